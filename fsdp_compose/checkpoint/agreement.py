"""Collective entry points: all ranks meet, in bounded time, and go on together or raise one error."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._torch import backend_name
from ..comm import first_difference, meet
from .fqns import ModelNames, leaves_of

_PACKAGE = str(Path(__file__).resolve().parents[1])
_T = TypeVar("_T")

_MAX_LINES = 20  # of problems that an error lists


def group_of(names: ModelNames) -> dist.ProcessGroup | None:
    """The ranks that share a model: the process group of its flat parameters, of its DTensors or of
    ``DistributedDataParallel``, if these are one, else all ranks; ``None`` if the model is this process's own."""
    handles = names.handles()
    if not dist.is_initialized() or any(handle.mesh.is_simulated for handle in handles):
        return None
    groups = _widest([handle.mesh.peers for handle in handles])
    groups += [m.process_group for m in names.model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    in_handles = {id(sharded) for handle in handles for sharded in handle.sharded_params}
    tensors = [*names.parameters.values(), *names.model.buffers()]
    others = [tensor for tensor in tensors if isinstance(tensor, DTensor) and id(tensor) not in in_handles]
    if any(tensor.device_mesh.ndim > 1 for tensor in others):
        return dist.group.WORLD
    groups += [tensor.device_mesh.get_group() for tensor in others]
    names_of_groups = {group.group_name for group in groups}
    if len(names_of_groups) > 1:
        return dist.group.WORLD
    return groups[0] if groups else None


def _widest(groups: list[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """The process group that has the ranks of all others, if there is one; else all of them."""
    ranks = {group: {*dist.get_process_group_ranks(group)} for group in dict.fromkeys(groups)}
    if len(ranks) < 2:
        return groups
    widest = max(ranks, key=lambda group: len(ranks[group]))
    return [widest] if all(ranks[widest].issuperset(item) for item in ranks.values()) else groups


def group_of_values(values: Any) -> dist.ProcessGroup | None:
    """The ranks that must meet to move given values into a model that is this process's own: those of their meshes, if
    these are one, else all; ``None`` if none is sharded."""
    leaves = [leaf for _, leaf in leaves_of(values) if isinstance(leaf, DTensor)]
    if not leaves or any(backend_name(group) == "fake" for group in leaves[0].device_mesh.get_all_groups()):
        return None
    groups = {leaf.device_mesh.get_group().group_name if leaf.device_mesh.ndim == 1 else "" for leaf in leaves}
    return leaves[0].device_mesh.get_group() if len(groups) == 1 and groups != {""} else dist.group.WORLD


def has_peers(group: dist.ProcessGroup | None) -> bool:
    return group is not None and group.size() > 1


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this is the first rank of the process group: the one that gets what only one rank gets."""
    if group is None:
        return not dist.is_initialized() or dist.get_rank() == 0
    return group.rank() == 0


def attempt(function: Callable[..., _T], *arguments: Any) -> tuple[_T | None, str | Exception]:
    """Call a function that may run code of the user (hooks, ``get_extra_state()``). An exception from it is a problem
    for ``agree``: the other ranks must hear of it."""
    try:
        return function(*arguments), ""
    except Exception as error:
        return None, error


def or_problem(function: Callable[..., str], *arguments: Any) -> str | Exception:
    """The problem that ``function`` returns as text, or raises; empty if there is none."""
    found, problem = attempt(function, *arguments)
    return problem or found or ""


def problem_text(problem: str | Exception) -> str:
    """A problem as text, for an error that other ranks raise too."""
    if isinstance(problem, str) or type(problem) is RuntimeError:
        return str(problem)
    return f"{type(problem).__name__}: {problem}"


def agree(group: dist.ProcessGroup | None, call: str, facts: Sequence[str], problem: str | Exception = "") -> None:
    """Meet the other ranks: return on all of them, or raise the same error.

    Args:
        group: the ranks; ``None``: this process alone.
        call: what the user has called, for messages.
        facts: what must be the same on every rank, one line each: all that decides which collectives follow.
        problem: why this rank cannot go on; empty if it can.

    Raises:
        RuntimeError: some rank has a problem, the facts differ, or a rank did not come in time. On the rank whose
            problem is an exception, that is its cause.
    """
    try:
        _agree(group, call, facts, problem_text(problem))
    except RuntimeError as error:
        if isinstance(problem, Exception):
            raise error from problem
        raise


def _agree(group: dist.ProcessGroup | None, call: str, facts: Sequence[str], problem: str) -> None:
    if has_peers(group):
        assert group is not None
        details = json.dumps([problem, *facts])
        digest = hashlib.sha256(details.encode()).hexdigest()

        def explain(rank: int, ours: str, theirs: str) -> str:
            return _explain(call, rank, json.loads(ours), json.loads(theirs))

        meet(group, call, digest, lambda _: "", details, explain, where=f" (called at {_caller()})")
    if problem:
        raise RuntimeError(f"{call}: {problem}")


def is_true_on_any(group: dist.ProcessGroup | None, call: str, what: str, flag: bool) -> bool:
    """Whether ``flag`` is true on some rank, where ranks may differ but must go the same way. Every rank meets."""
    if not has_peers(group):
        return flag
    assert group is not None
    purpose = f"{call}: {what}"
    return meet(group, purpose, str(flag), lambda flags: str(str(True) in flags)) == str(True)


def tell_and_compare(
    group: dist.ProcessGroup | None, call: str, what: str, text: str, facts: Sequence[str]
) -> tuple[str, bool]:
    """The first rank's ``text``, on every rank; and whether ``facts`` are the same on every rank. Every rank meets."""
    if not has_peers(group):
        return text, True
    assert group is not None
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def judge(brought: list[str]) -> str:
        digests = {item.partition(" ")[0] for item in brought}
        return f"{len(digests)} {brought[0].partition(' ')[2]}"

    num_digests, _, first = meet(group, f"{call}: {what}", f"{digest} {text}", judge).partition(" ")
    return first, num_digests == "1"


def _explain(call: str, rank: int, ours: list[str], theirs: list[str]) -> str:
    if ours[0]:
        return f"{call}: {ours[0]}"
    if theirs[0]:
        return f"{call}: on rank {rank}: {theirs[0]}"
    difference = first_difference(ours[1:], theirs[1:])
    assert difference is not None
    _, a, b = difference
    return (
        f"{call}: the ranks were not given the same: rank 0 has {_or_nothing(a)} where rank {rank} has "
        f"{_or_nothing(b)}. Nothing was changed. Call it with the same options and the same keys on every rank"
    )


def _or_nothing(fact: str | None) -> str:
    return "nothing more" if fact is None else fact


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def list_problems(what: str, problems: Sequence[str], remedy: str) -> str:
    """One text of several problems; empty if there are none."""
    if not problems:
        return ""
    lines = [f"  {problem}" for problem in problems[:_MAX_LINES]]
    if len(problems) > _MAX_LINES:
        lines.append(f"  and {len(problems) - _MAX_LINES} more")
    return "\n".join([f"{what}; nothing was changed:", *lines, remedy])
