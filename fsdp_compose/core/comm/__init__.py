"""Process groups, and everything that travels between ranks. Nothing here knows a parameter or a module.

``mesh`` has the ranks that a group runs on, and ``transport`` spells each collective once; on gloo, the plug-in
``gloo`` replaces the backend's own collectives. ``control_exchange`` compares a few bytes once per backward. ``store``
has everything that goes through the key-value store: it is slow, but bounded in time, and works when collectives hang.

How long a rank waits in a rendezvous: the timeout of the process group, a minute in recovery, and five seconds once a
collective of the process group has failed, be that before or meanwhile. While it waits it checks every five seconds
whether gloo's connections to the missing ranks are closed: then they have ended, or given up. On gloo, the
journal finds out whether another rank waits for this one somewhere else.
"""

from .context import all_kept as all_kept
from .context import forget_for as forget_for
from .context import kept_for as kept_for
from .context import known_for as known_for
from .control_exchange import Carrier as Carrier
from .control_exchange import ControlExchange as ControlExchange
from .control_exchange import maximum_of_all_ranks as maximum_of_all_ranks
from .failure import all_reduce as all_reduce
from .failure import class_of_failure as class_of_failure
from .failure import failure_of as failure_of
from .failure import give_up as give_up
from .mesh import DataParallelMesh as DataParallelMesh
from .mesh import check_beside as check_beside
from .mesh import check_mesh as check_mesh
from .mesh import data_parallel_mesh as data_parallel_mesh
from .mesh import default_mesh as default_mesh
from .mesh import device_of_mesh as device_of_mesh
from .mesh import has_ranks_in_common as has_ranks_in_common
from .mesh import mesh_beside as mesh_beside
from .mesh import mesh_of_this_rank as mesh_of_this_rank
from .mesh import replicated_mesh as replicated_mesh
from .mesh import stay_on_cpu as stay_on_cpu
from .mesh import transport_of as transport_of
from .store import RECOVERY_TIMEOUT as RECOVERY_TIMEOUT
from .store import first_difference as first_difference
from .store import is_on as is_on
from .store import known_namespace as known_namespace
from .store import last_of_every_rank as last_of_every_rank
from .store import meet as meet
from .store import note as note
from .transport import IN_GROUP as IN_GROUP
from .transport import Collective as Collective
from .transport import CollectiveKind as CollectiveKind
from .transport import CollectiveNotes as CollectiveNotes
from .transport import Label as Label
from .transport import Names as Names
from .transport import Recorder as Recorder
from .transport import Replicas as Replicas
from .transport import Transport as Transport
from .transport import TransportRole as TransportRole
from .transport import TransportWrapper as TransportWrapper
from .transport import Work as Work
from .transport import as_transferable as as_transferable
from .transport import device_for as device_for
from .transport import is_capturing as is_capturing
from .transport import streams_of as streams_of
