"""The systems under test: each puts a model of ``models.py`` under one way of training it, and gives it an optimizer.

All shard over every rank of torch's default process group, one group per block and one for the rest; experts over an
eighth of the ranks, in a group of their own, under FSDP2 and ours. Those in
``SYSTEMS`` train on the CPU and reshard after forward, and work on a deep copy, so that one base model serves them all;
``wrap`` gives the choice of dtypes and of resharding, and works on the model itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from fsdp2_views import use_views
from models import MixtureBlock
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compose
from fsdp_compose.extension import even_chunks

FLAT_MESH, HYBRID_MESH, TENSOR_MESH = "flat", "hybrid", "tensor"  # how ``wrap`` lays out the ranks
DDP, FSDP1, FSDP2, OURS, PLAIN = "DDP", "FSDP1", "FSDP2", "fsdp_compose", "plain"
# FSDP2 as torch's open pull requests would have it (fsdp2_views.py): parameters are views of what an all-gather has
# written; and, in addition, shards are gathered from where they lie.
NO_COPY_OUT, NO_COPIES = "FSDP2 without copy-out", "FSDP2 without copies"
OURS_REPLICATE, TORCH_REPLICATE = "fsdp_compose replicate", "torch replicate"
IN_CHUNKS = "fsdp_compose in FSDP2's layout"  # as after drop_in.install(layout="fsdp2")
FLAT = " flat"  # behind the name of one of ours: the optimizer has flat views


@dataclass(frozen=True)
class Precision:
    """The dtypes in which parameters are gathered (and computed with), and in which gradients are reduced; ``None``:
    as the model is."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


PRECISIONS = {
    "fp32": Precision(),
    "bf16/fp32": Precision(torch.bfloat16, torch.float32),
    "bf16/bf16": Precision(torch.bfloat16, torch.bfloat16),
}

Trained = tuple[nn.Module, torch.optim.Optimizer]
System = Callable[[nn.Module, bool], Trained]


