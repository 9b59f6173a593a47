"""Gradients of backwards without gradient sync (``no_sync``): unsharded, in the reduce dtype, on every rank by itself.

Owned by a ``FlatParamHandle`` from the first such backward to the next reduction, whose input its buffer becomes;
filled by ``collectives``. Meanwhile the faces show an ``UnreducedGradient``, which raises whenever it is read: no rank
knows the gradient yet. And because it stands in ``.grad``, ``zero_grad()`` is noticed, and drops what was accumulated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from ._torch import foreach_add_
from .ragged import RaggedDTensor, RaggedSpec


class UnreducedGradient(RaggedDTensor):
    """What ``.grad`` of a sharded parameter holds after a backward without gradient sync.

    It has the shape, dtype and placement of the gradient and no elements. ``zero_()`` and dropping it work, as
    ``zero_grad()`` does either; everything else raises.
    """

    hidden: torch.Tensor | None  # what ``.grad`` was before
    _name: str
    _zero: Callable[[], None]

    @staticmethod
    def of(face: nn.Parameter, name: str, zero: Callable[[], None]) -> UnreducedGradient:
        """``zero``: called when the user zeroes it in place."""
        spec: RaggedSpec = face._spec  # type: ignore[attr-defined]
        nothing = torch.empty(0, dtype=face.dtype, device=face.device)
        gradient: UnreducedGradient = UnreducedGradient(nothing, spec)
        gradient.hidden, gradient._name, gradient._zero = face.grad, name, zero
        return gradient

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.zero_.default:
            args[0]._zero()
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default:
            for item in args[0]:
                item.zero_()
            return None
        unreduced = next(item for item in _flatten((*args, *(kwargs or {}).values())) if isinstance(item, cls))
        unreduced.refuse(str(func))
        return None

    def refuse(self, what: str, *_: Any, **__: Any) -> Any:
        """Raise, the same on every rank."""
        raise RuntimeError(
            f"{what}: the gradient of {self._name} has not been reduced: its last backward ran without gradient sync "
            "(no_sync(), set_requires_gradient_sync(False)), so every rank holds a part of it, unsharded. Run the last "
            "backward of an accumulation with gradient sync, and clip and step after it; zero_grad() drops what was "
            "accumulated"
        )

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        return self.refuse("to_local()")

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        return self.refuse("full_tensor()")

    def all_gather(self) -> Any:
        return self.refuse("all_gather()")

    def redistribute(self, *_: Any, **__: Any) -> Any:
        return self.refuse("redistribute()")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return self.refuse("pickle")

    def __deepcopy__(self, _memo: Any) -> Any:
        return self.refuse("deepcopy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreducedGradient({self._name}, shape={tuple(self.shape)})"


def _flatten(items: Sequence[Any]) -> list[Any]:
    return [leaf for item in items for leaf in (_flatten(item) if isinstance(item, (list, tuple)) else [item])]


# Accumulations that wait for a reduction; while there is one, optimizers are looked at before they step.
waiting: weakref.WeakSet[Accumulation] = weakref.WeakSet()


def refuse_unreduced(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a gradient that ``optimizer`` is about to read was not reduced: before it changes anything (weight decay
    comes before the gradient is read)."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param.grad, UnreducedGradient):
                param.grad.refuse(f"{type(optimizer).__name__}.step()")


class Accumulation:
    """The unsharded gradient of one flat parameter, summed over backwards without gradient sync.

    Args:
        flat: zeros, of the flat parameter's length, in the reduce dtype.
        views: of ``flat``, with the parameters' shapes.
        faces: the sharded parameters.
        names: their FQNs.
        is_used: which of them have contributed, on any rank; a parameter that is dropped is cleared there.
    """

    __slots__ = ("__weakref__", "_faces", "_names", "_shown", "_views", "flat", "is_used")

    def __init__(
        self,
        flat: torch.Tensor,
        views: Sequence[torch.Tensor],
        faces: Sequence[nn.Parameter],
        names: Sequence[str],
        is_used: bytearray | memoryview,
    ) -> None:
        self.flat = flat
        self._views, self._faces, self._names = views, faces, names
        self.is_used = is_used
        self._shown: list[UnreducedGradient | None] = [None] * len(faces)
        waiting.add(self)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients that one backward has left on the unsharded parameters."""
        present = [(view, grad) for view, grad in zip(self._views, grads, strict=True) if grad is not None]
        if present:
            foreach_add_([view for view, _ in present], [grad for _, grad in present])

    def show(self) -> None:
        """Let the faces of all parameters that have contributed, on any rank, say so."""
        reference = weakref.ref(self)
        for i, face in enumerate(self._faces):
            if self.is_used[i] and self._shown[i] is None:
                self._shown[i] = face.grad = UnreducedGradient.of(face, self._names[i], _zero_of(reference, i))

    def settle(self) -> bool:
        """Put back what the faces showed before, and forget the parameters whose gradients the user has dropped.

        Returns:
            Whether anything is left.
        """
        for i, (face, shown) in enumerate(zip(self._faces, self._shown, strict=True)):
            if shown is None:
                continue
            if face.grad is shown:
                face.grad = shown.hidden
            else:
                self._views[i].zero_()
                self.is_used[i] = 0
            shown.hidden = self._shown[i] = None
        return any(self.is_used)

    def zero(self, index: int) -> None:
        """The user has zeroed a gradient in place."""
        self._views[index].zero_()
        shown = self._shown[index]
        if shown is not None and shown.hidden is not None:
            shown.hidden.zero_()


def _zero_of(reference: weakref.ref[Accumulation], index: int) -> Callable[[], None]:
    """Refers weakly: the parameters hold their gradients, and must be freed without the garbage collector."""

    def zero() -> None:
        accumulation = reference()
        if accumulation is not None:
            accumulation.zero(index)

    return zero
