"""Which parameters a module shows: the sharded ones outside ``forward``, the unsharded ones inside.

Every module that holds parameters of a group has two prepared ``_parameters`` dicts: its own, with the sharded
parameters, and one with the unsharded parameters in the same slots. A swap assigns one or the other to the module.
Entries that the group does not own are in both dicts. Lists in which a module caches its weights
(``nn.RNN._flat_weights``) are swapped the same way.

If the user replaces, adds or removes a parameter, an error names it: a change outside forward raises at the start of
the next iteration, a change inside forward at the end of the outermost forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.nn as nn

from ..._torch import hook_saved_first, saves_as_torch_module
from ...errors import MisuseRuntimeError
from ..comm import IN_GROUP, Names
from ..flat import (
    FlatParamHandle,
    ManagedParameter,
    Owner,
    check_content,
    check_grad_dtype,
    handle_of,
    refuse_meta_content,
    take_over,
)
from ..ragged import RaggedDTensor
from .hook_decorators import MARKS, ends_forward
from .kept_tensors import KeptTensors, Namespace
from .start_values import notice_load, notice_loaded

_Parameters = dict[str, "nn.Parameter | None"]
_LOST_CHANGE = (
    "forward replaced, added or removed parameters of a sharded module{}. This change would be lost when the module "
    "is resharded; change parameters outside forward, while the module is sharded"
)


class Held:
    """Some dicts and a record of their values, compared in one pass.

    Attributes:
        dicts: the given dict objects themselves.
        values: their values when ``note`` was last called.
    """

    __slots__ = ("_empty", "_known", "_views", "dicts", "values")

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self.dicts = [*dicts]
        self.note()

    def note(self) -> None:
        self._empty = [item for item in self.dicts if not item]
        views = [dict.values(item) for item in self.dicts if item]
        self.values = tuple(chain.from_iterable(views))
        self._views, self._known = [*views, _END], (*self.values, *_END)

    def is_same(self) -> bool:
        """Whether the dicts hold these very values, in this order."""
        return not any(self._empty) and all(map(is_, chain.from_iterable(self._views), self._known))


_END = (object(),)  # comes after all values, so that it is displaced if there are more or fewer of them


class ParameterSwap:
    """The prepared dicts of all modules of a group.

    It writes to the ``__dict__`` of each module. It refers to the sharded module(s) themselves weakly: they hold the
    state that holds this object, and a model must be freed without the garbage collector.

    Args:
        roots: the module(s) given to ``fully_shard``.
        managed: the group's parameters; the sharded ones are already in place in the modules.
        handles: the handles that hold them, by FQN.
        fqns: name of every module of the group, relative to the sharded module.

    Attributes:
        kept: the tensors that ``forward`` keeps on the group's modules.
        num_shows: number of running forwards and backwards that make the modules show the unsharded parameters; one
            more while ``is_left``.
        is_left: the modules show them between forwards too (``leave_shown``).
        shown_instead: the tensors that ``show_instead`` shows at present, by the id of the unsharded parameter.
    """

    __slots__ = (
        "_children", "_fqns", "_namespaces", "_owned", "_prepared_names", "_root_writes", "_roots", "_sharded",
        "_unsharded", "_views", "_writes", "called", "is_left", "kept", "num_shows", "shown_instead",
    )  # fmt: skip

    def __init__(
        self,
        roots: Sequence[nn.Module],
        managed: Sequence[ManagedParameter],
        handles: Sequence[FlatParamHandle],
        fqns: dict[nn.Module, str],
    ) -> None:
        # By identity: a parameter that was untied from another may have that one's name.
        where = {id(sharded): (handle, i) for handle in handles for i, sharded in enumerate(handle.sharded_params)}
        owned: dict[nn.Module, dict[str, tuple[FlatParamHandle, int]]] = {}
        for item in managed:
            for module, name in item.slots:
                owned.setdefault(module, {})[name] = where[id(module._parameters[name])]
        self._namespaces = [None if module in roots else module.__dict__ for module in owned]
        self._roots = [weakref.ref(module) if module in roots else None for module in owned]
        self.num_shows, self.is_left, self.shown_instead = 0, False, dict[int, torch.Tensor]()
        self.called: Names = IN_GROUP  # parameter names for messages; those in the root, once a root is known
        self._fqns = [fqns[module] for module in owned]
        self.kept = KeptTensors(
            [(module, (*_OWN_ATTRIBUTES, *getattr(module, "__constants__", ()))) for module in fqns], held_weakly=roots
        )
        self._children = Held([module._modules for module in fqns])
        self._owned = list(owned.values())
        self._sharded = Held([module._parameters for module in owned])
        self._views = [parameters.values() for parameters in self._sharded.dicts]
        self._unsharded = Held([{} for _ in owned])
        for module, fqn in zip(owned, self._fqns, strict=True):
            guard_state_dict(module, fqn)
        self.rebuild()

    def rebuild(self) -> None:
        """Prepare the unsharded dicts from the handles' present unsharded parameters."""
        self.end_left()
        found: list[tuple[Namespace, str, Any, Any]] = []  # where, key, sharded value, unsharded value
        self._root_writes: list[tuple[weakref.ref[nn.Module], str, Any, Any]] = []
        for namespace, root, owned, sharded, unsharded in zip(
            self._namespaces, self._roots, self._owned, self._sharded.dicts, self._unsharded.dicts, strict=True
        ):
            params = {name: handle.unsharded.params[i] for name, (handle, i) in owned.items()}
            unsharded.clear()  # keep the same dict object: change detectors hold it
            unsharded.update((name, params.get(name, value)) for name, value in sharded.items())
            by_sharded_param = {id(sharded[name]): param for name, param in params.items()}
            writes: list[tuple[str, Any, Any]] = [("_parameters", sharded, unsharded)]
            present = namespace if root is None else getattr(root(), "__dict__", {})
            for key, value in present.items() if present is not None else ():
                if isinstance(value, list) and any(id(item) in by_sharded_param for item in value):
                    writes.append((key, value, [by_sharded_param.get(id(item), item) for item in value]))
            if root is not None:
                self._root_writes += [(root, *write) for write in writes]
            elif namespace is not None:
                found += [(namespace, *write) for write in writes]
        self._writes = found
        self._prepared_names = [list(parameters) for parameters in self._sharded.dicts]
        self._sharded.note()
        self._unsharded.note()

    def watched_dicts(self) -> list[dict[str, Any]]:
        """The dicts whose changes between iterations matter: sharded parameters and submodules."""
        return [*self._sharded.dicts, *self._children.dicts]

    def unsharded_dicts(self) -> list[dict[str, Any]]:
        """The dicts that the modules show inside forward."""
        return [*self._unsharded.dicts]

    def note_children(self) -> None:
        """Record the present submodules of the group's modules."""
        self._children.note()

    def children_changed(self) -> bool:
        """Whether a submodule was added, replaced or removed since ``note_children``."""
        return not self._children.is_same()

    def slots(self) -> Iterator[tuple[dict[str, Any], str, FlatParamHandle, int]]:
        """The slots of the group's parameters in the modules' own dicts, with handle and index of each parameter."""
        for owned, sharded in zip(self._owned, self._sharded.dicts, strict=True):
            yield from ((sharded, name, handle, index) for name, (handle, index) in owned.items())

    def check_slots(self) -> None:
        """Raise if a parameter was replaced, added or removed since ``fully_shard``."""
        is_renamed = [*map(list, self._sharded.dicts)] != self._prepared_names  # perhaps to a name in the same place
        if is_renamed or not self._sharded.is_same():
            self._reconcile()

    def is_overridden(self) -> bool:
        """Whether parameter slots hold other values than those that ``fully_shard`` put there."""
        return not self.num_shows and not all(map(is_, chain.from_iterable(self._views), self._sharded.values))

    def overrides(self) -> dict[int, torch.Tensor]:
        """The other values in parameter slots, by the id of the tensor that the modules would show inside forward.

        Raises:
            NotImplementedError: two names of one (tied) parameter hold different values.
        """
        found: dict[int, Any] = {}
        for fqn, names, sharded, unsharded in zip(
            self._fqns, self._prepared_names, self._sharded.dicts, self._unsharded.dicts, strict=True
        ):
            for name in names:
                shown, present = unsharded[name], sharded.get(name)
                if shown is not None and found.setdefault(id(shown), present) is not present:
                    raise NotImplementedError(
                        f"functional_call(): {self.called(_join(fqn, name))} and another name of the same (tied) "
                        "parameter were given different values; give both the same (tie_weights=True does)"
                    )
        known = {id(shown): own for shown, own in zip(self._unsharded.values, self._sharded.values, strict=True)}
        return {key: value for key, value in found.items() if value is not known[key]}

    def take_overrides(self) -> list[tuple[_Parameters, str, Any]]:
        """Put the prepared values back into the modules' own dicts. Returns the replaced ones: (dict, name, value)."""
        taken = []
        values = iter(self._sharded.values)
        for names, sharded in zip(self._prepared_names, self._sharded.dicts, strict=True):
            for name, own in zip(names, values):
                if name in sharded and sharded[name] is not own:
                    taken.append((sharded, name, sharded[name]))
                    sharded[name] = own
        return taken

    def show_unsharded(self) -> None:
        """Let the modules show the unsharded parameters. Calls nest.

        Called before ``forward``, and also before backward, because activation checkpointing may run a part of forward
        again there without the hooks."""
        self.num_shows += 1
        if self.num_shows > 1:
            return
        # One write a module, of a whole dict: Dynamo cannot trace a swap entry by entry.
        for namespace, key, _, unsharded in self._writes:
            namespace[key] = unsharded
        for ref, key, _, unsharded in self._root_writes:
            module = ref()
            if module is not None:
                module.__dict__[key] = unsharded

    def show_instead(self, others: dict[int, torch.Tensor]) -> Held:
        """Like ``show_unsharded``, but show other tensors instead (keyed by the id of the unsharded parameter).

        Returns:
            The dicts that the modules show now, for ``check_shown``; empty if they showed full parameters already.
        """
        self.num_shows += 1
        shown: list[dict[str, Any]] = []
        if self.num_shows > 1:
            return Held(shown)
        self.shown_instead = others

        def replaced(value: Any) -> Any:
            if isinstance(value, dict):
                result: Any = {name: others.get(id(item), item) for name, item in value.items()}
                shown.append(result)
                return result
            return [others.get(id(item), item) for item in value]

        for namespace, key, _, unsharded in self._writes:
            namespace[key] = replaced(unsharded)
        for ref, key, _, unsharded in self._root_writes:
            module = ref()
            if module is not None:
                module.__dict__[key] = replaced(unsharded)
        return Held(shown)

    def check_shown(self, shown: Held) -> None:
        """Raise if a forward replaced, added or removed a tensor that ``show_instead`` has shown."""
        if not shown.is_same():
            raise MisuseRuntimeError(_LOST_CHANGE.format(f", {self.called}"))

    def show_sharded(self) -> None:
        """Undo one ``show_unsharded``."""
        self.num_shows -= 1
        if self.num_shows:
            return
        if self.shown_instead:
            self.shown_instead = {}
        for namespace, key, sharded, _ in self._writes:
            namespace[key] = sharded
        for ref, key, sharded, _ in self._root_writes:
            module = ref()
            if module is not None:
                module.__dict__[key] = sharded

    show_sharded_after_forward = ends_forward(show_sharded)  # called as the first thing after a forward

    def leave_shown(self) -> None:
        """Show the unsharded parameters until ``end_left``, as FSDP2 does while a group is gathered."""
        if not self.is_left:
            self.is_left = True
            self.show_unsharded()

    def end_left(self) -> None:
        if self.is_left:
            self.is_left = False
            self.show_sharded()

    def restore(self, num_running: int = 0) -> None:
        """Show the sharded parameters again after an interruption, and discard changes of the interrupted forward to
        the modules; but not while forwards of the group are running (``num_running``)."""
        self.is_left = False
        if num_running:
            self.num_shows = num_running
            return
        if self.num_shows:
            self.num_shows = 1
            self.show_sharded()
        if not self._unsharded.is_same():
            self.rebuild()

    def check_unsharded_slots(self) -> None:
        """Raise if a forward replaced, added or removed a parameter."""
        if not self._unsharded.is_same():
            changed = ", ".join(map(self.called, self._changed(self._unsharded)))
            self.rebuild()
            if changed:  # else one was taken out and put back, so only the order differs
                raise MisuseRuntimeError(_LOST_CHANGE.format(f": {changed}"))

    def _reconcile(self) -> None:
        """Accept changes of entries that the group does not own and no optimizer would train; raise for others."""
        changed = self._changed(self._sharded)
        owned = {_join(fqn, name) for fqn, names in zip(self._fqns, self._owned, strict=True) for name in names}
        present = _by_name(self._fqns, self._sharded.dicts)
        known = {id(value) for value in self._sharded.values}
        refused = []
        for name in changed:
            value = present.get(name)
            if name in owned or (value is not None and value.requires_grad and id(value) not in known):
                refused.append(name)
        if refused:
            raise MisuseRuntimeError(
                "parameters of a sharded module were replaced, added or removed after fully_shard(): "
                f"{', '.join(map(self.called, refused))}. A new value would not be sharded and would not train: "
                "change parameters in place (under torch.no_grad()) or before fully_shard()"
            )
        self.rebuild()

    def _changed(self, held: Held) -> list[str]:
        """Names of the entries that differ from the prepared ones."""
        prepared = zip(self._fqns, self._prepared_names, strict=True)
        before = dict(zip((_join(fqn, name) for fqn, names in prepared for name in names), held.values, strict=True))
        now, missing = _by_name(self._fqns, held.dicts), object()
        return sorted(
            name for name in before.keys() | now.keys() if before.get(name, missing) is not now.get(name, missing)
        )


