"""``fully_shard()`` with FSDP2's keywords, and FSDP2's mixed-precision policy, translated to this package's own terms.

The policy means what it means in the installed torch. Everything ends in the own ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._arguments import checked
from .._torch import concatenate_meshes, dtensor_spec, flatten_mesh, is_wrapper, local_tensor
from ..errors import MisuseError
from ..extension import (
    Granularity,
    ParamAttribute,
    RaggedDTensor,
    annotations_on,
    as_ours,
    check_fully_shard,
    check_modules,
    default_mesh,
    even_chunks,
    get_state,
    is_annotated,
    is_split_evenly,
)
from ..extension import MixedPrecisionPolicy as _OwnPolicy
from ..extension import fully_shard as _own
from .module import StateFace, add_methods, refuse_clash

# ---- FSDP2's mixed-precision policy, with the meaning that it has in the installed torch.


_HAS_OVERRIDE = any(item.name == "param_dtype_override_fn" for item in fields(fsdp.MixedPrecisionPolicy))

if TYPE_CHECKING or _HAS_OVERRIDE:  # torch >= 2.15
    MixedPrecisionPolicy = fsdp.MixedPrecisionPolicy
else:

    @dataclass(frozen=True)
    class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):
        """torch's policy with the field that torch 2.15 added: ``param_dtype_override_fn``, from a parameter to the
        dtype in which forward sees it, or ``None`` for ``param_dtype``."""

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)


def own_policy(given: object) -> _OwnPolicy:
    """Convert torch's policy to ours, which means the same; ours is returned as it is. Raises TypeError if it is
    neither."""
    policy = as_ours(_OwnPolicy, given, "fully_shard(mp_policy=...)")
    # If ``reduce_dtype`` is left out, torch before 2.15 reduces in ``param_dtype``, and later versions in the dtype of
    # the gradient, as our policy does on every torch.
    if isinstance(given, _OwnPolicy) or _HAS_OVERRIDE or policy.reduce_dtype is not None:
        return policy
    return replace(policy, reduce_dtype=policy.param_dtype)


# ---- ``fully_shard()``


_M = TypeVar("_M", nn.Module, list[nn.Module])


class Layout:
    """How the next groups are laid out."""

    is_fsdp2 = False  # each rank holds a chunk of every parameter

    def check(
        self,
        modules: Iterable[nn.Module],
        params: Iterable[nn.Parameter],
        placements: dict[nn.Parameter, Any],
        mesh: DeviceMesh,
    ) -> None:
        """Mark those of ``params``, in ``modules``, that are to be cut along another dimension than 0.

        Raises:
            ValueError: there is no such dimension; tensor parallelism has cut it; the parameter's class holds several
                tensors.
            NotImplementedError: it cannot be cut evenly.
        """
        named = [item for module in modules for item in module.named_parameters()] if self.is_fsdp2 else []
        concerned = {*params}
        for fqn, param in [item for item in named if item[1] in concerned]:
            wanted = getattr(placements.get(param), "placement", placements.get(param))
            if not isinstance(wanted, Shard) or wanted.dim in (0, -param.ndim):
                continue
            what = (
                f"fully_shard(shard_placement_fn=...): {fqn}, of shape {tuple(param.shape)}, is to be placed {wanted!r}"
            )
            dim = wanted.dim % max(param.ndim, 1)
            if not -param.ndim <= wanted.dim < param.ndim:
                raise MisuseError(f"{what}, a dimension that it does not have")
            if is_wrapper(param) and not isinstance(param, DTensor):
                raise MisuseError(f"{what}, but a {type(param).__name__} is cut between rows: return Shard(0) or None")
            size = _home_of(placements[param], mesh).mesh.size(-1)
            if param.shape[dim] % size:
                raise NotImplementedError(
                    f"{what} on {size} ranks: FSDP does not support uneven sharding on dim {dim}, of size "
                    f"{param.shape[dim]}: return Shard(0) or None"
                )
            if not even_chunks.cut(param, dim):
                raise MisuseError(f"{what}, but tensor parallelism has cut this dimension: return another one, or None")


layout = Layout()

_NO_POLICY, _NO_OFFLOADING = MixedPrecisionPolicy(), OffloadPolicy()
PlacementFn = Callable[[nn.Parameter], Any]  # to Shard, None, or torch's ShardPlacementResult


@checked()
def fully_shard(
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _NO_POLICY,
    offload_policy: OffloadPolicy | None = _NO_OFFLOADING,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> _M:
    """``fsdp_compose.fully_shard`` with FSDP2's keywords and their meaning.

    As in FSDP2, shard boundaries fall between rows (indices of dim 0), unless a single row is longer than a rank's
    shard of the group. But the rows that a rank holds differ: the parameters of a group lie one after the other, so a
    small parameter may be whole on one rank. ``p.placements`` and ``p.to_local()`` show it. After
    ``install(layout="fsdp2")`` each rank has FSDP2's rows.

    Ranks: as for ``fsdp_compose.fully_shard``. If there is neither a ``mesh`` nor a process group, the call initializes
    the default process group, as under torchrun.

    Args:
        module, reshard_after_forward, ignored_params: as for ``fsdp_compose.fully_shard``.
        mesh: data-parallel mesh; with ``dp_mesh_dims``, the whole mesh. Default: all ranks, in a dimension named
            "fsdp".
        shard_placement_fn: a function from a parameter to ``Shard(dim)``, ``Replicate()``, ``None``, or torch's
            ``ShardPlacementResult``. With ``Shard(dim)``, boundaries may fall between indices of dimensions up to
            ``dim``; ``None`` means the default. A ``ShardPlacementResult`` may name another mesh: modules that have all
            their parameters on it (experts) form their own group there; where a module has parameters on several
            meshes, they are in one group. Modules of which all parameters are ``Replicate()`` (norms) form a group,
            too: they stay whole on every rank, and their gradients are averaged.
        mp_policy: torch's policy or ours. Before torch 2.15, torch's without ``reduce_dtype`` reduces in
            ``param_dtype``.
        offload_policy: torch's policy, or ``None``, which verl gives.
        dp_mesh_dims: names of the data-parallel dimensions of ``mesh``. Parameters must be DTensors on ``mesh``,
            replicated over these dimensions; inside forward they are so again. Whatever autograd leaves on these
            dimensions, a sum's terms or whole gradients, is divided by their size and summed: a loss that is a mean
            over all ranks, itself a DTensor, needs ``set_gradient_divide_factor(1.0)``. Or the package spmd_types must
            have annotated them on all other dimensions of ``mesh``; inside forward they are plain, with their types.

    Returns:
        ``module``; it, or each module of the list, is then an ``FSDPModule``.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``fsdp_compose.fully_shard``; a module has an attribute with the
            name of one of the methods; a module mixes parameters that stay whole with others.
    """
    modules, ignored = check_modules(module, ignored_params, "fully_shard")
    refuse_clash(modules)
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        mesh = default_mesh()
    options: dict[str, Any] = {"mp_policy": own_policy(mp_policy), "offload_policy": offload_policy}
    usual, is_replicated = _Home(mesh), False
    if dp_mesh_dims is not None:
        (mesh, is_replicated), whole = _data_parallel(mesh, dp_mesh_dims), mesh
        usual = _Home(mesh, annotated_on=(whole, _names(dp_mesh_dims)))
    with _put_back_on_error(modules), usual.reading():
        if dp_mesh_dims is not None:
            _leave_data_parallel_dims(modules, ignored, whole, dp_mesh_dims)
        params = _unsharded_params(modules, ignored)
        placements = {} if shard_placement_fn is None else {param: shard_placement_fn(param) for param in params}
        shard_numel = sum(param.numel() for param in params) / mesh.size(mesh.ndim - 1)
        layout.check(modules, params, placements, mesh)
        options["granularity"] = _granularity(placements, shard_numel)
        options |= {"strategy": "ddp"} if is_replicated else {"reshard_after_forward": reshard_after_forward}
        groups = [
            ([inner], options | home.options(reshard_after_forward), home)
            for inner, home in _with_other_homes(modules, placements, mesh)
        ]
        inner_params = {param for inner, *_ in groups for param in inner[0].parameters()}
        for inner, arguments, home in groups:
            refuse_clash(inner)
            with home.reading():
                check_fully_shard(inner, ignored_params=ignored, **arguments)
        groups.append((modules, options | {"mesh": mesh}, usual))
        check_fully_shard(modules, ignored_params=ignored | inner_params, **groups[-1][1])
    # All groups were checked above, so that none is made if another one is refused.
    for members, arguments, home in groups:
        with home.reading():
            _own(members, ignored_params=ignored, **arguments)
        add_methods(members)
        state = get_state(members[0])
        if state is not None:
            for sharded in [param for handle in state._handles for param in handle.sharded_params]:
                if isinstance(sharded, RaggedDTensor):
                    sharded._spec = sharded._spec.left_partial
            if layout.is_fsdp2:
                state.set_options(shows_gathered=True)
    _forget_meshes(params)
    return module


def _forget_meshes(params: Iterable[nn.Parameter | None]) -> None:
    for param in params:
        if param is not None:
            param.__dict__.pop(ParamAttribute.MESH, None)
            even_chunks.forget(param)


@contextmanager
def _put_back_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modules' parameters if the body raises."""
    before = {inner: dict(inner._parameters) for module in modules for inner in module.modules()}
    try:
        yield
    except BaseException:
        for inner, parameters in before.items():
            _forget_meshes(inner._parameters.values())
            inner._parameters.update(parameters)
        raise


