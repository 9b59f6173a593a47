"""The order of collectives on one process group, for all models that use it. It must be the same on every rank.

Two models on one process group share its communicator: if one rank runs the first model and another rank the second,
collectives of equal size pair silently. So there is one order per process group. It numbers the ``fully_shard`` groups
of every model at the model's first forward, which all ranks run together, and records each collective that is issued.
The control exchange compares the records.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch.distributed as dist

from ..comm import kept_for

if TYPE_CHECKING:
    from ..flat import FlatParamHandle

_MAX_ENTRIES = 1 << 16  # collectives remembered between two exchanges; only a program without backward gets there
FLAGS_CHANGED = "no collective but a change of requires_grad"
LOADED = "no collective but a load_state_dict() of whole tensors"
REPLICAS_SET = "no collective but a set_replicas()"
TRANSPORTS_SET = "no collective but a set_transport() or set_wire_formats()"
REPLICAS_DIFFER = "no collective but the news that another replica group has issued other reductions"
UNSHARDED_DIFFER = "no collective but a look at the unsharded parameters that a parametrization was put on"


# Integers, because Python salts the hashes of strings, and of other enums, in each process.
class Kind(IntEnum):
    """What an entry says."""

    # collectives of a group
    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    SCATTER_ALONE = 2  # a reduce-scatter whose result is not averaged over replicas
    FOLDED = 3  # many collectives
    # notes: no collectives, but things that must be the same on all ranks
    FLAGS = 4  # a change of ``requires_grad``
    LOADED = 5  # a ``load_state_dict()`` of whole tensors
    UNSHARDED = 6  # what the ranks have gathered
    # where a rank is, in an exchange
    END_OF_BACKWARD = 7
    END_OF_FORWARD = 8  # a forward that has looked for untracked writes ends with an exchange
    START_OF_BACKWARD = 9
    END_OF_GROUP = 10  # of the forward of a group
    SERVE = 11
    OTHER_MODEL = 12  # where another root goes on
    # more notes
    REPLICAS = 13  # ``set_replicas()``
    TRANSPORTS = 15  # ``set_transport()``
    REPLICAS_DIFFER = 14  # another replica group has reduced other gradients


class Entry(NamedTuple):
    """A line of the log, or a moment of the program. Equal on all ranks that do the same.

    Attributes:
        kind: what was done.
        group: the number of the group, if it is about one.
        detail: a hash of the rest.
    """

    kind: Kind
    group: int = -1
    detail: int = 0

    def __str__(self) -> str:
        return f"{self.kind:d} {self.group} {self.detail}"


END_OF_BACKWARD, END_OF_FORWARD, START_OF_BACKWARD = map(
    Entry, (Kind.END_OF_BACKWARD, Kind.END_OF_FORWARD, Kind.START_OF_BACKWARD)
)
SERVE, OTHER_MODEL = Entry(Kind.SERVE), Entry(Kind.OTHER_MODEL)
MOMENTS = {
    END_OF_BACKWARD: "the end of backward",
    END_OF_FORWARD: "the end of forward",
    START_OF_BACKWARD: "the start of backward",
    SERVE: "sync_optional_groups()",
    OTHER_MODEL: "the start or end of another model's forward or backward",
}


class GroupEntries:
    """The entries of one group, made once."""

    __slots__ = ("all_gather", "end_of_forward", "reduce_scatter", "scatter_alone")

    def __init__(self, number: int) -> None:
        """``number``: the group's; -1 before it has one."""
        self.all_gather = Entry(Kind.ALL_GATHER, number)
        self.reduce_scatter = Entry(Kind.REDUCE_SCATTER, number)
        self.scatter_alone = Entry(Kind.SCATTER_ALONE, number)
        self.end_of_forward = Entry(Kind.END_OF_GROUP, number)

    def note(self, kind: Kind, text: str) -> Entry:
        """The entry of a note; ``text`` says how it came out."""
        digest = hashlib.sha256(text.encode()).digest()
        return Entry(kind, self.all_gather.group, int.from_bytes(digest[:6], "little"))


UNNUMBERED = GroupEntries(-1)


class OrderedRoot(Protocol):
    """What the order uses of a ``Root``."""

    number: int
    order: CollectiveLog

    @property
    def states(self) -> Sequence[Callable[[], Group | None]]: ...  # weak references

    @property
    def label(self) -> str: ...

    def has_backward_to_come(self) -> bool: ...

    def phase(self) -> str: ...


