"""Small edits of the package, and which test notices each.

    python -m tests.tools.record RECORD                           first: which cases run what (minutes)
    python -m tests.tools.mutate RECORD RESULTS [--part 0/2]      applies each edit in a copy of this checkout

An edit turns a comparison, moves a constant by one, negates a condition, leaves out a call, drops a dtype or device, or
returns ``None``. Edits are spread over the files of ``WINGS`` by their lines, and within a file over the kinds, by a
seed. The cases that run the edited block are run, cheap and specific ones first, until one fails or hangs. A line
of RESULTS is one edit; those that it has are not made again.

Interpreters that begin would take longer than the tests: each run is forked from this process, which has imported what
tests import, and so is the server from which ranks are forked.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import json
import multiprocessing.forkserver as forkserver
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.tools.record import ROOT, blocks, copy_checkout, function_of
from tests.tools.which_tests import files_for

WINGS = ("flat", "group", "runtime", "comm", "ragged", "optim", "checkpoint")
TURNED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
FIRST = 10  # cases run before the others are collected: most edits are noticed by one of them
NEAR = 20  # blocks before and after that of an edit
NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # turned is negated


class Edit(NamedTuple):
    file: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    start: int  # bytes of the file that ``after`` replaces
    stop: int
    block: int  # among those of the record


# ---- edits


def wing_of(file: str) -> str:
    return file.removeprefix("fsdp_compose/").removeprefix("core/").partition("/")[0]


def edits_of(file: str, first_block: int) -> Iterator[Edit]:
    source = (ROOT / file).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for number, block in enumerate(blocks(_marked(ast.parse(source))), first_block):
        for statement in block.statements[block.start : block.stop]:
            for node in _inside(statement):
                for kind, new in _changes(node):
                    start = starts[node.lineno - 1] + node.col_offset
                    stop = starts[node.end_lineno - 1] + node.end_col_offset
                    before = source.encode()[start:stop].decode()
                    yield Edit(file, block.function, node.lineno, kind, before, new, start, stop, number)


def _inside(node: ast.AST) -> Iterator[Any]:
    """A statement and what is in it, but not other statements, errors, and annotations."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            inner = isinstance(child, ast.AST) and not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case))
            if inner and name != "annotation":
                yield from _inside(child)


def _changes(node: Any) -> Iterator[tuple[str, str]]:
    is_turned = isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED
    if is_turned:
        yield "comparison", _unparsed(node, ops=[TURNED[type(node.ops[0])]()])
    if isinstance(node, ast.BoolOp):
        yield "comparison", _unparsed(node, op=TURNED[type(node.op)]())
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield "constant", repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return  # its test is one of the expressions below
    if getattr(node, "is_condition", False) and not (is_turned and isinstance(node.ops[0], NEGATED)):
        yield "condition", f"(not ({ast.unparse(node)}))"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", "None"
    if isinstance(node, ast.Call):
        kept = [keyword for keyword in node.keywords if keyword.arg not in ("dtype", "device")]
        if len(kept) < len(node.keywords):
            yield "dtype", _unparsed(node, keywords=kept)
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "None", "return None"


def _unparsed(node: Any, **fields: Any) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    text = ast.unparse(changed)
    return text if isinstance(node, ast.Call) else f"({text})"


def chosen_edits(number: int, seed: int, recorded: list[list[Any]]) -> list[Edit]:
    """Evenly by lines over files, evenly over kinds in a file."""
    firsts: dict[str, int] = {}
    for place, (file, *_) in enumerate(recorded):
        firsts.setdefault(file, place)
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in firsts if wing_of(file) in WINGS}
    chosen, due = [], 0.0
    for file in sorted(lines):
        now = [block.function for block in blocks(ast.parse((ROOT / file).read_text()))]
        assert now == [function for other, function, _ in recorded if other == file], (
            f"{file} is not that of the record"
        )
        choice = random.Random(f"{seed} {file}")
        kinds: defaultdict[str, list[Edit]] = defaultdict(list)
        for edit in edits_of(file, firsts[file]):
            kinds[edit.kind].append(edit)
        order = []
        for edits in choice.sample(sorted(kinds.items()), len(kinds)):
            choice.shuffle(edits[1])
            order += [(place, edit) for place, edit in enumerate(edits[1])]
        order.sort(key=lambda placed: placed[0])
        due += number * lines[file] / sum(lines.values())
        taken, due = int(due + 0.5), due - int(due + 0.5)
        chosen += [edit for _, edit in order[:taken]]
    random.Random(seed).shuffle(chosen)
    return chosen


