"""Tensor and sequence parallelism: ``parallelize_module()`` first, then ``fully_shard()`` on the rest of the mesh."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.profiler import ProfilerActivity, profile

import fsdp_compose
from fsdp_compose import RaggedDTensor, clip_grad_norm_, fully_shard, record_collectives
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fsdp_compose.core.comm.store import DEBUG_ENV, TIMEOUT_ENV, last_of_every_rank
from fsdp_compose.optim import Muon
from tests.checkpoint.states import assert_equal, shared_folder, whole
from tests.harness import distributed, environment, lasting_mesh
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import assert_same_parameters

TORCHS = torch.nn.utils.clip_grad_norm_


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return lasting_mesh(names, sizes)


def tensor_plan() -> dict[str, Any]:
    return {
        "qkv": ColwiseParallel(output_layouts=Replicate()),
        "proj": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }


def sequence_plan() -> dict[str, Any]:
    return {
        "norm1": SequenceParallel(),
        "qkv": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "proj": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }


def parallelize(model: GPT, tp: DeviceMesh, kind: str) -> GPT:
    """``kind``: "tensor"; "vocabulary" (of 29 words) as well; "some", with every other block plain; "sequence"; or
    "loss", whose logits stay sharded."""
    for i, block in enumerate(model.blocks):
        if kind != "some" or i % 2 == 0:
            parallelize_module(block, tp, sequence_plan() if kind in ("sequence", "loss") else tensor_plan())
    if kind == "vocabulary":
        tokens, logits = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, tp, {"tokens": tokens, "head": logits})
    if kind in ("sequence", "loss"):
        is_whole = kind == "sequence"
        logits = ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Replicate() if is_whole else Shard(-1),
            use_local_output=is_whole,
        )
        tokens = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, tp, {"tokens": tokens, "norm": SequenceParallel(), "head": logits})
        entry = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        parallelize_module(model.blocks[0], tp, entry)
    return model


def reference(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**options)


def sharded_gpt(mesh: DeviceMesh, kind: str = "tensor", data: Any = "dp", **options: Any) -> GPT:
    return shard_layers(parallelize(reference(**options), mesh["tp"], kind), mesh=mesh[data])


def share_of(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """The part of a global batch that a rank of a data-parallel mesh has."""
    place = 0
    for dim, size in enumerate(mesh.shape):
        place = place * size + mesh.get_local_rank(dim)
    return lambda batch: batch.chunk(mesh.size())[place]


def train(
    model: nn.Module,
    share: Callable[[torch.Tensor], torch.Tensor] = lambda batch: batch,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    clip: Callable[..., Any] | None = None,
    steps: int = 3,
    microbatches: int = 1,
    is_loss_parallel: bool = False,
) -> list[float]:
    """The norms of the gradients; ``clip`` is given the parameters of the optimizer."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    norms = []
    for batch in batches(steps):
        for i, part in enumerate(batch.chunk(microbatches)):
            is_last = i + 1 == microbatches
            with nullcontext() if is_last or fully_shard.state(model) is None else fsdp_compose.no_sync(model):
                with loss_parallel() if is_loss_parallel else nullcontext():
                    (gpt_loss(model, share(part)) / microbatches).backward()
        if clip is not None:
            norm = clip(params, 0.5)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


# ---- training


@distributed(world_size=4)
@pytest.mark.parametrize("kind", ["tensor", "some", "sequence", "loss"])
def test_trains_and_clips_as_one_process(kind):
    mesh = mesh_of(2, 2)
    model, expected = sharded_gpt(mesh, kind, layers=2), reference(layers=2)
    weight = model.blocks[0].up.weight
    assert type(weight) is RaggedDTensor and weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert weight.placements[1] == Shard(0) and weight.shape == (64, 16)
    for block in model.blocks:
        (handle,) = fully_shard.state(block)._handles  # of plain parameters and DTensors together
        assert handle.layout.padding_fraction < 0.1
    clip = TORCHS if kind == "some" else clip_grad_norm_
    norms = train(model, share_of(mesh["dp"]), clip=clip, is_loss_parallel=kind == "loss")
    torch.testing.assert_close(norms, train(expected, clip=TORCHS), rtol=1e-5, atol=1e-6)
    assert_same_parameters(model, expected)
    # What to_local() gives of an output is hooked: it is no view of a parameter.
    assert not any(fully_shard.state(part).persistent.is_unhooked for part in (model, *model.blocks))


