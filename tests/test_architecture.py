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
TRAINING = ("comm", "ragged", "flat", "group", "runtime", "optim")
WINGS = (*TRAINING, "checkpoint", "sync", "inspect", "testing")  # then the files users call
LAST_WING = "drop_in"  # which imports these too
ON_TOP = ("plan", "plan_command", "__main__")  # as the last wing: made of what users call
MOST_WING_FLOORS = 8
MOST_FLOORS = 21  # of files, one concept each; the last wing, and what is on top, have three of their own

File = tuple[str, ...]  # its path inside the package, without .py; of a wing's __init__, the wing


def name_of(path: Path) -> File:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def files() -> dict[File, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def is_package(file: File) -> bool:
    return (PACKAGE.joinpath(*file) / "__init__.py").exists()


def start_of(file: File, node: ast.ImportFrom) -> File:
    """The file or package that ``from ..x import`` names, in ``file``."""
    up = node.level - is_package(file)
    start = file[: len(file) - up] if up else file
    return (*start, *node.module.split(".")) if node.module else start


def offered(package: File) -> dict[str, ast.ImportFrom]:
    """The names that a package's ``__init__`` imports from its own files, with where."""
    imported = [node for node in files()[package].body if isinstance(node, ast.ImportFrom) and node.level == 1]
    return {alias.asname or alias.name: node for node in imported for alias in node.names}


def imports(file: File) -> Iterator[tuple[File, int]]:
    """The files of the package that a file imports, with the line; inside functions and for annotations alone too."""
    for node in ast.walk(files()[file]):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = start_of(file, node)
            for alias in node.names:
                inner = (*target, alias.name)
                yield (inner if inner in files() and alias.name not in offered(target) else target), node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert all(name.split(".")[0] != PACKAGE.name for name in names), f"{file}, line {node.lineno}: 'from .'"


def rank(file: File) -> int:
    if file and file[0] == LAST_WING:
        return len(WINGS) + 1
    if not file or file[0] not in WINGS:
        return -1 if file and file[0] in ABOVE_ALL else len(WINGS)
    return WINGS.index(file[0])


def test_the_folders_are_the_wings():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*WINGS, LAST_WING}
    for wing in folders:
        assert ast.get_docstring(files()[(wing,)]), f"{wing}/__init__.py says what the wing owns"


def test_a_wing_imports_only_wings_above_it_each_through_its_init():
    wrong = []
    for file in files():
        for target, line in imports(file):
            if rank(target) > rank(file):
                wrong.append(f"{'/'.join(file)}, line {line}: {'.'.join(target)} is below")
            elif rank(target) != rank(file) and target[0] in WINGS and len(target) > 1:
                wrong.append(f"{'/'.join(file)}, line {line}: {'.'.join(target)} is inside another wing")
    assert not wrong, "\n".join(wrong)


