"""Save and load models as safetensors files in the layout of the Hugging Face hub.

Saving gathers one flat parameter at a time; loading reads one tensor at a time.

A folder has one file ``model.safetensors``, or several files and an index that maps tensors to files::

    model-00001-of-00002.safetensors  model-00002-of-00002.safetensors  model.safetensors.index.json
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from .._arguments import checked, size_of
from ..errors import CheckpointDamagedError, MisuseRuntimeError, list_problems, text_of
from ..extension import (
    CompositeDTensor,
    Described,
    ModelNames,
    ModelPlan,
    Peers,
    RaggedDTensor,
    StateDictOptions,
    Target,
    gather_values,
    local_of,
)
from .folders import METADATA, abandon_folder, begin_folder, finish_folder, local_folder, new_token, partial_of, sync

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip

_MAX_HEADER_BYTES = 100_000_000  # the library's limit
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def plan_files(num_bytes: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Fill files in order. A tensor that does not fit starts a new file; a larger tensor has a file of its own."""
    files: list[list[str]] = [[]]
    size = 0
    for fqn, n in num_bytes.items():
        if files[-1] and size + n > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(fqn)
        size += n
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": fqns for i, fqns in enumerate(files, 1)}


@checked()
def save_hf(model: nn.Module, folder: str | Path, *, max_file_bytes: int | str = 5 * 10**9) -> None:
    """Save a model's whole tensors as safetensors, under canonical FQNs and in their dtypes. Tied weights are saved
    once.

    The first rank writes. It holds one file and one flat parameter at a time; the others never hold more than their
    shards.

    Ranks: all ranks of the model.

    Args:
        model: any kind of model, as for ``get_model_state_dict``.
        folder: must not exist; it is renamed into place only when all files are on disk.
        max_file_bytes: maximum size of the tensors in one file, in bytes or as ``"5GB"``.

    Raises:
        ValueError: ``folder`` is a network address.
        RuntimeError: on every rank: the folder exists, the model has state that is not a tensor, a file could not be
            written, or a rank did not arrive.
        ModuleNotFoundError: the package ``safetensors`` is not installed.
    """
    max_file_bytes = size_of(max_file_bytes, "save_hf(max_file_bytes={})")
    names, folder, token = ModelNames(model), local_folder(folder), new_token()
    peers = Peers.of(names, "save_hf()")
    is_here = peers.is_first  # only the first rank uses its token: no other rank writes
    importlib.import_module("safetensors.torch")  # assumed to be missing on all ranks or on none

    def begin() -> dict[str, torch.Tensor]:
        tensors = _tensors(names)
        peers.refuse_lost(tensors)
        if is_here:
            begin_folder(folder, token)
        return tensors

    tensors = peers.attempt(begin, facts=lambda tensors: [str(folder), *tensors])
    num_bytes = {fqn: value.numel() * value.element_size() for fqn, value in tensors.items()}
    files = plan_files(num_bytes, max_file_bytes)
    problem: str | Exception = ""
    wholes = _stream(names, tensors, is_here)
    for file, fqns in files.items():
        content = {fqn: whole for fqn, whole in (next(wholes) for _ in fqns) if whole is not None}
        if is_here and not problem:  # the other ranks keep gathering, and learn of a problem at the end
            problem = _problem_of(_write, partial_of(folder) / token / file, content)
    if is_here and not problem:
        problem = _problem_of(_finish, folder, token, files, sum(num_bytes.values()))
    if is_here and problem:
        abandon_folder(folder, token)
    peers.agree([str(folder)], problem)


def _problem_of(function: Callable[..., Any], *arguments: Any) -> str | Exception:
    """Call a function. Return its exception, for ``Peers.agree``; empty if there is none."""
    try:
        function(*arguments)
        return ""
    except Exception as error:
        return error


