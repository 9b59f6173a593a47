"""Hooks around the steps of every optimizer in the process, and the count of steps, which all ranks must make together.

The hooks are torch's global ones, so they also run for optimizers that have nothing to do with this package. The
control exchange compares the count."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..._torch import data_parallelism_of_torch
from ...errors import RanksDifferError
from ..comm import kept_for, known_for, meet
from ..flat import ParamAttribute, segment_owners, sharded_param_owners
from ..ragged import OWNER_ATTRIBUTE
from .hook_decorators import never_traced
from .iteration import StepCounts
from .registry import get_state
from .start_values import name_ranks
from .state import Root, state_of

_is_compiling = torch.compiler.is_compiling


def before_every_step(hook: Callable[[Optimizer], None]) -> None:
    register_optimizer_step_pre_hook(_for_ours(hook))


def after_every_step(hook: Callable[[Optimizer], None]) -> None:
    register_optimizer_step_post_hook(_for_ours(hook))


def _for_ours(hook: Callable[[Optimizer], None]) -> Callable[[Optimizer, Any, Any], None]:
    hook = never_traced(hook)

    # Under torch.compile(optimizer.step) Dynamo traces this. For an optimizer that has none of our parameters it must
    # leave nothing in the graph. For others the hook must run in Python at every step: the graph breaks before it, and
    # the arithmetic of the step is compiled by itself.
    def call(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not _is_compiling() or _has_ours(optimizer):
            hook(optimizer)

    return call


def _has_ours(optimizer: Optimizer) -> bool:
    """Whether a parameter is sharded, a flat view, or replaced by a sharded one. Dynamo traces and guards this."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, OWNER_ATTRIBUTE) or hasattr(param, ParamAttribute.FLAT):
                return True
    return False


# ---- The count of optimizer steps: all ranks must step together, which every control exchange checks.
#
# If a rank skips a step alone (it found an inf, its loss was NaN), its shards belong to a different step than those of
# the other ranks from then on, and the parameters together are those of no step. Nothing else would reveal this,
# because the collectives stay the same.


STEPS_DIFFER = "the ranks have made different numbers of optimizer steps"
REMEDY = (
    "The parameter shards now belong to different steps: load a checkpoint. All ranks must decide together whether "
    "to step, by all-reducing a flag"
)


class _Counted:
    """Kept for an optimizer that has stepped, and stands for it where steps are counted: ids are reused."""


def count_steps(root: Root) -> None:
    """From now on count the steps of optimizers of the root's sharded parameters and flat views."""
    root.steps = StepCounts()
    _count_every_step()


@cache
def _count_every_step() -> None:
    """Acts once."""
    after_every_step(_count)


def _count(optimizer: Optimizer) -> None:
    counted = None
    for root in {_root_of(group["params"]) for group in optimizer.param_groups}:
        steps = None if root is None else root.steps
        if steps is not None:
            if counted is None:
                counted = known_for(optimizer, _Counted)
                if counted is None:
                    counted = kept_for(optimizer, _Counted)
                    _warn_of_unreduced(optimizer)
            steps.total += 1
            steps.recent[counted] += 1


def _root_of(params: list[object]) -> Root | None:
    """The root of the first parameter that is ours and has a gradient (a step skips those without one)."""
    for param in params:
        owner = sharded_param_owners.get(id(param)) or segment_owners.get(id(param))
        handle = None if owner is None else owner[0]()
        if handle is not None and param.grad is not None:  # type: ignore[attr-defined]
            state = state_of(handle)
            return None if state is None else state.root
    return None


def _warn_of_unreduced(optimizer: Optimizer) -> None:
    """Warn, at the first step of ``optimizer``, if some of its parameters belong to groups and others to none. What no
    group and nothing else reduces drifts apart; usually ``fully_shard(model)`` was forgotten after its blocks."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    params = [param for param in params if ParamAttribute.SHARDED not in param.__dict__]
    managed = sharded_param_owners.keys() | segment_owners.keys()
    stray = {id(param): param for param in params if id(param) not in managed}
    if not stray:
        return
    handles = [reference() for reference in {owner[0] for owner in sharded_param_owners.values()}]
    states = {state_of(handle) for handle in handles if handle is not None}
    ignored = {id(param) for state in states if state is not None for param in state.ignored}
    names = dict.fromkeys(stray.keys() - ignored, "")
    if not names:
        return
    # Nothing leads from a parameter to the modules that have it, so this searches all objects of the process: 0.4 s for
    # a million. It is rare: a warning will follow, or torch's data parallelism reduces all of these.
    for module in [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]:
        own = {id(param): name for name, param in module.named_parameters() if id(param) in names}
        state = get_state(module)
        # What torch's own data parallelism reduces, or the user does (ignored_params), does not drift apart.
        if data_parallelism_of_torch(module):
            names = {key: names[key] for key in names.keys() - own.keys()}
        elif state is not None:
            names = {key: names[key] for key in names.keys() - {id(param) for param in state.ignored}}
        names |= {key: name for key, name in own.items() if key in names and len(name) > len(names[key])}
    if names:
        listed = [names[key] or f"one of shape {tuple(stray[key].shape)}" for key in stray if key in names]
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        warnings.warn(
            f"the {type(optimizer).__name__} trains parameters of fully_shard groups, and {len(listed)} trainable "
            f"parameter(s) of no group, whose gradients are not reduced, so the ranks train them apart: "
            f"{', '.join(listed[:5])}{more}. Call fully_shard() on the model too, after its blocks; or pass them as "
            "ignored_params if you reduce their gradients yourself",
            stacklevel=3,
        )


def num_steps(root: Root) -> int | None:
    """The number of steps so far; ``None`` if this rank has nothing to train, and so may have no optimizer."""
    return root.steps.total if root.steps is not None and holds_elements(root) else None


def steps_to_compare(root: Root) -> int | None:
    """The most steps of one optimizer since the last exchange, up to 255; ``None`` as in ``num_steps``."""
    steps = root.steps
    if steps is None or not holds_elements(root):
        return None
    return min(255, max(steps.recent.values(), default=0))


def steps_were_compared(root: Root) -> None:
    """Restart the count after all ranks have compared it or given it up."""
    steps = root.steps
    if steps is not None and steps.recent:
        steps.recent.clear()


def holds_elements(root: Root) -> bool:
    """Whether this rank has elements for an optimizer to train; without any, it may have no optimizer."""
    return any(
        start < stop and flag
        for state in root.live_states()
        for handle in state._handles
        for (start, stop, _), flag in zip(handle.local_shards, handle.unsharded.flags, strict=True)
    )


def raise_different_steps(root: Root) -> None:
    """Raise, on every rank, an error with the number of steps of each. Ranks: all, which know that they differ."""
    steps = steps_to_compare(root)
    group = root.mesh.peers
    root.order.close()
    steps_were_compared(root)  # each difference is reported once
    text = meet(group, "comparing optimizer steps", "-" if steps is None else str(steps), _list_steps)
    raise RanksDifferError(f"{STEPS_DIFFER} since their last backward: {text}. No gradient was published. {REMEDY}")


def _list_steps(payloads: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, steps in enumerate(payloads):
        if steps != "-":
            ranks.setdefault(steps, []).append(rank)
    few_first = sorted(ranks.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{name_ranks(item)}: {steps}" for steps, item in few_first)
