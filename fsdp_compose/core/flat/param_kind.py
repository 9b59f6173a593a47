"""What is decided for each parameter when it is sharded: its dtypes, and its codec.

Parameters that differ in any of this go into different flat parameters. This file also refuses what sharding would
break: classes of tensors that cannot be cut, and parameters that share memory with others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..._torch import grad_dtype_slot, has_grad_dtype_override, is_wrapper
from ...errors import MisuseError, MisuseRuntimeError
from .codecs import BY_ELEMENTS, ParameterCodec, check_protocol, has_protocol, is_composite
from .policy import MixedPrecisionPolicy


def kind_of(
    fqn: str, param: nn.Parameter, policy: MixedPrecisionPolicy, module: nn.Module | None = None
) -> ParameterKind:
    """Decide the kind of a parameter that is about to be sharded. ``module``: the module that has it, if it will be
    gathered.

    Raises:
        ValueError: see ``MixedPrecisionPolicy.compute_dtype_of``.
    """
    compute, reduce = policy.compute_dtype_of(fqn, param), policy.reduce_dtype
    codec = BY_ELEMENTS if module is None else codec_of(param, module, policy, compute)
    gradient = own_grad_dtype(param)
    if is_any_grad_dtype(param) and param.is_floating_point():
        gradient = reduce or compute  # the dtype that arrives from the reduction
    return ParameterKind(compute, reduce, gradient, codec)


def codec_of(
    param: nn.Parameter, module: nn.Module, policy: MixedPrecisionPolicy, compute: torch.dtype | None
) -> ParameterCodec:
    """The codec for ``param``, a checked parameter in ``module`` that computes in ``compute``; the cut of a composite
    one is not known yet."""
    has, is_cut = has_protocol(param), is_composite(param)
    if not is_cut and not (has and param.numel() and param.dim()):
        return BY_ELEMENTS
    from ...plugins.parameter_classes import codec_of_class

    return codec_of_class(param, module, policy, compute, is_composite=is_cut)


@dataclass(frozen=True)
class ParameterKind:
    """What was decided for one parameter when it was sharded. All parameters of a flat parameter have the same kind."""

    # Of the unsharded parameter; None: the original dtype, even after module.to() has changed it.
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None  # of the reduction of its gradient; None: that of the gradient
    gradient: torch.dtype | None = None  # of the sharded gradient (grad_dtype); None: the original dtype
    codec: ParameterCodec = BY_ELEMENTS  # how it is stored and gathered; if by its class, alone in a flat parameter

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
        """The kind for the copy of a parameter, while a model is copied; ``memo``: see ``copy.deepcopy``."""
        return replace(self, codec=self.codec.of_a_copy(memo))

    def in_group(self, own: MixedPrecisionPolicy, other: MixedPrecisionPolicy) -> ParameterKind:
        """The kind in a group with another policy than its ``own`` group's; decisions for this parameter alone stay."""
        compute = other.param_dtype if self.compute == own.param_dtype else self.compute
        return replace(self, compute=compute, reduce=other.reduce_dtype)


def own_grad_dtype(param: torch.Tensor) -> torch.dtype | None:
    """The dtype that was set for gradients of ``param``. Before torch 2.15 nothing tells if it was set to the dtype of
    ``param``."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)  # subclasses may lack it
    return dtype if dtype != param.dtype or has_grad_dtype_override(param) else None


def is_any_grad_dtype(param: torch.Tensor) -> bool:
    """Whether gradients of ``param`` may have any dtype, because ``grad_dtype`` was set to ``None``; if unset, it is a
    dtype."""
    return getattr(param, "grad_dtype", param.dtype) is None


def expect_gradient(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Let ``param`` have gradients of ``dtype``, which may be its own."""
    if dtype != getattr(param, "grad_dtype", dtype):
        gradient, param.grad = param.grad, None
        grad_dtype_slot.__set__(param, dtype)  # not by its name, which parameters of groups refuse
        if gradient is not None:
            param.grad = gradient.to(dtype)


