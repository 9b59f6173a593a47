"""Checkpoints: folders on disk, saves while training goes on, files of the Hugging Face hub, the shards of one rank.

The core makes the state dicts in them, under the names and with the meaning of
``torch.distributed.checkpoint.state_dict``; see docs/checkpoints.md.
"""

from ..core.state_dicts import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    patch_model_state_dict,
    patch_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from .background import SaveFuture, Saver, async_save
from .hf import load_hf, save_hf
from .local_shards import Shards, shards
from .planner import LoadPlanner, SavePlanner
from .retention import keep, latest
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
