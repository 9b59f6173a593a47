"""The functions of ``torch.distributed.checkpoint.state_dict``, for every kind of module.

A getter chooses the entries of a state dict locally; then the ranks agree on them, and it gathers or copies values if
asked to. A setter makes a plan, compares the ranks' plans, moves values, and only then changes anything. The work is
in ``model_state``, ``optimizer_state`` and ``optimizer_load``."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ..._arguments import checked
from ..._nested import GROUPS, STATE, is_flattened, map_leaves
from ..._torch import group_device_types, versions_of, with_versions
from ...errors import MisuseError, MisuseRuntimeError
from .agreement import Peers, group_of, group_of_values
from .fqns import ModelNames, patch_method
from .gathering import Copies, Key, copy_to_cpu, digests_of, facts_of, gather_values, key_text
from .model_state import (
    ModelPlan,
    StateDictOptions,
    as_options,
    choose_entries,
    fetch_model,
    is_extra_state,
)
from .optimizer_init import is_pending, pending_keys, without_pending
from .optimizer_load import OptimizerPlan, commit_optimizers, fetch_optimizers, plan_optimizers
from .optimizer_state import (
    Optimizers,
    TrainedBy,
    choose_optimizer_entries,
    flatten,
    is_numbered,
    listed,
    name,
    require_form,
    trained_by,
    unflatten,
)
from .resharding import Sender, describe, on_cpu, share

# ---- The getters: choose entries locally; agree with the other ranks; then gather, copy, or return live values.


@dataclass
class _Entries:
    """The entries of state dicts, with live values.

    Attributes:
        model: in a full dict, all names of a parameter share one value.
        keys: the keys of the model's dict, each with its key in ``model``.
        optimizers, groups: the state and the parameter groups of the optimizers.
    """

    model: dict[Key, Any] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)
    optimizers: dict[Key, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


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
    peers = Peers(group_of(names) if options.full_state_dict else None, call)

    def facts(entries: _Entries) -> list[str]:
        return [repr(options), *names.parameters, *facts_of(entries.model), *facts_of(entries.optimizers)]

    with torch.no_grad():
        entries = peers.attempt(_choose, names, optimizers, options, submodules, with_model, facts=facts)
        if options.full_state_dict and optimizers is not None:
            digests = digests_of(entries.groups, (GROUPS,)) if peers.several else {}
            for key, value in entries.optimizers.items() if peers.several else ():
                digests |= digests_of(value, (STATE, *key))
            peers.compare("state of optimizers", "", [], digests)
        values = _in_form(names, peers, entries.model, options)
        model_state = {key: values[at] for key, at in entries.keys.items() if at in values}
        return model_state, _optimizer_state(names, peers, entries, options) if optimizers is not None else {}


def _choose(
    names: ModelNames,
    optimizers: Optimizers | None,
    options: StateDictOptions,
    submodules: set[nn.Module] | None,
    with_model: bool,
) -> _Entries:
    """Choose the entries of the state dicts. Local.

    Raises:
        RuntimeError: the state dicts cannot be made.
    """
    if options.full_state_dict:
        names.refuse_while_running_elsewhere()
    trained = trained_by(optimizers, names, options.keep_foreign_params)
    for by in trained:
        by.keep_only(names.prefixes_of(submodules))
    entries = _Entries()
    if with_model:
        entries.model, entries.keys = choose_entries(names, options, submodules)
    entries.optimizers, entries.groups = choose_optimizer_entries(trained, options)
    if options.full_state_dict:
        values = [*entries.model.items(), *entries.optimizers.items()]
        Peers.refuse_lost({key_text(key): value for key, value in values})
    return entries


def _in_form(names: ModelNames, peers: Peers, values: dict[Key, Any], options: StateDictOptions) -> dict[Key, Any]:
    """Gather or copy values as the options ask. Ranks: with ``full_state_dict`` all, after they agreed."""
    if options.full_state_dict:
        return gather_values(
            names, values, to_cpu=options.cpu_offload, rank0_only=options.is_rank0_only, is_first=peers.is_first
        )
    if not options.cpu_offload:
        return values

    def to_cpu(_: Any, value: Any) -> Any:
        return copy_to_cpu(value) if isinstance(value, torch.Tensor) and not is_pending(value) else value

    return {key: map_leaves(to_cpu, value) for key, value in values.items()}


def _optimizer_state(names: ModelNames, peers: Peers, entries: _Entries, options: StateDictOptions) -> dict[str, Any]:
    values, groups = _in_form(names, peers, entries.optimizers, options), entries.groups
    if options.is_rank0_only and not peers.is_first:
        return {}
    if options.full_state_dict or options.cpu_offload:
        copies = Copies(options.cpu_offload)
        groups = [map_leaves(lambda _, value: copies.of(value), group) for group in groups]
    state: dict[str, dict[str, Any]] = {}
    for (fqn, key), value in values.items():
        state.setdefault(fqn, {})[key] = value
    result = {STATE: state, GROUPS: groups}
    return flatten(result) if options.flatten_optimizer_state_dict else result


# ---- The setters: agree, plan, compare plans, move values, and only then change anything.


@dataclass
class _Given:
    """The state to load, keyed by FQN: a model's, optimizers', or both."""

    model: Mapping[str, Any] | None = None
    optimizers: Mapping[str, Any] | None = None


@dataclass
class _Ready:
    """A rank's input before the ranks agree: the state, the optimizers to load, and the first rank's description."""

    trained: list[TrainedBy]
    given: _Given
    told: bytes


@dataclass
class _Plans:
    given: _Given
    model: ModelPlan
    optimizers: OptimizerPlan

    def facts(self) -> list[str]:
        return [*self.model.facts, *self.optimizers.facts]


def load_into(
    call: str,
    model: nn.Module,
    optimizers: Optimizers | None,
    model_state: Mapping[str, Any] | None,
    optimizer_state: Mapping[str, Any] | None,
    options: StateDictOptions,
    only_check: bool = False,
) -> Any:
    """Load a model and optimizers (each unless its state is ``None``), completely on every rank or not at all.

    Args:
        only_check: only raise what loading would raise before it changes anything. Pending state is about to be loaded.
    """
    with torch.inference_mode(False):  # loaded tensors must be writable later
        optimizers = None if optimizers is None else listed(optimizers)
        names = ModelNames(model)
        group = group_of(names) or group_of_values([model_state, optimizer_state])
        if group is None and options.broadcast_from_rank0 and dist.is_initialized():
            group = dist.group.WORLD
        peers, sender = Peers(group, call), None
        if options.broadcast_from_rank0 and peers.several:
            sender = Sender(peers.several, _message_device(names, peers.several))

        def facts(ready: _Ready) -> list[str]:
            state = ready.given.optimizers[STATE] if ready.given.optimizers is not None else {}
            pending = [f"{key_text(key)}, which has no state yet" for key in pending_keys(state)]
            return [repr(options), f"{len(ready.trained)} optimizers", *pending]

        given = _Given(model_state, optimizer_state)
        ready = peers.attempt(_prepare, names, optimizers, given, options, sender, facts=facts)
        told, given = share(ready.told, sender) if sender is not None else b"", ready.given
        if only_check and given.optimizers is not None:
            state = {fqn: of for fqn, of in given.optimizers[STATE].items() if any(v is not None for v in of.values())}
            given.optimizers = {**given.optimizers, STATE: state}
        elif sender is None and given.optimizers is not None:
            given.optimizers = {**given.optimizers, STATE: without_pending(given.optimizers[STATE], group)}

        plans = peers.attempt(_plan, names, ready, told, options, sender, facts=_Plans.facts)
        if only_check:
            return None
        values = fetch_model(plans.model, sender)

        def load_model() -> Any:  # if it fails on a rank, all ranks raise before optimizers are changed
            if plans.given.model is None:
                return None
            others = "; the optimizers are unchanged" if plans.given.optimizers is not None else ""
            consequence = f"some of the model's values may be replaced, on any rank{others}"
            return peers.attempt(plans.model.commit, values, consequence=consequence)

        is_on_meta = any(by.on_meta(flat=False) for by in ready.trained)
        if optimizers is not None and peers.ask("on the meta device", is_on_meta, any):
            # Parameters on meta have no memory yet, so their optimizer state could not have any.
            result = load_model()
            arguments, consequence = (model, optimizers, plans, options, sender), "the optimizers were not loaded"
            plans = peers.attempt(_plan_again, *arguments, facts=_Plans.facts, consequence=consequence)
            packed = fetch_optimizers(plans.optimizers, sender)
        else:
            packed = fetch_optimizers(plans.optimizers, sender)
            result = load_model()
        if optimizers is not None:
            consequence = "some optimizer state may already be replaced, on any rank"
            peers.attempt(commit_optimizers, plans.optimizers, packed, consequence=consequence)
        return result


def _prepare(
    names: ModelNames,
    optimizers: Optimizers | None,
    given: _Given,
    options: StateDictOptions,
    sender: Sender | None,
) -> _Ready:
    """Check and normalize the input. Local. Raises RuntimeError or the user's error if something cannot be loaded."""
    names.refuse_while_running_elsewhere()
    trained = trained_by(optimizers, names, options.keep_foreign_params)
    if sender is not None and not sender.is_here:
        return _Ready(trained, _Given(), b"")
    for state, is_wanted in ((given.model, optimizers is None), (given.optimizers, optimizers is not None)):
        if not isinstance(state, Mapping) and (is_wanted or state is not None):
            raise MisuseRuntimeError(f"expected a dict, found a {type(state).__name__}")
    if given.optimizers is not None:
        given = _Given(given.model, _read(given.optimizers, names, trained, options))
    return _Ready(trained, given, b"" if sender is None else _tell(given))


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


