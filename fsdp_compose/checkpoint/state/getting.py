"""The getters: choose, locally, what a state dict will hold; meet; then gather, copy, or neither."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from ..moving.agreement import agree, attempt, group_of
from ..moving.gathering import facts_of
from ..moving.names import ModelNames
from .model_state import ModelEntries, choose_entries, get_model_state
from .optimizer_state import OptimizerEntries, choose_optimizer_entries, get_optimizer_state
from .options import StateDictOptions
from .trained import Optimizers, problem_of, trained_by


def get(
    call: str,
    model: nn.Module,
    optimizers: Optimizers | None,
    options: StateDictOptions,
    submodules: set[nn.Module] | None,
    with_model: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of a model (empty unless ``with_model``) and of optimizers (empty if there are none)."""
    names = ModelNames(model)
    with torch.no_grad():
        chosen, problem = attempt(_choose, names, optimizers, options, submodules, with_model)
        if options.full_state_dict or chosen is None:
            facts = [repr(options), *names.parameters]
            if chosen is not None:
                facts += facts_of(chosen[0].values) + facts_of(chosen[1].values)
            agree(group_of(names) if options.full_state_dict else None, call, facts, problem)
        assert chosen is not None
        model_state = get_model_state(names, chosen[0], options) if with_model else {}
        return model_state, get_optimizer_state(names, chosen[1], options) if optimizers is not None else {}


def _choose(
    names: ModelNames,
    optimizers: Optimizers | None,
    options: StateDictOptions,
    submodules: set[nn.Module] | None,
    with_model: bool,
) -> tuple[ModelEntries, OptimizerEntries]:
    """The entries that the state dicts will hold. Local.

    Raises:
        RuntimeError: they cannot be made.
    """
    trained = trained_by(optimizers, names, options.keep_foreign_params)
    problem = problem_of(trained, names)
    if problem:
        raise RuntimeError(problem)
    for by in trained:
        by.keep_only(names.prefixes_of(submodules) if submodules else [""])
    entries = choose_entries(names, options, submodules) if with_model else ModelEntries()
    return entries, choose_optimizer_entries(trained, options)