class Uneven(nn.Module):
    """Its hidden size divides by nothing; some ranks have more than others, or all."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, hidden), nn.LayerNorm(6), nn.Linear(hidden, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x).tanh()))


UNEVEN_PLAN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def uneven(hidden: int = 7) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Uneven(hidden), Uneven(hidden))


def parallel_uneven(mesh: DeviceMesh, data: Any = "dp", hidden: int = 7) -> nn.Module:
    model = uneven(hidden)
    for layer in model:
        parallelize_module(layer, mesh["tp"], UNEVEN_PLAN)
        fully_shard(layer, mesh=mesh[data])
    return fully_shard(model, mesh=mesh[data])


def steps_of(
    model: nn.Module,
    place: int,
    num: int,
    clip: Callable[..., Any],
    order: float = 2.0,
    flat: list[nn.Parameter] | None = None,
) -> list[float]:
    """Norms; ``flat``: in the place of the model's parameters."""
    params = [*model.parameters()] if flat is None else flat
    optimizer, norms = torch.optim.AdamW(params, lr=0.1, eps=1e-3), []
    for i in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
        model(x.chunk(num)[place]).square().mean().backward()
        norm = clip(params, 0.3, order)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@distributed(world_size=4)
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 1)], ids=str)
def test_uneven_tensor_parallelism_and_replicas_train_and_clip_as_one_process(sizes):
    mesh = mesh_of(*sizes, names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]
    place = data.get_local_rank(0) * data.size(1) + data.get_local_rank(1)
    hidden = 3 if mesh.size(2) == 4 else 7  # of which the last of four ranks has nothing
    for order, clip in ((2.0, clip_grad_norm_), (2.0, TORCHS), (float("inf"), clip_grad_norm_), (1.0, clip_grad_norm_)):
        model, expected = parallel_uneven(mesh, ("replicate", "shard"), hidden), uneven(hidden)
        norms = steps_of(model, place, data.size(), clip, order)
        torch.testing.assert_close(norms, steps_of(expected, 0, 1, TORCHS, order), rtol=1e-5, atol=1e-6)
        assert_same_parameters(model, expected)


@distributed(world_size=4)
def test_a_part_of_the_ranks_trains_and_is_saved_by_itself():
    mesh = mesh_of(2, 1, 2, names=("pp", "dp", "tp"))
    stage = mesh.get_local_rank("pp")
    model, expected = sharded_gpt(mesh["dp", "tp"]), reference()
    assert sorted(dist.get_process_group_ranks(fully_shard.state(model.blocks[0]).mesh.peers)) == [
        2 * stage,
        2 * stage + 1,
    ]
    for _ in range(1 + stage):  # each stage in its own time
        train(model, clip=clip_grad_norm_)
        train(expected, clip=TORCHS)
    assert_same_parameters(model, expected)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(state) == (mesh.get_local_rank("tp") == 0)
    with fsdp_compose.summon_full_params(model):
        for (fqn, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param, other, rtol=0, atol=1e-5)
            assert not state or torch.equal(state[fqn], param)


@distributed(world_size=4)
def test_terms_of_gradients_are_summed_in_one_all_reduce_for_each_group():
    mesh = mesh_of(2, 2)
    model = sharded_gpt(mesh, "sequence")
    loss = gpt_loss(model, share_of(mesh["dp"])(next(batches(1))))
    with record_collectives(model) as lines:
        loss.backward()
    # Weight and bias of both norms of a block, and of that of the root.
    blocks = [f"all-reduce blocks.{i}.norm1.weight and 3 more (64 x float32 among 2 ranks)" for i in (2, 1, 0)]
    sums = [*blocks, "all-reduce norm.weight and 1 more (32 x float32 among 2 ranks)"]
    assert [line for line in lines if line.startswith("all-reduce")] == sums
    for line in sums:  # it is there before what it is a part of is reduced
        place = lines.index(line)
        assert lines[place + 1] == "  wait for " + line.partition(" (")[0]
    assert not any(line.startswith("reduce-scatter") for line in lines[: lines.index(sums[0])])
    assert any(line.startswith("reduce-scatter") for line in lines[lines.index(sums[-1]) :])


@distributed(world_size=4)
def test_a_profile_names_the_sums_of_terms_by_group():
    mesh = mesh_of(2, 2)
    model = sharded_gpt(mesh, "sequence")
    share, batch = share_of(mesh["dp"]), next(batches(1))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        gpt_loss(model, share(batch)).backward()
    events = sorted(profiler.events(), key=lambda item: item.time_range.start)
    prefix = "fsdp_compose::all_reduce over tensor-parallel ranks of "
    seen = [item.name.removeprefix(prefix) for item in events if item.name.startswith(prefix)]
    assert seen == ["blocks.2", "blocks.1", "blocks.0", "(root)"]


