"""Runs test bodies on several ranks, in processes that live as long as the pytest run.

    from tests.harness import distributed

    @distributed(world_size=(1, 2, 4))
    def test_something():
        ...                                  # every rank runs this; torch.distributed (gloo) is initialised

The ranks are those of ``fsdp_compose.testing``: of one world size they form a pool, which is started once and reused,
until something goes wrong in it. A test travels as (file, module, qualified name, arguments); each rank looks it up in
the module and calls it. Tests that need one process only use ``fake_process_group``, and those that run a program of
their own ``start_forked``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import math
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fsdp_compose.testing import Ranks, RanksFailed, preload
from fsdp_compose.testing import ranks as rank_processes  # noqa: F401
from fsdp_compose.testing.ranks import GROUP_TIMEOUT, START_TIMEOUT, simulated_ranks
from fsdp_compose.testing.ranks import end as end
from fsdp_compose.testing.ranks import start as start_forked

ROOT = Path(__file__).resolve().parents[1]
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
MOST_THREADS_LEFT = 24  # by tests, in one rank: of eight process groups, of which four last (lasting_mesh)

Body = Callable[..., None]
_rank: int | None = None  # set in a worker, None in the pytest process
_environment: dict[str, str] = {}  # of a worker, when it begins

preload("tests.rewriting", first=True)


def _ensure_running(server: ForkServer, begin: Callable[[ForkServer], None] = ForkServer.ensure_running) -> None:
    """Lets what a server has forked, as ranks are, fork from that server: it has the address, but would begin another
    interpreter, which imports torch."""
    if server._forkserver_address is None or server._forkserver_pid is not None:  # type: ignore[attr-defined]
        begin(server)


ForkServer.ensure_running = _ensure_running  # type: ignore[method-assign]


def distributed(
    world_size: int | Sequence[int], *, timeout: float = 60, fresh: bool = False, pg_timeout: float | None = None
) -> Callable[[Body], Body]:
    """Runs the decorated test body on every rank of a gloo process group.

    Args:
        world_size: number of ranks; a sequence parametrizes the test over it. A body with an argument named
            ``world_size`` is given it.
        timeout: seconds until the test fails with the Python stacks of every rank.
        fresh: use a pool that is thrown away after the test, for a body that breaks the process group on purpose.
        pg_timeout: timeout of the process group's collectives in seconds, for tests of bounded waiting. Implies fresh.

    Arguments from ``pytest.mark.parametrize`` and fixtures reach the body if they can be pickled. The body must be
    found by its name in its module (a nested function is not). Skips belong in a mark: raised inside, they fail.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Body) -> Body:
        preload(body.__module__)
        signature = inspect.signature(body)
        wants_size = "world_size" in signature.parameters

        @functools.wraps(body)
        def test(*args: Any, **arguments: Any) -> None:
            if _rank is None:
                size = arguments["world_size"]
                run_distributed(body, size, arguments, timeout=timeout, fresh=fresh, pg_timeout=pg_timeout)
            else:
                body(*args, **{name: arg for name, arg in arguments.items() if name != "world_size" or wants_size})

        if not wants_size:
            extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(parameters=[*signature.parameters.values(), extra])
        test.__signature__ = signature  # type: ignore[attr-defined]
        test = pytest.mark.parametrize("world_size", sizes, ids=[f"{size}ranks" for size in sizes])(test)
        return pytest.mark.timeout(timeout + START_TIMEOUT + 30)(test)  # the net under our own timeout

    return decorate


def run_distributed(
    body: Body,
    world_size: int,
    arguments: dict[str, Any] | None = None,
    *,
    timeout: float = 60,
    fresh: bool = False,
    pg_timeout: float | None = None,
) -> None:
    """Runs ``body(**arguments)`` on ``world_size`` ranks; fails the calling test if any rank fails."""
    throw_away = fresh or pg_timeout is not None
    file = str(sys.modules[body.__module__].__file__)
    pool = None if throw_away else _pools.pop(world_size, None)
    try:
        pool = pool or Ranks(world_size, pg_timeout=pg_timeout or GROUP_TIMEOUT, before=_reset, after=end_groups)
        task = file, body.__module__, body.__qualname__, arguments or {}
        pool.run(_call, *task, timeout=timeout, name=body.__qualname__, barrier_after=not throw_away)
        if not throw_away and _is_fit(pool):
            _pools[world_size] = pool
    except RanksFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    finally:
        if pool is not None and _pools.get(world_size) is not pool:
            pool.kill()


def fake_process_group(rank: int = 0, world_size: int = 64) -> AbstractContextManager[None]:
    """Makes this process ``rank`` of a process group whose collectives return at once and move nothing."""
    return simulated_ranks(world_size, rank)


