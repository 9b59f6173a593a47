"""Gradient hooks of sharded parameters.

The gradients of sharded parameters arrive by a reduction, not through autograd, which therefore never calls the hooks
that users register on them. They are kept here instead, and called by the sharded gradient when it is published: once
in each backward that reduces, with the sharded gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from .ragged import hook_owners

_Hooks = OrderedDict[int, Callable[[Any], Any]]


class GradientHooks:
    """The hooks of the parameters of one handle.

    Args:
        faces: the sharded parameters; from now on ``register_hook`` and ``register_post_accumulate_grad_hook`` on one
            of them arrive here, also after ``module.to()`` has exchanged everything in it but its identity.
        before: who has kept the hooks of each face until now, if somebody has.
    """

    def __init__(self, faces: Sequence[nn.Parameter], before: Sequence[GradientHooks | None] = ()) -> None:
        self._faces = faces
        self._on_gradient: dict[int, _Hooks] = {}
        self._after_accumulation: dict[int, _Hooks] = {}
        for i, owner in enumerate(before):
            if owner is not None:
                j = owner._index(faces[i])
                for mine, theirs in (
                    (self._on_gradient, owner._on_gradient),
                    (self._after_accumulation, owner._after_accumulation),
                ):
                    if j in theirs:
                        mine[i] = theirs[j]
        for face in faces:
            hook_owners[id(face)] = self

    def move_over(self, index: int, original: nn.Parameter) -> None:
        """Take over the hooks of the parameter that face ``index`` replaces. Handles to remove them stay valid."""
        if original._backward_hooks:
            self._on_gradient[index] = cast(_Hooks, original._backward_hooks)
        after = getattr(original, "_post_accumulate_grad_hooks", None)
        if after:
            self._after_accumulation[index] = after

    def register(self, face: nn.Parameter, hook: Callable[[Any], Any], after_accumulation: bool) -> RemovableHandle:
        """What registering a hook on a face does."""
        index = self._index(face)
        kind = self._after_accumulation if after_accumulation else self._on_gradient
        hooks = kind.setdefault(index, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _index(self, face: nn.Parameter) -> int:
        return next(i for i, item in enumerate(self._faces) if item is face)

    @property
    def want_gradients(self) -> bool:
        """Whether some hook must see the gradient of a backward by itself, before it is accumulated."""
        return any(self._on_gradient.values())

    @property
    def is_empty(self) -> bool:
        return not (self._on_gradient or self._after_accumulation)

    def replace(self, index: int, gradient: torch.Tensor) -> None:
        """Call the hooks on a gradient; what they return takes its place, in its memory."""
        with torch.no_grad():
            for hook in [*self._on_gradient.get(index, {}).values()]:
                result = hook(gradient)
                if result is not None:
                    gradient.copy_(result)

    def accumulated(self, index: int) -> None:
        """Call the hooks that follow the accumulation into ``.grad``."""
        with torch.no_grad():
            for hook in [*self._after_accumulation.get(index, {}).values()]:
                hook(self._faces[index])
