"""``Muon``: given equal gradients, sharded parameters end with the bits of ``torch.optim.Muon`` on whole matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compose import (
    CPUOffloadPolicy,
    clip_grad_norm_,
    distribute_ragged,
    flat_parameters,
    fully_shard,
    no_sync,
    offload_optimizer_states,
    replicate,
)
from fsdp_compose.checkpoint import get_optimizer_state_dict, get_state_dict, resume, save
from fsdp_compose.core.ragged import RaggedDTensor, RunLengths
from fsdp_compose.errors import MisuseError, MisuseRuntimeError, RankLostError, RanksDifferError
from fsdp_compose.optim import Muon, muon_groups
from fsdp_compose.optim.matrices import assign, matrices_of, stacks_of
from tests.harness import distributed, lasting_mesh, run_distributed, same_on_every_rank
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import full_values, local_part

Shape = tuple[int, ...]
SETS: dict[str, list[Shape]] = {
    "tall": [(64, 16), (129, 7), (33, 32)],
    "wide": [(16, 64), (7, 129), (1, 40), (5, 1)],
    "odd": [(37, 41), (13, 13), (101, 3), (2, 2)],
    "one of many": [(256, 128)] + [(8, 8)] * 7,
    "experts": [(6, 24, 16), (5, 16, 24), (3, 2, 10, 12)],
    "large": [(256, 260), (2, 260, 256)],  # computed one by one
}


class Parameters(nn.Module):
    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.items = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
        )


def gradients(shapes: Sequence[Shape], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def expected(
    shapes: Sequence[Shape],
    steps: int,
    block_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
    without: Sequence[int] = (),
    **options: Any,
) -> list[torch.Tensor]:
    """What torch's own optimizer makes of each whole matrix. ``without``: parameters without gradients."""
    model = Parameters(shapes, dtype)
    matrices = []
    for param, shape in zip(model.items, shapes, strict=True):
        blocks = param.detach().reshape(-1, block_rows or shape[-2], shape[-1])
        matrices.append([nn.Parameter(block.clone()) for block in blocks])
    optimizer = torch.optim.Muon([matrix for blocks in matrices for matrix in blocks], **options)
    for step in range(steps):
        for i, (blocks, gradient) in enumerate(zip(matrices, gradients(shapes, step), strict=True)):
            for k, matrix in enumerate(blocks):
                matrix.grad = None if i in without else gradient.to(dtype).reshape(-1, *matrix.shape)[k].clone()
        optimizer.step()
    return [torch.stack([m.detach() for m in blocks]).reshape(shape) for blocks, shape in zip(matrices, shapes)]


def give_gradients(params: Sequence[Any], step: int, without: Sequence[int] = ()) -> None:
    for i, (param, gradient) in enumerate(zip(params, gradients([(*p.shape,) for p in params], step), strict=True)):
        gradient = gradient.to(param.dtype)
        if i in without:
            param.grad = None
        elif isinstance(param, RaggedDTensor):
            param.grad = distribute_ragged(gradient, param.device_mesh, param.placements, src_data_rank=None)
        elif isinstance(param, DTensor):
            param.grad = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        else:
            param.grad = gradient


def whole(param: Any) -> torch.Tensor:
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def assert_bits(params: Sequence[Any], values: Sequence[torch.Tensor], *when: object) -> None:
    for i, (param, value) in enumerate(zip(params, values, strict=True)):
        got = whole(param)
        assert torch.equal(got, value), (i, (got - value).abs().max(), *when)


def stepped(model: Any, steps: int = 3, without: Sequence[int] = (), **options: Any) -> list[Any]:
    params = [*model.items]
    optimizer = Muon(params, lr=0.02, **options)
    for step in range(steps):
        give_gradients(params, step, without)
        optimizer.step()
    return params


# ---- Bits of one process


@pytest.mark.parametrize("name", SETS)
@distributed(world_size=(1, 2, 3, 4))
def test_the_bits_of_whole_matrices(name):
    shapes, steps = SETS[name], 1 if name == "large" else 2
    values = expected(shapes, steps, lr=0.02)
    for i, granularity in enumerate((None,) if name == "large" else (None, "elements", "rows", "whole")):
        options = {"bucket_bytes": 1} if (i + i // 2 + dist.get_world_size()) % 2 else {}  # every two of them meet
        choose = None if granularity is None else lambda _name, _param, wanted=granularity: wanted
        model = fully_shard(Parameters(shapes), granularity=choose)
        assert_bits(stepped(model, steps, **options), values, granularity, options)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1}, {"block_rows": 4}], ids=str)
