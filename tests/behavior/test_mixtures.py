"""Mixtures of experts sharded by one call for a block: what they do, compared with one process in float64.

Gradients are compared, not losses alone: Adam's steps hide a gradient of the wrong scale.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compose import clip_grad_norm_, drop_in, fully_shard, set_requires_all_reduce
from tests.harness import distributed, lasting_mesh
from tests.mixtures import EP_LAYOUTS, Layout, Mixture, batch, loss_of, mixture, shard, spread_over

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


def run(model: Mixture, expected: Mixture, layout: Layout, step: int = 0) -> None:
    """Backward of both."""
    parts = batch(step, layout)
    loss_of(model, parts[layout.place]).backward()
    for part in parts:
        (loss_of(expected, part) / layout.num_parts).backward()


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
