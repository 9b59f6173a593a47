from __future__ import annotations

import gc
import os
import shutil
import tempfile
import zlib
from collections.abc import Generator
from multiprocessing.util import Finalize

import pytest
from hypothesis import settings

from tests import harness

# No name is asked of a server: a store asks for that of each client, which is on this machine, and where an answer is
# lost every rank waits five seconds for it.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# What tests leave there, on every rank, is removed at the end of this process, after the folder of multiprocessing.
tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="fsdp_compose_tests_")
Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=-200)

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


@pytest.fixture(autouse=True, scope="module")
def _earlier_modules_are_no_garbage() -> None:
    """What earlier modules have left in this process is looked at once: a plan looks for garbage three times, and a
    search makes dozens of plans."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    harness.shutdown_pools()


# The files that take longest, in that order. They come first: at the end nothing long is left that one worker would do
# while the others have nothing to do.
LONGEST = (
    "test_whole_model_compile",
    "test_reductions",
    "test_edits",
    "test_recovery",
    "test_every_group_reduced",
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


# What depends on torch's formats and private names: with another torch all of these are run; of those of checkpoints,
# which are many and slow, a tenth.
OF_TORCH = ("parity", "drop_in", "private_torch", "requirements", "old_names", "torch_state_dicts")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sixtieth", type=int, help="0 to 59: of the tests that depend on torch least, this part alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--sixtieth")
    if part is not None:
        left = [item for item in items if not _is_in_part(item, part)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    place = {f"{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def _is_in_part(item: pytest.Item, part: int) -> bool:
    if any(word in item.path.name for word in OF_TORCH):
        return True
    of = 10 if item.path.name.startswith("test_checkpoint_") else 60
    return zlib.crc32(item.nodeid.encode()) % of == part % of
