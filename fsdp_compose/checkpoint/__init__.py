"""State dicts for any parallelism under canonical names, and functions that save and load them.

Names, arguments and meaning are those of ``torch.distributed.checkpoint.state_dict``; see docs/checkpoints.md.
"""

from .agreement import agree as agree
from .agreement import group_of as group_of
from .agreement import is_first as is_first
from .fqns import ModelNames as ModelNames
from .hf import load_hf, save_hf
from .model_state import StateDictOptions
from .planner import LoadPlanner, SavePlanner
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
from .storage import load, save

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "load_hf",
    "patch_model_state_dict",
    "patch_optimizer_state_dict",
    "save",
    "save_hf",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
