"""Things that a user may do with a sharded model: each test does them to an equal unsharded model too, and compares."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import expecttest
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    RaggedDTensor,
    distribute_ragged,
    flat_parameters,
    fully_shard,
    no_sync,
    record_collectives,
    reshard,
    set_requires_gradient_sync,
    set_reshard_after_forward,
    unshard,
)
from fsdp_compose.core.flat.accumulation import UnreducedGradient
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed, fake_process_group
from tests.internals import Collectives, states_of, unsharded_bytes
from tests.models import DIM, GPT, Branches, Layer, Net, gpt_loss, inputs, shard_branches, shard_layers
from tests.models import batches as token_batches
from tests.training import (
    Twins,
    adamw,
    assert_close,
    local_part,
    mean_square,
    pair,
    plain_sgd,
    whole,
)

# ---- what is in a group ----------------------------------------------------------------------------------------------


class MixedDtypes(nn.Module):
    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, 7).to(low)
        self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x).to(self.linear.weight.dtype))
        return (y.float() * self.phase).abs()


@pytest.mark.parametrize(("low", "tolerance"), [(torch.float64, 1e-5), (torch.bfloat16, 2e-2)])
@distributed(world_size=(2, 3))
def test_one_group_of_several_dtypes_has_a_flat_parameter_for_each(low, tolerance):
    twins = Twins(MixedDtypes(low), fully_shard, tolerance=tolerance)
    assert len(get_state(twins.sharded)._handles) == 3
    twins.train()


@distributed(world_size=(2, 3))
def test_one_group_of_frozen_and_trainable_parameters():
    net = Net()
    net.embed.weight.requires_grad_(False)
    net.layers[1].linear.bias.requires_grad_(False)
    twins = Twins(net, fully_shard)
    assert [handle.pending_gradients.is_trainable for handle in get_state(twins.sharded)._handles] == [False, True]
    twins.train()


class IntegerAndBool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.order = nn.Parameter(torch.arange(DIM).flip(0), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(DIM) % 2 == 0, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, self.order] * self.mask


@distributed(world_size=3)
def test_frozen_parameters_that_are_integers_and_booleans():
    twins = Twins(IntegerAndBool(), fully_shard, make_optimizer=lambda params: plain_sgd(list(params)[:2]))
    for batch in inputs(3):
        twins.backward(mean_square, batch)
        twins.check_gradients()
        for twin, optimizer in zip(twins.both, twins.optimizers, strict=True):
            optimizer.step()
            twin.zero_grad()


class Shapes(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() * sum(weight.square().sum() for weight in self.weights)


@pytest.mark.parametrize(
    "shapes", [((), (1,), (0, 4), (7, 3)), ((),), ((1,), (2,)), ((0, 4),), ((0,), (3, 0, 2), ())], ids=str
)
@distributed(world_size=(2, 3))
def test_parameters_of_odd_shapes(shapes):
    twins = Twins(Shapes(*shapes), fully_shard)
    for batch in inputs(3):
        twins.backward(lambda model, x: model(x), batch)
        assert [tuple(p.grad.shape) for p in twins.sharded.parameters()] == list(shapes)
        assert all(p.grad.to_local().shape == p.to_local().shape for p in twins.sharded.parameters())
        twins.step()


@distributed(world_size=(2, 3))
def test_parameters_smaller_than_the_world_leave_ranks_without_elements():
    model = fully_shard(Shapes((), (1,)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [param.to_local().numel() for param in model.parameters()])
    assert [sum(numels) for numels in zip(*everyone, strict=True)] == [1, 1]
    assert [param.numel() for param in model.parameters()] == [1, 1]


@distributed(world_size=3)
def test_group_without_parameters():
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 2))

    def shard(model):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)

    Twins(model, shard).train()


@pytest.mark.parametrize("module", [nn.Linear(0, 0, bias=False), nn.Identity()], ids=["empty weight", "no weight"])
@distributed(world_size=2)
def test_model_without_a_single_element(module):
    assert torch.equal(fully_shard(module)(torch.ones(2, 0)), torch.ones(2, 0))


# ---- parameters that stand in several places -------------------------------------------------------------------------


@distributed(world_size=(2, 3))
def test_tied_embedding_and_head_in_the_root_group():
    twins = Twins(GPT(dim=4, layers=2, tie=True), shard_layers)
    for batch in token_batches(3):
        twins.backward(gpt_loss, batch)
        twins.step()
    assert twins.sharded.head.weight is twins.sharded.tokens.weight


class RegisteredTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(DIM, DIM)
        self.c = nn.Linear(DIM, DIM)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("own_group", [False, True])
@distributed(world_size=(2, 3))
def test_module_and_parameter_registered_twice(own_group):
    def shard(model):
        if own_group:
            fully_shard([model.a, model.c])
        fully_shard(model)

    twins = Twins(RegisteredTwice(), shard)
    assert twins.sharded.a is twins.sharded.b
    assert twins.sharded.a.weight is twins.sharded.c.weight
    twins.train()


class Nested(nn.Module):
    """Three levels: the whole, two halves, two layers in each; every level has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Net(layers=2) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(2, DIM))
        for half in self.halves:
            half.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half, scale in zip(self.halves, self.scale, strict=True):
            x = half(x * scale)
        return x


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=3)
def test_nested_groups_of_three_levels(reshard_after_forward):
    def shard(model):
        for half in model.halves:
            shard_layers(half, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)

    twins = Twins(Nested(), shard)
    assert len(states_of(twins.sharded)) == 7
    twins.train()


# ---- frozen parameters -----------------------------------------------------------------------------------------------


@distributed(world_size=(2, 3))
def test_frozen_group_in_the_middle_is_not_reduced_and_has_no_gradient_memory():
    net = Net()
    net.layers[1].requires_grad_(False)
    twins = Twins(net)
    with Collectives() as collectives:
        twins.train(steps=2)
    (frozen,) = get_state(twins.sharded.layers[1])._handles
    assert collectives.count["reduce_scatter_base"] == 2 * 3, "root and two of the three layers, twice"
    assert frozen.gradient.memory.flat is None
    assert frozen.pending_gradients.accumulation is None
    assert all(param.grad is None for param in twins.sharded.layers[1].parameters())


@distributed(world_size=(2, 3))
def test_frozen_model_reduces_nothing_and_gives_the_gradient_of_its_input():
    twins = Twins(Net().requires_grad_(False), make_optimizer=lambda _: torch.optim.SGD([torch.zeros(1)]))
    batch = next(inputs())
    x, share = batch.clone().requires_grad_(), local_part(batch).clone().requires_grad_()
    mean_square(twins.reference, x).backward()
    with Collectives() as collectives:
        mean_square(twins.sharded, share).backward()
    assert collectives.count["reduce_scatter_base"] == 0
    assert_close(share.grad / dist.get_world_size(), local_part(x.grad), 1e-6, "gradient of the input")
    twins.check_gradients()


@distributed(world_size=3)
def test_frozen_first_layers_and_trainable_head():
    net = Net()
    net.embed.requires_grad_(False)
    net.layers.requires_grad_(False)
    Twins(net).train()


@distributed(world_size=(2, 3))
def test_requires_grad_toggled_between_steps():
    twins = Twins(Net())
    for batch, flags in zip(
        inputs(6), [(True, True), (False, True), (False, False), (True, False), (True, True), (True, True)], strict=True
    ):
        for twin in twins.both:
            twin.layers[1].requires_grad_(flags[0])
            twin.head.weight.requires_grad_(flags[1])
        twins.backward(mean_square, batch)
        twins.step()


# ---- lists of modules ------------------------------------------------------------------------------------------------