# ---- Parameters that are tensors of other classes: which can be sharded, and how
#
# Plain data with a class on top (attributes, ``__torch_function__``) keeps its class inside forward. A wrapper around
# one tensor of its own shape and dtype (torchao's weights for float8 and int8 training) is sharded as that tensor. If
# its class has an all-gather of its own, forward sees the result of that (``codecs``); otherwise the tensor inside,
# with a warning. A wrapper around anything else (NF4 and other quantized weights) is more than its elements: if it is
# frozen and its class can cut it, it is sharded as the tensors inside (``codecs``), otherwise refused.


_warned: set[type] = set()


def plain_tensor(param: torch.Tensor) -> torch.Tensor:
    """The tensor with the elements of ``param``, outside autograd."""
    return _inner(param) if is_wrapper(param) else param.detach()


def plain_gradient(gradient: torch.Tensor, label: object) -> torch.Tensor:
    """The elements of a gradient that may be of a class.

    Raises:
        RuntimeError: it has several tensors that differ.
    """
    if not is_wrapper(gradient) or isinstance(gradient, DTensor):
        return gradient
    from ...plugins.parameter_classes import common_tensor, describe_part, inner_tensors

    plain = common_tensor(gradient)
    if plain is None:
        parts = ", ".join(f"{name}: {describe_part(tensor)}" for name, tensor in inner_tensors(gradient).items())
        raise MisuseRuntimeError(
            f"the gradient of {label} is a {type(gradient).__name__} of several different tensors ({parts}), but the "
            "gradient of a sharded parameter is one plain tensor, from which its class steps: let the class return a "
            "plain gradient, or equal tensors"
        )
    return plain


def check_class(param: nn.Parameter, fqn: str, is_gathered: bool = True) -> None:
    """Raise ValueError if ``param`` cannot be sharded; warn, once per class, if forward will see another class.
    ``is_gathered``: there is an all-gather; replicated parameters have none."""
    cls = type(param)
    if not is_wrapper(param):
        if param.layout != torch.strided or param.is_quantized:
            kind = "quantized" if param.is_quantized else param.layout
            raise MisuseError(
                f"fully_shard(): the parameter {fqn} is {kind}, which cannot be sharded: make it a dense tensor, or "
                "leave it out with ignored_params"
            )
        check_protocol(param, fqn)
        return
    check_protocol(param, fqn)
    if is_composite(param):
        from ...plugins.parameter_classes import check_composite

        check_composite(param, fqn, is_gathered)
    elif cls not in _warned and not (is_gathered and has_protocol(param)):
        _warned.add(cls)
        why = "no all-gather of its own (fsdp_pre_all_gather)" if is_gathered else "nothing to gather: it is replicated"
        warnings.warn(
            f"fully_shard(): the parameter {fqn} is a {cls.__name__}, with {why}: forward sees the tensor that it "
            f"wraps, in {param.dtype} or the policy's param_dtype, without the class (this warning appears once per "
            "class)",
            stacklevel=7,  # where the user calls fully_shard()
        )


def _inner(param: torch.Tensor) -> torch.Tensor:
    """The one tensor inside a wrapper."""
    (name,), _ = param.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: torch.Tensor = getattr(param, name)
    return inner.detach()


# ---- Different parameters, or a parameter and a buffer, in the same memory: refused, because sharding would separate
# them
#
# ``nn.Parameter(embedding.weight.data)`` is a separate parameter that changes with every step of the other one. A shard
# is a copy, so that would end silently. They are not tied weights either, which have one gradient and one optimizer
# state. Views of one storage that do not overlap (loaded checkpoints, flattened buffers) are fine.
#
# ``fully_shard`` compares a group's own tensors. Those of different groups are compared at the first forward, from what
# each group recorded about the memory of its parameters. Tensors on the meta device have no memory.


