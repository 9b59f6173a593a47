"""Which face of its parameters a module shows: sharded outside ``forward``, unsharded inside.

For every module that holds parameters of a group there are two prepared ``_parameters`` dicts: the module's own, with
the sharded faces, and one with the unsharded parameters in the same slots. A swap assigns the one or the other to the
module: one write per module, and the only way that Dynamo can trace (entry by entry fails there). Entries that the
group does not own stand in both dicts. Lists in which a module caches its weights (``nn.RNN._flat_weights``) are
swapped the same way.

A swap is made only if every slot holds what we put there; a parameter that was replaced, added or removed behind our
back is an error that names it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch.nn as nn

from .flat_param import FlatParamHandle, ManagedParameter

_Parameters = dict[str, "nn.Parameter | None"]
_Namespace = dict[str, Any]


class ParameterSwap:
    """The prepared dicts of all modules of a group.

    It writes to the modules' ``__dict__``, and holds those of the sharded module(s) themselves weakly: they hold the
    state that holds this object, and a model must be freed without the garbage collector.

    Args:
        roots: the module(s) given to ``fully_shard``.
        managed: the group's parameters, whose faces are already in place in the modules.
        handles: the handles that hold them, by FQN.
        fqns: name of every module of the group, relative to the sharded module.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        managed: Sequence[ManagedParameter],
        handles: Sequence[FlatParamHandle],
        fqns: dict[nn.Module, str],
    ) -> None:
        where = {fqn: (handle, i) for handle in handles for i, fqn in enumerate(handle.fqns)}
        owned: dict[nn.Module, dict[str, tuple[FlatParamHandle, int]]] = {}
        for item in managed:
            for module, name in item.slots:
                owned.setdefault(module, {})[name] = where[item.fqn]
        self._namespaces = [None if module in roots else module.__dict__ for module in owned]
        self._roots = [weakref.ref(module) if module in roots else None for module in owned]
        self._fqns = [fqns[module] for module in owned]
        self._owned = list(owned.values())
        self._sharded: list[_Parameters] = [module._parameters for module in owned]
        self.rebuild()

    def rebuild(self) -> None:
        """Prepare the unsharded dicts from the handles' present unsharded parameters."""
        self._unsharded: list[_Parameters] = []
        self._writes: list[tuple[_Namespace, str, Any, Any]] = []  # (where, key, sharded value, unsharded value)
        self._root_writes: list[tuple[weakref.ref[nn.Module], str, Any, Any]] = []
        for namespace, root, owned, sharded in zip(
            self._namespaces, self._roots, self._owned, self._sharded, strict=True
        ):
            params = {name: handle.unsharded_params[i] for name, (handle, i) in owned.items()}
            unsharded = {name: params.get(name, value) for name, value in sharded.items()}
            self._unsharded.append(unsharded)
            by_face = {id(sharded[name]): param for name, param in params.items()}
            writes: list[tuple[str, Any, Any]] = [("_parameters", sharded, unsharded)]
            present = namespace if root is None else getattr(root(), "__dict__", {})
            for key, value in present.items() if present is not None else ():
                if isinstance(value, list) and any(id(item) in by_face for item in value):
                    writes.append((key, value, [by_face.get(id(item), item) for item in value]))
            if root is not None:
                self._root_writes += [(root, *write) for write in writes]
            elif namespace is not None:
                self._writes += [(namespace, *write) for write in writes]
        self._prepared_names = [list(parameters) for parameters in self._sharded]
        self._sharded_values = tuple(_values(self._sharded))
        self._unsharded_values = tuple(_values(self._unsharded))

    def show_unsharded(self) -> None:
        """Called before ``forward``.

        Raises:
            RuntimeError: a parameter was replaced, added or removed since ``fully_shard``.
        """
        if not _hold(self._sharded, self._sharded_values):
            self._reconcile()
        for namespace, key, _, unsharded in self._writes:
            namespace[key] = unsharded
        for ref, key, _, unsharded in self._root_writes:
            module = ref()
            if module is not None:
                module.__dict__[key] = unsharded

    def show_sharded(self) -> None:
        """Called after ``forward``, however it ended. Restores first, then complains about what forward changed.

        Raises:
            RuntimeError: ``forward`` replaced, added or removed a parameter.
        """
        for namespace, key, sharded, _ in self._writes:
            namespace[key] = sharded
        for ref, key, sharded, _ in self._root_writes:
            module = ref()
            if module is not None:
                module.__dict__[key] = sharded
        if not _hold(self._unsharded, self._unsharded_values):
            changed = self._changed(self._unsharded, self._unsharded_values)
            self.rebuild()
            raise RuntimeError(
                f"forward replaced, added or removed parameters of a sharded module: {', '.join(changed)}. Such a "
                "change would be lost when the module is resharded; change parameters outside forward"
            )

    def _reconcile(self) -> None:
        """The modules' own dicts have changed since they were prepared: accept what concerns only entries that the
        group does not own, and that nobody would train."""
        changed = self._changed(self._sharded, self._sharded_values)
        owned = {_join(fqn, name) for fqn, names in zip(self._fqns, self._owned, strict=True) for name in names}
        present = self._by_name(self._sharded)
        known = {id(value) for value in self._sharded_values}
        refused = []
        for name in changed:
            value = present.get(name)
            if name in owned or (value is not None and value.requires_grad and id(value) not in known):
                refused.append(name)
        if refused:
            raise RuntimeError(
                f"parameters of a sharded module were replaced, added or removed after fully_shard(): "
                f"{', '.join(refused)}. A new value would not be sharded, and would not train: change parameters in "
                "place (under torch.no_grad()), or before fully_shard()"
            )
        self.rebuild()

    def _changed(self, dicts: Sequence[_Parameters], values: Sequence[Any]) -> list[str]:
        """Names of the entries that are not what was prepared."""
        prepared = zip(self._fqns, self._prepared_names, strict=True)
        before = dict(zip((_join(fqn, name) for fqn, names in prepared for name in names), values, strict=True))
        now, missing = self._by_name(dicts), object()
        return sorted(
            name for name in before.keys() | now.keys() if before.get(name, missing) is not now.get(name, missing)
        )

    def _by_name(self, dicts: Sequence[_Parameters]) -> dict[str, Any]:
        return {
            _join(fqn, name): value
            for fqn, parameters in zip(self._fqns, dicts, strict=True)
            for name, value in parameters.items()
        }


def _values(dicts: Sequence[_Parameters]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _hold(dicts: Sequence[_Parameters], values: tuple[Any, ...]) -> bool:
    """Whether the dicts hold these very values, in this order."""
    return sum(map(len, dicts)) == len(values) and all(map(is_, _values(dicts), values))


def _join(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name
