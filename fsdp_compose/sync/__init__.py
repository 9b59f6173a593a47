"""Send weights to other programs: whole parameters, or only the changed elements, in buckets that all ranks gather.

``full_parameters`` gathers whole parameters; the functions of ``changes`` gather the elements that differ from a
snapshot. Nothing here changes the model.
"""

from .changes import ChangedElements as ChangedElements
from .changes import ParameterSnapshot as ParameterSnapshot
from .changes import apply_changes as apply_changes
from .changes import changed_since as changed_since
from .changes import snapshot_parameters as snapshot_parameters
from .full_parameters import full_parameters as full_parameters