@dataclass(frozen=True)
class Region:
    """The memory of a tensor."""

    name: str
    is_sharded: bool  # it is a parameter of a group
    storage: StorageWeakRef  # stays unique, and comparable, after the storage is freed
    start: int  # with ``stop``, the range of bytes in the storage that contains all elements
    stop: int
    shape: tuple[int, ...]  # like ``strides`` in bytes, with the bytes of an element as the last dimension
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_dense(self) -> bool:
        """Whether every byte between start and stop belongs to the tensor."""
        return self.stop - self.start == torch.Size(self.shape).numel()


def region_of(name: str, tensor: torch.Tensor, is_sharded: bool) -> Region | None:
    """The region of a tensor; ``None`` if it has no memory that could be shared."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or is_wrapper(tensor):
        return None
    if not tensor.numel():
        return None
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*[stride * size for stride in tensor.stride()], 1)
    start = int(tensor.storage_offset()) * size
    stop = start + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return Region(name, is_sharded, StorageWeakRef(tensor.untyped_storage()), start, stop, shape, strides, tensor.dtype)


def regions_of(tensors: Iterable[tuple[str, torch.Tensor]], are_sharded: bool) -> list[Region]:
    """The regions of the tensors that have one."""
    found = [region_of(name, tensor, are_sharded) for name, tensor in tensors]
    return [region for region in found if region is not None]


def refuse_shared_memory(regions: Sequence[Region]) -> None:
    """Raise if a sharded parameter overlaps with another region, or with itself.

    Raises:
        ValueError: it does.
    """
    last: Region | None = None
    active: list[tuple[int, Region]] = []
    overlaps: list[tuple[int, int]] = []
    # Compares in memory order, which may differ between ranks; reports the first overlap in the order of the regions.
    for index, region in sorted(enumerate(regions), key=lambda item: (item[1].storage.cdata, item[1].start)):
        if last is None or region.storage.cdata != last.storage.cdata:
            active = []
        active = [item for item in active if item[1].stop > region.start]
        if region.is_sharded and region.stop - region.start < torch.Size(region.shape).numel():
            overlaps.append((index, index))
        for other_index, other in active:
            if (region.is_sharded or other.is_sharded) and _overlap(other, region):
                overlaps.append((min(index, other_index), max(index, other_index)))
        active.append((index, region))
        last = region
    if overlaps:
        first, second = min(overlaps)
        raise MisuseError(_message(regions[first], regions[second]))


def _overlap(a: Region, b: Region) -> bool:
    """Whether two regions of one storage, whose ends overlap, have a byte in common."""
    if a.is_dense and b.is_dense:
        return True
    start = min(a.start, b.start)
    bytes_of_a = torch.zeros(max(a.stop, b.stop) - start, dtype=torch.bool)
    bytes_of_a.as_strided(a.shape, a.strides, a.start - start).fill_(True)
    return bool(bytes_of_a.as_strided(b.shape, b.strides, b.start - start).any())


def _message(a: Region, b: Region) -> str:
    if a is b:
        return (
            f"fully_shard(): elements of the parameter {a.name} share memory with each other (an expanded tensor), "
            "and sharding would separate them: give it memory of its own, .clone()"
        )
    if not a.is_sharded:
        a, b = b, a
    is_same = (a.start, a.shape, a.strides, a.dtype) == (b.start, b.shape, b.strides, b.dtype)
    other = "the parameter" if b.is_sharded else "the buffer, or unsharded parameter,"
    tie = f"make them one parameter ({b.name} = {a.name}, tied weights), or " if is_same and b.is_sharded else ""
    return (
        f"fully_shard(): the parameter {a.name} and {other} {b.name} are different tensors in the same memory, so "
        f"changing one changes the other. Sharding would silently give each memory of its own: {tie}give one of them "
        "memory of its own before fully_shard(), .clone()"
    )
