"""``fully_shard()`` and ``replicate()``: shard parameters over the data-parallel ranks, or keep them whole on each.

Both check their arguments before they change a module, so a rejected call can be repeated. Then they build the flat
parameters, register one ``_FSDPState`` on the modules and hook their forwards. Users, ``plan()`` and ``drop_in`` call
them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from torch.nn.parameter import UninitializedParameter

from .._arguments import checked, size_of
from .._torch import add_composable_state, composable_registry, data_parallelism_of_torch, flatten_mesh, fsdp2
from ..errors import MisuseError, MisuseTypeError
from .comm import check_mesh, data_parallel_mesh, device_of_mesh, replicated_mesh
from .flat import (
    CPUOffloadPolicy,
    FlatParamHandle,
    Granularity,
    ManagedParameter,
    MixedPrecisionPolicy,
    Region,
    annotation_of,
    annotations_on,
    as_offload_policy,
    as_ours,
    check_class,
    kind_of,
    mark_owner,
    meshes_of,
    refuse_shared_memory,
    regions_of,
    shard_params,
    spec_of,
)
from .group import (
    API_KEY,
    BUCKET_BYTES,
    GroupOptions,
    ParameterSwap,
    Strategy,
    _annotate_modules_for_dynamo,
    _FSDPState,
    bytes_of_limit,
    detect_meta_buffers,
    get_state,
    group_modules,
    guard_state_dict,
    make_proxies,
    managed_parameters,
    partition,
    sample_start,
    strategy_named,
    ties_with_other_groups,
    unsharded_tensors,
)
from .runtime import drive

_TRANSFORMERS_LOADER = "transformers.distributed.sharding_utils"  # must ask for our placements

# ---- Making a group: check arguments, collect the managed parameters, build flat parameters, install them.
#
# All checks run before a module is touched, so a rejected call can be repeated.


def make_group(modules: list[nn.Module], mesh: DeviceMesh, options: GroupOptions, ignored: set[nn.Parameter]) -> None:
    """Make one group of ``modules``, which are checked already, from the parameters below them that neither a nested
    call nor ``ignored`` took. The group works once hooks drive the modules.

    Raises:
        ValueError: see ``fully_shard``.
    """
    with annotations_on(mesh):
        label, fqns, managed, regions = check_group(modules, mesh, options, ignored)
        ties = ties_with_other_groups(fqns, ignored)
        meshes = [meshes_of(item.parameter, mesh) for item in managed]
        data_mesh = data_parallel_mesh(mesh, dict.fromkeys(meshes), options.post_forward_size)
        for param, own in zip(managed, meshes, strict=True):
            param.mesh = data_mesh.on(*own)
        handles = []
        for items in partition(managed, options):
            handles.append(shard_params(items, items[0].mesh, options.granularity, options.offload))
            sample_start(items, handles[-1])

    state = _FSDPState()
    state.initialize(modules, label, data_mesh, options, handles, ignored, regions)
    _put_sharded(managed, handles, label)
    for item, name, sharded in ties:
        item._parameters[name] = sharded
        guard_state_dict(item, fqns[item])
    detect_meta_buffers(fqns)
    state.swap = ParameterSwap(modules, managed, handles, fqns)
    for item in modules:
        _annotate_modules_for_dynamo(item, set(item.modules()) - fqns.keys(), use_orig_params=True)
    add_composable_state(modules, API_KEY, state)
    if _TRANSFORMERS_LOADER in sys.modules:
        from ..plugins.transformers_loader import extend_transformers_loader

        extend_transformers_loader()


def check_group(
    modules: list[nn.Module], mesh: DeviceMesh, options: GroupOptions, ignored: set[nn.Parameter]
) -> tuple[str, dict[nn.Module, str], list[ManagedParameter], list[Region]]:
    """Raise the errors that ``make_group`` would raise for these parameters. Changes nothing. Return the group's label
    in messages, its modules with their FQNs, its parameters, and their memory regions."""
    label, fqns = ", ".join(type(item).__name__ for item in modules), group_modules(modules)
    managed = managed_parameters(fqns, ignored, label)
    caller = "fully_shard" if options.bucket_bytes is None else "replicate"
    _refuse_other_data_parallelism(fqns, managed, caller)
    with annotations_on(mesh):
        _check_parameters(managed, mesh, caller)
    for item in managed:
        # A replicated parameter is never gathered.
        holder = item.slots[0][0] if options.bucket_bytes is None else None
        item.kind = kind_of(item.fqn, item.parameter, options.mp_policy, holder)
    regions = regions_of(((item.fqn, item.parameter) for item in managed), are_sharded=True)
    others = unsharded_tensors(fqns, {item.parameter for item in managed})
    refuse_shared_memory([*regions, *regions_of(others, are_sharded=False)])
    return label, fqns, managed, regions


def _refuse_other_data_parallelism(
    fqns: dict[nn.Module, str], managed: Sequence[ManagedParameter], caller: str
) -> None:
    params = {item.parameter for item in managed}
    for module, fqn in fqns.items():
        applied = data_parallelism_of_torch(module)
        if applied and not params.isdisjoint(module.parameters()):
            raise MisuseError(
                f"{caller}(): {fqn or 'this'} ({type(module).__name__}) is data parallel already, by {applied}: choose "
                f"one. Call {caller}() on the module without it (for a wrapper, on the module inside), or pass its "
                "parameters as ignored_params"
            )


# ---- arguments

_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict


def check_modules(
    module: Any, ignored_params: Iterable[nn.Parameter] | None, caller: str
) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """Return the outermost of the given modules, and the parameters that their groups leave out."""
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, list) or not modules or not all(isinstance(item, nn.Module) for item in modules):
        raise MisuseTypeError(
            f"{caller}(): expected an nn.Module or a non-empty list of nn.Modules, got {type(module).__name__}"
        )
    roots = [
        item
        for i, item in enumerate(modules)
        if item not in modules[:i] and not any(item in set(other.modules()) for other in modules if other is not item)
    ]
    for item in roots:
        # Another module without a forward may have methods that register_forward_method() makes a forward of.
        if isinstance(item, _CONTAINERS) and type(item).forward is nn.Module.forward and "forward" not in vars(item):
            remedy = f"call it on its children, or group them together: {caller}(list(module.children()))"
            if not [*item.children()]:  # an nn.ParameterList, for example
                remedy = "call it on the module that contains it and whose forward uses its parameters"
            raise MisuseError(
                f"{caller}(): a {type(item).__name__} has no forward, so nothing would ever gather its parameters; "
                + remedy
            )
        state = get_state(item)
        if state is not None:
            is_sharded = state.options.bucket_bytes is None
            earlier, sharded = ("fully_shard", "sharded") if is_sharded else ("replicate", "replicated")
            raise MisuseError(
                f"{earlier}() was already called on this {type(item).__name__}: a module can be {sharded} once. Call "
                f"{caller}() once on each submodule, then on the module itself"
            )
        for other in ("fully_shard", "replicate"):
            if other in composable_registry(item):
                raise MisuseError(
                    f"{caller}(): torch's {other}() was already applied to this {type(item).__name__}; choose one"
                )
    return roots, _ignored(ignored_params, caller)


def _ignored(ignored_params: Iterable[nn.Parameter] | None, caller: str) -> set[nn.Parameter]:
    if ignored_params is None:
        return set()
    if isinstance(ignored_params, torch.Tensor) or not isinstance(ignored_params, Iterable):
        raise MisuseTypeError(
            f"{caller}(ignored_params=...): expected an iterable of nn.Parameters, got {type(ignored_params).__name__}"
        )
    ignored = list(ignored_params)
    for item in ignored:
        if not isinstance(item, nn.Parameter):
            raise MisuseTypeError(f"{caller}(ignored_params=...): expected nn.Parameters, got {type(item).__name__}")
    return set(ignored)


# ---- parameters


def _check_parameters(managed: Sequence[ManagedParameter], mesh: DeviceMesh, caller: str) -> None:
    device, annotated = device_of_mesh(mesh), {}
    for item in managed:
        param = item.parameter
        annotation = annotation_of(param, item.fqn)
        if annotation is not None:
            annotated[item.fqn] = annotation
        if isinstance(param, UninitializedParameter):
            raise MisuseError(
                f"{caller}(): the parameter {item.fqn} is not initialized (lazy module); run a forward first"
            )
        if param.device.type != "meta" and param.device != device and param.device.type != "cpu":
            raise MisuseError(
                f"{caller}(): the parameter {item.fqn} is on {param.device}, but the mesh is on {device}; "
                f"move the module with module.to({str(device)!r}), or pass a mesh on {param.device.type}"
            )
        spec = spec_of(param)
        if spec is not None and caller == "fully_shard":
            from ..plugins.tensor_parallel import refuse_placement

            refuse_placement(item.fqn, param, mesh)
        elif spec is not None:
            raise MisuseError(
                f"replicate(): the parameter {item.fqn} is already a DTensor, placed {list(spec.placements)} on "
                f"{spec.mesh}: call fully_shard() with a (replicate, shard) submesh of the same mesh whose second "
                "dimension has one rank"
            )
        else:
            check_class(param, item.fqn, is_gathered=caller == "fully_shard")
        if param.grad is not None:
            raise MisuseError(
                f"{caller}(): the parameter {item.fqn} has a gradient, which would be lost: call "
                "module.zero_grad() first"
            )
    if annotated:
        from ..plugins.tensor_parallel import refuse_gaps
        from .runtime import pause_type_checks

        refuse_gaps(annotated)
        pause_type_checks()
    devices = {item.parameter.device.type == "meta" for item in managed}
    if len(devices) > 1:
        on_meta = next(item.fqn for item in managed if item.parameter.device.type == "meta")
        raise MisuseError(
            f"{caller}(): the parameter {on_meta} is on the meta device and others of its group are not; "
            "materialize all of them or none"
        )


def _put_sharded(managed: Sequence[ManagedParameter], handles: Sequence[FlatParamHandle], label: str) -> None:
    """Replace each parameter by its sharded parameter, wherever it stands in the group."""
    sharded_params = {
        fqn: sharded for handle in handles for fqn, sharded in zip(handle.fqns, handle.sharded_params, strict=True)
    }
    by_module: dict[nn.Module, dict[int, nn.Parameter]] = {}  # and by the id of the original
    for item in managed:
        sharded = sharded_params[item.fqn]
        mark_owner(item.parameter, label, item.fqn)  # to recognise a tie that points here from outside the group
        mark_owner(sharded, label, item.fqn)
        for module, name in item.slots:
            module._parameters[name] = sharded
            by_module.setdefault(module, {})[id(item.parameter)] = sharded
    for module, own in by_module.items():
        # Some modules cache their weights in lists, as nn.RNN does in _flat_weights.
        for key, value in module.__dict__.items():
            if isinstance(value, list) and not own.keys().isdisjoint(map(id, value)):
                module.__dict__[key] = [own.get(id(item), item) for item in value]
    make_proxies([(item.parameter, sharded_params[item.fqn]) for item in managed])


# ---- ``fully_shard()``


_M = TypeVar("_M", nn.Module, list[nn.Module])


@checked(
    granularity="a function from (FQN, parameter) to a granule",
    mp_policy="fsdp_compose's MixedPrecisionPolicy or torch's",
    limit_unsharded_bytes="a number of bytes, or a text such as '256MB' or '2 groups'",
)
def fully_shard(
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    granularity: Granularity | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    strategy: str | Strategy | None = None,
    offload_policy: CPUOffloadPolicy | OffloadPolicy | None = None,
    optional: bool = False,
    limit_unsharded_bytes: int | str | None = None,
    **others: NoReturn,
) -> _M:
    """Shard the parameters of ``module``, their gradients and their optimizer state over the data-parallel ranks.

    One call makes one *group*, from the parameters below ``module`` that neither a nested call nor ``ignored_params``
    took. The group's parameters are all-gathered together before forward and again before backward; after backward
    their gradients are reduce-scattered. Call it on the inner modules first (each transformer block), then on the
    whole model.

    The module keeps its class and its FQNs. This call replaces each parameter by a sharded parameter, which
    ``module.parameters()`` returns from then on outside ``forward``: build the optimizer afterwards.

    Ranks: every rank of the mesh makes the same calls on the same model. The call communicates only on a mesh of
    several dimensions that does not contain all ranks: its ranks then create a process group. The first forward
    compares the ranks' models. Each rank keeps *its own* values: start from equal parameters.

    Args:
        module: a module, or a list of modules that form one group (for example a final norm and an output head).
        mesh: device mesh of the data-parallel ranks; default: a 1-D mesh of all ranks. A 2-D mesh (replicate, shard)
            gives hybrid sharding: parameters are sharded within a row, and every row holds a full copy. If tensor
            parallelism has turned parameters into DTensors (``parallelize_module(module, mesh["tp"], plan)`` before
            this call), pass the data-parallel part of the same mesh: ``mesh["dp"]``. DTensors that are split over
            data-parallel ranks (experts) are sharded over those that hold the same part: see docs/meshes.md. If a mesh
            of several dimensions does not contain all ranks, the first call waits for all of its ranks and creates a
            process group.
        reshard_after_forward: ``True`` frees the gathered parameters between forward and backward and gathers them
            again (least memory); ``False`` keeps them (less communication). ``None``: ``False`` for the module whose
            forward is outermost, ``True`` for all others. An int ``n`` that divides the number of shard ranks: between
            forward and backward, ``n`` adjacent ranks (for example one node) keep the parameters sharded among
            themselves, and backward gathers only within them; the first such call creates their process group. 1 means
            ``False``, the number of shard ranks means ``True``; in functional mode any number means ``True``.
        granularity: a function from (FQN relative to ``module``, parameter) to the smallest piece of the parameter
            that no shard boundary may split: ``"elements"``, ``"rows"``, ``"whole"``, a number of elements, a block
            shape, or ``None`` for the default (rows where that costs next to nothing, else elements).
        mp_policy: dtypes of compute, reduction and outputs (``torch.distributed.fsdp.MixedPrecisionPolicy`` is
            accepted too).
        ignored_params: parameters below ``module`` that stay as they are; their gradients are not reduced.
        strategy: a name in ``fsdp_compose.strategies.STRATEGIES``, or a ``Strategy``: how parameters, gradients and
            optimizer state are sharded over each dimension of ``mesh``. Use it instead of ``reshard_after_forward``.
            If the optimizer state is sharded over two dimensions, all ranks of the default process group must make the
            first such call together, because it creates a process group.
        offload_policy: where shards, gradients and optimizer state live. ``CPUOffloadPolicy()`` (torch's is accepted
            too): in host memory, and the optimizer steps on the CPU. ``None``: on the device of the mesh. See
            docs/offload.md.
        optional: in every forward, each rank may run the module any number of times or skip it (a vision tower where
            only some ranks have images, experts that get no tokens, layer drop). The same holds for groups inside it.
            The module may only run inside the forward of the nearest enclosing group that is not optional. A rank that
            skips it contributes zeros to the average; gradients are ``None`` where no rank had one. Costs small
            exchanges between the ranks in the forwards and backwards of the whole model. See docs/optional.md.
        limit_unsharded_bytes: for the call on the root, whose forward is outermost: how many bytes of gathered
            parameters and of gradients on their way its groups may hold at a time; ``"2 groups"``: twice the largest.
            Then a group is gathered ahead, and computes while another is reduced, only if there is room. What one group
            needs is always taken, and groups that stay gathered do not count. ``None``: one group is gathered ahead,
            and one is reduced behind. Changes no result. In graphs of ``torch.compile`` the compiler
            places the gathers, so groups of such a model break them: compile block by block.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a module is already sharded; a parameter would be in two groups, is on the wrong device, or belongs
            to a tensor class that cannot be sharded (quantized weights); the mesh has more than two dimensions, or a
            dimension of a parameter that is already a DTensor; ``reshard_after_forward`` is a number that does
            not divide the number of shard ranks; ``strategy`` is unknown, does not fit the mesh, or is combined with
            ``reshard_after_forward``.
        RuntimeError: there is neither a mesh nor a process group.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    for name in others:
        hint = f": it is FSDP2's, and {_DROP_IN}" if name in inspect.signature(fsdp2.fully_shard).parameters else ""
        raise MisuseTypeError(f"fully_shard() got an unexpected keyword argument {name!r}{hint}")
    arguments = _checked(
        module,
        mesh,
        reshard_after_forward,
        granularity,
        mp_policy,
        ignored_params,
        strategy,
        offload_policy,
        optional,
        limit_unsharded_bytes,
    )
    make_group(*arguments)
    drive(arguments[0])
    _explain_methods(arguments[0])
    return module


