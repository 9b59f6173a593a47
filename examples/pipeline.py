"""Trains the GPT of train_gpt.py as a pipeline whose stages are sharded over the ranks that run them.

    torchrun --standalone --nproc_per_node 4 examples/pipeline.py                              # 2 stages x 2 shards
    torchrun --standalone --nproc_per_node 4 examples/pipeline.py --schedule InterleavedZeroBubble

torch's schedules run the microbatches. ``fsdp_compose.pipelining.PipelineStage`` reduces each flat parameter only once
a step. (With ``drop_in.install()`` torch's own stage does the same.) Except for rounding, the losses are those of one
process.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from train_gpt import GPT

from fsdp_compose import clip_grad_norm_, fully_shard
from fsdp_compose.pipelining import PipelineStage

STAGES_PER_RANK = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2}


class Stage(nn.Module):
    """A part of the GPT: some blocks, with the embeddings in the first part and the head in the last."""

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        size = -(-len(model.blocks) // num_stages)
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.blocks = nn.ModuleList(model.blocks[index * size : (index + 1) * size])
        if self.is_first:
            self.embedding, self.positions = model.embedding, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(step: int, args: argparse.Namespace, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Returns bytes that count up, and the bytes that follow them."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    first = torch.randint(256, (args.batch, 1), generator=generator)
    text = ((first + torch.arange(args.seq_len + 1)) % 256).chunk(parts)[part]
    return text[:, :-1], text[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="number of pipeline ranks (default: 2)")
    parser.add_argument("--schedule", choices=STAGES_PER_RANK, default="1F1B")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all data-parallel ranks")
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradient norm limit of a rank's stages; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(seq_len=32, dim=64, layers=4, heads=4, tie=False, checkpoint_activations=False)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start this under torchrun: see --help")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (args.stages, dist.get_world_size() // args.stages), mesh_dim_names=("pp", "dp"))
    pp, dp, shards = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh["dp"].size()
    torch.manual_seed(args.seed)  # every rank builds the same model, and keeps its part
    model = GPT(args)
    per_rank = STAGES_PER_RANK[args.schedule]
    num_stages, stages = args.stages * per_rank, []
    for index in range(pp, num_stages, args.stages):
        part = Stage(model, index, num_stages)
        for block in part.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
        stages.append(PipelineStage(part, index, num_stages, torch.device("cpu"), group=mesh.get_group("pp")))
    schedule_of = get_schedule_class(args.schedule)
    schedule = schedule_of(stages if per_rank > 1 else stages[0], n_microbatches=args.microbatches, loss_fn=loss_of)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    for step in range(1, args.steps + 1):
        text, targets = batch_of(step, args, dp, shards)
        losses: list[Tensor] = []
        inputs = (text,) if pp == 0 else ()
        schedule.step(*inputs, **({"target": targets, "losses": losses} if stages[-1].is_last else {}))
        if args.max_norm:
            clip_grad_norm_(params, args.max_norm)  # over the stages of this rank alone
        optimizer.step()
        optimizer.zero_grad()
        if stages[-1].is_last:
            mean = torch.stack(losses).mean().detach()
            dist.all_reduce(mean, group=mesh.get_group("dp"))
            if dp == 0:
                print(f"step {step}: loss {mean.item() / shards:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
