"""``calibrate``: measure a machine.

Several processes measure at the same time, in lock step, since what they take from each other (memory bandwidth,
caches, links) is part of how fast a rank is. Each round measures everything once: a disturbance then hits a round of
many things, not all rounds of one. Of each thing counts the median over the rounds, and the mean of those over the
ranks. ``workload`` has what is measured. The last section makes a device and a network of the times.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist

from .._arguments import checked
from ..errors import MisuseError, MisuseRuntimeError
from ..extension import CollectiveKind
from ..inspect import Issue, Operation, StepEvent, plan, simulate
from ..testing import Ranks, RanksFailed
from .hardware import BUSY, Curve, Device, Hardware, Level, Network
from .schedule import schedule
from .workload import (
    BESIDE,
    GPU_WORKLOAD,
    NUM_GATHERS,
    NUM_PRODUCTS,
    NUM_TINY,
    STEP_ALONE,
    STEP_SHARDED,
    TINY,
    Sample,
    Workload,
    actions_of,
    tiny_model,
    tiny_optimizer,
    tiny_sharded_model,
)

WALL, CPU = "wall", "cpu"
Note: TypeAlias = Callable[[str], None]


@checked()
def calibrate(
    *,
    processes: int | None = None,
    threads: int = 1,
    rounds: int = 7,
    dtypes: Sequence[torch.dtype] | None = None,
    clock: str = WALL,
    most_busy: float = BUSY,
    node_bandwidth: float | None = None,
    workload: Workload | None = None,
    time_limit: float = 900.0,
    note: Note | None = None,
) -> Hardware:
    """Measure this machine: its GPUs if it has some, else its CPU. ``write_hardware`` writes the result to a file.

    Ranks: call it in a process without a process group. It spawns processes, so a script that calls it needs
    ``if __name__ == "__main__":``.

    Args:
        processes: how many measure at the same time. Default: one for each GPU; 2 on the CPU.
        threads: of each process, on the CPU.
        rounds: how often everything is measured.
        dtypes: of matrix products; the last one is that of attention. Default: fp32, and bf16 on GPUs.
        clock: ``"wall"``, or ``"cpu"`` to count CPU time, for a CPU that is never idle.
        most_busy: the wall time by CPU time that is accepted on a CPU with a core for each thread, unless CPU time
            counts; ``math.inf``: any.
        node_bandwidth: bytes a second between two nodes like this one, which one machine can't measure. ``None``: there
            is only this one.
        workload: sizes of what is measured. Default: ``Workload()``, larger ones on GPUs.
        time_limit: give up after this many seconds.
        note: called with a line of text about the progress.

    Returns:
        The hardware.

    Raises:
        ValueError: an argument does not fit. It is a RuntimeError too if the machine is busy, or if there is a process
            group.
        RuntimeError: a rank fails or dies, or the time is over.
    """
    begun = time.monotonic()
    is_cuda, note = torch.cuda.is_available(), note or (lambda _: None)
    processes = (torch.cuda.device_count() if is_cuda else 2) if processes is None else processes
    dtypes = dtypes or ((torch.float32, torch.bfloat16) if is_cuda else (torch.float32,))
    _check(is_cuda, processes, threads, rounds, clock, node_bandwidth)
    cpu, make_optimizer = torch.device("cpu"), partial(tiny_optimizer, is_cuda)
    note("simulating steps of a tiny model")
    alone = simulate(partial(tiny_model, cpu), make_optimizer, 1, lambda _: None).events
    sharded = plan(partial(tiny_sharded_model, cpu), processes, optimizer_of=make_optimizer).worlds[0].events
    workload = workload or (GPU_WORKLOAD if is_cuda else Workload())
    note(f"starting {processes} process{'es' if processes > 1 else ''}")
    try:
        with Ranks(processes) as ranks:
            note("measuring")
            arguments, left = (threads, rounds, (*dtypes,), workload, is_cuda), begun + time_limit - time.monotonic()
            samples = ranks.run(_measure, *arguments, timeout=max(0.0, left), name="calibrate")[0]
    except RanksFailed as error:
        raise RuntimeError(str(error)) from None
    busy = 0.0 if is_cuda else busy_of(samples, threads)
    if busy > most_busy and clock == WALL and processes * threads <= _num_cores():  # CPU time is right on a busy one
        raise MisuseRuntimeError(
            f"the machine is busy: computing took {busy:.2f} times its CPU time, where {most_busy:g} is accepted. Try "
            "when it is idle, count CPU time (--cpu-time, clock='cpu'), or write it anyway (--busy-ok, "
            "most_busy=math.inf)"
        )
    network = fitted_network(samples, clock, is_cuda, processes, node_bandwidth)
    device = with_host(fitted_device(samples, clock, is_cuda), network, samples, clock, alone, sharded)
    machine = _name_of_machine(is_cuda)
    if is_cuda:
        capacity = torch.cuda.get_device_properties(0).total_memory
    else:
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    device = replace(device, name=machine, capacity=capacity)
    calibrated = {
        "on": machine, "torch": torch.__version__, "processes": processes, "threads": threads, "rounds": rounds,
        "clock": clock, "busy": round(busy, 3), "seconds": round(time.monotonic() - begun, 1),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    return Hardware(device, network, calibrated)


@checked()
def write_hardware(hardware: Hardware, path: str | os.PathLike[str]) -> None:
    """Write a file that ``read_hardware`` reads, completely or not at all."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(hardware.json(), encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _check(is_cuda: bool, processes: int, threads: int, rounds: int, clock: str, node_bandwidth: float | None) -> None:
    if min(processes, threads, rounds) < 1:
        raise MisuseError(f"{processes} processes, {threads} threads, {rounds} rounds: expected at least 1 of each")
    if is_cuda and processes > torch.cuda.device_count():
        raise MisuseError(f"{processes} processes: expected at most one for each of {torch.cuda.device_count()} GPUs")
    if clock not in (WALL, CPU):
        raise MisuseError(f"clock={clock!r}: expected {WALL!r} or {CPU!r}")
    if node_bandwidth is not None and not node_bandwidth > 0:
        raise MisuseError(f"a bandwidth between nodes of {node_bandwidth} bytes a second: expected a positive number")
    if clock == CPU and (is_cuda or threads > 1):
        raise MisuseError(
            "CPU time: expected a CPU and one thread for each process; elsewhere it does not say how long"
        )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _name_of_machine(is_cuda: bool) -> str:
    if is_cuda:
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.processor() or platform.machine())}, {_num_cores()} cores"


