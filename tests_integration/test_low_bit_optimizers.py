"""torchao's optimizers whose state has 8 or 4 bits, on sharded parameters and on flat views: they train as unsharded,
and their state is quantised where each rank has whole blocks."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn as nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from fsdp_compose import declare_blockwise, declare_elementwise, distribute_ragged, flat_parameters, fully_shard
from fsdp_compose.checkpoint import get_state_dict, resume, save
from fsdp_compose.errors import MisuseError
from tests.harness import distributed, run_distributed
from tests.training import local_part, mean_over_ranks

OPTIMIZERS: dict[str, Any] = {item.__name__: item for item in (AdamW8bit, AdamW4bit, AdamWFp8)}
BLOCK = 256  # what they quantise together: 256, 128 (AdamW4bit), 256
WAYS = {
    "sharded": lambda model: [*model.parameters()],
    "flat views": flat_parameters,
    "local flat views": lambda model: flat_parameters(model, local=True),
}


def train(name: str, way: str, bias: bool, granularity: Any, steps: int) -> tuple[Any, list[Any]]:
    """Losses of both agree at each step; the optimizer, and what it trains."""
    declare_elementwise(OPTIMIZERS[name])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 320, bias=bias), nn.Tanh(), nn.Linear(320, 64, bias=bias))
    reference = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, granularity=granularity)
    fully_shard(model)
    params = WAYS[way](model)
    optimizers = [OPTIMIZERS[name](params, lr=3e-3), OPTIMIZERS[name](reference.parameters(), lr=3e-3)]
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 64, generator=generator), torch.randn(24, 64, generator=generator)
    losses = []
    for _ in range(steps):
        loss = (model(local_part(x)) - local_part(y)).square().mean()
        expected = (reference(x) - y).square().mean()
        for item in (loss, expected):
            item.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(mean_over_ranks(loss)))
        assert losses[-1] == pytest.approx(expected.item(), rel=0.01)
    assert losses[-1] < 0.9 * losses[0]
    return optimizers[0], params


def state_classes(optimizer: Any, param: Any) -> set[str]:
    states = [optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
    return {type(getattr(item, "_local_tensor", item)).__name__ for item in states}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=2)
def test_they_train_as_unsharded_with_quantised_state(name, way):
    with torch.compiler.set_stance("force_eager"):
        optimizer, params = train(name, way, bias=False, granularity=None, steps=12)
    assert all("OptimState" in cls for param in params for cls in state_classes(optimizer, param))


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=3)
def test_granularity_keeps_blocks_whole(name):
    with torch.compiler.set_stance("force_eager"):
        optimizer, params = train(name, "sharded", bias=True, granularity=lambda fqn, param: BLOCK, steps=12)
    for param in params:
        local = param.to_local().numel()
        assert param.ndim == 1 or local % BLOCK == 0
        if param.ndim == 2 and local >= 4096:
            assert all("OptimState" in cls for cls in state_classes(optimizer, param))


@distributed(world_size=2)
def test_a_shard_that_is_no_whole_blocks_keeps_exact_state():
    with torch.compiler.set_stance("force_eager"):
        optimizer, params = train("AdamW8bit", "flat views", bias=True, granularity=None, steps=12)
    assert {cls for param in params for cls in state_classes(optimizer, param)} == {"Tensor"}


@distributed(world_size=2, timeout=300)
def test_compiled_as_they_come():
    train("AdamW8bit", "sharded", bias=False, granularity=None, steps=8)


def gradients(shapes: Any, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def models() -> tuple[Any, Any]:
    """A model that is sharded in whole blocks, of which every rank has enough to be quantised, and a plain one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 384, bias=False), nn.Linear(384, 64, bias=False))
    return fully_shard(copy.deepcopy(model), granularity=lambda fqn, param: BLOCK), model


