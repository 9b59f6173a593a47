"""What every rank has whole (norms, sums of rows, gathered copies) computes with plain tensors, numbers and sharded
tensors: as whole tensors would, or it raises on every rank."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compose import RaggedDTensor, RaggedShard, distribute_ragged, fully_shard
from fsdp_compose.core.ragged import MixedOperandsError, ReplicatedDTensor
from tests.harness import distributed

SHAPE = (10, 4)
ROWS = {1: (10,), 2: (7, 3), 3: (7, 3, 0)}  # the last rank of 3 holds nothing
ELEMENTS = {1: (40,), 2: (0, 40), 3: (17, 0, 23)}


class Kinds(NamedTuple):
    """The operands of one operation, of each kind that can meet. For the expected result, all are plain tensors."""

    sharded: Any  # (10, 4)
    whole: Any  # (10, 4), replicated
    column: Any  # (10, 1), replicated
    norm: Any  # 0-dim, replicated
    plain: Any  # (10, 4)
    row: Any  # (4,), plain
    count: Any  # 0-dim, plain


def kinds(placements: list[Any] | None) -> Kinds:
    generator = torch.Generator().manual_seed(3)
    full, plain = (torch.rand(SHAPE, generator=generator) + 0.1 for _ in range(2))
    row, count = torch.rand(4, generator=generator) + 0.1, torch.tensor(3.0)
    if placements is None:
        return Kinds(full, full.cumsum(0), full.mean(1, keepdim=True), full.norm(), plain, row, count)
    x = distribute_ragged(full, init_device_mesh("cpu", (dist.get_world_size(),)), placements)
    return Kinds(x, x.cumsum(0), x.mean(1, keepdim=True), x.norm(), plain, row, count)


def written(result: Any, _: Any) -> Any:
    return result


# name -> (the operation, the type of its result)
OPERATIONS: dict[str, tuple[Callable[[Kinds], Any], type]] = {
    # replicated, with numbers and its own kind
    "norm + 1": (lambda k: k.norm + 1, ReplicatedDTensor),
    "2 / norm": (lambda k: 2 / k.norm, ReplicatedDTensor),
    "norm ** 2": (lambda k: k.norm**2, ReplicatedDTensor),
    "whole * norm": (lambda k: k.whole * k.norm, ReplicatedDTensor),
    "whole / column": (lambda k: k.whole / k.column, ReplicatedDTensor),
    "norm > 2": (lambda k: k.norm > 2, ReplicatedDTensor),
    "clamp": (lambda k: k.column.clamp(min=0.2, max=0.4), ReplicatedDTensor),
    "stack": (lambda k: torch.stack([k.norm, k.norm * 2]).norm(), ReplicatedDTensor),
    "svd": (lambda k: torch.linalg.svdvals(k.whole), ReplicatedDTensor),
    "qr": (lambda k: torch.linalg.qr(k.whole).R, ReplicatedDTensor),
    "eigh": (lambda k: torch.linalg.eigvalsh(k.whole.t() @ k.whole)[-1], ReplicatedDTensor),
    "sort": (lambda k: k.whole.sort(0, descending=True).values, ReplicatedDTensor),
    "zeros_like": (lambda k: torch.zeros_like(k.column), ReplicatedDTensor),
    "new_zeros": (lambda k: k.norm.new_zeros(3, 2), ReplicatedDTensor),
    "bfloat16": (lambda k: k.whole.bfloat16().float(), ReplicatedDTensor),
    "histogram": (lambda k: k.whole.flatten().histc(4, 0.0, 1.0), ReplicatedDTensor),
    "item": (lambda k: round(k.norm.item(), 4), float),
    "bool": (lambda k: bool(k.norm > 2), bool),
    "equal": (lambda k: torch.equal(k.whole, k.whole.clone()), bool),
    "allclose": (lambda k: torch.allclose(k.whole, k.whole + 1e-9), bool),
    # with plain 0-dim tensors: taken to be equal, as in stock DTensor
    "norm * count": (lambda k: k.norm * k.count, ReplicatedDTensor),
    "count / norm": (lambda k: k.count / k.norm, ReplicatedDTensor),
    "maximum with a count": (lambda k: torch.maximum(k.count, k.norm), ReplicatedDTensor),
    "whole.mul_(count)": (lambda k: k.whole.mul_(k.count), ReplicatedDTensor),
    "whole * one element": (lambda k: k.whole * k.count.view(1), ReplicatedDTensor),
    # with plain tensors of more elements: plain
    "plain * norm": (lambda k: k.plain * k.norm, torch.Tensor),
    "norm - plain": (lambda k: k.norm - k.plain, torch.Tensor),
    "whole + plain": (lambda k: k.whole + k.plain, torch.Tensor),
    "row * column": (lambda k: k.row * k.column, torch.Tensor),
    "plain @ whole": (lambda k: k.plain @ k.whole.t(), torch.Tensor),
    "einsum": (lambda k: torch.einsum("ij,ik->jk", k.plain, k.whole), torch.Tensor),
    "where": (lambda k: torch.where(k.whole > 1, k.plain, k.row), torch.Tensor),
    "cat": (lambda k: torch.cat([k.whole, k.plain]), torch.Tensor),
    "lerp": (lambda k: k.plain.lerp(k.whole, 0.3), torch.Tensor),
    "equal to plain": (lambda k: torch.equal(k.whole, k.plain), bool),
    # written to a plain tensor
    "plain.add_(whole)": (lambda k: k.plain.add_(k.whole), torch.Tensor),
    "plain.mul_(norm)": (lambda k: k.plain.mul_(k.norm), torch.Tensor),
    "count.add_(norm)": (lambda k: k.count.add_(k.norm), torch.Tensor),
    "count.copy_(norm)": (lambda k: k.count.copy_(k.norm), torch.Tensor),
    "count.fill_(norm)": (lambda k: k.count.fill_(k.norm), torch.Tensor),
    "plain.lerp_(whole)": (lambda k: k.plain.lerp_(k.whole, 0.3), torch.Tensor),
    "plain.addcmul_(whole, column)": (lambda k: k.plain.addcmul_(k.whole, k.column), torch.Tensor),
    "plain[2] = ": (lambda k: written(k.plain, k.plain.__setitem__(2, k.whole[3])), torch.Tensor),
    "plain.add_(sharded)": (lambda k: k.plain.add_(k.sharded), torch.Tensor),
    "plain.copy_(sharded)": (lambda k: k.plain.copy_(k.sharded), torch.Tensor),
    "plain.addcmul_(sharded, whole)": (lambda k: k.plain.addcmul_(k.sharded, k.whole), torch.Tensor),
    "plain.addmm_(sharded, sharded)": (
        lambda k: k.plain.view(-1)[:16].view(4, 4).addmm_(k.sharded.t(), k.sharded),
        torch.Tensor,
    ),
    # written to a replicated one
    "whole.add_(whole)": (lambda k: k.whole.add_(k.whole), ReplicatedDTensor),
    "whole.add_(sharded)": (lambda k: k.whole.add_(k.sharded), ReplicatedDTensor),
    "whole.copy_(plain)": (lambda k: k.whole.copy_(k.plain), ReplicatedDTensor),
    "column.mul_(column plain)": (lambda k: k.column.mul_(k.plain[:, :1]), ReplicatedDTensor),
    "norm.sqrt_()": (lambda k: k.norm.sqrt_(), ReplicatedDTensor),
    "whole[1] = ": (lambda k: written(k.whole, k.whole.__setitem__(1, 7.0)), ReplicatedDTensor),
    "whole[mask] = ": (lambda k: written(k.whole, k.whole.__setitem__(k.whole > 2, 7.0)), ReplicatedDTensor),
    "addmm_": (lambda k: k.whole.addmm_(k.whole, k.whole[:4]), ReplicatedDTensor),
    "a view, written": (lambda k: written(k.whole, k.whole.t()[2].mul_(3)), ReplicatedDTensor),
    "a chunk, written": (lambda k: written(k.whole, k.whole.chunk(2, 1)[1].zero_()), ReplicatedDTensor),
    # out=
    "out=whole": (lambda k: torch.add(k.whole, k.whole, out=torch.zeros_like(k.whole)), ReplicatedDTensor),
    "out=one of the operands": (lambda k: torch.mul(k.whole, k.norm, out=k.whole), ReplicatedDTensor),
    "out=plain": (lambda k: torch.add(k.whole, k.norm, out=k.plain), torch.Tensor),
    "out=whole, of plain": (lambda k: torch.add(k.plain, k.norm, out=k.whole), ReplicatedDTensor),
    "out=sharded": (lambda k: torch.mul(k.whole, k.plain, out=k.sharded), RaggedDTensor),
    # shapes
    "unsqueeze": (lambda k: k.norm.unsqueeze(0), ReplicatedDTensor),
    "t": (lambda k: k.whole.t().reshape(2, -1), ReplicatedDTensor),
    "expand": (lambda k: k.column.expand(10, 4).sum(), ReplicatedDTensor),
    "unbind": (lambda k: k.whole.unbind(1)[2], ReplicatedDTensor),
    "unsqueeze_": (lambda k: (k.column.unsqueeze_(0) * 2)[0], ReplicatedDTensor),
    "squeeze_": (lambda k: k.column.squeeze_(1) + 1, ReplicatedDTensor),
    "t_": (lambda k: k.whole.t_() * k.column.view(-1), ReplicatedDTensor),
    # with sharded ones
    "sharded * norm": (lambda k: k.sharded * k.norm, RaggedDTensor),
    "norm / sharded": (lambda k: k.norm / k.sharded, RaggedDTensor),
    "sharded / column": (lambda k: k.sharded / k.column, RaggedDTensor),
    "whole - sharded": (lambda k: k.whole - k.sharded, RaggedDTensor),
    "sharded.add_(whole)": (lambda k: k.sharded.add_(k.whole), RaggedDTensor),
    "sharded.div_(column)": (lambda k: k.sharded.div_(k.column), RaggedDTensor),
    "sharded.copy_(whole)": (lambda k: k.sharded.copy_(k.whole), RaggedDTensor),
    "sharded * plain": (lambda k: k.sharded * k.plain, RaggedDTensor),
    "row * sharded": (lambda k: k.row * k.sharded, RaggedDTensor),
    "where sharded": (lambda k: torch.where(k.sharded > 0.5, k.plain, k.column), RaggedDTensor),
    "sharded.add_(plain)": (lambda k: k.sharded.add_(k.plain, alpha=2), RaggedDTensor),
    "sharded.addcdiv_(plain, whole)": (lambda k: k.sharded.addcdiv_(k.plain, k.whole, value=-0.1), RaggedDTensor),
    "sharded.lerp_(row)": (lambda k: k.sharded.lerp_(k.row.expand(SHAPE), 0.3), RaggedDTensor),
    "a row, written": (lambda k: written(k.sharded, k.sharded[3].mul_(k.row)), RaggedDTensor),
    "a column, written": (lambda k: written(k.sharded, k.sharded[:, 1].add_(k.plain[:, 0])), RaggedDTensor),
    "sharded.addmm_(plain, plain)": (lambda k: k.sharded.addmm_(k.plain, k.plain[:4]), RaggedDTensor),
    "sharded @ plain": (lambda k: k.sharded @ k.plain.t(), torch.Tensor),
    "plain.t() @ sharded": (lambda k: k.plain.t() @ k.sharded, torch.Tensor),
    "sharded.t() @ plain": (lambda k: k.sharded.t() @ k.plain, torch.Tensor),
    "sharded + a larger plain one": (lambda k: k.sharded + k.plain.expand(2, 10, 4), torch.Tensor),
    # lists
    "foreach of norms": (lambda k: torch._foreach_maximum([k.norm, k.norm * 2], 2.0), ReplicatedDTensor),
    "foreach of norms, in place": (
        lambda k: (norms := [k.norm, k.norm * 2], torch._foreach_add_(norms, 1.0))[0],
        ReplicatedDTensor,
    ),
    "foreach of norms and counts": (lambda k: torch._foreach_mul([k.norm, k.norm], [k.count, k.count]), DTensor),
    "foreach of plain ones by norms": (lambda k: torch._foreach_mul([k.plain, k.row], [k.norm, k.norm]), torch.Tensor),
    "foreach of mixed kinds": (
        lambda k: torch._foreach_mul([k.plain, k.whole, k.sharded], [k.norm, k.norm, k.norm]),
        torch.Tensor,
    ),
    "foreach of mixed kinds, in place": (
        lambda k: (a := [k.plain, k.whole, k.sharded], torch._foreach_add_(a, [k.column, k.sharded * 2, k.plain * 2]))[
            0
        ],
        torch.Tensor,
    ),
    "foreach of mixed kinds by numbers": (
        lambda k: (a := [k.plain, k.whole, k.sharded], torch._foreach_mul_(a, [2.0, 3.0, 4.0]))[0],
        torch.Tensor,
    ),
    "foreach of mixed kinds by a norm": (
        lambda k: (a := [k.plain, k.whole, k.sharded], torch._foreach_mul_(a, k.norm))[0],
        torch.Tensor,
    ),
    "foreach of counts by norms": (
        lambda k: (a := [k.count, k.count.clone()], torch._foreach_add_(a, [k.norm, k.norm]))[0],
        torch.Tensor,
    ),
    "foreach norms of mixed kinds": (lambda k: torch._foreach_norm([k.plain, k.whole, k.sharded]), torch.Tensor),
    # random numbers: the generators agree
    "normal_": (lambda k: (torch.manual_seed(1), k.whole.normal_())[1], ReplicatedDTensor),
    "rand_like": (lambda k: (torch.manual_seed(1), torch.rand_like(k.whole))[1], ReplicatedDTensor),
    # copies and files
    "deepcopy": (lambda k: copy.deepcopy(k.whole), ReplicatedDTensor),
}


def full_of(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [full_of(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def kinds_of(value: Any) -> list[Any]:
    return [item for part in value for item in kinds_of(part)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "elements"])
@distributed(world_size=(1, 2, 3))
def test_every_operation_equals_that_on_whole_tensors(flat):
    warnings.simplefilter("ignore")
    wrong = []
    placements = [RaggedShard((ELEMENTS if flat else ROWS)[dist.get_world_size()], flat=flat)]
    with torch.no_grad():
        for name, (operation, kind) in OPERATIONS.items():
            try:
                result = operation(kinds(placements))
                assert all(isinstance(item, kind) for item in kinds_of(result)), [type(x) for x in kinds_of(result)]
                assert kind is not torch.Tensor or "foreach" in name or not isinstance(result, DTensor), type(result)
                torch.testing.assert_close(full_of(result), full_of(operation(kinds(None))))
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


def own(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """A plain tensor that is another one on each rank: the same elements in another order."""
    return torch.arange(40.0).roll(dist.get_rank())[: torch.Size(shape).numel()].view(shape)


DIFFERING: dict[str, Callable[[Kinds], Any]] = {
    "sharded.add_(own)": lambda k: k.sharded.add_(own()),
    "sharded * own": lambda k: k.sharded * own(),
    "sharded.mul_(own row)": lambda k: k.sharded.mul_(own((4,))),
    "sharded.addmm_(own, own)": lambda k: k.sharded.addmm_(own(), own()[:4]),
    "a column of the sharded": lambda k: k.sharded.addcmul_(own((10, 1)), k.whole),
    "whole.copy_(own)": lambda k: k.whole.copy_(own()),
    "whole.mul_(own)": lambda k: k.whole.mul_(own()),
    "out=whole": lambda k: torch.add(k.whole, own(), out=k.whole),
    "foreach on sharded ones": lambda k: torch._foreach_add_([k.sharded], [own()]),
    "foreach on whole ones": lambda k: torch._foreach_add_([k.whole, k.whole], [k.norm, own()]),
    "one bit": lambda k: k.sharded.add_(torch.full(SHAPE, 1.0 + 2**-23 * dist.get_rank())),
    "half precision": lambda k: k.sharded.add_(own().bfloat16()),
    "complex": lambda k: (k.sharded + 0j).add_(own() * 1j),
    "double": lambda k: k.sharded.double().add_(own().double()),
    "booleans": lambda k: torch.where(own() > 20, k.sharded, k.norm),
}


@distributed(world_size=3)
def test_what_differs_between_ranks_and_would_be_written_raises_on_every_rank_and_changes_nothing():
    warnings.simplefilter("ignore")
    with torch.no_grad():
        for name, operation in DIFFERING.items():
            k = kinds([RaggedShard((7, 3, 0))])
            before = [full_of(item).clone() for item in k]
            with pytest.raises(MixedOperandsError, match=r"aten.*differs between the ranks.*(sharded|replicated)"):
                operation(k)
            assert all(map(torch.equal, before[:1], [full_of(k[0])])), name
            if "whole" not in name or "foreach" not in name:
                assert all(map(torch.equal, before, map(full_of, k))), name


@distributed(world_size=2)
def test_results_with_a_tensor_of_one_rank_stay_plain_and_its_own():
    k = kinds([RaggedShard((7, 3))])
    reference = kinds(None)
    with torch.no_grad():
        for ours, theirs in (
            (k.norm * own(), reference.norm * own()),
            (k.sharded @ own().t(), reference.sharded @ own().t()),
            (own().add_(k.sharded), own().add_(reference.sharded)),
        ):
            assert type(ours) is torch.Tensor
            torch.testing.assert_close(ours, theirs)


@distributed(world_size=2)
def test_a_read_parameter_and_whatever_autograd_follows_mix_with_no_plain_tensor():
    warnings.simplefilter("ignore")
    k = kinds([RaggedShard((7, 3))])
    for operation in (
        lambda: k.sharded + k.plain,
        lambda: k.sharded.add_(k.plain),
        lambda: k.sharded @ k.plain.t(),
        lambda: k.sharded.addmm_(k.plain, k.plain[:4]),
        lambda: k.whole.copy_(k.plain),
    ):
        with pytest.raises(MixedOperandsError, match="aten"):
            operation()
    with pytest.raises(RuntimeError, match=r"copy_.*full_tensor.*no_grad"):
        k.plain.copy_(k.sharded)
    with pytest.raises(RuntimeError, match=r"_foreach_add.*full_tensor.*no_grad"):
        torch._foreach_add_([k.plain], [k.sharded])
    leaf = k.sharded.detach().requires_grad_(True)
    with pytest.raises(MixedOperandsError, match=r"aten.mul.*full_tensor\(\)"):
        leaf.norm() * k.plain
    model = fully_shard(nn.Linear(4, 4))
    with torch.no_grad():
        for operation in (
            lambda: model.weight * torch.ones(4),
            lambda: nn.functional.linear(torch.ones(2, 4), model.weight),
            lambda: torch.ones(2, 4) @ model.weight.t(),
            lambda: torch.addmm(torch.ones(4), torch.ones(2, 4), model.weight),
        ):
            with pytest.raises(MixedOperandsError, match="the sharded parameter weight of the fully_shard group"):
                operation()
        assert isinstance(model.weight.add_(torch.ones(4)), RaggedDTensor)


@distributed(world_size=3)
def test_gradients_through_replicated_values_equal_those_of_one_process():
    warnings.simplefilter("ignore")

    def loss(x: Any) -> Any:
        rows = x.cumsum(0)
        scale = 1 / (1 + x.norm()) + torch.tensor(0.5) * rows.square().mean()
        return (x * scale).sum() + (x / x.sum(1, keepdim=True)).square().sum() + x.max() * scale.detach()

    k, reference = kinds([RaggedShard((7, 3, 0))]), kinds(None)
    ours, theirs = k.sharded.requires_grad_(True), reference.sharded.requires_grad_(True)
    value = loss(ours)
    assert isinstance(value, ReplicatedDTensor) and isinstance(value.item(), float)
    value.backward()
    loss(theirs).backward()
    assert isinstance(ours.grad, RaggedDTensor)
    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@distributed(world_size=2)
def test_a_replicated_value_is_a_dtensor_for_everyone_else():
    k = kinds([RaggedShard((7, 3))])
    assert isinstance(k.norm, DTensor) and k.norm.placements == (Replicate(),)
    assert torch.equal(k.norm.full_tensor(), k.norm.to_local()) and k.norm.item() == float(k.norm)
    assert k.whole.redistribute(placements=[Shard(0)]).to_local().shape == (5, 4)
    assert torch.equal(distribute_ragged(k.whole, placements=[RaggedShard((2, 8))]).full_tensor(), full_of(k.whole))
    # with stock DTensors, theirs are the rules
    stock = distribute_tensor(k.plain, k.whole.device_mesh, [Shard(0)])
    for first, second in ((k.whole, stock), (stock, k.whole)):
        assert torch.equal((first + second).full_tensor(), full_of(k.whole) + k.plain)
    before = full_of(k.whole).clone()
    assert k.whole.add_(stock) is k.whole and torch.equal(full_of(k.whole), before + k.plain)
    # copies and files are stock DTensors, which load without this package
    file = io.BytesIO()
    torch.save(k.whole, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=True), pickle.loads(pickle.dumps(k.whole))):
        assert type(copied) is DTensor and torch.equal(copied.full_tensor(), full_of(k.whole))


@distributed(world_size=2)
def test_what_would_make_replicated_values_differ_or_lose_their_memory_raises():
    k = kinds([RaggedShard((7, 3))])
    torch.manual_seed(dist.get_rank())
    for draw in (lambda: k.whole.normal_(), lambda: torch.rand_like(k.whole), lambda: k.whole.bernoulli(0.5)):
        with pytest.raises(RuntimeError, match="manual_seed"):
            draw()
    with pytest.raises(NotImplementedError, match=r"allreduce.*to_local\(\)"):
        dist.all_reduce(k.whole)
    with pytest.raises(NotImplementedError, match=r"set_.*full_tensor\(\)"):
        k.whole.set_(k.whole.clone())
    with pytest.raises(RuntimeError, match=r"shape \(10, 4\)"):
        torch.add(k.whole, k.norm, out=k.column)
    assert k.column.shape == (10, 1) and k.column.to_local().shape == (10, 1)


@distributed(world_size=4)
def test_values_of_other_ranks_do_not_mix():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_ragged(torch.ones(SHAPE), mesh["a"], [RaggedShard((7, 3))])
    y = distribute_ragged(torch.ones(SHAPE), mesh["b"], [RaggedShard((7, 3))])
    with pytest.raises(RuntimeError, match=r"mesh"):
        x.norm() * y.norm()


@distributed(world_size=2)
def test_compiled_operations_on_replicated_values_equal_eager_ones():
    torch._dynamo.reset()
    k = kinds([RaggedShard((7, 3))])

    def step(x: Any, norm: Any, state: Any) -> Any:
        state.mul_(0.9).add_(norm)
        return x * (norm / (norm + 1)), norm * 2, state * norm

    with torch.no_grad():
        expected = step(k.sharded.clone(), k.norm, torch.ones(3))
        actual = torch.compile(step, backend="aot_eager")(k.sharded.clone(), k.norm, torch.ones(3))
    assert [type(item) for item in actual] == [RaggedDTensor, ReplicatedDTensor, torch.Tensor]
    torch.testing.assert_close(full_of(actual), full_of(expected))


@pytest.mark.parametrize("differs", [False, True])
@distributed(world_size=2)
def test_compiled_code_raises_or_compares_ranks_as_eager_code_does(differs):
    torch._dynamo.reset()
    k = kinds([RaggedShard((7, 3))])
    before, error = full_of(k.sharded), None
    with torch.no_grad():
        try:
            torch.compile(lambda x, y: x.add_(y), backend="aot_eager")(k.sharded, own() if differs else k.plain)
        except Exception as raised:  # torch 2.12 runs it without a graph
            error = str(raised)
    if differs or error is not None:
        assert error is not None and re.search("aten.add.*(inside torch.compile|differs between the ranks)", error)
    assert torch.equal(full_of(k.sharded), before if error is not None else before + k.plain)
