"""Invariant 10: ties hold. One parameter in modules of several groups trains as in the unsharded model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import RaggedDTensor, distribute_ragged, fully_shard, no_sync
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.core.state_dicts.state_dict import get_model_state_dict
from tests import harness
from tests.harness import distributed
from tests.models import Layer
from tests.training import Twins, assert_same_gradients, local_part, mean_square, plain_sgd

VOCABULARY, DIM = 7, 5


class TiedModel(nn.Module):
    """Embedding and head share a weight; the head has a bias of its own, and a second layer shares the first's."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer(DIM) for _ in range(3))
        self.head = nn.Linear(DIM, VOCABULARY)
        self.head.weight = self.embed.weight
        self.layers[2].linear.weight = self.layers[0].linear.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def each_apart(model: TiedModel, **options: bool) -> None:
    for module in (model.embed, *model.layers, model.head):
        fully_shard(module, **options)
    fully_shard(model, **options)


def embedding_apart(model: TiedModel, **options: bool) -> None:
    fully_shard(model.embed, **options)
    fully_shard([model.layers[0], model.layers[1]], **options)
    fully_shard(model, **options)


def head_and_last_layer_apart(model: TiedModel, **options: bool) -> None:
    fully_shard(model.layers[2], **options)
    fully_shard(model.head, **options)
    fully_shard(model, **options)


WAYS: list[Callable[..., None]] = [each_apart, embedding_apart, head_and_last_layer_apart]


def tokens(steps: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (12, 3), generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("shard", WAYS)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=3)
def test_tied_weights_across_groups_train_as_unsharded(shard, reshard_after_forward):
    twins = Twins(TiedModel(), lambda model: shard(model, reshard_after_forward=reshard_after_forward))
    model = twins.sharded
    ids = [id(param) for param in model.parameters()]
    assert model.head.weight is model.embed.weight and isinstance(model.head.weight, RaggedDTensor)
    assert model.layers[2].linear.weight is model.layers[0].linear.weight
    for batch in tokens(2):
        with torch.no_grad():
            torch.testing.assert_close(model(local_part(batch)), local_part(twins.reference(batch)))
        with no_sync(model):
            twins.backward(mean_square, batch)
        twins.backward(mean_square, batch)
        twins.step()
    assert [id(param) for param in model.parameters()] == ids
    assert model.head.weight is model.embed.weight
    assert len({handle.shard.data_ptr() for handle in _get_fsdp_handles(model)}) == len(_get_fsdp_handles(model))
    assert sum(len(handle.sharded_params) for handle in _get_fsdp_handles(model)) == len(ids)


@pytest.mark.parametrize("use_reentrant", [True, False])
@distributed(world_size=2)
def test_tied_weights_across_groups_with_checkpointing(use_reentrant):
    twins = Twins(TiedModel(use_reentrant), each_apart)
    for batch in tokens(2):
        twins.backward(mean_square, batch)
        twins.step()


@pytest.mark.parametrize("trained", [False, True])
@distributed(world_size=2)
def test_load_state_dict_with_assign_keeps_ties(trained):
    twins = Twins(TiedModel(), each_apart, make_optimizer=plain_sgd)
    batches = tokens(2)
    if trained:
        twins.backward(mean_square, batches[0])
        twins.step()
    params = list(twins.sharded.parameters())
    for twin in twins.both:
        state = {name: value.detach() * 0.5 for name, value in twin.state_dict().items()}
        twin.load_state_dict(state, assign=twin is twins.sharded)
    assert all(ours is param for ours, param in zip(twins.sharded.parameters(), params, strict=True))
    assert twins.sharded.head.weight is twins.sharded.embed.weight
    twins.backward(mean_square, batches[1])
    twins.step()


class InTwoPlaces(nn.Module):
    """``inner`` runs inside ``outer`` and by itself; both have a layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(DIM, DIM), Layer(DIM)
        self.outer = nn.Sequential(self.inner, Layer(DIM))
        self.outer[1].linear.weight = self.inner.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.first(x)))


@distributed(world_size=2)
def test_tied_weight_of_a_module_that_also_runs_outside_the_group_around_it():
    def shard(model: nn.Module) -> None:
        for module in (model.inner, model.outer, model):
            fully_shard(module)

    Twins(InTwoPlaces(), shard).train(mean_square)


class KeepsALoss(nn.Module):
    """Keeps a loss that is computed after a layer; backward enters by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = Layer(DIM), nn.Linear(DIM, 1)
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.kept = self.gate(y).square().mean()
        return y


