"""Mixtures of experts in transformers' Trainer, laid out by its own ``distributed_config``, compared with one process.

``python -m tests_integration.mixtures`` writes the table of docs/compared.md: all layouts, FSDP2 and fsdp_compose.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed
from trl import SFTConfig, SFTTrainer
from trl.generation.vllm_generation import VLLMGeneration

from fsdp_compose import drop_in
from tests.harness import end_groups, preload, run_distributed
from tests_integration.test_accelerate import pretend_to_have_accelerators

VOCABULARY, LENGTH, BATCH, EXPERTS = 67, 12, 8, 8

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "use_cache": False,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32, "num_experts_per_tok": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 2,
    "num_key_value_heads": 8, "first_k_dense_replace": 1, "topk_group": 1, "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 16, "num_nextn_predict_layers": 0,
}  # fmt: skip
FEW = "Mixtral, 2 experts"
FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "Mixtral": (MixtralForCausalLM, MixtralConfig, _SIZES | {"num_local_experts": EXPERTS}),
    "Qwen3-MoE": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        _SIZES | {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 4, "norm_topk_prob": True},
    ),
    "DeepSeek-V3": (DeepseekV3ForCausalLM, DeepseekV3Config, _SIZES | _LATENT),
    FEW: (MixtralForCausalLM, MixtralConfig, _SIZES | {"num_local_experts": 2}),
}


class Layout(NamedTuple):
    """Sizes of transformers' ``DistributedConfig``."""

    dp_replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.fsdp * self.tp

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self._asdict().items() if size > 1) or "one process"

    def load(self, family: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        config = DistributedConfig(
            dp_replicate_size=self.dp_replicate, fsdp_size=self.fsdp, tp_size=self.tp, ep_size=self.ep
        )
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
        if self != ONE:
            options["distributed_config"] = config
        return FAMILIES[family][0].from_pretrained(folder, **options)


ONE = Layout()
ON_4 = [  # all with data parallelism, in which experts can be divided evenly
    Layout(1, 4), Layout(1, 4, ep=2), Layout(1, 4, ep=4), Layout(1, 2, 2), Layout(1, 2, 2, 2), Layout(1, 2, 2, 4),
    Layout(2, 2), Layout(2, 2, ep=2), Layout(4, 1), Layout(2, 1, 2), Layout(2, 1, 2, 2),
]  # fmt: skip
ON_8 = [
    Layout(2, 2, 2, 2), Layout(2, 2, 2, 4), Layout(1, 4, 2, 4), Layout(1, 4, 2, 8), Layout(1, 8, ep=4),
    Layout(2, 4, ep=2), Layout(2, 4, ep=4), Layout(1, 2, 4, 4), Layout(1, 2, 4, 8),
]  # fmt: skip


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(VOCABULARY, (8 * BATCH, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Recorder(TrainerCallback):
    """Losses, gradient norms, and the gradients of the first step, whole."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.gradients:
            grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
            self.gradients = {name: whole(grad) for name, grad in grads.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Job(NamedTuple):
    """Train in a layout, from the hub files in ``start``, with the optimizer state that is saved there, if there is.

    ``way``: transformers' Trainer, TRL's, or accelerate in a loop of one's own (whose tensor parallelism asks for an
    older transformers).
    """

    family: str
    layout: Layout
    start: Path
    folder: Path
    steps: int
    accumulation: int = 1
    dtype: torch.dtype = torch.float32
    way: str = "Trainer"

    def run(self) -> dict[str, Any]:
        """What was recorded, and the parameters as one process reads them from the hub files that were written."""
        model = self.layout.load(self.family, self.start, self.dtype)
        # With a large epsilon the step depends on the scale of the gradients.
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-2)
        if (self.start / "optimizer").exists():
            load_optimizer_distributed(model, optimizer, str(self.start / "optimizer"))
        recorder = Recorder()
        if self.way == "accelerate":
            self._loop(model, optimizer, recorder)
            model.save_pretrained(self.folder)
        else:
            trainer = self._trainer(model, optimizer, recorder)
            trainer.train()
            trainer.save_model(str(self.folder))
        save_optimizer_distributed(model, optimizer, str(self.folder / "optimizer"))
        dist.barrier()
        result: dict[str, Any] = {"losses": recorder.losses, "norms": recorder.norms, "gradients": recorder.gradients}
        if self.way == "TRL":
            result["sent"] = sent(model)
        if dist.get_rank() == 0:
            read = ONE.load(self.family, self.folder, self.dtype)
            result["parameters"] = {name: param.detach().clone() for name, param in read.named_parameters()}
        dist.barrier()
        return result

    def _pretend(self) -> None:
        if self.layout != ONE:
            pretend_to_have_accelerators()

    @property
    def _of_rank(self) -> int:
        return BATCH // (self.layout.dp_replicate * self.layout.fsdp)

    def _trainer(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, recorder: Recorder) -> Trainer:
        accumulation = min(self.accumulation, self._of_rank)
        options: dict[str, Any] = {
            "per_device_train_batch_size": self._of_rank // accumulation, "max_steps": self.steps,
            "gradient_accumulation_steps": accumulation, "logging_steps": 1, "save_strategy": "no", "report_to": [],
            "use_cpu": True, "max_grad_norm": 1.0, "disable_tqdm": True,
        }  # fmt: skip
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        common: dict[str, Any] = {"callbacks": [recorder], "optimizers": (optimizer, constant)}
        if self.way == "Trainer":
            arguments = TrainingArguments(str(self.folder), **options)
            self._pretend()
            return Trainer(model, arguments, train_dataset=Tokens(), **common)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), eos_token="a", pad_token="a"
        )
        # Its default is to checkpoint activations, in bfloat16, with a loss of the router that depends on the batch.
        options |= {"gradient_checkpointing": False, "bf16": False, "router_aux_loss_coef": 0.0}
        options |= {"remove_unused_columns": False}
        options["dataset_kwargs"] = {"skip_prepare_dataset": True}
        more = {"attention_mask": [1] * LENGTH}
        tokens = Dataset.from_list([{key: value.tolist() for key, value in item.items()} | more for item in Tokens()])
        arguments = SFTConfig(str(self.folder), **options)
        self._pretend()
        return SFTTrainer(
            model, arguments, train_dataset=tokens, processing_class=tokenizer, data_collator=default_data_collator,
            **common,
        )  # fmt: skip

    def _loop(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
        accumulation, options, place = min(self.accumulation, self._of_rank), {}, 0
        self._pretend()
        if self.layout != ONE:
            options["fsdp_plugin"], place = FullyShardedDataParallelPlugin(fsdp_version=2), dist.get_rank()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **options)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(self.steps):
            whole_batch = Tokens().ids[step * BATCH :][:BATCH]
            own = whole_batch[place * self._of_rank :][: self._of_rank]
            total = 0.0
            for ids in own.chunk(accumulation):
                with accelerator.accumulate(model):
                    loss = model(ids, labels=ids).loss
                    accelerator.backward(loss)
                    total += float(accelerator.gather(loss.detach()).mean()) / accumulation
                    if accelerator.sync_gradients:
                        recorder.on_pre_optimizer_step(None, None, None, accelerator.unwrap_model(model))
                        recorder.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                    optimizer.step()
                    optimizer.zero_grad()
            recorder.losses.append(total)


def sent(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What TRL sends to a rollout engine, parameter by parameter."""
    exporter = SimpleNamespace(
        model=model, accelerator=SimpleNamespace(device=torch.device("cpu")),
        _fix_param_name_to_vllm=lambda name, extra_prefixes=None: name,
    )  # fmt: skip
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        return {name: whole(param) for name, param in model.named_parameters()}
    return {name: whole(param) for name, param in VLLMGeneration._iter_fsdp2_params(exporter, model)}


CASTING = ("transformers.models.", "transformers.loss.", "trl.kernels.")  # use float32 for norms and losses


class _Double(ModuleType):
    """``torch``, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_double() -> None:
    """In those files too that compute in float32 whatever they are given."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(CASTING) and getattr(module, "torch", None) is torch:
            module.torch = _Double("torch")
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def run_jobs(jobs: list[Job], results: Path, system: str) -> None:
    """Run them on these ranks, one after the other, until one fails."""
    warnings.simplefilter("ignore")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())  # as torchrun says it
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CCL_WORKER_COUNT": "0"}  # there is a process group
    if any(job.dtype == torch.float64 for job in jobs):
        compute_in_double()
    found = []
    for job in jobs:
        AcceleratorState._reset_state(reset_partial_state=True)  # of the job before
        if system == "fsdp_compose":  # accelerate finds parameters of a sharded model by their addresses
            drop_in.install(layout="fsdp2" if job.way == "accelerate" else "flat")
        found.append(job.run())
        gc.collect()
        end_groups()
        if rank == "0":
            torch.save(found, results)


def train(jobs: list[Job], folder: Path, system: str = "fsdp_compose", timeout: float = 300) -> list[dict[str, Any]]:
    """What each job has recorded, on ranks of their own; all have one number of ranks."""
    preload(run_jobs.__module__)
    results = folder / "results.pt"
    arguments = {"jobs": jobs, "results": results, "system": system}
    run_distributed(run_jobs, jobs[0].layout.num_ranks, arguments, timeout=timeout, fresh=True)
    found: list[dict[str, Any]] = torch.load(results)
    return found


def write_models(folder: Path, families: Sequence[str]) -> None:
    """Write models as files of the hub, with routers that tell tokens apart."""
    for family in families:
        cls, config, options = FAMILIES[family]
        torch.manual_seed(0)
        model = cls(config(**options)).double()
        for name, param in model.named_parameters():
            if name.endswith("gate.weight"):
                torch.nn.init.normal_(param)
        model.save_pretrained(folder / family)


def difference(found: dict[str, Any], truth: dict[str, Any]) -> dict[str, float]:
    """The largest differences, as parts of the largest value."""
    result = {}
    for key in ("losses", "norms"):
        assert len(found[key]) == len(truth[key])
        result[key] = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found[key], truth[key], strict=True))
    for key in ("gradients", "parameters", *(["sent"] if "sent" in truth else [])):
        assert found[key].keys() == truth[key].keys()
        pairs = [(found[key][name], value) for name, value in truth[key].items()]
        result[key] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return result