def test_plain_parameters_with_other_strides(options):
    shapes: list[Shape] = [(3, 4, 12, 10), (12, 20)]
    model = Parameters(shapes)
    model.items[0].data = model.items[0].data.to(memory_format=torch.channels_last)
    model.items[1].data = model.items[1].data.t().contiguous().t()
    values = expected(shapes, 2, options.get("block_rows"), lr=0.02)
    assert_bits(stepped(model, 2, **options), values)
    assert model.items[0].is_contiguous(memory_format=torch.channels_last) and not model.items[1].is_contiguous()


@distributed(world_size=3)
def test_bits_in_nested_groups_and_with_plain_parameters():
    shapes = SETS["odd"] + SETS["experts"]
    model = Parameters(shapes)
    inner = nn.Module()
    inner.weight = model.items[1]
    model.inner = fully_shard(inner)
    plain = model.items[3]
    fully_shard(model, ignored_params={plain})
    params = [*model.items]
    params[1] = inner.weight
    optimizer = Muon(params, lr=0.02)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    assert params[3] is plain
    assert_bits(params, expected(shapes, 3, lr=0.02))


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original"},
        {"weight_decay": 0.0, "momentum": 0.5, "ns_steps": 3, "eps": 1e-3},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
    ],
    ids=str,
)
@distributed(world_size=2)
def test_bits_with_options(options):
    shapes = SETS["odd"]
    assert_bits(stepped(fully_shard(Parameters(shapes)), **options), expected(shapes, 3, lr=0.02, **options))


@distributed(world_size=(2, 3))
def test_unused_parameters_stay():
    shapes = SETS["odd"]
    model = fully_shard(Parameters(shapes))
    params = stepped(model, without=(1, 2))
    assert_bits(params, expected(shapes, 3, without=(1, 2), lr=0.02))
    optimizer = Muon(params)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state


@distributed(world_size=2)
def test_parameters_that_get_gradients_in_turn():
    shapes = SETS["one of many"]
    model, reference = fully_shard(Parameters(shapes)), Parameters(shapes)
    params, theirs = [*model.items], [*reference.items]
    ours, torchs = Muon(params, lr=0.02, bucket_bytes=4096), torch.optim.Muon(theirs, lr=0.02)
    for step in range(20):
        without = [i for i in range(len(shapes)) if (step >> (i % 4)) & 1]
        give_gradients(params, step, without)
        give_gradients(theirs, step, without)
        ours.step()
        torchs.step()
    assert_bits(params, [item.detach() for item in theirs])


@distributed(world_size=(2, 3))
def test_heads_as_blocks():
    shapes = [(48, 20), (16, 40), (2, 32, 12)]
    for rows in (4, 8, 16):
        params = stepped(fully_shard(Parameters(shapes)), block_rows=rows, adjust_lr_fn="match_rms_adamw")
        assert_bits(params, expected(shapes, 3, rows, lr=0.02, adjust_lr_fn="match_rms_adamw"), rows)


@distributed(world_size=(2, 3))
def test_bfloat16_parameters_within_one_ulp():
    shapes = SETS["tall"] + SETS["odd"]
    params = stepped(fully_shard(Parameters(shapes, torch.bfloat16)), steps=1)
    values = expected(shapes, 1, dtype=torch.bfloat16, lr=0.02)
    for param, value, start in zip(params, values, Parameters(shapes, torch.bfloat16).items, strict=True):
        ours, theirs = whole(param).float(), value.float()
        # The sum is rounded once; of its terms the parameter is the larger one, or nearly.
        ulp = torch.finfo(torch.bfloat16).eps * torch.maximum(theirs.abs(), start.detach().float().abs())
        assert bool(((ours - theirs).abs() <= ulp).all())


@distributed(world_size=4)
def test_hybrid_sharding():
    for shapes in (SETS["odd"], SETS["experts"], SETS["one of many"]):
        values = expected(shapes, 3, lr=0.02)
        for options in ({}, {"over_replicas": True}, {"over_replicas": True, "bucket_bytes": 1}):
            mesh = lasting_mesh(("replicate", "shard"))
            assert_bits(stepped(fully_shard(Parameters(shapes), mesh=mesh), **options), values, options)


