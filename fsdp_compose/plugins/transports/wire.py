"""Fewer bytes between ranks: a transport that sends encoded tensors by another one, and the encodings.

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
from types import SimpleNamespace
from typing import Any

import torch

from ...core.comm import Label, Transport, TransportWrapper, Work, streams_of

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
        return 4 * self._num_blocks(numel) + numel

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

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self._block)

    def _chunks(
        self, plain: torch.Tensor, packed: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Elements, scales and multiples of some blocks, as matrices; then of the last block, which may be shorter."""
        size, numel, found = self._block, plain.numel(), list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        if not numel:
            return found
        end = 4 * self._num_blocks(numel)
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
    done: Any = SimpleNamespace(wait=lambda: module.current_stream(device).wait_event(event))
    return done


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
