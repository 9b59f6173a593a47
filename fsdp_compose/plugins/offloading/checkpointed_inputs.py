"""``offload_checkpointed_inputs``: what activation checkpointing keeps of a block, its inputs, waits in host memory.

``torch.utils.checkpoint`` saves the inputs of what it will recompute as autograd saves tensors, so hooks for saved
tensors see them, and nothing else if they are set around the call of the checkpoint function alone::

    forward    block 0          block 1          block 2
               input 0 -> host  input 1 -> host  ...             copied while the block computes
    backward                    block 1          block 0
                 host -> input 1   host -> input 0               copied while the block after it computes

At most two inputs wait on the device to be copied out, and one is copied back ahead.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..._arguments import checked, size_of
from ..._torch import has_saved_tensors_hooks, storage_id
from ...core.comm import streams_of
from ...core.flat import host_memory
from ...errors import MisuseError

# The attributes by which modules call a checkpoint function: of torch's ``CheckpointWrapper``, and of transformers.
_ATTRIBUTES = ("checkpoint_fn", "_gradient_checkpointing_func")


@checked()
def offload_checkpointed_inputs(model: nn.Module, *, min_bytes: int | str = 1 << 20, pin_memory: bool = True) -> int:
    """Keep the inputs of checkpointed blocks in host memory between their forward and their backward.

    Blocks are those in torch's ``checkpoint_wrapper`` and those of transformers after
    ``model.gradient_checkpointing_enable()``: call this afterwards. Around a ``checkpoint(block, x)`` of your own, use
    ``CheckpointedInputs``. Inputs are copied while blocks compute, from and to page-locked memory. No bit of a result
    changes. Between forward and backward a rank keeps nothing of such a block on the device, except the last two.

    Offloaded are the positional tensors of the checkpointed call that require grad, once each if several blocks get the
    same one (the output of an encoder; it must not be written to through ``.data`` in between, which is not noticed, as
    in autograd without this). On the CPU, where host memory is where they are already, this only copies.
    In code that ``torch.compile`` has traced, checkpointing is the compiler's, and nothing is offloaded; compiled
    blocks inside a checkpoint work.

    Ranks: local, no communication.

    Args:
        model: contains the blocks; sharded before or after this call, or not at all.
        min_bytes: smaller tensors, in bytes or as ``"1MB"``, stay on the device.
        pin_memory: use page-locked host memory if the device is an accelerator.

    Returns:
        The number of checkpointed blocks.

    Raises:
        MisuseError: there is none below ``model``.
        MisuseTypeError: ``model`` is no module.
    """
    inputs, count = CheckpointedInputs(min_bytes=min_bytes, pin_memory=pin_memory), 0
    for module in model.modules():
        for name in _ATTRIBUTES:
            function = module.__dict__.get(name)
            if callable(function):
                inner = function.function if isinstance(function, _Offloading) else function  # called once more
                module.__dict__[name] = _Offloading(inner, inputs)
                count += 1
    if not count:
        raise MisuseError(
            f"offload_checkpointed_inputs(): no block below this {type(model).__name__} is checkpointed: call it after "
            "checkpoint_wrapper(block) or model.gradient_checkpointing_enable(). Around checkpoint(block, x) in a "
            "forward of your own, use: with inputs: ..., where inputs = CheckpointedInputs()"
        )
    return count


class _Offloading:
    """A checkpoint function whose saved inputs are offloaded."""

    def __init__(self, function: Callable[..., Any], inputs: CheckpointedInputs) -> None:
        self.function, self._inputs = function, inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        with self._inputs:
            return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Offloading:
        return _Offloading(self.function, self._inputs)


@checked()
class CheckpointedInputs:
    """A context around calls of ``torch.utils.checkpoint.checkpoint`` whose inputs are to wait in host memory::

        self.inputs = CheckpointedInputs()  # one for all blocks: each is copied back while the one after it computes

        def forward(self, x):
            for block in self.blocks:
                with self.inputs:
                    x = checkpoint(block, x, use_reentrant=False)
            return x

    See ``offload_checkpointed_inputs``, which does this for blocks that it finds. Only the checkpoint function belongs
    inside: other tensors that autograd saves there are offloaded too. Inside another checkpoint it does nothing.

    Ranks: local, no communication.

    Args:
        min_bytes: smaller tensors, in bytes or as ``"1MB"``, stay on the device.
        pin_memory: use page-locked host memory if the device is an accelerator.

    Raises:
        RuntimeError: in backward: an input that stayed on the device was modified in place since the forward, or one
            that was offloaded while it was copied.
    """

    def __init__(self, *, min_bytes: int | str = 1 << 20, pin_memory: bool = True) -> None:
        self._min_bytes, self._pins = size_of(min_bytes, "CheckpointedInputs(min_bytes={})", least=0), pin_memory
        self._streams: dict[torch.device, _Streams] = {}
        self._open = threading.local()  # contexts of this thread
        self._call: _Call | None = None

    def __enter__(self) -> CheckpointedInputs:
        context: AbstractContextManager[Any] = nullcontext()
        # Inside another checkpoint, in its forward as in its recomputation, what is saved is that one's.
        if not has_saved_tensors_hooks():
            self._call = _Call(self._call)
            pack = functools.partial(self._pack, self._call)
            context = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed())
        context.__enter__()
        self._open.contexts = [*getattr(self._open, "contexts", ()), context]
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.contexts.pop().__exit__(*error)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedInputs:
        return CheckpointedInputs(min_bytes=self._min_bytes, pin_memory=self._pins)

    def _pack(self, call: _Call, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        is_activation = tensor.requires_grad and not tensor.is_leaf and type(tensor) is torch.Tensor
        if not is_activation or tensor.nbytes < max(self._min_bytes, 1) or not _is_dense(tensor):
            return functools.partial(_unless_written, tensor, tensor._version)
        streams = self._streams.get(tensor.device)
        if streams is None:
            streams = self._streams[tensor.device] = _Streams(tensor.device, self._pins)
        return call.add(tensor, streams).restore


def _unless_written(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """A saved tensor that stays where it is. Autograd does not look for writes to what hooks have packed."""
    error = _error_if_written(tensor, version)
    if error is not None:
        raise error
    return tensor


def _error_if_written(tensor: torch.Tensor, version: int) -> RuntimeError | None:
    if tensor._version == version:
        return None
    return RuntimeError(
        f"an input of a checkpointed block, {tensor.dtype}, {tensor.numel()} elements, was modified by an inplace "
        f"operation before backward: it is at version {tensor._version}; expected version {version}. Write to a copy"
    )


class _Call:
    """The offloaded inputs of one call of a checkpoint function, and of the calls before it."""

    __slots__ = ("__weakref__", "_before", "_tensors")

    def __init__(self, before: _Call | None) -> None:
        # Weakly: a call exists as long as the graph holds an input of it.
        self._before = None if before is None else weakref.ref(before)
        self._tensors: list[weakref.ref[_Offloaded]] = []

    def add(self, tensor: torch.Tensor, streams: _Streams) -> _Offloaded:
        packed = streams.known(tensor)
        if packed is None:
            packed = _Offloaded(tensor, streams, self)
            streams.note(tensor, packed)
            self._tensors.append(weakref.ref(packed))
        return packed

    def prefetch_before(self) -> None:
        """Start copying the inputs of the call before this one back."""
        before = None if self._before is None else self._before()
        for ref in () if before is None else before._tensors:
            packed = ref()
            if packed is not None:
                packed.fetch()


class _Offloaded:
    """A saved tensor in host memory."""

    __slots__ = ("__weakref__", "_call", "_fetched", "_geometry", "_host", "_read", "_streams", "spoiled")

    def __init__(self, tensor: torch.Tensor, streams: _Streams, call: _Call) -> None:
        self._call, self._streams = call, streams
        self._geometry = tensor.shape, tensor.stride()
        self._fetched: tuple[torch.Tensor, Any] | None = None
        self._read: Any = None  # an event after the last copy from host memory
        self.spoiled: RuntimeError | None = None  # it was written to while it was copied
        with torch.no_grad():
            self._host = streams.to_host(tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()), self)

    def fetch(self) -> None:
        """Start copying it back, unless that has been done."""
        if self._fetched is None:
            self._fetched = self._streams.to_device(self._host)
            self._read = self._fetched[1]

    def restore(self) -> torch.Tensor:
        """The tensor on the device. Also starts on those of the call before, whose backward is next."""
        self.fetch()
        if self.spoiled is not None:
            raise self.spoiled
        assert self._fetched is not None
        (flat, event), self._fetched = self._fetched, None
        self._streams.wait(event)
        self._call.prefetch_before()
        return flat.as_strided(*self._geometry)

    def __del__(self) -> None:
        if self._fetched is not None:  # for a backward that does not come: the copy still writes to memory freed here
            self._streams.wait(self._fetched[1])
        self._streams.give_back(self._host, self._read)


class _Streams:
    """Copies between host memory and one device, beside its compute. Device memory belongs to the compute stream, which
    waits for a copy before it frees what the copy touches. Host memory is used again, once what reads it is done."""

    def __init__(self, device: torch.device, pins: bool) -> None:
        self._device, self._pins = device, pins and device.type != "cpu"
        self._module: Any = streams_of(device)
        self._out: Any = self._module.Stream(device) if self._module else None
        self._in: Any = self._module.Stream(device) if self._module else None
        self._leaving: list[tuple[Any, torch.Tensor, int, weakref.ref[_Offloaded]]] = []
        self._free: list[tuple[torch.Tensor, Any]] = []  # host memory in bytes, and an event after its last use
        # What is in host memory, by storage: the reference keeps its number from being given to another one.
        self._known: dict[int, tuple[Any, int, Any, weakref.ref[_Offloaded]]] = {}

    def known(self, tensor: torch.Tensor) -> _Offloaded | None:
        """What ``tensor`` was packed as already, if it has not been written to."""
        found = self._known.get(storage_id(tensor.untyped_storage()))
        if found is None or found[1] != tensor._version or found[2] != _geometry(tensor):
            return None
        return found[3]()

    def note(self, tensor: torch.Tensor, packed: _Offloaded) -> None:
        self._known = {key: item for key, item in self._known.items() if not item[0].expired()}
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._known[storage_id(storage)] = reference, tensor._version, _geometry(tensor), weakref.ref(packed)

    def to_host(self, flat: torch.Tensor, packed: _Offloaded) -> torch.Tensor:
        memory, read = self._host_memory(flat.nbytes)
        host = memory[: flat.nbytes].view(flat.dtype)
        if self._module is None:
            host.copy_(flat)
            return host
        compute = self._module.current_stream(self._device)
        self._out.wait_stream(compute)
        if read is not None:
            self._out.wait_event(read)
        with self._module.stream(self._out):
            host.copy_(flat, non_blocking=True)
            self._leaving.append((self._out.record_event(), flat, flat._version, weakref.ref(packed)))
        if len(self._leaving) > 2:
            self._let_leave(compute)
        return host

    def _host_memory(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Host memory of at least this size, and an event after its last use. There is never more than was needed at a
        time, in number, so sizes may vary from step to step."""
        self._free.sort(key=lambda item: item[0].nbytes)
        for i, (memory, _) in enumerate(self._free):
            if memory.nbytes >= nbytes:
                return self._free.pop(i)
        if self._free:
            _, read = self._free.pop()  # all are too small: the largest goes
            if read is not None:
                read.synchronize()
        return host_memory(nbytes, torch.uint8, self._pins), None

    def _let_leave(self, compute: Any) -> None:
        """Let compute wait for the oldest copy to the host; then it may write to what was copied, or free it."""
        event, flat, version, ref = self._leaving.pop(0)
        compute.wait_event(event)
        packed = ref()
        if packed is not None:
            packed.spoiled = _error_if_written(flat, version)

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        flat = torch.empty(host.numel(), dtype=host.dtype, device=self._device)
        if self._module is None:
            flat.copy_(host)
            return flat, None
        compute = self._module.current_stream(self._device)
        while self._leaving:  # backward has begun: nothing needs to wait on the device any more
            self._let_leave(compute)
        self._in.wait_stream(compute)  # it has just allocated the memory, or freed it
        self._in.wait_stream(self._out)
        with self._module.stream(self._in):
            flat.copy_(host, non_blocking=True)
            return flat, self._in.record_event()

    def give_back(self, host: torch.Tensor, read: Any) -> None:
        whole = torch.empty(0, dtype=torch.uint8)
        self._free.append((whole.set_(host.untyped_storage()), read))

    def __del__(self) -> None:
        for stream in (self._out, self._in):  # they may still touch the host memory, which goes with this object
            if stream is not None:
                stream.synchronize()

    def wait(self, event: Any) -> None:
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)


def _geometry(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory, in any order of dimensions, as they are."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
