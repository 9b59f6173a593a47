"""Trains LoRA adapters of peft on a frozen Llama, both sharded, and saves the adapters for peft.

    torchrun --standalone --nproc_per_node 2 examples/lora.py --out runs/lora
    torchrun --standalone --nproc_per_node 2 examples/lora.py --base runs/hf_llama --vocabulary 64

In each group, frozen and trainable parameters are in separate flat parameters: only the adapters' gradients are
reduced, and only the adapters have optimizer state. At the end --out holds only the adapters, as peft saves them. The
first rank loads them onto an unsharded base and compares them with the trained ones.

--base is a folder saved by hf_llama.py, or another small Llama; without it the base is random. See hf_llama.py.
Needs peft, transformers and safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from hf_llama import build_model, differences, make_parser, shard, start_process_group, train
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import LlamaForCausalLM

from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict


def build_base(args: argparse.Namespace) -> LlamaForCausalLM:
    return build_model(args) if args.base is None else LlamaForCausalLM.from_pretrained(args.base)


def add_adapters(base: LlamaForCausalLM, args: argparse.Namespace) -> PeftModel:
    """Adds low-rank matrices to attention's; freezes everything else."""
    torch.manual_seed(args.seed + 1)  # the same adapters on every rank
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets))


def save_and_compare(model: PeftModel, args: argparse.Namespace) -> None:
    """Saves the adapters. Ranks: all ranks gather them; the first one writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    trained = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(args.out, state_dict=trained)
        loaded = PeftModel.from_pretrained(build_base(args), args.out)
        adapters = get_peft_model_state_dict(model, state_dict=trained)
        wrong = differences(get_peft_model_state_dict(loaded), adapters)
        if wrong:
            raise SystemExit(f"{args.out} differs from the trained adapters: {', '.join(wrong)}")
        print(f"peft loads {args.out}: {len(adapters)} tensors, equal to those that were trained")


def main() -> None:
    parser = make_parser(__doc__, "runs/lora")
    parser.add_argument("--base", type=Path, help="folder of a saved Llama (default: a random one)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    args = parser.parse_args()
    device = start_process_group(args)
    model = add_adapters(build_base(args), args).to(device)
    num_trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    num_frozen = sum(param.numel() for param in model.parameters()) - num_trainable
    shard(model, model.get_base_model().model.layers)
    if dist.get_rank() == 0:
        print(f"{num_trainable:,} adapter parameters, {num_frozen:,} frozen ones")
    train(model, args, device)
    save_and_compare(model, args)
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
