"""Decorators of the runtime's hooks: some report when groups compute, others keep ``torch.compile`` out of a hook.

The runtime applies them; without listeners a decorated hook is the hook itself. Managed modules are annotated for
Dynamo here too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.nn as nn

from .._torch import skip_frame, skip_top_frame
from ..flat import End, begin, watched

# ---- Support for torch.compile: annotations on managed modules, and hooks that Dynamo never traces.
#
# Nothing here imports Dynamo (it costs 0.85 s).


MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")

_F = TypeVar("_F", bound=Callable[..., Any])


def _annotate_modules_for_dynamo(module: nn.Module, ignored_modules: set[nn.Module], use_orig_params: bool) -> None:
    """Mark every module in the tree under ``module`` as managed, except those in ``ignored_modules``.

    Dynamo then reads a marked module's parameters at each call instead of building them into the graph, and shares
    one graph among equal modules. It needs both marks: without ``_fsdp_use_orig_params`` it makes no graph at all.

    Args:
        module: root of the tree.
        ignored_modules: modules to leave unmarked (their children are still visited).
        use_orig_params: value of ``_fsdp_use_orig_params``; the runtime always passes ``True``.
    """
    for submodule in module.modules():
        if submodule not in ignored_modules:
            submodule._is_fsdp_managed_module = True  # type: ignore[assignment]
            submodule._fsdp_use_orig_params = use_orig_params  # type: ignore[assignment]


def never_traced(function: _F) -> _F:
    """Tell Dynamo, once, never to trace ``function``, nor to compile what it calls. Costs nothing per call."""
    skip_frame(function)
    return function


def traced_inside_others(function: _F) -> _F:
    """Tell Dynamo to run ``function`` as it is where it would begin a graph, and to trace it as a part of another."""
    skip_top_frame(function)
    return function


# ---- When groups compute, for those who listen: ``forward``, ``recomputation`` (activation checkpointing),
# ``backward``.
#
# A forward of a group is what runs from the end of its pre-forward to its post-forward, a backward what runs from the
# end of the pre-backward of a use to its post-backward, or to the end of the whole backward where no input requires
# grad. In functional mode there are forwards only: autograd does the rest by itself.


_Method = Callable[..., Any]


class ComputingGroup(Protocol):
    """A ``_FSDPState``."""

    @property
    def name(self) -> str: ...

    @property
    def root(self) -> object: ...


class ReachedUse(Protocol):
    """A use, to which backwards come; see ``HookedUse``."""

    @property
    def state(self) -> ComputingGroup: ...

    @property
    def active_backward(self) -> object: ...


class EndOfBackward(Protocol):
    """The end of a backward of a root, which is called once."""

    @property
    def root(self) -> object: ...


_forwards: list[End] = []  # those that are running, the innermost last
_backwards: dict[int, tuple[weakref.ref[ComputingGroup], End]] = {}  # by the id of a use, which a graph holds


def _after_enter(method: _Method) -> _Method:
    @never_traced
    def enter(mode: object, root: object, state: ComputingGroup, is_recomputed: bool) -> Any:
        entered = method(mode, root, state, is_recomputed)
        _forwards.append(begin("recomputation" if is_recomputed else "forward", state, state.name))
        return entered

    return enter


def _before_leave(method: _Method) -> _Method:
    @never_traced
    def leave(swap: object) -> None:
        if _forwards:  # none if the listener has come meanwhile
            _forwards.pop()()
        method(swap)

    return leave


def _after_reach(method: _Method) -> _Method:
    @never_traced
    def reach(use: ReachedUse, grad: object) -> None:
        before = use.active_backward
        method(use, grad)
        if use.active_backward is not before:  # else another output has come before
            end = begin("backward", use.state, use.state.name)
            _backwards[id(use)] = weakref.ref(use.state), end

    return reach


def _before_pass(method: _Method) -> _Method:
    @never_traced
    def leave(use: ReachedUse, grad: object) -> None:
        _end_backward(id(use))
        method(use, grad)

    return leave


def _before_end(method: _Method) -> _Method:
    @never_traced
    def end(callback: EndOfBackward) -> None:
        for use in [*reversed(_backwards)]:
            state = _backwards[use][0]()
            if state is None or state.root is callback.root:
                _end_backward(use)
        method(callback)

    return end


def _end_backward(use: int) -> None:
    found = _backwards.pop(use, None)
    if found is not None:
        found[1]()


begins_forward = watched(_after_enter)  # of ``Mode.enter``
ends_forward = watched(_before_leave)  # of what post-forward calls first, of ``ParameterSwap``
begins_backward = watched(_after_reach)  # of the pre-backward of a use
ends_backward = watched(_before_pass)  # of its post-backward
ends_backwards = watched(_before_end)  # of the end of a backward
