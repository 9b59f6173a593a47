"""The command: it kills, stops, starves and damages real jobs, and says whether what is promised held.

    python -m benchmarks.faults                      # fsdp_compose; minutes
    python -m benchmarks.faults --systems all        # the table of docs/project/faults.md, with FSDP2 and DCP
    python -m benchmarks.faults --only flip --quick  # some faults, a few cases of each

The last line is the verdict on fsdp_compose. Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

from . import (
    async_saves,
    bit_flips,
    disk_full,
    elastic_groups,
    killed_saves,
    lost_ranks,
    muon_steps,
    out_of_memory,
    restarts,
    soak,
    two_jobs,
)
from .fault import Fault, Settings, Verdict
from .systems import OURS, SYSTEMS, System

PARTS = [
    killed_saves,
    async_saves,
    two_jobs,
    disk_full,
    bit_flips,
    restarts,
    lost_ranks,
    muon_steps,
    elastic_groups,
    out_of_memory,
    soak,
]
FAULTS: list[Fault] = [fault for part in PARTS for fault in part.FAULTS]


def judge(fault: Fault, system: System, settings: Settings) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True) as folder:
        try:
            return fault.run(system, replace(settings, folder=Path(folder)))
        except Exception as error:
            traceback.print_exc()
            return Verdict(False, f"the battery failed: {type(error).__name__}: {error}")


def cell(verdict: Verdict, seconds: float) -> str:
    text = verdict.text.replace("|", "\\|").replace("\n", " ")
    text = text if len(text) <= 400 else text[:397] + "..."
    return f"{'as promised' if verdict.is_kept else '**not as promised**'}: {text} ({seconds:.0f} s)"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with all that is started ended, and folders removed
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.faults", description=__doc__, formatter_class=formatter)
    parser.add_argument("--systems", choices=("ours", "all", *SYSTEMS), default="ours")
    parser.add_argument("--only", default="", help="run the faults whose names contain this")
    parser.add_argument("--quick", action="store_true", help="a few cases of each fault: to see that it runs")
    parser.add_argument("--steps", type=int, default=3000, help="of the soak")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args()
    names = {"ours": [OURS], "all": list(SYSTEMS)}.get(options.systems, [options.systems])
    systems = [SYSTEMS[name] for name in names]
    settings = Settings(
        options.quick, min(options.steps, 100) if options.quick else options.steps, options.seed, Path()
    )
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no fault has that in its name")
    print(f"| fault | {' | '.join(system.name for system in systems)} |\n|---|{'---|' * len(systems)}", flush=True)
    num_kept = 0
    for fault in chosen:
        cells = []
        for system in systems:
            start = time.monotonic()
            found = judge(fault, system, settings)
            cells.append(cell(found, time.monotonic() - start))
            num_kept += system.is_ours and found.is_kept
        print(f"| {fault.name} | {' | '.join(cells)} |", flush=True)
    if OURS in names:
        print(f"\nfaults: {num_kept} of {len(chosen)} as promised")
        sys.exit(num_kept < len(chosen))


if __name__ == "__main__":
    main()
