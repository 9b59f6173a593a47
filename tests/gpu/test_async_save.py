"""A save while training goes on, of a model on a device: the copy waits for what was computed before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp_compose.checkpoint import Saver, get_model_state_dict, load
from tests.gpu.test_cuda import CYCLES, Training, process_group

pytestmark = pytest.mark.gpu


def test_what_is_saved_is_what_the_device_computed_until_the_call(tmp_path: Path):
    with process_group("nccl"), Saver() as saver:
        training = Training("fp32")
        training.step()
        torch.cuda._sleep(CYCLES)  # the step below has not begun when the call comes
        training.step()
        saving = saver.save({"model": get_model_state_dict(training.model)}, tmp_path / "one")
        expected = training.shards()
        training.run()
        assert any(not torch.equal(a, b) for a, b in zip(training.shards(), expected, strict=True))
        saving.result()
        load({"model": get_model_state_dict(training.model)}, tmp_path / "one")
        for shard, saved in zip(training.shards(), expected, strict=True):
            assert torch.equal(shard, saved)
