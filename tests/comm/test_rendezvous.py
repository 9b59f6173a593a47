"""A rendezvous costs each rank a few short operations, leaves nothing behind, and asks one rank alone for details."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import fully_shard
from fsdp_compose._torch import default_store
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict
from fsdp_compose.core.comm import store as rendezvous
from fsdp_compose.core.comm.store import TIMEOUT_ENV, meet, own_store
from tests.harness import distributed, environment, run_forked, same_on_every_rank

MOST_OPERATIONS, MOST_BYTES = 5, 300  # besides looking whether a key is there
METHODS = ("set", "get", "wait", "check", "add", "delete_key", "multi_get", "multi_set", "compare_set")


class StoreLog:
    """While entered, notes what this process asks of stores: the methods, and keys with the lengths of their values."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.written: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def noting(self) -> Iterator[StoreLog]:
        originals = {name: vars(dist.Store)[name] for name in METHODS}
        try:
            for name in METHODS:
                setattr(dist.Store, name, self._noted(name, getattr(dist.Store, name)))
            yield self
        finally:
            for name, original in originals.items():
                setattr(dist.Store, name, original)

    def _noted(self, name: str, method: Any) -> Any:
        def noted(store: dist.Store, *args: Any) -> Any:
            self.operations.append(name)
            if name == "set":
                self.written.append((args[0], len(args[1])))
            return method(store, *args)

        return noted


def prefix_length(purpose: str) -> int:
    """What the names of a purpose's keys begin with; the first rank finds one of them in the store."""
    probe = dist.PrefixStore(f"rendezvous/{purpose}", own_store(dist.group.WORLD, "test"))
    probe.set(f"probe{dist.get_rank()}", "")
    length = len(next(key for key in default_store().list_keys() if key.endswith(f"probe{dist.get_rank()}"))) - 6
    probe.delete_key(f"probe{dist.get_rank()}")
    return length


def keys_in_store() -> list[str]:
    dist.barrier()
    name = f"fsdp_compose/{dist.group.WORLD.group_name}/"  # those of other process groups, of other tests, are theirs
    keys = [key for key in default_store().list_keys() if key.startswith(name) and "rendezvous/" in key]
    dist.barrier()
    return keys


def refuse(rank: int, ours: str, theirs: str) -> str:
    return f"rank 0 has {ours}, rank {rank} has {theirs}"


@distributed(world_size=3)
def test_each_rank_takes_five_operations_and_300_bytes_and_no_keys_stay():
    details, length = "x" * 100_000, prefix_length("comparing models")
    meet(dist.group.WORLD, "warm up", "", lambda _: "")
    for turn in range(20):
        purpose = f"comparing {('models', 'graphs')[turn % 2]}"
        with StoreLog().noting() as log:
            verdict = meet(dist.group.WORLD, purpose, details, lambda _: "fine", details, refuse, where=" (here)")
        assert verdict == "fine"
        if dist.get_rank():
            assert len([name for name in log.operations if name != "check"]) <= MOST_OPERATIONS, log.operations
            assert log.operations.count("check") <= 100, log.operations  # at most four a second
            assert sum(length + len(key) + size for key, size in log.written) <= MOST_BYTES, log.written
        assert len(keys := keys_in_store()) <= 4, keys


