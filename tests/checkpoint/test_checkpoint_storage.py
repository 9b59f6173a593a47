"""Checkpoints on disk: by torch.distributed.checkpoint at other numbers of ranks, to and from other systems, damaged
ones, and safetensors."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from fsdp_compose import RaggedDTensor, RaggedShard, distribute_ragged, flat_parameters, fully_shard
from fsdp_compose.checkpoint import (
    LoadPlanner,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    load_hf,
    save,
    save_hf,
)
from fsdp_compose.checkpoint.folders import read_lists
from fsdp_compose.checkpoint.hf import plan_files
from fsdp_compose.core.comm import Transport
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.core.state_dicts import gathering
from tests.checkpoint.states import (
    FLATTENED,
    Net,
    adamw,
    assert_equal,
    build,
    set_state,
    shared_folder,
    snapshot,
    state_of,
    train,
    whole,
)
from tests.harness import ROOT, distributed, run_distributed, run_forked, same_on_every_rank
from tests.models import shard_layers

# ---- torch.distributed.checkpoint


@pytest.mark.parametrize("how", ["save", "async_save", "flattened", "ours"])
@distributed(world_size=2)
def test_torchs_save_and_load_take_these_dicts(how):
    folder = str(shared_folder() / "checkpoint")
    options = FLATTENED if how == "flattened" else None
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    train(model, optimizer, 2)
    state = state_of(model, optimizer, options)
    expected, saving = snapshot(model, optimizer), None
    if how == "async_save":
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    elif how == "ours":
        save(state, folder)
    else:
        dcp.save(state, checkpoint_id=folder)
    train(model, optimizer, 1, begin=2)  # goes on while it is written
    if saving is not None:
        saving.result()
    dist.barrier()
    loaded = state_of(other, fresh, options)
    if how == "ours":
        load(loaded, folder)
    else:
        dcp.load(loaded, checkpoint_id=folder)
    assert not fresh.state, "set by set_state_dict, not before"
    set_state(other, fresh, loaded)
    assert other.counter.steps == 2
    assert {name for name, param in other.named_parameters() if param not in fresh.state} == {
        "dead.weight",
        "dead.bias",
    }
    assert_equal(snapshot(other, fresh), expected)
    train(other, fresh, 1, begin=2)
    assert_equal(snapshot(other, fresh), snapshot(model, optimizer))


@distributed(world_size=2)
def test_the_strides_in_the_metadata_are_those_of_whole_tensors():
    """``TensorProperties.strides``, of torch 2.14 and later, as FSDP2 writes them."""
    written = []
    for system in (fully_shard, torch_fsdp.fully_shard):
        folder = str(shared_folder() / "checkpoint")
        model = system(nn.Linear(7, 5), mesh=init_device_mesh("cpu", (2,)))
        dcp.save(model.state_dict(), checkpoint_id=folder)
        dist.barrier()
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        written.append({key: getattr(entry.properties, "strides", None) for key, entry in entries.items()})
    assert written[0] == written[1]


@pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="torch < 2.14 has no CheckpointableTensor to compare with"
)
@pytest.mark.parametrize("load_with", ["load", "dcp.load"])
@pytest.mark.parametrize("save_with", ["save", "dcp.save"])
@pytest.mark.parametrize("on_meta", [False, True])
@distributed(world_size=2)
def test_plain_tensors_that_say_which_part_they_are(save_with, load_with, on_meta):
    """``torch.distributed.checkpoint.CheckpointableTensor``: shards beside what every rank has whole."""
    folder, rank = shared_folder() / "checkpoint", dist.get_rank()
    values = torch.arange(40.0).view(10, 4)

    def part(of, device="cpu"):
        """Rows 0 to 3, or 3 to 10, of which the last four come first; a row in front belongs to nothing."""
        starts = ((0,), (6, 3))[rank]
        sizes = ((3,), (4, 3))[rank]
        rows = [of[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        local = torch.cat([torch.full((1, 4), -1.0), *rows]).to(device)
        local.global_shape = (10, 4)
        local.global_offsets = tuple((start, 0) for start in starts)
        local.local_offsets = ((1, 0), (5, 0))[: len(starts)]
        local.local_sizes = tuple((size, 4) for size in sizes)
        return local

    state = {"model": {"part": part(values), "whole": values}, "step": 3}
    save(state, folder) if save_with == "save" else dcp.save(state, checkpoint_id=str(folder))
    dist.barrier()
    device = "meta" if on_meta else "cpu"
    empty = {"model": {"part": part(torch.zeros_like(values), device), "whole": torch.zeros_like(values)}, "step": 0}
    load(empty, folder) if load_with == "load" else dcp.load(empty, checkpoint_id=str(folder))
    assert torch.equal(empty["model"]["part"][1:], part(values)[1:]) and empty["step"] == 3
    assert torch.equal(empty["model"]["whole"], values)
    assert empty["model"]["part"].global_offsets == part(values).global_offsets
    whole_again = {"model": {"part": torch.zeros_like(values)}}
    load(whole_again, folder)
    assert torch.equal(whole_again["model"]["part"], values)


@distributed(world_size=2)
def test_a_saved_fresh_optimizer_is_fresh_again():
    folder = str(shared_folder() / "checkpoint")
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer, stepped = adamw(model.parameters()), adamw(other.parameters())
    train(other, stepped, 1)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    dist.barrier()
    state = state_of(other, stepped)
    dcp.load(state, checkpoint_id=folder)
    set_state(other, stepped, state)
    assert not stepped.state
    assert_equal(snapshot(other, stepped), snapshot(model, optimizer))


@distributed(world_size=2)
def test_other_parameter_groups_load_from_disk_with_everything_in_them():
    folder = shared_folder() / "checkpoint"
    model, other = shard_layers(build(0)), shard_layers(build(1))
    optimizer = adamw(model.parameters())
    optimizer.param_groups[0].update(initial_lr=0.5, tag={"name": "mine"}, lr=torch.tensor(0.25))
    train(model, optimizer, 1)
    save(state_of(model, optimizer), folder)
    params = [*other.parameters()]
    regrouped = adamw([{"params": params[5:]}, {"params": params[:5]}])
    state = state_of(other, regrouped)
    load(state, folder)
    set_state(other, regrouped, state)
    for group in regrouped.param_groups:
        assert (group["initial_lr"], group["tag"], group["lr"]) == (0.5, {"name": "mine"}, torch.tensor(0.25))
    assert_equal(snapshot(other, regrouped)[1]["state"], snapshot(model, optimizer)[1]["state"])
    with pytest.raises(RuntimeError, match="exists: save each checkpoint to its own folder") as caught:
        save(state, folder)
    same_on_every_rank(str(caught.value))


def trained_by_all(seed: int, steps: int, flat: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(seed)
    del model.dead
    optimizer = adamw(flat_parameters(shard_layers(model)) if flat else model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def save_at_this_size(folder: str) -> None:
    size = dist.get_world_size()
    model, optimizer = trained_by_all(0, 2, flat=size % 2 == 0)
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{size}")
    expected = snapshot(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/{size}.pt")


def load_from_other_sizes(folder: str) -> None:
    size = dist.get_world_size()
    for saved in {1, 2, 3, 4, 5} - {size}:
        flat = (saved + size) % 4 < 2
        model, optimizer = trained_by_all(1, saved % 2, flat)  # fresh ones, and ones that have stepped
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{saved}")
        set_state(model, optimizer, state)
        expected = torch.load(f"{folder}/{saved}.pt", weights_only=False)
        found = snapshot(model, optimizer)
        for state in (found, expected):  # flat views have another order
            state[1]["param_groups"][0]["params"].sort()
        assert_equal(found, expected)


@pytest.mark.timeout(300)
def test_checkpoints_load_at_any_other_number_of_ranks(tmp_path):
    for body in (save_at_this_size, load_from_other_sizes):
        for size in range(1, 6):
            run_distributed(body, size, {"folder": str(tmp_path)})


@distributed(world_size=4)
def test_two_dimensional_layouts_load_in_any_other():
    folder = shared_folder()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shape, values = (5, 7), torch.arange(35.0).view(5, 7)
    layouts: dict[str, Any] = {
        "hsdp": [Replicate(), RaggedShard((20, 15), flat=True)],
        "hsdp, rows": [Replicate(), RaggedShard((5, 0))],
        "tensor parallel": [RaggedShard((13, 7), flat=True), Shard(0)],
        "columns": [RaggedShard((4, 1)), Shard(1)],
    }
    # Counts are of the elements that are local after the other placement, so they differ between the ranks.
    layouts["tensor parallel"][0] = RaggedShard((20, 1) if mesh.get_local_rank(1) == 0 else (10, 4), flat=True)
    for name, placements in layouts.items():
        dcp.save({"w": distribute_ragged(values, mesh, placements)}, checkpoint_id=str(folder / name))
    dist.barrier()
    for saved in layouts:
        whole_one = {"w": torch.zeros(shape)}
        dcp.load(whole_one, checkpoint_id=str(folder / saved))
        assert torch.equal(whole_one["w"], values), saved
        for name, placements in layouts.items():
            state = {"w": distribute_ragged(torch.zeros(shape), mesh, placements)}
            dcp.load(state, checkpoint_id=str(folder / saved))
            assert isinstance(state["w"], RaggedDTensor) and torch.equal(state["w"].full_tensor(), values), (
                saved,
                name,
            )


def torch_state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    model_state, optimizer_state = torch_state_dict.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def fsdp2(model: Net) -> nn.Module:
    """FSDP2 refuses 0-dim parameters."""
    torch_fsdp.fully_shard(model.second)
    return torch_fsdp.fully_shard(model)


def without_scalar(seed: int) -> Net:
    model = build(seed)
    model.scale = nn.Parameter(torch.tensor([1.5]))
    return model


OTHERS = {"FSDP2": fsdp2, "DDP": DistributedDataParallel, "unsharded": lambda model: model, "ours": shard_layers}


@pytest.mark.filterwarnings("ignore")
@distributed(world_size=2, timeout=120)
def test_checkpoints_of_other_systems_load_and_ours_load_there():
    def alive(seed: int) -> Net:
        model = without_scalar(seed)
        del model.dead
        return model

    folder, expected = shared_folder(), {}
    for name, wrap in OTHERS.items():
        model = wrap(alive(0))
        optimizer = adamw(model.parameters())
        train(model, optimizer, 2)
        state = state_of(model, optimizer) if name == "ours" else torch_state_of(model, optimizer)
        dcp.save(state, checkpoint_id=str(folder / name))
        expected[name] = snapshot(model, optimizer)
    dist.barrier()
    for name, wrap in OTHERS.items():
        if name != "ours":
            for seed, steps in ((1, 0), (1, 1)):
                model = shard_layers(alive(seed))
                optimizer = adamw(model.parameters())
                train(model, optimizer, steps)
                state = state_of(model, optimizer)
                dcp.load(state, checkpoint_id=str(folder / name))
                set_state(model, optimizer, state)
                assert_equal(snapshot(model, optimizer), expected[name], name)
        model = wrap(alive(1))
        optimizer = adamw(model.parameters())
        state = torch_state_of(model, optimizer)
        dcp.load(state, checkpoint_id=str(folder / "ours"))
        torch_state_dict.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert_equal(snapshot(model, optimizer), expected["ours"], name)


@pytest.mark.filterwarnings("ignore")
@distributed(world_size=2)
def test_torchs_own_functions_on_our_modules_make_the_same_dicts():
    model = shard_layers(without_scalar(0))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    for full in (False, True):
        theirs = torch_state_dict.get_state_dict(
            model, optimizer, options=torch_state_dict.StateDictOptions(full_state_dict=full)
        )
        ours = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full))
        assert_equal(whole(ours[0]), whole(theirs[0]))
        assert_equal(whole(ours[1]), whole(theirs[1]))
    with pytest.raises(KeyError):  # as docs/checkpoints.md says
        torch_state_dict.get_optimizer_state_dict(model, adamw(flat_parameters(model)))


@pytest.mark.filterwarnings("ignore")
@distributed(world_size=2)
def test_a_checkpoint_of_fsdp2_without_the_state_of_an_unused_expert_loads():
    folder = shared_folder() / "checkpoint"
    source, model = fsdp2(without_scalar(0)), shard_layers(without_scalar(1))
    optimizer, loaded = adamw(source.parameters()), adamw(model.parameters())
    train(source, optimizer, 1)
    state = torch_state_of(source, optimizer)
    assert "dead.weight" not in state["optimizer"]["state"]
    dcp.save(state, checkpoint_id=str(folder))
    dist.barrier()
    state = state_of(model, loaded)
    dcp.load(state, checkpoint_id=str(folder), planner=LoadPlanner())
    set_state(model, loaded, state)
    assert_equal(snapshot(model, loaded), snapshot(source, optimizer))


# ---- damage


@distributed(world_size=2)
def test_damaged_and_incomplete_checkpoints_are_refused_on_every_rank():
    folder = shared_folder()
    model = shard_layers(build(0))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    save(state_of(model, optimizer), folder / "good")
    dcp.save(state_of(model, optimizer), checkpoint_id=str(folder / "torch's"))
    dist.barrier()
    before = snapshot(model, optimizer)

    def damaged(name: str, source: str, action: Any) -> Path:
        path = folder / name
        if dist.get_rank() == 0:
            subprocess.run(["cp", "-r", str(folder / source), str(path)], check=True)
            action(path)
        dist.barrier()
        return path

    def truncate(path: Path) -> None:
        os.truncate(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size // 2)

    def flip(path: Path) -> None:
        data = bytearray((path / "__0_0.distcp").read_bytes())
        data[len(data) // 2] ^= 1
        (path / "__0_0.distcp").write_bytes(data)

    cases = [
        (damaged("truncated", "good", truncate), r"__1_0\.distcp has \d+ bytes, but \d+ were written"),
        (damaged("flipped", "good", flip), r"__0_0\.distcp is not as it was written"),
        (damaged("lost", "good", lambda path: (path / "__1_0.distcp").unlink()), r"__1_0\.distcp is missing"),
        (damaged("headless", "good", lambda path: (path / ".metadata").unlink()), r"not a complete checkpoint"),
        (damaged("truncated too", "torch's", truncate), r"__1_0\.distcp has \d+ bytes, but \d+ were written"),
        (damaged("x.partial", "good", lambda _: None).with_name("x"), r"an interrupted save"),
        (folder / "nowhere", r"there is no checkpoint at .*nowhere"),
    ]
    for path, message in cases:
        with pytest.raises(RuntimeError, match=message) as caught:
            load(state_of(model, optimizer), path)
        same_on_every_rank(str(caught.value).replace("on rank 1: ", ""))
        assert_equal(snapshot(model, optimizer), before)
    for name in ("good", "torch's"):
        load(state_of(model, optimizer), folder / name)


class Bomb:
    def __reduce__(self):  # called when the checkpoint is written, by the rank that writes it
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return (str, ("",))


def die_in_the_second_save(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = shard_layers(build(0))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    save(state_of(model, optimizer), folder / "step-1")
    train(model, optimizer, 1)
    save({**state_of(model, optimizer), **{f"bomb{i}": Bomb() for i in range(8)}}, folder / "step-2")


@pytest.mark.timeout(120)
def test_a_rank_killed_while_it_saves_leaves_the_earlier_checkpoint(tmp_path):
    (noticed, said), (killed, _) = run_forked(2, tmp_path, die_in_the_second_save, tmp_path, timeout=100)
    assert killed == -signal.SIGKILL and noticed is not None and noticed > 0, f"the other one has noticed: {said}"
    assert not (tmp_path / "step-2").exists()
    with pytest.raises(RuntimeError, match="there is no checkpoint"):
        read_lists(tmp_path / "step-2")
    reference, model = build(0), build(1)
    expected, optimizer = adamw(reference.parameters()), adamw(model.parameters())
    train(reference, expected, 1)
    state = state_of(model, optimizer)  # in this process alone, without torch.distributed
    load(state, tmp_path / "step-1")
    set_state(model, optimizer, state)
    for name in ("norm.weight", "norm.running_mean", "head.weight"):  # not what a batch norm takes the mean from
        torch.testing.assert_close(model.state_dict()[name], reference.state_dict()[name])
    assert len(optimizer.state) == len(expected.state) and optimizer.state[model.scale]["step"] == 1


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@distributed(world_size=2, timeout=120)
def test_many_saves_keep_no_memory_and_a_model_is_freed_without_the_garbage_collector():
    folder = shared_folder()
    model = shard_layers(build(0))
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    alive = []
    for i in range(50):
        state = state_of(model, optimizer)
        if i % 5 == 0:
            save(state, folder / str(i))
        else:
            dcp.save(state, checkpoint_id=str(folder / "same"))
        get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        del state
        if i in (9, 49):
            alive.append(tensors_alive())
    assert alive[1] <= alive[0], alive  # what tests before this one left may die meanwhile
    freed = weakref.ref(model), weakref.ref(_get_fsdp_handles(model)[0])
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert [ref() for ref in freed] == [None, None]
    finally:
        gc.enable()


@distributed(world_size=2)
def test_full_state_dicts_hold_one_flat_parameter_besides_the_result():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from memory import AllocatedBytes

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    layer_bytes = 256 * 256 * 4
    optimizer = adamw(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with AllocatedBytes() as allocated, allocated.section("sharded"):
        get_state_dict(model, optimizer)
    assert allocated.peak["sharded"] < 2**16 < layer_bytes
    for cpu_offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        with AllocatedBytes() as allocated, allocated.section("full"):
            states = get_state_dict(model, optimizer, options=options)
        is_given = not cpu_offload or dist.get_rank() == 0
        assert (len(states[0]), len(states[1].get("state", ()))) == ((6, 6) if is_given else (0, 0))
        # Messages arrive in the result. Other backends' collectives need memory for one flat parameter.
        assert allocated.peak["full"] < (24 * layer_bytes if is_given else 0) + 2**16
    check_that_flat_parameters_are_gathered_one_by_one(model, optimizer)


def check_that_flat_parameters_are_gathered_one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gathered: list[StorageWeakRef] = []
    original = gathering.gather_flat

    def gather_flat(*arguments: Any) -> torch.Tensor | None:
        deadline = time.monotonic() + 10
        while not all(ref.expired() for ref in gathered):  # gloo's threads let go of what they have moved a bit later
            assert time.monotonic() < deadline, "a flat parameter is still there when the next one is gathered"
            time.sleep(0.001)
        flat = original(*arguments)
        gathered[:] = [] if flat is None else [StorageWeakRef(flat.untyped_storage())]
        counts[-1] += 1
        return flat

    counts: list[int] = []
    for handle in _get_fsdp_handles(model):
        handle.change_transports(lambda item, _: Transport(item.group))  # as on other backends than gloo
    with pytest.MonkeyPatch.context() as counting:
        counting.setattr(gathering, "gather_flat", gather_flat)
        for cpu_offload in (False, True):
            counts.append(0)
            options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
            get_state_dict(model, optimizer, options=options)
    assert counts == [24, 24], "one collective for each of 6 flat parameters and each of their 3 moments"


# ---- safetensors


class Typed(nn.Module):
    """Several dtypes, a tie across groups, an int buffer, uneven shards, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.low = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("steps", torch.tensor([1, 2, 3]))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)) * self.scale


