"""Take over into the shards what the user has changed between two iterations, or refuse it."""

from __future__ import annotations

from collections.abc import Sequence

from ..flat import reflatten
from ..group import Root, Watch, _FSDPState, take_assigned
from .buckets import watch_buckets
from .steps import follow_requires_grad


def take_over(root: Root, states: list[_FSDPState]) -> None:
    for item in states:
        for handle in item._handles:
            if handle.unsharded.has_grad():
                _refuse_stray_gradients(item)
            if handle.was_toggled():
                follow_requires_grad(root, item)
            else:
                handle.follow_requires_grad()
        take_assigned(item.swap)
        item.swap.check_slots()
        if any(handle.was_moved() for handle in item._handles):
            _reflatten(root, item)
    _refuse_meta(states)
    watch_again(root)


def watch_again(root: Root) -> None:
    """Take a new picture of what the user may change."""
    for part in root.parts:
        owner = part[0]()
        if owner is not None:
            owner.follow(Watch([state for ref in part if (state := ref()) is not None]))


def _refuse_meta(states: list[_FSDPState]) -> None:
    for state in states:
        if any(handle.unsharded.is_meta for handle in state._handles):
            raise ValueError(
                f"the parameters of the fully_shard group {state.name} are still on the meta device: call "
                "model.to_empty(device=...) and initialise them before the first forward"
            )


def refuse_late_grad_dtype(states: Sequence[_FSDPState]) -> None:
    """Raise if ``grad_dtype`` of a parameter was set after its flat parameter was made, which it decides about."""
    for state in states:
        for handle in state._handles:
            for sharded, fqn in zip(handle.sharded_params, handle.fqns, strict=True):
                wanted, expected = getattr(sharded, "grad_dtype", handle.gradient.dtype), handle.gradient.dtype
                if sharded.requires_grad and wanted != expected:
                    raise RuntimeError(
                        f"grad_dtype of {fqn} was set to {wanted}, and its gradients are sharded in {expected}: set it "
                        "before fully_shard()"
                    )


def _refuse_stray_gradients(state: _FSDPState) -> None:
    for handle in state._handles:
        handle.drop_iteration(is_tainted=False)
    raise RuntimeError(
        f"a backward reached parameters of the fully_shard group {state.name} without passing any of its module's "
        "outputs, and their gradients were not reduced (they are thrown away now). Let forward return every tensor "
        "that a loss is computed from, or keep it as an attribute of the module"
    )


def _reflatten(root: Root, state: _FSDPState) -> None:
    for handle in state._handles:
        if handle.was_moved():
            root.communicator.wait(handle)
            reflatten(handle)
    state.lead()
    state.swap.rebuild()
    state.past.have_new_parameters()
    watch_buckets(state)
