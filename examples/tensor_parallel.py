"""Trains the GPT of train_gpt.py with tensor parallelism inside sharded data parallelism.

    torchrun --standalone --nproc_per_node 4 examples/tensor_parallel.py                     # 2 x 2: data, tensor
    torchrun --standalone --nproc_per_node 8 examples/tensor_parallel.py --mesh 2x2x2        # replicas, shards, tensor

``parallelize_module`` splits the matrices of each block over the last dimension of the mesh; ``fully_shard`` then
shards all parameters, split or not, over the other dimensions, with one flat parameter, one all-gather and one
reduce-scatter for each block. Ranks of one tensor-parallel group get the same batch. Except for rounding, the losses
are those of one process.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_gpt import GPT

from fsdp_compose import clip_grad_norm_, fully_shard

PLAN = {
    "qkv": ColwiseParallel(output_layouts=Replicate()),
    "projection": RowwiseParallel(input_layouts=Replicate()),
    "mlp_in": ColwiseParallel(),
    "mlp_out": RowwiseParallel(),
}


def build_model(args: argparse.Namespace, mesh: DeviceMesh) -> GPT:
    torch.manual_seed(args.seed)  # every rank builds the same model, and keeps its part
    model = GPT(args).to(mesh.device_type)
    data = mesh[mesh.mesh_dim_names[:-1]]
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="data x tensor, or replicas x shards x tensor (default: 2x2)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, over all data-parallel ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(seq_len=64, dim=128, layers=2, heads=4, tie=False, checkpoint_activations=False)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start this under torchrun: see --help")
    shape = tuple(int(size) for size in args.mesh.split("x"))
    num_shares = math.prod(shape[:-1])
    if len(shape) not in (2, 3) or math.prod(shape) != int(os.environ["WORLD_SIZE"]) or args.batch % num_shares:
        raise SystemExit(f"--mesh {args.mesh}: expected DxT or RxSxT over all processes, and a --batch divisible by D")
    device_type = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard", "tensor")[-len(shape) :])
    model = build_model(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share = dist.get_rank() // shape[-1]
    generator = torch.Generator().manual_seed(args.seed)
    text = torch.tensor([*Path(__file__).read_bytes()])
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.seq_len - 1, (args.batch,), generator=generator)
        tokens = text[starts.chunk(num_shares)[share][:, None] + torch.arange(args.seq_len + 1)].to(device_type)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(
                f"step {step + 1}: loss {mean.item() / dist.get_world_size():.4f}, norm {norm.item():.3f}", flush=True
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
