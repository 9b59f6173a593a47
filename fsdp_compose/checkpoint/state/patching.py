"""``model.state_dict()`` and ``optimizer.state_dict()`` that are the functions of this package."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ..moving.names import patch_method
from .options import StateDictOptions
from .state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from .trained import Optimizers


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make ``model.state_dict()`` and ``model.load_state_dict()`` call ``get_model_state_dict`` and
    ``set_model_state_dict``, for code that knows no others. Those of a ``copy.deepcopy`` of the model are the copy's.

    Args:
        model, options: theirs.
    """
    # Partials: deepcopy() puts the copy into the place of the model.
    patch_method(model, "state_dict", partial(_get_model, model, options))
    patch_method(model, "load_state_dict", partial(_set_model, model, options))


def _get_model(model: nn.Module, options: StateDictOptions | None) -> dict[str, Any]:
    return get_model_state_dict(model, options=options)


def _set_model(model: nn.Module, options: StateDictOptions | None, state_dict: dict[str, Any]) -> Any:
    return set_model_state_dict(model, state_dict, options=options)


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of each of the optimizers get and load the state of all of them,
    by ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``. A ``copy.deepcopy`` of an optimizer is not
    patched.

    Args:
        model, optimizers, options: theirs.
    """
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in several:
        patch_method(optimizer, "state_dict", partial(_get_optimizers, model, several, options))
        patch_method(optimizer, "load_state_dict", partial(_set_optimizers, model, several, options))


def _get_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions | None
) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizers, options=options)


def _set_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions | None, state_dict: dict[str, Any]
) -> None:
    set_optimizer_state_dict(model, optimizers, state_dict, options=options)
