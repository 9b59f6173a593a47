from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests import harness

# No name is asked of a server: a store asks for that of each client, which is on this machine, and where an answer is
# lost every rank waits five seconds for it.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# A deadline per example measures the machine, not the code; CI must not fail on a new example.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# What imports and collection make lives as long as this process: no garbage is looked for meanwhile, nor in it later.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    harness.shutdown_pools()


# The files that take longest, in that order. They come first: at the end nothing long is left that one worker would do
# while the others have nothing to do.
LONGEST = (
    "test_whole_model_compile",
    "test_reductions",
    "test_invariants",
    "test_tensor_parallel",
    "test_features",
    "test_compile",
    "test_stream_order",
    "test_offload",
    "test_offload_states",
    "test_one_rank_differs",
    "test_parity",
    "test_strategies",
    "test_weight_sync",
    "test_all_gather_extensions",
    "test_harness",
    "test_torch_state_dicts",
    "test_sharded_params",
    "test_backward_inside_forward",
    "test_private_torch",
    "test_ragged",
    "test_parts",
    "test_hybrid",
    "test_checkpoint_storage",
    "test_memory",
    "test_replicate",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
