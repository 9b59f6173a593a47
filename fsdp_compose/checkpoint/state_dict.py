"""The functions of ``torch.distributed.checkpoint.state_dict``, for every kind of module.

A getter chooses the entries of a state dict locally; then the ranks agree on them, and it gathers or copies values if
asked to. A setter makes a plan, compares the ranks' plans, moves values, and only then changes anything. The work is
in ``model_state``, ``optimizer_state`` and ``optimizer_load``."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from .._torch import group_device_types, versions_of, with_versions
from ..errors import MisuseError, MisuseRuntimeError, RanksDifferError, class_of, name_of
from .agreement import (
    agree,
    attempt,
    differing_values,
    group_of,
    group_of_values,
    has_peers,
    is_true_on_any,
    lost_ranks,
    problem_text,
    tell_and_compare,
)
from .fqns import ModelNames, patch_method
from .gathering import digests_of, facts_of, key_text
from .model_state import (
    ModelEntries,
    ModelPlan,
    StateDictOptions,
    as_options,
    choose_entries,
    commit_model,
    fetch_model,
    get_model_state,
    is_extra_state,
    plan_model,
)
from .optimizer_init import pending_keys, without_pending
from .optimizer_load import OptimizerPlan, commit_optimizers, fetch_optimizers, plan_optimizers
from .optimizer_state import (
    GROUPS,
    STATE,
    OptimizerEntries,
    Optimizers,
    TrainedBy,
    choose_optimizer_entries,
    get_optimizer_state,
    is_flattened,
    is_numbered,
    listed,
    name,
    problem_of,
    require_form,
    trained_by,
    unflatten,
)
from .resharding import describe, on_cpu, share

# ---- The getters: choose entries locally; agree with the other ranks; then gather, copy, or return live values.


def get(
    call: str,
    model: nn.Module,
    optimizers: Optimizers | None,
    options: StateDictOptions,
    submodules: set[nn.Module] | None,
    with_model: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of a model (empty unless ``with_model``) and of optimizers (empty if there are none)."""
    names = ModelNames(model)
    with torch.no_grad():
        chosen, problem = attempt(_choose, names, optimizers, options, submodules, with_model)
        if options.full_state_dict or chosen is None:
            group = group_of(names) if options.full_state_dict else None
            facts, digests = [repr(options), *names.parameters], {}
            if chosen is not None:
                facts += facts_of(chosen[0].values) + facts_of(chosen[1].values)
                problem = lost_ranks({key_text(key): value for part in chosen for key, value in part.values.items()})
                digests = _digests(chosen[1]) if has_peers(group) else {}
            agree(group, call, facts, problem)
            if optimizers is not None:
                _refuse_differing(group, call, digests)
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
    """Choose the entries of the state dicts. Local.

    Raises:
        RuntimeError: the state dicts cannot be made.
    """
    trained = trained_by(optimizers, names, options.keep_foreign_params)
    problem = problem_of(trained, names)
    if problem:
        raise MisuseRuntimeError(problem)
    for by in trained:
        by.keep_only(names.prefixes_of(submodules) if submodules else [""])
    entries = choose_entries(names, options, submodules) if with_model else ModelEntries()
    return entries, choose_optimizer_entries(trained, options)


def _digests(entries: OptimizerEntries) -> dict[str, str]:
    found = digests_of(entries.groups, (GROUPS,))
    for key, value in entries.values.items():
        found |= digests_of(value, (STATE, *key))
    return found


def _refuse_differing(group: dist.ProcessGroup | None, call: str, digests: Mapping[str, str]) -> None:
    _, is_alike = tell_and_compare(group, call, "state of optimizers", "", [*map(" ".join, digests.items())])
    problem = "" if is_alike else differing_values(group, call, digests)
    if problem:
        raise RanksDifferError(f"{call}: {problem}")


# ---- The setters: agree, plan, compare plans, move values, and only then change anything.


@dataclass
class _Given:
    """The state to load, keyed by FQN: a model's, optimizers', or both."""

    model: Mapping[str, Any] | None = None
    optimizers: Mapping[str, Any] | None = None


def load_into(
    call: str,
    model: nn.Module,
    optimizers: Optimizers | None,
    model_state: Mapping[str, Any] | None,
    optimizer_state: Mapping[str, Any] | None,
    options: StateDictOptions,
) -> Any:
    """Load a model and optimizers (each unless its state is ``None``), completely on every rank or not at all."""
    with torch.inference_mode(False):  # loaded tensors must be writable later
        several = None if optimizers is None else listed(optimizers)
        return _load_into(call, model, several, model_state, optimizer_state, options)


