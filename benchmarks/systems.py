"""The systems under test: each puts a model of ``models.py`` under one way of training it, and gives it an optimizer.

All shard over every rank of torch's default process group, on the CPU, one group per block and one for the rest, and
reshard after forward. They work on a deep copy, so that one base model serves them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_compose

Trained = tuple[nn.Module, torch.optim.Optimizer]
System = Callable[[nn.Module, bool], Trained]


def plain(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """No sharding; ``mixed_precision``: the model in bf16, which is what sharded systems then compute with."""
    model = copy.deepcopy(base)
    return _with_optimizer(model.bfloat16() if mixed_precision else model)


def fsdp1(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """torch's FullyShardedDataParallel, the user's own parameters visible."""
    return _with_optimizer(_fsdp1(base, mixed_precision, use_orig_params=True))


def fsdp1_flat(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """torch's FullyShardedDataParallel, one flat parameter per group visible."""
    return _with_optimizer(_fsdp1(base, mixed_precision, use_orig_params=False))


def fsdp2(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """torch's fully_shard."""
    return _fully_shard_each_block(base, torch_fsdp, mixed_precision)


def ours(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """fsdp_compose's fully_shard."""
    return _fully_shard_each_block(base, fsdp_compose, mixed_precision)


def ours_flat(base: nn.Module, mixed_precision: bool = False) -> Trained:
    """fsdp_compose's fully_shard, with an optimizer over flat parameters."""
    model, _ = ours(base, mixed_precision)
    return model, _optimizer(fsdp_compose.flat_parameters(model))


SYSTEMS: dict[str, System] = {
    "plain": plain,
    "FSDP1": fsdp1,
    "FSDP1 flat": fsdp1_flat,
    "FSDP2": fsdp2,
    "fsdp_compose": ours,
    "fsdp_compose flat": ours_flat,
}


def _fsdp1(base: nn.Module, mixed_precision: bool, use_orig_params: bool) -> nn.Module:
    model = copy.deepcopy(base)
    policy = None
    if mixed_precision:
        policy = torch_fsdp.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_root_forward_inputs=True
        )
    return torch_fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=policy,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def _fully_shard_each_block(base: nn.Module, library: object, mixed_precision: bool) -> Trained:
    """FSDP2 and fsdp_compose have one interface: ``library`` is the module it is taken from."""
    model, mesh = copy.deepcopy(base), _mesh_over_all_ranks()
    policy = library.MixedPrecisionPolicy()
    if mixed_precision:
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, mp_policy=policy)
    library.fully_shard(model, mesh=mesh, mp_policy=policy)
    return _with_optimizer(model)


def _mesh_over_all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _with_optimizer(model: nn.Module) -> Trained:
    return model, _optimizer(model.parameters())


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
