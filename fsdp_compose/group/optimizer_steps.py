"""Hooks around the steps of every optimizer in the process, and the count of steps, which all ranks must make together.

The hooks are torch's global ones, so they also run for optimizers that have nothing to do with this package. The
control exchange compares the count.

Note [Compiled steps]. Under ``torch.compile(optimizer.step)`` Dynamo traces the hooks. For an optimizer that has none
of our parameters they must leave nothing in the graph. For other optimizers they must run in Python at every step: the
graph breaks before them, and the arithmetic of the step is compiled by itself."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm import meet
from ..flat import FLAT_ATTRIBUTE, segment_owners, sharded_param_owners
from ..ragged import OWNER_ATTRIBUTE
from .hook_decorators import never_traced
from .state import Root, state_of

_is_compiling = torch.compiler.is_compiling


def before_every_step(hook: Callable[[Optimizer], None]) -> None:
    """From now on call ``hook`` with each optimizer that is about to step."""
    register_optimizer_step_pre_hook(_for_ours(hook))


def after_every_step(hook: Callable[[Optimizer], None]) -> None:
    """From now on call ``hook`` with each optimizer that has stepped."""
    register_optimizer_step_post_hook(_for_ours(hook))


def _for_ours(hook: Callable[[Optimizer], None]) -> Callable[[Optimizer, Any, Any], None]:
    hook = never_traced(hook)

    def call(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not _is_compiling() or _has_ours(optimizer):  # see Note [Compiled steps]
            hook(optimizer)

    return call


def _has_ours(optimizer: Optimizer) -> bool:
    """Whether a parameter is sharded, a flat view, or replaced by a sharded one. Dynamo traces and guards this."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, OWNER_ATTRIBUTE) or hasattr(param, FLAT_ATTRIBUTE):
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
_counts = False
_unused = count()
_numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # instead of ids, which are reused


class _Steps:
    """Optimizer steps on one root's parameters: the total, and the count of each optimizer since the last exchange."""

    def __init__(self) -> None:
        self.total = 0
        self.recent: Counter[int] = Counter()


_steps: weakref.WeakKeyDictionary[Root, _Steps] = weakref.WeakKeyDictionary()


def count_steps(root: Root) -> None:
    """From now on count the steps of optimizers of the root's sharded parameters and flat views."""
    global _counts
    _steps[root] = _Steps()
    if not _counts:
        _counts = True
        after_every_step(_count)


def _count(optimizer: Optimizer) -> None:
    number = None
    for root in {_root_of(group["params"]) for group in optimizer.param_groups}:
        steps = None if root is None else _steps.get(root)
        if steps is not None:
            number = _numbers.setdefault(optimizer, next(_unused)) if number is None else number
            steps.total += 1
            steps.recent[number] += 1


def _root_of(params: list[object]) -> Root | None:
    """The root of the first parameter that is ours and has a gradient (a step skips those without one)."""
    for param in params:
        owner = sharded_param_owners.get(id(param)) or segment_owners.get(id(param))
        handle = None if owner is None else owner[0]()
        if handle is not None and param.grad is not None:  # type: ignore[attr-defined]
            state = state_of(handle)
            return None if state is None else state.root
    return None


def num_steps(root: Root) -> int | None:
    """The number of steps so far; ``None`` if this rank has nothing to train, and so may have no optimizer."""
    return _steps[root].total if holds_elements(root) else None


def restart_counts(root: Root) -> None:
    """Count from zero."""
    _steps[root] = _Steps()


def steps_to_compare(root: Root) -> int | None:
    """The largest number of steps of one optimizer since the last exchange, at most 255; ``None`` as in
    ``num_steps``."""
    steps = _steps.get(root)
    if steps is None or not holds_elements(root):
        return None
    return min(255, max(steps.recent.values(), default=0))


def steps_were_compared(root: Root) -> None:
    """Restart the count after all ranks have compared it or given it up."""
    steps = _steps.get(root)
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
    """Raise, on every rank, an error that says how many steps each rank has made. Ranks: all know of the difference
    and call this."""
    steps = steps_to_compare(root)
    group = root.mesh.peers
    root.order.close()
    steps_were_compared(root)  # each difference is reported once
    text = meet(group, "comparing optimizer steps", "-" if steps is None else str(steps), _list_steps)
    raise RuntimeError(f"{STEPS_DIFFER} since their last backward: {text}. No gradient was published. {REMEDY}")


def _list_steps(payloads: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, steps in enumerate(payloads):
        if steps != "-":
            ranks.setdefault(steps, []).append(rank)
    few_first = sorted(ranks.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{name_ranks(item)}: {steps}" for steps, item in few_first)


def name_ranks(ranks: list[int], most: int = 8) -> str:
    """A list of ranks as errors show it."""
    listed = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
