"""``Matrixwise``: optimizers of plain matrices, unmodified, have the bits that they have in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_compose import CPUOffloadPolicy, fully_shard, replicate
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    resume,
    save,
    set_optimizer_state_dict,
)
from fsdp_compose.core.comm import Recorder
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.core.ragged import RaggedDTensor
from fsdp_compose.errors import MisuseError, MisuseRuntimeError, MisuseTypeError, RankLostError, RanksDifferError
from fsdp_compose.optim import Matrixwise
from tests.harness import distributed, lasting_mesh, run_distributed, same_on_every_rank
from tests.models import GPT, shard_layers
from tests.optim.test_muon import Parameters, assert_train_alike, give_gradients, gradients, hybrid_of_four, whole
from tests.optim.test_muon_reports import AllToAlls, peak_within

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(33, 20), (12, 40), (7, 7), (25, 16), (10,), (3, 12, 5), ()]


TP_SHAPES: list[Shape] = [(12, 20), (8, 6), (16,), (3, 12, 4)]


class Shampoo(torch.optim.Optimizer):
    """As users write it: preconditioners by shape, Python numbers and lists in its state."""

    def __init__(self, params: Any, lr: float = 0.01, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad
                if not state:
                    state["step"] = 0
                    state["factors"] = [1e-3 * torch.eye(size, dtype=grad.dtype) for size in grad.shape]
                    state["roots"] = [None for _ in grad.shape]
                for dim, factor in enumerate(state["factors"]):
                    rows = grad.movedim(dim, 0).reshape(grad.size(dim), -1)
                    factor += rows @ rows.T
                    if state["step"] % group["every"] == 0:
                        values, vectors = torch.linalg.eigh(factor)
                        state["roots"][dim] = vectors @ torch.diag(values.clamp(min=1e-9) ** -0.25) @ vectors.T
                    grad = torch.tensordot(state["roots"][dim], grad, dims=([1], [dim])).movedim(0, dim)
                state["step"] += 1
                param.add_(grad, alpha=-group["lr"])


OPTIMIZERS: dict[str, Any] = {
    "Shampoo": Shampoo,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}
TWO_DIMENSIONS = {"Muon": lambda params: torch.optim.Muon(params, lr=0.01)}


def matrices_of(param: torch.Tensor, block_rows: int | None = None) -> list[torch.Tensor]:
    if param.dim() < 2:
        return [param]
    rows = block_rows or param.shape[-2]
    return [*param.reshape(prod(param.shape[:-1]) // max(1, rows) if rows else 1, rows, param.shape[-1])]


class Reference:
    """The optimizer on each whole matrix, in this process."""

    def __init__(self, shapes: Sequence[Shape], make: Any, block_rows: int | None = None) -> None:
        self.shapes, self.block_rows = shapes, block_rows
        self.matrices = [
            [nn.Parameter(matrix.clone()) for matrix in matrices_of(param.detach(), block_rows)]
            for param in Parameters(shapes).items
        ]
        self.optimizer = make([matrix for several in self.matrices for matrix in several])

    def step(self, number: int, without: Sequence[int] = ()) -> None:
        for i, (several, gradient) in enumerate(zip(self.matrices, gradients(self.shapes, number), strict=True)):
            for matrix, part in zip(several, matrices_of(gradient, self.block_rows), strict=True):
                matrix.grad = None if i in without else part.clone()
        self.optimizer.step()

    def assert_equal(self, params: Sequence[Any], *when: object) -> None:
        for i, (param, several) in enumerate(zip(params, self.matrices, strict=True)):
            got, value = whole(param), torch.stack([item.detach() for item in several]).reshape(param.shape)
            assert torch.equal(got, value), (i, (got - value).abs().max(), *when)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *TWO_DIMENSIONS])
@distributed(world_size=(1, 2, 3, 4))
def test_the_bits_of_one_process(name):
    make = {**OPTIMIZERS, **TWO_DIMENSIONS}[name]
    shapes = [shape for shape in SHAPES if len(shape) >= 2 or name in OPTIMIZERS]
    for granularity in (None, "elements", "whole"):
        choose = None if granularity is None else lambda _name, _param, wanted=granularity: wanted
        model, reference = fully_shard(Parameters(shapes), granularity=choose), Reference(shapes, make)
        optimizer = Matrixwise(model.items, make)
        for step in range(3):
            give_gradients([*model.items], step)
            optimizer.step()
            reference.step(step)
            reference.assert_equal([*model.items], granularity, step)


@distributed(world_size=(1, 2, 3))
def test_heads_as_blocks():
    shapes = [(12, 20), (2, 24, 5)]
    model, reference = fully_shard(Parameters(shapes)), Reference(shapes, Shampoo, block_rows=4)
    optimizer = Matrixwise(model.items, Shampoo, block_rows=4)
    for step in range(3):
        give_gradients([*model.items], step)
        optimizer.step()
        reference.step(step)
    reference.assert_equal([*model.items])
    assert [*optimizer.state[model.items[1]]] == [str(k) for k in range(12)]


def _train_both(model: Any, shapes: Sequence[Shape], steps: int = 3, **options: Any) -> Matrixwise:
    reference, params = Reference(shapes, Shampoo, **options), [*model.items]
    optimizer = Matrixwise(params, Shampoo, **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
        reference.step(step)
    reference.assert_equal(params)
    return optimizer


@distributed(world_size=4)
def test_hybrid_sharding_and_replicas():
    mesh = lasting_mesh(("replicate", "shard"))
    _train_both(fully_shard(Parameters(SHAPES), mesh=mesh), SHAPES)
    _train_both(replicate(Parameters(SHAPES)), SHAPES)


@distributed(world_size=2)
def test_offloaded_and_plain_parameters():
    _train_both(fully_shard(Parameters(SHAPES), offload_policy=CPUOffloadPolicy(pin_memory=False)), SHAPES)
    model = Parameters(SHAPES)
    _train_both(fully_shard(model, ignored_params={model.items[0], model.items[4]}), SHAPES)


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Shard(0)]], ids=str)
@distributed(world_size=4)
def test_tensor_parallelism(placements):
    shapes = TP_SHAPES
    mesh = lasting_mesh(("dp", "tp"))
    model = Parameters(shapes)
    cuts = [*placements, Shard(0), Shard(2)]
    for i, cut in enumerate(cuts):
        model.items[i] = nn.Parameter(distribute_tensor(model.items[i].detach(), mesh["tp"], [cut]))
    fully_shard(model, mesh=mesh["dp"])
    reference, params = Reference(shapes, Shampoo), [*model.items]
    optimizer = Matrixwise(params, Shampoo)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
        reference.step(step)
    reference.assert_equal(params)
    state = get_optimizer_state_dict(model, optimizer)
    assert all(value.full_tensor().shape == value.shape for value in _tensors(state["state"]))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@distributed(world_size=2)
def test_tensor_parallelism_alone():
    mesh, model, shapes = init_device_mesh("cpu", (2,)), Parameters(TP_SHAPES), TP_SHAPES
    for i, cut in enumerate([Shard(0), Shard(1), Replicate(), Shard(2)]):
        model.items[i] = nn.Parameter(distribute_tensor(model.items[i].detach(), mesh, [cut]))
    _train_both(model, shapes)


@distributed(world_size=2)
def test_parameters_without_elements():
    shapes = [(0, 4), (3, 4), (0,)]
    model = fully_shard(Parameters(shapes))
    optimizer = Matrixwise(model.items, OPTIMIZERS["AdamW"])
    reference = Reference(shapes, OPTIMIZERS["AdamW"])
    for step in range(2):
        give_gradients([*model.items], step)
        optimizer.step()
        reference.step(step)
    reference.assert_equal([*model.items])


@distributed(world_size=4)
def test_parameters_that_cannot_be_shared_are_refused():
    mesh = lasting_mesh(("dp", "ep"))
    model = Parameters([(4, 6, 5)])
    model.items[0] = nn.Parameter(distribute_tensor(model.items[0].detach(), mesh["ep"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = Matrixwise(model.items, Shampoo)
    give_gradients([*model.items], 0)
    with pytest.raises(MisuseError, match="gives this rank 2 of the 4 matrices"):
        optimizer.step()


@distributed(world_size=3)
def test_unused_and_frozen_parameters_stay():
    model, reference = fully_shard(Parameters(SHAPES)), Reference(SHAPES, Shampoo)
    params = [*model.items]
    optimizer = Matrixwise(params, Shampoo)
    for step, without in enumerate([(0, 5), (1, 2), (0,), ()]):
        give_gradients(params, step, without)
        optimizer.step()
        reference.step(step, without)
        reference.assert_equal(params, step)
    for param in params:
        param.grad = None
    optimizer.step()
    reference.assert_equal(params)


@distributed(world_size=2)
def test_parameter_groups_and_schedulers():
    model, reference = fully_shard(Parameters(SHAPES)), Reference(SHAPES, Shampoo)
    params = [*model.items]
    optimizer = Matrixwise([{"params": params[:3], "lr": 0.5}, {"params": params[3:]}], Shampoo)
    reference.optimizer = Shampoo(
        [
            {"params": [m for several in reference.matrices[:3] for m in several], "lr": 0.5},
            {"params": [m for several in reference.matrices[3:] for m in several]},
        ]
    )
    assert [(group["lr"], group["every"]) for group in optimizer.param_groups] == [(0.5, 2), (0.01, 2)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(item, 0.5) for item in (optimizer, reference.optimizer)]
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
        reference.step(step)
        for scheduler in schedulers:
            scheduler.step()
    reference.assert_equal(params)
    assert optimizer.param_groups[0]["lr"] == 0.0625


@distributed(world_size=2)
def test_writes_by_others_between_steps_are_seen():
    model, reference = fully_shard(Parameters(SHAPES)), Reference(SHAPES, Shampoo)
    params = [*model.items]
    optimizer = Matrixwise(params, Shampoo)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
        reference.step(step)
        with torch.no_grad():
            for param, several in zip(params, reference.matrices, strict=True):
                param.mul_(0.5)
                for matrix in several:
                    matrix.mul_(0.5)
    reference.assert_equal(params)


@distributed(world_size=3)
def test_training_a_whole_model_keeps_ranks_together():
    torch.manual_seed(0)
    reference = GPT()
    model = shard_layers(copy.deepcopy(reference))

    def adam(params: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)

    ours, theirs = Matrixwise(model.parameters(), adam), adam([*reference.parameters()])
    assert_train_alike(model, reference, ours, theirs, steps=10, max_norm=1.0)


@distributed(world_size=2)
def test_plain_parameters_that_one_rank_uses_alone():
    model = Parameters(SHAPES)
    fully_shard(model, ignored_params={model.items[0]})  # an expert that got no tokens on the other rank
    params, is_first = [*model.items], dist.get_rank() == 0
    reference, optimizer = Reference(SHAPES, Shampoo), Matrixwise(params, Shampoo)
    for step in range(3):
        without = () if is_first else (0,)
        give_gradients(params, step, without)
        optimizer.step()
        reference.step(step, without)
    reference.assert_equal(params)
    assert bool(optimizer.state[params[0]]) == is_first


@distributed(world_size=(1, 2, 4))
def test_temporary_memory():
    shapes = [(256, 192)] * 12
    model = fully_shard(Parameters(shapes), granularity=lambda _fqn, _param: "elements")
    optimizer = Matrixwise(model.items, lambda params: torch.optim.SGD(params, lr=0.1, foreach=False))
    give_gradients([*model.items], 0)
    optimizer.step()
    peak, told, largest = peak_within(optimizer.step), optimizer.describe().temporary_bytes, 256 * 192 * 4
    assert told - largest <= peak <= told + 2 * largest


@distributed(world_size=(1, 3))
def test_describe():
    shapes = [(33, 20), (12, 40), (7, 7), (10,)]
    model = fully_shard(Parameters(shapes), granularity=lambda _fqn, _param: "elements")
    optimizer = Matrixwise(model.items, Shampoo)
    report = optimizer.describe()
    assert (report.optimizer, report.num_matrices, sum(report.owned)) == ("Matrixwise", 4, 4)
    notes = AllToAlls()
    for handle in _get_fsdp_handles(model):
        handle.change_transports(lambda transport, _: Recorder(transport, notes))
    give_gradients([*model.items], 0)
    optimizer.step()
    assert (len(notes.nbytes), sum(notes.nbytes)) == (report.num_collectives, report.bytes_moved)
    assert (report.bytes_moved > 0) == (dist.get_world_size() > 1)
    assert "a step moves" in str(report).lower()


# ---- State


@distributed(world_size=3)
def test_state_lies_whole_at_one_rank_under_its_usual_names():
    model = fully_shard(Parameters(SHAPES))
    optimizer = _train_both(model, SHAPES)
    state = optimizer.state[model.items[0]]
    assert [*state] == ["step", "factors", "roots"]
    for value in _tensors(state):
        counts = value._spec.ragged.counts
        assert isinstance(value, RaggedDTensor) and sorted(counts)[:-1] == [0, 0]

    assert torch.equal(state["step"].full_tensor(), torch.tensor(3))
    held = sum(value.to_local().nbytes for entries in optimizer.state.values() for value in _tensors(entries))
    total = sum(value.numel() * value.element_size() for e in optimizer.state.values() for value in _tensors(e))
    everyone: list[Any] = [None] * 3
    dist.all_gather_object(everyone, held)
    assert sum(everyone) == total and max(everyone) < total


class Moving(torch.optim.SGD):
    """Keeps a tensor whose memory it exchanges, and assigns to ``.data`` of parameters."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state.setdefault("total", torch.zeros_like(param))
            state["total"].data = state["total"] + param.grad
            param.data = param.detach() - state["total"]


