"""Send only the elements of a model's parameters that changed since a snapshot, as positions and values.

A snapshot is a cast copy of this rank's shards. One bitwise comparison finds the changes in a shard, or in those of its
elements that a bucket has. The ranks' changes are gathered as positions in the flat parameter, then split by parameter.
Nothing here changes the sending model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist
import torch.nn as nn

from .._arguments import checked, size_of
from .._torch import DTensorSpec, StridedShard, compute_local_shape_and_global_offset
from ..errors import MisuseError, MisuseRuntimeError
from ..extension import FlatParamHandle, Label, Peers, TensorParallel, Transport, transport_of
from .full_parameters import (
    BUCKET_BYTES,
    Range,
    Run,
    Source,
    Span,
    Steps,
    check_dtype,
    gather_lone,
    gather_span,
    handles_of,
    in_step,
    names_of,
    sources_of,
    span_of,
    why_unreadable,
)

# ---- Gathering selected elements of a long tensor, which each rank has for its own range: positions and values.
#
# Each rank sends one block of bytes, in the form that is smaller for all ranks together::
#
#     | values | positions, 4 or 8 bytes each | padding |        few elements
#     | values | one bit for each element of the range | padding |    from about one in 32 on
#
# Positions are counted from the start of the rank's own range, so 4 bytes suffice except for the longest tensors.


_ALIGNMENT = 16  # bytes, of blocks and of what they consist of: the largest element


@dataclass(frozen=True)
class Elements:
    """Selected elements of a 1-D tensor.

    Attributes:
        positions: int64, ascending.
        values: as many.
    """

    positions: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def joined(several: Sequence[Elements], starts: Sequence[int] | None = None) -> Elements:
        """Return all elements of several tensors, in their order; ``starts``: where each begins in the result."""
        positions = [item.positions for item in several]
        if starts is not None:
            positions = [item + start for item, start in zip(positions, starts, strict=False)]
        return Elements(torch.cat(positions), torch.cat([item.values for item in several]))

    def split(self, bounds: Sequence[int]) -> list[Elements]:
        """Return the elements between each two of ``bounds``, with positions counted from the first of them."""
        cuts = torch.searchsorted(self.positions, torch.tensor(bounds, device=self.positions.device)).tolist()
        return [
            Elements(self.positions[a:b] - start, self.values[a:b])
            for start, a, b in zip(bounds, cuts, cuts[1:], strict=False)
        ]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements as integers. Elements of 16 bytes become two integers each, in a last dim."""
    size = tensor.element_size()
    if size == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def changed_elements(old: torch.Tensor, new: torch.Tensor) -> Elements:
    """Return the elements of ``new`` whose bits differ from ``old``; both are 1-D and have the same dtype."""
    # Bits and not values: a NaN differs from itself, and -0.0 equals 0.0.
    differs = as_bits(new) != as_bits(old)
    if differs.ndim == 2:
        differs = differs.any(1)
    positions = differs.nonzero().view(-1)
    return Elements(positions, new[positions])


