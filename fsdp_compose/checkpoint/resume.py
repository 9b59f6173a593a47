"""``resume``: get the state dicts, load a checkpoint into them, and set them, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ..errors import MisuseTypeError
from .optimizer_state import Optimizers
from .state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from .storage import load


def resume(
    folder: str | Path,
    model: nn.Module,
    optimizers: Optimizers | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizers, on any number of ranks, and return what else it has.

    The checkpoint was saved as ``save({"model": ..., "optimizer": ..., **others}, folder)``, with the state dicts of
    ``get_state_dict``. This is ``load`` between the getters and the setters, which many programs forget: without a
    setter, parameter groups and the state of a new optimizer are not loaded.

    Ranks: all ranks of ``process_group``, on a shared file system.

    Args:
        folder: the checkpoint's folder.
        model, optimizers: what to load into; without optimizers, theirs stays unread.
        process_group: the ranks; default: all.
        others: values to load under their names, for example ``step=0``. An object that has ``load_state_dict()``
            (a scheduler, a data loader) is loaded in place.

    Returns:
        ``others`` with the loaded values.

    Raises:
        TypeError: a name in ``others`` is ``optimizer``.
        RuntimeError, ValueError: as for ``load`` and the setters.

    Example::

        step = resume("step-1000", model, optimizer, step=0)["step"]
    """
    if "optimizer" in others:
        raise MisuseTypeError("resume(): pass the optimizer by position: resume(folder, model, optimizer)")
    if optimizers is None:
        state = {"model": get_model_state_dict(model), **others}
        load(state, folder, process_group=process_group)
        set_model_state_dict(model, state.pop("model"))
        return state
    trained = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
    of_model, of_optimizers = get_state_dict(model, trained)
    state = {"model": of_model, "optimizer": of_optimizers, **others}
    load(state, folder, process_group=process_group)
    set_state_dict(model, trained, model_state_dict=state.pop("model"), optim_state_dict=state.pop("optimizer"))
    return state