@distributed(world_size=2)
def test_optimizers_that_exchange_memory():
    model = fully_shard(Parameters(SHAPES))
    reference, params = Reference(SHAPES, lambda given: Moving(given, lr=1)), [*model.items]
    optimizer = Matrixwise(params, lambda given: Moving(given, lr=1))
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
        reference.step(step)
    reference.assert_equal(params)
    total = sum(gradients(SHAPES, step)[0] for step in range(3))
    assert torch.equal(optimizer.state[params[0]]["total"].full_tensor(), total)


@distributed(world_size=4)
def test_a_full_state_dict_is_that_of_one_process():
    shapes = SHAPES[:4]
    mesh = lasting_mesh(("replicate", "shard"))
    model = fully_shard(Parameters(shapes), mesh=mesh)
    optimizer, reference = Matrixwise(model.items, Shampoo), Reference(shapes, Shampoo)
    for step in range(3):
        give_gradients([*model.items], step)
        optimizer.step()
        reference.step(step)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for i, (matrix,) in enumerate(reference.matrices):
        got, expected = full["state"][f"items.{i}"], reference.optimizer.state[matrix]
        assert [*got] == [*expected] and got["step"] == 3
        for key in ("factors", "roots"):
            assert all(torch.equal(a, b) for a, b in zip(got[key], expected[key], strict=True)), key
    twin = Matrixwise(model.items, Shampoo)
    set_optimizer_state_dict(model, twin, full, options=StateDictOptions(full_state_dict=True))
    for step in range(3, 5):
        give_gradients([*model.items], step)
        twin.step()
        reference.step(step)
    reference.assert_equal([*model.items])
    again = Matrixwise(model.items, Shampoo)
    again.load_state_dict(twin.state_dict())
    give_gradients([*model.items], 5)
    again.step()
    reference.step(5)
    reference.assert_equal([*model.items])


