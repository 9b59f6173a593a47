"""``fully_shard()``: parameters sharded over the data-parallel ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from types import NoneType
from typing import Any, TypeVar

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch import flatten_mesh
from .comm import check_mesh, replicated_mesh
from .flat import CPUOffloadPolicy, Granularity, MixedPrecisionPolicy, as_offload_policy, as_ours
from .group import BUCKET_BYTES, GroupOptions, Strategy, get_state, strategy_named
from .making import check_group, check_ignored, check_modules, make_group
from .runtime import drive

_M = TypeVar("_M", nn.Module, list[nn.Module])


def fully_shard(
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    granularity: Granularity | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    strategy: str | Strategy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    optional: bool = False,
) -> _M:
    """Shard the parameters of ``module``, their gradients and their optimizer state over the data-parallel ranks.

    One call makes one *group*: the parameters below ``module`` that no nested call and no ``ignored_params`` took.
    Before forward and backward the group's parameters are all-gathered together, into the memory that ``forward``
    computes with; after backward their gradients are averaged and scattered. Call it on the inner modules first
    (each transformer block), then on the whole model.

    The module keeps its class and its FQNs. Each of its parameters is replaced once, by this call, by a sharded
    parameter that ``module.parameters()`` returns from then on, outside ``forward``: build the optimizer after.

    Ranks: every rank of the mesh makes the same calls on the same model. The call itself does not communicate, but
        where there are ranks outside of a mesh of several dimensions: those in it then make a process group. The
    first forward compares the ranks' models. Each rank keeps *its own* values: start from equal parameters.

    Args:
        module: a module, or a list of modules that form one group (for example a final norm and an output head).
        mesh: device mesh of the data-parallel ranks; default: all ranks, which share the shards. Of two dimensions,
            (replicate, shard), for hybrid sharding: the ranks of a row share the shards, and every row has them all.
            Where tensor or expert parallelism has made DTensors of parameters (``parallelize_module(module,
            mesh["tp"], plan)`` before this call), another part of the same mesh: ``mesh["dp"]``. With several
            dimensions that are not all ranks the first call waits for the others of them, to make a process group.
        reshard_after_forward: free the gathered parameters between forward and backward and gather them again
            (``True``: least memory), or keep them (``False``: less communication). ``None``: ``False`` for the module
            whose forward is outermost, ``True`` for all others. A number, a factor of that of the ranks that share the
            shards: so many neighbours among them (those of one node, say) hold the parameters together between forward
            and backward, each an equal part, and backward gathers among them alone; the first call with it makes a
            process group of them. 1 is ``False``, all of the ranks ``True``; in functional mode any number is.
        granularity: a function from (FQN relative to ``module``, parameter) to the smallest piece of the parameter
            that no shard boundary may split: ``"elements"``, ``"rows"``, ``"whole"``, a number of elements, a block
            shape, or ``None`` for the default (rows where that costs next to nothing, else elements).
        mp_policy: dtypes to compute, reduce and return in (``torch.distributed.fsdp.MixedPrecisionPolicy`` too).
        ignored_params: parameters below ``module`` that stay as they are; their gradients are not reduced.
        strategy: a row of the table of strategies, by its name in ``STRATEGIES`` or as a ``Strategy``: what is kept of
            parameters, gradients and optimizer state over each dimension of ``mesh``, in the place of
            ``reshard_after_forward``. Where the optimizer's state is sharded over two dimensions, all ranks of the
            default process group make the first such call together, which makes a process group.
        offload_policy: where shards, gradients and optimizer state live: ``CPUOffloadPolicy()`` (or
            ``torch.distributed.fsdp``'s) for host memory, in which the optimizer steps on the CPU; ``None`` for the
            device of the mesh. See docs/offload.md.
        optional: each rank may run the module or skip it, at every forward as it comes, any number of times (a vision
            tower where only some ranks have images, experts that get no token, layer drop); so may groups inside it. It
            may run only inside the forward of the nearest group around it that is not optional. A rank that skips it
            counts as zeros in the average; gradients are ``None`` where no rank had one. Costs small exchanges between
            the ranks in the forwards and backwards of the whole model. See docs/optional.md.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a module is sharded twice, a parameter would be in two groups, is on the wrong device, or is a
            tensor of a class that cannot be sharded (quantised weights); the mesh has more than two dimensions, or has
            ranks in common with that of a parameter which is a DTensor already; the number given for
            ``reshard_after_forward`` is no factor of that of the ranks; there is no such ``strategy``, or not on such a
            mesh, or ``reshard_after_forward`` is given too.
        RuntimeError: there is neither a mesh nor a process group.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    arguments = _checked(
        module, mesh, reshard_after_forward, granularity, mp_policy, ignored_params, strategy, offload_policy, optional
    )
    make_group(*arguments)
    drive(arguments[0])
    return module


def check_fully_shard(module: nn.Module | list[nn.Module], **arguments: Any) -> None:
    """Raise what ``fully_shard(module, **arguments)`` would raise, and change nothing."""
    defaults = dict.fromkeys(item for item in inspect.signature(fully_shard).parameters if item != "module")
    check_group(*_checked(module, **defaults | arguments))


def _checked(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    granularity: Granularity | None,
    mp_policy: MixedPrecisionPolicy | None,
    ignored_params: Iterable[nn.Parameter] | None,
    strategy: str | Strategy | None,
    offload_policy: CPUOffloadPolicy | None,
    optional: bool | None,
) -> tuple[list[nn.Module], DeviceMesh, GroupOptions, set[nn.Parameter]]:
    """The arguments of ``fully_shard``, as ``make_group`` takes them."""
    modules = check_modules(module, "fully_shard")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):  # a bool is an int
        raise TypeError(
            f"fully_shard(reshard_after_forward={reshard_after_forward!r}): expected True, False, None or a number of "
            "ranks"
        )
    if mp_policy is None:
        mp_policy = MixedPrecisionPolicy()
    mp_policy = as_ours(MixedPrecisionPolicy, mp_policy, "fully_shard(mp_policy=...)")
    if granularity is not None and not callable(granularity):
        raise TypeError(
            f"fully_shard(granularity={granularity!r}): expected a function from (FQN, parameter) to a granule"
        )
    if not isinstance(optional, (bool, NoneType)):
        raise TypeError(f"fully_shard(optional={optional!r}): expected True or False")
    offload = as_offload_policy(offload_policy, "fully_shard(offload_policy=...)")
    ignored = check_ignored(ignored_params, "fully_shard")
    mesh, options = check_mesh(mesh), GroupOptions(mp_policy, granularity, offload, is_optional=bool(optional))
    if strategy is None:
        parts = _checked_parts(reshard_after_forward, mesh.size(mesh.ndim - 1))
        options = replace(options, reshard_after_forward=parts)
    elif reshard_after_forward is not None:
        raise ValueError("fully_shard(): expected reshard_after_forward or strategy, which decides it, got both")
    else:
        mesh, options = _follow(strategy_named(strategy, mesh.ndim), mesh, options)
    return modules, mesh, options, ignored


