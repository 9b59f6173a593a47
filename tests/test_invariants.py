"""The invariants of the design, by their numbers there. Every test runs real collectives and compares with unsharded
training of the same model on the same global batch, or asserts an error by its words."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    RaggedDTensor,
    RaggedShard,
    distribute_ragged,
    flat_parameters,
    fully_shard,
    no_sync,
    set_functional_mode,
    unshard,
)
from fsdp_compose.comm import failure, journal, store
from fsdp_compose.comm.control_exchange import Carrier
from fsdp_compose.comm.store import TIMEOUT_ENV
from fsdp_compose.flat.accumulation import UnreducedGradient
from fsdp_compose.group.registry import _get_fsdp_handles, _get_fsdp_states
from tests import harness
from tests.models import assert_gradients_match, assert_parameters_match, local_part, pair

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one

IN, DIM, OUT, ROWS = 3, 5, 2, 12  # sizes that 2 and 3 ranks do not divide; a global batch that they do


class Trip(nn.Module):
    """Passes its input on. Armed with an error, raises it the next time its forward, or its backward, is reached;
    ``passes`` lets it go by so many times first. ``look`` is called in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: dict[str, BaseException] = {}
        self.passes = 0
        self.look: Callable[[], None] = lambda: None

    def arm(self, where: str, error: BaseException, passes: int = 0) -> None:
        self.armed, self.passes = {where: error}, passes

    def reached(self, where: str) -> None:
        if where in self.armed:
            if self.passes:
                self.passes -= 1
            else:
                raise self.armed.pop(where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        self.reached("forward")
        return PassThrough.apply(x, self)


class PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.reached("backward")
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.trip, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 7), Trip(), nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.trip(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """``use_reentrant``: ``None`` for no activation checkpointing, else the kind."""

    def __init__(self, blocks: int = 3, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed, self.trip, self.head = nn.Linear(IN, DIM), Trip(), nn.Linear(DIM, OUT)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trip(self.embed(x))
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def stacks(**options: Any) -> tuple[Stack, Stack]:
    """A sharded stack, a group for each block and one for the rest, and its unsharded equal."""
    torch.manual_seed(0)
    model, reference = pair(Stack(use_reentrant=options.pop("use_reentrant", None)))
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options), reference


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def inputs(step: int = 0, size: int = IN) -> torch.Tensor:
    return torch.randn(ROWS, size, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_trains_on(model: nn.Module, reference: nn.Module, steps: int = 2) -> None:
    """Both models take the same steps from here and stay equal."""
    optimizers = torch.optim.SGD(sharded_params(model), lr=0.1, momentum=0.9, weight_decay=0.01), sgd(reference)
    for i in range(steps):
        train_step(model, optimizers[0], local_part(inputs(100 + i)))
        train_step(reference, optimizers[1], inputs(100 + i))
    assert_parameters_match(model, reference, 1e-6)


def assert_no_gradients(model: nn.Module) -> None:
    present = [name for name, param in model.named_parameters() if param.grad is not None]
    assert not present, f"gradients were published: {present}"


def assert_nothing_is_unsharded(model: nn.Module) -> None:
    for handle in _get_fsdp_handles(model):
        assert not handle.unsharded.is_allocated and handle.unsharded.memory.nbytes() == 0, f"unsharded: {handle.fqns}"
        assert handle.unsharded.work is None
        assert all(param.grad is None for param in handle.unsharded.params)
    roots = [state.root for state in _get_fsdp_states(model) if state.root is not None]
    assert not any(root.communicator._in_flight for root in roots)


def sharded_params(model: nn.Module) -> list[nn.Parameter]:
    return [sharded for handle in _get_fsdp_handles(model) for sharded in handle.sharded_params]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor: of a sharded one, its local part."""
    return tensor.to_local() if isinstance(tensor, RaggedDTensor) else tensor


def breakable_mesh() -> DeviceMesh:
    """All ranks, through a process group of the test's own, whose collectives give up after 2 seconds: what breaks it
    does no harm to other tests."""
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Ranks that wait for each other tell so after 0.2 seconds, not after three: those of groups made inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "STALL_SECONDS", 0.2)
        for module in (journal, failure):
            patch.setattr(module, "PERIOD", 0.1)
        yield


def same_on_every_rank(text: str) -> str:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert texts == [text] * len(texts)
    return text


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def our_warnings() -> Iterator[list[str]]:
    """The texts of the warnings about fully_shard'ed models, every time they are given."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(item.message) for item in caught if "fully_shard" in str(item.message)]


# ---- 1. Collectives pair ---------------------------------------------------------------------------------------------


def wider(model: Stack) -> None:
    model.blocks[1].up = nn.Linear(DIM, 8)


def frozen(model: Stack) -> None:
    model.blocks[1].up.weight.requires_grad_(False)


def in_double(model: Stack) -> None:
    model.blocks[1].double()


@pytest.mark.parametrize(
    "change, names",
    [
        (wider, r"blocks\.1.*up\.weight.*\[7, 5\].*blocks\.1.*up\.weight.*\[8, 5\]"),
        (frozen, r"blocks\.1.*up\.weight.*requires_grad.*true.*blocks\.1.*up\.bias"),
        (in_double, r"blocks\.1.*norm\.weight.*float32.*blocks\.1.*norm\.weight.*float64"),
    ],
    ids=["shape", "requires_grad", "dtype"],
)
@distributed(world_size=(2, 3))
def test_ranks_with_different_models_raise_the_same_error_at_first_forward(world_size, change, names):
    model = Stack()
    if dist.get_rank() == world_size - 1:
        change(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=f"different models.*rank 0.*rank {world_size - 1}.*Build the same") as error:
        model(inputs())
    error.match(names.replace(".*blocks", f".*rank {world_size - 1}.*blocks"))
    same_on_every_rank(str(error.value))
    assert [id(param) for param in model.parameters()] == [
        id(sharded) for sharded in model.state_dict(keep_vars=True).values()
    ]
    model, reference = stacks()
    assert_trains_on(model, reference)


@pytest.mark.parametrize("difference", ["groups", "policy", "order"])
@distributed(world_size=2)
def test_ranks_that_shard_the_same_model_differently_raise_at_first_forward(difference):
    model, is_other = Stack(), dist.get_rank() == 1
    for block in model.blocks[1 if is_other and difference == "groups" else 0 :]:
        fully_shard(block)
    options = {}
    if is_other and difference == "policy":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if is_other and difference == "order":
        model._modules = dict(reversed(model._modules.items()))
    fully_shard(model, **options)
    with pytest.raises(RuntimeError, match="first forward: the ranks have different models.*rank 0.*rank 1") as error:
        model(inputs())
    same_on_every_rank(str(error.value))


@pytest.mark.parametrize("early", [0, 1])
@distributed(world_size=2)
def test_first_forward_names_a_rank_that_does_not_come_and_can_be_repeated(early):
    model, reference = stacks()
    late = 1 - early
    with environment(**{TIMEOUT_ENV: "0.5"}):
        if dist.get_rank() == early:
            with pytest.raises(RuntimeError, match=rf"first forward: rank\(s\) {late} did not arrive.*{TIMEOUT_ENV}"):
                model(inputs())
        else:
            time.sleep(1)
    with environment(**{TIMEOUT_ENV: "10"}):
        assert_trains_on(model, reference)


class Experts(nn.Module):
    """Runs the expert whose number ``choice`` says, through equal-shaped groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.choice = nn.Linear(IN, DIM), 0  # None: no expert
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return x if self.choice is None else self.experts[self.choice](x)


def run_every_expert(model: Experts) -> None:
    """So often that the next forward does not look for unseen writes, whose exchange would come before backward's."""
    for choice in (0, 0, 1, 1, None):
        model.choice = choice
        loss_of(model, local_part(inputs())).backward()
    model.zero_grad()


def experts(**options: Any) -> tuple[Experts, Experts]:
    torch.manual_seed(0)
    model, reference = pair(Experts())
    for expert in model.experts:
        fully_shard(expert, **options)
    return fully_shard(model, **options), reference


@pytest.mark.parametrize("steps_before", [0, 1])
@distributed(world_size=(2, 3))
def test_ranks_that_run_different_groups_of_equal_shape_raise_before_a_gradient_is_published(world_size, steps_before):
    model, reference = experts()
    optimizers = sgd(model), sgd(reference)
    for _ in range(steps_before):
        model.choice = reference.choice = None
        train_step(model, optimizers[0], local_part(inputs()))
        train_step(reference, optimizers[1], inputs())
    model.choice = int(dist.get_rank() == world_size - 1)
    words = rf"experts\.0 on rank 0.*experts\.1 on rank {world_size - 1}.*No gradient was published"
    with pytest.raises(RuntimeError, match=words) as error:
        loss_of(model, local_part(inputs())).backward()
    error.match("same order.*one group with their parent")
    same_on_every_rank(str(error.value))
    assert_no_gradients(model)
    model.choice = reference.choice = 1
    with our_warnings() as texts:
        train_step(model, optimizers[0], local_part(inputs(1)))
    train_step(reference, optimizers[1], inputs(1))
    assert len(texts) == 1 and "interrupted" in texts[0]
    assert_parameters_match(model, reference, 1e-6)
    assert_nothing_is_unsharded(model)


@distributed(world_size=2)
def test_the_first_difference_is_named_also_after_forwards_of_a_model_that_is_gone_on_some_ranks():
    kept = [experts()[0]]
    with torch.no_grad():
        kept[0](local_part(inputs()))
    if dist.get_rank() == 1:
        kept.clear()
        gc.collect()
    model, _ = experts()
    model.choice = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"experts\.0.* on rank 0 and .*experts\.1.* on rank 1"):
        loss_of(model, local_part(inputs())).backward()
    assert_no_gradients(model)


@distributed(world_size=2)
def test_ranks_that_leave_a_prefetched_path_raise_before_a_gradient_is_published():
    """All expect expert 0 and prefetch it, one runs expert 1: it issues one collective more than the others."""
    model, _ = experts(mesh=breakable_mesh())
    train_step(model, sgd(model), local_part(inputs()))
    model.choice = dist.get_rank()
    words = r"\b(experts\.0|experts\.1|\(root\)).*(another rank|rank 0)|at the end of forward failed: "
    with pytest.raises(RuntimeError, match=words):
        loss_of(model, local_part(inputs())).backward()
    assert_no_gradients(model)


@distributed(world_size=2)
def test_gradients_that_a_failed_backward_was_added_to_are_dropped():
    model, reference = experts()
    run_every_expert(model)
    loss_of(model, local_part(inputs())).backward()
    model.choice = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"experts\.0.*experts\.1"):
        loss_of(model, local_part(inputs())).backward()
    model.choice = 0
    with our_warnings() as texts:
        loss_of(model, local_part(inputs())).backward()
    assert len(texts) == 1 and "all gradients are None" in texts[0]
    loss_of(reference, inputs()).backward()
    assert_gradients_match(model, reference, 1e-6)


