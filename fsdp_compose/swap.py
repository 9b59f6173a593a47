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
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch.nn as nn

from .flat_param import FlatParamHandle, ManagedParameter


class ModuleSwap:
    """The two dicts of one module. Holds the module weakly: a model must be freed without the garbage collector."""

    def __init__(self, module: nn.Module, fqn: str, owned: dict[str, tuple[FlatParamHandle, int]]) -> None:
        self._module = weakref.ref(module)
        self.fqn = fqn
        self._owned = owned
        self._sharded = module._parameters
        self.rebuild()

    def rebuild(self) -> None:
        """Prepare the unsharded dict from the handles' present unsharded parameters."""
        unsharded = {name: handle.unsharded_params[i] for name, (handle, i) in self._owned.items()}
        self._unsharded = {name: unsharded.get(name, value) for name, value in self._sharded.items()}
        self._sharded_values = tuple(self._sharded.values())
        self._unsharded_values = tuple(self._unsharded.values())
        faces = {id(self._sharded[name]): param for name, param in unsharded.items()}
        self._caches: list[tuple[str, list[Any], list[Any]]] = []
        module = self._module()
        for key, value in module.__dict__.items() if module is not None else ():
            if isinstance(value, list) and any(id(item) in faces for item in value):
                self._caches.append((key, value, [faces.get(id(item), item) for item in value]))

    def show_unsharded(self) -> None:
        """Called before ``forward``."""
        sharded = self._sharded
        if len(sharded) != len(self._sharded_values) or not all(map(is_, sharded.values(), self._sharded_values)):
            self._reconcile()
        module = self._module()
        if module is None:
            return
        attributes = module.__dict__
        if attributes["_parameters"] is not sharded:
            self._refuse("its whole _parameters dict")
        attributes["_parameters"] = self._unsharded
        for key, _, unsharded in self._caches:
            attributes[key] = unsharded

    def show_sharded(self) -> None:
        """Called after ``forward``, however it ended. Restores first, then complains about what forward changed."""
        module = self._module()
        if module is None:
            return
        attributes = module.__dict__
        attributes["_parameters"] = self._sharded
        for key, sharded, _ in self._caches:
            attributes[key] = sharded
        unsharded, values = self._unsharded, self._unsharded_values
        if len(unsharded) != len(values) or not all(map(is_, unsharded.values(), values)):
            prepared = dict(zip(self._sharded, values, strict=True))
            changed = [
                name
                for name in unsharded.keys() | prepared.keys()
                if name not in unsharded or name not in prepared or unsharded[name] is not prepared[name]
            ]
            self.rebuild()
            raise RuntimeError(
                f"forward replaced, added or removed parameters of a sharded module: {self._names(changed)}. Such a "
                "change would be lost when the module is resharded; change parameters outside forward"
            )

    def _reconcile(self) -> None:
        """The module's own dict has changed since it was prepared: accept what concerns only entries we do not own."""
        before = dict(zip(self._unsharded, self._sharded_values, strict=True))
        for name in self._owned:
            if self._sharded.get(name) is not before[name]:
                self._refuse(name)
        for name, value in self._sharded.items():
            if name not in before and value is not None and value.requires_grad:
                self._refuse(name)
        self.rebuild()

    def _refuse(self, name: str) -> None:
        raise RuntimeError(
            f"{self._names([name])} was replaced, added or removed after fully_shard(): its new value would not be "
            "sharded, and would not train. Change parameters in place (under torch.no_grad()), or before fully_shard()"
        )

    def _names(self, names: Sequence[str]) -> str:
        return ", ".join(f"{self.fqn}.{name}" if self.fqn else name for name in sorted(names))


def prepare_swaps(
    managed: Sequence[ManagedParameter], handles: Sequence[FlatParamHandle], fqns: dict[nn.Module, str]
) -> list[ModuleSwap]:
    """The swaps of a group whose faces are already in place in the modules.

    Args:
        managed: the group's parameters, with their slots.
        handles: the handles that hold them, by FQN.
        fqns: name of every module of the group, relative to the sharded module.
    """
    where = {fqn: (handle, i) for handle in handles for i, fqn in enumerate(handle.fqns)}
    by_module: dict[nn.Module, dict[str, tuple[FlatParamHandle, int]]] = {}
    for item in managed:
        for module, name in item.slots:
            by_module.setdefault(module, {})[name] = where[item.fqn]
    return [ModuleSwap(module, fqns[module], owned) for module, owned in by_module.items()]
