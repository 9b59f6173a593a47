"""A fault, the promise that it tests, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .systems import System


@dataclass(frozen=True)
class Settings:
    """How thorough a run is, and where it may write.

    Attributes:
        quick: seconds, to see that it runs.
        steps: of the soak.
        seed: of everything that is drawn.
        folder: an empty one, removed afterwards.
    """

    quick: bool
    steps: int
    seed: int
    folder: Path

    def some(self, cases: Sequence[int], at_most: int = 3) -> list[int]:
        """All cases; of a quick run a few, evenly spread, with the first and the last."""
        cases = list(cases)
        if not self.quick or len(cases) <= at_most:
            return cases
        return [cases[i * (len(cases) - 1) // (at_most - 1)] for i in range(at_most)]


@dataclass(frozen=True)
class Verdict:
    is_kept: bool
    text: str


def verdict(done: str, problems: Sequence[str]) -> Verdict:
    """Kept if there are no problems; else their number and the first one, which may be long."""
    if not problems:
        return Verdict(True, done)
    count = f"{len(problems)} problems, the first: " if len(problems) > 1 else ""
    return Verdict(False, f"{done}; {count}{problems[0]}")


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    Attributes:
        name: the fault, for the table and for ``--only``.
        run: does it to a system, and judges.
    """

    name: str
    run: Callable[[System, Settings], Verdict]
