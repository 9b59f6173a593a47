"""transformers' Trainer with mixtures of experts, by its own ``distributed_config``, in 11 layouts of four ranks.

``python -m tests_integration.mixtures`` runs each model in all layouts, also of eight ranks, beside FSDP2."""

from __future__ import annotations

import pytest
import torch

from tests_integration.mixtures import ON_4, ONE, Job, Layout, bound_of, difference, train, write_models

LAYOUTS = {"Mixtral": ON_4[::3], "Qwen3-MoE": ON_4[1::3], "DeepSeek-V3": ON_4[2::3]}


@pytest.mark.timeout(300)
def test_trains_and_resumes_in_another_layout_as_one_process_does(tmp_path):
    write_models(tmp_path, [*LAYOUTS])

    def jobs(family: str, layouts: list[Layout], steps: tuple[int, int] = (3, 2)) -> list[Job]:
        place = tmp_path / f"of {family}"
        folders = [place / str(layout) for layout in layouts]
        begun = [
            Job(family, layout, tmp_path / family, folder, steps[0])
            for layout, folder in zip(layouts, folders, strict=True)
        ]
        others = [*folders[1:], folders[0]]
        resumed = [
            Job(family, layout, other, folder / "resumed", steps[1], accumulation=2)
            for layout, folder, other in zip(layouts, folders, others, strict=True)
        ]
        return begun + resumed

    expected = train([job for family in LAYOUTS for job in jobs(family, [ONE])], tmp_path)
    truth = dict(zip([(family, part) for family in LAYOUTS for part in (0, 1)], expected, strict=True))
    asked = [job for family, layouts in LAYOUTS.items() for job in jobs(family, layouts)]
    for job, found in zip(asked, train(asked, tmp_path), strict=True):
        for what, size in difference(found, truth[job.family, job.folder.name == "resumed"]).items():
            assert size < bound_of(what, 1e-6), (job, what, size)


@pytest.mark.parametrize(
    ("way", "layouts"),
    [
        ("accelerate", [Layout(fsdp=4, ep=2), Layout(dp_replicate=2, fsdp=2, ep=2)]),
        ("TRL", [Layout(fsdp=2, tp=2, ep=2), Layout(fsdp=4, ep=2)]),
    ],
)
@pytest.mark.timeout(300)
def test_a_loop_of_accelerate_and_the_trainer_of_trl_in_float64(way, layouts, tmp_path):
    """accelerate clips with a function of its own; TRL sends experts to an engine, parameter by parameter."""
    write_models(tmp_path, ["Mixtral"])

    def job(layout: Layout) -> Job:
        folder = tmp_path / str(layout)
        return Job("Mixtral", layout, tmp_path / "Mixtral", folder, 3, accumulation=2, dtype=torch.float64, way=way)

    (truth,) = train([job(ONE)], tmp_path)
    for layout, found in zip(layouts, train([job(layout) for layout in layouts], tmp_path), strict=True):
        sizes = difference(found, truth)
        assert ("sent" in sizes) == (way == "TRL")
        for what, size in sizes.items():
            assert size < bound_of(what, 1e-14), (layout, what, size)
