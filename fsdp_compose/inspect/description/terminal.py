"""A description as text with colours and ruled tables, made by ``rich``, as wide as the terminal."""

from __future__ import annotations

import importlib.util
import sys
from io import StringIO

from .facts import GroupFacts, ModelFacts
from .words import COLUMNS, bytes_of, flat_title, group_details, group_title, row_of, sizes_of, title_of


def can_use_terminal() -> bool:
    """Whether output goes to a terminal, and ``rich`` is installed."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def as_terminal_text(facts: ModelFacts) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=StringIO(), force_terminal=True)
    with console.capture() as capture:
        console.print(Text(title_of(facts), style="bold"))
        console.print(Text(sizes_of(facts)))
        for group in facts.groups:
            console.print()
            console.print(Text(group_title(group), style="bold cyan"))
            console.print(Text(group_details(group), style="dim"))
            for table in _tables(group, facts.rank):
                console.print(table)
        if facts.others:
            console.print(Text("\nin no group, whole on every rank; see check(model)", style="bold yellow"))
            for other in facts.others:
                console.print(Text(f"{other.fqn} {other.shape} {other.dtype}, {bytes_of(other.nbytes)}"))
    return capture.get().rstrip("\n")


def _tables(group: GroupFacts, rank: int) -> list[object]:
    from rich.table import Table
    from rich.text import Text

    tables: list[object] = []
    for flat in group.flat_parameters:
        table = Table(title=Text(flat_title(flat)), title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="right" if column in ("elements", "offset") else "left")
        for param in flat.parameters:
            table.add_row(*map(Text, row_of(param, rank)), style="" if param.requires_grad else "dim")
        tables.append(table)
    return tables
