"""Edits of sharded parameters: how a gathered copy is known to be out of date, alike on every rank.

An all-gather may be issued ahead of its use (prefetch, ``unshard()``), or its result kept from an earlier use. If the
sharded parameters were written to in between, the group must be gathered again, by all ranks or by none. Two numbers
tell, each compared in constant time for a whole flat parameter:

- the version of the shard, which every write that torch can see raises, and
- the number of writes that the ranks make together: operations on sharded parameters (``RaggedDTensor`` dispatches them
  on every rank, also on those that hold no elements), steps of optimizers, loading.

Both have changed: the ranks wrote together, and gather again. Only the version has: this rank wrote to its own memory
(``to_local()``), of which other ranks may know nothing, and that is an error. What raises no version at all (``.data``
of a tensor that ``to_local()`` returned, kernels that write to an address) cannot be seen here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch.autograd.graph import increment_version

from .._requirements import PLAIN_SHARDED_PARAMS


class _Writes:
    """The number of writes so far that all ranks have made together."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


writes = _Writes()


class _Toggles:
    """How often ``requires_grad`` of a sharded parameter was set."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1


class _EveryLook:
    """The same where setting it cannot be seen: another number whenever it is looked at."""

    _count = itertools.count()

    @property
    def count(self) -> int:
        return next(self._count)

    def note(self) -> None: ...


toggles: _Toggles | _EveryLook = _EveryLook() if PLAIN_SHARDED_PARAMS else _Toggles()


def note_write_of_all_ranks(tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """All ranks have written to these local tensors, or to their shares of the same tensors; inside a dispatch no
    version has counted it."""
    increment_version(tensors)
    writes.count += 1