fully_shard.state = (  # type: ignore[attr-defined]
    lambda module: None if get_state(module) is None else StateFace(module)
)


# ---- meshes


def _data_parallel(mesh: DeviceMesh, dims: DataParallelMeshDims) -> tuple[DeviceMesh, bool]:
    """Return the data-parallel dimensions of a mesh, and whether all of them replicate."""
    for name in _names(dims):
        if name not in (mesh.mesh_dim_names or ()):
            raise MisuseError(
                f"fully_shard(dp_mesh_dims=...): {name!r} not found in mesh.mesh_dim_names: {mesh.mesh_dim_names}"
            )
    meshes = [
        mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names])
        for names in (dims.replicate_names, dims.shard_names)
        if names
    ]
    if not meshes:
        raise MisuseError("fully_shard(dp_mesh_dims=...): expected names in shard or replicate, got none")
    return meshes[0] if len(meshes) == 1 else concatenate_meshes(meshes), not dims.shard_names


def _names(dims: DataParallelMeshDims) -> tuple[str, ...]:
    return (*dims.replicate_names, *dims.shard_names)


# Where a parameter on the whole mesh stores what has replaced it.
_WITHOUT_DATA_DIMS = "_fsdp_compose_without_data_dims"


def _leave_data_parallel_dims(
    modules: Iterable[nn.Module], ignored: set[nn.Parameter], mesh: DeviceMesh, dims: DataParallelMeshDims
) -> None:
    """Replace parameters that are DTensors on all of ``mesh`` by DTensors on its other dimensions, or plain tensors,
    which forward will see as they were. Annotated parameters say by themselves what forward sees."""
    names = mesh.mesh_dim_names
    assert names is not None, "its dimensions were looked up by name"
    ours = {names.index(name) for name in _names(dims)}
    rest = tuple(name for i, name in enumerate(names) if i not in ours)
    new: dict[nn.Parameter, nn.Parameter] = {}
    for fqn, param in [item for module in modules for item in module.named_parameters(remove_duplicate=False)]:
        if param in ignored or param in new or isinstance(param, RaggedDTensor) or is_annotated(param):
            continue
        earlier = param.__dict__.get(_WITHOUT_DATA_DIMS)
        if earlier is not None and ParamAttribute.SHARDED in earlier.__dict__:
            new[param] = earlier  # an earlier call has sharded it elsewhere: weights tied across calls
            continue
        if not isinstance(param, DTensor) or param.device_mesh != mesh:
            what = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else "not a DTensor"
            raise MisuseError(
                f"fully_shard(dp_mesh_dims=...): parameters must be DTensors on {mesh}, or annotated by spmd_types, "
                f"but {fqn} is {what}"
            )
        if not all(isinstance(param.placements[i], Replicate) for i in ours):
            raise MisuseError(
                "fully_shard(dp_mesh_dims=...): Expected Replicate() on the data-parallel dimensions, but "
                f"{fqn} is placed {param.placements} on {names}"
            )
        if param.grad is not None:
            raise MisuseError(
                f"fully_shard(): the parameter {fqn} has a gradient, which would be lost: call module.zero_grad() first"
            )
        local = local_tensor(param).detach()
        if rest:
            kept = [item for i, item in enumerate(param.placements) if i not in ours]
            local = DTensor.from_local(
                local, mesh[rest], kept, run_check=False, shape=param.shape, stride=param.stride()
            )
        new[param] = nn.Parameter(local, requires_grad=param.requires_grad)
        new[param].__dict__[ParamAttribute.FORWARD_SPEC] = dtensor_spec(param)
        param.__dict__[_WITHOUT_DATA_DIMS] = new[param]
    for item in {inner for module in modules for inner in module.modules()}:
        for name, own in item._parameters.items():
            if own in new:
                item._parameters[name] = new[own]