@distributed(world_size=(2, 4))
def test_replicate():
    for shapes in (SETS["odd"], SETS["experts"]):
        values = expected(shapes, 3, lr=0.02)
        for options in ({}, {"over_replicas": True}):
            assert_bits(stepped(replicate(Parameters(shapes)), **options), values, options)


@distributed(world_size=2)
def test_offloaded_parameters():
    shapes = SETS["odd"]
    model = fully_shard(Parameters(shapes), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_bits(stepped(model), expected(shapes, 3, lr=0.02))


# ---- Tensor and expert parallelism


def sharded_beside(shapes: Sequence[Shape], placements: Sequence[Any], granularity: str | None = None) -> Parameters:
    mesh = lasting_mesh(("dp", "tp"))
    model = Parameters(shapes)
    for i, placement in enumerate(placements):
        if placement is not None:
            cut = distribute_tensor(model.items[i].detach(), mesh["tp"], [placement], src_data_rank=None)
            model.items[i] = nn.Parameter(cut)
    choose = None if granularity is None else lambda _name, _param: granularity
    return fully_shard(model, mesh=mesh["dp"], granularity=choose)


@pytest.mark.parametrize(
    ("shapes", "placements"),
    [
        ([(24, 20), (16, 36), (12, 12)], [Shard(0), Shard(1), Replicate()]),
        ([(24, 20), (16, 36), (12, 12)], [Shard(1), None, Shard(0)]),
        ([(25, 21), (17, 13), (3, 5)], [Shard(0), Shard(1), Shard(0)]),  # unevenly
        ([(1, 8), (8, 1)], [Shard(0), Shard(1)]),  # one rank has nothing
        ([(4, 12, 10), (6, 10, 12)], [Shard(0), Shard(0)]),  # expert parallelism
        ([(3, 12, 10), (5, 9, 11)], [Shard(1), Shard(2)]),
        ([(5, 12, 10), (2, 3, 6, 8)], [Shard(0), Shard(1)]),  # unevenly many
    ],
    ids=str,
)
@distributed(world_size=4)
def test_tensor_parallelism(shapes, placements):
    values = expected(shapes, 3, lr=0.02, adjust_lr_fn="match_rms_adamw")
    for granularity in (None, "elements"):
        for options in ({}, {"bucket_bytes": 1}):
            model = sharded_beside(shapes, placements, granularity)
            assert_bits(stepped(model, adjust_lr_fn="match_rms_adamw", **options), values, granularity, options)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("rows", [3, 4, 12])
@distributed(world_size=4)
def test_heads_with_tensor_parallelism(placement, rows):
    shapes = [(24, 20), (36, 8)]
    params = stepped(sharded_beside(shapes, [placement] * 2), block_rows=rows)
    assert_bits(params, expected(shapes, 3, rows, lr=0.02))


@distributed(world_size=2)
def test_tensor_parallelism_alone():
    mesh, shapes = init_device_mesh("cpu", (2,)), [(24, 20), (9, 16), (8, 8)]
    model = Parameters(shapes)
    for i in range(2):
        cut = distribute_tensor(model.items[i].detach(), mesh, [Shard(i)], src_data_rank=None)
        model.items[i] = nn.Parameter(cut)
    assert_bits(stepped(model), expected(shapes, 3, lr=0.02))


# ---- A whole model


def optimizers(model: nn.Module, **options: Any) -> Muon:
    return Muon(muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-2, "eps": 1e-3}), **options)


