"""``torch.func`` on sharded models: transforms of their inputs and parameters, and ``functional_call`` with values,
equal what they give for the unsharded model, in either mode; or one error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecisionPolicy, distribute_ragged, flat_parameters, fully_shard, set_functional_mode
from tests import harness
from tests.models import DIM, Layer, Net, inputs, shard_layers
from tests.training import Twins, full_values, mean_square, pair, plain_sgd

Values = dict[str, torch.Tensor]
distributed = partial(harness.distributed, timeout=120)  # seconds; torch imports much for its first jvp


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [full(value)]
    return [item for part in (value.values() if isinstance(value, dict) else value) for item in tensors(part)]


def batch() -> torch.Tensor:
    """Return an equal batch on every rank, so that averages over the ranks are those of one rank."""
    return next(inputs())


def loss(model: nn.Module, values: Values, x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, values, (x,)).square().mean()


# ---- values to compute with


def own(model: nn.Module) -> Values:
    return dict(model.named_parameters())


def other(model: nn.Module) -> Values:
    return {name: full(param) * 2 for name, param in model.named_parameters()}


def other_sharded(model: nn.Module) -> Values:
    return {name: param.detach() * 2 for name, param in model.named_parameters()}


def some(model: nn.Module) -> Values:
    return {name: full(param) * 2 for name, param in model.named_parameters() if name.endswith("bias")}


def mixed(model: nn.Module) -> Values:
    """Full and sharded tensors in one group."""
    return {name: (full(p) if name.endswith("bias") else p.detach()) * 2 for name, p in model.named_parameters()}


def leaves(values: Values) -> Values:
    return {name: value if value.requires_grad else value.requires_grad_() for name, value in values.items()}


# ---- what is done with them


def call(model: nn.Module, values: Values, x: torch.Tensor) -> Any:
    with torch.no_grad():
        first = functional_call(model, values, (x,))
    return first, functional_call(model, values, (x,)), model(x)


def backward(model: nn.Module, values: Values, x: torch.Tensor) -> Any:
    values = leaves(values)
    loss(model, values, x).backward()
    return {name: value.grad for name, value in values.items()}


def gradient(model: nn.Module, values: Values, x: torch.Tensor) -> Any:
    return grad(lambda values: loss(model, values, x))(values)


def pulled_back(model: nn.Module, values: Values, x: torch.Tensor) -> Any:
    value, pull = vjp(lambda values: loss(model, values, x), values)
    return value, pull(torch.ones(()))


def pushed_forward(model: nn.Module, values: Values, x: torch.Tensor) -> Any:
    tangents = {name: torch.ones_like(value) for name, value in values.items()}
    return jvp(lambda values: loss(model, values, x), (values,), (tangents,))


OF_VALUES = [call, backward, gradient, pulled_back, pushed_forward]


def jvp_of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    return jvp(model, (x,), (x.flip(0),))


def vjp_of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    return vjp(model, x)[1](torch.ones(len(x), 2))


def vectorised(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        first = vmap(model)(x)
    return first, vmap(model)(x)


def derivatives_of_inputs(model: nn.Module, x: torch.Tensor) -> Any:
    def total(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    return grad(total)(x), vmap(grad(total))(x), jacrev(model)(x[0]), jacfwd(model)(x[0]), hessian(total)(x[0])


def forward_mode(model: nn.Module, x: torch.Tensor) -> Any:
    with fwad.dual_level():
        return fwad.unpack_dual(model(fwad.make_dual(x, x.flip(0))))


def trained_through_jvp(model: nn.Module, x: torch.Tensor) -> Any:
    """As consistency models are trained: gradients of parameters through a derivative with respect to the inputs."""
    value, slope = jvp(model, (x,), (x.flip(0),))
    (value.square().mean() + slope.square().mean()).backward()
    return [param.grad for param in model.parameters()]


def ensemble(model: nn.Module, x: torch.Tensor) -> Any:
    torch.manual_seed(5)
    values, _ = stack_module_state([Net(2), Net(2)])
    return vmap(lambda values: functional_call(model, values, (x,)))(values)


def stacked(model: nn.Module, x: torch.Tensor) -> Any:
    return stack_module_state([model, model])[0]


OF_INPUTS = [
    jvp_of_inputs, vjp_of_inputs, vectorised, derivatives_of_inputs, forward_mode, trained_through_jvp, ensemble,
    stacked,
]  # fmt: skip


def per_sample(model: nn.Module, values: Values, x: torch.Tensor) -> Any:
    return vmap(grad(lambda values, x: loss(model, values, x[None])), in_dims=(None, 0))(values, x)


def curvature(model: nn.Module, values: Values, x: torch.Tensor) -> Any:
    return hessian(lambda values: loss(model, values, x))(values)


def check(action: Callable[..., Any], is_functional: bool, warm_up: bool, *make_values: Any) -> None:
    """On both models, of which the sharded one must train on as if nothing had been."""
    torch.manual_seed(0)
    twins = Twins(Net(2), make_optimizer=plain_sgd)
    if is_functional:
        set_functional_mode(twins.sharded)
    if warm_up:
        twins.train(steps=1)
    expected, got = (
        tensors(action(model, *[make(model) for make in make_values], batch()))
        for model in (twins.reference, twins.sharded)
    )
    assert len(expected) == len(got) > 0
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5), (action, make_values)
    for model in twins.both:
        model.zero_grad()
    twins.train(steps=1)


@pytest.mark.parametrize(
    ("values", "is_functional"),
    [(own, False), (own, True), (other, False), (other_sharded, True), (some, False), (mixed, False), (mixed, True)],
)
@distributed(world_size=2)
def test_functional_call_computes_with_the_values_that_it_is_given(values, is_functional):
    for action in OF_VALUES:
        check(action, is_functional, action is not call, values)


@pytest.mark.parametrize("is_functional", [False, True])
@distributed(world_size=2)
def test_transforms_of_inputs(is_functional):
    for action in OF_INPUTS:
        check(action, is_functional, action is not jvp_of_inputs)


@distributed(world_size=2)
def test_batches_of_sharded_parameters_are_refused_and_of_full_ones_are_right():
    for action in (per_sample, curvature):
        check(action, False, True, full_values)
        check(action, False, True, some)
        model = shard_layers(Net(2))
        with pytest.raises(NotImplementedError, match=r"fully_shard group .*full_tensor\(\)"):
            action(model, own(model), batch())


@distributed(world_size=2)
def test_a_gather_inside_a_transform_is_refused():
    shown = shard_layers(Net(2)).head.weight.detach()
    for gather in (lambda x: x * shown.full_tensor(), lambda x: x * shown.redistribute(placements=[Replicate()])):
        with pytest.raises(NotImplementedError, match=r"call full_tensor\(\) before the transform"):
            grad(gather)(torch.ones(shown.shape))


class CallsOther(Net):
    """A forward that computes with other weights than a child's own: an inner loop, a hypernetwork."""

    def __init__(self) -> None:
        super().__init__(2)
        self.outer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outer(x)
        fast = {"linear.weight": torch.tanh(self.outer.bias).diag() + self.outer.weight, "linear.bias": self.outer.bias}
        x = functional_call(self.layers[0], fast, (x,))
        x = functional_call(self.layers[1], {"linear.bias": self.outer.bias}, (x,))
        return self.head(self.layers[0](x))


