"""Functional mode: gathering the parameters is itself an operation that autograd differentiates, as often as asked.

Instead of refilling memory that hooks manage, the forward of a group in this mode makes new full parameters from the
sharded ones, which stay in the graph: gradients flow through a reduce-scatter back to the sharded parameters, and
gradients of gradients through another all-gather. So ``autograd.grad(loss, model.parameters(), create_graph=True)`` and
gradient penalties are what they are for the unsharded model. The price: what was gathered lives until the graph is
freed, and nothing is prefetched. ``runtime`` enters and leaves; between them modules show the new parameters.

Note [Averages]. Each rank differentiates its own loss, and what arrives at sharded parameters is the average over the
ranks, as everywhere in data parallel training. A term of the loss that was computed from such an average is the same on
every rank; its average over the ranks is the term itself. So the derivative of the reduce-scatter is the plain
all-gather, without another division.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .collectives import copy_gradients
from .exchange import ControlExchange, control_group, order_hash
from .faces import face_local, like_face, make_gradient
from .flat_param import FlatParamHandle
from .iteration import ALL_GATHER, REDUCE_SCATTER, raise_different_order
from .state import RootContext, _FSDPState

_exchanges: weakref.WeakKeyDictionary[FlatParamHandle, ControlExchange] = weakref.WeakKeyDictionary()


class FunctionalUse:
    """One forward of one group in functional mode.

    Raises:
        RuntimeError: gradients that were accumulated without sync wait for a backward in the default mode.
    """

    __slots__ = ("_shown", "_versions")

    def __init__(self, root: RootContext, state: _FSDPState) -> None:
        full: dict[int, torch.Tensor] = {}
        for handle in state._handles:
            whole = _AllGather.apply(_Gather(root, state, handle), *handle.faces)
            full |= {id(param): item for param, item in zip(handle.unsharded_params, whole, strict=True)}
        self._versions = [(item, item._version) for item in full.values()]
        self._shown = state.swap.show_instead(full)

    def check(self, state: _FSDPState) -> None:
        """Raise if forward has written to a gathered parameter, or replaced one: the change would be lost."""
        state.swap.check_shown(self._shown)
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a parameter of the fully_shard group {state.name} was modified in place inside forward; the edit "
                    "is lost, since the sharded parameters are authoritative. Modify parameters outside forward, or "
                    "keep what changes in forward in a buffer"
                )


def refuse_accumulated(state: _FSDPState) -> None:
    """Raise if gradients of the group wait for a reduction, which functional mode does not do for them."""
    if any(handle.accumulation is not None for handle in state._handles):
        raise RuntimeError(
            f"the fully_shard group {state.name} has gradients that were accumulated without sync, and a forward in "
            "functional mode begins: run the backward that reduces them in the default mode first, or zero_grad()"
        )


class _Gather:
    """One all-gather of one handle, as its derivatives know it."""

    def __init__(self, root: RootContext, state: _FSDPState, handle: FlatParamHandle) -> None:
        self._root, self._state, self.handle = root, state, handle
        self._versions = state.shard_versions()

    def all_gather(self, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The whole of every parameter, from sharded parts; zeros where there is none."""
        handle = self.handle
        self._root.trace.append(self._state.index << 1 | ALL_GATHER)
        storage = self._root.communicator.all_gather_copy(handle, self._shard_of(parts)).untyped_storage()
        # Not views: autograd lets nobody use those of a base that was written to, whoever wrote, and names nothing.
        return [
            torch.empty(0, dtype=handle.param_dtype, device=handle.shard.device).set_(storage, p.offset, p.shape)  # type: ignore[call-overload]
            for p in handle.layout.params
        ]

    def _shard_of(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        handle = self.handle
        if all(part is face for part, face in zip(parts, handle.faces, strict=True)):
            return handle.shard
        shard = torch.zeros_like(handle.shard)
        for part, face, (start, stop, shape) in zip(parts, handle.faces, handle.runs, strict=True):
            if part is not None:
                shard[start:stop].view(shape).copy_(face_local(like_face(part, face)))
        return shard

    def reduce_scatter(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The average over the ranks of gradients of the whole parameters, cut like these; ``None`` where no rank has
        one."""
        handle = self.handle
        self._state.check_versions(self._versions)
        self._root.trace.append(self._state.index << 1 | REDUCE_SCATTER)
        used = self._agree_on_used(grads)
        flat = torch.zeros(handle.layout.flat_numel, dtype=handle.reduce_dtype, device=handle.shard.device)
        present = [item for item in zip(handle.full_views_of(flat), grads, strict=True) if item[1] is not None]
        if present:
            copy_gradients(*map(list, zip(*present)))
        reduced = self._root.communicator.reduce_scatter_copy(handle, flat)
        return [
            make_gradient(reduced[start:stop].view(shape), face) if is_used else None
            for is_used, face, (start, stop, shape) in zip(used, handle.faces, handle.runs, strict=True)
        ]

    def _agree_on_used(self, grads: Sequence[torch.Tensor | None]) -> bytes:
        """Which parameters have a gradient on some rank. All ranks learn here if they do not do the same."""
        root, handle = self._root, self.handle
        exchange = _exchanges.get(handle)
        if exchange is None:
            control = control_group(handle.mesh.shard_group) if handle.mesh.has_peers else None
            exchange = _exchanges[handle] = ControlExchange(len(handle.fqns), 0, control, may_stop=False)
        exchange.used[:] = bytes(grad is not None for grad in grads)
        exchange.start(order_hash(root.trace, len(root.trace)))
        if not exchange.wait():
            root.has_failed = True
            raise_different_order(root, root.live_states())
        root.num_collectives += len(root.trace)
        root.trace.clear()
        return bytes(exchange.used)


class _AllGather(torch.autograd.Function):
    """Sharded parameters (or gradients like them) -> whole ones."""

    @staticmethod
    def forward(ctx: Any, gather: _Gather, *parts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.gather = gather
        ctx.set_materialize_grads(False)
        whole = gather.all_gather(parts)
        ctx.mark_non_differentiable(*[item for item, needed in zip(whole, ctx.needs_input_grad[1:]) if not needed])
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_ReduceScatter.apply(ctx.gather, *grads)


class _ReduceScatter(torch.autograd.Function):
    """Gradients of the whole parameters -> their average, sharded."""

    @staticmethod
    def forward(ctx: Any, gather: _Gather, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.gather = gather
        ctx.set_materialize_grads(False)
        return tuple(gather.reduce_scatter(grads))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        whole = _AllGather.apply(ctx.gather, *grads)
        return None, *[item if needed else None for item, needed in zip(whole, ctx.needs_input_grad[1:])]
