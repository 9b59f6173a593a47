"""What one rank does in a training step, in order: operations, collectives and waits. ``simulate`` records
them in its last step, and the ``tuning`` wing tells from them how long a step takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry

from .._torch import overload_packet

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of torch."""

    name: str  # as in ``torch.ops.aten``, without overload, leading underscore and ``foreach``
    phase: str  # ``forward``, ``backward`` or ``optimizer``
    # Floating-point operations of a matrix product, convolution or attention, else 0. A causal attention has half of
    # those of a full one.
    flops: float
    nbytes: int  # bytes that are read and written: its arguments and results once each
    dtype: torch.dtype  # of the first argument
    num_tensors: int = 1  # how many tensors it updates, if it takes a list of them
    layout: str = ""  # of a product of two matrices: for each ``n``, or ``t`` if it is stored by columns; else empty
    is_attention: bool = False  # whether it is an attention
    # Of an operator of another library without a formula, the floating-point operations that its sizes allow: for each
    # element that it makes, two products over the largest dimension of its tensors.
    hidden: float = 0.0
    is_repeated: bool = False  # it belongs to a forward that backward recomputes

    @property
    def is_backward(self) -> bool:
        """Whether an attention is one of backward: it computes gradients."""
        return "backward" in self.name or "bwd" in self.name


@dataclass(frozen=True, slots=True)
class Issue:
    """The start of a collective."""

    number: int  # counts the collectives of a step
    # See ``CollectiveFacts``.
    kind: str
    group: str
    nbytes: int
    ranks: Sequence[int]  # the global ranks that take part
    phase: str  # see ``Operation``
    sent: int | None = None  # of an all-to-all, bytes that this rank sends


@dataclass(frozen=True, slots=True)
class Wait:
    """The first wait for a collective: what follows uses its result."""

    number: int  # of the collective


StepEvent: TypeAlias = Operation | Issue | Wait


def operation_of(
    func: Any, args: Any, kwargs: Any, result: Any, flatten: Callable[[Any], list[torch.Tensor]], phase: str
) -> Operation | None:
    """Describe an operation that has run, or would run; ``None``: it computes nothing. ``flatten`` returns the tensors
    in a nest of lists, tuples and dicts."""
    full_name = func._schema.name.partition("::")[2]
    name = full_name.removeprefix("_").removeprefix("foreach_")
    if name in _WITHOUT_KERNEL:
        return None
    given, made = flatten((args, kwargs)), flatten(result)
    listed = flatten(args[0]) if name != full_name and full_name[1:].startswith(_OF_LISTS) else []
    if name in _GATHERING:  # reads a row of a table for each row of the result
        nbytes = 2 * nbytes_of(made)
    else:
        written = nbytes_of(made or listed)
        nbytes = nbytes_of(given) + (0 if name in _OVERWRITING else written)
    first = (given or made)[0] if given or made else torch.empty(0)
    is_of_torch = func.namespace.lstrip("_") in _OF_TORCH
    is_attention = (_ATTENTION_OF_TORCH if is_of_torch else _ATTENTIONS).search(func._schema.name) is not None
    # Torch's own formulas count no causal masks.
    flops = None if is_attention and is_of_torch else _flops_of(func, args, kwargs, result)
    if flops is None and is_attention:
        flops = _attention_flops(func, args, given, is_of_torch)
    hidden = 0.0
    if flops is None and not is_of_torch:
        largest = max((size for item in (*given, *made) for size in item.shape), default=0)
        hidden = 4.0 * sum(item.numel() for item in made) * largest
    return Operation(
        name=name if is_of_torch else func._schema.name,
        phase=phase,
        flops=flops or 0.0,
        nbytes=nbytes,
        dtype=first.dtype,
        num_tensors=max(1, len(listed)),
        layout="".join(map(_layout_of, given[-2:])) if name in _OF_MATRICES else "",
        is_attention=is_attention,
        hidden=hidden,
    )


_WITHOUT_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "local_scalar_dense",
    "record_function_enter_new", "record_function_exit",
}  # fmt: skip
_OF_TORCH = {"aten", "prims", "c10d", "c10d_functional", "fsdp", "inductor", "torchvision"}
# Those of flash-attn and xformers, whose tensors have the heads behind the tokens.
_ATTENTIONS = re.compile("flash_attn|flash_attention|efficient_attention|fmha|xformers_flash")
_ATTENTION_OF_TORCH = re.compile("scaled_dot_product")
_GATHERING = {"embedding", "index_select", "gather"}
_OF_MATRICES = {"mm", "addmm"}
_OF_LISTS = ("foreach_", "fused_")
_OVERWRITING = {"copy_", "zero_", "fill_"}  # they do not read what they write


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(item.numel() * item.element_size() for item in tensors)


def _layout_of(matrix: torch.Tensor) -> str:
    return "t" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "n"


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    """Count the operations by torch's formula, or one given to ``register_flop_formula``; ``None`` if there is none."""
    formula = flop_registry.get(overload_packet(func))
    if formula is None:
        if "grouped_mm" not in func._schema.name:
            return None
        a, b = args[:2]
        groups = a.shape[0] if a.ndim == 3 and b.ndim == 2 else 1  # each takes its own columns of b
        return 2.0 * a.numel() * b.shape[-1] / groups
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    return float(formula(*args, **kwargs, out_val=result))


def _attention_flops(func: Any, args: Any, given: Sequence[torch.Tensor], is_of_torch: bool) -> float | None:
    """The products of an attention; torch's counter has no formula for the CPU's, nor for those of other libraries."""
    names = [item.name for item in func._schema.arguments]
    is_backward = "backward" in func._schema.name or "bwd" in func._schema.name
    is_causal = any(name in ("is_causal", "causal") and value for name, value in zip(names, args, strict=False))
    operands = [item for item in given if item.ndim >= 3][is_backward:][:3]
    if len(operands) < 3:
        return None
    query, key, value = operands
    tokens = key.ndim - 2 if is_of_torch else key.ndim - 3  # others: sequences if any, tokens, heads, width
    scores = query.numel() // query.shape[-1] * key.shape[tokens]
    # Two products in forward. Backward has five: it makes the scores again.
    products = 2 * key.shape[-1] + 3 * value.shape[-1] if is_backward else key.shape[-1] + value.shape[-1]
    return 2.0 * scores * products * (0.5 if is_causal else 1.0)
