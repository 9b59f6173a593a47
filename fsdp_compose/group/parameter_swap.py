"""Which parameters a module shows: the sharded ones outside ``forward``, the unsharded ones inside.

For every module that holds parameters of a group there are two prepared ``_parameters`` dicts: the module's own, with
the sharded parameters, and one with the unsharded parameters in the same slots. A swap assigns the one or the other to
the module: one write per module, and the only way that Dynamo can trace (entry by entry fails there). Entries that the
group does not own stand in both dicts. Lists in which a module caches its weights (``nn.RNN._flat_weights``) are
swapped the same way.

A parameter that was replaced, added or removed behind our back is an error that names it: outside forward seen at the
start of the next iteration, inside forward at the end of the outermost one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.nn as nn

from ..comm import IN_GROUP, Names
from ..flat import FlatParamHandle, ManagedParameter, check_content, note_write, take_content
from ..ragged import RaggedDTensor
from .hook_decorators import MARKS, ends_forward
from .kept_tensors import KeptTensors, Namespace

_Parameters = dict[str, "nn.Parameter | None"]
_LOST_CHANGE = (
    "forward replaced, added or removed parameters of a sharded module{}. Such a change would be lost when the module "
    "is resharded; change parameters outside forward"
)


class Held:
    """Some dicts, and what they held, kept once and compared in one pass.

    Attributes:
        dicts: as given, the very objects.
        values: what they held when that was noted last.
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


_END = (object(),)  # behind all values: with more of them, or fewer, it is not where it was


class ParameterSwap:
    """The prepared dicts of all modules of a group.

    It writes to the modules' ``__dict__``, and holds those of the sharded module(s) themselves weakly: they hold the
    state that holds this object, and a model must be freed without the garbage collector.

    Args:
        roots: the module(s) given to ``fully_shard``.
        managed: the group's parameters; the sharded ones are already in place in the modules.
        handles: the handles that hold them, by FQN.
        fqns: name of every module of the group, relative to the sharded module.

    Attributes:
        kept: the tensors that ``forward`` keeps on the group's modules.
        num_shows: forwards and backwards during which the modules show the unsharded parameters.
        shown_instead: what ``show_instead`` shows at present, by the id of the unsharded parameter.
    """

    __slots__ = (
        "_children", "_fqns", "_namespaces", "_owned", "_prepared_names", "_root_writes", "_roots", "_sharded",
        "_unsharded", "_views", "_writes", "called", "kept", "num_shows", "shown_instead",
    )  # fmt: skip

    def __init__(
        self,
        roots: Sequence[nn.Module],
        managed: Sequence[ManagedParameter],
        handles: Sequence[FlatParamHandle],
        fqns: dict[nn.Module, str],
    ) -> None:
        where = {fqn: (handle, i) for handle in handles for i, fqn in enumerate(handle.fqns)}
        assert len(where) == sum(len(handle.fqns) for handle in handles), "two parameters of a group have one name"
        owned: dict[nn.Module, dict[str, tuple[FlatParamHandle, int]]] = {}
        for item in managed:
            for module, name in item.slots:
                owned.setdefault(module, {})[name] = where[item.fqn]
        self._namespaces = [None if module in roots else module.__dict__ for module in owned]
        self._roots = [weakref.ref(module) if module in roots else None for module in owned]
        self.num_shows, self.shown_instead = 0, dict[int, torch.Tensor]()
        self.called = IN_GROUP  # how parameters are called in the root, once a root is known
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
        found: list[tuple[Namespace, str, Any, Any]] = []  # where, key, sharded value, unsharded value
        self._root_writes: list[tuple[weakref.ref[nn.Module], str, Any, Any]] = []
        for namespace, root, owned, sharded, unsharded in zip(
            self._namespaces, self._roots, self._owned, self._sharded.dicts, self._unsharded.dicts, strict=True
        ):
            params = {name: handle.unsharded.params[i] for name, (handle, i) in owned.items()}
            unsharded.clear()  # the same dict: others remember it
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

    def call_parameters(self, names: Names) -> None:
        """``names``: how the group's parameters are called in the root."""
        self.called = names

    def watched_dicts(self) -> list[dict[str, Any]]:
        """The dicts of which an entry that changes between iterations matters: sharded parameters, and submodules."""
        return [*self._sharded.dicts, *self._children.dicts]

    def unsharded_dicts(self) -> list[dict[str, Any]]:
        """The dicts that the modules show inside forward."""
        return [*self._unsharded.dicts]

    def note_children(self) -> None:
        """Remember the modules below those of the group, as they are now."""
        self._children.note()

    def children_changed(self) -> bool:
        """Whether a submodule was added, replaced or removed since."""
        return not self._children.is_same()

    def slots(self) -> Iterator[tuple[dict[str, Any], str, FlatParamHandle, int]]:
        """Where the group's parameters stand in the modules' own dicts, and which parameters they are."""
        for owned, sharded in zip(self._owned, self._sharded.dicts, strict=True):
            yield from ((sharded, name, handle, index) for name, (handle, index) in owned.items())

    def check_slots(self) -> None:
        """Raise if a parameter was replaced, added or removed since ``fully_shard``."""
        if not self._sharded.is_same():
            self._reconcile()

    def is_overridden(self) -> bool:
        """Whether other values stand in the slots of parameters than ``fully_shard`` has put there."""
        return not self.num_shows and not all(map(is_, chain.from_iterable(self._views), self._sharded.values))

    def overrides(self) -> dict[int, torch.Tensor]:
        """Those values, by the id of what the modules would show inside forward.

        Raises:
            NotImplementedError: two names of one (tied) parameter hold different ones.
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
        """Put the prepared values back into the modules' own dicts; what stood there: (dict, name, value)."""
        taken = []
        values = iter(self._sharded.values)
        for names, sharded in zip(self._prepared_names, self._sharded.dicts, strict=True):
            for name, own in zip(names, values):
                if name in sharded and sharded[name] is not own:
                    taken.append((sharded, name, sharded[name]))
                    sharded[name] = own
        return taken

    def show_unsharded(self) -> None:
        """Called before ``forward``, and before backward, where activation checkpointing may run a part of forward
        again without the hooks. Calls nest."""
        self.num_shows += 1
        if self.num_shows > 1:
            return
        for namespace, key, _, unsharded in self._writes:
            namespace[key] = unsharded
        for ref, key, _, unsharded in self._root_writes:
            module = ref()
            if module is not None:
                module.__dict__[key] = unsharded

    def show_instead(self, others: dict[int, torch.Tensor]) -> Held:
        """As ``show_unsharded``, with other tensors in the place of unsharded parameters (by the id of these).

        Returns:
            What the modules show now, for ``check_shown``; nothing if they showed full ones already.
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
        """Raise if a forward replaced, added or removed what ``show_instead`` has shown."""
        if not shown.is_same():
            raise RuntimeError(_LOST_CHANGE.format(f", {self.called}"))

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

    def restore(self, num_running: int = 0) -> None:
        """Put the sharded parameters back after an interruption, whatever it left, and throw away what the interrupted
        forward changed in the modules; but not while forwards of the group are running (``num_running``)."""
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
            raise RuntimeError(_LOST_CHANGE.format(f": {changed}"))

    def _reconcile(self) -> None:
        """Accept changes that concern only entries that the group does not own, and that no optimizer would train."""
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
            raise RuntimeError(
                "parameters of a sharded module were replaced, added or removed after fully_shard(): "
                f"{', '.join(map(self.called, refused))}. A new value would not be sharded, and would not train: "
                "change parameters in place (under torch.no_grad()), or before fully_shard()"
            )
        self.rebuild()

    def _changed(self, held: Held) -> list[str]:
        """Names of the entries that are not what was prepared."""
        prepared = zip(self._fqns, self._prepared_names, strict=True)
        before = dict(zip((_join(fqn, name) for fqn, names in prepared for name in names), held.values, strict=True))
        now, missing = _by_name(self._fqns, held.dicts), object()
        return sorted(
            name for name in before.keys() | now.keys() if before.get(name, missing) is not now.get(name, missing)
        )


def caches_parameters(swap: ParameterSwap) -> bool:
    """Whether modules keep parameters elsewhere too than in their own dicts of these."""
    return any(key != "_parameters" for _, key, *_ in (*swap._writes, *swap._root_writes))


# ---- state dicts

SHARDED_PARAMS, _ASIDE, _OWN = "_fsdp_compose_sharded_params", "_fsdp_compose_aside", "_fsdp_compose_own"
_OWN_ATTRIBUTES = (SHARDED_PARAMS, _ASIDE, _OWN, *MARKS)


def guard_state_dict(module: nn.Module, fqn: str) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of ``module`` see the sharded parameters at any moment: also
    inside forward, and after a KeyboardInterrupt, which post-forward hooks miss."""
    if SHARDED_PARAMS not in module.__dict__:
        module.register_state_dict_pre_hook(_show_sharded)
        module.register_state_dict_post_hook(_show_what_was)
        module.register_load_state_dict_pre_hook(before_load)
        module.register_load_state_dict_post_hook(_show_what_was)
    module.__dict__[SHARDED_PARAMS] = module._parameters
    sharded_params = {name: param for name, param in module._parameters.items() if isinstance(param, RaggedDTensor)}
    module.__dict__[_OWN] = (fqn, sharded_params)


