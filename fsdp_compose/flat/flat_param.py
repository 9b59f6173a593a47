"""One flat parameter: its shard, its unsharded buffer, and the two faces of every parameter in it.

A ``FlatParamHandle`` owns all tensors of the parameters of one group that share (dtype, requires_grad), builds every
view of them once, and knows nothing about modules, hooks or when things happen::

    shard       |a a a|a b b|            this rank's equal slice, original dtype, always resident
                   |                     faces: leaf nn.Parameters over the runs, what optimizers see
                   v  (cast +) all-gather
    unsharded   |a a a a|b b|-|c c c|-|  compute dtype; storage exists between unshard and reshard only
                                         unsharded parameters: leaf nn.Parameters, what ``forward`` computes with

Note [Version counters]. The unsharded parameters have a version counter of their own, not that of what an all-gather
writes to: so refilling the memory never looks to autograd like an edit of a saved tensor, and an edit that ``forward``
makes on one of them is seen as a change of ``unsharded_version``. The faces share the version counter of ``shard``: an
optimizer step between forward and backward is seen as a change of ``shard._version``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

from .._torch import PlainAttributes
from ..comm import DataParallelMesh, wire
from ..ragged import OWNER_ATTRIBUTE, hook_owners, note_write_of_all_ranks, writes
from .accumulation import Accumulation
from .gradient import ShardedGradient
from .gradient_view import FlatSegment
from .hooks import GradientHooks
from .layout import FlatLayout, Granule, ParamSpec, plan_layout
from .policy import MixedPrecisionPolicy
from .sharded_param import (
    copy_attributes,
    dress,
    face_local,
    face_memory,
    face_spec,
    face_whole,
    make_face,
    rebind_face,
)
from .subclasses import plain_tensor
from .unsharded import UnshardedMemory

SHARD_ALIGNMENT_BYTES = 16  # cuBLAS and NCCL both need it; all-gathers that miss it lose up to 12x of their bandwidth

_grad, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")

Granularity = Callable[[str, nn.Parameter], "Granule | None"]


@dataclass
class ManagedParameter:
    """A parameter of a group, with every place in the module tree where it stands."""

    fqn: str
    parameter: nn.Parameter
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)


class Summoned(Protocol):
    """What stands in the place of the faces within ``summon_full_params``."""

    @property
    def is_everywhere(self) -> bool:
        """Whether there are full parameters on every rank."""


class FlatParamHandle:
    """The flat parameter over ``managed`` parameters of one dtype and one ``requires_grad``.

    Building one copies this rank's elements and changes nothing in the module; see ``fully_shard``.

    Attributes:
        fqns: names, relative to the module given to ``fully_shard``.
        layout: where each parameter is.
        faces: the sharded faces, by parameter; the same objects for ever.
        unsharded_params: the unsharded faces, by parameter; usable while ``is_unsharded``.
        gradient: the flat gradient.
        segments: the parameters that ``flat_parameters()`` has made over the shard.
        memory: of the unsharded flat parameter.
        flags: ``requires_grad`` of each unsharded parameter.
        storage: what the unsharded parameters are views of.
        is_unsharded: the unsharded memory exists (its all-gather may still be in flight).
        is_resident: there is nothing to gather, the unsharded parameters always exist.
        is_pinned: must not be resharded: resident, or its module's outputs cannot be hooked.
        accumulation: the gradients of backwards without gradient sync, until they are reduced.
        outside_grads: whole gradients, by parameter, of uses outside the group's forward, until they are reduced.
        is_used: for each parameter, 1 if it has contributed to the gradient that is reduced next; a part of the
            control exchange's memory, which all ranks combine.
    """

    __slots__ = (
        "__weakref__", "_face_locals", "_face_memory", "_index_of", "_mp_policy", "_no_grads", "accumulation",
        "all_gather_work", "all_used", "awaits_publication", "cast_shard", "face_ids", "faces", "flags", "fqns",
        "gather_wires", "gathered_segments", "gathered_version", "gathered_writes", "gradient", "group", "hooks",
        "is_kept", "is_meta", "is_pinned", "is_reduce_added", "is_resident", "is_trainable", "is_unsharded", "is_used",
        "layout", "memory", "mesh", "none_used", "outside_grads", "param_dtype", "prefix",
        "reduce_dtype", "reduce_input", "reduce_output", "reduce_plan", "reduce_work", "runs", "segments", "shard",
        "storage", "summoned", "unsharded_base", "unsharded_params", "unsharded_version",
    )  # fmt: skip

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        granularity: Granularity | None = None,
    ) -> None:
        originals = [item.parameter for item in managed]
        self.fqns = [item.fqn for item in managed]
        self.prefix = ""  # what precedes these names in the root, once a root is known
        self.mesh = mesh
        self._mp_policy = mp_policy
        self.layout = _plan(managed, mesh, mp_policy, granularity)
        dtype = originals[0].dtype
        specs = [face_spec(self.layout, i, mesh.mesh, dtype) for i in range(len(managed))]
        self.runs = _runs(self.layout, mesh.shard_rank, [spec.local_shape for spec in specs])
        self._begin()
        device = mesh.device if originals[0].device.type != "meta" else originals[0].device
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        with torch.no_grad():
            for original, placement, (start, stop, _) in zip(originals, self._runs_of_params(), self.runs, strict=True):
                if stop > start:
                    shard[start:stop].copy_(plain_tensor(original).reshape(-1)[placement : placement + stop - start])
        self.faces: list[nn.Parameter] = []
        with torch.inference_mode(False), torch.no_grad():
            for original, local, spec in zip(originals, self._views_of(shard), specs, strict=True):
                self.faces.append(make_face(local, original, spec))
        self._know_faces()
        self.hooks = GradientHooks(self.faces, owner=self)
        for i, original in enumerate(originals):
            self.hooks.move_over(i, original)
        self._adopt(shard)

    @classmethod
    def over_faces(
        cls,
        managed: Sequence[ManagedParameter],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        granularity: Granularity | None = None,
    ) -> FlatParamHandle:
        """A handle over parameters that are sharded already, by other handles, whose place it takes.

        Ranks: all ranks of the mesh; each parameter is all-gathered once.
        """
        self = object.__new__(cls)
        self.fqns, self.prefix, self.mesh, self._mp_policy = [item.fqn for item in managed], "", mesh, mp_policy
        self.layout = _plan(managed, mesh, mp_policy, granularity)
        self.faces = [item.parameter for item in managed]
        dtype, device = self.faces[0].dtype, face_local(self.faces[0]).device
        specs = [face_spec(self.layout, i, mesh.mesh, dtype) for i in range(len(managed))]
        self.runs = _runs(self.layout, mesh.shard_rank, [spec.local_shape for spec in specs])
        self._begin()
        with torch.inference_mode(False), torch.no_grad():
            shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
            starts = self._runs_of_params()
            for face, local, spec, first in zip(self.faces, self._views_of(shard), specs, starts, strict=True):
                if device.type != "meta":
                    whole = face_whole(face)
                    local.copy_(whole.reshape(-1)[first : first + local.numel()].view(local.shape))
                rebind_face(face, local, spec)
        self.hooks = GradientHooks(self.faces, [hook_owners.get(id(face)) for face in self.faces], owner=self)
        self._know_faces()
        self._adopt(shard)
        return self

    # ---- building

    def _begin(self) -> None:
        """Nothing has run yet."""
        self.group: Any = None  # a weak reference to the state of the group
        self.is_unsharded = False
        self.is_kept = False  # left unsharded by a forward (not by a prefetch): stale at the next forward
        self.awaits_publication = False  # reduced in this backward, not yet shown to the user
        self.segments: list[FlatSegment] = []
        self.summoned: Summoned | None = None  # while full parameters stand in the place of the faces
        self.all_gather_work: dist.Work | None = None
        # When the last all-gather was issued: the versions of what it read, and the writes of all ranks.
        self.gathered_version = self.gathered_segments = self.gathered_writes = 0
        self.accumulation: Accumulation | None = None  # of backwards without gradient sync
        self.outside_grads: dict[int, torch.Tensor] = {}  # by parameter; see outside_use
        num_params = len(self.fqns)
        self.is_used: bytearray | memoryview = bytearray(num_params)
        self.all_used, self.none_used = b"\x01" * num_params, bytes(num_params)
        self._no_grads = [None] * num_params
        # A reduction in flight: its work, where the result arrives, the memory it reads, and whether it is added.
        self.reduce_work: dist.Work | None = None
        self.reduce_output: torch.Tensor | None = None
        self.reduce_input: Any = None
        self.is_reduce_added = False
        self.reduce_plan: Any = None  # made and used by collectives

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParamHandle:
        """A handle of its own, over copies of the faces: those that ``memo`` has, which modules show."""
        twin = object.__new__(FlatParamHandle)
        memo[id(self)] = twin
        twin.fqns, twin.prefix, twin.mesh, twin._mp_policy = self.fqns, "", self.mesh, self._mp_policy
        twin.layout, twin.runs = self.layout, self.runs
        twin._begin()
        twin.faces = [copy.deepcopy(face, memo) for face in self.faces]
        twin._know_faces()
        twin.hooks = GradientHooks(twin.faces, owner=twin)
        twin._adopt(twin._flatten_faces())
        return twin

    def _adopt(self, shard: torch.Tensor) -> None:
        """Make ``shard``, of which the faces are views already, this handle's shard; build the unsharded side."""
        rank, numel = self.mesh.shard_rank, self.layout.shard_numel
        self.shard = shard
        self.gradient = ShardedGradient(self.faces, self.runs, shard, self.hooks, self.segments)
        self.param_dtype = self._mp_policy.compute_dtype(shard.dtype)
        self.reduce_dtype = self._mp_policy.reduction_dtype(shard.dtype)
        self.is_meta = shard.device.type == "meta"
        # One rank and no cast: nothing to gather, both faces share the shard's memory.
        is_trivial = self.mesh.shard_world_size == 1 and self.param_dtype == shard.dtype
        self.is_resident = is_trivial or numel == 0
        with torch.inference_mode(False), torch.no_grad():
            flat = shard
            if not self.is_resident:
                flat = torch.empty(self.layout.flat_numel, dtype=self.param_dtype, device=shard.device)
            # Without a cast the collective reads the shard itself, else its cast in the buffer (in place).
            own_slice = flat[rank * numel : (rank + 1) * numel]
            is_cast = self.param_dtype != shard.dtype or self.mesh.shard_world_size == 1
            self.cast_shard = own_slice if is_cast else None
            self.gather_wires = (wire(flat), wire(own_slice if is_cast else shard))
            may_free = not (self.is_resident or self.is_meta)
            self.memory = UnshardedMemory(flat, self._error_of_late_access() if may_free else None)
            self.memory.show()
            self.unsharded_base, self.storage = self.memory.shown, self.memory.storage  # Note [Version counters]
            self.unsharded_params = [nn.Parameter(view, requires_grad=False) for view in self._full_views()]
        for face, unsharded in zip(self.faces, self.unsharded_params, strict=True):
            dress(face, unsharded)
        self.unsharded_version = self.unsharded_base._version
        self._face_memory = face_memory(self.faces)
        self._face_locals = [*map(face_local, self.faces)]
        self.flags: list[bool] = [False] * len(self.faces)
        self.is_trainable = False
        self.follow_requires_grad()
        self.reduce_plan = None
        self.is_unsharded = self.is_pinned = self.is_resident
        self.is_kept = False
        if may_free:
            self.memory.free()

    def set_prefix(self, prefix: str) -> None:
        """``prefix`` precedes the parameters' names in the root."""
        if prefix != self.prefix:
            self.prefix = prefix
            self.memory.rename(self._error_of_late_access())

    def _error_of_late_access(self) -> str:
        others = f" and {len(self.fqns) - 1} more" if len(self.fqns) > 1 else ""
        return (
            f"rank {self.mesh.shard_rank}: the unsharded {self.prefix}{self.fqns[0]}{others} of a fully_shard group "
            "were used while they are sharded. A parameter that was kept in forward (as an attribute, in a list, by a "
            "hook) must be cloned there; and every tensor that a loss is computed from must be returned by forward, or "
            "kept as an attribute of its module"
        )

    def _know_faces(self) -> None:
        self.face_ids = [*map(id, self.faces)]
        self._index_of = {key: i for i, key in enumerate(self.face_ids)}
        _register(self, self.face_ids, face_owners)

    def know_as(self, param: nn.Parameter, index: int) -> None:
        """Let ``handle_of(param)`` find this handle. By id: a weak reference to a face makes ``module.to()`` fail."""
        self._index_of[id(param)] = index
        face_owners[id(param)] = weakref.ref(self)

    def forget(self, param: nn.Parameter) -> None:
        """``param`` no longer stands for one of the faces."""
        del self._index_of[id(param)], face_owners[id(param)]

    def index_of(self, param: torch.Tensor) -> int:
        return self._index_of[id(param)]

    def _runs_of_params(self) -> list[int]:
        return [self.layout.run(i, self.mesh.shard_rank).param_start for i in range(len(self.fqns))]

    def _views_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        return [shard[start:stop].view(shape) for start, stop, shape in self.runs]

    def _full_views(self) -> list[torch.Tensor]:
        return self.full_views_of(self.unsharded_base)

    def full_views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of ``flat``, a whole flat parameter, with the parameters' shapes."""
        return [flat[p.offset : p.offset + p.numel].view(p.shape) for p in self.layout.params]

    # ---- what the user may have done since the last iteration

    def faces_moved(self) -> bool:
        """Whether somebody gave a face other memory (``module.to()``, ``to_empty()``, ``p.data = ...``)."""
        if not all(map(is_, map(face_local, self.faces), self._face_locals)):
            return True  # also where this rank has no elements, which have no address
        return face_memory(self.faces) != self._face_memory

    def reflatten(self) -> None:
        """Take the faces' present elements, wherever they are, into a new shard.

        Raises:
            ValueError: the faces no longer agree on dtype or device, or one has another shape.
        """
        locals_ = [face_local(face) for face in self.faces]
        first = f"{self.prefix}{self.fqns[0]}"
        for fqn, local, (_, _, shape) in zip(self.fqns, locals_, self.runs, strict=True):
            if (local.dtype, local.device) != (locals_[0].dtype, locals_[0].device):
                raise ValueError(
                    f"the parameters of one fully_shard group no longer agree: {self.prefix}{fqn} is {local.dtype} on "
                    f"{local.device}, {first} is {locals_[0].dtype} on {locals_[0].device}; convert or move "
                    "the whole sharded module, or shard the part that differs by its own fully_shard() call"
                )
            if tuple(local.shape) != tuple(shape):
                raise ValueError(
                    f"the sharded parameter {self.prefix}{fqn} was given data of shape {tuple(local.shape)} on rank "
                    f"{self.mesh.shard_rank}, where its shard has shape {tuple(shape)}: assign data of that shape"
                )
        device = locals_[0].device
        if device.type not in ("meta", self.mesh.device.type):
            raise ValueError(
                f"the sharded parameter {first} was moved to {device}, but its mesh is on "
                f"{self.mesh.device}; move it back before the next forward"
            )
        self.gradient.detach_segments()
        shard = self._flatten_faces()
        # One that no shard had before.
        note_write_of_all_ranks((shard,) * max(self.shard._version + 1 - shard._version, 1))
        for segment in self.segments:
            segment.rebind(shard)
        for face, unsharded in zip(self.faces, self.unsharded_params, strict=True):
            copy_attributes(unsharded, face)  # module.to() loses them
        self.hooks.listen_again()
        was_unsharded = self.is_unsharded
        self._adopt(shard)
        if was_unsharded and not self.is_resident and not self.is_meta:
            self.memory.allocate()  # to be gathered again when the other ranks do
            self.is_unsharded = True

    def _flatten_faces(self) -> torch.Tensor:
        """A new shard with the faces' present elements, of which the faces are views from now on."""
        locals_ = [face_local(face) for face in self.faces]
        with torch.inference_mode(False), torch.no_grad():
            shard = torch.zeros(self.layout.shard_numel, dtype=locals_[0].dtype, device=locals_[0].device)
            for face, view, local in zip(self.faces, self._views_of(shard), locals_, strict=True):
                view.copy_(local)
                rebind_face(face, view)
        return shard

    def was_toggled(self) -> bool:
        """Whether ``requires_grad`` of a face differs from that of its unsharded parameter."""
        with PlainAttributes():
            return [*map(_requires_grad, self.faces)] != self.flags

    def follow_requires_grad(self) -> None:
        """Give the unsharded parameters the ``requires_grad`` that the faces have now."""
        flags = [*map(_requires_grad, self.faces)]
        if flags != self.flags:
            self._check_segments_agree(flags)
            for unsharded, flag in zip(self.unsharded_params, flags, strict=True):
                unsharded.requires_grad_(flag)
            self.flags = flags
        self.is_trainable = any(flags)

    def was_toggled_unsharded(self) -> bool:
        """Whether forward has set ``requires_grad`` of an unsharded parameter."""
        return [*map(_requires_grad, self.unsharded_params)] != self.flags

    def follow_unsharded_requires_grad(self) -> None:
        """Give the faces the ``requires_grad`` that the unsharded parameters have got in forward."""
        flags = [*map(_requires_grad, self.unsharded_params)]
        self._check_segments_agree(flags)
        for face, old, new in zip(self.faces, self.flags, flags, strict=True):
            if old != new:
                face.requires_grad_(new)
        self.flags = flags
        self.is_trainable |= any(flags)  # all ranks still reduce what they were about to

    def after_publication(self, call: Callable[[], None]) -> None:
        """Make ``call`` when the gradients of the backward that is running are published; now if no backward of the
        group's root is running."""
        state = self.group()
        root = None if state is None else state.root
        if root is not None and root.is_in_backward:
            root.after_publication.append(call)
        else:
            call()

    def write_used_to(self, memory: memoryview) -> None:
        """From now on note there which parameters were used."""
        memory[:] = self.is_used
        self.is_used = memory
        if self.accumulation is not None:
            self.accumulation.is_used = memory

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients that were taken from the unsharded parameters to what was accumulated before."""
        if self.accumulation is None:
            with torch.inference_mode(False), torch.no_grad():
                flat = torch.zeros(self.layout.flat_numel, dtype=self.reduce_dtype, device=self.shard.device)
            names = [self.prefix + fqn for fqn in self.fqns]
            views = self.full_views_of(flat)
            self.accumulation = Accumulation(flat, views, self.faces, names, self.is_used, self.mesh.mesh)
            for segment in self.segments:
                self.accumulation.shows_at(segment.parameter, segment.faces)
        self.accumulation.add(grads)

    def settle_accumulation(self) -> None:
        """Take into account that the user may have dropped gradients that were accumulated without sync."""
        if self.accumulation is not None and not self.accumulation.settle():
            self.accumulation = None

    def follow_user(self) -> None:
        """Make faces and flat parameters agree after what the user, or autograd, did to the gradients of either."""
        self.settle_accumulation()
        self.gradient.follow_user()
        if self.accumulation is not None:
            self.accumulation.show()

    def _check_segments_agree(self, flags: list[bool]) -> None:
        for segment in self.segments:
            those = {flag: self.fqns[i] for i, flag in zip(segment.faces, flags[segment.faces.start :], strict=False)}
            if len(those) > 1:
                raise ValueError(
                    f"requires_grad of {self.prefix}{those[False]} is now False and that of {self.prefix}{those[True]} "
                    "is True, but flat_parameters() has put both into one flat parameter, which an optimizer moves as "
                    "a whole: freeze parameters before flat_parameters(), or make two selections of them (where=...)"
                )

    # ---- flat parameters

    def segment_over(self, faces: range, is_local: bool) -> FlatSegment | None:
        """The segment over exactly these faces, if there is one.

        Raises:
            ValueError: there is one that has some of them, or one of the other kind.
        """
        for segment in self.segments:
            shared = sorted({*segment.faces} & {*faces})
            if shared and (segment.faces != faces or segment.is_local != is_local):
                what = "with other neighbours" if segment.faces != faces else f"with local={segment.is_local}"
                raise ValueError(
                    f"flat_parameters(): the parameter {self.prefix}{self.fqns[shared[0]]} is already in a flat "
                    f"parameter that an earlier call has made, {what}. A parameter is in one flat parameter: let the "
                    "selections (where=...) of your parameter groups exclude each other, and repeat them unchanged"
                )
            if shared:
                return segment
        return None

    def add_segment(self, faces: range, is_local: bool) -> FlatSegment:
        """A new segment, over faces of which none is in another one."""
        mesh = self.mesh
        segment = FlatSegment(self.layout, mesh.mesh, mesh.shard_rank, faces, is_local, self.shard)
        self.segments.append(segment)
        self.hooks.listen_to_all()
        self.gradient.attach(segment)
        _register(self, (id(segment.parameter),), segment_owners)
        return segment

    def check_segments(self) -> None:
        """Raise RuntimeError if a step of the flat parameters would be lost: somebody has given the faces, or the flat
        parameters themselves, other memory."""
        if not all(map(is_, map(face_local, self.faces), self._face_locals)):
            raise RuntimeError(
                f"the parameters of the fully_shard group with {self.prefix}{self.fqns[0]} were moved, converted or "
                "assigned to since the last forward, and flat parameters follow at the next one: run a forward before "
                "the optimizer's step"
            )
        if not all(segment.is_at(self.shard, segment.parameter) for segment in self.segments):
            raise RuntimeError(
                f".data of a flat parameter over {self.prefix}{self.fqns[0]} and its neighbours was assigned to, so "
                "that it is no part of the model any more: copy_() into it instead"
            )

    def drop_iteration(self, is_tainted: bool) -> None:
        """Forget the gradients of an interrupted iteration; if it had ``is_tainted`` older ones, these too."""
        for param in self.unsharded_params:
            param.grad = None
        self.outside_grads = {}
        self.awaits_publication = False
        self.hooks.forget_arrivals()
        if is_tainted:
            self.gradient.discard()
            self.accumulation = None
        else:
            self.gradient.forget_result()
        if self.accumulation is None:
            self.is_used[:] = self.none_used

    # ---- gathered copies and edits; see ``edits``

    def note_gathered_segments(self) -> None:
        """An all-gather is about to be issued, of flat parameters as they are now."""
        self.gathered_segments = self._segment_version()

    def is_stale(self) -> bool:
        """Whether the ranks have written to the sharded parameters since these were gathered. The same on all ranks.

        Raises:
            RuntimeError: this rank has, by itself.
        """
        if self.shard._version == self.gathered_version and not self.segments:
            return False
        if self.is_resident:
            return False
        if self.segments and self._segment_version() != self.gathered_segments:
            return True
        if self.shard._version == self.gathered_version:
            return False
        if self.gathered_writes != writes.count:
            return True
        names = ", ".join(self.prefix + fqn for fqn in self.fqns)
        raise RuntimeError(
            f"rank {self.mesh.shard_rank}: a sharded parameter was written to through its local memory (to_local(), or "
            "a flat parameter made with local=True) after it had been gathered, which other ranks cannot know, so that "
            f"what was gathered would be used with old values. It is one of {names}. Write to the sharded parameter "
            "itself, under torch.no_grad(); or outside forward, where no keep_unsharded() keeps what was gathered (the "
            "group that comes next in a forward is gathered ahead)"
        )

    def was_written_since_gather(self) -> bool:
        """Whether this rank has seen a write to its shard since then."""
        if self.segments and self._segment_version() != self.gathered_segments:
            return True
        return self.shard._version != self.gathered_version

    def _segment_version(self) -> int:
        """Changes when a flat parameter that is a DTensor is written to, which does not count at the shard."""
        return sum([segment.parameter._version for segment in self.segments if not segment.is_local])

    # ---- facts

    @property
    def is_summoned_on_first_rank_only(self) -> bool:
        """Whether this is inside ``summon_full_params(rank0_only=True)``; the same on every rank."""
        return self.summoned is not None and not self.summoned.is_everywhere

    def unsharded_nbytes(self) -> int:
        """What the unsharded flat parameter takes now."""
        return self.memory.nbytes()

    def was_edited_unsharded(self) -> bool:
        """Whether somebody wrote to an unsharded parameter since it was unsharded; such an edit would be lost."""
        return self.unsharded_base._version != self.unsharded_version

    def forgive_unsharded_edit(self) -> None:
        self.unsharded_version = self.unsharded_base._version

    def add_outside(self, index: int, grad: torch.Tensor) -> None:
        """Keep the gradient of a use outside the group's forward until the group is reduced."""
        present = self.outside_grads.get(index)
        self.outside_grads[index] = grad if present is None else present + grad

    def has_unsharded_grad(self) -> bool:
        """Whether autograd has left a gradient on an unsharded parameter, not taken yet."""
        return [*map(_grad, self.unsharded_params)] != self._no_grads  # "==" looks at identities first

    def describe(self) -> list[dict[str, Any]]:
        """The facts that must be the same on every rank: one for each parameter, then one for the whole."""
        facts: list[dict[str, Any]] = [
            {
                "parameter": self.prefix + placement.fqn,
                "shape": list(placement.shape),
                "dtype": str(self.shard.dtype),
                "compute dtype": str(self.param_dtype),
                "reduce dtype": str(self.reduce_dtype),
                "requires_grad": face.requires_grad,
            }
            for placement, face in zip(self.layout.params, self.faces, strict=True)
        ]
        offsets = [placement.offset for placement in self.layout.params]
        return [*facts, {"elements per rank": self.layout.shard_numel, "offsets": offsets}]

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle({len(self.fqns)} parameters, {self.layout.shard_numel} elements of {self.shard.dtype} "
            f"on each of {self.layout.world_size} ranks)"
        )


