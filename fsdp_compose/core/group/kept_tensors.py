"""Tensors that require grad and that ``forward`` keeps on modules, such as an auxiliary loss in an attribute.

Backward may enter a group through them, without passing its outputs. The change detector looks for them in every
forward under grad mode, by a pass over plain lists that compares identities, and searches only where something has
changed. It looks after each use of a group or, if the group's last uses have changed nothing, in one pass for all such
groups before the outermost forward ends. (A backward inside that forward does not find tensors that such a group has
kept, and raises as described next.) Tensors that are kept elsewhere (in a global, a closure, deep inside an object) do
not give wrong gradients: a backward that needs parameters which no hook has gathered raises, see ``flat/unsharded``."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch
import torch.nn as nn

from ..._torch import REGISTRY_KEY, STATE_KEY

# ---- Callables among a module's own attributes, which replace methods of its class


_T = TypeVar("_T", bound="BoundToModule")


class BoundToModule:
    """A callable for one module. It refers to the module weakly, so that a model is freed without the garbage
    collector; in a copy of the module, it refers to the copy. The search for kept tensors skips it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def __self__(self) -> nn.Module:
        """The module, as for a bound method."""
        module = self._module()
        assert module is not None, "the module is gone"
        return module

    def for_copy(self: _T, module: nn.Module, memo: dict[int, Any]) -> _T:
        """Return this callable bound to ``module``, a copy of the one that it is bound to now."""
        raise NotImplementedError

    def __deepcopy__(self: _T, memo: dict[int, Any]) -> _T:
        module = self.__self__
        return self.for_copy(memo.get(id(module), module), memo)


# ---- The search for tensors that forward keeps on modules


Namespace = dict[str, Any]

_MAX_ENTRIES = 256  # search this many entries from the end of a list; compare only shorter collections one by one
_MAX_DEPTH = 3  # lists in dicts in attributes
_QUIET_AFTER = 3  # uses of a group that have changed nothing

_num_same = attrgetter("num_same")

# Attributes that every module has. Forward writes to none of them but the buffers, which are searched nevertheless. Our
# own state is among them because it must not be remembered here: the state holds this object, and the cycle would keep
# a model alive until the garbage collector runs.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {STATE_KEY, REGISTRY_KEY}


class KeptTensors:
    """The tensors that the modules of one group keep.

    Args:
        modules: each module with the names of its attributes that never change.
        held_weakly: modules whose attributes must not be held.

    Attributes:
        num_same: number of recent uses of the group that changed nothing on its modules.
        is_unchanged: the group is not searched after each of its uses, but by ``BatchedKeptTensors``.
    """

    __slots__ = (
        "_contents", "_empty", "_held", "_known", "_lengths", "_live", "_never_change", "_places", "_seen",
        "_slots", "_weak", "is_unchanged", "num_same",
    )  # fmt: skip

    def __init__(self, modules: Sequence[tuple[nn.Module, Iterable[str]]], held_weakly: Collection[nn.Module]) -> None:
        ordered = sorted(modules, key=lambda item: item[0] in held_weakly)
        self._held = [module.__dict__ for module, _ in ordered if module not in held_weakly]
        self._weak = [weakref.ref(module) for module, _ in ordered if module in held_weakly]
        self._never_change = [_OF_EVERY_MODULE.union(constants) for _, constants in ordered]
        self._places: list[tuple[int, str]] = []  # (namespace, key) where tensors were found: always read
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._empty: list[Collection[Any]] = []  # collections inside attributes that were empty
        self._live: list[Collection[Any]] = []  # ... and those that were not
        self._contents: list[Collection[Any]] = []  # the live ones whose items are compared one by one
        self._slots: list[tuple[int, itemgetter[Any]]] = []  # (namespace, getter of all its compared values)
        self._known: list[Any] = []  # the values of contents and slots at the last search
        self._lengths: list[int] = []  # lengths of namespaces and of live collections; empty before the first search

        self.num_same, self.is_unchanged = 0, False

    def new_ones(self) -> list[torch.Tensor]:
        """Tensors added since the last call."""
        namespaces = self.namespaces()
        if self._has_changed(namespaces):
            self._search(namespaces)
            self.num_same, self.is_unchanged = 0, False
        elif not self._places:
            self.num_same += 1
        if not self._places:
            return []
        found = [item for i, key in self._places for item in tensors_requiring_grad(namespaces[i].get(key))]
        known = [ref() for ref in self._seen]
        new = [item for item in found if not any(item is other for other in known)]
        self._seen = [weakref.ref(item) for item in found]
        return new

    def namespaces(self) -> list[Namespace]:
        """The attributes of the modules."""
        modules = [ref() for ref in self._weak]
        return [*self._held, *({} if module is None else module.__dict__ for module in modules)]

    def _has_changed(self, namespaces: Sequence[Namespace]) -> bool:
        if any(self._empty) or [*map(len, namespaces), *map(len, self._live)] != self._lengths:
            return True
        if any([key not in namespaces[i] for i, key in self._places]):  # another may be there instead
            return True
        try:
            values = [*self._contents, *[getter(namespaces[i]) for i, getter in self._slots]]
        except KeyError:
            return True
        return not all(map(is_, chain.from_iterable(values), self._known))

    def _search(self, namespaces: Sequence[Namespace]) -> None:
        """Look at everything, and remember it for comparison."""
        self._slots.clear()
        self._places = [(i, key) for i, key in self._places if key in namespaces[i]]
        known: list[Any] = []
        collections: list[Collection[Any]] = []
        for i, (namespace, never_change) in enumerate(zip(namespaces, self._never_change, strict=True)):
            names = []
            for name, value in namespace.items():
                if (name in never_change and name != "_buffers") or (i, name) in self._places:
                    continue
                if isinstance(value, BoundToModule):
                    continue
                if tensors_requiring_grad(value):
                    self._places.append((i, name))
                elif name == "_buffers":
                    collections.append(value.values())  # a module keeps the same dict of buffers
                else:
                    names.append(name)
                    collections += _contents_of(value, _MAX_DEPTH)
            if names:
                getter = itemgetter(*names, names[0])  # with a single name, it would not return a tuple
                self._slots.append((i, getter))
                known += getter(namespace)
        self._empty = [item for item in collections if not item]
        self._live = [item for item in collections if item]
        self._lengths = [*map(len, namespaces), *map(len, self._live)]
        self._contents = [item for item in self._live if len(item) <= _MAX_ENTRIES]
        self._known = [*chain.from_iterable(self._contents), *known]


