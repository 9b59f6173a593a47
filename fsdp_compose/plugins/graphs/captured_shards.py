"""One flat parameter inside a graph that ``torch.compile`` captures: its gather and its reduction, as operators.

``captured_group`` and ``graph_mode`` use this file; eager training never enters it. What happens around the
operators (where results of reductions go, accumulation, publication) is the same code as in the eager modes: a graph
only delivers gradients. It reads the shard through a plain leaf over the same memory. The gradient arrives at that
leaf, or at a ``grad_leaf`` if it has another dtype or length. Which parameters had no gradient is known when the
backward is captured; unless all had one, the graph reports it through an ``unused_mask``.

If the process group's own collectives carry the training, the graph uses torch's functional collectives, which
compilers know. If messages do, it uses operators of this package that send messages.

A hash of this file's source is part of the numbers of captured graphs, so every edit here renews them, along with
caches on disk.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from ..._torch import (
    WorkOfGraph,
    define_operations,
    foreach_copy_,
    functional_collectives,
    lower_as_collective,
    register_work,
    was_written_in_graph,
)
from ...core.comm import Label, Transport, Work
from ...core.flat import FlatParamHandle, ReductionOptions
from ...core.flat.collectives import accumulate as accumulate_gradients
from ...core.flat.collectives import keep_scattered
from ...core.flat.gradient import ADDED
from ...core.flat.reduction import add_scattered, bring_result
from ...errors import MisuseRuntimeError

# ---- Collectives as operators of graphs
#
# If a process group's own collectives carry the training, these are torch's functional collectives, which compilers
# know. If another transport does (messages, on gloo), they are operators of ours that call it; ``wait_tensor`` waits
# for those too.


_Tensor = torch.Tensor
_OURS = "by "  # the routes of our operators begin with this
_routes: weakref.WeakValueDictionary[str, Transport] = weakref.WeakValueDictionary()
_labels: dict[str, Label] = {}


def route_of(transport: Transport, label: Label) -> str:
    """The route by which an operator finds the ranks, and how tensors move between them; the same on every rank of the
    process group, and in every run of a program."""
    if type(transport) is Transport:
        return transport.group.group_name
    route = f"{_OURS}{transport.name} of {transport.group.group_name}: {label.text}"
    _routes[route], _labels[route] = transport, label
    return route


def all_gather(shard: _Tensor, dtype: torch.dtype, world_size: int, route: str) -> _Tensor:
    """Gather shards as ``dtype``, which is theirs unless the transport is inexact."""
    stock = functional_collectives()
    if route.startswith(_OURS):
        return stock.wait_tensor(torch.ops.fsdp_compose.all_gather(shard, dtype, world_size, route))
    return stock.wait_tensor(stock.all_gather_into_tensor(shard, world_size, route))


def reduce_scatter(flat: _Tensor, is_average: bool, world_size: int, route: str) -> _Tensor:
    stock = functional_collectives()
    if route.startswith(_OURS):
        return stock.wait_tensor(torch.ops.fsdp_compose.reduce_scatter(flat, is_average, world_size, route))
    return stock.wait_tensor(stock.reduce_scatter_tensor(flat, "avg" if is_average else "sum", world_size, route))


def all_reduce(flat: _Tensor, is_average: bool, route: str) -> _Tensor:
    stock = functional_collectives()
    if route.startswith(_OURS):
        return stock.wait_tensor(torch.ops.fsdp_compose.all_reduce(flat, is_average, route))
    return stock.wait_tensor(stock.all_reduce(flat, "avg" if is_average else "sum", route))


def flatten(grads: Sequence[_Tensor], places: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> _Tensor:
    """Make one tensor of pieces with ``sizes`` elements: ``grads`` at these ``places``, zeros in the others."""
    # An operator of its own, not a concatenation: into one Inductor fuses the computation of gradients, across groups,
    # and the whole gradients of all groups would then be in memory at the same time.
    result: _Tensor = torch.ops.fsdp_compose.flatten(grads, places, sizes, dtype)
    return result


# ---- Our operators


def _flatten(grads: Sequence[_Tensor], places: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> _Tensor:
    flat = grads[0].new_empty(sum(sizes), dtype=dtype)
    pieces = flat.split([*sizes])
    foreach_copy_([pieces[place].view(grad.shape) for grad, place in zip(grads, places, strict=True)], [*grads])
    for place in {*range(len(sizes))}.difference(places):
        pieces[place].zero_()
    return flat


def _fake_flatten(grads: Sequence[_Tensor], places: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> _Tensor:
    return grads[0].new_empty(sum(sizes), dtype=dtype)


def _all_gather(shard: _Tensor, dtype: torch.dtype, world_size: int, route: str) -> _Tensor:
    shard = shard.contiguous()
    whole = shard.new_empty(world_size * shard.numel(), dtype=dtype)
    return _issued(whole, _routes[route].all_gather(whole, shard, _labels[route]), shard)


def _reduce_scatter(flat: _Tensor, is_average: bool, world_size: int, route: str) -> _Tensor:
    flat = flat.contiguous()
    shard = flat.new_empty(flat.numel() // world_size)
    return _issued(shard, _routes[route].reduce_scatter(shard, flat, is_average, _labels[route]), flat)


def _all_reduce(flat: _Tensor, is_average: bool, route: str) -> _Tensor:
    result = flat.clone()
    return _issued(result, _routes[route].all_reduce(result, is_average, _labels[route]), result)


def _issued(result: _Tensor, work: Work, source: _Tensor) -> _Tensor:
    """Return ``result``, for which ``wait_tensor`` must wait; ``source`` is read until then."""
    register_work(result, WorkOfGraph(lambda: work.wait(), source))
    return result


def _fake_all_gather(shard: _Tensor, dtype: torch.dtype, world_size: int, route: str) -> _Tensor:
    _teach_compiler()
    return shard.new_empty(world_size * shard.numel(), dtype=dtype)


def _fake_reduce_scatter(flat: _Tensor, is_average: bool, world_size: int, route: str) -> _Tensor:
    _teach_compiler()
    return flat.new_empty(flat.numel() // world_size)


def _fake_all_reduce(flat: _Tensor, is_average: bool, route: str) -> _Tensor:
    _teach_compiler()
    return torch.empty_like(flat)


_OPERATIONS: dict[str, tuple[Callable[..., _Tensor], Callable[..., _Tensor]]] = {
    "all_gather(Tensor shard, ScalarType dtype, int world_size, str route) -> Tensor": (_all_gather, _fake_all_gather),
    "reduce_scatter(Tensor flat, bool is_average, int world_size, str route) -> Tensor": (
        _reduce_scatter,
        _fake_reduce_scatter,
    ),
    "all_reduce(Tensor flat, bool is_average, str route) -> Tensor": (_all_reduce, _fake_all_reduce),
    "flatten(Tensor[] grads, int[] places, int[] sizes, ScalarType dtype) -> Tensor": (_flatten, _fake_flatten),
}


@cache
def define() -> object:
    """Define the operators, also for a graph that was found in a cache on disk instead of captured. The cache of this
    function keeps them."""
    return define_operations("fsdp_compose", _OPERATIONS)


def _teach_compiler() -> None:
    """Keep Inductor, if it is there, from reusing memory that a collective still reads."""
    if "torch._inductor.lowering" in sys.modules:
        _lower()


@cache
def _lower() -> None:
    ours = torch.ops.fsdp_compose
    lower_as_collective([ours.all_gather.default, ours.reduce_scatter.default, ours.all_reduce.default])


# ---- The gather and the reduction of one flat parameter


class GradientForm(Enum):
    """Which form of a gradient arrives when the backward of a graph has run."""

    REDUCED = "this rank's shard of the average"
    SCATTERED = "this rank's shard of the average over the shard group; that over the replicas is yet to come"
    WHOLE = "the whole gradient of this rank, not reduced"
    NOTHING = "nothing: no parameter requires grad"


@dataclass(frozen=True)
class GatherPlan:
    """Everything that the operators of one flat parameter depend on. Equal plans make equal graphs."""

    # How shards move, and how gradients are averaged over replicas; ``None``: not at all.
    route: str | None
    replica_route: str | None
    world_size: int  # the size of the shard group
    # The dtype of the shard, and the compute dtype.
    shard_dtype: torch.dtype
    dtype: torch.dtype
    # The dtype to reduce in, and that of the reduced gradient.
    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype
    sizes: tuple[int, ...]  # the sizes of the flat parameter's pieces, parameters and padding, in order
    params: tuple[tuple[int, tuple[int, ...]], ...]  # the piece and the shape of each parameter
    flags: tuple[bool, ...]  # which of them require grad
    arrives: GradientForm  # the form of gradient that a backward delivers
    # The divisor of gradients before they are reduced, and whether the collective averages.
    before: float
    is_average: bool
    rounds: bool  # the transport may gather other bits, and casts by itself

    @property
    def needs_grad_leaf(self) -> bool:
        """Whether the gradient differs from the leaf in dtype or length."""
        if self.arrives is GradientForm.REDUCED:
            return self.gradient_dtype != self.shard_dtype
        return self.arrives is not GradientForm.NOTHING

    @property
    def is_gathered(self) -> bool:
        """Whether parameters have memory of their own, rather than the shard's."""
        return self.route is not None or self.dtype != self.shard_dtype

    # ---- Operators; called with the tensors of a graph that is being captured

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        flat = shard if shard.dtype == self.dtype or self.rounds else shard.to(self.dtype)
        return flat if self.route is None else all_gather(flat, self.dtype, self.world_size, self.route)

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        starts = [*accumulate(self.sizes, initial=0)]  # not split(): partitioners want every value to be a tensor
        bounds = [(starts[piece], starts[piece + 1], shape) for piece, shape in self.params]
        return tuple([flat[start:stop].view(shape) for start, stop, shape in bounds])

    def whole_gradient(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Concatenate the gradients of the parameters into one for the flat parameter, with zeros in the padding."""
        present = [(grad, piece) for grad, (piece, _) in zip(grads, self.params, strict=True) if grad is not None]
        return flatten([grad for grad, _ in present], [piece for _, piece in present], self.sizes, self.reduce_dtype)

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """Reduce a whole gradient to the form that arrives."""
        if self.arrives is GradientForm.WHOLE:
            return flat
        if self.before != 1:
            flat = flat / self.before
        if self.route is not None:
            flat = reduce_scatter(flat, self.is_average, self.world_size, self.route)
        if self.arrives is GradientForm.REDUCED and self.replica_route is not None:
            flat = all_reduce(flat, self.is_average, self.replica_route)
        return flat.to(self.gradient_dtype) if self.arrives is GradientForm.REDUCED else flat

    def unused(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """For the unused_mask: 1 for each parameter without a gradient; ``None`` if there is none."""
        missing = [float(grad is None) for grad in grads]
        return torch.tensor(missing) if 1 in missing else None


class _GatheredParameters(torch.autograd.Function):
    """Forward: the parameters, from a shard. Backward: the form of gradient to deliver, from their gradients."""

    @staticmethod
    def forward(
        ctx: Any, flat: GatherPlan, leaf: torch.Tensor, grad_leaf: torch.Tensor | None, unused_mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.flat, ctx.has_grad_leaf = flat, grad_leaf is not None
        ctx.set_materialize_grads(False)
        views = flat.views(flat.gather(leaf))
        ctx.mark_non_differentiable(*[view for view, flag in zip(views, flat.flags, strict=True) if not flag])
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, Any, Any, Any]:
        flat = ctx.flat
        grads = tuple([grad if flag else None for grad, flag in zip(grads, flat.flags, strict=True)])
        if all(grad is None for grad in grads):
            return None, None, None, None
        arriving = flat.reduce(flat.whole_gradient(grads))
        at_leaf, at_grad_leaf = (None, arriving) if ctx.has_grad_leaf else (arriving, None)
        return None, at_leaf, at_grad_leaf, flat.unused(grads)


_flats: dict[int, GatherPlan] = {}


def plan_id(flat: GatherPlan) -> int:
    """Return a number for the plan, on which graphs can be guarded."""
    # It must depend on everything that the operators do, their code included: what Dynamo captures contains only this
    # number, and caches on disk may know graphs of earlier processes by it.
    number = int(hashlib.sha256(f"{_sources()}{flat!r}".encode()).hexdigest()[:15], 16)
    _flats[number] = flat
    return number


@cache
def _sources() -> str:
    """A digest of the operators' code."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def summary_of(number: int) -> str:
    """Describe the collectives of the flat parameter with this number, in words."""
    flat = _flats[number]
    gather = "nothing gathered" if flat.route is None else f"all-gather of {flat.dtype} over {flat.world_size} ranks"
    if flat.arrives is GradientForm.NOTHING:
        return f"{gather}, frozen"
    average = " and averaged over replicas" if flat.replica_route and flat.arrives is GradientForm.REDUCED else ""
    how = "not reduced" if flat.arrives is GradientForm.WHOLE else f"reduced in {flat.reduce_dtype}{average}"
    return f"{gather}, {len(flat.params)} parameters, gradients {how}"


def gather_captured(
    number: int, leaf: torch.Tensor, grad_leaf: torch.Tensor | None, unused_mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gather the parameters of the flat parameter with this number; goes into a graph as it is."""
    result: tuple[torch.Tensor, ...] = _GatheredParameters.apply(_flats[number], leaf, grad_leaf, unused_mask)
    return result


def refuse_written(names: str, *params: torch.Tensor) -> None:
    """Raise, while a graph is captured, if forward has written to gathered parameters; goes into a graph as it is."""
    if any([was_written_in_graph(param) for param in params]):
        raise MisuseRuntimeError(
            f"torch.compile: forward of a fully_shard'ed module writes to one of its own parameters, among {names}: "
            "the write would be lost, because the sharded parameters are authoritative. Modify parameters outside "
            "forward, or keep what changes in forward in a buffer"
        )


class GraphInputs(NamedTuple):
    """The inputs of a graph for one flat parameter."""

    leaf: nn.Parameter
    grad_leaf: nn.Parameter | None
    unused_mask: nn.Parameter


class CapturedShard:
    """The leaves of one flat parameter in graphs, and the gradients that arrive at them; lives as long as the shard,
    whose memory and version counter the leaves share. ``flat`` is the plan of the next graphs, with ``inputs``."""

    __slots__ = ("_device", "_frozen", "_note", "_places", "_unused_mask", "flat", "inputs", "shard")

    def __init__(self, handle: FlatParamHandle, flat: GatherPlan, note: Callable[[torch.Tensor], None]) -> None:
        """``note`` is called with the place at which a gradient has arrived."""
        self.shard, self._note = handle.shard, note
        self._device = handle.storage.compute_device(handle.shard)
        with torch.inference_mode(False):
            unused_mask = torch.zeros(len(flat.params))
            self._unused_mask = nn.Parameter(unused_mask)
            frozen_unused_mask = nn.Parameter(unused_mask, requires_grad=False)
            self._frozen = GraphInputs(nn.Parameter(self.shard, requires_grad=False), None, frozen_unused_mask)
        # Options may change between a forward and its backward, and backwards of several forwards may run together. So
        # each form of gradient arrives at a place of its own, which stays.
        self._places: dict[GradientForm, nn.Parameter] = {}
        self.follow(flat)

    def follow(self, flat: GatherPlan) -> None:
        self.flat = flat
        if flat.arrives is GradientForm.NOTHING:
            self.inputs = self._frozen
            return
        place = self._places.get(flat.arrives)
        if place is None:
            place = self._places[flat.arrives] = self._place_for(flat)
        if flat.needs_grad_leaf:
            self.inputs = GraphInputs(self._frozen.leaf, place, self._unused_mask)
        else:
            self.inputs = GraphInputs(place, None, self._unused_mask)

    def _place_for(self, flat: GatherPlan) -> nn.Parameter:
        with torch.inference_mode(False):
            if flat.needs_grad_leaf:  # one element, whatever its length
                numel = sum(flat.sizes) if flat.arrives is GradientForm.WHOLE else self.shard.numel()
                dtype = flat.gradient_dtype if flat.arrives is GradientForm.REDUCED else flat.reduce_dtype
                place = nn.Parameter(torch.zeros((), dtype=dtype, device=self._device).expand(numel))
            else:
                place = nn.Parameter(self.shard)
            place.register_post_accumulate_grad_hook(self._note)
        return place

    def places(self) -> list[nn.Parameter]:
        return [*self._places.values()]

    def has_grad(self) -> bool:
        """Whether graphs have delivered gradients that nobody has taken."""
        return any([place.grad is not None for place in self._places.values()])

    def drop(self) -> None:
        for tensor in (*self._places.values(), self._unused_mask):
            tensor.grad = None

    def take(self) -> tuple[list[tuple[GradientForm, torch.Tensor]], list[bool]]:
        """Take the gradients that graphs have delivered, by form, and report which parameters they are for, as far as
        the graphs tell."""
        arrived = []
        for arrives, place in self._places.items():
            if place.grad is not None:
                arrived.append((arrives, place.grad))
                place.grad = None
        unused, self._unused_mask.grad = self._unused_mask.grad, None
        used = [True] * len(self.flat.params) if unused is None else [value == 0 for value in unused.tolist()]
        return arrived, used


def captured_flat(handle: FlatParamHandle, is_synced: bool, averages: bool, options: ReductionOptions) -> GatherPlan:
    """The plan for a flat parameter in graphs. ``is_synced``: backwards reduce; ``averages``: over replicas too."""
    define()
    mesh, layout, contributions = handle.mesh, handle.layout, handle.pending_gradients
    sizes: list[int] = []
    params: list[tuple[int, tuple[int, ...]]] = []
    end = 0
    for param in layout.params:
        if param.offset > end:
            sizes.append(param.offset - end)
        params.append((len(sizes), tuple(param.shape)))
        sizes.append(param.numel)
        end = param.offset + param.numel
    if layout.flat_numel > end:
        sizes.append(layout.flat_numel - end)
    is_half = contributions.dtype == torch.float16
    before, is_average, _ = options.factors(mesh.data_world_size, mesh.missing_factor, is_half)
    arrives = GradientForm.REDUCED
    if not any(handle.unsharded.flags):
        arrives = GradientForm.NOTHING
    elif not is_synced or (mesh.is_replicated and not averages):
        arrives = GradientForm.WHOLE
    elif not averages and mesh.replica_transport is not None:
        arrives = GradientForm.SCATTERED
    is_alone = mesh.shard_world_size == 1
    return GatherPlan(
        None if is_alone else route_of(mesh.transport, handle.label),
        None if mesh.replica_transport is None else route_of(mesh.replica_transport, handle.label),
        mesh.shard_world_size,
        handle.shard.dtype,
        handle.unsharded.dtype,
        contributions.dtype,
        handle.gradient.dtype,
        tuple(sizes),
        tuple(params),
        tuple(handle.unsharded.flags),
        arrives,
        before,
        is_average,
        not is_alone and mesh.transport.rounds,
    )


def deliver_gradients(handle: FlatParamHandle, shard: CapturedShard) -> tuple[bool, bool]:
    """Move the gradients that compiled graphs produced to where eager backward puts them. No reduction of the handle is
    in flight. Returns whether older or accumulated gradients have changed, and whether something is yet to be
    reduced."""
    arrived, told = shard.take()
    has_added = is_due = False
    for arrives, grad in arrived:
        views = handle.full_views_of(grad) if arrives is GradientForm.WHOLE else handle.views_of(grad)
        # A parameter that a forward used in one call of its module, but not in another, has a gradient.
        used = [is_one or bool(view.any()) for is_one, view in zip(told, views, strict=True)]
        flags = handle.unsharded.flags
        for view, flag in zip(views, flags, strict=True):
            if not flag:  # frozen since the forward: keep it out of the norm of the flat gradient
                view.zero_()
        used = [is_one and flag for is_one, flag in zip(used, flags, strict=True)]
        for index, is_one in enumerate(used):
            if is_one:
                handle.pending_gradients.is_used[index] = 1
        if handle.pending_gradients.accumulation is not None:
            handle.pending_gradients.follow_zero_grad()
        with torch.no_grad():
            if arrives is GradientForm.WHOLE:
                kept = [view if is_one else None for view, is_one in zip(views, used, strict=True)]
                accumulate_gradients(handle, kept)
            elif arrives is GradientForm.SCATTERED:
                accumulation = handle.pending_gradients.accumulation
                earlier = None if accumulation is None else accumulation.scattered
                kept_dtype = torch.promote_types(grad.dtype, handle.gradient.dtype)
                keep_scattered(handle, add_scattered(grad, earlier, kept_dtype))
            else:
                has_added |= _bring_reduced(handle, grad)
        is_due |= arrives is not GradientForm.REDUCED
    return has_added or is_due, is_due


def _bring_reduced(handle: FlatParamHandle, grad: torch.Tensor) -> bool:
    contributions, mesh = handle.pending_gradients, handle.mesh
    contributions.awaits_publication = True
    is_added, options = handle.gradient.prepare() is ADDED, contributions.options
    is_half = contributions.dtype == torch.float16
    _, _, after = options.factors(mesh.data_world_size, mesh.missing_factor, is_half)
    target = handle.gradient.target
    assert target is not None
    bring_result(grad, target, is_added, after, options.hook)
    return is_added
