"""Random compositions of parallelism, each with the bound of 1e-12 to one process in float64: see ``compositions``.

``python -m tests.whole.test_compositions --seconds 600 --ranks 2 4`` runs others, as many as it can, and prints those
that are wrong with one thing less in each, as far as they stay wrong. ``--system FSDP2`` (or ``drop_in``) runs FSDP2's
spelling.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from tests.harness import preload, run_distributed
from tests.mixtures import Layout
from tests.programs import compositions
from tests.programs.compositions import SYSTEMS, Composition, Piece, made_possible, random_composition, simpler

preload(compositions.__name__)

# Two meshes have a dimension of one name, "ep", and of other sizes.
_ONE_NAME = Composition(
    layout=Layout(replicate=2, tp=2, folds=True), pieces=(Piece("few experts"), Piece("LoRA", has_group=False))
)


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


@pytest.mark.parametrize(("system", "num"), [("fsdp_compose", 20), ("drop_in", 8)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.timeout(300)
def test_random_compositions_train_as_one_process(world_size, system, num, tmp_path):
    random = Random(world_size)
    asked = [random_composition(random, world_size, system) for _ in range(num)]
    asked += [_ONE_NAME] if world_size == 4 and system == "fsdp_compose" else []
    for composition, wrong in zip(asked, run(asked, world_size, tmp_path, 240), strict=True):
        assert not wrong, f"{composition}\n{wrong}"


# ---- Many


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
                        counts["wrong" if wrong else "right"] += 1
                        if wrong:
                            small, words = reduced(composition, world_size, Path(folder))
                            print(f"{world_size} ranks: {small}\n  " + "\n  ".join(words), flush=True)
                left = left[len(found) :]
            print(f"{sum(counts.values())} compositions: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