def _follow(row: Strategy, mesh: DeviceMesh, options: GroupOptions) -> tuple[DeviceMesh, GroupOptions]:
    """What a row of the table of strategies makes of a mesh and of options."""
    if row.is_replicated:
        mesh = replicated_mesh(mesh if mesh.ndim == 1 else flatten_mesh(mesh))
        return mesh, replace(options, reshard_after_forward=False, bucket_bytes=BUCKET_BYTES)
    reshards = row.reshards(mesh.shape)
    if reshards is not None:
        options = replace(options, reshard_after_forward=reshards, reshard_after_backward=reshards)
    return flatten_mesh(mesh) if row.flattens else mesh, options


def _checked_parts(reshard_after_forward: bool | int | None, num_ranks: int) -> bool | int | None:
    """``reshard_after_forward``, of which a number is neither 1 nor that of all ranks."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if reshard_after_forward < 1 or num_ranks % reshard_after_forward:
        raise ValueError(
            f"fully_shard(reshard_after_forward={reshard_after_forward}): {num_ranks} ranks share the shards, so that "
            f"{_factors(num_ranks)} of them can hold the parameters together between forward and backward"
        )
    if reshard_after_forward in (1, num_ranks):
        return reshard_after_forward != 1
    return reshard_after_forward


def _factors(number: int) -> str:
    *others, last = [str(i) for i in range(1, number + 1) if number % i == 0]
    return f"{', '.join(others)} or {last}" if others else last


fully_shard.state = get_state  # type: ignore[attr-defined]
