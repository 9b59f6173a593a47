"""Forwards inside a backward: those that repeat an earlier one for it, as activation checkpointing does, and others."""

from __future__ import annotations

import torch.nn as nn

from .._torch import is_checkpoint_recomputing
from ..group import Root, _FSDPState
from .steps import reshard, reshard_until_backward


def is_recomputation(state: _FSDPState, task: int) -> bool:
    """Whether a forward that begins inside a backward (of number ``task``) repeats an earlier one for it, as activation
    checkpointing does. Else it is a forward like those outside: of a teacher in a gradient hook, say.

    While a backward of its own root runs, a forward is always treated like a repetition: it computes with parameters
    that cannot have changed since that backward came to them."""
    root = state.root
    if root is None:
        return is_checkpoint_recomputing()  # of a forward before fully_shard()
    if root.forward.depth and root.forward.task == task:
        return False  # a part of a forward that has begun inside that backward
    if root.backward is not None:
        return True
    if not is_checkpoint_recomputing():
        return False
    # The model is wholly inside a checkpoint. Where its forward has left nothing to repeat for, this is another one.
    return state.past.was_functional or any(other.progress.outstanding for other in root.live_states())


def enter_recomputation(state: _FSDPState, module: nn.Module) -> Root:
    """The root of a recomputation that begins. The groups recomputed before this one are resharded unless their
    backward has begun; the last one stays, since its backward comes next."""
    root = state.root
    if root is None:
        raise RuntimeError(
            f"the first forward of the fully_shard'ed {type(module).__name__} runs inside a backward; run its first "
            "forward outside of backward"
        )
    if root.recomputed:
        for other in root.recomputed:
            if other is not state and not other.backward.active_uses and not other.options.keeps_after_backward():
                (reshard_until_backward if other.place.keeps_parts else reshard)(root, other)
        root.recomputed.clear()
    return root
