"""``replicate()``: data parallelism in which every rank holds all parameters, by the machinery of ``fully_shard``.

A replicated group is a group on a mesh (replicate, shard) of one rank in its second dimension: its flat parameters have
one shard, which every rank has whole, so that there is nothing to gather or to scatter. Its flat parameters are
*buckets*, of which the gradients are averaged as soon as a backward has brought all of them (``runtime.buckets``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .comm import replicated_mesh
from .flat import MixedPrecisionPolicy, as_ours
from .group import BUCKET_BYTES, GroupOptions, get_state
from .making import check_ignored, check_modules, make_group
from .runtime import drive

_M = TypeVar("_M", nn.Module, list[nn.Module])


def replicate(
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> _M:
    """Train ``module`` with data parallelism in which nothing is sharded: every rank holds all parameters, and backward
    averages the gradients over the ranks. For what is too small to be worth sharding.

    It manages the parameters below ``module`` that no nested call of ``fully_shard`` or ``replicate``, and no
    ``ignored_params``, took. Both compose in one model: call either on inner modules first, then on outer ones.

    Gradients are averaged in *buckets* of about ``bucket_bytes``, one all-reduce each, in an order that is fixed: that
    of the modules, backwards. If the model of which the forward runs has replicated groups alone, and no other model
    takes part in the backward, a bucket's all-reduce begins as soon as backward has brought all its gradients, and
    backward goes on meanwhile. Else a group is averaged when its backward is done, as ``fully_shard`` does it, so that
    ranks that use different parameters stay in step. ``.grad`` are views of the buckets, whose memory stays.

    The parameters become ``DTensor`` objects like those of ``fully_shard``, of which every rank holds all elements
    (``.to_local()``, without a copy): optimizers, gradient clipping, ``flat_parameters`` and checkpoints are the same,
    and checkpoints fit models that are sharded. Inside ``forward`` modules show plain parameters, in the same memory.

    Ranks: every rank of the mesh makes the same calls on the same model; the call itself does not communicate. The
    first forward compares the ranks' models, then all take over the first rank's parameters and buffers: until then
    each rank has its own. Buffers that change in training (running means) stay each rank's own afterwards.

    Args:
        module: a module, or a list of modules that form one group.
        mesh: 1-D device mesh of the ranks; default: all ranks. All of it replicates.
        mp_policy: dtypes to compute, reduce and return in. With ``param_dtype`` there is a copy in that dtype.
        bucket_bytes: of parameters whose gradients are averaged together; the first bucket has at most 1 MiB.
        ignored_params: parameters below ``module`` that stay as they are; their gradients are not averaged.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``module`` is sharded or replicated already, a parameter would be in two groups, is on the wrong
            device, or is a tensor of a class that cannot be managed; the mesh is not 1-D; ``bucket_bytes`` is not
            positive.
        RuntimeError: there is neither a mesh nor a process group.

    Example::

        replicate(model.embeddings)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    """
    modules = check_modules(module, "replicate")
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    policy = as_ours(MixedPrecisionPolicy, policy, "replicate(mp_policy=...)")
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool):
        raise TypeError(f"replicate(bucket_bytes={bucket_bytes!r}): expected a number of bytes, as an int")
    if bucket_bytes <= 0:
        raise ValueError(f"replicate(bucket_bytes={bucket_bytes}): expected a positive number of bytes")
    ignored = check_ignored(ignored_params, "replicate")
    options = GroupOptions(policy, reshard_after_forward=False, bucket_bytes=bucket_bytes)
    make_group(modules, replicated_mesh(mesh), options, ignored)
    drive(modules)
    return module


replicate.state = get_state  # type: ignore[attr-defined]