def _load_into(
    call: str,
    model: nn.Module,
    optimizers: list[Optimizer] | None,
    model_state: Mapping[str, Any] | None,
    optimizer_state: Mapping[str, Any] | None,
    options: StateDictOptions,
) -> Any:
    names = ModelNames(model)
    group = group_of(names) or group_of_values([model_state, optimizer_state])
    if group is None and options.broadcast_from_rank0 and dist.is_initialized():
        group = dist.group.WORLD
    sending = group if options.broadcast_from_rank0 and has_peers(group) else None

    ready, problem = attempt(_prepare, names, optimizers, _Given(model_state, optimizer_state), options, sending)
    agree(group, call, [repr(options), *(ready.facts if ready else [])], problem)
    assert ready is not None
    sender = (sending, _message_device(names, sending)) if sending is not None else None
    told = share(ready.told, *sender) if sender is not None else b""
    given = ready.given
    if sender is None and given.optimizers is not None:
        given.optimizers = {**given.optimizers, STATE: without_pending(given.optimizers[STATE], group)}

    plans, problem = attempt(_plan, names, ready, told, options, sending)
    agree(group, call, plans.facts if plans else [], problem)
    assert plans is not None
    values, result = fetch_model(plans.model, sender), None
    is_on_meta = any(by.on_meta(flat=False) for by in ready.trained)
    is_first_loaded = optimizers is not None and is_true_on_any(group, call, "on the meta device", is_on_meta)
    if is_first_loaded:  # parameters on meta have no memory yet, so their optimizer state could not have any
        result = _load_model(group, call, plans, values)
        plans, problem = attempt(_plan_again, ModelNames(model), optimizers, plans, options)
        agree(group, call, plans.facts if plans else [], _after("the optimizers were not loaded", problem))
        assert plans is not None
    packed = fetch_optimizers(plans.optimizers, sender)
    if not is_first_loaded:
        result = _load_model(group, call, plans, values)
    if optimizers is not None:
        _, problem = attempt(commit_optimizers, plans.optimizers, packed)
        agree(group, call, [], _after("some optimizer state may already be replaced, on any rank", problem))
    return result


@dataclass
class _Ready:
    """A rank's input before the ranks agree: the state, the optimizers to load, and the first rank's description."""

    trained: list[TrainedBy]
    given: _Given
    told: bytes

    @property
    def facts(self) -> list[str]:
        state = self.given.optimizers[STATE] if self.given.optimizers is not None else {}
        pending = [f"{key_text(key)}, which has no state yet" for key in pending_keys(state)]
        return [f"{len(self.trained)} optimizers", *pending]


def _prepare(
    names: ModelNames,
    optimizers: Optimizers | None,
    given: _Given,
    options: StateDictOptions,
    sending: dist.ProcessGroup | None,
) -> _Ready:
    """Check and normalize the input. Local. Raises RuntimeError, or an error of the user's objects, if something cannot
    be loaded."""
    trained = trained_by(optimizers, names, options.keep_foreign_params)
    problem = problem_of(trained, names)
    if problem:
        raise MisuseRuntimeError(problem)
    if sending is not None and sending.rank() != 0:
        return _Ready(trained, _Given(), b"")
    for state, is_wanted in ((given.model, optimizers is None), (given.optimizers, optimizers is not None)):
        if not isinstance(state, Mapping) and (is_wanted or state is not None):
            raise MisuseRuntimeError(f"expected a dict, found a {type(state).__name__}")
    if given.optimizers is not None:
        given = _Given(given.model, _read(given.optimizers, names, trained, options))
    return _Ready(trained, given, b"" if sending is None else _tell(given))


def _read(
    state: Mapping[str, Any], names: ModelNames, trained: list[TrainedBy], options: StateDictOptions
) -> Mapping[str, Any]:
    """Convert an optimizer dict of any form to one keyed by FQN."""
    if not trained and not state:
        return {STATE: {}, GROUPS: []}
    fqns = [fqn for by in trained for fqn in by.fqns]
    try:
        if is_flattened(state):
            known = {*names.parameters, *fqns, *(by.shared_name for by in trained)}
            state = unflatten(state, known, strict=options.strict)
        elif is_numbered(state):
            if any(param.flat for by in trained for group in by.groups for param in group.params):
                raise MisuseError(
                    "an optimizer's own state_dict() numbers its parameters, but this optimizer's are flat views"
                )
            state = name(state, fqns, trained[0].shared_name)
        require_form(state)
    except ValueError as error:
        raise MisuseRuntimeError(f"the optimizer dict cannot be read: {error}") from error
    return state


