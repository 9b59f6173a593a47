"""Checkpoints that other versions of torch wrote load with the one that runs; and one in a format that this torch does
not have is called that, not damaged."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._mesh_layout as _mesh_layout
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fsdp_compose import RaggedDTensor, fully_shard
from fsdp_compose.checkpoint import (
    folders,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    save,
    set_state_dict,
)
from fsdp_compose.checkpoint import folders as contents
from tests.checkpoint.states import FULL, assert_equal, shared_folder
from tests.harness import distributed
from tests.written_checkpoints import DATA, SCALES, SHAPES, build, numbers, placed, values

WRITTEN = sorted(path.name for path in DATA.iterdir())


def empty(value: Any) -> Any:
    """Containers of the same keys, tensors without their elements, ``None`` for all else."""
    if isinstance(value, dict):
        return {key: empty(item) for key, item in value.items()}
    if isinstance(value, list):
        return [empty(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def assert_holds_the_numbers(model_state: dict[str, Any], optimizer_state: dict[str, Any]) -> None:
    for name in SHAPES:
        assert_equal(model_state[name], numbers(name))
        assert_equal(optimizer_state["state"][name], {
            "step": torch.tensor(4.0), **{kind: numbers(name, scale) for kind, scale in SCALES.items()}
        })  # fmt: skip


def test_every_supported_version_has_written_some():
    assert WRITTEN == ["2.12.0", "2.13.0", "2.14.1", "2.15.0"]
    assert all(
        {"ours", "torchs", "rank0.pt", "rank1.pt"} == {path.name for path in (DATA / v).iterdir()} for v in WRITTEN
    )


@pytest.mark.parametrize("version", WRITTEN)
@pytest.mark.parametrize("how", ["ours", "torchs"])
@distributed(world_size=(1, 2, 3))
def test_folders_of_every_version_load(how: str, version: str) -> None:
    model, optimizer = build(fully_shard)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "values": empty(values()),
        "placed": {key: torch.zeros_like(value) for key, value in placed().items()},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*only the sizes of its files were verified")
        load(state, DATA / version / how)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_holds_the_numbers(
        get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    )
    assert_equal(state["values"], values())
    assert_equal(
        {key: value.full_tensor() for key, value in state["placed"].items()},
        {key: value.full_tensor() for key, value in placed().items()},
    )


@pytest.mark.parametrize("version", WRITTEN)
@distributed(world_size=2)
def test_sharded_state_dicts_that_each_rank_pickled_load(version: str) -> None:
    file = DATA / version / f"rank{dist.get_rank()}.pt"
    if WRITTEN.index(version) > 0 and not hasattr(_mesh_layout, "_FlatLayout"):  # 2.12 pickles meshes in another way
        with pytest.raises(pickle.UnpicklingError, match="Unsupported global.*_FlatLayout"):
            torch.load(file, weights_only=True)
        return
    saved = torch.load(file, weights_only=True)
    assert {type(value) for value in saved.values()} == {RaggedDTensor}
    model, _ = build(fully_shard)
    model.load_state_dict(saved)
    for name, param in model.named_parameters():
        assert_equal(param.full_tensor().detach(), numbers(name))


@pytest.mark.parametrize("version", WRITTEN)
@distributed(world_size=2)
def test_torchs_own_loader_takes_ours_where_it_takes_its_own(version: str) -> None:
    """torch before 2.15 cannot read the metadata that 2.15 writes, whoever calls it."""
    told = []
    for how in ("ours", "torchs"):
        model, _ = build(torchs_fully_shard)
        state = {"model": model.state_dict()}
        try:
            dcp.load(state, checkpoint_id=DATA / version / how)
        except dcp.CheckpointException as error:
            told.append(str(error))
        else:
            told.append("loaded")
            assert_equal({k: v.full_tensor() for k, v in state["model"].items()}, {k: numbers(k) for k in SHAPES})
    is_newer = version == "2.15.0" and not hasattr(TensorProperties(), "strides")
    assert all(("too many values to unpack" in text) if is_newer else text == "loaded" for text in told), told


# ---- formats of the future


@distributed(world_size=2)
def test_what_an_untested_torch_writes_is_read_before_it_gets_its_name() -> None:
    """A save on a torch that writes its metadata in another format fails, and leaves no folder behind."""
    folder = shared_folder() / "checkpoint"
    model, _ = build(fully_shard)
    for version, is_tested in ((torch.__version__, True), ("99.0.0", False)):
        with pretended_torch(version), a_format_of_the_future():
            if is_tested:  # only what cannot be known needs the time that looking takes
                save({"model": get_model_state_dict(model)}, folder / "tested")
                continue
            with pytest.raises(
                RuntimeError, match="could not read the checkpoint that torch 99.0.0 just wrote.*float3_e1m1"
            ):
                save({"model": get_model_state_dict(model)}, folder / "untested")
    assert (folder / "tested").exists() and not (folder / "untested").exists()
    with pretended_torch("99.0.0"):
        save({"model": get_model_state_dict(model)}, folder / "untested")
    load({"model": get_model_state_dict(model)}, folder / "untested")


@contextmanager
def pretended_torch(version: str) -> Iterator[None]:
    before = torch.__version__
    torch.__version__ = version
    try:
        yield
    finally:
        torch.__version__ = before


@contextmanager
def a_format_of_the_future() -> Iterator[None]:
    """Metadata refer to a dtype that no torch has."""
    before = filesystem.pickle.dump

    def dump(value: Any, file: Any) -> None:
        file.write(pickle.dumps(value)[:-1] + b"0ctorch\nfloat3_e1m1\n.")

    filesystem.pickle.dump = dump
    try:
        yield
    finally:
        filesystem.pickle.dump = before


def changed(folder: Path, pickled: bytes) -> None:
    """The metadata are other bytes, and those that the manifest lists. Ranks: all, when none reads the folder."""
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / contents.METADATA).write_bytes(pickled)
        if (folder / contents.MANIFEST).exists():
            manifest = json.loads((folder / contents.MANIFEST).read_text())
            manifest.pop("checksum")
            manifest["files"] |= folders.entries([folder / contents.METADATA])
            (folder / contents.MANIFEST).write_text(contents.as_text(manifest))
    dist.barrier()


def copied(version: str, how: str) -> Path:
    folder = shared_folder() / "checkpoint"
    if dist.get_rank() == 0:
        shutil.copytree(DATA / version / how, folder)
    dist.barrier()
    return folder


def error_of_loading(folder: Path) -> str:
    model, _ = build(fully_shard)
    with pytest.raises(RuntimeError) as caught:
        load({"model": get_model_state_dict(model)}, folder)
    for name in SHAPES:
        assert not get_model_state_dict(model, options=FULL)[name].any(), "something was changed"
    return str(caught.value)


@pytest.mark.parametrize("how", ["ours", "torchs"])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "ChunkOfTheFuture"),
        ("torch.distributed.tensor.future", "Spec"),
        ("torch", "float3_e1m1"),
    ],
)
@distributed(world_size=2)
def test_a_name_that_this_torch_lacks_is_called_that(how: str, module: str, name: str) -> None:
    folder = copied("2.15.0", how)
    good = (folder / contents.METADATA).read_bytes()
    # At the end of a tuple, so that all else is read before it; the identity of the save is in it as well.
    changed(folder, good[:-1] + f"0c{module}\n{name}\n.".encode())
    text = error_of_loading(folder)
    assert f"a format that this torch, {torch.__version__}, does not have (it refers to {module}.{name})" in text
    assert ("or it is damaged" in text) == (how == "torchs") and "is damaged" not in text.replace(
        "or it is damaged", ""
    )


@distributed(world_size=2)
def test_the_torch_that_wrote_it_is_named() -> None:
    folder = shared_folder() / "checkpoint"
    model, _ = build(fully_shard)
    save({"model": get_model_state_dict(model)}, folder)
    good = (folder / contents.METADATA).read_bytes()
    changed(folder, good[:-1] + b"0ctorch\nfloat3_e1m1\n.")
    assert (
        f"torch {torch.__version__} wrote it. Load it with torch {torch.__version__}, or a newer"
        in error_of_loading(folder)
    )


@contextmanager
def seven_properties() -> Iterator[None]:
    """``TensorProperties`` are pickled with two fields more than torch 2.13 has."""
    before = TensorProperties.__getstate__
    TensorProperties.__getstate__ = lambda self: (*before(self)[:5], (3, 1), "of the future")  # type: ignore
    try:
        yield
    finally:
        TensorProperties.__getstate__ = before  # type: ignore


@distributed(world_size=2)
def test_more_fields_of_known_classes_are_read_past() -> None:
    """Also of versions that do not exist yet: seven properties, and a chunk that says more of itself."""
    folder = copied("2.13.0", "ours")
    metadata = pickle.loads((folder / contents.METADATA).read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            for chunk in entry.chunks:
                object.__setattr__(chunk, "of_the_future", (1, 2))
    with seven_properties():
        changed(folder, pickle.dumps(metadata))
    model, _ = build(fully_shard)
    state = {"model": get_model_state_dict(model)}
    load(state, folder)
    for name in SHAPES:
        assert_equal(get_model_state_dict(model, options=FULL)[name], numbers(name))