@distributed(world_size=4)
@pytest.mark.parametrize("is_synced", [True, False])
def test_tensor_parallel_ranks_that_sum_other_terms_are_told_before_they_do(is_synced):
    """With ``FSDP_COMPOSE_DEBUG=1``; and then training goes on."""
    with environment(**{DEBUG_ENV: "1", TIMEOUT_ENV: "20"}):
        mesh = mesh_of(2, 2)
        model, share = sharded_gpt(mesh, "sequence"), share_of(mesh["dp"])
        expected = reference()
        train(model, share)
        train(expected)
        (handle,) = fully_shard.state(model.blocks[1])._handles
        lost = handle.unsharded.params[handle.fqns.index("norm1.bias")]
        has_lost = mesh.get_local_rank("tp") == 1
        hook = lost.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None) if has_lost else None)
        loss = gpt_loss(model, share(next(batches(1))))
        ranks = r"\[0, 1\]" if is_synced or mesh.get_local_rank("dp") == 0 else r"\[2, 3\]"
        match = (
            rf"summed over the tensor-parallel ranks {ranks}, but of different parameters, .*: of "
            r"\['blocks\.1\.norm1\.weight', 'blocks\.1\.norm1\.bias', .* on one rank, of \['blocks\.1\.norm1\.weight', "
            r"'blocks\.1\.norm2"
        )
        with nullcontext() if is_synced else fsdp_compose.no_sync(model), pytest.raises(RuntimeError, match=match):
            loss.backward()
        hook.remove()
        with pytest.warns(UserWarning, match="discarded"):
            train(model, share)
        train(expected)
        assert_same_parameters(model, expected)


@distributed(world_size=4)
def test_errors_about_ranks_tell_of_sums_of_terms():
    with environment(**{DEBUG_ENV: "1"}):
        mesh = mesh_of(2, 2)
        model = sharded_gpt(mesh, "sequence")
        with fsdp_compose.no_sync(model):  # so that nothing comes after it
            gpt_loss(model, share_of(mesh["dp"])(next(batches(1)))).backward()
            dist.barrier()
            text = last_of_every_rank(dist.group.WORLD)
    noted = "all-reduce over tensor-parallel ranks of norm.weight and 1 more"
    assert [line.partition(": ")[2] for line in text.splitlines()[2:]] == [noted] * 4


@distributed(world_size=4)
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_accumulation_checkpointing_and_frozen_parameters(use_reentrant):
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model, expected = GPT(use_reentrant=use_reentrant), reference()
    for item in (model, expected):
        item.blocks[1].up.weight.requires_grad_(False)
        item.blocks[1].norm1.bias.requires_grad_(False)
    shard_layers(parallelize(model, mesh["tp"], "tensor"), mesh=mesh["dp"])
    assert not model.blocks[1].up.weight.requires_grad
    train(model, share_of(mesh["dp"]), microbatches=2)
    train(expected, microbatches=2)
    assert_same_parameters(model, expected)


@distributed(world_size=4)
def test_mixed_precision_computes_and_reduces_in_its_dtypes():
    mesh = mesh_of(2, 2)
    policy = fsdp_compose.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = shard_layers(parallelize(GPT(), mesh["tp"], "tensor"), mesh=mesh["dp"], mp_policy=policy)
    seen = []
    model.blocks[0].up.register_forward_hook(lambda module, _args, _output: seen.append(module.weight))
    train(model, share_of(mesh["dp"]), steps=1)
    assert isinstance(seen[0], DTensor) and seen[0].dtype == torch.bfloat16 and seen[0].placements == (Shard(0),)
    assert model.blocks[0].up.weight.dtype == torch.float32
    expected = reference()
    train(expected, steps=1)
    assert_same_parameters(model, expected, tolerance=5e-3)


