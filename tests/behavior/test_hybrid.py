"""Hybrid sharding: shards over some ranks, replicas over the others."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    broadcast_replicas,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    functional_mode,
    keep_unsharded,
    no_sync,
    record_collectives,
    replicate,
    set_requires_all_reduce,
    summon_full_params,
)
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_state_dict,
    load,
    save,
    set_model_state_dict,
    set_state_dict,
)
from fsdp_compose.core.comm.failure import together
from fsdp_compose.core.group.registry import get_state
from tests.group.test_one_rank_differs import DIFFERENT, Loop, build
from tests.harness import distributed, lasting_groups, lasting_mesh, same_on_every_rank
from tests.internals import impatient
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import (
    adamw,
    assert_gradients_match,
    assert_same_parameters,
    local_part,
    pair,
    sgd,
    train,
    without_all_reduce,
)

SHAPES = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1), (1, 4)]}
MESHES = [(shape, size) for size, shapes in SHAPES.items() for shape in shapes]
NAMES = ("replicate", "shard")


def mesh_of(*shape: int) -> DeviceMesh:
    return lasting_mesh(NAMES[-len(shape) :], shape)


def over(*shapes: tuple[int, ...]):
    """Runs a test on the meshes of these shapes, each of all ranks."""

    def decorate(body):
        body = distributed(world_size=4)(body)
        return pytest.mark.parametrize("shape", shapes, ids=["x".join(map(str, shape)) for shape in shapes])(body)

    return decorate


# ---- training


@over((2, 2), (4, 1), (1, 4))
def test_trains_as_one_process(shape):
    for make_optimizer, options in (
        (sgd, {}),
        (adamw, {"reshard_after_forward": False}),
        (sgd, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
    ):
        torch.manual_seed(0)
        model, reference = pair(GPT(tie=True, layers=2, use_reentrant=False))
        shard_layers(model, mesh=mesh_of(*shape), **options)
        losses = train(model, make_optimizer, share=local_part, steps=3)
        expected = train(reference, make_optimizer, steps=3)
        dist.all_reduce(losses)
        assert torch.allclose(losses / 4, expected, atol=1e-5)
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("without_sync", [no_sync, without_all_reduce])
@over((2, 2), (4, 1), (1, 4))
def test_accumulation(shape, without_sync):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=2))
    shard_layers(model, mesh=mesh_of(*shape))
    train(model, sgd, share=local_part, steps=2, microbatches=3, without_sync=without_sync)
    train(reference, sgd, steps=2, microbatches=3)
    assert_same_parameters(model, reference)


@over((2, 2))
def test_accumulation_without_all_reduce_costs_one_and_cannot_be_read(shape):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1))
    shard_layers(model, mesh=mesh_of(*shape))
    gpt_loss(model, local_part(next(batches(1)))).backward()
    model.zero_grad()
    with record_collectives(model) as lines:
        for step, batch in enumerate(batches(3)):
            set_requires_all_reduce(model, step == 2)
            gpt_loss(model, local_part(batch)).backward()
            gpt_loss(reference, batch).backward()
            if step < 2:
                with pytest.raises(RuntimeError, match=r"head.weight has not been reduced.*set_requires_all_reduce"):
                    model.head.weight.grad.norm()
    kinds = [line.split()[0] for line in lines if not line.startswith("  wait")]
    assert kinds.count("reduce-scatter") == 3 * kinds.count("all-reduce") > 0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-5)


class Scaled(nn.Module):
    """Has a gradient that is exactly what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


