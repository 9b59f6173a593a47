"""Checkpoints: state dicts of any parallelism under canonical names, and storing them.

The names, arguments and meaning of ``torch.distributed.checkpoint.state_dict``; see docs/checkpoints.md.
"""

from .hf import load_hf, save_hf
from .options import StateDictOptions
from .patching import patch_model_state_dict, patch_optimizer_state_dict
from .planner import LoadPlanner, SavePlanner
from .state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
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
