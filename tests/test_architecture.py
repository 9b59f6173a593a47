"""The package is laid out as docs/design.md draws it: wings, of which each imports only those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.harness import ROOT

PACKAGE = ROOT / "fsdp_compose"
ABOVE_ALL = ("_torch", "_requirements", "_shared_store")  # files that any wing may import
WINGS = ("comm", "ragged", "flat", "group", "runtime", "optim", "checkpoint", "inspect")  # then the files users call
MOST_FLOORS = 19  # to become fewer

File = tuple[str, ...]  # its path inside the package, without .py; of a wing's __init__, the wing


def name_of(path: Path) -> File:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def files() -> dict[File, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imports(file: File) -> Iterator[tuple[File, int]]:
    """What a file imports of the package, and in which line; inside functions and for annotations alone too."""
    is_package = (PACKAGE.joinpath(*file) / "__init__.py").exists()
    for node in ast.walk(files()[file]):
        if isinstance(node, ast.ImportFrom) and node.level:
            up = node.level - is_package
            start = file[: len(file) - up] if up else file
            target = (*start, *(node.module or "").split(".")) if node.module else start
            for alias in node.names:
                yield ((*target, alias.name) if (*target, alias.name) in files() else target), node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            yield tuple((node.module or "").split("."))[1:], node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] != PACKAGE.name, f"{file}, line {node.lineno}: write 'from . import'"


def rank(file: File) -> int:
    if not file or file[0] not in WINGS:
        return -1 if file and file[0] in ABOVE_ALL else len(WINGS)
    return WINGS.index(file[0])


def test_the_folders_are_the_wings():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*WINGS}
    for wing in WINGS:
        assert ast.get_docstring(files()[(wing,)]), f"{wing}/__init__.py says what the wing owns"


def test_a_wing_imports_only_wings_above_it_each_through_its_init():
    wrong = []
    for file in files():
        for target, line in imports(file):
            if rank(target) > rank(file):
                wrong.append(f"{'/'.join(file)}, line {line}: {'.'.join(target)} is below")
            elif rank(target) != rank(file) and target[0] in WINGS and len(target) > 1:
                if file or (PACKAGE.joinpath(*target[:-1]) / f"{target[-1]}.py").exists() is False:
                    wrong.append(f"{'/'.join(file)}, line {line}: {'.'.join(target)} is inside another wing")
    assert not wrong, "\n".join(wrong)


def without_facades(file: File) -> set[File]:
    """The files that a file needs: of what it imports through a wing's ``__init__``, those where the names are made."""
    found: set[File] = set()
    for node in ast.walk(files()[file]):
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                found.add(origin(file, node, alias.name))
    return found - {file}


def origin(file: File, node: ast.ImportFrom, name: str) -> File:
    is_package = (PACKAGE.joinpath(*file) / "__init__.py").exists()
    up = node.level - is_package
    start = file[: len(file) - up] if up else file
    target = (*start, *node.module.split(".")) if node.module else start
    if (*target, name) in files():
        return (*target, name)
    if (PACKAGE.joinpath(*target) / "__init__.py").exists() and target:
        for inner in files()[target].body:
            if isinstance(inner, ast.ImportFrom) and inner.level:
                for alias in inner.names:
                    if (alias.asname or alias.name) == name:
                        return origin(target, inner, alias.name)
    return target


def test_no_file_needs_itself_and_the_floors_are_few():
    needs = {file: without_facades(file) for file in files() if file and file not in {(wing,) for wing in WINGS}}
    floors: dict[File, int] = {}
    for file in TopologicalSorter(needs).static_order():  # raises CycleError, which names the files
        floors[file] = 1 + max((floors.get(other, 0) for other in needs.get(file, ())), default=0)
    assert max(floors.values()) <= MOST_FLOORS, sorted(floors.items(), key=lambda item: -item[1])[:5]
