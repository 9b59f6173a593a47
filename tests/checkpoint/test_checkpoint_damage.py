"""A failure while checkpoints are written and read, on one rank or in the folder, is one error on every rank."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import (
    StateDictOptions,
    async_save,
    folders,
    get_model_state_dict,
    hf,
    load,
    load_hf,
    save,
    save_hf,
    set_model_state_dict,
)
from tests.checkpoint.states import adamw, assert_equal, build, set_state, shared_folder, snapshot, state_of, train
from tests.harness import distributed, same_on_every_rank
from tests.models import shard_layers


def linear(seed: int, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        return fully_shard(nn.Linear(6, 6))


class Trouble(Exception):
    """Cannot be sent to other ranks."""

    def __init__(self) -> None:
        super().__init__("no more memory")
        self.lock = threading.Lock()


class Raises:
    """An object with a state_dict that one rank cannot make."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise Trouble
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Unpicklable:
    """An object that cannot be written."""

    def __reduce__(self) -> Any:
        raise Trouble


@pytest.mark.parametrize("what", ["state_dict() of one rank", "unpicklable", "unpicklable on one rank"])
@distributed(world_size=2)
def test_what_cannot_be_saved_is_an_error_on_every_rank(what):
    folder = shared_folder() / "checkpoint"
    mine = Unpicklable() if dist.get_rank() == 1 else 1
    value = {"state_dict() of one rank": Raises(), "unpicklable": Unpicklable()}.get(what, mine)
    if what == "unpicklable on one rank":
        with pytest.raises(RuntimeError, match="on rank 1: Trouble: no more memory"):
            dcp_key = f"value{dist.get_rank()}"
            save({"model": get_model_state_dict(linear(0)), "values": {dcp_key: value}}, folder)
    else:
        with pytest.raises(RuntimeError, match="Trouble: no more memory") as caught:
            save({"model": get_model_state_dict(linear(0)), "value": value}, folder)
        same_on_every_rank(str(caught.value).replace("on rank 1: ", ""))
    assert not folder.exists()


@distributed(world_size=2)
def test_an_object_that_cannot_be_loaded_on_one_rank_is_an_error_on_every_rank():
    folder = shared_folder() / "checkpoint"
    save({"object": {"value": 1}}, folder)

    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"value": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if dist.get_rank() == 1:
                raise Trouble

    with pytest.raises(RuntimeError, match=r"everything was read, but load_state_dict\(\) of object raised Trouble"):
        load({"object": Refuses()}, folder)


@distributed(world_size=2)
def test_a_rank_that_cannot_read_is_an_error_on_every_rank():
    folder = shared_folder()
    model, other = linear(0), linear(1)
    save({"model": get_model_state_dict(model)}, folder / "dcp")
    save_hf(model, folder / "hf")
    before = snapshot(other)

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    state = {"model": get_model_state_dict(other)}
    with pytest.MonkeyPatch.context() as broken:
        if dist.get_rank() == 1:
            broken.setattr(hf, "_read", fails)
            broken.setattr(folders, "checksum", fails)
        for call in (lambda: load_hf(other, folder / "hf"), lambda: load(state, folder / "dcp")):
            with pytest.raises(RuntimeError, match="OSError: .*Input/output error") as caught:
                call()
            same_on_every_rank(str(caught.value).replace("on rank 1: ", ""))
    assert_equal(snapshot(other), before)


@distributed(world_size=2)
def test_hooks_that_raise_on_one_rank_are_an_error_on_every_rank():
    folder = shared_folder()
    model, other = linear(0), linear(1)
    save_hf(model, folder / "hf")

    def refuse(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise Trouble

    other.register_load_state_dict_post_hook(refuse)
    with pytest.raises(RuntimeError, match="Trouble: no more memory"):
        load_hf(other, folder / "hf")
    model.register_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="Trouble: no more memory"):
        save_hf(model, folder / "again")
    assert not (folder / "again").exists()


