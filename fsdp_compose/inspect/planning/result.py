"""What ``plan()`` returns: the facts, and their forms."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .facts import PlanFacts
from .picture import save_picture
from .words import as_json, as_text


@dataclass(frozen=True)
class Plan(PlanFacts):
    """A plan, made by ``plan()``: ``print(plan(...))``. Its facts are in ``worlds``, see docs/planning.md."""

    def text(self) -> str:
        """Tables of memory, collectives and layout, and advice."""
        return as_text(self)

    def json(self) -> str:
        """All facts, for programs."""
        return as_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the memory by kind, for each number of ranks: ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the name ends in something else, or there is no such folder.
        """
        save_picture(self, Path(path))

    def __str__(self) -> str:
        return self.text()
