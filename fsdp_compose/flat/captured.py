"""The gather and the reduction of one flat parameter as operations of a graph that ``torch.compile`` captures.

What is around them (what reductions do with their result, accumulation, publication) is that of the eager modes; a
graph only brings gradients. It reads the shard through a plain leaf over the same memory, and its gradient arrives
there, or at a ``sink`` where it has another dtype or length. Which parameters had none is known when the backward is
captured; the graph tells of it through a ``probe``, if it is not all of them.

Functional collectives of torch, which compilers know, are used where the process group's own collectives carry the
training; where messages do, operations of ours that send these (``graph_ops``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from .._torch import was_written_in_graph
from .accumulating import accumulate as accumulate_gradients
from .accumulating import keep_scattered
from .flat_param import FlatParamHandle
from .gradient import ADDED
from .graph_ops import all_gather, all_reduce, define, flatten, reduce_scatter, route_of
from .reduction import ReductionOptions, bring_result


class Arrives(Enum):
    """What arrives of a gradient when the backward of a graph has run."""

    REDUCED = "this rank's part of the average"
    SCATTERED = "this rank's part of the average over the shard group; that over the replicas is yet to come"
    WHOLE = "the whole gradient of this rank, not reduced"
    NOTHING = "nothing: no parameter requires grad"


@dataclass(frozen=True)
class CapturedFlat:
    """All that the operations of one flat parameter depend on. Equal ones make equal graphs.

    Attributes:
        route, replica_route: how shards move, and what is averaged over replicas; ``None``: not at all.
        world_size: of the shard group.
        shard_dtype, dtype: of the shard, and to compute in.
        reduce_dtype, gradient_dtype: to reduce in, and of the reduced gradient.
        sizes: of the pieces of the flat parameter, parameters and padding, in order.
        params: which piece each parameter is, and its shape.
        flags: which of them require grad.
        arrives: what a backward brings.
        before, is_average: what gradients are divided by before they are reduced, and whether the collective averages.
    """

    route: str | None
    replica_route: str | None
    world_size: int
    shard_dtype: torch.dtype
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    gradient_dtype: torch.dtype
    sizes: tuple[int, ...]
    params: tuple[tuple[int, tuple[int, ...]], ...]
    flags: tuple[bool, ...]
    arrives: Arrives
    before: float
    is_average: bool

    @property
    def needs_sink(self) -> bool:
        """Whether the gradient has not the form of the leaf."""
        if self.arrives is Arrives.REDUCED:
            return self.gradient_dtype != self.shard_dtype
        return self.arrives is not Arrives.NOTHING

    @property
    def is_gathered(self) -> bool:
        """Whether parameters are in memory of their own, not in that of the shard."""
        return self.route is not None or self.dtype != self.shard_dtype

    # ---- operations; called with the tensors of a graph that is being captured

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        flat = shard if shard.dtype == self.dtype else shard.to(self.dtype)
        return flat if self.route is None else all_gather(flat, self.world_size, self.route)

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        starts = [*accumulate(self.sizes, initial=0)]  # not split(): partitioners want every value to be a tensor
        bounds = [(starts[piece], starts[piece + 1], shape) for piece, shape in self.params]
        return tuple([flat[start:stop].view(shape) for start, stop, shape in bounds])

    def whole_gradient(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The gradients of the parameters as one of the flat parameter, with zeros in the padding."""
        present = [(grad, piece) for grad, (piece, _) in zip(grads, self.params, strict=True) if grad is not None]
        return flatten([grad for grad, _ in present], [piece for _, piece in present], self.sizes, self.reduce_dtype)

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """What arrives of a whole gradient."""
        if self.arrives is Arrives.WHOLE:
            return flat
        if self.before != 1:
            flat = flat / self.before
        if self.route is not None:
            flat = reduce_scatter(flat, self.is_average, self.world_size, self.route)
        if self.arrives is Arrives.REDUCED and self.replica_route is not None:
            flat = all_reduce(flat, self.is_average, self.replica_route)
        return flat.to(self.gradient_dtype) if self.arrives is Arrives.REDUCED else flat

    def unused(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """For the probe: 1 for each parameter without a gradient; ``None`` if there is none."""
        missing = [float(grad is None) for grad in grads]
        return torch.tensor(missing) if 1 in missing else None


class _GatheredParameters(torch.autograd.Function):
    """The parameters, from a shard; in backward, what is to arrive, from their gradients."""

    @staticmethod
    def forward(
        ctx: Any, flat: CapturedFlat, leaf: torch.Tensor, sink: torch.Tensor | None, probe: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.flat, ctx.has_sink = flat, sink is not None
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
        at_leaf, at_sink = (None, arriving) if ctx.has_sink else (arriving, None)
        return None, at_leaf, at_sink, flat.unused(grads)


_flats: dict[int, CapturedFlat] = {}


def number_of(flat: CapturedFlat) -> int:
    """A number for it, which graphs can be guarded on. It depends on all that the operations do: what Dynamo has
    captured has this number alone, and caches on disk may know graphs of earlier processes by it."""
    number = int(hashlib.sha256(f"{_sources()}{flat!r}".encode()).hexdigest()[:15], 16)
    _flats[number] = flat
    return number


@cache
def _sources() -> str:
    """The code of the operations, as a digest."""
    files = [Path(__file__), Path(__file__).with_name("graph_ops.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def summary_of(number: int) -> str:
    """The collectives of the flat parameter of this number, in words."""
    flat = _flats[number]
    gather = "nothing gathered" if flat.route is None else f"all-gather of {flat.dtype} over {flat.world_size} ranks"
    if flat.arrives is Arrives.NOTHING:
        return f"{gather}, frozen"
    average = " and averaged over replicas" if flat.replica_route and flat.arrives is Arrives.REDUCED else ""
    how = "not reduced" if flat.arrives is Arrives.WHOLE else f"reduced in {flat.reduce_dtype}{average}"
    return f"{gather}, {len(flat.params)} parameters, gradients {how}"


def gather_captured(
    number: int, leaf: torch.Tensor, sink: torch.Tensor | None, probe: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The parameters of the flat parameter of this number, gathered; to be put into a graph as it is."""
    result: tuple[torch.Tensor, ...] = _GatheredParameters.apply(_flats[number], leaf, sink, probe)
    return result


def refuse_written(names: str, *params: torch.Tensor) -> None:
    """Raise, while a graph is captured, if forward has written to gathered parameters; to be put into a graph as it
    is."""
    if any([was_written_in_graph(param) for param in params]):
        raise RuntimeError(
            f"torch.compile: forward of a fully_shard'ed module writes to a parameter of its own, one of {names}: the "
            "write would be lost, since the sharded parameters are authoritative. Modify parameters outside forward, "
            "or keep what changes in forward in a buffer"
        )


class GraphInputs(NamedTuple):
    """The inputs of a graph for one flat parameter."""

    leaf: nn.Parameter
    sink: nn.Parameter | None
    probe: nn.Parameter


class CapturedShard:
    """The leaves of one flat parameter in graphs, and what they bring; for as long as the shard stays the same.

    What a forward was captured for may have changed when its backward comes, and backwards of several may come
    together: so each way in which gradients arrive has a place of its own, which stays.

    Attributes:
        shard: of which the leaves have the memory and the version counter.
        flat: what the next graphs do.
        inputs: of these graphs.
    """

    __slots__ = ("_device", "_frozen", "_note", "_places", "_probe", "flat", "inputs", "shard")

    def __init__(self, handle: FlatParamHandle, flat: CapturedFlat, note: Callable[[torch.Tensor], None]) -> None:
        """``note`` is called with the place at which a gradient has come."""
        self.shard, self._note = handle.shard, note
        self._device = handle.home.compute_device(handle.shard)
        with torch.inference_mode(False):
            probe = torch.zeros(len(flat.params))
            self._probe = nn.Parameter(probe)
            frozen_probe = nn.Parameter(probe, requires_grad=False)
            self._frozen = GraphInputs(nn.Parameter(self.shard, requires_grad=False), None, frozen_probe)
        self._places: dict[Arrives, nn.Parameter] = {}
        self.follow(flat)

    def follow(self, flat: CapturedFlat) -> None:
        """The next graphs do ``flat``."""
        self.flat = flat
        if flat.arrives is Arrives.NOTHING:
            self.inputs = self._frozen
            return
        place = self._places.get(flat.arrives)
        if place is None:
            place = self._places[flat.arrives] = self._place_for(flat)
        if flat.needs_sink:
            self.inputs = GraphInputs(self._frozen.leaf, place, self._probe)
        else:
            self.inputs = GraphInputs(place, None, self._probe)

    def _place_for(self, flat: CapturedFlat) -> nn.Parameter:
        """Where autograd is to bring what arrives."""
        with torch.inference_mode(False):
            if flat.needs_sink:  # of one element, whatever its length
                numel = sum(flat.sizes) if flat.arrives is Arrives.WHOLE else self.shard.numel()
                dtype = flat.gradient_dtype if flat.arrives is Arrives.REDUCED else flat.reduce_dtype
                place = nn.Parameter(torch.zeros((), dtype=dtype, device=self._device).expand(numel))
            else:
                place = nn.Parameter(self.shard)
            place.register_post_accumulate_grad_hook(self._note)
        return place

    def places(self) -> list[nn.Parameter]:
        """The leaves at which gradients arrive."""
        return [*self._places.values()]

    def has_grad(self) -> bool:
        """Whether graphs have brought something that was not taken."""
        return any([place.grad is not None for place in self._places.values()])

    def drop(self) -> None:
        """Forget what graphs have brought."""
        for tensor in (*self._places.values(), self._probe):
            tensor.grad = None

    def take(self) -> tuple[list[tuple[Arrives, torch.Tensor]], list[bool]]:
        """What graphs have brought, in each way, and which parameters have a part of it as far as they tell."""
        arrived = []
        for arrives, place in self._places.items():
            if place.grad is not None:
                arrived.append((arrives, place.grad))
                place.grad = None
        unused, self._probe.grad = self._probe.grad, None
        used = [True] * len(self.flat.params) if unused is None else [value == 0 for value in unused.tolist()]
        return arrived, used


def captured_flat(handle: FlatParamHandle, is_synced: bool, averages: bool, options: ReductionOptions) -> CapturedFlat:
    """What graphs do with a flat parameter. ``is_synced``: backwards reduce; ``averages``: over replicas too."""
    define()
    mesh, layout, contributions = handle.mesh, handle.layout, handle.contributions
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
    arrives = Arrives.REDUCED
    if not any(handle.unsharded.flags):
        arrives = Arrives.NOTHING
    elif not is_synced or (mesh.has_whole and not averages):
        arrives = Arrives.WHOLE
    elif not averages and mesh.replica_transport is not None:
        arrives = Arrives.SCATTERED
    is_alone = mesh.shard_world_size == 1
    return CapturedFlat(
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
    )


def bring(handle: FlatParamHandle, shard: CapturedShard) -> tuple[bool, bool]:
    """Take what graphs have brought, and lead it where an eager backward would; no reduction of the handle is in
    flight.

    Returns:
        Whether older gradients, or accumulated ones, have changed by it; and whether something is yet to be reduced.
    """
    arrived, told = shard.take()
    has_added = is_due = False
    for arrives, grad in arrived:
        views = handle.full_views_of(grad) if arrives is Arrives.WHOLE else handle.views_of(grad)
        # One that a forward has used in one call of its module and not in another has a gradient.
        used = [is_one or bool(view.any()) for is_one, view in zip(told, views, strict=True)]
        flags = handle.unsharded.flags
        for view, flag in zip(views, flags, strict=True):
            if not flag:  # frozen since the forward: the norm of the flat gradient is not to know of it
                view.zero_()
        used = [is_one and flag for is_one, flag in zip(used, flags, strict=True)]
        for index, is_one in enumerate(used):
            if is_one:
                handle.contributions.is_used[index] = 1
        if handle.contributions.accumulation is not None:
            handle.contributions.follow_zero_grad()
        with torch.no_grad():
            if arrives is Arrives.WHOLE:
                kept = [view if is_one else None for view, is_one in zip(views, used, strict=True)]
                accumulate_gradients(handle, kept)
            elif arrives is Arrives.SCATTERED:
                _bring_scattered(handle, grad)
            else:
                has_added |= _bring_reduced(handle, grad)
        is_due |= arrives is not Arrives.REDUCED
    return has_added or is_due, is_due


def _bring_scattered(handle: FlatParamHandle, grad: torch.Tensor) -> None:
    accumulation = handle.contributions.accumulation
    if accumulation is not None and accumulation.scattered is not None:
        grad.add_(accumulation.scattered)
    keep_scattered(handle, grad)


def _bring_reduced(handle: FlatParamHandle, grad: torch.Tensor) -> bool:
    contributions, mesh = handle.contributions, handle.mesh
    contributions.await_publication()
    is_added, options = handle.gradient.prepare() is ADDED, contributions.options
    is_half = contributions.dtype == torch.float16
    _, _, after = options.factors(mesh.data_world_size, mesh.missing_factor, is_half)
    target = handle.gradient.target
    assert target is not None
    bring_result(grad, target, is_added, after, options.hook)
    return is_added
