"""Runs random compositions of parallelism, and reduces those that are wrong: see ``tests/programs/compositions``.

    python -m tests.whole.compositions --seconds 600 --ranks 2 4     # as many as it can, other ones with another --seed
    python -m tests.whole.compositions --system FSDP2                # in FSDP2's spelling; drop_in runs it too

A wrong composition is printed after features, options and layers were taken away as long as it stays wrong. What FSDP2
refuses with an error is counted by its message.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from tests.harness import preload, run_distributed
from tests.programs import compositions
from tests.programs.compositions import SYSTEMS, Composition, made_possible, random_composition, simpler

preload(compositions.__name__)


def run(asked: Sequence[Composition], world_size: int, folder: Path, timeout: float) -> list[list[str]]:
    """What is wrong in each; the last ones are missing after ranks have failed in different ways, or hang."""
    results = folder / "results.pt"
    results.unlink(missing_ok=True)
    arguments = {"compositions": [*asked], "folder": folder, "results": results}
    found: list[list[str]] = []
    try:
        run_distributed(compositions.run_compositions, world_size, arguments, timeout=timeout)
    except pytest.fail.Exception as failure:
        found = torch.load(results) if results.exists() else []
        return [*found, [str(failure)[-3000:]]][: len(asked)]
    found = torch.load(results)
    return found


def reduced(composition: Composition, world_size: int, folder: Path) -> tuple[Composition, list[str]]:
    """With as little as leaves something wrong."""
    (wrong,) = run([composition], world_size, folder, 60)
    tried = {composition}
    while True:
        others = dict.fromkeys(item for item in map(made_possible, simpler(composition)) if item not in tried)
        for other in others:
            tried.add(other)
            (found,) = run([other], world_size, folder, 60)
            if found and found[0].split(":")[0] == wrong[0].split(":")[0]:  # in the same way
                composition, wrong = other, found
                break
        else:
            return composition, wrong


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    options.add_argument("--system", choices=SYSTEMS, default=SYSTEMS[0])
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--together", type=int, default=40, help="compositions that ranks are sent at once")
    given = options.parse_args()
    end, random, counts = time.monotonic() + given.seconds, Random(given.seed), Counter[str]()
    while time.monotonic() < end:
        for world_size in given.ranks:
            left = [random_composition(random, world_size, given.system) for _ in range(given.together)]
            while left:
                with tempfile.TemporaryDirectory() as folder:
                    found = run(left, world_size, Path(folder), 30 + 6 * len(left))
                    for composition, wrong in zip(left, found, strict=False):
                        if given.system == "FSDP2" and wrong and re.match(r"\w+Error: ", wrong[0]):
                            counts[wrong[0][:60]] += 1
                            continue
                        counts["wrong" if wrong else "right"] += 1
                        if wrong:
                            small, words = reduced(composition, world_size, Path(folder))
                            print(f"{world_size} ranks: {small}\n  " + "\n  ".join(words), flush=True)
                left = left[len(found) :]
            print(f"{sum(counts.values())} compositions: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
