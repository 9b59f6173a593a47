"""``drop_in.install(layout="fsdp2")``: FSDP2's even chunks, placed ``Shard(0)`` or as asked, and all else as it is."""

from __future__ import annotations

import copy
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_fsdp import check_sharded_parity

import fsdp_compose
from fsdp_compose import (
    RaggedShard,
    checkpoint,
    drop_in,
    functional_mode,
    record_collectives,
    set_wire_formats,
    summon_full_params,
)
from fsdp_compose.drop_in.sharding import layout as chosen
from fsdp_compose.optim import Muon
from fsdp_compose.sync import apply_changes, changed_since, full_parameters, snapshot_parameters
from tests.harness import distributed, fake_process_group
from tests.internals import handles_of
from tests.training import adamw

FSDP2 = fsdp.fully_shard


class Uneven(nn.Module):
    """Rows that no number of ranks divides, one row, and one frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 11), nn.Linear(11, 1)
        self.frozen = nn.Parameter(torch.randn(5, 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh()) + x @ self.frozen


class Cut(nn.Module):
    """Parameters that are cut along other dimensions than 0, beside others, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(12, 5), nn.Linear(5, 1)
        self.columns, self.middle = nn.Parameter(torch.randn(7, 12)), nn.Parameter(torch.randn(3, 12, 5))
        self.frozen = nn.Parameter(torch.randn(5, 12), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.a(x).tanh() @ self.columns + x @ self.frozen
        return self.c((self.b(inner.tanh()) + (inner @ self.middle).sum(0)).tanh())

    @staticmethod
    def placement(param: nn.Parameter) -> Shard | None:
        return {(7, 12): Shard(-1), (3, 12, 5): Shard(1), (5, 12): Shard(1)}.get(tuple(param.shape))


@contextmanager
def layout() -> Iterator[None]:
    chosen.is_fsdp2 = True  # as install() does, which also rebinds FSDP2's functions, with which we compare
    try:
        yield
    finally:
        chosen.is_fsdp2 = False


def three(cls: type[nn.Module] = Uneven, **options: Any) -> tuple[Any, Any, Any]:
    """A model under this layout, the same under FSDP2, and unsharded."""
    torch.manual_seed(0)
    reference: Any = cls()
    options |= {} if cls is Uneven else {"shard_placement_fn": Cut.placement}
    ours, theirs = copy.deepcopy(reference), copy.deepcopy(reference)
    with layout():
        for module in (ours.a, ours.b, ours):
            drop_in.fully_shard(module, **options)
    for module in (theirs.a, theirs.b, theirs):
        FSDP2(module, **options)
    return ours, theirs, reference


def assert_same_shards(ours: nn.Module, theirs: nn.Module, tolerance: float = 0) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, DTensor) and isinstance(other, DTensor)
        assert mine.placements == other.placements and other.placements == mine.placements, name
        assert [*map(type, mine.placements)] == [*map(type, other.placements)], name
        assert mine.device_mesh == other.device_mesh and mine._local_tensor.shape == other._local_tensor.shape, name
        torch.testing.assert_close(mine._local_tensor, other._local_tensor, rtol=tolerance, atol=tolerance)


