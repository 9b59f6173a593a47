"""State dicts for any parallelism under canonical names.

The names, arguments and meaning of ``torch.distributed.checkpoint.state_dict``; see docs/checkpoints.md.

Loading has four steps. All ranks meet, so that none waits for one that is not there. Each rank plans by itself and
changes nothing: what goes where, what is missing, what does not fit. They meet again and compare plans, so the verdict
is the same everywhere. Only then are values moved into the layout they are needed in, and ``load_state_dict()`` of the
module and of the optimizers gets them. So users' hooks see ordinary calls, and a rank that dies on the way leaves the
others unchanged. Since hooks may raise on one rank only, ranks meet after the module, before an optimizer is changed,
and at the end. The price is memory for this rank's share of what is moved.

``torch.distributed.checkpoint`` loads into tensors that exist, and an optimizer that has not stepped has none. So a
stand-in of it steps on a tiny tensor (``optimizer_init``).
"""

from .agreement import Peers as Peers
from .fqns import ModelNames as ModelNames
from .gathering import digests_of as digests_of
from .gathering import gather_values as gather_values
from .gathering import says_what_it_holds as says_what_it_holds
from .model_state import ModelPlan as ModelPlan
from .model_state import StateDictOptions as StateDictOptions
from .model_state import as_options as as_options
from .optimizer_init import PlaceState as PlaceState
from .optimizer_init import pending_like as pending_like
from .optimizer_load import state_placer as state_placer
from .optimizer_state import Optimizers as Optimizers
from .optimizer_state import is_shared_name as is_shared_name
from .optimizer_state import listed as listed
from .resharding import Described as Described
from .resharding import Target as Target
from .state_dict import get_model_state_dict as get_model_state_dict
from .state_dict import get_optimizer_state_dict as get_optimizer_state_dict
from .state_dict import get_state_dict as get_state_dict
from .state_dict import load_into as load_into
from .state_dict import patch_model_state_dict as patch_model_state_dict
from .state_dict import patch_optimizer_state_dict as patch_optimizer_state_dict
from .state_dict import set_model_state_dict as set_model_state_dict
from .state_dict import set_optimizer_state_dict as set_optimizer_state_dict
from .state_dict import set_state_dict as set_state_dict