def caches_parameters(swap: ParameterSwap) -> bool:
    """Whether modules also keep parameters outside their ``_parameters``, in lists."""
    return any(key != "_parameters" for _, key, *_ in (*swap._writes, *swap._root_writes))


# ---- State dicts
#
# In the thread of the iteration, a module shows its sharded parameters while it makes or loads a state dict, so that
# all hooks and methods of users find them. In any other thread forward needs them as they are: the entries that
# ``state_dict()`` has taken are replaced instead, and what cannot be replaced so is refused.

SHARDED_PARAMS, _ASIDE, _OWN = "_fsdp_compose_sharded_params", "_fsdp_compose_aside", "_fsdp_compose_own"
_OWN_ATTRIBUTES = (SHARDED_PARAMS, _ASIDE, _OWN, *MARKS)


def guard_state_dict(module: nn.Module, fqn: str) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of ``module`` see the sharded parameters at all times."""
    # Even inside forward, and after a KeyboardInterrupt, which skips post-forward hooks.
    if SHARDED_PARAMS not in module.__dict__:
        module.register_state_dict_pre_hook(_before_save)
        module.register_state_dict_post_hook(_show_what_was)
        hook_saved_first(module, _after_save)
        module.register_load_state_dict_pre_hook(before_load)
        module.register_load_state_dict_post_hook(_after_load)
    module.__dict__[SHARDED_PARAMS] = module._parameters
    sharded_params = {name: param for name, param in module._parameters.items() if isinstance(param, RaggedDTensor)}
    module.__dict__[_OWN] = (fqn, sharded_params)


def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """With ``assign=True``, let sharded parameters take over the values that would replace them, in their slots."""
    fqn, sharded_params = module.__dict__[_OWN]
    if any([owner.is_busy and owner.is_of_another_thread for owner in _owners(module)]):
        raise MisuseRuntimeError(
            f"load_state_dict() of {fqn or type(module).__name__} was called on one thread while another thread "
            "runs a forward or backward of the model, which would go on with a mixture of old and new parameters: "
            "load between iterations"
        )
    given = {name: state_dict[prefix + name] for name in sharded_params if prefix + name in state_dict}
    is_assigned = bool(metadata.get("assign_to_params_buffers"))
    for name, value in given.items():
        refuse_meta_content(sharded_params[name], value, _join(fqn, name))
        if is_assigned:
            check_content(sharded_params[name], value, _join(fqn, name))
            check_grad_dtype(sharded_params[name], value)
    notice_load((sharded_params[name], value) for name, value in given.items())
    # In its slot the value itself would be a parameter that no optimizer trains.
    if is_assigned:
        for name, value in given.items():
            take_over(sharded_params[name], value)
            state_dict[prefix + name] = sharded_params[name]  # load_state_dict() works on a copy of the user's dict
    _show_sharded(module)


def _after_load(module: nn.Module, *_: Any) -> None:
    notice_loaded(module.__dict__[_OWN][1].values())
    _show_what_was(module)


def sharded_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """The parameters of ``module`` itself as ``state_dict()`` sees them: sharded, even inside forward."""
    sharded_params: Mapping[str, nn.Parameter | None] = module.__dict__.get(SHARDED_PARAMS, module._parameters)
    return sharded_params


class SlotView:
    """Puts other values into some of a module's parameter slots until ``restore``, for ``state_dict()`` too."""

    def __init__(self, module: nn.Module, values: Mapping[str, nn.Parameter]) -> None:
        self._module, attributes = module, module.__dict__
        self._before = {key: attributes[key] for key in ("_parameters", SHARDED_PARAMS, _OWN) if key in attributes}
        shown = {name: values.get(name, value) for name, value in module._parameters.items()}
        attributes["_parameters"] = shown
        if SHARDED_PARAMS in attributes:
            attributes[SHARDED_PARAMS], attributes[_OWN] = shown, ("", {})

    def restore(self) -> None:
        parameters = self._before["_parameters"]
        for name, value in self._module._parameters.items():
            parameters.setdefault(name, value)  # in case it was added meanwhile
        self._module.__dict__.update(self._before)


