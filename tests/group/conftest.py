from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import fake_process_group


@pytest.fixture
def one_process() -> Iterator[None]:
    with fake_process_group(rank=1, world_size=4):
        yield
