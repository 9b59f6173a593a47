"""The gradients that backwards have brought to one flat parameter, until a reduction takes them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn

from .._torch import PlainAttributes
from .accumulation import Accumulation
from .reduction import AVERAGE, Reduction, ReductionOptions
from .tensor_parallel import AddUp, TensorParallel

_grad = attrgetter("grad")


def _take(params: Sequence[nn.Parameter]) -> list[Any]:
    grads = [*map(_grad, params)]
    for param in params:
        param.grad = None
    return grads


class Contributions:
    """What this rank has to bring to the next reduction of one flat parameter.

    Attributes:
        dtype: to reduce in; ``options``: how; ``reduction``: through which memory, once there was one.
        is_used: for each parameter, 1 if it has contributed to the gradient that is reduced next; a part of the
            control exchange's memory, which all ranks combine.
        is_trainable: some parameter requires grad, as far as is known.
        accumulation: the gradients of backwards without gradient sync, or without the replicas' average.
        outside: whole gradients, by parameter, of uses outside the group's forward; see ``outside_use``.
        awaits_publication: reduced in this backward, not yet shown to the user.
        tensor_parallel: how the parameters lie on meshes of their own; ``None`` if none does.
        placed: which gradients of this backward are where they are averaged already; see ``whole``.
    """

    __slots__ = (
        "_all_used", "_none_used", "accumulation", "awaits_publication", "dtype", "is_trainable", "is_used",
        "options", "outside", "placed", "reduction", "tensor_parallel",
    )  # fmt: skip

    def __init__(self, num_params: int, dtype: torch.dtype, tensor_parallel: TensorParallel | None = None) -> None:
        self.dtype, self.tensor_parallel = dtype, tensor_parallel
        self.is_used: bytearray | memoryview = bytearray(num_params)
        self._all_used, self._none_used = b"\x01" * num_params, bytes(num_params)
        self.is_trainable = self.awaits_publication = False
        self.options = AVERAGE
        self.reduction: Reduction | None = None
        self.accumulation: Accumulation | None = None
        self.outside: dict[int, torch.Tensor] = {}
        self.placed: set[int] = set()

    def write_used_to(self, memory: memoryview) -> None:
        """From now on note there which parameters were used."""
        memory[:] = self.is_used
        self.is_used = memory
        if self.accumulation is not None:
            self.accumulation.is_used = memory

    def begin_again(self, dtype: torch.dtype) -> None:
        """There is another shard, whose gradient is reduced in ``dtype``."""
        self.dtype, self.reduction = dtype, None

    def follow(self, options: ReductionOptions) -> None:
        self.options = options

    def reduce_by(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def train(self, is_trainable: bool) -> None:
        self.is_trainable = is_trainable

    def add_outside(self, index: int, grad: torch.Tensor) -> None:
        """Keep the gradient of a use outside the group's forward until the group is reduced."""
        present = self.outside.get(index)
        self.outside[index] = grad if present is None else present + grad

    def take(
        self, params: Sequence[nn.Parameter], awaits_publication: bool = False, add_up: AddUp | None = None
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Move the gradients out of the unsharded parameters; which are missing (None in the list).
        ``awaits_publication``: they are about to be reduced, to be shown at the end of this backward. ``add_up``: where
        there is ``tensor_parallel``, see there."""
        if awaits_publication:
            self.awaits_publication = True
        if self.tensor_parallel is None:
            grads = _take(params)
        else:
            with PlainAttributes():
                grads = _take(params)
            assert add_up is not None
            grads = self.tensor_parallel.local_gradients(grads, self.dtype, add_up)
        if self.outside:
            for i, outside in self.outside.items():
                grads[i] = outside if grads[i] is None else outside + grads[i]
            self.outside = {}
        missing: list[int] = []
        for grad in grads:
            if grad is None:
                missing = [i for i, grad in enumerate(grads) if grad is None]
                break
        if missing:
            for i, grad in enumerate(grads):
                if grad is not None:
                    self.is_used[i] = 1
        else:
            self.is_used[:] = self._all_used
        return grads, missing

    def take_placed(self) -> None:
        """What was placed is being reduced."""
        for index in self.placed:
            self.is_used[index] = 1
        self.placed = set()

    def accumulate(self, accumulation: Accumulation) -> None:
        """Gradients are accumulated there from now on."""
        self.accumulation = accumulation

    def take_accumulation(self) -> Accumulation | None:
        accumulation, self.accumulation = self.accumulation, None
        return accumulation

    def follow_zero_grad(self) -> None:
        """Take into account that the user may have dropped gradients that were accumulated without sync."""
        if self.accumulation is not None and not self.accumulation.follow_zero_grad():
            self.accumulation = None

    def await_publication(self) -> None:
        """They are being reduced."""
        self.awaits_publication = True

    def take_used(self) -> bytes:
        """Which parameters have contributed, on any rank, to the gradient that is published now."""
        self.awaits_publication = False
        used = bytes(self.is_used)
        self.is_used[:] = self._none_used
        return used

    def drop(self, has_accumulated: bool) -> None:
        """Forget those of an interrupted iteration; ``has_accumulated``: and what earlier ones have accumulated."""
        self.outside, self.placed = {}, set()
        self.awaits_publication = False
        if has_accumulated:
            self.accumulation = None
        if self.accumulation is None:
            self.is_used[:] = self._none_used