@distributed(world_size=4, timeout=90)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_first_forward_writes_the_same_few_bytes_for_many_parameters(num_replicas):
    written = []
    for num_layers in (2, 40):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
        mesh = init_device_mesh("cpu", (num_replicas, 4 // num_replicas), mesh_dim_names=("replicate", "shard"))
        for layer in model:
            fully_shard(layer, mesh=mesh if num_replicas > 1 else mesh["shard"])
        fully_shard(model, mesh=mesh if num_replicas > 1 else mesh["shard"])
        with StoreLog().noting() as log:
            model(torch.ones(2, 4))
        assert not [key for key, _ in log.written if key.startswith("details")]
        payloads = [size for key, size in log.written if key.startswith("payload")]
        assert len(payloads) == num_replicas + 1 or not dist.get_rank()
        written.append(sum(payloads))
    assert written[0] == written[1] <= MOST_BYTES, written


@distributed(world_size=3)
def test_one_differing_rank_is_asked_for_its_details_and_all_raise_one_error():
    rank = dist.get_rank()
    for _ in range(2):
        with StoreLog().noting() as log, pytest.raises(RuntimeError, match="rank 0 has .*, rank 1 has ") as error:
            meet(dist.group.WORLD, "comparing", f"payload of {rank}", lambda _: "", f"details of {rank}", refuse)
        assert same_on_every_rank(str(error.value)) == "rank 0 has details of 0, rank 1 has details of 1"
        assert [key.split("/")[0] for key, _ in log.written].count("details") == (rank == 1)
    assert meet(dist.group.WORLD, "comparing", "same", lambda _: "agreed", "details", refuse) == "agreed"
    assert len(keys := keys_in_store()) <= 4, keys


@distributed(world_size=3)
def test_full_state_dicts_ask_for_as_little_whatever_they_gather():
    sizes = []
    for width in (1, 60):
        model = fully_shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(width))))
        with StoreLog().noting() as log:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        sizes.append(sum(size for _, size in log.written))
    assert abs(sizes[1] - sizes[0]) <= 4, sizes


@distributed(world_size=3, timeout=90)
def test_ranks_that_came_late_or_for_something_else_meet_again():
    group, rank = dist.group.WORLD, dist.get_rank()
    for turn in range(2):
        dist.barrier()
        with environment(**{TIMEOUT_ENV: "1"}):
            if rank == 1:  # it comes when the others have given up
                default_store().wait([f"{turn}, {other}" for other in (0, 2)], timedelta(seconds=50))
            else:
                absent = "1" if rank == 0 else "[01]"  # the first rank tells who, unless it is late itself
                with pytest.raises(RuntimeError, match=rf"first: rank\(s\) {absent} did not arrive at the rendezvous"):
                    meet(group, "first", "", lambda _: "")
                default_store().set(f"{turn}, {rank}", "")
        dist.barrier()
        assert meet(group, "second", str(rank), ",".join) == "0,1,2"  # all come, for another purpose
        assert meet(group, "second", str(rank), ",".join) == "0,1,2"
        assert meet(group, "first", str(rank), ",".join) == "0,1,2"
        assert len(keys := keys_in_store()) <= 4, keys


def differ_and_die(rank: int, port: int) -> None:
    rendezvous._GRACE, rendezvous._FIRST_LOOK = timedelta(seconds=1), 1.0
    os.environ[TIMEOUT_ENV] = "600"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=600))
    meet(dist.group.WORLD, "warm up", "", lambda _: "")
    original = vars(dist.Store)["set"]

    def set_or_die(store: dist.Store, key: str, value: str) -> None:
        if key.startswith("details/"):
            os.kill(os.getpid(), signal.SIGKILL)
        original.__get__(store)(key, value)

    if rank == 2:
        dist.Store.set = set_or_die  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        meet(dist.group.WORLD, "comparing", f"{rank == 2}", lambda _: "", "details", refuse)
    except RuntimeError as error:
        print(f"TOLD {time.monotonic() - begin:.1f} {error}".replace("\n", " "))
    sys.stdout.flush()
    os._exit(0)


def test_a_rank_that_dies_when_it_is_asked_is_named_in_bounded_time(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_forked(3, tmp_path, differ_and_die, store.port, timeout=60)
    assert ranks[2][0] == -signal.SIGKILL
    for code, said in ranks[:2]:
        told = next((line for line in said.splitlines() if line.startswith("TOLD")), said)
        assert code == 0 and "comparing: rank(s) 2 have ended" in told, said
