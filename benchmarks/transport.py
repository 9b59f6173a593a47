"""All-gathers, reduce-scatters and all-reduces on real gloo processes: gloo's own, and ours: of direct messages, and of
memory that the ranks share.

Every rank of this machine is a process that the script starts. Both kinds run in turn, in another random order each
round; the time is that of the slowest rank, CPU time that of all threads of the first rank. Medians.

    python benchmarks/transport.py                      # 2 processes
    python benchmarks/transport.py --processes 4
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import report
import torch
import torch.distributed as dist
from processes import run_on_ranks
from report import column

from fsdp_compose.core.comm import Label, Transport
from fsdp_compose.plugins.gloo.messages import Messages

LABEL = Label(["flat"])
SIZES = (100_000, 2_000_000, 20_000_000)
QUICK = (100_000,)
GLOO, MESSAGES = "gloo's", "messages"


@dataclass(frozen=True)
class Row:
    """One collective of ``nbytes`` (of the whole tensor), in two ways."""

    collective: str = column("collective")
    nbytes: int = column("bytes", ",")
    gloo_ms: float = column("gloo's ms", ".2f")
    messages_ms: float = column("fsdp_compose ms", ".2f")
    ratio: float = column("ratio", ".2f")
    gloo_cpu_ms: float = column("CPU ms", ".2f")
    messages_cpu_ms: float = column("CPU ms", ".2f")


Action = Callable[[], None]


def _actions(nbytes: int) -> dict[tuple[str, str], Action]:
    world = dist.group.WORLD
    assert world is not None
    size, rank = world.size(), world.rank()
    shard = nbytes // 4 // size
    whole = torch.zeros(shard * size)
    own, result = whole[rank * shard : (rank + 1) * shard], torch.zeros(shard)
    actions: dict[tuple[str, str], Action] = {}
    for name, transport in ((GLOO, Transport(world)), (MESSAGES, Messages(world))):
        actions["all-gather", name] = lambda moved=transport: moved.all_gather(whole, own, LABEL).wait()
        actions["reduce-scatter", name] = lambda moved=transport: moved.reduce_scatter(
            result, whole, True, LABEL
        ).wait()
        actions["all-reduce", name] = lambda moved=transport: moved.all_reduce(whole, True, LABEL).wait()
    return actions


def _worker(sizes: Sequence[int], rounds: int, path: Path) -> None:
    rows = []
    shuffled = random.Random(0)  # the same order on every rank
    for nbytes in sizes:
        actions = _actions(nbytes)
        order = [*actions]
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in order}
        cpu: dict[tuple[str, str], list[float]] = {key: [] for key in order}
        for i in range(-2, rounds):
            shuffled.shuffle(order)
            for key in order:
                dist.barrier()
                begun, start = process_time(), perf_counter()
                actions[key]()
                elapsed, used = perf_counter() - start, process_time() - begun
                if i >= 0:
                    seconds[key].append(_slowest(elapsed))
                    cpu[key].append(used)
        for collective in dict.fromkeys(kind for kind, _ in actions):
            a, b = (collective, GLOO), (collective, MESSAGES)
            times = [median(seconds[key]) * 1e3 for key in (a, b)]
            cpus = [median(cpu[key]) * 1e3 for key in (a, b)]
            rows.append(Row(collective, nbytes, *times, times[1] / times[0], *cpus))
    if dist.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed runs of each (default: 60; --quick: 3)")
    options = parser.parse_args()
    sizes, rounds = QUICK if options.quick else SIZES, options.rounds or (3 if options.quick else 60)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _worker, sizes, rounds, path)
        rows = [Row(**row) for row in json.loads(path.read_text())]
    result = report.Report(f"transport_{options.processes}", {"processes": options.processes, "rounds": rounds}, rows)
    print(f"{options.processes} gloo processes, {rounds} rounds, medians.\n\n{result.table()}")
    result.write(options.out, report.bars("nbytes", "ratio", by="collective", unit="messages / gloo's", line=1.0))


if __name__ == "__main__":
    main()