@distributed(world_size=4)
def test_tied_weights_move_to_one_group_and_train_as_one_process():
    mesh = mesh_of(2, 2)
    model, expected = reference(tie=True), reference(tie=True)
    tp = mesh["tp"]
    parallelize_module(
        model,
        tp,
        {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
    )
    model.head.weight = model.tokens.weight
    for part in (model.tokens, model.head):
        fully_shard(part, mesh=mesh["dp"])
    shard_layers(parallelize(model, tp, "tensor"), mesh=mesh["dp"])
    train(model, share_of(mesh["dp"]))
    train(expected)
    assert model.head.weight is model.tokens.weight
    assert_same_parameters(model, expected)


# ---- what modules and users see


@distributed(world_size=4)
def test_an_edit_of_a_dtensor_inside_forward_raises():
    mesh = mesh_of(2, 2)
    model, x = parallel_uneven(mesh), torch.ones(2, 6)
    model(x)

    def edit(module: nn.Module, _args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    hook = model[0].up.register_forward_pre_hook(edit)
    with pytest.raises(RuntimeError, match=r"modified in place inside forward.*0\.up\.weight"):
        model(x)
    hook.remove()
    model(x).sum().backward()

    def write(module: nn.Module, _args: Any) -> None:
        module.weight.to_local().data.mul_(2)

    hook = model[0].up.register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match=r"through \.data.*0\.up\.weight"):
        for _ in range(8):
            model(x)
    hook.remove()
    model(x)


@distributed(world_size=4)
def test_a_parameter_that_a_loss_uses_whole_gets_its_gradient():
    mesh = mesh_of(2, 2)
    model, expected = parallel_uneven(mesh), uneven()
    place, full = mesh.get_local_rank("dp"), torch.randn(4, 6, generator=torch.Generator().manual_seed(5))

    def loss(item: nn.Module, x: torch.Tensor, whole: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        y = item(x)
        return (y @ whole(item[0].up.weight).t()).square().mean() + whole(item[1].down.weight).square().sum()

    for functional in (False, True):
        fsdp_compose.set_functional_mode(model, functional)
        model.zero_grad()
        expected.zero_grad()
        loss(model, full.chunk(2)[place], lambda p: p.full_tensor()).backward()
        loss(expected, full, lambda p: p).backward()
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-6)


@distributed(world_size=4)
def test_functional_mode_differentiates_twice():
    mesh = mesh_of(2, 2)
    model, expected = parallel_uneven(mesh).double(), uneven().double()
    full = torch.randn(4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    fsdp_compose.set_functional_mode(model)
    grads = []
    for item, x in ((model, full.chunk(2)[mesh.get_local_rank("dp")]), (expected, full)):
        params = [*item.parameters()]
        first = torch.autograd.grad(item(x).square().mean(), params, create_graph=True)
        sum(
            grad.square().sum() if not isinstance(grad, DTensor) else grad.full_tensor().square().sum()
            for grad in first
        ).backward()
        grads.append([param.grad for param in params])
    for grad, other in zip(*grads, strict=True):  # (torch's own, of a layer norm, is a few 1e-6 off without us too)
        torch.testing.assert_close(grad.full_tensor(), other, rtol=1e-4, atol=1e-5)


@distributed(world_size=4)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_summoned_parameters_are_whole_and_written_back(rank0_only):
    mesh = mesh_of(2, 2)
    model, expected = parallel_uneven(mesh), uneven()
    steps_of(model, mesh.get_local_rank("dp"), 2, clip_grad_norm_)
    steps_of(expected, 0, 1, TORCHS)
    model(torch.ones(2, 6)).sum().backward()
    grads = [param.grad.full_tensor() for param in model.parameters()]
    with fsdp_compose.summon_full_params(model, rank0_only=rank0_only, writeback=not rank0_only, with_grads=True):
        is_whole = [type(param) is nn.Parameter for param in model.parameters()]
        assert all(is_whole) if dist.get_rank() == 0 or not rank0_only else not any(is_whole)
        if all(is_whole):
            for param, other, grad in zip(model.parameters(), expected.parameters(), grads, strict=True):
                torch.testing.assert_close(param, other, rtol=0, atol=1e-5)
                torch.testing.assert_close(param.grad, grad)
        if not rank0_only:
            with torch.no_grad():
                for item in (model, expected):
                    for i, param in enumerate(item.parameters()):
                        param.copy_(torch.arange(param.numel()).view(param.shape) / 100 + i)
    assert_same_parameters(model, expected)


@distributed(world_size=4)
def test_copies_meta_models_and_optimizers_built_before():
    mesh = mesh_of(2, 2)
    model, expected = reference(), reference()
    parallelize(model, mesh["tp"], "tensor")
    optimizer, theirs = (
        torch.optim.SGD(item.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for item in (model, expected)
    )
    train(model, optimizer=optimizer, steps=1)
    train(expected, optimizer=theirs, steps=1)
    shard_layers(model, mesh=mesh["dp"])
    twin, their_twin = copy.deepcopy(model), copy.deepcopy(expected)
    share = share_of(mesh["dp"])
    train(twin, share)
    train(their_twin)
    train(model, share, optimizer)
    train(expected, optimizer=theirs)
    assert_same_parameters(model, expected)
    assert_same_parameters(twin, their_twin)
    with torch.device("meta"):
        blank = GPT()
    shard_layers(parallelize(blank, mesh["tp"], "tensor"), mesh=mesh["dp"])
    blank.to_empty(device="cpu")
    set_model_state_dict(blank, get_model_state_dict(model))
    train(blank, share)
    train(model, share)
    assert_same_parameters(blank, model, tolerance=0)


@distributed(world_size=4)
def test_flat_views_may_be_plain_tensors():
    mesh = mesh_of(2, 2)
    model, expected = sharded_gpt(mesh), reference()
    flat = fsdp_compose.flat_parameters(model, local=True)
    optimizer = torch.optim.SGD(flat, lr=0.1, momentum=0.9, weight_decay=0.01)
    norms = train(model, share_of(mesh["dp"]), optimizer, clip=clip_grad_norm_)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    torch.testing.assert_close(norms, train(expected, optimizer=theirs, clip=TORCHS), rtol=1e-5, atol=1e-6)
    assert_same_parameters(model, expected)
    ours, plain = (get_optimizer_state_dict(*item)["state"] for item in ((model, optimizer), (expected, theirs)))
    for fqn, state in plain.items():
        torch.testing.assert_close(whole(ours[fqn]["momentum_buffer"]), state["momentum_buffer"], rtol=0, atol=1e-5)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=True),
    "loop": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=False),
}


