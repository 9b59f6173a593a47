"""Process groups and all communication between ranks; nothing here knows about parameters or modules.

``mesh`` holds the process groups and ``transport`` the collectives on flat tensors; ``gloo`` and ``shared_memory``
replace those collectives on gloo. ``control_exchange`` and ``store`` do small exchanges and rendezvous; ``journal`` and
``failure`` collect what errors report.
"""

from .control_exchange import Carrier as Carrier
from .control_exchange import ControlExchange as ControlExchange
from .control_exchange import maximum_of_all_ranks as maximum_of_all_ranks
from .failure import fail_together as fail_together
from .failure import failure_of as failure_of
from .failure import give_up as give_up
from .failure import noticing_loss as noticing_loss
from .gloo import Messages as Messages
from .gloo import transport_of as transport_of
from .journal import Journal as Journal
from .journal import difference_of as difference_of
from .journal import known_journal as known_journal
from .mesh import DataParallelMesh as DataParallelMesh
from .mesh import check_mesh as check_mesh
from .mesh import data_parallel_mesh as data_parallel_mesh
from .mesh import default_mesh as default_mesh
from .mesh import device_of_mesh as device_of_mesh
from .mesh import joined_mesh as joined_mesh
from .mesh import mesh_of_this_rank as mesh_of_this_rank
from .mesh import replicated_mesh as replicated_mesh
from .store import RECOVERY_TIMEOUT as RECOVERY_TIMEOUT
from .store import first_difference as first_difference
from .store import is_on as is_on
from .store import last_of_every_rank as last_of_every_rank
from .store import meet as meet
from .store import note as note
from .transport import ALL_GATHER as ALL_GATHER
from .transport import ALL_REDUCE as ALL_REDUCE
from .transport import GATHER as GATHER
from .transport import IN_GROUP as IN_GROUP
from .transport import REDUCE_SCATTER as REDUCE_SCATTER
from .transport import Collective as Collective
from .transport import CollectiveNotes as CollectiveNotes
from .transport import Label as Label
from .transport import Names as Names
from .transport import Recorder as Recorder
from .transport import Transport as Transport
from .transport import Work as Work
from .transport import as_transferable as as_transferable
from .transport import device_for as device_for
