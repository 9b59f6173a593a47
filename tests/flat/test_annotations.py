"""Parameters that spmd_types has annotated, on several ranks, beside one process and FSDP2 (torch 2.15)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp_compose
from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    drop_in,
    register_forward_method,
    replicate,
    set_functional_mode,
    set_gradient_divide_factor,
    set_requires_gradient_sync,
    summon_full_params,
)
from fsdp_compose.checkpoint import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from fsdp_compose.core.comm import Label, Transport, TransportWrapper, Work
from fsdp_compose.core.group.registry import get_state
from fsdp_compose.plugins.tensor_parallel.parameters import TensorParallel
from tests.harness import TORCH, distributed, fake_process_group, lasting_mesh
from tests.internals import states_of
from tests.test_architecture import output_of

types = pytest.importorskip("spmd_types", reason="the package spmd_types is not installed")

DIM, HIDDEN, SEQUENCE = 6, 8, 4
Types = dict[Any, Any]

FSDP2 = pytest.param("fsdp2", marks=pytest.mark.skipif(TORCH < (2, 15), reason="FSDP2 of torch 2.15 reads annotations"))


class Noting(nn.Module):
    """A layer that notes of which class its parameters are in forward, and of which types."""

    seen: dict[str, tuple[type, Types]]
    name: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, param in self.named_parameters():
            self.seen[f"{self.name}.{name}"] = type(param), dict(types.get_local_type(param))
        return super().forward(x)


class Linear(Noting, nn.Linear):
    pass


class Norm(Noting, nn.LayerNorm):
    pass


class Net(nn.Module):
    """Two layers split over tensor-parallel ranks between layers that are not; on one rank, or on those of ``tp``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = Linear(DIM, DIM, bias=False), Norm(DIM)
        self.up, self.down = Linear(DIM, HIDDEN), Linear(HIDDEN, DIM, bias=False)
        self.head = Linear(DIM, DIM, bias=False)
        self.tp: dist.ProcessGroup | None = None
        self.by_sequence = self.recomputes = False
        self.seen: dict[str, tuple[type, Types]] = {}
        for layer_name, layer in self.named_children():
            layer.name, layer.seen = layer_name, self.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x))
        return self.head(checkpoint(self.inner, h, use_reentrant=False) if self.recomputes else self.inner(h))

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return self.down(torch.tanh(self.up(h)))
        if self.by_sequence:
            h = types.all_gather(h, self.tp, src=types.S(1), dst=types.R)
        y = self.down(torch.tanh(self.up(h)))
        if self.by_sequence:
            return types.reduce_scatter(y, self.tp, src=types.P, dst=types.S(1))
        return types.all_reduce(y, self.tp, src=types.P, dst=types.I)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def build(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def axis(mesh: DeviceMesh, name: str) -> Any:
    return types.MeshAxis.of(mesh.get_group(name))


def annotate(net: nn.Module, of: Callable[[str], Types]) -> None:
    for name, param in net.named_parameters():
        types.assert_type(param, of(name))


def shard(system: str, modules: list[nn.Module], mesh: DeviceMesh, dims: DataParallelMeshDims, **options: Any) -> None:
    for module in modules:
        if system == "own":
            names = (*dims.replicate_names, *dims.shard_names)
            fsdp_compose.fully_shard(module, mesh=mesh[names[0] if len(names) == 1 else names], **options)
        else:
            package = drop_in if system == "drop_in" else fsdp
            package.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **options)


@contextmanager
def checked(on: Any) -> Iterator[None]:
    from spmd_types.checker import typecheck

    with types.set_current_mesh(frozenset(on)), typecheck(strict_mode="strict"):
        yield


