"""The package is a core of wings, with plug-ins and annexes beside it. A wing imports only wings above it, an annex
only annexes above it, each through its ``__init__``. The core names a plug-in at its seam alone, and imports it when a
model needs it. An annex takes from both what ``extension`` gives out. No file needs itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, TypeGuard

import fsdp_compose
from tests.harness import ROOT
from tests.tools.which_tests import files_for, table

PACKAGE = ROOT / "fsdp_compose"
ABOVE_ALL = ("_torch", "_import_checks", "_on_demand", "errors", "_arguments", "_nested")  # that any wing may import
CORE = ("comm", "ragged", "flat", "group", "runtime", "optimizers", "state_dicts")
ANNEXES = ("optim", "checkpoint", "sync", "inspect", "testing", "tuning")
LAST = ("drop_in", "integrations")  # which also import the files on top: ``pipelining``, ``__main__``
FRAMEWORKS = {"accelerate", "lightning", "llamafactory", "ray", "torchtitan", "transformers", "trl", "verl"}
DOOR = ("extension",)
# Files of the core that name a plug-in: its seam. ``state_dicts`` and ``summon`` are loaded late themselves.
SEAMS = {
    "bounded_memory": "runtime/lazy_init",
    "debugging": "runtime/lazy_init",
    "even_chunks": "flat/build",
    "functional": "runtime/hooks runtime/lazy_init",
    "gloo": (
        "comm/mesh comm/control_exchange flat/collectives ragged/ops/operands ragged/ops/reductions "
        "runtime/agreement runtime/group_ops runtime/recovery state_dicts/gathering"
    ),
    "graphs": "group/iteration runtime/hooks",
    "offloading": "",
    "optional_groups": "runtime/lazy_init",
    "parameter_classes": (
        "flat/build flat/codecs flat/flat_param flat/param_kind flat/sharded_param summon state_dicts/gathering "
        "state_dicts/model_state state_dicts/optimizer_state state_dicts/resharding"
    ),
    "replicas": "comm/mesh runtime/agreement",
    "tensor_parallel": (
        "flat/accumulation flat/build flat/flat_param flat/shard_storage flat/sharded_param flat/unsharded shard"
    ),
    "transformers_loader": "shard",
    "transports": "",
}
LOADED_LATE = {("core", "summon"), ("core", "runtime", "recovery"), ("core", "ragged", "ops", "reductions")}

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
    """The names that a package's ``__init__`` gives out from its own files, at once or on demand, with where."""
    nodes = [*files()[package].body, *on_demand(package)]
    imported = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1]
    return {alias.asname or alias.name: node for node in imported for alias in node.names}


def on_demand(package: File) -> list[ast.stmt]:
    """What a package's ``__init__`` imports for type checkers alone."""
    return [item for node in files()[package].body if is_for_annotations(node) for item in node.body]