@distributed(world_size=2)
def test_one_backward_exchanges_once():
    with environment(FSDP_COMPOSE_TRANSPORT="collectives"):
        model, _ = stacks()
    optimizer = sgd(model)
    data = _get_fsdp_states(model)[0].mesh.shard_group
    for _ in range(2):
        train_step(model, optimizer, local_part(inputs()))
    carrier = Carrier.of(data)
    for step, num_looks in enumerate([0, 1, 0, 0, 0, 1]):  # the 3rd to 8th forward: the 4th and the 8th look
        before = carrier.num_exchanges, data._get_sequence_number_for_group()
        train_step(model, optimizer, local_part(inputs(step)))
        assert carrier.num_exchanges - before[0] == 1 + num_looks
        # Forward gathers 4 groups, backward the 3 blocks again; every group is reduced once.
        assert data._get_sequence_number_for_group() - before[1] == 4 + 3 + 4
    for num_looks in (1, 1, 0, 1):
        before = carrier.num_exchanges
        with torch.no_grad():
            model(local_part(inputs()))
        assert carrier.num_exchanges == before + num_looks and not carrier.num_whole


@distributed(world_size=3)
def test_ranks_may_be_in_different_numbers_of_process_groups():
    some = dist.new_group([0, 1])
    model, reference = stacks()
    assert_trains_on(model, reference, steps=1)
    if dist.get_rank() < 2:
        dist.destroy_process_group(some)


# ---- 2. None is the same everywhere ----------------------------------------------------------------------------------


class Branches(nn.Module):
    """Parameters that some ranks use and some do not; the small ones have empty local shards on most ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(IN, DIM)
        self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.full(shape, 1.5)) for shape in [(), (1,), (1, DIM)])
        self.never = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        x = self.always(x)
        return x if chosen < 0 else self.branches[chosen](x) * self.scales[chosen]


def branch_of(rank: int) -> int:
    return 2 if rank == 0 else -1  # one branch on one rank, two branches nowhere


@pytest.mark.parametrize("nested", [False, True])
@distributed(world_size=(2, 3))
def test_parameter_used_on_one_rank_has_gradients_on_all_and_one_used_nowhere_on_none(world_size, nested):
    model, reference = pair(Branches())
    if nested:
        fully_shard(model.always)
    fully_shard(model)
    numels = [stop - start for handle in _get_fsdp_handles(model) for start, stop, _ in handle.local_shards]
    assert 0 in numels, "a local shard should be empty on every rank"
    for step in range(3):
        loss = sum(
            reference(part, branch_of(rank)).square().mean() for rank, part in enumerate(inputs(step).chunk(world_size))
        )
        (loss / world_size).backward()
        chosen = branch_of(dist.get_rank())
        model(local_part(inputs(step)), chosen).square().mean().backward()
        assert_gradients_match(model, reference, 1e-6)
        for name in ("never", "branches.0.weight", "scales.1"):
            assert model.get_parameter(name).grad is None
        if step < 1:  # and then accumulate, by addition
            model.zero_grad()
            reference.zero_grad()


@distributed(world_size=3)
def test_every_rank_may_use_another_parameter():
    model, reference = pair(Branches())
    fully_shard(model)
    for rank, part in enumerate(inputs().chunk(3)):
        (reference(part, rank).square().mean() / 3).backward()
    model(local_part(inputs()), dist.get_rank()).square().mean().backward()
    assert_gradients_match(model, reference, 1e-6)
    assert model.never.grad is None and model.branches[0].weight.grad is not None


@distributed(world_size=(2, 3))
def test_parameter_used_in_an_accumulating_backward_of_one_rank_has_gradients_on_all(world_size):
    model, reference = pair(Branches())
    fully_shard(model)
    for step, branches in enumerate([[2] + [-1] * (world_size - 1), [-1] * world_size]):
        for rank, part in enumerate(inputs(step).chunk(world_size)):
            (reference(part, branches[rank]).square().mean() / world_size).backward()
        with no_sync(model) if step == 0 else contextlib.nullcontext():
            model(local_part(inputs(step)), branches[dist.get_rank()]).square().mean().backward()
        if step == 0:  # the same on every rank, although one rank only has something of it
            unreduced = {name for name, param in model.named_parameters() if type(param.grad) is UnreducedGradient}
            assert unreduced == {name for name, param in reference.named_parameters() if param.grad is not None}
            assert all(param.grad is None for name, param in model.named_parameters() if name not in unreduced)
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_autograd_grad_of_the_input_leaves_gradients_alone(world_size, reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)

    def input_gradient(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(module, batch), batch)
        return grad

    expected = local_part(input_gradient(reference, inputs())) * world_size
    torch.testing.assert_close(input_gradient(model, local_part(inputs())), expected, rtol=0, atol=1e-6)
    assert_no_gradients(model)
    loss_of(model, local_part(inputs())).backward()
    loss_of(reference, inputs()).backward()
    grads = [param.grad for param in model.parameters()]
    before = [grad.clone() for grad in grads]
    input_gradient(model, local_part(inputs(1)))
    for param, grad, value in zip(model.parameters(), grads, before):
        assert param.grad is grad and torch.equal(grad.full_tensor(), value.full_tensor())
    loss_of(model, local_part(inputs(2))).backward()
    loss_of(reference, inputs(2)).backward()
    assert_gradients_match(model, reference, 1e-6)
    assert_nothing_is_unsharded(model)


# ---- 3. Padding is zero ----------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """Awkward shapes, each used once; ``look`` is called in its backward."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = sum((item + 1).square().sum() for item in self.items) * 0.01
        out = x * torch.tanh(scale)
        if out.requires_grad:
            out.register_hook(lambda _: self.look())
        return out


