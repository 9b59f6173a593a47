"""The hooks that drive groups through forward and backward, and the steps that they take, in time order."""

from . import (
    differentiable_gather as differentiable_gather,  # gives sharded parameters gradients of losses that gather them
)
from .backward import reduce_accumulated as reduce_accumulated
from .differentiable_gather import notice_inputs as notice_inputs
from .forward import enter_alone as enter_alone
from .forward import region as region
from .group_ops import reshard as reshard
from .group_ops import unshard as unshard
from .group_ops import wait_for_unshard as wait_for_unshard
from .hooks import drive as drive
from .hooks import post_forward as post_forward
from .hooks import pre_forward as pre_forward
from .optional import serve_peers as serve_peers
from .optional import unshard_in_rounds as unshard_in_rounds
