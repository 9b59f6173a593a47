"""All ranks begin a step of an optimizer together, and are about to do the same, or all raise before anything changed.

For optimizers that send matrices from rank to rank. Costs one control exchange of 40 bytes a step (see ``comm``). Only
if digests differ do ranks send what they are about to do, through the key-value store, to name the difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from ..errors import FSDPComposeError, RanksDifferError
from ..extension import Carrier, FlatParamHandle, handle_of, handle_of_segment, meet, refuse_unreduced
from .matrices import local_gradient, name_of

_FAILED = b"failed"
_CHANGED = "Nothing was changed"
_WITH, _WITHOUT = "with a gradient", "without a gradient"


Gradients = dict[int, torch.Tensor]
"""This rank's shards of gradients, by the id of the parameter."""


@dataclass(eq=False)
class Trained:
    """The parameters that an optimizer trains, found out once.

    Attributes:
        params: of all parameter groups.
        shared: those that ranks train together, sharded ones and flat views, each with its place in ``groups``.
        groups: the numbers of the parameter groups that have any of these. Others are each rank's own.
        handles: of each mesh, a flat parameter.
        digest: of what this rank trains. Made at the first step, since parameters get other names at a first forward.
    """

    params: list[torch.Tensor] = field(default_factory=list)
    shared: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    handles: list[FlatParamHandle] = field(default_factory=list)
    digest: bytes = b""

    @staticmethod
    def by(groups: Sequence[Mapping[str, Any]]) -> Trained:
        trained, by_mesh = Trained(), dict[int, FlatParamHandle]()
        for number, group in enumerate(groups):
            for param in group["params"]:
                place = handle_of(param)
                handle = handle_of_segment(param) if place is None else place[0]
                trained.params.append(param)
                if handle is not None:
                    by_mesh.setdefault(id(handle.mesh), handle)
                    trained.groups += [] if number in trained.groups else [number]
                    trained.shared.append((param, len(trained.groups) - 1))
        trained.handles += by_mesh.values()
        return trained

    def peers(self) -> list[dist.ProcessGroup]:
        """The process groups of all ranks that step together: for each model one, once it has run."""
        return [*dict.fromkeys([item.mesh.peers for item in self.handles if item.mesh.has_peers])]


def begin_step(
    optimizer: Optimizer,
    closure: Callable[[], Any] | None,
    plan: Callable[[], Trained],
    head: Sequence[str],
    options: Sequence[str],
) -> tuple[Any, Gradients]:
    """Do what can fail on one rank, and return it once all ranks have, and are about to do the same: what ``closure``
    returned, and this rank's shards of the gradients.

    Ranks: all that have the parameters.

    Args:
        optimizer: that steps.
        closure: computes the loss again.
        plan: what else comes before anything is sent; it changes nothing that a user sees, and tells what is trained.
        head: lines that must be equal on all ranks; ``options``: entries of parameter groups that must be, too.

    Raises:
        RanksDifferError: on every rank, which names the first difference, or the rank that cannot step.
        RankLostError: another rank did not come.
        Exception: on this rank, what ``closure`` or ``plan`` raised; RuntimeError, ValueError: a gradient is not
            reduced, or is not sharded like its parameter.
    """
    name, loss, gradients, error = type(optimizer).__name__, None, Gradients(), None
    trained, digest, agreed = Trained(), b"", [*head]
    try:
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = plan()
        refuse_unreduced(f"{name}.step()", trained.params)
        gradients = {id(p): local_gradient(name, p) for p in trained.params if p.grad is not None}
        if trained.peers():
            agreed += _options_of(trained, optimizer.param_groups, options)
            trained.digest = trained.digest or blake2b("\n".join(_lines(trained, False)).encode()).digest()
            present = bytes([param.grad is not None for param, _ in trained.shared])
            digest = b"".join([trained.digest, present, "\n".join(agreed).encode()])
    except Exception as caught:  # the others wait for this rank: they are told
        error, trained = caught, trained if trained.params else Trained.by(optimizer.param_groups)
    _agree(f"{name}.step()", trained.peers(), digest, lambda: [*agreed, *_lines(trained)], error)
    return loss, gradients


def _options_of(trained: Trained, groups: Sequence[Mapping[str, Any]], options: Sequence[str]) -> list[str]:
    def plain(value: Any) -> str:  # the same on every rank that has it
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(plain, value))})"
        return repr(value) if value is None or isinstance(value, (int, float, str)) else type(value).__name__

    shared = [groups[number] for number in trained.groups]
    return [
        f"{name}={plain(g[name])} in parameter group {i}" for i, g in enumerate(shared) for name in options if name in g
    ]