def data(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randn(dist.get_world_size() * 2, 5)


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def train_beside(
    ours: nn.Module, reference: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: int
) -> None:
    """Train a sharded model on this rank's rows, and an unsharded one on all of them."""
    for number in range(steps):
        for model, optimizer, x in zip((ours, reference), optimizers, (mine(data(number)), data(number)), strict=True):
            step(model, x)
            optimizer.step()
            optimizer.zero_grad()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stays": {"reshard_after_forward": False},
    "bf16": {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "hybrid": {"mesh": "hybrid"},
    "parts": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("cls", [Uneven, Cut])
@pytest.mark.parametrize("variant", VARIANTS)
@distributed(world_size=(2, 3, 4))
def test_shards_are_those_of_fsdp2_and_train_alike(variant, cls, world_size):
    options = dict(VARIANTS[variant])
    if (variant in ("hybrid", "parts")) != (world_size == 4):
        return
    if variant == "parts" and cls is Cut:
        return  # FSDP2 of torch 2.13 raises "setStorage: ... out of bounds"
    if variant == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, theirs, reference = three(cls, **options)
    assert_same_shards(ours, theirs)
    if cls is Cut:
        assert ours.columns.placements[-1] == Shard(1) and ours.columns.shape == (7, 12)
        assert ours.middle._local_tensor.shape == (3, 12 // ours.middle.device_mesh.size(-1), 5)
    # Sums of two numbers have one order.
    tolerance = 0 if world_size == 2 else 1e-5 if variant == "bf16" else 1e-6
    optimizers = [adamw(model.parameters()) for model in (ours, theirs, reference)]
    for number in range(4):
        x = data(number)
        for model in (ours, theirs):
            model.set_requires_gradient_sync(number != 1)  # the second backward accumulates
            step(model, mine(x))
        if variant != "bf16":
            step(reference, x)
        if number == 1:
            continue
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None)
            if param.grad is not None:
                assert param.grad.placements == other.grad.placements
                grads = param.grad._local_tensor, other.grad._local_tensor
                torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)
        if variant != "offload":
            norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (ours, theirs)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1].full_tensor())
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_shards(ours, theirs, tolerance)
    if variant != "bf16":
        for param, other in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), other.data, rtol=1e-5, atol=1e-5)
    for handle in handles_of(ours):
        padding = handle.shard.clone()
        for start, stop, _ in handle.local_shards:
            padding[start:stop] = 0
        assert not padding.any()


@distributed(world_size=(2, 3))
def test_code_that_computes_rows_by_itself_is_right(world_size):
    ours, _, reference = three()
    step(ours, mine(data(0)))
    step(reference, data(0))
    rank = dist.get_rank()
    for param, other in zip(ours.parameters(), reference.parameters(), strict=True):
        (placement,) = param.placements
        assert isinstance(placement, Shard) and placement.is_shard() and placement.dim == 0
        rows = -(-param.shape[0] // world_size)
        first = rank * rows
        torch.testing.assert_close(param.to_local(), other.data[first : first + rows])
        if not param.requires_grad:
            continue
        # an optimizer that pads equal chunks, gathers them, and writes its own rows
        chunk = torch.zeros(rows, *param.shape[1:])
        chunk[: param.grad.to_local().shape[0]] = param.grad.to_local()
        gathered = [torch.empty_like(chunk) for _ in range(world_size)]
        dist.all_gather(gathered, chunk)
        whole = torch.cat(gathered)[: param.shape[0]]
        torch.testing.assert_close(whole, other.grad)
        update = DTensor.from_local(
            whole[first : first + rows], param.device_mesh, param.placements, run_check=False, shape=param.shape,
            stride=param.stride(),
        )  # fmt: skip
        with torch.no_grad():
            param.add_(update, alpha=-0.5)
            other.sub_(other.grad, alpha=0.5)
            torch.testing.assert_close(param.full_tensor(), other.data)
            stock = distribute_tensor(other, param.device_mesh, param.placements)
            assert type(stock) is DTensor and stock.to_local().shape == param.to_local().shape
    for model, x in ((ours, mine(data(1))), (reference, data(1))):
        model.zero_grad()
        step(model, x)
    for param, other in zip(ours.parameters(), reference.parameters(), strict=True):
        if param.requires_grad:
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@distributed(world_size=2)
def test_stock_dtensors_are_taken_for_parameters_state_and_state_dicts():
    ours, theirs, _ = three()
    optimizers = [adamw(model.parameters()) for model in (ours, theirs)]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        step(model, mine(data(0)))
        optimizer.step()
        optimizer.zero_grad()
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):  # what FSDP2's optimizer has
        for key, value in optimizers[1].state.get(other, {}).items():
            optimizers[0].state[param][key] = value.clone()
    with torch.no_grad():
        for param in theirs.parameters():
            param.mul_(0.5)
    ours.load_state_dict({key: value.clone() for key, value in theirs.state_dict().items()})
    assert_same_shards(ours, theirs)
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        step(model, mine(data(1)))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_shards(ours, theirs)
    for mine_, other in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        assert torch.equal(mine_["exp_avg"]._local_tensor, other["exp_avg"]._local_tensor)
    # assigned, as loaders do
    new = nn.Parameter(
        DTensor.from_local(
            torch.full_like(ours.b.weight._local_tensor, 0.25), ours.b.weight.device_mesh, ours.b.weight.placements,
            run_check=False, shape=ours.b.weight.shape, stride=ours.b.weight.stride(),
        )
    )  # fmt: skip
    ours.b.weight = new
    ours(mine(data(2)))
    assert type(ours.b.weight.placements[0]) is Shard and bool((ours.b.weight.full_tensor() == 0.25).all())


