"""``backward(inputs=...)`` and ``autograd.grad()`` of sharded parameters.

In the default mode gradients reach sharded parameters by a reduction: autograd knows no way from a loss to them. Asked
for their gradients alone it would compute nothing, without a word. So ``backward(inputs=...)`` asks for those of the
unsharded parameters as well, which are then reduced as ever. ``autograd.grad()``, which must return gradients and leave
``.grad`` alone, finds out whether the loss was computed with the parameters in a forward, and then refuses; gradients
of terms on the sharded parameters themselves, and everything in functional mode, are autograd's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._torch import intercept_backward_inputs
from ..flat import FlatParamHandle, handle_of, handle_of_segment, sharded_param_of
from ..group import captured_leaves, state_of
from . import outside_use

_is_installed = False


def notice_inputs() -> None:
    """Called by ``fully_shard``; acts once."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        intercept_backward_inputs(_run)


def _run(
    run: Callable[[tuple[Any, ...], bool], Any], inputs: tuple[Any, ...], allow_unused: bool, accumulates: bool
) -> Any:
    """``run(inputs, allow_unused)``, with the inputs that the user means."""
    found = [(handle, index) for item in inputs for handle, index in _places_of(item)]
    if not found:
        return run(inputs, allow_unused)
    unsharded = [handle.unsharded.params[index] for handle, index in found]
    if accumulates:
        sharded = [handle.sharded_params[index] for handle, index in found]
        leaves = [leaf for handle, _ in found for leaf in captured_leaves(handle)]
        added = {id(item): item for item in (*sharded, *unsharded, *leaves) if item.requires_grad}
        for item in inputs:
            added.pop(id(item), None)
        return run((*inputs, *added.values()), allow_unused)
    asked = {id(param): (param, place) for param, place in zip(unsharded, found, strict=True) if param.requires_grad}
    asked |= {
        id(leaf): (leaf, (handle, index))
        for handle, index in found
        for leaf in captured_leaves(handle)
        if leaf.requires_grad
    }
    with outside_use.gradients_through_autograd():
        result = run((*inputs, *[param for param, _ in asked.values()]), True)
    gradients, others = result[: len(inputs)], result[len(inputs) :]
    for (_, (handle, index)), other in zip(asked.values(), others, strict=True):
        if other is not None:
            raise _refusal(handle, index)
    if not allow_unused and any(item is None for item in gradients):
        raise RuntimeError(
            "autograd.grad(): a tensor among the inputs was not used to compute the outputs; with allow_unused=True "
            "its gradient is None"
        )
    return gradients


def _places_of(item: Any) -> Iterator[tuple[FlatParamHandle, int]]:
    """The sharded parameters behind an input: itself, or those of which it is the flat view."""
    if not isinstance(item, torch.Tensor):
        return
    place = handle_of(sharded_param_of(item))
    if place is not None:
        yield place
    handle = handle_of_segment(item)
    for segment in () if handle is None else handle.segments:
        if segment.parameter is item and handle is not None:
            yield from ((handle, index) for index in segment.sharded_params)


def _refusal(handle: FlatParamHandle, index: int) -> RuntimeError:
    state = state_of(handle)
    group = "?" if state is None else state.name
    return RuntimeError(
        f"autograd.grad() was asked for the gradient of {handle.name_of(index)}, a sharded parameter of "
        f"the fully_shard group {group}, whose forward ran in the default mode: gradients arrive in .grad there. Run "
        "the forward in functional mode (with functional_mode(model): ...), or call backward(), with inputs=[...] "
        "for some parameters only"
    )
