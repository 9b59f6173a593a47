"""A whole sharded model under ``torch.compile``: what sharding costs in the graph, beside graphs of single blocks.

Systems, each in a process of its own (forked before torch was used), so that Dynamo's caches know one model only:

- ``plain whole``: no sharding, one graph each way.
- ``FSDP2 blocks``: its usual way, blocks compiled one by one. ``FSDP2 whole``: ``torch.compile(model)``, which breaks
  the graph at its hooks.
- ``fsdp_compose blocks``; ``fsdp_compose whole``: ``torch.compile(model, fullgraph=True)``; ``fsdp_compose region``:
  ``fsdp_compose.compile(model)``, the root's group in the graph too. ``fsdp_compose eager``: not compiled.
- ``SimpleFSDP``: the idea of its paper (arXiv 2411.00284), built here: every parameter a DTensor sharded on dimension
  0, which is redistributed wherever forward reads it, in a region of activation checkpointing; nothing else.

Sections, each with a table of its own:

- ``host``: CPU time of forward and backward beyond ``plain whole``, per group, on the null process group (64 ranks
  simulated). In turn, in random order, an untimed step before each timed one; medians. Graphs call collectives by
  operators, which reach that process group through Python; ``collectives alone`` is what issuing and waiting for one
  group's costs then: two all-gathers and a reduce-scatter.
- ``compilation``: CPU time (children included) of a first forward and backward beyond a later one's, and wall time;
  everything compiled anew, caches off. ``nested``: every block a ``torch.compiler.nested_compile_region``: of its
  forward, the hooks outside of it, or of its call, hooks and all.
- ``memory``: the peak of a training step, as ``memory.py`` counts it, with torch's fake process group.
- ``throughput``: wall time of a training step on real gloo processes, as in ``throughput.py``; with Inductor, also
  with its own reordering of collectives, and with ``launch_early`` below.
- ``order``: in the captured graphs, the matmuls between the launch of a collective and the wait for it; as captured,
  and after ``launch_early``.

    python benchmarks/compiled.py --sections host
    python benchmarks/compiled.py --sections compilation --blocks 48
    python benchmarks/compiled.py --sections memory
    python benchmarks/compiled.py --sections throughput --rounds 20
    python benchmarks/compiled.py --sections order
    python benchmarks/compiled.py --quick
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import random
import resource
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time_ns
from typing import Any

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read when torch is loaded: nothing is compiled by other processes
os.environ["KINETO_LOG_LEVEL"] = "99"  # likewise: no line on the terminal for each profile

import null_process_group
import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT, Block, TinyBlocks, num_groups, parameter_bytes
from processes import run_on_ranks, time_in_turn
from report import column
from systems import DDP, FSDP2, OURS, PLAIN, wrap
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fsdp_compose

EAGER, BLOCKS, WHOLE, REGION = " eager", " blocks", " whole", " region"  # behind the name of a system
INSIDE, OUTSIDE = " nested-forward", " nested-call"
SIMPLE = "SimpleFSDP"
ALONE = "collectives alone"
HOST_SYSTEMS = (
    PLAIN + WHOLE,
    FSDP2 + BLOCKS,
    FSDP2 + WHOLE,
    OURS + EAGER,
    OURS + BLOCKS,
    OURS + WHOLE,
    OURS + REGION,
    SIMPLE,
)
COMPILED_SYSTEMS = (
    PLAIN + WHOLE,
    FSDP2 + BLOCKS,
    OURS + BLOCKS,
    OURS + WHOLE,
    OURS + REGION,
    SIMPLE,
    PLAIN + INSIDE,
    OURS + INSIDE,
    OURS + OUTSIDE,
)
QUICK_SYSTEMS = (PLAIN + WHOLE, OURS + WHOLE)
MEMORY_SYSTEMS = (OURS + EAGER, OURS + BLOCKS, OURS + WHOLE, OURS + REGION)
EARLY, REORDERED = ", launch_early", ", reordered"
THROUGHPUT_SYSTEMS = (
    OURS + EAGER,
    OURS + BLOCKS,
    OURS + WHOLE,
    DDP + WHOLE,
    OURS + WHOLE + EARLY,
    OURS + WHOLE + REORDERED,
)
MEMORY_GOAL = 1.02  # of the eager peak
HOST_GOAL = 0.02  # of the overhead of FSDP2 with compiled blocks
SIMULATED_ENV = "FSDP_COMPOSE_SIMULATED"

Forward = Callable[[torch.Tensor], torch.Tensor]


# ---- the systems


def build(
    base: nn.Module, system: str, backend: Any, reshard: bool = True, options: dict[str, Any] | None = None
) -> tuple[nn.Module, Forward]:
    """A sharded copy of ``base``, and its compiled forward; ``options``: of Inductor."""
    model = copy.deepcopy(base)
    if backend == "inductor":
        torch._inductor.config.compile_threads = 1
    if system == SIMPLE:
        shard_simply(model, init_device_mesh("cpu", (dist.get_world_size(),)), reshard)
        return model, torch.compile(model, backend=backend, fullgraph=True)
    name, _, how = system.rpartition(" ")
    if how == INSIDE.strip():
        nest(model, is_call=False)
    model = wrap(model, name, reshard=reshard)
    if how == OUTSIDE.strip():
        nest(model, is_call=True)
    if how == EAGER.strip():
        return model, model
    if how == BLOCKS.strip():
        for module in model.modules():
            if isinstance(module, Block):
                module.compile(backend=backend, fullgraph=True)
        return model, model
    if how == REGION.strip():
        return model, fsdp_compose.compile(model, backend=backend, fullgraph=True)
    return model, torch.compile(model, backend=backend, fullgraph=name in (PLAIN, OURS), options=options)


def nest(model: nn.Module, is_call: bool) -> None:
    """Make a nested region of the forward of every block, or of its call, with the hooks in it."""
    if not is_call:  # of the class: each system has a process of its own
        Block.forward = torch.compiler.nested_compile_region(Block.forward)  # type: ignore[method-assign]
    else:
        region = torch.compiler.nested_compile_region(lambda block, x: block(x))

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            x = model.embed(tokens)
            for block in model.blocks:
                x = region(block, x)
            return model.head(x)

        model.forward = forward


def shard_simply(model: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    """Shard every parameter on its dimension 0; forward reads it replicated, through a property of its name."""
    for module in [*model.modules()]:
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        for name in names:
            param = module.get_parameter(name)
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
        if names:
            module.__class__ = _reading_replicated(type(module), names, reshard)


@cache
def _reading_replicated(cls: type[nn.Module], names: tuple[str, ...], reshard: bool) -> type[nn.Module]:
    read = _replicated_again if reshard else _replicated

    def reading(name: str) -> property:
        return property(lambda self: read(self._parameters[name]))

    return type(cls.__name__, (cls,), {name: reading(name) for name in names})


def _replicated(param: Any) -> torch.Tensor:
    return param.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _replicated_again(param: Any) -> torch.Tensor:
    """... and once more in backward."""
    return checkpoint(_replicated, param, use_reentrant=False)


# ---- processes that measure when it is their turn


class Child:
    """A forked process: prepares once, then measures whenever it is told to."""

    def __init__(self, prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, prepare, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._is_ready = False

    def wait(self) -> None:
        """Until it has prepared."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def measure(self) -> Any:
        self.wait()
        self._connection.send(True)
        return self._answer()

    def end(self) -> None:
        self._connection.send(False)
        self.process.join()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"a measuring process has ended early, with {self.process.exitcode}") from None