@pytest.mark.parametrize("is_compiled", [False, True])
@over((2, 2), (4, 1), (1, 4))
def test_sums_kept_without_all_reduce_are_as_precise_as_the_gradient(shape, is_compiled):
    """In bf16, 256 + 1 is 256; in fp16, 2048 + 1 is 2048."""
    settings: list[Any] = [
        (torch.bfloat16, 256.0, {}),
        (torch.bfloat16, 256.0, {"reshard_after_forward": False}),
        (torch.float16, 2048.0, {}),
        (torch.float64, 256.0, {}),
        (torch.bfloat16, 256.0, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ]
    # Compiled, each on one mesh, and on each mesh one: compiling takes longer than all else.
    for dtype, first, options in settings[shape[0] // 2 : 4 : 3] if is_compiled else settings:
        model = Scaled()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
        fully_shard(model, mesh=mesh_of(*shape), mp_policy=policy, **options)
        run = torch.compile(model, backend="aot_eager") if is_compiled else model
        for _ in range(2):  # the second is added to a gradient that was there before
            for factor in (first, 1.0, 1.0, 1.0):
                if shape[0] == 1:
                    factor = 1.0  # without replicas every backward publishes
                set_requires_all_reduce(model, False)
                run(torch.full((8,), factor)).backward()
            set_requires_all_reduce(model, True)
            run(torch.full((8,), 1.0)).backward()
        expected = 2 * (first + 4 if shape[0] > 1 else 5)
        assert model.weight.grad.dtype == torch.float32
        assert (model.weight.grad.full_tensor() == expected).all(), (dtype, options)


@over((2, 2))
def test_zero_grad_drops_what_was_kept_without_all_reduce(shape):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1))
    shard_layers(model, mesh=mesh_of(*shape))
    first, second, third = batches(3)
    with without_all_reduce(model):
        gpt_loss(model, local_part(first)).backward()
        model.zero_grad()
        gpt_loss(model, local_part(second)).backward()
        model.head.weight.grad = None  # this one alone
    gpt_loss(model, local_part(third)).backward()
    for batch in (second, third):
        gpt_loss(reference, batch).backward()
        if batch is second:
            reference.head.weight.grad = None
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-5), name


@over((2, 2), (4, 1))
def test_flat_views_and_clipping(shape):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1))
    shard_layers(model, mesh=mesh_of(*shape))
    params = flat_parameters(model)
    ours = torch.optim.AdamW(params, 1e-2, eps=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2, eps=1e-3)
    for batch in batches(3):
        gpt_loss(model, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert torch.allclose(clip_grad_norm_(params, 0.1), expected, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    gpt_loss(model, local_part(batch))
    assert_same_parameters(model, reference)


@over((2, 2), (4, 1))
def test_clipping_by_torch_and_by_us_counts_replicas_once(shape):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1))
    shard_layers(model, mesh=mesh_of(*shape))
    batch = next(batches(1))
    gpt_loss(model, local_part(batch)).backward()
    gpt_loss(reference, batch).backward()
    for order in (2.0, 1.0, float("inf")):
        expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()], order)
        ours = clip_grad_norm_(model.parameters(), 1e9, order)
        stock = nn.utils.clip_grad_norm_(model.parameters(), 1e9, order)
        stock = stock.full_tensor() if hasattr(stock, "full_tensor") else stock
        assert torch.allclose(ours, expected, rtol=1e-4) and torch.allclose(stock, expected, rtol=1e-4)


@over((2, 2), (4, 1), (1, 4))
def test_functional_mode_and_derivatives_of_derivatives(shape):
    torch.manual_seed(0)
    model, reference = pair(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(*shape))
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    for twin, x in ((model, local_part(batch)), (reference, batch)):
        x = x.clone().requires_grad_()
        with functional_mode(twin) if twin is model else contextlib.nullcontext():
            out = twin(x).square().mean()
        # each rank's own gradients of its own input: of a mean over fewer rows they are larger
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (slope * (len(x) / 8)).square().sum().mul(4 if twin is model else 1).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-5)


