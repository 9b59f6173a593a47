from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests import harness

# A deadline per example measures the machine, not the code; CI must not fail on a new example.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_sessionfinish(session: pytest.Session) -> None:
    harness.shutdown_pools()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that launch whole programs take longest, and come first: at the end nothing is left to do next to them."""
    items.sort(key=lambda item: item.path.name != "test_train_gpt.py")
