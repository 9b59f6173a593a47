"""What finds out why ranks do not go on: agreement before each collective (``FSDP_COMPOSE_DEBUG=1``), and the log line
of a rank that stands still."""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand

if TYPE_CHECKING:
    from .lockstep import LockstepCommunicator as LockstepCommunicator
    from .lockstep import announce_first_forward as announce_first_forward
    from .standstill import POSITION_MARK as POSITION_MARK
    from .standstill import look_after_standstill as look_after_standstill
else:
    __getattr__ = on_demand(
        __name__,
        {
            "lockstep": "LockstepCommunicator announce_first_forward",
            "standstill": "POSITION_MARK look_after_standstill",
        },
    )