@distributed(world_size=(2, 3))
def test_a_checkpoint_does_not_know_the_layout(world_size, tmp_path_factory=None):
    box = [None]
    if dist.get_rank() == 0:
        import tempfile

        box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    folder = Path(str(box[0]))
    torch.manual_seed(0)
    models = [Uneven() for _ in range(3)]
    with layout():
        drop_in.fully_shard(models[0])
    drop_in.fully_shard(models[1])
    with layout():
        drop_in.fully_shard(models[2])
    optimizers = [adamw(model.parameters()) for model in models]

    def states(i: int) -> dict[str, Any]:
        model, optimizer = checkpoint.get_state_dict(models[i], optimizers[i])
        return {"model": model, "optimizer": optimizer}

    def load(i: int, name: str) -> None:
        state = states(i)
        checkpoint.load(state, folder / name)
        checkpoint.set_state_dict(
            models[i], optimizers[i], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def wholes(i: int) -> list[torch.Tensor]:
        state = [value["exp_avg"].full_tensor() for value in optimizers[i].state.values()]
        return [*(param.full_tensor() for param in models[i].parameters()), *state]

    for optimizer, model in zip(optimizers, models, strict=True):
        step(model, mine(data(0)))
        optimizer.step()
    for source, target, name in ((0, 1, "chunks"), (1, 2, "flat")):
        step(models[source], mine(data(1)))
        optimizers[source].step()
        checkpoint.save(states(source), folder / name)
        load(target, name)
        for a, b in zip(wholes(source), wholes(target), strict=True):
            assert torch.equal(a, b)
    # whole state dicts, from rank 0, and by torch's own writer and reader
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = checkpoint.get_state_dict(models[0], optimizers[0], options=options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = whole if dist.get_rank() == 0 else ({}, {})
    checkpoint.set_state_dict(
        models[2], optimizers[2], model_state_dict=given[0], optim_state_dict=given[1], options=options
    )
    for a, b in zip(wholes(0), wholes(2), strict=True):
        assert torch.equal(a, b)
    dcp.save({"model": models[2].state_dict()}, checkpoint_id=folder / "torch")
    torch.manual_seed(1)
    theirs = FSDP2(Uneven())
    state = {"model": theirs.state_dict()}
    dcp.load(state, checkpoint_id=folder / "torch")
    theirs.load_state_dict(state["model"])
    assert_same_shards(models[2], theirs)
    step(models[2], mine(data(5)))


@distributed(world_size=4)
def test_checkpoints_and_whole_parameters_do_not_know_the_dimension():
    """On 4 ranks, then on 2 of them, in this layout and in rows."""
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    pair = dist.new_group([0, 1])
    ours, theirs, reference = three(Cut, reshard_after_forward=2)  # FSDP2 only says what is where
    assert_same_shards(ours, theirs)
    optimizers = [adamw(model.parameters()) for model in (ours, reference)]
    train_beside(ours, reference, optimizers, 2)
    with summon_full_params(ours):
        for (name, param), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.data, other.data, rtol=1e-5, atol=1e-5, msg=name)
            param.data.mul_(2)
    assert torch.equal(ours.columns[2:5, 3].full_tensor(), ours.columns.full_tensor()[2:5, 3])
    assert torch.equal(ours.columns.sum(1).full_tensor(), ours.columns.full_tensor().sum(1))
    assert torch.equal(ours.middle.view(-1)[7:30].full_tensor(), ours.middle.full_tensor().view(-1)[7:30])
    states = [value["exp_avg"] for value in optimizers[0].state.values()]
    wholes = [item.full_tensor() for item in (*ours.parameters(), *states)]
    before = snapshot_parameters(ours)
    with torch.no_grad():
        ours.columns[3, 5:7] = 4.0
        reference.load_state_dict(dict(zip(reference.state_dict(), wholes, strict=False)))
        reference.columns[3, 5:7] = 4.0
    with changed_since(ours, before) as buckets:
        ((name, changed),) = [item for bucket in buckets for item in bucket]
    assert name == "columns" and changed.positions is not None and changed.positions.tolist() == [41, 42]
    expected = reference.state_dict()
    with full_parameters(ours) as buckets:
        assert all(torch.equal(whole, expected[name]) for bucket in buckets for name, whole in bucket)
    model_state, optimizer_state = checkpoint.get_state_dict(ours, optimizers[0])
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, Path(box[0]) / "own")
    wholes = [item.full_tensor() for item in (*ours.parameters(), *states)]
    if dist.get_rank() > 1:
        return
    mesh = DeviceMesh.from_group(pair, "cpu")
    for is_cut in (True, False):
        torch.manual_seed(5)
        model: Any = Cut()
        if is_cut:
            with layout():
                drop_in.fully_shard(model, mesh=mesh, shard_placement_fn=Cut.placement)
        else:
            drop_in.fully_shard(model, mesh=mesh)
        optimizer = adamw(model.parameters())
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, Path(box[0]) / "own", process_group=pair)
        checkpoint.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        states = [value["exp_avg"] for value in optimizer.state.values()]
        for item, whole in zip((*model.parameters(), *states), wholes, strict=True):
            assert torch.equal(item.full_tensor(), whole)