def plain(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """No sharding; ``mixed_precision``: the model in bf16, which is what sharded systems then compute with."""
    return _with_optimizer(wrap(copy.deepcopy(base), PLAIN, _precision(mixed_precision)))


def fsdp1(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """torch's FullyShardedDataParallel, the user's own parameters visible."""
    return _with_optimizer(wrap(copy.deepcopy(base), FSDP1, _precision(mixed_precision)))


def fsdp1_flat(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """torch's FullyShardedDataParallel, one flat parameter per group visible."""
    return _with_optimizer(_fsdp1(copy.deepcopy(base), _precision(mixed_precision), use_orig_params=False))


def fsdp2(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """torch's fully_shard."""
    return _with_optimizer(wrap(copy.deepcopy(base), FSDP2, _precision(mixed_precision)))


def fsdp2_without_copy_out(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """torch's fully_shard, whose all-gather writes parameters in one piece; shards are still copied into its input."""
    return _with_optimizer(wrap(copy.deepcopy(base), NO_COPY_OUT, _precision(mixed_precision)))


def fsdp2_without_copies(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """The same, gathering shards from where they lie."""
    return _with_optimizer(wrap(copy.deepcopy(base), NO_COPIES, _precision(mixed_precision)))


def ours(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """fsdp_compose's fully_shard."""
    return _with_optimizer(wrap(copy.deepcopy(base), OURS, _precision(mixed_precision)))


def _precision(mixed_precision: bool) -> Precision:
    return PRECISIONS["bf16/fp32" if mixed_precision else "fp32"]


def ours_flat(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """fsdp_compose's fully_shard, with an optimizer over flat views."""
    model, _ = ours(base, mixed_precision)
    return model, _optimizer(fsdp_compose.flat_parameters(model))


def in_chunks(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """fsdp_compose's fully_shard, with FSDP2's even chunks."""
    return _with_optimizer(wrap(copy.deepcopy(base), IN_CHUNKS, _precision(mixed_precision)))


SYSTEMS: dict[str, System] = {
    PLAIN: plain,
    FSDP1: fsdp1,
    "FSDP1 flat": fsdp1_flat,
    FSDP2: fsdp2,
    NO_COPY_OUT: fsdp2_without_copy_out,
    NO_COPIES: fsdp2_without_copies,
    OURS: ours,
    "fsdp_compose flat": ours_flat,
    IN_CHUNKS: in_chunks,
}


_layout = [FLAT_MESH]


def lay_out(layout: str) -> None:
    """From now on ``fully_shard`` is called on this mesh, of FSDP2's and ours: one dimension of all ranks; (replicate,
    shard), 8 ranks sharing the shards; or (dp, tp), 2 ranks of tensor parallelism, which cuts the MLPs of all blocks,
    in the plain model too."""
    _layout[0] = layout


def wrap(
    model: nn.Module, system: str, precision: Precision = PRECISIONS["fp32"], reshard: bool = True, **of_root: Any
) -> nn.Module:
    """Put ``model`` under ``system``, on the device where it is.

    Args:
        system: ``PLAIN``, ``DDP``, ``FSDP1``, ``FSDP2``, ``NO_COPY_OUT``, ``NO_COPIES``, ``OURS``, or one of the two
            that replicate.
        reshard: free the gathered parameters between forward and backward: blocks, not the root, which every system
            keeps by default. ``False``: free nothing.
        of_root: more arguments for the root's ``fully_shard``.
    """
    if _layout[0] == TENSOR_MESH:
        plan = {"expand": ColwiseParallel(), "contract": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, _mesh("cpu", 2, ("dp", "tp"))["tp"], plan)
    if system in (PLAIN, *LIBRARIES):  # expert parallelism is no sharding: the plain model has it too
        for block in model.blocks:
            if isinstance(block, MixtureBlock):
                _spread(block.experts)
    if system == PLAIN:
        return model if precision.param_dtype is None else model.to(precision.param_dtype)
    if system == DDP:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if system in (OURS_REPLICATE, TORCH_REPLICATE):
        replicate = fsdp_compose.replicate if system == OURS_REPLICATE else torch_replicate
        policies = fsdp_compose if system == OURS_REPLICATE else torch_fsdp
        policy = policies.MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
        if system == TORCH_REPLICATE:  # it overlaps from group to group
            for block in model.blocks:
                replicate(block, mp_policy=policy)
        return replicate(model, mp_policy=policy)
    if system == FSDP1:
        return _fsdp1(model, precision, use_orig_params=True, reshard=reshard)
    if system in (NO_COPY_OUT, NO_COPIES):
        model = _fully_shard_each_block(model, torch_fsdp, precision, reshard, **of_root)
        return use_views(model, packs=system == NO_COPY_OUT)
    return _fully_shard_each_block(model, LIBRARIES[system], precision, reshard, **of_root)


_IN_CHUNKS = SimpleNamespace(
    fully_shard=partial(fsdp_compose.fully_shard, granularity=even_chunks),
    MixedPrecisionPolicy=fsdp_compose.MixedPrecisionPolicy,
)
LIBRARIES: dict[str, Any] = {FSDP2: torch_fsdp, OURS: fsdp_compose, IN_CHUNKS: _IN_CHUNKS}


def _fsdp1(model: nn.Module, precision: Precision, use_orig_params: bool, reshard: bool = True) -> nn.Module:
    policy = None
    if precision.param_dtype is not None:
        policy = torch_fsdp.MixedPrecision(
            param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_root_forward_inputs=True
        )
    strategy = torch_fsdp.ShardingStrategy
    return torch_fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=policy,
        use_orig_params=use_orig_params,
        device_id=next(model.parameters()).device,
        sharding_strategy=strategy.FULL_SHARD if reshard else strategy.SHARD_GRAD_OP,
    )


def _fully_shard_each_block(
    model: nn.Module, library: object, precision: Precision, reshard: bool = True, **of_root: Any
) -> nn.Module:
    """FSDP2 and fsdp_compose have one interface: ``library`` is the module it is taken from."""
    device_type = next(model.parameters()).device.type.replace("meta", "cpu")  # a mesh is of what will compute
    if _layout[0] == FLAT_MESH:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    elif _layout[0] == HYBRID_MESH:
        mesh = _mesh(device_type, 8, ("replicate", "shard"))
    else:
        mesh = _mesh(device_type, 2, ("dp", "tp"))["dp"]
    policy = library.MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
    after_forward = None if reshard else False
    for block in model.blocks:
        if isinstance(block, MixtureBlock):
            library.fully_shard(block.experts, mesh=_mesh(device_type, *EXPERT_MESH)["efsdp"], mp_policy=policy)
            if library is torch_fsdp:
                block.experts.set_gradient_divide_factor(dist.get_world_size())
        library.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward)
    return library.fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward, **of_root)


EXPERT_MESH = 8, ("efsdp", "ep")


def _spread(experts: nn.Module) -> None:
    """Make those of this rank its part of the experts of all ranks of expert parallelism."""
    for module in experts.modules():
        if isinstance(module, nn.Linear):
            mesh = _mesh(module.weight.device.type.replace("meta", "cpu"), *EXPERT_MESH)["ep"]
            placed = DTensor.from_local(module.weight.detach(), mesh, [Shard(0)], run_check=False)
            module.weight = nn.Parameter(placed)


def clip(system: str, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float = 1.0) -> None:
    """Clip gradients as a user of the system does; torch's functions take parameters of one mesh."""
    groups = [group["params"] for group in optimizer.param_groups]
    if system.startswith(OURS):
        fsdp_compose.clip_grad_norm_([param for params in groups for param in params], max_norm)
    elif system.startswith(FSDP1):
        model.clip_grad_norm_(max_norm)
    else:
        grads = [[param.grad for param in params if param.grad is not None] for params in groups]
        norms = [torch.nn.utils.get_total_norm(own, foreach=True) for own in grads]
        total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
        for params in groups:
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach=True)


_meshes: dict[tuple[str, int, tuple[str, str]], DeviceMesh] = {}


def _mesh(device_type: str, inner: int, names: tuple[str, str]) -> DeviceMesh:
    key = device_type, inner, names
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device_type, (dist.get_world_size() // inner, inner), mesh_dim_names=names)
    return _meshes[key]


def _with_optimizer(model: nn.Module) -> Trained:
    return model, _optimizer(model.parameters())


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    by_mesh: dict[object, list[nn.Parameter]] = {}  # torch's lists of operands have one kind, on one mesh
    for param in parameters:
        by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return torch.optim.AdamW([{"params": params} for params in by_mesh.values()], lr=1e-3, foreach=True)
