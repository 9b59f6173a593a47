"""Hooks around the steps of every optimizer of the process, and the count of steps, which all ranks must make together.

The hooks are torch's global ones, so they also run for optimizers that have nothing to do with this package. The
control exchange compares the count.

Note [Compiled steps]. Dynamo traces the hooks with ``torch.compile(optimizer.step)``. For an optimizer without any
parameter of ours nothing may remain of them in the graph; for one of ours they must run at every step, in Python: the
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
        if not _is_compiling() or _has_ours(optimizer):
            hook(optimizer)

    return call


def _has_ours(optimizer: Optimizer) -> bool:
    """Whether a parameter is sharded, a flat view, or replaced by a sharded one; Dynamo traces this, and guards it."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, OWNER_ATTRIBUTE) or hasattr(param, FLAT_ATTRIBUTE):
                return True
    return False


# ---- Optimizer steps, which all ranks must make together: counted here, compared at every control exchange.
#
# A rank that skips a step alone (it has found an inf; its loss was NaN) has shards of another step than the others from
# then on: a model that never was. Nothing else tells of it, for the collectives are the same.


STEPS_DIFFER = "the ranks have made different numbers of optimizer steps"
REMEDY = (
    "The shards of the parameters are no longer of one step: load a checkpoint. All ranks must decide together whether "
    "to step, by all-reducing a flag"
)
_counts = False
_unused = count()
_numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # not ids: these come again


class _Steps:
    """The steps of optimizers of one root's parameters: in all, and by optimizer since the last exchange."""

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
    """The root of the first parameter that is ours and has a gradient: without one it was left as it is."""
    for param in params:
        owner = sharded_param_owners.get(id(param)) or segment_owners.get(id(param))
        handle = None if owner is None else owner[0]()
        if handle is not None and param.grad is not None:  # type: ignore[attr-defined]
            state = state_of(handle)
            return None if state is None else state.root
    return None


def num_steps(root: Root) -> int | None:
    """All steps so far; ``None`` where there is nothing to train: there may be no optimizer."""
    return _steps[root].total if holds_elements(root) else None


def restart_counts(root: Root) -> None:
    """Count from zero."""
    _steps[root] = _Steps()


def steps_to_compare(root: Root) -> int | None:
    """The most steps that one optimizer has made since the last exchange, 255 for more; ``None`` as in
    ``num_steps``."""
    steps = _steps.get(root)
    if steps is None or not holds_elements(root):
        return None
    return min(255, max(steps.recent.values(), default=0))


def steps_were_compared(root: Root) -> None:
    """All ranks have exchanged, or given up."""
    steps = _steps.get(root)
    if steps is not None and steps.recent:
        steps.recent.clear()


def holds_elements(root: Root) -> bool:
    """Whether there is something on this rank for an optimizer to train: it may have none where there is not."""
    return any(
        start < stop and flag
        for state in root.live_states()
        for handle in state._handles
        for (start, stop, _), flag in zip(handle.local_shards, handle.unsharded.flags, strict=True)
    )


def raise_different_steps(root: Root) -> None:
    """Raise, on every rank, an error that tells how many steps each has made. Ranks: all, for each knows of it."""
    steps = steps_to_compare(root)
    group = root.mesh.peers
    root.order.close()
    steps_were_compared(root)  # each difference is told once
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
    """Some ranks, as errors list them."""
    listed = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