def _tensors(names: ModelNames) -> dict[str, torch.Tensor]:
    """Return the tensors to save, in the order of the flat parameters. Raises RuntimeError if one cannot be saved."""
    chosen: dict[Any, dict[str, torch.Tensor]] = {}
    for fqn, (_, value) in names.entries().items():
        if not isinstance(value, torch.Tensor):
            raise MisuseRuntimeError(
                f"{fqn} is a {type(value).__name__}, but safetensors files hold only tensors: save it by other means, "
                "and let the module's state_dict() leave it out"
            )
        if isinstance(value, CompositeDTensor):
            raise MisuseRuntimeError(
                f"{fqn} is a {value.composite.name}, made of several tensors, which safetensors does not support: save "
                "the others by get_model_state_dict(), or all by save()"
            )
        if value.layout != torch.strided or value.dtype not in _DTYPES.values():
            found = value.layout if value.layout != torch.strided else value.dtype
            raise MisuseRuntimeError(f"{fqn} is {found}, which safetensors does not support: save it by other means")
        if names.aliases(fqn)[0] == fqn:
            chosen.setdefault((names.place(fqn) or (None,))[0], {})[fqn] = value
    return {fqn: value for group in chosen.values() for fqn, value in group.items()}


def _stream(
    names: ModelNames, tensors: Mapping[str, torch.Tensor], is_here: bool
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every tensor whole, on the first rank, gathered a flat parameter at a time."""
    for _, fqns in groupby(tensors, lambda fqn: (names.place(fqn) or (fqn,))[0]):
        batch = {(fqn, ""): tensors[fqn] for fqn in fqns}
        wholes = gather_values(names, batch, to_cpu=True, rank0_only=True, is_first=is_here)
        for key in batch:
            yield key[0], wholes.pop(key, None)


def _write(path: Path, content: Mapping[str, torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({fqn: tensor.contiguous() for fqn, tensor in content.items()}, path, metadata={"format": "pt"})
        sync(path)
    except (OSError, SafetensorError) as error:
        raise MisuseRuntimeError(f"{path} could not be written: {error}") from error
    least = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    if path.stat().st_size <= least:
        raise MisuseRuntimeError(
            f"{path} has {path.stat().st_size} bytes, but {least} and a header were written: is the disk full?"
        )


def _finish(folder: Path, token: str, files: Mapping[str, list[str]], total_bytes: int) -> None:
    index = partial_of(folder) / token / INDEX
    try:
        if len(files) > 1:
            weight_map = {fqn: file for file, fqns in files.items() for fqn in fqns}
            content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            index.write_text(json.dumps(content, indent=1))
            sync(index)
        finish_folder(folder, token)
    except OSError as error:
        raise MisuseRuntimeError(f"{folder} could not be written: {error}") from error


# ---- loading


@checked()
def load_hf(model: nn.Module, folder: str | Path, *, strict: bool = True) -> Any:
    """Load safetensors files into a model. Each rank reads only its own parts, one tensor at a time. Unless everything
    fits, nothing is changed.

    Ranks: all ranks of the model, on a shared file system.

    Args:
        model: any kind of model; it may be on the meta device.
        folder: a folder with ``model.safetensors``, or with several files and their index.
        strict: whether missing and unexpected names are errors.

    Returns:
        ``(missing_keys, unexpected_keys)``, the same on every rank.

    Raises:
        ValueError: ``folder`` is a network address.
        RuntimeError: on every rank: a file is missing, damaged or contradicts the index; names or shapes do not fit; or
            a rank did not arrive.
        ModuleNotFoundError: the package ``safetensors`` is not installed.
    """
    names, folder = ModelNames(model), local_folder(folder)
    peers = Peers.of(names, "load_hf()")

    def plan_to_load() -> tuple[ModelPlan, dict[str, _Stored]]:
        found = _look_into(folder)
        described = {fqn: item.described for fqn, item in found.items()}
        plan = ModelPlan.of(names, described, StateDictOptions(strict=strict))
        problem = plan.problem or list_problems(
            "the files hold other kinds of numbers than the model",
            [
                f"{fqn}: the files hold {plan.given[fqn].dtype}, which {target.like.dtype} cannot represent"
                for fqn, target in plan.targets.items()
                if not _is_faithful(plan.given[fqn].dtype, target.like.dtype)
            ],
            "Convert one of them first: quantized or packed weights must be unpacked by the library that packed them",
        )
        if problem:
            raise MisuseRuntimeError(problem)
        return plan, found

    plan, found = peers.attempt(plan_to_load, facts=lambda made: [str(folder), *made[0].facts])

    def read() -> dict[str, torch.Tensor]:
        return {fqn: _read(found[fqn], fqn, target) for fqn, target in plan.targets.items()}

    values = peers.attempt(read)
    return peers.attempt(plan.commit, values)


@dataclass(frozen=True)
class _Stored:
    path: Path
    described: Described


def _is_faithful(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a conversion keeps the values: floats may be rounded, nothing else may change."""
    if found == wanted:
        return True
    if found.is_floating_point:
        return wanted.is_floating_point or wanted.is_complex
    if found.is_complex or wanted.is_complex or wanted.is_floating_point or torch.bool in (found, wanted):
        return found.is_complex and wanted.is_complex
    a, b = torch.iinfo(found), torch.iinfo(wanted)
    return b.min <= a.min and a.max <= b.max


def _look_into(folder: Path) -> dict[str, _Stored]:
    """Read the headers of a folder's files, and return the tensors that they list.

    Raises:
        RuntimeError: a file is missing or damaged.
    """
    if folder.is_file():
        raise MisuseRuntimeError(
            f"{folder} is a file: give the folder that contains {SINGLE}, or several files and {INDEX}"
        )
    if (folder / METADATA).is_file():
        raise MisuseRuntimeError(
            f"{folder} is a checkpoint of save(), not a folder of safetensors files: load it with load()"
        )
    weight_map = _read_index(folder / INDEX) if (folder / INDEX).is_file() else {}
    found: dict[str, _Stored] = {}
    for name in sorted(set(weight_map.values())) or [SINGLE]:
        path = folder / name
        if not path.is_file():
            raise (CheckpointDamagedError if weight_map else MisuseRuntimeError)(f"there is no {path}")
        for fqn, described in _read_header(path).items():
            if fqn in found:
                raise CheckpointDamagedError(f"{fqn} is both in {found[fqn].path} and in {path}: remove one of the two")
            found[fqn] = _Stored(path, described)
    for fqn, name in weight_map.items():
        if fqn not in found or found[fqn].path.name != name:
            raise CheckpointDamagedError(f"{folder / INDEX} says that {fqn} is in {name}, but it is not there")
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(), object_pairs_hook=_without_twins)["weight_map"]
        if not isinstance(weight_map, dict):
            raise ValueError(f"expected a dict as weight_map, found a {type(weight_map).__name__}")
        for fqn, name in weight_map.items():
            # Links are followed: the hub's cache consists of links.
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise ValueError(f"it lists {fqn} in {name!r}, which is not the name of a file in this folder")
    except Exception as error:  # malformed JSON may raise anything
        raise CheckpointDamagedError(f"{path} is damaged: {text_of(error)}") from error
    return weight_map


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it contains {next(name for name in names if names.count(name) > 1)} twice")
    return made


