"""The end of fine-tuning: adapters are merged into weights and taken out of the model, parts of it are called by
themselves, and it is saved as whole tensors. Right, or an error that names group, parameter and remedy."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fsdp_compose import flat_parameters, fully_shard, set_functional_mode, summon_full_params
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict
from tests.harness import distributed, same_on_every_rank
from tests.training import local_part

VOCAB, DIM = 12, 8


class Adapted(nn.Module):
    """A linear layer with a low-rank addition that can be merged into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.a, self.b = nn.Parameter(torch.randn(2, DIM)), nn.Parameter(torch.randn(DIM, 2))
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)

    def merge(self, sign: int = 1) -> nn.Linear:
        self.base.weight.data += sign * (self.b @ self.a).detach()
        return self.base


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Sequential(Adapted(), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Outer(nn.Module):
    """The wrapper by which a model is given adapters: it passes everything on, and is what is sharded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


def outer_and_reference() -> tuple[Outer, Outer]:
    torch.manual_seed(0)
    model = Outer(Model())
    reference = copy.deepcopy(model)
    for layer in model.inner.layers:
        fully_shard(layer)
    return fully_shard(model), reference


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (4, 3), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("has_flat", [False, True])
@pytest.mark.parametrize("place", ["sharded", "summoned"])
@distributed(world_size=2)
def test_adapters_are_merged_taken_out_and_unmerged(place, has_flat, is_functional):
    model, reference = outer_and_reference()
    set_functional_mode(model, is_functional)
    if has_flat:
        flat_parameters(model)
    step(model, local_part(tokens()))
    step(reference, tokens())

    def merge(module: Outer, sign: int) -> None:
        for layer in module.inner.layers:
            layer[0].merge(sign)

    for sign in (1, -1, 1):
        if place == "summoned":
            with summon_full_params(model):
                merge(model, sign)
        else:
            merge(model, sign)
        merge(reference, sign)
        torch.testing.assert_close(model(tokens()), reference(tokens()))
    for module in (model, reference):
        for layer in module.inner.layers:
            layer[0] = layer[0].base
    torch.testing.assert_close(model(tokens()), reference(tokens()))
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected)


@pytest.mark.parametrize("is_functional", [False, True])
@pytest.mark.parametrize("has_grad", [False, True])
@distributed(world_size=2)
def test_a_part_called_by_itself_names_group_parameter_and_remedy(has_grad, is_functional):
    model, reference = outer_and_reference()
    set_functional_mode(model, is_functional)
    step(model, local_part(tokens()))
    with torch.set_grad_enabled(has_grad):
        for call in (model.inner, model.inner.embed, lambda x: model.inner.norm(x.new_ones(2, DIM).float())):
            words = r"sharded parameter inner\.(embed|norm)\.weight of the fully_shard group .*Call that forward"
            with pytest.raises(RuntimeError, match=words) as error:
                call(tokens())
            same_on_every_rank(str(error.value))
        bag = model.inner.embed.weight
        with pytest.raises(RuntimeError, match=r"inner\.embed\.weight of the fully_shard group"):
            F.embedding_bag(tokens(), bag)
        torch.testing.assert_close(model(tokens()), reference(tokens()))


@pytest.mark.parametrize("has_run", [False, True])
@distributed(world_size=2)
def test_safetensors_of_sharded_tensors_name_group_parameter_and_remedy(has_run, tmp_path):
    model, reference = outer_and_reference()
    if has_run:
        step(model, local_part(tokens()))
    path = tmp_path / f"{dist.get_rank()}.safetensors"
    for entries in (model.state_dict(), dict(model.named_parameters())):
        one = {"inner.layers.1.0.base.bias": entries["inner.layers.1.0.base.bias"]}
        words = r"inner\.layers\.1\.0\.base\.bias|0\.base\.bias"  # before the first forward, as the group has it
        with pytest.raises(RuntimeError, match=rf"({words}) of the fully_shard group .*summon_full_params.*state_dict"):
            save_file(one, path)
    with summon_full_params(model, writeback=False):
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    assert_same(load_file(path), reference)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    save_file(full, path)
    assert_same(load_file(path), reference)


def assert_same(found: dict[str, torch.Tensor], reference: nn.Module) -> None:
    expected = reference.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
