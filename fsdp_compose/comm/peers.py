"""The process group of all ranks that run a model together: its *peers*, who meet, exchange and recover.

On a mesh of one dimension they are the ranks that share the shards. On a mesh of several, of which the user has a
process group for each dimension, they are all ranks of it: the default process group if these are all there are, else
one that is made here, on gloo, for it carries rendezvous, control exchanges and checkpoints, not training.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from .._torch import backend_name, group_timeout, is_destroyed, make_group_of
from .namespace import agree_on_name

_GRACE = timedelta(seconds=5)
_numbers = itertools.count()
_Made = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]
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


def group_of_ranks(
    ranks: Iterable[int],
    known: Iterable[dist.ProcessGroup] = (),
    like: dist.ProcessGroup | None = None,
    is_simulated: bool = False,
) -> dist.ProcessGroup:
    """A process group over ``ranks``, which are numbers in the default one: that one, one of ``known``, or one that is
    made for it, once.

    Ranks: all of ``ranks``, where it must be made.

    Args:
        like: one for other ranks, whose backends it must have (it is not the default one then); default: any.
        is_simulated: the other ranks are not there.

    Raises:
        RuntimeError: some of them did not come in time.
    """
    wanted, world = tuple(sorted(ranks)), dist.group.WORLD
    assert world is not None, "there are process groups"
    for group in (world, *known) if like is None else ():
        if tuple(dist.get_process_group_ranks(group)) == wanted:
            return group
    made = _made.setdefault(world, {})
    key = wanted, "gloo" if like is None else backend_name(like)
    if key not in made or is_destroyed(made[key]):
        made[key] = _make(wanted, world, like, is_simulated)
    return made[key]


def _make(
    ranks: tuple[int, ...], world: dist.ProcessGroup, like: dist.ProcessGroup | None, is_simulated: bool
) -> dist.ProcessGroup:
    timeout = group_timeout(world if like is None else like)

    def absence(absent: Sequence[int]) -> RuntimeError:
        return RuntimeError(
            f"making a process group of the ranks {[*ranks]}, for a model that they run together: rank(s) "
            f"{', '.join(str(ranks[i]) for i in absent)} did not come within {timeout.total_seconds():g} s. Every rank "
            "of a mesh must call fully_shard()"
        )

    gathering = _Gathering(ranks, world.rank())
    # The name is one that no earlier initialisation has used: torch keeps what it needs for the group below it.
    name = f"{gathering.group_name}/{next(_numbers)}"
    if not is_simulated:
        name = agree_on_name(gathering, timeout, _GRACE, absence)
    return make_group_of(ranks, name, timeout, like)
