"""What users import: new names, old names for one release more, and aliases that FSDP2's users look for."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest
import torch
import torch.nn as nn

import fsdp_compose
from fsdp_compose import fsdp_groups, fully_shard
from tests.harness import distributed


@pytest.mark.parametrize(("old", "new"), fsdp_compose._OLD_NAMES.items())
def test_old_names_work_and_name_the_new(old: str, new: str) -> None:
    module, _, name = f"fsdp_compose.{new}".rpartition(".")
    expected = f"fsdp_compose.{old} is now fsdp_compose.{new}; the old name works until 0.4"
    with pytest.warns(DeprecationWarning, match=expected) as caught:
        found = getattr(fsdp_compose, old)
    assert found is getattr(importlib.import_module(module), name)
    assert caught[0].filename == __file__, "the warning points at the caller"
    assert old not in fsdp_compose.__all__


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fsdp_compose' has no attribute 'fully_sharded'"):
        fsdp_compose.fully_sharded  # noqa: B018
    with pytest.raises(ImportError, match="fully_sharded"):
        from fsdp_compose import fully_sharded  # noqa: F401


def test_every_public_name_is_there_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    for name in fsdp_compose.__all__:
        assert not isinstance(getattr(fsdp_compose, name), types.ModuleType), name
    assert not recwarn.list
    assert inspect.isfunction(fsdp_compose.fully_shard) or callable(fsdp_compose.fully_shard)
    assert fsdp_compose.__version__ == "0.3.0"


def test_names_of_fsdp2_are_the_same_functions() -> None:
    assert fsdp_compose.register_fsdp_forward_method is fsdp_compose.register_forward_method
    assert fsdp_compose.set_all_reduce_hook is fsdp_compose.set_post_reduction_hook


@distributed(world_size=2)
def test_fsdp_groups_lists_each_group_once_with_its_own_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5)), nn.Linear(5, 2))
    assert [*fsdp_groups(model)] == []
    model.append(model[0])  # the same module at another place
    fully_shard(model[1][0])
    fully_shard([model[0], model[2]])
    fully_shard(model)
    found = [*fsdp_groups(model)]
    assert [(module, name) for module, name, _ in found] == [(model, ""), (model[0], "0"), (model[1][0], "1.0")]
    names = {id(param): name for name, param in model.named_parameters()}
    assert [[names[id(param)] for param in group.parameters] for group in found] == [
        ["1.1.weight", "1.1.bias"],
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        ["1.0.weight", "1.0.bias"],
    ]
    (below,) = fsdp_groups(model[2])  # the first module of its group is elsewhere
    assert below.module is model[2] and below.name == "" and len(below.parameters) == 4
    assert sum(param.to_local().numel() for group in found for param in group.parameters) > 0
