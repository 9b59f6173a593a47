"""A pipeline stage for ``torch.distributed.pipelining`` that reduces its module's gradients once a step.

A schedule runs the backwards of its microbatches in its own order, and tells the stage when all of them are done.
torch's stage recognizes FSDP2's modules by their class; our modules keep the user's class, so they need this stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import pipelining
from torch.distributed.pipelining.stage import stage_backward

from ._torch import finalizes_gradients
from .extension import no_sync, reduce_gradients, states_to_run


class PipelineStage(pipelining.PipelineStage):
    """``torch.distributed.pipelining.PipelineStage`` for a ``fully_shard``'ed module, with the same arguments.

    Backwards of microbatches accumulate gradients without communication; after the last one, each flat parameter is
    reduced once (``reduce_gradients``). Shard a stage over the ranks that run the same stage::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        stage = PipelineStage(model, mesh.get_local_rank("pp"), 2, device, group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    Schedules that split a microbatch's backward into one for the inputs and one for the weights (zero bubble) give the
    same results, but the split hides no bubble: one backward of a group computes all gradients, so both run at the
    inputs' turn.
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
                return (), None  # ran with the inputs' backward
            return stage_backward(**bwd_kwargs), None  # torch's method would leave its flags on modules of drop_in

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients accumulated by the microbatches and divide them by ``grad_scale_factor``.

        A step with ``finalize_gradients=False`` (torch 2.15) does neither; a later step then reduces its gradients.

        Ranks: all ranks that run this stage.
        """
        if self._is_sharded:
            if not finalizes_gradients():
                return
            reduce_gradients(self.submod)
            if grad_scale_factor != 1:
                self.scale_grads(grad_scale_factor)
        else:
            super().perform_reduce_grad(grad_scale_factor)

    @property
    def _is_sharded(self) -> bool:
        return bool(states_to_run(self.submod))

    def _post_metadata_inference_cleanup(self) -> None:
        """Drop the gradients of the backward by which torch learned the shapes of the stage."""
        super()._post_metadata_inference_cleanup()
        if self._is_sharded:
            self.submod.zero_grad()


def whole_backward(
    stage_output: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterator[nn.Parameter] | None = None,
) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]]]:
    """Run the backward of a stage's inputs and weights, instead of that of its inputs alone. For the last stage,
    ``stage_output`` is the loss, without ``output_grads``. Returns the gradients of the inputs, and an empty list: no
    work is left for the weights."""
    output: Any = stage_output
    if output_grads is None:
        (output,) = stage_output
    return stage_backward(output, output_grads, input_values), []
