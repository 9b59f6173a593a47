"""A framework's function with another ``fully_shard()`` inside."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from fsdp_compose.integrations.substitution import with_functions

SOURCE = """
from elsewhere import shard

def helper(x, *, times=2):
    return [shard(x) for _ in range(times)]

def other(x):
    return x

def countdown(x, n):
    return shard(x) if n == 0 else countdown(x, n - 1)

def ping(x, n):
    return shard(x) if n == 0 else pong(x, n - 1)

def pong(x, n):
    return ping(x, n)

def apply(x, y=1):
    def inner():
        return helper(x, times=y)
    return inner() + [other(y)]

class Engine:
    def build(self, x):
        return [self.name, shard(x)]

    name = "engine"
"""


def shard(x: Any) -> Any:
    return "theirs", x


def ours(x: Any) -> Any:
    return "ours", x


@pytest.fixture
def framework(monkeypatch) -> ModuleType:
    elsewhere, package = ModuleType("elsewhere"), ModuleType("framework")
    elsewhere.shard = shard
    monkeypatch.setitem(__import__("sys").modules, "elsewhere", elsewhere)
    exec(SOURCE, vars(package))
    return package


def test_what_it_calls_in_its_package_calls_the_new_function_and_nothing_else_changes(framework):
    before = dict(vars(framework))
    own = with_functions(framework.apply, {shard: ours})
    assert own(5) == [("ours", 5), 1] and own(5, y=2) == [("ours", 5)] * 2 + [2]
    assert framework.apply(5) == [("theirs", 5), 1]
    assert vars(framework) == before and framework.helper(1, times=1) == [("theirs", 1)]


def test_methods_and_functions_that_call_themselves_or_each_other(framework):
    engine = framework.Engine()
    assert with_functions(framework.Engine.build, {shard: ours})(engine, 3) == ["engine", ("ours", 3)]
    for name in ("countdown", "ping", "pong"):
        own = with_functions(getattr(framework, name), {shard: ours})
        assert [own(3, n) for n in (0, 1, 2)] == [("ours", 3)] * 3


def test_a_function_that_calls_nothing_of_it_is_refused(framework):
    with pytest.raises(RuntimeError, match=r"framework.other\(\) calls no .*shard\(\)"):
        with_functions(framework.other, {shard: ours})
