"""Inspect a model or a job: its groups and layout, a trace, a plan, the cause of a hang."""

from .describe import describe as describe
from .diagnose import UnreducedParameter as UnreducedParameter
from .diagnose import explain_hang as explain_hang
from .diagnose import explain_logs as explain_logs
from .diagnose import find_unreduced_parameters as find_unreduced_parameters
from .diagnose import positions_in as positions_in
from .groups import FSDPGroup as FSDPGroup
from .groups import fsdp_groups as fsdp_groups
from .plan_report import Plan as Plan
from .plan_report import advise as advise
from .plan_report import check_picture as check_picture
from .plan_report import dtype_of as dtype_of
from .plan_report import load_factory as load_factory
from .plan_report import mesh_shape_of as mesh_shape_of
from .plan_report import world_sizes_of as world_sizes_of
from .simulated_step import simulate as simulate
from .trace import Trace as Trace
from .trace import record_collectives as record_collectives
from .trace import trace as trace
from .trace_formats import TraceEvent as TraceEvent
