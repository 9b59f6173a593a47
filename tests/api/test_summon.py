"""``summon_full_params``, ``register_forward_method``, ``find_unreduced_parameters``, and copies of sharded models."""

from __future__ import annotations

import copy
import functools
import io
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel

from fsdp_compose import (
    MixedPrecisionPolicy,
    RaggedDTensor,
    find_unreduced_parameters,
    fully_shard,
    no_sync,
    register_forward_method,
    set_requires_gradient_sync,
    summon_full_params,
)
from fsdp_compose.core.comm.store import TIMEOUT_ENV
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed, environment, same_on_every_rank
from tests.models import DIM, Net, inputs, shard_layers
from tests.training import Twins, assert_parameters_match, local_part, mean_square, pair, plain_sgd, whole

# ---- summon_full_params ----------------------------------------------------------------------------------------------


def assert_equal_states(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("trained", [False, True])
@distributed(world_size=(1, 3))
def test_summoned_parameters_are_ordinary_and_full(trained):
    twins = Twins(Net(), make_optimizer=plain_sgd, tolerance=1e-6)
    model, reference = twins.sharded, twins.reference
    if trained:
        twins.train(steps=2)
    before = list(model.parameters())
    with summon_full_params(model, writeback=False):
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert type(param) is nn.Parameter and param.requires_grad and param.shape == expected.shape, name
            torch.testing.assert_close(param, expected, rtol=0, atol=1e-6)
        state = model.state_dict()
        assert all(type(tensor) is torch.Tensor for tensor in state.values())
        with torch.no_grad():
            model.head.weight.zero_()  # not written back
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    twins.check_parameters()
    assert isinstance(model.state_dict()["head.weight"], RaggedDTensor)
    twins.train(steps=1)


def fill(model: nn.Module) -> None:
    with torch.no_grad():
        model.layers[1].linear.weight.fill_(0.25)
        model.head.bias.add_(1.0)


def replace(model: nn.Module) -> None:
    model.layers[0].linear.weight = nn.Parameter(torch.full((DIM, DIM), 0.5))
    model.head.weight.data = torch.full((2, DIM), 0.125)


def load(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.load_state_dict({name: torch.randn(tensor.shape) for name, tensor in Net().state_dict().items()})


def load_by_assignment(model: nn.Module) -> None:
    torch.manual_seed(6)
    model.load_state_dict({name: torch.randn(tensor.shape) for name, tensor in Net().state_dict().items()}, assign=True)


def initialise(model: nn.Module) -> None:
    torch.manual_seed(7)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.reset_parameters()


def fail(model: nn.Module) -> None:
    fill(model)
    raise ZeroDivisionError


@pytest.mark.parametrize("edit", [fill, replace, load, load_by_assignment, initialise, fail])
@pytest.mark.parametrize("offload_to_cpu", [False, True])
@distributed(world_size=3)
def test_edits_of_summoned_parameters_are_in_every_ranks_shard(edit, offload_to_cpu):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    twins.train(steps=1)
    ids = [id(param) for param in twins.sharded.parameters()]
    for model in twins.both:
        try:
            if model is twins.sharded:
                with summon_full_params(model, offload_to_cpu=offload_to_cpu):
                    edit(model)
            else:
                edit(model)
        except ZeroDivisionError:
            pass
    assert [id(param) for param in twins.sharded.parameters()] == ids
    twins.check_parameters()
    twins.optimizers[0] = plain_sgd(twins.reference.parameters())  # some edits have replaced its parameters
    twins.train(steps=2)


@distributed(world_size=2)
def test_summoned_gradients_are_full_and_can_be_written_back():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    (batch,) = inputs()
    twins.reference.head.bias.requires_grad_(False), twins.sharded.head.bias.requires_grad_(False)
    twins.backward(mean_square, batch)
    with summon_full_params(twins.sharded, with_grads=True):
        for (name, param), expected in zip(twins.sharded.named_parameters(), twins.reference.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None), name
            if param.grad is not None:
                torch.testing.assert_close(param.grad, expected.grad, rtol=0, atol=1e-6)
        twins.sharded.head.weight.grad.mul_(2)
        twins.sharded.embed.weight.grad = None
    twins.reference.head.weight.grad.mul_(2)
    twins.reference.embed.weight.grad = None
    twins.step()
    with no_sync(twins.sharded):
        twins.backward(mean_square, batch)
    with pytest.raises(RuntimeError, match="has not been reduced"), summon_full_params(twins.sharded, with_grads=True):
        pass
    twins.backward(mean_square, batch)
    twins.step()
    for flag in (False, True):  # the first groups are reduced, and gathered before the one that is not is reached
        set_requires_gradient_sync(twins.sharded.layers[2], flag)
        twins.backward(mean_square, batch)
        if not flag:
            with pytest.raises(RuntimeError, match=r"layers\.2\.linear\.weight has not been reduced"):
                with summon_full_params(twins.sharded, with_grads=True):
                    pass
    twins.step()


@distributed(world_size=3)
def test_rank0_only_gives_full_parameters_to_the_first_rank():
    model, reference = pair(Net())
    shard_layers(model)
    with summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert_equal_states(model.state_dict(), reference.state_dict())
        else:
            assert all(isinstance(param, RaggedDTensor) for param in model.parameters())
        with pytest.raises(ValueError, match="the other ranks have no full parameters"), summon_full_params(model):
            pass
    with pytest.raises(ValueError, match="needs writeback=False"), summon_full_params(model, rank0_only=True):
        pass
    assert_parameters_match(model, reference, 0)


@distributed(world_size=2)
def test_summoning_in_original_dtype_under_mixed_precision():
    model, reference = pair(Net())
    shard_layers(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with summon_full_params(model, writeback=False):
        assert_equal_states(model.state_dict(), reference.state_dict())


@distributed(world_size=2)
def test_nested_contexts_and_submodules():
    model, reference = pair(Net())
    shard_layers(model)
    with summon_full_params(model.layers[1].linear):  # inside a group
        assert type(model.layers[1].linear.weight) is nn.Parameter
        assert isinstance(model.layers[0].linear.weight, RaggedDTensor)
        with summon_full_params(model):
            fill(model)
        assert type(model.layers[1].linear.weight) is nn.Parameter
        assert isinstance(model.head.bias, RaggedDTensor)
    fill(reference)
    with summon_full_params(model, recurse=False, writeback=False):
        assert all(isinstance(param, RaggedDTensor) for param in model.parameters())  # the root itself holds none
    with summon_full_params(model, writeback=False):
        with summon_full_params(model.layers[0]), torch.no_grad():
            model.layers[0].linear.bias.fill_(3.0)
        with torch.no_grad():
            model.layers[0].linear.bias.fill_(4.0)
    reference.layers[0].linear.bias.data.fill_(3.0)
    assert_parameters_match(model, reference, 0)


@distributed(world_size=2)
def test_summoning_before_the_first_forward_finds_tied_parameters_in_the_group_around_them():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    expected = copy.deepcopy(model.state_dict())
    for module in (*model, model):
        fully_shard(module)
    with summon_full_params(model):
        assert model[0].weight is model[1].weight
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name])


@distributed(world_size=2)
def test_misuse_of_summon_full_params_raises_and_leaves_the_model_as_it_was():
    twins = Twins(Net())
    (batch,) = inputs()
    twins.train(steps=1)
    model = twins.sharded
    with summon_full_params(model), pytest.raises(RuntimeError, match=r"begins inside summon_full_params"):
        model(local_part(batch))
    with pytest.raises(ValueError, match=r"head\.weight was replaced by a value of shape \(1, 1\).*\(2, 5\)"):
        with summon_full_params(model):
            model.head.weight = nn.Parameter(torch.zeros(1, 1))
    loss = mean_square(model, local_part(batch))
    loss.backward()
    with pytest.raises(RuntimeError, match=r"written to inside the context"), summon_full_params(model):
        twins.optimizers[1].step()
    model.zero_grad()
    expected = mean_square(twins.reference, batch)
    expected.backward()
    twins.optimizers[0].step()
    twins.reference.zero_grad()
    twins.check_parameters()
    looks: list[str] = []

    def look(*_: object) -> None:
        with pytest.raises(RuntimeError, match=r"a forward or backward of .* is running"), summon_full_params(model):
            pass
        looks.append("in forward")

    handle = model.layers[1].register_forward_hook(look)
    model(local_part(batch))
    handle.remove()
    assert looks
    twins.train(steps=1)


@distributed(world_size=2, fresh=True)
def test_summon_full_params_called_by_one_rank_names_the_absent_one():
    model = shard_layers(Net())
    model(torch.ones(2, DIM))
    with environment(**{TIMEOUT_ENV: "1"}):
        if dist.get_rank() == 0:
            with pytest.raises(
                RuntimeError, match=r"summon_full_params: rank\(s\) 1 did not arrive.*2 ranks within 1 s"
            ):
                with summon_full_params(model):
                    pass
            assert all(isinstance(param, RaggedDTensor) for param in model.parameters())
    dist.barrier()
    with pytest.raises(RuntimeError, match="make the same call") as caught:
        with summon_full_params(model, writeback=dist.get_rank() == 0):
            pass
    same_on_every_rank(str(caught.value))


# ---- register_forward_method -----------------------------------------------------------------------------------------


class Encoder(Net):
    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Doc."""
        return self.layers[0](self.embed(x)) @ self.head.weight.t() * scale

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = x + self(x).mean(dim=1, keepdim=True) + self.embed.bias
        return x

    def crash(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(self.head.weight.shape)


def shard_encoder(model: nn.Module) -> None:
    shard_layers(model)
    for name in ("encode", "generate", "crash"):
        register_forward_method(model, name)


@distributed(world_size=(2, 3))
def test_registered_methods_compute_with_full_parameters_and_train():
    twins = Twins(Encoder(), shard_encoder)
    for _ in range(2):
        twins.train(lambda model, x: model.encode(x, scale=2.0).square().mean(), 1)
        twins.train(lambda model, x: model.generate(x, 3).square().mean(), 1)
        with pytest.raises(ZeroDivisionError, match=r"2, 5"):
            twins.sharded.crash(torch.ones(1, DIM))
        assert all(isinstance(param, RaggedDTensor) for param in twins.sharded.parameters())
    assert twins.sharded.encode.__name__ == "encode" and twins.sharded.encode.__doc__ == "Doc."
    with torch.no_grad():
        batch = torch.ones(2, DIM)
        torch.testing.assert_close(twins.sharded.generate(batch, 2), twins.reference.generate(batch, 2))


class Codec(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, 3), nn.Linear(3, DIM)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codec, self.head = Codec(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.codec.decode(self.codec.encode(x)))


def shard_codec(model: nn.Module) -> None:
    for module in (model.codec, model):
        fully_shard(module)
    for name in ("encode", "decode"):
        register_forward_method(model.codec, name)


@distributed(world_size=2)
def test_a_module_without_forward_trains_by_its_registered_methods():
    twins = Twins(Autoencoder(), shard_codec)
    twins.train(lambda model, x: model(x).square().mean(), 2)
    with pytest.raises(RuntimeError, match=r"the sharded parameter inner\..*register_forward_method\(\)"):
        fully_shard(Codec()).encode(torch.ones(2, DIM))


class Callables(Encoder):
    """Whatever ``module.name`` can be besides a method of its class."""

    @staticmethod
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def name_of(cls, x: torch.Tensor) -> str:
        return f"{cls.__name__} {tuple(x.shape)}"

    def __init__(self) -> None:
        super().__init__()
        self.scale = functools.partial(torch.mul, 3.0)
        self.own = self.encode
        self.of_a_child = self.head.forward


@distributed(world_size=2)
def test_registered_static_methods_and_callable_attributes_get_the_users_arguments():
    batch = torch.ones(2, DIM)

    def results(model: nn.Module) -> list[object]:
        with torch.no_grad():
            heads = model.own(batch, scale=1.0), model.of_a_child(batch)
        return [model.double(batch), model.name_of(batch), model.scale(batch), *heads]

    reference = Callables()
    model = copy.deepcopy(reference)
    shard_layers(model)
    for name in ("double", "name_of", "scale", "own", "of_a_child"):
        register_forward_method(model, name)
    expected = results(reference)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for got, wanted in zip(results(twin), expected, strict=True):
        assert torch.allclose(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted


@distributed(world_size=1)
def test_register_forward_method_refuses_what_is_no_method_and_passes_unsharded_modules():
    model = Encoder()
    register_forward_method(model, "encode")
    assert "encode" not in model.__dict__
    with pytest.raises(ValueError, match=r"an? Encoder has no method 'missing'"):
        register_forward_method(model, "missing")


# ---- check -----------------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_check_lists_trainable_parameters_that_are_not_reduced():
    model = Net()
    model.outside = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.outside[1].requires_grad_(False)
    ignored = model.layers[2].linear.bias
    for layer in model.layers:
        fully_shard(layer, ignored_params=[ignored])
    found = find_unreduced_parameters(model)
    assert [(item.fqn, item.reason.split(":")[0]) for item in found] == [
        ("embed.weight", "no fully_shard() call covers it"),
        ("embed.bias", "no fully_shard() call covers it"),
        ("head.weight", "no fully_shard() call covers it"),
        ("head.bias", "no fully_shard() call covers it"),
        ("layers.2.linear.bias", "passed as ignored_params"),
        ("outside.0.weight", "no fully_shard() call covers it"),
        ("outside.0.bias", "no fully_shard() call covers it"),
    ]
    fully_shard(model, ignored_params=[ignored])
    assert [item.fqn for item in find_unreduced_parameters(model)] == ["layers.2.linear.bias"]
    model.layers[0].added = nn.Linear(2, 2)
    assert [str(item).split(":")[:2] for item in find_unreduced_parameters(model)][0] == [
        "layers.0.added.weight",
        " added or replaced after fully_shard()",
    ]


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first forward", "after a step", "with gradients"])
@distributed(world_size=(2, 3))
def test_deepcopy_of_a_sharded_model_trains_by_itself(when):
    twins = Twins(Encoder(), shard_encoder)
    if when != "before the first forward":
        twins.train(steps=1)
    if when == "with gradients":
        twins.backward(mean_square, next(inputs()))
    copies = Twins.__new__(Twins)
    copies.tolerance = twins.tolerance
    copies.both = copies.reference, copies.sharded = tuple(copy.deepcopy(model) for model in twins.both)
    copies.optimizers = [plain_sgd(model.parameters()) for model in copies.both]
    assert {id(p) for p in copies.sharded.parameters()}.isdisjoint(id(p) for p in twins.sharded.parameters())
    storages = {handle.shard.data_ptr() for handle in _get_fsdp_handles(copies.sharded)}
    assert storages.isdisjoint(handle.shard.data_ptr() for handle in _get_fsdp_handles(twins.sharded))
    ids = [id(param) for param in copies.sharded.parameters()]
    for _ in range(2):
        copies.train(lambda model, x: model.encode(x * 3, scale=1.0).square().mean(), 1)
        if when == "with gradients":
            twins.step()
        twins.train(steps=1)
        if when == "with gradients":
            twins.backward(mean_square, next(inputs()))
    assert [id(param) for param in copies.sharded.parameters()] == ids
    assert list(copies.sharded.state_dict()) == list(twins.sharded.state_dict())
    with summon_full_params(copies.sharded, writeback=False):
        torch.testing.assert_close(copies.sharded.state_dict(), copies.reference.state_dict(), rtol=0, atol=1e-5)


@distributed(world_size=2)
def test_copies_of_copies_and_of_parts():
    twins = Twins(Net())
    twins.train(steps=1)
    again = copy.deepcopy(copy.deepcopy(twins.sharded))
    batch = local_part(next(inputs()))
    torch.testing.assert_close(again(batch), twins.sharded(batch))
    layer = copy.deepcopy(twins.sharded.layers[0])
    torch.testing.assert_close(layer(batch), twins.reference.layers[0](batch))


@distributed(world_size=2)
def test_averaged_model():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    averages = [AveragedModel(model) for model in twins.both]
    for _ in range(3):
        twins.train(steps=1)
        for average, model in zip(averages, twins.both, strict=True):
            average.update_parameters(model)
    batch = next(inputs())
    torch.testing.assert_close(averages[1](local_part(batch)), local_part(averages[0](batch)))
    got = whole(averages[1].module, lambda param: param, averages[0].module)
    for name, param in averages[0].module.named_parameters():
        torch.testing.assert_close(got[name], param.detach())


SAVES: dict[str, Callable[[nn.Module], object]] = {
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


@distributed(world_size=1)
def test_saving_a_sharded_module_whole_is_a_named_error():
    model = shard_layers(Net())
    for save in SAVES.values():
        with pytest.raises(NotImplementedError, match=re.escape("cannot be pickled")):
            save(model)


@distributed(world_size=2)
def test_copy_inside_forward_raises():
    model = shard_layers(Net())
    seen: list[str] = []

    def look(*_: object) -> None:
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy\(\): a forward or backward"):
            copy.deepcopy(model)
        seen.append("raised")

    model.layers[0].linear.register_forward_hook(look)
    model(torch.ones(2, DIM))
    assert seen
