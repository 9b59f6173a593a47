"""The functions of ``torch.distributed.checkpoint.state_dict``, for every kind of module: what users call."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from .._torch import group_device_types
from .agreement import agree, group_of, has_peers
from .flattened import GROUPS, STATE, is_flattened, is_numbered, name, unflatten
from .layouts import describe, on_cpu, share
from .model_state import ModelPlan, commit_model, fetch_model, get_model_state, plan_model
from .names import ModelNames, patch_method
from .optimizer_state import (
    OptimizerPlan,
    commit_optimizers,
    fetch_optimizers,
    get_optimizer_state,
    plan_optimizers,
)
from .options import StateDictOptions
from .pending import settle
from .trained import TrainedBy, problem_of

Optimizers = Optimizer | Iterable[Optimizer]


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The state dict of a model, by canonical FQN: as the model was called before any wrapper or sharding.

    Sharded tensors are DTensors over the live shards: nothing is communicated or copied. With ``full_state_dict`` they
    are whole: one collective for each flat parameter, and no more memory than one beside the result. Names of one
    tensor (tied weights) have one whole tensor.

    Ranks: with ``full_state_dict`` all ranks of the model, which meet first, in bounded time; else any.

    Args:
        model: plain, sharded, tensor-parallel, wrapped, or a mix.
        submodules: only what is in these.
        options: see ``StateDictOptions``.

    Raises:
        RuntimeError: a rank did not come, or asks for something else; two entries have one canonical name.
    """
    return _get("get_model_state_dict()", model, None, options or StateDictOptions(), submodules)[0]


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of optimizers: ``{"state": {FQN: {...}}, "param_groups": [{"params": [FQN, ...], ...}]}``.

    It reads: no optimizer steps, no gradient is looked at. For flat parameters (``flat_parameters``) it holds the
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
    call, options = "get_optimizer_state_dict()", options or StateDictOptions()
    return _get(call, model, optimizers, options, submodules, with_model=False)[1]


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict``."""
    return _get("get_state_dict()", model, optimizers, options or StateDictOptions(), submodules)


def _get(
    call: str,
    model: nn.Module,
    optimizers: Optimizers | None,
    options: StateDictOptions,
    submodules: set[nn.Module] | None,
    with_model: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = ModelNames(model)
    trained = _trained(optimizers, names, options)
    problem = problem_of(trained)
    if options.full_state_dict or problem:
        agree(group_of(names) if options.full_state_dict else None, call, [repr(options), *names.parameters], problem)
    with torch.no_grad():
        model_state = get_model_state(names, options, submodules) if with_model else {}
        if optimizers is None:
            return model_state, {}
        for by in trained:
            by.keep_only(names.prefixes_of(submodules) if submodules else [""])
        return model_state, get_optimizer_state(names, trained, options)


def _trained(optimizers: Optimizers | None, names: ModelNames, options: StateDictOptions) -> list[TrainedBy]:
    if optimizers is None:
        return []
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    return [TrainedBy(optimizer, names, options.keep_foreign_params) for optimizer in several]


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
    return _set("set_model_state_dict()", model, None, model_state_dict, None, options or StateDictOptions())


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
        RuntimeError: on every rank: an optimizer's parameter is in no saved group, or a saved name is not in the model
            (unless ``strict=False``); a shape does not fit; parameters of one group were saved with different
            hyperparameters; a flat parameter would have to hold different states; or as ``set_model_state_dict``.
    """
    _set("set_optimizer_state_dict()", model, optimizers, None, optim_state_dict, options or StateDictOptions())


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """``set_model_state_dict`` and ``set_optimizer_state_dict``: both, or nothing is changed."""
    options = options or StateDictOptions()
    return _set("set_state_dict()", model, optimizers, model_state_dict, optim_state_dict, options)


@dataclass
class _Given:
    """What a user wants loaded: of a model, of optimizers, or both."""

    model: Mapping[str, Any] | None
    optimizers: Mapping[str, Any] | None