def step_both(model: Any, reference: Any, optimizers: Any, steps: range) -> None:
    """With the same gradients."""
    x = torch.randn(4, 64)
    for step in steps:
        values = gradients([param.shape for param in reference.parameters()], step)
        model(x).sum().backward()
        for param, plain, value in zip(model.parameters(), reference.parameters(), values, strict=True):
            param.grad.copy_(distribute_ragged(value, param.device_mesh, param.placements, src_data_rank=None))
            plain.grad = value
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_bits(model: Any, reference: Any) -> None:
    for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), plain)


@pytest.mark.parametrize("way", ["sharded", "flat views"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=2)
def test_whole_blocks_have_the_bits_of_one_process(name, way):
    declare_blockwise(OPTIMIZERS[name], BLOCK)
    model, reference = models()
    optimizers = [OPTIMIZERS[name](item, lr=3e-3) for item in (WAYS[way](model), reference.parameters())]
    with torch.compiler.set_stance("force_eager"):
        step_both(model, reference, optimizers, range(4))
    assert_bits(model, reference)


def _bitsandbytes(folder: str, is_first: bool) -> None:
    declare_blockwise(bnb.optim.Adam8bit, BLOCK)
    model, reference = models()
    params = flat_parameters(model, local=True)
    optimizers = [bnb.optim.Adam8bit(item, lr=3e-3) for item in (params, reference.parameters())]
    if is_first:
        step_both(model, reference, optimizers, range(3))
        assert_bits(model, reference)
        assert all(optimizers[0].state[param]["state1"].dtype == torch.uint8 for param in params)
        of_model, of_optimizer = get_state_dict(model, optimizers[0])
        save({"model": of_model, "optimizer": of_optimizer}, folder)
        return
    resume(folder, model, optimizers[0])
    step_both(fully_shard(copy.deepcopy(reference)), reference, [optimizers[1]], range(3))
    step_both(model, reference, optimizers, range(3, 5))
    assert_bits(model, reference)


def test_bitsandbytes_on_flat_views_and_in_checkpoints(tmp_path):
    for world_size, is_first in ((2, True), (3, False)):
        run_distributed(_bitsandbytes, world_size, {"folder": str(tmp_path / "checkpoint"), "is_first": is_first})


def _torchao(folder: str, is_first: bool) -> None:
    declare_blockwise(AdamW8bit, BLOCK)
    model, reference = models()
    optimizers = [AdamW8bit(item, lr=3e-3) for item in (model.parameters(), reference.parameters())]
    with torch.compiler.set_stance("force_eager"):
        if is_first:
            step_both(model, reference, optimizers, range(3))
            of_model, of_optimizer = get_state_dict(model, optimizers[0])
            save({"model": of_model, "optimizer": of_optimizer}, folder)
            return
        step_both(fully_shard(copy.deepcopy(reference)), reference, [optimizers[1]], range(3))
        resume(folder, model, optimizers[0])
        for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                got = optimizers[0].state[param][key].to_local()
                if got.numel():
                    assert type(got).__name__ == "OptimState8bit"
                    whole = optimizers[1].state[plain][key].dequantize()
                    start, stop = param._spec.element_range
                    expected = whole.view(-1)[start:stop].view(got.shape)
                    # Rounded twice; the largest negative code is less than one (torchao 0.18).
                    assert (got.dequantize() - expected).abs().max() <= 0.02 * expected.abs().max()
        step_both(model, reference, optimizers, range(3, 5))
    for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), plain, rtol=1e-2, atol=1e-4)


def test_checkpoints_of_torchaos_states_are_quantised_again(tmp_path):
    for world_size, is_first in ((2, True), (2, False)):
        run_distributed(_torchao, world_size, {"folder": str(tmp_path / "checkpoint"), "is_first": is_first})


@distributed(world_size=3)
def test_divided_blocks_are_refused():
    declare_blockwise(AdamW8bit, BLOCK)
    model = fully_shard(nn.Linear(64, 320))
    optimizer = AdamW8bit(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(MisuseError, match="which divides a block of 256"):
        optimizer.step()