@pytest.mark.parametrize("how", ["assigned", "copied", "from_rank0"])
@distributed(world_size=(2, 3))
def test_a_model_made_on_the_meta_device_is_filled(how, world_size):
    torch.manual_seed(0)
    reference: Any = Uneven()
    with torch.device("meta"):
        model: Any = Uneven()
    with layout():
        for module in (model.a, model):
            drop_in.fully_shard(module)
    whole = reference.state_dict()
    if how == "from_rank0":
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole if dist.get_rank() == 0 else {}, options=options)
    else:
        if how == "copied":
            model.to_empty(device="cpu")
        sharded = {
            name: distribute_tensor(whole[name], param.device_mesh, param.placements)
            for name, param in model.named_parameters()
        }
        assert {type(value) for value in sharded.values()} == {DTensor}
        model.load_state_dict(sharded, assign=how == "assigned")
    optimizers = [adamw(item.parameters()) for item in (model, reference)]
    train_beside(model, reference, optimizers, 2)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.placements == (Shard(0),)
        torch.testing.assert_close(param.full_tensor(), other.data, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", ["columns", "rows", "uneven"])
@distributed(world_size=4)
def test_beside_tensor_parallelism_placements_are_those_of_fsdp2(style):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    width = 9 if style == "uneven" else 12  # five of nine on one tensor-parallel rank, four on the other
    models: list[Any] = [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    plan = {"0": ColwiseParallel(use_local_output=style != "uneven"), "1": RowwiseParallel()}
    if style == "rows":
        plan["0"] = ColwiseParallel(output_layouts=Shard(-1))
    for model in models[:2]:
        parallelize_module(model, mesh["tp"], plan)
    with layout():
        drop_in.fully_shard(models[0], mesh=mesh["dp"])
    FSDP2(models[1], mesh=mesh["dp"])
    optimizers = [adamw(model.parameters()) for model in models]
    for number in range(3):
        assert_same_shards(models[0], models[1], 1e-6)
        torch.manual_seed(number)
        x = torch.randn(4, 4)
        part = x.chunk(2)[mesh["dp"].get_local_rank()]
        for model, optimizer, own in zip(models, optimizers, (part, part, x), strict=True):
            model(own).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, other in zip(models[0].parameters(), models[2].parameters(), strict=True):
        whole = param.full_tensor()
        torch.testing.assert_close(whole, other.data, rtol=1e-5, atol=1e-6)
        for chunk, own in param._chunks():  # what a checkpoint has of this rank
            box = zip(chunk.offsets, chunk.sizes, strict=True)
            assert torch.equal(own, whole[tuple([slice(start, start + size) for start, size in box])])
    twice = {name: value * 2 for name, value in models[2].state_dict().items()}
    fsdp_compose.checkpoint.set_model_state_dict(models[0], twice, options=StateDictOptions(full_state_dict=True))
    for name, param in models[0].named_parameters():
        assert torch.equal(param.full_tensor(), twice[name]), name


@distributed(world_size=3)
def test_features_that_read_flat_parameters_follow():
    ours, _, reference = three()
    step(ours, mine(data(0)))
    step(reference, data(0))
    for model in (ours, reference):
        adamw(model.parameters()).step()
    expected = dict(reference.named_parameters())
    with full_parameters(ours) as buckets:
        held = {name: value.clone() for bucket in buckets for name, value in bucket}
    for name, value in held.items():
        torch.testing.assert_close(value, expected[name].data, rtol=1e-5, atol=1e-6)
    with summon_full_params(ours, with_grads=True):
        for name, param in ours.named_parameters():
            torch.testing.assert_close(param.data, expected[name].data, rtol=1e-5, atol=1e-6)
            if param.grad is not None:
                torch.testing.assert_close(param.grad, expected[name].grad, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            ours.b.bias.fill_(0.5)
    assert bool((ours.b.bias.full_tensor() == 0.5).all())
    with torch.no_grad():
        reference.b.bias.fill_(0.5)
    held["b.bias"].fill_(0.5)
    snapshot = snapshot_parameters(ours)
    with torch.no_grad():
        for model in (ours, reference):
            model.b.weight[4:6].mul_(2)
            model.a.bias.add_(1)
    with changed_since(ours, snapshot) as buckets:
        for bucket in buckets:
            apply_changes(held, bucket)
    for name, value in held.items():
        torch.testing.assert_close(value, expected[name].data, rtol=1e-5, atol=1e-6)
    for model, x in ((ours, mine(data(3))), (reference, data(3))):
        model.zero_grad()
        with functional_mode(model) if model is ours else torch.enable_grad():
            (slope,) = torch.autograd.grad(model(x).sum(), [model.b.weight], create_graph=True)
            (model(x).square().mean()).backward()
        del slope
    for param, other in zip(ours.parameters(), reference.parameters(), strict=True):
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)


@distributed(world_size=(2, 3))
def test_flat_views_and_optimizers_of_matrices_train(world_size):
    for make in ("flat", "local", "muon"):
        ours, _, reference = three()
        if make == "muon":
            matrices = [
                [p for p in model.parameters() if p.ndim == 2 and p.requires_grad] for model in (ours, reference)
            ]
            optimizers = [Muon(matrices[0], lr=0.1), torch.optim.Muon(matrices[1], lr=0.1)]
        else:
            views = fsdp_compose.flat_parameters(ours, local=make == "local")
            optimizers = [torch.optim.AdamW(views, lr=0.1), torch.optim.AdamW(reference.parameters(), lr=0.1)]
        train_beside(ours, reference, optimizers, 3)
        for (name, param), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
            tolerance = 2e-2 if make == "muon" else 1e-4
            torch.testing.assert_close(param.full_tensor(), other.data, rtol=tolerance, atol=tolerance, msg=name)


class Rounded:
    """An all-gather of the user."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


@pytest.mark.parametrize("how", ["wire", "custom", "separate", "both"])
@distributed(world_size=(2, 3))
def test_what_is_put_around_transports_sees_shards(how, world_size):
    ours, _, reference = three()
    if how == "wire":
        set_wire_formats(ours, all_gather="bf16")
    for module in (ours.a, ours.b, ours):
        if how in ("custom", "both"):
            module.set_custom_all_gather(Rounded())
    if how in ("separate", "both"):
        ours.set_separate_reduce_scatter_group()
    optimizers = [adamw(model.parameters()) for model in (ours, reference)]
    train_beside(ours, reference, optimizers, 3)
    tolerance = 3e-2 if how == "wire" else 1e-5
    for param, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other.data, rtol=tolerance, atol=tolerance)


@distributed(world_size=(2, 3))
def test_torchs_own_check_of_parity_holds_also_after_an_interrupted_iteration(world_size):
    ours, _, reference = three()
    step(ours, mine(data(0)))
    hook = ours.b.register_forward_hook(interrupt)
    with pytest.raises(ArithmeticError):
        ours(mine(data(1)))
    hook.remove()
    ours.zero_grad()
    twin = copy.deepcopy(ours)
    for model in (ours, twin):
        step(model, mine(data(2)))
    step(reference, data(2))
    for model in (ours, twin):
        check_sharded_parity(_Close(), reference, model)


def interrupt(*_: Any) -> None:
    raise ArithmeticError


class _Close(unittest.TestCase):
    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
        else:
            super().assertEqual(first, second, msg)


class Gathering(torch.Tensor):
    """Has an all-gather of its own."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        return None if out is not None else (outputs[0], outputs)


@distributed(world_size=3)
def test_scalars_and_classes_with_an_all_gather_of_their_own_have_their_place():
    torch.manual_seed(0)
    reference: Any = nn.Linear(5, 7)
    reference.scale = nn.Parameter(torch.tensor(2.0))
    ours = copy.deepcopy(reference)
    ours.weight = nn.Parameter(ours.weight.data.as_subclass(Gathering))
    for model in (ours, reference):
        model.register_forward_hook(lambda module, _, output: output * module.scale)
    with layout():
        drop_in.fully_shard(ours)
    assert ours.weight.placements == ours.bias.placements == (Shard(0),)
    assert ours.weight.to_local().shape == ((3, 3, 1)[dist.get_rank()], 5)
    assert isinstance(ours.scale.placements[0], RaggedShard)  # FSDP2 refuses it
    step(ours, mine(data(0)))
    step(reference, data(0))
    for param, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


def shown(model: nn.Module) -> list[tuple[Any, ...]]:
    """What the modules show as their parameters."""
    for item in model.parameters():
        if not isinstance(item, DTensor):
            item.detach().sum()  # its memory can be read
    return [(name, isinstance(item, DTensor), item.shape, item.dtype) for name, item in model.named_parameters()]


def what_is_shown(model: Any) -> dict[str, list[tuple[Any, ...]]]:
    """At the moments at which it differs."""
    x, moments = mine(data(0)), {"new": shown(model)}
    model.unshard()
    moments["root gathered"] = shown(model)
    work = model.a.unshard(async_op=True)
    moments["gather begun"] = shown(model)
    work.wait()
    moments["gathered"] = shown(model)
    model.state_dict()
    moments["saved"] = shown(model)
    model.a.unshard()
    model.a.reshard()
    moments["freed"] = shown(model)
    hooks = [
        model.b.register_forward_pre_hook(lambda *_: moments.update({"in forward": shown(model)})),
        model.b.register_forward_hook(lambda *_: moments.update({"after a forward inside": shown(model)})),
    ]
    loss = model(x).sum()
    moments["after forward"] = shown(model)
    for hook in hooks:
        hook.remove()
    loss.backward()
    moments["after backward"] = shown(model)
    with torch.no_grad():
        model(x)
    moments["after evaluation"] = shown(model)
    objects = [*map(id, model.parameters())]
    with torch.no_grad():
        model(x)
    moments["again"] = [objects == [*map(id, model.parameters())]]
    model.load_state_dict(model.state_dict())
    moments["loaded"] = shown(model)
    model.unshard()
    model.to(torch.float32)
    moments["moved"] = shown(model)
    return moments


@pytest.mark.parametrize("variant", ["plain", "stays", "bf16", "hybrid"])
@distributed(world_size=(2, 4))
def test_gathered_modules_show_what_those_of_fsdp2_show(variant, world_size):
    if (variant == "hybrid") != (world_size == 4):
        return
    options = dict(VARIANTS[variant])
    if variant == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, theirs, _ = three(**options)
    found, expected = what_is_shown(ours), what_is_shown(theirs)
    for moment, those in expected.items():
        assert found[moment] == those, moment
    assert {is_dtensor for _, is_dtensor, *_ in expected["after evaluation"]} >= {False}
    assert_same_shards(ours, theirs)


class Head(nn.Module):
    """Computes with the weights of its last layer, not with the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x).tanh()
        if isinstance(self.head, drop_in.FSDPModule):
            self.head.unshard()
        return hidden @ self.head.weight.T + self.head.bias


@pytest.mark.parametrize("is_outside", [False, True])
@distributed(world_size=2)
def test_gathered_weights_that_a_loss_uses_directly_are_trained(is_outside):
    torch.manual_seed(0)
    reference: Any = Head()
    ours = copy.deepcopy(reference)
    with layout():
        for module in (ours.a, ours.head, *([] if is_outside else [ours])):
            drop_in.fully_shard(module, reshard_after_forward=True)
    for number in range(3):
        for model, x in ((reference, data(number)), (ours, mine(data(number)))):
            model.zero_grad()
            loss = model(x).square().mean()
            assert not isinstance(model.head.weight, DTensor)
            loss.backward()
        for param, other in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@distributed(world_size=2)
def test_what_is_done_to_gathered_parameters_between_forwards_is_refused_or_done():
    ours, _, reference = three(reshard_after_forward=False)
    x = mine(data(0))
    before = [item.detach().clone() for item in reference.parameters()]
    with torch.no_grad():
        ours(x)
        ours.a.weight.zero_()  # FSDP2 loses it without a word
    with pytest.raises(RuntimeError, match=r"group a was modified in place while it was gathered, between forwards"):
        ours.a.reshard()
    ours(x)
    ours.b.weight = nn.Parameter(torch.zeros_like(ours.b.weight))
    with pytest.raises(RuntimeError, match=r"replaced, added or removed parameters of a sharded module: b\.weight"):
        ours(x)
    ours(x)
    with pytest.raises(RuntimeError, match="iterations"):
        copy.deepcopy(ours)
    with summon_full_params(ours):
        for param, value in zip(ours.parameters(), before, strict=True):
            assert not isinstance(param, DTensor)
            torch.testing.assert_close(param.detach(), value)
    work = ours.b.unshard(async_op=True)
    ours.b.reshard()
    work.wait()
    assert isinstance(ours.b.weight, DTensor)
    with functional_mode(ours):
        ours(x)
    assert isinstance(ours.a.weight, DTensor)
    ours(x)
    flat = fsdp_compose.flat_parameters(ours)
    assert sum(item.numel() for item in flat) >= sum(item.numel() for item in before if item.requires_grad)


@distributed(world_size=2)
def test_collectives_are_those_of_the_other_layout():
    lists = []
    for is_fsdp2 in (True, False):
        torch.manual_seed(0)
        model: Any = Uneven()
        if is_fsdp2:
            with layout():
                drop_in.fully_shard(model)
        else:
            drop_in.fully_shard(model)
        step(model, mine(data(0)))
        with record_collectives(model) as recorded:
            step(model, mine(data(1)))
        lists.append([str(item).partition(" (")[0] for item in recorded])
    assert lists[0] == lists[1]


def test_it_is_chosen_by_install_and_refuses_what_it_does_not_have():
    with fake_process_group(world_size=4):
        drop_in.install(layout="fsdp2")
        try:
            model: Any = fsdp.fully_shard(nn.Linear(5, 7))
            assert model.weight.placements == (Shard(0),) and model.weight._local_tensor.shape == (2, 5)
            drop_in.install()  # again, for modules imported since: the layout stays
            model = fsdp.fully_shard(nn.Linear(5, 7))
            assert model.bias._local_tensor.shape == (2,)
            with pytest.raises(
                NotImplementedError,
                match=r"weight, of shape \(7, 5\).* 4 ranks: .*uneven sharding on dim 1, of size 5",
            ):
                drop_in.fully_shard(nn.Linear(5, 7), shard_placement_fn=lambda _: Shard(1))
            with pytest.raises(
                ValueError, match=r"bias, of shape \(4,\).*Shard\(dim=1\), a dimension that it does not"
            ):
                drop_in.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda _: Shard(1))
            model = nn.Linear(8, 4)
            drop_in.fully_shard(model, shard_placement_fn=lambda param: Shard(param.ndim - 1))
            assert model.weight.placements == (Shard(1),) and model.bias.placements == (Shard(0),)
            with pytest.raises(ValueError, match="whole matrices cannot step.*Shard"):
                Muon([model.weight]).step()
            with pytest.raises(ValueError, match="expected 'flat' or 'fsdp2'"):
                drop_in.install(layout="rows")  # type: ignore[arg-type]
        finally:
            del model
            drop_in.uninstall()
        model = drop_in.fully_shard(nn.Linear(5, 7))
        assert type(model.weight.placements[0]) is not Shard


@distributed(world_size=2)
def test_ranks_with_other_layouts_are_told():
    torch.manual_seed(0)
    model = Uneven()
    if dist.get_rank():
        drop_in.fully_shard(model)
    else:
        with layout():
            drop_in.fully_shard(model)
    with pytest.raises(RuntimeError, match="layout|offsets|elements per rank"):
        model(mine(data(0)))