def _register(handle: FlatParamHandle, ids: Iterable[int], owners: dict[int, weakref.ref[FlatParamHandle]]) -> None:
    """Remember ``handle`` as the owner of objects with these ids, for as long as it lives (they live longer)."""
    owners.update(dict.fromkeys(ids, weakref.ref(handle)))
    weakref.finalize(handle, _forget, ids, owners).atexit = False


def _forget(ids: Iterable[int], owners: dict[int, weakref.ref[FlatParamHandle]]) -> None:
    for key in ids:
        owner = owners.get(key)
        if owner is not None and owner() is None:  # else another handle has taken it over
            del owners[key]


# By the id of a sharded parameter, and by that of a flat parameter, the handle that it belongs to. Plain dicts with
# plain look-ups: optimizers and clipping ask for thousands.
face_owners: dict[int, weakref.ref[FlatParamHandle]] = {}
segment_owners: dict[int, weakref.ref[FlatParamHandle]] = {}


def _plan(
    managed: Sequence[ManagedParameter],
    mesh: DataParallelMesh,
    mp_policy: MixedPrecisionPolicy,
    granularity: Granularity | None,
) -> FlatLayout:
    dtype = managed[0].parameter.dtype
    smallest = min(d.itemsize for d in (dtype, mp_policy.compute_dtype(dtype), mp_policy.reduction_dtype(dtype)))
    specs = []
    for item in managed:
        granule = granularity(item.fqn, item.parameter) if granularity is not None else None
        specs.append(ParamSpec(item.fqn, tuple(item.parameter.shape), granule))
    return plan_layout(specs, mesh.shard_world_size, max(1, SHARD_ALIGNMENT_BYTES // smallest))


def _runs(layout: FlatLayout, rank: int, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, int, tuple[int, ...]]]:
    runs = [layout.run(i, rank) for i in range(len(layout.params))]
    return [(run.shard_start, run.shard_start + run.numel, shape) for run, shape in zip(runs, shapes, strict=True)]


def handle_of(param: torch.Tensor) -> tuple[FlatParamHandle, int] | None:
    """The handle that holds a sharded parameter, and which of its parameters it is."""
    owner = face_owners.get(id(param))
    handle = owner() if owner is not None else None
    return None if handle is None else (handle, handle.index_of(param))


def note_write(face: nn.Parameter) -> None:
    """Let a backward whose forward came before know that ``face`` has got other elements, in memory of their own."""
    place = handle_of(face)
    if place is not None:
        note_write_of_all_ranks(place[0].shard)


def mark_owner(parameter: nn.Parameter, group: str, fqn: str) -> None:
    """Remember on ``parameter`` which fully_shard call owns it, to recognise it elsewhere in the model."""
    setattr(parameter, OWNER_ATTRIBUTE, (group, fqn))


def owner_of(parameter: nn.Parameter) -> tuple[str, str] | None:
    return getattr(parameter, OWNER_ATTRIBUTE, None)
