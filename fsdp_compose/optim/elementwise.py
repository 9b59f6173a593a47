"""Which optimizers treat every element alike: they alone may train flat views."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.optim.optimizer import Optimizer

_Class = TypeVar("_Class", bound=type[Optimizer])

elementwise_classes: list[type[Optimizer]] = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop,
]  # fmt: skip

_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "it keeps averages of the rows and columns of each parameter",
    torch.optim.Muon: "it orthogonalises each parameter as a matrix",
    torch.optim.LBFGS: "it gathers the whole gradient, and its history, on every rank, where flat views gain "
    "nothing, and takes inner products over it, which are wrong on local ones",
    torch.optim.SparseAdam: "it takes sparse gradients only",
}


def declare_elementwise(optimizer: _Class) -> _Class:
    """Declare that a class of optimizers, and its subclasses, can train flat views: what it does to an element
    depends on the gradients and the state of that element only, never on a parameter's shape, norm or name.

    Usable as a decorator. Ranks: no communication.

    Args:
        optimizer: a subclass of ``torch.optim.Optimizer``.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: it is no such class.
        ValueError: it is, or inherits from, one of ``torch.optim`` that is known not to be element-wise.
    """
    if not isinstance(optimizer, type) or not issubclass(optimizer, Optimizer):
        raise TypeError(f"declare_elementwise(): expected a subclass of torch.optim.Optimizer, got {optimizer!r}")
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer, refused):
            raise ValueError(f"declare_elementwise({optimizer.__name__}): {refused.__name__} is not: {reason}")
    elementwise_classes.append(optimizer)
    return optimizer


_FLAT = "train flat_parameters()"


def refuse_unless_elementwise(optimizer: Optimizer, what: str = _FLAT) -> None:
    """Raise TypeError if an optimizer is not known to treat every element alike, as it must to do ``what``."""
    if isinstance(optimizer, tuple(elementwise_classes)):
        return
    kind = type(optimizer)
    remedy = "Give it the sharded parameters themselves: model.parameters()"
    if what != _FLAT:
        remedy = "Leave its state on the device"
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise TypeError(f"{kind.__name__} cannot {what}: {reason}. {remedy}")
    raise TypeError(
        f"{kind.__name__} was to {what}, but is not known to treat every element alike: if what it does "
        "does not depend on the shapes or norms of parameters, declare it with "
        f"fsdp_compose.declare_elementwise({kind.__name__}). {remedy}"
    )