KINDS = ["tensor", "some", "vocabulary", "sequence", "hybrid"]
# Every two of a kind, an optimizer and a way to clip meet.
TOGETHER = [
    (kind, optimizer, ("ours", "torch")[(i + j) % 2])
    for i, kind in enumerate(KINDS)
    for j, optimizer in enumerate(OPTIMIZERS)
]


@distributed(world_size=4)
@pytest.mark.parametrize(("kind", "optimizer", "way"), TOGETHER)
def test_flat_views_train_and_are_clipped_as_one_process(kind, optimizer, way):
    clip = clip_grad_norm_ if way == "ours" else TORCHS
    is_hybrid = kind == "hybrid"
    mesh = mesh_of(2, 1, 2, names=("r", "s", "tp")) if is_hybrid else mesh_of(2, 2)
    data = ("r", "s") if is_hybrid else "dp"
    model = sharded_gpt(mesh, "tensor" if is_hybrid else kind, data, layers=2)
    expected = reference(layers=2)
    make = OPTIMIZERS[optimizer]
    ours, theirs = make(fsdp_compose.flat_parameters(model)), make(expected.parameters())
    norms = train(model, share_of(mesh[data]), ours, clip=clip, steps=2)
    torch.testing.assert_close(norms, train(expected, optimizer=theirs, clip=TORCHS, steps=2), rtol=1e-5, atol=1e-6)
    assert_same_parameters(model, expected)
    state, plain = (get_optimizer_state_dict(*item)["state"] for item in ((model, ours), (expected, theirs)))
    key = "momentum_buffer" if optimizer == "sgd" else "exp_avg_sq"
    for fqn, values in plain.items():
        torch.testing.assert_close(whole(state[fqn][key]), values[key], rtol=0, atol=1e-5)


@distributed(world_size=4)
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("clip", [clip_grad_norm_, TORCHS], ids=["ours", "torch"])
def test_flat_views_of_uneven_parts(clip, order):
    """The padding of the ranks that have less is zero, and counts for nothing."""
    mesh = mesh_of(2, 2)
    model, expected = parallel_uneven(mesh), uneven()
    norms = steps_of(model, mesh.get_local_rank("dp"), 2, clip, order, fsdp_compose.flat_parameters(model))
    torch.testing.assert_close(norms, steps_of(expected, 0, 1, TORCHS, order), rtol=1e-5, atol=1e-7)
    assert_same_parameters(model, expected)


@distributed(world_size=4)
def test_state_of_other_optimizers_loads_into_flat_views_of_what_is_cut():
    mesh = mesh_of(2, 2)
    share, make = share_of(mesh["dp"]), OPTIMIZERS["foreach"]
    first, second = sharded_gpt(mesh), sharded_gpt(mesh)
    optimizer, flat = make(first.parameters()), make(fsdp_compose.flat_parameters(second))
    train(first, share, optimizer)
    set_model_state_dict(second, get_model_state_dict(first))
    set_optimizer_state_dict(second, flat, get_optimizer_state_dict(first, optimizer))
    train(first, share, optimizer, clip=TORCHS)
    train(second, share, flat, clip=TORCHS)
    assert_same_parameters(second, first, tolerance=1e-6)


