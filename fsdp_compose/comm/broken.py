"""Process groups in which a collective of ours has failed: a rank died, or one did not come in time.

Such a process group carries nothing any more. Ranks that talk to the dead one hear of it at once; one that waits for
the part of a rank that has given up would wait for the timeout of the process group. So a rank that gives up closes its
connections, which tells its neighbours, and so on. A rendezvous on the process group, which goes through the store,
waits a few seconds only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from .._torch import close_gloo_connections, is_gloo_connection_closed

# Weak both ways: the group of a control group, and the control group of a group.
_partners: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# Process groups of one mesh: a rank that waits in one of them waits for ranks that wait in others.
_families: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_failures: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def carries(control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """``control`` carries the exchanges of ``group``: they fail together."""
    _partners[group] = weakref.ref(control)
    _partners[control] = weakref.ref(group)


def fail_together(groups: Sequence[dist.ProcessGroup]) -> None:
    """Where a collective of one of ``groups`` has failed, none of them carries anything more."""
    for group in groups:
        _families.setdefault(group, weakref.WeakSet()).update(groups)


def give_up(group: dist.ProcessGroup, failure: str) -> None:
    """Note that a collective of ``group`` has failed, and close the connections."""
    if group in _failures:
        return
    for item in _together(group):
        _failures[item] = failure
    close_connections(group)


def close_connections(group: dist.ProcessGroup) -> None:
    """Let the other ranks hear that a collective of ``group`` has failed."""
    for item in _together(group):
        close_gloo_connections(item)


def _together(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    found = [group]
    for item in found:  # grows
        found += [other for other in (*_same_ranks(item), *_families.get(item, ())) if other not in found]
    return found


def _same_ranks(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    partner = _partners.get(group)
    return [item for item in (group, None if partner is None else partner()) if item is not None]


def failure_of(group: dist.ProcessGroup) -> str:
    """How the first collective failed; empty if none did."""
    return _failures.get(group, "")


def gone(group: dist.ProcessGroup, ranks: Iterable[int]) -> list[int]:
    """Those of ``ranks`` whose connections are closed: they have died, or given up."""
    return [rank for rank in ranks if any(is_gloo_connection_closed(item, rank) for item in _same_ranks(group))]


@contextmanager
def noticing_loss(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Within, a collective of ``group`` is issued and waited for by functions that raise gloo's own errors."""
    try:
        yield
    except RuntimeError as error:
        if "gloo/transport" not in str(error):  # its source file: others are errors of the call
            raise
        failure = (
            f"rank {group.rank()}: {what} failed: another rank died, or did not enter the same collective. {error}"
        )
        give_up(group, failure)
        raise RuntimeError(failure) from error
