"""Parameters that are DTensors already (``parameters``), and those that are annotated so (``annotations``)."""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .annotations import Annotation as Annotation
    from .annotations import read as read
    from .annotations import refuse_gaps as refuse_gaps
    from .parameters import AddUp as AddUp
    from .parameters import Shown as Shown
    from .parameters import TensorParallel as TensorParallel
    from .parameters import is_even as is_even
    from .parameters import is_split_evenly as is_split_evenly
    from .parameters import largest_local_shape as largest_local_shape
    from .parameters import local_shape as local_shape
    from .parameters import placed as placed
    from .parameters import refuse_placement as refuse_placement
else:
    __getattr__ = on_demand(
        __name__,
        {
            "annotations": "Annotation read refuse_gaps",
            "parameters": (
                "AddUp Shown TensorParallel is_even is_split_evenly largest_local_shape local_shape placed "
                "refuse_placement"
            ),
        },
    )