def assert_train_alike(model: Any, reference: Any, ours: Any, theirs: Any, steps: int, max_norm: float = 1e9) -> None:
    """But for other summation orders of gradients: at most 2e-5 of the way travelled."""
    start = {name: param.detach().clone() for name, param in reference.named_parameters()}
    for batch in batches(steps):
        for item, optimizer, part in ((model, ours, local_part(batch)), (reference, theirs, batch)):
            gpt_loss(item, part).backward()
            clip_grad_norm_(item.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    after = full_values(reference)
    for name, value in full_values(model).items():
        way = (after[name] - start[name]).abs().max()
        assert (value - after[name]).abs().max() <= 2e-5 * way + 1e-6, name


@distributed(world_size=(2, 3))
def test_training_a_whole_model():
    torch.manual_seed(0)
    reference = GPT()
    model = shard_layers(copy.deepcopy(reference))
    ours, theirs = (optimizers(item, ns_dtype=torch.float32) for item in (model, reference))
    assert [len(group["params"]) for group in ours.param_groups] == [len(g["params"]) for g in theirs.param_groups]
    assert_train_alike(model, reference, ours, theirs, steps=20)


def test_the_usual_groups():
    model = GPT()
    groups = muon_groups(model, muon={"lr": 0.1}, adamw={"betas": (0.8, 0.9)})
    names = [set(group["param_names"]) for group in groups]
    assert names[0] | names[1] == {name for name, _ in model.named_parameters()} and not names[0] & names[1]
    ends = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for name, param in model.named_parameters():
        is_matrix = param.dim() >= 2 and id(param) not in ends and "head" not in name
        assert (name in names[0]) == is_matrix, name
    optimizer = Muon(groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-3]
    assert [group["eps"] for group in optimizer.param_groups] == [1e-7, 1e-8]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    tied = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False))
    tied[2].weight = tied[0].weight
    assert [group["param_names"] for group in muon_groups(tied)] == [["1.weight"], ["0.weight", "1.bias"]]
    chosen = muon_groups(tied, lambda name, param: name == "0.weight")
    assert [group["param_names"] for group in chosen] == [["0.weight"], ["1.weight", "1.bias"]]
    with pytest.raises(MisuseError, match=r"where\(\) chose 1.bias of shape \(5,\), which is no matrix"):
        muon_groups(tied, lambda name, param: True)
    tied[1].weight.requires_grad_(False)
    assert [group["algorithm"] for group in muon_groups(tied)] == ["adamw"]


@distributed(world_size=2)
def test_adamw_groups_are_adamw():
    shapes = [(5,), (9, 4), (3,)]
    model, reference = fully_shard(Parameters(shapes)), Parameters(shapes)
    ours = Muon([{"params": [*model.items], "algorithm": "adamw", "lr": 0.05, "weight_decay": 0.3}])
    theirs = torch.optim.AdamW([*reference.items], lr=0.05, weight_decay=0.3)
    for step in range(4):
        give_gradients([*model.items], step)
        give_gradients([*reference.items], step)
        ours.step()
        theirs.step()
    assert_bits([*model.items], [item.detach() for item in reference.items])
    assert {*ours.state[model.items[1]]} == {*theirs.state[reference.items[1]]}


@pytest.mark.parametrize("local", [False, True], ids=["views", "local views"])
@distributed(world_size=(2, 3))
def test_flat_views_in_groups_for_adamw(local):
    torch.manual_seed(0)
    model, twin = (shard_layers(GPT()) for _ in range(2))
    matrices, rest = muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-2})
    names = {*rest["param_names"]}
    views = {**rest, "params": flat_parameters(model, lambda name, _: name in names, local=local)}
    assert 0 < len(views["params"]) < len(rest["params"]) and views.pop("param_names")
    twin.load_state_dict(model.state_dict())
    del matrices["param_names"]
    ours = Muon([matrices, views])
    theirs = Muon(muon_groups(twin, muon={"lr": 0.02}, adamw={"lr": 1e-2}))
    for batch in batches(3):
        for item, optimizer in ((model, ours), (twin, theirs)):
            gpt_loss(item, local_part(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    after = full_values(twin)
    assert all(torch.equal(value, after[name]) for name, value in full_values(model).items())


@distributed(world_size=2)
def test_with_clipping_and_a_gradient_scaler():
    torch.manual_seed(0)
    reference = GPT()
    model = shard_layers(copy.deepcopy(reference))
    ours, theirs = (optimizers(item, ns_dtype=torch.float32) for item in (model, reference))
    ours_scaler, their_scaler = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    before = full_values(model)
    for step, batch in enumerate(batches(3)):
        for item, optimizer, scaler, part in (
            (model, ours, ours_scaler, local_part(batch)),
            (reference, theirs, their_scaler, batch),
        ):
            loss = gpt_loss(item, part)
            if step == 0 and (item is reference or dist.get_rank() == 1):
                loss = loss * math.inf  # on one rank: all skip the step
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(item.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if step == 0:
            assert all(torch.equal(value, before[name]) for name, value in full_values(model).items())
    after = full_values(reference)
    for name, value in full_values(model).items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=1e-4)


# ---- Checkpoints


def hybrid_of_four() -> Any:
    """Four ranks shard in two replicas, others as usual."""
    is_four = dist.get_world_size() == 4
    return lasting_mesh(("replicate", "shard")) if is_four else None


def trained(steps: int) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    shapes = SETS["odd"] + [(7,)]
    model = fully_shard(Parameters(shapes), mesh=hybrid_of_four())
    params = [*model.items]
    optimizer = Muon([{"params": params[:-1], "lr": 0.02}, {"params": params[-1:], "algorithm": "adamw"}])
    go_on(model, optimizer, 0, steps)
    return model, optimizer


def go_on(model: Any, optimizer: Muon, first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients([*model.items], step)
        optimizer.step()


def save_trained(folder: str) -> None:
    model, optimizer = trained(3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, folder)


def load_and_compare(folder: str) -> None:
    model, optimizer = trained(5)
    other, fresh = trained(0)
    resume(folder, other, fresh)
    go_on(other, fresh, 3, 5)
    assert_bits([*other.items], [whole(item) for item in model.items])
    for param, other_param in zip(model.items, other.items, strict=True):
        for key, value in optimizer.state[param].items():
            assert torch.equal(whole(value), whole(fresh.state[other_param][key])), key


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 2), (4, 1), (2, 4)])
def test_checkpoints_of_other_world_sizes(before, after, tmp_path):
    run_distributed(save_trained, before, {"folder": str(tmp_path / "saved")})
    run_distributed(load_and_compare, after, {"folder": str(tmp_path / "saved")})


