"""QLoRA with torchao's NF4 weights: the frozen base in four bits, gathered as such; losses, step by step, are those of
FSDP2 and of the model that is not sharded. Inference classes of torchao, which FSDP2 cannot cut, below adapters too."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torchao.quantization as quantization
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, linear_nf4, to_nf4

from fsdp_compose import MixedPrecisionPolicy, clip_grad_norm_, flat_parameters, fully_shard, record_collectives
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed, fake_process_group
from tests.training import local_part, mean_over_ranks
from tests_integration import llama
from tests_integration.side_by_side import assert_same, results_of

DIM, BLOCK, SCALER_BLOCK = 256, 64, 256


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(dim, dim) / dim**0.5), requires_grad=False)
        self.a, self.b = nn.Linear(dim, 4, bias=False), nn.Linear(4, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(x, self.weight) + self.b(self.a(x))


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(DIM) for _ in range(2)), nn.Linear(DIM, 4)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)).tanh()
        return self.head(x)


def made(how: Any = None, checkpoints: bool = False, seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    model = Model(checkpoints)
    if how is not None:
        for layer in model.layers:
            how(layer, **options)
        how(model, **options)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def losses(model: nn.Module, params: Any = None, is_sharded: bool = True, clips: Any = None) -> list[float]:
    params = trainable(model) if params is None else params
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(4):
        batch = torch.randn(8, DIM, generator=generator)
        loss = model(local_part(batch) if is_sharded else batch).float().square().mean()
        loss.backward()
        if clips is not None:
            clips(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item() if not is_sharded else float(mean_over_ranks(loss)))
    return found


def assert_same_weight(got: Any, expected: Any) -> None:
    assert type(got) is NF4Tensor and got.shape == expected.shape
    for name in expected.__tensor_flatten__()[0]:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


POLICIES = {"fp32": (), "bf16": (torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("checkpoints", [False, True])
@distributed(world_size=2)
def test_losses_are_those_of_fsdp2(checkpoints, reshards, policy):
    dtypes, options = POLICIES[policy], {"checkpoints": checkpoints, "reshard_after_forward": reshards}
    ours = made(fully_shard, mp_policy=MixedPrecisionPolicy(*dtypes), **options)
    theirs = made(fsdp.fully_shard, mp_policy=fsdp.MixedPrecisionPolicy(*dtypes), **options)
    got, expected = losses(ours), losses(theirs)
    assert got == expected and got[-1] < got[0], (got, expected)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if isinstance(other.to_local(), NF4Tensor):
            assert mine.shape == other.shape and mine.dtype == other.dtype
            assert_same_weight(mine._local_tensor, other._local_tensor)
        else:
            assert torch.equal(mine.full_tensor(), other.full_tensor())


@pytest.mark.parametrize("way", ["plain", "flat views", "clipped", "checkpointed", "bf16"])
@distributed(world_size=(1, 2, 4))
def test_losses_are_those_of_the_model_that_is_not_sharded(way):
    if way == "bf16":
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    else:
        options = {"checkpoints": way == "checkpointed"}
    model, reference = made(fully_shard, **options), made()
    clips = way == "clipped"
    params = flat_parameters(model) if way == "flat views" else None
    got = losses(model, params, clips=clip_grad_norm_ if clips else None)
    expected = losses(reference, is_sharded=False, clips=nn.utils.clip_grad_norm_ if clips else None)
    torch.testing.assert_close(got, expected, atol=0.01 if way == "bf16" else 1e-6, rtol=0.1 if way == "bf16" else 1e-5)
    assert_same_weight(model.layers[0].weight.full_tensor(), reference.layers[0].weight)
    assert model.layers[0].weight.grad is None


@distributed(world_size=(2, 4))
def test_a_weight_takes_and_travels_in_half_a_byte_an_element_and_scales():
    model = made(fully_shard)
    model(torch.randn(2, DIM))
    with record_collectives(model) as lines:
        model(torch.randn(2, DIM))
    nbytes = 0
    for line in lines:
        if line.startswith("all-gather layers.0.weight"):
            numel, dtype = re.search(r"\((\d+) x (\w+)", line).groups()
            nbytes += int(numel) * getattr(torch, dtype).itemsize
    num_blocks = DIM * DIM // BLOCK
    assert nbytes == DIM * DIM // 2 + num_blocks + num_blocks // SCALER_BLOCK * 4
    (frozen,) = [handle for handle in get_state(model.layers[0])._handles if handle.shard.dtype == torch.uint8]
    tables = 16 + 64  # the mean and the 16 levels, on every rank; each part on a boundary of 16 bytes
    assert nbytes / dist.get_world_size() <= frozen.shard.numel() <= nbytes / dist.get_world_size() + tables + 48


@distributed(world_size=2)
def test_checkpoints_and_copies():
    import tempfile

    model, x = made(fully_shard), torch.randn(2, DIM)
    losses(model)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    other = made(fully_shard, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    dcp.save(model.state_dict(), checkpoint_id=Path(str(box[0])) / "ours")
    other = made(fully_shard, seed=1)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=Path(str(box[0])) / "ours")
    other.load_state_dict(state)
    assert torch.equal(other(x), expected)


def test_what_cannot_be_cut_is_refused_with_its_sizes():
    torch.manual_seed(0)
    model = Model()  # 4 blocks of scales
    with fake_process_group(rank=0, world_size=8):
        with pytest.raises(ValueError, match=r"weight is a NF4Tensor of shape \(256, 256\).*quantized_d.*into 8 parts"):
            fully_shard(model)
        fully_shard(model, ignored_params=[layer.weight for layer in model.layers])
    with fake_process_group(rank=0, world_size=3):
        with pytest.raises(ValueError, match=r"its 256 rows are not a multiple of the 3 ranks"):
            fully_shard(Model())


# ---- programs, with FSDP2 and with drop_in


def llama_with_adapters(folder: Path) -> dict[str, Any]:
    base = llama.model(hidden_size=128, intermediate_size=256)
    for param in base.parameters():
        param.requires_grad_(False)
    for layer in base.model.layers:
        for linear in layer.modules():
            if isinstance(linear, nn.Linear):
                linear.weight = nn.Parameter(to_nf4(linear.weight.detach(), BLOCK, 16), requires_grad=False)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(base, config)
    for layer in model.base_model.model.model.layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(trainable(model), 1e-2, eps=1e-3)
    found = []
    for ids in llama.batches(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append(llama.mean(loss))
        optimizer.step()
        optimizer.zero_grad()
    adapters = get_peft_model_state_dict(model)
    sums = [float(value.full_tensor().abs().sum()) for _, value in sorted(adapters.items())]
    kinds = sorted({type(param._local_tensor).__name__ for param in model.parameters()})
    return {"losses": found, "adapters": sorted(adapters), "sums": sums, "kinds": kinds}


def test_peft_on_a_llama_with_nf4_weights(tmp_path):
    results = results_of(llama_with_adapters, tmp_path)
    assert_same(results, 2e-5)
    assert results["drop_in"]["kinds"] == ["NF4Tensor", "Tensor"]


# ---- other classes of torchao, which FSDP2 refuses


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
@distributed(world_size=(2, 4))
def test_inference_classes_below_adapters(config):
    class WithAdapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = nn.Linear(64, 64, False), nn.Linear(64, 4, False), nn.Linear(4, 64, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    torch.manual_seed(0)
    model = nn.Sequential(WithAdapter(), nn.Tanh(), WithAdapter()).to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)(), lambda _, fqn: fqn.endswith("base"))
    for name, param in model.named_parameters():
        param.requires_grad_(".base." not in name)
    reference = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizers = [torch.optim.AdamW(trainable(item), 1e-2) for item in (model, reference)]
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        found = [item(x).square().mean() for item in (model, reference)]
        assert found[0].item() == found[1].item()
        for loss, optimizer in zip(found, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
