"""What a user may steer by hand: gradient synchronisation, resharding, explicit unshard and reshard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn

from .group import _FSDPState, get_state, states_to_run
from .runtime import enter_alone, wait_for_unshard
from .runtime import reshard as _reshard
from .runtime import unshard as _unshard


class UnshardHandle:
    """Result of ``unshard(module, async_op=True)``; ``wait()`` makes the parameters usable."""

    def __init__(self, state: _FSDPState) -> None:
        self._state: _FSDPState | None = state

    def wait(self) -> None:
        """Wait for the all-gather; a second call does nothing."""
        state, self._state = self._state, None
        if state is not None and state.root is not None:
            wait_for_unshard(state.root, state)


def unshard(module: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """All-gather the parameters of ``module``'s group ahead of its forward.

    Only storage is materialised: the module's next forward uses it, and frees it as it always does. Meant for use
    inside the outermost forward, ahead of a module's own: what is unsharded when the outermost forward begins is
    gathered again, since parameters may have been edited in between.

    Ranks: all ranks of the mesh must call it, in the same order among their other collectives.

    Args:
        module: a module given to ``fully_shard``. Nested groups are not touched.
        async_op: return at once, with a handle to wait for.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
    """
    state = _own_state(module, "unshard")
    root = enter_alone(state, module)
    _unshard(root, state)
    handle = UnshardHandle(state)
    if async_op:
        return handle
    handle.wait()
    return None


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters of ``module``'s group. Local: no communication.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
        RuntimeError: a forward or backward of the group is running.
    """
    state = _own_state(module, "reshard")
    if state.entries or state.active_uses:
        raise RuntimeError(f"reshard(): a forward or backward of the fully_shard group {state.name} is running")
    if state.root is not None:
        for handle in state._handles:
            handle.is_pinned = handle.is_resident
        _reshard(state.root, state)


@contextmanager
def keep_unsharded(module: nn.Module) -> Iterator[None]:
    """Within this context forwards without grad mode leave the parameters of all groups below ``module`` gathered, for
    the next forward: generation, where one forward a token would gather the whole model each time::

        with torch.no_grad(), keep_unsharded(model):
            for _ in range(num_tokens):
                ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)

    Every rank then holds the whole model in its compute dtype, from the first forward to the end of the context, or to
    ``reshard(module)``, or to the end of a backward. At the end of the context it is freed. Forwards under grad mode
    keep what ``reshard_after_forward`` says.

    Edits inside the context are followed: what the ranks write to the sharded parameters (operations on them, on views
    and ``.data`` of them, on flat parameters, steps of ``torch.optim`` optimizers, ``load_state_dict``, loading by
    ``torch.distributed.checkpoint``, ``summon_full_params``, ``module.to()``) shows in the next forward. A write to a
    rank's local memory (``to_local()``) raises at the next forward of that rank. A write that torch does not count
    (``.data`` of what ``to_local()`` returned, NumPy, a kernel that is given an address) cannot be noticed: call
    ``reshard()`` after it, on the groups in question, on all ranks.

    Ranks: all ranks of the mesh must enter and leave it at the same place of their programs. Local: no communication.

    Args:
        module: root of the tree to keep.
    """
    states = [
        state for state in _states(module, recurse=True) if not state.keeps_unsharded
    ]  # else: of an outer context
    for state in states:
        state.keeps_unsharded = True
    try:
        yield
    finally:
        for state in states:
            state.keeps_unsharded = False
            if state.root is not None and not state.entries and not state.active_uses:
                _reshard(state.root, state)


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether the backwards to come reduce gradients, or accumulate them unsharded, without communication.

    Unsharded accumulation holds ``reduce_dtype`` gradients of the whole group on every rank. The backward that
    reduces again includes what was accumulated.

    Ranks: all ranks must set the same. Local: no communication.

    Args:
        module: root of the tree to set.
        requires_gradient_sync: the flag.
        recurse: set it for all groups below ``module``, not only its own.
    """
    for state in _states(module, recurse):
        state.requires_gradient_sync = requires_gradient_sync


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Within this context backward accumulates gradients without communication; see ``set_requires_gradient_sync``.

    The flags of all groups below ``module`` are restored at the end, also after an exception.
    """
    with _flag_within(module, "requires_gradient_sync", False):
        yield


def set_functional_mode(module: nn.Module, is_functional: bool = True, *, recurse: bool = True) -> None:
    """Whether the forwards to come gather parameters in a way that autograd can differentiate any number of times.

    In functional mode double backward (``create_graph=True``: gradient penalties) and ``autograd.grad(loss,
    model.parameters())`` give what they give for the unsharded model, averaged over the ranks like every gradient, as
    DTensors. Gathered parameters live until the graph is freed, as if the model were replicated for that long; every
    backward reduces (``no_sync`` has no effect on it). Activation checkpointing must wrap whole groups. Forwards
    without grad mode are as always.

    Ranks: all ranks must set the same. Local: no communication.

    Args:
        module: root of the tree to set.
        is_functional: the mode.
        recurse: set it for all groups below ``module``, not only its own.
    """
    for state in _states(module, recurse):
        state.is_functional = is_functional


@contextmanager
def functional_mode(module: nn.Module) -> Iterator[None]:
    """Within this context forwards of ``module`` run in functional mode (see ``set_functional_mode``); their backward
    may come later. The modes of all groups below ``module`` are restored at the end, also after an exception::

        with functional_mode(critic):
            score = critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + (slope.norm() - 1) ** 2).backward()
    """
    with _flag_within(module, "is_functional", True):
        yield


def set_reshard_after_forward(module: nn.Module, reshard_after_forward: bool, *, recurse: bool = True) -> None:
    """Set ``reshard_after_forward`` (see ``fully_shard``) from the next forward on, the same on all ranks.

    It is about the time between a forward and its backward. After a forward without grad mode parameters are freed all
    the same, for an edit before the next one may leave no trace: see ``keep_unsharded``.
    """
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(f"set_reshard_after_forward(): expected True or False, got {reshard_after_forward!r}")
    for state in _states(module, recurse):
        state.reshard_option = state.reshard_after_forward = reshard_after_forward


@contextmanager
def _flag_within(module: nn.Module, flag: str, value: bool) -> Iterator[None]:
    """Set a flag of all groups below ``module`` for a while."""
    before = [(state, getattr(state, flag)) for state in _states(module, recurse=True)]
    try:
        for state, _ in before:
            setattr(state, flag, value)
        yield
    finally:
        for state, was in before:
            setattr(state, flag, was)


def _own_state(module: nn.Module, call: str) -> _FSDPState:
    state = get_state(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ValueError(f"{call}(): fully_shard() was not called on this {type(module).__name__}")
    return state


def _states(module: nn.Module, recurse: bool) -> list[_FSDPState]:
    if recurse:
        return [state for state, _ in states_to_run(module)]
    return [_own_state(module, "recurse=False")]