@distributed(world_size=2)
def test_a_fresh_optimizer_offers_its_state_to_torchs_load(tmp_path):
    model, optimizer = trained(3)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=str(tmp_path / "saved"))
    other, fresh = trained(0)
    state = {"optimizer": get_optimizer_state_dict(other, fresh)}
    assert {key for entries in state["optimizer"]["state"].values() for key in entries} == {
        "momentum_buffer", "exp_avg", "exp_avg_sq", "step",
    }  # fmt: skip
    dcp.load(state, checkpoint_id=str(tmp_path / "saved"))


# ---- Errors


@distributed(world_size=2, fresh=True)
def test_a_rank_that_does_not_step():
    model = fully_shard(Parameters(SETS["odd"]))
    params = [*model.items]
    optimizer = Muon(params, lr=0.02)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    with pytest.raises((RankLostError, RanksDifferError), match="rank 0") as caught:
        if dist.get_rank() == 0:
            optimizer.step()
        whole(params[0])
    assert "an optimizer's step" in str(caught.value) or "all-to-all" in str(caught.value), caught.value


@distributed(world_size=2)
def test_a_gradient_that_is_not_reduced_is_refused_before_anything_changes():
    model = shard_layers(GPT(layers=1))
    optimizer = optimizers(model)
    (batch,) = batches(1)
    with no_sync(model):
        gpt_loss(model, local_part(batch)).backward()
    before = full_values(model)
    with pytest.raises(MisuseRuntimeError, match=r"Muon\.step\(\): the gradient of .* has not been reduced"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in full_values(model).items())
    gpt_loss(model, local_part(batch)).backward()
    optimizer.step()


@distributed(world_size=2)
def test_ranks_with_other_parameters():
    model = fully_shard(Parameters(SETS["odd"]))
    params = [*model.items]
    before = [whole(param).clone() for param in params]
    optimizer = Muon(params if dist.get_rank() == 0 else params[:-1])
    give_gradients(params, 0)
    with pytest.raises(RanksDifferError, match="ranks differ in what they train") as caught:
        optimizer.step()
    assert "items.3 of shape (2, 2)" in same_on_every_rank(str(caught.value))
    assert_bits(params, before)


