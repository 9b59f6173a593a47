"""The examples with models of others: what they save is loaded by the libraries that the models are of."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests import harness
from tests.harness import ROOT, fake_process_group

SMALL = ["--steps=6", "--log-every=1", "--layers=2", "--dim=32", "--batch=4", "--seq-len=16", "--lr=1e-2"]


def run(example: str, out: Path, processes: int, *arguments: str) -> list[float]:
    """The losses of a run of an example by torchrun."""
    out.parent.mkdir(exist_ok=True)
    command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}"]
    command += ["--run-path", "--start-method=fork", str(ROOT / "examples" / example), f"--out={out}"]
    code, said = harness.run_torchrun(
        out.parent, *command, *SMALL, *arguments, timeout=250, PYTHONPATH=f"{ROOT}:{ROOT / 'examples'}"
    )
    assert code == 0, said[-3000:]
    assert "equal to those that were trained" in said
    return [float(number) for number in re.findall(r"loss ([\d.]+)", said)]


@pytest.fixture
def examples(monkeypatch) -> Iterator[Any]:
    """Imports an example, which may import another one."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module
    for name in {"hf_llama", "lora"} & {*sys.modules} - before:
        del sys.modules[name]


def arguments_of(example: Any, *more: str) -> argparse.Namespace:
    parser = example.make_parser(None, "nowhere")
    parser.set_defaults(base=None, rank=8)
    return parser.parse_args([*SMALL, *more])


def trained_alone(example: Any, model: torch.nn.Module, args: argparse.Namespace) -> list[float]:
    """The losses of training without sharding, in this process."""
    with fake_process_group(world_size=1):
        return example.train(model, args, torch.device("cpu"))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processes", "tie"), [(1, "--no-tie"), (2, "--no-tie"), (2, "--tie")])
def test_transformers_loads_the_llama_that_was_trained_as_without_sharding(tmp_path, examples, processes, tie):
    losses = run("hf_llama.py", tmp_path / "out" / "llama", processes, tie)
    example = examples("hf_llama")
    args = arguments_of(example, tie)
    model = example.build_model(args)
    assert losses == pytest.approx(trained_alone(example, model, args), abs=1e-3) and losses[-1] < losses[0]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "llama")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (tie == "--tie")
    assert_close(loaded.state_dict(), model.state_dict())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("has_base", [False, True])
def test_peft_loads_the_adapters_that_were_trained_as_without_sharding(tmp_path, examples, has_base):
    out, base = tmp_path / "out" / "lora", tmp_path / "out" / "llama"
    if has_base:
        run("hf_llama.py", base, 1)
    losses = run("lora.py", out, 2, *([f"--base={base}"] if has_base else []))
    example = examples("lora")
    args = arguments_of(example)
    args.base = base if has_base else None
    model = example.add_adapters(example.build_base(args), args)
    assert losses == pytest.approx(trained_alone(example, model, args), abs=1e-3)
    stored = load_file(out / "adapter_model.safetensors")
    assert len(stored) == 16 and all("lora_" in name for name in stored), "nothing of the base"
    assert all(tensor.any() for tensor in stored.values()), "trained: one of each two begins as zeros"
    loaded = PeftModel.from_pretrained(example.build_base(args), out)
    assert_close(get_peft_model_state_dict(loaded), get_peft_model_state_dict(model))


@pytest.mark.timeout(600)
def test_the_trainer_of_transformers_shards_by_us_and_resumes(tmp_path, examples):
    """On two processes and on four; the second half of the steps by a run that resumes from a checkpoint."""
    losses = [run("accelerate_trainer.py", tmp_path / f"{n}" / "out", n, "--batch=8") for n in (2, 4)]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], abs=2e-3) and losses[0][-1] < losses[0][0]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "2" / "out" / "final")
    assert sum(param.numel() for param in loaded.parameters()) > 0


@pytest.mark.parametrize("name", ["hf_llama", "lora"])
def test_what_cannot_be_begun_is_refused_with_the_remedy(tmp_path, examples, monkeypatch, name):
    example = examples(name)
    args = arguments_of(example, f"--out={tmp_path}")
    with pytest.raises(SystemExit, match="start this under torchrun"):
        example.start_process_group(args)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="expected a multiple of the number of processes"):
        example.start_process_group(args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="exists already"):
        example.start_process_group(args)
