"""``full_parameters``: gather whole parameters, a bucket at a time, for programs that load weights.

``changes`` shares the parts of this file, in this order: choosing the tensors to send, planning buckets, gathering
them, and the loop whose steps all ranks take together or raise one error. Nothing here changes the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._arguments import checked, size_of
from ..errors import MisuseRuntimeError, MisuseTypeError, RanksDifferError, class_of
from ..extension import (
    CompositeDTensor,
    DataParallelMesh,
    FlatParamHandle,
    ModelNames,
    Peers,
    Transport,
    handle_of,
    local_elements,
    local_of,
    state_of,
)

# ---- The tensors to send, under canonical FQNs, and whether they can be read now.


Place = tuple[FlatParamHandle, int]


@dataclass(frozen=True, eq=False)
class Source:
    """One tensor of a model.

    Attributes:
        names: its canonical FQNs: all names of a tied parameter; the first one identifies it.
        tensor: the live tensor: a sharded parameter, or a tensor that ``fully_shard`` does not manage.
        dtype: the dtype to send it in.
        place: its flat parameter, and its index there.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: torch.dtype
    place: Place | None

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in the dtype to send."""
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def fact(self) -> str:
        """A description that must be equal on all ranks."""
        where = "not sharded by fully_shard()" if self.place is None else f"one of {self.place[0].label}"
        return f"{', '.join(self.names)} of shape {tuple(self.tensor.shape)}, sent in {self.dtype}, {where}"

    @property
    def is_dtensor(self) -> bool:
        return isinstance(self.tensor, DTensor)

    def local(self) -> torch.Tensor:
        return local_of(self.tensor.detach())

    def follows(self, before: Source) -> bool:
        """Whether this one directly follows another one in the same flat parameter, and is sent in its dtype."""
        if self.place is None or before.place is None or self.dtype != before.dtype:
            return False
        return self.place[0] is before.place[0] and self.place[1] == before.place[1] + 1


def sources_of(names: ModelNames, dtype: torch.dtype | None, include_buffers: bool) -> list[Source]:
    """List every parameter, and persistent buffer, once; parameters of a flat parameter are adjacent and in its order.

    Args:
        dtype: dtype to send floating-point parameters in; ``None``: their own. Other parameters, and buffers, keep
            theirs.
    """
    together: dict[Any, list[Source]] = {}
    for tensor, fqns in _by_tensor(names.parameters.items()):
        place = handle_of(tensor)
        sent = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        key = id(tensor) if place is None else place[0]
        together.setdefault(key, []).append(Source(fqns, tensor, sent, place))
    found = []
    for group in together.values():
        found += sorted(group, key=lambda source: source.place[1] if source.place is not None else 0)
    slots = names.slots("_buffers", persistent=True) if include_buffers else ()
    buffers = [(fqn, buffer) for fqn, module, name in slots if (buffer := module._buffers[name]) is not None]
    return [*found, *(Source(fqns, buffer, buffer.dtype, None) for buffer, fqns in _by_tensor(buffers))]


def _by_tensor(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, tuple[str, ...]]]:
    """Yield each tensor once, with all its names."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for fqn, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(fqn)
    for tensor, fqns in found.values():
        yield tensor, tuple(fqns)


def handles_of(sources: Sequence[Source]) -> list[FlatParamHandle]:
    return list(dict.fromkeys(source.place[0] for source in sources if source.place is not None))


def why_unreadable(sources: Sequence[Source]) -> str:
    """Return why the tensors cannot be read now; empty if they can."""
    for handle in handles_of(sources):
        state = state_of(handle)
        if state is None:
            return f"the sharded module of {handle.names[0]} no longer exists"
        if state.persistent.is_asleep:
            return state.sleeping_error
        if state.is_busy:
            return (
                f"a forward or backward of the fully_shard group {state.name} is running (or was interrupted: run a "
                "forward first, which recovers from it)"
            )
        if handle.summoned is not None:
            return (
                f"{handle.names[0]} is a full parameter inside summon_full_params(), and may have been edited: leave "
                "that context first"
            )
    for source in sources:
        if isinstance(source.tensor, CompositeDTensor):
            return (
                f"{source.names[0]} is a {source.tensor.composite.name}, which consists of several tensors and cannot "
                "be sent as one: send its .full_tensor() by other means, and the trainable parameters by "
                "get_model_state_dict()"
            )
    on_meta = [source.names[0] for source in sources if source.local().is_meta]
    if on_meta:
        return f"{on_meta[0]} is on the meta device: call model.to_empty(device=...) and initialize it first"
    return ""