@dataclass(frozen=True)
class Form:
    """The layout of blocks, equal on all ranks, which know all counts.

    Attributes:
        dtype: dtype of the values.
        index: dtype of positions; ``None``: one bit for each element.
        counts: number of elements that each rank has.
        ranges: each rank's range in the whole tensor.
    """

    dtype: torch.dtype
    index: torch.dtype | None
    counts: Sequence[int]
    ranges: Sequence[Range]

    @staticmethod
    def shortest(dtype: torch.dtype, counts: Sequence[int], ranges: Sequence[Range]) -> Form:
        longest = max(stop - start for start, stop in ranges)
        listed = Form(dtype, torch.int32 if longest < 1 << 31 else torch.int64, counts, ranges)
        return min(listed, Form(dtype, None, counts, ranges), key=lambda form: form.nbytes)

    @property
    def nbytes(self) -> int:
        """Size of all blocks."""
        return self.blocks()[-1][1]

    def blocks(self) -> list[Range]:
        """Return the byte range of each rank's block."""
        stops = [*accumulate(self._num_bytes(rank) for rank in range(len(self.counts)))]
        return [*zip([0, *stops], stops, strict=False)]

    def _num_bytes(self, rank: int) -> int:
        count, (start, stop) = self.counts[rank], self.ranges[rank]
        if not count:
            return 0
        places = -(-(stop - start) // 8) if self.index is None else count * self.index.itemsize
        return -(-(self._places_at(count) + places) // _ALIGNMENT) * _ALIGNMENT

    def _places_at(self, count: int) -> int:
        return -(-count * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def write(self, block: torch.Tensor, own: Elements, rank: int) -> None:
        count, (start, stop) = self.counts[rank], self.ranges[rank]
        if not count:
            return
        block[: count * self.dtype.itemsize].view(self.dtype).copy_(own.values)
        places = block[self._places_at(count) :]
        if self.index is not None:
            places[: count * self.index.itemsize].view(self.index).copy_(own.positions)
            return
        num = -(-(stop - start) // 8)
        flags = torch.zeros(8 * num, dtype=torch.uint8, device=block.device)
        flags[own.positions] = 1
        torch.sum(flags.view(num, 8) << _bits(block.device), 1, dtype=torch.uint8, out=places[:num])

    def read(self, block: torch.Tensor, rank: int) -> Elements:
        """Return the elements of ``rank``, with positions in the whole tensor."""
        count, (start, stop) = self.counts[rank], self.ranges[rank]
        values = block[: count * self.dtype.itemsize].view(self.dtype)
        places = block[self._places_at(count) :]
        if not count:
            positions = torch.empty(0, dtype=torch.int64, device=block.device)
        elif self.index is not None:
            positions = places[: count * self.index.itemsize].view(self.index).to(torch.int64) + start
        else:
            flags = (places[: -(-(stop - start) // 8), None] >> _bits(block.device)) & 1
            positions = flags.view(-1).nonzero().view(-1) + start
        return Elements(positions, values)


def _bits(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def gather_counts(transport: Transport, count: int, device: torch.device, label: Label) -> list[int]:
    """Gather how many elements each rank of the transport's process group has. Ranks: all of that group."""
    size, rank = transport.group.size(), transport.group.rank()
    counts = torch.zeros(size, dtype=torch.int64, device=device)
    counts[rank] = count
    ranges = [(i, i + 1) for i in range(size)]
    transport.gather(counts, counts[rank : rank + 1], ranges, True, label)
    found: list[int] = counts.tolist()
    return found


def gather_elements(
    transport: Transport, own: Elements, form: Form, is_everywhere: bool, label: Label
) -> Elements | None:
    """Gather the elements of all ranks, in rank order; ``None`` on ranks that do not want them. Ranks: all of the
    transport's process group.

    Args:
        own: this rank's elements, with positions counted from the start of its range.
        is_everywhere: all ranks want them; otherwise only the first one.
    """
    rank, blocks = transport.group.rank(), form.blocks()
    is_wanted = is_everywhere or rank == 0
    start, stop = blocks[rank] if is_wanted else (0, blocks[rank][1] - blocks[rank][0])
    memory = torch.zeros(form.nbytes if is_wanted else stop, dtype=torch.uint8, device=own.values.device)
    form.write(memory[start:stop], own, rank)
    transport.gather(memory if is_wanted else None, memory[start:stop], blocks, is_everywhere, label)
    if not is_wanted:
        return None
    return Elements.joined([form.read(memory[slice(*block)], i) for i, block in enumerate(blocks)])


# ---- Changed elements of parameters that are split by tensor parallelism.


def over_tensor_ranks(
    own: TensorParallel, span: Span, shards: Sequence[Elements | None], is_everywhere: bool
) -> list[Elements | None]:
    """Gather the elements of whole parameters; ``None`` on ranks that do not want them. All parameters that are split
    over the same ranks share one gather.

    Ranks: all ranks of the parameters' own meshes that have ``shards``.

    Args:
        shards: the elements that this rank's shard group has of each parameter of the span, with positions among its
            own.
        is_everywhere: all ranks want them; otherwise only the first one.
    """
    found = [*shards]
    for groups, indices in own.by_groups(span.indices).items():
        if groups:
            places = [index - span.indices.start for index in indices]
            specs = [own.specs[index] for index in indices]
            wholes = _gather(groups, [(specs[i], shards[place]) for i, place in enumerate(places)], span, is_everywhere)
            for place, whole in zip(places, wholes, strict=True):
                found[place] = whole
    return found


def _gather(
    groups: Sequence[dist.ProcessGroup],
    items: Sequence[tuple[DTensorSpec | None, Elements | None]],
    span: Span,
    is_everywhere: bool,
) -> list[Elements | None]:
    """Gather several parameters at once, with positions in their concatenation."""
    specs = [spec for spec, _ in items if spec is not None]
    starts = [0, *accumulate(prod(spec.shape) for spec in specs)]
    placed = [_in_whole(spec, shard) for spec, (_, shard) in zip(specs, items, strict=True) if shard is not None]
    together: Elements | None = Elements.joined(placed, starts)
    for group in reversed(groups):
        if together is None:
            break
        transport, device, label = transport_of(group, span.mesh.device), span.mesh.device, span.handle.label
        counts = gather_counts(transport, together.positions.numel(), device, label)
        form = Form.shortest(together.values.dtype, counts, [(0, starts[-1])] * len(counts))
        together = gather_elements(transport, together, form, is_everywhere, label)
    if together is None:
        return [None] * len(items)
    positions, order = together.positions.sort()
    return [*Elements(positions, together.values[order]).split(starts)]


def _in_whole(spec: DTensorSpec, shard: Elements) -> Elements:
    """Convert elements of this rank's shard of a DTensor to elements of the whole DTensor."""
    shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    if not shard.positions.numel():
        return shard
    if any(isinstance(item, StridedShard) for item in spec.placements):
        raise MisuseError(
            f"changes of a parameter placed {list(spec.placements)}, of which each rank has several strides, cannot be "
            "sent: send full_parameters()"
        )
    positions, stride = torch.zeros_like(shard.positions), 1
    places = torch.unravel_index(shard.positions, tuple(shape))
    for place, first, size in zip(reversed(places), reversed(offset), reversed(spec.shape), strict=True):
        positions += (place + first) * stride
        stride *= size
    return Elements(positions, shard.values)


# ---- Snapshots, and the changes since


@dataclass(frozen=True)
class ChangedElements:
    """The changed elements of one parameter.

    Attributes:
        shape: shape of the whole parameter.
        positions: ascending int64 positions in the flattened parameter; ``None``: all elements, if that is less to
            send.
        values: the new elements, 1-D, in the dtype of the snapshot.
    """

    shape: torch.Size
    positions: torch.Tensor | None
    values: torch.Tensor


class ParameterSnapshot:
    """A copy of this rank's shards of a model's parameters, in the dtype in which they are sent.

    ``snapshot_parameters`` makes it; ``changed_since`` compares with it and renews it.

    Attributes:
        dtype: dtype of floating-point parameters; ``None``: their own.
        num_renewals: the number of renewals so far.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | None) -> None:
        self.dtype = dtype
        self.num_renewals = -1
        self._device = device
        self._names: list[tuple[tuple[str, ...], torch.Size, torch.dtype]] = []
        self._flats: weakref.WeakKeyDictionary[FlatParamHandle, torch.Tensor] = weakref.WeakKeyDictionary()
        self._alone: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Size of the snapshot on this rank."""
        return sum(tensor.nbytes for tensor in (*self._flats.values(), *self._alone.values()))

    def renew(self, sources: Sequence[Source]) -> None:
        """Copy the current values."""
        with torch.no_grad():
            self._names = _names(sources)
            dtypes = {source.place[0]: source.dtype for source in sources if source.place is not None}
            for handle in handles_of(sources):
                flat = self._flats.get(handle)
                if flat is None:
                    device = self._device or handle.mesh.device
                    flat = torch.empty(handle.layout.shard_numel, dtype=dtypes[handle], device=device)
                    self._flats[handle] = flat
                whole = range(len(handle.layout.params))
                Span(handle, whole, 0, handle.layout.flat_numel, dtypes[handle]).write_own(flat)
            for source in sources:
                if source.place is None:
                    copy = source.local().to(self._device, source.dtype, copy=True)
                    self._alone[source.names[0]] = copy.reshape(-1)
        self.num_renewals += 1

    def why_unfit(self, sources: Sequence[Source]) -> str:
        """Return why the snapshot does not match ``sources``; empty if it does."""
        if self._names == _names(sources) and all(handle in self._flats for handle in handles_of(sources)):
            return ""
        return (
            "the snapshot was taken of another model, or names, shapes, dtypes or groups of the parameters have "
            "changed since (ties are found at the first forward): send full parameters and take another snapshot"
        )

    def of_span(self, span: Span) -> torch.Tensor:
        """Return this rank's elements of a span."""
        return self._flats[span.handle][span.own_in_shard()].to(span.mesh.device)

    def of_lone(self, source: Source) -> torch.Tensor:
        """Return this rank's elements of a tensor outside flat parameters, 1-D."""
        return self._alone[source.names[0]].to(source.local().device)


def _names(sources: Sequence[Source]) -> list[tuple[tuple[str, ...], torch.Size, torch.dtype]]:
    return [(source.names, source.tensor.shape, source.dtype) for source in sources]


@checked()
def snapshot_parameters(
    model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> ParameterSnapshot:
    """Copy this rank's shards of the parameters, for ``changed_since``. Local: no communication.

    Args:
        model: any kind of model, as for ``get_model_state_dict``.
        dtype: dtype for floating-point parameters, the same as ``full_parameters`` sends them in; ``None``: their own.
        device: where to keep the snapshot; default: the parameters' device. It takes the memory of the shards in
            ``dtype``.

    Raises:
        RuntimeError: a forward or backward is running.
        TypeError: ``dtype`` is not a floating-point dtype.
    """
    check_dtype("snapshot_parameters", dtype)
    sources = sources_of(names_of(model), dtype, include_buffers=False)
    problem = why_unreadable(sources)
    if problem:
        raise MisuseRuntimeError(f"snapshot_parameters(): {problem}")
    snapshot = ParameterSnapshot(dtype, None if device is None else torch.device(device))
    snapshot.renew(sources)
    return snapshot


@checked()
@contextmanager
def changed_since(
    model: nn.Module, snapshot: ParameterSnapshot, *, bucket_bytes: int | str = BUCKET_BYTES, rank0_only: bool = False
) -> Iterator[Steps[tuple[str, ChangedElements]]]:
    """Gather the elements that differ from a snapshot after casting, to update a copy of the weights elsewhere::

        snapshot = snapshot_parameters(model)         # and send full parameters, in the same dtype
        ...                                           # train
        with changed_since(model, snapshot) as buckets:
            for bucket in buckets:                    # a list of (FQN, ChangedElements)
                apply_changes(weights, bucket)

    Elements with unchanged bits are left out, and so are parameters without changed elements. If all ranks take all
    buckets, the snapshot is renewed at the end of the context; otherwise it stays as it is. The tensors have memory of
    their own.

    Values are sent with a 4-byte position each, or with one bit for every element of the range, or a part of a flat
    parameter is sent whole, whichever is smallest. Parameters that are split by tensor parallelism are gathered over
    its ranks as well. DTensors that ``fully_shard`` does not manage are sent whole.

    Ranks: as for ``full_parameters``, also if a rank stops early.

    Args:
        model: the model of the snapshot.
        snapshot: made by ``snapshot_parameters``.
        bucket_bytes: maximum size of the whole parameters of a bucket; the changes are usually far smaller.
        rank0_only: only the first rank gets changes; the others get empty lists.

    Raises:
        RuntimeError: as for ``full_parameters``; or, on every rank, the snapshot is of another model.
        ValueError: ``bucket_bytes`` is not positive.
        TypeError: ``snapshot`` is not a snapshot.
    """
    bucket_bytes = size_of(bucket_bytes, "changed_since(bucket_bytes={})")
    names = names_of(model)
    sources = sources_of(names, snapshot.dtype, include_buffers=False)
    is_here = Peers.of(names, "changed_since()").is_first
    gather = partial(_changes_of, snapshot=snapshot, rank0_only=rank0_only, is_here=is_here)
    options = f"bucket_bytes={bucket_bytes}, rank0_only={rank0_only}, a snapshot renewed {snapshot.num_renewals} times"
    problem = snapshot.why_unfit(sources)
    with in_step("changed_since()", names, sources, bucket_bytes, options, gather, problem) as steps:
        yield steps
    if steps.is_complete:
        snapshot.renew(sources)


_SAME_DTYPE = ": give full_parameters() and snapshot_parameters() the same dtype="


@checked()
def apply_changes(state: Mapping[str, torch.Tensor], changes: Iterable[tuple[str, ChangedElements]]) -> None:
    """Write changes into whole tensors, in place. If one of them does not fit, nothing is written. Local.

    Args:
        state: contiguous tensors by FQN, in the dtypes of the changes, on any device; it may hold other tensors too.
        changes: a bucket of ``changed_since``.

    Raises:
        KeyError: a changed parameter is not in ``state``.
        ValueError: its tensor has another shape or dtype, or is not contiguous.
    """
    changes = [*changes]
    for fqn, change in changes:
        if fqn not in state:
            raise KeyError(f"apply_changes(): {fqn} has changed, but is not among the {len(state)} given tensors")
        tensor, dtype = state[fqn], change.values.dtype
        if tensor.shape != change.shape or tensor.dtype != dtype or not tensor.is_contiguous():
            layout = "" if tensor.is_contiguous() else ", which is not contiguous"
            remedy = "" if tensor.dtype == dtype else _SAME_DTYPE
            raise MisuseError(
                f"apply_changes(): expected a contiguous tensor of shape {tuple(change.shape)} in {dtype} for {fqn}, "
                f"got one of shape {tuple(tensor.shape)} in {tensor.dtype}{layout}{remedy}. Nothing was changed"
            )
    with torch.no_grad():
        for fqn, change in changes:
            flat = state[fqn].view(-1)
            values = change.values.to(flat.device)
            if change.positions is None:
                flat.copy_(values)
            else:
                flat[change.positions.to(flat.device)] = values


# ---- One run


def _changes_of(
    run: Run, snapshot: ParameterSnapshot, rank0_only: bool, is_here: bool
) -> list[tuple[str, ChangedElements]]:
    """Gather the changes of a run's parameters, on the ranks that want them. Ranks: all of the model."""
    with torch.no_grad():
        found: Sequence[_Change | None]
        if run[0].is_dtensor and run[0].place is None:
            found = [(None, gather_lone(run[0]).reshape(-1))]
        elif run[0].place is None:
            new = run[0].local().to(run[0].dtype).reshape(-1)
            changed = changed_elements(snapshot.of_lone(run[0]), new)
            found = [(changed.positions, changed.values)]
        else:
            found = _changes_of_span(run, span_of(run), snapshot, rank0_only)
    if rank0_only and not is_here:
        return []
    return [
        (name, ChangedElements(source.tensor.shape, *change))
        for source, change in zip(run, found, strict=True)
        if change is not None and change[1].numel()
        for name in source.names
    ]


_Change = tuple["torch.Tensor | None", torch.Tensor]
"""Positions, and values."""


def _changes_of_span(run: Run, span: Span, snapshot: ParameterSnapshot, rank0_only: bool) -> Sequence[_Change | None]:
    handle, mesh = span.handle, span.mesh
    # Changed elements are not in the mesh's order of collectives: other shard groups send other numbers of bytes, or
    # nothing. So this transport has a journal of this shard group alone.
    transport = transport_of(mesh.shard_group, mesh.device)
    start, stop = span.range_of(mesh.shard_rank)
    new = torch.empty(stop - start, dtype=span.dtype, device=mesh.device)
    span.write_own(new)
    own = changed_elements(snapshot.of_span(span), new)  # with positions among this rank's elements
    counts = [own.positions.numel()]
    if mesh.shard_world_size > 1:
        counts = gather_counts(transport, counts[0], mesh.device, handle.label)
    form = Form.shortest(span.dtype, counts, span.ranges())
    nothing: list[_Change | None] = [None] * len(run)
    if rank0_only and not mesh.is_first_replica:
        return nothing
    if form.nbytes >= span.numel * span.dtype.itemsize and handle.tensor_parallel is None:
        flat = gather_span(span, rank0_only, transport)
        return nothing if flat is None else [(None, view.reshape(-1)) for view in span.views_of(flat)]
    elements: Elements | None = own
    if mesh.shard_world_size > 1 and form.nbytes:
        elements = gather_elements(transport, own, form, not rank0_only, handle.label)
    if elements is None or (rank0_only and mesh.shard_rank):
        return nothing
    if handle.layout.in_chunks:
        positions, order = handle.layout.positions_in_range(elements.positions, span.indices).sort()
        elements = Elements(positions, elements.values[order])
    # What this rank's shard group has of each parameter.
    starts = [handle.layout.params[i].offset - span.start for i in span.indices]
    changes: list[Elements | None] = [*elements.split([*starts, span.numel])]
    if handle.tensor_parallel is not None:
        changes = over_tensor_ranks(handle.tensor_parallel, span, changes, not rank0_only)
    return [None if change is None else (change.positions, change.values) for change in changes]
