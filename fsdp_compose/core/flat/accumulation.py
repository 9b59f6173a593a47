"""Gradients on their way to a reduction: those of the running backward, and those accumulated by earlier ones.

``PendingGradients`` holds what backwards produce until a reduction takes it. ``Accumulation`` holds gradients that are
not yet reduced over all data ranks; each rank has its own, in the reduce dtype. A ``FlatParamHandle`` owns both, and
``Communicator`` takes from them.

Backwards without gradient sync (``no_sync``) accumulate unsharded gradients. Backwards that leave out the average over
replicas (``set_requires_all_reduce``) accumulate scattered ones. An ``Accumulation`` lasts from the first such backward
to the next one that reduces over all ranks: then the unsharded sum becomes the input of the reduce-scatter, and the
scattered sum is added to its result. Until then, the sharded parameters show an ``UnreducedGradient``, which raises
whenever it is read, because no rank knows the gradient yet. It stands in ``.grad``, so ``zero_grad()`` is noticed, and
drops what was accumulated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..._torch import DTensorSpec, PlainAttributes, TensorMeta, dtensor_spec, foreach_add_
from ...errors import MisuseRuntimeError
from ..ragged import RaggedDTensor, RaggedSpec
from .param_kind import own_grad_dtype, plain_gradient
from .reduction import AVERAGE, Reduction, ReductionOptions

if TYPE_CHECKING:
    from ...plugins.tensor_parallel import AddUp, TensorParallel


class Contribution(Enum):
    """What is done with the gradients of a flat parameter when those of its group are taken; the same on all ranks."""

    KEPT = auto()  # added to those that each rank keeps for itself, without communication
    SCATTERED = auto()  # added up over the ranks that shard it, and kept there: the average over replicas is left out
    REDUCED = auto()  # averaged over all data ranks, with what was kept before


class UnreducedGradient(RaggedDTensor):
    """The tensor in ``.grad`` of a sharded parameter after a backward without gradient sync.

    It has the shape, dtype and placement of the gradient, but no elements. You can call ``zero_()`` on it or drop it,
    since ``zero_grad()`` does one of the two. Autograd can add to it, as it does for loss terms computed from the
    parameter itself. Everything else raises.
    """

    hidden: torch.Tensor | None  # what ``.grad`` was before, plus what was added since
    _name: str
    _zero: Callable[[], None]

    @staticmethod
    def of(parameter: nn.Parameter, mesh: DeviceMesh, name: str, zero: Callable[[], None]) -> UnreducedGradient:
        """Make one for a parameter. ``zero``: called when the user zeroes it in place."""
        if isinstance(parameter, DTensor):
            spec = dtensor_spec(parameter)
        else:
            meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
            spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
        dtype = own_grad_dtype(parameter) or parameter.dtype
        if isinstance(spec, RaggedSpec):
            spec = spec.with_dtype(dtype)
        elif dtype != parameter.dtype:
            spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(parameter.shape, parameter.stride(), dtype))
        with torch.inference_mode(False):  # an evaluation may run between two backwards
            nothing = torch.empty(0, dtype=dtype, device=parameter.device)
            gradient: UnreducedGradient = UnreducedGradient(nothing, cast(RaggedSpec, spec))
        gradient.hidden, gradient._name, gradient._zero = parameter.grad, name, zero
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
        if func is torch.ops.aten.add_.Tensor and isinstance(args[1], torch.Tensor) and not isinstance(args[1], cls):
            args[0]._add(args[1], **(kwargs or {}))
            return args[0]
        unreduced = next(item for item in _flatten((*args, *(kwargs or {}).values())) if isinstance(item, cls))
        unreduced.refuse(str(func))
        return None

    def _add(self, other: Any, alpha: float = 1) -> None:
        if self.hidden is None and other.shape == self.shape:
            self.hidden = other * alpha
        elif self.hidden is not None:
            self.hidden.add_(other, alpha=alpha)
        else:
            self.refuse("add_() of another shape")

    def refuse(self, what: str, *_: Any, **__: Any) -> Any:
        """Raise the error, which is the same on every rank."""
        raise MisuseRuntimeError(
            f"{what}: the gradient of {self._name} has not been reduced: its last backward ran without gradient sync "
            "(no_sync(), set_requires_gradient_sync(False), or set_requires_all_reduce(False)), so each rank holds "
            "only its own part, unsharded or for one replica. Run the last backward of an accumulation with gradient "
            "sync, and clip and step after it; zero_grad() drops what was accumulated"
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


def behind(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor that will be reduced: the one that an ``UnreducedGradient`` hides, or else ``gradient`` itself."""
    return gradient.hidden if isinstance(gradient, UnreducedGradient) else gradient


