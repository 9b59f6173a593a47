"""Send weights to other programs: whole parameters, or only the changed elements, in buckets that all ranks gather.

Users call ``full_parameters``, which sends whole parameters, and the functions of ``changes``, which send what differs
from a snapshot. Nothing here changes the model.

Both are loops over a plan that all ranks compare at the start. The user's code between two steps may end the loop on
one rank only, so each step is a rendezvous with what this rank is about to do: go on, leave, or raise.
"""

from .changes import ChangedElements as ChangedElements
from .changes import ParameterSnapshot as ParameterSnapshot
from .changes import apply_changes as apply_changes
from .changes import changed_since as changed_since
from .changes import snapshot_parameters as snapshot_parameters
from .full_parameters import full_parameters as full_parameters
