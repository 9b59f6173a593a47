"""How evenly ``Muon`` shares the matrices of large models among many ranks, what travels, and how long planning takes.
Nothing is trained: owners are chosen from shapes, in the layout that ``fully_shard`` gives each block.

``balance`` is the most work of any rank relative to the mean. It cannot be less than ``bound``: one largest matrix,
relative to the mean. The goal is 1.10 as long as that is a quarter at most.

    python benchmarks/muon_owners.py                     # a minute
    python benchmarks/muon_owners.py --quick
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time

import report
from report import column

from fsdp_compose.core.flat.layout import ParamSpec, plan_layout
from fsdp_compose.optim.matrices import Matrices, assign, matrices_of, stacks_of

Shape = tuple[int, ...]
RANKS, QUICK_RANKS = (2, 8, 64, 256, 1024), (2, 64)
ALIGNMENT = 8  # 16 bytes of bfloat16


def dense(hidden: int, intermediate: int, kv: int) -> list[Shape]:
    return [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden), (intermediate, hidden),
            (intermediate, hidden), (hidden, intermediate)]  # fmt: skip


def experts(count: int, hidden: int, intermediate: int) -> list[Shape]:
    return [(count, intermediate, hidden), (count, intermediate, hidden), (count, hidden, intermediate)]


# DeepSeek's attention: low-rank queries, keys and values. Its first blocks have no experts.
LATENT = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
DENSE_MLP = [(18432, 7168), (18432, 7168), (7168, 18432)]
MODELS: dict[str, list[list[Shape]]] = {  # matrices of each block
    "Llama 8B": [dense(4096, 14336, 1024)] * 32,
    "Llama 70B": [dense(8192, 28672, 1024)] * 80,
    "Llama 405B": [dense(16384, 53248, 1024)] * 126,
    "Mixtral 8x7B": [dense(4096, 0, 1024)[:4] + experts(8, 4096, 14336)] * 32,
    "DeepSeek-V3": [LATENT + DENSE_MLP] * 3 + [LATENT + experts(256, 7168, 2048) + experts(1, 7168, 2048)] * 58,
}


@dataclass(frozen=True)
class Row:
    model: str = column("model")
    ranks: int = column("ranks", ",")
    matrices: int = column("matrices", ",")
    balance: float = column("balance", ".2f")
    bound: float = column("bound", ".2f")
    bytes_per_element: float = column("bytes sent for an element", ".3f")
    seconds: float = column("CPU s to plan", ".2f")


def matrices(blocks: Sequence[Sequence[Shape]], num_ranks: int) -> list[Matrices]:
    found = []
    for block in blocks:
        layout = plan_layout([ParamSpec(str(i), shape) for i, shape in enumerate(block)], num_ranks, ALIGNMENT)
        found += [matrices_of(shape, layout.counts(i), None) for i, shape in enumerate(block)]
    return found


def measure(model: str, num_ranks: int) -> Row:
    items = matrices(MODELS[model], num_ranks)
    begun = process_time()
    owners = assign(items, num_ranks)
    seconds = process_time() - begun
    loads, moved = [0] * num_ranks, 0
    for i, (item, chosen) in enumerate(zip(items, owners, strict=True)):
        for owner in chosen:
            loads[owner] += item.cost
        for stack in stacks_of(i, item, chosen):
            moved += stack.numel - sum([stop - start for rank, start, stop in stack.ranges if rank == stack.owner])
    mean, numel = sum(loads) / num_ranks, sum(item.count * item.numel for item in items)
    bound = max(1.0, max(item.cost for item in items) / mean)
    num = sum(item.count for item in items)
    return Row(model, num_ranks, num, max(loads) / mean, bound, moved * 2 * 2 / numel, seconds)


def main() -> None:
    parser = report.parser(__doc__)
    options = parser.parse_args()
    models = ["Llama 8B", "Mixtral 8x7B"] if options.quick else MODELS
    rows = [measure(model, size) for model in models for size in (QUICK_RANKS if options.quick else RANKS)]
    result = report.Report("muon_owners", {"dtype": "bfloat16, both ways"}, rows)
    print(result.table())
    result.write(options.out, report.bars("model", "balance", by="ranks", unit="most work of a rank / mean"))


if __name__ == "__main__":
    main()