@distributed(world_size=2)
def test_weights_that_do_not_fit_on_the_disk_are_one_error_and_leave_nothing():
    folder, model = shared_folder(), linear(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(RuntimeError, match="save_hf") as caught:
            save_hf(model, folder / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same_on_every_rank(str(caught.value).replace("on rank 0: ", ""))
    dist.barrier()  # the first rank deletes what it has begun
    assert not [*folder.iterdir()]
    dist.barrier()
    save_hf(model, folder / "hf")


@distributed(world_size=2)
def test_what_the_checkpoint_lacks_is_one_short_error():
    folder = shared_folder() / "checkpoint"
    model, other = linear(0), linear(1)
    save({"model": get_model_state_dict(model)}, folder)
    before = snapshot(other)
    with pytest.raises(
        RuntimeError, match=r"on rank 0: .*the checkpoint lacks more\. It has, .*: nothing\. Nothing was changed"
    ) as caught:
        load({"model": get_model_state_dict(other), "more": torch.zeros(2)}, folder)
    assert len(str(caught.value)) < 300
    assert_equal(snapshot(other), before)


@distributed(world_size=2)
def test_other_names_are_shown_beside_those_of_the_checkpoint():
    folder, model = shared_folder(), linear(0)
    state = get_model_state_dict(model)
    wrapped = {f"module.{fqn}": value for fqn, value in state.items()}
    for i, saved in enumerate(({"model": wrapped}, state, {"other": state})):
        save(saved, folder / str(i))
    before = snapshot(model)
    for i, found in enumerate(("model.module.weight, model.module.bias", "weight, bias", "other.weight, other.bias")):
        expected = rf"the checkpoint lacks model.weight, model.bias\. It has, .*: {found}\. Nothing was changed"
        with pytest.raises(RuntimeError, match=expected) as caught:
            load({"model": get_model_state_dict(model)}, folder / str(i))
        same_on_every_rank(str(caught.value))
    assert_equal(snapshot(model), before)


@pytest.mark.parametrize("prefix", ["module.", "model.", "a.module."])
@distributed(world_size=2)
def test_a_prefix_of_all_names_is_named(prefix):
    model, options = linear(0), StateDictOptions(full_state_dict=True)
    full, before = get_model_state_dict(model, options=options), snapshot(model)
    with pytest.raises(RuntimeError, match=f"The given names begin with '{prefix}'") as caught:
        set_model_state_dict(model, {f"{prefix}{fqn}": value for fqn, value in full.items()}, options=options)
    same_on_every_rank(str(caught.value))
    with pytest.raises(RuntimeError, match="Build the model as it was"):
        set_model_state_dict(model, {f"{prefix}weight": full["weight"], "bas": full["bias"]}, options=options)
    assert_equal(snapshot(model), before)


@distributed(world_size=2)
def test_the_other_kinds_of_files_are_named_with_their_loader():
    folder, model = shared_folder(), linear(0)
    save({"model": get_model_state_dict(model)}, folder / "ours")
    save_hf(model, folder / "hf")
    save_hf(model, folder / "several", max_file_bytes=1)
    if dist.get_rank() == 0:
        torch.save({"weight": torch.zeros(2)}, folder / "model.pt")
    dist.barrier()
    before = snapshot(model)
    cases: list[tuple[Any, str, str]] = [
        (load, "hf", r"hf holds safetensors files, .*load_hf\("),
        (load, "several", r"several holds safetensors files, .*load_hf\("),
        (load, "hf/model.safetensors", r"is a file, .*load_hf\("),
        (load, "model.pt", r"is a file, .*torch\.load\("),
        (load_hf, "hf/model.safetensors", "is a file: give the folder"),
        (load_hf, "model.pt", "is a file: give the folder"),
        (load_hf, "ours", r"is a checkpoint of save\(\), .*load\(\)"),
    ]
    for call, name, message in cases:
        with pytest.raises(RuntimeError, match=message) as caught:
            call(model if call is load_hf else {"model": get_model_state_dict(model)}, folder / name)
        same_on_every_rank(str(caught.value))
    assert_equal(snapshot(model), before)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"files": {"a": 3}}', '{"files": {"a": [1, "b"]}}'])
@distributed(world_size=2)
def test_a_damaged_list_of_files_is_an_error(text):
    folder = shared_folder()
    model = linear(0)
    save({"model": get_model_state_dict(model)}, folder / "ours")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=str(folder / "torchs"))
    save_hf(model, folder / "hf")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "ours" / folders.MANIFEST).write_text(text)
        (folder / "torchs" / ".metadata").write_text(text)
        (folder / "hf" / hf.INDEX).write_text(text)
    dist.barrier()
    for name in ("ours", "torchs"):
        with pytest.raises(RuntimeError, match="is damaged: its list of files cannot be read"):
            load({"model": get_model_state_dict(model)}, folder / name)
    with pytest.raises(RuntimeError, match="is damaged"):
        load_hf(model, folder / "hf")


