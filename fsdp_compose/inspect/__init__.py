"""Questions that a user can ask a model."""

from .check import UnreducedParameter as UnreducedParameter
from .check import check as check
from .description import describe as describe
from .hang import explain_hang as explain_hang
from .hang import explain_logs as explain_logs
from .hang import positions_in as positions_in
from .planning import Plan as Plan
from .planning import advise as advise
from .planning import check_picture as check_picture
from .planning import dtype_of as dtype_of
from .planning import load_factory as load_factory
from .planning import mesh_shape_of as mesh_shape_of
from .planning import simulate as simulate
from .planning import world_sizes_of as world_sizes_of
from .schedule import record_collectives as record_collectives
from .timeline import Trace as Trace
from .timeline import TraceEvent as TraceEvent
from .timeline import trace as trace
