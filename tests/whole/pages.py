"""Pages of the documentation as programs: their blocks of code, and how these are run.

A page's ```python blocks run in order, in one namespace and one process. Comments, which readers do not see, say more:

    <!-- ranks: 2 -->            the blocks from here on run on 2 ranks, anew; a process group is made, if they do not
    <!-- after: tutorial.md 1 -->  the first block of that page runs before those from here on
    <!-- setup                   so does this
    code -->
    <!-- raises: RuntimeError --> the next block ends with such an error
    <!-- fragment: why -->       the next block is not run
    <!-- example -->             the next ```text block shows how it may look, not what comes

A ```text block right below one of code is what that prints on the first rank, or the text of its error, in which "..."
stands for anything."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import ROOT

_PARTS = re.compile(
    r"^<!-- *(?P<directive>ranks|after|setup|raises|fragment|example)\b:?(?P<given>.*?)-->"
    r"|^```(?P<language>[^\n`]*)\n(?P<code>.*?)^``` *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    language: str
    code: str
    line: int  # of its first line
    expected: str | None = None
    raises: str = ""
    fragment: str = ""


@dataclass
class Section:
    """Blocks that run in the same processes. ``ranks``: 0 for one process without a process group."""

    page: Path
    ranks: int
    setup: list[Block] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.blocks[0].line}"


@dataclass
class Page:
    path: Path
    blocks: list[Block]
    sections: list[Section]


def all_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(path: Path) -> Page:
    text = path.read_text()
    page, section = Page(path, [], []), Section(path, 0)
    pending: dict[str, str] = {}
    end = 0
    for found in _PARTS.finditer(text):
        is_below = not text[end : found.start()].strip()
        end = found.end()
        line = text.count("\n", 0, found.start()) + 2
        given = (found["given"] or "").strip()
        if found["directive"] == "ranks":
            section = Section(path, int(given))
        elif found["directive"] == "after":
            name, number = given.split()
            before = [item for item in read(path.parent / name).blocks if item.language == "python"]
            section.setup += before[: int(number)]
        elif found["directive"] == "setup":
            start = found.start("given") + len(found["given"]) - len(found["given"].lstrip())
            section.setup.append(Block("python", given + "\n", text.count("\n", 0, start) + 1))
        elif found["directive"]:
            pending[found["directive"]] = given or "yes"
        else:
            block = Block(found["language"], found["code"], line)
            if block.language == "python":
                block.raises, block.fragment = pending.pop("raises", ""), pending.pop("fragment", "")
                if not block.fragment:
                    section.blocks.append(block)
            elif block.language == "text" and is_below and "example" not in pending and page.blocks:
                if page.blocks[-1].language == "python":
                    page.blocks[-1].expected = block.code
            pending.clear()
            page.blocks.append(block)
        if section.blocks and section not in page.sections:
            page.sections.append(section)
    return page


def run(rank: int, section: Section, folder: str, port: int) -> None:
    """Run ``section`` as ``rank``: as if torchrun had started it. Its exit code tells whether all went well."""
    os.chdir(folder)
    sys.path[:] = [str(ROOT), *sys.path]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": section.ranks, "LOCAL_WORLD_SIZE": section.ranks}
    if section.ranks:
        os.environ.update({name: str(value) for name, value in named.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        if not any("init_process_group" in block.code for block in (*section.setup, *section.blocks)):
            dist.init_process_group("gloo")
    code = 0
    try:
        with _quiet_main() as namespace:
            for block in (*section.setup, *section.blocks):
                _run_block(block, section.page, namespace, compares=rank == 0)
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the blocks have left behind need not be taken down


@contextlib.contextmanager
def _quiet_main() -> Iterator[dict[str, Any]]:
    """The namespace of a program: classes and functions are found in it by their names, as when they are pickled."""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    yield main.__dict__


def _run_block(block: Block, page: Path, namespace: dict[str, Any], compares: bool) -> None:
    program = compile("\n" * (block.line - 1) + block.code, str(page), "exec")  # errors name the lines of the page
    output = io.StringIO()
    error: Exception | None = None
    try:
        with contextlib.redirect_stdout(output):
            exec(program, namespace)
    except Exception as raised:
        error = raised
        if type(raised).__name__ != block.raises:
            raise
    if block.raises and error is None:
        raise AssertionError(f"{page}:{block.line}: expected {block.raises}, and nothing was raised")
    found = output.getvalue() if error is None else f"{type(error).__name__}: {error}"
    if compares and block.expected is not None and not _is_as(block.expected, found):
        raise AssertionError(f"{page}:{block.line}: the page says\n{block.expected}\nand it is\n{found}")
    if error is not None:
        traceback.clear_frames(error.__traceback__)


def _is_as(expected: str, found: str) -> bool:
    """To the letter, but for "..." and how lines are broken around it."""
    if "..." not in expected:
        return expected == found or expected.split() == found.split()
    pattern = r".*".join(re.escape(" ".join(part.split())) for part in expected.split("..."))
    return re.fullmatch(rf"\s*{pattern}\s*", " ".join(found.split()), re.DOTALL) is not None
