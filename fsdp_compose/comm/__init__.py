"""Process groups, and what goes between ranks; knows no parameter and no module.

Each file is one way for ranks to meet: the process groups themselves (``ranks``), small exchanges, rendezvous through
the key-value store, direct messages; and what is noted for errors.
"""

from .broken import fail_together as fail_together
from .broken import failure_of as failure_of
from .broken import give_up as give_up
from .broken import noticing_loss as noticing_loss
from .control_exchange import Carrier as Carrier
from .control_exchange import ControlExchange as ControlExchange
from .control_exchange import maximum_of_all_ranks as maximum_of_all_ranks
from .journal import Journal as Journal
from .journal import difference_of as difference_of
from .journal import known_journal as known_journal
from .label import ALL_GATHER as ALL_GATHER
from .label import ALL_REDUCE as ALL_REDUCE
from .label import GATHER as GATHER
from .label import IN_GROUP as IN_GROUP
from .label import REDUCE_SCATTER as REDUCE_SCATTER
from .label import Label as Label
from .label import Names as Names
from .label import Work as Work
from .messages import Messages as Messages
from .messages import transport_of as transport_of
from .ranks import DataParallelMesh as DataParallelMesh
from .ranks import check_mesh as check_mesh
from .ranks import data_parallel_mesh as data_parallel_mesh
from .ranks import default_mesh as default_mesh
from .ranks import device_of_mesh as device_of_mesh
from .ranks import joined_mesh as joined_mesh
from .ranks import mesh_of_this_rank as mesh_of_this_rank
from .ranks import replicated_mesh as replicated_mesh
from .recording import Collective as Collective
from .recording import CollectiveNotes as CollectiveNotes
from .recording import Recorder as Recorder
from .records import is_on as is_on
from .records import last_of_every_rank as last_of_every_rank
from .records import note as note
from .rendezvous import RECOVERY_TIMEOUT as RECOVERY_TIMEOUT
from .rendezvous import first_difference as first_difference
from .rendezvous import meet as meet
from .transferable import as_transferable as as_transferable
from .transferable import device_for as device_for
from .transport import Transport as Transport