def _measure(threads: int, rounds: int, dtypes: Sequence[torch.dtype], work: Workload, is_cuda: bool) -> list[Sample]:
    """Ranks: all that measure."""
    if hasattr(os, "SCHED_OTHER"):  # as training runs; processes of ``testing`` do not
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    rank, group = dist.get_rank(), dist.group.WORLD
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    else:
        torch.set_num_threads(threads)
    assert group is not None, "ranks are in a process group"
    torch.manual_seed(0)
    actions = [*actions_of(work, dtypes, device, group)]
    wait: Callable[[], None] = torch.cuda.synchronize if is_cuda else (lambda: None)
    taken = torch.empty(0)
    for _ in range(2):  # the first one initializes things
        taken = torch.tensor([_time(action, wait)[0] for action in actions])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    for action, seconds in zip(actions, taken.tolist(), strict=True):
        action.repeats = min(max(1, math.ceil(work.seconds / seconds)), 500)
    gc.collect()
    gc.freeze()
    times: list[list[tuple[float, float]]] = [[] for _ in actions]
    order, shuffled = [*range(len(actions))], random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        shuffled.shuffle(order)
        for i in order:
            times[i].append(_time(actions[i], wait))
    medians = torch.tensor([[*map(median, zip(*each, strict=True))] for each in times])
    dist.all_reduce(medians)
    means = (medians / dist.get_world_size()).tolist()
    # What they run is not for other processes.
    return [replace(one, run=object, wall=wall, cpu=cpu) for one, (wall, cpu) in zip(actions, means, strict=True)]


def _time(action: Sample, wait: Callable[[], None]) -> tuple[float, float]:
    """The seconds of the clock and of the CPU that an action takes."""
    dist.barrier()
    action.run()  # warms caches
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(action.repeats):
        action.run()
    wait()
    return (time.perf_counter() - wall) / action.repeats, (time.process_time() - cpu) / action.repeats


# ---- From measured times to a device and a network


def busy_of(samples: Sequence[Sample], threads: int) -> float:
    """Wall time by CPU time of what computes. With several threads, of operations so small that one thread does them:
    the CPU time of the others says nothing."""
    ratios = []
    for item in samples:
        operation = item.operation
        if operation is not None and (threads == 1 or (operation.nbytes < 1 << 16 and not operation.flops)):
            ratios.append(item.wall / item.cpu)
    return median(ratios) if ratios else 1.0


def fitted_device(samples: Sequence[Sample], clock: str, is_cuda: bool) -> Device:
    """A device without a name, and without what ``with_host`` finds out."""
    seconds = {item.name: item.seconds(clock) for item in samples}
    # On a CPU the host computes: what any operation takes is ``host``, and other operations are what is left. A GPU
    # runs beside the host: nothing is taken away.
    tiny = seconds[TINY] / NUM_TINY
    overhead = 0.0 if is_cuda else tiny
    operations = [
        (item.operation, max(item.seconds(clock) - overhead, 1e-9)) for item in samples if item.operation is not None
    ]
    products = [item for item in operations if item[0].flops and not item[0].is_attention]
    rates, matmul_bytes = fitted_products(
        (f"{str(item.dtype).removeprefix('torch.')} {item.layout}".strip(), item.flops, item.nbytes, took)
        for item, took in products
    )
    forward, backward = (
        median(item.flops / took for item, took in operations if item.is_attention and item.is_backward == which)
        for which in (False, True)
    )
    curves = curves_of((item.name, item.nbytes, took) for item, took in operations if not item.flops)
    return Device(
        "",
        "calibrate",
        matmul=rates,
        attention=(forward, backward),
        memory=curves["add"].nbytes[-1] / curves["add"].seconds[-1],
        matmul_bytes=matmul_bytes,
        kernel=Device.kernel if is_cuda else 0.0,
        host=tiny,
        collective=0.0,
        overlaps=is_cuda,
        beside=fitted_beside(samples) if is_cuda else 1.0,
        curves=curves,
        collectives={} if is_cuda else _collectives(samples, clock),
    )


