"""How flat tensors move between the ranks of a process group: each collective is written here, once.

A ``Transport`` belongs to one process group and serves the groups on it; ``FlatParamHandle.change_transports`` gives a
group another one. A transport only issues: its caller chooses the stream, waits, and reports failures. This file also
holds the labels by which errors and schedules name a collective, the conversion of elements that a backend cannot
carry, and transports around another one: what users derive theirs from, and one that records.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..._arguments import checked
from ..._torch import AllgatherOptions, AllreduceOptions, ReduceScatterOptions, group_device_types

# ---- Streams and events: the one place they come from, which a test can replace


def streams_of(device: torch.device) -> Any:
    """The module with ``Stream``, ``Event``, ``stream`` and ``current_stream`` for a device (``torch.cuda``); ``None``
    for the CPU, where everything is done once it is issued, and for the meta device, where nothing is."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)


def is_capturing(device: torch.device) -> bool:
    """Whether what is issued now becomes a graph (CUDA's), so that the host can't wait for results."""
    module = streams_of(device)
    return hasattr(module, "is_current_stream_capturing") and module.is_current_stream_capturing()


# ---- Kinds of collectives, and labels for what they carry, as errors and schedules print them.


class CollectiveKind:
    """What a collective does, in words."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SECOND_HALF = "second half of the all-reduce"
    MESSAGES = "exchange of tensors"
    BACKWARD = "exchange at the end of backward"
    FORWARD = "exchange at the end of forward"
    INTRODUCTION = "introduction before the first long sum"
    ROUND = "round about optional groups"
    ALL_TO_ALL = "all-to-all"
    STEP = "start of an optimizer's step"
    GATHER = "gather"  # of unequal shards, or to one rank: several of these, or calls of torch.distributed


KINDS = [kind for name, kind in vars(CollectiveKind).items() if name.isupper()]


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Make the result visible to later work on the current stream. May be called again after an interruption."""


@dataclass(frozen=True)
class Names:
    """Turns the names of a group's parameters into names in the root. If the group has several modules, its own names
    begin with the number of the module.

    Attributes:
        modules: the names of the group's modules in the root.
    """

    modules: tuple[str, ...]

    def __call__(self, fqn: str) -> str:
        module = self.modules[0]
        if len(self.modules) > 1:
            number, _, fqn = fqn.partition(".")
            module = self.modules[int(number)]
        return f"{module}.{fqn}" if module else fqn

    def __str__(self) -> str:
        return ", ".join([name or "the root" for name in self.modules])


IN_GROUP = Names(("",))  # before a root is known


class Label:
    """The parameters that collectives are for.

    Attributes:
        names: turns their names in the group into names in the root.
        whole_group: the name of their group, if they are all of its parameters; else empty.
        text: the label in messages: the group's name, if they are all of its parameters and several.
    """

    __slots__ = ("_fqns", "names", "text", "whole_group")

    def __init__(self, fqns: Sequence[str], names: Names = IN_GROUP, whole_group: str = "") -> None:
        """``fqns``: the names in the group; at least one."""
        self._fqns = fqns
        self.rename(names, whole_group)

    def rename(self, names: Names, whole_group: str = "") -> None:
        self.names, self.whole_group = names, whole_group
        self.text = whole_group if whole_group and len(self._fqns) > 1 else self._named_parameters()

    def of(self, indices: Sequence[int]) -> Label:
        """A label for some of the parameters."""
        return Label([self._fqns[i] for i in indices], self.names)

    @property
    def group(self) -> str:
        """The group that they are in, for errors."""
        return f"the fully_shard group {self.whole_group or f'with {self._named_parameters()}'}"

    def _named_parameters(self) -> str:
        more = f" and {len(self._fqns) - 1} more" if len(self._fqns) > 1 else ""
        return f"{self.names(self._fqns[0])}{more}"

    def __str__(self) -> str:
        return self.text


# ---- Conversion of elements for transport


# unknown to gloo
_AS_BYTES = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


# known to every backend
PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64})