def needs_of(file: File) -> set[File]:
    """The files that a file needs: of what it imports through a wing's ``__init__``, those where the names are made."""
    found = {
        origin(start_of(file, node), alias.name)
        for node in ast.walk(files()[file])
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    return found - {file}


def origin(target: File, name: str) -> File:
    """Where ``name``, imported from ``target``, is made."""
    if is_package(target) and name in offered(target):
        inner = start_of(target, offered(target)[name])
        return origin(inner, name) if inner != target else (*target, name)
    return (*target, name) if (*target, name) in files() else target


def test_no_file_needs_itself_and_the_floors_are_few():
    needs = {file: needs_of(file) for file in files() if not is_package(file)}
    floors: dict[File, int] = {}
    for file in TopologicalSorter(needs).static_order():  # raises CycleError, which names the files
        floors[file] = 1 + max((floors.get(other, 0) for other in needs.get(file, ())), default=0)
    floors = {file: floor - 3 * (file[:1] in {(LAST_WING,), *zip(ON_TOP)}) for file, floor in floors.items()}
    assert max(floors.values()) <= MOST_FLOORS, sorted(floors.items(), key=lambda item: -item[1])[:5]


def test_the_floors_of_wings_are_few():
    needs: dict[str, set[str]] = {}
    for file in files():
        if not is_package(file):
            needs.setdefault(wing_of(file), set()).update(map(wing_of, needs_of(file)))
    floors: dict[str, int] = {}
    for wing in TopologicalSorter({wing: others - {wing} for wing, others in needs.items()}).static_order():
        floors[wing] = 1 + max((floors[other] for other in needs[wing] - {wing}), default=0)
    assert {*WINGS, LAST_WING} < floors.keys() and max(floors.values()) <= MOST_WING_FLOORS, floors


def wing_of(file: File) -> str:
    """Its wing; of a file outside, what users call or what any may import."""
    folder = file[0] if file else ""
    return folder if folder in (*WINGS, LAST_WING) else "above all" if folder in ABOVE_ALL else "users call"


def test_the_hooks_alone_know_modes():
    modes = {file for file in files() if file[:2] == ("runtime", "modes")}
    wrong = [
        f"{'/'.join(file)}, line {line}: {'.'.join(target)}"
        for file in files()
        for target, line in imports(file)
        if target in modes and file != ("runtime", "hooks")
    ]
    assert len(modes) > 2 and not wrong, "\n".join(wrong)


# ---- classes

MOST_FIELDS, MOST_LINES = 15, 250
NOT_FIELDS = {"grad", "data", "requires_grad", "state", "forward", "backward"}  # mostly of tensors, or of torch's
OURS = {"root", "handle", "communicator", "swap", "watch", "exchange", "transport", "journal", "layout", "mesh"}


def classes() -> Iterator[tuple[File, ast.ClassDef]]:
    for file, tree in files().items():
        yield from ((file, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def fields_of(node: ast.ClassDef) -> set[str]:
    """What instances hold: dataclass fields, and what methods assign to ``self``."""
    is_dataclass = any("dataclass" in ast.unparse(item) for item in node.decorator_list)
    found = {
        item.target.id
        for item in node.body
        if is_dataclass and isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    return found | {name for owner, name in assigned(node) if owner == "self"}


def names_of(node: ast.ClassDef) -> set[str]:
    """Its fields, and what its body declares."""
    assigned_to = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
    annotated = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    return fields_of(node) | {*map(ast.unparse, [*assigned_to, *annotated])}


def assigned(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The attributes that are assigned to, in ``node``: of what, and their names."""
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            yield ast.unparse(item.value), item.attr


def test_classes_are_small():
    wrong = []
    for file, node in classes():
        num_fields, num_lines = len(fields_of(node)), (node.end_lineno or 0) - node.lineno + 1
        if num_fields > MOST_FIELDS or num_lines > MOST_LINES:
            wrong.append(f"{'/'.join(file)}: {node.name} has {num_fields} fields and {num_lines} lines")
    assert not wrong, "\n".join(wrong)


def test_a_field_is_assigned_in_the_file_of_its_class():
    files_of: dict[str, set[File]] = {}
    for file, node in classes():
        for name in names_of(node) - NOT_FIELDS:
            files_of.setdefault(name, set()).add(file)
    wrong = [
        f"{'/'.join(file)}: {owner}.{name}"
        for file, tree in files().items()
        if file != ("_torch",)  # which assigns to what is torch's
        for owner, name in assigned(tree)
        if owner not in ("self", "ctx") and name in files_of and file not in files_of[name]
    ]
    assert not wrong, "\n".join(wrong)


def annotations(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """What is annotated: arguments, variables and fields, with the annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.annotation, node.lineno
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target).removeprefix("self."), node.annotation, node.lineno


def test_what_is_of_a_class_of_ours_is_annotated_so():
    wrong = [
        f"{'/'.join(file)}, line {line}: {name}: {ast.unparse(annotation)}"
        for file, tree in files().items()
        for name, annotation, line in annotations(tree)
        if name.strip("_") in (OURS | {"state"} if file[0] in ("group", "runtime", "optim") else OURS)
        and ast.unparse(annotation) in ("Any", "Any | None", "Optional[Any]")
    ]
    assert not wrong, "\n".join(wrong)
