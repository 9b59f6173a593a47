"""Reports as plain text, as colored tables in a terminal, and as one HTML page.

``describe`` and ``plan`` put what they found into sections. Nothing here knows what a report is about."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO

from ..errors import as_ranges


@dataclass(frozen=True)
class Section:
    """A title with a table or a few lines below it."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: Collection[str] = ()  # the columns that are aligned to the right
    faint: Collection[int] = ()  # numbers of rows that matter less
    is_part: bool = False  # of the section before it
    details: str = ""  # a line below the title
    items: Sequence[str] = ()  # lines that the reader should look into
    picture: Callable[[], str] | None = None  # makes an SVG; only a page shows it


@dataclass(frozen=True)
class Report:
    name: str  # of the model
    heading: Sequence[str]  # lines
    sections: Sequence[Section]


def as_text(report: Report) -> str:
    lines = [*report.heading]
    for section in report.sections:
        indent, details = "  " if section.is_part else "", [section.details] if section.details else []
        if not section.is_part:
            lines.append("")
        lines.append(f"{indent}{section.title}")
        aligned = [
            [cell.rjust(width) if name in section.right else cell.ljust(width) for cell in column]
            for name, column in zip(section.columns, zip(section.columns, *section.rows, strict=True), strict=True)
            for width in [max(map(len, column))]
        ]
        table = ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
        lines += [f"{indent}  {line}" for line in (*details, *table, *section.items)]
    return "\n".join(lines)


def for_stdout(report: Report) -> str:
    """Format with colors if output goes to a terminal and ``rich`` is installed, otherwise as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return as_terminal_text(report)
    return as_text(report)


def as_terminal_text(report: Report) -> str:
    """Format with colors and ruled tables by ``rich``, as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=StringIO(), force_terminal=True)
    with console.capture() as capture:
        for number, line in enumerate(report.heading):
            console.print(Text(line, style="" if number else "bold"))
        for section in report.sections:
            if section.columns:
                table = Table(title=Text(section.title), title_justify="left")
                for column in section.columns:
                    table.add_column(column, justify="right" if column in section.right else "left")
                for number, row in enumerate(section.rows):
                    table.add_row(*map(Text, row), style="dim" if number in section.faint else "")
                console.print(table)
                continue
            console.print()
            console.print(Text(section.title, style="bold yellow" if section.items else "bold cyan"))
            if section.details:
                console.print(Text(section.details, style="dim"))
            for item in section.items:
                console.print(Text(item))
    return capture.get().rstrip("\n")


_STYLE = """\
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
h2 { font-size: 1.1em; margin: 2em 0 0 } h3 { font-size: 1em; font-weight: normal; margin: 1em 0 .3em }
table { border-collapse: collapse; margin: .5em 0 } th, td { text-align: left; padding: .1em .8em .1em 0 }
th { border-bottom: 1px solid #999; font-weight: 600 } td { border-bottom: 1px solid #eee }
.details { color: #666; margin: 0 } svg text { font: 11px system-ui, sans-serif }"""


def as_page(report: Report) -> str:
    """Format as an HTML page, which loads nothing from anywhere."""
    title, *others = report.heading
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in others)]
    for section in report.sections:
        tag = "h3" if section.is_part else "h2"
        body.append(f"<{tag}>{escape(section.title)}</{tag}>")
        if section.details:
            body.append(f'<p class="details">{escape(section.details)}</p>')
        if section.picture is not None:
            body.append(section.picture())
        if section.columns:
            rows = [("th", section.columns), *(("td", row) for row in section.rows)]
            lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in rows]
            body.append("<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>")
        if section.items:
            body += ["<ul>", *(f"<li>{escape(item)}</li>" for item in section.items), "</ul>"]
    head = f'<meta charset="utf-8"><title>{escape(report.name)}</title><style>{_STYLE}</style>'
    return "\n".join(['<!DOCTYPE html><html lang="en">', f"<head>{head}</head><body>", *body, "</body></html>\n"])


# ---- Numbers in words


_MOST_DIGITS = 10_000  # above it, the next unit


def ranges_of(numbers: Iterable[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3 and 7."""
    return as_ranges(sorted(numbers), ", ")


def bytes_of(nbytes: int) -> str:
    if nbytes < _MOST_DIGITS:
        return f"{nbytes:,} B"
    size, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if size >= _MOST_DIGITS:
            size, unit = size / 1024, larger
    return f"{size:,.1f} {unit}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
