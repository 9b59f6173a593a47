"""Pipeline schedules that split a stage's backward into one for its inputs and one for its weights (zero bubble).

For sharded stages the inputs' backward computes both, and nothing is left for the weights. In ``drop_in``, where
``install()`` rebinds nothing: elsewhere torch's functions, which these call, would become these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.pipelining.stage import stage_backward_input as of_inputs
from torch.distributed.pipelining.stage import stage_backward_weight as of_weights

from ..extension import handle_of
from ..pipelining import whole_backward


def stage_backward_input(
    stage_outputs_or_loss: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[nn.Parameter],
) -> Any:
    """torch's function of this name, for sharded stages too."""
    weights = list(weights)
    # torch splits a backward by searching the graph for the stage's parameters, but the graph of a sharded module
    # contains unsharded parameters instead.
    run: Callable[..., Any] = whole_backward if _are_sharded(weights) else of_inputs
    return run(stage_outputs_or_loss, output_grads, input_values, iter(weights))


def stage_backward_weight(weights: Iterable[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
    """torch's function of this name, for sharded stages too."""
    weights = list(weights)
    return () if _are_sharded(weights) else of_weights(iter(weights), *args, **kwargs)


def _are_sharded(weights: Iterable[nn.Parameter]) -> bool:
    return any(handle_of(item) is not None for item in weights)
