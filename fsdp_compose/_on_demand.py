"""What is imported only when it is first needed: names of a package, and classes that pickles name.

``import fsdp_compose`` imports neither ``torch.distributed.tensor`` nor the wings. A wing's ``__init__`` imports what
every model needs, and gives the rest out by ``on_demand``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


def on_demand(package: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``, which imports a name, or a file, when it is first asked for.
    ``files``: files of the package, each with the names that come from it, divided by spaces."""
    homes = {name: file for file, names in files.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name in files:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return __getattr__


# ---- Classes, and a function that runs no code from the pickle, by the names under which files have them. Files load
# before anything else of the package is used, and ``torch.load(weights_only=True)`` knows these names to be safe.

_CORE = "fsdp_compose.core"
_TENSORS = "torch.distributed.tensor"
_PICKLED = {
    "fsdp_compose.RaggedDTensor": f"{_CORE}.ragged",
    "fsdp_compose.RaggedSpec": f"{_CORE}.ragged",
    "fsdp_compose.RaggedShard": f"{_CORE}.ragged",
    "fsdp_compose.checkpoint.optimizer_init._nothing": f"{_CORE}.state_dicts.optimizer_init",
    # in files of 0.1
    "fsdp_compose.ragged.RaggedDTensor": f"{_CORE}.ragged",
    "fsdp_compose.ragged_spec.RaggedSpec": f"{_CORE}.ragged",
    "fsdp_compose.placement.RaggedShard": f"{_CORE}.ragged",
    "fsdp_compose.checkpoint.pending._nothing": f"{_CORE}.state_dicts.optimizer_init",
    # what a file of ours may name before a class of ours: importing torch.distributed.tensor makes all of torch's safe
    f"{_TENSORS}.DTensor": _TENSORS,
    f"{_TENSORS}.placement_types.Partial": _TENSORS,
    f"{_TENSORS}.placement_types.Replicate": _TENSORS,
    f"{_TENSORS}.placement_types.Shard": _TENSORS,
}
# Modules of earlier versions.
_GONE = {path.rpartition(".")[0] for path in _PICKLED if path.startswith("fsdp_compose.")} - {"fsdp_compose"}


def _find(path: str) -> Any:
    return getattr(import_module(_PICKLED[path]), path.rpartition(".")[2])


class _Safe(tuple[str, str]):
    """A pair as ``add_safe_globals()`` takes it, of an item and its name; the item is imported when torch unpacks the
    pair."""

    def __iter__(self) -> Iterator[Any]:
        return iter((_find(self[1]), self[1]))


class _Gone(ModuleType):
    """A module that no longer exists, for the names that pickles look for in it."""

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" not in _PICKLED:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _find(f"{self.__name__}.{name}")


_safe: list[Any] = [_Safe(("imported on demand", path)) for path in _PICKLED]
torch.serialization.add_safe_globals(_safe)
sys.modules.update((module, _Gone(module)) for module in _GONE)
