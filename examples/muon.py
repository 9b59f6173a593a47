"""Trains the GPT of train_gpt.py twice, by AdamW and by Muon, and prints the validation losses side by side.

    torchrun --standalone --nproc_per_node 2 examples/muon.py --steps 150

Both begin with the same weights and see the same batches. Muon trains the matrices of the blocks; embeddings, head and
norms are trained by AdamW in both runs, with the same learning rate.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from train_gpt import Corpus, build_model, learning_rate, loss_of, my_slice, start_process_group, validate, windows

from fsdp_compose import clip_grad_norm_
from fsdp_compose.optim import Muon, muon_groups

WIDTH = 40  # of the longest bar


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=Path, default=stdlib, help="file or directory (default: the standard library)")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--val-every", type=int, default=25)
    rest = {"max_bytes": 4 << 20, "val_batches": 4, "tie": True, "bf16": False, "compile": False, "mesh": None}
    parser.set_defaults(**rest, checkpoint_activations=False, strategy="zero3")  # what train_gpt.py has options for
    return parser.parse_args()


def adamw(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)


def muon(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    groups = muon_groups(model, muon={"lr": args.muon_lr}, adamw={"lr": args.lr, "betas": (0.9, 0.95)})
    optimizer = Muon(groups)
    if dist.get_rank() == 0:
        print(optimizer.describe())
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module, argparse.Namespace], torch.optim.Optimizer]] = {"AdamW": adamw, "Muon": muon}


def losses_of(name: str, corpus: Corpus, args: argparse.Namespace, device: torch.device) -> dict[int, float]:
    """Trains a new model; returns validation losses by step."""
    model, _ = build_model(args, device)
    optimizer = OPTIMIZERS[name](model, args)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate(step, args))
    losses = {}
    for step in range(1, args.steps + 1):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(corpus.training) - args.seq_len, (args.batch,), generator=generator)
        loss_of(model, *windows(corpus.training, my_slice(starts), args.seq_len, device)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % args.val_every == 0 or step == args.steps:
            losses[step] = validate(model, corpus, args, device)
            if dist.get_rank() == 0:
                print(f"{name}, step {step}: validation loss {losses[step]:.3f}", flush=True)
    return losses


def table(losses: dict[str, dict[int, float]]) -> str:
    """The losses of both optimizers by step, with bars."""
    highest = max(loss for by_step in losses.values() for loss in by_step.values())
    lines = ["step  optimizer  loss"]
    for step in losses["AdamW"]:
        for name, by_step in losses.items():
            lines.append(f"{step:>4}  {name:<9}  {by_step[step]:.3f}  {'#' * round(WIDTH * by_step[step] / highest)}")
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    device = start_process_group(args)
    corpus = Corpus(args.data, args.max_bytes, args.seq_len)
    losses = {name: losses_of(name, corpus, args, device) for name in OPTIMIZERS}
    if dist.get_rank() == 0:
        print(f"\n{table(losses)}")
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
