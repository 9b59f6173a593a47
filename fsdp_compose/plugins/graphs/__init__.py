"""Graphs of whole models that ``torch.compile`` captures: their gathers and reductions as operators, the data that they
read from a group, how ranks agree on them, and the mode of such a forward."""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .captured_group import VersionsBefore as VersionsBefore
    from .captured_group import captured_leaves as captured_leaves
    from .captured_shards import CapturedShard as CapturedShard
    from .compiling import compile as compile
    from .graph_mode import can_capture as can_capture
    from .graph_mode import enter as enter
    from .graph_mode import leave as leave
else:
    __getattr__ = on_demand(
        __name__,
        {
            "captured_group": "VersionsBefore captured_leaves",
            "captured_shards": "CapturedShard",
            "compiling": "compile",
            "graph_mode": "can_capture enter leave",
        },
    )
