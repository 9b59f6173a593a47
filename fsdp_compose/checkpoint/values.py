"""Values beside the state of models and optimizers: which can be read back without running code, and which each rank
has for itself.

What ranks have for themselves (a generator's state, a loader's position) is saved once more for each of them, below one
name that no state dict has, and loaded by rank. ``torch.distributed.checkpoint`` finds one rank's where it always was.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from .._nested import GROUPS, STATE, Path, is_flattened, leaves_of, map_leaves
from ..errors import MisuseError
from ..extension import Peers, digests_of, says_what_it_holds

# ---- Reading values. Arrays are made from bytes here: NumPy's own functions trust the dtype that a pickle describes.


class _Type:
    """Takes the place of ``numpy.dtype``."""

    def __init__(self, name: str, *_: Any) -> None:
        self.read = np.dtype(str(name))
        if self.read.kind not in "biufcSU":
            raise pickle.UnpicklingError(f"GLOBAL numpy.dtype of {self.read}")

    def __setstate__(self, state: Any) -> None:
        self.read = self.read.newbyteorder(state[1])


class _Array:
    """Takes the place of ``numpy.ndarray``."""

    def __init__(self, *_: Any) -> None:
        self.read = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        self.read = np.frombuffer(content, kind.read).reshape(shape, order="F" if by_columns else "C").copy()


_NUMPY: dict[str, Any] = {
    "multiarray.scalar": lambda kind, content: np.frombuffer(content, kind.read)[0],
    "multiarray._reconstruct": _Array,
}
_HARMLESS: list[Any] = [
    (_Type, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    (frozenset, "builtins.frozenset"),
    (lambda: b"", "builtins.bytes"),  # as which no bytes are pickled
    *[(made, f"{core}.{name}") for name, made in _NUMPY.items() for core in ("numpy.core", "numpy._core")],
    *[(cls, f"datetime.{cls.__name__}") for cls in vars(datetime).values() if isinstance(cls, type)],
    *[
        (getattr(pathlib, name), f"{module}.{name}")
        for name in ("PosixPath", "PurePosixPath", "PureWindowsPath")
        for module in ("pathlib", "pathlib._local")
    ],
]


def read_value(content: io.BytesIO) -> Any:
    """Unpickle what cannot run code: plain values, arrays and scalars of NumPy's numbers and texts, dates, paths."""
    with torch.serialization.safe_globals(_HARMLESS):
        value = torch.load(content, weights_only=True)
    return map_leaves(lambda _, leaf: leaf.read if isinstance(leaf, (_Type, _Array)) else leaf, value)


def refuse_unreadable(values: Mapping[str, Any]) -> None:
    """Raise MisuseError if ``load`` could not read one of the values that are no tensors."""
    for key, value in values.items():
        is_known = isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")
        if is_known or hasattr(value, "local_shards") or _is_plain(value):
            continue
        content = io.BytesIO()
        torch.save(value, content)
        content.seek(0)
        try:
            read_value(content)
        except Exception as error:
            raise MisuseError(
                f"{key} is a {type(value).__module__}.{type(value).__qualname__}, or has something in it, which load() "
                f"could not read back without running code: {str(error).splitlines()[0]}. Save tensors, numbers, "
                "strings, and plain containers of them, or name its classes to "
                "torch.serialization.add_safe_globals() where you save and where you load. Nothing was saved"
            ) from error


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in (type(None), bool, int, float, str, bytes)


# ---- What each rank has for itself.


_EACH = "fsdp_compose.each_rank"
_OF_JOB = ("model", "optimizer")  # names whose values are those of a model or an optimizer, also if it is not sharded


def is_optimizer_dict(state: Mapping[Any, Any]) -> bool:
    # Keys under ``state.`` are not enough: that may be the name of a submodule.
    has_groups = any(str(key).startswith(f"{GROUPS}.") for key in state)
    return {STATE, GROUPS} <= state.keys() or (is_flattened(state) and has_groups)


