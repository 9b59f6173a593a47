"""Collective entry points: all ranks wait for each other, for a bounded time, then continue or raise the same error."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..._nested import leaves_of
from ...errors import FSDPComposeError, MisuseRuntimeError, RanksDifferError, class_of, name_of, text_of
from ..comm import first_difference, meet
from .fqns import ModelNames

_PACKAGE = str(Path(__file__).resolve().parents[2])
_T = TypeVar("_T")

_MAX_VALUES = 3  # that an error lists


def group_of(names: ModelNames) -> dist.ProcessGroup | None:
    """Return the ranks that share a model: the process group of its flat parameters, DTensors and
    ``DistributedDataParallel`` modules if that is a single one, else all ranks; ``None`` if the model belongs to this
    process alone."""
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
    """Return the process group that contains the ranks of all others, if there is one; else all of them."""
    ranks = {group: {*dist.get_process_group_ranks(group)} for group in dict.fromkeys(groups)}
    if len(ranks) < 2:
        return groups
    widest = max(ranks, key=lambda group: len(ranks[group]))
    return [widest] if all(ranks[widest].issuperset(item) for item in ranks.values()) else groups


def group_of_values(values: Any) -> dist.ProcessGroup | None:
    """Return the ranks that must agree to move values into a model that belongs to this process alone: those of the
    values' mesh if that is a single one, else all ranks; ``None`` if no value is sharded."""
    leaves = [leaf for _, leaf in leaves_of(values) if isinstance(leaf, DTensor)]
    if not leaves or any(dist.get_backend(group) == "fake" for group in leaves[0].device_mesh.get_all_groups()):
        return None
    groups = {leaf.device_mesh.get_group().group_name if leaf.device_mesh.ndim == 1 else "" for leaf in leaves}
    return leaves[0].device_mesh.get_group() if len(groups) == 1 and groups != {""} else dist.group.WORLD


