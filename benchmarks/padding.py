"""How much padding sharding adds to the parameters of a group, in percent of the payload. Exact: nothing is timed.

Three rules are compared: ours (``fsdp_compose.core.flat.layout``); that of FSDP2, which pads dim 0 of each parameter to
a multiple of the ranks; and ``LCM``, a flat buffer whose shards are a multiple of every parameter's row, as in
Megatron-FSDP.

    python benchmarks/padding.py               # a few seconds, also without --quick, which changes nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import report
from report import column
from shapes import MODELS, Shape
from systems import FSDP2, OURS

from fsdp_compose.core.flat.layout import ParamSpec, plan_layout

RANKS = (8, 64, 256, 1024, 4096)
ALIGNMENT = 8  # 16 bytes of bfloat16


@dataclass(frozen=True)
class Row:
    """Percent of the payload, by number of ranks (``RANKS``)."""

    group: str = column("group")
    system: str = column("rule")
    ranks_8: float = column("8 ranks", ",.2f")
    ranks_64: float = column("64", ",.2f")
    ranks_256: float = column("256", ",.2f")
    ranks_1024: float = column("1024", ",.2f")
    ranks_4096: float = column("4096", ",.2f")


def our_padding(shapes: Sequence[Shape], world_size: int) -> float:
    specs = [ParamSpec(f"param{index}", shape) for index, shape in enumerate(shapes)]
    return plan_layout(specs, world_size, ALIGNMENT).padding_fraction


def fsdp2_padding(shapes: Sequence[Shape], world_size: int) -> float:
    padded = sum(_round_up(shape[0], world_size) * math.prod(shape[1:]) for shape in shapes)
    return padded / _payload_numel(shapes) - 1


def lcm_padding(shapes: Sequence[Shape], world_size: int) -> float:
    rows = math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    return _round_up(_payload_numel(shapes), world_size * rows) / _payload_numel(shapes) - 1


RULES: dict[str, Callable[[Sequence[Shape], int], float]] = {
    OURS: our_padding,
    FSDP2: fsdp2_padding,
    "LCM": lcm_padding,
}


def _payload_numel(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def main() -> None:
    options = report.parser(__doc__).parse_args()
    rows = [
        Row(group, name, *(100 * rule(shapes, world_size) for world_size in RANKS))
        for group, shapes in MODELS.items()
        for name, rule in RULES.items()
    ]
    result = report.Report("padding", {"alignment": ALIGNMENT}, rows)
    print(f"Padding of a group in percent of its payload, by number of ranks.\n\n{result.table()}")
    result.write(options.out, report.bars("group", "ranks_1024", unit="padding at 1024 ranks, %"))


if __name__ == "__main__":
    main()