class Group(Protocol):
    """What the order uses of an ``_FSDPState``."""

    log: GroupEntries
    serial: int
    _handles: list[FlatParamHandle]

    @property
    def name(self) -> str: ...

    @property
    def root(self) -> OrderedRoot | None: ...


class CollectiveLog:
    """The collectives that one process group has carried.

    Attributes:
        entries: the collectives issued since the last exchange.
        num_collectives: how many were issued before that.
        num_roots: how many roots have run.
        serve: called with a root and an entry before that root issues the collective of this entry, if a root on the
            process group has optional groups: ranks may request these until all are at this collective.
    """

    __slots__ = (
        "__weakref__", "_next_number", "_serials", "_states", "_waiting", "entries", "num_collectives", "num_roots",
        "serve",
    )  # fmt: skip

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.num_collectives = 0
        self.num_roots = 0
        self.serve: Callable[[OrderedRoot | None, Entry], None] | None = None
        self._next_number = 0
        self._states: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._serials: defaultdict[str, list[int]] = defaultdict(list)  # serials of roots that have run, by model
        self._waiting: weakref.WeakSet[Group] = weakref.WeakSet()  # ``fully_shard`` groups that no root has run

    @staticmethod
    def of(process_group: dist.ProcessGroup) -> CollectiveLog:
        return kept_for(process_group, CollectiveLog)

    def record(self, root: OrderedRoot, entry: Entry) -> None:
        """Record a collective, which the caller issues next."""
        if self.serve is not None:
            self.serve(root, entry)
        self.entries.append(entry)

    @property
    def count(self) -> int:
        """The total number of collectives issued."""
        return self.num_collectives + self._num_entries()

    def _num_entries(self) -> int:
        """How many entries are collectives."""
        # One rank may make notes alone, and its count must still be that of the others.
        return len([entry for entry in self.entries if entry.kind <= Kind.FOLDED])

    def hash(self, root: OrderedRoot, moment: Entry) -> int:
        """A hash of the collectives since the last exchange and of the ``moment`` that ``root`` is at."""
        return order_hash((moment, *self.entries), root.number)

    def close(self) -> None:
        """Forget the entries, after all ranks have compared it or given it up."""
        self.num_collectives += self._num_entries()
        self.entries.clear()

    def compact(self) -> None:
        """Replace a long list of entries by its hash."""
        if len(self.entries) > _MAX_ENTRIES:
            self.num_collectives += self._num_entries() - 1
            self.entries[:] = [Entry(Kind.FOLDED, detail=order_hash(self.entries, 0))]

    # ---- Models

    def has_others_in_backward(self, root: OrderedRoot) -> bool:
        """Whether a root other than ``root`` has a backward that is running or still to come."""
        return any([item is not root and item.has_backward_to_come() for item in self.roots()])

    def register_group(self, state: Group) -> None:
        """Note a new group, whose collectives this process group will carry."""
        self._waiting.add(state)

    def position_of(self, root: Group, states: Sequence[Group], model: str) -> str:
        """The position of ``root``, by creation, among equal roots that have run and equal groups that have not.

        Ranks that start with different ones of several equal models (``model`` is a digest) have different places."""
        earlier = sum(serial < root.serial for serial in self._serials[model])
        shape = _shape_of(root)
        others = [state.serial for state in self._waiting.difference(states) if _shape_of(state) == shape]
        return f"{earlier} {sum(serial < root.serial for serial in others)} {len(others)}"

    def register_root(self, root: Group, states: Sequence[Group], model: str) -> int:
        """Number the groups of a root at its first forward, the same way on all ranks. Returns the root's number."""
        for state in states:
            self._waiting.discard(state)
            if state.log is UNNUMBERED:
                state.log = GroupEntries(self._next_number)
                self._states[self._next_number] = state
                self._next_number += 1
        previous = root.root
        if previous is not None and previous.states[0]() is root:
            return previous.number
        self._serials[model].append(root.serial)
        self.num_roots += 1
        return self.num_roots

    def entries_as_text(self, root: OrderedRoot, moment: Entry) -> list[str]:
        """The entries since the last exchange and the ``moment`` of ``root``, a line each: entry, meaning, model."""
        # Only the entries tell ranks apart: a model may be gone, and have no name, on some ranks only.
        now = f"{MOMENTS[moment]}\t{root.label}" if moment in MOMENTS else self._as_text(moment)
        return [*(f"{item}\t{self._as_text(item)}" for item in self.entries), f"{moment} {root.number}\t{now}"]

    def last_as_text(self) -> str:
        """The last collective, if it was issued since the last exchange; may be called in another thread."""
        last = self.entries[-1:]
        return self._as_text(last[0]).replace("\t", " of ") if last else ""

    def name_of(self, entry: Entry) -> str:
        """The meaning of an entry, as text."""
        return MOMENTS[entry] if entry in MOMENTS else self._as_text(entry).partition("\t")[0]

    def roots(self) -> list[OrderedRoot]:
        """The roots that have run and are still alive."""
        return [*{id(root): root for state in [*self._states.values()] if (root := state.root) is not None}.values()]

    def _as_text(self, entry: Entry) -> str:
        if entry.kind == Kind.FOLDED:
            return "the last of many collectives that are no longer remembered"
        state = self._states.get(entry.group)
        root = None if state is None else state.root
        name = "a group that is gone\t" if state is None or root is None else f"{state.name}\t{root.label}"
        if entry.kind in _NOTES:
            group, _, label = name.partition("\t")
            return f"{_NOTES[entry.kind]} of {group} (a digest: {entry.detail:012x})\t{label}"
        if entry.kind == Kind.FLAGS:
            frozen = [] if state is None else [item for handle in state._handles for item in _frozen(handle)]
            now = f"{', '.join(frozen[:3]) or 'nothing'}{' ...' if len(frozen) > 3 else ''}"
            group, _, label = name.partition("\t")
            return f"{FLAGS_CHANGED} in {group} (now frozen: {now})\t{label}"
        if entry.kind == Kind.END_OF_GROUP:
            return f"the end of the forward of {name}"
        is_whole = state is not None and any([item.mesh.is_replicated for item in state._handles])
        if entry.kind == Kind.REDUCE_SCATTER and is_whole:
            return f"the all-reduce of {name}"
        return f"the {_COLLECTIVES[entry.kind]} of {name}"


