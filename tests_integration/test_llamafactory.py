"""LlamaFactory v1: its own launcher and trainer, with its plugin for FSDP2 and with this package's.

Not run: loading from the meta device, for which it needs an older transformers (only what we change in it runs), and on
rank 0, where it leaves buffers without values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fsdp_compose import drop_in
from tests.harness import ROOT, run_distributed, run_torchrun
from tests_integration import llama
from tests_integration.side_by_side import SYSTEMS, assert_same

MODULES = {"FSDP2": "llamafactory.v1.launcher", "drop_in": "fsdp_compose.integrations.llamafactory"}
WORDS = 50


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A model, its tokenizer, and conversations."""
    folder = tmp_path_factory.mktemp("files")
    llama.model(tie_word_embeddings=False).save_pretrained(folder / "model")
    words = [*(f"w{i}" for i in range(WORDS)), "<|im_start|>", "<|im_end|>", "user", "assistant", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|<\|\w+\|>"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>").save_pretrained(
        folder / "model"
    )
    generator = torch.Generator().manual_seed(0)

    def said(role: str) -> dict[str, Any]:
        text = " ".join(f"w{i}" for i in torch.randint(WORDS, (6,), generator=generator).tolist())
        return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": float(role == "assistant")}

    samples = [{"messages": [said("user"), said("assistant")]} for _ in range(32)]
    (folder / "data.json").write_text(json.dumps(samples))
    return folder


def run(files: Path, folder: Path, system: str, **options: Any) -> dict[str, Any]:
    config = {
        "model": str(files / "model"), "template": "chatml", "train_dataset": str(files / "data.json"),
        "flash_attn": "eager", "output_dir": str(folder), "micro_batch_size": 1, "global_batch_size": 4,
        "cutoff_len": 64, "learning_rate": 1e-2, "bf16": False, "batching_workers": 0, "max_grad_norm": 0.5,
        "enable_activation_checkpointing": False, "dist_config": {"name": "fsdp2"}, **options,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(config))
    log = folder / "trainer_log.jsonl"
    log.unlink(missing_ok=True)
    code, output = run_torchrun(
        folder,
        *("--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("--local-addr", "127.0.0.1", "-m", "tests_integration.untouched", MODULES[system]),
        *("sft", str(folder / "config.yaml")),
        timeout=300,
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(files / "cache"),
    )
    assert code == 0, output[-6000:]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {"losses": [line["loss"] for line in lines], "norms": [line["grad_norm"] for line in lines]}


def test_training_and_a_run_that_is_resumed(files, tmp_path):
    options = {"max_steps": 6, "save_steps": 4}
    results = {system: run(files, tmp_path / system, system, **options) for system in SYSTEMS}
    assert len(results["drop_in"]["losses"]) == 6
    assert_same(results)
    resumed = run(files, tmp_path / "drop_in", "drop_in", **options, resume_from_checkpoint="auto")
    assert resumed == {key: values[4:] for key, values in results["drop_in"].items()}


def load_one_by_one() -> None:
    from fsdp_compose.integrations.llamafactory import Engine

    values, model = nn.Linear(5, 7), drop_in.fully_shard(nn.Linear(5, 7).to("meta")).to_empty(device="cpu")
    torch.manual_seed(0)
    nn.init.normal_(values.weight)
    for param, value in zip(
        model.parameters(), (values.weight.detach(), values.bias.detach().double().fill_(2)), strict=True
    ):
        Engine._copy_weights(None, param, value)
        torch.testing.assert_close(param.full_tensor(), value, check_dtype=False, rtol=0, atol=0)


def test_whole_values_are_copied_into_the_parts_that_ranks_have():
    run_distributed(load_one_by_one, 2, fresh=True, timeout=240)
