"""``compile()``: ``torch.compile`` of code in which whole sharded models run, their roots included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from ..group import get_state
from ..runtime import region

_Function = Callable[..., Any]


def compile(target: nn.Module | _Function, *models: nn.Module, **options: Any) -> _Function:
    """``torch.compile`` with everything in the graph: also the all-gather and reduce-scatter of the root's own group,
    which ``torch.compile(model)`` and ``model.compile()`` leave outside, with the root's hooks.

    What concerns an iteration as a whole (checks of what was changed since the last one, recovery) is done before the
    compiled code begins, and what concerns a backward as a whole at its end, in eager code.

    Args:
        target: a sharded model; or a function that runs some, such as a step of training: forward, loss, backward,
            optimizer. ``backward()`` breaks the graph, and so does the step of an optimizer.
        models: the modules that are roots, of which ``target`` runs forwards; ``target`` itself if none is named. A
            forward of another sharded model inside ``target`` breaks the graph at the hooks of its root.
        options: of ``torch.compile``.

    Returns:
        What to call instead of ``target``, with its arguments. For a model, use the model itself for all else.

    Raises:
        ValueError: ``fully_shard`` was not called on one of the models, or none is named.

    Ranks: a call of the result is like a forward of ``models``, to be made by all ranks of their meshes.
    """
    roots = models or ((target,) if isinstance(target, nn.Module) else ())
    if not roots:
        raise ValueError("compile(): name the sharded models that the function runs: compile(step, model)")
    for root in roots:
        if get_state(root) is None:
            raise ValueError(
                f"compile(): fully_shard() was not called on the {type(root).__name__}: shard it first, its blocks and "
                "then itself"
            )

    def call(*args: Any, **kwargs: Any) -> Any:  # of a frame of its own: Dynamo traces the hooks of a module in it
        return target(*args, **kwargs)

    compiled = torch.compile(call, **options)

    @functools.wraps(target.forward if isinstance(target, nn.Module) else target)
    def run(*args: Any, **kwargs: Any) -> Any:
        with region(roots):
            return compiled(*args, **kwargs)

    return run
