"""The harness that the other tests rely on: reuse, attribution, bounded hangs, recovery, and nothing left running."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import harness
from tests.harness import distributed, fake_process_group, rank_processes, run_distributed, start_forked


def _pids(world_size: int) -> list[int]:
    return [worker.process.pid for worker in harness._pools[world_size].ranks]


def _failure(body, world_size: int = 2, **options) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_distributed(body, world_size, **options)
    return str(caught.value)


def _section(failure: str, rank: int) -> str:
    """The part of a failure's text about one rank, its output included."""
    return failure.split(f" rank {rank} ===")[1].split(" ===")[0]


# ---- bodies that run on the ranks ------------------------------------------------------------------------------------


def _sums_ranks() -> None:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    assert total == world_size * (world_size - 1) // 2


def _fails_on_rank_1() -> None:
    print(f"hello from rank {dist.get_rank()}")
    shape = (dist.get_rank(), 3)
    assert shape == (0, 3)
    dist.barrier()  # where rank 0 now waits forever


def _skips() -> None:
    pytest.skip("not like this")


def _hangs_on_rank_0() -> None:
    if dist.get_rank() == 0:
        _hang_here()


def _hang_here() -> None:
    time.sleep(1000)


def _leaves_a_collective_unpaired() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


_groups_made: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _makes_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    weight = distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Replicate()])
    assert (weight + weight).full_tensor().tolist() == [0, 2, 4, 6]  # DTensor remembers the mesh: of the sum, of
    assert (weight.redistribute(placements=[Replicate()] * 2) @ weight).full_tensor() == 14  # what moves, and its cost
    _groups_made.update({*mesh.get_all_groups()} - {dist.group.WORLD})
    in_a_cycle: list[object] = [dist.new_group()]
    _groups_made.add(in_a_cycle[0])
    in_a_cycle.append(in_a_cycle)


def _has_no_groups_of_earlier_tests() -> None:
    assert {*distributed_c10d._world.pg_map} - {*harness.lasting_groups} == {dist.group.WORLD}
    assert not [*_groups_made]


def _makes_a_lasting_group() -> None:
    _groups_made.add(group := dist.new_group())
    harness.lasting_groups.add(group)


def _has_a_lasting_group() -> None:
    (group,) = _groups_made
    dist.barrier(group)
    dist.destroy_process_group(group)


def _leaves_threads(number: int) -> None:
    for _ in range(number):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def _dies_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


# ---- tests that run on the ranks -------------------------------------------------------------------------------------


@distributed(world_size=(1, 2, 3))
def test_body_runs_on_every_rank(world_size):
    assert dist.get_backend() == "gloo"
    assert dist.get_world_size() == world_size
    assert dist.get_rank() == harness._rank
    assert torch.get_num_threads() == 1
    _sums_ranks()


@distributed(world_size=2)
@pytest.mark.parametrize("flag", [True, False])
def test_parametrize_below(flag):
    assert isinstance(flag, bool) and dist.get_world_size() == 2


@pytest.mark.parametrize("size", [torch.Size([2, 3])])
@distributed(world_size=2)
def test_parametrize_above_and_fixtures(size, tmp_path):
    assert size.numel() == 6 and tmp_path.is_dir()


class TestMethods:
    @distributed(world_size=2)
    def test_method(self):
        assert isinstance(self, TestMethods) and dist.is_initialized()


@pytest.mark.parametrize("attempt", [1, 2])
@distributed(world_size=2)
def test_random_state_is_the_same_for_every_test(attempt):
    assert torch.initial_seed() == 0
    torch.manual_seed(attempt)


@distributed(world_size=2, pg_timeout=1)
def test_collectives_can_be_bounded():
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.barrier()


@distributed(world_size=2, fresh=True)
def test_process_group_may_be_destroyed_in_a_fresh_pool():
    dist.destroy_process_group()


# ---- tests of the harness from outside -------------------------------------------------------------------------------


def test_workers_are_reused():
    run_distributed(_sums_ranks, 2)
    before = _pids(2)
    run_distributed(_sums_ranks, 2)
    run_distributed(_sums_ranks, 2, fresh=True)
    assert _pids(2) == before


