"""Questions that a user can ask a model."""

from .check import UnreducedParameter as UnreducedParameter
from .check import check as check
from .schedule import record_collectives as record_collectives
