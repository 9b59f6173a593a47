"""State dicts for any parallelism under canonical names, and functions that save and load them.

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

from .agreement import agree as agree
from .agreement import ask_all as ask_all
from .agreement import group_of as group_of
from .agreement import is_first as is_first
from .background import SaveFuture, Saver, async_save
from .fqns import ModelNames as ModelNames
from .hf import extend_transformers_loader as extend_transformers_loader
from .hf import load_hf, save_hf
from .local_shards import Shards, shards
from .model_state import StateDictOptions
from .planner import LoadPlanner, SavePlanner
from .retention import keep, latest
from .state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    patch_model_state_dict,
    patch_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from .storage import load, resume, save

__all__ = [
    "LoadPlanner",
    "SaveFuture",
    "SavePlanner",
    "Saver",
    "Shards",
    "StateDictOptions",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "keep",
    "latest",
    "load",
    "load_hf",
    "patch_model_state_dict",
    "patch_optimizer_state_dict",
    "resume",
    "save",
    "save_hf",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "shards",
]