def typed(seed: int) -> Typed:
    torch.manual_seed(seed)
    model = Typed()
    model.steps += seed
    return model


def shard_typed(model: Typed) -> Typed:
    for part in (model.embed, model.block, model.low):
        fully_shard(part)
    return fully_shard(model)


@distributed(world_size=(1, 3))
def test_safetensors_hold_ties_once_and_keep_dtypes():
    folder = shared_folder()
    model, expected = shard_typed(typed(0)), typed(0).state_dict()
    for name, max_bytes in (("one", 10**9), ("several", 100)):
        save_hf(model, folder / name, max_file_bytes=max_bytes)
        from safetensors.torch import load_file

        files = sorted((folder / name).glob("*.safetensors"))
        stored = {key: value for file in files for key, value in load_file(file).items()}
        assert_equal(stored, {key: expected[key] for key in expected if key != "head.weight"})
        for fresh in (shard_typed(typed(1)), typed(1)):
            result = load_hf(fresh, folder / name)
            assert result.missing_keys == [] and fresh.head.weight is fresh.embed.weight
            assert_equal(whole(get_model_state_dict(fresh)), expected)
        with torch.device("meta"):
            meta = shard_typed(Typed())
        load_hf(meta, folder / name)
        assert_equal(whole(get_model_state_dict(meta)), expected)
    index = json.loads((folder / "several" / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in stored.values())


@distributed(world_size=2)
def test_damaged_or_unfit_safetensors_are_refused_on_every_rank():
    folder = shared_folder()
    model = shard_typed(typed(0))
    save_hf(model, folder / "good", max_file_bytes=100)
    if dist.get_rank() == 0:
        for name in ("truncated", "lost"):
            subprocess.run(["cp", "-r", str(folder / "good"), str(folder / name)], check=True)
        file = min((folder / "truncated").glob("*.safetensors"))
        os.truncate(file, file.stat().st_size - 1)
        min((folder / "lost").glob("*.safetensors")).unlink()
    dist.barrier()
    other = shard_typed(typed(1))
    before = snapshot(other)
    for name, message in (
        ("truncated", "is damaged, or was not completely written"),
        ("lost", "there is no"),
        ("no", "there is no"),
    ):
        with pytest.raises(RuntimeError, match=message) as caught:
            load_hf(other, folder / name)
        same_on_every_rank(str(caught.value))
    wrong = Typed()
    wrong.block, wrong.more = nn.Linear(4, 6), nn.Linear(2, 2)
    shard_typed(wrong)
    with pytest.raises(
        RuntimeError, match=r"missing: more\.weight of shape \(2, 2\)[^$]*block\.weight: expected shape \(6, 4\)"
    ):
        load_hf(wrong, folder / "good")
    assert_equal(snapshot(other), before)
    with pytest.raises(RuntimeError, match="exists"):
        save_hf(model, folder / "good")
    with pytest.raises(RuntimeError, match=r"counter\._extra_state is a dict, but safetensors files hold only tensors"):
        save_hf(shard_layers(build()), folder / "extra")


@distributed(world_size=2)
def test_safetensors_are_written_in_bounded_memory():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from memory import AllocatedBytes

    folder = shared_folder()
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(12)])
    for layer in model:
        fully_shard(layer)
    layer_bytes = 256 * 256 * 4
    save_hf(model, folder / "first", max_file_bytes=layer_bytes)
    with AllocatedBytes() as allocated:
        with allocated.section("save"):
            save_hf(model, folder / "second", max_file_bytes=layer_bytes)
        with allocated.section("load"):
            load_hf(model, folder / "second")
    # On the first rank one file, one flat parameter, its copy, and gloo's, whose thread frees it when it comes to that;
    # on the others nothing beyond their shards.
    assert allocated.peak["save"] < (9 * layer_bytes if dist.get_rank() == 0 else 0) + 2**16
    # What each rank holds, and one whole tensor, whose memory safetensors keeps for a part of it.
    assert allocated.peak["load"] < 12 * layer_bytes // 2 + layer_bytes + 2**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@distributed(world_size=2)
