"""Optimizer state in host memory, and the step on the device: chunk after chunk of the state is copied in, stepped and
copied out.

``offload_optimizer_states`` exchanges an optimizer's ``step``. What it does to one chunk is the optimizer's own step,
over a parameter that is a part of one of its own (a plain 1-D view), with that part of the state: every optimizer
that treats all elements alike can be streamed, in whatever implementation it chooses, and gives the bits it would give
anyway. What is one number for each parameter (the count of steps) begins at the same value for every chunk, and moves
once::

    host     |state 0|state 1|state 2|state 3|          two slots on the device:
    copy in  |   1   |   2   |   3   |
    step     |   0   |   1   |   2   |   3   |          slot 0 has chunks 0, 2, ..., slot 1 has 1, 3, ...
    copy out         |   0   |   1   |   2   |   3   |

Shards and gradients that live in host memory too (``CPUOffloadPolicy``) are streamed with the state. Note [Slots]. A
slot's memory belongs to the compute stream. Copies into it wait for the copies out that its last chunk has left, the
step for the copies in, the copies out for the step; and the host for all copies out, before it looks at state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from .._torch import dtensor_spec, make_dtensor, same_storage
from ..flat import FlatParamHandle, handle_of, handle_of_segment, host_memory, local_of, streams_of
from ..ragged import RaggedDTensor, note_write_of_all_ranks
from .flat_parameters import refuse_unless_elementwise

_ALIGNMENT = 1024  # elements: chunks end where vector instructions and fused kernels end their work, too
_UNKNOWN_STATES = 2  # for each parameter, as long as there is no state to count


def offload_optimizer_states(
    optimizer: Optimizer, *, chunk_bytes: int = 64 << 20, pin_memory: bool = True
) -> Optimizer:
    """Keep the state of ``optimizer`` in host memory; its steps run on the device that computes, chunk by chunk.

    The bits are those of the ordinary step. On the device there are two chunks at most beside parameters and
    gradients, each of ``chunk_bytes``. The state's tensors stand in ``optimizer.state`` as always (DTensors, whose
    local tensors are in host memory): state dicts and checkpoints are as always, and what is loaded goes to host
    memory. Best over ``flat_parameters(model)``, whose chunks are long; with parameters one by one, each is a chunk or
    more.

    With ``fully_shard(offload_policy=CPUOffloadPolicy())`` shards and gradients are in host memory, too, and are
    streamed with the state, where the ordinary step would run on the CPU; with ``CPUOffloadPolicy(parameters=False)``
    the gradients alone.

    Call it before learning-rate schedulers are built, which exchange ``step`` as well. A step returns when its state
    has come to host memory.

    Ranks: every rank, alike; no communication.

    Args:
        optimizer: one that treats every element alike (see ``flat_parameters``); also after steps.
        chunk_bytes: of all that is copied in for a chunk together.
        pin_memory: page-locked host memory, where the device is an accelerator.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: it is no optimizer, or not known to treat every element alike.
        ValueError: ``chunk_bytes`` is not positive, or ``step`` was exchanged already.

    Example::

        optimizer = offload_optimizer_states(torch.optim.AdamW(flat_parameters(model), fused=True))
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload_optimizer_states(): expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0:
        raise ValueError(f"offload_optimizer_states(chunk_bytes={chunk_bytes!r}): expected a positive number of bytes")
    refuse_unless_elementwise(optimizer, "step on parts of its state (offload_optimizer_states())")
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"offload_optimizer_states(): step() of this {type(optimizer).__name__} was exchanged already, by an "
            "earlier call or a scheduler: call offload_optimizer_states() once, before schedulers are made"
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
        group: the optimizer's, of the parameter.
        param: of the optimizer; ``elements`` and ``gradient`` are what this rank has of it and of its gradient, 1-D.
        is_host, has_host_gradient: what of these two is in host memory.
        device: that steps.
        state: the optimizer's, as it was before the step.
        states: of it, what is kept for each element, in host memory, 1-D.
        stepped: the same after the step, filled chunk by chunk; in the same memory, where there was some.
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


@dataclass
class _Chunk:
    """A range of the elements of one parameter."""

    training: _Training
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.training.elements.numel()