def optimizer_dicts(state: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if not isinstance(state, dict):
        return
    if is_optimizer_dict(state):
        yield path, state
        return
    for key, value in state.items():
        yield from optimizer_dicts(value, (*path, str(key)))


def is_beside(name: str, value: Any) -> bool:
    """Whether a value in a state dict is neither of a model nor of an optimizer."""
    is_sharded = any(isinstance(leaf, DTensor) or says_what_it_holds(leaf) for _, leaf in leaves_of(value))
    return name not in _OF_JOB and not is_sharded and not any(optimizer_dicts(value, ()))


def _all_beside(state: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what is beside models and optimizers, in as few values as possible."""
    if is_optimizer_dict(state) or any(isinstance(value, DTensor) for value in state.values()):
        return  # what is here belongs to it
    for name, value in state.items():
        if is_beside(name, value):
            yield ".".join((*path, name)), value
        elif isinstance(value, Mapping) and name not in _OF_JOB:
            yield from _all_beside(value, (*path, name))


def save_for_each_rank(peers: Peers, state: dict[str, Any]) -> None:
    """Add to ``state`` what this rank has for itself: values that another rank has otherwise. All ranks call it."""
    if not peers.several:
        return
    beside = dict(_all_beside(state))
    digests = {name: dict(_digests(value)) for name, value in beside.items()}
    differing = peers.ask("values of each rank", digests, _differing)
    own = {name: beside[name] for name in differing if name in beside}
    if own:
        state[_EACH] = {f"{peers.rank} of {peers.size}": own}


def is_of_one_rank(key: str) -> bool:
    """Whether a key in a checkpoint is that of a value that one rank has for itself."""
    return key.startswith(f"{_EACH}.")


def _differing(brought: list[dict[str, dict[str, str]]]) -> list[str]:
    """The names of values in which a key has other values on another rank. Keys that only one rank has are no conflict:
    a rank's number in the key is how programs keep what each rank has, and may be loaded by any number of ranks."""
    found: dict[str, dict[str, str]] = {}
    differing: dict[str, None] = {}
    for name, digests in [item for of_rank in brought for item in of_rank.items()]:
        first = found.setdefault(name, {})
        if any(first.setdefault(key, digest) != digest for key, digest in digests.items()):
            differing[name] = None
    return [*differing]


def _digests(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield keys of nested dicts and digests of what is there."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _digests(item, f"{key}.{name}")
    else:
        known = digests_of(value)
        texts = [f"{path} {known.get('.'.join(map(str, path))) or _text(leaf)}" for path, leaf in leaves_of(value)]
        yield key, f"{zlib.crc32(repr(texts).encode()):08x}"


def _text(leaf: Any) -> str:
    if isinstance(leaf, (set, frozenset)):  # in another order in each process
        return repr(sorted(map(repr, leaf)))
    return f"{zlib.crc32(pickle.dumps(leaf)):08x}"


def for_rank(metadata: Metadata, rank: int, size: int, asked: Collection[str]) -> Metadata:
    """Return the metadata of a checkpoint with this rank's own values under their names, and nobody else's.

    Args:
        asked: the names in the state dict.

    Raises:
        MisuseError: another number of ranks saved what is asked for.
    """
    paths = metadata.planner_data or {}
    each = {key: path for key, path in paths.items() if path[0] == _EACH and len(path) > 2 and is_of_one_rank(key)}
    if not each:
        return metadata
    names = {str(path[2]) for path in each.values()}
    wanted = sorted(name for name in names if any(f"{name}.".startswith(f"{one}.") for one in asked))
    saved = {str(path[1]).rpartition(" of ")[2] for path in each.values()}
    if wanted and saved != {str(size)}:
        raise MisuseError(
            f"each of the {', '.join(saved)} ranks that saved had its own {', '.join(wanted)}, and {size} ranks load: "
            "load on as many ranks, or leave these names out; to give one rank's to all: load(planner="
            "torch.distributed.checkpoint.DefaultLoadPlanner()). Nothing was changed"
        )
    own = {key: ".".join(map(str, path[2:])) for key, path in each.items() if path[1] == f"{rank} of {size}"}

    def renamed(key: str) -> str | None:
        is_hidden = is_of_one_rank(key) or any(f"{key}.".startswith(f"{name}.") for name in names)
        return own.get(key, None if is_hidden else key)

    entries = metadata.state_dict_metadata
    places = {index: renamed(index.fqn) for index in metadata.storage_data or {}}
    return replace(
        metadata,
        state_dict_metadata={new: entries[key] for key in entries if (new := renamed(key)) is not None},
        planner_data={new: paths.get(new, (new,)) for key in paths if (new := renamed(key)) is not None},
        storage_data={
            replace(index, fqn=name): metadata.storage_data[index] for index, name in places.items() if name is not None
        },
    )