def _plan(names: ModelNames, ready: _Ready, told: bytes, options: StateDictOptions, sender: Sender | None) -> _Plans:
    """Plan the loading. Local. Raises RuntimeError if something does not fit."""
    given: _Given = ready.given if sender is None or sender.is_here else pickle.loads(told)
    plans = _Plans(given, ModelPlan(names), OptimizerPlan(ready.trained))
    if given.model is not None:
        plans.model = ModelPlan.of(names, given.model, options, sender)
    if given.optimizers is not None:
        plans.optimizers = plan_optimizers(names, ready.trained, given.optimizers, options, sender)
    problem = _meta_problem(ready.trained, plans.model) or plans.model.problem or plans.optimizers.problem
    if problem:
        raise MisuseRuntimeError(problem)
    return plans


def _plan_again(
    model: nn.Module, optimizers: Optimizers, plans: _Plans, options: StateDictOptions, sender: Sender | None
) -> _Plans:
    """Plan the optimizers again after the model was loaded and got memory."""
    assert plans.given.optimizers is not None
    names = ModelNames(model)
    trained = trained_by(optimizers, names, options.keep_foreign_params)
    again = plan_optimizers(names, trained, plans.given.optimizers, options, sender)
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


# ---- Public functions: getting state dicts


@checked()
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