@distributed(world_size=2)
def test_folders_of_others_are_never_deleted():
    folder = shared_folder()
    state = {"model": get_model_state_dict(linear(0))}
    model = linear(0)
    save(state, folder / "best.partial")
    save_hf(model, folder / "weights.partial")
    if dist.get_rank() == 0:
        (folder / "mine.partial").mkdir()
        (folder / "mine.partial" / "notes").touch()
        (folder / "latest").symlink_to(folder / "nowhere")
    dist.barrier()
    before = sorted(str(path) for path in folder.rglob("*"))
    for call in (
        lambda: save(state, folder / "best"),
        lambda: save_hf(model, folder / "weights"),
        lambda: save(state, folder / "mine"),
    ):
        with pytest.raises(RuntimeError, match="is not an interrupted save: move it away") as caught:
            call()
        same_on_every_rank(str(caught.value))
    with pytest.raises(RuntimeError, match="latest exists"):
        save(state, folder / "latest")
    assert sorted(str(path) for path in folder.rglob("*")) == before


def test_a_folder_that_another_job_makes_at_the_last_moment_is_not_touched(tmp_path, monkeypatch):
    folder, rename = tmp_path / "best", Path.rename

    def rename_later(source, target):
        (target / "of another").mkdir(parents=True)
        rename(source, target)

    def rename_on_full_disk(*_):
        raise OSError(errno.ENOSPC, "No space")

    for named, kind, text in (
        (rename_on_full_disk, OSError, "No space"),
        (rename_later, RuntimeError, "best exists now, and was not touched"),
    ):
        (folders.partial_of(folder) / "mine").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(Path, "rename", named)
        with pytest.raises(kind, match=text):
            folders.finish_folder(folder, "mine")
    assert [path.name for path in folder.iterdir()] == ["of another"]


@distributed(world_size=2)
def test_folders_that_cannot_be_written_are_named_with_the_remedy():
    folder = shared_folder()
    (folder / "file").touch()
    model, long = linear(0), "n" * 250
    state = {"model": get_model_state_dict(model)}
    cases = {"file/one": "cannot be written: NotADirectoryError", long: "cannot be written: .*at most 240 bytes"}
    for name, text in cases.items():
        for call in (save, async_save):
            with pytest.raises(RuntimeError, match=rf"{folder / name} {text}") as caught:
                call(state, folder / name)
            same_on_every_rank(str(caught.value))
    with pytest.MonkeyPatch.context() as full:
        if dist.get_rank() == 1:
            full.setattr(folders.SummedFile, "write", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        with pytest.raises(RuntimeError, match=rf"on rank 1: .*No space.* Make room.*{folder}/two was not completed"):
            save(state, folder / "two")
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["file"]


@distributed(world_size=2)
def test_safetensors_of_an_unknown_type_are_an_error():
    folder = shared_folder() / "hf"
    model = linear(0)
    save_hf(model, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        file = folder / hf.SINGLE
        file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F4" ', 1).replace(b'"F32"', b'"F4" ', 1))
    dist.barrier()
    with pytest.raises(RuntimeError, match="is damaged|is not supported") as caught:
        load_hf(model, folder)
    same_on_every_rank(str(caught.value))


@distributed(world_size=2)
def test_a_model_on_the_meta_device_gets_memory():
    folder = shared_folder() / "checkpoint"
    model = shard_layers(build(0))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 2)
    save(state_of(model, optimizer), folder)
    with torch.device("meta"):
        meta = shard_layers(build(1))
    its = adamw(meta.parameters())
    with pytest.MonkeyPatch.context() as no_gpu:  # a torch that was built for CUDA, on a machine that has none
        has_none = lambda check_available=False: None if check_available else torch.device("cuda")  # noqa: E731
        no_gpu.setattr(torch.accelerator, "current_accelerator", has_none)
        state = state_of(meta, its)
        load(state, folder)
        set_state(meta, its, state)
    assert_equal(snapshot(meta, its), snapshot(model, optimizer))
    meta.scratch = torch.ones(2)  # in no state dict
    for trained, by in ((model, optimizer), (meta, its)):
        train(trained, by, 1, begin=2)
    assert_equal(snapshot(meta, its), snapshot(model, optimizer))
