"""One flat parameter: its shard, its unsharded buffer and, for every parameter in it, a sharded and an unsharded one.

A ``FlatParamHandle`` owns all tensors of the parameters of one group that share (dtype, requires_grad), builds every
view of them once, and knows nothing about modules, hooks or when things happen::

    shard       |a a a|a b b|            this rank's equal slice, original dtype, never freed
                   |                     sharded parameters: leaf nn.Parameters over local shards, what optimizers see
                   v  (cast +) all-gather
    unsharded   |a a a a|b b|-|c c c|-|  compute dtype; storage exists between unshard and reshard only
                                         unsharded parameters: leaf nn.Parameters, what ``forward`` computes with

Note [Version counters]. The unsharded parameters have a version counter of their own, not that of what an all-gather
writes to: so refilling the memory never looks to autograd like a write to a saved tensor, and a write that ``forward``
makes on one of them is seen (``Unsharded.was_written``). The sharded parameters share the version counter of
``shard``: an optimizer step between forward and backward is seen as a change of ``shard._version``.

This file also finds the flat parameter of a tensor, makes its flat views, and gathers the whole of one flat tensor
into memory of its own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn as nn

from ..._torch import PlainAttributes
from ...errors import MisuseError, MisuseRuntimeError
from ..comm import DataParallelMesh, Label, Names, Transport, TransportRole
from ..ragged import OWNER_ATTRIBUTE, RaggedDTensor, note_write_of_all_ranks
from .accumulation import PendingGradients
from .codecs import PRE
from .gradient import ShardedGradient
from .gradient_hooks import GradientHooks
from .layout import FlatLayout, LocalShards, full_views, local_views
from .param_kind import ParameterKind, own_grad_dtype
from .reduction import ReduceBuffer, Reduction
from .shard_storage import ON_DEVICE, ShardStorage
from .sharded_param import (
    NOT_COPIED,
    Snapshot,
    is_sharded_like,
    local_elements,
    rebind_sharded_param,
    take_content,
)
from .unsharded import Unsharded, error_of_late_access

if TYPE_CHECKING:
    from ...plugins.tensor_parallel import TensorParallel
    from .flat_views import FlatSegment

_requires_grad = attrgetter("requires_grad")


class Owner(Protocol):
    """The group that a flat parameter belongs to."""

    @property
    def name(self) -> str: ...

    @property
    def is_functional(self) -> bool: ...

    @property
    def is_in_forward(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def is_of_another_thread(self) -> bool: ...

    def after_publication(self, call: Callable[[], None]) -> None: ...

    def end_left(self) -> None: ...

    def gather_parameter(self, handle: FlatParamHandle, index: int) -> torch.Tensor | None: ...


class _Referable:
    __slots__ = ("__weakref__",)  # dataclass(weakref_slot=True) needs Python 3.11


@dataclass(slots=True, eq=False, repr=False)
class FlatParamHandle(_Referable):
    """The flat parameter that holds parameters of one kind (see ``group/registry``); ``build`` makes it."""

    layout: FlatLayout  # the position of each parameter
    mesh: DataParallelMesh
    kind: ParameterKind  # what was decided for the parameters
    local_shards: LocalShards
    own: InitVar[TensorParallel | None] = None  # see ``tensor_parallel``
    storage: ShardStorage = ON_DEVICE  # where shard and gradient live
    label: Label = field(init=False)  # the parameters, as collectives and errors name them
    segments: list[FlatSegment] = field(init=False, default_factory=list)  # flat views that the user has made
    owner: weakref.ref[Owner] | None = field(init=False, default=None)  # the group, once there is one
    # What replaces the sharded parameters inside ``summon_full_params``; ``is_everywhere``: there are full parameters
    # on every rank.
    summoned: Any = field(init=False, default=None)
    pending_gradients: PendingGradients = field(init=False)  # for the next reduction

    sharded_params: list[nn.Parameter] = field(init=False)  # by parameter; permanently the same objects
    hooks: GradientHooks = field(init=False)
    shard: torch.Tensor = field(init=False)  # this rank's slice, of which the sharded parameters are views
    unsharded: Unsharded = field(init=False)  # what ``forward`` computes with
    gradient: ShardedGradient = field(init=False)  # the flat gradient, where the reduction's result goes
    snapshot: Snapshot = field(init=False)

    def __post_init__(self, own: TensorParallel | None) -> None:
        self.label = Label([param.fqn for param in self.layout.params])
        self.pending_gradients = PendingGradients(len(self.layout.params), torch.float32, own)

    # ---- Building

    def hold(self, params: list[nn.Parameter], hooks: GradientHooks) -> None:
        """Set the sharded parameters and their hooks. Call ``set_shard`` next."""
        self.sharded_params, self.hooks = params, hooks
        _register(self, {id(sharded): i for i, sharded in enumerate(params)}, sharded_param_owners)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParamHandle:
        """Copy the handle, over copies of the sharded parameters: those in ``memo``, which the copied modules show."""
        mesh = self.mesh.with_transports(lambda transport, _: transport.unrecorded)
        arguments = self.kind, self.local_shards, self.tensor_parallel, self.storage
        twin = memo[id(self)] = FlatParamHandle(self.layout, mesh, *arguments)
        twin.kind = self.kind.of_a_copy(memo)  # only now: it may copy the module, which has this handle
        params = [copy.deepcopy(sharded, memo) for sharded in self.sharded_params]
        twin.hold(params, GradientHooks(params, owner=twin))
        twin.set_shard(twin.flatten())
        return twin

    def set_shard(self, shard: torch.Tensor) -> None:
        """Adopt ``shard``, of which the sharded parameters already are views, and build the rest."""
        self.shard = shard
        self.unsharded, self.gradient = self._build(shard)
        self.pending_gradients.dtype = self.kind.reduction_dtype(self.kind.codec.dtype_of(shard))
        self.pending_gradients.reduction = None
        self.unsharded.take_attributes(self.sharded_params)
        self.snapshot = Snapshot(self.sharded_params)
        self.follow_requires_grad()

    def _build(self, shard: torch.Tensor) -> tuple[Unsharded, ShardedGradient]:
        kind, codec, layout = self.kind, self.kind.codec, self.layout
        dtype = codec.dtype_of(shard)
        compute = kind.compute_dtype(dtype)
        if codec.gathered_by is not None:
            from ...plugins.parameter_classes import ExtendedUnsharded, ExtensionCodec

            assert isinstance(codec, ExtensionCodec)
            unsharded: Unsharded = ExtendedUnsharded(codec, shard, layout, self.mesh, compute, self.label)
        else:
            own = self.tensor_parallel
            unsharded = self.storage.unsharded(shard, layout, self.mesh, compute, self.label, own)
        described = (self.sharded_params, self.local_shards, self.segments)
        numel, gradient_dtype = layout.shard_numel, kind.gradient_dtype(dtype)
        memory = self.storage.gradient_memory(shard.device, *described, numel, gradient_dtype)
        return unsharded, self.storage.gradient(memory, self.hooks, self.mesh.is_replicated)

    def call_parameters(self, names: Names, whole_group: str) -> None:
        """Name the parameters: ``names`` turns names in the group into names in the root, ``whole_group`` is as in
        ``Label``."""
        if (names, whole_group) != (self.label.names, self.label.whole_group):
            self.label.rename(names, whole_group)
            self.unsharded.memory.rename(error_of_late_access(self.mesh.rank, self.label))

    def change_transports(self, change: Callable[[Transport, TransportRole], Transport]) -> None:
        """Replace each transport of shards and gradients by ``change(transport, role)``, from the next collective on.
        Ranks: all, between iterations."""
        self.run_on(self.mesh.with_transports(change))
        if self.tensor_parallel is not None:
            self.tensor_parallel.change_transports(change)

    def transport_names(self) -> dict[str, dict[str, str]]:
        """A fact that must be the same on every rank: how tensors move."""
        names = self.mesh.transport_names()
        if self.tensor_parallel is not None:
            names |= self.tensor_parallel.transport_names()
        return {"transports": names}

    def run_on(self, mesh: DataParallelMesh) -> None:
        """Switch to ``mesh``, which has the same ranks."""
        if mesh is not self.mesh:
            self.mesh = mesh
            self.unsharded.gather_on(mesh)
            self.pending_gradients.reduction = None  # it knows the mesh

    @property
    def tensor_parallel(self) -> TensorParallel | None:
        """How the parameters are placed on meshes of their own; ``None`` if none of them was a DTensor."""
        return self.pending_gradients.tensor_parallel

    @property
    def fqns(self) -> list[str]:
        """The parameters' names, relative to the module given to ``fully_shard``."""
        return [param.fqn for param in self.layout.params]

    def name_of(self, index: int) -> str:
        """A parameter's name, relative to the root."""
        return self.label.names(self.layout.params[index].fqn)

    @property
    def names(self) -> list[str]:
        """The parameters' names, relative to the root."""
        return [self.label.names(param.fqn) for param in self.layout.params]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a tensor with the shard's elements, such as the flat gradient, with the shapes of the local
        shards."""
        return local_views(flat, self.local_shards)

    @property
    def shard_numel(self) -> int:
        """The length of a shard."""
        return self.kind.codec.shard_numel(self.layout)

    def locals_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Views of a shard: the local tensors of the sharded parameters."""
        return self.kind.codec.locals_of(shard, self.local_shards)

    def full_views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of ``flat``, a whole flat parameter, with the parameters' shapes."""
        return full_views(self.layout, flat)

    # ---- Checks for what the user may have done since the last iteration

    def was_moved(self) -> bool:
        """Whether a sharded parameter was given other memory (``module.to()``, ``to_empty()``, ``p.data = ...``)."""
        return not self.snapshot.has_locals() or not self.snapshot.has_addresses()

    def flatten(self) -> torch.Tensor:
        """Make a new shard from the current elements of the sharded parameters, which become views of it."""
        locals_ = [local_elements(sharded) for sharded in self.sharded_params]
        with torch.inference_mode(False), torch.no_grad():
            shard = self.storage.zeros(self.shard_numel, locals_[0].dtype, locals_[0].device)
            for sharded, view, local in zip(self.sharded_params, self.locals_of(shard), locals_, strict=True):
                view.copy_(local)
                rebind_sharded_param(sharded, view)
        return shard

    def was_toggled(self) -> bool:
        """Whether ``requires_grad`` of a sharded parameter differs from that of its unsharded parameter."""
        with PlainAttributes():
            return [*map(_requires_grad, self.sharded_params)] != self.unsharded.flags

    def follow_requires_grad(self) -> None:
        """Copy the sharded parameters' ``requires_grad`` to the unsharded parameters."""
        flags = [*map(_requires_grad, self.sharded_params)]
        if flags != self.unsharded.flags:
            _check_segments_agree(self.segments, flags, self.names)
            self.unsharded.set_flags(flags)
        self.pending_gradients.is_trainable = any(flags)

    def follow_unsharded_requires_grad(self) -> None:
        """Copy to the sharded parameters the ``requires_grad`` that forward has set on the unsharded ones."""
        flags = self.unsharded.present_flags()
        _check_segments_agree(self.segments, flags, self.names)
        for sharded, old, new in zip(self.sharded_params, self.unsharded.flags, flags, strict=True):
            if old != new:
                sharded.requires_grad_(new)
        self.unsharded.flags = flags
        # All ranks still reduce what they were going to reduce.
        self.pending_gradients.is_trainable |= any(flags)

    def refuse_late_methods(self) -> None:
        """Raise if methods of an all-gather were set on a sharded parameter's local tensor: ``fully_shard()`` alone
        looks for them."""
        for sharded, fqn in zip(self.sharded_params, self.fqns, strict=True):
            # FSDP2 looks for the method at each all-gather.
            if self.kind.codec.gathered_by is None and PRE in vars(local_elements(sharded)):
                raise MisuseRuntimeError(
                    f"{PRE} was set on the local tensor of {fqn} after fully_shard(), which would never call it: set "
                    "it on the parameter, or use a class that has it, before fully_shard()"
                )

    # ---- Gradients

    def _group(self) -> Owner | None:
        return self.owner() if self.owner is not None else None

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the group's root is running."""
        group = self._group()
        return group is not None and group.is_in_forward

    @property
    def is_functional(self) -> bool:
        """Whether forwards of the group gather in functional mode, or there is no group yet."""
        group = self._group()
        return group is None or group.is_functional

    def after_publication(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the gradients of the running backward are published; at once if no backward of the root is
        running."""
        group = self._group()
        if group is None:
            call()
        else:
            group.after_publication(call)

    def gather_parameter(self, index: int) -> torch.Tensor | None:
        """See ``GradientHooks.gather``. Ranks: all of the shard group."""
        group = self._group()
        return None if group is None else group.gather_parameter(self, index)

    def show_to_segments(self, sharded_params: Sequence[int]) -> None:
        """Call the hooks of flat views for gradients that reached some sharded parameters through autograd."""
        self.gradient.show_to_segments(sharded_params)

    def reduction_of(self, flat: torch.Tensor, buffer: ReduceBuffer | None = None) -> Reduction:
        """Make a reduction of ``flat``, a whole flat gradient; ``buffer`` is its memory, if that is pooled."""
        return self.storage.reduction(self.layout, self.mesh, self.gradient.dtype, flat, buffer)

    def follow_user(self) -> None:
        """Make sharded parameters and flat views agree, after the user or autograd has changed gradients of either."""
        self.pending_gradients.follow_zero_grad()
        self.gradient.follow_user()
        if self.pending_gradients.accumulation is not None:
            self.pending_gradients.accumulation.show()

    def drop_iteration(self, is_tainted: bool) -> None:
        """Drop the gradients of an interrupted iteration and, if it has ``is_tainted`` older ones, those too."""
        for param in self.unsharded.params:
            param.grad = None
        self.hooks.forget_arrivals()
        if is_tainted:
            self.gradient.discard()
        else:
            self.gradient.forget_result()
        self.pending_gradients.drop(has_accumulated=is_tainted)

    # ---- Facts

    def segment_version(self) -> int:
        """A number that changes when a flat view that is a DTensor is written to; the shard's version does not count
        such writes."""
        return sum([segment.parameter._version for segment in self.segments if not segment.is_local])

    @property
    def is_summoned_on_first_rank_only(self) -> bool:
        """Whether this is inside ``summon_full_params(rank0_only=True)``; the same on every rank."""
        return self.summoned is not None and not self.summoned.is_everywhere

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle({len(self.layout.params)} parameters, {self.layout.shard_numel} elements of "
            f"{self.shard.dtype} on each of {self.layout.world_size} ranks)"
        )


Owners = dict[int, tuple["weakref.ref[FlatParamHandle]", int]]


def _register(handle: FlatParamHandle, indexes: Mapping[int, int], owners: Owners) -> None:
    """Record ``handle`` as the owner of objects, by id and with their indices, for as long as it lives."""
    # The objects live longer, so no other object gets their ids meanwhile.
    reference = weakref.ref(handle)
    owners.update({key: (reference, index) for key, index in indexes.items()})
    weakref.finalize(handle, _forget, [*indexes], owners).atexit = False


def know_as(handle: FlatParamHandle, param: nn.Parameter, index: int) -> None:
    """Make ``handle_of(param)`` find ``handle``."""
    # By id, because a weak reference to a sharded parameter makes module.to() fail.
    sharded_param_owners[id(param)] = (weakref.ref(handle), index)


def forget(param: nn.Parameter) -> None:
    """Note that ``param`` no longer stands for a sharded parameter."""
    del sharded_param_owners[id(param)]


def _forget(ids: Iterable[int], owners: Owners) -> None:
    for key in ids:
        owner = owners.get(key)
        if owner is not None and owner[0]() is None:  # otherwise another handle owns it now
            del owners[key]


# The owning handle, and the index in it, by the id of a sharded parameter and by the id of a flat view. Plain dicts,
# because optimizers and clipping look up thousands of them.
sharded_param_owners: Owners = {}
segment_owners: Owners = {}


# ---- Which flat parameter a tensor belongs to, and what is stored on the tensors themselves


def handle_of(param: torch.Tensor) -> tuple[FlatParamHandle, int] | None:
    """Return the handle that holds a sharded parameter, and the parameter's index in it."""
    return find(sharded_param_owners, param)


def handle_of_segment(param: torch.Tensor) -> FlatParamHandle | None:
    """Return the handle that a flat view belongs to."""
    found = find(segment_owners, param)
    return None if found is None else found[0]


def find(owners: Owners, param: torch.Tensor) -> tuple[FlatParamHandle, int] | None:
    owner = owners.get(id(param))
    handle = owner[0]() if owner is not None else None
    return None if owner is None or handle is None else (handle, owner[1])


def check_grad_dtype(sharded: nn.Parameter, given: torch.Tensor) -> None:
    """Raise RuntimeError if ``take_over`` cannot take the ``grad_dtype`` that was set for ``given``."""
    place, wanted = handle_of(sharded), own_grad_dtype(given) if isinstance(given, nn.Parameter) else None
    if place is not None and wanted not in (None, place[0].gradient.dtype):
        raise MisuseRuntimeError(
            f"the parameter that was assigned to {place[0].name_of(place[1])} has grad_dtype {wanted}, but gradients "
            f"there are sharded in {place[0].gradient.dtype}: set grad_dtype before fully_shard()"
        )


def take_over(sharded: nn.Parameter, given: torch.Tensor) -> None:
    """Let a sharded parameter have all that a tensor has that would replace it: its elements (see ``take_content``);
    and if it is a parameter of no group, its hooks, attributes, and a gradient that is sharded likewise. Ranks: as
    ``take_content``."""
    place = handle_of(sharded)
    new = given if isinstance(given, nn.Parameter) and handle_of(given) is None else None
    if new is not None and place is not None:
        place[0].hooks.move_over(place[1], new)
    take_content(sharded, given)
    if place is not None:
        note_write_of_all_ranks(place[0].shard)  # for a backward whose forward is over
    if new is not None:
        if isinstance(new.grad, RaggedDTensor) and is_sharded_like(new.grad, sharded):
            sharded.grad = new.grad
        hidden = {*NOT_COPIED, OWNER_ATTRIBUTE}
        sharded.__dict__.update({key: value for key, value in new.__dict__.items() if key not in hidden})


def mark_owner(parameter: nn.Parameter, group: str, fqn: str) -> None:
    """Store on ``parameter`` which fully_shard call owns it, to recognize it elsewhere in the model."""
    setattr(parameter, OWNER_ATTRIBUTE, (group, fqn))


def owner_of(parameter: nn.Parameter) -> tuple[str, str] | None:
    return getattr(parameter, OWNER_ATTRIBUTE, None)


# ---- The flat views of one flat parameter: made once, checked before they are used


def segment_over(handle: FlatParamHandle, sharded_params: range, is_local: bool) -> FlatSegment | None:
    """Return the segment over exactly these sharded parameters, if there is one.

    Raises:
        ValueError: there is a segment with only some of them, or one with another value of ``is_local``.
    """
    for segment in handle.segments:
        shared = sorted({*segment.sharded_params} & {*sharded_params})
        if shared and (segment.sharded_params != sharded_params or segment.is_local != is_local):
            what = (
                "with other neighbors" if segment.sharded_params != sharded_params else f"with local={segment.is_local}"
            )
            raise MisuseError(
                f"flat_parameters(): the parameter {handle.name_of(shared[0])} is already in a flat view that an "
                f"earlier call has made, {what}. A parameter can be in only one flat view: let the selections "
                "(where=...) of your parameter groups exclude each other, and repeat them unchanged"
            )
        if shared:
            return segment
    if is_local and handle.storage.has_host_gradients and not handle.storage.is_host:
        raise MisuseError(
            f"flat_parameters(local=True): gradients of {handle.name_of(sharded_params[0])} are in host memory, but "
            "the parameter is on the device (CPUOffloadPolicy(parameters=False)): torch does not allow such a "
            "gradient on a plain tensor. Leave local out"
        )
    return None


def _check_segments_agree(segments: Sequence[FlatSegment], flags: Sequence[bool], names: Sequence[str]) -> None:
    """Raise ValueError if ``requires_grad`` differs within a flat view."""
    for segment in segments:
        those = {
            flag: names[i]
            for i, flag in zip(segment.sharded_params, flags[segment.sharded_params.start :], strict=False)
        }
        if len(those) > 1:
            raise MisuseError(
                f"requires_grad of {those[False]} is now False and that of {those[True]} is True, but "
                "flat_parameters() has put both into one flat view, which an optimizer updates as a whole: freeze "
                "parameters before flat_parameters(), or put the two into separate selections (where=...)"
            )


def add_segment(handle: FlatParamHandle, sharded_params: range, is_local: bool, among_cut: bool = False) -> FlatSegment:
    """Make a segment over sharded parameters that are in no other segment. Unless ``is_local``, tensor parallelism must
    split all of them in the same way. ``among_cut``: tensor parallelism splits some parameters of the model."""
    from .flat_views import FlatSegment

    own = None if is_local else handle.tensor_parallel
    cut = () if own is None else own.sharded_dims(sharded_params[0])
    segment = FlatSegment(handle.layout, handle.mesh, sharded_params, is_local, handle.shard, cut, among_cut)
    handle.segments.append(segment)
    handle.hooks.listen_to_all()
    handle.gradient.attach(segment)
    _register(handle, {id(segment.parameter): segment.sharded_params.start}, segment_owners)
    return segment


def check_segments(handle: FlatParamHandle) -> None:
    """Raise RuntimeError if a step of the flat views would be lost, because the sharded parameters, or the flat views
    themselves, were given other memory."""
    if not handle.snapshot.has_locals():
        raise MisuseRuntimeError(
            f"the parameters of {handle.label.group} were moved, converted or assigned to since the last forward. Flat "
            "views follow only at the next forward: run one before the optimizer's step"
        )
    if not all(segment.is_at(handle.shard, segment.parameter) for segment in handle.segments):
        raise MisuseRuntimeError(
            f".data of a flat view over {handle.name_of(0)} and its neighbors was assigned to, so it is no longer "
            "part of the model: use copy_() on it instead"
        )


# ---- The whole of one flat tensor, in memory of its own


def wholes_of(handle: FlatParamHandle, flat: torch.Tensor) -> list[torch.Tensor]:
    """The whole parameters in ``flat``, a whole flat parameter: see ``ParameterCodec.wholes_of``."""
    return handle.kind.codec.wholes_of(flat, handle.layout)


def gather_flat(handle: FlatParamHandle, shard: torch.Tensor, rank0_only: bool, to_cpu: bool) -> torch.Tensor | None:
    """Gather a flat tensor that is sharded like the flat parameter of ``handle``, from this rank's ``shard``; ``None``
    on ranks that do not want it. One collective. If only one rank wants it, only the first replica gathers."""
    mesh, numel, shard_bytes = handle.mesh, shard.numel(), shard.element_size()
    if rank0_only and not mesh.is_first_replica:
        if mesh.shard_world_size > 1 and numel:
            mesh.transport.skip(numel * mesh.shard_world_size * shard_bytes, handle.label)
        return None
    with torch.no_grad():
        shard = handle.storage.on_device(shard)
        flat = None
        if not rank0_only or mesh.shard_rank == 0:
            flat = shard.new_empty(numel * mesh.shard_world_size)
        if mesh.shard_world_size > 1 and numel:
            ranges = [(rank * numel, rank * numel + numel) for rank in range(mesh.shard_world_size)]
            mesh.transport.gather(flat, shard, ranges, not rank0_only, handle.label)
        elif flat is not None:
            flat.copy_(shard)
        return flat.cpu() if flat is not None and to_cpu else flat
