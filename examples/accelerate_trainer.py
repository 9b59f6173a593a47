"""Trains the Llama of hf_llama.py with transformers' Trainer and accelerate; two lines make them use fsdp_compose.

    torchrun --standalone --nproc_per_node 2 examples/accelerate_trainer.py --out runs/trainer

``drop_in.install()`` replaces FSDP2's names by fsdp_compose's in all imported modules. The rest is an ordinary FSDP2
program: the Trainer wraps the decoder layers, accumulates and clips gradients, saves a checkpoint, resumes from it, and
writes a folder that transformers can load. At the end the first rank loads that folder and compares it with the model.

Runs on the CPU with gloo, or with --device cuda on one GPU per process with NCCL. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from hf_llama import batch_of, build_model, differences, make_parser, start_process_group
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fsdp_compose import drop_in
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict


class Sequences(torch.utils.data.Dataset):
    """The sequences of hf_llama.py."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokens = torch.cat([batch_of(step, args) for step in range(args.steps)])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step}: loss {float(logs['loss']):.4f}", flush=True)


def make_trainer(args: argparse.Namespace, steps: int) -> Trainer:
    is_cpu = args.device == "cpu"
    arguments = TrainingArguments(
        str(args.out), max_steps=steps, per_device_train_batch_size=args.batch // dist.get_world_size() // 2,
        gradient_accumulation_steps=2, learning_rate=args.lr, lr_scheduler_type="constant", max_grad_norm=1.0,
        logging_steps=args.log_every, save_steps=max(args.steps // 2, 1), report_to=[], seed=args.seed, use_cpu=is_cpu,
        fsdp=True, disable_tqdm=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    if is_cpu:  # accelerate assumes that FSDP runs on GPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(build_model(args), arguments, train_dataset=Sequences(args), callbacks=[Report()])


def main() -> None:
    args = make_parser(__doc__, "runs/trainer").parse_args()
    start_process_group(args)
    rebound = drop_in.install()
    make_trainer(args, max(args.steps // 2, 1)).train()
    trainer = make_trainer(args, args.steps)
    trainer.train(resume_from_checkpoint=True)
    groups = sum(isinstance(module, drop_in.FSDPModule) for module in trainer.model.modules())
    trainer.save_model(str(args.out / "final"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    trained = get_model_state_dict(trainer.model, options=options)
    if dist.get_rank() == 0:
        print(f"install() rebound {len(rebound)} names; fsdp_compose sharded {groups} modules")
        wrong = differences(LlamaForCausalLM.from_pretrained(args.out / "final").state_dict(), trained)
        if wrong or not groups:
            raise SystemExit(f"{args.out / 'final'} differs from the trained model: {', '.join(wrong)}")
        print(f"transformers loads {args.out / 'final'}: {len(trained)} tensors, equal to those that were trained")
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