@checked()
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


@checked()
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


@checked(model_state_dict=None)
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


@checked(optim_state_dict=None)
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


@checked(model_state_dict=None, optim_state_dict=None)
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


@checked()
def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make ``model.state_dict()`` and ``model.load_state_dict()`` call ``get_model_state_dict`` and
    ``set_model_state_dict``, for code that only uses the methods. A ``copy.deepcopy`` of the model is patched too, for
    itself.

    Args:
        model, options: arguments of these functions.
    """
    # Partials: deepcopy() replaces the model in them by its copy.
    patch_method(model, "state_dict", partial(get_model_state_dict, model, options=options))
    patch_method(model, "load_state_dict", partial(_set_model, model, options))


def _set_model(model: nn.Module, options: StateDictOptions | None, state_dict: dict[str, Any]) -> Any:
    return set_model_state_dict(model, state_dict, options=options)


@checked()
def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of each optimizer get and load the state of all of them, by
    ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``. A ``copy.deepcopy`` of an optimizer is not patched.

    Args:
        model, optimizers, options: arguments of these functions.
    """
    several = listed(optimizers)
    for optimizer in several:
        patch_method(optimizer, "state_dict", partial(get_optimizer_state_dict, model, several, options=options))
        patch_method(optimizer, "load_state_dict", partial(_set_optimizers, model, several, options))


def _set_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions | None, state_dict: dict[str, Any]
) -> None:
    set_optimizer_state_dict(model, optimizers, state_dict, options=options)
