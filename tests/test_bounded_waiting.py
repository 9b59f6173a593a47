"""No rank waits forever: a rendezvous of which one rank is gone raises in bounded time, and names it.

One rank alone in a first forward: ``test_bad_input``; in recovery: ``test_invariants``, section 8; in
``summon_full_params``: ``test_summon``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import torch.distributed as dist

from tests.harness import ROOT

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from tests.test_invariants import Stack, loss_of, inputs
from fsdp_compose import fully_shard

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = Stack()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
for _ in range(2):
    loss_of(model, inputs()).backward()
    model.zero_grad()
loss = loss_of(model, inputs())
if rank == 1:
    model.blocks[1].trip.arm("backward", KeyboardInterrupt())
    try:
        loss.backward()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
for attempt in (loss.backward, lambda: model(inputs())):
    begin = time.monotonic()
    try:
        attempt()
        print("no error")
    except RuntimeError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}".replace(chr(10), " "))
sys.stdout.flush()
os._exit(0)
"""


def test_rank_that_dies_in_backward_makes_the_others_raise_and_names_itself_at_the_next_forward():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "FSDP_COMPOSE_TIMEOUT": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store.port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    begin = time.monotonic()
    try:
        outputs = [process.communicate(timeout=80) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert time.monotonic() - begin < 60, "they waited for the timeout of the process group"
    assert ranks[1].returncode < 0
    for rank in (0, 2):
        first, second = outputs[rank][0].splitlines() or [outputs[rank][1], ""]
        assert f"rank {rank}: the" in first and "another rank died" in first, first
        assert "recovery after an interrupted iteration: rank(s)" in second and "did not come" in second, second
        # The first rank tells who is absent. The other one may be, too: in the collective, waiting for the first rank's
        # part, which never comes, until that one's connection is gone as well.
        assert rank != 0 or re.search(r"rank\(s\) 1(, 2)? did", second), second