def as_transferable(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory, in a dtype that every backend can gather, and can reduce unless it holds integers."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor).view(-1)
    if tensor.dtype.itemsize == 1 or tensor.dtype in _AS_BYTES:
        return tensor.view(torch.uint8)
    return tensor


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device where a tensor on ``device`` must be for collectives of ``group``."""
    if device.type != "cpu":
        return device
    # NCCL alone has no backend for host memory.
    types = group_device_types(group)
    if not types or "cpu" in types:
        return device
    device_type = min(types)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


# ---- The transport


class Replicas(Protocol):
    """What ``set_replicas`` takes: groups of ranks that train the same model, each of which may be lost as a whole.

    Both methods are called by every rank of every group, in the same order, in each backward that reduces gradients:
    ``maximum`` before the first ``average`` and after the last one.
    Each rank stands for its group: it communicates with the ranks of the same number in the other groups. When a group
    is lost, both must still return in bounded time, on every rank: some may have noticed and call no more, others not.
    """

    def average(self, tensor: torch.Tensor) -> Work:
        """Begin to replace ``tensor`` by its average over the groups that take part in this step, and return an object
        whose ``wait()`` makes the result visible on the current stream.

        If a group is lost, ``wait()`` must return all the same, with any values in ``tensor``: ``maximum`` tells. A
        ``RuntimeError`` in ``wait()`` ends this group: its other ranks raise ``RankLostError``.

        Args:
            tensor: this rank's shard of a gradient, averaged over its group: 1-D, contiguous, in the reduce dtype, on
                the device that computes.
        """

    def maximum(self, tensor: torch.Tensor) -> bool:
        """Replace ``tensor`` by its elementwise maximum over the groups that take part in this step, and wait for it.

        A group that takes part in communication only (because it does not have the parameters yet) contributes zeros.

        Args:
            tensor: of dtype uint8, on the device that computes.

        Returns:
            Whether it worked, and every average of this backward too. ``False``: a group was lost. The gradients are
            then worthless, and the caller must not step with them.
        """


TRANSPORT_ENV = "FSDP_COMPOSE_TRANSPORT"


class TransportRole(Enum):
    """What a transport of a group is for."""

    SHARDS = "shards"  # gathers parameters and scatters gradients
    REPLICAS = "replicas"  # averages gradients over the ranks that hold the same shard
    PARTS = "parts"  # gathers what adjacent ranks have kept (``reshard_after_forward=int``)
    TENSOR_PARALLEL = "tensor-parallel sums"  # of gradients; always as they are


_LONG_BYTES = 1 << 20  # of one rank's shard: above this, copying padded shards costs more than one broadcast per shard

Range = tuple[int, int]
"""Elements from the first number up to, but not including, the second."""


class Transport:
    """The collectives of the process group itself.

    Tensors are 1-D, contiguous, and on one device. Ranks: all ranks of the process group call each method, in the same
    order. ``label`` names the parameters that a collective is for.

    Attributes:
        name: compared at the first forward: it must be the same on every rank.
        group: the process group.
    """

    name = "collectives"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def exact(self) -> Transport:
        """The transport for what must arrive bit for bit and is no training: this one, or that below its wrappers."""
        return self

    @property
    def rounds(self) -> bool:
        """Whether ``all_gather`` may fill in other bits than it was given."""
        return False

    def over(self, change: Callable[[Transport], Transport]) -> Transport:
        """A transport like this one, with ``change(transport)`` where it sends bytes."""
        return change(self)

    def changed(self, change: Callable[[Transport], Transport]) -> Transport:
        """``change(transport)``; or the same around it, for one that is a part of a layout."""
        return change(self)

    def as_gathered(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """What ranks see of ``part``, this rank's elements, when it was gathered as ``dtype``; ``None``: unknown."""
        return part.to(dtype)

    @property
    def unrecorded(self) -> Transport:
        """This transport, or the one that it records."""
        return self

    @property
    def num_ranks(self) -> int:
        """How many ranks take part in a collective; 0 if that changes (replica groups)."""
        return self.group.size()

    @property
    def replicas(self) -> Replicas | None:
        """The user's replica groups over which this one averages, if it does that."""
        return None

    def among(self, peers: dist.ProcessGroup) -> Transport:
        """A transport for the same process group whose ranks work in lockstep with all of ``peers``."""
        return self

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        """Fill ``whole`` with the equal shards of all ranks, in order; ``shard`` may be this rank's chunk of it. If
        this transport ``rounds``, it may have another dtype."""
        if whole.dtype not in PLAIN:
            whole, shard = as_transferable(whole), as_transferable(shard)
        return self.group._allgather_base(whole, shard, _ALL_GATHER)

    def prepared_all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Callable[[], Work]:
        """Return a function that issues ``all_gather`` with these arguments each time it is called."""
        if type(self) is not Transport:
            return partial(self.all_gather, whole, shard, label)
        return partial(self.group._allgather_base, as_transferable(whole), as_transferable(shard), _ALL_GATHER)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        """Fill ``shard`` with this rank's chunk of the sum, or average, of ``whole`` over the ranks. ``shard`` may be
        this rank's chunk of ``whole``, and ``whole`` may be overwritten."""
        options = _AVERAGE if is_average else _SUM
        if whole.dtype not in PLAIN:
            whole, shard = as_transferable(whole), as_transferable(shard)
        return self.group._reduce_scatter_base(shard, whole, options)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        """Replace ``tensor`` by its sum, or average, over the ranks."""
        options = _ALL_AVERAGE if is_average else _ALL_SUM
        return self.group.allreduce([as_transferable(tensor)], options)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        num_moved: int,
        label: Label,
    ) -> Work:
        """Send each rank its chunk of ``sent``, and fill ``received`` with the chunks for this rank, in the order of
        ranks. ``num_moved``: the elements of all chunks of all ranks, the same on every rank."""
        into, out = as_transferable(received), as_transferable(sent)
        work = dist.all_to_all_single(into, out, [*received_sizes], [*sent_sizes], self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        return work

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        """Fill ``whole`` with the elements of all ranks, and wait for it.

        Args:
            whole: ``None`` on a rank that does not want it.
            part: this rank's elements.
            ranges: the position of each rank's elements in ``whole``; ranks may have unequally many.
            is_everywhere: all ranks want it, rather than only the first.
        """
        lengths = {stop - start for start, stop in ranges}
        if lengths == {0}:
            return
        # Memory is sent as it is: a conjugate that torch has only marked as one must be computed first.
        part = part.resolve_conj()
        is_even = len(lengths) == 1 and [*ranges] == sorted(ranges)
        if is_everywhere and is_even:
            assert whole is not None
            self.all_gather(whole, part, label).wait()
        elif is_everywhere:
            assert whole is not None
            self._gather_uneven(whole, part, ranges, label)
        elif not is_even:
            self._gather_uneven_on_first(whole, part, ranges)
        else:
            chunks = None if whole is None else [as_transferable(whole[start:stop]) for start, stop in ranges]
            dist.gather(as_transferable(part), chunks, group=self.group, group_dst=0)

    def skip(self, nbytes: int, label: Label) -> None:
        """Called when ranks of other process groups of the mesh gather ``nbytes`` and those of this one do not."""

    def _gather_uneven(self, whole: torch.Tensor, shard: torch.Tensor, ranges: Sequence[Range], label: Label) -> None:
        owners = [rank for rank, (start, stop) in enumerate(ranges) if stop > start]
        longest = max(stop - start for start, stop in ranges)
        if 2 * len(owners) <= len(ranges) or longest * shard.element_size() >= _LONG_BYTES:
            # Few ranks hold anything, or there is much to send: broadcast each shard straight to its place.
            whole[slice(*ranges[self.group.rank()])] = shard
            works = [
                dist.broadcast(
                    as_transferable(whole[slice(*ranges[rank])]), group=self.group, group_src=rank, async_op=True
                )
                for rank in owners
            ]
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()
            return
        padded = shard.new_zeros(longest)
        padded[: shard.numel()] = shard
        everything = shard.new_empty(longest * len(ranges))
        self.all_gather(everything, padded, label).wait()
        for rank, (start, stop) in enumerate(ranges):
            whole[start:stop] = everything[rank * longest : rank * longest + stop - start]

    def _gather_uneven_on_first(self, whole: torch.Tensor | None, shard: torch.Tensor, ranges: Sequence[Range]) -> None:
        """With point-to-point messages, which arrive at their final place."""
        if whole is None:
            messages = [dist.P2POp(dist.isend, as_transferable(shard), group=self.group, group_peer=0)]
        else:
            whole[slice(*ranges[0])] = shard
            messages = [
                dist.P2POp(dist.irecv, as_transferable(whole[start:stop]), group=self.group, group_peer=rank)
                for rank, (start, stop) in enumerate(ranges)
                if rank and stop > start
            ]
        if whole is None and not shard.numel():
            return
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


def _reducing(options: Any, op: Any) -> Any:
    options.reduceOp = op
    options.asyncOp = True
    return options


_ALL_GATHER = AllgatherOptions()
_ALL_GATHER.asyncOp = True
_AVERAGE = _reducing(ReduceScatterOptions(), dist.ReduceOp.AVG)
_SUM = _reducing(ReduceScatterOptions(), dist.ReduceOp.SUM)
_ALL_AVERAGE = _reducing(AllreduceOptions(), dist.ReduceOp.AVG)
_ALL_SUM = _reducing(AllreduceOptions(), dist.ReduceOp.SUM)


# ---- Transports around another one


@checked()
class TransportWrapper(Transport):
    """A transport that uses another one. Override some of ``all_gather``, ``reduce_scatter`` and ``all_reduce``.

    Those carry training. What must be exact (checkpoints, ``full_tensor()``, Muon's matrices) goes by ``inner``.

    Order: all ranks of a process group call the same methods in the same order; several collectives may be in flight,
    and each is waited for once, in the order of issue within each kind. A call must not block longer than it takes to
    issue. Streams: what a method issues belongs on the current stream, which is none that computes; ``wait()`` of the
    returned work makes the current stream, which computes, wait. Tensors are 1-D, contiguous, on one device. Their
    memory is the caller's, valid until the end of ``wait()``, and freed or reused afterwards. Memory that a method
    allocates must live as long as what it has issued.

    Args:
        inner: the transport to use.

    Attributes:
        inner: as given.
        name: compared at the first forward: it must be the same on every rank, and tell all settings.
        is_exact: ``all_gather`` fills in the bits that it was given. If it rounds, set this to ``False``: then it gets
            shards in their own dtype, and the look for writes through ``.data`` in forward does not take the rounding
            for one. Override ``as_gathered`` too, or nothing looks for such writes, which are lost.
    """

    is_exact = True

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.group)
        self.inner = inner

    @property
    def rounds(self) -> bool:
        return not self.is_exact or self.inner.rounds

    def as_gathered(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        return self.inner.as_gathered(part, dtype) if self.is_exact else None

    def over(self, change: Callable[[Transport], Transport]) -> Transport:
        twin = copy.copy(self)
        twin.inner = self.inner.over(change)
        return twin

    @property
    def unrecorded(self) -> Transport:
        twin = copy.copy(self)
        twin.inner = self.inner.unrecorded
        return twin

    @property
    def exact(self) -> Transport:
        return self.inner.exact

    @property
    def num_ranks(self) -> int:
        return self.inner.num_ranks

    @property
    def replicas(self) -> Replicas | None:
        return self.inner.replicas

    def among(self, peers: dist.ProcessGroup) -> Transport:
        twin = copy.copy(self)
        twin.inner = self.inner.among(peers)
        return twin

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        return self.inner.all_gather(whole, shard, label)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        return self.inner.reduce_scatter(shard, whole, is_average, label)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        return self.inner.all_reduce(tensor, is_average, label)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        num_moved: int,
        label: Label,
    ) -> Work:
        return self.inner.all_to_all(received, sent, received_sizes, sent_sizes, num_moved, label)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        self.inner.gather(whole, part, ranges, is_everywhere, label)

    def skip(self, nbytes: int, label: Label) -> None:
        self.inner.skip(nbytes, label)