def _lines(trained: Trained, with_gradients: bool = True) -> Sequence[str]:
    """What this rank trains, in words."""
    lines = []
    for param, group in trained.shared:
        view = handle_of_segment(param)  # may have another shape on each rank
        line = f"{name_of(param)} of shape {tuple(param.shape)}"
        if view is not None:
            line = f"a flat view in the group of {view.name_of(0)}"
        line += f", in parameter group {group}"
        lines.append(f"{line}, {_WITHOUT if param.grad is None else _WITH}" if with_gradients else line)
    return lines


def _agree(
    what: str,
    groups: Iterable[dist.ProcessGroup],
    digest: bytes,
    lines: Callable[[], Sequence[str]],
    error: Exception | None,
) -> None:
    """Raise unless all ranks of ``groups``, which each rank has in the same order, begin a step, and are about to do
    the same. Ranks: all of them.

    Args:
        digest: of what this rank is about to do; ``lines``: returns what that is, in words.
        error: why this rank cannot step. It raises that, the others RanksDifferError.
    """
    number = int.from_bytes(blake2b(digest if error is None else _FAILED, digest_size=8).digest(), "little")
    for group in groups:
        try:
            are_all_here, is_same = Carrier.of(group).begin_step(number)
        except FSDPComposeError as lost:
            raise error or type(lost)(f"{what}: {lost}. {_CHANGED}") from None
        if not is_same:
            _explain(what, group, lines() if error is None else [], error, are_all_here)
    if error is not None:
        raise error


def _explain(
    what: str, group: dist.ProcessGroup, lines: Sequence[str], error: Exception | None, are_all_here: bool
) -> None:
    """Raise, on every rank. Ranks: all, which know that they differ."""
    problem = "" if error is None else f"{type(error).__name__}: {error}".replace("\n", " ")
    details = "\n".join([problem, *lines])

    def explain(rank: int, ours: str, theirs: str) -> str:
        (problem, *mine), (other_problem, *others) = ours.split("\n"), theirs.split("\n")
        if problem or other_problem:
            which, why = (0, problem) if problem else (rank, other_problem)
            return f"{what}: rank {which} cannot step, so no rank does: {why}. {_CHANGED}"
        first, second = next(pair for pair in zip_longest(mine, others, fillvalue="nothing") if pair[0] != pair[1])
        remedy = "Make the optimizer with the same parameters and options, in the same order, on every rank"
        if first.removesuffix(_WITH).removesuffix(_WITHOUT) == second.removesuffix(_WITH).removesuffix(_WITHOUT):
            remedy = (
                "A backward gives all ranks gradients for the same parameters: do not set .grad to None, or to a "
                "tensor, on some ranks only"
            )
        return (
            f"{what}: ranks differ in what they train: rank 0 has {first}, rank {rank} has {second}. {remedy}. "
            f"{_CHANGED}"
        )

    try:
        if not are_all_here:
            # The others compare their collectives: what they tell, and what they are told, are entries with meanings.
            _compare_collectives(what, group)
        meet(group, f"comparing what ranks train in {what}", details, lambda _: "", details, explain)
    except RanksDifferError:
        if error is not None:
            raise error from None
        raise
    raise RanksDifferError(f"{what}: ranks differ in what they train. {_CHANGED}")


def _compare_collectives(what: str, group: dist.ProcessGroup) -> None:
    """Raise, on every rank. Ranks: all, of which some are in another exchange (``core/runtime/agreement``)."""
    place = f"the start of {what}"

    def explain(rank: int, _: str, theirs: str) -> str:
        there = theirs.split("\n")[-1].partition("\t")[2].replace("\t", " of ")
        return (
            f"{what}: rank 0 is at {place}, rank {rank} at {there}. {_CHANGED} by this step. All ranks must decide "
            "together whether to step, by all-reducing a flag"
        )

    meet(group, "comparing collectives", f"{place}\t{place}", lambda _: "", f"{place}\t{place}", explain)


def share_changes(what: str, group: dist.ProcessGroup, news: str) -> list[str]:
    """Return the texts of all ranks that have any, if at least one has; else nothing, for one small exchange.

    Ranks: all of ``group``, during a step. ``news``: one line; empty: this rank has none."""
    number = 1 + group.rank() if news else 0  # ranks that all have news differ too
    are_all_here, is_same = Carrier.of(group).begin_step(number)
    if not are_all_here:
        _compare_collectives(what, group)
    if is_same:
        return []
    brought = json.loads(meet(group, f"sharing what is new in {what}", news, json.dumps))
    return [text for text in map(str.strip, brought) if text]