def _set(
    call: str,
    model: nn.Module,
    optimizers: Optimizers | None,
    model_state: Mapping[str, Any] | None,
    optimizer_state: Mapping[str, Any] | None,
    options: StateDictOptions,
) -> Any:
    names = ModelNames(model)
    group = group_of(names)
    if group is None and options.broadcast_from_rank0 and dist.is_initialized():
        group = dist.group.WORLD
    trained = _trained(optimizers, names, options)
    sends = options.broadcast_from_rank0 and has_peers(group)
    given, problem, told = _Given(None, None), problem_of(trained), b""
    if not sends or (group is not None and group.rank() == 0):
        given, wrong = _read(model_state, optimizer_state, names, trained)
        problem = problem or wrong
        if sends and not problem:
            told, problem = _tell(given)
    agree(group, call, [repr(options), f"{len(trained)} optimizers"], problem)
    sender = None
    if sends:
        assert group is not None
        sender = (group, _message_device(names, group))
        heard = pickle.loads(share(told, *sender))
        given = given if group.rank() == 0 else heard
    model_plan, optimizer_plan, settled = ModelPlan(names), OptimizerPlan(trained), {}
    if given.model is not None:
        model_plan = plan_model(names, given.model, options)
    if given.optimizers is not None:
        settled = {STATE: settle(given.optimizers[STATE], group), GROUPS: given.optimizers[GROUPS]}
        optimizer_plan = plan_optimizers(names, trained, settled, options)
    facts = [*model_plan.facts, *optimizer_plan.facts]
    agree(group, call, facts, _meta_problem(trained, model_plan) or model_plan.problem or optimizer_plan.problem)
    values, result = fetch_model(model_plan, sender), None
    if any(by.on_meta(flat=False) for by in trained):  # what has no memory yet gives its state none
        result = commit_model(model_plan, values)
        trained = _trained(optimizers, ModelNames(model), options)
        optimizer_plan = plan_optimizers(ModelNames(model), trained, settled, options)
    packed = fetch_optimizers(optimizer_plan, sender) if given.optimizers is not None else []
    if given.model is not None and result is None:
        result = commit_model(model_plan, values)
    commit_optimizers(optimizer_plan, packed)
    return result


def _meta_problem(trained: list[TrainedBy], plan: ModelPlan) -> str:
    """Why optimizer state cannot be loaded for parameters on the meta device; empty if it can."""
    for by in trained:
        flat = by.on_meta(flat=True)
        if flat:
            return (
                f"the optimizer trains flat parameters on the meta device ({flat[0]}), which get memory at "
                "the next forward: load the model first, run a forward, then load the optimizer"
            )
        stays = [fqn for fqn in by.on_meta(flat=False) if fqn not in plan.targets]
        if stays:
            return (
                f"the optimizer trains {stays[0]}, which is on the meta device and is not in the model's state dict: "
                "load the model first, or both with set_state_dict()"
            )
    return ""


def _read(
    model_state: Mapping[str, Any] | None,
    optimizer_state: Mapping[str, Any] | None,
    names: ModelNames,
    trained: list[TrainedBy],
) -> tuple[_Given, str]:
    """What the user has given, keyed by FQN, and what is wrong with it."""
    if optimizer_state is None:
        return _Given(model_state, None), ""
    fqns = [fqn for by in trained for group in by.groups for fqn in group.fqns]
    try:
        if is_flattened(optimizer_state):
            optimizer_state = unflatten(optimizer_state, {*names.parameters, *fqns})
        elif is_numbered(optimizer_state):
            if any(param.flat for by in trained for group in by.groups for param in group.params):
                raise ValueError("an optimizer's own state_dict() numbers its parameters, and these are flat ones")
            optimizer_state = name(optimizer_state, fqns)
    except ValueError as error:
        return _Given(None, None), f"the optimizer dict cannot be read: {error}"
    if not {STATE, GROUPS} <= optimizer_state.keys():
        return _Given(None, None), (
            f"expected an optimizer dict with {STATE!r} and {GROUPS!r}, or a flattened one; found the keys "
            f"{[*optimizer_state][:5]}"
        )
    return _Given(model_state, optimizer_state), ""


def _tell(given: _Given) -> tuple[bytes, str]:
    """What the other ranks are told of what the first one has, and why they cannot be."""
    try:
        model = None if given.model is None else {fqn: describe(value) for fqn, value in given.model.items()}
        optimizers = None
        if given.optimizers is not None:
            state = {
                fqn: {key: describe(value) for key, value in entries.items()}
                for fqn, entries in given.optimizers[STATE].items()
            }
            optimizers = {STATE: state, GROUPS: on_cpu(given.optimizers[GROUPS])}
        return pickle.dumps(_Given(model, optimizers)), ""
    except Exception as error:  # whatever objects of the user's raise
        return b"", f"broadcast_from_rank0 cannot send this state dict: {type(error).__name__}: {error}"


def _message_device(names: ModelNames, group: dist.ProcessGroup) -> torch.device:
    for handle in names.handles():
        return handle.mesh.device
    if "cpu" in group_device_types(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# ---- patching


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make ``model.state_dict()`` and ``model.load_state_dict()`` call ``get_model_state_dict`` and
    ``set_model_state_dict``, for code that knows no others.

    Args:
        model, options: theirs.
    """
    patch_method(model, "state_dict", lambda: get_model_state_dict(model, options=options))
    patch_method(model, "load_state_dict", lambda state_dict: set_model_state_dict(model, state_dict, options=options))


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of each of the optimizers get and load the state of all of them,
    by ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``.

    Args:
        model, optimizers, options: theirs.
    """
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in several:
        patch_method(optimizer, "state_dict", lambda: get_optimizer_state_dict(model, several, options=options))
        patch_method(
            optimizer,
            "load_state_dict",
            lambda state_dict: set_optimizer_state_dict(model, several, state_dict, options=options),
        )
