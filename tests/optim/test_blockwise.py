"""Optimizers that quantize their state in blocks: the bits of one process on any number of ranks, checkpoints with
their scales, and refusals where blocks would be others."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from fsdp_compose import declare_blockwise, declare_elementwise, distribute_ragged, flat_parameters, fully_shard
from fsdp_compose.checkpoint import get_optimizer_state_dict, get_state_dict, load, resume, save, set_state_dict
from fsdp_compose.core.flat import handle_of, local_of
from fsdp_compose.core.ragged import RaggedDTensor
from fsdp_compose.errors import MisuseError, MisuseTypeError, RanksDifferError
from fsdp_compose.optim import Matrixwise, Muon, block_of, whole_matrices, zeros_per_block
from tests.harness import distributed, run_distributed
from tests.optim.test_muon import Parameters, give_gradients, gradients, whole

# The optimizer of the example, as a user would write it.
adam_8bit: Any = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "adam_8bit.py"))
AdamW8, BLOCK = adam_8bit["AdamW8"], adam_8bit["BLOCK"]

SHAPES: list[tuple[int, ...]] = [(33, 47), (64, 64), (1000,), (5,), (3, 17, 11)]
ALIGNED: list[tuple[int, ...]] = [(32, 48), (64, 64), (1024,), (256,), (4, 16, 12)]  # all are whole blocks


def reference(shapes: Sequence[tuple[int, ...]], steps: int) -> list[torch.Tensor]:
    model = Parameters(shapes)
    optimizer = AdamW8(model.items)
    for step in range(steps):
        for param, gradient in zip(model.items, gradients(shapes, step), strict=True):
            param.grad = gradient
        optimizer.step()
    return [param.detach() for param in model.items]


class Sum(Parameters):
    def forward(self) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.items]).sum()


def sharded(shapes: Sequence[tuple[int, ...]]) -> Any:
    return fully_shard(Sum(shapes), granularity=lambda _fqn, _param: BLOCK)


def assert_bits(model: Any, values: Sequence[torch.Tensor]) -> None:
    for i, (param, value) in enumerate(zip(model.items, values, strict=True)):
        assert torch.equal(whole(param), value), i


WAYS: dict[str, Any] = {
    "parameters": lambda model: [*model.items],
    "flat views": flat_parameters,
    "local flat views": lambda model: flat_parameters(model, local=True),
    "some flat views": lambda model: flat_parameters(model, lambda fqn, _: fqn != "items.1"),
}


def set_gradients(model: Any, step: int) -> None:
    """In place, since those of flat views are the same memory."""
    for param, gradient in zip(model.items, gradients([(*p.shape,) for p in model.items], step), strict=True):
        given = distribute_ragged(gradient, param.device_mesh, param.placements, src_data_rank=None)
        param.grad.copy_(given)


def train(model: Any, params: Sequence[Any], steps: range, optimizer: Any = None) -> Any:
    optimizer = AdamW8(params) if optimizer is None else optimizer
    for step in steps:
        model().backward()
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@distributed(world_size=(1, 2, 3, 4))
def test_the_bits_of_one_process():
    model = sharded(SHAPES)
    optimizer = train(model, [*model.items], range(3))
    assert_bits(model, reference(SHAPES, 3))
    scales = optimizer.state[model.items[1]]["exp_avg_scale"]
    assert isinstance(scales, RaggedDTensor) and scales.shape == (16,)


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=(1, 2, 3))
def test_flat_views_have_the_bits_of_one_process(way):
    model = sharded(ALIGNED)
    params = WAYS[way](model)
    left_out = [i for i in range(len(ALIGNED)) if way == "some flat views" and i == 1]
    train(model, params, range(3))
    for i, value in enumerate(reference(ALIGNED, 3)):
        is_equal = torch.equal(whole(model.items[i]), value)
        assert is_equal == (i not in left_out), i


@distributed(world_size=2)
def test_flat_views_that_divide_blocks_are_refused():
    model = sharded(SHAPES)
    optimizer = AdamW8(flat_parameters(model))
    model().backward()
    with pytest.raises(MisuseError, match="in the flat view of a rank, items.1 begins at element 15.*, which divides"):
        optimizer.step()


def _between_flat_views_and_parameters(folder: str, part: str, ways: tuple[str, str]) -> None:
    model = sharded(ALIGNED)
    params = WAYS[ways[part == "load"]](model)
    optimizer = AdamW8(params)
    if part == "save":
        train(model, params, range(3), optimizer)
        of_model, of_optimizer = get_state_dict(model, optimizer)
        save({"model": of_model, "optimizer": of_optimizer}, folder)
        return
    resume(folder, model, optimizer)
    train(model, params, range(3, 5), optimizer)
    assert_bits(model, reference(ALIGNED, 5))


@pytest.mark.parametrize(
    "ways", [("parameters", "flat views"), ("flat views", "parameters"), ("local flat views", "flat views")]
)
def test_checkpoints_between_flat_views_and_parameters(ways, tmp_path):
    for world_size, part in ((2, "save"), (3, "load")):
        arguments = {"folder": str(tmp_path / "checkpoint"), "part": part, "ways": ways}
        run_distributed(_between_flat_views_and_parameters, world_size, arguments)


def _goes_on(folder: str, part: str, way: str, shapes: Any) -> None:
    model = sharded(shapes)
    if part == "save":
        optimizer = train(model, [*model.items], range(3))
        assert_bits(model, reference(shapes, 3))
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = of_optimizer["state"]["items.1"]
        assert state["exp_avg_scale"].shape == (16,) and state["exp_avg_scale"].dtype == torch.float32
        save({"model": of_model, "optimizer": of_optimizer}, folder)
        return
    optimizer = AdamW8(model.items)
    if way == "resume":
        resume(folder, model, optimizer)
    else:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        if way == "load":
            load(state, folder)
        else:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for param in model.items:
        assert isinstance(optimizer.state[param]["exp_avg_scale"], RaggedDTensor)
    train(model, [*model.items], range(3, 5), optimizer)
    assert_bits(model, reference(shapes, 5))


@pytest.mark.parametrize("way", ["resume", "load", "torch's load"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 4), (3, 2)])
def test_checkpoints_of_other_world_sizes(before, after, way, tmp_path):
    for world_size, part in ((before, "save"), (after, "load")):
        arguments = {"folder": str(tmp_path / "checkpoint"), "part": part, "way": way, "shapes": SHAPES}
        run_distributed(_goes_on, world_size, arguments)


@distributed(world_size=(2, 3))
def test_a_fresh_optimizer_offers_its_state():
    model = sharded(SHAPES)
    state = get_optimizer_state_dict(model, AdamW8(model.items))["state"]["items.0"]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (), "exp_avg": (33, 47), "exp_avg_sq": (33, 47), "exp_avg_scale": (7,), "exp_avg_sq_scale": (7,)
    }  # fmt: skip


@distributed(world_size=2)
def test_boundaries_inside_blocks_are_refused():
    model = fully_shard(Parameters([(33, 47), (7, 5)]), granularity=lambda _fqn, _param: "elements")
    optimizer = AdamW8(model.items)
    give_gradients([*model.items], 0)
    with pytest.raises(MisuseError, match=r"of items.0, which divides a block of 256: shard with fully_shard"):
        optimizer.step()
    with pytest.raises(MisuseError, match="divides a block"):
        zeros_per_block(model.items[0], BLOCK)


def test_what_is_refused():
    with pytest.raises(MisuseTypeError, match="expected a subclass"):
        declare_blockwise(nn.Linear)  # type: ignore[type-var]
    with pytest.raises(MisuseError, match="expected a number of elements above 0"):
        declare_blockwise(AdamW8, 0)
    for cls in (Muon, torch.optim.Muon, Matrixwise):
        for declare in (declare_blockwise, declare_elementwise):
            with pytest.raises(MisuseError, match="as a matrix"):
                declare(cls)
        assert block_of(object.__new__(cls)) is None
    with pytest.raises(MisuseError, match="expected a budget above 0"):
        whole_matrices(0)


class Shampoo(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise AssertionError("must not be reached")


class Adam8bit(Shampoo):
    pass


@pytest.mark.parametrize(
    ("cls", "remedy"),
    [
        (type("Shampoo", (torch.optim.Optimizer,), {"step": Shampoo.step}), r"Matrixwise\(params, Shampoo\)"),
        (type("MuonClip", (torch.optim.Optimizer,), {"step": Shampoo.step}), r"fsdp_compose.optim.Muon"),
        (type("Adam8bit", (torch.optim.Optimizer,), {"step": Shampoo.step}), r"declare_blockwise\(Adam8bit, block"),
    ],
)
def test_refusals_name_the_remedy(cls, remedy):
    run_distributed(_refused, 2, {"name": cls.__name__, "remedy": remedy})


def _refused(name: str, remedy: str) -> None:
    cls: Any = type(name, (torch.optim.Optimizer,), {"step": Shampoo.step})
    model = fully_shard(nn.Linear(8, 8))
    params = flat_parameters(model)
    optimizer = cls(params, {})
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(MisuseTypeError, match=remedy) as caught:
        optimizer.step()
    assert "declare_elementwise" not in str(caught.value)


@distributed(world_size=2)
def test_state_of_a_rank_alone_is_not_saved_without_a_word(tmp_path):
    class Local(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for param in self.param_groups[0]["params"]:
                self.state[param]["statistics"] = local_of(param).detach().flatten()[:1].clone()

    model = fully_shard(Parameters([(32, 32)]))
    optimizer = Local(model.items, lr=0.1)
    give_gradients([*model.items], 0)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(RanksDifferError, match="differ from rank to rank.*statistics.*zeros_per_block"):
        save({"optimizer": state}, tmp_path / "checkpoint")


class Placing(torch.optim.SGD):
    """Keeps one number for each row on the rank that has it, and says so."""

    def __init__(self, params: Any, placed: Any) -> None:
        self.placed = placed
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if "norms" not in state:
                state["norms"] = zeros_per_block(param, param.size(1))
            state["norms"] += zeros_per_block(param, param.size(1)) + 1

    def place_state(self, param: Any, key: str, shape: Any, dtype: Any) -> Any:
        return self.placed(param, shape, dtype) if key == "norms" else None


def _placed_elsewhere(folder: str, part: str) -> None:
    shape = (12, 5)
    model = fully_shard(Parameters([shape]), granularity=lambda _fqn, _param: "rows")
    optimizer = Placing(model.items, lambda param, _shape, dtype: zeros_per_block(param, 5, dtype))
    if part == "save":
        give_gradients([*model.items], 0)
        optimizer.step()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        save({"model": of_model, "optimizer": of_optimizer}, folder)
        return
    resume(folder, model, optimizer)
    norms = optimizer.state[model.items[0]]["norms"]
    assert isinstance(norms, RaggedDTensor) and torch.equal(norms.full_tensor(), torch.ones(12))
    assert norms.placements == zeros_per_block(model.items[0], 5).placements
    with pytest.raises(RuntimeError, match=r"Placing.place_state\(\) returned a tensor of shape \(3,\) for norms"):
        resume(folder, model, Placing(model.items, lambda *_: torch.zeros(3)))


def test_optimizers_say_how_their_state_lies(tmp_path):
    for world_size, part in ((2, "save"), (3, "load")):
        run_distributed(_placed_elsewhere, world_size, {"folder": str(tmp_path / "checkpoint"), "part": part})


# ---- Stacks whose matrices lie whole


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_whole_matrices_keep_stacks_whole_within_the_budget(num_ranks):
    run_distributed(_whole, num_ranks, {})


def _whole() -> None:
    shape = (64, 12, 10)
    whole_ones, cut = (
        fully_shard(Parameters([shape, (4, 12, 10)]), granularity=granularity)
        for granularity in (whole_matrices(0.05), lambda _fqn, _param: "elements")
    )
    for start, stop in whole_ones.items[0]._spec.ragged.element_ranges(shape):
        assert start % 120 == 0 and stop % 120 == 0
    handle, other = (handle_of(model.items[0])[0] for model in (whole_ones, cut))
    assert handle.layout.flat_numel <= 1.05 * other.layout.flat_numel
    alone = fully_shard(Parameters([shape]), granularity=whole_matrices(0.05))
    optimizer = Muon(alone.items, lr=0.1)
    give_gradients([*alone.items], 0)
    optimizer.step()
    assert optimizer.describe().bytes_moved == 0


@pytest.mark.parametrize(
    ("count", "num_ranks", "is_whole"), [(64, 3, True), (64, 4, False), (80, 4, True), (8, 8, False)]
)
def test_whole_matrices_only_where_padding_is_small(count, num_ranks, is_whole):
    granule = whole_matrices(0.05, num_ranks)("experts", nn.Parameter(torch.empty(count, 6, 4, device="meta")))
    assert granule == ((6, 4) if is_whole else None)
    assert whole_matrices(0.05, num_ranks)("weight", nn.Parameter(torch.empty(600, 4, device="meta"))) is None
    if is_whole:
        assert num_ranks * prod((6, 4)) <= 0.05 * count * prod((6, 4))
