"""Comparison of captured collectives: when a newly compiled graph has other collectives than before, before it runs.

The collectives of graphs are not in the order that is exchanged at the end of a backward. Ranks with different graphs
would wait for each other in different collectives, so they compare their graphs first. Graphs that differ only in
shapes are not compared, because ranks may compile those at different times."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import torch

from ..._torch import call_after_compilation, tracing_attempt
from ...core.comm import first_difference, meet
from ...core.group import _FSDPState
from ...errors import MisuseRuntimeError
from .captured_group import GraphPlan, VersionsBefore, graph_plan_of
from .captured_shards import summary_of


@dataclass(slots=True, eq=False)
class _Capture:
    """The groups that Dynamo has traced in one attempt to trace a frame."""

    attempt: object = None  # identifies the attempt; ``None`` if there was none
    # The traced forwards, in order: the group, the key of its plans, the module's index in the group, and whether
    # gradients are needed.
    groups: list[tuple[_FSDPState, str, int, bool]] = field(default_factory=list)


class _Present:
    capture = _Capture()


def note_capture(state: _FSDPState, key: str, index: int) -> None:
    """Called while Dynamo traces a forward of the module with this index in its group."""
    attempt = tracing_attempt()
    if _Present.capture.attempt is not attempt:  # Dynamo starts a new attempt after each graph break
        _Present.capture = _Capture(attempt)
        call_after_compilation(_compare)
    root = state.root
    if root is not None:
        versions = root.forward.record.captured
        if not isinstance(versions, VersionsBefore):
            versions = VersionsBefore(())
            root.forward.record.captured = versions
        versions.add(state)
    _Present.capture.groups.append((state, key, index, torch.is_grad_enabled()))


def _compare() -> None:
    """Raise, on every rank, if ranks have captured different collectives. Also raise if only some modules of a group
    were traced."""
    capture, _Present.capture = _Present.capture, _Capture()
    if not capture.groups:
        return
    _check_complete(capture)
    root = capture.groups[0][0].root
    if root is None or not root.mesh.has_peers or root.mesh.is_simulated:
        return
    lines = [_line(state, graph_plan_of(key, index), has_grad) for state, key, index, has_grad in capture.groups]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if digest in root.compared_graphs:
        return

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference(ours.split("\n"), theirs.split("\n"))
        assert difference is not None, "digests differ"
        number, a, b = difference
        return (
            f"torch.compile: the ranks have captured graphs with different collectives: group {number} is {a} on rank "
            f"0 and {b} on rank {rank}. They would wait for each other, so none was run. Make forward take the same "
            "path through the fully_shard'ed modules on every rank"
        )

    meet(root.mesh.peers, "comparing captured graphs", digest, lambda _: "", "\n".join(lines), explain)
    root.compared_graphs.add(digest)


def _check_complete(capture: _Capture) -> None:
    counts: dict[_FSDPState, Counter[int]] = {}
    for state, _, index, _ in capture.groups:
        counts.setdefault(state, Counter())[index] += 1
    for state, found in counts.items():
        modules = state.live_modules()
        if len({found[index] for index in range(len(modules))}) > 1:
            names = ", ".join(type(module).__name__ for module in modules)
            raise MisuseRuntimeError(
                f"torch.compile: a graph runs only some of the modules of the fully_shard group {state.name} ({names}),"
                " or runs some more often than others; the parameters gathered for them could not be freed. Call "
                "fully_shard() separately for modules that do not always run together"
            )


def _line(state: _FSDPState, plan: GraphPlan, has_grad: bool) -> str:
    what = "; ".join(summary_of(number) for number in plan.numbers)
    return (
        f"{state.name} ({what}{', gathered again in backward' if plan.reshards and has_grad else ''}"
        f"{'' if has_grad else ', without gradients'})"
    )