@over((2, 2))
def test_kept_gathered_and_summoned(shape):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1))
    shard_layers(model, mesh=mesh_of(*shape))
    ids = next(batches(1))[:, :-1]
    with torch.no_grad(), keep_unsharded(model):
        for _ in range(2):
            assert torch.equal(model(ids), reference(ids))
            for twin in (model, reference):
                twin.head.weight.mul_(1.5)
    with summon_full_params(model):
        assert torch.equal(model.head.weight, reference.head.weight)
        model.head.weight.data.mul_(2)
    reference.head.weight.data.mul_(2)
    assert torch.equal(model(ids), reference(ids))
    with summon_full_params(model, writeback=False, rank0_only=True):
        is_full = not isinstance(model.head.weight, torch.distributed.tensor.DTensor)
        assert is_full == (dist.get_rank() == 0)


# ---- degenerate meshes


@distributed(world_size=(2, 4))
def test_one_replica_gives_the_bits_of_the_mesh_of_one_dimension(world_size):
    torch.manual_seed(0)
    model, twin = pair(GPT(layers=2))
    shard_layers(model, mesh=mesh_of(1, world_size))
    shard_layers(twin)
    for item in (model, twin):
        train(item, adamw, share=local_part, steps=2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())


@distributed(world_size=2)
def test_one_shard_gives_the_bits_of_ddp(world_size):
    """Between two ranks: of more, the order in which gradients are added up is another."""
    torch.manual_seed(0)
    model, twin = pair(GPT(layers=2))
    shard_layers(model, mesh=mesh_of(world_size, 1))
    twin = DistributedDataParallel(twin)
    for item in (model, twin):
        train(item, sgd, share=local_part, steps=2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs)


# ---- replicas


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@distributed(world_size=4)
def test_replicas_that_differ_are_named_and_can_be_made_equal(shape):
    for change in ("seeds", "one element", "the order of elements"):
        torch.manual_seed(dist.get_rank() // shape[1] if change == "seeds" else 0)
        model = GPT(layers=1)
        if dist.get_rank() // shape[1] == shape[0] - 1 and change != "seeds":
            with torch.no_grad():
                weight = model.blocks[0].up.weight
                weight.copy_(weight.flip(0) if change == "the order of elements" else weight.clone())
                weight[-1, -1] += 1e-7 if change == "one element" else 0
        shard_layers(model, mesh=mesh_of(*shape))
        ids = next(batches(1))[:, :-1]
        with pytest.raises(RuntimeError, match=r"has different elements on ranks \d and \d, which hold") as error:
            model(ids)
        text = same_on_every_rank(str(error.value))
        assert change == "seeds" or re.search(r"blocks\.0\.up\.weight .*ranks \d and [23]", text), text
        broadcast_replicas(model)
        outputs = [torch.empty_like(model(ids)) for _ in range(4)]
        dist.all_gather(outputs, model(ids).detach())
        assert all(torch.equal(outputs[0], other) for other in outputs)


@over((2, 2))
def test_replicas_that_differ_after_meta_or_loading_are_named_too(shape):
    with torch.device("meta"):
        model = GPT(layers=1)
    shard_layers(model, mesh=mesh_of(*shape))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.0)
    with torch.no_grad():
        if dist.get_rank() >= 2:
            model.head.weight.to_local().fill_(1)
    with pytest.raises(RuntimeError, match=r"head\.weight has different elements on ranks \d and \d"):
        model(next(batches(1))[:, :-1])


@distributed(world_size=4)
def test_tied_parameters_move_between_groups_on_different_meshes():
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1, tie=True))
    fully_shard(model.head, mesh=mesh_of(4, 1))
    fully_shard(model.blocks[0], mesh=mesh_of(1, 4))
    fully_shard(model, mesh=mesh_of(2, 2))
    train(model, sgd, share=local_part, steps=2)
    train(reference, sgd, steps=2)
    assert_same_parameters(model, reference)


