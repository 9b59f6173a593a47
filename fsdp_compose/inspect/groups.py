"""``fsdp_groups(model)``: iterate over the groups of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn as nn

from ..group import states_to_run


class FSDPGroup(NamedTuple):
    """One ``fully_shard`` or ``replicate`` call.

    Attributes:
        module: the module that was given to the call; of a list, the first one that is found in the model.
        name: the FQN of ``module`` in the model, "" for the model itself.
        parameters: the sharded parameters that the call manages; calls on submodules manage their own.
    """

    module: nn.Module
    name: str
    parameters: list[nn.Parameter]


def fsdp_groups(model: nn.Module) -> Iterator[FSDPGroup]:
    """Iterate over the groups of ``model``: depth first, a module before its submodules, each group once. Local::

        for module, name, parameters in fsdp_groups(model):
            print(name or "(root)", sum(param.to_local().numel() for param in parameters), "elements on this rank")

    Args:
        model: any module. The iterator is empty if neither the module nor a submodule is sharded.

    Yields:
        The module, its name, and its group's parameters; the list is empty if the group has none.
    """
    for state, name in states_to_run(model):
        yield FSDPGroup(
            model.get_submodule(name), name, [param for handle in state._handles for param in handle.sharded_params]
        )
