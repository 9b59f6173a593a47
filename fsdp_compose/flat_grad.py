"""The gradient of one shard: one flat buffer, of which the faces' ``.grad`` are views.

Owned by its ``FlatParamHandle``; written by ``collectives``; shown to the user by ``publish`` at the end of backward.
The views are built once and recycled, unless the user still holds one: a gradient that somebody kept is never written
again (a new buffer is made instead). ``zero_grad()`` is noticed by looking, and frees the memory at the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from sys import getrefcount

import torch
import torch.nn as nn

from ._torch import storage_use_count
from .faces import make_gradient


class Arrival(Enum):
    """How a newly reduced gradient meets what is already in ``face.grad``."""

    FRESH = "no face has a gradient: the flat gradient is overwritten"
    ADDED = "the faces' gradients are our views: the flat gradient is added to"
    FOREIGN = "some face holds a gradient that the user put there: the result is added to each face's own"


class ShardedGradient:
    """The flat gradient of a shard.

    Args:
        faces: the sharded faces, in the order of the layout.
        runs: for each face, (start, stop, shape) of its run inside the shard, in elements.
        shard: the shard, whose length, dtype and device the gradient has.
    """

    def __init__(
        self, faces: Sequence[nn.Parameter], runs: Sequence[tuple[int, int, tuple[int, ...]]], shard: torch.Tensor
    ) -> None:
        self._faces = faces
        self._runs = runs
        self._numel, self._dtype, self._device = shard.numel(), shard.dtype, shard.device
        self._nbytes = shard.numel() * shard.element_size()
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._is_published = [False] * len(faces)
        self._references = (0, 0)
        self._arrival = Arrival.FRESH
        self._target: torch.Tensor | None = None

    # ---- while a backward runs

    def prepare(self) -> Arrival:
        """Decide where the gradient that is about to be reduced goes; called once per reduction. A second reduction
        in the same backward is added to the first."""
        if self._target is not None:
            return Arrival.ADDED
        grads = [face.grad for face in self._faces]
        if not any(grad is not None for grad in grads):
            self._is_published = [False] * len(grads)
            self._ensure_writable()
            self._arrival, self._target = Arrival.FRESH, self._flat
        elif self._views and all(grad is None or grad is view for grad, view in zip(grads, self._views, strict=True)):
            for i, grad in enumerate(grads):
                if grad is None and self._is_published[i]:  # dropped by the user since: starts from zero again
                    self._run(self._flat, i).zero_()
                    self._is_published[i] = False
            self._arrival, self._target = Arrival.ADDED, self._flat
        else:
            self._arrival = Arrival.FOREIGN
            self._target = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        return self._arrival

    @property
    def target(self) -> torch.Tensor:
        """The flat tensor that takes the result: to be overwritten (FRESH, FOREIGN) or added to (ADDED)."""
        assert self._target is not None, "prepare() first"
        return self._target

    def publish(self, is_used: bytes | bytearray) -> None:
        """Show the reduced gradient: ``face.grad`` of every face for which ``is_used`` holds a 1; the others stay as
        they are, ``None`` when they had none."""
        if self._arrival is Arrival.FOREIGN:
            for i, face in enumerate(self._faces):
                if is_used[i]:
                    result = make_gradient(self._run(self._target, i))
                    if face.grad is None:
                        face.grad = result
                    else:
                        face.grad.add_(result)
        else:
            published = self._is_published
            if self._arrival is Arrival.FRESH and 0 not in is_used:
                for face, view in zip(self._faces, self._views, strict=True):
                    face.grad = view
                self._is_published = [True] * len(published)
                self._target = None
                return
            for i, (face, view) in enumerate(zip(self._faces, self._views, strict=True)):
                if is_used[i] and not published[i]:
                    face.grad = view
                    published[i] = True
        self._target = None

    # ---- between backwards

    def release_if_dropped(self) -> None:
        """Free the memory when the user has dropped the gradient (``zero_grad()``)."""
        if self._flat is None or any(face.grad is not None for face in self._faces):
            return
        if self._is_held_elsewhere():
            self._forget()
        elif self._flat.untyped_storage().nbytes():
            self._flat.untyped_storage().resize_(0)

    def forget_result(self) -> None:
        """Do not publish what was reduced."""
        self._target = None

    def discard(self) -> bool:
        """Make every face's gradient ``None``; whether there was one."""
        had_gradient = False
        for face in self._faces:
            had_gradient |= face.grad is not None
            face.grad = None
        self._is_published = [False] * len(self._faces)
        self._target = None
        return had_gradient

    # ---- memory

    def _ensure_writable(self) -> None:
        if self._flat is not None and self._is_held_elsewhere():
            self._forget()
        if self._flat is None:
            self._build()
        elif self._nbytes and not self._flat.untyped_storage().nbytes():
            self._flat.untyped_storage().resize_(self._nbytes)

    def _build(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._flat = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            self._views = [make_gradient(self._run(self._flat, i)) for i in range(len(self._faces))]
        self._references = self._count_references()

    def _forget(self) -> None:
        """Leave the buffer to whoever holds it."""
        self._flat, self._views = None, []

    def _is_held_elsewhere(self) -> bool:
        return self._count_references() != self._references

    def _count_references(self) -> tuple[int, int]:
        assert self._flat is not None
        return sum(map(getrefcount, self._views)), storage_use_count(self._flat.untyped_storage())

    def _run(self, flat: torch.Tensor | None, index: int) -> torch.Tensor:
        assert flat is not None
        start, stop, shape = self._runs[index]
        return flat[start:stop].view(shape)
