"""Parameters that are DTensors already (``parameters``), and those that are annotated so (``annotations``)."""

from .annotations import Annotation as Annotation
from .annotations import read as read
from .annotations import refuse_gaps as refuse_gaps
from .parameters import AddUp as AddUp
from .parameters import Shown as Shown
from .parameters import TensorParallel as TensorParallel
from .parameters import is_even as is_even
from .parameters import is_split_evenly as is_split_evenly
from .parameters import largest_local_shape as largest_local_shape
from .parameters import local_shape as local_shape
from .parameters import placed as placed
from .parameters import refuse_placement as refuse_placement
