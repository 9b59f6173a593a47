"""Test programs that train with this package: run functions on several ranks, each in its own process; simulate one
rank of many in this process; compare sharded with unsharded training; record the collectives of a step, or everything
that overlaps in it (``trace(model).text(times=False)``), as text.

    from fsdp_compose.testing import run_on_ranks

    def two_steps() -> float: ...                      # every rank runs this; torch.distributed is initialized

    losses = run_on_ranks(2, two_steps, timeout=60)    # one result per rank, or one error that names each rank

``calibrate`` measures with its ranks; nothing else in the package imports this wing."""

from ..inspect import record_collectives as record_collectives
from ..inspect import trace as trace
from .parity import assert_trains_like_unsharded as assert_trains_like_unsharded
from .ranks import Ranks as Ranks
from .ranks import RanksFailed as RanksFailed
from .ranks import preload as preload
from .ranks import run_on_ranks as run_on_ranks
from .ranks import simulated_ranks as simulated_ranks
