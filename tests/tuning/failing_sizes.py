"""Sizes that a rank reads when it begins to measure, and that rank 1 cannot read. In a file of their own, which ranks
import fast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch.distributed as dist


class FailsOnOneRank(tuple):
    """Sizes that one rank cannot read."""

    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() == 1:
            raise ValueError("no sizes here")
        return super().__iter__()


class EndsOneRank(tuple):
    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__iter__()


class StopsOneRank(tuple):
    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() == 1:
            time.sleep(1000)
        return super().__iter__()