def backward(net: Net, x: torch.Tensor, of_x: Types) -> torch.Tensor:
    """One backward of a sum under strict checking; returns the loss."""
    with checked(of_x):
        types.assert_type(x, of_x)
        out = net(x)
        of_out = types.get_local_type(out)
        assert of_out.keys() == of_x.keys()
        with types.no_typecheck():
            loss = out.square().sum()
        types.assert_type(loss, {item: types.P if kind is types.V else kind for item, kind in of_out.items()})
        loss.backward()
    return loss.detach()


def inputs(num: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(num, 2, SEQUENCE, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_gradients(net: nn.Module, truth: nn.Module) -> None:
    for (name, param), other in zip(net.named_parameters(), truth.parameters(), strict=True):
        assert (param.grad is None) is (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(whole(param.grad), other.grad, rtol=0, atol=1e-12, msg=name)
            assert other.grad.abs().max() > 1e-3, name


def true_gradients(truth: Net, num: int) -> None:
    for x in inputs(num):
        (truth(x).square().sum() / num).backward()


# ---- Data parallelism alone

DATA: dict[str, dict[str, Any]] = {
    "1-D": {},
    "hybrid": {"names": ("dp_replicate", "dp_shard")},
    "hybrid, one flat axis": {"names": ("dp_replicate", "dp_shard"), "flat": True},
    "dimensions left out": {"names": ("dp_replicate", "dp_shard"), "left_out": True},
    "tied": {"tied": True},
    "tied across groups": {"tied": True, "groups": ("embed",)},
    "frozen": {"frozen": True},
    "activation checkpointing": {"recomputes": True},
    "offloaded": {"offload": True},
    "accumulated": {"backwards": 2},
}


def on_data(program: dict[str, Any]) -> tuple[Net, Net, DeviceMesh, DataParallelMeshDims, list[Any]]:
    names = program.get("names", ("dp_shard",))
    mesh = lasting_mesh(names, (2, 2) if len(names) == 2 else (4,))
    dims = DataParallelMeshDims(shard="dp_shard", replicate=names[0] if len(names) == 2 else None)
    axes = [axis(mesh, name) for name in names]
    if "flat" in program:
        axes = [types.MeshAxis.of(mesh._flatten().get_group())]
    truth, net = build(), build()
    for model in (truth, net):
        model.recomputes = "recomputes" in program
        model.norm.weight.requires_grad_("frozen" not in program)
        if "tied" in program:
            model.head.weight = model.embed.weight
    annotate(net, lambda name: {item: types.R for item in (axes[1:] if "left_out" in program else axes)})
    return net, truth, mesh, dims, axes


@pytest.mark.parametrize("system", ["own", "drop_in", FSDP2])
@pytest.mark.parametrize("program", DATA)
@distributed(world_size=4)
def test_gradients_are_those_of_one_process(program, system):
    given = DATA[program]
    if system == "fsdp2" and program == "tied across groups":
        return  # its gradients are wrong: each group has a parameter of its own then
    net, truth, mesh, dims, axes = on_data(given)
    options = {}
    if "offload" in given:
        options = {"offload_policy": CPUOffloadPolicy() if system == "own" else fsdp.CPUOffloadPolicy(pin_memory=False)}
    with types.set_current_mesh(frozenset(axes)):
        groups = [getattr(net, name) for name in given.get("groups", () if "tied" in given else ("up", "down"))]
        shard(system, [*groups, net], mesh, dims, **options)
    num_backwards = given.get("backwards", 1)
    for i in range(num_backwards):
        is_last = i == num_backwards - 1
        if system == "own":
            set_requires_gradient_sync(net, is_last)
        else:
            net.set_requires_gradient_sync(is_last)
        backward(net, inputs(4)[dist.get_rank()], dict.fromkeys(axes, types.V))
        true_gradients(truth, 4)
    assert_same_gradients(net, truth)
    assert {kind for kind, _ in net.seen.values()} == {nn.Parameter}
    assert [of for _, of in net.seen.values()] == [dict.fromkeys(axes, types.R)] * len(net.seen)


@distributed(world_size=4)
def test_with_bf16_the_bits_are_those_without_annotations():
    mesh = lasting_mesh(("dp_shard",), (4,))
    nets = build(torch.float32), build(torch.float32)
    axes = [axis(mesh, "dp_shard")]
    annotate(nets[0], lambda name: {axes[0]: types.R})
    x = inputs(4, torch.float32)[dist.get_rank()]
    for net in nets:
        for module, dtype in ((net.up, None), (net, torch.float32)):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=dtype)
            fsdp_compose.fully_shard(module, mesh=mesh, mp_policy=policy)
    backward(nets[0], x, {axes[0]: types.V})
    nets[1](x).square().sum().backward()
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    assert {of[axes[0]] for _, of in nets[0].seen.values()} == {types.R}


@distributed(world_size=2)
def test_the_optimizer_clips_and_steps_under_the_checker_and_copies_keep_types():
    mesh = lasting_mesh(("dp_shard",), (2,))
    net, truth, dp = build(), build(), axis(mesh, "dp_shard")
    annotate(net, lambda name: {dp: types.R})
    shard("own", [net.up, net], mesh, DataParallelMeshDims(shard="dp_shard"))
    register_forward_method(net, "again")
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (net, truth)]
    for _ in range(2):
        backward(net, inputs(2)[dist.get_rank()], {dp: types.V})
        true_gradients(truth, 2)
        for model, optimizer in zip((net, truth), optimizers, strict=True):
            with checked([dp]) if model is net else nullcontext():
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(net.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=0, atol=1e-12)
    x = inputs(2)[0]
    for model in (net, copy.deepcopy(net)):
        model.seen.clear()
        with checked([dp]):
            types.assert_type(x, {dp: types.V})
            assert types.get_local_type(model(x)) == {dp: types.V}
            assert types.get_local_type(model.again(x)) == {dp: types.V}
        assert {of[dp] for _, of in model.seen.values()} == {types.R}
    net.to(torch.float32)
    net(x.float())
    assert {of[dp] for _, of in net.seen.values()} == {types.R}
    with checked([dp]):
        torch.autograd.backward(
            [types.assert_type(net(types.assert_type(x.float(), {dp: types.V})).sum(), {dp: types.V})]
        )
    assert all(param.grad is not None for param in net.parameters())


@distributed(world_size=2)
def test_functional_mode_and_replicate():
    mesh = lasting_mesh(("dp_shard",), (2,))
    truth, dp = build(), axis(mesh, "dp_shard")
    true_gradients(truth, 2)
    for program in ("functional", "replicate"):
        net = build()
        annotate(net, lambda name: {dp: types.R})
        if program == "replicate":
            replicate(net, mesh=mesh)
        else:
            shard("own", [net.up, net], mesh, DataParallelMeshDims(shard="dp_shard"))
            set_functional_mode(net)
        backward(net, inputs(2)[dist.get_rank()], {dp: types.V})
        assert_same_gradients(net, truth)
        assert [of for _, of in net.seen.values()] == [{dp: types.R}] * len(net.seen), program


@distributed(world_size=2)
def test_the_mesh_of_all_ranks():
    """Which has no names."""
    truth, net, world = build(), build(), types.MeshAxis.of(dist.group.WORLD)
    annotate(net, lambda name: {world: types.R})
    fsdp_compose.fully_shard(net)
    backward(net, inputs(2)[dist.get_rank()], {world: types.V})
    true_gradients(truth, 2)
    assert_same_gradients(net, truth)
    refused = nn.Linear(2, 2)
    types.assert_type(refused.weight, {world: types.I})
    with pytest.raises(
        ValueError, match="weight is annotated by spmd_types as I on dimension 0, which is data-parallel"
    ):
        fsdp_compose.fully_shard(refused)


@distributed(world_size=2)
def test_compiled_blocks():
    mesh = lasting_mesh(("dp_shard",), (2,))
    truth, net = build(), build()
    annotate(net, lambda name: {axis(mesh, "dp_shard"): types.R})
    shard("own", [net.up, net.down, net], mesh, DataParallelMeshDims(shard="dp_shard"))
    net.up.compile(backend="aot_eager")
    net.down.compile(backend="aot_eager")
    net(inputs(2)[dist.get_rank()]).square().sum().backward()
    true_gradients(truth, 2)
    assert_same_gradients(net, truth)


# ---- Beside tensor, sequence and expert parallelism


def split(net: Net, mesh: DeviceMesh, by_sequence: bool) -> tuple[Any, Any]:
    """Annotate ``net``, of which this rank keeps its part; returns the axes."""
    dp = axis(mesh, "dp_replicate" if mesh.ndim == 3 else "dp_shard")  # of three dimensions, one has one rank
    tp = axis(mesh, "tp")
    rank, half = mesh.get_local_rank("tp"), HIDDEN // 2
    own = slice(rank * half, rank * half + half)
    net.up.weight = nn.Parameter(net.up.weight.detach()[own].clone())
    net.up.bias = nn.Parameter(net.up.bias.detach()[own].clone())
    net.down.weight = nn.Parameter(net.down.weight.detach()[:, own].clone())
    on_tp = {"up.weight": types.S(0), "up.bias": types.S(0), "down.weight": types.S(1)}
    if not by_sequence:
        on_tp["head.weight"] = types.I
    annotate(net, lambda name: {dp: types.R, tp: on_tp.get(name, types.R)})
    net.tp, net.by_sequence = mesh.get_group("tp"), by_sequence
    return dp, tp


def part_of_input(x: torch.Tensor, mesh: DeviceMesh, by_sequence: bool) -> torch.Tensor:
    x = x[mesh.get_local_rank(mesh.mesh_dim_names[0])]
    return x.chunk(2, 1)[mesh.get_local_rank("tp")].clone() if by_sequence else x


MODES = ("plain", "policy", "accumulated", "offloaded", "recomputed", "hybrid")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("system", ["own", "drop_in", FSDP2])
@pytest.mark.parametrize("by_sequence", [False, True], ids=["tensor", "sequence"])
@distributed(world_size=4)
def test_tensor_and_sequence_parallelism(by_sequence, system, mode):
    mesh, dims = lasting_mesh(("dp_shard", "tp")), DataParallelMeshDims(shard="dp_shard")
    if mode == "hybrid":
        mesh = lasting_mesh(("dp_replicate", "dp_shard", "tp"), (2, 1, 2))
        dims = DataParallelMeshDims(shard="dp_shard", replicate="dp_replicate")
    truth, net = build(), build()
    net.recomputes = mode == "recomputed"
    dp, tp = split(net, mesh, by_sequence)
    options: dict[str, Any] = {}
    if mode == "policy":
        policies = fsdp if system == "fsdp2" else fsdp_compose
        options["mp_policy"] = policies.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    if mode == "offloaded":
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
    shard(system, [net.up, net], mesh, dims, **options)
    for i in range(2):  # the second one is added to the first
        is_reduced = mode != "accumulated" or i == 1
        if system == "own":
            set_requires_gradient_sync(net, is_reduced)
        else:
            net.set_requires_gradient_sync(is_reduced)
        of_x = {dp: types.V, tp: types.V if by_sequence else types.R}
        backward(net, part_of_input(inputs(2), mesh, by_sequence), of_x)
        true_gradients(truth, 2)
    assert_same_gradients(net, truth)
    assert net.seen["up.weight"] == (nn.Parameter, {dp: types.R, tp: types.V})
    assert net.seen["embed.weight"] == (nn.Parameter, {dp: types.R, tp: types.R})
    assert net.seen["head.weight"][1][tp] is (types.R if by_sequence else types.I)
    if system != "fsdp2":
        assert net.up.weight.shape == (HIDDEN, DIM) and net.up.weight.placements[-1] == Shard(0)


@distributed(world_size=4)
def test_functional_mode_refuses_what_is_annotated_beside_data_parallelism():
    mesh, net = lasting_mesh(("dp_shard", "tp")), build()
    split(net, mesh, False)
    shard("own", [net], mesh, DataParallelMeshDims(shard="dp_shard"))
    set_functional_mode(net)
    with pytest.raises(NotImplementedError, match="annotated by spmd_types on other dimensions, too"):
        net(part_of_input(inputs(2), mesh, False))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, DIM, DIM) / DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # as many rows of tokens as there are experts here
        return torch.einsum("etd,edo->eto", x, self.weight)