def _goes_on(folder: Any, part: str) -> None:
    shapes = SHAPES[:-1]  # empty lists, as of what has no dimension, are in no checkpoint
    model, reference = fully_shard(Parameters(shapes), mesh=hybrid_of_four()), Reference(shapes, Shampoo)
    params = [*model.items]
    optimizer = Matrixwise(params, Shampoo)
    for step in range(5):
        reference.step(step)
        if step == 2 and part == "save":
            middle = [torch.stack([item.detach().clone() for item in several]) for several in reference.matrices]
    if part == "save":
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        for param, value in zip(params, middle, strict=True):
            assert torch.equal(whole(param), value.reshape(param.shape))
        of_model, of_optimizer = get_state_dict(model, optimizer)
        save({"model": of_model, "optimizer": of_optimizer}, folder)
        return
    resume(folder, model, optimizer)
    for value in _tensors([*optimizer.state.values()]):
        assert not isinstance(params[0], RaggedDTensor) or isinstance(value, RaggedDTensor)
    for step in range(3, 5):
        give_gradients(params, step)
        optimizer.step()
    reference.assert_equal(params)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 2), (4, 1), (2, 4)])
def test_checkpoints_of_other_world_sizes(before, after, tmp_path):
    for world_size, part in ((before, "save"), (after, "load")):
        run_distributed(_goes_on, world_size, {"folder": str(tmp_path / "checkpoint"), "part": part})


