"""What the user may have done to a model between two iterations, noticed in one pass over plain lists.

Built when a root is set up, and again after every change that it has noticed. The pass is on the hot path (each
top-level forward, every parameter), so it compares and nothing more; who changed what is found out by the slow path in
``iteration``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from .state import _FSDPState

_data_ptr = torch.Tensor.data_ptr
_dtype, _grad, _requires_grad = attrgetter("dtype"), attrgetter("grad"), attrgetter("requires_grad")


class Watch:
    """A picture of the parameters and modules of all groups of a root."""

    def __init__(self, states: Sequence[_FSDPState]) -> None:
        handles = [handle for state in states for handle in state._handles]
        self._dicts = [item for state in states for item in state.swap.watched_dicts()]
        self._values = tuple(chain.from_iterable(map(dict.values, self._dicts)))
        self._faces = [face for handle in handles for face in handle.faces]
        self._requires_grad = [*map(_requires_grad, self._faces)]
        # A face with elements has an address, which changes with its memory; an empty one has a dtype at least.
        self._filled = [face for face in self._faces if face.numel()]
        self._addresses = [*map(_data_ptr, self._filled)]
        self._empty = [face for face in self._faces if not face.numel()]
        self._dtypes = [*map(_dtype, self._empty)]
        self._unsharded = [param for handle in handles for param in handle.unsharded_params]
        self._has_meta = any(handle.is_meta for handle in handles)

    def is_quiet(self) -> bool:
        """Whether every slot holds what it held, every parameter is where it was and requires grad as it did, and no
        gradient was left on an unsharded parameter."""
        dicts = self._dicts
        return (
            not self._has_meta
            and sum(map(len, dicts)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), self._values))
            and [*map(_requires_grad, self._faces)] == self._requires_grad
            and [*map(_data_ptr, self._filled)] == self._addresses
            and [*map(_dtype, self._empty)] == self._dtypes
            and not self.has_unsharded_grads()
        )

    def has_unsharded_grads(self) -> bool:
        """Whether autograd has left a gradient on some unsharded parameter, not taken yet."""
        return _any_present(map(_grad, self._unsharded))

    def has_grads(self) -> bool:
        """Whether some sharded parameter has a gradient."""
        return _any_present(map(_grad, self._faces))


def _any_present(values: Any) -> bool:
    for value in values:
        if value is not None:
            return True
    return False
