"""``trace(model)``: what groups do is written down as they do it, and shown by files that know nothing of models."""

from .events import TraceEvent as TraceEvent
from .trace import Trace as Trace
from .trace import trace as trace