@over((2, 2))
def test_broadcast_replicas_takes_what_was_loaded_or_moved_since(shape):
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = GPT(layers=1)
    shard_layers(model, mesh=mesh_of(*shape))
    with pytest.raises(ValueError, match="meta device"):
        broadcast_replicas(model)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, float(dist.get_rank() // 2 + 1))
    broadcast_replicas(model)
    model(next(batches(1))[:, :-1])
    assert all(bool((param.full_tensor() == 1).all()) for param in model.parameters())


# ---- meshes


@distributed(world_size=4)
def test_groups_of_one_root_may_shard_over_other_ranks_of_the_same(world_size):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=3))
    for block, shape in zip(model.blocks, [(2, 2), (4, 1), (1, 4)], strict=True):
        fully_shard(block, mesh=mesh_of(*shape))
    fully_shard(model)
    train(model, adamw, share=local_part, steps=3)
    train(reference, adamw, steps=3)
    assert_same_parameters(model, reference)


@distributed(world_size=4)
def test_groups_on_other_ranks_are_refused_by_name():
    model = GPT(layers=1)
    fully_shard(model.blocks[0], mesh=mesh_of(2, 2)["shard"])
    fully_shard(model, mesh=mesh_of(2, 2))
    with pytest.raises(ValueError, match=r"blocks\.0\.norm1\.weight is on the ranks \[\d, \d\].*\[0, 1, 2, 3\]"):
        model(next(batches(1))[:, :-1])


@distributed(world_size=4)
def test_process_groups_of_a_mesh_fail_together():
    mesh = get_state(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 2)))).mesh
    groups = {mesh.peers, mesh.shard_group, mesh.replicate_group}
    assert len(groups) == 3
    assert all(groups <= {*together(group)} for group in groups)


@distributed(world_size=4)
def test_a_model_on_a_part_of_the_ranks():
    """Two models, each on a mesh (2, 1) of its own two ranks; twice, of which the first process groups are gone."""
    train_on_a_part_of_the_ranks()
    dist.barrier()
    lasting = {dist.group.WORLD, *lasting_groups}
    for group in [group for group in distributed_c10d._world.pg_map if group not in lasting]:
        dist.destroy_process_group(group)
    train_on_a_part_of_the_ranks()