class TiedInside(nn.Module):
    """The layer inside ``block`` has the weight of one outside."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.block = Layer(DIM), KeepsALoss()
        self.block.layer.linear.weight = self.first.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("reshard_after_forward", [True, None])
@pytest.mark.parametrize("use_reentrant", [None, False])
@distributed(world_size=2)
def test_tied_weight_that_backward_reaches_by_a_loss_kept_inside_another_group(use_reentrant, reshard_after_forward):
    def shard(model: nn.Module) -> None:
        fully_shard(model.block)
        fully_shard(model, reshard_after_forward=reshard_after_forward)

    twins = Twins(TiedInside(use_reentrant), shard)
    twins.train(lambda model, x: model(x).square().mean() + model.block.kept)


@distributed(world_size=2)
def test_tied_weights_keep_hooks_values_loaded_before_and_copies():
    twins = Twins(TiedModel(), each_apart, make_optimizer=plain_sgd)
    fired: list[str] = []
    twins.sharded.embed.weight.register_post_accumulate_grad_hook(lambda param: fired.append("embed"))
    twins.sharded.head.bias.register_post_accumulate_grad_hook(lambda param: fired.append("bias"))
    state = {name: torch.randn(tensor.shape) for name, tensor in twins.reference.state_dict().items()}
    state["head.weight"], state["layers.2.linear.weight"] = state["embed.weight"], state["layers.0.linear.weight"]
    twins.reference.load_state_dict(state)
    with torch.no_grad():
        for name, param in twins.sharded.named_parameters():
            param.copy_(distribute_ragged(state[name], param.device_mesh, param.placements))
    before = copy.deepcopy(twins.sharded)
    for batch in tokens(2):
        twins.backward(mean_square, batch)
        assert sorted(fired) == ["bias", "embed"]
        fired.clear()
        twins.step()
    after = copy.deepcopy(twins.sharded)
    assert after.head.weight is after.embed.weight
    batch = local_part(tokens()[0])
    torch.testing.assert_close(after(batch), twins.sharded(batch))
    twins.reference.load_state_dict(state)
    torch.testing.assert_close(before(batch), twins.reference(batch))


@distributed(world_size=2)
def test_tied_module_run_by_itself_raises_and_the_model_goes_on():
    twins = Twins(TiedModel(), each_apart)
    batch = tokens()[0]
    with pytest.raises(ValueError, match=r"head\.weight|weight: these weights are tied|weight.*common parent"):
        twins.sharded.head(torch.ones(2, DIM))
    twins.backward(mean_square, batch)
    twins.step()
    with pytest.raises(Exception, match="DTensor|Tensor"):
        twins.sharded.head(torch.ones(2, DIM))
    twins.backward(mean_square, batch)
    twins.step()


@distributed(world_size=2)
def test_meta_device_with_ties():
    with torch.device("meta"):
        model = TiedModel()
    each_apart(model)
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    torch.manual_seed(0)
    reference = TiedModel()
    with torch.no_grad():
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(param, RaggedDTensor), name
            param.copy_(distribute_ragged(expected.detach(), param.device_mesh, param.placements))
    batch = tokens()[0]
    torch.testing.assert_close(model(batch), reference(batch))


class Chain(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = torch.tanh(module(x))
        return x


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@distributed(world_size=2)
def test_a_tied_weight_comes_into_a_group_of_two_modules_that_have_equal_names_inside(order):
    a, b, c, d = (nn.Linear(DIM, DIM).double() for _ in range(4))
    b.weight = a.weight
    model = Chain(Chain(a), Chain(b, c, a), d)  # `a` stands in both, so it is a group of its own
    reference = copy.deepcopy(model)
    fully_shard(a)
    fully_shard([model[i] for i in order])
    fully_shard(model)
    optimizers = plain_sgd(model.parameters()), plain_sgd(reference.parameters())
    for step in range(3):
        x = torch.randn(4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for one, batch, optimizer in ((model, local_part(x), optimizers[0]), (reference, x, optimizers[1])):
            one(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
    for handle in _get_fsdp_handles(model):
        assert len({*handle.fqns}) == len(handle.fqns)


def square(model: nn.Module) -> torch.Tensor:
    """A term of the loss on every parameter, gathered here and now."""
    wholes = [param.full_tensor() if isinstance(param, RaggedDTensor) else param for param in model.parameters()]
    return torch.stack([whole.square().sum() for whole in wholes]).sum()


def norms(model: nn.Module) -> torch.Tensor:
    return torch.stack([getattr(n, "full_tensor", lambda n=n: n)() for n in map(torch.norm, model.parameters())]).sum()


FIRSTS = ("with sync", "without sync", "of the term alone")
HOOKS = (None, "on gradient", "after accumulation")


@pytest.mark.parametrize("term_of", [square, norms] if harness.TORCH >= (2, 13) else [square])  # no detach_ in 2.12
@pytest.mark.parametrize("shard", WAYS)
@distributed(world_size=3)
def test_gradients_of_terms_computed_before_tied_weights_move(shard, term_of):
    """The first forward shards a tied weight anew; what autograd brings from before is sharded as it was then."""
    for first in FIRSTS:
        for hook in HOOKS if shard is each_apart else (None,):
            train_with_term(shard, term_of, first, hook)


def train_with_term(
    shard: Callable[..., None], term_of: Callable[[nn.Module], torch.Tensor], first: str, hook: str | None
) -> None:
    twins, batches = Twins(TiedModel(), shard), tokens(3)
    models = (twins.sharded, twins.reference)
    for param in models[0].parameters() if hook else ():
        if hook == "on gradient":
            param.register_hook(lambda grad: None)
        else:
            param.register_post_accumulate_grad_hook(lambda param: None)
    terms = [term_of(model) for model in models]
    with no_sync(models[0]) if first == "without sync" else contextlib.nullcontext():
        for model, term, is_ours in zip(models, terms, (True, False), strict=True):
            loss = mean_square(model, local_part(batches[0]) if is_ours else batches[0])
            (term if first == "of the term alone" else loss + term).backward()
    for batch in batches[1:]:
        mean_square(models[0], local_part(batch)).backward()
        mean_square(models[1], batch).backward()
        for ours in models[0].parameters():
            assert ours.grad.placements == ours.placements and ours.grad.to_local().shape == ours.to_local().shape
        assert_same_gradients(*models)


class TiedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(DIM, DIM) for _ in range(3))
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def shard_whole(model: TiedLinears) -> None:
    fully_shard(model)


def shard_one_apart(model: TiedLinears) -> None:
    fully_shard(model.second)
    fully_shard(model)


def untie(model: nn.Module, *names: str) -> nn.Parameter:
    """Assign one new parameter, with the same elements, to these modules."""
    own = model.get_submodule(names[0]).weight
    fresh = nn.Parameter(own.detach().clone())
    for name in names:
        model.get_submodule(name).weight = fresh
    return fresh


@pytest.mark.parametrize("names", [["first"], ["second"], ["third"], ["second", "third"], ["first", "second", "third"]])
@pytest.mark.parametrize(("shard", "step"), [(shard_whole, 0), (shard_whole, 2), (shard_one_apart, 2)])
@distributed(world_size=3)
def test_weights_untied_after_sharding_train_apart(shard, names, step):
    reference = TiedLinears()
    model = copy.deepcopy(reference)
    shard(model)
    models = (model, reference)
    optimizers = [torch.optim.SGD(item.parameters(), 0.1, momentum=0.9) for item in models]
    for i in range(4):
        if i == step:
            for item, optimizer in zip(models, optimizers, strict=True):
                if item is reference and len(names) == 3:
                    break  # none is untied: the assigned parameter's elements, and the state of the optimizer, stay
                fresh = untie(item, *names)
                if len(names) < 3:
                    optimizer.add_param_group({"params": [fresh]})
        x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(i))
        for item, optimizer, batch in zip(models, optimizers, (local_part(x), x), strict=True):
            mean_square(item, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        tied = [[a.weight is b.weight for a in item.children() for b in item.children()] for item in models]
        assert tied[0] == tied[1]
        theirs = dict(reference.named_parameters())
        ours = dict(model.named_parameters())
        assert ours.keys() == theirs.keys()
        for name, param in ours.items():
            torch.testing.assert_close(param.detach().full_tensor(), theirs[name].detach(), rtol=1e-5, atol=1e-6)
    saved, expected = get_model_state_dict(model), reference.state_dict()
    assert saved.keys() == expected.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value.full_tensor(), expected[name], rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("step", [0, 2])
@distributed(world_size=3)
def test_modules_that_two_groups_exchange_train_on(step):
    reference = nn.Sequential(Block(), Block())
    model = copy.deepcopy(reference)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizers = [torch.optim.SGD(item.parameters(), 0.1, momentum=0.9) for item in (model, reference)]
    for i in range(4):
        if i == step:
            for a, b in (model, reference):
                a.up, b.up = b.up, a.up
        x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(i))
        for item, optimizer, batch in zip((model, reference), optimizers, (local_part(x), x), strict=True):
            mean_square(item, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for param, own in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.detach().full_tensor(), own.detach(), rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_many_ties_move_in_the_same_order_on_every_rank():
    """Each is gathered when it moves. If ranks began with different ones, of equal size, weights would be mixed up."""
    others = [nn.Parameter(torch.empty(0)) for _ in range(400 * dist.get_rank())]
    del others[::3]  # so that objects have other addresses, and lie in sets in another order, from rank to rank
    pairs = [[nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "ab")) for _ in "ab"] for _ in range(8)]
    for first, second in pairs:
        second[0].weight = first[0].weight  # the second layers stay
    model = nn.ModuleList(block for pair in pairs for block in pair)
    for block in model:
        fully_shard(block)
    model.forward = lambda: sum(block(torch.ones(1, 4)).sum() for block in model)
    fully_shard(model)
    expected = {name: value.full_tensor() for name, value in get_model_state_dict(model).items()}
    model().backward()
    for name, value in get_model_state_dict(model).items():
        assert torch.equal(value.full_tensor(), expected[name])
