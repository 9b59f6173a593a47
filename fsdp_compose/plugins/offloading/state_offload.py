"""Optimizer state in host memory, with the step on the device: state is copied in, stepped and copied out in chunks.

``offload_optimizer_states`` replaces an optimizer's ``step``. For each chunk, the new ``step`` runs the optimizer's own
step on a chunk of one of its parameters (a plain 1-D view) with the same chunk of the state. This works for every
elementwise optimizer, in any of its implementations, and gives the same bits as the ordinary step::

    host     |state 0|state 1|state 2|state 3|          two slots on the device:
    copy in  |   1   |   2   |   3   |
    step     |   0   |   1   |   2   |   3   |          slot 0 has chunks 0, 2, ..., slot 1 has 1, 3, ...
    copy out         |   0   |   1   |   2   |   3   |

Shards and gradients that are in host memory too (``CPUOffloadPolicy``) are streamed with the state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..._arguments import checked, size_of
from ..._torch import dtensor_spec, make_dtensor, same_storage
from ...core.comm import streams_of
from ...core.flat import FlatParamHandle, handle_of, handle_of_segment, host_memory, local_of
from ...core.optimizers.flat_parameters import refuse_unless_elementwise
from ...core.ragged import RaggedDTensor, note_write_of_all_ranks
from ...errors import MisuseError

_ALIGNMENT = 1024  # elements: chunks end where vector instructions and fused kernels end their work too
_UNKNOWN_STATES = 2  # assumed states per parameter, as long as there is no state to count


@checked()
def offload_optimizer_states(
    optimizer: Optimizer, *, chunk_bytes: int | str = 64 << 20, pin_memory: bool = True
) -> Optimizer:
    """Keep the state of ``optimizer`` in host memory and run its steps on the compute device, chunk by chunk.

    A step gives the same bits as the ordinary step. Beside parameters and gradients, the device holds at most two
    chunks of ``chunk_bytes`` each. ``optimizer.state`` has the same tensors as usual (DTensors whose local tensors are
    in host memory), so state dicts and checkpoints work as usual, and loaded state goes to host memory. Works best with
    ``flat_parameters(model)``, which makes long chunks; without it, every parameter is at least one chunk of its own.

    With ``fully_shard(offload_policy=CPUOffloadPolicy())``, shards and gradients are in host memory too. They are then
    streamed with the state, whereas the ordinary step would run on the CPU. With ``CPUOffloadPolicy(parameters=False)``
    only the gradients are.

    Call it before you create learning-rate schedulers, which also replace ``step``. A step returns when its state is
    back in host memory.

    Ranks: make the same call on every rank; no communication.

    Args:
        optimizer: an elementwise one (see ``flat_parameters``); it may have stepped already.
        chunk_bytes: size of everything that is copied in for one chunk, in bytes or as ``"64MiB"``.
        pin_memory: use page-locked host memory if the device is an accelerator.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or is not known to be elementwise.
        ValueError: ``chunk_bytes`` is not positive, or ``step`` was already replaced.

    Example::

        optimizer = offload_optimizer_states(torch.optim.AdamW(flat_parameters(model), fused=True))
    """
    chunk_bytes = size_of(chunk_bytes, "offload_optimizer_states(chunk_bytes={})")
    refuse_unless_elementwise(optimizer, "step on parts of its state (offload_optimizer_states())")
    if "step" in optimizer.__dict__:
        raise MisuseError(
            f"offload_optimizer_states(): step() of this {type(optimizer).__name__} was already replaced, by an "
            "earlier call or a scheduler: call offload_optimizer_states() once, before creating schedulers"
        )
    streamed = StreamedStep(chunk_bytes, pin_memory)
    streamed.take_over(optimizer)
    optimizer.register_load_state_dict_post_hook(streamed.take_over)
    optimizer.step = MethodType(Optimizer.profile_hook_step(streamed.step), optimizer)  # type: ignore[method-assign]
    return optimizer


@dataclass
class _Training:
    """One parameter in one step.

    Attributes:
        group: the optimizer's parameter group that has it.
        param: the optimizer's parameter; ``elements`` and ``gradient`` are this rank's shard of it and of its gradient,
            1-D.
        is_host, has_host_gradient: whether ``elements`` and ``gradient`` are in host memory.
        device: the device that steps.
        state: the optimizer's state of the parameter, before the step.
        states: what of it is kept per element, in host memory, 1-D.
        stepped: ``states`` after the step, filled chunk by chunk, in the same memory if there was any.
    """

    group: dict[str, Any]
    param: torch.Tensor
    elements: torch.Tensor
    gradient: torch.Tensor
    is_host: bool
    has_host_gradient: bool
    device: torch.device
    state: dict[str, Any]
    states: dict[str, torch.Tensor]
    stepped: dict[str, torch.Tensor]


class _Chunk(NamedTuple):
    """A range of the elements of one parameter."""

    training: _Training
    start: int
    stop: int


@dataclass
class _Slot:
    """Memory on the device for one chunk at a time; see Note [Slots].

    Attributes:
        memory: buffers, by key of the state and dtype.
        views: of the buffers, with the present chunk.
        ready, left: events after the last copy in, and after the last copy out.
        leaving: tensors that are being copied out; kept alive for that long.
    """

    memory: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    ready: Any = None
    left: Any = None
    leaving: list[torch.Tensor] = field(default_factory=list)


class StreamedStep:
    """The step of an optimizer whose state is in host memory.

    Args:
        chunk_bytes, pin_memory: see ``offload_optimizer_states``.
    """

    def __init__(self, chunk_bytes: int, pin_memory: bool) -> None:
        self._chunk_bytes, self._pins = chunk_bytes, pin_memory
        self._lanes: dict[torch.device, _Lane] = {}

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Do what ``optimizer.step()`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trainings = [*self._trainings(optimizer)]
        # Its own step, without torch's hooks around it: these run once for the whole step, and not for every chunk.
        run: Any = type(optimizer).step
        run = run.__wrapped__ if getattr(run, "hooked", False) else run
        for device in dict.fromkeys(training.device for training in trainings):
            lane = self._lanes.setdefault(device, _Lane(device))
            chunks = self._chunks(training for training in trainings if training.device == device)
            with torch.no_grad():
                self._stream(optimizer, run, lane, chunks)
        handles = dict.fromkeys(filter(None, (_handle_of(training.param) for training in trainings)))
        note_write_of_all_ranks([tensor for handle in handles for tensor in (handle.shard, *handle.sharded_params)])
        return loss

    def take_over(self, optimizer: Optimizer) -> None:
        for param, state in optimizer.state.items():
            if isinstance(param, torch.Tensor):
                for key, value in state.items():
                    if _is_of_elements(param, key, value):
                        local = local_of(value).detach()
                        host = self._memory(local.numel(), local.dtype, _device_of(param))
                        host.copy_(local.reshape(-1))
                        state[key] = _placed_like(param, host.view(local.shape))

    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return host_memory(numel, dtype, self._pins and device.type not in ("cpu", "meta"))

    def _trainings(self, optimizer: Optimizer) -> Iterator[_Training]:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                handle, state = _handle_of(param), optimizer.state.get(param, {})
                states = {
                    key: local_of(value).view(-1) for key, value in state.items() if _is_of_elements(param, key, value)
                }
                yield _Training(
                    group,
                    param,
                    local_of(param).detach().view(-1),
                    local_of(param.grad).detach().reshape(-1),
                    handle is not None and handle.storage.is_host,
                    handle is not None and _is_in_host_memory(handle, local_of(param.grad)),
                    _device_of(param),
                    state,
                    states,
                    dict(states),
                )

    def _chunks(self, trainings: Iterable[_Training]) -> Iterator[_Chunk]:
        for training in trainings:
            numel, size = training.elements.numel(), training.elements.element_size()
            sizes = [state.element_size() for state in training.states.values()] or [size] * _UNKNOWN_STATES
            per_element = sum(sizes) + size * (training.is_host + training.has_host_gradient)
            length = max(self._chunk_bytes // per_element // _ALIGNMENT, 1) * _ALIGNMENT
            # A rank without elements of the parameter steps on an empty chunk: it has a step count like the others.
            for start in range(0, max(numel, 1), length):
                yield _Chunk(training, start, min(start + length, numel))

    def _stream(
        self, optimizer: Optimizer, run: Callable[[Optimizer], Any], lane: _Lane, chunks: Iterator[_Chunk]
    ) -> None:
        present = next(chunks, None)
        if present is not None:
            lane.copy_in(present)
        while present is not None:
            following = next(chunks, None)
            slot = lane.take()
            if following is not None:
                lane.copy_in(following)
            self._step_chunk(optimizer, run, lane, slot, present)
            present = following
        lane.end()

    def _step_chunk(
        self, optimizer: Optimizer, run: Callable[[Optimizer], Any], lane: _Lane, slot: _Slot, chunk: _Chunk
    ) -> None:
        training, views = chunk.training, slot.views
        param = nn.Parameter(views.pop(_ELEMENTS))
        param.grad = views.pop(_GRADIENT)
        # What is one number per parameter (the step count) starts from the same value for every chunk: it changes once.
        state = {
            key: views[key] if key in views else item.clone() if isinstance(item, torch.Tensor) else item
            for key, item in training.state.items()
        }
        groups, states = optimizer.param_groups, optimizer.state
        try:
            optimizer.param_groups = [{**training.group, "params": [param]}]
            optimizer.state = defaultdict(dict, {param: state} if state else {})
            run(optimizer)
            stepped = optimizer.state.get(param, {})
        finally:
            optimizer.param_groups, optimizer.state = groups, states
        leaving = [(training.elements[chunk.start : chunk.stop], param.detach())] if training.is_host else []
        for key, value in stepped.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                if key not in training.stepped:
                    training.stepped[key] = self._memory(training.elements.numel(), value.dtype, training.device)
                leaving.append((training.stepped[key][chunk.start : chunk.stop], value))
        lane.copy_out(slot, leaving)
        if chunk.stop == training.elements.numel():  # the last one
            states[training.param] = {
                key: _placed_like(training.param, training.stepped[key].view(local_of(training.param).shape))
                if key in training.stepped
                else value
                for key, value in stepped.items()
            }


_ELEMENTS, _GRADIENT = " elements", " gradient"  # the space keeps them apart from keys of the optimizer's state


# Note [Slots]. A slot's memory belongs to the compute stream. Copies into a slot wait until its previous chunk has been
# copied out. The step waits for the copies in, the copies out wait for the step, and the host waits for all copies out
# before it looks at the state.
class _Lane:
    """Two slots of one device, and the streams that fill and empty them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = streams_of(device)
        self._in: Any = self._module.Stream(device) if self._module else None
        self._out: Any = self._module.Stream(device) if self._module else None
        self._slots = [_Slot(), _Slot()]
        self._filled: list[_Slot] = []

    def copy_in(self, chunk: _Chunk) -> None:
        """Start copying a chunk into the slot whose turn it is."""
        slot, training = self._slots[0], chunk.training
        self._slots.reverse()
        span = slice(chunk.start, chunk.stop)
        host = {key: state[span] for key, state in training.states.items()}
        slot.views = {}
        (host if training.is_host else slot.views)[_ELEMENTS] = training.elements[span]
        (host if training.has_host_gradient else slot.views)[_GRADIENT] = training.gradient[span]
        targets = {key: self._room(slot, key, source) for key, source in host.items()}
        if self._module is None:
            for key, target in targets.items():
                target.copy_(host[key])
        else:
            # The slot's memory belongs to the compute stream, which may have just allocated it, or used it in the step
            # before the last: wait for compute first.
            self._in.wait_stream(self._module.current_stream(self._device))
            with self._module.stream(self._in):
                if slot.left is not None:
                    self._in.wait_event(slot.left)
                for key, target in targets.items():
                    target.copy_(host[key], non_blocking=True)
                slot.ready = self._in.record_event()
        slot.views |= targets
        self._filled.append(slot)

    def _room(self, slot: _Slot, key: str, source: torch.Tensor) -> torch.Tensor:
        memory = slot.memory.get((key, source.dtype))
        if memory is None or memory.numel() < source.numel():
            if memory is not None and slot.left is not None:
                # Freeing gives the memory back to the compute stream while a copy out may still read it.
                self._module.current_stream(self._device).wait_event(slot.left)
            memory = torch.empty(source.numel(), dtype=source.dtype, device=self._device)
            slot.memory[key, source.dtype] = memory
        return memory[: source.numel()]

    def take(self) -> _Slot:
        """The slot of the next chunk to step; the compute stream waits until it is filled."""
        slot = self._filled.pop(0)
        if self._module is not None:
            self._module.current_stream(self._device).wait_event(slot.ready)
        return slot

    def copy_out(self, slot: _Slot, leaving: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start copying stepped tensors to host memory; each pair is (host memory, tensor on the device)."""
        if self._module is None:
            for host, here in leaving:
                host.copy_(here)
            return
        compute = self._module.current_stream(self._device)
        if slot.left is not None:
            compute.wait_event(slot.left)  # the next line frees the tensors of the previous copy out
        slot.leaving = [here for _, here in leaving]
        self._out.wait_stream(compute)
        with self._module.stream(self._out):
            for host, here in leaving:
                host.copy_(here, non_blocking=True)
            slot.left = self._out.record_event()

    def end(self) -> None:
        """Block the host until everything is in host memory, then free the slots."""
        if self._module is not None:
            self._out.synchronize()
        self._slots, self._filled = [_Slot(), _Slot()], []


def _handle_of(param: torch.Tensor) -> FlatParamHandle | None:
    place = handle_of(param)
    return handle_of_segment(param) if place is None else place[0]


def _is_in_host_memory(handle: FlatParamHandle, gradient: torch.Tensor) -> bool:
    """Whether a gradient is in host memory: in a flat gradient there, or its shard is there."""
    flat = handle.gradient.memory.flat
    is_ours = flat is not None and same_storage(flat.untyped_storage(), gradient.untyped_storage())
    return handle.storage.is_host or (handle.storage.has_host_gradients and is_ours)


def _device_of(param: torch.Tensor) -> torch.device:
    handle = _handle_of(param)
    return local_of(param).device if handle is None else handle.storage.compute_device(handle.shard)


def _is_of_elements(param: torch.Tensor, key: str, value: Any) -> bool:
    """Whether ``value`` is state that an optimizer keeps per element of a parameter."""
    if not isinstance(value, torch.Tensor):
        return False
    if isinstance(value, DTensor):
        return True
    # The step count of a 0-dim parameter has the parameter's shape.
    return not isinstance(param, DTensor) and value.shape == param.shape and (value.dim() > 0 or key != "step")


def _placed_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded like ``param`` and has ``local`` on this rank."""
    if isinstance(param, RaggedDTensor):
        return RaggedDTensor(local, param._spec.with_dtype(local.dtype))
    return make_dtensor(DTensor, local, dtensor_spec(param)) if isinstance(param, DTensor) else local
