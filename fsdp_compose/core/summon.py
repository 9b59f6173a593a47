"""``summon_full_params``: temporarily replace sharded parameters by ordinary full ones.

A flat parameter is gathered as a whole, in its original dtype, and its full parameters are views of it. At the end each
rank copies the elements of its own local shards back. The runtime is not involved: no forward may run in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn

from .._arguments import checked
from ..errors import MisuseError, MisuseRuntimeError
from ..plugins.parameter_classes import CompositeDTensor
from .comm import meet
from .flat import (
    FlatParamHandle,
    UnreducedGradient,
    expect_gradient,
    forget,
    gather_flat,
    handle_of,
    know_as,
    local_elements,
    make_gradient,
    restore_attributes,
    wholes_of,
)
from .group import SlotView, _FSDPState, _get_fsdp_states, state_of
from .ragged import RaggedDTensor, inner_of_whole, note_write_of_all_ranks
from .runtime import enter_alone


@dataclass(frozen=True)
class _Slot:
    """A sharded parameter's place in the module tree."""

    module: nn.Module
    name: str
    fqn: str
    index: int  # of the parameter in its handle


@dataclass(eq=False)
class _Summoned:
    """The full parameters of one flat parameter.

    Attributes:
        slots, params: empty on ranks that keep the sharded parameters.
        is_everywhere: whether all ranks have full parameters.
        version: of the shard, when the full parameters had its values.
    """

    handle: FlatParamHandle
    slots: Sequence[_Slot]
    params: list[nn.Parameter]
    is_everywhere: bool

    def __post_init__(self) -> None:
        for i, param in enumerate(self.params):
            know_as(self.handle, param, i)  # for contexts inside this one
        self.version = self.handle.shard._version

    def present(self) -> dict[int, nn.Parameter]:
        """Return the modules' current parameters in the places of the full ones, by index.

        Raises:
            ValueError: one of them cannot be written back.
        """
        found: dict[int, list[nn.Parameter]] = {}
        for slot in self.slots:
            value, sharded = slot.module._parameters.get(slot.name), self.handle.sharded_params[slot.index]
            if value is None or value.shape != sharded.shape:
                shape = None if value is None else tuple(value.shape)
                raise MisuseError(
                    f"summon_full_params(): {slot.fqn} was replaced by a value of shape {shape}, but the sharded "
                    f"parameter has shape {tuple(sharded.shape)}: write into the parameter, or replace it by one of "
                    "the same shape"
                )
            values = found.setdefault(slot.index, [])
            if values and values[0] is not value:
                raise MisuseError(
                    f"summon_full_params(): {slot.fqn} and another name of the same (tied) parameter now hold "
                    "different tensors: assign the same tensor to both names, or write into it"
                )
            values.append(value)
        return {index: values[0] for index, values in found.items()}

    def write_back(self, present: dict[int, nn.Parameter], with_grads: bool) -> None:
        """Copy the elements of this rank's local shards into the shard."""
        handle = self.handle
        if handle.shard._version != self.version:
            raise MisuseRuntimeError(
                f"summon_full_params(): one of the sharded parameters {', '.join(handle.names)} was written to inside "
                "the context (optimizer.step()?). Edits of the full parameters would undo that, so they were dropped: "
                "step outside the context"
            )
        with torch.no_grad():
            for i, param in present.items():
                sharded = handle.sharded_params[i]
                if isinstance(sharded, CompositeDTensor):
                    sharded.copy_(param.detach())
                else:
                    local_elements(sharded).copy_(self._local_of(param.detach(), i))
                if not with_grads:
                    continue
                if param.grad is None:
                    sharded.grad = None
                elif sharded.grad is None:
                    local = self._local_of(param.grad, i)
                    copied = local.to(handle.shard.device, handle.gradient.dtype, copy=True)
                    sharded.grad = make_gradient(copied, sharded)
                else:
                    local_elements(sharded.grad).copy_(self._local_of(param.grad, i))
        note_write_of_all_ranks(handle.shard)
        self.version = handle.shard._version

    def _local_of(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        handle, sharded = self.handle, self.handle.sharded_params[index]
        if isinstance(sharded, RaggedDTensor):  # of this shard group, if tensor parallelism has split it too
            whole = inner_of_whole(whole, sharded._spec)
        return handle.layout.own_elements(index, whole, handle.mesh.shard_rank).view(handle.local_shards[index][2])


@checked()
@contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside this context the parameters below ``module`` are ordinary, full ``nn.Parameter`` s, in their original
    dtype and shape.

    ``module.state_dict()`` returns them too. At the end the modules get their sharded parameters back, the same objects
    as before. No forward may run inside. Contexts nest: an inner one uses the parameters that an outer one gathered.
    Edits are kept even if an exception leaves the context.

    Ranks: all ranks of the mesh enter it together (they first wait for each other, for a bounded time). Leaving does
    not communicate.

    Memory: all unsharded parameters, on every rank, including those split by tensor parallelism, which are plain
    tensors inside the context.

    Args:
        module: root of the tree; a sharded module, one above sharded ones, or one inside a group.
        recurse: whether parameters of submodules are included.
        writeback: copy the full parameters (or the parameters that replaced them) into the shards at the end. Each rank
            copies its own elements: make the same edits on all ranks.
        rank0_only: only rank 0 of the mesh gets full parameters, and the others keep the sharded ones; needs
            ``writeback=False``.
        offload_to_cpu: put the full parameters on the CPU.
        with_grads: give the full parameters full gradients where the sharded ones have gradients.

    Raises:
        ValueError: ``rank0_only`` with ``writeback``; a parameter was replaced by one of another shape.
        RuntimeError: a rank did not arrive; a forward or backward is running; a gradient was not reduced yet
            (``with_grads`` after ``no_sync``); or the sharded parameters were written to inside the context.
    """
    if rank0_only and writeback:
        raise MisuseError(
            "summon_full_params(rank0_only=True) needs writeback=False: the other ranks have no full parameters to "
            "write their shards from"
        )
    for state in _get_fsdp_states(module):
        state.end_left()
    for state in _get_fsdp_states(module) if recurse else []:
        _make_ready(state)  # outer groups first: tied parameters may move to them
    slots = _slots_below(module, recurse)
    handles = list(dict.fromkeys(handle for handle, _ in slots))
    for handle in handles:
        owner = state_of(handle)
        if owner is None:
            raise MisuseRuntimeError("summon_full_params(): the sharded module of a parameter no longer exists")
        _make_ready(owner)
    options = (recurse, writeback, rank0_only, offload_to_cpu, with_grads)
    for mesh in {id(handle.mesh.peers): handle.mesh for handle in handles}.values():
        if mesh.has_peers:
            _meet(mesh.peers, handles, options)
    views: list[SlotView] = []
    inherited: list[_Summoned] = [handle.summoned for handle in handles if handle.summoned is not None]
    if rank0_only is False and any(not item.is_everywhere for item in inherited):
        raise MisuseError(
            "summon_full_params() inside another one with rank0_only=True: the other ranks have no full parameters"
        )
    own: list[_Summoned] = []
    is_shown = False  # else there is nothing to write back: the slots still hold the sharded parameters
    try:
        for handle in handles:
            if handle.summoned is None:
                own_slots = [slot for item, slot in slots if item is handle]
                handle.summoned = _summon(handle, own_slots, rank0_only, offload_to_cpu, with_grads)
                own.append(handle.summoned)
        views = _put(own)
        is_shown = True
        yield
    finally:
        # Also after an exception: edits are kept. If a new value does not fit, modules get their sharded parameters
        # back before that raises.
        try:
            present = []
            if writeback and is_shown:
                present = [(item, item.present()) for item in (*own, *inherited)]
        finally:
            for view in views:
                view.restore()
            for item in own:
                item.handle.summoned = None
                for param in item.params:
                    forget(param)
        for item, values in present:
            item.write_back(values, with_grads)


def _slots_below(module: nn.Module, recurse: bool) -> list[tuple[FlatParamHandle, _Slot]]:
    found = []
    for prefix, item in module.named_modules() if recurse else [("", module)]:
        for name, param in item._parameters.items():
            place = handle_of(param) if param is not None else None
            if place is not None:
                handle, index = place
                found.append((handle, _Slot(item, name, f"{prefix}.{name}" if prefix else name, index)))
    return found


def _make_ready(state: _FSDPState) -> None:
    """Apply the user's changes since the last iteration; raise if the group is busy."""
    if state.is_busy:
        raise MisuseRuntimeError(
            f"summon_full_params(): a forward or backward of the fully_shard group {state.name} is running (or was "
            "interrupted: run a forward first, which recovers from it)"
        )
    if all(handle.summoned is None for handle in state._handles):
        owner = state.modules[0]()
        assert owner is not None
        enter_alone(state, owner)


def _meet(group: dist.ProcessGroup, handles: Sequence[FlatParamHandle], options: tuple[bool, ...]) -> None:
    asked = f"{options} of {', '.join(handle.name_of(0) for handle in handles)}"

    def explain(rank: int, ours: str, theirs: str) -> str:
        return (
            f"summon_full_params(): rank 0 called it with (recurse, writeback, rank0_only, offload_to_cpu, with_grads) "
            f"= {ours}, rank {rank} with {theirs}: make the same call on every rank"
        )

    meet(group, "summon_full_params", asked, lambda _: "", asked, explain)


def _summon(
    handle: FlatParamHandle, slots: Sequence[_Slot], rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> _Summoned:
    """Gather one flat parameter, on the ranks that want it."""
    grads = [sharded.grad for sharded in handle.sharded_params]
    for grad in grads:
        if isinstance(grad, UnreducedGradient) and with_grads:
            grad.refuse("summon_full_params(with_grads=True)")
    to_cpu = offload_to_cpu and handle.tensor_parallel is None
    flat = gather_flat(handle, handle.shard.detach(), rank0_only, to_cpu)
    flat_grad = None
    if with_grads and any(grad is not None for grad in grads):
        shard_grad = handle.shard.new_zeros(handle.layout.shard_numel, dtype=handle.gradient.dtype)
        for grad, view in zip(grads, handle.views_of(shard_grad), strict=True):
            if grad is not None:
                view.copy_(local_elements(grad))
        flat_grad = gather_flat(handle, shard_grad, rank0_only, to_cpu)
    is_everywhere = not rank0_only or handle.mesh.peers.size() == 1
    views = [] if flat is None else wholes_of(handle, flat)
    gradients = None if flat_grad is None else handle.full_views_of(flat_grad)
    if flat is not None and handle.tensor_parallel is not None:
        views = handle.tensor_parallel.wholes(views)
        gradients = None if gradients is None else handle.tensor_parallel.wholes(gradients)
    if flat is None or (rank0_only and not _is_first(handle)):
        return _Summoned(handle, (), [], is_everywhere)
    params = []
    for i, (sharded, view) in enumerate(zip(handle.sharded_params, views, strict=True)):
        param = nn.Parameter(view.cpu() if offload_to_cpu else view, requires_grad=sharded.requires_grad)
        restore_attributes(sharded, param)
        expect_gradient(param, handle.gradient.dtype)
        if gradients is not None and grads[i] is not None:
            param.grad = gradients[i].cpu() if offload_to_cpu else gradients[i]
        params.append(param)
    return _Summoned(handle, slots, params, is_everywhere)


def _is_first(handle: FlatParamHandle) -> bool:
    """Whether this rank gets full parameters under ``rank0_only``: one that has the first replica's first shard."""
    mesh, own = handle.mesh, handle.tensor_parallel
    if own is not None:
        return own.is_on_first_rank
    return mesh.peers.size() == mesh.data_world_size or mesh.rank == 0


def _put(summoned: Sequence[_Summoned]) -> list[SlotView]:
    """Let the modules show the full parameters."""
    by_module: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for item in summoned:
        for slot in item.slots:
            by_module.setdefault(slot.module, {})[slot.name] = item.params[slot.index]
    return [SlotView(module, params) for module, params in by_module.items()]
