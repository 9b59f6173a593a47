"""TRL: a reference model that it shards, and the weights that it hands to a rollout engine, one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed import fsdp
from trl.generation.vllm_generation import VLLMGeneration
from trl.models.utils import prepare_fsdp

from tests_integration import llama
from tests_integration.side_by_side import assert_same, results_of
from tests_integration.test_accelerate import pretend_to_have_accelerators


def reference_and_export(folder: Path) -> dict[str, Any]:
    pretend_to_have_accelerators()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = llama.model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference = prepare_fsdp(llama.model(), accelerator)
    exporter = SimpleNamespace(
        model=model, accelerator=accelerator, _dist=SimpleNamespace(fsdp_version=2, is_fsdp=True), mode="colocate",
        _fix_param_name_to_vllm=lambda name, extra_prefixes=None: name,
    )  # fmt: skip
    losses, sums = [], []
    for ids in llama.batches(3):
        with torch.no_grad():
            expected = reference(ids).logits
        logits = model(ids, labels=ids)
        loss = logits.loss + (logits.logits - expected).square().mean()
        accelerator.backward(loss)
        losses.append(llama.mean(loss))
        optimizer.step()
        optimizer.zero_grad()
        sums += [float(value.abs().sum()) for _, value in VLLMGeneration._iter_fsdp2_params(exporter, model)]
    return {"losses": losses, "sums": sums, "groups": sum(isinstance(m, fsdp.FSDPModule) for m in reference.modules())}


def test_reference_and_export(tmp_path):
    assert_same(results_of(reference_and_export, tmp_path), 2e-5)
