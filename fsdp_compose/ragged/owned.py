"""What sharded parameters, and tensors made of them, know of the group that they belong to."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from .._torch import is_swapping_tensors

# Where a sharded parameter, or one that was replaced by one, remembers its owner: (name of the group, FQN).
OWNER_ATTRIBUTE = "_fsdp_compose_owner"
# Where a sharded tensor remembers how it shows its local tensor; see ``classed``.
SHOWN_ATTRIBUTE = "_fsdp_compose_shown_as"


def describe_owner(tensor: Any) -> str:
    """Which sharded tensor was mixed with a plain one, and what to do instead: the end of an error."""
    owner = getattr(tensor, OWNER_ATTRIBUTE, None)
    if owner is None:
        return (
            "a sharded one: make both DTensors (fsdp_compose.distribute_ragged()), or use .to_local() or "
            ".full_tensor() of the sharded one"
        )
    group, fqn = owner
    return (
        f"the sharded parameter {fqn} of the fully_shard group {group}, which is whole only while that group's own "
        "forward runs. Call that forward (or another method, registered with register_forward_method()); do not shard "
        "by itself a module whose parameters another module computes with; or use .full_tensor(). Outside forward "
        "(.grad, optimizer state) make the other one sharded too: fsdp_compose.distribute_ragged(tensor, "
        "p.device_mesh, p.placements). In functional mode activation checkpointing must recompute whole groups"
    )


# The keepers of the gradient hooks (``GradientHooks``) of parameters whose gradients arrive without autograd, by the id
# of the parameter, which outlives everything else in it when ``module.to()`` exchanges its content.
hook_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class OwnedDTensor(DTensor):
    """A DTensor that may be a parameter of a group: what would find no memory or no gradient there asks the group."""

    is_composite = False  # its local tensor is the bytes of several; see ``classed``

    def data_ptr(self) -> int:
        """0, which torch's own code understands. Of a sharded parameter, or what is detached from it, it raises for all
        others: what they read, compare or save there would be nothing."""
        self._refuse_address("data_ptr()")
        return super().data_ptr()

    def storage(self) -> Any:
        """As ``data_ptr``."""
        self._refuse_address("storage()")
        return super().storage()

    def _refuse_address(self, what: str) -> None:
        owner = self.__dict__.get(OWNER_ATTRIBUTE)
        if owner is None or sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):
            return
        group, fqn = owner
        raise RuntimeError(
            f"{what} of the parameter {fqn} of the fully_shard group {group}: each rank holds a part of it, "
            ".to_local(), and none the whole. To save a model as whole tensors (save_pretrained(), safetensors) gather "
            "them on all ranks, inside summon_full_params(model, writeback=False), or by "
            "fsdp_compose.checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), "
            "which is then given to the saving function as its state_dict"
        )

    def share_memory_(self) -> NoReturn:
        """Raises: torch would crash, looking for memory behind the wrapper."""
        raise NotImplementedError(
            f"share_memory_() of a sharded tensor of shape {tuple(self.shape)}: give other processes .full_tensor() of "
            "it, or what this rank holds, .to_local()"
        )

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        owner = hook_owners.get(id(self))
        return super().register_hook(hook) if owner is None else owner.register(self, hook, after_accumulation=False)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        owner = hook_owners.get(id(self))
        if owner is None:
            return super().register_post_accumulate_grad_hook(hook)
        return owner.register(self, hook, after_accumulation=True)

    # Ways to find the node that accumulates the gradient of a leaf: p.view_as(p).grad_fn.next_functions[0][0].

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        self._refuse_accumulator(other)
        return super().view_as(other)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        self._refuse_accumulator(other)
        return super().expand_as(other)

    def _refuse_accumulator(self, other: torch.Tensor) -> None:
        owner = hook_owners.get(id(self)) if other is self and torch.is_grad_enabled() else None
        if owner is not None and not is_swapping_tensors():
            owner.refuse_accumulator(self)