# ---- A transport that records what passes through another one, for debugging and for tests.


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective.

    Attributes:
        kind: a ``CollectiveKind``.
        label: the parameters that it is for.
        numel, dtype: of the whole tensor, which each rank has before or after it; of an all-to-all, of all that moves.
        num_ranks: how many ranks take part; 0: replica groups, whose number changes.
        place: for a gather, which ranks get the whole tensor, in words.
    """

    kind: str
    label: str
    numel: int
    dtype: torch.dtype
    num_ranks: int
    place: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        if self.place:
            return f"{self.kind} {self.label} on {self.place}"
        dtype = str(self.dtype).removeprefix("torch.")
        ranks = f"{self.num_ranks} ranks" if self.num_ranks else "replica groups"
        return f"{self.kind} {self.label} ({self.numel} x {dtype} among {ranks})"


class CollectiveNotes:
    """Receives these calls for each collective, in this order; if the collective fails, the later ones are missing."""

    def issue(self, collective: Collective) -> None:
        """It is about to be issued; an exception raised here leaves nothing in flight."""

    def under_way(self, collective: Collective, work: Work) -> None:
        """It was issued, on the current stream."""

    def wait(self, collective: Collective) -> None:
        """Its result is about to be waited for, on the current stream."""

    def done(self, collective: Collective) -> None:
        """Later work sees the result."""


class Recorder(TransportWrapper):
    """Reports each collective when it is issued and when its result is waited for, also of what must be exact. It sends
    nothing itself, so wrappers around ``inner`` belong around it.

    Args:
        inner: a transport.
        notes: receives the reports.
    """

    name = "recorder"

    def __init__(self, inner: Transport, notes: CollectiveNotes) -> None:
        super().__init__(inner)
        self._notes = notes

    @property
    def unrecorded(self) -> Transport:
        return self.inner.unrecorded

    @property
    def exact(self) -> Transport:
        return self

    def over(self, change: Callable[[Transport], Transport]) -> Transport:
        return change(self)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        collective = self._issue(CollectiveKind.ALL_GATHER, label, whole)
        return self._under_way(collective, self.inner.all_gather(whole, shard, label))

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        collective = self._issue(CollectiveKind.REDUCE_SCATTER, label, whole)
        return self._under_way(collective, self.inner.reduce_scatter(shard, whole, is_average, label))

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        collective = self._issue(CollectiveKind.ALL_REDUCE, label, tensor)
        return self._under_way(collective, self.inner.all_reduce(tensor, is_average, label))

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        num_moved: int,
        label: Label,
    ) -> Work:
        collective = Collective(CollectiveKind.ALL_TO_ALL, str(label), num_moved, sent.dtype, self.group.size())
        self._notes.issue(collective)
        work = self.inner.all_to_all(received, sent, received_sizes, sent_sizes, num_moved, label)
        return self._under_way(collective, work)

    def gather(
        self, whole: torch.Tensor | None, part: torch.Tensor, ranges: Sequence[Range], is_everywhere: bool, label: Label
    ) -> None:
        place, numel = "every rank" if is_everywhere else "the first rank", sum(stop - start for start, stop in ranges)
        collective = Collective(CollectiveKind.GATHER, str(label), numel, part.dtype, self.group.size(), place)
        self._notes.issue(collective)
        self._notes.wait(collective)
        self.inner.gather(whole, part, ranges, is_everywhere, label)
        self._notes.done(collective)

    def _issue(self, kind: str, label: Label, whole: torch.Tensor) -> Collective:
        collective = Collective(kind, str(label), whole.numel(), whole.dtype, self.num_ranks)
        self._notes.issue(collective)
        return collective

    def _under_way(self, collective: Collective, work: Work) -> Work:
        if self.num_ranks:  # those of replica groups may be waited for on one stream alone: it ends when that is done
            self._notes.under_way(collective, work)
        return _Recorded(work, collective, self._notes)


class _Recorded:
    __slots__ = ("_collective", "_notes", "_work")

    def __init__(self, work: Work, collective: Collective, notes: CollectiveNotes) -> None:
        self._work, self._collective, self._notes = work, collective, notes

    def wait(self) -> None:
        self._notes.wait(self._collective)
        self._work.wait()
        self._notes.done(self._collective)
