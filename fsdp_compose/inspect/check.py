"""``check(model)``: the trainable parameters of a model whose gradients are not reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn

from ..flat import SHARDED_PARAM_ATTRIBUTE
from ..group import get_state, modules_to_run, states_to_run


@dataclass(frozen=True)
class UnreducedParameter:
    """A trainable parameter whose gradients differ from rank to rank.

    Attributes:
        fqn: its name in the model.
        reason: why its gradients are not reduced, and what to do.
    """

    fqn: str
    reason: str

    def __str__(self) -> str:
        return f"{self.fqn}: {self.reason}"


def check(model: nn.Module) -> list[UnreducedParameter]:
    """List the trainable parameters of ``model`` whose gradients are not reduced over the ranks. Local.

    They train differently on every rank, silently, unless the user reduces their gradients. Parameters that another
    composable API manages (torch's ``replicate``) are that API's, and not listed.

    Args:
        model: a module, of which some submodules are sharded.

    Returns:
        The parameters found, in the order of ``model.named_parameters()``; empty if all is well.
    """
    groups = states_to_run(model)
    managed = {id(sharded) for state, _ in groups for handle in state._handles for sharded in handle.sharded_params}
    ignored = {id(param) for state, _ in groups for param in state.ignored}
    below = {id(item) for module in model.modules() if get_state(module) is not None for item in module.modules()}
    found: dict[int, UnreducedParameter] = {}
    for prefix, module in modules_to_run(model):
        for name, param in module._parameters.items():
            if param is None or not param.requires_grad or id(param) in managed or id(param) in found:
                continue
            if id(param) in ignored:
                reason = "passed as ignored_params: reduce its gradients yourself, or freeze it"
            elif SHARDED_PARAM_ATTRIBUTE in param.__dict__:
                reason = (
                    "tied to a parameter that was sharded elsewhere, and no longer the same tensor: shard the modules "
                    "that share it in one call, fully_shard([a, b])"
                )
            elif id(module) in below:
                reason = "added or replaced after fully_shard(): build the module first, then shard it"
            else:
                reason = "no fully_shard() call covers it: call fully_shard() on a module above it"
            found[id(param)] = UnreducedParameter(f"{prefix}.{name}" if prefix else name, reason)
    return list(found.values())
