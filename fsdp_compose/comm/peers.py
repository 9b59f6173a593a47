"""The process group of all ranks that run a model together: its *peers*, who meet, exchange and recover.

On a mesh of one dimension they are the ranks that share the shards. On a mesh of several, of which the user has a
process group for each dimension, they are all ranks of it: the default process group if these are all there are, else
one that is made here, on gloo, for it carries rendezvous, control exchanges and checkpoints, not training.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from .._torch import group_timeout, is_destroyed, make_gloo_group_of
from .namespace import agree_on_name

_GRACE = timedelta(seconds=5)
_Made = dict[tuple[int, ...], dist.ProcessGroup]
# Strongly: ranks that drop their models at different times still have the same ones.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()


class _Gathering:
    """Ranks that have no process group yet, as ``agree_on_name`` knows a process group."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    @property
    def group_name(self) -> str:
        return f"peers/{'-'.join(map(str, self._ranks))}"

    def rank(self) -> int:
        return self._ranks.index(self._rank)

    def size(self) -> int:
        return len(self._ranks)


def group_of_ranks(ranks: Iterable[int], known: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A process group over ``ranks``, which are numbers in the default one: that one, one of ``known``, or one that is
    made for it, once.

    Ranks: all of ``ranks``, where it must be made.

    Raises:
        RuntimeError: some of them did not come in time.
    """
    wanted, world = tuple(sorted(ranks)), dist.group.WORLD
    assert world is not None, "there are process groups"
    for group in (world, *known):
        if tuple(dist.get_process_group_ranks(group)) == wanted:
            return group
    made = _made.setdefault(world, {})
    if wanted not in made or is_destroyed(made[wanted]):
        made[wanted] = _make(wanted, world)
    return made[wanted]


def _make(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    timeout = group_timeout(world)

    def absence(absent: Sequence[int]) -> RuntimeError:
        return RuntimeError(
            f"making the process group of the ranks {[*ranks]}, which run a model together: rank(s) "
            f"{', '.join(str(ranks[i]) for i in absent)} did not come within {timeout.total_seconds():g} s. Every rank "
            "of a mesh must call fully_shard()"
        )

    gathering = _Gathering(ranks, world.rank())
    # The name is one that no earlier initialisation has used: torch keeps what it needs for the group below it.
    return make_gloo_group_of(ranks, agree_on_name(gathering, timeout, _GRACE, absence), timeout)
