"""Trains a vision-language model from transformers (LLaVA) on batches in which only some ranks have images.

    torchrun --standalone --nproc_per_node 2 examples/vision_language.py
    torchrun --standalone --nproc_per_node 2 examples/vision_language.py --system fsdp2     # fails

The modeling code is transformers' own, with a small random configuration. It runs the vision tower only if there are
images, so the tower and the projector are optional groups. Ranks without images help to gather them, and count as zeros
in the average of gradients. FSDP2 has no such groups: ranks with images enter all-gathers that the others never join.

The data are synthetic. An image is dark except for one part, and the text after it repeats that part's number; texts
without an image go up by equal steps. Each step draws one global batch, and every rank takes its slice. Losses are
summed and divided by the number of tokens of all ranks, so the run is the same on any number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from fsdp_compose import clip_grad_norm_, fully_shard

VOCABULARY = 64
IMAGE_TOKEN = VOCABULARY - 1
PATCH = 8  # pixels
PARTS = 4  # of an image, two by two; one image token each
NO_TARGET = -100


class Batch(NamedTuple):
    """Sequences, and the images of those that have one, in order."""

    tokens: Tensor
    targets: Tensor
    images: Tensor


def build_model(args: argparse.Namespace) -> LlavaForConditionalGeneration:
    """Builds an unsharded model, the same on every rank."""
    torch.manual_seed(args.seed)
    sizes = {
        "hidden_size": args.dim,
        "intermediate_size": 2 * args.dim,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
    }
    vision = CLIPVisionConfig(image_size=2 * PATCH, patch_size=PATCH, **sizes)
    text = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=args.seq_len, use_cache=False, **sizes)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=PARTS,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def shard(model: LlavaForConditionalGeneration, system: str = "ours") -> nn.Module:
    """Makes each layer a group. Groups inside the optional vision tower are optional too."""
    shard_one = fsdp2_shard if system == "fsdp2" else fully_shard
    parts = model.model
    for layer in [*parts.vision_tower.encoder.layers, *parts.language_model.layers]:
        shard_one(layer)
    for module in (parts.vision_tower, parts.multi_modal_projector):
        if system == "fsdp2":
            fsdp2_shard(module)
        else:
            fully_shard(module, optional=True)
    return shard_one(model)


def batch_of(step: int, args: argparse.Namespace) -> Batch:
    """Draws a step's global batch. In some steps the first sequences have an image, so only few ranks see images."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    first = torch.randint(VOCABULARY - 1, (args.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (args.batch, 1), generator=generator)
    tokens = (first + stride * torch.arange(args.seq_len)) % (VOCABULARY - 1)
    num_images = (0, 1, args.batch // 4, args.batch // 2)[step % 4]
    bright = torch.randint(PARTS, (num_images,), generator=generator)
    tokens[:num_images, :PARTS] = IMAGE_TOKEN
    tokens[:num_images, PARTS:] = bright[:, None]
    targets = tokens[:, 1:].clone()
    targets[:num_images, : PARTS - 1] = NO_TARGET
    is_bright = F.one_hot(bright, PARTS).view(num_images, 1, 2, 2).float()
    return Batch(tokens, targets, F.interpolate(is_bright, scale_factor=PATCH).expand(-1, 3, -1, -1))


def my_part(batch: Batch) -> Batch:
    """Returns this rank's slice of a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    num_rows = len(batch.tokens) // size
    rows = slice(rank * num_rows, (rank + 1) * num_rows)
    return Batch(batch.tokens[rows], batch.targets[rows], batch.images[rows])


def loss_of(model: nn.Module, batch: Batch, num_targets: float) -> Tensor:
    """Returns the sum of this rank's token losses divided by ``num_targets``, which is the same on all ranks. Averaging
    over each rank's own tokens would give more weight to tokens of ranks with few."""
    images = {"pixel_values": batch.images} if len(batch.images) else {}
    logits = model(input_ids=batch.tokens, **images).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return losses / num_targets


def train(model: nn.Module, args: argparse.Namespace) -> list[float]:
    """Trains; returns the mean loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    clip = nn.utils.clip_grad_norm_ if args.system == "fsdp2" else clip_grad_norm_
    losses = []
    for step in range(args.steps):
        whole = batch_of(step, args)
        part = my_part(whole)
        num_targets = (whole.targets != NO_TARGET).sum().item() / dist.get_world_size()  # gradients are averaged
        loss = loss_of(model, part, num_targets)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told = torch.tensor([loss.item() / dist.get_world_size(), len(part.images) > 0])
        dist.all_reduce(told)
        losses.append(told[0].item())
        if dist.get_rank() == 0:
            print(
                f"step {step + 1}: loss {losses[-1]:.4f}, images on {told[1]:.0f} of {dist.get_world_size()} ranks",
                flush=True,
            )
    return losses


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("ours", "fsdp2"), default="ours")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2, help="layers of the vision tower, and of the language model")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--timeout", type=float, default=60, help="timeout of collectives, in seconds")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(f"start this under torchrun: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}")
    if args.batch % int(os.environ["WORLD_SIZE"]):
        raise SystemExit(f"--batch {args.batch} is the global batch: expected a multiple of the number of processes")
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    train(shard(build_model(args), args.system), args)
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