@dataclass
class _Slot:
    """Memory on the device for one chunk at a time; see Note [Slots].

    Attributes:
        memory: by what it is for, and dtype.
        parts: of the chunk that is in it.
        ready, left: events after the last copy in, and after the last copy out.
        leaving: what is being copied out.
    """

    memory: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
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
        """As ``optimizer.step()``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trainings = [*self._trainings(optimizer)]
        run = _own_step(optimizer)
        for device in dict.fromkeys(training.device for training in trainings):
            lane = self._lanes.setdefault(device, _Lane(device))
            chunks = self._chunks(training for training in trainings if training.device == device)
            with torch.no_grad():
                self._stream(optimizer, run, lane, chunks)
        handles = dict.fromkeys(filter(None, (_handle_of(training.param) for training in trainings)))
        note_write_of_all_ranks([tensor for handle in handles for tensor in (handle.shard, *handle.sharded_params)])
        return loss

    def take_over(self, optimizer: Optimizer) -> None:
        """Bring the state that there is to host memory."""
        for param, state in optimizer.state.items():
            if isinstance(param, torch.Tensor):
                for key, value in state.items():
                    if _is_of_elements(param, key, value):
                        local = local_of(value).detach()
                        state[key] = _placed_like(param, self._to_host(local.reshape(-1), param).view(local.shape))

    def _to_host(self, local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        host = self._memory(local.numel(), local.dtype, _device_of(param))
        host.copy_(local)
        return host

    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return host_memory(numel, dtype, self._pins and device.type not in ("cpu", "meta"))

    def _trainings(self, optimizer: Optimizer) -> Iterator[_Training]:
        """The parameters that have a gradient."""
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
        training, parts = chunk.training, slot.parts
        part = nn.Parameter(parts.pop(_ELEMENTS))
        part.grad = parts.pop(_GRADIENT)
        state = {key: parts[key] if key in parts else _copy_of(value) for key, value in training.state.items()}
        groups, states = optimizer.param_groups, optimizer.state
        try:
            optimizer.param_groups = [{**training.group, "params": [part]}]
            optimizer.state = defaultdict(dict, {part: state} if state else {})
            run(optimizer)
            stepped = optimizer.state.get(part, {})
        finally:
            optimizer.param_groups, optimizer.state = groups, states
        leaving = [(training.elements[chunk.start : chunk.stop], part.detach())] if training.is_host else []
        for key, value in stepped.items():
            if isinstance(value, torch.Tensor) and value.shape == part.shape:
                leaving.append((self._state_of(training, key, value)[chunk.start : chunk.stop], value))
        lane.copy_out(slot, leaving)
        if chunk.is_last:
            states[training.param] = {
                key: _placed_like(training.param, training.stepped[key].view(local_of(training.param).shape))
                if key in training.stepped
                else value
                for key, value in stepped.items()
            }

    def _state_of(self, training: _Training, key: str, like: torch.Tensor) -> torch.Tensor:
        """Host memory for what the optimizer keeps as ``key`` for all elements."""
        known = training.stepped.get(key)
        if known is None:
            numel = training.elements.numel()
            known = training.stepped[key] = self._memory(numel, like.dtype, training.device)
        return known


_ELEMENTS, _GRADIENT = " elements", " gradient"  # no keys of state


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
        """Start to bring a chunk to the slot whose turn it is."""
        slot, training = self._slots[0], chunk.training
        self._slots.reverse()
        part = slice(chunk.start, chunk.stop)
        host = {key: state[part] for key, state in training.states.items()}
        slot.parts = {}
        (host if training.is_host else slot.parts)[_ELEMENTS] = training.elements[part]
        (host if training.has_host_gradient else slot.parts)[_GRADIENT] = training.gradient[part]
        targets = {key: self._room(slot, key, source) for key, source in host.items()}
        if self._module is None:
            for key, target in targets.items():
                target.copy_(host[key])
        else:
            # Memory may be new, and the step before the last has computed in it: compute comes first.
            self._in.wait_stream(self._module.current_stream(self._device))
            with self._module.stream(self._in):
                if slot.left is not None:
                    self._in.wait_event(slot.left)
                for key, target in targets.items():
                    target.copy_(host[key], non_blocking=True)
                slot.ready = self._in.record_event()
        slot.parts |= targets
        self._filled.append(slot)

    def _room(self, slot: _Slot, key: str, source: torch.Tensor) -> torch.Tensor:
        memory = slot.memory.get((key, source.dtype))
        if memory is None or memory.numel() < source.numel():
            if memory is not None and slot.left is not None:
                self._module.current_stream(self._device).wait_event(slot.left)  # before it is freed
            memory = torch.empty(source.numel(), dtype=source.dtype, device=self._device)
            slot.memory[key, source.dtype] = memory
        return memory[: source.numel()]

    def take(self) -> _Slot:
        """The slot of the chunk that is to be stepped now, which compute waits for."""
        slot = self._filled.pop(0)
        if self._module is not None:
            self._module.current_stream(self._device).wait_event(slot.ready)
        return slot

    def copy_out(self, slot: _Slot, leaving: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start to bring what was stepped, the second of each pair, to host memory, the first."""
        if self._module is None:
            for host, here in leaving:
                host.copy_(here)
            return
        compute = self._module.current_stream(self._device)
        if slot.left is not None:
            compute.wait_event(slot.left)  # before what left last is freed
        slot.leaving = [here for _, here in leaving]
        self._out.wait_stream(compute)
        with self._module.stream(self._out):
            for host, here in leaving:
                host.copy_(here, non_blocking=True)
            slot.left = self._out.record_event()

    def end(self) -> None:
        """Wait, on the host, until all is in host memory; free the slots."""
        if self._module is not None:
            self._out.synchronize()
        self._slots, self._filled = [_Slot(), _Slot()], []


def _own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step of the optimizer's class, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _handle_of(param: torch.Tensor) -> FlatParamHandle | None:
    place = handle_of(param)
    if place is not None:
        return place[0]
    return handle_of_segment(param)


def _is_in_host_memory(handle: FlatParamHandle, gradient: torch.Tensor) -> bool:
    """Whether a gradient is a part of a flat gradient there, or stands beside a shard there."""
    flat = handle.gradient.buffer.flat
    is_ours = flat is not None and same_storage(flat.untyped_storage(), gradient.untyped_storage())
    return handle.storage.is_host or (handle.storage.has_host_gradients and is_ours)


def _device_of(param: torch.Tensor) -> torch.device:
    """That computes with a parameter."""
    handle = _handle_of(param)
    return local_of(param).device if handle is None else handle.storage.compute_device(handle.shard)


def _is_of_elements(param: torch.Tensor, key: str, value: Any) -> bool:
    """Whether an optimizer keeps ``value`` for each element of a parameter."""
    if not isinstance(value, torch.Tensor):
        return False
    if isinstance(value, DTensor):
        return True
    return not isinstance(param, DTensor) and value.shape == param.shape and (value.dim() > 0 or key != "step")


def _placed_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor sharded like ``param``, of which this rank has ``local``."""
    if isinstance(param, RaggedDTensor):
        return RaggedDTensor(local, param._spec.with_dtype(local.dtype))
    if isinstance(param, DTensor):
        made: torch.Tensor = make_dtensor(DTensor, local, dtensor_spec(param))
        return made
    return local


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
