"""Random compositions of parallelism, each with the bound of 1e-12 to one process in float64: see ``compositions``."""

from __future__ import annotations

from random import Random

import pytest

from tests.mixtures import Layout
from tests.programs.compositions import Composition, Piece, random_composition
from tests.whole.compositions import run

# Two meshes have a dimension of one name, "ep", and of other sizes.
_ONE_NAME = Composition(
    layout=Layout(replicate=2, tp=2, folds=True), pieces=(Piece("few experts"), Piece("LoRA", has_group=False))
)


@pytest.mark.parametrize(("system", "num"), [("fsdp_compose", 20), ("drop_in", 8)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.timeout(300)
def test_random_compositions_train_as_one_process(world_size, system, num, tmp_path):
    random = Random(world_size)
    asked = [random_composition(random, world_size, system) for _ in range(num)]
    asked += [_ONE_NAME] if world_size == 4 and system == "fsdp_compose" else []
    for composition, wrong in zip(asked, run(asked, world_size, tmp_path, 240), strict=True):
        assert not wrong, f"{composition}\n{wrong}"
