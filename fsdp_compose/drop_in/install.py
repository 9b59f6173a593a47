"""``install()``: rebind FSDP2's functions to ours, in torch and in packages that have imported them.

For packages that let nobody choose who shards (accelerate, transformers); ``integrations`` has the doors of others.
Names are rebound by identity: every global of every imported module that is FSDP2's ``fully_shard``, and so on. Modules
imported later get ours from ``torch.distributed.fsdp``. FSDP2's classes stay: ours derives from ``FSDPModule``.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.nn as nn

from .._arguments import checked
from .._torch import fsdp2
from ..errors import MisuseError, MisuseRuntimeError
from ..extension import get_state, register_forward_method
from .module import FSDPModule, share_comm_ctx
from .sharding import fully_shard
from .sharding import layout as chosen

_OURS: dict[str, Any] = {  # by their names in FSDP2
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_forward_method,
    "share_comm_ctx": share_comm_ctx,
}

# These import the names when they are imported, so ``install()`` imports them first.
_IMPORTED = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed.pipelining")
_LEFT_ALONE = (f"{fsdp2.__name__}.", f"{__package__}.")  # torch's own implementation keeps its names

_rebound: list[tuple[ModuleType, str, Any]] = []
_log = logging.getLogger("fsdp_compose")


@checked(layout="'flat', 'fsdp2' or None")
def install(*, layout: str | None = None) -> list[str]:
    """Rebind FSDP2's functions to those of ``fsdp_compose.drop_in`` in this process, for code that you cannot edit and
    that has no other way in.

    Call it on all ranks, before models are sharded. Modules imported later pick up the new names from torch. If such a
    module derives something from them at import time (transformers' loader), call ``install()`` again. Local: no
    communication.

    Args:
        layout: how ``drop_in.fully_shard`` lays out parameters from now on. ``"flat"``, the default: one after the
            other in a flat parameter, with unequal shards. ``"fsdp2"``: every rank holds FSDP2's even chunk of every
            parameter, placed ``Shard(0)``, for code that computes rows by itself; each collective then costs one copy.
            ``None``: as before. The same on all ranks.

    Returns:
        The names that this call has rebound, as "module.name", sorted; they are also logged (``fsdp_compose``, INFO).

    Raises:
        ValueError: there is no such layout.
        RuntimeError: a model is already sharded, by FSDP2 or by ``fsdp_compose.fully_shard``; code that checks for an
            ``FSDPModule`` would not recognize it.
    """
    theirs = [item for item in _all_modules() if get_state(item) is None and fsdp2.FSDPModule in type(item).__mro__]
    _refuse_sharded("install", "FSDP2", theirs)
    without = [item for item in _all_modules() if get_state(item) is not None and not isinstance(item, FSDPModule)]
    _refuse_sharded("install", "fsdp_compose.fully_shard()", without)
    if layout not in (None, "flat", "fsdp2"):
        raise MisuseError(f"install(layout={layout!r}): expected 'flat' or 'fsdp2'")
    if layout is not None:
        chosen.is_fsdp2 = layout == "fsdp2"
    for name in _IMPORTED:
        importlib.import_module(name)
    ours = {id(getattr(fsdp2, name)): item for name, item in _OURS.items()} | _of_others()
    new = [
        (module, name, value)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and not f"{module.__name__}.".startswith(_LEFT_ALONE)
        for name, value in vars(module).items()
        if id(value) in ours
    ]
    for module, name, value in new:
        setattr(module, name, ours[id(value)])
    _rebound.extend(new)
    names = _names(new)
    _log.info("install(): rebound %s", ", ".join(names) or "nothing more")
    return names


def installed() -> list[str]:
    """Return the names that ``install()`` has rebound and that nobody has rebound since, as "module.name", sorted."""
    return _names(_still_ours())


def uninstall() -> list[str]:
    """Undo ``install()``.

    Returns:
        The restored names as "module.name", sorted.

    Raises:
        RuntimeError: a model is sharded by ``drop_in.fully_shard``.
    """
    _refuse_sharded(
        "uninstall", "drop_in.fully_shard()", [item for item in _all_modules() if isinstance(item, FSDPModule)]
    )
    chosen.is_fsdp2 = False
    back = _still_ours()
    for module, name, value in back:
        setattr(module, name, value)
    _rebound.clear()
    return _names(back)


def _still_ours() -> list[tuple[ModuleType, str, Any]]:
    ours = {id(item) for item in (*_OURS.values(), *_of_others().values())}
    return [(module, name, value) for module, name, value in _rebound if id(vars(module).get(name)) in ours]


def _names(rebound: list[tuple[ModuleType, str, Any]]) -> list[str]:
    return sorted(f"{module.__name__}.{name}" for module, name, _ in rebound)


def _of_others() -> dict[int, Any]:
    """Return replacements for what depends on FSDP2's parameter layout in other packages, by the id of the original."""
    from . import pipelining_patch as of_pipelines  # late: pipelining is slow to import

    ours: dict[int, Any] = {
        id(of_pipelines.of_inputs): of_pipelines.stage_backward_input,
        id(of_pipelines.of_weights): of_pipelines.stage_backward_weight,
    }
    restoring = "verl.utils.fsdp_utils"
    if "verl" not in sys.modules or find_spec(restoring) is None:
        return ours
    if hasattr(importlib.import_module(restoring), "fsdp2_sharded_load_from_cpu"):
        from . import verl_patch as verl_restoring

        ours[id(verl_restoring.original)] = verl_restoring.fsdp2_sharded_load_from_cpu
    return ours


def _all_modules() -> list[nn.Module]:
    return [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]


def _refuse_sharded(caller: str, sharder: str, modules: list[nn.Module]) -> None:
    if modules:
        raise MisuseRuntimeError(
            f"{caller}(): there are modules sharded by {sharder} ({len(modules)}, among them a "
            f"{type(modules[0]).__name__}): call it before models are sharded, or after they are deleted (gc.collect())"
        )
