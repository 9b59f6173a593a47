"""Every storage writer, storage reader and planner of ``torch.distributed.checkpoint``, on shards that begin and end
inside rows: what was written is read back by every reader of its format, or it is refused before anything is written.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from fsdp_compose import fully_shard
from fsdp_compose.checkpoint import LoadPlanner as OurLoadPlanner
from fsdp_compose.checkpoint import SavePlanner as OurSavePlanner
from fsdp_compose.checkpoint import get_model_state_dict, load
from tests.checkpoint.states import assert_equal, shared_folder, whole
from tests.harness import distributed

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (5, 3), "vector": (7,), "experts": (3, 5, 7), "scale": ()}
FILES = {name: 1 + i % 2 for i, name in enumerate([*SHAPES, "short", "buffer"])}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.short = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
        self.register_buffer("buffer", torch.randn(3))


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Model()


WRITERS: dict[str, Callable[[Path], StorageWriter]] = {
    "files": FileSystemWriter,
    "a file each": lambda path: FileSystemWriter(path, single_file_per_rank=False),
    "threads": lambda path: FileSystemWriter(path, thread_count=3),
    "fsspec": FsspecWriter,
    "safetensors": lambda path: HuggingFaceStorageWriter(str(path), save_distributed=True),
    "two safetensors": lambda path: HuggingFaceStorageWriter(str(path), FILES, thread_count=2, save_distributed=True),
    "consolidated": lambda path: HuggingFaceStorageWriter(
        str(path), FILES, save_distributed=True, enable_consolidation=True
    ),
}


def readers(path: Path) -> Iterator[StorageReader]:
    """All that can read what was written."""
    if (path / ".metadata").exists():
        yield from (FileSystemReader(path), FsspecReader(path))
    if (path / "model.safetensors.index.json").exists():
        yield QuantizedHuggingFaceStorageReader(str(path))
    for folder in (path, path / "sharded"):
        if [*folder.glob("*.safetensors")]:
            yield HuggingFaceStorageReader(str(folder))
            yield HuggingFaceStorageReader(str(folder), thread_count=2)


def assert_read(
    read: Callable[[dict[str, Any]], Any], get: Callable[[nn.Module], dict[str, Any]] = nn.Module.state_dict
) -> None:
    """``read`` fills a state dict with the values of the model of seed 0."""
    state = get(fully_shard(build(1)))
    read(state)
    assert_equal(whole(state), build(0).state_dict())


@pytest.mark.parametrize("how", [*WRITERS])
@pytest.mark.parametrize("get", [nn.Module.state_dict, get_model_state_dict], ids=["state_dict", "ours"])
@distributed(world_size=(1, 2, 4))
def test_what_a_writer_has_written_every_reader_reads(get, how):
    folder = shared_folder() / "checkpoint"
    dcp.save(get(fully_shard(build(0))), storage_writer=WRITERS[how](folder))
    dist.barrier()
    for reader in readers(folder):
        assert_read(lambda state: dcp.load(state, storage_reader=reader), get)  # noqa: B023
    if how == "files":
        assert_read(lambda state: load(state, folder), get)
    if how == "two safetensors":  # as transformers and torchtitan do afterwards
        merged = folder / "merged"
        if dist.get_rank() == 0:
            merged.mkdir()
            consolidate_safetensors_files(str(folder), str(merged), fqn_to_index_mapping=FILES)
        dist.barrier()
        assert_read(lambda state: dcp.load(state, storage_reader=HuggingFaceStorageReader(str(merged))), get)


PLANNERS: dict[str, tuple[Callable[[], SavePlanner], Callable[[], LoadPlanner]]] = {
    "default": (DefaultSavePlanner, DefaultLoadPlanner),
    "not flattened": (
        lambda: DefaultSavePlanner(flatten_state_dict=False),
        lambda: DefaultLoadPlanner(flatten_state_dict=False),
    ),
    "lowest rank": (lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True), DefaultLoadPlanner),
    "cached": (lambda: DefaultSavePlanner(enable_plan_caching=True), DefaultLoadPlanner),
    "ours": (OurSavePlanner, OurLoadPlanner),
}


# A cached plan of one writer is none for another: torch says so.
@pytest.mark.parametrize(
    ("planner", "how"),
    [(key, how) for key in PLANNERS for how in ("files", "safetensors") if (key, how) != ("cached", "safetensors")],
)
@distributed(world_size=2)
def test_every_planner_plans_all_parts(planner, how):
    save_planner, load_planner = PLANNERS[planner]
    for i in range(2):  # the second time with what a planner has kept
        folder = shared_folder() / f"checkpoint {i}"
        dcp.save(fully_shard(build(0)).state_dict(), storage_writer=WRITERS[how](folder), planner=save_planner())
        dist.barrier()
        reader = next(readers(folder))
        assert_read(lambda state: dcp.load(state, storage_reader=reader, planner=load_planner()))  # noqa: B023


@distributed(world_size=2)
def test_a_checkpoint_becomes_a_file_of_whole_tensors():
    folder = shared_folder()
    dcp.save(fully_shard(build(0)).state_dict(), checkpoint_id=folder / "checkpoint")
    dist.barrier()
    file = folder / f"{dist.get_rank()}.pt"
    dcp_to_torch_save(folder / "checkpoint", file)
    assert_equal(torch.load(file), build(0).state_dict())


CONTAINERS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "dict": (dict, {"planner": DefaultSavePlanner(flatten_state_dict=False)}),
    "tuple": (lambda state: (*state.values(),), {}),
}


@pytest.mark.parametrize("kind", [*CONTAINERS])
@distributed(world_size=2)
def test_a_container_that_one_rank_would_pickle_is_refused_before_anything_is_written(kind):
    folder = shared_folder() / "checkpoint"
    make, arguments = CONTAINERS[kind]
    state = {"model": make(fully_shard(build(0)).state_dict())}
    with pytest.raises(dcp.CheckpointException, match=f"model is a {kind} with a sharded tensor of shape"):
        dcp.save(state, checkpoint_id=folder, **arguments)
    assert not folder.exists() or not [*folder.iterdir()]


@distributed(world_size=2)
def test_a_writer_that_would_mix_the_parts_of_ranks_is_refused():
    folder = shared_folder() / "checkpoint"
    model = fully_shard(build(0))
    with pytest.raises(dcp.CheckpointException, match="HuggingFaceStorageWriter: .* is sharded.*save_distributed=True"):
        dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(str(folder)))
    assert not [*folder.iterdir()]


def test_torch_ships_no_others():
    tried = {
        *(FileSystemWriter, FsspecWriter, HuggingFaceStorageWriter, FileSystemReader, FsspecReader),
        *(HuggingFaceStorageReader, QuantizedHuggingFaceStorageReader),
        *(DefaultSavePlanner, DefaultLoadPlanner),
    }
    inner = {"_FileSystemWriter", "_EmptyStateDictLoadPlanner", "_ReaderWithOffset"}  # bases, and what others use
    inner |= {
        "BroadcastingTorchSaveReader",
        "DynamicMetaLoadPlanner",
    }  # for ShardedTensor, not DTensor
    found = set()
    for module in pkgutil.walk_packages(dcp.__path__, f"{dcp.__name__}."):
        if "_experimental" not in module.name:
            for item in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(item) and issubclass(item, (StorageWriter, StorageReader, SavePlanner, LoadPlanner)):
                    found.add(item)
    assert {item for item in found if not inspect.isabstract(item) and item.__module__.startswith("torch.")} <= (
        tried | {item for item in found if item.__name__ in inner} | {LoadPlanner, SavePlanner}
    )