_DROP_IN = "fsdp_compose.drop_in.fully_shard() has FSDP2's keywords and methods"


def _explain_methods(modules: list[nn.Module]) -> None:
    """Let the methods of FSDP2 that training loops call say what to do instead."""
    for module in modules:
        # Not all methods: programs ask by ``hasattr(module, "reshard")`` whether a module has them.
        for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            if not hasattr(module, name):
                module.__dict__[name] = _missing_method(type(module).__name__, name)


def _missing_method(cls: str, name: str) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise AttributeError(
            f"{cls!r} object has no attribute {name!r}: fsdp_compose.fully_shard() adds no methods. Call "
            f"fsdp_compose.{name}(module, ...); or {_DROP_IN}"
        )

    return missing


def check_fully_shard(module: nn.Module | list[nn.Module], **arguments: Any) -> None:
    """Raise the errors that ``fully_shard(module, **arguments)`` would raise. Changes nothing."""
    defaults = dict.fromkeys(inspect.signature(fully_shard).parameters.keys() - {"module", "others"})
    check_group(*_checked(module, **defaults | arguments))


def _checked(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    granularity: Granularity | None,
    mp_policy: MixedPrecisionPolicy | None,
    ignored_params: Iterable[nn.Parameter] | None,
    strategy: str | Strategy | None,
    offload_policy: CPUOffloadPolicy | OffloadPolicy | None,
    optional: bool | None,
    limit_unsharded_bytes: int | str | None,
) -> tuple[list[nn.Module], DeviceMesh, GroupOptions, set[nn.Parameter]]:
    """Check the arguments of ``fully_shard`` and convert them to those of ``make_group``."""
    modules, ignored = check_modules(module, ignored_params, "fully_shard")
    if mp_policy is None:
        mp_policy = MixedPrecisionPolicy()
    mp_policy = as_ours(MixedPrecisionPolicy, mp_policy, "fully_shard(mp_policy=...)")
    offload = as_offload_policy(offload_policy, "fully_shard(offload_policy=...)")
    if limit_unsharded_bytes is not None:
        bytes_of_limit(limit_unsharded_bytes)
    mesh = check_mesh(mesh)
    options = GroupOptions(mp_policy, granularity, offload, None, bool(optional), limit_unsharded_bytes)
    if strategy is None:
        checked = _checked_post_forward_size(reshard_after_forward, mesh.size(mesh.ndim - 1))
        options = replace(options, reshard_after_forward=checked)
    elif reshard_after_forward is not None:
        raise MisuseError(
            "fully_shard(): expected reshard_after_forward or strategy, got both; the strategy decides it"
        )
    else:
        mesh, options = _follow(strategy_named(strategy, mesh.ndim), mesh, options)
    return modules, mesh, options, ignored