def put_behind(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Reduce ``gradient`` instead of the present gradient. An ``UnreducedGradient`` remains, and hides it."""
    if isinstance(parameter.grad, UnreducedGradient):
        parameter.grad.hidden = gradient
    else:
        parameter.grad = gradient


def _flatten(items: Sequence[Any]) -> list[Any]:
    return [leaf for item in items for leaf in (_flatten(item) if isinstance(item, (list, tuple)) else [item])]


# Accumulations that wait for a reduction; while there are any, gradients are checked before they are used.
waiting: weakref.WeakSet[Accumulation] = weakref.WeakSet()


def refuse_unreduced(what: str, params: Iterable[torch.Tensor]) -> None:
    """Raise if the gradient of a parameter is not reduced, before ``what`` changes anything (optimizers decay weights
    before they read gradients). If the user dropped the gradient of a flat view, or of all sharded parameters in one,
    drops what was accumulated."""
    for accumulation in [*waiting]:
        accumulation.follow_zero_grad()
        accumulation.show()
    for param in params:
        if isinstance(param.grad, UnreducedGradient):
            param.grad.refuse(what)


@dataclass(eq=False, repr=False)
class Accumulation:
    """The gradient of one flat parameter, summed over backwards that did not reduce it over all data ranks."""

    names: Sequence[str]  # of the sharded parameters
    is_used: bytearray | memoryview  # which have contributed, on any rank; one that the user drops is cleared there
    mesh: DeviceMesh
    # The parameters that show the gradient: each sharded parameter, and the flat views, which are several of them.
    places: Sequence[tuple[nn.Parameter, range]]

    # The sum over backwards without gradient sync, unsharded, and views of it in the parameters' shapes.
    flat: torch.Tensor | None = None
    views: Sequence[torch.Tensor] = ()

    # The sum over backwards without the replicas' average, of a shard's length, and views of it.
    scattered: torch.Tensor | None = None
    scattered_views: Sequence[torch.Tensor] = ()

    _shown: dict[int, UnreducedGradient] = field(default_factory=dict)  # by index in ``places``

    def __post_init__(self) -> None:
        waiting.add(self)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients that a backward has left on the unsharded parameters."""
        # A gradient of a class that holds several tensors would be added once for each of them.
        present = [
            (view, grad if type(grad) is torch.Tensor else plain_gradient(grad, name))
            for view, grad, name in zip(self.views, grads, self.names, strict=True)
            if grad is not None
        ]
        if present:
            foreach_add_([view for view, _ in present], [grad for _, grad in present])

    def show(self) -> None:
        """Show an ``UnreducedGradient`` on every parameter that has contributed, on any rank."""
        # Weak: parameters hold their gradients, and must be freed without the garbage collector.
        reference = weakref.ref(self)
        for i, (parameter, sharded_params) in enumerate(self.places):
            if i not in self._shown and any(self.is_used[sharded_params.start : sharded_params.stop]):
                name, zero = self.names[sharded_params.start], partial(_zero_in_place, reference, i)
                parameter.grad = self._shown[i] = UnreducedGradient.of(parameter, self.mesh, name, zero)

    def follow_zero_grad(self) -> bool:
        """Put back what ``.grad`` was before, and forget the parameters whose gradients the user has dropped.

        Returns:
            Whether anything is left.
        """
        shown = [(*self.places[i], gradient) for i, gradient in self._shown.items()]
        self._shown = {}
        dropped = {i for param, sharded_params, gradient in shown if param.grad is not gradient for i in sharded_params}
        for param, sharded_params, gradient in shown:
            if param.grad is gradient:
                param.grad = None if dropped.issuperset(sharded_params) else gradient.hidden
            gradient.hidden = None
        for i in dropped:
            self._zero(i)
            self.is_used[i] = 0
        return any(self.is_used)

    def _zero(self, index: int) -> None:
        for views in (self.views, self.scattered_views):
            if views:
                views[index].zero_()


def _zero_in_place(reference: weakref.ref[Accumulation], place: int) -> None:
    """The user has zeroed the gradient of a place in place."""
    accumulation = reference()
    if accumulation is not None:
        for i in accumulation.places[place][1]:
            accumulation._zero(i)
        shown = accumulation._shown.get(place)
        if shown is not None and shown.hidden is not None:
            shown.hidden.zero_()


# ---- The gradients that backwards have produced for one flat parameter, until a reduction takes them


_grad = attrgetter("grad")


def _take(params: Sequence[nn.Parameter]) -> list[Any]:
    grads = [*map(_grad, params)]
    for param in params:
        param.grad = None
    return grads


@dataclass(slots=True, eq=False, repr=False)
class PendingGradients:
    """What this rank contributes to the next reduction of one flat parameter."""

    num_params: InitVar[int]
    dtype: torch.dtype  # to reduce in
    tensor_parallel: TensorParallel | None = None  # how the parameters are placed on meshes of their own, if any is

    options: ReductionOptions = AVERAGE
    reduction: Reduction | None = None  # made by the first one
    is_trainable: bool = False  # some parameter requires grad, as far as is known
    awaits_publication: bool = False  # reduced in this backward, not yet shown to the user

    # For each parameter, 1 if it has contributed to the gradient that is reduced next; a part of the control
    # exchange's memory, which all ranks combine.
    is_used: bytearray | memoryview = field(init=False)
    _all_used: bytes = field(init=False)
    _none_used: bytes = field(init=False)

    accumulation: Accumulation | None = None  # of backwards without gradient sync, or without the average over replicas
    # By parameter, whole gradients of uses outside the group's forward; see ``differentiable_gather``.
    outside: dict[int, torch.Tensor] = field(default_factory=dict)
    # Which gradients of this backward were already moved to where they are averaged; see ``collectives``.
    placed: set[int] = field(default_factory=set)

    def __post_init__(self, num_params: int) -> None:
        self.is_used, self._all_used, self._none_used = bytearray(num_params), b"\x01" * num_params, bytes(num_params)

    def write_used_to(self, memory: memoryview) -> None:
        """Record from now on, in this memory, which parameters were used."""
        memory[:] = self.is_used
        self.is_used = memory
        if self.accumulation is not None:
            self.accumulation.is_used = memory

    def add_outside(self, index: int, grad: torch.Tensor) -> None:
        """Keep the gradient of a use outside the group's forward until the group is reduced."""
        present = self.outside.get(index)
        self.outside[index] = grad if present is None else present + grad

    def take(self, params: Sequence[nn.Parameter], add_up: AddUp | None) -> tuple[list[torch.Tensor], list[int]]:
        """Move the gradients out of the unsharded parameters; return them (``None`` for missing ones) and which are
        missing. ``add_up``: see ``tensor_parallel``."""
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
        """Called when placed gradients are being reduced."""
        for index in self.placed:
            self.is_used[index] = 1
        self.placed = set()

    def follow_zero_grad(self) -> None:
        """Take into account that the user may have dropped gradients that were accumulated without sync."""
        if self.accumulation is not None and not self.accumulation.follow_zero_grad():
            self.accumulation = None

    def take_used(self, trainable: Sequence[bool]) -> bytes:
        """Return which parameters get the gradient that is published now: those that have contributed to it on any
        rank, or all ``trainable`` ones."""
        self.awaits_publication = False
        used = bytes(self.is_used)
        if self.options.fills_unused:
            used = bytes(a | b for a, b in zip(used, trainable, strict=True))
        self.is_used[:] = self._none_used
        return used

    def drop(self, has_accumulated: bool) -> None:
        """Drop the gradients of an interrupted iteration and, if ``has_accumulated``, those accumulated by earlier
        ones."""
        self.outside, self.placed = {}, set()
        self.awaits_publication = False
        if has_accumulated:
            self.accumulation = None
        if self.accumulation is None:
            self.is_used[:] = self._none_used
