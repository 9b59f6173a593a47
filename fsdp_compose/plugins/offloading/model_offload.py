"""``offload_model()`` and ``onload_model()``: park a model in host memory while something else needs the device.

Each storage of the model and its optimizer is copied as a whole, and then swaps its pointer with an empty storage that
refuses access, as freed unsharded memory does. Every tensor, view and dict remains the same object, so optimizers keep
working. There is one copy per storage: a shard, a flat gradient, a tensor of an optimizer's state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Union

import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer

from ..._arguments import checked
from ..._torch import is_wrapper, memory_exchange, refuse_access
from ...core.comm import forget_for, kept_for, known_for
from ...core.flat import FlatParamHandle, host_memory, local_of
from ...core.group import _FSDPState, _get_fsdp_states, put_to_sleep, wake
from ...core.ragged.ops.operands import tensors_in
from ...errors import MisuseError, MisuseRuntimeError, MisuseTypeError
from ..parameter_classes import inner_tensors

Optimizers = Union[Optimizer, "Iterable[Optimizer]", None]


@checked()
def offload_model(module: nn.Module, optimizer: Optimizers = None, *, pin_memory: bool = True) -> None:
    """Move a sharded model and its optimizer's state to host memory until ``onload_model``.

    Use it while another model or another program needs the device. It moves shards, flat gradients, all other
    parameters, buffers and gradients below ``module``, and the optimizers' states. It frees gathered parameters and
    pooled buffers. Gradients are kept; call ``zero_grad()`` first if you do not need them. All tensors remain the same
    objects, and reading their elements raises until ``onload_model``. State that already lives in host memory
    (``CPUOffloadPolicy``, ``offload_optimizer_states``) is not moved. The memory of process groups (NCCL) is not
    affected. ``torch.cuda.empty_cache()`` returns the freed memory to the device.

    Ranks: every rank makes the same call, between iterations; no communication.

    Args:
        module: root of the tree; no other part of its model may run in the meantime.
        optimizer: one optimizer or several.
        pin_memory: use page-locked host memory if the device is an accelerator.

    Raises:
        TypeError: ``module`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: nothing below ``module`` is sharded.
        RuntimeError: the model is already offloaded; a forward or backward is running (or was interrupted); the call is
            inside ``summon_full_params()``; or gradients were accumulated without gradient sync.
    """
    optimizers = _checked(module, optimizer, "offload")
    states = _get_fsdp_states(module)
    if not states:
        raise MisuseError(f"offload_model(): there is no fully_shard group below this {type(module).__name__}")
    for state in states:
        _refuse_unless_idle(state)
    handles = [handle for state in states for handle in state._handles]
    for state in states:
        _free_gathered(state)
    device = handles[0].mesh.device if handles else torch.device("cpu")
    moved = [handle for handle in handles if not handle.was_moved()]
    storages = _storages(module, handles, optimizers, device)
    sleeping = _Sleeping(states, moved, optimizers, storages, device, pin_memory and device.type != "cpu")
    put_to_sleep(states)
    kept_for(module, _Sleeping, lambda: sleeping)


@checked()
def onload_model(module: nn.Module, optimizer: Optimizers = None) -> None:
    """Move everything that ``offload_model`` moved back to the device, into the same tensors.

    Ranks: every rank makes the same call; no communication.

    Args:
        module: the module given to ``offload_model``.
        optimizer: the optimizers given to ``offload_model``. You may leave them out: they are remembered.

    Raises:
        TypeError: ``module`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: an optimizer was not given to ``offload_model``.
        RuntimeError: the module is not offloaded.
        torch.OutOfMemoryError: the device has too little memory: free some and call it again.
    """
    optimizers = _checked(module, optimizer, "onload")
    sleeping = known_for(module, _Sleeping)
    if sleeping is None:
        raise MisuseRuntimeError(
            f"onload_model(): offload_model() was not called on this {type(module).__name__}, or onload_model() has "
            "been called since"
        )
    for item in optimizers:
        if not any(item is known for known in sleeping.optimizers):
            raise MisuseError(
                f"onload_model(): this {type(item).__name__} was not given to offload_model(): give both calls the "
                "same optimizers"
            )
    sleeping.end()
    forget_for(module, _Sleeping)


def _checked(module: Any, optimizer: Any, caller: str) -> list[Optimizer]:
    if optimizer is None:
        return []
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    for item in optimizers:
        if not isinstance(item, Optimizer):
            raise MisuseTypeError(f"{caller}(): expected torch.optim.Optimizers, got {type(item).__name__}")
    return optimizers


def _refuse_unless_idle(state: _FSDPState) -> None:
    if state.persistent.is_asleep:
        raise MisuseRuntimeError(
            f"offload_model(): the fully_shard group {state.name} is already offloaded: call onload_model() first"
        )
    if state.is_busy:
        raise MisuseRuntimeError(
            f"offload_model(): a forward or backward of the fully_shard group {state.name} is running (or was "
            "interrupted: run a forward first, which recovers from it)"
        )
    for handle in state._handles:
        if handle.summoned is not None:
            raise MisuseRuntimeError(
                f"offload_model(): called inside summon_full_params() of the fully_shard group {state.name}"
            )
        handle.pending_gradients.follow_zero_grad()
        if handle.pending_gradients.accumulation is not None:
            handle.pending_gradients.accumulation.show()
            raise MisuseRuntimeError(
                f"offload_model(): {handle.name_of(0)} and its group hold gradients accumulated without gradient sync, "
                "unsharded on each rank: run the last backward of the accumulation with sync, or call zero_grad()"
            )


def _free_gathered(state: _FSDPState) -> None:
    """Free gathered parameters, including kept ones; the next forward gathers them again."""
    root = state.root
    if root is not None:
        root.communicator.finish()
    for handle in state._handles:
        handle.storage.synchronize()
        handle.gradient.release_if_dropped()
        if root is not None:
            root.communicator.wait(handle)
        handle.unsharded.drop_post_forward()
        if handle.unsharded.is_allocated and not handle.unsharded.never_freed and not handle.unsharded.is_meta:
            handle.unsharded.free()


def _storages(
    module: nn.Module, handles: Sequence[FlatParamHandle], optimizers: Sequence[Optimizer], device: torch.device
) -> list[torch.UntypedStorage]:
    """Return the storages that the model and the optimizers have on ``device``, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(module, handles, optimizers):
        for inner in _inner(tensor.detach()):
            if inner.device == device and inner.layout == torch.strided:
                storage = inner.untyped_storage()
                if storage.nbytes():
                    found.setdefault(StorageWeakRef(storage).cdata, storage)
    return [*found.values()]


