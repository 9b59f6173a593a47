"""accelerate's FSDP2 plugin: prepare, accumulate, clip, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch.distributed import fsdp

from tests_integration import llama
from tests_integration.side_by_side import assert_same, pin_no_memory, results_of


def pretend_to_have_accelerators() -> None:
    """accelerate takes FSDP for what GPUs do. The processes are on the CPU all the same."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train(folder: Path, precision: str = "no", num_steps: int = 3, **plugin_options: Any) -> dict[str, Any]:
    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        **plugin_options,
    )
    pretend_to_have_accelerators()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = llama.model(tie_word_embeddings=plugin_options.get("cpu_ram_efficient_loading", False))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for ids in llama.batches(2 * num_steps):
        with accelerator.accumulate(model):
            loss = model(ids, labels=ids).loss
            accelerator.backward(loss)
            losses.append(llama.mean(loss))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder / "state"))
    whole = accelerator.get_state_dict(model)
    sums = [] if not whole else [float(value.float().abs().sum()) for _, value in sorted(whole.items())]
    accelerator.load_state(str(folder / "state"))
    for ids in llama.batches(1):
        losses.append(llama.mean(model(ids, labels=ids).loss))
    return {
        "losses": losses,
        "norms": norms,
        "sums": sums,
        "groups": sum(isinstance(module, fsdp.FSDPModule) for module in model.modules()),
        "class": type(accelerator.unwrap_model(model)).__name__.removeprefix("FSDP"),
    }


def plain(folder: Path) -> dict[str, Any]:
    return train(folder)


def bf16(folder: Path) -> dict[str, Any]:
    return train(folder, "bf16")


def kept(folder: Path) -> dict[str, Any]:
    return train(folder, reshard_after_forward=False)


def loaded_on_the_first_rank(folder: Path) -> dict[str, Any]:
    return train(folder, cpu_ram_efficient_loading=True)


def checkpointed(folder: Path) -> dict[str, Any]:
    return train(folder, activation_checkpointing=True)


def offloaded(folder: Path) -> dict[str, Any]:
    pin_no_memory()
    return train(folder, cpu_offload=True)


@pytest.mark.parametrize("program", [plain, offloaded, bf16, kept, loaded_on_the_first_rank, checkpointed])
def test_training(program, tmp_path):
    assert_same(results_of(program, tmp_path), 2e-2 if program is bf16 else 1e-5)
