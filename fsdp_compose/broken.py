"""Process groups in which a collective of ours has failed: a rank died, or one did not come in time.

Such a group carries nothing any more. Ranks that talk to the dead one hear of it at once; one that waits for the part
of a rank that has given up would wait for the timeout of the group. So a rank that gives up closes its connections,
which tells its neighbours, and so on. Meetings on the group, which go through the store, wait a few seconds only.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from ._torch import close_gloo_connections

# Weak both ways: the group of a control group, and the control group of a group.
_partners: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_failures: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def carries(control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """``control`` carries the exchanges of ``group``: they fail together."""
    _partners[group] = weakref.ref(control)
    _partners[control] = weakref.ref(group)


def give_up(group: dist.ProcessGroup, failure: str) -> None:
    """A collective of ``group`` has failed."""
    if group in _failures:
        return
    partner = _partners.get(group)
    for item in (group, None if partner is None else partner()):
        if item is not None:
            _failures[item] = failure
            close_gloo_connections(item)


def failure_of(group: dist.ProcessGroup) -> str:
    """How the first collective failed; empty if none did."""
    return _failures.get(group, "")
