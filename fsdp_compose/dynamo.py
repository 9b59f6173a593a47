"""What torch.compile needs: annotations on managed modules, and hooks that Dynamo never traces.

Dynamo itself is imported only when something is being compiled (it costs 0.85 s).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.nn as nn

from ._torch import eval_frame_callback, skip_frame

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
    """A function that Dynamo neither traces nor enters; what it calls is not compiled either.

    Applied once, when the function is defined. Outside compiled code it costs one extra call: the slow path that
    switches Dynamo off for the callees is taken only while a frame callback is active on this thread.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def untraced(*args: Any) -> Any:
        if eval_frame_callback() is None:
            return function(*args)
        if not disabled:
            import torch._dynamo

            disabled.append(torch._dynamo.disable(function, reason="fsdp_compose hook"))
        return disabled[0](*args)

    skip_frame(untraced)
    return cast(_F, untraced)
