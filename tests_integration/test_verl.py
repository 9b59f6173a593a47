"""verl's functions around FSDP2: sharding, loading, moving, export of weights for rollouts; and its engines, which come
by the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast
from verl.trainer.config import CheckpointConfig
from verl.utils import fsdp_utils as verl
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from fsdp_compose import drop_in
from fsdp_compose.integrations.verl import LanguageModelEngine  # what the plugin does
from tests.harness import ROOT
from tests_integration import llama
from tests_integration.side_by_side import assert_same, results_of


def on_cpu() -> None:
    """verl asks for the current GPU."""
    verl.get_device_id = lambda: "cpu"
    verl.get_torch_device = lambda: SimpleNamespace(empty_cache=lambda: None)


def train(folder: Path, by_dimension: bool) -> dict[str, Any]:
    on_cpu()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = llama.model(seed=dist.get_rank())  # the first rank's values are loaded
    full = model.state_dict() if dist.get_rank() == 0 else {}
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True),
        "offload_policy": None,
        "reshard_after_forward": True,
    }
    if by_dimension:
        options["shard_placement_fn"] = verl.get_shard_placement_fn(2)
    verl.apply_fsdp2(model, options, OmegaConf.create({"forward_prefetch": True}))
    verl.fsdp2_load_full_state_dict(model, full, mesh, None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses, norms = [], []
    for step, ids in enumerate(llama.batches(4)):
        if step == 2:
            verl.offload_fsdp_model_to_cpu(model)
            verl.load_fsdp_model_to_gpu(model)
            verl.set_reshard_after_forward(model, False)
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(llama.mean(loss))
        norms.append(float(verl.fsdp2_clip_grad_norm_(model.parameters(), max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = verl.get_fsdp_full_state_dict(model)
    sums = [float(value.float().abs().sum()) for _, value in sorted(state.items())]
    return {"losses": losses, "norms": norms, "sums": sums, "version": verl.fsdp_version(model)}


def keep_and_restore(folder: Path) -> dict[str, Any]:
    """As verl's workers of separated rollouts do: what a rank holds is kept, training goes on, and it comes back."""
    on_cpu()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = llama.model()
    verl.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, OmegaConf.create({}))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    kept, spec = verl.fsdp2_sharded_save_to_cpu(model)
    kept = {name: (part.clone(), of) for name, (part, of) in kept.items()}  # on a CPU it is the memory itself
    for _ in range(2):
        for ids in llama.batches(2):
            loss = model(ids, labels=ids).loss
            loss.backward()
            losses.append(llama.mean(loss))
            optimizer.step()
            optimizer.zero_grad()
        verl.fsdp2_sharded_load_from_cpu(model, kept, spec)
    assert losses[:2] == losses[2:]
    return {"losses": losses}


