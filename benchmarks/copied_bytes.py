"""How many bytes sharding copies: what one forward and backward copies beyond the plain model, in model sizes.

A copy between an all-gather's output and the parameters, or between gradients and a reduce-scatter's input, costs
device memory bandwidth and memory. At 8 ranks one forward and backward of

- FSDP2 copies the shard into the all-gather's input and the output to the parameters, twice, and the gradients to the
  reduce-scatter's input: 2 * (1/8 + 1) + 1 = 3.25 (a little less: the root stays unsharded after forward);
- fsdp_compose copies the shard into its place twice and the gradients once: 2 * 1/8 + 1 = 1.25.

Counted by a dispatch mode, which sees every operator on tensors, on rank 3 of 8 under torch's ``fake`` process group;
what collectives do inside themselves is not seen. Activations are copied too (reshapes, gradients of views): the plain
model does the same, and its count is subtracted.

    python benchmarks/copied_bytes.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from models import GPT, parameter_bytes
from systems import SYSTEMS
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WORLD_SIZE, RANK = 8, 3
BASELINE = "plain"

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
    "fsdp::split_with_sizes_copy",
}
# Operators that fill memory without reading any.
FILLS = {"aten::_foreach_zero_", "aten::fill_", "aten::ones_like", "aten::zero_", "aten::zeros", "aten::zeros_like"}
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::resize_"}


class WrittenBytes(TorchDispatchMode):
    """Adds up, by operator, the bytes that operators write while this mode is active.

    Operators that an operator calls do not count again: they run without the mode. Views and collectives (namespace
    ``c10d``) count nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if func.namespace != "c10d" and not func.is_view and name not in ALLOCATIONS:
            self.by_operator[name] += sum(map(_num_bytes, _written(func, args, kwargs, result)))
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Iterator[torch.Tensor]:
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
    """Bytes that one forward and backward writes, by operator, beyond what the plain model's writes."""

    excess: dict[str, int]
    model_bytes: int

    @property
    def copied(self) -> float:
        """Copies, in model sizes."""
        return sum(count for name, count in self.excess.items() if name in COPIES) / self.model_bytes

    @property
    def computed(self) -> float:
        """What operators write that are neither copies nor fills, in model sizes: no copy hides under another name
        where this is nothing."""
        return sum(n for name, n in self.excess.items() if name not in COPIES | FILLS) / self.model_bytes


def traffic(system: str) -> Traffic:
    """Count one forward and backward of ``system``, a name in ``systems.SYSTEMS``.

    Makes a fake process group torch's default group for that time; there must be none yet.
    """
    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE, store=FakeStore())
    try:
        torch.manual_seed(0)
        base = GPT()
        tokens = base.example_input()
        plain = _written_by_operator(SYSTEMS[BASELINE](base, False)[0], tokens)
        sharded = _written_by_operator(SYSTEMS[system](base, False)[0], tokens)
    finally:
        dist.destroy_process_group()
    excess = {name: sharded[name] - plain[name] for name in sorted(sharded.keys() | plain.keys())}
    return Traffic({name: count for name, count in excess.items() if count}, parameter_bytes(base))


def measure(system: str) -> float:
    """Bytes that one forward and backward of ``system`` copies, divided by the model's bytes."""
    return traffic(system).copied


def _written_by_operator(model: nn.Module, tokens: torch.Tensor) -> Counter[str]:
    for _ in range(2):  # lazy initialisation, and the order that prefetching follows
        model(tokens).sum().backward()
        model.zero_grad()
    with WrittenBytes() as written:
        model(tokens).sum().backward()
    return written.by_operator


def main() -> None:
    print(f"Bytes written by one forward and backward beyond plain's, in model sizes; {WORLD_SIZE} ranks.\n")
    print("| system | copied | otherwise computed | copies by operator |")
    print("|---|--:|--:|---|")
    for system in ("FSDP1", "FSDP2", "fsdp_compose"):
        counted = traffic(system)
        copies = {name: count / counted.model_bytes for name, count in counted.excess.items() if name in COPIES}
        print(
            f"| {system} | {counted.copied:.3f} | {counted.computed:.3f} "
            f"| {', '.join(f'{name} {size:.3f}' for name, size in copies.items())} |"
        )


if __name__ == "__main__":
    main()
