"""backward(inputs=...), autograd.grad() of sharded parameters, and hooks on the nodes that accumulate gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from fsdp_compose import flat_parameters, fully_shard, functional_mode, no_sync, set_functional_mode
from tests.harness import distributed, fake_process_group
from tests.training import assert_same_gradients, local_part, pair

DIM = 4


def nets(mode: str = "default") -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model, reference = pair(nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)]).double())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    set_functional_mode(model, mode == "functional")
    return model, reference


def batch() -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)).double()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).tanh().square().mean()


@pytest.mark.parametrize("mode", ["default", "functional"])
@pytest.mark.parametrize("names", [None, ["2.weight"], ["0.bias", "1.weight"], ["1.bias"]], ids=str)
@distributed(world_size=2)
def test_backward_with_parameters_as_inputs(names: list[str] | None, mode: str) -> None:
    model, reference = nets(mode)
    for _ in range(2):
        for one, x in ((model, local_part(batch())), (reference, batch())):
            inputs = [param for name, param in one.named_parameters() if names is None or name in names]
            loss_of(one, x).backward(inputs=inputs)
        assert_same_gradients(model, reference)
    loss_of(model, local_part(batch())).backward()  # the next one is not affected
    loss_of(reference, batch()).backward()
    assert_same_gradients(model, reference)


@distributed(world_size=2)
def test_with_flat_views_old_references_other_inputs_and_without_sync() -> None:
    torch.manual_seed(0)
    model, reference = pair(nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(2)]).double())
    old = model[0].bias
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    flat = flat_parameters(model[1])
    x, its = local_part(batch()).requires_grad_(), batch().requires_grad_()
    with no_sync(model):
        torch.autograd.backward(loss_of(model, x), inputs=[x, old, *flat])
    torch.autograd.backward(loss_of(model, x), inputs=[x, old, *flat])
    for _ in range(2):
        theirs = [its, reference[0].bias, *reference[1].parameters()]
        torch.autograd.backward(loss_of(reference, its), inputs=theirs)
    assert_same_gradients(model, reference)
    torch.testing.assert_close(x.grad / 2, local_part(its.grad))
    assert flat[0].grad is not None


@distributed(world_size=2)
def test_backward_to_other_inputs_only() -> None:
    model, _ = nets()
    x = local_part(batch()).requires_grad_()
    loss_of(model, x).backward(inputs=[x])
    assert x.grad is not None
    assert all(param.grad is None for param in model.parameters())
    (slope,) = torch.autograd.grad(loss_of(model, x), x)
    torch.testing.assert_close(slope, x.grad)


@pytest.mark.parametrize("allow_unused", [False, True])
@distributed(world_size=2)
def test_grad_of_parameters_in_the_default_mode_is_refused(allow_unused: bool) -> None:
    model, reference = nets()
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight.*functional mode"):
        torch.autograd.grad(loss_of(model, local_part(batch())), [*model.parameters()], allow_unused=allow_unused)
    mixed = loss_of(model, local_part(batch())) + model[1].weight.square().sum().full_tensor()
    with pytest.raises(RuntimeError, match=r"gradient of 1\.weight.*functional mode"):
        torch.autograd.grad(mixed, model[1].weight, allow_unused=allow_unused)
    assert all(param.grad is None for param in model.parameters())
    loss_of(model, local_part(batch())).backward()
    loss_of(reference, batch()).backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=2)
def test_grad_of_terms_on_parameters(mode: str) -> None:
    model, reference = nets(mode)
    model(local_part(batch()))
    h = batch()
    for term in (
        lambda one, h: getattr(one[1].weight, "full_tensor", lambda: one[1].weight)().square().sum(),
        lambda one, h: F.linear(h, getattr(one[1].weight, "full_tensor", lambda: one[1].weight)()).square().mean(),
    ):
        (ours,) = torch.autograd.grad(term(model, local_part(h)), model[1].weight)
        (theirs,) = torch.autograd.grad(term(reference, h), reference[1].weight)
        torch.testing.assert_close(ours.full_tensor(), theirs)
    (ours,) = torch.autograd.grad(model[1].weight.square().sum().full_tensor(), model[1].weight)
    torch.testing.assert_close(ours.full_tensor(), 2 * reference[1].weight)
    assert all(param.grad is None for param in model.parameters())
    unused = torch.autograd.grad(ours.sum().full_tensor() * h.requires_grad_().sum(), [h, model[0].weight], None, False,
                                 False, True, True)  # fmt: skip
    assert unused[1] is None
    with pytest.raises(RuntimeError, match="not used|not have been used"):
        torch.autograd.grad(h.sum(), model[0].weight)


@distributed(world_size=2)
def test_grad_of_parameters_in_functional_mode() -> None:
    model, reference = nets()
    with functional_mode(model):
        ours = torch.autograd.grad(loss_of(model, local_part(batch())), [*model.parameters()])
    theirs = torch.autograd.grad(loss_of(reference, batch()), [*reference.parameters()])
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.full_tensor(), its)


@distributed(world_size=2)
def test_hooks_on_accumulating_nodes_are_refused_where_they_would_not_run() -> None:
    model, _ = nets()
    seen: list[str] = []
    weight = model[0].weight
    model(local_part(batch()))  # names are known from the first forward
    with pytest.raises(RuntimeError, match=r"0\.weight.*register_post_accumulate_grad_hook"):
        register_multi_grad_hook([*model.parameters()], lambda _: seen.append("all"))
    for find in (lambda p: p.view_as(p), lambda p: p.expand_as(p), get_gradient_edge):
        with pytest.raises(RuntimeError, match=r"0\.weight.*would never be called"):
            find(weight)
    register_multi_grad_hook([*model.parameters()], lambda _: seen.append("any"), mode="any")
    loss_of(model, local_part(batch())).backward()
    assert seen == ["any"]
    with torch.no_grad():
        weight.view_as(weight)
    set_functional_mode(model)
    register_multi_grad_hook([*model.parameters()], lambda _: seen.append("all"))
    weight.view_as(weight).grad_fn.next_functions[0][0].register_hook(lambda *_: seen.append("node"))
    loss_of(model, local_part(batch())).backward()
    assert sorted(seen) == ["all", "any", "any", "node"]


def test_multi_grad_hooks_that_were_registered_before_are_refused() -> None:
    with fake_process_group(world_size=2):
        layer = nn.Linear(DIM, DIM)
        handle = register_multi_grad_hook([*layer.parameters()], lambda _: None)
        before = [*layer.parameters()]
        with pytest.raises(ValueError, match=r"weight: fully_shard\(\) after register_multi_grad_hook"):
            fully_shard(layer)
        assert all(a is b for a, b in zip(before, layer.parameters(), strict=True))
        handle.remove()
        fully_shard(layer)


def test_unsharded_models_of_the_process_are_as_ever() -> None:
    with fake_process_group(world_size=2):
        fully_shard(nn.Linear(DIM, DIM))
    model, x = nn.Linear(DIM, DIM), torch.randn(2, DIM)
    model(x).sum().backward(inputs=[model.weight])
    assert model.weight.grad is not None and model.bias.grad is None
    assert torch.autograd.grad(model(x).sum(), [model.bias, x.requires_grad_()], allow_unused=True)[0] is not None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(x.sum(), model.weight)