def _tensors(
    module: nn.Module, handles: Sequence[FlatParamHandle], optimizers: Sequence[Optimizer]
) -> Iterator[torch.Tensor]:
    on_host, with_host_gradients = set[int](), set[int]()
    for handle in handles:
        if handle.storage.is_host:
            on_host.update(map(id, (*handle.sharded_params, *[item.parameter for item in handle.segments])))
        else:
            yield handle.shard
        if handle.storage.has_host_gradients:
            with_host_gradients.update(map(id, handle.sharded_params))
        elif handle.gradient.memory.flat is not None:  # even if no gradient uses the buffer at the moment
            yield handle.gradient.memory.flat
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in on_host:
            yield tensor
            if tensor.grad is not None and id(tensor) not in with_host_gradients:
                yield tensor.grad
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            if id(param) not in on_host:
                yield from tensors_in(state)


def _inner(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors whose memory holds the elements of ``tensor``."""
    local = local_of(tensor)
    if is_wrapper(local):
        for part in inner_tensors(local).values():
            yield from _inner(part)
    else:
        yield local


class _Sleeping:
    """An offloaded model: its storages with their copies in host memory.

    Args:
        handles: those whose sharded parameters were not moved by the user.
        optimizers: they must not step meanwhile.
        pins: use page-locked memory.
    """

    def __init__(
        self,
        states: list[_FSDPState],
        handles: list[FlatParamHandle],
        optimizers: list[Optimizer],
        storages: Sequence[torch.UntypedStorage],
        device: torch.device,
        pins: bool,
    ) -> None:
        # Weak references: states and handles refer to the module, for which this object is kept.
        self._states, self._handles = [*map(weakref.ref, states)], [*map(weakref.ref, handles)]
        self.optimizers, self._device = optimizers, device
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        for storage in storages:
            copied = host_memory(storage.nbytes(), torch.uint8, pins)
            copied.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage), non_blocking=True)
            self._moved.append((storage, copied))
        # The copies were issued without waiting: memory may be freed only when all are complete.
        self._synchronize()
        for storage, _ in self._moved:
            other = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
            refuse_access(other, states[0].sleeping_error)  # if torch can
            memory_exchange(storage, other)()
        self._guards = [item.register_step_pre_hook(self._refuse_step) for item in optimizers]

    def end(self) -> None:
        read = []  # keeps host memory alive until the copies from it are complete
        # One after the other: if the device has too little memory, a second call continues with the rest.
        while self._moved:
            storage, copied = self._moved[-1]
            fresh = torch.empty(copied.numel(), dtype=torch.uint8, device=self._device)
            fresh.copy_(copied, non_blocking=True)
            memory_exchange(storage, fresh.untyped_storage())()
            read.append(self._moved.pop())
        self._synchronize()
        while self._guards:
            self._guards.pop().remove()
        for reference in self._handles:
            handle = reference()
            if handle is not None:
                handle.snapshot.follow_addresses()
        wake(self._live_states())

    def _live_states(self) -> list[_FSDPState]:
        return [state for reference in self._states if (state := reference()) is not None]

    def _refuse_step(self, *_: Any) -> None:
        for state in self._live_states():
            state.refuse_sleeping()

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device.type).synchronize(self._device)