class TwoParts(nn.Module):
    """``order`` says which of the parts run, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.parts = nn.ModuleDict({"a": Layer(), "b": Layer()})

    def forward(self, x: torch.Tensor, order: str = "ab") -> torch.Tensor:
        x = self.embed(x)
        for name in order:
            x = self.parts[name](x)
        return x


def shard_parts(model: TwoParts, **kwargs: Any) -> None:
    fully_shard([model.parts["a"], model.parts["b"]], **kwargs)
    fully_shard(model)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=3)
def test_list_of_modules_in_any_order_and_only_some_of_them(reshard_after_forward):
    twins = Twins(TwoParts(), lambda model: shard_parts(model, reshard_after_forward=reshard_after_forward))
    assert get_state(twins.sharded.parts["a"]) is get_state(twins.sharded.parts["b"])
    for batch, order in zip(inputs(8), ["ab", "ba", "a", "b", "", "aba", "bb", "ab"], strict=True):
        twins.backward(lambda model, x, order=order: model(x, order).square().mean(), batch)
        twins.step()
        assert unsharded_bytes(twins.sharded.parts["a"]) == 0


@distributed(world_size=2)
def test_list_of_modules_is_gathered_once_and_kept_from_the_first_to_the_last():
    model = TwoParts()
    shard_parts(model)
    between = []
    model.parts["b"].register_forward_pre_hook(lambda *_: between.append(unsharded_bytes(model.parts["a"])))
    with torch.no_grad(), Collectives() as collectives:
        model(next(inputs()))
    assert collectives.count["allgather_base"] == 2, "the list's group and the root's"
    assert between[0] > 0
    assert unsharded_bytes(model.parts["a"]) == 0


# ---- modules that run more than once ---------------------------------------------------------------------------------


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for i in (0, 1, 0, 0, 1):
            x = self.layers[i](x)
        return x


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=3)
def test_module_used_several_times_in_one_forward(reshard_after_forward):
    Twins(Repeated(), lambda model: shard_layers(model, reshard_after_forward=reshard_after_forward)).train()


class Recursive(nn.Module):
    """Each of the two calls the other, until ``depth`` is used up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.other: list[Recursive] = []  # no submodule: that would be a cycle

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x))
        if depth:
            x = x + self.other[0](x, depth - 1)
        return torch.tanh(self.linear(x))


class MutuallyRecursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Recursive(), Recursive()])
        self.layers[0].other.append(self.layers[1])
        self.layers[1].other.append(self.layers[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x, depth=3)


@distributed(world_size=(2, 3))
def test_block_that_calls_itself_through_another():
    twins = Twins(MutuallyRecursive())
    assert twins.sharded.layers[0].other[0] is twins.sharded.layers[1]
    twins.train()


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=3)
def test_two_forwards_then_one_backward(reshard_after_forward):
    twins = Twins(Net(), lambda model: shard_layers(model, reshard_after_forward=reshard_after_forward))
    twins.train(lambda model, x: (model(x) * model(x.flip(1))).mean())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=3)
def test_two_forwards_then_two_backwards_in_either_order(reshard_after_forward, first):
    twins = Twins(Net(), lambda model: shard_layers(model, reshard_after_forward=reshard_after_forward))

    def forwards_then_backwards(model, x):
        losses = [mean_square(model, x), mean_square(model, x.flip(1))]
        losses[first].backward()
        losses[1 - first].backward()
        return losses[0] + losses[1]

    for batch in inputs(3):
        twins.run(forwards_then_backwards, batch)
        twins.step()


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=3)
def test_backward_twice_through_a_retained_graph(reshard_after_forward):
    twins = Twins(Net(), lambda model: shard_layers(model, reshard_after_forward=reshard_after_forward))

    def backward_twice(model, x):
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    for batch in inputs(3):
        twins.run(backward_twice, batch)
        twins.step()


@distributed(world_size=3)
def test_backward_of_two_outputs_one_by_one():
    twins = Twins(Net())

    def two_losses(model, x):
        a, b = model(x).square().mean(0)
        a.backward(retain_graph=True)
        b.backward()
        return a + b

    for batch in inputs(3):
        twins.run(two_losses, batch)
        twins.step()


# ---- parameters that get no gradient ---------------------------------------------------------------------------------


@distributed(world_size=(2, 3))
def test_unused_parameters_and_unused_groups_have_no_gradient():
    twins = Twins(Branches(), shard_branches)
    for batch, use in zip(inputs(5), ["a", "", "b", "ab", ""], strict=True):
        twins.backward(lambda model, x, use=use: model(x, use).square().mean(), batch)
        grads = twins.check_gradients()
        assert [name for name in "ab" if grads[f"side.{name}.weight"] is not None] == list(use)
        twins.step()


@distributed(world_size=(2, 3))
def test_parameters_used_on_one_rank_get_the_average_with_zeros_everywhere():
    twins = Twins(Branches(), shard_branches)
    for batch, user in zip(inputs(4), [0, 1, dist.get_world_size() - 1, 0], strict=True):
        twins.backward_by_rank(
            lambda model, x, rank, user=user: model(x, "a" if rank == user else "").square().mean(), batch
        )
        grads = twins.check_gradients()
        assert grads["side.a.weight"] is not None
        twins.step()


@distributed(world_size=(2, 3))
def test_forward_whose_output_the_loss_does_not_use():
    def loss_of(model, x):
        model(x, "ab")
        return model.layers[0](x).square().mean()

    Twins(Branches(), shard_branches).train(loss_of)


@distributed(world_size=(2, 3))
def test_detached_output_of_one_layer_stops_gradients_there():
    class Detached(Net):
        def forward(self, x):
            x = self.layers[0](self.embed(x))
            return self.head(self.layers[2](self.layers[1](x).detach()))

    Twins(Detached()).train()


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class PlainDataclass:
    x: torch.Tensor
    scale: float


@dataclasses.dataclass
class PytreeDataclass:
    x: torch.Tensor
    scale: float


torch.utils._pytree.register_dataclass(PytreeDataclass)


class Pair(NamedTuple):
    x: torch.Tensor
    scale: float


class Packed(nn.Module):
    """A layer whose input and output are packed in a container of the same kind."""

    def __init__(self, pack: Callable[[torch.Tensor, float], Any], unpack: Callable[[Any], tuple]) -> None:
        super().__init__()
        self.linear, self.pack, self.unpack = nn.Linear(DIM, DIM), pack, unpack

    def forward(self, packed: Any) -> Any:
        x, scale = self.unpack(packed)
        return self.pack(torch.tanh(self.linear(x)) * scale, scale)


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor, float], Any], Callable[[Any], tuple]]] = {
    "tuple": (lambda x, scale: (x, scale), tuple),
    "list": (lambda x, scale: [scale, [x]], lambda packed: (packed[1][0], packed[0])),
    "dict": (lambda x, scale: {"x": x, "scale": scale}, lambda packed: (packed["x"], packed["scale"])),
    "namedtuple": (Pair, lambda packed: (packed.x, packed.scale)),
    "dataclass": (PlainDataclass, lambda packed: (packed.x, packed.scale)),
    "pytree dataclass": (PytreeDataclass, lambda packed: (packed.x, packed.scale)),
    "nested": (
        lambda x, scale: {"a": (Pair(x, scale), None)},
        lambda packed: (packed["a"][0].x, packed["a"][0].scale),
    ),
}


class PackedNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        pack, unpack = CONTAINERS[kind]
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Packed(pack, unpack) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.layers[0].pack(self.embed(x), 2.0)
        for layer in self.layers:
            packed = layer(packed)
            assert type(packed) is type(self.layers[0].pack(x, 2.0))
        return self.layers[0].unpack(packed)[0]


