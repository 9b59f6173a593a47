"""Which test files to run after a change of a file of the package, the best first.

    make which-tests FILE=fsdp_compose/core/flat/layout.py
    python -m tests.tools.which_tests --write RECORD    rewrites the table from what tests.tools.record wrote

The table, ``which_tests.txt``, has a line for each file of the package. A test file comes first in it that runs most of
the package's file, where what few test files run counts most; each that follows, for what those before it do not run.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".txt")
MOST = 6  # test files in a line
LEAST = 0.02  # of a file's blocks, weighted, that a further test file must add
SEEN_TWICE = 0.25  # what a block counts for a further test file, each time that one before it runs the block
OWN_FOLDER = 2.0  # how much more a test of the folder of the file's wing counts
# The folder of tests of what has none of its own.
_ELSEWHERE = {
    **{
        "fsdp_compose": "api",
        "core": "api",
        "state_dicts": "checkpoint",
        "optimizers": "optim",
        "ops": "ragged",
        "plugins": "runtime",
    },
    **{
        "gloo": "comm",
        "transports": "comm",
        "replicas": "comm",
        "parameter_classes": "flat",
        "tensor_parallel": "flat",
    },
    **{"graphs": "compiled", "functional": "runtime", "optional_groups": "runtime", "debugging": "group"},
    **{"offloading": "api"},
}


def table() -> dict[str, list[str]]:
    lines = (line.partition(": ") for line in TABLE.read_text().splitlines())
    return {file: tests.split() for file, _, tests in lines}


def files_for(file: str) -> list[str]:
    """The test files of a file; for one that the table does not have, such as a new one, those of its wing's folder.
    Tests of torch.compile are not recorded: what they need is in files named graph."""
    listed = [test for test in table().get(file, []) if (ROOT / test).exists()]
    folder = ("compiled",) if "graph" in Path(file).stem else _folder(file)
    return listed or sorted(str(path.relative_to(ROOT)) for path in ROOT.joinpath("tests", *folder).glob("test_*.py"))


def made_from(record: Path) -> dict[str, list[str]]:
    blocks = json.loads((record / "blocks.json").read_text())
    tests_running: defaultdict[int, set[str]] = defaultdict(set)
    for line in (record / "cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        for block in case["blocks"]:
            tests_running[block].add(case["id"].partition("::")[0])
    of_file: defaultdict[str, dict[int, set[str]]] = defaultdict(dict)
    for number, (file, *_) in enumerate(blocks):
        if number in tests_running:
            of_file[file][number] = tests_running[number]
    return {file: _best(file, running) for file, running in sorted(of_file.items())}


def _folder(file: str) -> tuple[str, ...]:
    """The folder of tests for a file of the package: that of its wing, or of the annex that users find it in."""
    wing = Path(file).parts[-2]  # of a file beside the wings, the package itself
    return (_ELSEWHERE.get(wing, wing),)


def _best(file: str, running: dict[int, set[str]]) -> list[str]:
    weights = {block: 1 / len(tests) for block, tests in running.items()}
    least, chosen = LEAST * sum(weights.values()), list[str]()
    while len(chosen) < MOST:
        gains: defaultdict[str, float] = defaultdict(float)
        for block, tests in running.items():
            for test in tests - {*chosen}:
                is_own = Path(test).parts[1:-1] == _folder(file)
                gains[test] += weights[block] * (OWN_FOLDER if is_own else 1.0)
        best = max(sorted(gains), key=lambda test: gains[test], default="")
        if not gains or gains[best] < least:
            break
        chosen.append(best)
        for block, tests in running.items():
            if best in tests:
                weights[block] *= SEEN_TWICE
    return chosen


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        lines = [f"{file}: {' '.join(tests)}\n" for file, tests in made_from(Path(sys.argv[2])).items()]
        TABLE.write_text("".join(lines))
        return
    known = table()
    for given in sys.argv[1:]:
        file = str(Path(given).resolve().relative_to(ROOT)) if Path(given).exists() else given
        if file not in known:
            print(
                f"{file} is not in {TABLE.relative_to(ROOT)} (a new name?); the tests of its folder:",
                file=sys.stderr,
            )
        tests = files_for(file)
        print("\n".join(tests) if tests else f"no test file is known for {file}: run make test")


if __name__ == "__main__":
    main()