# ---- The table


def main() -> None:
    options = argparse.ArgumentParser(description="All layouts, under FSDP2 and fsdp_compose, as a table.")
    options.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--models", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    options.add_argument("--dtype", default="float32", help="float64: modelling files compute in it throughout")
    options.add_argument("--way", choices=["Trainer", "accelerate", "TRL"], default="Trainer")
    options.add_argument(
        "--tolerance", type=float, default=1e-6, help="of losses and norms; of tensors, 100 times that"
    )
    options.add_argument("--timeout", type=float, default=900)
    given = options.parse_args()
    dtype = getattr(torch, given.dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, given.models)

        print("| layout | model | " + " | ".join(SYSTEMS) + " |", flush=True)
        for family in given.models:
            one = folder / "one" / family

            def jobs(layout: Layout, own: Path, before: Path, family: str = family) -> list[Job]:
                """Begin, and resume what the layout before has saved, with accumulation."""
                return [
                    Job(family, layout, folder / family, own, given.steps, dtype=dtype, way=given.way),
                    Job(family, layout, before, own / "resumed", 4, accumulation=2, dtype=dtype, way=given.way),
                ]

            truth = train(jobs(ONE, one, one), folder)
            for num_ranks in given.ranks:
                layouts = [item for item in ON_4 + ON_8 if item.num_ranks == num_ranks][: 1 if family == FEW else None]
                columns = []
                for system in SYSTEMS:
                    own = [folder / system / family / str(layout) for layout in layouts]
                    asked = [pair for args in zip(layouts, own, [one, *own], strict=False) for pair in jobs(*args)]
                    columns.append(words_of(asked, folder, system, truth, given))
                for i, layout in enumerate(layouts):
                    cells = [", ".join(words[2 * i : 2 * i + 2]) for words in columns]
                    print("| " + " | ".join([str(layout), family, *cells]) + " |", flush=True)


