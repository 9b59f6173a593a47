"""Questions that a user can ask a model.

Each question has one file that reads a model and one with the answer as plain data: ``describe`` and
``describe_formats``, ``trace`` and ``trace_formats``, ``simulated_step`` and ``plan_report``. Descriptions and plans
are shown by ``report``.
"""

from .describe import FSDPGroup as FSDPGroup
from .describe import describe as describe
from .describe import fsdp_groups as fsdp_groups
from .diagnose import UnreducedParameter as UnreducedParameter
from .diagnose import explain_hang as explain_hang
from .diagnose import explain_logs as explain_logs
from .diagnose import find_unreduced_parameters as find_unreduced_parameters
from .diagnose import positions_in as positions_in
from .plan_report import ACTIVATIONS as ACTIVATIONS
from .plan_report import GRADIENTS as GRADIENTS
from .plan_report import OPTIMIZER as OPTIMIZER
from .plan_report import PARAMETERS as PARAMETERS
from .plan_report import Plan as Plan
from .plan_report import WorldFacts as WorldFacts
from .plan_report import check_picture as check_picture
from .plan_report import dtype_of as dtype_of
from .plan_report import load_factory as load_factory
from .plan_report import save_figure as save_figure
from .plan_report import world_sizes_of as world_sizes_of
from .planning import ADAMW as ADAMW
from .planning import model_of as model_of
from .planning import modules_to_wrap as modules_to_wrap
from .planning import of_parameters as of_parameters
from .planning import plan as plan
from .report import Report as Report
from .report import Section as Section
from .report import as_text as as_text
from .report import bytes_of as bytes_of
from .simulated_step import LossOf as LossOf
from .simulated_step import MakeOptimizer as MakeOptimizer
from .simulated_step import OptimizerOf as OptimizerOf
from .simulated_step import simulate as simulate
from .step_events import BACKWARD as BACKWARD
from .step_events import FORWARD as FORWARD
from .step_events import STEP as STEP
from .step_events import Issue as Issue
from .step_events import Operation as Operation
from .step_events import StepEvent as StepEvent
from .step_events import Wait as Wait
from .step_events import operation_of as operation_of
from .trace import Trace as Trace
from .trace import record_collectives as record_collectives
from .trace import trace as trace
from .trace_formats import TraceEvent as TraceEvent
