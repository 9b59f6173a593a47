"""Loading runs no code that is in a checkpoint and reads no file outside of its folder; what makes no sense is one
error on every rank, and nothing is changed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import LoadPlanner, get_model_state_dict, load, load_hf, save, save_hf
from fsdp_compose.checkpoint.folders import MANIFEST, NUMBERS, as_text, entries
from tests.checkpoint.states import adamw, assert_equal, build, set_state, shared_folder, snapshot, state_of, train
from tests.harness import distributed, same_on_every_rank
from tests.models import shard_layers


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Value:
    """An object of the user's."""

    def __init__(self, number: int) -> None:
        self.number = number


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(nn.Linear(6, 6))


@contextmanager
def on_first_rank() -> Iterator[bool]:
    dist.barrier()
    yield dist.get_rank() == 0
    dist.barrier()


def refused(folder: Path, message: str, **options: Any) -> None:
    """Loading is one error on every rank, and changes nothing."""
    model = linear(1)
    before = snapshot(model)
    state = {"model": get_model_state_dict(model), "value": None}
    with pytest.raises(RuntimeError, match=message) as caught:
        load(state, folder, **options)
    same_on_every_rank(str(caught.value).replace("on rank 1: ", ""))
    assert state["value"] is None
    assert_equal(snapshot(model), before)