def is_for_annotations(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(file: File, *, at_once: bool = False) -> Iterator[tuple[File, int]]:
    """The files of the package that a file imports, with the line; unless ``at_once``, inside functions and for
    annotations too."""
    for node in files()[file].body if at_once else ast.walk(files()[file]):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = start_of(file, node)
            for alias in node.names:
                inner = (*target, alias.name)
                yield (inner if inner in files() and alias.name not in offered(target) else target), node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert all(name.split(".")[0] != PACKAGE.name for name in names), f"{file}, line {node.lineno}: 'from .'"


ORDER = [*(("core", wing) for wing in CORE), ("core",), ("plugins",), DOOR, *((annex,) for annex in ANNEXES)]


def wing_of(file: File) -> File:
    """The wing, plug-in or annex of a file; of a file beside them, the file."""
    return file[:2] if file[1:] and (file[1] in CORE or file[0] == "plugins") else file[:1]


def rank(file: File) -> int:
    if file and file[0] in ABOVE_ALL:
        return -1
    if file and file[0] in LAST:
        return len(ORDER) + 1 + LAST.index(file[0])
    place = file[:1] if file[:1] == ("plugins",) else wing_of(file)
    return ORDER.index(place) if place in ORDER else len(ORDER)


def test_the_folders_are_the_wings():
    def folders(path: Path) -> set[str]:
        return {path.name for path in path.iterdir() if path.is_dir() and path.name != "__pycache__"}

    assert folders(PACKAGE) == {"core", "plugins", *ANNEXES, *LAST}
    assert folders(PACKAGE / "core") == {*CORE}
    assert {wing_of(file)[1:] for file in files() if file[:1] == ("plugins",)} == {(), *((name,) for name in SEAMS)}
    for file in [*ORDER, *((annex,) for annex in LAST)]:
        assert ast.get_docstring(files()[file]), f"{'/'.join(file)}/__init__.py says what it owns"


def test_a_wing_imports_only_wings_above_it_each_through_its_init():
    wrong = []
    for file in files():
        for target, line in imports(file):
            of_core, of_plugins = target[:1] == ("core",), target[:1] == ("plugins",)
            if rank(target) > rank(file) and not (of_plugins and file[:1] == ("core",)):
                wrong.append(f"{'/'.join(file)}, line {line}: {'.'.join(target)} is below")
            elif wing_of(target) not in (wing_of(file), target) and is_package(wing_of(target)) and file != DOOR:
                if not (of_core and file[:1] == ("plugins",)):  # which may take what no wing gives out
                    wrong.append(f"{'/'.join(file)}, line {line}: {'.'.join(target)} is inside another wing")
    assert not wrong, "\n".join(wrong)


def test_the_core_names_a_plugin_at_its_seam_and_imports_it_when_a_model_needs_it():
    named: dict[str, set[str]] = {name: set() for name in SEAMS}
    for file in files():
        if file[:1] == ("core",):
            for target, _ in imports(file):
                if target[:1] == ("plugins",):
                    named[target[1]].add("/".join(file[1:]))
    assert named == {name: {*seam.split()} for name, seam in SEAMS.items()}
    early = [file for file in files() if file[:1] == ("core",) and file[1:2] != ("state_dicts",)]
    wrong = {file for file in early for target, _ in imports(file, at_once=True) if target[:1] == ("plugins",)}
    assert wrong == LOADED_LATE


def test_an_annex_takes_from_the_core_what_the_extension_gives_out():
    wrong = [
        f"{'/'.join(file)}, line {line}: {'.'.join(target)}"
        for file in files()
        if file[:1] not in ((), ("core",), ("plugins",), DOOR) and file not in PUBLIC
        for target, line in imports(file)
        if target[:1] in (("core",), ("plugins",))
    ]
    assert not wrong, "\n".join(wrong)
    nothing_else = (ast.Expr, ast.ImportFrom, ast.Assign)  # a docstring, imports, __all__
    assert all(isinstance(node, nothing_else) for file in PUBLIC for node in files()[file].body)
    names = [alias.name for node in ast.walk(files()[DOOR]) if isinstance(node, ast.ImportFrom) for alias in node.names]
    taken = {
        alias.name
        for file, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level and start_of(file, node) == DOOR
        for alias in node.names
    }
    assert {*names} - taken <= FOR_OTHERS and len(names) <= MOST_NAMES, len(names)


PUBLIC = {("checkpoint",), ("optim",), ("strategies",)}  # heads that give out functions of the core under public names
FOR_OTHERS = {"WireFormat"}  # names that no annex of ours takes
MOST_NAMES = 111


def test_frameworks_are_imported_where_they_come_in_alone():
    """``drop_in/verl_patch.py`` is imported where verl is."""
    found = {
        file
        for file, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names])
        if name.partition(".")[0] in FRAMEWORKS
    }
    doors = {file for file in files() if file[:1] == ("integrations",) and file[-1] in FRAMEWORKS}
    assert found == {*doors, ("drop_in", "verl_patch")} and len(doors) > 2
    assert not {file for file in files() for target, _ in imports(file) if target in doors}


def needs_of(file: File) -> set[File]:
    """The files that a file needs, be it inside a function or to annotate: of what it imports through a wing's
    ``__init__``, those where the names are made."""
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


def test_no_file_needs_itself():
    needs = {file: needs_of(file) for file in files() if not is_package(file)}
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the files


def test_what_a_package_gives_out_on_demand_is_what_type_checkers_see():
    for package in filter(is_package, files()):
        seen = [node for node in on_demand(package) if isinstance(node, ast.ImportFrom)]
        module = importlib.import_module(".".join((PACKAGE.name, *package)))
        get = getattr(module, "_get", None) or getattr(module, "__getattr__", None)
        if get is None:
            assert not seen, package
            continue
        homes = inspect.getclosurevars(get).nonlocals["homes"]
        assert homes == {
            alias.asname or alias.name: node.module for node in seen if node.module for alias in node.names
        }, package
        # Importing a file would hide the name.
        assert not homes.keys() & {file[-1] for file in files() if file and file[:-1] == package}, package