@distributed(world_size=4)
def test_gradient_scalers_unscale_flat_views_of_what_is_cut():
    """And an inf on one rank is one on all."""
    mesh = mesh_of(2, 2)
    model, expected = sharded_gpt(mesh), reference()
    flat, batch = fsdp_compose.flat_parameters(model), next(batches(1))
    optimizer, theirs = OPTIMIZERS["sgd"](flat), OPTIMIZERS["sgd"](expected.parameters())
    for is_broken in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(gpt_loss(model, share_of(mesh["dp"])(batch))).backward()
        if is_broken and dist.get_rank() == 3:
            cut = [item.grad.to_local() for item in flat if item.device_mesh.ndim == 2]
            next(local for local in cut if local.numel())[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (128.0 if is_broken else 256.0)
    gpt_loss(expected, batch).backward()
    theirs.step()
    assert_same_parameters(model, expected)


@distributed(world_size=4)
def test_flat_views_of_what_is_cut_are_tensors_on_both_meshes():
    mesh = mesh_of(2, 2)
    model = sharded_gpt(mesh, layers=1)
    flat = fsdp_compose.flat_parameters(model)
    assert flat == fsdp_compose.flat_parameters(model)
    places = [tuple(map(type, item.placements)) for item in flat]
    assert {*places} == {(fsdp_compose.RaggedShard,), (fsdp_compose.RaggedShard, Shard)}
    cut = [item for item in flat if item.device_mesh.ndim == 2]
    assert cut and all(isinstance(item, RaggedDTensor) and item.ndim == 1 for item in cut)
    (block,) = fully_shard.state(model.blocks[0])._handles
    parallel = [param for param in block.sharded_params if any(p.is_shard() for p in param.placements[1:])]
    for order in (1.0, 2.0, float("inf")):  # every element counts once, and padding for nothing
        norm = torch.linalg.vector_norm
        norms = [norm(torch.stack([whole(norm(item, order)) for item in items]), order) for items in (cut, parallel)]
        torch.testing.assert_close(*norms)
    elements = sum(int((whole(item) != 0).sum()) for item in cut)
    assert elements == sum(int((whole(item) != 0).sum()) for item in parallel)
    before = [whole(param).clone() for param in parallel]
    with torch.no_grad():
        cut[0].mul_(2)
    doubled = [torch.equal(whole(param), 2 * old) for param, old in zip(parallel, before, strict=True)]
    kept = [torch.equal(whole(param), old) for param, old in zip(parallel, before, strict=True)]
    assert doubled == [True, True, True, False, False, False] and kept == [not item for item in doubled]


# ---- checkpoints


def layouts() -> dict[str, Callable[[], tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]]:
    """Models of other weights than ``reference()``, in all layouts, with this rank's share of a batch."""

    def fresh() -> GPT:
        torch.manual_seed(9)
        return GPT(layers=1)

    def on(mesh: DeviceMesh, data: Any, is_parallel: bool) -> Any:
        model = parallelize(fresh(), mesh["tp"], "vocabulary") if is_parallel else fresh()
        return shard_layers(model, mesh=mesh[data]), share_of(mesh[data])

    return {
        "dp2tp2": lambda: on(mesh_of(2, 2), "dp", True),
        "dp1tp4": lambda: on(mesh_of(1, 4), "dp", True),
        "dp4": lambda: on(mesh_of(4, 1), "dp", False),
        "hsdp": lambda: on(mesh_of(2, 2, 1, names=("r", "s", "tp")), ("r", "s"), False),
        "plain": lambda: (fresh(), lambda batch: batch),
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    full = StateDictOptions(full_state_dict=True, **options)
    state = get_optimizer_state_dict(model, optimizer, options=full)
    return {"model": get_model_state_dict(model, options=full), "optimizer": state}


@distributed(world_size=4, timeout=120)
@pytest.mark.parametrize("source", ["dp2tp2", "dp1tp4", "dp4", "hsdp", "plain"])
def test_checkpoints_load_on_every_mesh(source):
    """Checkpoints of one layout load into each other one, also where tensor parallelism cuts parameters."""
    model, share = layouts()[source]()
    optimizer = adamw(model)
    train(model, share, optimizer)
    states = full_state(model, optimizer)
    only = full_state(model, optimizer, cpu_offload=True)
    assert bool(only["model"]) == (dist.get_rank() == 0)
    assert all(type(value) is torch.Tensor for value in states["model"].values())
    folder = shared_folder()
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=str(folder / "saved"))
    place = [*layouts()].index(source)
    for i, (name, build) in enumerate(layouts().items()):
        for k, how in enumerate(("dcp", "full", "broadcast")):
            # Every two of a source, a layout and a way meet, but for layouts without tensor parallelism.
            if "tp" not in source + name or ((place + i + k) % 3 if "tp" in source else (i + k) % 2):
                continue
            other, _ = build()
            theirs = adamw(other)
            if how == "dcp":
                state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, theirs)}
                dcp.load(state, checkpoint_id=str(folder / "saved"))
                options = StateDictOptions()
            elif how == "full":
                state, options = copy.deepcopy(states), StateDictOptions(full_state_dict=True)
            else:
                nothing: dict[str, Any] = {"model": {}, "optimizer": {}}
                state = copy.deepcopy(states) if dist.get_rank() == 0 else nothing
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(other, state["model"], options=options)
            set_optimizer_state_dict(other, theirs, state["optimizer"], options=options)
            assert_equal(full_state(other, theirs), states, f"{name}, {how}")


