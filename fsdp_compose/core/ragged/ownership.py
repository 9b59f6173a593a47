"""What a ``RaggedDTensor`` knows about the group that it is a parameter of, and how often it was written to.

The flat parameter sets the owner; ``RaggedDTensor`` and its operations ask it. From the count of writes, all ranks
conclude the same about whether a gathered copy is out of date. Nothing here reads or writes elements.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..._torch import grad_dtype_slot, is_swapping_tensors, local_tensor
from ...errors import MisuseRuntimeError

# ---- What sharded parameters, and tensors made from them, know about their group


# The attribute by which a sharded parameter, or one that it replaced, finds its owner: (name of the group, FQN).
OWNER_ATTRIBUTE = "_fsdp_compose_owner"
# The attribute by which a sharded tensor knows how to show its local tensor; see ``subclass_views``.
SHOWN_ATTRIBUTE = "_fsdp_compose_shown_as"


class MixedOperandsError(MisuseRuntimeError):
    """An operation got a plain tensor beside a sharded one."""


def describe_owner(tensor: Any) -> str:
    """Say which sharded tensor was mixed with a plain one, and what to do instead: the end of an error message."""
    owner = getattr(tensor, OWNER_ATTRIBUTE, None)
    if owner is None:
        return (
            "a sharded one: make both DTensors (fsdp_compose.distribute_ragged()), or use .to_local() or "
            ".full_tensor() of the sharded one"
        )
    group, fqn = owner
    return (
        f"the sharded parameter {fqn} of the fully_shard group {group}, which is whole only while that group's own "
        "forward runs. Call that forward by model(...), since model.forward(...) skips hooks (or another method, "
        "registered with register_forward_method()); do not make a separate group of a module whose parameters "
        "another module computes with; or use .full_tensor(). Outside forward (.grad, optimizer state), shard the "
        "other tensor too: fsdp_compose.distribute_ragged(tensor, p.device_mesh, p.placements). In functional mode, "
        "activation checkpointing must recompute whole groups"
    )


class ParameterOwner(ABC):
    """What sharded parameters ask their flat parameter; ``GradientHooks`` answers for it."""

    @abstractmethod
    def register(self, sharded: Any, hook: Callable[[Any], Any], after_accumulation: bool) -> Any: ...

    @abstractmethod
    def refuse_accumulator(self, sharded: Any) -> None: ...

    @abstractmethod
    def is_forward_running(self) -> bool: ...

    @abstractmethod
    def gather(self, sharded: Any) -> torch.Tensor | None: ...


# By the id of a parameter whose gradient arrives without autograd. The id outlives everything else in a parameter when
# ``module.to()`` exchanges its content.
parameter_owners: weakref.WeakValueDictionary[int, ParameterOwner] = weakref.WeakValueDictionary()


class OwnedDTensor(DTensor):
    """A DTensor that may be a parameter of a group."""

    # Methods that would find no memory or no gradient on a sharded parameter ask its group, or raise.

    is_composite = False  # its local tensor holds the bytes of several tensors; see ``subclass_views``

    def data_ptr(self) -> int:
        """Return 0 to torch's own code. For any other caller, a sharded parameter, or a tensor detached from one,
        raises."""
        # torch knows that a wrapper has no address. Others would read, compare or save what is at that address.
        self._refuse_address("data_ptr()")
        return super().data_ptr()

    def storage(self) -> Any:
        """Like ``data_ptr``."""
        self._refuse_address("storage()")
        return super().storage()

    def _refuse_address(self, what: str) -> None:
        owner = self.__dict__.get(OWNER_ATTRIBUTE)
        if owner is None or sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):
            return
        group, fqn = owner
        raise RuntimeError(
            f"{what} of the parameter {fqn} of the fully_shard group {group}: each rank holds only a part of it, "
            ".to_local(), and no rank the whole. To save a model as whole tensors (save_pretrained(), safetensors), "
            "gather them on all ranks: inside summon_full_params(model, writeback=False), or with "
            "fsdp_compose.checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), "
            "whose result you pass to the saving function as its state_dict. An optimizer that compares addresses "
            "cannot train sharded parameters"
        )

    def share_memory_(self) -> NoReturn:
        """Raises."""
        # torch would look for memory behind the wrapper, and crash.
        raise NotImplementedError(
            f"share_memory_() of a sharded tensor of shape {tuple(self.shape)}: give other processes its "
            ".full_tensor(), or this rank's part, .to_local()"
        )

    def _set_grad_dtype(self, dtype: torch.dtype | None) -> None:
        owner, present = self.__dict__.get(OWNER_ATTRIBUTE), grad_dtype_slot.__get__(self)
        if owner is not None and dtype != present:
            group, fqn = owner
            raise RuntimeError(
                f"grad_dtype of {fqn} of the fully_shard group {group} cannot be set to {dtype}: its gradients are "
                f"sharded in {present}. Set it before fully_shard()"
            )
        grad_dtype_slot.__set__(self, dtype)

    if grad_dtype_slot is not None:
        grad_dtype = property(grad_dtype_slot.__get__, _set_grad_dtype)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        owner = parameter_owners.get(id(self))
        return super().register_hook(hook) if owner is None else owner.register(self, hook, after_accumulation=False)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        owner = parameter_owners.get(id(self))
        if owner is None:
            return super().register_post_accumulate_grad_hook(hook)
        return owner.register(self, hook, after_accumulation=True)

    # This expression finds the node that accumulates the gradient of a leaf: p.view_as(p).grad_fn.next_functions[0][0].

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        self._refuse_accumulator(other)
        return super().view_as(other)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        self._refuse_accumulator(other)
        return super().expand_as(other)

    def _refuse_accumulator(self, other: torch.Tensor) -> None:
        owner = parameter_owners.get(id(self)) if other is self and torch.is_grad_enabled() else None
        if owner is not None and not is_swapping_tensors():
            owner.refuse_accumulator(self)


# ---- Writes to sharded parameters: how all ranks know, equally, that a gathered copy is out of date
#
# An all-gather may be issued ahead of its use (prefetch, ``unshard()``), or its result kept from an earlier use. If the
# sharded parameters were written to in between, the group must be gathered again, by all ranks or by none. Two numbers
# decide; each is compared in constant time for a whole flat parameter:
#
# - the version of the shard, which rises with every write that torch can see; and
# - the number of writes that the ranks make together: operations on sharded parameters (``RaggedDTensor`` dispatches
# them on every rank, even one that holds no elements), optimizer steps, loading.
#
# If both have changed, the ranks wrote together, and gather again. If only the version has, this rank wrote to its own
# memory (``to_local()``); other ranks may not know, so that is an error. Writes that raise no version at all (``.data``
# of a tensor that ``to_local()`` returned, kernels that write to an address) cannot be detected here.


class _Counter:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


writes = _Counter()
"""Counts the writes that all ranks have made together so far."""

requires_grad_writes = _Counter()
"""Counts how often ``requires_grad`` of a sharded parameter was set."""


def note_write_of_all_ranks(tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Say that all ranks have written to the local tensors of these parameters, each to its own.

    Code that steps parameters through local tensors calls this afterwards: ranks then gather again what they have kept
    (``zero1``, ``zero2``, ``unshard``), also those that hold no elements of what was written. Operations on sharded
    parameters need nothing, nor do steps on flat views, and of classes declared with ``declare_blockwise``.

    Ranks: all ranks, for the same parameters. No communication.

    Args:
        tensors: parameters, or their local tensors.

    Example::

        for param in params:
            kernel(param.to_local(), param.grad.to_local())
        note_write_of_all_ranks(params)
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
    # A dispatch moves no version counter, and a local tensor shares that of the shard, but not that of its parameter.
    increment_version(tensors)
    increment_version([local_tensor(item) for item in tensors if isinstance(item, DTensor)])
    writes.count += 1
