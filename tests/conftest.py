from __future__ import annotations

import gc
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Generator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import settings

from tests import harness, tiers
from tests.tools.costs import Costs

# No name is asked of a server: a store asks for that of each client, which is on this machine, and where an answer is
# lost every rank waits five seconds for it.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# What tests leave there, on every rank, is removed at the end of this process, after the folder of multiprocessing.
tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="fsdp_compose_tests_")
Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=-200)

CHOSEN = pytest.StashKey[tuple[int, int]]()  # how many tests run, and of how many

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
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["chosen"] = session.config.stash.get(CHOSEN, (0, 0))


# What depends on torch's formats and private names: with another torch all of these are run; of those of checkpoints,
# which are many and slow, a tenth.
OF_TORCH = ("parity", "drop_in", "private_torch", "requirements", "old_names", "torch_state_dicts", "annotations")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-costs", type=Path, metavar="FILE", help="write what each test costs to this file")
    parser.addoption("--tier", choices=tiers.TIERS, default="every", help="tests/tiers.py says what each runs")
    parser.addoption("--sixtieth", type=int, help="0 to 59: of the tests that depend on torch least, this part alone")


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--write-costs")) is not None:
        config.pluginmanager.register(Costs(file.resolve()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--sixtieth")
    if part is not None:
        left = [item for item in items if not _is_in_part(item, part)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    total = len(items)
    items[:], left = tiers.choose(items, config.getoption("--tier"))
    config.hook.pytest_deselected(items=left)
    config.stash[CHOSEN] = len(items), total
    _longest_first(items)


def _longest_first(items: list[pytest.Item]) -> None:
    """Sorts files by what they cost: at the end nothing long is left that one worker would do while the others have
    nothing to do."""
    costs, of_file = tiers.measured(), Counter()
    for item in items:
        of_file[item.path] += costs.get(tiers.function_of(item), tiers.UNKNOWN)
    items.sort(key=lambda item: -of_file[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """What a worker of xdist has collected, told to the process that prints."""
    if (output := getattr(node, "workeroutput", None)) is not None:
        node.config.stash[CHOSEN] = tuple(output["chosen"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run, total = config.stash.get(CHOSEN, (0, 0))
    if run != total:
        terminalreporter.write_line(f"{run:,} of {total:,}; all: make test-all")


def _is_in_part(item: pytest.Item, part: int) -> bool:
    if any(word in item.path.name for word in OF_TORCH):
        return True
    of = 10 if item.path.name.startswith("test_checkpoint_") else 60
    return zlib.crc32(item.nodeid.encode()) % of == part % of