class Block(nn.Module):
    """A layer, then four experts: on one rank, or two on each rank of ``ep``."""

    def __init__(self, ep: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.experts, self.ep = nn.Linear(DIM, DIM), Experts(), ep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(x))
        if self.ep is None:
            return self.experts(h)
        rows = h.shape[1]
        mine = self.exchange(h.reshape(-1, DIM)).view(2, 2, rows, DIM).transpose(0, 1).reshape(2, 2 * rows, DIM)
        out = self.experts(mine).view(2, 2, rows, DIM).transpose(0, 1).reshape(-1, DIM)
        return self.exchange(out).view(4, rows, DIM)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [len(x) // 2] * 2
        return types.all_to_all(x, self.ep, src=types.V, dst=types.V, output_split_sizes=sizes, input_split_sizes=sizes)


NAMES_MESH = pytest.mark.skipif(TORCH < (2, 15), reason="ShardPlacementResult of torch < 2.15 names no whole mesh")


@pytest.mark.parametrize("system", ["own", pytest.param("drop_in", marks=NAMES_MESH), FSDP2])
@distributed(world_size=4)
def test_experts_on_a_mesh_of_their_own(system):
    dense, sparse = lasting_mesh(("dp_shard",), (4,)), lasting_mesh(("efsdp", "ep"))
    truth, net = Block().double(), Block(sparse.get_group("ep")).double()
    own = net.experts.weight.detach()[2 * sparse.get_local_rank("ep") :][:2].clone()
    net.experts.weight = nn.Parameter(own)
    types.assert_type(net.experts.weight, {axis(sparse, "efsdp"): types.R, axis(sparse, "ep"): types.S(0)})
    annotate(net.layer, lambda name: {axis(dense, "dp_shard"): types.R})
    dims, weight = DataParallelMeshDims(shard="dp_shard"), net.experts.weight
    of_experts = DataParallelMeshDims(shard="efsdp")
    if system == "own":
        shard(system, [net.experts], sparse, of_experts)
        shard(system, [net], dense, dims)
        set_gradient_divide_factor(net, 1.0)
    else:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

        infos = _get_mesh_info(dense, dims), _get_mesh_info(sparse, of_experts)
        homes = {param: ShardPlacementResult(Shard(0), infos[param is weight]) for param in net.parameters()}
        shard(system, [net], dense, dims, shard_placement_fn=homes.__getitem__)
    for module in (net, net.experts):
        if hasattr(module, "set_gradient_divide_factor"):  # as torchtitan does: each rank's loss is a term
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    x = inputs(4).reshape(4, 4, 2, DIM)
    net(x[dist.get_rank()]).square().sum().backward()
    for item in x:
        truth(item).square().sum().backward()
    assert_same_gradients(net, truth)


# ---- Checkpoints


@pytest.mark.parametrize("system", ["own", "drop_in"])
@distributed(world_size=4)
def test_checkpoints_are_those_of_the_model_without_annotations(system, tmp_path):
    mesh = lasting_mesh(("dp_shard", "tp"))
    truth = build()
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    split_net, plain = build(), build()
    axes = split(split_net, mesh, False)
    shard(system, [split_net.up, split_net], mesh, DataParallelMeshDims(shard="dp_shard"))
    fsdp_compose.fully_shard(plain)
    states = []
    for i, net in enumerate((split_net, plain)):
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        x = part_of_input(inputs(2), mesh, False)
        for _ in range(2):
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        with summon_full_params(net):
            for name, param in net.named_parameters():
                torch.testing.assert_close(param.detach(), full[name], rtol=0, atol=0)
        dcp.save(dict(zip("mo", get_state_dict(net, optimizer), strict=True)), checkpoint_id=f"{folder[0]}/{i}")
        metadata = dcp.FileSystemReader(f"{folder[0]}/{i}").read_metadata().state_dict_metadata
        states.append((net, optimizer, full, {name: getattr(item, "size", None) for name, item in metadata.items()}))
    assert states[0][3] == states[1][3] and len(states[0][3]) > len([*truth.parameters()])
    for name, value in states[0][2].items():
        torch.testing.assert_close(value, states[1][2][name], rtol=0, atol=1e-12)
        assert not torch.equal(value, truth.state_dict()[name])
    for (net, optimizer, full, _), i in ((states[0], 1), (states[1], 0)):  # each loads what the other has saved
        with torch.no_grad():
            for param in net.parameters():
                param.zero_()
        model, state = get_state_dict(net, optimizer)
        saved = {"m": model, "o": state}
        dcp.load(saved, checkpoint_id=f"{folder[0]}/{i}")
        set_state_dict(net, optimizer, model_state_dict=saved["m"], optim_state_dict=saved["o"])
        for name, param in net.named_parameters():
            torch.testing.assert_close(param.detach().full_tensor(), full[name], rtol=0, atol=1e-12)
    split_net.seen.clear()
    split_net(part_of_input(inputs(2), mesh, False))
    assert split_net.seen["up.weight"][1] == {axes[0]: types.R, axes[1]: types.V}


@pytest.mark.parametrize("is_split", [False, True], ids=["1-D", "tensor"])
@distributed(world_size=4)
def test_a_model_on_the_meta_device_keeps_its_types(is_split):
    mesh = lasting_mesh(("dp_shard", "tp")) if is_split else lasting_mesh(("dp_shard",), (4,))
    truth, axes = build(), (axis(mesh, "dp_shard"),)
    with torch.device("meta"):
        net = Net().double()
        if is_split:
            axes = split(net, mesh, False)
        else:
            annotate(net, lambda name: {axes[0]: types.R})
    shard("drop_in", [net.up, net], mesh, DataParallelMeshDims(shard="dp_shard"))
    net.to_empty(device="cpu")
    whole_values = StateDictOptions(full_state_dict=True)
    set_model_state_dict(net, truth.state_dict(), options=whole_values)
    x = inputs(4)[dist.get_rank() if not is_split else mesh.get_local_rank("dp_shard")]
    torch.testing.assert_close(net(x), truth(x), rtol=0, atol=1e-12)
    assert net.seen["norm.weight"] == (nn.Parameter, dict.fromkeys(axes, types.R))
    for name, value in get_model_state_dict(net, options=whole_values).items():
        assert torch.equal(value, truth.state_dict()[name]), name


# ---- What cannot be sharded

REFUSED: dict[str, tuple[Callable[[Any, Any], Types], str]] = {
    "S over data": (
        lambda dp, tp: {dp: types.S(0), tp: types.R},
        r"0.weight .* as S\(0\) on dp_shard, which is data-parallel: annotate it as R there",
    ),
    "I over data": (
        lambda dp, tp: {dp: types.I, tp: types.R},
        "0.weight .* as I on dp_shard, which is data-parallel: annotate it as R there",
    ),
    "V": (lambda dp, tp: {dp: types.R, tp: types.V}, r"0.weight .* as V on tp.*annotate it as S\(i\)"),
    "P": (lambda dp, tp: {dp: types.R, tp: types.P}, r"0.weight .* as P on tp.*annotate it as S\(i\)"),
}


@pytest.mark.parametrize("system", ["own", "drop_in"])
@pytest.mark.parametrize("why", REFUSED)
def test_a_type_that_cannot_be_sharded_is_refused_by_name(why, system):
    make, error = REFUSED[why]
    with fake_process_group(world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        net = nn.Sequential(nn.Linear(4, 4))
        types.assert_type(net[0].weight, make(axis(mesh, "dp_shard"), axis(mesh, "tp")))
        types.assert_type(net[0].bias, {axis(mesh, "dp_shard"): types.R, axis(mesh, "tp"): types.R})
        before = dict(net.named_parameters())
        with pytest.raises(ValueError, match=error):
            shard(system, [net], mesh, DataParallelMeshDims(shard="dp_shard"))
        assert get_state(net) is None and dict(net.named_parameters()) == before


def test_what_an_annotation_leaves_out_or_has_too_much_is_refused_by_name():
    with fake_process_group(world_size=8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
        dp, ep, tp = (axis(mesh, name) for name in ("dp_shard", "ep", "tp"))
        dims = DataParallelMeshDims(shard="dp_shard")

        def refuse(system: str, error: str, **annotations: Any) -> None:
            net = nn.Linear(4, 4)
            for name, given in annotations.items():
                types.assert_type(getattr(net, name), *given)
            with pytest.raises(ValueError, match=error):
                shard(system, [net], mesh, dims)
            assert get_state(net) is None

        refuse(
            "drop_in",
            "weight is annotated by spmd_types, but not on tp of the same mesh",
            weight=[{dp: types.R, ep: types.S(0)}],
            bias=[{dp: types.R}],
        )
        refuse(
            "own", "bias is annotated .* but not on ep, as weight of the same group is",
            weight=[{dp: types.R, ep: types.S(0)}], bias=[{dp: types.R}],
        )  # fmt: skip
        refuse("drop_in", "bias is not a DTensor", weight=[{dp: types.R, ep: types.R, tp: types.R}])
        both = types.MeshAxis.of(mesh["ep", "tp"]._flatten().get_group())
        refuse("own", "which is no dimension of .*dp_mesh_dims", weight=[{both: types.R}])
        order = {dp: types.R}, types.PartitionSpec((tp, ep), None)
        refuse("own", "in another order than that of", weight=order, bias=[{dp: types.R}])
        with pytest.raises(
            ValueError, match=r"weight is annotated by spmd_types as S\(0\) on .*, which is no dimension of"
        ):
            net = nn.Linear(4, 4, bias=False)
            types.assert_type(net.weight, {dp: types.R, tp: types.S(0)})
            replicate(net, mesh=mesh["dp_shard"])


@distributed(world_size=4)
def test_a_parameter_split_over_two_dimensions():
    mesh = lasting_mesh(("dp_shard", "ep", "tp"), (1, 2, 2))
    ep, tp = axis(mesh, "ep"), axis(mesh, "tp")
    torch.manual_seed(0)
    weight = torch.randn(8, 3, dtype=torch.float64)
    net = nn.Linear(3, 2, bias=False)
    net.weight = nn.Parameter(weight.chunk(4)[dist.get_rank()].clone())
    types.assert_type(net.weight, {}, types.PartitionSpec((ep, tp), None))
    fsdp_compose.fully_shard(net, mesh=mesh["dp_shard"])
    assert [*net.weight.placements[1:]] == [Shard(0), Shard(0)]
    assert torch.equal(net.weight.full_tensor(), weight)


@distributed(world_size=4)
def test_an_uneven_split_is_refused_at_the_first_forward():
    mesh = lasting_mesh(("dp_shard", "tp"))
    net = nn.Linear(3, 2, bias=False)
    net.weight = nn.Parameter(torch.randn(3 - mesh.get_local_rank("tp"), 3))
    types.assert_type(net.weight, {axis(mesh, "dp_shard"): types.R, axis(mesh, "tp"): types.S(0)})
    fsdp_compose.fully_shard(net, mesh=mesh["dp_shard"])
    with pytest.raises(RuntimeError, match="weight"):
        net(torch.randn(2, 3))


# ---- Nobody else pays

_STEP = """
import spmd_types, torch, null_process_group
null_process_group.init(rank=3, world_size=64)
from fsdp_compose import fully_shard

model = fully_shard(torch.nn.Linear(8, 8))
model(torch.randn(2, 8)).sum().backward()
print(json.dumps(loaded()))
"""


def test_a_model_without_annotations_loads_nothing_for_them():
    found = output_of(_STEP)
    assert any("default_mode" in file for file in found)
    assert not [file for file in found if "annotations" in file or "unchecked" in file or "tensor_parallel" in file]


# ---- An audit: the collectives of a step, by the rules of spmd_types, on simulated ranks


class Audited(TransportWrapper):
    """Does each collective with a typed tensor for each parameter too, so that spmd_types checks what goes in and says
    what comes out. ``shown``: the types of parameters; ``gradients``: those of their gradients."""

    def __init__(self, inner: Transport, shown: dict[str, Types], gradients: dict[str, Types]) -> None:
        super().__init__(inner)
        self.name, self.shown, self.gradients = inner.name, shown, gradients

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        self.follow(self.shown, label, types.all_gather, types.S(0), types.R)
        return super().all_gather(whole, shard, label)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        self.follow(self.gradients, label, types.reduce_scatter, types.P, types.S(0))
        return super().reduce_scatter(shard, whole, is_average, label)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        self.follow(self.gradients, label, types.all_reduce, types.P, types.I)
        return super().all_reduce(tensor, is_average, label)

    def follow(self, known: dict[str, Types], label: Label, collective: Any, src: Any, dst: Any) -> None:
        for fqn in map(label.names, label._fqns):
            tensor = types.assert_type(torch.zeros(4), known[fqn])
            with checked(known[fqn]):
                known[fqn] = types.get_local_type(collective(tensor, self.group, src=src, dst=dst))


def audit(by_sequence: bool) -> None:
    with fake_process_group(world_size=8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        dp, sharded, tp = (axis(mesh, name) for name in mesh.mesh_dim_names)
        net = build()
        split(net, mesh, by_sequence)
        annotated = {name: dict(types.get_local_type(param)) for name, param in net.named_parameters()}
        dims = DataParallelMeshDims(shard="dp_shard", replicate="dp_replicate")
        shard("drop_in", [net.up, net], mesh, dims)
        expected = {name: {sharded: types.R, **given} for name, given in annotated.items()}
        shown = {name: {**given, sharded: types.V} for name, given in expected.items()}
        gradients = {name: {on: kind.backward_type() for on, kind in given.items()} for name, given in expected.items()}
        for state in states_of(net):
            for handle in state._handles:
                handle.change_transports(lambda transport, role: Audited(transport, shown, gradients))
        loss = net(inputs(1, torch.float64)[0].chunk(2, 1)[0] if by_sequence else inputs(1)[0]).square().sum()
        for name, given in shown.items():
            assert given == expected[name] == net.seen[name][1], name
            shown[name] = {**given, sharded: types.V}  # it is freed, and gathered again in backward
        loss.backward()
        for name, given in gradients.items():
            on_tp = types.V if annotated[name][tp] is types.V else types.I  # each rank's part, or the same on all
            assert given == {dp: types.I, sharded: types.V, tp: on_tp}, name


@pytest.mark.parametrize("by_sequence", [False, True], ids=["tensor", "sequence"])
def test_the_collectives_of_a_step_are_what_types_ask_for(by_sequence, monkeypatch):
    audit(by_sequence)
    monkeypatch.setattr(TensorParallel, "_summed_dims", lambda *_: [])
    with pytest.raises(AssertionError, match="embed.weight"):  # a sum over tp is missing
        audit(by_sequence)