def saved(how: str, value: Any = 1) -> Path:
    folder = shared_folder() / "checkpoint"
    state = {"model": get_model_state_dict(linear(0)), "value": value}
    if how == "ours" and value == 1:
        save(state, folder)
        return folder
    dcp.save(state, checkpoint_id=folder)
    with on_first_rank() as is_first:
        if is_first and how == "ours":  # whose save() refuses such values
            listed = {"files": entries([*folder.iterdir()]), NUMBERS: []}
            (folder / MANIFEST).write_text(as_text(listed))
    return folder


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite the metadata, and the manifest so that it agrees."""
    with on_first_rank() as is_first:
        if is_first:
            path = folder / ".metadata"
            metadata = pickle.loads(path.read_bytes())
            changed = change(metadata)
            path.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(changed or metadata))
            agree_again(folder)


def restore(folder: Path, good: bytes) -> None:
    with on_first_rank() as is_first:
        if is_first:
            (folder / ".metadata").write_bytes(good)
            agree_again(folder)


def agree_again(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        manifest = json.loads((folder / MANIFEST).read_text())
        names = [path for path in folder.iterdir() if path.name in manifest["files"]]
        manifest["files"] |= entries(names)
        (folder / MANIFEST).write_text(json.dumps(manifest))


class StateAttack(dict):  # a class that metadata do not need
    pass


def metadata_attacks(marker: Path) -> dict[str, Callable[[Any], Any]]:
    def build_on_class(_: Any) -> bytes:
        # GLOBAL Metadata; then BUILD with (None, {"hacked": 1}): setattr(Metadata, "hacked", 1)
        return b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x06\x00\x00\x00hackedK\x01s\x86b."

    return {
        "instead": lambda _: pickle.dumps(Attack(marker)),
        "as a value": lambda m: m.state_dict_metadata.update(attack=Attack(marker)),
        "as an identity": lambda m: setattr(m, "storage_meta", Attack(marker)),
        "as a path": lambda m: m.planner_data.update(value=Attack(marker)),
        "as a key": lambda m: m.storage_data.update({MetadataIndex("x"): Attack(marker)}),
        "another class": lambda m: setattr(m, "planner_data", StateAttack(m.planner_data)),
        "eval": lambda _: b'cbuiltins\neval\n(S\'__import__("os").system("touch %s")\'\ntR.' % str(marker).encode(),
        "getattr": lambda _: b"cbuiltins\ngetattr\n(ctorch\nfloat32\nS'__class__'\ntR.",
        "a class is changed": build_on_class,
    }


@pytest.mark.parametrize("how", ["ours", "torch's"])
@distributed(world_size=2)
def test_metadata_run_no_code(how):
    folder = saved(how)
    good = (folder / ".metadata").read_bytes()
    marker = folder.parent / "marker"
    for name, attack in metadata_attacks(marker).items():
        change_metadata(folder, attack)
        refused(folder, r"(was not loaded: it refers to \w+\.\w+|is damaged: its list of files cannot be read)")
        assert not marker.exists(), name
        assert not hasattr(dcp.Metadata, "hacked")
        restore(folder, good)
    if dist.get_rank() == 0:
        pickle.loads(pickle.dumps(Attack(marker)))
        assert marker.exists(), "they are real attacks"


@pytest.mark.parametrize("planner", [None, LoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("how", ["ours", "torch's"])
@distributed(world_size=2)
def test_values_run_no_code_unless_it_is_allowed(how, planner):
    marker = shared_folder() / "marker"
    folder = saved(how, Attack(marker))
    assert not marker.exists()
    options = {} if planner is None else {"planner": planner()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(folder, r"value in .* refers to posix.system: unpickling it could run any code.*Nothing was", **options)
    assert not marker.exists()
    dist.barrier()
    options = {} if planner is None else {"planner": planner()}
    load({"value": None}, folder, allow_pickle=True, **options)
    assert marker.exists(), "it is a real attack"


@distributed(world_size=2)
def test_objects_of_the_users_load_when_that_is_allowed():
    folder = saved("ours", [Value(3), np.arange(3)])
    refused(folder, r"value in .* refers to [\w.]+: unpickling it could run any code.*allow_pickle=True")
    state: dict[str, Any] = {"value": None}
    load(state, folder, allow_pickle=True)
    assert state["value"][0].number == 3 and state["value"][1].tolist() == [0, 1, 2]


@distributed(world_size=2)
def test_plain_values_load_as_they_are():
    value = {
        "numbers": [1, 2.5, True, None, 3 + 4j, 10**30],
        "texts": ("a", b"b", {"deep": [{"er": ()}]}),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "sets": {1, 2},
        "generator": torch.get_rng_state(),
    }
    folder = saved("ours", value)
    state: dict[str, Any] = {
        "value": {key: None for key in value} | {"generator": torch.zeros_like(value["generator"])}
    }
    load(state, folder)
    assert_equal(state["value"], value)


@pytest.mark.parametrize("planner", [False, True], ids=["ours", "torch's"])
@distributed(world_size=2)
def test_a_whole_training_state_needs_no_pickles(planner):
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer, its = adamw(model.parameters()), adamw(other.parameters())
    ours, theirs = (
        torch.optim.lr_scheduler.SequentialLR(
            by,
            [torch.optim.lr_scheduler.LinearLR(by), torch.optim.lr_scheduler.MultiStepLR(by, [3, 9])],
            milestones=[2],
        )
        for by in (optimizer, its)
    )
    train(model, optimizer, 2)
    ours.step()
    folder = shared_folder() / "checkpoint"
    save({**state_of(model, optimizer), "scheduler": ours.state_dict()}, folder)
    train(other, its, 1)
    state = {**state_of(other, its), "scheduler": theirs.state_dict()}
    load(state, folder, planner=DefaultLoadPlanner() if planner else None)
    set_state(other, its, state)
    assert_equal(snapshot(other, its), snapshot(model, optimizer))
    assert_equal(state["scheduler"]["last_epoch"], 1)


# ---- files


@distributed(world_size=2)
def test_no_file_outside_of_the_folder_is_read():
    folder = saved("ours")
    secret = folder.parent / "secret.distcp"
    with on_first_rank() as is_first:
        if is_first:
            secret.write_bytes((folder / "__0_0.distcp").read_bytes())
            subprocess.run(["cp", "-r", str(folder), str(folder.parent / "torchs")], check=True)
            (folder.parent / "torchs" / MANIFEST).unlink()
    torchs = folder.parent / "torchs"
    change_metadata(torchs, lambda m: setattr(m, "storage_meta", StorageMeta()))

    def elsewhere(name: str) -> Callable[[Any], None]:
        def change(metadata: Any) -> None:
            for info in metadata.storage_data.values():
                if info.relative_path == "__0_0.distcp":
                    info.relative_path = name

        return change

    for where in (folder, torchs):
        good = (where / ".metadata").read_bytes()
        for name in ("../secret.distcp", str(secret), "sub/../../secret.distcp", "", "x\0y", "."):
            change_metadata(where, elsewhere(name))
            refused(where, "is damaged: its list of files cannot be read|is missing")
            with on_first_rank() as is_first:
                manifest = where / MANIFEST
                before = manifest.read_text() if manifest.exists() else None
                if is_first and before is not None:
                    listed = json.loads(before)
                    listed["files"][name] = [secret.stat().st_size, 0]
                    manifest.write_text(json.dumps(listed))
            refused(where, "is damaged: its list of files cannot be read|is missing")
            with on_first_rank() as is_first:
                if is_first and before is not None:
                    manifest.write_text(before)
            restore(where, good)
        load({"model": get_model_state_dict(linear(1))}, where)
        for name in ("__0_0.distcp", ".metadata"):
            with on_first_rank() as is_first:
                if is_first:
                    (where / name).rename(where.parent / "aside")
                    (where / name).symlink_to(where.parent / "aside")
            refused(where, f"it refers to the file '{name}', which is not in the folder")
            with on_first_rank() as is_first:
                if is_first:
                    (where / name).unlink()
                    (where.parent / "aside").rename(where / name)
    with on_first_rank() as is_first:
        if is_first:
            (folder / "renamed.distcp").symlink_to("__0_0.distcp")
            (folder.parent / "link").symlink_to(folder)
    load({"model": get_model_state_dict(linear(1))}, folder.parent / "link")


@distributed(world_size=2)
def test_a_lost_manifest_is_noticed_and_torchs_folders_load_with_a_warning():
    folder = saved("ours")
    with on_first_rank() as is_first:
        if is_first:
            (folder / MANIFEST).unlink()
    refused(folder, f"saved with a {MANIFEST}, which is missing, so nothing can be verified")
    theirs = saved("torch's")
    state = {"model": get_model_state_dict(linear(1)), "value": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(state, theirs)
    told = [str(item.message) for item in caught if "only the sizes of its files were verified" in str(item.message)]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert state["value"] == 1
    dcp.load({"model": get_model_state_dict(linear(1))}, checkpoint_id=folder)  # torch itself needs no manifest


def nonsense() -> dict[str, Callable[[Any], Any]]:
    def first(metadata: Any) -> Any:
        return next(iter(metadata.storage_data.values()))

    def tensor(metadata: Any) -> Any:
        return metadata.state_dict_metadata["model.weight"]

    return {
        "a negative offset": lambda m: setattr(first(m), "offset", -5),
        "a length that is none": lambda m: setattr(first(m), "length", "x"),
        "beyond the end": lambda m: setattr(first(m), "length", 10**15),
        "a name that is none": lambda m: setattr(first(m), "relative_path", 7),
        "a file that is not listed": lambda m: setattr(first(m), "relative_path", "other"),
        "a shape that is none": lambda m: setattr(tensor(m), "size", "abc"),
        "a negative shape": lambda m: setattr(tensor(m), "size", (-1, 6)),
        "chunks that are none": lambda m: setattr(tensor(m), "chunks", [3]),
        "an index beyond all": lambda m: m.planner_data.update(value=("value", 10**12)),
        "no dtype": lambda m: setattr(tensor(m).properties, "dtype", "float32"),
        "no places": lambda m: setattr(m, "storage_data", None),
        "no keys": lambda m: setattr(m, "state_dict_metadata", [1]),
        "a text": lambda m: "metadata",
        "half": lambda m: pickle.dumps(m)[:100],
    }


@distributed(world_size=2)
def test_metadata_that_make_no_sense_are_refused():
    folder = saved("ours")
    good = (folder / ".metadata").read_bytes()
    for change in nonsense().values():
        change_metadata(folder, change)
        refused(folder, "is damaged|has .* bytes, but|__0_0.distcp")
        restore(folder, good)
    load({"model": get_model_state_dict(linear(1))}, folder)


# ---- safetensors


def write_safetensors(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {"weight": entry(0, 144, [6, 6]), "bias": entry(144, 168, [6])}
DATA = bytes(168)
TWICE = b'{"weight":%s,"bias":%s,"weight":%s}' % tuple(
    json.dumps(part).encode() for part in (GOOD["weight"], GOOD["bias"], GOOD["weight"])
)


def files(folder: Path, index: Any, **contents: Any) -> None:
    for name, header in contents.items():
        size = max(item["data_offsets"][1] for item in header.values())
        write_safetensors(folder / f"{name}.safetensors", header, bytes(size))
    text = index if isinstance(index, str) else json.dumps({"weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


A, B = {"weight": entry(0, 144, [6, 6])}, {"bias": entry(0, 24, [6])}
HOSTILE: dict[str, Callable[[Path], None]] = {
    "a header longer than the file": lambda f: write_safetensors(f / "model.safetensors", GOOD, DATA, length=2**63),
    "a header of 90 MB": lambda f: write_safetensors(f / "model.safetensors", GOOD, DATA, length=90_000_000),
    "a header that is no JSON": lambda f: write_safetensors(f / "model.safetensors", b"{" * 60, DATA),
    "a header of brackets": lambda f: write_safetensors(f / "model.safetensors", b"[" * 100_000, DATA),
    "names twice": lambda f: write_safetensors(f / "model.safetensors", TWICE, DATA),
    "overlapping": lambda f: write_safetensors(
        f / "model.safetensors", {"weight": entry(0, 144, [6, 6]), "bias": entry(120, 144, [6])}, DATA
    ),
    "out of range": lambda f: write_safetensors(f / "model.safetensors", GOOD, DATA[:100]),
    "a gap": lambda f: write_safetensors(f / "model.safetensors", {**A, "bias": entry(160, 184, [6])}, bytes(184)),
    "other bytes than its shape": lambda f: write_safetensors(
        f / "model.safetensors", {**A, "bias": entry(144, 168, [7])}, DATA
    ),
    "an absurd shape": lambda f: write_safetensors(
        f / "model.safetensors", {**A, "bias": entry(144, 168, [2**62, 2**62])}, DATA
    ),
    "an empty file": lambda f: (f / "model.safetensors").touch(),
    "a folder": lambda f: (f / "model.safetensors").mkdir(),
    "a missing name": lambda f: write_safetensors(f / "model.safetensors", A, DATA[:144]),
    "nothing": lambda f: None,
    "an index that is no JSON": lambda f: files(f, "{{{", a=A, b=B),
    "an index of brackets": lambda f: files(f, "[" * 100_000, a=A, b=B),
    "an index without names": lambda f: files(f, '{"metadata": {}}', a=A, b=B),
    "an index that is a list": lambda f: files(f, "[1, 2]", a=A, b=B),
    "an index of numbers": lambda f: files(f, {"weight": 1, "bias": 2}, a=A, b=B),
    "an index of lists": lambda f: files(f, {"weight": ["a"], "bias": ["b"]}, a=A, b=B),
    "an index of a list": lambda f: files(f, [["weight", "a.safetensors"]], a=A, b=B),
    "a missing file": lambda f: files(f, {"weight": "a.safetensors", "bias": "c.safetensors"}, a=A, b=B),
    "another file": lambda f: files(f, {"weight": "a.safetensors", "bias": "a.safetensors"}, a=A, b=B),
    "above the folder": lambda f: (
        files(f.parent, {}, secret=B), files(f, {"weight": "a.safetensors", "bias": "../secret.safetensors"}, a=A)
    ),
    "an absolute path": lambda f: (
        files(f.parent, {}, secret=B),
        files(f, {"weight": "a.safetensors", "bias": str(f.parent / "secret.safetensors")}, a=A),
    ),
    "the folder itself": lambda f: files(f, {"weight": "a.safetensors", "bias": "."}, a=A),
    "names twice in the index": lambda f: files(
        f, '{"weight_map": {"weight": "a.safetensors", "bias": "c.safetensors", "bias": "b.safetensors"}}', a=A, b=B
    ),
    "a name in two files": lambda f: files(
        f, {"weight": "a.safetensors", "bias": "b.safetensors"}, a=A, b={**B, "weight": entry(24, 168, [6, 6])}
    ),
    "an unknown dtype": lambda f: write_safetensors(
        f / "model.safetensors", {**A, "bias": entry(144, 150, [6], "F8_E8M0")}, bytes(150)
    ),
    "integers": lambda f: write_safetensors(
        f / "model.safetensors", {**A, "bias": entry(144, 192, [6], "I64")}, bytes(192)
    ),
    "complex numbers": lambda f: write_safetensors(
        f / "model.safetensors", {**A, "bias": entry(144, 192, [6], "C64")}, bytes(192)
    ),
    "booleans": lambda f: write_safetensors(
        f / "model.safetensors", {**A, "bias": entry(144, 150, [6], "BOOL")}, bytes(150)
    ),
}  # fmt: skip


@distributed(world_size=2)
def test_hostile_safetensors_are_one_error_on_every_rank():
    parent, model = shared_folder(), linear(1)
    before = snapshot(model)
    for number, (name, make) in enumerate(HOSTILE.items()):
        folder = parent / f"{number}" / "model"
        with on_first_rank() as is_first:
            if is_first:
                folder.mkdir(parents=True)
                make(folder)
        with pytest.raises(RuntimeError, match=r"load_hf\(\): ") as caught:
            load_hf(model, folder)
        same_on_every_rank(str(caught.value).replace("on rank 1: ", ""))
        assert str(folder) in str(caught.value) or "bias" in str(caught.value), name
        assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 600, name
        assert_equal(snapshot(model), before)


CASTS = {
    (torch.complex64, torch.float32): False,
    (torch.int64, torch.float32): False,
    (torch.uint8, torch.bfloat16): False,
    (torch.bool, torch.float32): False,
    (torch.float32, torch.int64): False,
    (torch.float32, torch.bool): False,
    (torch.uint8, torch.bool): False,
    (torch.int64, torch.int32): False,
    (torch.uint8, torch.int8): False,
    (torch.int32, torch.int64): True,
    (torch.bool, torch.int64): False,
    (torch.float32, torch.bfloat16): True,
    (torch.bfloat16, torch.float32): True,
    (torch.float8_e4m3fn, torch.bfloat16): True,
    (torch.float32, torch.complex64): True,
}


class Typed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        value = torch.ones(4, dtype=torch.float32).to(dtype)
        if dtype.is_floating_point or dtype.is_complex:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@distributed(world_size=2)
def test_dtypes_that_would_lose_what_was_saved_are_refused_by_name():
    parent = shared_folder()
    for number, ((found, wanted), is_fine) in enumerate(CASTS.items()):
        folder = parent / str(number)
        save_hf(Typed(found), folder)
        model = fully_shard(Typed(wanted))
        before = snapshot(model)
        if is_fine:
            load_hf(model, folder)
            continue
        with pytest.raises(RuntimeError, match=f"value: .*{found}.*{wanted}") as caught:
            load_hf(model, folder)
        same_on_every_rank(str(caught.value))
        assert_equal(snapshot(model), before)


@distributed(world_size=2)
def test_links_of_a_hub_cache_are_followed():
    folder, model, other = shared_folder(), linear(0), linear(1)
    save_hf(model, folder / "blobs", max_file_bytes=150)
    with on_first_rank() as is_first:
        if is_first:
            (folder / "snapshot").mkdir()
            for path in (folder / "blobs").iterdir():
                (folder / "snapshot" / path.name).symlink_to(path)
    load_hf(other, folder / "snapshot")
    assert_equal(snapshot(other), snapshot(model))
