"""The exchange at the end of a backward, at that of a forward that has looked for writes, and before each reduction in
functional mode: whether all ranks have done the same.
"""

from __future__ import annotations

from ..comm import ControlExchange
from ..group import Root, raise_different_steps, steps_to_compare, steps_were_compared
from .different_order import raise_different_order


def begin_exchange(root: Root, exchange: ControlExchange, code: int) -> None:
    """Send off what this rank has done, and what it is about to do (``code``). Ranks: all."""
    root.communicator.announce_exchange(root, code)
    exchange.start(root.order.hash(root, code), steps_to_compare(root))


def end_exchange(root: Root, exchange: ControlExchange, code: int) -> None:
    """Wait for the other ranks.

    Raises:
        RuntimeError: on every rank, they have issued other collectives, or made other numbers of optimizer steps; or a
            rank did not come.
    """
    try:
        is_same = exchange.wait()
    except RuntimeError:
        root.order.close()  # as on the other ranks
        raise
    if not is_same:
        raise_different_order(root, code)
    if not exchange.steps_agree:
        raise_different_steps(root)
    root.order.close()
    steps_were_compared(root)
