"""Trains a sharded Llama from transformers, and saves it in files that transformers can load.

    torchrun --standalone --nproc_per_node 2 examples/hf_llama.py --out runs/hf_llama

The modeling code is transformers' own, with a small random configuration. Each decoder layer is a group; the rest of
the model is another one. The tokens are synthetic: sequences that go up by equal steps. At the end --out is a folder
in the layout of the Hugging Face hub; the first rank loads an unsharded model from it and compares it with the trained
one. Needs transformers and safetensors.

Runs on the CPU with gloo, or with --device cuda on one GPU per process with NCCL. Each step draws one global batch, and
every rank takes its slice, so the run is the same on any number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_compose import clip_grad_norm_, fully_shard
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict, save_hf


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Builds an unsharded model, the same on every rank."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.dim,
        intermediate_size=3 * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 2,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=args.tie,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def shard(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def my_batch(step: int, args: argparse.Namespace, device: torch.device) -> Tensor:
    """Returns this rank's part of a step's batch."""
    return batch_of(step, args).chunk(dist.get_world_size())[dist.get_rank()].to(device)


def batch_of(step: int, args: argparse.Namespace) -> Tensor:
    """Sequences that go up by equal steps, around the vocabulary."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    first = torch.randint(args.vocabulary, (args.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (args.batch, 1), generator=generator)
    return (first + stride * torch.arange(args.seq_len)) % args.vocabulary


def train(model: nn.Module, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Trains; returns the mean loss of each step."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=args.lr)
    losses = []
    for step in range(1, args.steps + 1):
        tokens = my_batch(step, args, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % args.log_every == 0 or step == args.steps):
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Returns the names of tensors that are not bitwise equal in both."""
    names = [*dict.fromkeys([*found, *expected])]
    return [
        name for name in names if name not in found or name not in expected or not found[name].equal(expected[name])
    ]


def save_and_compare(model: nn.Module, args: argparse.Namespace) -> None:
    save_hf(model, args.out)
    trained = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.config.save_pretrained(args.out)
        loaded = LlamaForCausalLM.from_pretrained(args.out)
        wrong = differences(loaded.state_dict(), trained)
        if wrong:
            raise SystemExit(f"{args.out} differs from the trained model: {', '.join(wrong)}")
        print(f"transformers loads {args.out}: {len(trained)} tensors, equal to those that were trained")


# ---- the run around it -----------------------------------------------------------------------------------------------


def make_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder to write; must not exist")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tie", action=argparse.BooleanOptionalAction, default=False, help="one embedding and head")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=10)
    return parser


def start_process_group(args: argparse.Namespace) -> torch.device:
    """Joins the other processes; returns the device this one computes on."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"start this under torchrun: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}")
    if args.batch % int(os.environ["WORLD_SIZE"]):
        raise SystemExit(f"--batch {args.batch} is the global batch: expected a multiple of the number of processes")
    if args.out.exists():
        raise SystemExit(f"--out {args.out} exists already: choose another folder")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    return device


def main() -> None:
    args = make_parser(__doc__, "runs/hf_llama").parse_args()
    device = start_process_group(args)
    model = build_model(args).to(device)
    shard(model, model.model.layers)
    train(model, args, device)
    save_and_compare(model, args)
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
