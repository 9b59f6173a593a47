"""The gather of functional mode: itself an operation that autograd differentiates, as often as asked.

Instead of refilling memory that hooks manage, it makes new full parameters from the sharded ones, which stay in the
graph: gradients flow through a reduce-scatter back to the sharded parameters, and gradients of gradients through
another all-gather. So ``autograd.grad(loss, model.parameters(), create_graph=True)`` and gradient penalties are what
they are for the unsharded model. The price: what was gathered lives until the graph is freed, and nothing is
prefetched. ``modes.functional`` lets modules show what was gathered; ``outside_use`` gathers single parameters.

Note [Averages]. Each rank differentiates its own loss, and what arrives at sharded parameters is the average over the
ranks, as everywhere in data parallel training. A term of the loss that was computed from such an average is the same on
every rank; its average over the ranks is the term itself. So the derivative of the reduce-scatter is the plain
all-gather, without another division.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from .._torch import in_forward_ad, queue_end_of_backward
from ..comm import Carrier, ControlExchange
from ..flat import (
    FlatParamHandle,
    copy_gradients,
    like_sharded_param,
    local_elements,
    make_gradient,
)
from ..group import ALL_GATHER, END_OF_BACKWARD, REDUCE_SCATTER, Backward, Root, _FSDPState
from .exchange import begin_exchange, end_exchange
from .recovery import recover_backward


def refuse_accumulated(state: _FSDPState) -> None:
    """Raise if gradients of the group wait for a reduction, which functional mode does not do for them."""
    for handle in state._handles:
        handle.contributions.follow_zero_grad()
    if any(handle.contributions.accumulation is not None for handle in state._handles):
        raise RuntimeError(
            f"the fully_shard group {state.name} has gradients that were accumulated without sync, and a forward in "
            "functional mode begins: run the backward that reduces them in the default mode first, or zero_grad()"
        )


class Gather:
    """One all-gather of one group, or of some of its handles, as its derivatives know it. Tensors are in the order of
    the handles' parameters."""

    def __init__(self, root: Root, state: _FSDPState, handles: Sequence[FlatParamHandle]) -> None:
        self._root, self._state = root, state
        self._versions = state.shard_versions()
        self._handles = list(handles)
        self._bounds = [0, *accumulate(len(handle.sharded_params) for handle in self._handles)]
        self.sharded_params = [sharded for handle in self._handles for sharded in handle.sharded_params]

    def apply(self, parts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        """The whole of every parameter, from sharded parts, by an operation that autograd differentiates."""
        whole: Sequence[torch.Tensor] = _AllGather.apply(self, *parts) if parts else ()
        return whole

    def all_gather(self, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The whole of every parameter, from sharded parts; zeros where there is none."""
        whole: list[torch.Tensor] = []
        for handle, start, stop in zip(self._handles, self._bounds, self._bounds[1:]):
            self._root.order.trace.append(self._state.code | ALL_GATHER)
            shard = _shard_of(handle, parts[start:stop])
            storage = self._root.communicator.all_gather_copy(handle, shard).untyped_storage()
            # Not views: autograd refuses to use those of a base that was written to, by any code, and names nothing.
            whole += [
                torch.empty(0, dtype=handle.unsharded.dtype, device=storage.device).set_(storage, p.offset, p.shape)  # type: ignore[call-overload]
                for p in handle.layout.params
            ]
        return whole

    def reduce_scatter(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The average over the ranks of gradients of the whole parameters, sharded like these; ``None`` where no rank
        has one."""
        self._state.check_versions(self._versions)
        exchange = _RootExchange.of(self._root)
        exchange.begin()
        used = exchange.agree_on_used(self._state, self._handles, grads, self._bounds)
        result: list[torch.Tensor | None] = []
        for handle, start, stop in zip(self._handles, self._bounds, self._bounds[1:]):
            if any(used[start:stop]):
                self._root.order.trace.append(self._state.code | REDUCE_SCATTER)
                reduced = self._reduce_scatter(handle, grads[start:stop])
                result += [
                    make_gradient(reduced[i:j].view(shape), sharded) if is_used else None
                    for is_used, sharded, (i, j, shape) in zip(
                        used[start:stop], handle.sharded_params, handle.local_shards, strict=True
                    )
                ]
            else:
                result += [None] * (stop - start)
        return result

    def refuse_batches(self) -> NotImplementedError:
        """The error of a ``vmap`` over parameters, or over gradients of parameters."""
        return NotImplementedError(
            f"torch.func.vmap over sharded parameters of the fully_shard group {self._state.name}, or over their "
            "gradients (per-sample gradients, hessian(), jacrev() of parameters): a batch of sharded tensors cannot be "
            "gathered or reduced. Give functional_call() full tensors, {name: p.full_tensor() for name, p in "
            "model.named_parameters()}, whose derivatives stay on each rank"
        )

    def _reduce_scatter(self, handle: FlatParamHandle, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        flat = torch.zeros(
            handle.layout.flat_numel, dtype=handle.contributions.dtype, device=handle.home.compute_device(handle.shard)
        )
        reduction = handle.reduction_of(flat)
        present = [item for item in zip(reduction.views, grads, strict=True) if item[1] is not None]
        if present:
            copy_gradients(*map(list, zip(*present)))
        return self._root.communicator.reduce_copy(handle, reduction)


def _shard_of(handle: FlatParamHandle, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    if all(part is sharded for part, sharded in zip(parts, handle.sharded_params, strict=True)):
        return handle.shard
    shard = torch.zeros_like(handle.shard)
    for part, sharded, (start, stop, shape) in zip(parts, handle.sharded_params, handle.local_shards, strict=True):
        if part is not None:
            shard[start:stop].view(shape).copy_(local_elements(like_sharded_param(part, sharded)))
    return shard


class _RootExchange:
    """The exchanges of one root in functional mode, all of one size, so that any two of them meet: one before the
    reduction of each group, and one at the end of a backward that has reduced."""

    def __init__(self, root: Root) -> None:
        states = root.live_states()
        mesh = root.mesh
        handles = [handle for state in states for handle in state._handles]
        starts = accumulate((len(handle.fqns) for handle in handles), initial=0)
        self._starts = dict(zip(map(id, handles), starts))
        self._root = weakref.ref(root)
        carrier = Carrier.of(mesh.peers) if mesh.has_peers else None
        self._exchange = ControlExchange(sum(len(item.fqns) for item in handles), 0, carrier)
        self._has_begun = False

    @staticmethod
    def of(root: Root) -> _RootExchange:
        known = _exchanges.get(root)
        if known is None:
            known = _exchanges[root] = _RootExchange(root)
        return known

    def begin(self) -> None:
        """A group is about to be reduced in the backward that is running."""
        if not self._has_begun:
            root = self._root()
            if root is not None and root.failed_backward is not None:
                recover_backward(root)
            self._has_begun = True
            queue_end_of_backward(_EndOfBackward(self))

    def agree_on_used(
        self,
        state: _FSDPState,
        handles: Sequence[FlatParamHandle],
        grads: Sequence[torch.Tensor | None],
        bounds: Sequence[int],
    ) -> bytes:
        """Which parameters of ``state`` have a gradient on some rank."""
        used, places = self._exchange.used, []
        used[:] = bytes(len(used))
        for handle, start, stop in zip(handles, bounds, bounds[1:]):
            place = slice(self._starts[id(handle)], self._starts[id(handle)] + stop - start)
            used[place] = bytes(grad is not None for grad in grads[start:stop])
            places.append(place)
        self._meet(state.code | REDUCE_SCATTER)
        return b"".join(bytes(used[place]) for place in places)

    def end(self) -> None:
        self._has_begun = False
        self._meet(END_OF_BACKWARD)

    def abandon(self) -> None:
        """The backward has raised: autograd may have added some of its gradients already."""
        self._has_begun = False
        root = self._root()
        if root is not None:
            root.fail_backward(Backward(has_added=True))

    def _meet(self, code: int) -> None:
        """Find out whether all ranks have done the same, and are about to do what ``code`` says."""
        root = self._root()
        assert root is not None
        begin_exchange(root, self._exchange, code)
        try:
            end_exchange(root, self._exchange, code)
        except RuntimeError:
            root.forward.fail()
            raise


_exchanges: weakref.WeakKeyDictionary[Root, _RootExchange] = weakref.WeakKeyDictionary()


class _EndOfBackward:
    """The callback at the end of a backward; autograd drops it uncalled when the backward raises."""

    def __init__(self, exchange: _RootExchange) -> None:
        self._exchange: _RootExchange | None = exchange

    def __call__(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.end()

    def __del__(self) -> None:
        if self._exchange is not None:
            self._exchange.abandon()


# Both are written in the way that ``torch.func`` needs: a context of its own, tangents, and a word about batches.


class _AllGather(torch.autograd.Function):
    """Sharded parameters (or gradients like them) -> whole ones."""

    @staticmethod
    def forward(gather: Gather, *parts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return tuple(gather.all_gather(parts))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.gather = inputs[0]
        ctx.set_materialize_grads(False)
        if not in_forward_ad():  # where what needs no gradient may have a tangent
            ctx.mark_non_differentiable(*[item for item, needed in zip(output, ctx.needs_input_grad[1:]) if not needed])

    @staticmethod
    def jvp(ctx: Any, _gather: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        whole: tuple[torch.Tensor, ...] = _AllGather.apply(ctx.gather, *tangents)
        return whole

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, gather: Gather, *_parts: Any) -> Any:
        raise gather.refuse_batches()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_ReduceScatter.apply(ctx.gather, *grads)


class _ReduceScatter(torch.autograd.Function):
    """Gradients of the whole parameters -> their average, sharded."""

    @staticmethod
    def forward(gather: Gather, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(gather.reduce_scatter(grads))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
        ctx.gather = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, _gather: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        reduced: tuple[torch.Tensor | None, ...] = _ReduceScatter.apply(ctx.gather, *tangents)
        return reduced

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, gather: Gather, *_grads: Any) -> Any:
        raise gather.refuse_batches()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        whole = _AllGather.apply(ctx.gather, *grads)
        return None, *[item if needed else None for item, needed in zip(whole, ctx.needs_input_grad[1:])]
