"""Which cases of a test run: ``make test`` has few, ``make test-all`` all that tell something.

A test function with several ``parametrize`` marks has a case for each combination of their values.

- ``all``: where there are three marks or more, cases that cover every *pair* of values; else every case.
- ``small``: cases that cover every *value*, on two ranks where the test has that number, else on the fewest above, as
  many as fit into ``SECONDS`` of CPU time, and at least one; of the few functions of which one case takes more than
  ``DEAR``, none. What a case costs was measured (``tests/tools/costs.py``).

A failure that only ``all`` finds adds its case to ``small``: ``pytest.param(..., marks=pytest.mark.small)``.
Equal trees choose equal cases: nothing here is random, and the order is that of collection.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import pytest

TIERS = ("small", "all", "every")  # every: each combination, as without tiers
SECONDS = 0.3  # of CPU time that a function has in the small tier
DEAR = 1.5  # CPU seconds; one function in 17 takes more, and these take nearly as long as all others together
UNKNOWN = 0.3  # CPU seconds of a case that nobody has measured
COSTS = Path(__file__).with_name("tools") / "costs.json"


def choose(items: Sequence[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the items that run, and those that are left to another command, both in the order of ``items``."""
    if tier == "every":
        return [*items], []
    costs = measured() if tier == "small" else {}
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(function_of(item), []).append(item)
    chosen: set[pytest.Item] = set()
    for name, cases in functions.items():
        if tier == "small":
            cost = max(costs.get(name, UNKNOWN), 1e-3)
            most = max(1, int(SECONDS / cost)) if cost <= DEAR else 0
            chosen.update(cover(sorted(cases, key=_ranks), 1)[:most])
            chosen.update(case for case in cases if case.get_closest_marker("small"))
        else:
            chosen.update(cover(cases, 2) if len(_values(cases[0])) > 2 else cases)
    return [item for item in items if item in chosen], [item for item in items if item not in chosen]


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def measured() -> dict[str, float]:
    """CPU seconds of a case of each test function."""
    return {name: cost["cpu"] for name, cost in json.loads(COSTS.read_text()).items()}


def cover(cases: Sequence[pytest.Item], of: int) -> list[pytest.Item]:
    """Returns cases in which every ``of`` values that occur together in ``cases`` do so: always that case next which
    adds most, and of several the first."""
    adds = {case: set(_combinations(case, of)) for case in cases}
    missing = set().union(*adds.values())
    chosen = []
    while missing:
        best = max(adds, key=lambda case: len(adds[case] & missing))
        missing -= adds.pop(best)
        chosen.append(best)
    return chosen or [*cases[:1]]


def _combinations(case: pytest.Item, of: int) -> Iterable[Hashable]:
    # With single values, the number of ranks is none of them: _ranks chooses it.
    values = [(n, value) for n, value in enumerate(_values(case)) if of > 1 or not value.endswith("ranks")]
    return itertools.combinations(values, min(of, len(values)))


def _values(case: pytest.Item) -> list[str]:
    """The names of the values of a case, one for each ``parametrize`` mark."""
    spec = getattr(case, "callspec", None)
    return [] if spec is None else spec._idlist


def _ranks(case: pytest.Item) -> tuple[bool, int]:
    number = getattr(case, "callspec", None) and case.callspec.params.get("world_size")
    number = number if isinstance(number, int) else 2
    return number < 2, number