def test_saving_shards_makes_no_copies_of_them(dtype):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from memory import AllocatedBytes

    folder = shared_folder()
    make = lambda: fully_shard(nn.Sequential(*[nn.Linear(256, 256, dtype=dtype) for _ in range(12)]))  # noqa: E731
    model, other = make(), make()
    save({"model": get_model_state_dict(model)}, folder / "first")
    with AllocatedBytes() as allocated, allocated.section("save"):
        save({"model": get_model_state_dict(model)}, folder / "second")
    assert allocated.peak["save"] < 256 * 256 * dtype.itemsize, "of one weight"
    state = {"model": get_model_state_dict(other)}
    load(state, folder / "second")
    assert_equal(snapshot(other), snapshot(model))


def test_files_are_filled_in_order():
    files = plan_files({"a": 3, "b": 3, "c": 9, "d": 1}, max_file_bytes=6)
    assert [*files.values()] == [["a", "b"], ["c"], ["d"]]
    assert [*files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [*plan_files({"a": 1}, max_file_bytes=6)] == ["model.safetensors"]
    assert [*plan_files({}, max_file_bytes=6).values()] == [[]]


def test_getting_optimizer_state_of_a_plain_model_needs_no_process_group():
    model, other = build(0), build(1)
    optimizer, loaded = adamw(model.parameters()), adamw(other.parameters())
    train(model, optimizer, 1)
    state = copy.deepcopy(state_of(model, optimizer))
    set_state(other, loaded, state)
    assert_equal(snapshot(other, loaded), snapshot(model, optimizer))
    assert get_optimizer_state_dict(model, optimizer)["state"].keys() == {n for n, _ in model.named_parameters()}


@distributed(world_size=2)
def test_a_save_that_cannot_be_completed_raises_on_every_rank():
    model = shard_layers(build())
    state = {"model": get_model_state_dict(model)}
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        before = os.getcwd()
        os.chdir(own)  # each rank sees a folder of its own
        try:
            with pytest.raises(RuntimeError, match="all ranks must share one file system") as caught:
                save(state, "checkpoint")
        finally:
            os.chdir(before)
        same_on_every_rank(str(caught.value))
        assert not Path(own, "checkpoint").exists()
        file = Path(folders[0], "file")
        if dist.get_rank() == 0:
            file.touch()
        plain = fully_shard(nn.Linear(2, 2))
        for call in (lambda: save(state, file / "checkpoint"), lambda: save_hf(plain, file / "weights")):
            with pytest.raises(RuntimeError, match="NotADirectoryError|FileExistsError") as caught:
                call()
            same_on_every_rank(str(caught.value))
        complex_model = nn.Linear(2, 2, dtype=torch.complex128)
        fully_shard(complex_model)
        with pytest.raises(RuntimeError, match="weight is torch.complex128, which safetensors does not support"):
            save_hf(complex_model, Path(folders[0], "weights"))
        dist.barrier()
