"""What each test costs: CPU seconds of all its processes, and seconds on the clock.

``pytest --write-costs FILE`` measures a run and writes the file; ``make costs`` runs all tests and writes
``costs.json`` beside this one, from which ``tests/tiers.py`` chooses the tests of ``make test``.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")


class Costs:
    """A plug-in of pytest. A worker of xdist measures, and sends what it has measured with the report of the test's
    teardown; the process that started the workers, or the only process, writes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.begun = (0.0, 0.0)
        self.measured: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.begun = cpu_seconds(), time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            begun, clock = self.begun
            report.user_properties.append(("cost", (cpu_seconds() - begun, time.monotonic() - clock)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = report.nodeid.partition("[")[0]
        self.measured[function] += [tuple(value) for name, value in report.user_properties if name == "cost"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        costs = {
            function: {"cases": len(of), "cpu": _mean(cpu for cpu, _ in of), "clock": _mean(clock for _, clock in of)}
            for function, of in sorted(self.measured.items())
            if of
        }
        lines = (f"{json.dumps(function)}: {json.dumps(cost)}" for function, cost in costs.items())
        self.file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _mean(seconds: Iterable[float]) -> float:
    return round(statistics.fmean(seconds), 3)


def cpu_seconds() -> float:
    """CPU seconds of this process and all that descend from it, those that have ended included."""
    ticks, left = 0, [os.getpid()]
    while left:
        pid = left.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])  # user, system, and those of children that have ended
            for task in os.listdir(f"/proc/{pid}/task"):
                left += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:  # it has just ended
            continue
    return ticks / TICK