def _marked(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            node.test.is_condition = "TYPE_CHECKING" not in ast.unparse(node.test)  # type: ignore[attr-defined]
    return tree


# ---- runs


class Run:
    """Runs cases in a copy of the checkout, in a process forked from this one."""

    def __init__(self, copied: Path, report: Path, warm: bool = True) -> None:
        self.copied, self.report = copied, report
        if warm:  # collects everything once: modules are compiled, and this process imports what they import
            self(["tests"], None, 600, "--ignore=tests/whole", "--ignore=tests/compiled", "--collect-only")
            for name in json.loads(report.read_text())["modules"]:
                with contextlib.suppress(Exception):
                    __import__(name)

    def __call__(
        self, files: list[str], seconds: dict[str, float] | None, limit: float, *options: str
    ) -> dict[str, Any]:
        """``seconds``: the cases to run, in this order, with the time that each has taken; all, if it is empty."""
        self.report.unlink(missing_ok=True)
        with own_folder("mutated_") as folder:
            child = os.fork()
            if not child:
                try:
                    self._child(folder, files, seconds, options)
                finally:
                    os._exit(0)
            deadline = time.monotonic() + limit
            while not os.waitpid(child, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    _kill_with_children(child)
                    os.waitpid(child, 0)
                    break
                time.sleep(0.05)
        if not self.report.exists():
            return {"outcome": "noticed", "by": "all", "how": "the run did not end in time, or its process died"}
        result: dict[str, Any] = json.loads(self.report.read_text())
        return result

    def _child(self, folder: str, files: list[str], seconds: dict[str, float] | None, options: tuple[str, ...]) -> None:
        os.setsid()
        output = os.open(self.report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.copied)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "fsdp_compose")]:
            del sys.modules[name]
        sys.modules["__main__"] = types.ModuleType("__main__")  # else every rank would import this file
        sys.path[:] = [str(self.copied), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.environ.update(PYTHONPATH=str(self.copied), TMPDIR=folder, CI="1", RES_OPTIONS="attempts:0")
        os.environ.update(PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1", GLOO_SOCKET_IFNAME="lo")
        tempfile.tempdir = folder
        if seconds is not None:
            sys.dont_write_bytecode = True
            modules = [file.removesuffix(".py").replace("/", ".") for file in files]
            _start_server(["tests.rewriting", "torch", "torch._dynamo", "tests.harness", *modules])
        plugin = _Plugin(seconds)
        code = pytest.main([*files, "-q", "-p", "no:cacheprovider", *options], plugins=[plugin])
        if code not in (0, 1, 5) and not plugin.by:
            plugin.by, plugin.how = "all", "pytest cannot begin"
        sizes = sorted(name for name in sys.modules if name.partition(".")[0] not in ("tests", "fsdp_compose"))
        result = {"outcome": "noticed" if plugin.by else "survived", "by": plugin.by, "how": plugin.how}
        self.report.write_text(json.dumps(result | ({"modules": sizes} if seconds is None else {"ran": plugin.ran})))


class _Plugin:
    def __init__(self, seconds: dict[str, float] | None) -> None:
        self.seconds, self.by, self.how, self.ran = seconds, "", "", 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.seconds:
            place = {case: number for number, case in enumerate(self.seconds)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A hang is noticed in ten times the usual time."""
        harness = sys.modules["tests.harness"]
        run = harness.__dict__.setdefault("_run", harness.run_distributed)
        usual = (self.seconds or {}).get(item.nodeid, 60.0)

        @functools.wraps(run)
        def run_distributed(*arguments: Any, timeout: float = 60, **rest: Any) -> None:
            run(*arguments, timeout=min(timeout, 40 + 10 * usual), **rest)

        harness.run_distributed = run_distributed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self._noticed(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._noticed(report.nodeid, report.longreprtext)

    def _noticed(self, by: str, text: str) -> None:
        if not self.by:
            errors = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:]
            self.by, self.how = by, " ".join(errors)[:200]


def _start_server(modules: list[str]) -> None:
    """Starts the server that forks ranks as a fork of this process."""

    def fork(_executable: bytes, arguments: list[str], kept: list[int]) -> int:
        if pid := os.fork():
            return pid
        for descriptor in set(range(3, 256)) - set(kept):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        exec(arguments[-1], {})
        os._exit(0)

    forkserver.set_forkserver_preload(modules)
    forkserver.util.spawnv_passfds, spawn = fork, forkserver.util.spawnv_passfds
    forkserver.ensure_running()
    forkserver.util.spawnv_passfds = spawn


def _kill_with_children(pid: int) -> None:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def cases_for(
    edit: Edit, cases: list[dict[str, Any]], num_cases: Counter[int], budget: float, only: dict[str, list[str]]
) -> dict[str, float]:
    """The cases that run the edited block, with their seconds; one of each function before a second one. Those come
    first that are cheap, and that run what few cases run near that block: they are likely to be its tests.
    ``only``: the cases of each function that may run, if not all."""
    near = range(edit.block - NEAR, edit.block + NEAR + 1)

    def key(case: dict[str, Any]) -> float:
        rare = sum(1 / num_cases[block] for block in {*case["blocks"]}.intersection(near))
        return float((case["seconds"] + 0.3) / rare)

    running = [case for case in cases if edit.block in case["blocks"] and case["outcome"] == "passed"]
    running.sort(key=key)
    if only:
        running = [{**case, "id": other} for case in running for other in only[function_of(case["id"])]]
    num_of: defaultdict[str, int] = defaultdict(int)
    placed = []
    for place, case in enumerate(running):
        function = function_of(case["id"])
        placed.append((num_of[function], place, case))
        num_of[function] += 1
    chosen: dict[str, float] = {}
    for _, _, case in sorted(placed, key=lambda entry: entry[:2]):
        if sum(chosen.values()) + case["seconds"] < budget or not chosen:
            chosen[case["id"]] = case["seconds"]
    return chosen


@contextlib.contextmanager
def own_folder(prefix: str) -> Iterator[str]:
    """A temporary folder that processes forked from this one leave alone when they end."""
    folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def applied(edit: Edit, copied: Path) -> Iterator[None]:
    path = copied / edit.file
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(before[: edit.start] + edit.after.encode() + before[edit.stop :])
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what is compiled is that of this file again


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--number", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20, help="of the cases that run for one edit")
    parser.add_argument("--whole", type=float, default=0, help="seconds of whole files of the table for what survives")
    parser.add_argument("--part", default="0/1", help="for several at a time, each with results of its own")
    parser.add_argument(
        "--wings", nargs="+", default=WINGS, help="of the edits that are chosen, make those in these alone"
    )
    parser.add_argument("--only", type=Path, help="output of pytest --collect-only -q --tier small: only these run")
    given = parser.parse_args()
    only: defaultdict[str, list[str]] = defaultdict(list)
    for case in [] if given.only is None else given.only.read_text().splitlines():
        only[function_of(case)].append(case)
    cases = [json.loads(line) for line in (given.record / "cases.jsonl").read_text().splitlines()]
    num_cases = Counter(block for case in cases for block in case["blocks"])
    edits = chosen_edits(given.number, given.seed, json.loads((given.record / "blocks.json").read_text()))
    part, of = map(int, given.part.split("/"))
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    done = {tuple(json.loads(line)["edit"]) for line in lines}
    with own_folder("mutations_") as folder:
        copied = Path(folder, "checkout")
        copy_checkout(copied)
        run = Run(copied, Path(folder, "report.json"))
        for edit in edits[part::of]:
            if tuple(edit) in done or wing_of(edit.file) not in given.wings:
                continue
            seconds = cases_for(edit, cases, num_cases, given.seconds, only)
            start = time.monotonic()
            result: dict[str, Any] = {"outcome": "survived", "by": "", "how": "no case runs it"}
            with applied(edit, copied):
                for some in (dict([*seconds.items()][:FIRST]), dict([*seconds.items()][FIRST:])):
                    if some and result["outcome"] == "survived":
                        files = [*dict.fromkeys(case.partition("::")[0] for case in some)]
                        result = run(files, some, 60 + 10 * sum(some.values()), "-x")
                if given.whole and result["outcome"] == "survived":
                    result = run(files_for(edit.file), {}, given.whole, "-x")
            result |= {"took": round(time.monotonic() - start, 1), "cases": len(seconds), "edit": edit}
            with given.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(
                f"{result['outcome']}: {edit.file}:{edit.line} {edit.kind} {result['by']} ({result['took']} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
