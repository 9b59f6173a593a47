"""The order in which one process group carries collectives, over all models that it carries: ranks must have the same.

Two models on one process group share their communicator: where one rank runs the first and another rank the second,
collectives of equal size pair without a word. So there is one order for each process group. It numbers the
``fully_shard`` groups of all models as these run first, which all ranks do together, and notes what is issued; the
control exchange compares it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from ..flat import FlatParamHandle

_MAX_TRACE = 1 << 16  # collectives remembered between two exchanges: only a program without backward reaches it
ALL_GATHER, REDUCE_SCATTER, SCATTER_ALONE = 0, 1, 2  # the last bits of what the trace holds; the others: which group
KIND_BITS = 2
END_OF_BACKWARD = -1  # no collective, but what an exchange may be for
END_OF_FORWARD = 1 << 62  # likewise, of a forward that has looked for unseen writes
START_OF_BACKWARD, SERVE = END_OF_FORWARD + 1, END_OF_FORWARD + 2  # points of roots with optional groups
_END_OF_GROUP = 1 << 61  # from here to END_OF_FORWARD: the end of a forward of a group
ENDS = {
    END_OF_BACKWARD: "the end of backward",
    END_OF_FORWARD: "the end of forward",
    START_OF_BACKWARD: "the start of backward",
    SERVE: "sync_optional_groups()",
}
_MAX_GROUPS = 1 << 24  # a code below END_OF_BACKWARD: a hash of the flags of requires_grad, and which group has them
_FOLDED = 1 << 63  # a code from here on: a hash of many
_KINDS = ("all-gather", "reduce-scatter", "reduce-scatter without all-reduce")


class OrderedRoot(Protocol):
    """The part of a ``Root`` that an order knows."""

    @property
    def number(self) -> int: ...

    @property
    def states(self) -> Sequence[Callable[[], Group | None]]: ...  # weak references

    @property
    def label(self) -> str: ...

    def has_backward_to_come(self) -> bool: ...

    def phase(self) -> str: ...


class Group(Protocol):
    """The part of an ``_FSDPState`` that an order knows."""

    @property
    def code(self) -> int: ...

    @property
    def serial(self) -> int: ...

    @property
    def _handles(self) -> list[FlatParamHandle]: ...

    def take_number(self, code: int) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def root(self) -> OrderedRoot | None: ...


_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = weakref.WeakKeyDictionary()


class CollectiveLog:
    """The collectives that one process group has carried.

    Attributes:
        trace: codes of the collectives issued since the last exchange; ``num_collectives`` those before.
        num_roots: how many roots have run.
    """

    __slots__ = (
        "__weakref__", "_next_number", "_serials", "_states", "_waiting", "num_collectives", "num_roots", "trace",
    )  # fmt: skip

    def __init__(self) -> None:
        self.trace: list[int] = []
        self.num_collectives = 0
        self.num_roots = 0
        self._next_number = 0
        self._states: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._serials: defaultdict[str, list[int]] = defaultdict(list)  # of the roots that have run, by their model
        self._waiting: weakref.WeakSet[Group] = weakref.WeakSet()  # ``fully_shard`` groups that no root has run

    @staticmethod
    def of(process_group: dist.ProcessGroup) -> CollectiveLog:
        order = _orders.get(process_group)
        if order is None:
            order = _orders[process_group] = CollectiveLog()
        return order

    @property
    def count(self) -> int:
        """How many collectives were issued in all."""
        return self.num_collectives + self._num_in_trace()

    def _num_in_trace(self) -> int:
        """Without the codes that stand for no collective: a rank may have toggled ``requires_grad`` alone."""
        return len([code for code in self.trace if code > END_OF_BACKWARD])

    def hash(self, root: OrderedRoot, code: int) -> int:
        """A hash of what was issued since the last exchange, and of what ``root`` is about to do."""
        return order_hash((code, *self.trace), root.number)

    def close(self) -> None:
        """All ranks have compared, or given up, what was issued."""
        self.num_collectives += self._num_in_trace()
        self.trace.clear()

    def compact(self) -> None:
        """Keep a hash of a long trace in place of it."""
        if len(self.trace) > _MAX_TRACE:
            self.num_collectives += self._num_in_trace() - 1
            self.trace[:] = [_FOLDED + (order_hash(self.trace, 0) & (_FOLDED - 1))]

    # ---- models

    @staticmethod
    def known() -> list[tuple[dist.ProcessGroup, CollectiveLog]]:
        """Every process group that has an order."""
        return [*_orders.items()]

    def has_others_in_backward(self, root: OrderedRoot) -> bool:
        """Whether another root than ``root`` has a backward that is running, or to come."""
        return any([item is not root and item.has_backward_to_come() for item in self.roots()])

    def register_group(self, state: Group) -> None:
        """A group was made that this process group will carry."""
        self._waiting.add(state)

    def place_of(self, root: Group, states: Sequence[Group], model: str) -> str:
        """Where ``root`` stands among equal roots that have run and equal groups that have not, by when they were made:
        tells ranks that begin with different ones of several equal models (``model``: a digest) from each other."""
        earlier = sum(serial < root.serial for serial in self._serials[model])
        shape = _shape_of(root)
        others = [state.serial for state in self._waiting.difference(states) if _shape_of(state) == shape]
        return f"{earlier} {sum(serial < root.serial for serial in others)} {len(others)}"

    def register_root(self, root: Group, states: Sequence[Group], model: str) -> int:
        """Number the groups of a root that begins to run, the same way on all ranks; the number of the root."""
        for state in states:
            self._waiting.discard(state)
            if state.code < 0:
                state.take_number(self._next_number << KIND_BITS)
                self._states[self._next_number] = state
                self._next_number += 1
        previous = root.root
        if previous is not None and previous.states[0]() is root:
            return previous.number
        self._serials[model].append(root.serial)
        self.num_roots += 1
        return self.num_roots

    def trace_as_text(self, root: OrderedRoot, code: int) -> list[str]:
        """The trace since the last exchange, and what ``root`` is about to do: in each line the code, which alone tells
        whether ranks differ (a model may be gone on some ranks only), what it is, and the model."""
        now = f"{ENDS[code]}\t{root.label}" if code in ENDS else self._as_text(code)
        return [*(f"{item}\t{self._as_text(item)}" for item in self.trace), f"{code} {root.number}\t{now}"]

    def last_as_text(self) -> str:
        """What was issued last, if that was since the last exchange; may be called in another thread."""
        last = self.trace[-1:]
        return self._as_text(last[0]).replace("\t", " of ") if last else ""

    def name_of(self, code: int) -> str:
        """What a code stands for, as text."""
        return ENDS[code] if code in ENDS else self._as_text(code).partition("\t")[0]

    def roots(self) -> list[OrderedRoot]:
        """Those that have run, and live."""
        return [*{id(root): root for state in [*self._states.values()] if (root := state.root) is not None}.values()]

    def _as_text(self, code: int) -> str:
        if code >= _FOLDED:
            return "the last of many collectives that are no longer remembered"
        is_end = code >= _END_OF_GROUP
        code -= is_end * _END_OF_GROUP
        flags, number = divmod(-2 - code, _MAX_GROUPS) if code < END_OF_BACKWARD else (0, code >> KIND_BITS)
        state = self._states.get(number)
        root = None if state is None else state.root
        name = "a group that is gone\t" if state is None or root is None else f"{state.name}\t{root.label}"
        if code < END_OF_BACKWARD:
            return f"no collective but a change of requires_grad (to {flags:x}) in {name}"
        if is_end:
            return f"the end of the forward of {name}"
        kind = code & 3
        if kind == REDUCE_SCATTER and state is not None and any([item.mesh.has_whole for item in state._handles]):
            return f"the all-reduce of {name}"
        return f"the {_KINDS[kind]} of {name}"


def entry_of_flags(code: int, text: str) -> int:
    """The code of a change of ``requires_grad`` in the group of ``code``: ``text`` says in what, and to what."""
    digest = hashlib.sha256(text.encode()).digest()
    return -2 - int.from_bytes(digest[:6], "little") * _MAX_GROUPS - (code >> KIND_BITS)


def entry_of_end(code: int) -> int:
    """The code of the end of a forward of the group of ``code``."""
    return _END_OF_GROUP + code


def first_difference_of_traces(ours: str, theirs: str) -> tuple[int, str, str] | None:
    """The first place where the traces of two ranks, as text, differ, with what each was at, as messages have it."""
    traces = [dict(enumerate(text.split("\n"))) for text in (ours, theirs)]
    for position in range(max(map(len, traces))):
        (a_code, _, a), (b_code, _, b) = (trace.get(position, "\tnothing").partition("\t") for trace in traces)
        if a_code != b_code:
            return position, *_name_models(a, b)
    return None


def _name_models(a: str, b: str) -> tuple[str, str]:
    """What two lines of traces tell, with the models if these differ."""
    has_several = len({line.partition("\t")[2] for line in (a, b)} - {""}) > 1
    named = [line.replace("\t", " of ") if has_several else line.partition("\t")[0] for line in (a, b)]
    return named[0], named[1]


def _shape_of(state: Group) -> list[tuple[list[str], int]]:
    return [([*handle.fqns], handle.layout.flat_numel) for handle in state._handles]


def judge_places(places: Sequence[str]) -> str:
    """Whether the ranks begin to run the same one of equal models, by their ``place_of``: an error, or an empty text.
    Ranks may have made models, or dropped them, that others have not: their numbers tell nothing then."""
    earlier, positions, counts = zip(*(place.split() for place in places), strict=True)
    for found, is_telling in ((earlier, True), (positions, len(set(counts)) == 1)):
        if is_telling and len(set(found)) > 1:
            rank = next(rank for rank, value in enumerate(found) if value != found[0])
            return (
                "first forward: the ranks begin to run different ones of several equal models: that of rank 0 was "
                f"made after {found[0]} of the {'others' if found is positions else 'ones that have run'}, that of "
                f"rank {rank} after {found[rank]}. Make the models, and run them, in the same order on every rank"
            )
    return ""


def order_hash(trace: Sequence[int], seed: int) -> int:
    """A hash of a sequence of integers that is the same in every process (integers are not salted)."""
    return hash((seed, len(trace), *trace))