@pytest.mark.parametrize("kind", CONTAINERS)
@distributed(world_size=3)
def test_containers_as_inputs_and_outputs(kind):
    twins = Twins(PackedNet(kind))
    twins.train()
    assert all(unsharded_bytes(layer) == 0 for layer in twins.sharded.layers)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *more: torch.Tensor, gate: torch.Tensor, **rest: Any) -> dict[str, Any]:
        y = self.linear(x) * gate.sigmoid()
        return {"y": y + sum(more) + rest["extra"]["bias"], "label": rest["label"]}


class KeywordsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([Keywords(), Keywords()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            result = layer(x, x * 2, x * 3, gate=x, extra={"bias": x[0]}, label="a")
            assert result["label"] == "a"
            x = result["y"]
        return x


@distributed(world_size=2)
def test_keyword_arguments_and_dict_outputs():
    twins = Twins(KeywordsNet())
    for batch in inputs(3):  # x[0] is another row on each rank
        twins.backward_by_rank(lambda model, x, _rank: mean_square(model, x), batch)
        twins.step()


class SameTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert q is k and k is v
        q, k, v = (linear(x) for linear, x in zip(self.project, (q, k, v), strict=True))
        y = q * k.tanh() + v
        return y, y


class SameTensorNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([SameTensor(), SameTensor()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x, again = layer(x, x, v=x)
            assert x is again
        return x


@distributed(world_size=(2, 3))
def test_one_tensor_as_three_arguments_and_two_outputs_stays_one_tensor():
    Twins(SameTensorNet()).train()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x += 1
        if y is not None:
            y.add_(x.detach())
        return self.linear(x) if y is None else torch.tanh(self.linear(x)) * y


class InPlaceNet(nn.Module):
    """The layers write to their inputs, and the net goes on with what they wrote."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([InPlace(), InPlace()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            args = [x * 0.5, x * 0.3][: self.num_inputs]
            before = [arg.detach().clone() for arg in args]
            result = layer(*args)
            assert not any(torch.equal(arg, value) for arg, value in zip(args, before, strict=True))
            x = result + sum(args)
        return x


@pytest.mark.parametrize("num_inputs", [1, 2])
@distributed(world_size=3)
def test_forward_writes_to_its_inputs_in_place(num_inputs):
    Twins(InPlaceNet(num_inputs)).train()


class ReturnsView(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(DIM, 2 * DIM), how

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x.tanh())  # not saved for backward: may be written to
        if self.how == "view":
            return y[:, DIM:]
        if self.how == "chunks":
            return y.chunk(2, dim=1)
        if self.how == "view of the input":
            return (x.view(-1, 1, DIM) + y.sum()).squeeze(1)[:, :]
        return x.view_as(x)


class ReturnsViewNet(nn.Module):
    def __init__(self, how: str, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([ReturnsView(how), ReturnsView(how)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            result = layer(x)
            result = result[0] * result[1] if isinstance(result, tuple) else result
            if self.in_place:
                result.add_(1)
                result[0].mul_(2)
            x = result * 1
        return x


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", ["view", "chunks", "view of the input", "input"])
@distributed(world_size=2)
def test_outputs_that_are_views_and_writes_to_them(how, in_place):
    twins = Twins(ReturnsViewNet(how, in_place))
    for batch in inputs(3):  # result[0] is another row on each rank
        twins.backward_by_rank(lambda model, x, _rank: mean_square(model, x), batch)
        twins.step()


class WritesToAViewAndReturnsIt(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)[:, :]
        y[:, 0].mul_(2)
        return y


@distributed(world_size=2)
def test_output_that_is_a_view_written_to_through_another_view():
    net = Net()
    net.layers[1] = WritesToAViewAndReturnsIt()
    Twins(net).train()


class ReturnsParameter(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(DIM, DIM)), how

    def forward(self) -> torch.Tensor:
        if self.how == "parameter":
            return self.weight
        return self.weight[:] if self.how == "view" else self.weight.detach()


class ReturnsParameterNet(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([ReturnsParameter(how), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.embed(x) @ self.layers[0]())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["parameter", "view", "detached"])
@distributed(world_size=3)
def test_output_that_is_the_modules_own_parameter(how, frozen):
    net = ReturnsParameterNet(how)
    net.layers[0].requires_grad_(not frozen)
    Twins(net).train()


@pytest.mark.parametrize("how", ["parameter", "view", "detached"])
@distributed(world_size=2)
def test_output_that_is_the_modules_own_parameter_without_gradients(how):
    twins = Twins(ReturnsParameterNet(how))
    (batch,) = inputs()
    with torch.no_grad():
        assert_close(twins.sharded(batch), twins.reference(batch), 1e-6, "output")


@distributed(world_size=(2, 3))
def test_gradients_of_leaf_inputs():
    twins = Twins(Net())
    for batch in inputs(3):
        x, share = batch.clone().requires_grad_(), local_part(batch).clone().requires_grad_()
        mean_square(twins.reference, x).backward()
        mean_square(twins.sharded, share).backward()
        assert_close(share.grad / dist.get_world_size(), local_part(x.grad), 1e-6, "gradient of the input")
        twins.step()


@pytest.mark.parametrize("has_gradient", [False, True])
@distributed(world_size=3)
def test_gradient_of_an_input_alone_leaves_those_of_parameters_as_they_are(has_gradient):
    twins = Twins(Net())
    for batch in inputs(2):
        if has_gradient:
            twins.backward(mean_square, batch)
        grads = [param.grad for param in twins.sharded.parameters()]
        values = copy.deepcopy(grads)
        x, share = batch.clone().requires_grad_(), local_part(batch).clone().requires_grad_()
        (expected,) = torch.autograd.grad(mean_square(twins.reference, x), x)
        (got,) = torch.autograd.grad(mean_square(twins.sharded, share), share)
        assert_close(got / dist.get_world_size(), local_part(expected), 1e-6, "gradient of the input")
        for param, grad, value in zip(twins.sharded.parameters(), grads, values, strict=True):
            assert param.grad is grad
            assert grad is None or torch.equal(grad, value)
        assert all(unsharded_bytes(layer) == 0 for layer in twins.sharded.layers)
        twins.backward(mean_square, batch)
        twins.step()


def penalty_of_whole(model: nn.Module) -> torch.Tensor:
    penalty = sum(param.square().sum() for param in model.parameters())
    return penalty.full_tensor() if isinstance(penalty, DTensor) else penalty


def penalty_of_local(model: nn.Module) -> torch.Tensor:
    """A share on each rank: the shares' gradients are those of their sum."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).square().sum() for p in model.parameters())


@pytest.mark.parametrize("penalty_of", [penalty_of_whole, penalty_of_local])
@pytest.mark.parametrize("when", ["before forward", "after forward"])
@distributed(world_size=3)
def test_loss_terms_on_the_sharded_parameters_themselves(when, penalty_of):
    twins = Twins(Net())

    def data_and_penalty(model, x):
        penalty = 0.0
        if when == "before forward":
            penalty = penalty_of(model)
        loss = mean_square(model, x)
        if when == "after forward":
            penalty = penalty_of(model)
        (loss + 0.1 * penalty).backward()
        return loss

    for batch in inputs(3):
        for _ in range(2):
            twins.run(data_and_penalty, batch)
        with torch.no_grad():
            expected, got = map(penalty_of_whole, twins.both)
        assert_close(got, expected, 1e-4, "penalty")
        twins.step()


@distributed(world_size=3)
def test_loss_on_activations_captured_by_hooks():
    twins = Twins(Net())

    def captured(model, x):
        seen = []
        hooks = [
            module.register_forward_hook(lambda _module, _args, output: seen.append(output))
            for module in (model.embed, model.layers[1])
        ]
        y = model(x)
        for hook in hooks:
            hook.remove()
        return sum(activation.square().mean() for activation in (y, *seen))

    twins.train(captured)


@distributed(world_size=3)
def test_full_backward_hooks_on_sharded_modules():
    twins = Twins(Net())
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for twin, gradients in zip(twins.both, seen, strict=True):
        for layer in twin.layers:
            layer.register_full_backward_pre_hook(lambda _module, outer, to=gradients: to.append(outer[0].clone()))
            layer.register_full_backward_hook(lambda _module, inner, _outer, to=gradients: to.append(inner[0].clone()))
    twins.train(steps=2)
    expected, got = seen
    assert len(got) == len(expected) == 2 * 3 * 2
    for a, b in zip(got, expected, strict=True):
        assert_close(a / dist.get_world_size(), local_part(b), 1e-6, "gradient of an activation")


# ---- gradient accumulation -------------------------------------------------------------------------------------------


def accumulate(twins: Twins, batch: torch.Tensor, without_sync: tuple[bool, ...]) -> None:
    """One backward per flag."""
    for share, off in zip(batch.chunk(len(without_sync)), without_sync, strict=True):
        with no_sync(twins.sharded) if off else nullcontext():
            twins.backward(mean_square, share)


@pytest.mark.parametrize("without_sync", [(False, False), (True, False), (False, True, False), (True, False, False)])
@distributed(world_size=2)
def test_accumulation_with_and_without_sync(without_sync):
    twins = Twins(Net())
    for batch in inputs(3):
        accumulate(twins, batch, without_sync)
        twins.step()


@distributed(world_size=(2, 3))
def test_no_communication_of_gradients_without_sync():
    twins = Twins(Net())
    (batch,) = inputs()
    with Collectives() as collectives, no_sync(twins.sharded):
        twins.backward(mean_square, batch)
    assert collectives.count["reduce_scatter_base"] == 0
    assert all(type(param.grad) is UnreducedGradient for param in twins.sharded.parameters())
    with Collectives() as collectives:
        twins.backward(mean_square, batch)
    assert collectives.count["reduce_scatter_base"] == 4
    twins.step()


@distributed(world_size=(2, 3))
def test_gradient_sync_switched_off_for_some_groups():
    twins = Twins(Net())
    for batch in inputs(3):
        set_requires_gradient_sync(twins.sharded.layers[1], False)
        set_requires_gradient_sync(twins.sharded, False, recurse=False)
        twins.backward(mean_square, batch)
        assert type(twins.sharded.layers[1].linear.weight.grad) is UnreducedGradient
        assert type(twins.sharded.head.weight.grad) is UnreducedGradient
        assert type(twins.sharded.layers[0].linear.weight.grad) is RaggedDTensor
        set_requires_gradient_sync(twins.sharded, True)
        twins.backward(mean_square, batch)
        twins.step()


@distributed(world_size=(2, 3))
def test_parameter_that_only_a_backward_without_sync_used():
    twins = Twins(Branches(), shard_branches)
    for batch, uses in zip(inputs(3), [("ab", ""), ("a", "b"), ("b", "b")], strict=True):
        for use, context in zip(uses, (no_sync(twins.sharded), nullcontext()), strict=True):
            with context:
                twins.backward(lambda model, x, use=use: model(x, use).square().mean(), batch)
        set_requires_gradient_sync(twins.sharded, True)
        twins.step()


@distributed(world_size=1)
def test_no_sync_restores_each_groups_flag_also_after_an_exception():
    model = shard_layers(Net())
    set_requires_gradient_sync(model.layers[1], False)
    before = [state.options.requires_gradient_sync for state in states_of(model)]
    assert before == [True, True, False, True]
    with no_sync(model):
        assert not any(state.options.requires_gradient_sync for state in states_of(model))
    assert [state.options.requires_gradient_sync for state in states_of(model)] == before
    with pytest.raises(ZeroDivisionError), no_sync(model):
        raise ZeroDivisionError
    assert [state.options.requires_gradient_sync for state in states_of(model)] == before


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=3)
def test_zero_grad_between_forward_and_backward(reshard_after_forward):
    twins = Twins(Net(), lambda model: shard_layers(model, reshard_after_forward=reshard_after_forward))

    def zero_grad_in_between(model, x):
        loss = mean_square(model, x)
        model.zero_grad()
        loss.backward()
        return loss

    for batch in inputs(3):
        twins.run(zero_grad_in_between, batch)
        twins.check_gradients()
        for optimizer in twins.optimizers:
            optimizer.step()
        twins.check_parameters()


@distributed(world_size=3)
def test_gradients_zeroed_in_place():
    twins = Twins(Net())
    for batch in inputs(3):
        twins.backward(mean_square, batch)
        twins.step(set_to_none=False)
        assert all((param.grad.full_tensor() == 0).all() for param in twins.sharded.parameters())


def drop_some(model: nn.Module) -> None:
    model.head.weight.grad = None
    model.layers[1].zero_grad()


def replace_some(model: nn.Module) -> None:
    model.head.weight.grad = torch.ones_like(model.head.weight)
    for param in model.layers[1].parameters():
        param.grad = torch.full_like(param, 0.5)


def replace_one_and_drop_another(model: nn.Module) -> None:
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.head.bias.grad = None


def scale_in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


@pytest.mark.parametrize("edit", [drop_some, replace_some, replace_one_and_drop_another, scale_in_place])
@distributed(world_size=3)
def test_gradients_that_the_user_edits_between_microbatches(edit):
    twins = Twins(Net())
    for batch in inputs(3):
        for share in batch.chunk(2):
            twins.backward(mean_square, share)
            for twin in twins.both:
                edit(twin)
        twins.backward(mean_square, batch)
        twins.step()


@distributed(world_size=3)
def test_gradient_dropped_for_an_unused_parameter_stays_none():
    twins = Twins(Branches(), shard_branches)
    for first, second in [("a", ""), ("", "a"), ("a", "a"), ("a", "b")]:
        for batch, use in zip(inputs(2), (first, second), strict=True):
            for twin in twins.both:
                twin.side["a"].zero_grad()
            twins.backward(lambda model, x, use=use: model(x, use).square().mean(), batch)
        twins.step()


HOLD: dict[str, Callable[[nn.Module], Any]] = {
    "gradients": lambda model: [param.grad for param in model.parameters()],
    "one gradient": lambda model: [model.layers[1].linear.weight.grad],
    "views": lambda model: [param.grad.view(-1) for param in model.parameters()],
    "detached": lambda model: [model.head.weight.grad.detach()],
    "local": lambda model: [param.grad.to_local() for param in model.parameters()],
    "numpy": lambda model: [param.grad.to_local().numpy() for param in model.parameters()],
}


@pytest.mark.parametrize("has_flat_views", [False, True])
@distributed(world_size=2)
def test_gradients_that_were_read_by_numpy(has_flat_views):
    """Torch cannot take memory away that NumPy has seen, even if nothing holds it any more."""
    twins = Twins(Net())
    views = flat_parameters(twins.sharded) if has_flat_views else []
    for batch in inputs(4):
        twins.backward(mean_square, batch)
        twins.check_gradients()
        norms = [float(np.linalg.norm(param.grad.to_local().numpy())) for param in twins.sharded.parameters()]
        norms += [float(np.linalg.norm(view.grad.to_local().numpy())) for view in views]
        assert any(norms)
        for optimizer in twins.optimizers:
            optimizer.step()
        for tensor in (*views, *twins.sharded.parameters(), *twins.reference.parameters()):
            tensor.grad = None
        twins.check_parameters()


@pytest.mark.parametrize("drop", ["zero_grad", "set_to_none by hand"])
@pytest.mark.parametrize("held", HOLD)
@distributed(world_size=2)
def test_gradient_that_the_user_holds_never_changes(held, drop):
    twins = Twins(Net())
    kept = []
    for batch in inputs(3):
        twins.backward(mean_square, batch)
        twins.check_gradients()
        holding = HOLD[held](twins.sharded)
        kept.append((holding, copy.deepcopy(holding)))
        for optimizer in twins.optimizers:
            optimizer.step()
        for twin in twins.both:
            if drop == "zero_grad":
                twin.zero_grad()
            else:
                for param in twin.parameters():
                    param.grad = None
        twins.check_parameters()
        for holding, copies in kept:
            for value, original in zip(holding, copies, strict=True):
                assert (value == original).all()


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, where: str, use_reentrant: bool) -> None:
        super().__init__()
        self.where, self.use_reentrant = where, use_reentrant
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)
        layer = (lambda: CheckpointedInside(use_reentrant)) if where == "inside" else Layer
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.where == "two blocks":
            for pair in (self.layers[:2], self.layers[2:]):
                x = checkpoint(lambda x, pair=pair: pair[1](pair[0](x)), x, use_reentrant=self.use_reentrant)
        elif self.where == "every other block":
            for i, layer in enumerate(self.layers):
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant) if i % 2 else layer(x)
        elif self.where == "the whole":
            x = checkpoint(lambda x: nn.Sequential(*self.layers)(x), x, use_reentrant=self.use_reentrant)
        else:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant) if self.where == "block" else layer(x)
        return self.head(x)