class CallsPart(CallsOther):
    """The other weights are for groups some modules below what is called; from the third forward on alone."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed, self.num_forwards = is_checkpointed, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        x = self.outer(x)
        if self.num_forwards > 2:
            call = partial(functional_call, nn.Sequential(*self.layers), {"1.linear.bias": self.outer.bias})
            x = checkpoint(call, (x,), use_reentrant=False) if self.is_checkpointed else call((x,))
        return self.head(self.layers[0](x))


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("make", [CallsOther, CallsPart, partial(CallsPart, is_checkpointed=True)])
@distributed(world_size=2)
def test_functional_call_of_a_group_inside_a_forward(is_functional, make):
    torch.manual_seed(0)

    def shard(model: nn.Module) -> None:
        shard_layers(model)
        set_functional_mode(model, is_functional)

    Twins(make(), shard, plain_sgd).train(steps=5)


@distributed(world_size=2)
def test_with_flat_views_and_in_low_precision():
    torch.manual_seed(0)
    model, reference = pair(Net(2))
    shard_layers(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.SGD(flat_parameters(model), lr=0.1)
    for _ in range(2):
        mean_square(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = other(reference)
    got = functional_call(model, values, (batch(),))
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), functional_call(reference, values, (batch(),)), atol=0.1)
    mean_square(model, batch()).backward()


@distributed(world_size=2)
def test_values_that_do_not_fit_and_interrupted_calls_leave_the_model_as_it_was():
    torch.manual_seed(0)
    twins = Twins(Net(2), make_optimizer=plain_sgd)
    twins.train(steps=1)
    model = twins.sharded
    name, param = "layers.0.linear.weight", model.layers[0].linear.weight
    columns = param.detach().redistribute(placements=[torch.distributed.tensor.Shard(1)])
    for wrong in (torch.ones(2, 2), columns):
        with pytest.raises(ValueError, match=rf"functional_call\(\): {name} of the fully_shard group layers.0"):
            functional_call(model, {name: wrong}, (batch(),))
    good = distribute_ragged(columns, placements=param.placements)
    functional_call(model, {name: good}, (batch(),))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional_call(model, full_values(model), (torch.ones(3, DIM + 1),))
    twins.train(steps=2)


@distributed(world_size=2)
def test_a_parameter_that_was_replaced_for_good_is_refused_outside_functional_call():
    model = shard_layers(Net(2))
    model(batch())
    model.layers[1].linear.weight = nn.Parameter(torch.ones(DIM, DIM))
    functional_call(model, {"head.bias": torch.zeros(2)}, (batch(),))
    with pytest.raises(RuntimeError, match="were replaced, added or removed after"):
        model(batch())


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.second.linear.weight = self.first.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@distributed(world_size=2)
def test_tied_parameters():
    torch.manual_seed(0)
    model, reference = pair(Shared())
    fully_shard(model)
    value = {"first.linear.weight": torch.ones(DIM, DIM)}
    assert torch.allclose(functional_call(model, value, (batch(),)), functional_call(reference, value, (batch(),)))
    with pytest.raises(NotImplementedError, match="were given different values"):
        functional_call(model, value, (batch(),), tie_weights=False)
