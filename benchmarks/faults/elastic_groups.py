"""A replica group, or one rank of it, dies just before a collective of a step, for every collective.

The groups that are left go on by themselves. All their ranks have made the step under way, or all have thrown it away,
and in the end they have the parameters of an unsharded run over the batches of the groups that took part in each step.
If one rank of a group has died, its partner ends with an error."""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import harness

from .fault import Fault, Settings, Verdict, verdict
from .jobs import Job, Result
from .replica_groups import AT, RANKS, STEPS, Place, train, unsharded
from .systems import System

LONGEST = 120.0  # seconds for a case that takes a few
TOLERANCE = 1e-12  # float64

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
harness.preload("benchmarks.faults.replica_groups")


@dataclass(frozen=True)
class Case:
    """Who dies: ``rank`` of group ``victim``, before the collective ``at`` of step ``AT``, from 1 on; 0: nobody."""

    num_groups: int
    victim: int
    rank: int
    at: int
    takes_group: bool = True

    def __str__(self) -> str:
        who = f"group {self.victim}" if self.takes_group else f"rank {self.rank} of group {self.victim}"
        return f"{who} of {self.num_groups} before collective {self.at} of rank {self.rank}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        problem: empty if all was as promised.
        is_made: whether the step under way was made with the group that died.
        seconds: from its death until the others had made a step without it.
        results: of the ranks, by group.
    """

    problem: str
    is_made: bool
    seconds: float
    results: list[list[Result]]


def run(system: System, settings: Settings, case: Case, *, torchft: bool) -> Outcome:
    folder = Path(tempfile.mkdtemp(dir=settings.folder))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        lighthouse, jobs, own_stores = "", [], []
        if torchft:
            server = lighthouse_server()
            stack.callback(server.shutdown)
            lighthouse = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
        for group in range(case.num_groups):
            own_stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            last = (case.rank, case.at) if case.at and group == case.victim else None
            ports = store.port, own_stores[-1].port
            place = Place(case.num_groups, group, last, case.takes_group, *ports, lighthouse, folder)
            jobs.append(stack.enter_context(Job(train, system, place, world_size=RANKS)))
        if case.at:
            jobs[case.victim].finish((case.rank,), limit=LONGEST)
            store.set("ended-1", str(case.victim))
        return judge(case, [job.finish(limit=LONGEST) for job in jobs], folder)


def lighthouse_server() -> Any:
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    return LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=1000)


def judge(case: Case, results: list[list[Result]], folder: Path) -> Outcome:
    def outcome(problem: str, is_made: bool = False, seconds: float = 0.0) -> Outcome:
        return Outcome(f"{case}: {problem}"[:600] if problem else "", is_made, seconds, results)

    left = [group for group in range(case.num_groups) if not case.at or group != case.victim]
    if case.at:
        dead, partner = results[case.victim][case.rank], results[case.victim][1 - case.rank]
        if dead.kind != "died" or (partner.kind != "died" if case.takes_group else partner.kind != "raised"):
            return outcome(f"the group that loses a rank: {dead}; its partner: {partner}")
    for group in left:
        for rank, result in enumerate(results[group]):
            if result.kind != "returned":
                return outcome(f"rank {rank} of group {group}, which is left: {result}")
    logs = {(group, rank): results[group][rank].value["log"] for group in left for rank in range(RANKS)}
    took_part, problem = taken(case.num_groups, logs)
    if problem:
        return outcome(problem)
    if took_part[-1] != left:
        return outcome(f"in the last step took part: {took_part[-1]}")
    expected = unsharded(took_part)
    for group in left:
        for rank, result in enumerate(results[group]):
            found = {
                name: torch.tensor(value, dtype=torch.float64) for name, value in result.value["parameters"].items()
            }
            difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
            if not difference <= TOLERANCE:
                return outcome(f"rank {rank} of group {group} is {difference:.1e} from an unsharded run {took_part}")
    if not case.at:
        return outcome("")
    died = float((folder / "died").read_text())
    ends = [next(at for _, _, count, at in log if count < case.num_groups) for log in logs.values()]
    return outcome("", len(took_part[AT]) == case.num_groups, max(ends) - died)


def taken(num_groups: int, logs: dict[tuple[int, int], Any]) -> tuple[list[list[int]], str]:
    """Who took part in each step, by the logs of the ranks that are left, and how these contradict each other."""
    found: list[list[int]] = []
    for step in range(STEPS):
        said = {place: line for place, log in logs.items() for line in log if line[0] == step}
        counts = {count for _, _, count, _ in said.values()}
        groups = sorted({group for (group, _), line in said.items() if line[1]})
        if counts == {num_groups}:
            groups = [*range(num_groups)]  # what the dead one knew is lost
        if counts != {len(groups)} or any((group, rank) not in said for group, _ in said for rank in range(RANKS)):
            return found, f"step {step}: by (group, rank): [step, takes part, groups, time]: {said}"
        found.append(groups)
    return found, ""


def count(system: System, settings: Settings, num_groups: int, *, torchft: bool) -> list[int]:
    """How many collectives a step has on each rank of a group."""
    outcome = run(system, settings, Case(num_groups, 0, 0, 0), torchft=torchft)
    if outcome.problem:
        raise RuntimeError(outcome.problem)
    return [len(result.value["collectives"]) for result in outcome.results[0]]


def judged(outcomes: list[Outcome], what: str) -> Verdict:
    fine = [item for item in outcomes if not item.problem]
    made, seconds = sum(item.is_made for item in fine), [item.seconds for item in fine]
    done = f"{what}: after {len(fine)} of {len(outcomes)} kills the others went on"
    if seconds:
        spread = f"median {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"
        done += f" ({made} made the step under way, {len(fine) - made} threw it away; next step: {spread})"
    return verdict(done, [item.problem for item in outcomes if item.problem])


def groups_die(system: System, settings: Settings, *, torchft: bool) -> Verdict:
    outcomes, counts = [], []
    for num_groups in (3,) if settings.quick else (2, 3):
        counts += count(system, settings, num_groups, torchft=torchft)
        for rank, num in enumerate(counts[-RANKS:] if not settings.quick else counts[:1]):
            for at in settings.some(range(1, num + 1)):
                case = Case(num_groups, at % num_groups, rank, at)
                outcomes.append(run(system, settings, case, torchft=torchft))
    return judged(outcomes, f"a group of two ranks, each with {min(counts)} to {max(counts)} collectives in a step")


def ranks_die(system: System, settings: Settings, *, torchft: bool) -> Verdict:
    outcomes = []
    for num_groups in (3,) if settings.quick else (2, 3):
        for rank, num in enumerate(count(system, settings, num_groups, torchft=torchft)):
            for at in (num // 2,) if settings.quick else (1, num // 4, num // 2, 3 * num // 4, num):
                case = Case(num_groups, at % num_groups, rank, at, takes_group=False)
                outcomes.append(run(system, settings, case, torchft=torchft))
    return judged(outcomes, "one rank of two, and the other one ended with an error")


FAULTS = [
    Fault(f"elastic{name}: {what}", partial(run_one, torchft=torchft))
    for torchft, name in ((False, ""), *([(True, ", torchft")] if HAS_TORCHFT else []))
    for what, run_one in (
        ("a replica group dies at every collective of a step", groups_die),
        ("one rank of a replica group dies", ranks_die),
    )
]
