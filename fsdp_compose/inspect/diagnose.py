"""Find problems of a model or a job: gradients that no group reduces, and the rank that the others wait for.

Both only read: ``find_unreduced_parameters`` reads a model; ``explain_hang`` and the command ``hang`` read the logs of
the ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn as nn

from .._arguments import checked
from ..extension import POSITION_MARK, ParamAttribute, get_state, modules_to_run, states_to_run

# ---- ``find_unreduced_parameters(model)``: the trainable parameters of a model whose gradients are not reduced.


@dataclass(frozen=True)
class UnreducedParameter:
    """A trainable parameter whose gradients differ from rank to rank.

    Attributes:
        fqn: its name in the model.
        reason: why its gradients are not reduced, and what to do.
    """

    fqn: str
    reason: str

    def __str__(self) -> str:
        return f"{self.fqn}: {self.reason}"


@checked()
def find_unreduced_parameters(model: nn.Module) -> list[UnreducedParameter]:
    """List the trainable parameters of ``model`` whose gradients are not reduced over the ranks. Local.

    Unless you reduce their gradients yourself, such parameters silently train differently on every rank. Parameters
    managed by another composable API (torch's ``replicate``) are not listed.

    Args:
        model: a module with sharded submodules.

    Returns:
        The parameters found, in the order of ``model.named_parameters()``; empty if there are none.
    """
    groups = states_to_run(model)
    managed = {id(sharded) for state, _ in groups for handle in state._handles for sharded in handle.sharded_params}
    ignored = {id(param) for state, _ in groups for param in state.ignored}
    below = {id(item) for module in model.modules() if get_state(module) is not None for item in module.modules()}
    found: dict[int, UnreducedParameter] = {}
    for prefix, module in modules_to_run(model):
        for name, param in module._parameters.items():
            if param is None or not param.requires_grad or id(param) in managed or id(param) in found:
                continue
            if id(param) in ignored:
                reason = "passed as ignored_params: reduce its gradients yourself, or freeze it"
            elif ParamAttribute.SHARDED in param.__dict__:
                reason = (
                    "was tied to a parameter that another group sharded, and is no longer the same tensor: shard the "
                    "modules that share it in one call, fully_shard([a, b])"
                )
            elif id(module) in below:
                reason = "added or replaced after fully_shard(): build the module first, then shard it"
            else:
                reason = "no fully_shard() call covers it: call fully_shard() on a module above it"
            found[id(param)] = UnreducedParameter(f"{prefix}.{name}" if prefix else name, reason)
    return list(found.values())


# ---- Which rank is late: combine the lines that ranks logged while they hung.
#
# Pure functions on text. ``core/group/standstill`` writes the lines.


Position = dict[str, Any]


def positions_in(lines: Iterable[str]) -> list[Position]:
    """Parse the positions in lines of logs. A line may have any prefix."""
    found = []
    for line in lines:
        _, mark, rest = line.partition(POSITION_MARK)
        if mark:
            try:
                found.append(json.JSONDecoder().raw_decode(rest)[0])
            except json.JSONDecodeError:
                continue  # lines of several ranks interleaved
    return found


def explain_hang(positions: Iterable[Position]) -> str:
    """Explain which ranks are behind and which ranks wait for them.

    Args:
        positions: the positions of all ranks, in the order in which each rank logged them.

    Returns:
        A text with a paragraph for each process group: the ranks that are behind and where they are, where the others
        wait, and the ranks that logged nothing.
    """
    groups: dict[tuple[str, int], dict[int, Position]] = defaultdict(dict)
    for position in positions:
        groups[position["ranks"], position["size"]][position["rank"]] = position  # the last one counts
    if not groups:
        return (
            "no rank logged its position: either none hung for long enough (FSDP_COMPOSE_HANG_SECONDS), or these are "
            "not the logs of the ranks' stderr"
        )
    return "\n\n".join(_explain(ranks, size, by_rank) for (ranks, size), by_rank in groups.items())


def _explain(ranks: str, size: int, by_rank: dict[int, Position]) -> str:
    lines = [f"process group of ranks {ranks} ({len(by_rank)} of {size} logged their position)"]
    silent = [rank for rank in range(size) if rank not in by_rank]
    if silent:
        lines.append(
            f"  {_ranks(silent)}: logged nothing: ended, still working, or its log is missing. Look there first"
        )
    by_number: dict[int, list[int]] = defaultdict(list)
    for rank, position in sorted(by_rank.items()):
        by_number[position["number"]].append(rank)
    behind = min(by_number)
    if len(by_number) > 1:
        ahead = [rank for rank in by_rank if rank not in by_number[behind]]
        lines.append(f"  {_ranks(by_number[behind])}: behind: the others wait for {_ranks(by_number[behind])}")
        lines += _where(by_number[behind], by_rank)
        lines.append(f"  {_ranks(ahead)}: waiting")
        lines += _where(ahead, by_rank)
        return "\n".join(lines)
    lasts = {position["last"] for position in by_rank.values()}
    if len(lasts) > 1:
        lines.append("  the ranks issued the same number of collectives, but different ones:")
    elif silent:
        lines.append(f"  the other ranks are at the same place: they wait for {_ranks(silent)}")
    else:
        lines.append(
            "  all ranks are at the same place: none is behind. Either a collective does not finish (the network, a "
            "device), or the ranks wait for something else, below"
        )
    lines += _where([*by_rank], by_rank)
    return "\n".join(lines)


def _where(ranks: Sequence[int], by_rank: dict[int, Position]) -> list[str]:
    """Describe where ranks are, with one line for all ranks at the same place."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        position = by_rank[rank]
        phase = position["phase"] or "between iterations"
        last = position["last"] or "none since the last exchange of all ranks"
        program = position["program"] or "?"
        if position["waits_in"]:
            program += f", in {position['waits_in']}"
        places[f"{position['number']} collectives; {phase}; last: {last}; program at {program}"].append(rank)
    return [
        f"    {_ranks(sharing)}: {place} (for {max(by_rank[rank]['seconds'] for rank in sharing)} s; "
        f"{', '.join(sorted({by_rank[rank]['host'] for rank in sharing})[:3])})"
        for place, sharing in places.items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


def explain_logs(paths: Sequence[Path]) -> str:
    """``explain_hang`` of log files, and of all files in folders (as ``torchrun --log-dir`` makes them)."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    texts = [file.read_text(errors="replace") for file in files if file.is_file()]
    return explain_hang(positions_in([line for text in texts for line in text.splitlines()]))
