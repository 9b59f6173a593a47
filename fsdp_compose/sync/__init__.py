"""Weights for other programs: whole parameters, or what has changed of them, in buckets that ranks gather together.

Users call ``full_parameters``, which sends whole parameters, and the functions of ``changes``, which send what differs
from a snapshot. Nothing here changes the model.
"""

from .changes import ChangedElements as ChangedElements
from .changes import ParameterSnapshot as ParameterSnapshot
from .changes import apply_changes as apply_changes
from .changes import changed_since as changed_since
from .changes import snapshot_parameters as snapshot_parameters
from .full_parameters import full_parameters as full_parameters
