"""Process groups, and what goes between ranks; knows no parameter and no module.

Each file is one way for ranks to meet: the process groups themselves (``ranks``), small exchanges, rendezvous through
the key-value store, direct messages; and what is noted for errors.
"""

from .broken import failure_of as failure_of
from .broken import give_up as give_up
from .broken import noticing_loss as noticing_loss
from .control_exchange import Carrier as Carrier
from .control_exchange import ControlExchange as ControlExchange
from .control_exchange import control_group as control_group
from .point_to_point import all_gather as all_gather
from .point_to_point import exchange as exchange
from .point_to_point import gather as gather
from .point_to_point import is_better as is_better
from .point_to_point import others as others
from .ranks import DataParallelMesh as DataParallelMesh
from .ranks import data_parallel_mesh as data_parallel_mesh
from .records import is_on as is_on
from .records import last_of_every_rank as last_of_every_rank
from .records import note as note
from .rendezvous import RECOVERY_TIMEOUT as RECOVERY_TIMEOUT
from .rendezvous import first_difference as first_difference
from .rendezvous import meet as meet
from .transferable import as_transferable as as_transferable
from .transport import TRANSPORT as TRANSPORT
from .transport import Transport as Transport