def train_on_a_part_of_the_ranks() -> None:
    mesh = lasting_mesh(("stage", *NAMES), (2, 2, 1))[NAMES]
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1))
    shard_layers(model, mesh=mesh)

    def share(batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(2)[dist.get_rank() % 2]

    train(model, sgd, share=share, steps=2)
    train(reference, sgd, steps=2)
    assert_same_parameters(model, reference)


@pytest.mark.parametrize("kind", ["replicated", "hybrid"])
@distributed(world_size=4, fresh=True)
def test_a_loss_on_a_parameter_whose_mesh_equals_one_of_which_a_process_group_is_gone(kind):
    """The models of the first round live on: nothing that was made for them may serve the second."""
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    lasting, kept = own_group(columns), []
    for _ in range(2):
        group = own_group([[0, 1, 2, 3]] if kind == "replicated" else rows)
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        expected = (16 * model.weight.square().sum()).sqrt()
        if kind == "replicated":
            replicate(model, mesh=DeviceMesh.from_group(group, "cpu"))
        else:
            mesh = DeviceMesh.from_group([group, lasting], "cpu", mesh=columns, mesh_dim_names=NAMES)
            fully_shard(model, mesh=mesh)
        whole = model.weight.full_tensor()
        (4 * whole).norm().backward()
        grad = model.weight.grad.full_tensor()
        assert torch.allclose(grad, 16 * whole / expected)
        kept.append(model)
        dist.barrier()
        dist.destroy_process_group(group)


def own_group(parts: list[list[int]]) -> dist.ProcessGroup:
    """A new process group of this rank, of those with these ranks."""
    made = [dist.new_group(ranks) for ranks in parts]
    return made[[dist.get_rank() in ranks for ranks in parts].index(True)]


# ---- checkpoints


@distributed(world_size=4)
def test_checkpoints_go_from_every_mesh_to_every_other(tmp_path):
    torch.manual_seed(0)
    model = GPT(layers=1)
    saved: dict[str, torch.Tensor] = {}
    for number, shape in enumerate([(2, 2), (4, 1), (1, 4), (4,)]):
        shard_layers(model, mesh=mesh_of(*shape))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if saved:
            state, optimizer_state = get_state_dict(model, optimizer)
            both = {"model": state, "optimizer": optimizer_state}
            load(both, tmp_path / f"checkpoint{number - 1}")
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
            for name, param in model.named_parameters():
                assert torch.equal(param.full_tensor(), saved[name])
                moment = optimizer.state[param]["exp_avg"]
                assert torch.equal(moment.full_tensor(), saved[f"moment of {name}"])
        gpt_loss(model, local_part(next(batches(1, seed=len(saved))))).backward()
        optimizer.step()
        state, optimizer_state = get_state_dict(model, optimizer)
        save({"model": state, "optimizer": optimizer_state}, tmp_path / f"checkpoint{number}")
        for name, param in model.named_parameters():
            saved[name] = param.full_tensor().detach().clone()
            saved[f"moment of {name}"] = optimizer.state[param]["exp_avg"].full_tensor().clone()
        torch.manual_seed(1)
        model = GPT(layers=1)


@over((2, 2), (4, 1))
def test_full_state_dicts_and_from_the_first_rank(shape):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=1))
    expected = reference.state_dict()
    shard_layers(model, mesh=mesh_of(*shape))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, _ = get_state_dict(model, [], options=options)
    assert state.keys() == (expected.keys() if dist.get_rank() == 0 else set())
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    torch.manual_seed(dist.get_rank() + 1)
    other = shard_layers(GPT(layers=1), mesh=mesh_of(*shape))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=options)
    other(next(batches(1))[:, :-1])
    assert_same_parameters(other, reference, tolerance=0)


# ---- ranks that differ


@pytest.mark.parametrize("change", ["no backward", "two backwards", "a forward for the log", "no step", "two steps"])
@distributed(world_size=4, fresh=True)
def test_one_rank_that_differs_gives_one_error_on_every_rank(change):
    with impatient():
        model, _ = build(mesh_of(2, 2))
        loop = Loop(model, change=change if dist.get_rank() == 3 else "", place=1)
        with pytest.raises(RuntimeError, match=f"{DIFFERENT}|have ended, or gave up"):
            loop.run()


@distributed(world_size=4, fresh=True)
def test_ranks_that_differ_in_the_flag_are_told():
    model, _ = build(mesh_of(2, 2))
    loop = Loop(model)
    loop.step(0)
    set_requires_all_reduce(model, dist.get_rank() != 1)
    with pytest.raises(RuntimeError, match="without all-reduce|run different programs"):
        loop.step(1)


@over((2, 2))
def test_training_goes_on_after_an_interrupted_backward(shape):
    model, reference = build(mesh_of(*shape))
    loop, expected = Loop(model), Loop(reference)
    loop.step(0)
    x = local_part(torch.ones(8, 6))
    out = model(x)
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (model[0](x).sum() + out.sum()).backward()
    with pytest.warns(UserWarning, match="discarded"):
        loop.step(1)
    assert model[0].weight.grad is not None
    del expected


@over((2, 2), (4, 1), (1, 4))
def test_gradients_equal_those_of_one_process_with_parts_unused(shape):
    torch.manual_seed(0)
    model, reference = pair(GPT(layers=2))
    shard_layers(model, mesh=mesh_of(*shape))
    model.positions.weight.requires_grad_(False)
    reference.positions.weight.requires_grad_(False)
    for batch in batches(2):
        gpt_loss(model, local_part(batch)).backward()
        gpt_loss(reference, batch).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-5), name
    if shape == (1, 4):
        assert_gradients_match(model, reference)
