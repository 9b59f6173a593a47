"""The hooks that drive groups through forward and backward, and what they do, in time order."""

from . import outside_use as outside_use  # gives sharded parameters gradients of losses that gather them
from .backward import reduce_accumulated as reduce_accumulated
from .backward_inputs import notice_inputs as notice_inputs
from .forward import enter_alone as enter_alone
from .hooks import drive as drive
from .hooks import post_forward as post_forward
from .hooks import pre_forward as pre_forward
from .optional import serve as serve
from .optional import unshard_in_rounds as unshard_in_rounds
from .region import region as region
from .steps import reshard as reshard
from .steps import unshard as unshard
from .steps import wait_for_unshard as wait_for_unshard
