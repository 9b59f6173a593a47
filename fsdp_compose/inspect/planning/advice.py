"""Advice, read off the facts: each rule is a function of one number of ranks, and says what its figures are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..description.words import bytes_of
from .facts import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, Advice, WorldFacts

SMALL_PART = 1 << 20
"""Bytes from each rank below which an all-gather takes the time of its latency: about 100 GB/s times 10 us."""
_LARGE_GROUP = 0.5  # of all parameters
_LARGE_SHARE = 0.25  # of the peak
_SMALL_STATE = 0.1  # of the peak
_MUCH_PADDING = 0.01  # of all shards
_MANY_ACTIVATIONS = 0.6  # of the peak
_MOST_NAMES = 3


def advise(facts: WorldFacts) -> WorldFacts:
    """The same, with advice."""
    rules = (_small_shards, _replicas, _large_group, _ties, _padding, _activations, _unreduced, _computed)
    return replace(facts, advice=tuple(item for rule in rules for item in rule(facts)))


def _small_shards(facts: WorldFacts) -> Iterator[Advice]:
    parts: dict[str, int] = {}
    gathers = [item for item in facts.collectives if item.kind == "all-gather" and item.num_ranks > 1]
    for item in gathers:
        parts[item.group] = max(parts.get(item.group, 0), item.part_bytes)
    small = {name: part for name, part in parts.items() if part < SMALL_PART}
    if not small or (len(small) == 1 and len(parts) > 1):  # one alone, of what is left at the root, is no loss
        return
    smallest = min(small, key=lambda name: small[name])
    typical = sorted(small.values())[len(small) // 2]
    text = (
        f"{len(small)} of {len(parts)} groups gather less than {SMALL_PART >> 20} MiB from each rank (the least: "
        f"{smallest}, {bytes_of(small[smallest])}): that takes the time of its latency, not of its bytes."
    )
    num_together = -(-SMALL_PART // max(1, typical))
    if num_together <= len(small):
        text += f" Make one group of {num_together} neighbours: fully_shard([block, ..., block])."
    num_ranks = max(item.num_ranks for item in gathers)
    num_shards = _shards_that_are_long(typical * num_ranks, num_ranks)
    if num_shards > 1:
        extra = _state_bytes(facts) * (num_ranks // num_shards - 1)
        text += (
            f" Or let {num_shards} ranks share the shards, in replicas (--mesh *x{num_shards}): "
            f"{bytes_of(extra)} more on each rank."
        )
    elif num_together > len(small):
        text += " Together they are no longer: let every rank have them whole, replicate()."
    yield Advice("small shards", text)


def _shards_that_are_long(whole: int, num_ranks: int) -> int:
    """The largest factor of ``num_ranks`` into as many parts as which ``whole`` can be cut without small ones."""
    return max(n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and (n == 1 or whole // n >= SMALL_PART))


def _state_bytes(facts: WorldFacts) -> int:
    """What a rank keeps of parameters, gradients and the optimizer's state."""
    return sum(
        max(moment.bytes_by_kind[kind] for moment in facts.moments) for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)
    )


def _replicas(facts: WorldFacts) -> Iterator[Advice]:
    num_ranks = max((item.num_ranks for item in facts.collectives if item.kind == "all-gather"), default=1)
    whole = _state_bytes(facts) * num_ranks
    if num_ranks > 1 and whole <= _SMALL_STATE * facts.peak.nbytes:
        num_gathers = sum(item.kind == "all-gather" for item in facts.collectives)
        yield Advice(
            "replicate",
            f"parameters, gradients and optimizer state take {bytes_of(whole)} if every rank has them whole, and the "
            f"peak is {bytes_of(facts.peak.nbytes)}: replicate the dimension of {num_ranks} ranks (replicate(), or "
            f"another --mesh), which saves {num_gathers} all-gathers a step.",
        )


def _large_group(facts: WorldFacts) -> Iterator[Advice]:
    groups = facts.layout.groups
    sizes = [sum(flat.flat_bytes for flat in group.flat_parameters) for group in groups]
    gathered: dict[str, int] = {}
    for item in facts.collectives:
        if item.kind == "all-gather":
            gathered[item.group] = max(gathered.get(item.group, 0), item.nbytes)
    for group, nbytes in zip(groups, sizes, strict=True):
        share, held = nbytes / max(1, sum(sizes)), gathered.get(group.name, 0)
        if share > _LARGE_GROUP and held > _LARGE_SHARE * facts.peak.nbytes:
            yield Advice(
                "one large group",
                f"the group {group.name} has {share:.0%} of the parameters: it takes {bytes_of(held)} while it is "
                f"gathered, of a peak of {bytes_of(facts.peak.nbytes)}, and nothing of it is gathered while something "
                "else computes. Make groups of the modules inside (--wrap ClassName).",
            )


def _ties(facts: WorldFacts) -> Iterator[Advice]:
    for group in facts.layout.groups:
        for flat in group.flat_parameters:
            for param in flat.parameters:
                if param.tied:
                    yield Advice(
                        "tied",
                        f"{' = '.join((param.fqn, *param.tied))} is one parameter of the group {group.name}, which is "
                        "gathered from the first of its uses to the last"
                        + (f": {bytes_of(flat.unsharded_bytes)}." if flat.unsharded_bytes else "."),
                    )


def _padding(facts: WorldFacts) -> Iterator[Advice]:
    padding, whole = facts.layout.padding_bytes, facts.layout.flat_bytes
    if padding > _MUCH_PADDING * whole:
        yield Advice(
            "padding",
            f"{padding / whole:.1%} of all shards are padding ({bytes_of(padding)}): the groups are small for so many "
            "ranks, or granules large.",
        )


def _activations(facts: WorldFacts) -> Iterator[Advice]:
    activations = facts.peak.bytes_by_kind[ACTIVATIONS]
    if activations > _MANY_ACTIVATIONS * facts.peak.nbytes and not facts.recomputes:
        yield Advice(
            "activations",
            f"activations are {activations / facts.peak.nbytes:.0%} of the peak ({bytes_of(activations)}), which more "
            "ranks do not change: a smaller batch on each rank does, or activation checkpointing.",
        )


def _unreduced(facts: WorldFacts) -> Iterator[Advice]:
    if facts.unreduced:
        more = f"; and {len(facts.unreduced) - _MOST_NAMES} more" if len(facts.unreduced) > _MOST_NAMES else ""
        yield Advice(
            "unreduced", f"gradients that no group averages: {'; '.join(facts.unreduced[:_MOST_NAMES])}{more}."
        )


def _computed(facts: WorldFacts) -> Iterator[Advice]:
    if facts.computed:
        yield Advice(
            "computed",
            f"of {', '.join(facts.computed)} torch does not know the shape without computing it: what depends on its "
            "elements may be otherwise in a real run.",
        )
