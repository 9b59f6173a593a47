"""Canonical FQNs: parameter names without any wrapper or sharding, and the names that share a tensor.

All state dicts use these names. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn

from ..._torch import loads_as_torch_module, non_persistent_buffers, wrapped_child
from ...errors import MisuseRuntimeError
from ..flat import FlatParamHandle, handle_of
from ..group import before_load, sharded_parameters

Place = tuple[FlatParamHandle, int]
"""A flat parameter, and the index of a parameter in it."""

_PATCHED = "_fsdp_compose_patched"


class ModelNames:
    """The names of everything below a model, in its current state.

    Attributes:
        parameters: every parameter (sharded if it has been sharded) by canonical FQN; tied ones under each name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._prefixes: dict[str, str] = {}  # module prefixes: as in state_dict() -> canonical
        self.parameters: dict[str, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}
        for raw, canonical, module in _walk(model, "", ""):
            self._prefixes[raw] = canonical
            for name, param in sharded_parameters(module).items():
                if param is not None:
                    place = handle_of(param)  # also for a full parameter that replaces a sharded one
                    tensor = param if place is None else place[0].sharded_params[place[1]]
                    self.parameters[canonical + name] = tensor
                    self._names.setdefault(id(tensor), []).append(canonical + name)

    def canonical(self, key: str) -> str:
        """Return the canonical form of a key of ``model.state_dict()``."""
        end = len(key)
        while (end := key.rfind(".", 0, end)) >= 0:
            if key[: end + 1] in self._prefixes:
                return self._prefixes[key[: end + 1]] + key[end + 1 :]
        return key

    def is_loadable(self, key: str) -> bool:
        """Whether ``load_state_dict()`` accepts a key of ``state_dict()``. True if that cannot be known: load hooks,
        and modules with their own loading, may accept any key."""
        modules, (*path, name) = [self.model], key.split(".")
        for step in path:
            child = modules[-1]._modules.get(step)
            if child is None:
                break
            modules.append(child)
        if not all(loads_as_torch_module(module, before_load) for module in modules):
            return True
        owner = modules[-1]
        return name in owner._parameters or name in owner._buffers or name == "_extra_state"

    def canonical_module(self, path: str) -> str:
        """Return the canonical form of a submodule's path; empty for the model itself."""
        return self._prefixes.get(f"{path}." if path else "", path).rstrip(".")

    def names_of(self, tensor: torch.Tensor) -> list[str]:
        """Return all names of a parameter; empty if the model does not have it."""
        return self._names.get(id(tensor), [])

    def aliases(self, fqn: str) -> list[str]:
        """Return all names of the tensor ``fqn``; the first one identifies it."""
        tensor = self.parameters.get(fqn)
        return [fqn] if tensor is None else self._names[id(tensor)]

    def place(self, fqn: str) -> Place | None:
        """Return a parameter's place in a flat parameter, if it has one."""
        tensor = self.parameters.get(fqn)
        return None if tensor is None else handle_of(tensor)

    def slots(self, kind: str, persistent: bool = False) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield name, module and attribute of everything in the dicts that modules keep under ``kind``:
        "_parameters" or "_buffers", all or the ``persistent`` ones."""
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name in getattr(module, kind):
                if persistent and name in non_persistent_buffers(module):
                    continue
                yield self.canonical(f"{path}.{name}" if path else name), module, name

    def handles(self) -> list[FlatParamHandle]:
        """Return every flat parameter of the model."""
        places = [handle_of(tensor) for tensor in self.parameters.values()]
        return list(dict.fromkeys(place[0] for place in places if place is not None))

    def live_state(self) -> Mapping[str, Any]:
        """Return ``model.state_dict()``.

        Raises:
            RuntimeError: on every rank, the first rank shows full parameters and the others sharded ones.
        """
        for handle in self.handles():
            if handle.is_summoned_on_first_rank_only:
                raise MisuseRuntimeError(
                    f"{handle.name_of(0)} is full on the first rank and sharded on the others, inside "
                    "summon_full_params(rank0_only=True): call it outside of that context. (A full state dict on the "
                    "first rank does not need the context: StateDictOptions(full_state_dict=True, cpu_offload=True))"
                )
        state: Mapping[str, Any] = own_method(self.model, "state_dict")()
        return state

    def entries(self, live: Mapping[str, Any] | None = None) -> dict[str, tuple[str, Any]]:
        """Return key and (detached, live) value of each entry of ``live_state()``, by canonical FQN.

        Raises:
            RuntimeError: two keys have the same canonical name; or as for ``live_state``.
        """
        found: dict[str, tuple[str, Any]] = {}
        for key, value in (self.live_state() if live is None else live).items():
            fqn = self.canonical(key)
            if fqn in found:
                raise MisuseRuntimeError(
                    f"{key} and {found[fqn][0]} of this {type(self.model).__name__} have the same canonical name, "
                    f"{fqn}: rename one of the submodules"
                )
            found[fqn] = (key, value)
        return found

    def refuse_while_running_elsewhere(self) -> None:
        """Raise if a forward or backward of the model runs on another thread, whose collectives would be mixed up with
        those of this one, or which would see half-loaded parameters."""
        owners = [None if handle.owner is None else handle.owner() for handle in self.handles()]
        if any([owner is not None and owner.is_busy and owner.is_of_another_thread for owner in owners]):
            raise MisuseRuntimeError(
                "another thread runs a forward or backward of the model: call this between iterations, in the thread "
                "that trains. checkpoint.shards(model) may be read on any thread, and so may state dicts that are not "
                "full"
            )

    def prefixes_of(self, modules: set[nn.Module] | None) -> list[str]:
        """Return the FQN prefixes of the given submodules; without any, that of the model."""
        if not modules:
            return [""]
        return [canonical for _, canonical, module in _walk(self.model, "", "") if module in modules]


def _walk(module: nn.Module, raw: str, canonical: str) -> Iterator[tuple[str, str, nn.Module]]:
    yield raw, canonical, module
    transparent = wrapped_child(module)
    for name, child in module._modules.items():
        if child is not None:
            # What a wrapper wraps has the wrapper's own name.
            yield from _walk(child, f"{raw}{name}.", canonical if name == transparent else f"{canonical}{name}.")


def own_method(owner: Any, name: str) -> Any:
    """Return ``owner.state_dict`` or ``owner.load_state_dict`` as it was before ``patch_*_state_dict``."""
    method = getattr(owner, name)
    return getattr(type(owner), name).__get__(owner) if hasattr(method, _PATCHED) else method


def patch_method(owner: Any, name: str, function: Any) -> None:
    setattr(function, _PATCHED, True)
    setattr(owner, name, function)
