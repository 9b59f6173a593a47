"""torch's own ways to load a model: ``torch.distributed.checkpoint.state_dict``, ``DTensor.from_local`` and
``distribute_tensor`` on sharded parameters, its options and policies given to our functions."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as theirs
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compose.checkpoint as ours
from fsdp_compose import MixedPrecisionPolicy, RaggedDTensor, RaggedShard, flat_parameters, fully_shard
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.checkpoint.states import assert_equal, shared_folder, whole
from tests.harness import distributed, lasting_mesh

GRANULARITIES = ["rows", "elements", "whole"]


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


def build(seed: int, granularity: str, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = plain(seed)
    for part in (model[0], model):
        fully_shard(part, granularity=lambda fqn, param: granularity)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = [*model.parameters()]
    kept = [optimizer.state[param][key] for param in params for key in ("exp_avg", "exp_avg_sq", "step")]
    return [whole(tensor).clone() for tensor in (*params, *kept)]


COMBINATIONS = [*itertools.product([False, True], [False, True], [False, True], [False, True])]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@distributed(world_size=(2, 3), timeout=120)
def test_torchs_setters_load_sharded_models_and_they_train_on(granularity, world_size):
    model, reference = build(0, granularity), plain(0)
    optimizer, expected = adamw(model), adamw(reference)
    for each, by in ((model, optimizer), (reference, expected)):
        step(each, by, 0)
    if granularity == "elements" and world_size > 1:
        assert any(p.placements[0].flat for p in model.parameters()), "some parameter is sharded within a row"
    before = values(model, optimizer)
    dicts = {}
    for offload in (False, True):
        options = theirs.StateDictOptions(full_state_dict=True, cpu_offload=offload)
        made = [
            theirs.get_model_state_dict(model, options=options),
            theirs.get_optimizer_state_dict(model, optimizer, options=options),
        ]
        dist.broadcast_object_list(made)
        dicts[offload] = copy.deepcopy(made)  # the first rank has its live step counts
    step(model, optimizer, 1)
    after = values(model, optimizer)
    if world_size < 3:  # the mean of three equal gradients is rounded
        step(reference, expected, 1)
        assert_equal(after, values(reference, expected))
    for offload, broadcast, strict, on_meta in COMBINATIONS:
        if (offload + broadcast + strict + on_meta + world_size) % 2:  # every three of them meet at each world size
            continue
        options = theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
        model_state, optimizer_state = copy.deepcopy(dicts[offload])
        if broadcast and dist.get_rank() > 0:
            model_state, optimizer_state = {}, {}
        other = build(1, granularity, "meta" if on_meta else "cpu")
        if on_meta and strict:
            other.to_empty(device="cpu")  # as the tutorial does; else the setter brings the memory
        params = [*other.parameters()]
        its = None if on_meta and not strict else adamw(other)
        theirs.set_model_state_dict(other, model_state, options=options)
        its = its or adamw(other)
        theirs.set_optimizer_state_dict(other, its, optimizer_state, options=options)
        where = f"{offload=} {broadcast=} {strict=} {on_meta=}"
        assert all(a is b for a, b in zip(params, other.parameters())), where
        assert_equal(values(other, its), before, where)
        step(other, its, 1)
        assert_equal(values(other, its), after, where)


@distributed(world_size=2)
def test_torchs_setter_with_flat_views_and_scalars():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    model, other = fully_shard(Scaled()), fully_shard(Scaled())
    with torch.no_grad():
        model.scale.fill_(5.0)
    state = theirs.get_model_state_dict(model, options=theirs.StateDictOptions(full_state_dict=True))
    flats = flat_parameters(other)
    optimizer = torch.optim.AdamW(flats, lr=0.1)
    options = theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    theirs.set_model_state_dict(other, copy.deepcopy(state), options=options)  # it changes the dict
    assert_equal([whole(p) for p in other.parameters()], [whole(p) for p in model.parameters()])
    its = torch.optim.AdamW(flat_parameters(model), lr=0.1)
    for each, by in ((model, its), (other, optimizer)):
        each(torch.ones(2, 4)).sum().backward()
        by.step()
    assert_equal([whole(p) for p in other.parameters()], [whole(p) for p in model.parameters()])
    with pytest.raises(KeyError):
        theirs.get_optimizer_state_dict(other, optimizer)
    with torch.device("meta"):
        meta = fully_shard(Scaled())
    theirs.set_model_state_dict(meta, copy.deepcopy(state), options=options)
    assert meta.scale.full_tensor().item() == 5.0


@pytest.mark.parametrize("granularity", GRANULARITIES)
@distributed(world_size=(2, 3))
def test_dcp_loads_into_a_model_on_the_meta_device(granularity):
    folder = shared_folder()
    model = build(0, granularity)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    state = {
        "model": theirs.get_model_state_dict(model),
        "optimizer": theirs.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    other = build(1, granularity, "meta").to_empty(device="cpu")
    its = adamw(other)
    state = {"model": theirs.get_model_state_dict(other), "optimizer": theirs.get_optimizer_state_dict(other, its)}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    theirs.set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_equal(values(other, its), values(model, optimizer))
    for each, by in ((model, optimizer), (other, its)):
        step(each, by, 1)
    assert_equal(values(other, its), values(model, optimizer))


# ---- DTensors from placements


@pytest.mark.parametrize("granularity", GRANULARITIES)
@distributed(world_size=(1, 2, 3))
def test_tensors_placed_like_a_parameter(granularity):
    model = build(0, granularity)
    for handle in _get_fsdp_handles(model):
        assert handle.sharded_params
    for param in model.parameters():
        full = param.full_tensor().detach()
        local = param.to_local().detach().clone()
        mesh, placements = param.device_mesh, param.placements
        for made in (
            DTensor.from_local(local, mesh, placements),
            DTensor.from_local(local, mesh, placements, shape=param.shape, stride=param.stride()),
            distribute_tensor(full, mesh, placements),
            torch.distributed.tensor.distribute_tensor(full.clone(), mesh, placements, src_data_rank=None),
        ):
            assert type(made) is RaggedDTensor and made.placements == placements and made.shape == param.shape
            assert torch.equal(made.full_tensor(), full)
            with torch.no_grad():
                assert torch.equal((made + param).full_tensor(), 2 * full)
        wrong = torch.zeros(local.numel() + 1)
        with pytest.raises(ValueError, match=r"from_local\(\).*a local tensor of shape|does not shard a tensor"):
            DTensor.from_local(wrong, mesh, placements)
        source = full if dist.get_rank() == 0 else torch.zeros_like(full)
        assert torch.equal(distribute_tensor(source, mesh, placements).full_tensor(), full), "the first rank's"
        assert distribute_tensor(param, mesh, placements) is param
        assert distribute_tensor(full.clone().requires_grad_(), mesh, placements).requires_grad
        assert torch.equal(DTensor.from_local(local, mesh, placements, run_check=False).to_local(), local)


@pytest.mark.parametrize("granularity", ["rows", "elements"])
@distributed(world_size=2)
def test_stock_dtensors_are_redistributed_like_parameters(granularity):
    """As DTensor optimizers do it with an update that every rank, or each for its rows, has computed."""
    for param in build(0, granularity).parameters():
        mesh, placements, full = param.device_mesh, param.placements, param.full_tensor().detach()
        twice = full.clone().requires_grad_()
        rows = full.chunk(2)[dist.get_rank()] if len(full) % 2 == 0 else None
        sources = [
            DTensor.from_local(twice, mesh),
            DTensor.from_local(full / 2, mesh, [Partial()]),
            *([] if rows is None else [DTensor.from_local(rows, mesh, [Shard(0)])]),
        ]
        for source in sources:
            moved = source.redistribute(placements=placements)
            assert type(moved) is RaggedDTensor and moved.placements == placements
            assert torch.equal(moved.to_local(), param.to_local())
        (sources[0].redistribute(mesh, placements) * param.detach()).sum().backward()
        assert torch.equal(twice.grad, full), "equal on every rank, as torch's own redistribution has it"
        with pytest.raises(ValueError, match="does not shard a tensor of shape"):
            DTensor.from_local(torch.zeros(full.numel() + 1), mesh).redistribute(placements=placements)


@distributed(world_size=4)
def test_stock_dtensors_are_redistributed_like_parameters_of_two_meshes():
    mesh = lasting_mesh(("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 13)), mesh["tp"], {"0": ColwiseParallel()})
    for param in fully_shard(model, mesh=mesh["dp"]).parameters():
        moved = DTensor.from_local(param.full_tensor().detach(), param.device_mesh).redistribute(
            placements=param.placements
        )
        assert torch.equal(moved.to_local(), param.to_local())


@distributed(world_size=2)
def test_from_local_is_differentiable():
    mesh = build(0, "rows")[0].weight.device_mesh
    for placement, shape in ((RaggedShard((3, 1)), (4, 2)), (RaggedShard((5, 3), flat=True), (4, 2))):
        rank = dist.get_rank()
        local = torch.randn(placement.local_shape(shape, rank)).requires_grad_()
        made = DTensor.from_local(local, mesh, [placement], shape=torch.Size(shape), stride=(2, 1))
        (made * made).sum().backward()
        assert torch.allclose(local.grad, 2 * local.detach())
        again = torch.randn(placement.local_shape(shape, rank)).requires_grad_()
        made = DTensor.from_local(again, mesh, [placement], shape=torch.Size(shape), stride=(2, 1))
        made.full_tensor().sum().backward()
        assert torch.equal(again.grad, torch.ones_like(again))
    with pytest.raises(ValueError, match="do not determine the shape of the whole tensor: pass .* shape= and stride="):
        DTensor.from_local(torch.zeros(5 - 2 * dist.get_rank()), mesh, [RaggedShard((5, 3), flat=True)])
    even = DTensor.from_local(torch.ones(2, 3), mesh, [torch.distributed.tensor.Shard(0)])
    assert type(even) is DTensor and even.shape == (4, 3), "others are as they were"


@distributed(world_size=2)
def test_the_box_that_a_rank_holds_or_a_named_error():
    model = build(0, "elements")
    for param in [*build(0, "rows").parameters(), *model.parameters()]:
        (placement,) = param.placements
        if placement.flat and param.dim() > 1:
            with pytest.raises(NotImplementedError, match=r"not a box of the tensor.*distribute_tensor\(\)"):
                compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
            continue
        sizes, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
        assert torch.equal(param.full_tensor()[box].reshape(-1), param.to_local().reshape(-1))


@pytest.mark.parametrize("rows", [64, 13])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@distributed(world_size=4)
def test_the_box_that_a_rank_holds_of_a_parameter_that_tensor_parallelism_has_cut(style, rows):
    mesh = lasting_mesh(("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, rows), nn.Linear(8, 5))
    parallelize_module(model, mesh["tp"], {"0": style()})
    fully_shard(model, mesh=mesh["dp"])
    for param in model.parameters():
        sizes, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        assert tuple(sizes) == tuple(param.to_local().shape)
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
        assert torch.equal(param.full_tensor()[box], param.to_local())


# ---- torch's own options


@distributed(world_size=2)
def test_our_functions_take_torchs_options():
    model, other = build(0, "rows"), build(1, "rows")
    optimizer, its = adamw(model), adamw(other)
    step(model, optimizer, 0)
    options = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = ours.get_state_dict(model, optimizer, options=options)
    assert (model_state == {}) == (dist.get_rank() > 0)
    options = theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ours.set_model_state_dict(other, model_state, options=options)
    ours.set_optimizer_state_dict(other, its, optimizer_state, options=options)
    assert_equal(values(other, its), values(model, optimizer))
    flat = ours.get_optimizer_state_dict(
        model, optimizer, options=theirs.StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert "state.0.weight.exp_avg" in flat
    ours.patch_model_state_dict(model, options=theirs.StateDictOptions(full_state_dict=True))
    assert not any(isinstance(value, DTensor) for value in model.state_dict().values())
    with pytest.raises(ValueError, match="dsd_fqn_modifiers='mine'.* is not supported"):
        ours.get_model_state_dict(other, options=theirs.StateDictOptions(dsd_fqn_modifiers="mine"))
    for wrong in ({"strict": False}, "full", theirs.StateDictOptions, MixedPrecisionPolicy()):
        with pytest.raises(TypeError, match=r"options=.*expected a StateDictOptions"):
            ours.get_model_state_dict(other, options=wrong)


@distributed(world_size=2)
def test_fully_shard_takes_torchs_policy():
    results: list[Any] = []
    for policy in (MixedPrecisionPolicy, TorchPolicy):
        model = plain(0)
        fully_shard(model, mp_policy=policy(torch.bfloat16, torch.float32, torch.float64, cast_forward_inputs=True))
        optimizer = adamw(model)
        out = model(torch.ones(2, 5))
        assert out.dtype == torch.float64
        out.sum().backward()
        optimizer.step()
        results.append(values(model, optimizer))
    assert_equal(results[1], results[0])
    with pytest.raises(TypeError, match="mp_policy=.*: expected fsdp_compose's MixedPrecisionPolicy or torch's"):
        fully_shard(plain(0), mp_policy=torch.distributed.fsdp.MixedPrecision())
    with pytest.raises(ValueError, match="param_dtype=torch.int32"):
        fully_shard(plain(0), mp_policy=TorchPolicy(param_dtype=torch.int32))


# ---- small ones


@pytest.mark.parametrize("whose", ["ours", "torch's"])
@distributed(world_size=2)
def test_a_model_without_optimizers_loads(whose):
    functions: Any = {"ours": ours, "torch's": theirs}[whose]
    model, other = build(0, "rows"), build(1, "rows")
    state = functions.get_model_state_dict(model)
    functions.set_state_dict(other, [], model_state_dict=state, optim_state_dict={})
    assert_equal([whole(p) for p in other.parameters()], [whole(p) for p in model.parameters()])


class Pair(nn.Module):
    """Loads its tensors together: it refuses to see only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(6, device="meta"))
        self.b = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.ones(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b * self.scale[0]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = [name for name in ("a", "b", "scale") if prefix + name in state_dict]
        assert len(given) in (0, 3), given
        self.calls += bool(given)
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("is_sharded", [True, False])
@distributed(world_size=2)
def test_a_module_that_loads_by_itself_and_is_partly_on_the_meta_device_gets_its_keys_together(is_sharded):
    torch.manual_seed(1)
    model = nn.Sequential(Pair(), nn.Linear(6, 6))
    if is_sharded:
        fully_shard(model[1])  # the pair is of two devices, which one group cannot hold
    pair = model[0]
    before = (pair.a, pair.b, pair.scale)
    optimizer = torch.optim.SGD([pair.b], lr=0.5)
    state = ours.get_model_state_dict(model)
    state |= {"0.a": torch.full((6,), 2.0), "0.b": torch.full((6,), 3.0), "0.scale": torch.full((2,), 4.0)}
    ours.set_model_state_dict(model, state)
    assert pair.calls == 1
    assert pair.a is before[0] and pair.b is before[1] and pair.scale is before[2], "the same objects"
    assert (pair.a[0].item(), pair.b[0].item(), pair.scale[0].item()) == (2.0, 3.0, 4.0)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(pair.b, torch.full((6,), 3.0)), "the optimizer trains what the model uses"
