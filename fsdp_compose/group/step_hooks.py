"""Hooks around the steps of every optimizer of the process: torch's global ones, which run for optimizers too that have
nothing to do with this package.

Note [Compiled steps]. Dynamo traces the hooks with ``torch.compile(optimizer.step)``. For an optimizer without any
parameter of ours nothing may remain of them in the graph; for one of ours they must run at every step, in Python: the
graph breaks before them, and the arithmetic of the step is compiled by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..flat import FLAT_ATTRIBUTE
from ..ragged import OWNER_ATTRIBUTE
from .dynamo import never_traced

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
