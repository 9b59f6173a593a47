"""Which blocks of the package each test case runs, over all its processes.

    python -m tests.tools.record FOLDER [arguments of pytest, such as --numprocesses 2]

FOLDER/cases.jsonl has a line for each case, with the numbers of blocks; FOLDER/blocks.json says what the blocks are.

The tests run in a copy of this checkout, in which every block of the package (the beginning of a function, of
a branch, and what follows a statement that may leave) sets a byte of a file that all processes of a test map. So ranks
need not know which test they run, and a block costs 40 ns. Of each function of tests as many cases run as begin within
``SECONDS``. Functions that FOLDER has already are not run again.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("RECORD_SECONDS", "0.7"))
SEEN = """import mmap, os
if os.environ.get("RECORDED_BLOCKS"):
    with open(os.environ["RECORDED_BLOCKS"], "r+b") as file:
        seen = mmap.mmap(file.fileno(), 0)
else:
    seen = bytearray({size})
"""


class Block(NamedTuple):
    function: str  # "Class.method", "function.<locals>.inner"
    statements: list[ast.stmt]  # the list that it is a part of
    start: int
    stop: int


def blocks(tree: ast.Module) -> Iterator[Block]:
    """The blocks inside functions, in the order of the file."""
    yield from _blocks_of_definitions(tree.body, "")


def _blocks_of_definitions(body: list[ast.stmt], name: str) -> Iterator[Block]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield from _blocks(node.body, name + node.name, is_function=True)
        elif isinstance(node, ast.ClassDef):
            yield from _blocks_of_definitions(node.body, f"{name}{node.name}.")
        else:
            for inner in _bodies(node):
                yield from _blocks_of_definitions(inner, name)


def _bodies(node: ast.stmt) -> list[list[ast.stmt]]:
    found = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
    found += [part.body for field in ("handlers", "cases") for part in getattr(node, field, [])]
    return [body for body in found if body]


def _blocks(body: list[ast.stmt], name: str, *, is_function: bool = False) -> Iterator[Block]:
    start = int(is_function and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant))
    cuts = [start, *(place + 1 for place in range(start, len(body) - 1) if _may_leave(body[place])), len(body)]
    for first, after in itertools.pairwise(cuts):
        yield Block(name, body, first, after)
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from _blocks_of_definitions([node], f"{name}.<locals>.")
        else:
            for inner in _bodies(node):
                yield from _blocks(inner, name)


def _may_leave(node: ast.stmt) -> bool:
    leaving = (ast.Return, ast.Raise, ast.Continue, ast.Break)
    return not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and any(
        isinstance(inner, leaving) for inner in ast.walk(node)
    )


def copy_checkout(folder: Path) -> None:
    """A copy of the tracked files and of new ones."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def instrument(folder: Path) -> list[tuple[str, str, int]]:
    """Rewrites the package in ``folder``. Returns file, function and first line of each block."""
    found: list[tuple[str, str, int]] = []
    for path in sorted((folder / "fsdp_compose").rglob("*.py")):
        tree = ast.parse(path.read_text())
        insertions = []
        for block in blocks(tree):
            line = block.statements[min(block.start, len(block.statements) - 1)].lineno
            insertions.append((block.statements, block.start, ast.parse(f"_seen[{len(found)}] = 1").body[0]))
            found.append((str(path.relative_to(folder)), block.function, line))
        for statements, place, mark in sorted(insertions, key=lambda insertion: -insertion[1]):
            statements.insert(place, mark)
        if insertions:
            place = next(
                number
                for number, node in enumerate(tree.body)
                if not (
                    isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
                )
            )
            tree.body.insert(place, ast.parse("from fsdp_compose._seen import seen as _seen").body[0])
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (folder / "fsdp_compose/_seen.py").write_text(SEEN.format(size=len(found)))
    return found


class Recorder:
    """The plug-in of pytest: notes for each case which bytes are set, and clears them."""

    def __init__(self) -> None:
        from fsdp_compose._seen import seen

        self.seen = seen
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.outcome = ""
        self.file = open(os.environ["RECORDED_BLOCKS"] + ".jsonl", "a")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        earlier = Path(os.environ["RECORD_FOLDER"], "cases.jsonl")
        known = {function_of(json.loads(line)["id"]) for line in earlier.open()} if earlier.exists() else set()
        items[:] = [item for item in items if function_of(item.nodeid) not in known]
        places: dict[str, int] = {}
        for item in items:
            places.setdefault(function_of(item.nodeid), len(places))
        items.sort(key=lambda item: (places[function_of(item.nodeid)], zlib.crc32(item.nodeid.encode())))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.seen[:] = bytes(len(self.seen))
        start = time.perf_counter()
        result = yield
        seconds = time.perf_counter() - start
        self.spent[function_of(item.nodeid)] += seconds
        ran = [number for number, byte in enumerate(self.seen[:]) if byte]
        if self.outcome:
            case = {"id": item.nodeid, "seconds": round(seconds, 3), "outcome": self.outcome, "blocks": ran}
            self.file.write(json.dumps(case) + "\n")
            self.file.flush()
        return result

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.outcome = ""
        if self.spent[function_of(item.nodeid)] > SECONDS:
            pytest.skip("enough cases of this function have run")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.outcome = report.outcome


def function_of(case: str) -> str:
    return case.partition("[")[0]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder())


def main() -> None:
    folder, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    copy = folder / "checkout"
    copy_checkout(copy)
    found = instrument(copy)
    (folder / "blocks.json").write_text(json.dumps(found))
    environment = {**os.environ, "PYTHONPATH": str(copy), "RECORD_FOLDER": str(folder)}
    ignored = [f"--ignore=tests/{name}" for name in ("whole", "compiled", "gpu", "test_architecture.py")]
    command = [sys.executable, "-m", "pytest", "-p", "tests.tools.record", "-p", "no:cacheprovider", "-q", *ignored]
    subprocess.run([*command, *arguments], cwd=copy, env=environment)
    with (folder / "cases.jsonl").open("a") as file:
        for part in sorted(folder.glob("*.seen.jsonl")):
            file.write(part.read_text())
            part.unlink()


if __name__ == "__main__":
    main()
elif "RECORD_FOLDER" in os.environ:  # a plug-in, before the package is imported
    name = os.environ.get("PYTEST_XDIST_WORKER", f"process{os.getpid()}")
    path = Path(os.environ["RECORD_FOLDER"], f"{name}.seen")
    path.write_bytes(bytes(len(json.loads((path.parent / "blocks.json").read_text()))))
    os.environ["RECORDED_BLOCKS"] = str(path)