@dataclass(frozen=True)
class Peers:
    """The ranks that make a call together: what one of them cannot do, all of them raise.

    All of them call ``agree``, ``attempt``, ``ask`` and ``compare``, in the same order.

    Args:
        group: the ranks; ``None``: this process alone.
        call: the user's call, such as ``load()``, for messages.
    """

    group: dist.ProcessGroup | None
    call: str

    @classmethod
    def of(cls, names: ModelNames, call: str) -> Peers:
        """The ranks that share the parameters of a model."""
        return cls(group_of(names), call)

    @property
    def several(self) -> dist.ProcessGroup | None:
        """Their process group; ``None`` if there is one of them."""
        return self.group if self.group is not None and self.group.size() > 1 else None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them, which gets results that only one rank gets."""
        if self.group is None:
            return not dist.is_initialized() or dist.get_rank() == 0
        return self.group.rank() == 0

    @staticmethod
    def refuse_lost(values: Any) -> None:
        """Raise RuntimeError if the process group is gone whose ranks share ``values``."""
        # A rank alone would save its own elements as the whole.
        for path, leaf in leaves_of(values) if not dist.is_initialized() else ():
            if isinstance(leaf, DTensor) and leaf.device_mesh.size() > 1:
                raise MisuseRuntimeError(
                    f"{'.'.join(map(str, path))} is sharded over {leaf.device_mesh.size()} ranks, but there is no "
                    "process group any more, and this rank has only its own part. Call it before "
                    "destroy_process_group(), on every rank"
                )

    def attempt(
        self,
        function: Callable[..., _T],
        *arguments: Any,
        facts: Callable[[_T], Sequence[str]] = lambda _: (),
        consequence: str = "",
    ) -> _T:
        """Call a function on every rank. Return its result if no rank has a problem and ``facts`` of the result are
        equal on all ranks; else raise the same error on all of them, as ``agree`` does.

        Args:
            function: may run the user's code (hooks, ``get_extra_state()``).
            consequence: what a failure leaves behind; added to the error.
        """
        found, problem = cast(_T, None), cast(str | Exception, "")
        try:
            found = function(*arguments)
        except Exception as error:
            problem = error
            if consequence:
                problem = class_of(name_of(error))(f"{text_of(error)}\n(raised during loading: {consequence})")
                problem.__cause__ = error
        self.agree([] if not self.several or problem != "" else facts(found), problem)
        return found

    def agree(self, facts: Sequence[str], problem: str | Exception = "") -> None:
        """Wait for the other ranks; then return on all of them, or raise the same error on all.

        Args:
            facts: lines that must be equal on every rank: everything that decides which collectives follow.
            problem: why this rank cannot continue: a text about what the user gave, or an exception; empty if it can.

        Raises:
            RuntimeError: a rank has a problem; the class is that of the problem. If this rank's problem is an
                exception, it is the cause.
            RanksDifferError: the facts differ.
            RankLostError: a rank did not arrive in time.
        """
        kind = name_of(problem) if isinstance(problem, Exception) else MisuseRuntimeError.__name__
        text = text_of(problem)

        try:
            if self.several:
                details = json.dumps([kind if text else "", text, *facts])
                digest = hashlib.sha256(details.encode()).hexdigest()
                where = f" (called at {_caller()})"
                meet(self.several, self.call, digest, lambda _: "", details, partial(_explain, self.call), where=where)
            if text:
                raise class_of(kind)(f"{self.call}: {text}")
        except RuntimeError as error:
            if isinstance(problem, Exception):
                raise error from (problem.__cause__ if isinstance(problem, FSDPComposeError) else problem)
            raise

    def ask(self, purpose: str, own: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """Return what ``judge`` makes of every rank's ``own``, in the order of ranks: the first rank calls it for all.
        Both are plain values, as JSON has them."""
        if not self.several:
            return judge([own])

        def judge_texts(brought: list[str]) -> str:
            return json.dumps(judge([json.loads(text) for text in brought]))

        return json.loads(meet(self.several, f"{self.call}: {purpose}", json.dumps(own), judge_texts))

    def compare(self, what: str, text: str, keys: Sequence[str], digests: Mapping[str, str]) -> tuple[str, bool]:
        """Return the first rank's ``text``, and whether ``keys`` and ``digests`` are equal on all ranks.

        Args:
            digests: the ``digests_of`` values of optimizers; ranks may lack some.

        Raises:
            RanksDifferError: a value of an optimizer differs between ranks that have it.
        """
        digest = hashlib.sha256(json.dumps([*keys, *map(" ".join, digests.items())]).encode()).hexdigest()

        def judge(brought: list[tuple[str, str]]) -> tuple[str, bool]:
            return brought[0][0], len({digest for _, digest in brought}) == 1

        told, is_alike = self.ask(what, (text, digest), judge)
        problem = "" if is_alike else self.ask("state of optimizers", digests, _differences)
        if problem:
            raise RanksDifferError(f"{self.call}: {problem}")
        return told, is_alike


def _differences(brought: list[dict[str, str]]) -> str:
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, str] = {}
    for rank, digests in enumerate(brought):
        for key, digest in digests.items():
            one, expected = first.setdefault(key, (rank, digest))
            if digest != expected:
                found.setdefault(key, f"{key} is {expected} on rank {one}, but {digest} on rank {rank}")
    if not found:
        return ""
    lines = [*found.values()][:_MAX_VALUES]
    if len(found) > _MAX_VALUES:
        lines.append(f"{len(found) - _MAX_VALUES} more")
    return (
        "plain tensors or numbers in the state of an optimizer differ from rank to rank, but only one rank's would be "
        f"saved: {'; '.join(lines)}. Make them equal on all ranks, let the optimizer keep DTensors (see "
        "optim.zeros_per_block), or take them out "
        "of its state and save them under keys that contain the rank. Nothing was saved"
    )


def _explain(call: str, rank: int, told: str, told_there: str) -> str:
    ours, theirs = json.loads(told), json.loads(told_there)
    for (kind, problem, *_), where in ((ours, ""), (theirs, f"on rank {rank}: ")):
        if problem:
            raise class_of(kind)(f"{call}: {where}{problem}")
    difference = first_difference(ours[2:], theirs[2:])
    assert difference is not None
    _, *facts = difference
    a, b = ("nothing more" if fact is None else fact for fact in facts)
    return (
        f"{call}: the ranks' arguments differ: rank 0 has {a}, but rank {rank} has {b}. "
        "Nothing was changed. Call it with the same options and the same keys on every rank"
    )


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
