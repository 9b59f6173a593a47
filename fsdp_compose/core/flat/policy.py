"""The policies of a group, as plain data: mixed precision, CPU offload, and what users decide about single parameters.

They are checked when they are made. torch's own policy classes are accepted too: they have the same names and meanings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.nn as nn

from ..._arguments import checked
from ...errors import MisuseError, MisuseTypeError
from .layout import Granule


@checked()
@dataclass(frozen=True)
class CPUOffloadPolicy:
    """Keep shards, gradients and optimizer state of a group in host memory, and compute on the device of its mesh.

    Name and meaning are those of ``torch.distributed.fsdp.CPUOffloadPolicy``, which is accepted too; torch's class has
    only ``pin_memory``.

    Args:
        pin_memory: use page-locked host memory, which is copied faster and while the device computes; ``False`` if the
            host has too little of it. No effect if the CPU computes.
        parameters: ``False``: keep shards on the device, and only gradients in host memory. You must then call
            ``offload_optimizer_states`` on the optimizer, which brings both together.
    """

    pin_memory: bool = True
    parameters: bool = True


Granularity = Callable[[str, nn.Parameter], Granule | None]
"""Given a parameter (its FQN, and the parameter), returns what no shard boundary may divide; see ``fully_shard``."""


@checked(
    param_dtype_override_fn="a function of one parameter, such as lambda param: torch.float32 if param.ndim == 1 else "
    "None"
)
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a group computes, reduces and returns.

    Parameters and optimizer state stay sharded in the dtype the model was built with; low precision exists only between
    all-gather and reshard. Names and meanings are those of ``torch.distributed.fsdp.MixedPrecisionPolicy`` in torch
    2.15, whatever your version of torch.

    Args:
        param_dtype: floating dtype of the unsharded parameters, hence of the all-gather, forward and backward. ``None``
            keeps the original dtype. Complex and integer parameters keep theirs.
        reduce_dtype: floating dtype of the gradient reduction, and of gradients accumulated under ``no_sync``.
            ``None``: the dtype of the parameter's gradient. That is ``param.grad_dtype``, if you set it, else the dtype
            the model was built with, even if ``param_dtype`` is lower (before 2.15, torch used ``param_dtype``). To
            reduce in bf16, set it here.
        output_dtype: floating dtype to which the floating-point tensors that the module returns are cast. ``None``
            leaves them as they are.
        cast_forward_inputs: whether floating-point tensors among the forward's arguments are cast to ``param_dtype``.
        param_dtype_override_fn: a function that takes a parameter and returns the floating dtype to use for it,
            unsharded, instead of ``param_dtype``. Return its own dtype to keep it as it is (norms, routers), or
            ``None`` for ``param_dtype``. ``fully_shard`` calls it once per parameter. Its answers must be the same on
            every rank; the first forward checks that. Parameters with different compute dtypes are in different flat
            parameters of the group. (torch 2.15 accepts only the parameter's own dtype; here it can be any.)

    Raises:
        TypeError: a dtype is not a ``torch.dtype``, or the function cannot be called.
        ValueError: a dtype is not a real floating-point dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise MisuseError(
                    f"MixedPrecisionPolicy({name}={dtype}): expected a floating-point dtype such as torch.bfloat16"
                )

    def compute_dtype_of(self, fqn: str, param: nn.Parameter) -> torch.dtype | None:
        """The compute dtype of ``param``; ``None``: its own dtype, whatever that is.

        Raises:
            ValueError: ``param_dtype_override_fn`` returned something other than a floating dtype or ``None``.
        """
        dtype = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(param)
        if dtype is None or dtype == self.param_dtype or (dtype == param.dtype and not dtype.is_floating_point):
            return self.param_dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or not param.is_floating_point():
            raise MisuseError(
                f"MixedPrecisionPolicy(param_dtype_override_fn=...): for the parameter {fqn}, which is {param.dtype}, "
                f"it returned {dtype!r}; expected the parameter's own dtype, None (for param_dtype) or, for a "
                "floating-point parameter, a floating-point dtype"
            )
        return None if dtype == param.dtype else dtype


# ---- Instances of torch's own classes instead of ours: they have the same names and meanings


_T = TypeVar("_T")


def as_ours(cls: type[_T], given: Any, where: str) -> _T:
    """Convert ``given``, an instance of ``cls`` or of torch's class of that name, to an instance of ``cls``.

    Args:
        where: the argument it was passed as, for messages.

    Raises:
        TypeError: it is something else.
        ValueError: it has a setting that ``cls`` does not support.
    """
    if isinstance(given, cls):
        return given
    names = {base.__name__ for base in type(given).__mro__}
    if isinstance(given, type) or not is_dataclass(given) or cls.__name__ not in names:
        raise MisuseTypeError(f"{where}: expected fsdp_compose's {cls.__name__} or torch's, got {given!r}")
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]
    for item in fields(given):
        if item.name not in known and getattr(given, item.name) != item.default:
            raise MisuseError(
                f"{where}: {type(given).__name__}({item.name}={getattr(given, item.name)!r}) is not supported: leave "
                f"it at {item.default!r}"
            )
    return cls(**{item.name: getattr(given, item.name) for item in fields(given) if item.name in known})


def as_offload_policy(given: Any, where: str) -> CPUOffloadPolicy | None:
    """Convert ours or torch's ``CPUOffloadPolicy`` to ours; return ``None`` for ``None``, and for torch's
    ``OffloadPolicy``, which offloads nothing.

    Raises:
        TypeError: it is something else.
    """
    if given is None or (is_dataclass(given) and type(given).__name__ == "OffloadPolicy"):
        return None
    return as_ours(CPUOffloadPolicy, given, where)
