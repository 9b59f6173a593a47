"""A model's state dict: made, locally or by gathering, and loaded.

``state_dict`` calls this. ``StateDictOptions``, the ``options`` of its functions, is here. Loading first plans the
whole model, so a refused dict leaves the model unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..._arguments import checked
from ..._torch import IncompatibleKeys, loads_as_torch_module, renew_hooks, versions_of, with_versions
from ...errors import MisuseError, MisuseRuntimeError, list_problems
from ...plugins.parameter_classes import CompositeDTensor
from ..flat import as_ours
from ..group import before_load
from .fqns import ModelNames, own_method
from .gathering import Key, same_elements, storage_of
from .resharding import Described, Sender, Target, fact_of, fetch

# ---- ``StateDictOptions``


@checked()
@dataclass(frozen=True)
class StateDictOptions:
    """Options for making and loading state dicts, with the names and meaning of
    ``torch.distributed.checkpoint.state_dict``.

    Args:
        full_state_dict: getters gather whole, ordinary tensors. Setters ignore it: they accept whole and sharded
            tensors.
        cpu_offload: getters copy to the CPU. With ``full_state_dict`` only the first rank gets a result; the others get
            an empty dict.
        ignore_frozen_params: model getters leave out parameters that do not require grad; model setters do not require
            them.
        keep_submodule_prefixes: with ``submodules=``, keep the submodules' names in the keys.
        strict: setters refuse missing and unexpected keys. Wrong shapes are always refused.
        broadcast_from_rank0: setters read only the first rank's dict, and send it, a flat parameter at a time. Needs
            ``full_state_dict``.
        flatten_optimizer_state_dict: optimizer dicts have one level, with keys ``state.<FQN>.<name>`` and
            ``param_groups.<FQN>.<name>``. Setters ignore it: they accept both forms.
        keep_foreign_params: keep parameters that an optimizer trains but the model does not have, under names like
            ``param_groups.1.params.0`` (their position in the optimizer), instead of raising.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    keep_foreign_params: bool = False

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise MisuseError(
                "StateDictOptions(broadcast_from_rank0=True) needs full_state_dict=True: the first rank sends whole "
                "tensors"
            )

    @property
    def is_rank0_only(self) -> bool:
        """Whether only the first rank gets a result."""
        return self.full_state_dict and self.cpu_offload


def as_options(given: Any) -> StateDictOptions:
    """Convert the user's ``options``: ours, torch's own, or none."""
    return StateDictOptions() if given is None else as_ours(StateDictOptions, given, "options")


# ---- Making the state dict


def is_extra_state(fqn: str) -> bool:
    """Whether this is nn.Module's name for the result of ``get_extra_state()``."""
    return fqn.rpartition(".")[2] == "_extra_state"


def choose_entries(
    names: ModelNames, options: StateDictOptions, submodules: set[nn.Module] | None = None
) -> tuple[dict[Key, Any], dict[str, Key]]:
    """Choose the entries of the state dict. Return their live values, and the key of the value for each key of the
    dict: in a full dict, all names of a parameter share one value. Local.

    Raises:
        RuntimeError: two entries would have the same key; or as for ``ModelNames.entries``.
    """
    state = {fqn: value for fqn, (_, value) in names.entries().items()}
    prefixes = names.prefixes_of(submodules)
    # Each with its first prefix.
    chosen = {fqn: prefix for fqn in state for prefix in reversed(prefixes) if fqn.startswith(prefix)}
    if options.ignore_frozen_params:
        chosen = {fqn: prefix for fqn, prefix in chosen.items() if not _is_frozen(names, fqn)}
    values, keys, by_key = dict[Key, Any](), dict[str, Key](), dict[str, str]()
    for fqn, prefix in chosen.items():
        key = fqn if options.keep_submodule_prefixes else fqn[len(prefix) :]
        if key in by_key:
            raise MisuseRuntimeError(
                f"{by_key[key]} and {fqn} would both be named {key}: keep the prefixes (keep_submodule_prefixes=True), "
                "or get one submodule at a time"
            )
        by_key[key] = fqn
        first = next(name for name in (*names.aliases(fqn), fqn) if name in chosen) if options.full_state_dict else fqn
        keys[key] = (first, "")
        values.setdefault((first, ""), state[first])
    return values, keys


def _is_frozen(names: ModelNames, fqn: str) -> bool:
    param = names.parameters.get(fqn)
    return param is not None and not param.requires_grad


# ---- Loading


