"""The bytes that sharding moves: bytes copied within a rank, collectives and their bytes between ranks.

A copy between an all-gather's output and the parameters, or between gradients and a reduce-scatter's input, costs
device memory bandwidth and memory. At 8 ranks one forward and backward of

- FSDP2 copies the shard into the all-gather's input and the output to the parameters, twice, and the gradients to the
  reduce-scatter's input: 2 * (1/8 + 1) + 1 = 3.25 (a little less: the root stays unsharded after forward);
- FSDP2 without copy-out, a prototype (``fsdp2_views.py``): 2 * 1/8 + 1; also without copying the shards: 1, and with a
  cast 2 * 1/8 in the smaller dtype more;
- fsdp_compose copies the gradients once: 1. With a cast it copies the shard into its place twice, too.

Counted by a dispatch mode, which sees every operator on tensors and every collective, on rank 3 of 8 under torch's
``fake`` process group; what collectives do inside themselves is not seen. Activations are copied too (reshapes,
gradients of views): the plain model does the same, and its count is subtracted. Everything is in units of the model's
bytes in the dtype it was built with. On a real process group fsdp_compose adds one all-reduce of a few bytes per
backward, the control exchange (16 bytes, one for each parameter, one for each group of ``fully_shard``), which is local
here, where no other rank exists.

    python benchmarks/copied_bytes.py
    python benchmarks/copied_bytes.py --quick    # a smaller model, the same proportions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT, parameter_bytes
from report import column
from systems import FSDP1, FSDP2, NO_COPIES, NO_COPY_OUT, OURS, PLAIN, SYSTEMS
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WORLD_SIZE, RANK = 8, 3

# Which argument of a collective is the whole of what travels.
COLLECTIVES = {
    "c10d::_allgather_base_": ("all-gather", "output_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", "outputs"),
    "c10d::allgather_": ("all-gather", "output_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce-scatter", "input_tensors"),
    "c10d::allreduce_": ("all-reduce", "tensors"),
}

# Operators whose result is a copy of an argument's elements, in another place, layout or dtype.
COPIES = {
    "aten::_chunk_cat",
    "aten::_foreach_copy_",
    "aten::_to_copy",
    "aten::cat",
    "aten::clone",
    "aten::contiguous",
    "aten::copy_",
    "aten::split_with_sizes_copy",
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::chunk_cat_mixed_dtype",  # its name since torch 2.15
    "fsdp::split_with_sizes_copy",
}
# Operators that fill memory without reading any.
FILLS = {"aten::_foreach_zero_", "aten::fill_", "aten::ones_like", "aten::zero_", "aten::zeros", "aten::zeros_like"}
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::resize_"}


class WrittenBytes(TorchDispatchMode):
    """Adds up, by operator, the bytes that operators write while this mode is active.

    Operators that an operator calls do not count again: they run without the mode. Views count nothing; collectives
    (namespace ``c10d``) are counted apart, by kind: how many, and how many bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()
        self.num_collectives: Counter[str] = Counter()
        self.collective_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if func.namespace == "c10d":
            self._count_collective(func, args)
        if func.namespace != "c10d" and not func.is_view and name not in ALLOCATIONS:
            self.by_operator[name] += sum(map(_num_bytes, _targets(func, args, kwargs, result)))
        return result

    def _count_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        kind, whole = COLLECTIVES[func._schema.name]  # KeyError: for another one it must be said what of it travels
        given = dict(zip((p.name for p in func._schema.arguments), args, strict=False))
        self.num_collectives[kind] += 1
        self.collective_bytes[kind] += sum(map(_num_bytes, tree_leaves(given[whole])))


