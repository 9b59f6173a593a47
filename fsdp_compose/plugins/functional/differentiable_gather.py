"""Gathers that autograd differentiates: of whole groups in functional mode, and of single parameters used in a loss.

Instead of refilling memory that hooks manage, such a gather makes new full parameters from the sharded ones, which stay
in the graph. Gradients flow back to the sharded parameters through a reduce-scatter, and gradients of gradients through
another all-gather. So ``autograd.grad(loss, model.parameters(), create_graph=True)`` and gradient penalties give the
same results as for the unsharded model. The price is that gathered parameters live until the graph is freed, and that
nothing is prefetched. ``functional_mode`` makes modules show the gathered parameters. This file also handles uses of a
parameter outside its group's forward, and ``backward(inputs=...)``. The operations themselves are in
``ragged/gather``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..._torch import queue_end_of_backward
from ...core.comm import Carrier, ControlExchange, kept_for
from ...core.flat import (
    FlatParamHandle,
    copy_gradients,
    handle_of,
    handle_of_segment,
    like_sharded_param,
    local_elements,
    make_gradient,
    sharded_param_of,
)
from ...core.group import END_OF_BACKWARD, Backward, Entry, Root, _FSDPState, state_of
from ...core.ragged import DifferentiableGather, RaggedDTensor, gather_local_shards, scatter_average
from ...core.runtime.agreement import begin_exchange, end_exchange
from ...core.runtime.backward import begin_backward
from ...core.runtime.group_ops import way_to_functional_mode
from ...core.runtime.recovery import recover_backward
from ...errors import MisuseRuntimeError
from ..graphs import captured_leaves


def refuse_accumulated(state: _FSDPState) -> None:
    """Raise if accumulated gradients of the group wait for a reduction, which functional mode does not do."""
    for handle in state._handles:
        handle.pending_gradients.follow_zero_grad()
    if any(handle.pending_gradients.accumulation is not None for handle in state._handles):
        raise MisuseRuntimeError(
            f"the fully_shard group {state.name} has gradients that were accumulated without sync, and a forward in "
            "functional mode begins: first run a backward that reduces them in the default mode, or call zero_grad()"
        )


class GroupGather(DifferentiableGather):
    """One all-gather of one group, or of some of its handles, with the data that its derivatives need. Tensors are in
    the order of the handles' parameters."""

    takes_none = True

    def __init__(self, root: Root, state: _FSDPState, handles: Sequence[FlatParamHandle]) -> None:
        self._root, self._state = root, state
        self._versions = state.shard_versions()
        self._handles = list(handles)
        self._bounds = [0, *accumulate(len(handle.sharded_params) for handle in self._handles)]
        self.sharded_params = [sharded for handle in self._handles for sharded in handle.sharded_params]

    def all_gather(self, shards: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Gather every parameter from its shards; a missing one (``None``) counts as zeros."""
        whole: list[torch.Tensor] = []
        for handle, start, stop in zip(self._handles, self._bounds, self._bounds[1:]):
            self._root.order.record(self._root, self._state.log.all_gather)
            shard = _shard_of(handle, shards[start:stop])
            storage = self._root.communicator.all_gather_copy(handle, shard).untyped_storage()
            # Tensors over the storage, not views: if any place writes to the base, autograd refuses to use its views,
            # with an error that names no parameter.
            whole += [
                torch.empty(0, dtype=handle.unsharded.dtype, device=storage.device).set_(storage, p.offset, p.shape)  # type: ignore[call-overload]
                for p in handle.layout.params
            ]
        return whole

    def reduce_scatter(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Average gradients of the whole parameters over the ranks, and shard them like the parameters; ``None`` if no
        rank has one."""
        self._state.check_versions(self._versions)
        exchange = _RootExchange.of(self._root)
        exchange.begin()
        used = exchange.agree_on_used(self._state, self._handles, grads, self._bounds)
        result: list[torch.Tensor | None] = []
        for handle, start, stop in zip(self._handles, self._bounds, self._bounds[1:]):
            if any(used[start:stop]):
                self._root.order.record(self._root, self._state.log.reduce_scatter)
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
        """The error for a ``vmap`` over parameters or their gradients."""
        return NotImplementedError(
            f"torch.func.vmap over sharded parameters of the fully_shard group {self._state.name}, or over their "
            "gradients (per-sample gradients, hessian(), jacrev() of parameters): a batch of sharded tensors cannot be "
            "gathered or reduced. Pass full tensors to functional_call(), {name: p.full_tensor() for name, p in "
            "model.named_parameters()}; their derivatives stay on each rank"
        )

    def _reduce_scatter(self, handle: FlatParamHandle, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        flat = torch.zeros(
            handle.layout.flat_numel,
            dtype=handle.pending_gradients.dtype,
            device=handle.storage.compute_device(handle.shard),
        )
        reduction = handle.reduction_of(flat)
        present = [item for item in zip(reduction.views, grads, strict=True) if item[1] is not None]
        if present:
            copy_gradients(*map(list, zip(*present)))
        return self._root.communicator.reduce_copy(handle, reduction)


def _shard_of(handle: FlatParamHandle, given: Sequence[torch.Tensor | None]) -> torch.Tensor:
    if all(item is sharded for item, sharded in zip(given, handle.sharded_params, strict=True)):
        return handle.shard
    shard = torch.zeros_like(handle.shard)
    for item, sharded, (start, stop, shape) in zip(given, handle.sharded_params, handle.local_shards, strict=True):
        if item is not None:
            shard[start:stop].view(shape).copy_(local_elements(like_sharded_param(item, sharded)))
    return shard


class _RootExchange:
    """The exchanges of one root in functional mode: one before the reduction of each group, and one at the end of a
    backward that has reduced."""

    def __init__(self, root: Root) -> None:
        states = root.live_states()
        mesh = root.mesh
        handles = [handle for state in states for handle in state._handles]
        starts = accumulate((len(handle.fqns) for handle in handles), initial=0)
        self._starts = dict(zip(map(id, handles), starts))
        self._root = weakref.ref(root)
        carrier = Carrier.of(mesh.peers) if mesh.has_peers else None
        # One size for all of them, so that any two pair up if ranks differ.
        self._exchange = ControlExchange(sum(len(item.fqns) for item in handles), 0, carrier)
        self._has_begun = False

    @staticmethod
    def of(root: Root) -> _RootExchange:
        return kept_for(root, _RootExchange, lambda: _RootExchange(root))

    def begin(self) -> None:
        """Called before each reduction; the first one in a backward registers the callback at its end."""
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
        """Find out which parameters of ``state`` have a gradient on some rank."""
        used, places = self._exchange.used, []
        used[:] = bytes(len(used))
        for handle, start, stop in zip(handles, bounds, bounds[1:]):
            place = slice(self._starts[id(handle)], self._starts[id(handle)] + stop - start)
            used[place] = bytes(grad is not None for grad in grads[start:stop])
            places.append(place)
        self._meet(state.log.reduce_scatter)
        return b"".join(bytes(used[place]) for place in places)

    def end(self) -> None:
        self._has_begun = False
        self._meet(END_OF_BACKWARD)

    def abandon(self) -> None:
        """Note that the backward has raised; autograd may have added some of its gradients already."""
        self._has_begun = False
        root = self._root()
        if root is not None:
            root.fail_backward(Backward(has_added=True))

    def _meet(self, place: Entry) -> None:
        """Check that all ranks have done the same and are at ``place``."""
        root = self._root()
        assert root is not None
        begin_exchange(root, self._exchange, place)
        try:
            end_exchange(root, self._exchange, place)
        except RuntimeError:
            root.forward.has_failed = True
            raise


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


# ---- Uses of a sharded parameter outside its group's forward: ``full_tensor()`` or ``redistribute()`` in a loss
#
# A fused or chunked cross entropy computes with the weight of the output head after the model's forward::
#
#     loss = F.cross_entropy(F.linear(hidden, model.head.weight.full_tensor()), target)
#
# The gradient of the whole tensor is this rank's own, like that of an unsharded parameter. In the default mode it takes
# the same path: it waits on the flat parameter until the running backward reduces the group with all its other
# gradients. If the group was already reduced, it is reduced at the end of backward, where the control exchange tells
# all ranks that some rank has such a gradient. So no rank waits for another one whose loss does not use the weight. In
# functional mode, where gradients reach sharded parameters through autograd, it goes through a reduce-scatter that
# autograd can differentiate.


def gather_parameter(root: Root, state: _FSDPState, handle: FlatParamHandle, index: int) -> torch.Tensor:
    """Gather one parameter of a group. Ranks: all of the shard group."""
    root.scheduler.before_single_gather(root, state)
    root.order.record(root, state.log.all_gather)
    root.communicator.announce(handle, "all-gather of a parameter")
    sharded: Any = handle.sharded_params[index]
    gather: DifferentiableGather
    if state.options.is_functional or state.persistent.was_functional:
        refuse_accumulated(state)
        gather = _FunctionalGather(root, state, handle, index)
    else:
        gather = _DefaultGather(sharded, state.shard_versions())
    whole: torch.Tensor
    (whole,) = gather.apply([sharded])
    return whole


_is_through_autograd = False


@contextlib.contextmanager
def gradients_through_autograd() -> Iterator[None]:
    """A context for ``autograd.grad()``: gradients are averaged immediately and returned to autograd."""
    global _is_through_autograd
    before, _is_through_autograd = _is_through_autograd, True
    try:
        yield
    finally:
        _is_through_autograd = before


class _DefaultGather(DifferentiableGather):
    """One parameter, in the default mode: its gradient waits for the reduction of the group."""

    def __init__(self, sharded: RaggedDTensor, versions: list[int]) -> None:
        self._sharded, self._versions = sharded, versions

    def all_gather(self, shards: Sequence[RaggedDTensor]) -> list[torch.Tensor]:
        return [*map(gather_local_shards, shards)]

    def reduce_scatter(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [scatter_average(grad, self._sharded) for grad in grads]  # differentiable by itself

    def deliver(self, grads: Any) -> Sequence[torch.Tensor | None]:
        place = handle_of(self._sharded)
        state = None if place is None else state_of(place[0])
        if _is_through_autograd or place is None or state is None or state.root is None:
            return self.reduce_scatter(grads)  # this is autograd.grad(), or the model is gone
        (grad,), (handle, index) = grads, place
        backward = state.root.backward or begin_backward(state.root)
        state.check_versions(self._versions)
        if self._sharded.requires_grad:  # else it was frozen after that forward
            handle.pending_gradients.add_outside(index, grad)
            backward.has_outside_grads = True
        return [None]


class _FunctionalGather(GroupGather):
    """One parameter, or a tensor sharded like it, in functional mode."""

    takes_none = False

    def __init__(self, root: Root, state: _FSDPState, handle: FlatParamHandle, index: int) -> None:
        super().__init__(root, state, [handle])
        self._index = index

    def all_gather(self, shards: Any) -> list[torch.Tensor]:
        return [*map(gather_local_shards, shards)]

    def reduce_scatter(self, grads: Any) -> list[torch.Tensor | None]:
        every: list[torch.Tensor | None] = [None] * len(self.sharded_params)
        every[self._index] = grads[0]
        return [super().reduce_scatter(every)[self._index]]


# ---- ``backward(inputs=...)`` and ``autograd.grad()`` of sharded parameters
#
# In the default mode a reduction delivers gradients to sharded parameters, and the autograd graph has no path to them.
# Asked for their gradients only, autograd would silently compute nothing. So ``backward(inputs=...)`` also asks for the
# gradients of the unsharded parameters, which are then reduced as usual. ``autograd.grad()`` must return gradients and
# leave ``.grad`` alone; it raises if a forward has used the parameters for the loss. Gradients of terms on the sharded
# parameters themselves, and everything in functional mode, are left to autograd.


def with_inputs(
    run: Callable[[tuple[Any, ...], bool], Any], inputs: tuple[Any, ...], allow_unused: bool, accumulates: bool
) -> Any:
    """Call ``run(inputs, allow_unused)`` with the inputs that the user means."""
    found = [(handle, index) for item in inputs for handle, index in _places_of(item)]
    if not found:
        return run(inputs, allow_unused)
    unsharded = [handle.unsharded.params[index] for handle, index in found]
    if accumulates:
        sharded = [handle.sharded_params[index] for handle, index in found]
        leaves = [leaf for handle, _ in found for leaf in captured_leaves(handle)]
        added = {id(item): item for item in (*sharded, *unsharded, *leaves) if item.requires_grad}
        for item in inputs:
            added.pop(id(item), None)
        return run((*inputs, *added.values()), allow_unused)
    asked = {id(param): (param, place) for param, place in zip(unsharded, found, strict=True) if param.requires_grad}
    asked |= {
        id(leaf): (leaf, (handle, index))
        for handle, index in found
        for leaf in captured_leaves(handle)
        if leaf.requires_grad
    }
    with gradients_through_autograd():
        result = run((*inputs, *[param for param, _ in asked.values()]), True)
    gradients, others = result[: len(inputs)], result[len(inputs) :]
    for (_, (handle, index)), other in zip(asked.values(), others, strict=True):
        if other is not None:
            raise _refusal(handle, index)
    if not allow_unused and any(item is None for item in gradients):
        raise MisuseRuntimeError(
            "autograd.grad(): a tensor among the inputs was not used to compute the outputs; with allow_unused=True "
            "its gradient is None"
        )
    return gradients


def _places_of(item: Any) -> Iterator[tuple[FlatParamHandle, int]]:
    """The sharded parameters behind an input: the input itself, or those in a flat view."""
    if not isinstance(item, torch.Tensor):
        return
    place = handle_of(sharded_param_of(item))
    if place is not None:
        yield place
    handle = handle_of_segment(item)
    for segment in () if handle is None else handle.segments:
        if segment.parameter is item and handle is not None:
            yield from ((handle, index) for index in segment.sharded_params)


def _refusal(handle: FlatParamHandle, index: int) -> RuntimeError:
    state = state_of(handle)
    group, root = ("?", None) if state is None else (state.name, state.root)
    return MisuseRuntimeError(
        f"autograd.grad() was asked for the gradient of {handle.name_of(index)}, a sharded parameter of "
        f"the fully_shard group {group}, whose forward ran in the default mode, in which gradients only arrive in "
        f".grad. Call backward(), with inputs=[...] for some parameters only. Or: {way_to_functional_mode(root)}"
    )