# ---- parameters


def _unsharded_params(modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    found = dict.fromkeys(param for module in modules for param in module.parameters())
    return [param for param in found if param not in ignored and not isinstance(param, RaggedDTensor)]


def _granularity(placements: dict[nn.Parameter, Any], shard_numel: float) -> Granularity:
    """Return a granularity with boundaries between rows, or as ``placements`` says, where that is the same on all ranks
    of a mesh for tensor parallelism; or that of FSDP2's layout, if ``install()`` was told so."""
    if layout.is_fsdp2:
        return even_chunks

    def granule(fqn: str, param: nn.Parameter) -> Literal["rows"] | int | None:
        wanted = placements.get(param)
        wanted = getattr(wanted, "placement", wanted)
        if wanted is None or isinstance(wanted, Replicate):
            return "rows" if prod(param.shape[1:]) <= max(shard_numel, 1) and is_split_evenly(param) else None
        if not isinstance(wanted, Shard) or not -param.ndim <= wanted.dim < param.ndim:
            raise MisuseError(
                f"fully_shard(shard_placement_fn=...): expected Shard(dim) for a dimension of {fqn}, of shape "
                f"{tuple(param.shape)}, Replicate(), torch's ShardPlacementResult or None, got {wanted!r}"
            )
        if not is_split_evenly(param):
            return None
        dim = wanted.dim % param.ndim
        return "rows" if dim == 0 else max(prod(param.shape[dim + 1 :]), 1)

    return granule


@dataclass(frozen=True)
class _Home:
    """Where a parameter lives."""

    mesh: DeviceMesh  # its data-parallel ranks
    is_whole: bool = False  # each of them holds all of it
    # The whole mesh on which its annotation is read, if it has one, and the data-parallel dimensions.
    annotated_on: tuple[DeviceMesh, tuple[str, ...]] | None = field(default=None, compare=False)

    def reading(self) -> AbstractContextManager[None]:
        """A context in which annotations are read there."""
        return nullcontext() if self.annotated_on is None else annotations_on(*self.annotated_on)

    def options(self, reshard_after_forward: bool | int | None) -> dict[str, Any]:
        """The arguments of ``fully_shard`` for a group there."""
        if self.is_whole:
            mesh = self.mesh if self.mesh.ndim == 1 else flatten_mesh(self.mesh)
            return {"mesh": mesh, "strategy": "ddp", "reshard_after_forward": None}
        return {"mesh": self.mesh, "strategy": None, "reshard_after_forward": reshard_after_forward}


def _home_of(wanted: Any, mesh: DeviceMesh) -> _Home:
    info = getattr(wanted, "mesh_info", None)
    dims, whole = getattr(info, "dp_mesh_dims", None), getattr(info, "spmd_mesh", None)  # torch 2.15
    annotated_on = None if dims is None or whole is None else (whole, _names(dims))
    is_whole = isinstance(getattr(wanted, "placement", wanted), Replicate)
    return _Home(mesh if info is None else info.mesh, is_whole, annotated_on)


def _with_other_homes(
    modules: Iterable[nn.Module], placements: dict[nn.Parameter, Any], mesh: DeviceMesh
) -> list[tuple[nn.Module, _Home]]:
    """Return the outermost modules that have all their parameters in a home other than shards on ``mesh``. Mark the
    parameters on other meshes that modules have beside others. Raises ValueError if a module has parameters of its own
    that stay whole, and others, or if one of ``modules`` is to stay whole."""
    usual = _Home(mesh)
    homes = {param: _home_of(wanted, mesh) for param, wanted in placements.items()}
    found: dict[nn.Module, _Home] = {}

    def look(module: nn.Module) -> None:
        used = {homes[param] for param in module.parameters() if param in homes}
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
        if len(used) == 1 and usual not in used and not is_list:
            found[module] = used.pop()
            return
        own = {name: homes[param] for name, param in module.named_parameters(recurse=False) if param in homes}
        others = [name for name, home in own.items() if home.is_whole]
        if others:
            raise MisuseError(
                f"fully_shard(shard_placement_fn=...): {', '.join(others)} of a {type(module).__name__} stay whole, "
                "Replicate(), and the rest of its parameters do not, but all of a group is sharded: shard them too "
                "(the parameters of a group lie in one buffer, so small ones cost next to nothing), or put them into a "
                "module of their own"
            )
        for name, home in own.items():
            if home != usual:
                module._parameters[name].__dict__[ParamAttribute.MESH] = home.mesh
        for child in module.children():
            look(child)

    if {*homes.values()} - {usual}:
        for module in modules:
            look(module)
            if module in found and found[module].is_whole:
                raise MisuseError(
                    f"fully_shard(shard_placement_fn=...): all parameters of this {type(module).__name__} are to stay "
                    "whole, Replicate(): call fsdp_compose.replicate(module) instead"
                )
    return list(found.items())
