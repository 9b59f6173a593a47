"""For tests of programs that train with this package: functions run on several ranks, in processes of their own or in
this one alone; training that must equal training without sharding; the collectives of a step, or all that overlaps in
it (``trace(model).text(times=False)``), as text.

    from fsdp_compose.testing import run_on_ranks

    def two_steps() -> float: ...                      # every rank runs this; torch.distributed is initialised

    losses = run_on_ranks(2, two_steps, timeout=60)    # what the ranks returned; or one error that names each rank

Nothing else in the package imports this one."""

from ..inspect import record_collectives as record_collectives
from ..inspect import trace as trace
from .parity import assert_trains_like_unsharded as assert_trains_like_unsharded
from .ranks import Ranks as Ranks
from .ranks import RanksFailed as RanksFailed
from .ranks import preload as preload
from .ranks import run_on_ranks as run_on_ranks
from .ranks import simulated_ranks as simulated_ranks