def test_failure_names_its_rank_and_the_pool_recovers():
    run_distributed(_sums_ranks, 2)
    before = _pids(2)
    failure = _failure(_fails_on_rank_1)
    assert "_fails_on_rank_1: failed on ranks [1] of 2" in failure
    assert "assert (1, 3) == (0, 3)" in _section(failure, 1)  # pytest's rewriting works in the workers
    assert "hello from rank 1" in _section(failure, 1)
    assert "still running" in _section(failure, 0) and "in barrier" in _section(failure, 0)
    assert "hello from rank 0" in _section(failure, 0)
    assert not any(_is_running(pid) for pid in before)
    run_distributed(_sums_ranks, 2)
    assert not set(_pids(2)) & set(before)


def test_skip_in_a_body_is_a_failure():
    failure = _failure(_skips)
    assert "failed on ranks [0, 1] of 2" in failure and "Skipped: not like this" in failure


def test_death_of_a_rank_is_a_failure():
    failure = _failure(_dies_on_rank_1, fresh=True)
    assert "failed on ranks [1] of 2" in failure and "exit code 7" in _section(failure, 1)


def test_hang_ends_within_its_timeout_with_every_stack():
    run_distributed(_sums_ranks, 2)
    failure = _failure(_hangs_on_rank_0, timeout=1)
    assert "_hangs_on_rank_0: ranks [0] of 2 did not finish within 1 s" in failure
    assert "still running" in _section(failure, 0) and "in _hang_here" in _section(failure, 0)
    assert "finished, waiting" in _section(failure, 1) and "in barrier" in _section(failure, 1)


def test_unpaired_collective_fails_its_own_test():
    failure = _failure(_leaves_a_collective_unpaired, timeout=1)
    assert "_leaves_a_collective_unpaired: every rank finished, but the barrier afterwards hangs" in failure


@pytest.mark.skipif(harness.TORCH < (2, 13), reason="torch 2.12 itself keeps process groups of meshes alive")
def test_process_groups_end_with_the_test_that_has_made_them():
    run_distributed(_makes_groups, 2)
    before = _pids(2)
    run_distributed(_has_no_groups_of_earlier_tests, 2)
    run_distributed(_makes_groups, 2)  # the mesh is equal, and another
    run_distributed(_makes_a_lasting_group, 2)
    run_distributed(_has_a_lasting_group, 2)
    assert _pids(2) == before


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads are counted in /proc, which this system lacks"
)
def test_a_pool_in_which_tests_have_left_many_threads_is_not_used_again():
    run_distributed(_sums_ranks, 2)
    before = _pids(2)
    run_distributed(_leaves_threads, 2, {"number": harness.MOST_THREADS_LEFT // 2})
    assert _pids(2) == before
    run_distributed(_leaves_threads, 2, {"number": harness.MOST_THREADS_LEFT})
    run_distributed(_sums_ranks, 2)
    assert not set(_pids(2)) & set(before)


def test_fake_process_group():
    with fake_process_group(rank=3, world_size=1024):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 1024)
        dist.barrier()
    assert not dist.is_initialized()


def _parent(folder: str, end: str) -> None:
    """A pytest process that ends in some way while its pool is idle."""
    tempfile.tempdir = folder  # a killed parent leaves its files behind
    with contextlib.suppress(KeyboardInterrupt):
        try:
            run_distributed(_sums_ranks, 1)
            print(*_pids(1), flush=True)
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif end == "interrupted":
                raise KeyboardInterrupt
        finally:
            atexit._run_exitfuncs()  # which forked processes leave out


def test_no_worker_outlives_its_parent(tmp_path):
    ends = "normal", "interrupted", "killed"
    parents = [start_forked(tmp_path / end, _parent, str(tmp_path), end) for end in ends]
    try:
        for end, parent in zip(ends, parents, strict=True):
            parent.join(100)
            assert parent.exitcode == (-signal.SIGKILL if end == "killed" else 0), (tmp_path / end).read_text()
            pid = int((tmp_path / end).read_text().split()[-1])
            deadline = time.monotonic() + 60
            while _is_running(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not _is_running(pid), end
    finally:
        for parent in parents:
            rank_processes.end(parent)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie whose parent is gone and that init has not reaped yet does not run
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