_NOTES = {
    Kind.LOADED: LOADED,
    Kind.UNSHARDED: UNSHARDED_DIFFER,
    Kind.REPLICAS: REPLICAS_SET,
    Kind.TRANSPORTS: TRANSPORTS_SET,
    Kind.REPLICAS_DIFFER: REPLICAS_DIFFER,
}
_COLLECTIVES = {
    Kind.ALL_GATHER: "all-gather",
    Kind.REDUCE_SCATTER: "reduce-scatter",
    Kind.SCATTER_ALONE: "reduce-scatter without all-reduce",
}


def _frozen(handle: FlatParamHandle) -> list[str]:
    return [name for name, flag in zip(handle.names, handle.unsharded.flags, strict=True) if not flag]


def first_difference_of_entries(ours: str, theirs: str) -> tuple[int, str, str] | None:
    """The first position where the entries of two ranks differ, with both entries as messages show them."""
    lines = zip_longest(ours.split("\n"), theirs.split("\n"), fillvalue="\tnothing")
    for position, both in enumerate(lines):
        (a_entry, _, a), (b_entry, _, b) = (line.partition("\t") for line in both)
        if a_entry != b_entry:  # with the models, if these differ
            has_several = len({line.partition("\t")[2] for line in (a, b)} - {""}) > 1
            a, b = (line.replace("\t", " of ") if has_several else line.partition("\t")[0] for line in (a, b))
            return position, a, b
    return None


def _shape_of(state: Group) -> list[tuple[list[str], int]]:
    return [([*handle.fqns], handle.layout.flat_numel) for handle in state._handles]


def judge_positions(of_ranks: Sequence[str]) -> str:
    """Compare the ``position_of`` of all ranks, to see whether they start with the same one of several equal models.
    Returns an error text, or an empty one."""
    earlier, positions, counts = zip(*(line.split() for line in of_ranks), strict=True)
    # If ranks have different numbers of waiting groups (some have made or dropped models alone), positions among these
    # mean nothing.
    for found, is_telling in ((earlier, True), (positions, len(set(counts)) == 1)):
        if is_telling and len(set(found)) > 1:
            rank = next(rank for rank, value in enumerate(found) if value != found[0])
            return (
                "first forward: there are several equal models, and the ranks start with different ones: rank 0's was "
                f"made after {found[0]} of the {'others' if found is positions else 'ones that have run'}, "
                f"rank {rank}'s after {found[rank]}. Make the models, and run them, in the same order on every rank"
            )
    return ""


def order_hash(entries: Sequence[Entry], seed: int) -> int:
    """A hash of a sequence of entries, the same in every process."""
    # Entries consist of integers, whose hashes Python does not salt.
    return hash((seed, len(entries), *entries))
