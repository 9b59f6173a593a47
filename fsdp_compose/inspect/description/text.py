"""A description as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from .facts import ModelFacts
from .words import COLUMNS, bytes_of, flat_title, group_details, group_title, row_of, sizes_of, title_of

_TO_THE_RIGHT = ("elements", "offset")


def as_text(facts: ModelFacts) -> str:
    lines = [title_of(facts), sizes_of(facts)]
    for group in facts.groups:
        lines += ["", group_title(group), f"  {group_details(group)}"]
        for flat in group.flat_parameters:
            lines.append(f"  {flat_title(flat)}")
            lines += [f"    {line}" for line in table([row_of(param, facts.rank) for param in flat.parameters])]
    if facts.others:
        lines += ["", "in no group, whole on every rank; see check(model)"]
        lines += [f"  {other.fqn} {other.shape} {other.dtype}, {bytes_of(other.nbytes)}" for other in facts.others]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of aligned cells, below ``COLUMNS``."""
    cells = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if column in _TO_THE_RIGHT else cell.ljust(width)
            for cell, width, column in zip(row, widths, COLUMNS, strict=True)
        ).rstrip()
        for row in cells
    ]
