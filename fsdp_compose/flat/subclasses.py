"""Parameters that are tensors of other classes: which can be sharded, and how.

Plain data with a class on top (attributes, ``__torch_function__``) keeps its class inside forward. A wrapper around one
tensor of its own shape and dtype (torchao's weights for float8 and int8 training) is sharded as that tensor. If its
class has an all-gather of its own, forward sees what that makes of it (``extension``), else the tensor inside, with a
warning. A wrapper around anything else (NF4 and other quantised weights) is more than its elements: if it is frozen and
its class can cut it, it is sharded as the tensors inside (``composite``), else refused.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn as nn

from .._torch import is_wrapper
from .composite import check_composite, is_composite
from .extension import check_protocol, has_protocol

_warned: set[type] = set()


def plain_tensor(param: torch.Tensor) -> torch.Tensor:
    """The tensor whose elements are those of ``param``, outside autograd."""
    return _inner(param) if is_wrapper(param) else param.detach()


def check_class(param: nn.Parameter, fqn: str, is_gathered: bool = True) -> None:
    """Raise ValueError if ``param`` cannot be sharded; warn, once a class, if forward will see another class.
    ``is_gathered``: there is an all-gather, which replicated parameters have none of."""
    cls = type(param)
    if not is_wrapper(param):
        if param.layout != torch.strided or param.is_quantized:
            kind = "quantized" if param.is_quantized else param.layout
            raise ValueError(
                f"fully_shard(): the parameter {fqn} is {kind}, which cannot be sharded: make it a dense tensor, or "
                "leave it out by ignored_params"
            )
        check_protocol(param, fqn)
        return
    if is_composite(param):
        check_protocol(param, fqn)
        check_composite(param, fqn, is_gathered)
        return
    check_protocol(param, fqn)
    if cls not in _warned and not (is_gathered and has_protocol(param)):
        _warned.add(cls)
        why = "no all-gather of its own (fsdp_pre_all_gather)" if is_gathered else "nothing to gather: it is replicated"
        warnings.warn(
            f"fully_shard(): the parameter {fqn} is a {cls.__name__}, with {why}: forward sees the tensor that it "
            f"wraps, in {param.dtype} or the policy's param_dtype, without the class (this is said once per class)",
            stacklevel=6,  # where the user calls fully_shard()
        )


def _inner(param: torch.Tensor) -> torch.Tensor:
    """The one tensor inside a wrapper."""
    (name,), _ = param.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: torch.Tensor = getattr(param, name)
    return inner.detach()