def restore_another(folder: Path) -> dict[str, Any]:
    """What was kept of a model that was sharded otherwise."""
    on_cpu()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    models = [llama.model() for _ in range(2)]
    for model, options in zip(models, ({}, {"shard_placement_fn": verl.get_shard_placement_fn(2)}), strict=True):
        verl.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True, **options}, OmegaConf.create({}))
    kept = verl.fsdp2_sharded_save_to_cpu(models[1])
    before = [param.to_local().clone() for param in models[0].parameters()]
    try:
        verl.fsdp2_sharded_load_from_cpu(models[0], *kept)
        error = ""
    except (RuntimeError, AssertionError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    is_unchanged = all(map(torch.equal, before, (param.to_local() for param in models[0].parameters())))
    return {"error": error, "is_unchanged": is_unchanged}


def plain(folder: Path) -> dict[str, Any]:
    return train(folder, by_dimension=False)


def by_dimension(folder: Path) -> dict[str, Any]:
    return train(folder, by_dimension=True)


@pytest.mark.parametrize("program", [plain, by_dimension])
def test_training(program, tmp_path):
    results = results_of(program, tmp_path)
    assert results["drop_in"]["version"] == 2
    assert_same(results)


def test_what_ranks_have_kept_comes_back(tmp_path):
    assert_same(results_of(keep_and_restore, tmp_path))


def test_what_was_kept_of_other_shards_is_refused_before_anything_is_written(tmp_path):
    found = results_of(restore_another, tmp_path)["drop_in"]
    assert "the kept one is" in found["error"] and "restore it into" in found["error"], found
    assert found["is_unchanged"], found


# ---- verl's own engine, which the plugin replaces


def all_on_cpu() -> None:
    """All of verl asks for the current GPU, and for what newer versions of trl no longer have."""
    nothing = dict.fromkeys(("empty_cache", "set_device", "synchronize"), lambda *_: None)
    sizes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    device = SimpleNamespace(**nothing, **dict.fromkeys(sizes, lambda *_: 0), mem_get_info=lambda *_: (0, 0))
    cpu = {"get_device_id": lambda: "cpu", "get_torch_device": lambda: device, "device_name": "cpu"}
    cpu |= {"get_device_name": lambda: "cpu", "is_trl_available": lambda: False}
    for path, module in [*sys.modules.items()]:
        if isinstance(module, ModuleType) and path.partition(".")[0] == "verl":
            vars(module).update({name: value for name, value in cpu.items() if name in vars(module)})


def engine(folder: Path, fully_shard: Any) -> dict[str, Any]:
    all_on_cpu()
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # verl registers its own for GPUs only
    if fully_shard is drop_in.fully_shard:
        os.environ |= {"VERL_ENGINE_VENDOR": "fsdp_compose", "VERL_ENGINE_DEVICE": "cpu"}
    path = str(folder / "model")
    if dist.get_rank() == 0:
        llama.model(tie_word_embeddings=False).save_pretrained(path)
        words = {"<pad>": 0, **{str(i): i for i in range(1, llama.VOCABULARY)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>").save_pretrained(path)
    dist.barrier()
    built = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=path,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            forward_prefetch=True,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=8, clip_grad=0.5),
        checkpoint_config=CheckpointConfig(),
    )
    assert isinstance(built, LanguageModelEngine) == (fully_shard is drop_in.fully_shard)
    built.initialize()
    assert isinstance(built.module, drop_in.FSDPModule) == (fully_shard is drop_in.fully_shard)
    losses, norms, sums = [], [], []

    def train(ids: torch.Tensor) -> None:
        with built.train_mode():
            built.optimizer_zero_grad()
            for part in ids.chunk(2):
                loss = built.module(input_ids=part, labels=part).loss / 2
                loss.backward()
                losses.append(llama.mean(loss))
            grads = [param.grad.full_tensor() for param in built.module.parameters()]
            sums.append([float(grad.abs().sum()) for grad in grads])
            norms.append(float(built.optimizer_step()))

    batches = [*llama.batches(6)]
    for ids in batches[:4]:
        train(ids)
    built.save_checkpoint(str(folder / "checkpoint"), global_step=4)
    for ids in batches[4:]:
        train(ids)
    built.load_checkpoint(str(folder / "checkpoint"))
    for ids in batches[4:]:
        train(ids)
    assert losses[8:12] == losses[12:] and norms[4:6] == norms[6:]
    version = verl.fsdp_version(built.module)
    return {"losses": losses, "norms": norms, "grads": [item for step in sums for item in step], "version": version}


def test_an_engine_trains_saves_and_loads(tmp_path):
    assert_same(results_of(engine, tmp_path))


ASK = """
import os, verl
os.environ.update(VERL_ENGINE_DEVICE="cuda", VERL_ENGINE_VENDOR="fsdp_compose")
from verl.workers.engine import EngineRegistry
for kind in ("language_model", "value_model"):
    print(EngineRegistry.get_engine_cls(kind, "fsdp2").__module__)
"""


def test_verl_finds_the_engines_of_an_installed_package(tmp_path):
    """What pip writes about entry points, of this checkout."""
    (section,) = [
        part
        for part in (ROOT / "pyproject.toml").read_text().split("\n[")
        if part.startswith('project.entry-points."verl')
    ]
    installed = tmp_path / "fsdp_compose_checkout-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp-compose-checkout\nVersion: 0\n")
    name, _, target = section.splitlines()[1].partition(" = ")
    (installed / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {target.strip(chr(34))}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    run = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-2:] == ["fsdp_compose.integrations.verl"] * 2