def _read_header(path: Path) -> dict[str, Described]:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))
    try:
        json.loads(header, object_pairs_hook=_without_twins)  # of duplicates, the library uses the last
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: {text_of(error)}") from error
    try:
        with safe_open(path, framework="pt") as opened:
            slices = {fqn: opened.get_slice(fqn) for fqn in opened.keys()}
            return {fqn: Described(tuple(of.get_shape()), _DTYPES[of.get_dtype()]) for fqn, of in slices.items()}
    except KeyError as error:
        raise RuntimeError(f"{path} holds a tensor of type {error}, which is not supported") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointDamagedError(f"{path} is damaged, or was not completely written: {error}") from error


def _read(stored: _Stored, fqn: str, target: Target) -> torch.Tensor:
    """Read this rank's shard of a stored tensor into new memory."""
    from safetensors import safe_open

    like = target.like
    with safe_open(stored.path, framework="pt") as file:
        if not isinstance(like, RaggedDTensor):
            whole = file.get_tensor(fqn)
            return target.shard(whole) if hasattr(like, "placements") else whole.to(target.device)
        spec = like._spec.with_dtype(stored.described.dtype)
        if spec.is_only_ragged and not spec.ragged.flat and spec.shape:
            start, stop = spec.ragged.unit_range(spec.rank)
            local = file.get_slice(fqn)[start:stop]
        else:
            local = local_of(Target(like).shard(file.get_tensor(fqn)))
        # A copy: the tensor that safetensors returns keeps the memory of the whole one.
        return RaggedDTensor(local.to(target.device, copy=True).view(spec.local_shape), spec)