def _before_save(module: nn.Module, *_: Any) -> None:
    attributes = module.__dict__
    if attributes["_parameters"] is attributes[SHARDED_PARAMS]:
        return
    if not _is_of_another_thread(module):
        _show_sharded(module)
    elif not saves_as_torch_module(module):
        _refuse_own_save(module)


def _after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
    """Replace what another thread's ``state_dict()`` has taken in a forward or backward, which may have begun since."""
    attributes = module.__dict__
    if saves_as_torch_module(module):
        for name in attributes[_OWN][1]:
            value, sharded = state_dict.get(prefix + name), attributes[SHARDED_PARAMS].get(name)
            if value is not None and isinstance(sharded, RaggedDTensor) and not isinstance(value, RaggedDTensor):
                keeps_vars = isinstance(value, nn.Parameter)
                state_dict[prefix + name] = sharded if keeps_vars else sharded.detach()
    elif attributes["_parameters"] is not attributes[SHARDED_PARAMS] and _is_of_another_thread(module):
        _refuse_own_save(module)


def _refuse_own_save(module: nn.Module) -> None:
    raise MisuseRuntimeError(
        f"state_dict() was called while another thread runs a forward or backward of the model, whose "
        f"{type(module).__name__} ({module.__dict__[_OWN][0] or 'a root of a group'}) saves itself by a method of its "
        "own (_save_to_state_dict), which would find parameters that are about to be freed. Call state_dict() between "
        "iterations, or take checkpoint.shards(model), which may be read on any thread"
    )