def _serve(connection: Connection, prepare: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore")  # torch's, about itself
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # simulated collectives leave arbitrary numbers behind; denormal ones are slow
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    measure = prepare(*arguments)
    connection.send(None)
    while connection.recv():
        connection.send(measure())


def in_child(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> Any:
    """One measurement in a process of its own; the error as text, if it fails."""
    child = Child(prepare, *arguments)
    result = child.measure()
    child.end()
    return result


def simulate(world_size: int) -> None:
    os.environ[SIMULATED_ENV] = "1"  # fsdp_compose: no other rank exists
    null_process_group.init(min(3, world_size - 1), world_size)


# ---- host


@dataclass(frozen=True)
class HostRow:
    """Overheads are microseconds per group, for one forward and backward, beyond ``plain whole``."""

    system: str = column("system")
    forward_ms: float | None = column("forward ms", ".2f")
    backward_ms: float | None = column("backward", ".2f")
    overhead_us: float | None = column("overhead us", ".1f")
    ratio: float | None = column("of FSDP2 blocks", ".3f")
    net_ratio: float | None = column("without the collectives", ".3f")

    @property
    def case(self) -> str:
        return "host"


def prepare_host(system: str, world: int, num_blocks: int, backend: str) -> Callable[[], tuple[int, int]]:
    """Nanoseconds of forward and of backward."""
    simulate(world)
    base = TinyBlocks(num_blocks)
    if system == ALONE:
        return prepare_collectives(base, world)
    model, forward = build(base, system, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    x = base.example_input()

    def step() -> tuple[int, int]:
        start = process_time_ns()
        loss = forward(x).sum()
        middle = process_time_ns()
        loss.backward()
        end = process_time_ns()
        optimizer.step()
        optimizer.zero_grad()
        return middle - start, end - middle

    for _ in range(4):
        step()
    return _quietly(step)


def prepare_collectives(base: TinyBlocks, world: int) -> Callable[[], tuple[int, int]]:
    """Return a function that issues the collectives of all groups, one after the other: nanoseconds of one all-gather
    of each, and of one more with a reduce-scatter."""
    name = dist.distributed_c10d._get_default_group().group_name
    numel = sum(param.numel() for param in base.blocks[0].parameters())
    shard = torch.zeros(-(-numel // world))
    flat = torch.zeros(shard.numel() * world)
    ops = torch.ops._c10d_functional

    def step() -> tuple[int, int]:
        start = process_time_ns()
        for _ in range(num_groups(base)):
            ops.wait_tensor(ops.all_gather_into_tensor(shard, world, name))
        middle = process_time_ns()
        for _ in range(num_groups(base)):
            ops.wait_tensor(ops.all_gather_into_tensor(shard, world, name))
            ops.wait_tensor(ops.reduce_scatter_tensor(flat, "avg", world, name))
        return middle - start, process_time_ns() - middle

    return _quietly(step)


def _quietly(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step after one that fills the caches, without the garbage collector."""
    gc.collect()
    gc.freeze()

    def measured() -> Any:
        gc.collect()
        gc.disable()
        step()
        result = step()
        gc.enable()
        return result

    return measured


def measure_host(systems: Sequence[str], world: int, num_blocks: int, backend: str, repeats: int) -> list[HostRow]:
    children = {name: Child(prepare_host, name, world, num_blocks, backend) for name in (*systems, ALONE)}
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in children}
    for child in children.values():
        child.wait()
    for _ in range(repeats):
        for name, child in random.sample([*children.items()], len(children)):
            times[name].append(child.measure())
    for child in children.values():
        child.end()
    groups = num_blocks + 1
    phases = {name: [median(phase) / 1e6 for phase in zip(*found, strict=True)] for name, found in times.items()}
    alone = sum(phases[ALONE]) / groups * 1e3
    overhead = {name: (sum(found) - sum(phases[PLAIN + WHOLE])) / groups * 1e3 for name, found in phases.items()}
    overhead[ALONE] = alone
    reference = overhead[FSDP2 + BLOCKS]
    in_graph = (OURS + WHOLE, OURS + REGION)
    return [
        HostRow(
            system=name,
            forward_ms=forward,
            backward_ms=backward,
            overhead_us=overhead[name] if name != PLAIN + WHOLE else None,
            ratio=overhead[name] / reference if name != PLAIN + WHOLE else None,
            net_ratio=(overhead[name] - alone) / reference if name in in_graph else None,
        )
        for name, (forward, backward) in phases.items()
    ]


def host_section(options: Any) -> None:
    rows = measure_host(options.systems, options.world, options.blocks, options.backend, options.repeats)
    settings = {name: getattr(options, name) for name in ("world", "blocks", "backend", "repeats")}
    print(f"## Host: {options.blocks} blocks, {options.world} ranks, medians of {options.repeats} repeats; per group\n")
    _write(
        report.Report("compiled_host", settings, rows),
        options.out,
        report.bars("case", "ratio", unit="overhead / FSDP2's with compiled blocks", line=HOST_GOAL),
    )


# ---- compilation


@dataclass(frozen=True)
class CompilationRow:
    backend: str = column("backend")
    system: str = column("system")
    cpu_s: float | None = column("CPU s", ".1f")
    wall_s: float | None = column("wall s", ".1f")
    graphs: int | None = column("graphs", "d")
    ratio: float | None = column("of plain whole", ".2f")
    error: str = column("error")


def prepare_compilation(system: str, world: int, num_blocks: int, backend: str) -> Callable[[], Any]:
    def measure() -> tuple[float, float, int, str]:
        from torch._dynamo.utils import counters
        from torch._inductor.utils import fresh_cache

        torch._inductor.config.force_disable_caches = True
        torch._functorch.config.enable_autograd_cache = False
        simulate(world)
        base = TinyBlocks(num_blocks)
        x = base.example_input()
        model, forward = build(base, system, backend)
        times = []
        try:
            with fresh_cache():
                for _ in range(3):
                    start, cpu = perf_counter(), _cpu_seconds()
                    forward(x).sum().backward()
                    times.append((_cpu_seconds() - cpu, perf_counter() - start))
                    model.zero_grad()
        except Exception as error:  # what it cannot compile is a result, too
            return 0.0, 0.0, 0, f"{type(error).__name__}: {error}".split("\n")[0][:120]
        cpu_s, wall_s = (first - last for first, last in zip(times[0], times[-1], strict=True))
        return cpu_s, wall_s, counters["stats"]["unique_graphs"], ""

    return measure


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compilation_section(options: Any) -> None:
    systems = COMPILED_SYSTEMS if options.compiled_systems is None else options.compiled_systems
    backends = [options.backend] if options.backend == "aot_eager" else ["aot_eager", options.backend]
    rows = []
    for backend in backends:
        plain_s = None
        for system in systems:
            found = in_child(prepare_compilation, system, options.world, options.blocks, backend)
            cpu_s, wall_s, graphs, error = found
            if system == PLAIN + WHOLE:
                plain_s = cpu_s
            numbers = (None,) * 4 if error else (cpu_s, wall_s, graphs, cpu_s / plain_s if plain_s else None)
            rows.append(CompilationRow(backend, system, *numbers, error))
            print(rows[-1], flush=True)
    print(f"\n## Compilation of {options.blocks} equal blocks, forward and backward\n")
    settings = {"world": options.world, "blocks": options.blocks}
    result = report.Report("compiled_compilation", settings, rows)
    _write(result, options.out, report.bars("backend", "cpu_s", unit="CPU s"))


# ---- memory


@dataclass(frozen=True)
class MemoryRow:
    resharding: str = column("resharding")
    system: str = column("system")
    step_mib: float = column("training step MiB", ".2f")
    step_blocks: float = column("in blocks", ".2f")
    ratio: float | None = column("of fsdp_compose eager", ".3f")
    left_bytes: int = column("left after the step, bytes", "d")


def prepare_memory(system: str, world: int, case: tuple[int, int, int], backend: str, reshard: bool) -> Any:
    def measure() -> tuple[int, int]:
        from memory import AllocatedBytes

        os.environ[SIMULATED_ENV] = "1"
        dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
        num_blocks, width, num_tokens = case
        base = GPT(num_blocks, width)
        tokens = torch.randint(base.vocabulary, (1, num_tokens))
        model, forward = build(base, system, backend, reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

        def step() -> None:
            forward(tokens).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        with AllocatedBytes() as allocated:
            step()
            with allocated.section("step"):
                step()
        return allocated.peak["step"], allocated.end["step"]

    return measure


def memory_section(options: Any) -> None:
    case = (2, 64, 16) if options.quick else (4, 128, 16)
    block_bytes = parameter_bytes(Block(case[1], 4))
    rows = []
    for name, reshard in (("default", True), ("never", False)):
        eager = None
        for system in [OURS + EAGER, OURS + WHOLE] if options.quick else MEMORY_SYSTEMS:
            peak, left = in_child(prepare_memory, system, options.world, case, options.backend, reshard)
            eager = peak if system == OURS + EAGER else eager
            rows.append(MemoryRow(name, system, peak / 2**20, peak / block_bytes, peak / (eager or peak), left))
            print(rows[-1], flush=True)
    print(f"\n## Memory: {case[0]} blocks of width {case[1]}, {case[2]} tokens, {options.world} ranks\n")
    settings = {"world": options.world, "case": case, "backend": options.backend}
    result = report.Report("compiled_memory", settings, rows)
    _write(result, options.out, report.bars("resharding", "ratio", unit="peak / eager's", line=MEMORY_GOAL))


# ---- throughput


@dataclass(frozen=True)
class ThroughputRow:
    """Milliseconds are medians of the slowest rank's; ratios those of single rounds, the median and the quartiles."""

    case: str = column("width x tokens")
    system: str = column("system")
    step_ms: float = column("step ms", ".1f")
    cpu_ms: float = column("CPU ms", ".1f")
    ratio: float = column("to fsdp_compose eager", ".3f")
    quartiles: tuple[float, float] = column("quartiles")
    loss: float = column("last loss", ".5f")


def _throughput_worker(
    case: tuple[int, int, int], backend: str, systems: Sequence[str], rounds: int, path: Path
) -> None:
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    num_blocks, width, num_tokens = case
    torch.manual_seed(0)
    base = GPT(num_blocks, width, num_heads=8)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(base.vocabulary, (num_tokens // 64, 64))
    steps = {system: _throughput_step(base, system, backend, tokens) for system in systems}
    times = time_in_turn(steps, rounds)
    rows = []
    for system, runs in times.items():
        ratios = sorted(run[0] / eager[0] for run, eager in zip(runs, times[OURS + EAGER], strict=True))
        whole, cpu = (median(part) for part in zip(*runs, strict=True))
        quartiles = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        loss = steps[system].loss
        rows.append((f"{width}x{num_tokens}", system, whole, cpu, median(ratios), quartiles, loss))
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))


def _throughput_step(base: nn.Module, system: str, backend: str, tokens: torch.Tensor) -> Any:
    name, _, order = system.partition(", ")
    if backend != "inductor" or name != OURS + WHOLE:
        options = None
    else:
        options = ORDERS[order]
    model, forward = build(base, name, backend, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> tuple[float]:
        start = process_time_ns()
        loss = nn.functional.cross_entropy(forward(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.loss = loss.item()
        return ((process_time_ns() - start) / 1e9,)

    return step


def throughput_section(options: Any) -> None:
    case = (2, 64, 64) if options.quick else (options.layers, 512, 128)
    systems = THROUGHPUT_SYSTEMS if options.backend == "inductor" else THROUGHPUT_SYSTEMS[:4]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        run_on_ranks(options.processes, _throughput_worker, case, options.backend, systems, options.rounds, path)
        rows = [ThroughputRow(*row) for row in json.loads(path.read_text())]
    print(f"## Throughput: {options.processes} gloo processes, {options.rounds} rounds, {case[0]} blocks\n")
    settings = {"processes": options.processes, "rounds": options.rounds, "case": case, "backend": options.backend}
    result = report.Report("compiled_throughput", settings, rows)
    _write(result, options.out, report.bars("case", "ratio", unit="step / eager's", line=1.0))


# ---- order


_LAUNCHES = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_reduce")
_MATMULS = ("mm", "addmm", "bmm", "baddbmm")


def _operator(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return ""
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def launch_early(graph: torch.fx.Graph) -> None:
    """Let collectives of a captured graph run while it computes: each all-gather of a shard is launched when the one
    before it has arrived, so that one group is gathered ahead; each reduction is waited for when the next one is to be
    launched, or at the end. For Inductor, ``options={"post_grad_custom_post_pass": launch_early}``."""
    last_wait: torch.fx.Node | None = None
    pending: torch.fx.Node | None = None
    for node in [*graph.nodes]:
        kind = _operator(node)
        if kind.startswith("all_gather"):
            chain = _inputs_only(node)
            if last_wait is not None and chain:
                for item in chain:
                    last_wait.append(item)
                    last_wait = item
        elif kind.startswith("reduce_scatter"):
            if pending is not None:
                _sink(pending, node)
            pending = None
        elif kind == "wait_tensor":
            launch = _operator(node.args[0])
            if launch.startswith("all_gather"):
                last_wait = node
            elif launch.startswith("reduce_scatter") and _is_result(node):
                pending = node
    if pending is not None:
        _sink(pending, graph.output_node())


def _inputs_only(node: torch.fx.Node) -> list[torch.fx.Node]:
    """``node`` and what it is computed from, in order, if that is inputs of the graph alone; else nothing."""
    chain: list[torch.fx.Node] = [node]
    for item in chain:
        for source in item.all_input_nodes:
            if source.op == "placeholder":
                continue
            if len(chain) > 4 or source.op != "call_function":
                return []
            chain.append(source)
    return chain[::-1]


def _is_result(node: torch.fx.Node) -> bool:
    """Whether nothing but the output reads it, or casts of it."""
    return all(user.op == "output" or _is_result(user) for user in node.users)


def _sink(node: torch.fx.Node, target: torch.fx.Node) -> None:
    for user in [node, *[item for item in node.users if item.op != "output"]]:
        target.prepend(user)


@dataclass(frozen=True)
class OrderRow:
    """The matmuls between launch and wait, summed up over the collectives of a kind, and for each."""

    graph: str = column("graph")
    order: str = column("order")
    collective: str = column("collective")
    count: int = column("number", "d")
    hidden: int = column("with matmuls before the wait", "d")
    matmuls: int = column("matmuls in all", "d")
    system: str = OURS + WHOLE


def distances(graph: torch.fx.Graph) -> dict[str, list[int]]:
    """By kind of collective, the matmuls between its launch and its wait."""
    places, matmuls, found = {}, 0, {}
    for node in graph.nodes:
        kind = _operator(node)
        matmuls += kind in _MATMULS
        if kind in _LAUNCHES:
            places[node] = matmuls
        elif kind == "wait_tensor" and node.args[0] in places:
            launch = _operator(node.args[0]).removesuffix("_into_tensor").removesuffix("_tensor")
            found.setdefault(launch, []).append(matmuls - places[node.args[0]])
    return found


def prepare_order(num_blocks: int, world: int) -> Callable[[], list[tuple[Any, ...]]]:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    rows: list[tuple[Any, ...]] = []

    def note(name: str) -> Any:
        def compiler(module: torch.fx.GraphModule, _inputs: Any) -> Any:
            for order in ("captured", "launch_early"):
                if order == "launch_early":
                    launch_early(module.graph)
                    module.graph.lint()
                    module.recompile()
                for kind, found in distances(module.graph).items():
                    rows.append((name, order, kind, len(found), sum(map(bool, found)), sum(found)))
            return make_boxed_func(module.forward)

        return compiler

    def measure() -> list[tuple[Any, ...]]:
        simulate(world)
        base = TinyBlocks(num_blocks)
        backend = aot_autograd(
            fw_compiler=note("forward"),
            bw_compiler=note("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        _, forward = build(base, OURS + WHOLE, backend)
        forward(base.example_input()).sum().backward()
        return rows

    return measure


def order_section(options: Any) -> None:
    rows = [OrderRow(*row) for row in in_child(prepare_order, options.blocks, options.world)]
    print(f"## Order of the captured graphs, {options.blocks} blocks\n")
    result = report.Report("compiled_order", {"blocks": options.blocks, "world": options.world}, rows)
    _write(result, options.out, report.bars("order", "matmuls", by="collective"))


# ---- command line


def _write(result: report.Report, out: Path, *plots: report.Plot) -> None:
    print(result.table())
    result.write(out, *plots)
    print(flush=True)


SECTIONS: dict[str, Callable[[Any], None]] = {
    "host": host_section,
    "compilation": compilation_section,
    "memory": memory_section,
    "throughput": throughput_section,
    "order": order_section,
}
ORDERS: dict[str, dict[str, Any] | None] = {  # options of Inductor
    "": None,
    EARLY.strip(", "): {"post_grad_custom_post_pass": launch_early},
    REORDERED.strip(", "): {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
    },
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument(
        "--systems", nargs="+", choices=HOST_SYSTEMS, help="of the host section, beside plain and FSDP2 blocks"
    )
    parser.add_argument("--backend", help="of torch.compile (default: inductor; --quick: aot_eager)")
    parser.add_argument("--world", type=int, default=64, help="simulated ranks (default: 64)")
    parser.add_argument("--blocks", type=int, help="of the host section (default: 12; --quick: 2)")
    parser.add_argument("--compiled-systems", nargs="+", choices=COMPILED_SYSTEMS, help="of the compilation section")
    parser.add_argument("--processes", type=int, default=2, help="of the throughput section")
    parser.add_argument("--layers", type=int, default=8, help="blocks of the throughput section")
    parser.add_argument("--rounds", type=int, help="of the throughput section (default: 20; --quick: 2)")
    parser.add_argument("--repeats", type=int, help="timed steps per system (default: 25; --quick: 2)")
    options = parser.parse_args()
    for name, usual, quick in (
        ("backend", "inductor", "aot_eager"),
        ("blocks", 12, 2),
        ("repeats", 25, 2),
        ("rounds", 20, 2),
    ):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if options.quick:
        options.compiled_systems = options.compiled_systems or QUICK_SYSTEMS
    options.systems = options.systems or (QUICK_SYSTEMS if options.quick else HOST_SYSTEMS)
    options.systems = list(dict.fromkeys([PLAIN + WHOLE, FSDP2 + BLOCKS, *options.systems]))
    random.seed(0)
    for name in options.sections:
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
