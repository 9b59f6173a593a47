"""Process groups that are made again next to the keys of earlier ones: by new processes, and by the same ones.

torch's own keys are removed before each attempt: gloo (torch 2.13) would dial the addresses of dead processes.
"""

from __future__ import annotations

import os
import random
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose._torch import default_store
from fsdp_compose.checkpoint import get_model_state_dict
from fsdp_compose.core.comm.control_exchange import control_group
from fsdp_compose.core.comm.store import DEBUG_ENV, TIMEOUT_ENV
from tests.harness import ROOT, distributed, end, environment, run_torchrun, start_forked
from tests.whole.restarted import Trainer, assert_equal, build, draw_death, forget_torch_keys, train_step, trained

# ---- in one process


def make_again(generation):
    """Destroy the process group and make it again on the same store."""
    store, rank, size = default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store.set(f"fsdp_compose_test/{generation}/{rank}", "")
    if rank == 0:
        store.wait([f"fsdp_compose_test/{generation}/{other}" for other in range(size)])
        forget_torch_keys(store)
        store.set(f"fsdp_compose_test/{generation}/clean", "")
    store.wait([f"fsdp_compose_test/{generation}/clean"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))


@pytest.mark.parametrize("debug", ["0", "1"])
@distributed(world_size=2, fresh=True)
def test_process_group_that_is_made_again_has_a_store_of_its_own(debug):
    """Groups of fully_shard differ, in number and in size, so that anything old would be noticed."""
    expected = trained(3)
    with environment(**{DEBUG_ENV: debug}):
        for generation in range(3):
            mesh = init_device_mesh("cpu", (2,))
            for _ in range(generation % 2 + 1):
                model, optimizer = build(mesh)
                for step in range(3):
                    train_step(model, optimizer, step)
                assert_equal(model, expected)
            other, _ = build(mesh, width=8 + generation)
            get_model_state_dict(other)
            make_again(generation)


@distributed(world_size=4, fresh=True)
def test_subgroups_that_are_made_again_have_stores_of_their_own():
    expected = {2: trained(3)}
    for generation in range(3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for name in ("a", "b") if generation % 2 else ("b", "a"):
            model, optimizer = build(mesh[name])
            for step in range(3):
                train_step(model, optimizer, step)
            assert_equal(model, expected[2])
        make_again(generation)


@distributed(world_size=3, fresh=True)
def test_rank_that_does_not_come_is_named_next_to_old_keys():
    train_step(*build(init_device_mesh("cpu", (3,))), 0)
    make_again(0)
    mesh = init_device_mesh("cpu", (3,))
    model, optimizer = build(mesh)
    with environment(**{TIMEOUT_ENV: "0.5"}):
        if dist.get_rank() != 1:
            with pytest.raises(
                RuntimeError, match=r"first forward: rank\(s\) 1 did|rank\(s\) 0 did not arrive"
            ) as error:
                train_step(model, optimizer, 0)
            if dist.get_rank() == 0:
                assert "first forward: rank(s) 1 did not arrive at the rendezvous of 3 ranks" in str(error.value)
    dist.barrier()
    train_step(model, optimizer, 0)  # all come now


@distributed(world_size=2, fresh=True)
def test_keys_of_a_process_group_are_deleted_when_it_is_agreed_on():
    control_group(dist.group.WORLD)
    dist.barrier()
    keys = [key for key in default_store().list_keys() if "challenge" in key]
    assert len(keys) == 1 and keys[0].endswith("/now"), keys


# ---- by new processes


def run_rank(rank, size, port, folder, death):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    Trainer(folder, death).run()
    print("finished", flush=True)
    os._exit(0)


def test_killed_trainers_resume_bit_for_bit_next_to_the_keys_of_the_dead(tmp_path):
    """As under ``torchrun --max-restarts``: the store stays, all processes are new; the number of ranks may change."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    draw = random.Random(0)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for attempt in range(5):
        size = draw.choice([2, 4])
        last = attempt == 4
        death = None if last else draw_death(draw, attempt, size)
        forget_torch_keys(store)
        outputs = [tmp_path / f"{attempt}.{rank}" for rank in range(size)]
        processes = [
            start_forked(outputs[rank], run_rank, rank, size, store.port, str(folder), death) for rank in range(size)
        ]
        try:
            if last:
                for process in processes:
                    process.join(30)
                texts = [output.read_text() for output in outputs]
                assert all("finished" in text for text in texts), texts
            else:
                processes[death[0]].join(30)
                text = outputs[death[0]].read_text()
                assert processes[death[0]].exitcode == -signal.SIGKILL, (death, text)
        finally:
            for process in processes:
                end(process)


@pytest.mark.timeout(240)
def test_torchrun_restarts_a_killed_trainer_which_resumes_bit_for_bit(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    arguments = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=1"]
    arguments += ["--monitor-interval=0.05", "--run-path", "--start-method=fork"]
    arguments += [str(ROOT / "tests" / "whole" / "restarted.py"), str(tmp_path / "checkpoints")]
    code, text = run_torchrun(tmp_path, *arguments, timeout=200)
    assert code == 0, text
    assert text.count("finished in attempt 1") == 2, text
