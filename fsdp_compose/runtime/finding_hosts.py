"""Which groups of a root ranks may skip, and inside which: found at its first forward, or refused there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn as nn

from ..comm import Carrier
from ..group import Rounds, _FSDPState


def check_optional(owners: Sequence[_FSDPState], names: Mapping[_FSDPState, str]) -> None:
    """Raise, before anything is set up, if some groups are optional where they cannot be. Nothing is communicated.
    ``names``: those of all groups of the root, which do not know them yet."""
    if not any(state.options.is_optional for state in names):
        return
    for state in owners:
        if state.options.is_optional:
            raise ValueError(
                f"the fully_shard group of {_class_of(state)} is optional, and its forward is the outermost one, which "
                "every rank runs: call fully_shard(optional=True) on modules inside it"
            )
    problem = ""
    if len(owners) > 1:
        problem = "several models share groups, and some of these are optional"
    for state, name in names.items():
        name = name or "the root"
        if state.options.bucket_bytes is not None:
            problem = f"{name} is made by replicate(), whose buckets are reduced in the order of one rank"
        elif state.options.keeps_parts() or state.mesh.part_transport is not None:  # it may be set to keep them
            problem = (
                f"{name} keeps parts of its parameters (it was made with a number as reshard_after_forward), which "
                "ranks that skip a group do not have: give True or False"
            )
        elif state.options.offload is not None:
            problem = f"{name} is offloaded (offload_policy)"
        elif any(handle.tensor_parallel is not None for handle in state._handles):
            problem = f"{name} has parameters that are DTensors, whose gradients are summed over their own ranks"
        elif any(handle.kind.extension is not None for handle in state._handles):
            problem = f"{name} has parameters that their class gathers (fsdp_pre_all_gather)"
    if problem:
        raise NotImplementedError(f"fully_shard(optional=True) in a model of which this holds: {problem}")


def rounds_of(states: Sequence[_FSDPState], carrier: Carrier | None) -> Rounds | None:
    """Those of a root of these groups, by their index; ``None`` where no rank can skip what another one runs."""
    if carrier is None or not any(state.options.is_optional for state in states):
        return None
    inside = {module for state in states if state.options.is_optional for module in _modules_of(state)}
    optional = [state for state in states if all(module in inside for module in state.live_modules())]
    around = [(state, _modules_of(state)) for state in states if state not in optional]
    hosts: dict[int, int] = {}
    for state in optional:
        own = {*state.live_modules()}
        found = [(len(modules), other.place.index) for other, modules in around if own <= modules]
        if not found:
            raise ValueError(
                f"the modules of the optional fully_shard group {state.name} are not together inside the module of "
                "one group that is not optional: make a group of each"
            )
        hosts[state.place.index] = min(found)[1]
    return Rounds(hosts, len(states), carrier)


def _modules_of(state: _FSDPState) -> set[nn.Module]:
    return {module for one in state.live_modules() for module in one.modules()}


def _class_of(state: _FSDPState) -> str:
    return ", ".join(type(module).__name__ for module in state.live_modules())
