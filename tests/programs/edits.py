"""Changes that a user may make to a parameter, or to the whole model, between iterations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from fsdp_compose import RaggedDTensor


def _multiply(model: nn.Module, chosen: nn.Parameter) -> None:
    with torch.no_grad():
        chosen.mul_(0.5)


def _multiply_data(model: nn.Module, chosen: nn.Parameter) -> None:
    chosen.data.mul_(-0.5)


def _load(model: nn.Module, chosen: nn.Parameter) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def _load_by_assignment(model: nn.Module, chosen: nn.Parameter) -> None:
    """The unsharded model keeps its parameters, for its optimizer; the gradients are dropped all the same."""
    state = {name: value * 0.9 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=isinstance(chosen, RaggedDTensor))
    model.zero_grad()


def _toggle(model: nn.Module, chosen: nn.Parameter) -> None:
    chosen.requires_grad_(not chosen.requires_grad)


def _drop_gradient(model: nn.Module, chosen: nn.Parameter) -> None:
    chosen.grad = None


def _scale_gradient(model: nn.Module, chosen: nn.Parameter) -> None:
    if chosen.grad is not None:
        chosen.grad.mul_(2)


EDITS: dict[str, Callable[[nn.Module, nn.Parameter], None]] = {
    "multiply": _multiply,
    "multiply data": _multiply_data,
    "load": _load,
    "load by assignment": _load_by_assignment,
    "toggle requires_grad": _toggle,
    "drop a gradient": _drop_gradient,
    "scale a gradient": _scale_gradient,
}
