"""A region of code that is compiled with the forwards of whole models in it: what a root's own hooks do around a
forward, done around the region, so that the graph can have the root's group in it too.

Within a region the root's hooks are traced like those of other groups (``modes.captured``). Where the graph breaks at
them they run eagerly, as a forward of the root inside another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.nn as nn

from ..group import Root, state_of_hooked
from .forward import abandon_forward, check_after_forward, end_forward, enter


@contextmanager
def region(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let a compiled region run forwards of the roots ``modules``."""
    entered: list[Root] = []
    try:
        for module in modules:
            root = enter(state_of_hooked(module), module)
            if root.rounds is not None:
                raise NotImplementedError(
                    "a compiled region with a fully_shard'ed model that has optional groups: a graph cannot tell which "
                    "of them a rank will run. Compile modules inside the groups, or shard without optional=True"
                )
            root.forward.begin_region()
            root.forward.enter(None)
            entered.append(root)
        yield
        for root in reversed(entered):
            root.forward.leave(None)
            if not root.forward.depth:
                check_after_forward(root)
                end_forward(root, True)
    except BaseException:
        for root in reversed(entered):
            if root.forward.depth or root.forward.has_failed:
                abandon_forward(root)
        raise
