"""How much padding sharding adds to a group of parameters, in percent of the payload.

    python benchmarks/padding.py               # a table for the terminal
    python benchmarks/padding.py --markdown    # the same for a document

Three rules are compared. `flat` is `fsdp_compose.layout`; `FSDP2` pads dim 0 of each parameter to a multiple of the
ranks; `LCM` is a flat buffer whose shards are a multiple of every parameter's row, as in Megatron-FSDP.
"""

import argparse
import math
from collections.abc import Callable, Sequence

from fsdp_compose.layout import ParamSpec, plan_layout

Shape = tuple[int, ...]

RANKS = (8, 64, 256, 1024, 4096)
ALIGNMENT = 8  # 16 bytes of bfloat16

MODELS: dict[str, list[Shape]] = {
    "Llama-3-8B block": [
        (4096, 4096),  # q
        (1024, 4096),  # k
        (1024, 4096),  # v
        (4096, 4096),  # o
        (14336, 4096),  # gate
        (14336, 4096),  # up
        (4096, 14336),  # down
        (4096,),  # norms
        (4096,),
    ],
    "GPT-2 small block": [
        *[(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)],  # norm, qkv, projection
        *[(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)],  # norm, MLP
    ],
    "GPT-2 small embeddings": [(50257, 768), (1024, 768), (768,), (768,)],
    "128 fused experts": [(128, 2880, 5760), (128, 5760), (128, 2880, 2880), (128, 2880)],
    "256 separate experts": [(2048, 7168), (2048, 7168), (7168, 2048)] * 256,
}


def flat_padding(shapes: Sequence[Shape], world_size: int) -> float:
    specs = [ParamSpec(f"param{index}", shape) for index, shape in enumerate(shapes)]
    return plan_layout(specs, world_size, ALIGNMENT).padding_fraction


def fsdp2_padding(shapes: Sequence[Shape], world_size: int) -> float:
    padded = sum(_round_up(shape[0], world_size) * math.prod(shape[1:]) for shape in shapes)
    return padded / _payload_numel(shapes) - 1


def lcm_padding(shapes: Sequence[Shape], world_size: int) -> float:
    rows = math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    return _round_up(_payload_numel(shapes), world_size * rows) / _payload_numel(shapes) - 1


RULES: dict[str, Callable[[Sequence[Shape], int], float]] = {
    "flat": flat_padding,
    "FSDP2": fsdp2_padding,
    "LCM": lcm_padding,
}


def padding_table() -> list[list[str]]:
    header = ["group", "rule", *(f"{world_size} ranks" for world_size in RANKS)]
    rows = [
        [model, name, *(f"{100 * rule(shapes, world_size):,.2f}" for world_size in RANKS)]
        for model, shapes in MODELS.items()
        for name, rule in RULES.items()
    ]
    return [header, *rows]


def format_table(table: list[list[str]], *, markdown: bool) -> str:
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in table]
        return "\n".join([lines[0], "|---|---|" + "---:|" * len(RANKS), *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def _payload_numel(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Padding in percent of the payload.")
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    print(format_table(padding_table(), markdown=parser.parse_args().markdown))
