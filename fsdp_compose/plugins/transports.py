"""How the tensors of groups travel between ranks: by transports of the user, or encoded, with fewer bytes.

``Wire`` belongs around the transport that it sends by: schedules, errors, the journal and ``trace`` see what is really
sent. Gathers are encoded by the owner of each shard, and all ranks, the owner too, compute with the decoded one: all
have the same bits. A reduction of encoded chunks is an all-to-all and a sum on the owner, since no backend can add what
it cannot read (as in ZeRO++, arXiv:2306.10209). Sums are formed in fp32 (or wider), in rank order, and rounded once; in
them, the owner's own chunk, which is not sent, is exact. No rank keeps what rounding has dropped: such a residual would
be as large as all gradients, on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from .._arguments import checked
from ..core.comm import DataParallelMesh, Label, Transport, TransportRole, TransportWrapper, Work, streams_of
from ..core.group import Kind, _FSDPState, states_for
from ..core.ragged import note_write_of_all_ranks
from ..errors import MisuseError, MisuseRuntimeError, MisuseTypeError

ALIGNMENT = 16  # bytes
# Elements that are encoded at a time. On a CPU, what a step of an encoding writes is read from the cache; on a device,
# steps are launched one by one.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 24


# ---- Encodings


class WireFormat(ABC):
    """How the elements of a tensor are sent. Subclass it for an encoding of your own.

    Encoding the same elements again must give the same bytes: the first forwards compare what was gathered with what
    should have been, to find writes to parameters that would be lost.

    Attributes:
        name: compared at the first forward: it must be the same on every rank, and tell all settings.
    """

    name: str

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """The bytes of ``numel`` encoded elements."""

    @abstractmethod
    def encode(self, source: torch.Tensor, packed: torch.Tensor) -> None:
        """Write the elements of ``source`` to ``packed``.

        Args:
            source: 1-D, contiguous, a floating dtype. Not to be written to.
            packed: 1-D, of dtype uint8 and ``nbytes(source.numel())`` long, aligned to 16 bytes.
        """

    @abstractmethod
    def decode(self, packed: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        """Write the elements of ``packed`` to ``out``, or add them.

        Args:
            packed: as ``encode`` has filled it, on this rank or another one.
            out: 1-D, contiguous, as long as the source; any floating dtype. Sums are fp32 or wider.
            adds: add to what ``out`` holds, instead of overwriting it.
        """


class Bfloat16(WireFormat):
    """Elements rounded to bfloat16: half the bytes of fp32, the same range."""

    name = "bf16"

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, source: torch.Tensor, packed: torch.Tensor) -> None:
        packed.view(torch.bfloat16).copy_(source)

    def decode(self, packed: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        (out.add_ if adds else out.copy_)(packed.view(torch.bfloat16))


class Int8(WireFormat):
    """Elements as multiples of 1/127 of the largest of ``block`` neighbors: about a quarter of fp32's bytes.

    Rounds to the nearest multiple. A block with an infinite element or a NaN has no finite one afterwards, so gradient
    scalers still notice.

    Args:
        block: how many neighboring elements share a scale, which takes 4 bytes.
    """

    # Scales are fp32: in fp16, blocks of gradients around 1e-7 would become zeros.

    def __init__(self, block: int = 256) -> None:
        self._block = block
        self.name = f"int8/{block}"

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self._block) + numel

    def encode(self, source: torch.Tensor, packed: torch.Tensor) -> None:
        scratch = self._scratch(source)
        for chunk, scales, target in self._chunks(source, packed):
            blocks = scratch[: chunk.numel()].view(chunk.shape)
            largest = torch.maximum(chunk.amax(1), chunk.amin(1).neg_())  # ``abs`` would write a copy
            # Not smaller than the smallest normal number: its reciprocal must be finite.
            torch.div(largest.float(), 127, out=scales).clamp_min_(torch.finfo(torch.float32).tiny)
            torch.mul(chunk, scales.reciprocal().unsqueeze(1), out=blocks)
            target.copy_(blocks.round_())

    def decode(self, packed: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        is_direct = out.dtype == torch.float32 and not adds
        scratch = None if is_direct else self._scratch(out)
        for chunk, scales, source in self._chunks(out, packed):
            result = chunk if scratch is None else scratch[: chunk.numel()].view(chunk.shape)
            result.copy_(source)  # a product of two dtypes would allocate memory for that
            if adds and out.dtype == torch.float32:
                chunk.addcmul_(result, scales.unsqueeze(1))
                continue
            result.mul_(scales.unsqueeze(1))
            if adds:
                chunk.add_(result)
            elif result is not chunk:
                chunk.copy_(result)

    def _scratch(self, plain: torch.Tensor) -> torch.Tensor:
        """Memory for a chunk, used again and again: allocating takes longer than computing."""
        return plain.new_empty(min(plain.numel(), self._chunk(plain)), dtype=torch.float32)

    def _chunk(self, plain: torch.Tensor) -> int:
        return max(_CPU_CHUNK if plain.device.type == "cpu" else _DEVICE_CHUNK, self._block)

    def _chunks(
        self, plain: torch.Tensor, packed: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Elements, scales and multiples of some blocks, as matrices; then of the last block, which may be shorter."""
        size, numel, found = self._block, plain.numel(), list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        if not numel:
            return found
        end = 4 * -(-numel // size)
        scales, elements = packed[:end].view(torch.float32), packed[end:].view(torch.int8)
        whole, step = numel // size, self._chunk(plain) // size
        for first in range(0, whole, step):
            last = min(whole, first + step)
            chunk = slice(first * size, last * size)
            found.append((plain[chunk].view(-1, size), scales[first:last], elements[chunk].view(-1, size)))
        if whole * size < numel:
            found.append((plain[None, whole * size :], scales[whole:], elements[None, whole * size :]))
        return found


# ---- The transport that sends what is encoded


class Wire(TransportWrapper):
    """Sends by ``inner`` what is encoded: all-gathers in ``gathers``, reductions in ``sums``; ``None``: as it is."""

    def __init__(self, inner: Transport, gathers: WireFormat | None, sums: WireFormat | None) -> None:
        super().__init__(inner)
        self._gathers, self._sums = gathers, sums
        self.is_exact = gathers is None
        formats = {"gathers": gathers, "sums": sums}
        self.name = ", ".join([inner.unrecorded.name, *[f"{a} as {b.name}" for a, b in formats.items() if b]])

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        encoding, numel = _useful(self._gathers, shard.numel(), whole.dtype), shard.numel()
        rank, size = self.group.rank(), self.group.size()
        if encoding is None:
            if shard.dtype != whole.dtype:
                shard = whole[rank * numel : rank * numel + numel].copy_(shard)
            return self.inner.all_gather(whole, shard, label)
        nbytes = encoding.nbytes(numel)
        packed = _rows(whole, size, nbytes)
        encoding.encode(shard, packed[rank, :nbytes])
        work = self.inner.all_gather(packed.view(-1), packed[rank], label)

        def finish() -> None:
            for row, target in zip(packed, whole.chunk(size), strict=True):
                encoding.decode(row[:nbytes], target, False)

        return finish_with(work, whole.device, finish)

    def as_gathered(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        encoding = _useful(self._gathers, part.numel(), dtype)
        if encoding is None:
            return self.inner.as_gathered(part.to(dtype), dtype)
        if self.inner.rounds:
            return None
        gathered, nbytes = part.new_empty(part.shape, dtype=dtype), encoding.nbytes(part.numel())
        packed = _rows(part, 1, nbytes)[0, :nbytes]
        encoding.encode(part, packed)
        encoding.decode(packed, gathered, False)
        return gathered

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        encoding = _useful(self._sums, shard.numel(), whole.dtype)
        if encoding is None:
            return self.inner.reduce_scatter(shard, whole, is_average, label)
        work, received, reads = self._exchange(encoding, whole.chunk(self.group.size()), label)
        divisor = self.group.size() if is_average else 1
        return finish_with(work, whole.device, lambda: _add_up(encoding, received, shard, divisor), reads)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        encoding = _useful(self._sums, tensor.numel(), tensor.dtype)
        if encoding is None:
            return self.inner.all_reduce(tensor, is_average, label)
        rank, size = self.group.rank(), self.group.size()
        chunks = tensor.tensor_split(size)
        lengths = [encoding.nbytes(chunk.numel()) for chunk in chunks]
        work, received, reads = self._exchange(encoding, chunks, label)
        packed = _rows(tensor, size, lengths[0])
        own = torch.empty_like(chunks[rank], dtype=torch.promote_types(tensor.dtype, torch.float32))
        second: list[Work] = []  # begins on the CPU in ``wait()``, which all ranks call in the same order

        def finish() -> None:
            if not second:  # issued once, also if it has failed and is waited for again
                _add_up(encoding, received, own, size if is_average else 1)
                encoding.encode(own, packed[rank, : lengths[rank]])
                second.append(self.inner.all_gather(packed.view(-1), packed[rank], label))
            second[0].wait()
            for row, nbytes, chunk in zip(packed, lengths, chunks, strict=True):
                encoding.decode(row[:nbytes], chunk, False)

        return finish_with(work, tensor.device, finish, reads)

    def _exchange(
        self, encoding: WireFormat, chunks: Sequence[torch.Tensor], label: Label
    ) -> tuple[Work, list[torch.Tensor], torch.Tensor]:
        """Send each rank its chunk. Return those for this one, by rank, encoded but for its own, and memory that is
        read until they have come."""
        rank, size = self.group.rank(), self.group.size()
        # A copy, since the sum may overwrite the chunk.
        own = chunks[rank].to(torch.promote_types(chunks[rank].dtype, torch.float32), copy=True)
        lengths = [encoding.nbytes(chunk.numel()) for chunk in chunks]
        padded = [_padded(length) for length in lengths]
        num_moved = (size - 1) * sum(padded)
        padded[rank] = 0
        sent = torch.empty(sum(padded), dtype=torch.uint8, device=own.device)
        for i, (chunk, packed) in enumerate(zip(chunks, sent.split(padded), strict=True)):
            if i != rank:
                encoding.encode(chunk, packed[: lengths[i]])
        arrived = _rows(own, size - 1, lengths[rank])
        arriving = [0 if i == rank else arrived.shape[1] for i in range(size)]
        work = self.inner.all_to_all(arrived.view(-1), sent, arriving, padded, num_moved, label)
        received = [*arrived[:, : lengths[rank]]]
        received.insert(rank, own)
        return work, received, sent


def _useful(encoding: WireFormat | None, numel: int, dtype: torch.dtype) -> WireFormat | None:
    """The format, if it saves bytes for so many elements, in what is sent by one rank."""
    if encoding is None or not dtype.is_floating_point or dtype.itemsize == 1:
        return None
    return encoding if _padded(encoding.nbytes(numel)) < numel * dtype.itemsize else None


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _rows(like: torch.Tensor, num: int, nbytes: int) -> torch.Tensor:
    """Memory for encoded chunks of this length; a row each, which begins as ``WireFormat`` promises."""
    return torch.empty(num, _padded(nbytes), dtype=torch.uint8, device=like.device)


def _add_up(encoding: WireFormat, terms: Sequence[torch.Tensor], out: torch.Tensor, divisor: int) -> None:
    """Write the sum of all ranks' terms to ``out``, divided. Those of other ranks are encoded."""
    total = out if out.element_size() >= 4 else torch.empty_like(out, dtype=torch.float32)
    for rank, term in enumerate(terms):
        if term.dtype == torch.uint8:
            encoding.decode(term, total, rank > 0)
        else:
            (total.add_ if rank else total.copy_)(term)
    if divisor > 1:
        total.div_(divisor)
    if total is not out:
        out.copy_(total)


def finish_with(work: Work, device: torch.device, finish: Callable[[], object], held: object = None) -> Work:
    """A work that ends with ``finish``, which must not mind to be called again; ``held``: memory that is read until
    then."""
    module: Any = streams_of(device)
    if module is None:
        return _Finishing(work, finish, held)
    # Here, on the side stream, so that it runs while the compute stream is busy.
    work.wait()
    finish()
    event = module.Event()
    event.record(module.current_stream(device))
    return _OnStream(module, device, event)


class _OnStream:
    __slots__ = ("_device", "_event", "_module")

    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self._event = module, device, event

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)


class _Finishing:
    __slots__ = ("_finish", "_held", "_work")

    def __init__(self, work: Work, finish: Callable[[], object], held: object) -> None:
        self._work, self._held = work, held
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        self._work.wait()
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
            self._finish = self._held = None  # and with them the memory


# ---- ``set_transport`` and ``set_wire_formats``

FORMATS: dict[str, Callable[[], WireFormat]] = {"bf16": Bfloat16, "int8": Int8}


@checked(
    wrap="None or a function from (Transport, TransportRole) to a Transport (set_wire_formats() takes formats, such as "
    "'int8')"
)
def set_transport(
    module: nn.Module, wrap: Callable[[Transport, TransportRole], Transport] | None, *, recurse: bool = True
) -> None:
    """Let collectives of groups go through transports of your own, from the next one on. What is gathered is gathered
    again.

    What must be exact stays as it is: checkpoints, full parameters, the matrices of ``optim.Muon``. So do all-gathers
    that tensor subclasses define, and sums over tensor-parallel ranks.

    Ranks: all ranks, the same way, between the same two iterations. Local: no communication; the first forward, or the
    next backward, compares the transports' names.

    Args:
        module: a module given to ``fully_shard``, or one that contains such modules.
        wrap: called with each group's transport and what it is for. Returns that transport, or a ``TransportWrapper``
            around it. ``None``: go back to the transports that groups have without this.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        MisuseError: there is no such group; graphs of ``torch.compile`` contain it.
        MisuseRuntimeError: a forward or backward is running.
        MisuseTypeError: ``wrap`` returned something that is no transport of the same ranks.
    """
    _change("set_transport", module, wrap, recurse)


@checked()
def set_wire_formats(
    module: nn.Module,
    *,
    all_gather: str | WireFormat | None = None,
    reduce_scatter: str | WireFormat | None = None,
    all_reduce: str | WireFormat | None = None,
    recurse: bool = True,
) -> None:
    """Send fewer bytes, rounded. For networks that are slower than the rounding: docs/howto/slow_networks.md says when.

    Formats are ``"bf16"`` (half of fp32's bytes), ``"int8"`` (0.254 of them: multiples of 1/127 of the largest of 256
    neighbors), or a ``WireFormat``. ``None`` sends what there is, the default. A format that would not be shorter than
    the dtype of a tensor does not change it.

    All ranks compute with the same rounded parameters; shards, optimizer state and checkpoints stay exact. Gradients
    are rounded before they are summed, in fp32, and the result of an all-reduce once more. Parameters of tensor
    subclasses with all-gathers of their own, and sums over tensor-parallel ranks, are sent as they are.

    With hybrid sharding, ``all_reduce`` alone keeps traffic inside a node exact, and rounds that between nodes.

    Ranks: as for ``set_transport``, whose transports this replaces.

    Args:
        module: a module given to ``fully_shard``, or one that contains such modules.
        all_gather: of parameters.
        reduce_scatter: of gradients over the ranks that share the shards.
        all_reduce: of gradients over replicas: hybrid sharding, ``replicate``.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        MisuseError: there is no such format or group; ``all_reduce`` with ``set_replicas``; graphs of
            ``torch.compile`` contain a group.
        MisuseRuntimeError: a forward or backward is running.

    Example::

        set_wire_formats(model, all_gather="int8", reduce_scatter="int8")
    """
    device = states_for(module, "set_wire_formats", recurse)[0].mesh.device
    gathers, scatters, sums = [_format(chosen, device) for chosen in (all_gather, reduce_scatter, all_reduce)]

    def wrap(transport: Transport, role: TransportRole) -> Transport:
        if transport.num_ranks == 1:
            return transport
        if role is TransportRole.SHARDS and (gathers or scatters):
            return Wire(transport, gathers, scatters)
        if role is TransportRole.REPLICAS and sums:
            if transport.replicas is not None:
                raise MisuseError(
                    "set_wire_formats(all_reduce=...): the model averages over replica groups (set_replicas()), which "
                    "choose themselves what they send"
                )
            return Wire(transport, None, sums)
        return transport

    _change("set_wire_formats", module, wrap, recurse)


def _format(chosen: str | WireFormat | None, device: torch.device) -> WireFormat | None:
    if isinstance(chosen, WireFormat):
        _try(chosen, device)
    if chosen is None or isinstance(chosen, WireFormat):
        return chosen
    if isinstance(chosen, str) and chosen in FORMATS:
        return FORMATS[chosen]()
    raise MisuseError(
        f"set_wire_formats(): {chosen!r} is no format: give {' or '.join(map(repr, FORMATS))}, a WireFormat or None"
    )


def _try(wire: WireFormat, device: torch.device) -> None:
    """Raise if a format of the user cannot send a few elements: later, it would fail amid a collective."""
    given = f"set_wire_formats(): the format {type(wire).__name__}"
    if not isinstance(getattr(wire, "name", None), str):
        raise MisuseTypeError(f"{given} has no name: set one, a string that tells all settings, for ranks to compare")
    source = torch.ones(1000, device=device)
    try:
        packed = torch.empty(wire.nbytes(1000), dtype=torch.uint8, device=device)
        wire.encode(source, packed)
        wire.decode(packed, torch.empty_like(source), False)
    except Exception as error:
        raise MisuseError(
            f"{given} fails on 1000 elements of fp32: {error}. Expected nbytes() to return the bytes that encode() "
            "fills and decode() reads"
        ) from error


def _change(
    call: str, module: nn.Module, wrap: Callable[[Transport, TransportRole], Transport] | None, recurse: bool
) -> None:
    states = states_for(module, call, recurse)
    for state in states:
        refuse_unless_between_iterations(call, state)

    def change(transport: Transport, role: TransportRole) -> Transport:
        plain = transport.exact
        wrapped = plain if wrap is None else wrap(plain, role)
        if not isinstance(wrapped, Transport) or wrapped.group is not plain.group:
            raise MisuseTypeError(
                f"{call}(): wrap() returned {wrapped!r} for {role.value}, which is not a transport of the same process "
                "group: return the given one, or a TransportWrapper around it"
            )
        return wrapped

    change_meshes(states, lambda mesh: mesh.with_transports(change))
    for state in states:
        # What is gathered has the old rounding: gather it again, on all ranks.
        note_write_of_all_ranks([handle.shard for handle in state._handles])
        if state.root is not None:
            names = str(state.mesh.transport_names())
            state.root.order.entries.append(state.log.note(Kind.TRANSPORTS, f"{state.name}{names}"))


def change_meshes(states: list[_FSDPState], change: Callable[[DataParallelMesh], DataParallelMesh]) -> None:
    """Let ``states`` and their flat parameters run on ``change(mesh)``, from the next collective on."""
    # Those of the group too: ties give it new flat parameters at the first forward.
    meshes = [mesh for state in states for mesh in (state.mesh, *[handle.mesh for handle in state._handles])]
    changed = {id(mesh): change(mesh) for mesh in meshes}  # one object for equal ones, as before
    for state in states:
        state.mesh = changed[id(state.mesh)]
        for handle in state._handles:
            handle.run_on(changed[id(handle.mesh)])


def refuse_unless_between_iterations(call: str, state: _FSDPState) -> None:
    """Raise if collectives of ``state`` are under way, or if compiled graphs contain them as they are now."""
    if state.persistent.captured is not None:
        raise MisuseError(
            f"{call}(): graphs of torch.compile contain the fully_shard group {state.name}: call it before compiled "
            "code runs"
        )
    if state.is_busy or state.progress.awaiting_backward:
        raise MisuseRuntimeError(
            f"{call}(): a forward or backward of the fully_shard group {state.name} is running or still to come: call "
            "it between iterations"
        )
