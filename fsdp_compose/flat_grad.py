"""The gradient of one shard: one flat buffer, of which the faces' ``.grad`` are views.

Owned by its ``FlatParamHandle``; written by ``collectives``; shown to the user by ``publish`` at the end of backward.
The views are built once and recycled, unless the user still holds one: a gradient that somebody kept is never written
again (a new buffer is made instead). ``zero_grad()`` is noticed by looking, and frees the memory at the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from operator import attrgetter
from sys import getrefcount

import torch
import torch.nn as nn

from ._torch import storage_use_count
from .faces import face_local, make_gradient
from .grad_hooks import GradientHooks

_grad = attrgetter("grad")


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
        hooks: the gradient hooks of the faces, which ``publish`` calls.
    """

    __slots__ = (
        "_arrival", "_device", "_dtype", "_faces", "_flat", "_hooks", "_is_allocated", "_is_dropped", "_is_published",
        "_nbytes", "_numel", "_references", "_runs", "_storage", "_target", "_views",
    )  # fmt: skip

    def __init__(
        self,
        faces: Sequence[nn.Parameter],
        runs: Sequence[tuple[int, int, tuple[int, ...]]],
        shard: torch.Tensor,
        hooks: GradientHooks,
    ) -> None:
        self._faces = faces
        self._runs = runs
        self._hooks = hooks
        self._numel, self._dtype, self._device = shard.numel(), shard.dtype, shard.device
        self._nbytes = shard.numel() * shard.element_size()
        self._flat: torch.Tensor | None = None
        self._is_allocated = False
        self._is_dropped = False  # no face had a gradient when the present forward began
        self._views: list[torch.Tensor] = []
        self._is_published = bytes(len(faces))
        self._references = (0, 0)
        self._arrival = Arrival.FRESH
        self._target: torch.Tensor | None = None

    # ---- while a backward runs

    def prepare(self) -> Arrival:
        """Decide where the gradient that is about to be reduced goes; called once per reduction. A second reduction
        in the same backward is added to the first."""
        if self._target is not None:
            return Arrival.ADDED
        if not self._is_dropped:  # else: publish() looks again
            for grad in map(_grad, self._faces):
                if grad is not None:
                    return self._prepare_to_add()
        self._ensure_writable()
        self._arrival, self._target = Arrival.FRESH, self._flat
        return Arrival.FRESH

    def _prepare_to_add(self) -> Arrival:
        grads = [face.grad for face in self._faces]
        is_ours = self._views and not self._hooks.want_gradients
        if is_ours and all(grad is None or grad is view for grad, view in zip(grads, self._views, strict=True)):
            for i, grad in enumerate(grads):
                if grad is None and self._is_published[i]:  # dropped by the user since: starts from zero again
                    self._run(self._flat, i).zero_()
            self._is_published = bytes(grad is not None for grad in grads)
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

    def publish(self, is_used: bytes, has_others: bool = True) -> None:
        """Show the reduced gradient: ``face.grad`` of every face for which ``is_used`` holds a 1; the others stay as
        they are, ``None`` when they had none. ``has_others``: faces may have gradients that are not ours."""
        self._is_dropped = False
        if self._arrival is Arrival.FRESH:
            if has_others:
                self._add_others()
            if not self._hooks.is_empty:
                self._publish_through_hooks(is_used)
            elif 0 not in is_used:
                for face, view in zip(self._faces, self._views):
                    face.grad = view
            else:
                for used, face, view in zip(is_used, self._faces, self._views, strict=True):
                    if used:
                        face.grad = view
            self._is_published = is_used
        elif self._arrival is Arrival.FOREIGN:
            for i, face in enumerate(self._faces):
                if is_used[i]:
                    result = make_gradient(self._run(self._target, i), face)
                    self._hooks.replace(i, result)
                    if face.grad is None:
                        face.grad = result
                    else:
                        face.grad.add_(result)
                    self._hooks.accumulated(i)
        else:
            published = self._is_published
            for i, (face, view) in enumerate(zip(self._faces, self._views, strict=True)):
                if is_used[i] and not published[i]:
                    face.grad = view
                if is_used[i] and not self._hooks.is_empty:
                    self._hooks.accumulated(i)
            self._is_published = bytes(a | b for a, b in zip(published, is_used, strict=True))
        self._target = None

    def _publish_through_hooks(self, is_used: bytes) -> None:
        for i, (face, view) in enumerate(zip(self._faces, self._views, strict=True)):
            if is_used[i]:
                self._hooks.replace(i, view)
                face.grad = view
                self._hooks.accumulated(i)

    # ---- between backwards

    def release_if_dropped(self, is_known_to_be: bool = False) -> None:
        """Free the memory when the user has dropped the gradient (``zero_grad()``), or is known to have."""
        self._is_dropped = is_known_to_be
        if not self._is_allocated:
            return
        if not is_known_to_be:
            for grad in map(_grad, self._faces):
                if grad is not None:
                    return
        if self._is_held_elsewhere():
            self._forget()
        else:
            self._storage.resize_(0)
            self._is_allocated = False

    def _add_others(self) -> None:
        """Add what the same backward has put into ``face.grad`` by itself: terms of the loss on the faces."""
        for face, view in zip(self._faces, self._views, strict=True):
            if face.grad is not None:
                view.add_(face.grad)

    def forget_result(self) -> None:
        """Do not publish what was reduced."""
        self._target = None

    def discard(self) -> bool:
        """Make every face's gradient ``None``; whether there was one."""
        had_gradient = False
        for face in self._faces:
            had_gradient |= face.grad is not None
            face.grad = None
        self._is_published = bytes(len(self._faces))
        self._target = None
        return had_gradient

    # ---- memory

    def _ensure_writable(self) -> None:
        if self._is_allocated and self._is_held_elsewhere():
            self._forget()
        if self._flat is None:
            self._build()
        elif not self._is_allocated:
            self._storage.resize_(self._nbytes)
            self._is_allocated = True

    def _build(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._flat = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            self._views = [make_gradient(self._run(self._flat, i), face) for i, face in enumerate(self._faces)]
        self._storage = self._flat.untyped_storage()
        self._is_allocated = True
        self._references = self._count_references()

    def _forget(self) -> None:
        """Leave the buffer to whoever holds it."""
        self._flat, self._views = None, []
        del self._storage
        self._is_allocated = False

    def _is_held_elsewhere(self) -> bool:
        return self._count_references() != self._references

    def _count_references(self) -> tuple[int, int]:
        locals_ = map(face_local, self._views)
        return sum(map(getrefcount, self._views)) + sum(map(getrefcount, locals_)), storage_use_count(self._storage)

    def _run(self, flat: torch.Tensor | None, index: int) -> torch.Tensor:
        assert flat is not None
        start, stop, shape = self._runs[index]
        return flat[start:stop].view(shape)
