"""The pages of docs/reference say what the docstrings say."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import ROOT


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/generator/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = load_generator()
PAGES = sorted(reference.PAGES.glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_says_what_the_docstrings_say(path: Path):
    text = path.read_text()
    assert text == reference.page_from(text), f"{path.relative_to(ROOT)} is not up to date: run `make reference`"


def test_what_is_written_by_hand_stays_and_what_is_below_is_replaced():
    page = 'A page\n\nBy hand.\n\n<a id="fsdp_compose.reshard"></a>\n\nan old text\n'
    made = reference.page_from(page)
    assert made.startswith("A page\n\nBy hand.\n\n<!-- ")
    assert "an old text" not in made
    assert "## `reshard`\n\n```python\nreshard(module: nn.Module) -> None\n```\n\n" in made
    assert reference.page_from(made) == made


def test_a_page_without_anchors_is_written_by_hand():
    assert reference.page_from("By hand.\n") == "By hand.\n"


def test_an_anchor_that_names_nothing_is_an_error():
    with pytest.raises(SystemExit, match=r"fsdp_compose\.no_such_thing"):
        reference.page_from('<a id="fsdp_compose.no_such_thing"></a>\n')


def test_a_function_is_found_that_is_called_like_its_module():
    assert isinstance(reference.find("fsdp_compose.drop_in.install").node, ast.FunctionDef)


def test_a_name_is_found_by_the_name_that_it_is_imported_as():
    assert reference.find("fsdp_compose.drop_in.register_fsdp_forward_method").node.name == "register_forward_method"


def test_another_name_for_a_function_is_documented_as_the_function_is():
    entry = reference.entry("fsdp_compose.set_all_reduce_hook")
    assert "\nset_all_reduce_hook(\n    module: nn.Module," in entry and "Call `hook(gradient)`" in entry


def test_a_docstring_becomes_markdown():
    docstring = (
        "Do ``this``::\n\n    with it:\n        pass\n\n    done()\n\nRanks: all,\nat once.\n\n"
        "Args:\n    a, b: two\n        things.\n    c: see ``that``.\n\nReturns:\n    What\n    it was.\n\n"
        "Raises:\n    ValueError, TypeError: not so: never."
    )
    assert reference.as_markdown(docstring) == [
        "Do `this`:",
        "```python\nwith it:\n    pass\n\ndone()\n```",
        "**Ranks**: all, at once.",
        "**Arguments**:",
        "- `a`, `b`: two things.\n- `c`: see `that`.",
        "**Returns**: What it was.",
        "**Raises**:",
        "- `ValueError`, `TypeError`: not so: never.",
    ]