def _tell(given: _Given) -> bytes:
    """Pickle a description of the first rank's state for the other ranks."""
    try:
        model = optimizers = None
        if given.model is not None:
            told = {fqn: (on_cpu if is_extra_state(fqn) else describe)(value) for fqn, value in given.model.items()}
            model = with_versions(told, versions_of(given.model))
        if given.optimizers is not None:
            given.optimizers = {**given.optimizers, STATE: without_pending(given.optimizers[STATE], None)}
            state = {fqn: describe(dict(entries)) for fqn, entries in given.optimizers[STATE].items()}
            optimizers = {STATE: state, GROUPS: on_cpu(given.optimizers[GROUPS])}
        return pickle.dumps(_Given(model, optimizers))
    except Exception as error:  # the user's objects may raise anything
        raise MisuseRuntimeError(
            f"broadcast_from_rank0 cannot send this state dict: {type(error).__name__}: {error}"
        ) from error


def _message_device(names: ModelNames, group: dist.ProcessGroup) -> torch.device:
    for handle in names.handles():
        return handle.mesh.device
    if "cpu" in group_device_types(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@dataclass
class _Plans:
    given: _Given
    model: ModelPlan
    optimizers: OptimizerPlan

    @property
    def facts(self) -> list[str]:
        return [*self.model.facts, *self.optimizers.facts]


def _plan(
    names: ModelNames, ready: _Ready, told: bytes, options: StateDictOptions, sending: dist.ProcessGroup | None
) -> _Plans:
    """Plan the loading. Local. Raises RuntimeError if something does not fit."""
    given: _Given = ready.given if sending is None or sending.rank() == 0 else pickle.loads(told)
    plans = _Plans(given, ModelPlan(names), OptimizerPlan(ready.trained))
    if given.model is not None:
        plans.model = plan_model(names, given.model, options, sending)
    if given.optimizers is not None:
        plans.optimizers = plan_optimizers(names, ready.trained, given.optimizers, options, sending)
    problem = _meta_problem(ready.trained, plans.model) or plans.model.problem or plans.optimizers.problem
    if problem:
        raise MisuseRuntimeError(problem)
    return plans


def _plan_again(names: ModelNames, optimizers: Optimizers | None, plans: _Plans, options: StateDictOptions) -> _Plans:
    """Plan the optimizers again after the model was loaded and got memory."""
    assert plans.given.optimizers is not None
    trained = trained_by(optimizers, names, options.keep_foreign_params)
    again = plan_optimizers(names, trained, plans.given.optimizers, options, plans.optimizers.sending)
    if again.problem:
        raise MisuseRuntimeError(again.problem)
    return _Plans(plans.given, plans.model, again)


def _meta_problem(trained: list[TrainedBy], plan: ModelPlan) -> str:
    """Return why optimizer state cannot be loaded for parameters on the meta device; empty if it can."""
    for by in trained:
        flat = by.on_meta(flat=True)
        if flat:
            return (
                f"the optimizer trains flat views on the meta device ({flat[0]}), which get memory at the "
                "next forward: load the model first, run a forward, then load the optimizer"
            )
        stays = [fqn for fqn in by.on_meta(flat=False) if fqn not in plan.targets]
        if stays:
            return (
                f"the optimizer trains {stays[0]}, which is on the meta device and is not in the model's state dict: "
                "load the model first, or both with set_state_dict()"
            )
    return ""


def _load_model(group: dist.ProcessGroup | None, call: str, plans: _Plans, values: Mapping[str, Any]) -> Any:
    """Change the model. If that fails on a rank, all ranks raise before optimizers are changed."""
    if plans.given.model is None:
        return None
    result, problem = attempt(commit_model, plans.model, values)
    optimizers = "; the optimizers are unchanged" if plans.given.optimizers is not None else ""
    agree(group, call, [], _after(f"some of the model's values may be replaced, on any rank{optimizers}", problem))
    return result


def _after(consequence: str, problem: str | Exception) -> str | Exception:
    """Add ``consequence`` to a problem that came up after something was changed."""
    if not problem:
        return ""
    kind = class_of(name_of(problem)) if isinstance(problem, Exception) else RuntimeError
    failure = kind(f"{problem_text(problem)}\n(raised during loading: {consequence})")
    failure.__cause__ = problem if isinstance(problem, Exception) else None
    return failure


# ---- Public functions: getting state dicts


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state dict of a model under canonical FQNs, the names without any wrapper or sharding.

    By default sharded tensors are DTensors over the live shards; nothing is communicated or copied. With
    ``full_state_dict`` tensors are whole, which takes one collective for each flat parameter, and memory for the result
    and one flat parameter. Names of the same tensor (tied weights) then share one whole tensor.

    Ranks: with ``full_state_dict`` all ranks of the model, which first wait for each other, for a bounded time;
    otherwise any rank.

    Args:
        model: a plain, sharded, tensor-parallel or wrapped model, or a mix.
        submodules: restrict the state dict to these submodules.
        options: see ``StateDictOptions``; torch's class of that name is accepted too.

    Raises:
        RuntimeError: a rank did not arrive or called it with other arguments; two entries have the same canonical name.
    """
    return get("get_model_state_dict()", model, None, as_options(options), submodules)[0]


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of optimizers: ``{"state": {FQN: {...}}, "param_groups": [{"params": [FQN, ...], ...}]}``.

    This only reads: it never steps an optimizer or looks at gradients. The state of flat views (``flat_parameters``) is
    listed by the parameters in them, as for any optimizer, as DTensors over the live state. If a parameter has no state
    yet, a sharded dict holds placeholders that ``torch.distributed.checkpoint`` can load into. Saved, they become
    "none yet"; placeholders that nothing is loaded into remain without state. A full dict has no entry for such a
    parameter.

    Ranks: as for ``get_model_state_dict``.

    Args:
        model: the module whose parameters are trained.
        optimizers: one optimizer, or several that share no parameter.
        submodules: restrict the dict to the parameters of these submodules.
        options: see ``StateDictOptions``.

    Raises:
        RuntimeError: an optimizer trains a parameter that the model does not have (unless ``keep_foreign_params``); a
            parameter is in two optimizers; or as for ``get_model_state_dict``.
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
    """Return the results of ``get_model_state_dict`` and ``get_optimizer_state_dict``."""
    return get("get_state_dict()", model, optimizers, as_options(options), submodules)


# ---- Public functions: loading state dicts


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a model's state dict. Unless everything fits on all ranks, nothing is changed on any rank.

    Ranks: all ranks of the model.

    Args:
        model: as for ``get_model_state_dict``. Parameters on the meta device get memory.
        model_state_dict: tensors by canonical FQN, whole (equal on every rank, or the first rank's with
            ``broadcast_from_rank0``) or DTensors in any layout. It is not changed. Tied parameters need only one of
            their names.
        options: see ``StateDictOptions``.

    Returns:
        ``(missing_keys, unexpected_keys)``, the same on every rank.

    Raises:
        RuntimeError: on every rank: keys are missing or unexpected (unless ``strict=False``); a shape does not fit; the
            ranks passed different dicts; or a rank did not arrive.
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

    State is matched by parameter name alone, so the parameter groups may differ from the saved ones. A frozen
    parameter keeps its state. A parameter without state in the dict has none afterwards.

    Args:
        model, optimizers: as for ``get_optimizer_state_dict``.
        optim_state_dict: a dict as returned by ``get_optimizer_state_dict``, flattened or not, or (with one optimizer
            over sharded parameters) an optimizer's own ``state_dict()``. Parameters of the model that these optimizers
            do not train are skipped.
        options: see ``StateDictOptions``.

    Raises:
        RuntimeError: on every rank: an optimizer's parameter is in no saved parameter group, or a saved name is not in
            the model (both unless ``strict=False``); a shape does not fit; parameters of one parameter group were saved
            with different hyperparameters; a flat view would have to hold different states; or as for
            ``set_model_state_dict``.
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
    """Load both dicts as ``set_model_state_dict`` and ``set_optimizer_state_dict`` do, or change nothing."""
    options = as_options(options)
    return load_into("set_state_dict()", model, optimizers, model_state_dict, optim_state_dict, options)


# ---- Public functions: patching ``state_dict()`` and ``load_state_dict()``


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make ``model.state_dict()`` and ``model.load_state_dict()`` call ``get_model_state_dict`` and
    ``set_model_state_dict``, for code that only uses the methods. A ``copy.deepcopy`` of the model is patched too, for
    itself.

    Args:
        model, options: arguments of these functions.
    """
    # Partials: deepcopy() replaces the model in them by its copy.
    patch_method(model, "state_dict", partial(_get_model, model, options))
    patch_method(model, "load_state_dict", partial(_set_model, model, options))


def _get_model(model: nn.Module, options: StateDictOptions | None) -> dict[str, Any]:
    return get_model_state_dict(model, options=options)


def _set_model(model: nn.Module, options: StateDictOptions | None, state_dict: dict[str, Any]) -> Any:
    return set_model_state_dict(model, state_dict, options=options)


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of each optimizer get and load the state of all of them, by
    ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``. A ``copy.deepcopy`` of an optimizer is not patched.

    Args:
        model, optimizers, options: arguments of these functions.
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
