"""``describe(model)``: which rank holds what, and in how many bytes."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch.nn as nn

from .collecting import collect
from .page import as_page
from .terminal import as_terminal_text, can_use_terminal
from .text import as_text

FORMATS = ("text", "json", "html")


def describe(model: nn.Module, format: str = "text") -> str:
    """Describe the layout of a sharded model: for each group its ranks, dtypes and options, and for each parameter of
    each flat parameter its place, and the rank that holds each part. ``print(describe(model))``.

    Ranks: any; nothing is communicated, and nothing changes. Before the first forward too; only then is it known which
    group is the root's, on which the default of ``reshard_after_forward`` depends.

    Args:
        model: a module, of which some submodules are sharded or replicated. Names are relative to it.
        format: ``"text"``: tables, by ``rich`` with colours where that is installed and output goes to a terminal;
            ``"json"``: all facts, for programs (sizes in elements and bytes, ranks by their numbers in the default
            process group; parts of parameters from the first element to before the last one); ``"html"``: a page with a
            picture of each flat parameter, which loads nothing from anywhere.

    Returns:
        The description.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: there is no such format.
        RuntimeError: called inside ``summon_full_params``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe(): expected an nn.Module, got {type(model).__name__}")
    if format not in FORMATS:
        raise ValueError(f"describe(format={format!r}): expected one of {', '.join(map(repr, FORMATS))}")
    facts = collect(model)
    if format == "html":
        return as_page(facts)
    if format == "json":
        totals = {
            "numel": facts.numel,
            "kept_bytes": facts.kept_bytes,
            "padding_bytes": facts.padding_bytes,
            "flat_bytes": facts.flat_bytes,
        }
        return json.dumps({**asdict(facts), "totals": totals}, indent=1)
    return as_terminal_text(facts) if can_use_terminal() else as_text(facts)