@distributed(world_size=4)
def test_checkpoints_are_those_of_fsdp2_and_tensor_parallelism():
    """Checkpoints of the model and the optimizer load in both directions."""
    from torch.distributed.checkpoint import state_dict as theirs
    from torch.distributed.fsdp import fully_shard as their_fully_shard

    mesh = mesh_of(2, 2)
    ours, share = layouts()["dp2tp2"]()
    optimizer = adamw(ours)
    train(ours, share, optimizer)
    fsdp2 = parallelize(GPT(layers=1), mesh["tp"], "vocabulary")
    for part in (*fsdp2.blocks, fsdp2):
        their_fully_shard(part, mesh=mesh["dp"])
    their_optimizer = adamw(fsdp2)
    folder = shared_folder()
    saved = {"model": get_model_state_dict(ours), "optimizer": get_optimizer_state_dict(ours, optimizer)}
    dcp.save(saved, checkpoint_id=str(folder / "ours"))
    state = dict(zip(saved, theirs.get_state_dict(fsdp2, their_optimizer), strict=True))
    dcp.load(state, checkpoint_id=str(folder / "ours"))
    arguments = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    theirs.set_state_dict(fsdp2, their_optimizer, **arguments)
    assert_equal([param.full_tensor() for param in fsdp2.parameters()], [p.full_tensor() for p in ours.parameters()])
    saved = dict(zip(saved, theirs.get_state_dict(fsdp2, their_optimizer), strict=True))
    dcp.save(saved, checkpoint_id=str(folder / "theirs"))
    again, _ = layouts()["dp2tp2"]()
    other = adamw(again)
    state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, other)}
    dcp.load(state, checkpoint_id=str(folder / "theirs"))
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, other, state["optimizer"])
    assert_equal(full_state(again, other), full_state(ours, optimizer))


# ---- parameters of which a tensor-parallel rank has several strides