def test_no_wing_needs_itself():
    needs: dict[File, set[File]] = {}
    for file in files():
        if not is_package(file):
            others = {wing_of(other) for other in needs_of(file) if other}
            if file[:1] == ("core",):  # which imports plug-ins when a model needs them
                others = {other for other in others if other[:1] != ("plugins",)}
            needs.setdefault(wing_of(file), set()).update(others)
    assert {*ORDER, *((annex,) for annex in LAST)} - {("plugins",)} < needs.keys()
    TopologicalSorter({wing: others - {wing} for wing, others in needs.items()}).prepare()


def test_the_table_of_tests_names_files_that_are_there():
    """A new file need not be in it; python -m tests.tools.which_tests rewrites it."""
    named = {name for file, tests in table().items() for name in (file, *tests)}
    assert not {name for name in named if not (ROOT / name).exists()}
    plugins = [wing_of(file) for file in files() if file[:1] == ("plugins",) and is_package(file) and file[1:]]
    wings = [*plugins, *(wing for wing in ORDER if wing not in (DOOR, ("plugins",)))]
    assert all(files_for(f"fsdp_compose/{'/'.join(wing)}/is_new.py") for wing in wings)


def test_no_file_hides_behind_a_function_of_its_name():
    """``fsdp_compose.fully_shard`` is the function, wherever one looks."""
    names = {path.stem for path in PACKAGE.iterdir()}
    assert not names & set(fsdp_compose.__all__)


def test_the_hooks_alone_know_modes():
    modes = {file for file in files() if file[:1] in (("core",), ("plugins",)) and file[-1].endswith("_mode")}
    knowing = {file for file in files() if not is_package(file) and needs_of(file) & modes}
    assert len(modes) > 2 and knowing == {("core", "runtime", "hooks")}


# ---- annotations

OURS = {"root", "handle", "communicator", "swap", "detector", "exchange", "transport", "journal", "layout", "mesh"}


STATEFUL = [("core", "group"), ("core", "runtime"), ("core", "optimizers"), ("optim",)]


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
        if name.strip("_") in (OURS | {"state"} if wing_of(file) in STATEFUL else OURS)
        and ast.unparse(annotation) in ("Any", "Any | None", "Optional[Any]")
    ]
    assert not wrong, "\n".join(wrong)


# ---- What is not used is not loaded

MOST_FILES, MOST_LINES, MOST_LINES_OF_CORE = 62, 22_000, 25_500

_LOADED = """
import json, sys

def loaded():
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "fsdp_compose"]
    return [module.__file__ for module in ours if hasattr(module, "__file__")]  # names of old pickles have none
"""

_STEP = """
import torch, null_process_group
null_process_group.init(rank=3, world_size=64)
from fsdp_compose import fully_shard

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(loaded()))
"""

_IMPORT = """
import torch, time
begin = time.process_time()
import fsdp_compose
light = time.process_time() - begin
before = [*sys.modules]
from fsdp_compose import *
whole = time.process_time() - begin
assert {*fsdp_compose.__all__} <= {*globals()} and {*fsdp_compose.__all__} <= {*dir(fsdp_compose)}
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "fsdp_compose"]
tensors = [key for module in ours for key, item in vars(module).items() if isinstance(item, torch.Tensor)]
print(json.dumps([light, whole, before, tensors]))
"""


def output_of(program: str) -> Any:
    """What a new process prints last, as JSON."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": path, "FSDP_COMPOSE_SIMULATED": "1"}
    command = [sys.executable, "-c", _LOADED + program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_step_of_a_plain_model_loads_the_core_alone():
    found = output_of(_STEP)
    num_lines = sum(len(Path(file).read_text().splitlines()) for file in found)
    assert len(found) <= MOST_FILES and num_lines <= MOST_LINES, (len(found), num_lines, sorted(found))
    assert not [file for file in found if PACKAGE / "plugins" in Path(file).parents]


def test_the_core_is_as_small_as_it_is_said_to_be():
    assert sum(len(path.read_text().splitlines()) for path in (PACKAGE / "core").rglob("*.py")) <= MOST_LINES_OF_CORE


def test_the_import_loads_nothing_that_takes_time():
    """The import takes at most two fifths of the CPU time of importing every public name."""
    light, whole, before, tensors = output_of(_IMPORT)
    assert "torch.distributed.tensor" not in before
    assert light <= 0.4 * whole
    assert not tensors, "imported under inference mode, fake tensors or a default device, they would stay of that kind"