class CheckpointedInside(Layer):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.more, self.use_reentrant = nn.Linear(DIM, DIM), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = lambda x: torch.tanh(self.linear(x)) * self.linear.bias  # noqa: E731
        return self.more(x + checkpoint(inner, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["block", "two blocks", "inside", "every other block", "the whole"])
@distributed(world_size=3)
def test_activation_checkpointing(where, use_reentrant):
    twins = Twins(Checkpointed(where, use_reentrant))
    twins.train()
    assert all(unsharded_bytes(layer) == 0 for layer in twins.sharded.layers)


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_activation_checkpointing_with_accumulation_without_sync(use_reentrant):
    twins = Twins(Checkpointed("two blocks", use_reentrant))
    for batch in inputs(3):
        accumulate(twins, batch, (True, False))
        twins.step()


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=3)
def test_evaluation_before_and_between_training_steps(reshard_after_forward, mode):
    twins = Twins(Net(), lambda model: shard_layers(model, reshard_after_forward=reshard_after_forward))
    identities = [id(param) for param in twins.sharded.parameters()]
    for batch in inputs(3):
        for _ in range(2):
            with mode():
                expected, got = twins.reference(batch), twins.sharded(batch)
            assert_close(got, expected, 1e-5, "output")
            assert all(unsharded_bytes(module) == 0 for module in (*twins.sharded.layers, twins.sharded))
        twins.backward(mean_square, batch)
        twins.step()
    assert [id(param) for param in twins.sharded.parameters()] == identities


