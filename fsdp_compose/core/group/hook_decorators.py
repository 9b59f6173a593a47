"""Decorators for the runtime's hooks: some report when groups compute, others keep ``torch.compile`` out of a hook.

The runtime applies them. Without listeners, a decorated hook is the hook itself. Managed modules are annotated for
Dynamo here too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from ..._torch import skip_frame, skip_top_frame
from ..flat import End, begin, watched
from .collective_order import Group

# ---- Support for torch.compile: marks on managed modules, and hooks that Dynamo never traces.
#
# Nothing here imports Dynamo (it costs 0.85 s).


MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def _annotate_modules_for_dynamo(module: nn.Module, ignored_modules: set[nn.Module], use_orig_params: bool) -> None:
    """Mark every module in the tree under ``module`` as managed, except those in ``ignored_modules``.

    Dynamo then reads a marked module's parameters at each call instead of building them into the graph, and shares
    one graph among equal modules.

    Args:
        module: root of the tree.
        ignored_modules: modules to leave unmarked (their children are still visited).
        use_orig_params: value of ``_fsdp_use_orig_params``; the runtime always passes ``True``.
    """
    # Both marks: without the second one Dynamo makes no graph at all.
    marks = dict(zip(MARKS, (True, use_orig_params), strict=True))
    for submodule in module.modules():
        if submodule not in ignored_modules:
            submodule.__dict__.update(marks)


# Decorators, which cost nothing per call: Dynamo never traces the function, nor compiles what it calls; or runs it
# eagerly where it would begin a graph, but traces it inside another graph.
never_traced, traced_inside_others = skip_frame, skip_top_frame


# ---- Reports to listeners when groups compute: ``forward``, ``recomputation`` (activation checkpointing), ``backward``
#
# The forward of a group lasts from the end of its pre-forward to its post-forward. Its backward lasts from the end of a
# use's pre-backward to the use's post-backward, or to the end of the whole backward if no input requires grad. In
# functional mode there are only forwards: autograd does the rest by itself.


_Method = Callable[..., Any]


_forwards: list[End] = []  # the running forwards, innermost last
_backwards: dict[int, tuple[weakref.ref[Group], End]] = {}  # by the id of a use; the graph keeps the use alive


def _after_enter(method: _Method) -> _Method:
    @never_traced
    def enter(mode: object, root: object, state: Group, is_recomputed: bool) -> Any:
        entered = method(mode, root, state, is_recomputed)
        _forwards.append(begin("recomputation" if is_recomputed else "forward", state, state.name))
        return entered

    return enter


def _before_leave(method: _Method) -> _Method:
    @never_traced
    def leave(swap: object) -> None:
        if _forwards:  # empty if the listener was added during this forward
            _forwards.pop()()
        method(swap)

    return leave


def _after_reach(method: _Method) -> _Method:
    @never_traced
    def reach(use: Any, grad: object) -> None:
        before = use.active_backward
        method(use, grad)
        if use.active_backward is not before:  # otherwise another output came first
            end = begin("backward", use.state, use.state.name)
            _backwards[id(use)] = weakref.ref(use.state), end

    return reach


def _before_pass(method: _Method) -> _Method:
    @never_traced
    def leave(use: Any, grad: object) -> None:
        _end_backward(id(use))
        method(use, grad)

    return leave


def _before_end(method: _Method) -> _Method:
    @never_traced
    def end(callback: Any) -> None:
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


begins_forward = watched(_after_enter)  # decorates ``Mode.enter``
ends_forward = watched(_before_leave)  # decorates the method of ``ParameterSwap`` that post-forward calls first
begins_backward = watched(_after_reach)  # decorates the pre-backward of a use
ends_backward = watched(_before_pass)  # decorates the post-backward of a use
ends_backwards = watched(_before_end)  # decorates the callback at the end of a backward