@dataclass
class ModelPlan:
    """A plan to load a state dict into a model, made before anything is changed.

    Attributes:
        given: the values to load, by FQN (one name of tied parameters); ``Described`` if only the first rank has them.
        targets: where the tensors among them go.
        keys: the keys in ``model.state_dict()``.
        missing, unexpected: as ``nn.Module.load_state_dict`` returns them.
        versions: format version of each submodule for ``load_state_dict()``: the one noted in the given dict, else the
            current one, since the keys are compared with the current ones.
        problem: why the dict cannot be loaded; empty if it can.
        sender: sends the first rank's tensors; ``None``: every rank has its own.
    """

    names: ModelNames
    given: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problem: str = ""
    sender: Sender | None = None

    @staticmethod
    def of(
        names: ModelNames, state: Mapping[str, Any], options: StateDictOptions, sender: Sender | None = None
    ) -> ModelPlan:
        """Compare a state dict with the model. Local; changes nothing.

        Args:
            state: values by canonical FQN: tensors of any layout, descriptions of the first rank's tensors, or others.
            sender: as in ``ModelPlan``.

        Raises:
            RuntimeError: as for ``ModelNames.entries``.
        """
        plan = ModelPlan(names, sender=sender)
        live = names.live_state()
        entries, noted = names.entries(live), versions_of(state)
        plan.versions = {
            path: noted.get(names.canonical_module(path), version) for path, version in versions_of(live).items()
        }
        problems: list[str] = []
        for fqn, (key, value) in entries.items():
            if fqn not in state:
                continue
            plan.given[fqn], plan.keys[fqn] = state[fqn], key
            if isinstance(value, torch.Tensor) and not is_extra_state(fqn):  # extra state can have any shape
                problems += _mismatch(fqn, value, state[fqn])
                if sender is not None and isinstance(value, CompositeDTensor):
                    problems.append(
                        f"{fqn}: a {value.composite.name} consists of several tensors, which the first rank cannot "
                        "send: give every rank a whole one (without broadcast_from_rank0), or leave it out of the dict"
                    )
                plan.targets[fqn] = Target(value, names.place(fqn))
        plan.missing = [
            fqn
            for fqn in entries
            if fqn not in state
            and not any(name in state for name in names.aliases(fqn))
            and not (options.ignore_frozen_params and _is_frozen(names, fqn))
        ]
        plan.unexpected = [fqn for fqn in state if fqn not in entries]
        refused = [fqn for fqn in plan.given if not names.is_loadable(plan.keys[fqn])]
        if options.strict:
            problems = [
                *(f"missing: {fqn}{_expected(entries[fqn][1])}" for fqn in plan.missing),
                *(f"unexpected: {fqn}, which the model does not have" for fqn in plan.unexpected),
                *(
                    f"{fqn}: a hook added it to state_dict(), but load_state_dict() does not accept it"
                    for fqn in refused
                ),
                *problems,
            ]
        plan.problem = list_problems(
            f"the state dict does not fit this {type(names.model).__name__}",
            problems,
            _prefix_remedy(plan.missing, plan.unexpected)
            or "Build the model as it was when the state dict was made, or load what fits with "
            "StateDictOptions(strict=False)",
        )
        return plan

    @property
    def facts(self) -> list[str]:
        """Facts that must be equal on every rank."""
        return [fact_of((fqn, ""), value, self.targets.get(fqn), self.sender) for fqn, value in self.given.items()]

    def commit(self, values: Mapping[str, Any]) -> Any:
        """Load values that fit. Parameters on the meta device get memory and keep their identity."""
        names, load = self.names, own_method(self.names.model, "load_state_dict")
        assigned = _assigned(self, values)
        there = {self.keys[fqn]: value for fqn, value in values.items() if fqn not in assigned}
        # If a user's hook raises in here, the module is not restored: that would take a copy of the module for every
        # load that succeeds.
        load(with_versions(there, self.versions), strict=False)
        if assigned:
            fresh = {fqn: value for fqn, value in values.items() if fqn in assigned}
            # assign=True makes parameters of the very tensors that it gets, and the given dict must not train along.
            for fqn in fresh.keys() & self.targets.keys():
                fresh[fqn] = fresh[fqn].detach().to(self.targets[fqn].like.dtype, copy=True)
            held = _held(names, fresh)
            given = {self.keys[fqn]: value for fqn, value in fresh.items()}
            load(with_versions(given, self.versions), strict=False, assign=True)
            _keep_objects(held)
            _tie_again(self, assigned)
        _warn_of_meta(names)
        return IncompatibleKeys(self.missing, self.unexpected)


def _prefix_remedy(missing: list[str], unexpected: list[str]) -> str:
    """Explain that all missing names were given with one prefix; empty if they were not."""
    given = set(unexpected)
    for fqn in unexpected if missing else ():
        prefix = fqn.removesuffix(missing[0])
        if prefix.endswith(".") and fqn != prefix and all(prefix + name in given for name in missing):
            return (
                f"The given names begin with {prefix!r}, as those of a wrapped model do (DistributedDataParallel): "
                "remove that prefix with torch.nn.modules.utils.consume_prefix_in_state_dict_if_present()"
            )
    return ""