class Packed(nn.Module):
    """Two projections in one parameter, of one layer or of stacked ones, of both of which each rank has a part."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*([3] * stacked), 8, 6))
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        gate, up = (x @ weight.transpose(-1, -2)).chunk(2, -1)
        return (gate * up).square()


def packed_model(stacked: bool, mesh: DeviceMesh | None = None, granule: Any = None) -> Packed:
    torch.manual_seed(0)
    model = Packed(stacked)
    if mesh is not None:
        placement = StridedShard(int(stacked), split_factor=2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [placement]))
        fully_shard(model, mesh=mesh["dp"], granularity=lambda *_: granule)
    return model


@distributed(world_size=4)
@pytest.mark.parametrize("granule", ["rows", "elements"])
@pytest.mark.parametrize("stacked", [False, True])
def test_parameters_cut_in_strides_train_and_are_saved_as_one_process_has_them(stacked, granule):
    mesh = mesh_of(2, 2)
    model, expected = packed_model(stacked, mesh, granule), packed_model(stacked)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    expected(x).mean(-2).sum().backward()
    model(x.chunk(2)[mesh.get_local_rank("dp")]).mean(-2).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected.weight.grad)
    norms = [clip_grad_norm_(item.parameters(), 0.5) for item in (model, expected)]
    torch.testing.assert_close(whole(norms[0]), norms[1])
    for item in (model, expected):
        torch.optim.SGD(item.parameters(), lr=0.1).step()
    assert_same_parameters(model, expected, tolerance=1e-6)
    folder = shared_folder()
    dcp.save(get_model_state_dict(model), checkpoint_id=str(folder / "saved"))
    read = {name: torch.zeros(param.shape) for name, param in expected.named_parameters()}
    dcp.load(read, checkpoint_id=str(folder / "saved"))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_equal(read, full)
    for source in ("parts", "full"):
        other = packed_model(stacked, mesh, granule)
        state = get_model_state_dict(other) if source == "parts" else full
        if source == "parts":
            dcp.load(state, checkpoint_id=str(folder / "saved"))
        set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=source == "full"))
        assert_equal([*map(whole, other.parameters())], [*map(whole, model.parameters())])
    with fsdp_compose.summon_full_params(model):
        assert torch.equal(whole(model.weight), full["weight"])


@distributed(world_size=4)
def test_what_strides_do_not_allow_is_refused():
    mesh = mesh_of(2, 2)
    model = nn.Linear(5, 6, bias=False)
    placement = StridedShard(0, split_factor=2)
    placed = DTensor.from_local(
        torch.zeros(3, 5), mesh["tp"], [placement], run_check=False, shape=torch.Size((6, 5)), stride=(5, 1)
    )
    model.weight = nn.Parameter(placed)
    with pytest.raises(ValueError, match=r"weight is already a DTensor.*dimension 0, of size 6, .* 4 strides"):
        fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="each rank has several strides"):
        packed = packed_model(stacked=False, mesh=mesh)
        packed(torch.ones(4, 6)).sum().backward()
        Muon([packed.weight], lr=0.1).step()


# ---- errors


@distributed(world_size=4)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_an_interrupted_iteration_is_recovered_from_by_all_ranks(debug):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_ENV, debug)
        mesh = mesh_of(2, 2)
        model, expected = sharded_gpt(mesh), reference()
        share = share_of(mesh["dp"])
        train(model, share, steps=1)
        train(expected, steps=1)

        def fail(*_: Any) -> None:
            raise ArithmeticError

        hook = model.blocks[1].up.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            gpt_loss(model, share(next(batches(1))))
        hook.remove()
        with pytest.warns(UserWarning, match="was interrupted"):
            train(model, share)
        train(expected)
        assert_same_parameters(model, expected)


@distributed(world_size=4)
def test_the_ranks_must_have_equal_parts_of_what_is_not_cut_and_equal_batches():
    mesh = mesh_of(2, 2)
    for where in (lambda model: model[1].norm.weight, lambda model: model[0].norm.bias):
        model = uneven()
        if mesh.get_local_rank("tp") == 1:
            with torch.no_grad():
                where(model)[0] += 1
        parallelize_module(model[0], mesh["tp"], UNEVEN_PLAN)
        for part in (*model, model):
            fully_shard(part, mesh=mesh["dp"])
        with pytest.raises(RuntimeError, match=r"[01]\.norm\.(weight|bias) has different elements on ranks 0 and 1"):
            model(torch.ones(2, 6))
    x = torch.full((2, 6), float(dist.get_rank() == 3))
    with pytest.warns(UserWarning, match=r"ranks 2 and 3 were given different inputs"):
        parallel_uneven(mesh)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_uneven(mesh)(torch.full((2, 6), float(mesh.get_local_rank("dp"))))


def placed_model(mesh: DeviceMesh, placement: Any) -> nn.Module:
    model = uneven()
    local = torch.zeros(7, 6)
    model[1].up.weight = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))
    return model


@distributed(world_size=4)
def test_what_cannot_be_sharded_is_refused_by_name():
    mesh = mesh_of(2, 2)
    model = uneven()
    parallelize_module(model[1], mesh["tp"], UNEVEN_PLAN)
    before = [*model.parameters()]
    with pytest.raises(ValueError, match=r"1\.up\.weight is already a DTensor.*ranks \[0, 1, 2, 3\].*mesh\['dp'\]"):
        fully_shard(model)
    with pytest.raises(ValueError, match=r"1\.up\.weight is already a DTensor.*mesh\['dp'\]"):
        fully_shard(model, mesh=mesh["tp"])
    with pytest.raises(ValueError, match=r"1\.up\.weight is already a DTensor.*one mesh"):
        fully_shard(model, mesh=DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("a", "b"))["a"])
    with pytest.raises(ValueError, match="expected a mesh with one dimension, or with two"):
        fully_shard(model, mesh=mesh_of(1, 2, 2, names=("a", "b", "c")))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"1\.up\.weight is already a DTensor.*Partial.*Shard and Replicate"):
        fully_shard(placed_model(mesh["tp"], Partial()), mesh=mesh["dp"])
    sharded = fully_shard(uneven(), mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"0\.up\.weight is already sharded.*parallelize_module\(\) before"):
        parallelize_module(sharded, mesh["tp"], {"0.up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"does not split 1\.up\.weight.*evenly.*'rows'"):
        fully_shard(model, mesh=mesh["dp"], granularity=lambda fqn, param: "rows")
    with pytest.raises(ValueError, match=r"0\.norm\.weight.*on the ranks"):
        model = uneven()
        parallelize_module(model[0], mesh["tp"], UNEVEN_PLAN)
        fully_shard(model[0], mesh=mesh["dp"])  # plain parameters too: not averaged over all
        fully_shard(model, mesh=mesh_of(4, names=("all",)))
        model(torch.ones(2, 6))