def versions_of(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Return versions that change when this rank's elements are written to or moved to other memory. Local."""
    locals_ = [source.local() for source in sources]
    versions = [(local.data_ptr(), 0 if local.is_inference() else local._version) for local in locals_]
    # A write to a flat view that is a DTensor does not count at the shard.
    return versions + [(0, handle.segment_version()) for handle in handles_of(sources)]


def names_of(model: nn.Module) -> ModelNames:
    if not isinstance(model, nn.Module):
        raise MisuseTypeError(f"expected a module, got {type(model).__name__}")
    return ModelNames(model)


# ---- Planning buckets: a pure function with the same result on every rank.
#
# A *run* is gathered by one collective: adjacent parameters of one flat parameter, or a single other tensor. A
# *bucket* is the runs that one step of the loop gathers::
#
#     flat parameters    |a a a a|b b|c c c|   |d d|e e e e e e e e|
#     buckets of 6       [a b   ][c      d    ][e                  ]      e is larger: a bucket of its own
#     runs                a b     c      d      e


Run = list[Source]
Bucket = list[Run]


def plan_buckets(sources: Sequence[Source], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets in order. A tensor that does not fit starts a new bucket; a tensor larger than a bucket is one."""
    buckets: list[Bucket] = []
    left = 0
    for source in sources:
        if source.nbytes > left or not buckets:
            buckets.append([])
            left = bucket_bytes
        left -= source.nbytes
        runs = buckets[-1]
        if runs and source.follows(runs[-1][-1]):
            runs[-1].append(source)
        else:
            runs.append([source])
    return buckets


# ---- Gathering runs: cast to the dtype to send, then one collective straight into the result.


Range = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """The range of a flat parameter that a run occupies.

    Attributes:
        indices: indices of its parameters.
        start, stop: its element range, with padding: equal on ranks that have less of some parameters (uneven tensor
            parallelism).
    """

    handle: FlatParamHandle
    indices: range
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def mesh(self) -> DataParallelMesh:
        return self.handle.mesh

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def range_of(self, rank: int) -> Range:
        """Return the elements that a rank of the shard group holds, counted from ``start``."""
        shard = self.handle.layout.shard_numel
        if self.handle.layout.in_chunks:
            numel = self.numel // self.mesh.shard_world_size
            return rank * numel, (rank + 1) * numel
        first, last = max(rank * shard, self.start), min((rank + 1) * shard, self.stop)
        return (first - self.start, max(first, last) - self.start) if first < self.stop else (self.numel, self.numel)

    def ranges(self) -> list[Range]:
        return [self.range_of(rank) for rank in range(self.mesh.shard_world_size)]

    def own_in_shard(self) -> slice:
        """Return the elements of this rank's shard that are in the span."""
        start, stop = self.handle.layout.range_in_shard(self.start, self.stop, self.mesh.shard_rank)
        return slice(start, stop) if stop > start else slice(0, 0)

    def write_own(self, out: torch.Tensor) -> None:
        """Write this rank's current elements into ``out``, which may have another dtype."""
        handle = self.handle
        if not handle.was_moved():
            out.copy_(handle.shard.detach()[self.own_in_shard()])
            return
        out.zero_()
        for i in self.indices:
            shard = handle.layout.local_shard(i, self.mesh.shard_rank)
            begin = shard.shard_start - self.own_in_shard().start
            if shard.numel:
                out[begin : begin + shard.numel].copy_(local_elements(handle.sharded_params[i]).detach().reshape(-1))

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the gathered span ``flat``, one for each parameter (the part of this rank's shard group)."""
        return self.handle.layout.views_of_range(flat, self.indices)


def span_of(run: Run) -> Span:
    places = [source.place for source in run]
    assert places[0] is not None, "the parameters of a run of several lie in a flat parameter"
    (handle, first), params = places[0], places[0][0].layout.params
    last = first + len(run)
    stop = params[last].offset if last < len(params) else handle.layout.flat_numel
    return Span(handle, range(first, last), params[first].offset if first else 0, stop, run[0].dtype)


def gather_run(run: Run, rank0_only: bool, is_first: bool) -> list[tuple[str, torch.Tensor]]:
    """Gather the whole tensors of a run into new memory, and return each under all its names; ranks that do not want
    them get an empty list.

    Ranks: all ranks of the model.

    Args:
        rank0_only: only the rank that ``is_first`` wants them.
    """
    is_wanted = is_first or not rank0_only
    with torch.no_grad():
        if run[0].place is None:
            wholes = [gather_lone(run[0])] if is_wanted or run[0].is_dtensor else []
        else:
            span = span_of(run)
            flat, own = gather_span(span, rank0_only), span.handle.tensor_parallel
            wholes = [] if flat is None else span.views_of(flat)
            if wholes and own is not None:  # split by tensor parallelism too: gather over those ranks as well
                wholes = own.wholes(wholes, span.indices.start)
    if not is_wanted:
        return []
    return [(name, whole) for source, whole in zip(run, wholes, strict=True) for name in source.names]


def gather_span(span: Span, rank0_only: bool, transport: Transport | None = None) -> torch.Tensor | None:
    """Gather a span; ``None`` on ranks that do not want it. With ``rank0_only``, only the first replica gathers.

    Ranks: all ranks of the model, which gather the same spans in the same order.

    Args:
        transport: of the shard group; default: the mesh's.
    """
    mesh, handle, ranges = span.mesh, span.handle, span.ranges()
    transport = transport or mesh.transport.exact.unrecorded  # other ranks may record nothing
    if rank0_only and not mesh.is_first_replica:
        if mesh.shard_world_size > 1:
            transport.skip(span.numel * span.dtype.itemsize, handle.label)
        return None
    start, stop = ranges[mesh.shard_rank]
    is_wanted = not rank0_only or mesh.shard_rank == 0
    memory = torch.empty(span.numel if is_wanted else stop - start, dtype=span.dtype, device=mesh.device)
    own = memory[start:stop] if is_wanted else memory
    span.write_own(own)
    if mesh.shard_world_size > 1:
        transport.gather(memory if is_wanted else None, own, ranges, not rank0_only, handle.label)
    return memory if is_wanted else None


def gather_lone(source: Source) -> torch.Tensor:
    """Copy a tensor outside flat parameters: a DTensor is gathered, any other tensor is this rank's own."""
    copy: Any = source.tensor.detach().to(source.dtype, copy=True)
    whole: torch.Tensor = copy.full_tensor() if source.is_dtensor else copy.contiguous()
    return whole


# ---- The loop over buckets: all ranks take each step together, or raise one error.
#
# Before each bucket, and at the end of the context, the ranks wait for each other through the store, for a bounded
# time. So no rank enters a collective that another rank will not enter: if a rank left its loop or raised, the others
# learn it at their next step.


T = TypeVar("T")

_ON, _LEFT, _FAILED = "on", "left", "failed"
_MAX_TEXT = 1000  # characters of an exception's text that are sent to the other ranks


@dataclass(eq=False)
class Steps(Generic[T]):
    """An iterator over buckets that all ranks advance together.

    The consumer owns the tensors, but not the list, which advancing empties.

    Args:
        gather: gathers the contents of a run, on all ranks.
        problem: returns why this rank cannot continue; empty if it can. Local.
    """

    _peers: Peers
    _buckets: Sequence[Bucket]
    _gather: Callable[[Run], list[T]]
    _problem: Callable[[], str]
    _num_taken: int = 0
    _is_over: bool = False
    _latest: list[T] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the total number of buckets."""
        return len(self._buckets)

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        if self._is_over:
            raise MisuseRuntimeError(
                f"{self._peers.call}: buckets are only available inside its context, which has ended"
            )
        # A loop that keeps nothing holds only one bucket.
        self._latest.clear()
        if self.is_complete:
            raise StopIteration
        self._is_over = True  # reset below: if this step fails, the loop is over on every rank
        self._step(_ON, f"asks for bucket {self._num_taken + 1} of {len(self)}")
        self._latest = [item for run in self._buckets[self._num_taken] for item in self._gather(run)]
        self._num_taken += 1
        self._is_over = False
        return self._latest

    @property
    def is_complete(self) -> bool:
        """Whether all buckets were taken."""
        return self._num_taken == len(self._buckets)

    def leave(self, error: BaseException | None) -> None:
        """End the loop on all ranks.

        Args:
            error: the exception by which this rank leaves the loop; the caller raises it again.

        Raises:
            RuntimeError: the ranks are not all at the same place.
        """
        self._latest.clear()
        if self._is_over:
            return
        self._is_over = True
        where = f"left its loop after {self._num_taken} of {len(self)} buckets"
        if error is not None:
            what = f"{where}, by {type(error).__name__}: {str(error)[:_MAX_TEXT]}"
            self._meet(_FAILED, what)  # the others raise this text; this rank raises ``error``
            return
        self._step(_LEFT, where)

    def _step(self, kind: str, what: str) -> None:
        problem = self._problem()
        if verdict := self._meet(_FAILED if problem else kind, problem or what):
            name, text = verdict
            raise class_of(name)(text)

    def _meet(self, kind: str, what: str) -> list[str]:
        """Return the class and the text of the error of ranks that cannot continue together; empty if they can."""
        judge = partial(_verdict, self._peers.call)
        verdict: list[str] = self._peers.ask("its loop over buckets", [kind, what], judge)
        return verdict


def _verdict(call: str, told: Sequence[tuple[str, str]]) -> list[str]:
    """Judge each rank's kind of step and description of it."""
    if all(item == told[0] for item in told) and told[0][0] != _FAILED:
        return []
    ranks: dict[str, list[int]] = {}
    for rank, (_, what) in sorted(enumerate(told), key=lambda item: item[1][0] != _FAILED):
        ranks.setdefault(what, []).append(rank)
    listing = "; ".join(f"rank(s) {', '.join(map(str, found))}: {what}" for what, found in ranks.items())
    kind = RanksDifferError if len(ranks) > 1 else MisuseRuntimeError
    return [
        kind.__name__,
        f"{call}: the ranks are out of step: {listing}. Every rank must take all buckets, even if it does nothing with "
        "them, or all ranks must leave the loop at the same place",
    ]


# ---- Public functions


BUCKET_BYTES = 256 << 20


@checked()
@contextmanager
def full_parameters(
    model: nn.Module,
    *,
    bucket_bytes: int | str = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
    include_buffers: bool = False,
) -> Iterator[Steps[tuple[str, torch.Tensor]]]:
    """Gather whole parameters, a bucket at a time, for programs that load weights (RL inference engines, exports)::

        with full_parameters(model, dtype=torch.bfloat16) as buckets:
            for bucket in buckets:            # a list of (FQN, tensor)
                engine.load_weights(bucket)

    Every parameter comes once under each of its canonical FQNs, the names in the unsharded, unwrapped model. All names
    of a tied parameter come together, with the same tensor. That includes frozen and ignored parameters, and sharded
    ones on any mesh. Values are the current values of the sharded parameters. They are cast before they are sent, by
    one collective for each flat parameter or part of one.

    Tensors have memory of their own, which is never reused, so you may keep them. Advancing the loop empties the
    previous list, so a loop holds one bucket plus the tensors it keeps. A kept tensor also keeps the memory of the
    tensors gathered with it from the same flat parameter. In a flattened loop (``(pair for bucket in buckets for pair
    in bucket)``) the last tensor of a bucket still exists while the next bucket is gathered.

    Ranks: all ranks of the model. They wait for each other, for a bounded time (``FSDP_COMPOSE_TIMEOUT``), at the
    start, before each bucket and at the end. Every rank must take all buckets, even if it does nothing with them. If a
    rank leaves the loop early or raises, all ranks raise at their next step; if all leave at the same place, none
    raises.

    Args:
        model: any kind of model, as for ``get_model_state_dict``, or a part of one.
        bucket_bytes: maximum size of a bucket, in bytes or as ``"256MB"``; a larger parameter is a bucket of its own.
        dtype: dtype to send floating-point parameters in; ``None``: their own. Other parameters, and buffers, keep
            theirs.
        rank0_only: only the first rank gets parameters; the others get empty lists and hold no more than their shards.
        include_buffers: send persistent buffers too, with this rank's values.

    Raises:
        RuntimeError: on every rank: a rank did not arrive, or passed other arguments; a forward or backward is running;
            parameters were written to between two buckets; or a rank left the loop while others continued.
        ValueError: ``bucket_bytes`` is not positive.
        TypeError: ``dtype`` is not a floating-point dtype.
    """
    check_dtype("full_parameters", dtype)
    bucket_bytes = size_of(bucket_bytes, "full_parameters(bucket_bytes={})")
    names = names_of(model)
    sources = sources_of(names, dtype, include_buffers)
    gather = partial(gather_run, rank0_only=rank0_only, is_first=Peers.of(names, "full_parameters()").is_first)
    options = f"bucket_bytes={bucket_bytes}, rank0_only={rank0_only}"
    with in_step("full_parameters()", names, sources, bucket_bytes, options, gather) as steps:
        yield steps


@contextmanager
def in_step(
    call: str,
    names: ModelNames,
    sources: list[Source],
    bucket_bytes: int,
    options: str,
    gather: Callable[[Run], list[T]],
    problem: str = "",
) -> Iterator[Steps[T]]:
    """Loop over buckets of ``sources``, with all ranks in step. ``problem`` says why this rank cannot begin."""
    peers = Peers.of(names, call)
    peers.agree([options, *(source.fact for source in sources)], problem or why_unreadable(sources))
    before = versions_of(sources)

    def present_problem() -> str:
        if versions_of(sources) != before:
            return (
                "parameters were written to or moved since the loop began (optimizer.step()?), so buckets would mix "
                "two versions of the model: leave the loop first"
            )
        return why_unreadable(sources)

    steps = Steps(peers, plan_buckets(sources, bucket_bytes), gather, present_problem)
    # Leaving is a rendezvous too: a rank that leaves meets those that go on, and all raise. That needs a context: a
    # generator that a ``break`` leaves behind may never be closed.
    try:
        yield steps
    except BaseException as error:
        steps.leave(error)
        raise
    steps.leave(None)


def check_dtype(call: str, dtype: torch.dtype | None) -> None:
    """Raise if values cannot be sent in this dtype."""
    if dtype is not None and not dtype.is_floating_point:
        raise MisuseTypeError(f"{call}(dtype=...): expected a floating-point dtype or None, got {dtype!r}")