def fitted_beside(samples: Sequence[Sample]) -> float:
    """How many times as long products take while a collective runs: what they lack when it ends is done later."""
    both = [item.wall for item in samples if item.name == BESIDE]
    if not both:  # one process
        return Device.beside
    gathers = NUM_GATHERS * max(item.wall for item in samples if item.name == CollectiveKind.ALL_GATHER)
    products = [item for item in samples if item.operation is not None and item.operation.name == "mm"]
    longest = max(products, key=lambda item: (item.operation.flops, item.wall))  # type: ignore[union-attr]
    lost = (both[0] - NUM_PRODUCTS * longest.wall) / gathers
    return 1 / (1 - min(max(0.0, lost), 0.5))


def fitted_products(products: Iterable[tuple[str, float, float, float]]) -> tuple[dict[str, float], float]:
    """Fit ``seconds = flops / rate + nbytes / bandwidth``, with a rate for each key and one bandwidth, to relative
    errors. ``products``: key, floating-point operations, bytes and seconds of each. Returns the rates, and the
    bandwidth; 0: bytes explain nothing."""
    rows = [*products]
    keys = sorted({key for key, *_ in rows})

    def costs(has_bytes: bool) -> list[float]:
        matrix = torch.tensor(
            [
                [flops / seconds * (key == other) for other in keys] + [nbytes / seconds] * has_bytes
                for key, flops, nbytes, seconds in rows
            ],
            dtype=torch.float64,
        )
        scale = matrix.amax(0)  # of flops and of bytes are far apart
        return (torch.linalg.lstsq(matrix / scale, matrix.new_ones(len(rows), 1)).solution[:, 0] / scale).tolist()

    *of_flops, of_bytes = costs(True)
    if of_bytes <= 0 or min(of_flops) <= 0:
        of_flops, of_bytes = costs(False), 0.0
    rates = {key: 1 / cost for key, cost in zip(keys, of_flops, strict=True)}
    return rates, 1 / of_bytes if of_bytes else 0.0


def curves_of(points: Iterable[tuple[str, int, float]]) -> Mapping[str, Curve]:
    """The seconds of each name by bytes. More bytes take at least as long as fewer."""
    found: dict[str, dict[int, float]] = {}
    for name, nbytes, seconds in sorted(points):
        below = max(found.setdefault(name, {}).values(), default=0.0)
        found[name][nbytes] = max(seconds, below)
    return {name: Curve((*curve,), (*curve.values(),)) for name, curve in found.items()}


def _collectives(samples: Sequence[Sample], clock: str) -> Mapping[str, Curve]:
    kinds = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE
    return curves_of((item.name, item.nbytes, item.seconds(clock)) for item in samples if item.name in kinds)


def fitted_network(
    samples: Sequence[Sample], clock: str, is_cuda: bool, processes: int, node_bandwidth: float | None
) -> Network:
    """The network in a node of so many processes, and between such nodes if that bandwidth is known.

    A CPU's collectives have curves, which hold all of their time: nothing is left for the network."""
    start, bandwidth = 0.0, math.inf
    gathers = _collectives(samples, clock).get(CollectiveKind.ALL_GATHER)
    if is_cuda and gathers is not None and processes > 1 and gathers.seconds[-1] > gathers.seconds[0]:
        start, longest = gathers.seconds[0], gathers.seconds[-1]
        bandwidth = gathers.nbytes[-1] * (processes - 1) / processes / (longest - start)
    if node_bandwidth is None:
        return Network((Level(0, bandwidth, 0.0),), start)
    return Network((Level(processes, bandwidth, 0.0), Level(0, node_bandwidth / processes, 5e-6)), start)


def with_host(
    device: Device,
    network: Network,
    samples: Sequence[Sample],
    clock: str,
    alone: Sequence[StepEvent],
    sharded: Sequence[StepEvent],
) -> Device:
    """Give the host what the steps of the tiny models (``alone``, ``sharded``) take, beyond what the device takes."""
    seconds = {item.name: item.seconds(clock) for item in samples}

    def left(name: str, events: Sequence[StepEvent], device: Device) -> float:
        known = schedule(events, device, network)
        return seconds[name] - (known.host if device.overlaps else known.seconds)  # a GPU waits for the host

    operation = left(STEP_ALONE, alone, replace(device, host=0.0)) / _num(alone, Operation)
    device = replace(device, host=max(device.host, operation))
    if not _num(sharded, Issue):  # one process
        return replace(device, collective=Device.collective)
    collective = left(STEP_SHARDED, sharded, device) / _num(sharded, Issue)
    return replace(device, collective=max(0.0, collective))


def _num(events: Sequence[StepEvent], kind: type[StepEvent]) -> int:
    return sum(isinstance(event, kind) for event in events)