@distributed(world_size=(2, 3))
def test_evaluation_between_forward_and_backward():
    twins = Twins(Net())

    def evaluate_in_between(model, x):
        loss = mean_square(model, x)
        with torch.no_grad():
            value = mean_square(model, x)
        loss.backward()
        return value

    for batch in inputs(3):
        twins.run(evaluate_in_between, batch)
        twins.step()


@distributed(world_size=2)
def test_parameters_inside_forward_under_inference_mode_can_be_refilled():
    twins = Twins(Net())
    with torch.inference_mode():
        twins.sharded(next(inputs()))
        unshard(twins.sharded.layers[0])
        reshard(twins.sharded.layers[0])
    assert not any(param.is_inference() for param in twins.sharded.parameters())
    twins.train()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        self.layers[1][0] = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


@distributed(world_size=(2, 3))
def test_batch_norm_in_training_and_evaluation_mode():
    twins = Twins(Normed())
    world_size = dist.get_world_size()
    # Statistics are each rank's own: the reference plays all ranks, each with its own running statistics.
    statistics = [copy.deepcopy(dict(twins.reference.named_buffers())) for _ in range(world_size)]
    for batch, is_training in zip(inputs(4), [True, False, True, False], strict=True):
        for twin in twins.both:
            assert twin.train(is_training) is twin
        for mine, share in zip(statistics, batch.chunk(world_size), strict=True):
            twins.reference.load_state_dict(mine, strict=False)
            (mean_square(twins.reference, share) / world_size).backward()
            mine.update(copy.deepcopy(dict(twins.reference.named_buffers())))
        mean_square(twins.sharded, local_part(batch)).backward()
        for name, buffer in twins.sharded.named_buffers():
            assert_close(buffer, statistics[dist.get_rank()][name], 1e-6, name)
        twins.step()


class FrozenStem(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        return self.head(self.layers[1](x))


@distributed(world_size=3)
def test_first_layers_run_without_gradients():
    Twins(FrozenStem()).train()


# ---- kinds of modules ------------------------------------------------------------------------------------------------


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(DIM, DIM), torch.randn(DIM)])
        self.dict = nn.ParameterDict({"scale": torch.randn(DIM), "shift": torch.randn(1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.list[0] + self.list[1]
        return torch.tanh(x) * self.dict["scale"] + self.dict["shift"]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(1, 3, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, hidden = self.rnn(x.unsqueeze(-1))
        return y[:, -1].sum(-1) + (hidden[0] if isinstance(hidden, tuple) else hidden).sum((0, 2))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 3, 3), nn.ConvTranspose1d(3, 2, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.unsqueeze(1))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(len(x), 5, 1).expand(-1, -1, 4)
        return self.attention(x, x, x, need_weights=False)[0]


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(7, 3, padding_idx=0), nn.EmbeddingBag(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 3).long().clamp(max=6)
        return self.table(ids).sum(1) + self.bag(ids)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Conv": Convolution,
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "RNN": lambda: Recurrent(nn.RNN),
    "MultiheadAttention": Attention,
    "TransformerEncoderLayer": lambda: nn.Sequential(
        nn.Linear(DIM, 8),
        nn.Unflatten(1, (2, 4)),
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
    ),
    "ParameterList": Parameters,
    "weight_norm": lambda: nn.Sequential(
        *(nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(2))
    ),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM)).eval(),
    "Embedding": Lookup,
}


class Caching(nn.Module):
    """Keeps its weights in a list, as ``nn.RNN`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.cached = [self.scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.cached[0] is self.scale
        return torch.tanh(self.linear(x)) * self.cached[0]


@pytest.mark.parametrize("convert", [False, True])
@distributed(world_size=3)
def test_lists_in_which_modules_cache_their_weights(convert):
    for module in (Caching(), Recurrent(nn.LSTM)):
        twins = Twins(module, fully_shard, make_optimizer=plain_sgd)
        twins.train()
        cached = module.cached if isinstance(module, Caching) else module.rnn._flat_weights
        registered = {id(param) for param in module.parameters()}
        assert all(id(param) in registered for param in cached), "outside forward it holds the sharded parameters"
        if convert:
            for twin in twins.both:
                twin.double()
            for x in inputs(2):
                twins.backward(mean_square, x.double())
                twins.step()


@pytest.mark.parametrize("own_groups", [False, True])
@pytest.mark.parametrize("kind", MODULES)
@distributed(world_size=3)
def test_modules_of_torch(kind, own_groups):
    def shard(model):
        if own_groups:
            for child in model.children():
                if not isinstance(child, (nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):  # they have no forward
                    fully_shard(child)
        fully_shard(model)

    twins = Twins(MODULES[kind](), shard)
    for batch in inputs(3):
        twins.backward(mean_square, batch)
        modes = [twin.training for twin in twins.both]
        with torch.no_grad():  # where some modules take a fast path of their own
            assert_close(twins.sharded.eval()(batch), twins.reference.eval()(batch), 1e-4, "output")
        for twin, mode in zip(twins.both, modes, strict=True):
            twin.train(mode)
        twins.step()


# ---- mixed precision -------------------------------------------------------------------------------------------------


class Observing(Layer):
    """Remembers which dtypes it saw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = next(self.parameters())
        self.seen = {"input": x.dtype, "parameter": weight.dtype, "registered": self.linear._parameters["bias"].dtype}
        return super().forward(x.to(weight.dtype))


class ObservingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Observing(), Observing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = []
        for layer in self.layers:
            x = layer(x)
            self.seen.append(x.dtype)
        return x


@pytest.mark.parametrize("cast_forward_inputs", [True, False])
@distributed(world_size=2)
def test_dtypes_seen_inside_and_outside_forward(cast_forward_inputs):
    low, half = torch.bfloat16, torch.float16
    policy = MixedPrecisionPolicy(low, torch.float32, half, cast_forward_inputs=cast_forward_inputs)
    model = shard_layers(ObservingNet(), mp_policy=policy)
    (batch,) = inputs()
    output = model(batch)
    inside = {"parameter": low, "registered": low}
    assert model.layers[0].seen == {"input": low if cast_forward_inputs else torch.float32, **inside}
    assert model.layers[1].seen == {"input": low if cast_forward_inputs else half, **inside}
    assert model.seen == [half, half]
    assert output.dtype == half
    output.float().mean().backward()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@distributed(world_size=2)
def test_integer_and_nested_inputs_are_cast_as_far_as_they_are_floating_point():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x, *, ids, more):
            assert (x.dtype, ids.dtype) == (torch.bfloat16, torch.int64)
            assert (more["mask"].dtype, more["y"].dtype) == (torch.bool, torch.bfloat16)
            return {"x": self.linear(x), "ids": ids}

    model = fully_shard(Nested(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    (x,) = inputs()
    output = model(x, ids=torch.arange(3), more={"mask": torch.ones(1, dtype=torch.bool), "y": x.double()})
    assert (output["x"].dtype, output["ids"].dtype) == (torch.float64, torch.int64)


class AttributeDict(dict):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class ConfiguredList(list):
    def __init__(self, items: Any, scale: float) -> None:
        super().__init__(items)
        self.scale = scale


class TensorTuple(tuple):
    pass


class NamedBatch(NamedTuple):
    x: Any


@dataclasses.dataclass
class DataBatch:
    x: Any
    num_made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        assert not self.num_made
        self.num_made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenBatch:
    x: Any


class CacheNode:
    """A key/value cache that is a pytree, as torch.export wants it."""

    def __init__(self, kept: Any = ()) -> None:
        self.kept = [*kept]


register_pytree_node(CacheNode, lambda cache: (cache.kept, None), lambda kept, _: CacheNode(kept))

CAST_CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"x": x}, lambda batch: batch["x"]),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda batch: batch["x"]),
    "default dict": (lambda x: defaultdict(list, x=x), lambda batch: [batch["x"], batch["absent"]][0]),
    "attribute dict": (lambda x: AttributeDict(x=x), lambda batch: [batch["x"], batch.x][1]),
    "list": (lambda x: [x], lambda batch: batch[0]),
    "list's subclass": (lambda x: ConfiguredList([x], 1.0), lambda batch: batch[0] * batch.scale),
    "tuple's subclass": (lambda x: TensorTuple([x]), lambda batch: batch[0]),
    "named tuple": (NamedBatch, lambda batch: batch.x),
    "set": (lambda x: {x}, lambda batch: [*batch][0]),
    "deque": (lambda x: deque([x], maxlen=1), lambda batch: [batch[0], batch.maxlen + 1][0]),
    "packed sequence": (lambda x: pack_sequence([x]), lambda batch: batch.data),
    "dataclass": (DataBatch, lambda batch: [batch.x, 1 / batch.num_made][0]),
    "frozen dataclass": (FrozenBatch, lambda batch: batch.x),
    "nested": (lambda x: [DataBatch({"x": NamedBatch(x)})], lambda batch: batch[0].x["x"].x),
}


class ContainerNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(DIM, DIM), kind

    def forward(self, batch: Any) -> Any:
        self.seen = type(batch)
        make, get = CAST_CONTAINERS[self.kind]
        return make(self.linear(get(batch)))


@pytest.mark.parametrize("kind", CAST_CONTAINERS)
@distributed(world_size=2)
def test_tensors_in_containers_are_cast_and_the_containers_keep_their_class(kind):
    make, get = CAST_CONTAINERS[kind]
    reference = ContainerNet(kind)
    model = fully_shard(
        copy.deepcopy(reference), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    )
    reference.bfloat16()
    (x,) = inputs()
    given = make(x)
    output = model(given)
    assert get(given).dtype == torch.float32  # what the caller has is left alone
    assert (model.seen, type(output)) == (type(given), type(given))
    expected = reference(make(x.bfloat16()))
    assert torch.equal(get(output), get(expected).double())
    get(output).sum().backward()
    get(expected).double().sum().backward()
    for param, own in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(param.grad.full_tensor(), own.grad.float(), 2e-2, "a gradient")


class CachingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, cache: CacheNode, scale: torch.Tensor) -> torch.Tensor:
        assert scale.dtype == torch.bfloat16
        y = self.linear(x)
        cache.kept.append(y.float() * scale.float())
        return y + sum(cache.kept).to(y.dtype)


class CachingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachingLayer() for _ in range(2))

    def forward(self, x: torch.Tensor, cache: CacheNode, scale: torch.Tensor) -> tuple[torch.Tensor, CacheNode]:
        for layer in self.layers:
            x = layer(x, cache, scale)
        return x, cache


@distributed(world_size=2)
def test_an_object_that_is_a_pytree_stays_the_callers_when_inputs_and_outputs_are_cast():
    reference = CachingNet()
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = shard_layers(copy.deepcopy(reference), mp_policy=policy)
    reference.bfloat16()
    cache, own_cache = CacheNode(), CacheNode()
    with torch.no_grad():
        for scale in torch.ones(3, 1):
            (x,) = inputs()
            y, returned = model(x, cache, scale)
            own, _ = reference(x.bfloat16(), own_cache, scale.bfloat16())
            assert returned is cache
            assert torch.equal(y, own.float())
    assert len(cache.kept) == len(own_cache.kept) == 6
    assert all(map(torch.equal, cache.kept, own_cache.kept))


@dataclasses.dataclass
class TreeNode:
    x: torch.Tensor
    children: list[TreeNode] = dataclasses.field(default_factory=list)
    parent: TreeNode | None = None


class TreeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, tree: TreeNode) -> torch.Tensor:
        return self.linear(tree.x + sum(child.x for child in tree.children))


