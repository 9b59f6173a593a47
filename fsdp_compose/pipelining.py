"""A stage for the schedules of ``torch.distributed.pipelining``: its module's gradients are reduced once a step.

A schedule runs the backwards of its microbatches in an order of its own, and says when all of them are done. torch's
stage knows FSDP2's modules by their class; ours are of the user's own, so this one says what is to be done with them.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import pipelining

from .controls import no_sync, reduce_gradients
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

    Schedules that split the backward of a microbatch into that of its inputs and that of its weights (zero bubble) are
    refused when they come to one.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run the backward of a microbatch, without gradient sync."""
        if not self._is_sharded:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type != "full":
            raise NotImplementedError(
                f"PipelineStage {self.stage_index}: the schedule splits backwards into those of inputs and of weights "
                f"(this one is of the {backward_type}), and a fully_shard'ed module has one backward for both: use "
                "GPipe, 1F1B, or interleaved 1F1B"
            )
        with no_sync(self.submod):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what the microbatches have accumulated, and divide it by ``grad_scale_factor``. Ranks: all that run
        this stage."""
        if self._is_sharded:
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