# ---- What goes wrong


class Failing(torch.optim.SGD):
    """Fails where the first matrix lies, at its third step."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps == 3 and any(param.shape == (33, 20) for param in self.param_groups[0]["params"]):
            raise ArithmeticError("an eigenvalue is not finite")
        super().step()


@distributed(world_size=3)
def test_an_optimizer_that_fails_on_one_rank_fails_on_all_and_changes_no_parameter():
    model = fully_shard(Parameters(SHAPES))
    params = [*model.items]
    optimizer = Matrixwise(params, lambda given: Failing(given, lr=0.1))
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    before = [whole(param).clone() for param in params]
    with pytest.raises(RuntimeError, match=r"on rank \d, the optimizer raised ArithmeticError") as caught:
        optimizer.step()
    same_on_every_rank(str(caught.value).partition(" (")[0])
    for param, value in zip(params, before, strict=True):
        assert torch.equal(whole(param), value)


@distributed(world_size=(2, 3))
def test_what_cannot_be_made_on_one_rank_is_told_to_all():
    model = fully_shard(Parameters(SHAPES))
    params, is_first, is_broken = [*model.items], dist.get_rank() == 0, False

    def make(given: Any) -> Any:
        if is_broken and is_first:
            raise ArithmeticError("no optimizer")
        return torch.optim.SGD(given, lr=0.1)

    optimizer, is_broken = Matrixwise(params, make), True
    give_gradients(params, 0)
    before = [whole(param).clone() for param in params]
    with pytest.raises(ArithmeticError if is_first else RanksDifferError, match="no optimizer"):
        optimizer.step()
    assert all(map(torch.equal, before, map(whole, params)))
    is_broken = False
    optimizer.step()
    assert not any(map(torch.equal, before, map(whole, params)))


@pytest.mark.parametrize("what", ["skips", "other parameters", "other gradients"])
@distributed(world_size=3, fresh=True)
def test_ranks_that_differ(what):
    model = fully_shard(Parameters(SHAPES))
    params, is_first = [*model.items], dist.get_rank() == 0
    optimizer = Matrixwise(params[1:] if what == "other parameters" and is_first else params, Shampoo)
    give_gradients(params, 0)
    if what == "skips":
        optimizer.step()
    before = [whole(param).clone() for param in params]
    if what == "other gradients" and is_first:
        params[2].grad = None
    with pytest.raises((RanksDifferError, RankLostError), match="Matrixwise.step|start of an optimizer's step"):
        if what != "skips" or not is_first:
            optimizer.step()
        whole(params[0])
    if what != "skips":
        for param, value in zip(params, before, strict=True):
            assert torch.equal(whole(param), value)


class Estimating(torch.optim.SGD):
    """Its step depends on all parameters, as in Prodigy."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["momentum"] = float(sum(p.grad.norm() for p in self.param_groups[0]["params"]))
        super().step()