@distributed(world_size=2)
def test_inputs_that_refer_to_themselves_are_cast_once():
    reference = TreeNet()
    model = fully_shard(copy.deepcopy(reference), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    (x,) = inputs()
    tree = TreeNode(x)
    tree.children = [TreeNode(x, parent=tree), TreeNode(x, parent=tree)]
    assert torch.equal(model(tree), reference.bfloat16()(TreeNode(x.bfloat16(), [TreeNode(x.bfloat16())] * 2)))


@pytest.mark.parametrize("accumulation", ["none", "sync", "no_sync"])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, None])
@distributed(world_size=3)
def test_low_precision_training_equals_casting_by_hand(reduce_dtype, accumulation):
    model, reference = pair(Net())
    for layer in model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, output_dtype=torch.float32))
    optimizers = [adamw(twin.parameters()) for twin in (model, reference)]
    tolerance = 1e-2 if reduce_dtype is torch.bfloat16 else 1e-6  # rounded to bf16 once more, or twice
    for batch in inputs(3):
        parts = batch.chunk(1 if accumulation == "none" else 2)
        grads = {name: torch.zeros_like(param) for name, param in reference.named_parameters()}
        for i, part in enumerate(parts):
            with no_sync(model) if accumulation == "no_sync" and i + 1 < len(parts) else nullcontext():
                mean_square(model, local_part(part)).backward()
            for share in part.chunk(dist.get_world_size()):
                low = copy.deepcopy(reference).bfloat16()
                low(share.bfloat16()).float().square().mean().backward()
                for name, param in low.named_parameters():
                    grads[name] += param.grad.float() / dist.get_world_size()
        got = whole(model, lambda param: param.grad, reference)
        for name, param in reference.named_parameters():
            param.grad = grads[name]
            assert_close(got[name], grads[name], tolerance, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, param in whole(model, lambda param: param, reference).items():
            assert_close(param, reference.get_parameter(name).detach(), max(tolerance, 1e-5), name)


@distributed(world_size=2)
def test_gradients_are_reduced_in_reduce_dtype():
    for reduce_dtype, expected in [(None, torch.float32), (torch.bfloat16,) * 2, (torch.float64,) * 2]:
        model = shard_layers(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
        with record_collectives(model) as lines:
            model(next(inputs())).float().mean().backward()
        dtypes = {line.split(" x ")[1].split()[0] for line in lines if line.startswith("reduce-scatter")}
        assert dtypes == {str(expected).removeprefix("torch.")}


# ---- steering by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@distributed(world_size=3)
def test_unshard_ahead_of_forward_and_reshard(async_op):
    twins = Twins(Net())
    layer = twins.sharded.layers[1]
    identities = [id(param) for param in layer.parameters()]
    for batch in inputs(3):
        handle = unshard(layer, async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
            handle.wait()
        assert unsharded_bytes(layer) > 0
        assert [id(param) for param in layer.parameters()] == identities, "parameters are swapped only in forward"
        with Collectives() as collectives, torch.no_grad():
            assert_close(twins.sharded(batch), twins.reference(batch), 1e-5, "output")
        assert collectives.count["allgather_base"] == 4, "root and three layers: it may have been edited since"
        assert unsharded_bytes(layer) == 0
        unshard(layer)
        twins.backward(mean_square, batch)
        twins.step()
        unshard(layer)
        reshard(layer)
        assert unsharded_bytes(layer) == 0


@distributed(world_size=2)
def test_unshard_before_the_first_forward_and_a_step_between_unshard_and_forward():
    twins = Twins(Net())
    unshard(twins.sharded.layers[0])
    twins.train(steps=1)
    (batch,) = inputs()
    twins.backward(mean_square, batch)
    reshard(twins.sharded.layers[0])
    twins.step()
    twins.train(steps=1)


@distributed(world_size=(2, 3))
def test_parameters_edited_between_unshard_and_forward_are_used():
    twins = Twins(Net())
    twins.train(steps=1)
    unshard(twins.sharded.layers[0])
    with torch.no_grad():
        for twin in twins.both:
            for param in twin.layers[0].parameters():
                param.mul_(2)
    twins.train(steps=1)


@distributed(world_size=2)
def test_set_reshard_after_forward_from_the_next_forward_on():
    twins = Twins(Net())
    for batch, flag in zip(inputs(4), [False, True, False, True], strict=True):
        set_reshard_after_forward(twins.sharded, flag)
        set_reshard_after_forward(twins.sharded.layers[0], True, recurse=False)
        loss = mean_square(twins.sharded, local_part(batch))
        kept = [unsharded_bytes(layer) > 0 for layer in (*twins.sharded.layers, twins.sharded)]
        assert kept == [False, not flag, not flag, not flag]
        loss.backward()
        mean_square(twins.reference, batch).backward()
        twins.step()


# ---- who is root, and when -------------------------------------------------------------------------------------------


@distributed(world_size=(2, 3))
def test_forward_of_a_child_before_the_roots_first_forward():
    twins = Twins(Net())
    for batch in inputs(2):
        twins.backward(lambda model, x: model.layers[0](x).square().mean(), batch)
        twins.check_gradients()
    twins.train()
    loss = mean_square(twins.sharded, local_part(batch))
    assert unsharded_bytes(twins.sharded.layers[0]) == 0, "it is not the root's group: resharded after forward"
    loss.backward()


@distributed(world_size=(2, 3))
def test_forwards_of_children_after_the_roots_first_forward():
    twins = Twins(Net())
    twins.train(steps=1)
    for batch in inputs(2):
        twins.backward(lambda model, x: model.layers[1](model.layers[0](x)).square().mean(), batch)
        twins.step()
    twins.train(steps=1)


@pytest.mark.parametrize("between", ["backward", "step", "unfinished backward"])
@distributed(world_size=(2, 3))
def test_parent_sharded_after_its_child_has_run(between):
    def shard_layer(model: nn.Module) -> None:
        fully_shard(model.layers[0])

    twins = Twins(Net(), shard_layer, lambda params: plain_sgd([*params]))
    (batch,) = inputs()
    losses = [
        model.layers[0](x).square().mean() for model, x in zip(twins.both, (batch, local_part(batch)), strict=True)
    ]
    for loss in losses if between != "unfinished backward" else ():
        loss.backward()
    if between == "step":
        for model in twins.both:
            torch.optim.SGD(model.layers[0].parameters(), lr=0.1).step()
            model.zero_grad()
    fully_shard(twins.sharded.layers[1])
    fully_shard(twins.sharded)
    twins.optimizers = [plain_sgd(model.parameters()) for model in twins.both]
    for loss in losses if between == "unfinished backward" else ():
        loss.backward()
    twins.train()


@distributed(world_size=2)
def test_backward_of_a_child_that_ran_before_the_root_was_known():
    twins = Twins(Net())

    def child_then_root(model, x):
        early = model.layers[0](x).square().mean()
        loss = early + mean_square(model, x)
        loss.backward()
        return loss

    twins.run(child_then_root, next(inputs()))
    twins.step()
    twins.train()


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=3)
def test_two_models_that_train_through_each_other(reshard_after_forward):
    """A generator and a critic: separate roots in one graph, one of them frozen at times, one of them used twice."""

    def shard(model):
        return shard_layers(model, reshard_after_forward=reshard_after_forward)

    critic = Net()
    critic.embed = nn.Linear(2, DIM)
    generators, critics = Twins(Net(), shard, plain_sgd), Twins(critic, shard, plain_sgd)

    def both(batch):
        return zip(generators.both, critics.both, (batch, local_part(batch)), strict=True)

    for batch in inputs(3):
        for generator, critic, x in both(batch):
            loss = critic(generator(x).detach()).square().mean() + (critic(x[:, :2]) - 1).square().mean()
            loss.backward()
        critics.step()
        for generator, critic, x in both(batch):
            critic.requires_grad_(False)
            (critic(generator(x)) - 1).square().mean().backward()
            critic.requires_grad_(True)
        critics.check_gradients()
        generators.step()
        for generator, critic, x in both(batch):
            critic(generator(x)).square().mean().backward()
        critics.step()
        generators.step()


class ShardsItself(Net):
    def __init__(self, shard: bool) -> None:
        super().__init__()
        if shard:
            for layer in self.layers:
                fully_shard(layer)
        self.late = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(super().forward(x))


def sharded_inside_its_constructor() -> nn.Module:
    return fully_shard(ShardsItself(shard=True))


def replace_sharded(twins: Twins, model: nn.Module) -> None:
    twins.sharded, twins.both = model, (twins.reference, model)
    twins.optimizers[1] = adamw(model.parameters())


@distributed(world_size=(2, 3))
def test_layers_sharded_inside_the_parents_constructor():
    torch.manual_seed(1)
    twins = Twins(ShardsItself(shard=False), lambda model: model)
    torch.manual_seed(1)
    replace_sharded(twins, sharded_inside_its_constructor())
    twins.train()


def copy_from(model: nn.Module, reference: nn.Module) -> None:
    """Give every sharded parameter of ``model`` this rank's local shard of the same parameter of ``reference``."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            source = reference.get_parameter(name)
            param.copy_(distribute_ragged(source, param.device_mesh, param.placements, src_data_rank=None))


@pytest.mark.parametrize("in_constructor", [False, True])
@distributed(world_size=(2, 3))
def test_sharded_on_the_meta_device_then_materialised_and_trained(in_constructor):
    twins = Twins(ShardsItself(shard=False), lambda model: model)
    with torch.device("meta"):
        model = sharded_inside_its_constructor() if in_constructor else shard_layers(ShardsItself(shard=False))
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    copy_from(model, twins.reference)
    replace_sharded(twins, model)
    identities = [id(param) for param in model.parameters()]
    twins.train()
    assert [id(param) for param in model.parameters()] == identities


@pytest.mark.parametrize("with_gradients", [False, True])
@distributed(world_size=3)
def test_model_converted_between_steps_goes_on_training(with_gradients):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    identities = [id(param) for param in twins.sharded.parameters()]
    twins.train(steps=2)
    (batch,) = inputs()
    if with_gradients:
        twins.backward(mean_square, batch)
    for twin in twins.both:
        twin.to(torch.float64)
    for _ in range(3):
        twins.backward(mean_square, batch.double())
        twins.step()
    assert [id(param) for param in twins.sharded.parameters()] == identities
    assert {param.dtype for param in twins.sharded.parameters()} == {torch.float64}


@distributed(world_size=2)
def test_parameters_given_other_data_are_used():
    twins = Twins(Net())
    twins.train(steps=1)
    for twin in twins.both:
        for param in twin.layers[1].parameters():
            param.data = param.data * 2
    twins.train(steps=2)


# ---- prefetch --------------------------------------------------------------------------------------------------------


class NotesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note("computes backward")
        return grad, None


class Marked(Layer):
    """Notes when its forward and its backward begin."""

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = lambda text: note(f"{name} {text}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("computes forward")
        return NotesBackward.apply(super().forward(x), self.note)


class Events(TorchDispatchMode):
    """The collectives, which group each is for, and marks, each with the groups that are unsharded at the time."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.model: nn.Module

    def note(self, text: str) -> None:
        unsharded = [
            state.name for state in states_of(self.model) if any(h.unsharded.memory.nbytes() for h in state._handles)
        ]
        self.lines.append(f"{text:32}{' '.join(name.removeprefix('layers.') for name in unsharded)}".rstrip())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            root = get_state(self.model).root
            kind = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}
            self.note(f"    {kind[function._schema.name]} {root.states[root.order.entries[-1].group]().name}")
        return result


def record_two_iterations(**kwargs: Any) -> tuple[str, str]:
    """The events of the first and the second iteration of a model with three layers."""
    with fake_process_group(), Events() as events:
        events.model = model = Net(layers=0)
        model.layers.extend(Marked(f"layers.{i}", events.note) for i in range(3))
        shard_layers(model, **kwargs)
        iterations = []
        for _ in range(2):
            events.lines.clear()
            loss = mean_square(model, torch.randn(4, DIM))
            events.note("forward is done")
            loss.backward()
            events.note("backward is done")
            model.zero_grad()
            iterations.append("\n".join(events.lines) + "\n")
        return iterations[0], iterations[1]


class TestPrefetch(expecttest.TestCase):
    def test_first_iteration_gathers_each_group_when_it_is_needed_and_prefetches_in_backward(self):
        self.assertExpectedInline(
            record_two_iterations()[0],
            """\
    all-gather (root)           (root)
    all-gather layers.0         (root) 0
layers.0 computes forward       (root) 0
    all-gather layers.1         (root) 1
layers.1 computes forward       (root) 1
    all-gather layers.2         (root) 2
layers.2 computes forward       (root) 2
forward is done                 (root)
    all-gather layers.2         (root) 2
    all-gather layers.1         (root) 1 2
layers.2 computes backward      (root) 1 2
    reduce-scatter layers.2     (root) 1
    all-gather layers.0         (root) 0 1
layers.1 computes backward      (root) 0 1
    reduce-scatter layers.1     (root) 0
layers.0 computes backward      (root) 0
    reduce-scatter layers.0     (root)
    reduce-scatter (root)
backward is done
""",
        )

    def test_second_iteration_prefetches_in_forward_too(self):
        self.assertExpectedInline(
            record_two_iterations()[1],
            """\
    all-gather (root)           (root)
    all-gather layers.0         (root) 0
    all-gather layers.1         (root) 0 1
layers.0 computes forward       (root) 0 1
    all-gather layers.2         (root) 1 2
layers.1 computes forward       (root) 1 2
layers.2 computes forward       (root) 2
forward is done                 (root)
    all-gather layers.2         (root) 2
    all-gather layers.1         (root) 1 2
layers.2 computes backward      (root) 1 2
    reduce-scatter layers.2     (root) 1
    all-gather layers.0         (root) 0 1
layers.1 computes backward      (root) 0 1
    reduce-scatter layers.1     (root) 0
layers.0 computes backward      (root) 0
    reduce-scatter layers.0     (root)
    reduce-scatter (root)
backward is done
""",
        )

    def test_without_resharding_backward_gathers_nothing(self):
        self.assertExpectedInline(
            record_two_iterations(reshard_after_forward=False)[1],
            """\
    all-gather (root)           (root)
    all-gather layers.0         (root) 0
    all-gather layers.1         (root) 0 1
layers.0 computes forward       (root) 0 1
    all-gather layers.2         (root) 0 1 2
layers.1 computes forward       (root) 0 1 2
layers.2 computes forward       (root) 0 1 2
forward is done                 (root) 0 1 2
layers.2 computes backward      (root) 0 1 2
    reduce-scatter layers.2     (root) 0 1
layers.1 computes backward      (root) 0 1
    reduce-scatter layers.1     (root) 0
layers.0 computes backward      (root) 0
    reduce-scatter layers.0     (root)
    reduce-scatter (root)
backward is done
""",
        )

    def test_resharding_the_root_too(self):
        self.assertExpectedInline(
            record_two_iterations(reshard_after_forward=True)[1],
            """\
    all-gather (root)           (root)
    all-gather layers.0         (root) 0
    all-gather layers.1         (root) 0 1
layers.0 computes forward       (root) 0 1
    all-gather layers.2         (root) 1 2
layers.1 computes forward       (root) 1 2
layers.2 computes forward       (root) 2
forward is done
    all-gather (root)           (root)
    all-gather layers.2         (root) 2
    all-gather layers.1         (root) 1 2
layers.2 computes backward      (root) 1 2
    reduce-scatter layers.2     (root) 1
    all-gather layers.0         (root) 0 1
layers.1 computes backward      (root) 0 1
    reduce-scatter layers.1     (root) 0
layers.0 computes backward      (root) 0
    reduce-scatter layers.0     (root)
    reduce-scatter (root)
backward is done
""",
        )


@distributed(world_size=2)
def test_a_group_may_run_below_another_root_between_its_forward_and_its_backward():
    class Models(nn.Module):
        """Two roots that share their last layer, which has another place in each."""

        def __init__(self) -> None:
            super().__init__()
            shared = Layer()
            self.long = nn.Sequential(*[Layer() for _ in range(4)], shared)
            self.short = nn.Sequential(shared)

    def shard(models: nn.Module) -> None:
        for layer in models.long:
            fully_shard(layer)
        fully_shard(models.long)
        fully_shard(models.short)

    twins = Twins(Models(), shard, plain_sgd)
    (batch,) = inputs()
    for _ in range(2):
        losses = [
            [model.long(x).square().mean(), model.short(x).square().mean()]
            for model, x in zip(twins.both, (batch, local_part(batch)), strict=True)
        ]
        for pair_of_losses in losses:
            for loss in pair_of_losses:
                loss.backward()
        twins.step()
