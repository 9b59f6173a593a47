"""transformers: models that it shards while it loads them, and its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from fsdp_compose import fully_shard, offload_checkpointed_inputs
from tests.harness import distributed
from tests.two_memories import IN, OUT, TwoMemories
from tests_integration import llama
from tests_integration.side_by_side import assert_same, pin_no_memory, results_of
from tests_integration.test_accelerate import pretend_to_have_accelerators


def loaded(folder: Path, **options: Any) -> dict[str, Any]:
    if dist.get_rank() == 0:
        llama.model().save_pretrained(folder / "model")
    dist.barrier()
    config = DistributedConfig(fsdp_size=dist.get_world_size(), **options)
    model = LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=config, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses, norms = [], []
    for ids in llama.batches(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(llama.mean(loss))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "trained")
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(folder / "trained", attn_implementation="eager")
    with torch.no_grad():
        losses += [again(ids, labels=ids).loss.item() for ids in llama.batches(1)][: dist.get_rank() == 0]
    groups = sum(isinstance(module, fsdp.FSDPModule) for module in model.modules())
    return {"losses": losses, "norms": norms, "groups": groups}


def plain(folder: Path) -> dict[str, Any]:
    return loaded(folder)


def mixed(folder: Path) -> dict[str, Any]:
    return loaded(folder, fsdp_mixed_precision=True)


def offloaded(folder: Path) -> dict[str, Any]:
    pin_no_memory()
    return loaded(folder, fsdp_cpu_offload=True)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(llama.VOCABULARY, (32, llama.LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.losses += [logs[key] for key in ("loss", "grad_norm", "eval_loss") if key in (logs or {})]


def trainer(folder: Path) -> dict[str, Any]:
    def make(resumed: bool) -> tuple[Trainer, Losses]:
        arguments = TrainingArguments(
            str(folder / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            max_steps=4 if resumed else 2, learning_rate=1e-2, logging_steps=1, save_steps=2, report_to=[],
            use_cpu=True, max_grad_norm=0.5, seed=0,
            fsdp="full_shard auto_wrap", lr_scheduler_type="constant", eval_strategy="steps", eval_steps=2,
            fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )  # fmt: skip
        pretend_to_have_accelerators()
        losses = Losses()
        return Trainer(
            llama.model(), arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=[losses]
        ), losses

    first, losses = make(resumed=False)
    first.train()
    groups = sum(isinstance(module, fsdp.FSDPModule) for module in first.model.modules())
    second, resumed = make(resumed=True)
    second.train(resume_from_checkpoint=True)
    second.save_model(str(folder / "final"))
    return {"losses": losses.losses, "resumed": resumed.losses, "groups": groups}


@pytest.mark.parametrize("program", [plain, mixed, offloaded, trainer])
def test_training(program, tmp_path):
    results = results_of(program, tmp_path)
    assert results["drop_in"]["groups"] > 3
    assert_same(results, 2e-2 if program is mixed else 2e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_inputs_of_checkpointed_layers_wait_in_host_memory(use_reentrant):
    gradients = []
    for offloads in (False, True):
        model = llama.model().train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if offloads:
            offload_checkpointed_inputs(model, min_bytes=1)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        (ids,) = llama.batches(1)
        with TwoMemories() as memories:
            model(ids, labels=ids).loss.backward()
        hidden = ids.numel() * model.config.hidden_size * 4
        assert memories.copies == {OUT: [hidden] * 3 * offloads, IN: [hidden] * 3 * offloads}
        gradients.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