def _follow(row: Strategy, mesh: DeviceMesh, options: GroupOptions) -> tuple[DeviceMesh, GroupOptions]:
    """Apply a row of the table of strategies to a mesh and to options."""
    if row.is_replicated:
        mesh = replicated_mesh(mesh if mesh.ndim == 1 else flatten_mesh(mesh))
        return mesh, replace(options, reshard_after_forward=False, bucket_bytes=BUCKET_BYTES)
    reshards = row.reshards(mesh.shape)
    if reshards is not None:
        options = replace(options, reshard_after_forward=reshards, reshard_after_backward=reshards)
    return flatten_mesh(mesh) if row.flattens else mesh, options


def _checked_post_forward_size(reshard_after_forward: bool | int | None, num_ranks: int) -> bool | int | None:
    """Check ``reshard_after_forward`` and return it, with 1 and the number of all ranks converted to bools."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if reshard_after_forward < 1 or num_ranks % reshard_after_forward:
        *others, last = [str(i) for i in range(1, num_ranks + 1) if num_ranks % i == 0]
        factors = f"{', '.join(others)} or {last}" if others else last
        raise MisuseError(
            f"fully_shard(reshard_after_forward={reshard_after_forward}): the parameters are sharded over {num_ranks} "
            f"ranks, so {factors} of them can keep the parameters between forward and backward"
        )
    if reshard_after_forward in (1, num_ranks):
        return reshard_after_forward != 1
    return reshard_after_forward


fully_shard.state = get_state  # type: ignore[attr-defined]


# ---- ``replicate()``: data parallelism with whole parameters on every rank, built on ``fully_shard``'s machinery.
#
# A replicated group is a group on a mesh (replicate, shard) with one rank in its second dimension. Its flat parameters
# have a single shard, which every rank holds, so there is nothing to gather or scatter. Its flat parameters are
# *buckets*: a bucket's gradients are averaged as soon as backward has computed all of them (``runtime/buckets``).


@checked()
def replicate(
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    bucket_bytes: int | str = BUCKET_BYTES,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> _M:
    """Train ``module`` with plain data parallelism: every rank holds all parameters, and backward averages the
    gradients over the ranks. Use it for modules that are too small to be worth sharding.

    It manages the parameters below ``module`` that no nested call of ``fully_shard`` or ``replicate`` took, and that
    are not in ``ignored_params``. The two compose in one model: call either on inner modules first, then on outer ones.

    Gradients are averaged in *buckets* of about ``bucket_bytes``, with one all-reduce each, in a fixed order: the
    reverse order of the modules. If the model has only replicated groups and no other model takes part in the backward,
    a bucket's all-reduce starts as soon as backward has computed all its gradients, and overlaps the rest of backward.
    Otherwise a group is averaged when its backward is done, as with ``fully_shard``, so ranks that use different
    parameters stay in step. ``.grad`` tensors are views of the buckets, whose memory is kept.

    The parameters become ``DTensor`` objects like those of ``fully_shard``, except that every rank holds all elements
    (``.to_local()`` makes no copy). Optimizers, gradient clipping, ``flat_parameters`` and checkpoints work the same
    way, and checkpoints can be loaded into sharded models. Inside ``forward`` modules show plain parameters in the same
    memory.

    Ranks: every rank of the mesh makes the same calls on the same model; the call itself does not communicate. The
    first forward compares the ranks' models, then copies the first rank's parameters and buffers to all ranks; until
    then each rank has its own. Buffers that change during training (running means) remain each rank's own afterwards.

    Args:
        module: a module, or a list of modules that form one group.
        mesh: 1-D device mesh of the replicas; default: all ranks.
        mp_policy: dtypes of compute, reduction and outputs. ``param_dtype`` adds a copy of the parameters in that
            dtype.
        bucket_bytes: size of a bucket, in bytes of parameters, or ``"25MB"``; the first bucket has at most 1 MiB.
        ignored_params: parameters below ``module`` that stay as they are; their gradients are not averaged.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``module`` is already sharded or replicated; a parameter would be in two groups, is on the wrong
            device, or belongs to a tensor class that cannot be managed; the mesh is not 1-D; ``bucket_bytes`` is not
            positive.
        RuntimeError: there is neither a mesh nor a process group.

    Example::

        replicate(model.embeddings)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    """
    modules, ignored = check_modules(module, ignored_params, "replicate")
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    policy = as_ours(MixedPrecisionPolicy, policy, "replicate(mp_policy=...)")
    bucket_bytes = size_of(bucket_bytes, "replicate(bucket_bytes={})")
    options = GroupOptions(policy, reshard_after_forward=False, bucket_bytes=bucket_bytes)
    make_group(modules, replicated_mesh(mesh), options, ignored)
    drive(modules)
    return module


replicate.state = get_state  # type: ignore[attr-defined]
