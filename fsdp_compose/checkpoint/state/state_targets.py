"""Where each tensor of an optimizer's state goes, also those in lists and dicts, when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..moving.layouts import Described, Target
from .nested import Path, leaves_of
from .pending import pending_state
from .templates import Template
from .trained import Trained, TrainedBy


class StateTargets:
    """The known facts of one parameter's state.

    Args:
        by: the optimizer.
        template: what it will keep for the parameter, if that is known.
    """

    def __init__(self, by: TrainedBy, param: Trained, template: Template) -> None:
        self._by, self._param, self._template = by, param, template
        self._present: Mapping[Path, Any] = dict(leaves_of(by.state_of(param)))

    def expected_shape(self, path: Path) -> tuple[int, ...] | None:
        """The shape that the state at ``path`` (its name, and where in lists and dicts) must have; ``None``: any."""
        if path[0] in self._template and len(path) == 1:
            return self._template[path[0]].shape(self._param.tensor.shape)
        known = self._present.get(path)
        return tuple(known.shape) if isinstance(known, torch.Tensor) and len(path) == 1 else None

    def dtype(self, path: Path, value: torch.Tensor | Described) -> torch.dtype:
        """The dtype that the optimizer keeps ``value`` in; its own, if that is not known."""
        if path[0] in self._template and len(path) == 1:
            return self._template[path[0]].dtype
        known = self._present.get(path)
        return known.dtype if isinstance(known, torch.Tensor) else value.dtype

    def of(self, path: Path, value: torch.Tensor | Described) -> Target:
        """Where ``value``, which has the expected shape, goes."""
        param, known = self._param, self._present.get(path)
        kind = self._template.get(path[0]) if len(path) == 1 else None
        is_like = kind.is_like_parameter if kind is not None else tuple(value.shape) == tuple(param.tensor.shape)
        if isinstance(known, torch.Tensor) and tuple(known.shape) == tuple(value.shape):
            return Target(known, param.place if is_like else None)
        if is_like and path[-1] != "step":  # of a 0-dim parameter
            return param.target
        if kind is not None:
            return Target(pending_state(param.tensor, {path[0]: kind})[path[0]])
        mesh = param.tensor.device_mesh if isinstance(param.tensor, DTensor) else None
        if isinstance(value, DTensor) and value.device_mesh == mesh:
            return Target(value)
        if mesh is not None and tuple(value.shape) == (self._by.numel,):
            # A vector over all parameters (LBFGS): what torch.cat() makes of sharded ones.
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            return Target(DTensor.from_local(like, mesh, [Replicate()] * mesh.ndim, run_check=False))
        return plain_target(value, param.target.device)


def plain_target(value: torch.Tensor | Described, device: torch.device) -> Target:
    """A whole tensor; numbers are kept on the CPU."""
    return Target(torch.empty(value.shape, dtype=value.dtype, device=device if len(value.shape) else "cpu"))


def shared_target(by: TrainedBy, path: Path, value: torch.Tensor | Described) -> Target:
    """Where state goes that an optimizer keeps under other keys than its parameters."""
    known = dict(leaves_of(by.shared)).get(path)
    if isinstance(known, torch.Tensor) and tuple(known.shape) == tuple(value.shape):
        return Target(known)
    if isinstance(value, DTensor):
        return Target(value)
    return plain_target(value, by.device)
