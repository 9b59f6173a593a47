"""Collectives by direct messages between ranks, and through shared memory: what gloo alone uses.

``messages`` replaces the collectives of the backend, ``shared_memory`` carries sums on one machine, and ``journal``
numbers what ranks send, so that ranks that went different ways learn why they wait.
"""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .journal import Journal as Journal
    from .journal import difference_of as difference_of
    from .journal import known_journal as known_journal
    from .journal import loss as loss
    from .journal import noticing_loss as noticing_loss
    from .journal import take_back_failure as take_back_failure
    from .journal import tell_failure as tell_failure
    from .journal import who_left as who_left
    from .messages import MemoryOfRanks as MemoryOfRanks
    from .messages import Messages as Messages
    from .messages import Pending as Pending
    from .messages import look_after_pending as look_after_pending
else:
    __getattr__ = on_demand(
        __name__,
        {
            "journal": "Journal difference_of known_journal loss noticing_loss take_back_failure tell_failure who_left",
            "messages": "MemoryOfRanks Messages Pending look_after_pending",
            "shared_memory": "",
        },
    )