class BatchedKeptTensors:
    """The groups of a root on whose modules the last forwards have changed nothing. They are searched together, at the
    end of the outermost forward.

    Args:
        groups: all groups of the root but the root's own.
    """

    def __init__(self, groups: Sequence[KeptTensors]) -> None:
        self._groups = groups
        self._rebuild()

    def _rebuild(self) -> None:
        for group in self._groups:
            group.is_unchanged = group.num_same >= _QUIET_AFTER
        self._others = [group for group in self._groups if not group.is_unchanged]
        self._quiet = [group for group in self._groups if group.is_unchanged]
        self._empty = [item for group in self._quiet for item in group._empty]
        self._slots: list[tuple[Namespace, itemgetter[Any]]] = []
        sized: list[Collection[Any]] = []
        lengths: list[int] = []
        contents: list[Collection[Any]] = []
        of_contents: list[Any] = []
        of_slots: list[Any] = []
        for group in self._quiet:
            namespaces = group.namespaces()
            sized += [*namespaces, *group._live]
            lengths += group._lengths
            self._slots += [(namespaces[i], getter) for i, getter in group._slots]
            contents += group._contents
            num = sum(map(len, group._contents))
            of_contents += group._known[:num]
            of_slots += group._known[num:]
        self._sized, self._lengths, self._contents, self._known = sized, lengths, contents, [*of_contents, *of_slots]

    def changed(self) -> Sequence[KeptTensors]:
        """The groups on whose modules something has changed; from now on these are searched one by one again."""
        if max(map(_num_same, self._others), default=0) >= _QUIET_AFTER:
            self._rebuild()
        # One pass over all groups. Group by group it costs ten times as much, mostly because the modules are no longer
        # in the CPU's caches.
        if self._are_same():
            return ()
        changed = [group for group in self._quiet if group._has_changed(group.namespaces())]
        for group in changed:
            group.num_same = 0
        self._rebuild()
        return changed

    def _are_same(self) -> bool:
        if any(self._empty) or [*map(len, self._sized)] != self._lengths:
            return False
        try:
            values = [*self._contents, *[getter(namespace) for namespace, getter in self._slots]]
        except KeyError:
            return False
        return all(map(is_, chain.from_iterable(values), self._known))


def _contents_of(value: Any, depth: int) -> Iterable[Collection[Any]]:
    """Live views of the contents of ``value``, which may change while ``value`` stays the same object."""
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
    """The tensors of a graph in ``value``, which is a tensor, a collection, or an object with attributes."""
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


ATOMS = (  # contain no tensors
    int, float, bool, str, bytes, complex, type(None), type, range, enum.Enum, nn.Module,
    torch.dtype, torch.device, torch.Size, torch.Generator, torch.Stream,
)  # fmt: skip
_MAX_OBJECTS = 1 << 14


def search_object(value: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors in an object of the user's own class (a key/value cache, a dataclass), whatever objects and
    collections they are in; and whether these are all. Functions, for example, may hide more."""
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    is_complete = True
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            continue
        if isinstance(item, ATOMS) or id(item) in seen:
            continue
        seen[id(item)] = item  # keeps it, so that no other object gets its id
        if len(seen) > _MAX_OBJECTS:
            return tensors, False
        if isinstance(item, (dict, list, tuple, set, frozenset, deque)):
            pending += [*item, *item.values()] if isinstance(item, dict) else item
        elif callable(item) or not hasattr(item, "__dict__"):
            is_complete = False
        pending += getattr(item, "__dict__", {}).values()
    return tensors, is_complete