def run_forked(
    num_ranks: int, folder: Path, target: Callable[..., None], *arguments: Any, timeout: float = 60
) -> list[tuple[int | None, str]]:
    """Calls ``target(rank, *arguments)`` in processes of their own, for what ranks of a pool cannot do, such as to die.
    Returns the exit code of each, ``None`` if it had to be ended after ``timeout`` seconds, and what it has printed."""
    outputs = [folder / f"{target.__name__}.{rank}" for rank in range(num_ranks)]
    processes = [start_forked(output, target, rank, *arguments) for rank, output in enumerate(outputs)]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            end(process)
    return [*zip(codes, (output.read_text(errors="replace") for output in outputs), strict=True)]


def run_torchrun(folder: Path, *arguments: str, timeout: float = 60, **environment: str) -> tuple[int | None, str]:
    """Runs torchrun; returns its exit code and all that was said. With ``--run-path --start-method=fork`` its workers
    are forked as well: interpreters that begin are longer at importing torch than at all that tests do."""
    ((code, said),) = run_forked(1, folder, _torchrun, arguments, environment, timeout=timeout)
    return code, said


def _torchrun(_rank: int, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.distributed.run.main(arguments)


# ---- pools of ranks --------------------------------------------------------------------------------------------------

_pools: dict[int, Ranks] = {}
_num_threads: weakref.WeakKeyDictionary[Ranks, int] = weakref.WeakKeyDictionary()  # after its first test


def _is_fit(pool: Ranks) -> bool:
    """Whether the next test may use a pool: what this one has left behind does not slow down all that follow."""
    # Threads of process groups that functions left behind wake up a hundred times a second each.
    tasks = Path(f"/proc/{pool.ranks[0].process.pid}/task")
    num_threads = len(os.listdir(tasks)) if tasks.exists() else 0  # elsewhere the system does not say
    return num_threads <= _num_threads.setdefault(pool, num_threads) + MOST_THREADS_LEFT


@atexit.register
def shutdown_pools() -> None:
    """Ends every worker this process started. Called at the end of the pytest session, or of the process."""
    while _pools:
        _pools.popitem()[1].close()


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _call(file: str, module: str, qualname: str, arguments: dict[str, Any]) -> None:
    global _rank
    _rank = dist.get_rank()
    found: Any = importlib.import_module(module)
    if Path(found.__file__).resolve() != Path(file).resolve():
        raise ImportError(f"{module} is {found.__file__} in this worker, but the test lives in {file}")
    for name in qualname.split("."):  # Class.method, or a function
        found = getattr(found() if inspect.isclass(found) else found, name)
    found(**arguments)


lasting_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # that bodies share with those of later tests


@functools.cache
def lasting_mesh(names: tuple[str, ...], sizes: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    """A mesh of all ranks that later tests have too: making its process groups, and DTensor's first look at a mesh,
    take longer than many tests. Meshes of other names or sizes share the groups."""
    assert _rank is not None, "only on the ranks of a pool"
    groups = []
    for i, size in enumerate(sizes):
        same = 0 if size > 1 else sizes[:i].count(1)  # no two dimensions of one mesh share a group
        groups.append(_lasting_group(size, math.prod(sizes[i + 1 :]) if size > 1 else 1, same))
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)
    _lasting_meshes.append(mesh)
    return mesh


_lasting_meshes: list[DeviceMesh] = []


@functools.cache
def _lasting_group(size: int, stride: int, _same: int) -> dist.ProcessGroup | None:
    """The process group of this rank and ``size - 1`` others, ``stride`` ranks apart, for all tests of this pool."""
    if size == dist.get_world_size():  # as torch's meshes have it
        return dist.group.WORLD
    ranks = torch.arange(dist.get_world_size()).view(-1, size, stride).mT.reshape(-1, size)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    lasting_groups.add(group)
    return group


def end_groups() -> None:
    """Ends the process groups that a test has made: a thread of each would wake up a hundred times a second."""
    for flattened in [flat for mesh in _lasting_meshes for flat in mesh._flatten_mapping.values()]:
        lasting_groups.update(flattened.get_all_groups())
    made = [group for group in _world.pg_map if group is not dist.group.WORLD and group not in lasting_groups]
    if made:
        while made:
            dist.destroy_process_group(made.pop())
        _forget_meshes()
        gc.collect()  # models that have not been freed yet


def _forget_meshes() -> None:
    """Clears what DTensor remembers of meshes: they hold groups, and are given to the next mesh that is equal."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    for cached in (_gen_transform_infos, ShardingPropagator._propagate_tensor_meta_cached):
        cached.cache_clear()


def _reset() -> None:
    """Undoes what one test may have changed for the next."""
    if not _environment:
        _environment.update(os.environ)
    os.environ.clear()
    os.environ.update(_environment)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def breakable_mesh() -> DeviceMesh:
    """All ranks, through a process group of the test's own, whose collectives give up after 2 seconds: what breaks it
    does no harm to other tests."""
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")


def same_on_every_rank(text: str) -> str:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert texts == [text] * len(texts)
    return text


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def our_warnings() -> Iterator[list[str]]:
    """The texts of the warnings about fully_shard'ed models, every time they are given."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(item.message) for item in caught if "fully_shard" in str(item.message)]
