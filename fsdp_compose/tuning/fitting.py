"""From measured times to a device and a network. Nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from ..extension import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ..inspect import Issue, Operation, StepEvent
from .hardware import Curve, Device, Level, Network
from .schedule import schedule
from .workload import BESIDE, NUM_GATHERS, NUM_PRODUCTS, NUM_TINY, STEP_ALONE, STEP_SHARDED, TINY, Sample

WALL, CPU = "wall", "cpu"


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
    gathers = NUM_GATHERS * max(item.wall for item in samples if item.name == ALL_GATHER)
    products = [item for item in samples if item.operation is not None and item.operation.name == "mm"]
    longest = max(products, key=lambda item: (item.operation.flops, item.wall))  # type: ignore[union-attr]
    lost = (both[0] - NUM_PRODUCTS * longest.wall) / gathers
    return 1 / (1 - min(max(0.0, lost), 0.5))


def fitted_products(products: Iterable[tuple[str, float, float, float]]) -> tuple[dict[str, float], float]:
    """Fit ``seconds = flops / rate + nbytes / bandwidth``, with a rate for each key and one bandwidth, to relative
    errors.

    Args:
        products: key, floating-point operations, bytes and seconds of each.

    Returns:
        The rates, and the bandwidth; 0: bytes explain nothing.
    """
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
    kinds = ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE
    return curves_of((item.name, item.nbytes, item.seconds(clock)) for item in samples if item.name in kinds)


def fitted_network(
    samples: Sequence[Sample], clock: str, is_cuda: bool, processes: int, node_bandwidth: float | None
) -> Network:
    """The network in a node of so many processes, and between such nodes if that bandwidth is known.

    A CPU's collectives have curves, which hold all of their time: nothing is left for the network."""
    start, bandwidth = 0.0, math.inf
    gathers = _collectives(samples, clock).get(ALL_GATHER)
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
    """Give the host what the steps of the tiny models take, beyond what the device takes for them.

    Args:
        alone, sharded: the events of the two steps.
    """
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