@distributed(world_size=2)
def test_what_is_refused():
    model = fully_shard(Parameters([(6, 4), (5,)]))
    params = [*model.items]
    with pytest.raises(MisuseError, match=r"items.1 of shape \(5,\).*is no real matrix.*muon_groups"):
        Muon(params)
    with pytest.raises(MisuseError, match="block_rows=4, but items.0 has 6 rows"):
        Muon(params[:1], block_rows=4)
    for options in (
        {"lr": -1.0}, {"momentum": -0.1}, {"ns_steps": 100}, {"adjust_lr_fn": "other"}, {"algorithm": "sgd"},
        {"bucket_bytes": 0}, {"ns_dtype": torch.int32}, {"ns_coefficients": (1.0, 2.0)}, {"eps": -1.0},
    ):  # fmt: skip
        with pytest.raises(MisuseError, match=next(iter(options))):
            Muon(params[:1], **options)
    with pytest.raises(TypeError, match="Muon"):
        offload_optimizer_states(Muon(params[:1]))
    params[0].grad = distribute_tensor(torch.zeros(6, 4), params[0].device_mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(MisuseError, match="expected a dense gradient that is sharded like the parameter"):
        Muon(params[:1]).step()


# ---- Planning


def even(numel: int, num_ranks: int) -> RunLengths:
    size = -(-numel // num_ranks)
    return RunLengths([(max(0, min(numel, (rank + 1) * size) - rank * size), 1) for rank in range(num_ranks)])


def llama(hidden: int, intermediate: int, layers: int, kv: int) -> list[Shape]:
    layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    return (layer + [(intermediate, hidden)] * 2 + [(hidden, intermediate)]) * layers


MODELS = {
    "llama 8B": llama(4096, 14336, 32, 1024),
    "llama 70B": llama(8192, 28672, 80, 1024),
    "llama 405B": llama(16384, 53248, 126, 1024),
    "mixtral": [*llama(4096, 0, 1, 1024)[:4], (8, 14336, 4096), (8, 14336, 4096), (8, 4096, 14336)] * 32,
    "DeepSeek-V3": [(256, 2048, 7168), (256, 2048, 7168), (256, 7168, 2048), (7168, 16384)] * 58,
}


@pytest.mark.parametrize("name", MODELS)
def test_owners_are_balanced(name):
    for num_ranks in (2, 8, 64, 256, 1024):
        items = [matrices_of(shape, even(math.prod(shape), num_ranks), None) for shape in MODELS[name]]
        owners, loads = assign(items, num_ranks), [0] * num_ranks
        for item, chosen in zip(items, owners, strict=True):
            assert len(chosen) == item.count
            for owner in chosen:
                loads[owner] += item.cost
        largest, total = max(item.cost for item in items), sum(loads)
        if num_ranks <= total / largest / 4:
            assert max(loads) * num_ranks <= 1.10 * total, num_ranks
        else:
            assert max(loads) <= max(2 * largest, 1.10 * total / num_ranks), num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_stacks_cover_every_element_once(num_ranks):
    for shapes in SETS.values():
        items = [matrices_of(shape, even(math.prod(shape), num_ranks), None) for shape in shapes]
        for i, (item, owners) in enumerate(zip(items, assign(items, num_ranks), strict=True)):
            ranges = item.counts.ranges()
            found = []
            for stack in stacks_of(i, item, owners):
                assert stack.start % item.numel == 0 and 0 <= stack.owner < num_ranks
                for rank, start, stop in stack.ranges:
                    first, last = stack.start + start, stack.start + stop
                    assert ranges[rank][0] <= first < last <= ranges[rank][1]
                    found.append((first, last))
            assert [first for first, _ in found] == [0, *[last for _, last in found[:-1]]]
            assert found[-1][1] == item.count * item.numel


@distributed(world_size=(1, 2, 3))
def test_describe():
    model = fully_shard(Parameters(SETS["odd"] + SETS["experts"]))
    optimizer = Muon([*model.items])
    report = optimizer.describe()
    assert report.num_matrices == 4 + 6 + 5 + 6 == sum(report.owned) and len(report.owned) == dist.get_world_size()
    assert (report.bytes_moved > 0) == (dist.get_world_size() > 1) == (report.num_collectives > 0)
    assert 1.0 <= report.balance and "21 matrices" in str(report)
    assert report.bytes_moved <= 2 * 2 * sum(math.prod(item.shape) for item in model.items)


@distributed(world_size=2)
def test_matrices_that_lie_whole_do_not_move():
    model = fully_shard(Parameters([(16, 16)] * 4), granularity=lambda _name, _param: "whole")
    optimizer = Muon([*model.items])
    report = optimizer.describe()
    assert (report.bytes_moved, report.num_collectives, report.owned) == (0, 0, (2, 2))