def padding_of(handle: Any, shard: torch.Tensor) -> torch.Tensor:
    """The elements of ``shard``, this rank's slice of a flat tensor, that belong to no parameter."""
    is_padding = torch.zeros(handle.layout.flat_numel, dtype=torch.bool)
    for start, stop in handle.layout.gaps():
        is_padding[start:stop] = True
    return shard[local_part(is_padding)]


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
@distributed(world_size=(2, 3))
def test_padding_stays_zero_while_the_reduce_buffer_changes_between_layouts(world_size, policy):
    torch.manual_seed(0)
    small, large = [(3, 3), (1,), (2,)], [(7, 3), (), (5, 5), (3,)]
    model = nn.Sequential(Bag(*large), Bag(*small), Bag(*large), nn.Linear(IN, DIM), Bag(*small))
    for bag in model:
        fully_shard(bag, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    handles = _get_fsdp_handles(model)
    assert len({handle.layout for handle in handles}) == 3 and all(handle.layout.gaps() for handle in handles)
    seen = []

    def look_at_buffers() -> None:
        for handle, reduction in model_root().communicator._in_flight.values():
            gaps = handle.layout.gaps()
            seen.append(max(reduction.flat[start:stop].abs().max().item() for start, stop in gaps))

    def model_root() -> Any:
        return _get_fsdp_states(model)[0].root

    for bag in model:
        bag.look = look_at_buffers
    optimizer = sgd(model)
    for step in range(4):
        with no_sync(model) if step == 2 else contextlib.nullcontext():
            loss_of(model, local_part(inputs(step))).backward()
        if step != 2:
            for handle in handles:
                assert not padding_of(handle, handle.gradient.buffer.flat).any()
            optimizer.step()
            optimizer.zero_grad()
        assert not any(padding_of(handle, handle.shard).any() for handle in handles)
    assert len(seen) > 3 and not any(seen), seen


# ---- 5. No edit is lost ----------------------------------------------------------------------------------------------


def edit_mul(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)


def edit_data_copy(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.copy_(param.data * 1.5)


def edit_replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 1.5


def edit_load_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def after_nothing(model: nn.Module) -> None:
    """The edit comes before the first forward."""


def after_training(model: nn.Module) -> None:
    batch = local_part(inputs()) if fully_shard.state(model) else inputs()
    train_step(model, sgd(model), batch)


def after_backward(model: nn.Module) -> None:
    loss_of(model, inputs()).backward()
    model.zero_grad()


def after_eval(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(inputs())
    model.train()


def after_inference(model: nn.Module) -> None:
    with torch.inference_mode():
        model(inputs())


def after_forward_without_backward(model: nn.Module) -> None:
    model(inputs())


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize(
    "before",
    [after_nothing, after_training, after_backward, after_eval, after_inference, after_forward_without_backward],
)
@pytest.mark.parametrize("edit", [edit_mul, edit_data_copy, edit_replace_data, edit_load_state_dict])
@distributed(world_size=2)
def test_edit_outside_forward_takes_effect_in_the_next_forward(edit, before, reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    for module in (model, reference):
        before(module)
        edit(module)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
    for module in (model, reference):  # and again, after the eval forward that has just been
        edit(module)
    torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-5)
    assert_trains_on(model, reference)


@pytest.mark.parametrize("edit", [edit_mul, edit_replace_data])  # an edit through p.data leaves no trace: documented
@distributed(world_size=2)
def test_edit_after_an_explicit_unshard_takes_effect(edit):
    model, reference = stacks()
    for module in (model, model.blocks[1]):
        unshard(module)
    edit(model)
    edit(reference)
    torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
    assert_trains_on(model, reference)


@pytest.mark.parametrize(
    "before, edit",
    [
        ("a forward without backward", "p.data = ..."),
        ("a forward without backward", "p.mul_ where there are elements"),
        ("an explicit unshard", "p.data = ..."),
    ],
)
@distributed(world_size=(2, 3))
def test_edit_that_only_some_ranks_can_see_takes_effect_on_all(world_size, before, edit):
    """Small parameters have elements on one rank only: what a rank does about an edit must not depend on seeing it."""
    model, reference = stacks(reshard_after_forward=False, mesh=breakable_mesh())
    model(inputs())
    if before == "an explicit unshard":
        with torch.no_grad():
            model(inputs())
        for module in [*model.blocks, model]:
            unshard(module)
    for name in ("embed.bias", "blocks.0.norm.weight", "blocks.1.down.bias"):
        for param in (model.get_parameter(name), reference.get_parameter(name)):
            if edit == "p.data = ...":
                param.data = param.data * 3
            elif local_of(param).numel():
                with torch.no_grad():
                    param.mul_(3)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-5)
    assert_trains_on(model, reference)


@pytest.mark.parametrize("edit", [edit_replace_data, torch.nn.Module.double])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_other_memory_between_a_forward_and_its_backward_raises(reshard_after_forward, edit):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    first = loss_of(model, local_part(inputs(0)))
    edit(model)
    dtype = model.embed.weight.dtype
    second = loss_of(model, local_part(inputs(1)).to(dtype))
    with pytest.raises(RuntimeError, match="modified.*between a forward and its backward"):
        (first + second).backward()
    edit(reference)
    with our_warnings():
        loss_of(model, local_part(inputs(2)).to(dtype)).backward()
    loss_of(reference, inputs(2).to(dtype)).backward()
    assert_gradients_match(model, reference, 1e-6)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "p.data = ...": edit_replace_data,
    "double()": nn.Module.double,
    "there and back": lambda model: model.double().float(),
    "to_empty()": lambda model: model.to_empty(device="cpu"),
    "_apply()": lambda model: model._apply(lambda tensor: tensor * 2),
    "load by assignment": lambda model: model.load_state_dict(
        {name: value * 2 for name, value in model.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("kind", ["default", "not resharded", "functional", "flat views"])
@pytest.mark.parametrize("move", MOVES)
@distributed(world_size=3)
def test_gradients_are_those_of_the_forward_or_backward_raises_when_parameters_move_in_between(move, kind):
    model, reference = stacks(reshard_after_forward=False if kind == "not resharded" else None)
    if kind == "flat views":
        flat_parameters(model)
    set_functional_mode(model, kind == "functional")
    loss_of(reference, inputs(0)).backward()
    loss = loss_of(model, local_part(inputs(0)))
    MOVES[move](model)
    try:
        loss.backward()
    except RuntimeError:
        pass
    else:
        assert_gradients_match(model, reference, 1e-6)
    model.zero_grad()
    with torch.no_grad():
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            param.copy_(distribute_ragged(expected.to(param.dtype), param.device_mesh, param.placements))
    dtype = model.embed.weight.dtype
    with our_warnings():
        model(local_part(inputs(1)).to(dtype)).square().mean().backward()
    reference.zero_grad()
    reference.to(dtype)(inputs(1).to(dtype)).square().mean().backward()
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("place", ["block", "root"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_edit_inside_forward_raises_with_the_name_and_is_undone(reshard_after_forward, place):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    edited = model.blocks[1].up if place == "block" else model.head
    after_training(model)
    after_training(reference)

    def edit() -> None:
        with torch.no_grad():
            edited.weight.add_(1)

    trip = model.blocks[1].trip if place == "block" else model.trip
    trip.look = edit
    name = r"blocks\.1\b.*\bup\.weight" if place == "block" else r"head\.weight"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{name}.*outside forward") as error:
            model(inputs())
        error.match("modified in place inside forward")
    trip.look = lambda: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
    assert_trains_on(model, reference)


def replace(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.randn(7, DIM))


def remove(module: nn.Module) -> None:
    del module.weight


def set_to_none(module: nn.Module) -> None:
    module.weight = None


def add(module: nn.Module) -> None:
    module.extra = nn.Parameter(torch.randn(7))


@pytest.mark.parametrize("when", ["before the first forward", "after training"])
@pytest.mark.parametrize("change", [replace, remove, set_to_none, add])
@distributed(world_size=2)
def test_replaced_removed_or_added_parameter_raises_with_its_name(change, when):
    model, reference = stacks()
    if when == "after training":
        after_training(model)
        after_training(reference)
    module = model.blocks[1].up
    before = dict(module._parameters)
    change(module)
    name = r"\bextra\b" if change is add else r"\bweight\b"
    for _ in range(2):  # it does not go through by trying again
        with pytest.raises((RuntimeError, ValueError), match=rf"blocks\.1\b.*\bup\.{name}.*fully_shard\(\)"):
            loss_of(model, local_part(inputs())).backward()
    module._parameters.clear()
    module._parameters.update(before)
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_trainable_module_added_after_training_raises_with_its_name():
    model, _ = stacks()
    after_training(model)
    model.blocks[1].extra = nn.Linear(2, 2)
    with pytest.raises((RuntimeError, ValueError), match=r"blocks\.1\.extra\.weight"):
        loss_of(model, local_part(inputs())).backward()


@distributed(world_size=2)
def test_frozen_parameter_added_after_training_is_left_alone():
    model, reference = stacks()
    for module in (model, reference):
        after_training(module)
        module.blocks[1].up.extra = nn.Parameter(torch.ones(7), requires_grad=False)
    model(inputs())
    assert torch.equal(model.blocks[1].up.extra, torch.ones(7))
    after_training(model)
    after_training(reference)
    model.blocks[1].up.extra = reference.blocks[1].up.extra = None
    del model.blocks[1].up.extra, reference.blocks[1].up.extra
    assert_trains_on(model, reference)


DTYPE_CHANGES = {
    "to": lambda model: model.to(torch.float64),
    "cpu()": lambda model: model.cpu(),
    "there and back": lambda model: model.double().float(),
    "half and double": lambda model: model.half().double(),
}


@pytest.mark.parametrize("change", DTYPE_CHANGES)
@pytest.mark.parametrize("before", [after_nothing, after_training, after_eval])
@distributed(world_size=2)
def test_change_of_dtype_after_sharding(before, change):
    model, reference = stacks(reshard_after_forward=False)
    params = list(model.parameters())
    for module in (model, reference):
        before(module)
        DTYPE_CHANGES[change](module)
    assert all(ours is sharded for ours, sharded in zip(model.parameters(), params))
    dtype = params[0].dtype
    loss_of(model, local_part(inputs()).to(dtype)).backward()
    loss_of(reference, inputs().to(dtype)).backward()
    assert all(param.grad.dtype == dtype for param in params)
    assert_gradients_match(model, reference, 1e-6)
    for optimizer in (sgd(reference), torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)):
        optimizer.step()
        optimizer.zero_grad()
    assert_parameters_match(model, reference, 1e-6)


@distributed(world_size=2)
def test_model_moved_to_a_device_that_is_not_its_meshs_raises_at_the_next_forward_and_comes_back():
    model, reference = stacks()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    with pytest.raises(ValueError, match=r"parameters of the fully_shard group .* are still on the meta device"):
        model(inputs())
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    with our_warnings():
        assert_trains_on(model, reference)


@pytest.mark.parametrize("optimizer_is_built", ["before to_empty", "after to_empty"])
@distributed(world_size=(2, 3))
def test_model_is_sharded_on_the_meta_device_and_filled_by_to_empty(world_size, optimizer_is_built):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        model(inputs())
    params = list(model.parameters())
    optimizer = sgd(model) if optimizer_is_built == "before to_empty" else None
    model.to_empty(device="cpu")
    assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))
    optimizer = optimizer or sgd(model)
    reference = Stack()
    with torch.no_grad():
        for module in (model, reference):
            for i, param in enumerate(module.parameters()):
                param.fill_(0.01 * (i + 1))
    assert_parameters_match(model, reference, 0)
    theirs = sgd(reference)
    for step in range(2):
        train_step(model, optimizer, local_part(inputs(step)))
        train_step(reference, theirs, inputs(step))
    assert_parameters_match(model, reference, 1e-6)


def sharded_otherwise(weight: RaggedDTensor) -> RaggedDTensor:
    """A tensor like ``weight``, of which rank 0 holds everything."""
    counts = (weight.numel(), 0)
    placement = RaggedShard(counts, flat=True)
    local = torch.zeros(counts[dist.get_rank()])
    return RaggedDTensor.from_local(local, weight.device_mesh, [placement], shape=weight.shape)


REFUSED_DATA: dict[str, tuple[Callable[[RaggedDTensor], torch.Tensor], str]] = {
    "another shape": (lambda weight: torch.zeros(3), r"\(7, 5\).*\(3,\) tensor"),
    "some rows": (lambda weight: torch.zeros(4, DIM), r"\(7, 5\).*\(4, 5\) tensor"),
    "the full shape in another dtype": (lambda weight: torch.zeros(7, DIM).double(), "float32.*float64.*module.to"),
    "other shards": (sharded_otherwise, r"\(7, 5\).*\(7, 5\) tensor.*35, 0"),
    "another dtype": (lambda weight: weight.detach().double(), "float32.*float64.*module.to"),
    "another device": (lambda weight: weight.detach().to("meta"), "cpu.*meta.*module.to"),
}


@pytest.mark.parametrize("case", REFUSED_DATA)
@pytest.mark.parametrize("before", [after_nothing, after_training])
@distributed(world_size=2)
def test_data_that_does_not_fit_raises_at_once_and_changes_nothing(before, case):
    model, reference = stacks()
    before(model)
    before(reference)
    weight = model.blocks[1].up.weight
    local, address = weight.to_local().detach(), weight.to_local().data_ptr()
    value, (make, words) = local.clone(), REFUSED_DATA[case]
    with pytest.raises(TypeError, match=words):
        weight.data = make(weight)
    assert weight.to_local().data_ptr() == address and torch.equal(weight.to_local(), value)
    assert weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape == (7, DIM)
    assert_trains_on(model, reference)


# ---- 6. A step between forward and backward raises -------------------------------------------------------------------


@pytest.mark.parametrize("stepped, named", [("", r"\(root\)"), ("blocks.1", r"blocks\.1"), ("head", r"\(root\)")])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_optimizer_step_between_forward_and_backward_raises_on_every_rank(
    world_size, reshard_after_forward, stepped, named
):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    optimizers = [sgd(module.get_submodule(stepped)) for module in (model, reference)]
    loss_of(model, local_part(inputs())).backward()
    loss_of(reference, inputs()).backward()
    loss = loss_of(model, local_part(inputs(1)))
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    reference.zero_grad()
    with pytest.raises(RuntimeError, match=f"{named}.*modified.*between a forward and its backward") as error:
        loss.backward()
    same_on_every_rank(str(error.value))
    assert_no_gradients(model)
    with our_warnings() as texts:
        assert_trains_on(model, reference)
    assert len(texts) == 1 and "interrupted" in texts[0]
    assert_nothing_is_unsharded(model)


@distributed(world_size=2)
def test_second_backward_after_a_step_raises():
    model, _ = stacks()
    optimizer = sgd(model)
    loss = loss_of(model, local_part(inputs()))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"\(root\).*modified.*between a forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("then", ["backward", "forward"])
@distributed(world_size=2)
def test_loading_between_forward_and_backward_raises(then, assign):
    model, reference = stacks()
    for _ in range(2):
        state = {name: value.detach() * 0.9 for name, value in model.state_dict().items()}
        loss = loss_of(model, local_part(inputs()))
        model.load_state_dict(state, assign=assign)
        reference.load_state_dict({name: value * 0.9 for name, value in reference.state_dict().items()})
        if then == "forward":
            with torch.no_grad():
                model(local_part(inputs()))
        with pytest.raises(RuntimeError, match=r"\(root\).*modified.*between a forward and its backward"):
            loss.backward()
        assert_no_gradients(model)
        with our_warnings() as texts:
            assert_trains_on(model, reference)
        assert len(texts) == 1 and "interrupted" in texts[0]


@pytest.mark.parametrize("kind", ["object", "None", "a number"])
@distributed(world_size=2)
def test_step_between_forward_and_backward_raises_where_outputs_cannot_be_hooked(kind):
    model, _ = pair(Layer(kind))
    fully_shard(model)
    batch = torch.randn(ROWS, DIM)
    with our_warnings():
        model.read(model(batch)).sum().backward()
        value = model.read(model(batch)).sum()
        sgd(model).step()
        with pytest.raises(RuntimeError, match=r"\(root\).*modified.*between a forward and its backward"):
            value.backward()


# ---- 8. Recovery -----------------------------------------------------------------------------------------------------


def interrupt(model: Stack, where: str, place: int, error: BaseException, step: int = 50) -> None:
    """Lets ``error`` happen in ``where`` of block ``place``, and catches it as a user would."""
    model.blocks[place].trip.arm(where, error)
    with pytest.raises(type(error), match="by the user"):
        loss_of(model, local_part(inputs(step))).backward()


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_training_goes_on_after_an_interruption(kind, where, place, reshard_after_forward):
    check_interruption(kind, where, place, reshard_after_forward)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("place", [0, 1, 2])
@distributed(world_size=3)
def test_training_goes_on_after_an_interruption_of_three_ranks(place, reshard_after_forward):
    is_error = (place + (reshard_after_forward is None)) % 2 == 0
    check_interruption(ValueError if is_error else KeyboardInterrupt, "forward", place, reshard_after_forward)
    check_interruption(KeyboardInterrupt if is_error else ValueError, "backward", place, reshard_after_forward)


def check_interruption(kind: type[BaseException], where: str, place: int, reshard_after_forward: bool | None) -> None:
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    optimizers = sgd(model), sgd(reference)
    params = list(model.parameters())
    for step, interruptions in enumerate([1, 0, 2, 0]):  # in the first iteration, and later twice in a row
        for _ in range(interruptions):
            interrupt(model, where, place, kind("by the user"))
            assert all(param.grad is None for param in params)
        with our_warnings() as texts:
            train_step(model, optimizers[0], local_part(inputs(step)))
        train_step(reference, optimizers[1], inputs(step))
        assert len(texts) == bool(interruptions) and all("interrupted" in text for text in texts), texts
        assert_nothing_is_unsharded(model)
        assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))
    assert_parameters_match(model, reference, 1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
@distributed(world_size=2)
def test_interruption_outside_of_every_block(where):
    model, reference = stacks()
    after_training(model)
    after_training(reference)
    for kind in (ValueError, KeyboardInterrupt):
        model.trip.arm(where, kind("by the user"))
        with pytest.raises(kind):
            loss_of(model, local_part(inputs())).backward()
    with our_warnings() as texts:
        assert_trains_on(model, reference)
    assert len(texts) == 1
    assert_nothing_is_unsharded(model)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_interrupted_evaluation(kind):
    model, reference = stacks(reshard_after_forward=False)
    after_training(model)
    after_training(reference)
    for mode in (torch.no_grad, torch.inference_mode):
        model.blocks[1].trip.arm("forward", kind("by the user"))
        with mode(), pytest.raises(kind):
            model(inputs())
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
        assert_nothing_is_unsharded(model)
    assert_trains_on(model, reference)


def give_other_data(model: nn.Module) -> None:
    for param in sharded_params(model) or model.parameters():
        param.data = param.data * 1.5


def freeze_a_block(model: nn.Module) -> None:
    model.blocks[1].requires_grad_(False)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("change", [nn.Module.double, give_other_data, freeze_a_block])
@distributed(world_size=2)
def test_what_the_user_changes_after_an_interruption_takes_effect(change, where):
    model, reference = stacks()
    after_training(model)
    after_training(reference)
    interrupt(model, where, 1, ValueError("by the user"))
    for twin in (model, reference):
        change(twin)
    dtype = reference.head.weight.dtype
    with our_warnings():
        loss_of(model, local_part(inputs(2)).to(dtype)).backward()
    loss_of(reference, inputs(2).to(dtype)).backward()
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_interrupted_recomputation(use_reentrant, kind):
    model, reference = stacks(use_reentrant=use_reentrant)
    params, optimizers = list(model.parameters()), (sgd(model), sgd(reference))
    for step, place in enumerate([1, 0, 2]):
        model.blocks[place].trip.arm("forward", kind("by the user"), passes=1)
        with pytest.raises(kind):
            loss_of(model, local_part(inputs())).backward()
        with our_warnings() as texts:
            train_step(model, optimizers[0], local_part(inputs(step)))
        train_step(reference, optimizers[1], inputs(step))
        assert len(texts) == 1
        assert_nothing_is_unsharded(model)
        assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))
    assert_parameters_match(model, reference, 1e-6)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_interruption_while_prefetched_groups_are_in_flight(kind):
    model, reference = stacks()
    after_training(model)
    after_training(reference)
    states = _get_fsdp_states(model)

    def prefetched() -> list[int]:
        found = []
        for i, state in enumerate(states[1:]):
            if any(handle.unsharded.work is not None for handle in state._handles):
                found.append(i)
        return found

    in_flight = []
    model.blocks[0].trip.look = lambda: in_flight.append(prefetched())
    interrupt(model, "forward", 0, kind("by the user"))
    assert in_flight == [[1]]
    model.blocks[0].trip.look = lambda: None
    for param in [*sharded_params(model), *reference.parameters()]:
        param.data.mul_(1.5)  # what was gathered for the interrupted iteration is stale
    with our_warnings(), torch.no_grad():
        torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
    assert_nothing_is_unsharded(model)
    assert_trains_on(model, reference)
    in_flight.clear()
    hook = model.blocks[2].trip.register_full_backward_pre_hook(lambda *_: in_flight.append(prefetched()))
    interrupt(model, "backward", 2, kind("by the user"))
    hook.remove()
    assert in_flight == [[1]]
    with our_warnings():
        assert_trains_on(model, reference)
    assert_nothing_is_unsharded(model)