SYSTEMS = ("FSDP2", "fsdp_compose")


def bound_of(what: str, tolerance: float) -> float:
    """The Trainer sums losses in float32. Of tensors, no norm evens out what is rounded."""
    if what == "losses":
        return max(tolerance, 1e-6)
    return tolerance if what == "norms" else max(1e-12, 100 * tolerance)


def words_of(jobs: list[Job], folder: Path, system: str, truth: list[dict[str, Any]], given: Any) -> list[str]:
    """What happens in each job; after a failure the next ones run on new ranks."""
    words: list[str] = []
    results = folder / "results.pt"
    while len(words) < len(jobs):
        results.unlink(missing_ok=True)
        failure, expected = "", [truth[i % 2] for i in range(len(words), len(jobs))]
        try:
            train(jobs[len(words) :], folder, system, given.timeout)
        except pytest.fail.Exception as error:
            lines = [line for line in str(error).splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)]
            failure = lines[0][:200] if lines else "hangs"
        for found, other in zip(torch.load(results) if results.exists() else [], expected, strict=False):
            sizes = difference(found, other)
            is_right = all(size <= bound_of(what, given.tolerance) for what, size in sizes.items())
            words.append(f"{'right' if is_right else 'wrong'} ({', '.join(f'{size:.0e}' for size in sizes.values())})")
        words += [failure] if failure else []
    return words


if __name__ == "__main__":
    from tests_integration import mixtures  # as other processes know it

    mixtures.main()