def _is_of_another_thread(module: nn.Module) -> bool:
    """Whether the forwards of ``module`` run on another thread than this one."""
    return any([owner.is_of_another_thread for owner in _owners(module)])


def _owners(module: nn.Module) -> list[Owner]:
    places = [handle_of(param) for param in module.__dict__[_OWN][1].values()]
    owners = [None if place is None or place[0].owner is None else place[0].owner() for place in places]
    return [*dict.fromkeys([owner for owner in owners if owner is not None])]


def _show_sharded(module: nn.Module, *_: Any) -> None:
    attributes = module.__dict__
    if attributes["_parameters"] is not attributes[SHARDED_PARAMS]:
        for owner in _owners(module):
            owner.end_left()
    if attributes["_parameters"] is not attributes[SHARDED_PARAMS]:
        attributes[_ASIDE] = attributes["_parameters"]
        attributes["_parameters"] = attributes[SHARDED_PARAMS]


def _show_what_was(module: nn.Module, *_: Any) -> None:
    if _ASIDE not in module.__dict__ or _is_of_another_thread(module):  # which may be what that thread has put aside
        return
    aside = module.__dict__.pop(_ASIDE, None)
    if aside is not None:
        module.__dict__["_parameters"] = aside


# ---- Names in dicts


def _by_name(fqns: Sequence[str], dicts: Sequence[_Parameters]) -> dict[str, Any]:
    """The values of the dicts of modules, by FQN."""
    return {
        _join(fqn, name): value
        for fqn, parameters in zip(fqns, dicts, strict=True)
        for name, value in parameters.items()
    }


def _join(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name
