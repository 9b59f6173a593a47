"""Support for torch.compile: annotations on managed modules, and hooks that Dynamo never traces.

Nothing here imports Dynamo (it costs 0.85 s).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn as nn

from .._torch import skip_frame, skip_top_frame

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