def _targets(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call of ``func`` wrote: the arguments that its schema says it changes, else its results."""
    if func._schema.name == "fsdp::all_gather_copy_in":  # its schema keeps silent about what it changes
        yield result[0]
        return
    parameters = func._schema.arguments
    changed = [p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write]
    given = dict(zip((p.name for p in parameters), args, strict=False)) | dict(kwargs)
    written = [given.get(name) for name in changed] if changed else result
    yield from (leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Traffic:
    """The bytes that one forward and backward moves.

    Attributes:
        excess: bytes written, by operator, beyond what the plain model writes.
        num_collectives, collective_bytes: by kind.
        model_bytes: of the parameters, in the dtype they were built with.
    """

    excess: dict[str, int]
    num_collectives: dict[str, int]
    collective_bytes: dict[str, int]
    model_bytes: int

    @property
    def copied(self) -> float:
        """Copies, in model sizes."""
        return sum(count for name, count in self.excess.items() if name in COPIES) / self.model_bytes

    @property
    def computed(self) -> float:
        """Bytes that operators write that are neither copies nor fills, in model sizes: where this is nothing, no copy
        hides under another name."""
        return sum(n for name, n in self.excess.items() if name not in COPIES | FILLS) / self.model_bytes


def traffic(system: str, mixed_precision: bool = False, base: GPT | None = None) -> Traffic:
    """Count one forward and backward of ``system``, a name in ``systems.SYSTEMS``.

    Makes a fake process group torch's default group for that time; there must be none yet.
    """
    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE, store=FakeStore())
    try:
        torch.manual_seed(0)
        base = base or GPT()
        tokens = base.example_input()
        plain = _written(SYSTEMS[PLAIN](base, mixed_precision)[0], tokens).by_operator
        counted = _written(SYSTEMS[system](base, mixed_precision)[0], tokens)
    finally:
        dist.destroy_process_group()
    sharded = counted.by_operator
    excess = {name: sharded[name] - plain[name] for name in sorted(sharded.keys() | plain.keys())}
    return Traffic(
        {name: count for name, count in excess.items() if count},
        dict(counted.num_collectives),
        dict(counted.collective_bytes),
        parameter_bytes(base),
    )


def measure(system: str) -> float:
    """Bytes that one forward and backward of ``system`` copies, divided by the model's bytes."""
    return traffic(system).copied


def _written(model: nn.Module, tokens: torch.Tensor) -> WrittenBytes:
    for _ in range(2):  # lazy initialisation, and the order that prefetching follows
        model(tokens).sum().backward()
        model.zero_grad()
    with WrittenBytes() as written:
        model(tokens).sum().backward()
    return written


# ---- the report


@dataclass(frozen=True)
class Row:
    """Bytes are in units of the model's."""

    precision: str = column("precision")
    system: str = column("system")
    copied: float = column("copied", ".3f")
    computed: float = column("otherwise computed", ".3f")
    all_gathers: int = column("all-gathers")
    all_gathered: float = column("bytes", ".3f")
    reduce_scatters: int = column("reduce-scatters")
    reduce_scattered: float = column("bytes", ".3f")
    all_reduces: int = column("all-reduces")
    copies: str = column("copies by operator")


def row(system: str, precision: str, base: GPT) -> Row:
    counted = traffic(system, precision != "fp32", base)
    copies = {name: count / counted.model_bytes for name, count in counted.excess.items() if name in COPIES}
    num, num_bytes, model_bytes = counted.num_collectives, counted.collective_bytes, counted.model_bytes
    return Row(
        precision=precision,
        system=system,
        copied=counted.copied,
        computed=counted.computed,
        all_gathers=num.get("all-gather", 0),
        all_gathered=num_bytes.get("all-gather", 0) / model_bytes,
        reduce_scatters=num.get("reduce-scatter", 0),
        reduce_scattered=num_bytes.get("reduce-scatter", 0) / model_bytes,
        all_reduces=num.get("all-reduce", 0),
        copies=", ".join(f"{name} {size:.3f}" for name, size in copies.items()),
    )


def main() -> None:
    options = report.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # simulated collectives leave arbitrary numbers behind; denormal ones are slow
    base = GPT(2, 64) if options.quick else GPT()
    systems = FSDP1, FSDP2, NO_COPY_OUT, NO_COPIES, OURS
    rows = [row(system, precision, base) for precision in ("fp32", "bf16/fp32") for system in systems]
    settings = {"ranks": WORLD_SIZE, "model_bytes": parameter_bytes(base), "num_groups": len(base.blocks) + 1}
    settings["num_parameters"] = len(list(base.parameters()))
    moved = report.Report("copied_bytes", settings, rows)
    print(f"One forward and backward, in model sizes, beyond plain's; {WORLD_SIZE} ranks.\n\n{moved.table()}")
    moved.write(
        options.out,
        report.bars("precision", "copied", unit="bytes copied / model bytes"),
        report.bars("precision", "all_gathered", unit="bytes all-gathered / model bytes"),
    )


if __name__ == "__main__":
    main()