class Counting(torch.optim.SGD):
    """Counts its steps in its parameter group."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["dampening"] += 1
        super().step()


@distributed(world_size=2)
def test_hyperparameters_that_the_optimizer_changes():
    model = fully_shard(Parameters(SHAPES))
    params = [*model.items]
    give_gradients(params, 0)
    optimizer = Matrixwise(params, lambda given: Counting(given, lr=0.1))
    for _ in range(3):
        optimizer.step()
    assert optimizer.param_groups[0]["dampening"] == 3
    with pytest.raises(MisuseRuntimeError, match="computes momentum of its parameter group from all its matrices"):
        Matrixwise(params, lambda given: Estimating(given, lr=0.1)).step()


@distributed(world_size=2)
def test_state_that_cannot_be_shown_is_an_error_on_all_ranks():
    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                self.state[param]["history"] = {1, 2} if param.shape == (33, 20) else 0.5

    model = fully_shard(Parameters(SHAPES))
    give_gradients([*model.items], 0)
    with pytest.raises(RuntimeError, match="keeps a set in its state, as history: expected tensors") as caught:
        Matrixwise(model.items, lambda given: Keeping(given, lr=1)).step()
    same_on_every_rank(str(caught.value))


@distributed(world_size=2)
def test_state_of_other_matrices_is_refused():
    model = fully_shard(Parameters([(12, 20), (2, 4, 6)]))
    params = [*model.items]
    states = []
    for rows in (None, 4):
        optimizer = Matrixwise(params, Shampoo, block_rows=rows)
        give_gradients(params, 0)
        optimizer.step()
        states.append(optimizer.state_dict())
    for rows, state in ((4, states[0]), (None, states[1])):
        with pytest.raises(MisuseRuntimeError, match="items.0 has . matrices here"):
            Matrixwise(params, Shampoo, block_rows=rows).load_state_dict(state)
    adam = torch.optim.AdamW(params)
    adam.step()
    with pytest.raises(MisuseRuntimeError, match="items.1 has 2 matrices here, and the state has the keys"):
        Matrixwise(params, Shampoo).load_state_dict(adam.state_dict())


def test_what_is_refused():
    params = [nn.Parameter(torch.zeros(4, 6))]
    with pytest.raises(MisuseTypeError, match="expected a function from parameters"):
        Matrixwise(params, torch.optim.SGD(params, lr=1))  # type: ignore[arg-type]
    with pytest.raises(MisuseTypeError, match="make\\(\\) returned None"):
        Matrixwise(params, lambda given: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(MisuseError, match="with 2 parameter groups"):
        Matrixwise(params, lambda given: torch.optim.SGD([{"params": []}, {"params": given}], lr=1))
    with pytest.raises(MisuseError, match="no whole number of such blocks"):
        Matrixwise(params, Shampoo, block_rows=3)
    with pytest.raises(MisuseError, match="expected a real parameter"):
        Matrixwise([nn.Parameter(torch.zeros(4, 6, dtype=torch.complex64))], Shampoo)
    optimizer = Matrixwise(params, Shampoo)
    params[0].grad = torch.ones(4, 6)
    optimizer.step()
    with pytest.raises(MisuseRuntimeError, match="would change the owners"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 6))]})
