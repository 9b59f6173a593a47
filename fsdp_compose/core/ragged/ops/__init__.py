"""Operations on a ``RaggedDTensor``: one handler per kind of operator, chosen once for each operator.

=====================  ==============================================================================================
element-wise, copies   on the local shards; result and other operands are sharded like the (largest) ragged one
foreach, fused         as element-wise, for every element of the lists
full reductions        on the local shards, then one all-reduce; the result is complete, a replicated 0-dim DTensor
dim-0 slices, views    views: a contiguous range of the flattened tensor is a range on every rank
other views            all-gather; a write to the result is written back or raises; using it out of date raises
random                 every rank draws the whole tensor and shards it: values do not depend on the layout
everything else        on the whole tensor, on every rank, with one warning per operator; written tensors are resharded
writes that change     raise, naming the operator
shape or memory
=====================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtensor import Handler, handlers
from .operands import FUSED_OPTIMIZERS, INDEXED_WRITES
from .pointwise import (
    copy_into,
    divide,
    empty_like,
    make_out,
    new,
    per_element,
    pointwise,
    random,
    unscale,
)
from .views import alias, as_real, gather_all, gathered_view, item, look_up, view, write_through

aten = torch.ops.aten


def choose(func: Any) -> Handler:
    """Choose the handler of an operator that is seen for the first time."""
    name: str = func._schema.name
    if func in _BY_OPERATOR:
        return _BY_OPERATOR[func]
    if name in FUSED_OPTIMIZERS or (name.startswith("aten::_foreach_") and name not in _NOT_PER_ELEMENT):
        return per_element
    if name in _DIVISIONS:
        return divide
    if name in INDEXED_WRITES:
        return write_through
    if torch.Tag.nondeterministic_seeded in func.tags:
        return random
    # ``equal`` has the tag too, but returns whether all elements are.
    if torch.Tag.pointwise in func.tags and func is not aten.equal.default:
        return pointwise
    from .reductions import BY_OPERATOR  # only now: an optimizer's step has none

    if func in BY_OPERATOR:
        return BY_OPERATOR[func]
    return gathered_view if func.is_view else gather_all


_VIEWS: Sequence[Any] = (
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.as_strided.default,
)  # fmt: skip

# Element-wise in effect, though not tagged so.
_LIKE_POINTWISE: Sequence[Any] = (
    aten.clone.default, aten._to_copy.default,
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zeros_like.default, aten.ones_like.default,
    aten.full_like.default, aten.lerp.Scalar, aten.lerp.Tensor, aten.lerp_.Scalar,
    aten.lerp_.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor, aten.lift_fresh.default, aten.nan_to_num.default, aten.nan_to_num_.default,
    aten._pin_memory.default, aten.where.self, aten.where.self_out, aten.abs_.default,
)  # fmt: skip

_NOT_PER_ELEMENT = ("aten::_foreach_mm", "aten::_foreach_norm", "aten::_foreach_max")

# These raise, for integers, where the divisor is zero.
_DIVISIONS = {
    "aten::div", "aten::div_", "aten::floor_divide", "aten::floor_divide_", "aten::fmod", "aten::fmod_",
    "aten::remainder", "aten::remainder_",
}  # fmt: skip

_BY_OPERATOR: dict[Any, Handler] = {
    **dict.fromkeys(_VIEWS, view),
    aten.detach.default: alias,
    aten.alias.default: alias,
    aten.view_as_real.default: as_real,
    aten.view_as_complex.default: as_real,
    **dict.fromkeys(_LIKE_POINTWISE, pointwise),
    aten.empty_like.default: empty_like,
    aten.copy_.default: copy_into,
    aten.new_empty.default: new,
    aten.new_empty_strided.default: new,
    aten.new_zeros.default: new,
    aten.new_ones.default: new,
    aten.new_full.default: new,
    aten.rand_like.default: random,
    aten.randn_like.default: random,
    aten._local_scalar_dense.default: item,
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    **dict.fromkeys(
        (aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default), look_up
    ),
    aten.eye.m_out: make_out,
    aten.eye.out: make_out,
}

handlers.choose = choose
