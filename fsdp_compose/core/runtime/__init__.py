"""The hooks that drive groups through forward and backward, and what they do, in time order.

Read ``hooks``, ``default_mode``, ``group_ops``, ``backward``: that is a usual step. Rules that span these files:

- **Repeated uses.** A group that runs several times is reduced once, after the last use in the same or an earlier
  forward. A use that a backward passes by delays at most that one backward's reduction.
- **Forwards inside a backward.** A forward inside its own root's backward, or one that ``torch.utils.checkpoint``
  repeats, is a recomputation: it leaves the group unsharded for the backward that follows. Any other one (a teacher in
  a gradient hook) is like a forward outside.
- **Backwards inside a forward** (forces, guidance, local losses) end like any other: what they reached is reduced,
  exchanged and shown at once. Groups whose forward is running stay unsharded.
- **Ways out of a forward.** Backward enters a group through hooked outputs. Tensors that forward keeps on modules, or
  puts into lists and dicts that it was given, are hooked too. If nothing can be hooked, the group stays unsharded, and
  hooks on its parameters make sure that the end of backward is reached.
- **requires_grad** is followed from sharded to unsharded parameters when a forward or a backward begins, and the other
  way at the end of forward, for what forward itself has set. Which groups are reduced does not change between forward
  and backward. Each change is noted among the collectives, so ranks compare it.
- **Weights in a loss.** A weight that a loss gathers with ``full_tensor()`` has a gradient of its own on each rank. It
  waits on the flat parameter and is reduced with the group's other gradients, or at the end of backward.
- **Functional mode** refuses and checks the same things as the default mode, and gives the same bits. A recomputation
  is in the mode of the group's last forward. Forwards inside a transform of ``torch.func``, or with values given by
  ``functional_call()``, always run in this mode. After a backward that raised all gradients are ``None``, because
  autograd may have added some of the new ones to older ones.
- **Captured graphs** take one leaf for each flat parameter, over the memory of the shard, and leave the gradient there.
  The end of backward takes it from there, after all eager reductions and before the exchange, so accumulation, hooks
  and publication are the eager code. Programs that do not compile never import Dynamo for it.
- **Optional groups.** Whether a group happens to be gathered on one rank must never decide whether a collective is
  issued. Only the scheduler of a root with optional groups (``SkippingOrder``) knows about them.
"""

from typing import TYPE_CHECKING

from ..._on_demand import on_demand
from .backward import leave_shown as leave_shown
from .backward import reduce_accumulated as reduce_accumulated
from .group_ops import reshard as reshard
from .hooks import drive as drive
from .hooks import enter_alone as enter_alone
from .hooks import notice_inputs as notice_inputs
from .hooks import region as region
from .hooks import registered as registered
from .lazy_init import optional_replicas_error as optional_replicas_error

if TYPE_CHECKING:
    from .unchecked import pause_type_checks as pause_type_checks
else:
    __getattr__ = on_demand(__name__, {"unchecked": "pause_type_checks"})
