"""Whether all ranks have captured the same collectives: compared when a graph with others than before was compiled,
before it runs.

What graphs issue is not in the order of collectives that is exchanged at the end of a backward. Ranks whose graphs
differ would wait for each other, each for another collective; so they compare. Graphs that differ in shapes alone are
not compared: ranks may compile those at different times.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable

import torch

from .._torch import call_after_compilation, tracing_attempt
from ..comm import first_difference, meet
from ..flat import summary_of
from ..group import Recipe, Root, _FSDPState, recipe_of

_compared: weakref.WeakKeyDictionary[Root, set[str]] = weakref.WeakKeyDictionary()


class VersionsBefore:
    """The versions of groups that graphs may run, before they do."""

    def __init__(self, states: Iterable[_FSDPState]) -> None:
        self._before = [(weakref.ref(state), state.shard_versions()) for state in states]

    def add(self, state: _FSDPState) -> None:
        """A graph is about to run this group for the first time."""
        if state not in [ref() for ref, _ in self._before]:
            self._before.append((weakref.ref(state), state.shard_versions()))

    def check_forward(self) -> None:
        """Raise if the forward has written to sharded parameters: a graph does not know that the parameters that it
        gathers and those that forward writes to have the same memory, and may read them earlier, or later."""
        for ref, versions in self._before:
            state = ref()
            if state is not None and state.shard_versions() != versions:
                raise RuntimeError(
                    f"a forward has written to sharded parameters of the fully_shard group {state.name}, which "
                    "torch.compile runs in a graph: it may have computed with the values before. Write to parameters "
                    "outside forward, or leave the module that does it out of the graph (torch.compiler.disable) and "
                    "compile the sharded modules one by one"
                )

    def check_backward(self) -> None:
        """Raise if they have changed since."""
        for ref, versions in self._before:
            state = ref()
            if state is not None:
                state.check_versions(versions)


class _Capture:
    """What one attempt of Dynamo to trace a frame has met.

    Attributes:
        attempt: which one; ``None`` if there was none.
        groups: of which a forward was traced, in order: the group, the key of its recipes, its module's place in it,
            and whether gradients are wanted.
    """

    __slots__ = ("attempt", "groups")

    def __init__(self, attempt: object = None) -> None:
        self.attempt = attempt
        self.groups: list[tuple[_FSDPState, str, int, bool]] = []


class _Present:
    capture = _Capture()


def note_capture(state: _FSDPState, key: str, index: int) -> None:
    """Called while Dynamo traces a forward of a module of a group: the one of this place in it."""
    attempt = tracing_attempt()
    if _Present.capture.attempt is not attempt:  # it begins anew after each break of the graph
        _Present.capture = _Capture(attempt)
        call_after_compilation(_compare)
    root = state.root
    if root is not None:
        versions = root.forward.record.captured
        if not isinstance(versions, VersionsBefore):
            versions = VersionsBefore(())
            root.forward.record.note_captured(versions)
        versions.add(state)
    _Present.capture.groups.append((state, key, index, torch.is_grad_enabled()))


def _compare() -> None:
    """Raise, on every rank, if ranks have captured different collectives; or if not all modules of a group of several
    have run."""
    capture, _Present.capture = _Present.capture, _Capture()
    if not capture.groups:
        return
    _check_complete(capture)
    root = capture.groups[0][0].root
    if root is None or not root.mesh.has_peers or root.mesh.is_simulated:
        return
    lines = [_line(state, recipe_of(key, index), has_grad) for state, key, index, has_grad in capture.groups]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    known = _compared.setdefault(root, set())
    if digest in known:
        return

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference(ours.split("\n"), theirs.split("\n"))
        assert difference is not None, "digests differ"
        number, a, b = difference
        return (
            f"torch.compile: the ranks have captured graphs with different collectives: group {number} is {a} on rank "
            f"0 and {b} on rank {rank}. They would wait for each other, so none was run. Let forward take the same way "
            "through the fully_shard'ed modules on every rank"
        )

    meet(root.mesh.peers, "comparing captured graphs", digest, lambda _: "", "\n".join(lines), explain)
    known.add(digest)


def _check_complete(capture: _Capture) -> None:
    counts: dict[_FSDPState, Counter[int]] = {}
    for state, _, index, _ in capture.groups:
        counts.setdefault(state, Counter())[index] += 1
    for state, found in counts.items():
        modules = state.live_modules()
        if len({found[index] for index in range(len(modules))}) > 1:
            names = ", ".join(type(module).__name__ for module in modules)
            raise RuntimeError(
                f"torch.compile: a graph runs only some of the modules of the fully_shard group {state.name} ({names}),"
                " or some more often than others; what it has gathered for them could not be freed. Shard modules that "
                "do not always run together by calls of their own"
            )


def _line(state: _FSDPState, recipe: Recipe, has_grad: bool) -> str:
    what = "; ".join(summary_of(number) for number in recipe.numbers)
    return (
        f"{state.name} ({what}{', gathered again in backward' if recipe.reshards and has_grad else ''}"
        f"{'' if has_grad else ', without gradients'})"
    )
