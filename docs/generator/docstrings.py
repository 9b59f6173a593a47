"""Docstrings of the package, which are plain text, as the Markdown that the reference is made of.

They are written for ``help()``: ``Ranks:`` begins a paragraph that says which ranks call, ``Example::`` code. Griffe
would take both for sections of its own. What it knows (``Args:``, ``Returns:``, ``Raises:``) is left as it is."""

from __future__ import annotations

import re
import textwrap

import griffe

_SHARED = re.compile(r"^( +)(\w+)((?:, \w+)+):((?:.*)(?:\n\1 .*)*)", re.MULTILINE)  # several arguments, one description
_SECTIONS = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Paragraphs about ranks in bold, unindented; indented code after ``::`` fenced; each argument by itself."""
    text = _SHARED.sub(_apart, text)
    return "\n\n".join(_paragraphs(re.split(r"\n\s*\n", text.strip("\n"))))


def _apart(found: re.Match[str]) -> str:
    indent, first, others, text = found.groups()
    return "\n".join([f"{indent}{first}:{text}", *(f"{indent}{name}: see {first}." for name in others[2:].split(", "))])


def _paragraphs(parts: list[str]) -> list[str]:
    made: list[str] = []
    is_code = False
    for part in parts:
        if is_code and part.startswith("    "):
            code = textwrap.dedent(part)
            if made[-1].endswith("\n```"):  # the code has an empty line in it
                made[-1] = made[-1].removesuffix("\n```") + f"\n\n{code}\n```"
            else:
                made.append(f"```python\n{code}\n```")
            continue
        is_code = part.endswith("::")
        if is_code:
            part = re.sub(r"^Example::$", "**Example**:", part.removesuffix("::") + "::")
            part = part.removesuffix(":") if part.endswith("::") else part
        if part.startswith("Ranks:") and not _SECTIONS.search(part):
            lines = [line.strip() for line in part.removeprefix("Ranks:").splitlines()]
            part = "**Ranks**: " + " ".join(filter(None, lines))
        made.append(part)
    return made