@pytest.mark.parametrize("how", ["sync", "no_sync"])
@pytest.mark.parametrize(
    "where, place, is_dropped",
    [("forward", 2, False), ("backward", 2, False), ("backward", 1, True), ("backward", 0, True)],
)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@distributed(world_size=2)
def test_accumulated_gradients_are_dropped_only_if_the_interrupted_backward_had_touched_them(
    kind, where, place, is_dropped, how
):
    model, reference = stacks()
    without_sync = no_sync if how == "no_sync" else lambda _: contextlib.nullcontext()
    with without_sync(model):
        loss_of(model, local_part(inputs(0))).backward()
        interrupt(model, where, place, kind("by the user"), step=1)
    with our_warnings() as texts:
        loss_of(model, local_part(inputs(2))).backward()
    assert len(texts) == 1 and ("all gradients are None" in texts[0]) == is_dropped, texts
    for step in [2] if is_dropped else [0, 2]:
        loss_of(reference, inputs(step)).backward()
    assert_gradients_match(model, reference, 1e-6)
    for module in (model, reference):
        module.zero_grad()
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_exception_handled_inside_forward_is_no_interruption():
    class Tolerant(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                try:
                    x = block(x)
                except ValueError:
                    continue
            return self.head(x)

    torch.manual_seed(0)
    model, reference = pair(Tolerant())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with our_warnings() as texts:
        for step in range(3):
            for module, batch in ((model, local_part(inputs(step))), (reference, inputs(step))):
                module.blocks[1].trip.arm("forward", ValueError("handled"))
                loss_of(module, batch).backward()
            assert_gradients_match(model, reference, 1e-6)
            assert model.blocks[1].up.weight.grad is not None if step < 0 else True
            model.zero_grad()
            reference.zero_grad()
    assert not texts
    assert_nothing_is_unsharded(model)


@distributed(world_size=2)
def test_forwards_without_backward_are_no_interruption():
    model, reference = stacks()
    with our_warnings() as texts:
        for _ in range(3):
            model(inputs())
        first, second = (model(local_part(inputs(i))).square().mean() for i in range(2))
        (first + second).backward()
    assert not texts
    for i in range(2):
        loss_of(reference, inputs(i)).backward()
    assert_gradients_match(model, reference, 1e-6)


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(IN, IN), nn.Linear(IN, OUT)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        return self.outer(x) + self(x, depth - 1) if depth else self.outer(x)


@pytest.mark.parametrize("nested", [False, True])
@distributed(world_size=2)
def test_root_that_calls_itself_is_no_interruption(nested):
    torch.manual_seed(0)
    model, reference = pair(CallsItself())
    if nested:
        fully_shard(model.inner)
    fully_shard(model)
    with our_warnings() as texts:
        assert_trains_on(model, reference)
    assert not texts


@distributed(world_size=2)
def test_interleaved_roots_are_no_interruption():
    (first, first_reference), (second, second_reference) = stacks(), stacks()
    optimizers = [sgd(model) for model in (first, second, first_reference, second_reference)]
    with our_warnings() as texts:
        for step in range(3):
            losses = loss_of(first, local_part(inputs(step))), loss_of(second, local_part(inputs(step + 9)))
            (losses[0] * losses[1]).backward()  # one backward through both
            for ours, theirs in zip(inputs(step).chunk(2), inputs(step + 9).chunk(2)):
                (loss_of(first_reference, ours) * loss_of(second_reference, theirs) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert not texts
    assert_parameters_match(first, first_reference, 1e-6)
    assert_parameters_match(second, second_reference, 1e-6)


@pytest.mark.parametrize("where, recovering", [("forward", 0), ("backward", 1)])
@distributed(world_size=2)
def test_interruption_on_one_rank_names_the_absent_rank_in_time(where, recovering):
    model, _ = stacks(mesh=breakable_mesh())
    after_training(model)
    with environment(**{TIMEOUT_ENV: "1"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_GRACE", timedelta(seconds=0.5))
        if dist.get_rank() == recovering:
            interrupt(model, where, 1, ValueError("by the user"))
            begin = time.monotonic()
            with pytest.raises(
                RuntimeError, match=rf"recovery.*rank\(s\) {1 - recovering} did not arrive.*{TIMEOUT_ENV}"
            ):
                model(inputs())
            assert 1 <= time.monotonic() - begin < 3
        else:  # its collective has no partner
            with pytest.raises(
                RuntimeError,
                match=f"rank {1 - recovering}: the (all-gather|reduce-scatter) of the fully_shard|the control exchange",
            ):
                loss_of(model, local_part(inputs())).backward()
            assert_no_gradients(model)


@pytest.mark.parametrize("with_term", [False, True])
@distributed(world_size=2)
def test_gradient_hooks_that_raise_in_different_groups_leave_no_gradient_on_any_rank(with_term):
    model, reference = stacks()
    blocks, seen = [model.blocks[i].up.weight for i in range(2)], []

    def raise_once(_grad: torch.Tensor) -> None:
        if not seen:
            seen.append("raised")
            raise ValueError("by the user")

    blocks[dist.get_rank()].register_hook(raise_once)
    blocks[1 - dist.get_rank()].register_hook(lambda grad: None)  # autograd's own hooks gather: on all ranks

    def loss_with_term(module: Stack, batch: torch.Tensor) -> torch.Tensor:
        weight = module.blocks[1].up.weight
        return (weight.full_tensor() if isinstance(weight, RaggedDTensor) else weight).sum() + loss_of(module, batch)

    loss = loss_with_term if with_term else loss_of
    with pytest.raises(ValueError, match="by the user"):
        loss(model, local_part(inputs())).backward()
    with our_warnings() as texts:
        loss(model, local_part(inputs(1))).backward()
    assert len(texts) == 1 and "all gradients are None" in texts[0]
    loss(reference, inputs(1)).backward()
    assert_gradients_match(model, reference, 1e-6)
    model.zero_grad()
    reference.zero_grad()
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_interruptions_at_different_places_are_one_error_on_every_rank():
    model, _ = stacks(mesh=breakable_mesh())
    after_training(model)
    with environment(**{TIMEOUT_ENV: "10"}):
        # Rank 0 has gathered the root and prefetched block 0; rank 1 has prefetched block 1 as well.
        if dist.get_rank() == 0:
            model.trip.arm("forward", ValueError("by the user"))
        else:
            model.blocks[0].register_forward_pre_hook(raise_by_the_user)
        with pytest.raises(ValueError, match="by the user"):
            model(inputs())
        words = r"different places on different ranks.*rank 0 after \d+, rank 1 after \d+.*Restart"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=words):
                model(inputs())


def raise_by_the_user(*_: Any) -> None:
    raise ValueError("by the user")


@distributed(world_size=2)
def test_interruptions_far_apart_name_the_absent_rank_and_never_hang():
    model, _ = stacks(mesh=breakable_mesh())
    with environment(**{TIMEOUT_ENV: "1"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_GRACE", timedelta(seconds=0.5))
        if dist.get_rank() == 0:
            interrupt(model, "forward", 0, ValueError("by the user"))
            with pytest.raises(RuntimeError, match=r"rank\(s\) 1 did not arrive"):
                model(inputs())
            time.sleep(2)  # until rank 1's all-gather, which rank 0 never joined, has failed
        else:
            model.blocks[2].trip.arm("forward", ValueError("by the user"))
            with pytest.raises(RuntimeError, match="the all-gather of the fully_shard"):
                model(inputs())
        with pytest.raises(
            RuntimeError, match="different places on different ranks|arrive at the rendezvous|restart the processes"
        ):
            model(inputs())


# ---- 9. Sharded parameters are in place whenever the user looks ------------------------------------------------------


def assert_shows_sharded(module: nn.Module, expected: list[nn.Parameter]) -> None:
    entries = list(module.state_dict().values())
    assert all(isinstance(entry, RaggedDTensor) for entry in entries)
    assert [entry.placements for entry in entries] == [sharded.placements for sharded in expected]
    assert [entry.shape for entry in entries] == [sharded.shape for sharded in expected]
    locals_, expected_locals = [*map(local_of, entries)], [*map(local_of, expected)]
    assert [local.shape for local in locals_] == [local.shape for local in expected_locals]
    assert [local.data_ptr() for local in locals_] == [local.data_ptr() for local in expected_locals]
    assert all(a is b for a, b in zip(module.state_dict(keep_vars=True).values(), expected, strict=True))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_parameters_are_sharded_after_an_exception_in_forward(world_size, reshard_after_forward):
    model, _ = stacks(reshard_after_forward=reshard_after_forward)
    params = list(model.parameters())
    for place in (0, 1, 2):
        for _ in range(2):
            interrupt(model, "forward", place, ValueError("by the user"))
            assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
            assert_shows_sharded(model, params)
    assert {id(param) for param in params} == {id(sharded) for sharded in sharded_params(model)}


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
@distributed(world_size=(2, 3))
def test_state_dict_inside_forward_sees_sharded_parameters(world_size, is_training, reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    params, block_params = list(model.parameters()), list(model.blocks[1].parameters())
    looks = []

    def look() -> None:
        weight = model.blocks[1].up.weight
        assert_shows_sharded(model, params)
        assert_shows_sharded(model.blocks[1], block_params)
        assert model.blocks[1].up.weight is weight  # the running forward goes on with what it had
        looks.append(weight)

    for trip in (model.trip, model.blocks[0].trip, model.blocks[1].trip):
        trip.look = look
    with torch.set_grad_enabled(is_training):
        torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
    assert looks[0] is looks[1] is block_params[2] and looks[2] is not block_params[2]
    assert not isinstance(looks[2], RaggedDTensor) and looks[2].shape == (7, DIM)
    assert_trains_on(model, reference)


@pytest.mark.parametrize("when", ["inside forward", "after a KeyboardInterrupt"])
@distributed(world_size=2)
def test_state_dict_of_an_inner_module_of_a_group_sees_sharded_parameters(when):
    model, _ = stacks()
    up, params = model.blocks[1].up, list(model.blocks[1].up.parameters())
    if when == "inside forward":
        model.blocks[1].trip.look = lambda: assert_shows_sharded(up, params)
        model(inputs())
    else:
        interrupt(model, "forward", 1, KeyboardInterrupt("by the user"))
        assert_shows_sharded(up, params)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_load_state_dict_inside_forward_takes_effect_in_the_next(reshard_after_forward):
    model, reference = stacks(reshard_after_forward=reshard_after_forward)
    model.blocks[1].trip.look = lambda: edit_load_state_dict(model)
    with torch.no_grad():
        model(inputs())
    model.blocks[1].trip.look = lambda: None
    edit_mul(reference)
    torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
    assert_trains_on(model, reference)


@distributed(world_size=2)
def test_load_state_dict_between_forward_and_backward_raises_there():
    model, _ = stacks()
    model.blocks[1].trip.look = lambda: edit_load_state_dict(model)
    with pytest.raises(RuntimeError, match="modified.*between a forward and its backward"):
        loss_of(model, local_part(inputs())).backward()


@pytest.mark.parametrize("where", ["forward", "backward", "recomputation"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_state_dicts_after_a_keyboard_interrupt_see_sharded_parameters(world_size, reshard_after_forward, where):
    options = {"use_reentrant": False} if where == "recomputation" else {}
    model, reference = stacks(reshard_after_forward=reshard_after_forward, **options)
    params, block_params = list(model.parameters()), list(model.blocks[1].parameters())
    after_training(model)
    after_training(reference)
    in_forward = where != "backward"
    model.blocks[1].trip.arm(
        "forward" if in_forward else "backward", KeyboardInterrupt(), passes=where == "recomputation"
    )
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, local_part(inputs())).backward()
    assert_shows_sharded(model, params)
    assert_shows_sharded(model.blocks[1], block_params)
    edit_load_state_dict(model)
    edit_mul(reference)
    assert_shows_sharded(model, params)
    with our_warnings() as texts:
        torch.testing.assert_close(model(inputs()), reference(inputs()), rtol=0, atol=1e-6)
    assert len(texts) == 1
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert_trains_on(model, reference)


# ---- 11. Every group that ran was reduced ----------------------------------------------------------------------------


class Result:
    """A class of the user's that torch knows nothing about."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class Outcome:
    value: torch.Tensor


class Named(NamedTuple):
    value: torch.Tensor
    note: str


class Layer(nn.Module):
    """A block that returns what ``kind`` says; ``read`` gets its value back from that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer, self.gate = nn.Linear(DIM, 7), nn.Linear(7, DIM), nn.Linear(DIM, 3)
        self.kept: torch.Tensor | None = None
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> Any:
        kind = self.kind
        if kind == "auxiliary loss before the output":
            self.aux = self.gate(x).square().mean()
        value = x + self.outer(torch.tanh(self.inner(x)))
        if kind == "auxiliary loss after the output":
            self.aux = self.gate(x * 2).square().mean()
        elif kind == "auxiliary loss of a parameter":
            self.aux = self.gate.weight.square().mean() + self.outer.weight.square().mean()
        elif kind in ("a detached tensor", "a number"):
            self.kept = value
            return value.detach() if kind == "a detached tensor" else 1.5
        elif kind == "None":
            self.kept = value
            return None
        elif kind == "a tensor that the loss does not use":
            self.kept = value
            return value * 2
        makers: dict[str, Callable[[], Any]] = {
            "object": lambda: Result(value),
            "dataclass": lambda: Outcome(value),
            "NamedTuple": lambda: Named(value, "note"),
            "tensor and object": lambda: (value, Result(value)),
            "tensor and parameter": lambda: (value, self.inner.weight),
        }
        return makers[kind]() if kind in makers else value

    def read(self, output: Any) -> torch.Tensor:
        if self.kept is not None:
            value, self.kept = self.kept, None
            return value
        if isinstance(output, torch.Tensor):
            return output
        if type(output) is tuple:
            output = output[1] if isinstance(output[1], Result) else Result(output[0])
        return output.value


class Layers(nn.Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, DIM)
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer.read(layer(x))
        return x


def gradients_or_an_error_that_names(
    group: str, model: nn.Module, reference: nn.Module, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> bool:
    """Three steps with equal gradients; or, on every rank, an error that names the group. Whether there was none."""
    optimizers = sgd(model), sgd(reference)
    for step in range(3):
        try:
            loss(model, local_part(inputs(step))).backward()
        except RuntimeError as error:
            assert group in same_on_every_rank(str(error))
            return False
        loss(reference, inputs(step)).backward()
        assert_gradients_match(model, reference, 1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(loss(model, inputs()), loss(reference, inputs()), rtol=0, atol=1e-6)
    assert_parameters_match(model, reference, 1e-6)
    return True


HOOKABLE = ["NamedTuple"]
SILENT = ["None", "a number", "a detached tensor"]
OPAQUE = ["object", "dataclass", "tensor and object", "tensor and parameter"]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", [*HOOKABLE, *SILENT, *OPAQUE])
@distributed(world_size=2)
def test_block_that_returns_no_plain_tensor_is_reduced(kind, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layers("tensor", kind, "tensor", kind))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    with our_warnings() as texts:
        trained = gradients_or_an_error_that_names(
            "layers.1", model, reference, lambda module, batch: loss_of(module, batch)
        )
    assert trained or kind in OPAQUE
    if kind in OPAQUE and trained:
        assert len(texts) == 2, texts  # once for each group
        assert "layers.1" in texts[0] and "layers.3" in texts[1] and "stay unsharded" in texts[0]
    elif kind in HOOKABLE:
        assert not texts


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", [*HOOKABLE, *SILENT, *OPAQUE])
@distributed(world_size=2)
def test_root_that_returns_no_plain_tensor_is_reduced(kind, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layer(kind))
    fully_shard(model.inner, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    with our_warnings() as texts:
        trained = gradients_or_an_error_that_names(
            "root",
            model,
            reference,
            lambda module, batch: module.read(module(batch.repeat(1, 2)[:, :DIM])).square().mean(),
        )
    assert trained or kind in OPAQUE
    if kind in OPAQUE and trained:
        assert len(texts) == 1 and "(root)" in texts[0], texts


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("order", ["loss + aux", "aux + loss", "aux"])
@pytest.mark.parametrize(
    "kind",
    ["auxiliary loss before the output", "auxiliary loss after the output", "auxiliary loss of a parameter"],
)
@distributed(world_size=2)
def test_block_that_keeps_an_auxiliary_loss_is_reduced(kind, order, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layers("tensor", kind, "tensor", kind))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)

    def loss(module: Layers, batch: torch.Tensor) -> torch.Tensor:
        main = loss_of(module, batch)
        aux = module.layers[1].aux + module.layers[3].aux
        return {"loss + aux": lambda: main + aux, "aux + loss": lambda: aux + main, "aux": lambda: aux}[order]()

    gradients_or_an_error_that_names("layers.", model, reference, loss)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_block_whose_output_the_loss_does_not_use_is_reduced(reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layers("tensor", "a tensor that the loss does not use", "tensor"))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    gradients_or_an_error_that_names("layers.1", model, reference, loss_of)


@pytest.mark.parametrize("kind", ["object", "None"])
@distributed(world_size=2)
def test_root_that_returns_no_plain_tensor_is_reduced_after_a_change_of_dtype(kind):
    torch.manual_seed(0)
    model, reference = pair(Layer(kind))
    fully_shard(model)
    batch = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    with our_warnings():
        model.read(model(local_part(batch))).sum().backward()
        model.zero_grad()
        for module, part in ((model.double(), local_part(batch)), (reference.double(), batch)):
            module.read(module(part.double())).square().mean().backward()
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("kind", ["object", "None", "NamedTuple"])
@distributed(world_size=2)
def test_first_backward_through_two_forwards_of_a_root_that_returns_no_plain_tensor(kind):
    """Backward reaches the aliases of such a root's inputs before anything has told that it began."""
    torch.manual_seed(0)
    model, reference = pair(Layer(kind))
    fully_shard(model)
    params = list(model.parameters())
    with our_warnings():
        for step in range(2):
            for module, share in ((model, local_part), (reference, lambda batch: batch)):
                first, second = (share(inputs(2 * step + i, DIM)).requires_grad_() for i in range(2))
                loss = module.read(module(first)).square().mean()
                (loss + module.read(module(second)).square().mean()).backward()
            assert_gradients_match(model, reference, 1e-6)
            assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))


class Recomputing(Layer):
    """Runs its inner part under activation checkpointing."""

    def __init__(self, kind: str, use_reentrant: bool) -> None:
        super().__init__(kind)
        self.use_reentrant = use_reentrant
        self.block = Block()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(checkpoint(self.block, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", OPAQUE)
@distributed(world_size=2)
def test_group_that_returns_no_plain_tensor_and_recomputes_a_part_of_itself(kind, use_reentrant):
    torch.manual_seed(0)
    model, reference = pair(Recomputing(kind, use_reentrant))
    fully_shard(model)

    def loss(module: Recomputing, batch: torch.Tensor) -> torch.Tensor:
        return module.read(module(batch.repeat(1, 2)[:, :DIM].requires_grad_())).square().mean()

    with our_warnings():
        assert gradients_or_an_error_that_names("root", model, reference, loss)


class Escaping(nn.Module):
    """A block whose auxiliary loss, computed after its output, leaves it by the way that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_calls = kind, 0
        self.inner, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.kept: Any = []

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        value = x + torch.tanh(self.inner(x))
        aux = self.gate(x * 2).square().mean()
        self.num_calls += 1
        self.kept = {
            "list": lambda: [aux],
            "dict": lambda: {"a": aux},
            "dict of lists": lambda: {"a": [aux]},
            "object": lambda: Result(aux),
            "argument": lambda: losses.append(aux),
            "later": lambda: [aux] if self.num_calls > 4 else [],  # switched on after a few steps
        }[self.kind]()
        return value

    def read(self) -> list[torch.Tensor]:
        kept = self.kept
        if isinstance(kept, dict):
            kept = kept["a"]
        return kept if isinstance(kept, list) else [kept.value] if isinstance(kept, Result) else [kept]


class EscapingStack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(IN, DIM), nn.ModuleList(Escaping(kind) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses: list[torch.Tensor] = []
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, losses)
        if self.kind != "argument":
            losses = [loss for layer in self.layers for loss in layer.read()]
        return x, sum(losses, torch.zeros(()))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", ["list", "dict", "dict of lists", "object", "argument"])
@distributed(world_size=2)
def test_auxiliary_loss_that_leaves_a_block_by_another_way_is_reduced(kind, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(EscapingStack(kind))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value, aux = module(batch)
        return value.square().mean() + aux

    for _ in range(2):  # six steps
        if not gradients_or_an_error_that_names("layers.", model, reference, loss):
            break


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)

    def forward(self, x: torch.Tensor, *, history: list[Any], cache: dict[str, Any]) -> torch.Tensor:
        history.append(len(history))
        cache["last"] = x
        return self.linear(x)


class KeepsALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, IN).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.auxiliary = self.linear(y).square().mean()
        return y


class LateGradients(nn.Module):
    """A frozen layer that gets an input that requires grad at its fifth forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = KeepsALoss(), nn.Parameter(torch.ones(IN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(x)
        return self.layer(x * self.scale)


@distributed(world_size=2)
def test_auxiliary_loss_of_a_frozen_block_whose_first_forwards_had_no_gradient():
    model, reference = pair(LateGradients())
    fully_shard(model.layer)
    fully_shard(model)
    for module, x in ((model, local_part(inputs())), (reference, inputs())):
        (module(x).square().mean() + module.layer.auxiliary).backward()
    assert_gradients_match(model, reference, 1e-6)


@distributed(world_size=2)
def test_containers_that_forward_writes_to_are_the_callers():
    model = fully_shard(Appends())
    history: list[Any] = ["begin"]
    cache: dict[str, Any] = {}
    for step in range(2):
        model(inputs(step), history=history, cache=cache)
    assert history == ["begin", 1, 2] and cache["last"].shape == (ROWS, IN)
