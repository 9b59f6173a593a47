"""What is decided for each parameter when it is sharded: in which dtypes it computes, is reduced and has gradients, and
whether its class gathers it. What differs here is in different flat parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from .composite import composite_extension_of, is_composite
from .extension import Extension, extension_of
from .policy import MixedPrecisionPolicy


def kind_of(
    fqn: str, param: nn.Parameter, policy: MixedPrecisionPolicy, module: nn.Module | None = None
) -> ParameterKind:
    """The kind of a parameter that is about to be sharded; ``module``: where it stands, if it is to be gathered.

    Raises:
        ValueError: see ``MixedPrecisionPolicy.compute_dtype_of``.
    """
    compute, reduce = policy.compute_dtype_of(fqn, param), policy.reduce_dtype
    own = replace(policy, param_dtype=compute, param_dtype_override_fn=None)
    extension = None
    if module is not None:
        make = composite_extension_of if is_composite(param) else extension_of
        extension = make(param, module, own)
    gradient = own_grad_dtype(param)
    if is_any_grad_dtype(param) and param.is_floating_point():
        gradient = reduce or compute  # what arrives from the reduction
    return ParameterKind(compute, reduce, gradient, extension)


@dataclass(frozen=True)
class ParameterKind:
    """What was decided for one parameter when it was sharded. Parameters of one flat parameter are of one kind.

    Attributes:
        compute: of the unsharded parameter; ``None``: the original dtype, also after ``module.to()`` has changed it.
        reduce: of the reduction of its gradient; ``None``: that of the gradient.
        gradient: of the sharded gradient (``grad_dtype``); ``None``: the original dtype.
        extension: the all-gather of its class; one that has one is by itself.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    gradient: torch.dtype | None = None
    extension: Extension | None = None

    def dtype_of(self, shard: torch.Tensor) -> torch.dtype:
        """The dtype of the parameters with this shard."""
        return shard.dtype if self.extension is None else self.extension.dtype_of(shard)

    def compute_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype of the unsharded parameter, if the sharded one is ``original``."""
        return self.compute if self.compute is not None and original.is_floating_point else original

    def gradient_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype of the sharded gradient."""
        return original if self.gradient is None else self.gradient

    def reduction_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient is reduced."""
        if self.reduce is not None and original.is_floating_point:
            return self.reduce
        return self.gradient_dtype(original)

    def of_a_copy(self, memo: dict[int, Any]) -> ParameterKind:
        """Of the copy of a parameter, while a model is copied; ``memo``: see ``copy.deepcopy``."""
        return self if self.extension is None else replace(self, extension=self.extension.of_a_copy(memo))

    def in_group(self, own: MixedPrecisionPolicy, other: MixedPrecisionPolicy) -> ParameterKind:
        """The kind in a group of another policy than its ``own`` group's: what was decided for this parameter alone
        stays."""
        compute = other.param_dtype if self.compute == own.param_dtype else self.compute
        return replace(self, compute=compute, reduce=other.reduce_dtype)


def own_grad_dtype(param: torch.Tensor) -> torch.dtype | None:
    """The dtype that gradients of ``param`` were given, if it is another than its own."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)  # subclasses may lack it
    return None if dtype == param.dtype else dtype


def is_any_grad_dtype(param: torch.Tensor) -> bool:
    """Whether gradients of ``param`` may be of any dtype: ``grad_dtype`` was set to ``None``; unset, it is a dtype."""
    return getattr(param, "grad_dtype", param.dtype) is None


def expect_gradient(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Let ``param`` have gradients of ``dtype``, also the one that it has."""
    if dtype != getattr(param, "grad_dtype", dtype):
        gradient, param.grad = param.grad, None
        param.grad_dtype = dtype
        if gradient is not None:
            param.grad = gradient.to(dtype)
