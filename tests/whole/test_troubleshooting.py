"""docs/troubleshooting.md quotes messages as the package prints them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.harness import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
VALUE = "\0"  # what an f-string fills in


def quoted() -> list[str]:
    """The first cells of the page's tables, without the type of the error."""
    cells = re.findall(r"^\| `(.+?)` \| ", PAGE.read_text(), re.MULTILINE)
    return [re.sub(r"^\w+(?:Error|Warning): ", "", cell) for cell in cells]


def texts_of_package() -> Iterator[str]:
    for path in (ROOT / "fsdp_compose").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)


TEXTS = [*texts_of_package()]


def is_printed(message: str) -> bool:
    """Whether some text of the package has the parts of ``message`` between its "...", in their order."""
    parts = [part.strip() for part in message.split("...")]
    return any(has_in_order(text, parts) for text in TEXTS)


def has_in_order(text: str, parts: list[str]) -> bool:
    start = 0
    for part in parts:
        start = text.find(part, start)
        if start < 0:
            return False
        start += len(part)
    return True


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_package(message: str) -> None:
    constant = message.replace("...", "")
    assert len(constant) >= 20, f"{message!r} says too little to be searched for"
    called = re.sub(r"^\w+(?=\()", "", message)  # the name of the function is often filled in
    assert is_printed(message) or is_printed(called), (
        f"{PAGE.name} quotes {message!r}, and no text of fsdp_compose reads like that: "
        "quote the message as it is printed now, with ... for what it fills in"
    )


def test_the_page_has_the_errors_that_users_meet_most() -> None:
    assert len(quoted()) >= 40
    assert len({*quoted()}) == len(quoted())
