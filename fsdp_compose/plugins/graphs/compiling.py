"""``compile()``: ``torch.compile`` for code that runs whole sharded models, roots included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from ..._arguments import checked
from ...core.group import get_state
from ...core.runtime import region
from ...errors import MisuseError

_Function = Callable[..., Any]


@checked()
def compile(target: nn.Module | _Function, *models: nn.Module, **options: Any) -> _Function:
    """Compile with ``torch.compile`` and put everything into the graph.

    That includes the root's hooks and the all-gather and reduce-scatter of its own group, which
    ``torch.compile(model)`` and ``model.compile()`` leave outside. Work for a whole iteration (detecting changes since
    the last one, recovery) runs in eager code before the compiled code begins; work for a whole backward runs in eager
    code at its end.

    Args:
        target: a sharded model, or a function that runs sharded models, for example a training step (forward, loss,
            backward, optimizer). ``backward()`` and the optimizer's step break the graph.
        models: the root modules whose forwards ``target`` runs; default: ``target`` itself. The forward of any other
            sharded model inside ``target`` breaks the graph at the hooks of its root.
        options: passed to ``torch.compile``.

    Returns:
        A callable to use instead of ``target``, with the same arguments. For everything but the call, use the model
        itself.

    Raises:
        ValueError: ``fully_shard`` was not called on one of the models, or with ``limit_unsharded_bytes``; or no model
            is named.

    Ranks: all ranks of the meshes of ``models`` must call the result, as they call forward.
    """
    roots = models or ((target,) if isinstance(target, nn.Module) else ())
    if not roots:
        raise MisuseError("compile(): pass the sharded models that the function runs too: compile(step, model)")
    for root in roots:
        state = get_state(root)
        if state is None:
            raise MisuseError(
                f"compile(): fully_shard() was not called on this {type(root).__name__}: call fully_shard() on its "
                "blocks, then on the model itself, before compile()"
            )
        if state.options.limit_unsharded_bytes is not None:
            raise MisuseError(
                f"compile(): this {type(root).__name__} has a limit_unsharded_bytes, and in a graph the compiler "
                "places the all-gathers: compile block by block (block.compile()), or leave out the limit"
            )

    def call(*args: Any, **kwargs: Any) -> Any:  # a frame of its own, in which Dynamo traces the module's hooks
        return target(*args, **kwargs)

    compiled = torch.compile(call, **options)

    @functools.wraps(target.forward if isinstance(target, nn.Module) else target)
    def run(*args: Any, **kwargs: Any) -> Any:
        with region(roots):
            return compiled(*args, **kwargs)

    return run
