"""The functions of ``torch.distributed.checkpoint.state_dict``, for every kind of module: what users call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ..moving.names import patch_method
from .getting import get
from .loading import load_into
from .options import StateDictOptions, as_options
from .trained import Optimizers


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The state dict of a model, by canonical FQN: as the model was called before any wrapper or sharding.

    Sharded tensors are DTensors over the live shards: nothing is communicated or copied. With ``full_state_dict`` they
    are whole: one collective for each flat parameter, and no more memory than for the result and one of these.
    Names of one tensor (tied weights) have one whole tensor.

    Ranks: with ``full_state_dict`` all ranks of the model, which meet first, in bounded time; else any.

    Args:
        model: plain, sharded, tensor-parallel, wrapped, or a mix.
        submodules: only what is in these.
        options: see ``StateDictOptions``; that of ``torch.distributed.checkpoint.state_dict`` is taken too.

    Raises:
        RuntimeError: a rank did not come, or asks for something else; two entries have one canonical name.
    """
    return get("get_model_state_dict()", model, None, as_options(options), submodules)[0]


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of optimizers: ``{"state": {FQN: {...}}, "param_groups": [{"params": [FQN, ...], ...}]}``.

    It reads: no optimizer steps, no gradient is looked at. For flat views (``flat_parameters``) it holds the
    parameters in them, as for any optimizer: DTensors over the live state. A sharded dict holds, for a parameter that
    has no state yet, places that ``torch.distributed.checkpoint`` can load into; they save as "none yet", and what was
    not loaded stays none. A full dict has no entry for it.

    Ranks: as ``get_model_state_dict``.

    Args:
        model: the module whose parameters are trained.
        optimizers: one, or several that share no parameter.
        submodules: only parameters in these.
        options: see ``StateDictOptions``.

    Raises:
        RuntimeError: an optimizer trains what the model does not have (unless ``keep_foreign_params``), or one
            parameter is in two; or as ``get_model_state_dict``.
    """
    call, options = "get_optimizer_state_dict()", as_options(options)
    return get(call, model, optimizers, options, submodules, with_model=False)[1]


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict``."""
    return get("get_state_dict()", model, optimizers, as_options(options), submodules)


# ---- loading


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a model's state dict. Nothing is changed, on any rank, unless everything fits on all of them.

    Ranks: all ranks of the model.

    Args:
        model: as for ``get_model_state_dict``. Parameters on the meta device get memory.
        model_state_dict: by canonical FQN; tensors whole (equal on every rank, or of the first rank with
            ``broadcast_from_rank0``) or DTensors in any layout. It is not changed. One of the names of tied parameters
            is enough.
        options: see ``StateDictOptions``.

    Returns:
        ``(missing_keys, unexpected_keys)``, the same on every rank.

    Raises:
        RuntimeError: on every rank: keys are missing or unexpected (unless ``strict=False``); a shape does not fit;
            the ranks were given different dicts; or a rank did not come.
    """
    return load_into("set_model_state_dict()", model, None, model_state_dict, None, as_options(options))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of optimizers; see ``set_model_state_dict``.

    What a parameter gets depends on its name only: parameters may be grouped otherwise than they were saved. A frozen
    parameter keeps its state. A parameter without state in the dict has none afterwards.

    Args:
        model, optimizers: as for ``get_optimizer_state_dict``.
        optim_state_dict: in its form, the flattened one, or (with one optimizer over sharded parameters) an optimizer's
            own ``state_dict()``. Names of parameters of the model that these optimizers do not train are passed over.
        options: see ``StateDictOptions``.

    Raises:
        RuntimeError: on every rank: an optimizer's parameter is in no saved parameter group, or a saved name is not in
            the model (unless ``strict=False``); a shape does not fit; parameters of one parameter group were saved with
            different hyperparameters; a flat view would have to hold different states; or as ``set_model_state_dict``.
    """
    load_into("set_optimizer_state_dict()", model, optimizers, None, optim_state_dict, as_options(options))


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """``set_model_state_dict`` and ``set_optimizer_state_dict``: both, or nothing is changed."""
    options = as_options(options)
    return load_into("set_state_dict()", model, optimizers, model_state_dict, optim_state_dict, options)


# ---- state_dict() of a model or an optimizer that is one of these


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
