"""Tensors that require grad and that ``forward`` keeps on modules, as attributes or inside them: an auxiliary loss.

Backward may enter a group through them, past the outputs. They are looked for after every forward under grad mode, by a
pass over plain lists that compares identities, and searched for only where something has changed. What is kept where
this does not look (a global, a closure, deep inside an object) is not lost: a backward that then needs parameters which
no hook has gathered raises, see ``unsharded_memory``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
import torch.nn as nn

from ._torch import REGISTRY_KEY, STATE_KEY

Namespace = dict[str, Any]

_MAX_ENTRIES = 256  # of a list that are looked at, from its end; of a list or dict that are compared one by one
_MAX_DEPTH = 3  # lists in dicts in attributes

# What every module has, of which only the buffers, which are looked at all the same, are written to by forward; and its
# state, which must not be remembered
# here: the state holds what is remembered, and a model is freed without the garbage collector.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {STATE_KEY, REGISTRY_KEY}


class KeptTensors:
    """The tensors that the modules of one group keep.

    Args:
        modules: with, of each, the names of attributes that never change.
        held_weakly: those of them whose attributes must not be held.
    """

    __slots__ = (
        "_contents", "_empty", "_held", "_known", "_lengths", "_live", "_never_change", "_places", "_seen",
        "_slots", "_weak",
    )  # fmt: skip

    def __init__(self, modules: Sequence[tuple[nn.Module, Iterable[str]]], held_weakly: Collection[nn.Module]) -> None:
        ordered = sorted(modules, key=lambda item: item[0] in held_weakly)
        self._held = [module.__dict__ for module, _ in ordered if module not in held_weakly]
        self._weak = [weakref.ref(module) for module, _ in ordered if module in held_weakly]
        self._never_change = [_OF_EVERY_MODULE.union(constants) for _, constants in ordered]
        self._places: list[tuple[int, str]] = []  # where some were found, namespace and key: always read
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._empty: list[Collection[Any]] = []  # what may change inside attributes, and holds nothing
        self._live: list[Collection[Any]] = []  # ... and holds something
        self._contents: list[Collection[Any]] = []  # those of them that are compared one by one
        self._slots: list[tuple[int, itemgetter[Any]]] = []  # namespace, and all its values that are compared
        self._known: list[Any] = []  # what contents and slots held
        self._lengths: list[int] = []  # of namespaces and live ones; as long as it is empty, nothing was prepared

    def new_ones(self) -> list[torch.Tensor]:
        """Those that were not there at the last call."""
        namespaces = self._held
        for ref in self._weak:
            module = ref()
            namespaces = [*namespaces, {} if module is None else module.__dict__]
        if any(self._empty) or [*map(len, namespaces), *map(len, self._live)] != self._lengths:
            self._search(namespaces)
        else:
            values = [*self._contents]
            try:
                for i, getter in self._slots:  # on the hot path: a comprehension is a call
                    values.append(getter(namespaces[i]))
                is_same = all(map(is_, chain.from_iterable(values), self._known))
            except KeyError:
                is_same = False
            if not is_same:
                self._search(namespaces)
        if not self._places:
            return []
        found = [item for i, key in self._places for item in tensors_requiring_grad(namespaces[i].get(key))]
        known = [ref() for ref in self._seen]
        new = [item for item in found if not any(item is other for other in known)]
        self._seen = [weakref.ref(item) for item in found]
        return new

    def _search(self, namespaces: Sequence[Namespace]) -> None:
        """Look at everything, and remember what was looked at."""
        self._slots.clear()
        known: list[Any] = []
        collections: list[Collection[Any]] = []
        for i, (namespace, never_change) in enumerate(zip(namespaces, self._never_change, strict=True)):
            names = []
            for name, value in namespace.items():
                if (name in never_change and name != "_buffers") or (i, name) in self._places:
                    continue
                if tensors_requiring_grad(value):
                    self._places.append((i, name))
                elif name == "_buffers":
                    collections.append(value.values())  # it stays the same dict
                else:
                    names.append(name)
                    collections += _contents_of(value, _MAX_DEPTH)
            if names:
                getter = itemgetter(*names, names[0])  # of one name, it would make no tuple
                self._slots.append((i, getter))
                known += getter(namespace)
        self._empty = [item for item in collections if not item]
        self._live = [item for item in collections if item]
        self._lengths = [*map(len, namespaces), *map(len, self._live)]
        self._contents = [item for item in self._live if len(item) <= _MAX_ENTRIES]
        self._known = [*chain.from_iterable(self._contents), *known]


def _contents_of(value: Any, depth: int) -> Iterable[Collection[Any]]:
    """What is inside ``value`` and may change while ``value`` stays the same object, as live views."""
    live: Collection[Any] | None = None
    if isinstance(value, (list, deque)):
        live = value
    elif isinstance(value, dict):
        live = value.values()
    elif _is_plain_object(value):
        live = vars(value).values()
    if live is not None:
        yield live
        if depth > 1 and len(live) <= _MAX_ENTRIES:
            for item in live:
                yield from _contents_of(item, depth - 1)


def _is_plain_object(value: Any) -> bool:
    is_special = isinstance(value, (nn.Module, type, torch.Tensor)) or callable(value)
    return not is_special and bool(getattr(value, "__dict__", None))


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """The tensors that are part of a graph in ``value``: a tensor, collections of them, or an object's attributes."""
    if isinstance(value, torch.Tensor):
        return [value] if value.grad_fn is not None else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value[-_MAX_ENTRIES:] for tensor in tensors_requiring_grad(item)]
    if isinstance(value, deque):
        return [tensor for item in value for tensor in tensors_requiring_grad(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_requiring_grad(item)]
    if _is_plain_object(value):
        return [item for item in vars(value).values() if isinstance(item, torch.Tensor) and item.grad_fn is not None]
    return []