def _mismatch(fqn: str, expected: torch.Tensor, found: Any) -> list[str]:
    if isinstance(found, (torch.Tensor, Described)):
        if tuple(found.shape) == tuple(expected.shape):
            return []
        got = f"a tensor of shape {tuple(found.shape)}, {found.dtype}"
    else:
        got = f"a {type(found).__name__}"
    layout = f", placed {list(expected.placements)}" if isinstance(expected, DTensor) else ""
    return [f"{fqn}: expected shape {tuple(expected.shape)}, {expected.dtype}{layout}; found {got}"]


def _expected(value: Any) -> str:
    return f" of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else ""


def fetch_model(plan: ModelPlan, sender: Sender | None) -> dict[str, Any]:
    """Convert the given values to the model's layout. None of them shares memory with another part of the model.
    Changes nothing.

    Ranks: all ranks of the model.
    """
    values = {fqn: value for fqn, value in plan.given.items() if fqn not in plan.targets}
    targets = {(fqn, ""): target for fqn, target in plan.targets.items()}
    moved = fetch({(fqn, ""): value for fqn, value in plan.given.items()}, targets, sender)
    live = {storage_of(target.like) for target in plan.targets.values() if not target.like.is_meta} - {0}
    for (fqn, _), tensor in moved.items():
        like, values[fqn] = plan.targets[fqn].like, tensor
        # Live tensors may be given under exchanged names: the first one that is loaded would overwrite the second. But
        # torch.distributed.checkpoint has loaded into the target itself. Asked in this order: a sparse tensor has no
        # storage whose elements could be compared.
        if storage_of(tensor) in live and not (type(tensor) is type(like) and same_elements(tensor, like)):
            values[fqn] = tensor.detach().clone()
    return values


def _assigned(plan: ModelPlan, values: Mapping[str, Any]) -> set[str]:
    """Return the FQNs of values that replace the model's tensors: those for tensors on the meta device, and all that a
    module with its own loading, or a hook, loads together with them, even if their tensors have memory."""
    on_meta = {fqn for fqn in values if fqn in plan.targets and plan.targets[fqn].like.is_meta}
    assigned = set(on_meta)
    if on_meta:
        for path, module in plan.names.model.named_modules():
            # A module with its own loading may need all of its keys in one call.
            if not loads_as_torch_module(module, before_load):
                prefix = f"{path}." if path else ""
                together = {fqn for fqn in values if plan.keys[fqn].startswith(prefix)}
                assigned |= together if together & on_meta else set()
    return assigned


def _held(names: ModelNames, fqns: Collection[str]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return the tensors among ``fqns`` that others may hold, as optimizers hold parameters, each with the dict of a
    module that it is in, and its name there."""
    found: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for fqn, module, name in names.slots("_parameters"):
        param = names.parameters.get(fqn)
        if fqn in fqns and param is not None and names.place(fqn) is None:
            found.append((module._parameters, name, param))
    for fqn, module, name in names.slots("_buffers"):
        buffer = module._buffers[name]
        if fqn in fqns and buffer is not None and not buffer.is_meta:
            found.append((module._buffers, name, buffer))
    return found


def _keep_objects(held: Sequence[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
    """Put back the objects that loading replaced, with the loaded values."""
    for slots, name, before in held:
        loaded = slots[name]
        if loaded is None or loaded is before:
            continue
        # Optimizers hold the object from before, so it gets the content of the loaded one.
        if isinstance(before, nn.Parameter):
            torch.utils.swap_tensors(before, loaded)
            renew_hooks(before)
        elif loaded.shape == before.shape:
            with torch.no_grad():
                before.copy_(loaded)
        else:
            continue
        slots[name] = before


def _tie_again(plan: ModelPlan, fqns: Collection[str]) -> None:
    """Restore ties: loading gives each module its own parameter, so assign the loaded one to all of a tie's modules."""
    slots = {fqn: (module, name) for fqn, module, name in plan.names.slots("_parameters")}
    for tied in {tuple(plan.names.aliases(fqn)) for fqn in fqns}:
        if len(tied) > 1:
            source, source_name = slots[next(fqn for fqn in tied if fqn in plan.given)]
            for module, name in map(slots.__getitem__, tied):
                module._parameters[name] = source._parameters[source_name]


def _warn_of_meta(names: ModelNames) -> None:
    """Warn about tensors that remain on the meta device after loading."""
    tensors: dict[str, torch.Tensor] = {**names.parameters}
    for name, buffer in names.model.named_buffers(remove_duplicate=False):
        tensors[names.canonical(name)] = buffer
    present = ModelNames(names.model).parameters
    left = [fqn for fqn, tensor in tensors.items() if present.get(fqn, tensor).is_meta]
    if left:
        persistent = names.entries()
        buffers = [fqn for fqn in left if fqn not in persistent]
        extra = f" ({', '.join(buffers)}: non-persistent, in no state dict)" if buffers else ""
        warnings.warn(
            f"loading left {', '.join(left)} on the meta device, without values{extra}: compute them before the first "
            "forward"
        )
