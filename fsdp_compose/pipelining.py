"""A stage for the schedules of ``torch.distributed.pipelining``: its module's gradients are reduced once a step.

A schedule runs the backwards of its microbatches in an order of its own, and says when all of them are done. torch's
stage knows FSDP2's modules by their class; ours are of the user's own, so this one says what is to be done with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import pipelining
from torch.distributed.pipelining.stage import stage_backward

from ._torch import finalizes_gradients
from .api import no_sync, reduce_gradients
from .group import states_to_run


class PipelineStage(pipelining.PipelineStage):
    """``torch.distributed.pipelining.PipelineStage`` for a ``fully_shard``'ed module: arguments and use are the same.

    Backwards of microbatches accumulate without communication, and one reduction for each flat parameter follows the
    last (``reduce_gradients``). Shard a stage over the ranks that run the same stage::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp"))
        for block in part.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])
        stage = PipelineStage(part, mesh.get_local_rank("pp"), 2, device, group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    Schedules that split the backward of a microbatch into that of its inputs and that of its weights (zero bubble)
    train alike, but hide nothing: both are done at the inputs' turn, for one backward of a group brings all gradients.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run the backward of a microbatch, without gradient sync."""
        if not self._is_sharded:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with no_sync(self.submod):
            if backward_type == "input":
                return whole_backward(**bwd_kwargs)
            if backward_type == "weight":
                return (), None  # done with the inputs
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what the microbatches have accumulated, and divide it by ``grad_scale_factor``; not in a step with
        ``finalize_gradients=False`` (torch 2.15), whose gradients a later step reduces. Ranks: all that run this
        stage."""
        if self._is_sharded:
            if not finalizes_gradients():
                return
            reduce_gradients(self.submod)
        super().perform_reduce_grad(grad_scale_factor)

    @property
    def _is_sharded(self) -> bool:
        return bool(states_to_run(self.submod))

    def _post_metadata_inference_cleanup(self) -> None:
        """torch has run the stage to learn what it returns; that backward is none of the training's."""
        super()._post_metadata_inference_cleanup()
        if self._is_sharded:
            self.submod.zero_grad()


def whole_backward(
    stage_output: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterator[nn.Parameter] | None = None,
) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]]]:
    """In the place of a backward of a stage's inputs alone, one of its inputs and its weights.

    Args:
        stage_output: what the stage has returned; of the last stage the loss, alone, without ``output_grads``.
        weights: without use.

    Returns:
        The gradients of the inputs, and what is left for the weights: nothing.
    """
    output: Any = stage_output
    if output_grads is None:
        (output,) = stage_output
    return stage_backward(output, output_grads, input_values), []