def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """With ``assign=True`` the sharded parameters take over what would be put in their place, and are put there
    themselves: so that optimizers keep training what the modules use."""
    fqn, sharded_params = module.__dict__[_OWN]
    if metadata.get("assign_to_params_buffers"):
        given = {name: state_dict[prefix + name] for name in sharded_params if prefix + name in state_dict}
        for name, value in given.items():
            check_content(sharded_params[name], value, _join(fqn, name))
        for name, value in given.items():
            take_content(sharded_params[name], value)
            note_write(sharded_params[name])
            state_dict[prefix + name] = sharded_params[name]  # load_state_dict() works on a copy of the user's dict
    _show_sharded(module)


def sharded_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """The parameters of ``module`` itself as ``state_dict()`` sees them: sharded, also inside forward."""
    sharded_params: Mapping[str, nn.Parameter | None] = module.__dict__.get(SHARDED_PARAMS, module._parameters)
    return sharded_params


class SlotView:
    """Other values in some of a module's parameter slots, until ``restore``: for ``state_dict()`` too."""

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
            parameters.setdefault(name, value)  # one that was added meanwhile
        self._module.__dict__.update(self._before)


def _show_sharded(module: nn.Module, *_: Any) -> None:
    attributes = module.__dict__
    if attributes["_parameters"] is not attributes[SHARDED_PARAMS]:
        attributes[_ASIDE] = attributes["_parameters"]
        attributes["_parameters"] = attributes[SHARDED_PARAMS]


def _show_what_was(module: nn.Module, *_: Any) -> None:
    aside = module.__dict__.pop(_ASIDE, None)
    if aside is not None:
        module.__dict__["_parameters"] = aside


# ---- dicts


def _by_name(fqns: Sequence[str], dicts: Sequence[_Parameters]) -> dict[str, Any]:
    """The values of the dicts of modules, by FQN."""
    return {
        _join(fqn, name): value
        for fqn, parameters in zip(fqns, dicts, strict=True)
        for name, value in parameters.items()
    }


def _join(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name
