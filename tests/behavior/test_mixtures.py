"""Mixtures of experts sharded by one call for a block: what they do, compared with one process in float64.

Gradients are compared, not losses alone: Adam's steps hide a gradient of the wrong scale.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    drop_in,
    flat_parameters,
    fully_shard,
    no_sync,
    set_functional_mode,
    set_requires_all_reduce,
    summon_full_params,
)
from fsdp_compose.checkpoint import get_state_dict, load, save, set_state_dict
from fsdp_compose.optim import Muon, whole_matrices
from fsdp_compose.sync import full_parameters
from tests.harness import distributed, lasting_mesh
from tests.mixtures import EP_LAYOUTS, Layout, Mixture, batch, loss_of, mixture, shard, spread, spread_over

EXACT = 1e-12


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, expected: nn.Module, tolerance: float = EXACT) -> None:
    """Parameters and gradients."""
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.detach()), theirs.detach(), rtol=0, atol=tolerance, msg=name)
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            message = f"gradient of {name}: {(whole(ours.grad) / theirs.grad).flatten()[:8]} times too large"
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=0, atol=tolerance, msg=message)


def run(model: Mixture, expected: Mixture, layout: Layout, step: int = 0, scale: float = 1.0, **options: Any) -> None:
    """Backward of both."""
    parts = batch(step, layout, model.head.weight.dtype, **options)
    (loss_of(model, parts[layout.place]) * scale).backward()
    for part in parts:
        (loss_of(expected, part) * scale / layout.num_parts).backward()


@distributed(world_size=4)
@pytest.mark.parametrize("layout", EP_LAYOUTS, ids=str)
def test_one_call_for_a_block_of_both_kinds_trains_as_one_process(layout):
    model, expected = shard(mixture(), layout), mixture()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.3, momentum=0.9) for item in (model, expected)]
    for step in range(2):
        run(model, expected, layout, step)
        assert_same(model, expected)
        norms = [clip_grad_norm_(item.parameters(), 0.2) for item in (model, expected)]
        torch.testing.assert_close(*map(whole, norms), rtol=0, atol=EXACT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, expected)


@distributed(world_size=4)
@pytest.mark.parametrize("layout", [Layout(fsdp=2, ep=2), Layout(replicate=2, ep=2)], ids=str)
def test_the_same_by_the_keywords_of_fsdp2(layout):
    """Each parameter is told the mesh of the ranks that hold the same part."""
    mesh = layout.mesh["replicate", "fsdp"] if layout.replicate > 1 else layout.mesh["fsdp"]
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim == 2:
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def placement(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), info) if isinstance(param, DTensor) else None

    model, expected = shard(mixture(), layout, drop_in.fully_shard, shard_placement_fn=placement), mixture()
    run(model, expected, layout)
    assert_same(model, expected)
    assert model.blocks[0].up.device_mesh.mesh_dim_names == (*mesh.mesh_dim_names, "ep")


@distributed(world_size=4)
def test_dtensors_on_data_ranks_that_are_no_experts_are_refused():
    mesh, data = lasting_mesh(("edp", "ep")), lasting_mesh(("dp",), (4,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["ep"], [Shard(0)]))
    for given, why in ((mesh, "has the dimension 'ep' too"), (None, "because mesh= was left out")):
        with pytest.raises(ValueError, match=why):
            fully_shard(model, mesh=given)
    model.weight = nn.Parameter(distribute_tensor(model.weight.full_tensor().detach(), mesh["ep"], [Replicate()]))
    with pytest.raises(ValueError, match="weight .* is replicated over .* leave it a plain parameter"):
        fully_shard(model, mesh=data)
    model.bias.requires_grad_(False)
    fully_shard(model, mesh=mesh["edp"], ignored_params=[model.bias])
    model = fully_shard(nn.Sequential(model, nn.Linear(4, 4)), mesh=data)
    with pytest.raises(ValueError, match=r"0\.weight, placed \[Replicate.*expert parallelism"):
        model(torch.ones(2, 4))


@distributed(world_size=4)
@pytest.mark.parametrize("is_same", [True, False])
def test_equal_batches_for_ranks_with_different_experts_are_a_warning(is_same):
    """As if tensor parallelism had split the parameters, whose gradients would be too small by its size."""
    layout = Layout(fsdp=2, ep=2)
    model = shard(mixture(), layout)
    x = batch(0, layout)[layout.place // 2 if is_same else layout.place][0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x)
    found = [str(item.message) for item in caught if "ranks 0 and 1 were given the same inputs" in str(item.message)]
    assert len(found) == is_same


@distributed(world_size=4)
@pytest.mark.parametrize("mesh", ["unflattened", "all ranks", "replicas"])
def test_meshes_without_a_dimension_for_the_ranks_with_the_same_part(mesh):
    """The mesh that ``ep`` is a part of does not have it, or has it in another order."""
    layout, data = Layout(fsdp=2, ep=2), lasting_mesh(("dp",), (4,))
    if mesh == "unflattened":
        ep = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))._unflatten(0, (2, 2), ("edp", "ep"))["ep"]
    elif mesh == "all ranks":
        ep = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    else:
        ep, data = lasting_mesh(("ep", "edp"))["ep"], lasting_mesh(("replicate", "shard"))
    model, expected = mixture(), mixture()
    for block in model.blocks:
        spread_over(block, ep)
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    for step, requires_all_reduce in enumerate((True, False, False, True)):
        set_requires_all_reduce(model, requires_all_reduce)
        run(model, expected, layout, step)
    assert_same(model, expected)


# ---- What mixtures do


TWICE = Layout(fsdp=2, ep=2)
LAYOUTS = [TWICE, Layout(ep=4), Layout(replicate=2, ep=2), Layout(fsdp=2, tp=2)]


def prefer(experts: list[int]) -> Callable[[Mixture], None]:
    """All tokens of the first block go to some of these experts."""

    def change(model: Mixture) -> None:
        model.blocks[0].bias[experts] = 5.0

    return change


def freeze(names: tuple[str, ...]) -> Callable[[Mixture], None]:
    def change(model: Mixture) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(name.rpartition(".")[2] not in names)

    return change


def keep(_model: Mixture) -> None: ...


# What a model is made with, what is done to it before it is sharded, and how it is sharded.
CASES: dict[str, tuple[dict[str, Any], Callable[[Mixture], None], dict[str, Any]]] = {
    "experts of one rank get no tokens": ({}, prefer([0, 1, 2, 3]), {}),
    "most experts get no tokens": ({}, prefer([3, 6]), {}),
    "capacity": ({"capacity": 1}, prefer([1, 2]), {}),
    "frozen experts": ({}, freeze(("up", "down")), {}),
    "one frozen of them": ({}, freeze(("down",)), {}),
    "only experts are trained": ({}, freeze(("weight", "bias")), {}),
    "LoRA": ({"lora": 2}, keep, {}),
    "kept gathered": ({}, keep, {"reshard_after_forward": False}),
    "parts": ({}, keep, {"reshard_after_forward": 2}),
    "granularity": ({}, keep, {"granularity": lambda _name, _param: "whole"}),
    "limited": ({}, keep, {"limit": "2 groups"}),
    "offload": ({}, keep, {"offload_policy": CPUOffloadPolicy()}),
    "reduced in float64": ({}, keep, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
}


@distributed(world_size=4)
@pytest.mark.parametrize("case", CASES)
def test_mixtures_train_as_one_process(case):
    options, change, how = CASES[case]
    for layout in LAYOUTS:
        if layout.replicate * layout.tp > 1 and "reshard_after_forward" in how:
            how = {"reshard_after_forward": False}
        model, expected = mixture(**options), mixture(**options)
        for item in (model, expected):
            change(item)
        shard(model, layout, **how)
        optimizers = [torch.optim.Adam(item.parameters(), lr=0.01) for item in (model, expected)]
        for step in range(2):
            run(model, expected, layout, step, is_even=False)
            assert_same(model, expected)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@distributed(world_size=4)
@pytest.mark.parametrize("how", ["no_sync", "each is reduced", "no all-reduce", "functional", "scaled", "checkpointed"])
def test_other_ways_through_a_step(how):
    for layout in LAYOUTS:
        model, expected = shard(mixture(), layout), mixture()
        if how == "functional":
            set_functional_mode(model)
        if how == "checkpointed":
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        for step in range(3):
            if how == "no all-reduce":
                set_requires_all_reduce(model, step == 2)
            with no_sync(model) if how == "no_sync" and step < 2 else nullcontext():
                run(model, expected, layout, step, scale=1024.0 if how == "scaled" else 1.0)
        if how == "scaled":
            with torch.no_grad():
                for param in (*model.parameters(), *expected.parameters()):
                    param.grad.div_(1024.0)
        assert_same(model, expected)


@distributed(world_size=4)
def test_a_gradient_scaler_skips_a_step_on_all_ranks_if_one_expert_overflows():
    for layout in LAYOUTS:
        model, expected = shard(mixture(torch.float32), layout), mixture(torch.float32)
        optimizer, theirs = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, expected)]
        for is_broken in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            scaler.scale(torch.zeros(()))
            run(model, expected, layout, scale=256.0)
            local = model.blocks[0].up.grad.to_local()
            if is_broken and dist.get_rank() == 1 and local.numel():
                local.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == (128.0 if is_broken else 256.0)
            if not is_broken:
                for param in expected.parameters():
                    param.grad.div_(256.0)
                theirs.step()
            expected.zero_grad()
        assert_same(model, expected, 1e-6)


@distributed(world_size=4)
def test_bf16_and_grouped_products():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layout in LAYOUTS[:2]:
        model = shard(mixture(torch.float32, is_grouped=True), layout, mp_policy=policy)
        expected = mixture(torch.float32, is_grouped=True)
        x = batch(0, layout, torch.bfloat16)
        (F.mse_loss(model(x[layout.place][0]).float(), x[layout.place][1].float())).backward()
        half = copy.deepcopy(expected).bfloat16()
        for part in x:
            (F.mse_loss(half(part[0]).float(), part[1].float()) / len(x)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), half.parameters(), strict=True):
            gap = (whole(ours.grad) - theirs.grad).norm() / theirs.grad.norm()
            assert ours.grad.dtype == torch.float32 and gap < 0.03, (name, gap)


@distributed(world_size=4)
def test_a_router_bias_that_all_ranks_move_alike():
    for layout in LAYOUTS:
        model, expected = shard(mixture(), layout), mixture()
        for step in range(3):
            run(model, expected, layout, step)
            for ours, theirs in zip(model.blocks, expected.blocks, strict=True):
                counts = ours.counts.clone()
                dist.all_reduce(counts)
                ours.move_bias(counts / layout.tp)
                theirs.move_bias(theirs.counts)
                assert torch.equal(ours.bias, theirs.bias) and ours.bias.any()
        assert_same(model, expected)


@distributed(world_size=4)
def test_compiled_blocks():
    layout = TWICE
    model, expected = shard(mixture(), layout), mixture()
    model.blocks[1].compile(backend="eager")
    run(model, expected, layout)
    assert_same(model, expected)


@distributed(world_size=4)
def test_muon_over_stacked_experts_sends_nothing_for_them():
    for layout in (TWICE, Layout(ep=4), Layout(fsdp=2, tp=2)):
        model = shard(mixture(torch.float32), layout, granularity=whole_matrices())
        expected = mixture(torch.float32)
        names = ("up", "down")
        experts, theirs = [
            [param for name, param in item.named_parameters() if name.endswith(names)] for item in (model, expected)
        ]
        optimizers = Muon(experts, lr=0.02, ns_dtype=torch.float32), Muon(theirs, lr=0.02, ns_dtype=torch.float32)
        run(model, expected, layout)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(model, expected, 1e-5)
        if layout.tp == 1:
            assert optimizers[0].describe().bytes_moved == 0


@distributed(world_size=4)
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_checkpoint_goes_on_with_other_numbers_of_experts_on_a_rank(offloaded, tmp_path):
    folder, before, expected = tmp_path / "saved", shard(mixture(), TWICE), mixture()
    optimizers = [torch.optim.Adam(item.parameters(), lr=0.01) for item in (before, expected)]
    run(before, expected, TWICE)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(before, optimizers[0])
    save({"model": model_state, "optimizer": optimizer_state}, folder)
    for layout in (*LAYOUTS[1:], Layout(fsdp=4)):
        policy = {"offload_policy": CPUOffloadPolicy()} if offloaded else {}
        model, twin = shard(mixture(), layout, **policy), copy.deepcopy(expected)
        theirs = torch.optim.Adam(twin.parameters(), lr=0.01)
        theirs.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        load(state, folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        run(model, twin, layout, 1)
        optimizer.step()
        theirs.step()
        assert_same(model, twin)


@distributed(world_size=4)
def test_whole_experts_for_engines_and_under_summon():
    for layout in LAYOUTS:
        model, expected = shard(mixture(), layout), mixture()
        with full_parameters(model, bucket_bytes=1000) as buckets:
            found = {name: tensor for bucket in buckets for name, tensor in bucket}
        for name, param in expected.named_parameters():
            assert torch.equal(found[name], param), name
        with summon_full_params(model):
            for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(ours, theirs)
                with torch.no_grad():
                    ours.mul_(0.5)
                    theirs.mul_(0.5)
        run(model, expected, layout)
        assert_same(model, expected)


@distributed(world_size=4)
def test_flat_views_of_both_kinds():
    for layout in LAYOUTS:
        model, expected = shard(mixture(), layout), mixture()
        ours, theirs = (
            torch.optim.Adam(flat_parameters(model), lr=0.01),
            torch.optim.Adam(expected.parameters(), lr=0.01),
        )
        for step in range(2):
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
            run(model, expected, layout, step)
            ours.step()
            theirs.step()
        assert_same(model, expected)


@distributed(world_size=4)
def test_experts_that_two_blocks_share():
    """Tied modules: their group is the one around both."""
    for layout in LAYOUTS[:3]:
        model, expected = mixture(), mixture()
        for item in (model, expected):
            item.blocks[1].up, item.blocks[1].down = item.blocks[0].up, item.blocks[0].down
        spread(model.blocks[0], layout)
        model.blocks[1].ep = model.blocks[0].ep
        model.blocks[1].up, model.blocks[1].down = model.blocks[0].up, model.blocks[0].down
        for block in model.blocks:
            fully_shard(block, mesh=layout.data)
        fully_shard(model, mesh=layout.data)
        for step in range(2):
            run(model, expected, layout, step)
        assert_same(model, expected)


@distributed(world_size=4)
def test_a_term_of_the_loss_on_an_expert_says_how_gradients_differ():
    """It may be read without that."""
    model, expected = shard(mixture(), TWICE), mixture()

    def refuse(name: str) -> None:
        whole = model.blocks[0].up.full_tensor()
        torch.testing.assert_close(whole.detach(), expected.blocks[0].up.detach())
        with pytest.raises(RuntimeError, match=rf"full_tensor\(\) of {name}, of which other data-parallel ranks"):
            whole.square().sum().backward()

    refuse(".*up")
    run(model, expected, TWICE)
    refuse(r"blocks\.0\.up")
    model.blocks[0].up.full_tensor(grad_placements=[Replicate()] * 2).square().sum().backward()
    expected.blocks[0].up.square().sum().backward()
    assert_same(model, expected)
