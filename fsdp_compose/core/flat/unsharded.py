"""The unsharded side of one flat parameter: its memory, its parameters, and the all-gather that fills it.

Its ``FlatParamHandle`` owns it; ``Communicator`` decides when it is gathered. Two storages take turns in holding one
piece of memory::

                       allocate()        show()           free()
    memory is in   -         ->   hidden   ->     shown     ->     -

    hidden   the storage that the all-gather writes to
    shown    the storage that the unsharded parameters view

So the parameters have elements only from the completion of their all-gather until they are resharded. At all other
times, ``shown`` refuses access: code that kept a parameter and reads it too late, or a backward that needs parameters
that no hook has gathered, gets a RuntimeError. Without that, freed memory would crash the process, and memory that an
all-gather is still filling would give wrong numbers. Showing and hiding only exchange two pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..._torch import PlainAttributes, memory_exchange, refuse_access, set_local_tensor
from ..comm import DataParallelMesh, Label, Transport, Work, streams_of
from ..ragged import writes
from .layout import FlatLayout, full_views
from .sharded_param import own_counter, restore_attributes

if TYPE_CHECKING:
    from ...plugins.tensor_parallel import TensorParallel

# ---- Input of an all-gather: the shards of all ranks, or the post-forward shards of a few
#
# Post-forward shards (``reshard_after_forward=int``): between forward and backward, a few adjacent ranks of the shard
# group hold the unsharded parameters together, each an equal shard, in the compute dtype. Backward gathers among these
# few ranks only. The idea is FSDP2's. That these shards outlive the backward, until a step, is the idea of hybrid
# sharding with optimizer state sharded over all ranks (HFSDP, Megatron-FSDP).


CopyIn = Callable[["torch.Tensor", "torch.Tensor"], None]
_Copies = tuple[list[Callable[[], object]], torch.Tensor]


class ShardSource:
    """The shards of all ranks.

    Args:
        shard: this rank's shard.
        flat: the output of the all-gather, which may have no memory now.
        mesh, label: those of the flat parameter.
        copy_in: copies a shard that is in host memory to the device, in its own dtype.
    """

    __slots__ = ("_copies", "_flat", "_is_local", "_label", "gather", "staging")

    def __init__(
        self, shard: torch.Tensor, flat: torch.Tensor, mesh: DataParallelMesh, label: Label, copy_in: CopyIn | None
    ) -> None:
        rank, numel, is_alone = mesh.shard_rank, shard.numel(), mesh.shard_world_size == 1
        own_slice = flat[rank * numel : (rank + 1) * numel]
        self.staging: torch.Tensor | None = None  # where a shard from the host waits to be cast; the caller allocates
        # What to do before the all-gather, and what it reads then. Without a cast that is the shard itself, else its
        # cast in the buffer (in place); a transport that rounds casts by itself.
        casts = own_slice.dtype != shard.dtype
        copies: _Copies = ([], shard)
        if copy_in is not None and not shard.is_meta:
            staging = own_slice
            if casts:
                staging = self.staging = torch.empty(numel, dtype=shard.dtype, device=own_slice.device)
                staging.untyped_storage().resize_(0)
            copies = ([partial(copy_in, staging, shard)], staging)
        self._copies = {False: copies, True: copies}
        if casts or (is_alone and copies[1] is shard):
            self._copies[True] = ([*copies[0], partial(own_slice.copy_, copies[1])], own_slice)
        # On an accelerator the work of a collective of one rank still orders the copy before compute.
        self._is_local = is_alone and streams_of(flat.device) is None
        self._flat, self._label = flat, label
        self.gather_by(mesh.transport)

    def gather_by(self, transport: Transport) -> None:
        """Move shards by this transport from now on."""
        before, source = self._copies[not transport.rounds or self._is_local]
        issue = _issue_nothing
        if not self._is_local:
            issue = transport.prepared_all_gather(self._flat, source, self._label)
        # Issues the all-gather on the current stream; returns its work, or None if it is complete. Not a bound method,
        # to avoid a cycle: nothing that holds a model's memory may be in one.
        self.gather: Callable[[], Work | None] = issue
        for copy in reversed(before):
            self.gather = partial(_in_turn, copy, self.gather)


def _in_turn(copy: Callable[[], object], issue: Callable[[], Any]) -> Any:
    copy()
    return issue()


def _issue_nothing() -> Any:
    """Does nothing: there is no other rank."""


class PostForwardShard:
    """This rank's post-forward shard of the flat parameter, which exists from ``keep`` to ``drop``.

    Args:
        flat: the output of all-gathers, which may have no memory now.
        transport: moves tensors among the ranks that have these shards.
        label: the parameters.
    """

    __slots__ = ("_arguments", "_memory", "_nbytes", "_range", "is_kept", "transport")

    def __init__(self, flat: torch.Tensor, transport: Transport, label: Label) -> None:
        rank, numel = transport.group.rank(), flat.numel() // transport.group.size()
        self._range, self.transport = slice(rank * numel, rank * numel + numel), transport
        self._memory = torch.empty(numel, dtype=flat.dtype, device=flat.device)
        self._nbytes = self._memory.nbytes
        self._arguments = (flat, self._memory, label)
        self.is_kept = True
        self.drop()

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated."""
        return self._nbytes if self.is_kept else 0

    def keep(self, shown: torch.Tensor) -> None:
        """Copy this rank's shard out of the complete unsharded flat parameter."""
        if not self.is_kept:
            self._memory.untyped_storage().resize_(self._nbytes)
            self.is_kept = True
        self._memory.copy_(shown[self._range])

    def gather(self) -> Work:
        """Issue the all-gather of these shards, on the current stream."""
        return self.transport.all_gather(*self._arguments)

    def drop(self) -> None:
        """Free it; no work that reads it is in flight."""
        if self.is_kept and self._memory.device.type != "meta":
            self._memory.untyped_storage().resize_(0)
        self.is_kept = False


# ---- The memory and the parameters


_grad, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")
_version_of = attrgetter("_version")


class UnshardedMemory:
    """The memory of ``flat``, which is new, and hidden at first. Call ``show`` before making views of ``shown``.

    Args:
        flat: the output of the all-gather; or, if there is nothing to gather, a tensor that always exists.
        error: the error for code that reads the parameters at the wrong time (only builds of torch with CUDA can raise
            it); ``None`` if reading is always allowed.
    """

    __slots__ = (
        "_exchange", "_hidden_storage", "_is_shown", "_nbytes", "allocate", "hidden", "is_guarded", "release", "shown",
        "storage",
    )  # fmt: skip

    def __init__(self, flat: torch.Tensor, error: str | None) -> None:
        self.hidden = flat  # as the all-gather writes it
        self._hidden_storage = flat.untyped_storage()
        self._nbytes = self._hidden_storage.nbytes()
        # Makes room for an all-gather.
        self.allocate: Callable[[], Any] = partial(self._hidden_storage.resize_, self._nbytes)
        self.release: Callable[[int], Any] = self._hidden_storage.resize_  # called with 0; does nothing if it is kept
        self.shown = torch.empty(0, dtype=flat.dtype, device=flat.device)  # as the unsharded parameters show it
        self.storage = self.shown.untyped_storage()
        # Access at the wrong time is refused; some versions of torch cannot do that.
        self.is_guarded = error is not None and refuse_access(self.storage, error)
        self._is_shown = not self.is_guarded
        self._exchange: Callable[[], Any] | None = None
        if self.is_guarded:
            self._exchange = memory_exchange(self.storage, self._hidden_storage)
            self.show()
            self.shown.set_(self.storage, 0, flat.shape, (1,))
            self.hide()
        else:
            self.shown, self.storage = flat.data, self._hidden_storage

    def rename(self, error: str) -> None:
        """Raise ``error`` from now on."""
        if not self._is_shown:
            refuse_access(self.storage, error)

    def show(self) -> None:
        """Allow reading the parameters: the all-gather is complete."""
        if not self._is_shown and self._exchange is not None:
            self._exchange()
            self._is_shown = True

    def hide(self) -> None:
        """Hide the parameters, before another all-gather into the same memory."""
        if self._is_shown and self._exchange is not None:
            self._exchange()
            self._is_shown = False

    def free(self) -> None:
        self.hide()
        self.release(0)

    def keep(self, keeps: bool, is_allocated: bool) -> None:
        """Keep the memory from now on, even while hidden, so its address stays the same; or no longer."""
        if keeps == (self.release is _keep):
            return
        resize = self._hidden_storage.resize_
        self.release = _keep if keeps else resize
        self.allocate = self._allocate_once if keeps else partial(resize, self._nbytes)
        if not (keeps or is_allocated):
            resize(0)

    def _allocate_once(self) -> None:
        if not self._hidden_storage.nbytes():
            self._hidden_storage.resize_(self._nbytes)  # even a resize to the same size would allocate other memory

    def nbytes(self) -> int:
        """The bytes that are allocated, shown or hidden."""
        return max(self.storage.nbytes(), self._hidden_storage.nbytes())


def _keep(_nbytes: int) -> None:
    """Replaces ``release`` while the memory is kept."""


Gathered = tuple[int, int, int]
"""The state that an all-gather has read: the version of the shard; that of flat views that are DTensors, whose writes
the shard's version does not count; and the number of writes by all ranks, as ``ragged`` counts them."""


class Unsharded:
    """The parameters that ``forward`` computes with.

    Args:
        shard: this rank's shard.
        layout, mesh: those of the flat parameter.
        dtype: the compute dtype.
        label: the parameters.
        tensor_parallel: for parameters that are DTensors inside forward too.
        copy_in: see ``ShardSource``.
    """

    __slots__ = (
        "_shard", "_source", "_unedited", "counters", "dtype", "flags", "follows_writes", "gathered", "is_allocated",
        "keep", "left_by_forward", "memory", "never_freed", "params", "post_forward", "work",
    )  # fmt: skip

    shows_shards = True  # shards are gathered, possibly cast, so each rank can compare its own with the result

    def __init__(
        self,
        shard: torch.Tensor,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        label: Label,
        tensor_parallel: TensorParallel | None = None,
        copy_in: CopyIn | None = None,
    ) -> None:
        self.dtype, self._shard = dtype, shard
        # One rank and no cast: nothing to gather, the sharded and the unsharded parameters share the shard's memory.
        is_same = copy_in is None and mesh.shard_world_size == 1 and dtype == shard.dtype
        self.never_freed = is_same or layout.shard_numel == 0  # the unsharded parameters always exist
        with torch.inference_mode(False), torch.no_grad():
            flat = shard
            if not self.never_freed:
                device = shard.device if copy_in is None or shard.is_meta else mesh.device
                flat = torch.empty(layout.flat_numel, dtype=dtype, device=device)
            self._source = ShardSource(shard, flat, mesh, label, copy_in)
            transport = None if self.never_freed else mesh.post_forward_transport
            # What may stay when the parameters are freed.
            self.post_forward = None if transport is None else PostForwardShard(flat, transport, label)
            may_free = not (self.never_freed or self.is_meta)
            self.memory = UnshardedMemory(flat, error_of_late_access(mesh.rank, label) if may_free else None)
            self.memory.show()
            views = full_views(layout, self.memory.shown)
            if tensor_parallel is None:
                params = [own_counter(view) for view in views]
            else:
                params = tensor_parallel.parameters(views)
        self._begin(params, [*params, self.memory.shown] if tensor_parallel else params, self.never_freed)
        if may_free:
            self.memory.free()

    def _begin(self, params: list[nn.Parameter], counters: Sequence[torch.Tensor], is_allocated: bool) -> None:
        """Set the parameters and their counters. Nothing is gathered yet."""
        self.params = params  # in the order of the layout; usable while is_allocated
        self.counters = counters  # tensors whose version counters show every write to params
        self.forgive_write()
        self.flags = [False] * len(params)  # the last requires_grad set on each
        self.gathered: Gathered = (0, 0, 0)  # by the last all-gather of shards
        self.work: Work | None = None  # the all-gather in flight
        self.is_allocated = is_allocated  # the memory exists (its all-gather may still be in flight)
        # It must not be freed: it never is, or the outputs of the group's module cannot be hooked.
        self.keep = is_allocated
        # A forward (not a prefetch) has left it allocated; the next forward gathers it again.
        self.left_by_forward = False
        self.follows_writes = False  # ... but only if the ranks have written since: a backward was told to leave it

    def take_attributes(self, sharded_params: Sequence[nn.Parameter]) -> None:
        """Let the parameters have the originals' attributes, and share them with the sharded parameters: forward and
        backward may set some."""
        for sharded, param in zip(sharded_params, self.params, strict=True):
            restore_attributes(sharded, param)

    # ---- Gathering

    def gather_on(self, mesh: DataParallelMesh) -> None:
        """Move shards, post-forward ones too, with the transports of ``mesh`` from now on."""
        self._source.gather_by(mesh.transport)
        if self.post_forward is not None:
            assert mesh.post_forward_transport is not None, "it has the same ranks"
            self.post_forward.transport = mesh.post_forward_transport

    def allocate(self) -> None:
        """Allocate memory, to be filled."""
        self.memory.allocate()
        self.is_allocated = True

    def gather(self, segments: int) -> None:
        """Issue the all-gather, on the current stream; allocates if there is no memory yet. ``segments``: see
        ``Gathered``."""
        if not self.is_allocated:
            self.memory.allocate()
            self.is_allocated = True
        self.gathered = self._shard._version, segments, writes.count
        if self.post_forward is not None:
            self.post_forward.drop()  # kept from an earlier all-gather
        self.work = self._source.gather()
        if self.work is None:
            self.memory.show()

    def gather_post_forward(self) -> None:
        """Like ``gather``, from the shards that stayed when the parameters were last freed."""
        assert self.post_forward is not None
        self.work = self.post_forward.gather()

    def hide(self) -> None:
        """Hide the parameters, before another all-gather into the same memory."""
        self.memory.hide()

    def arrive(self) -> None:
        """Called when the all-gather is complete."""
        self.work = None
        memory = self.memory  # hot path: repeats its methods inline
        if memory._exchange is not None and not memory._is_shown:
            memory._exchange()
            memory._is_shown = True

    def free(self) -> None:
        memory = self.memory
        if memory._is_shown and memory._exchange is not None:
            memory._exchange()
            memory._is_shown = False
        memory.release(0)
        self.is_allocated = self.left_by_forward = False

    def keep_post_forward(self) -> None:
        """Keep this rank's post-forward shard when the parameters, which are complete, are freed."""
        if self.post_forward is not None:
            with torch.no_grad():
                self.post_forward.keep(self.memory.shown)

    def drop_post_forward(self) -> None:
        if self.post_forward is not None:
            self.post_forward.drop()

    def be_left(self, is_left: bool, follows_writes: bool = False) -> None:
        """Note that a forward leaves this allocated, or that it was gathered again after one did."""
        self.left_by_forward, self.follows_writes = is_left, follows_writes

    def keep_storage(self, keeps: bool) -> None:
        """Keep the memory while the parameters are sharded, or stop keeping it."""
        if not (self.never_freed or self.is_meta):
            self.memory.keep(keeps, self.is_allocated)

    def keep_allocated(self, keep: bool) -> None:
        """Forbid freeing, or allow it again."""
        self.keep = keep or self.never_freed

    def was_written_since_gather(self, segments: int) -> bool:
        """Whether this rank has seen a write to its shard since the last all-gather."""
        return (self._shard._version, segments) != self.gathered[:2]

    def put_back(self, index: int, view: torch.Tensor) -> None:
        """Make a parameter that was given other memory a view of this memory again."""
        param = self.params[index]
        if isinstance(param, DTensor):
            set_local_tensor(param, view)
        else:
            param.data = view

    # ---- Facts

    @property
    def may_be_freed(self) -> bool:
        """Whether there is memory that resharding frees."""
        return self.is_allocated and not self.keep

    @property
    def bearers(self) -> Sequence[nn.Parameter]:
        """The parameters with the attributes that the user has set, which ``module.to()`` removes from sharded
        parameters."""
        return self.params

    @property
    def is_meta(self) -> bool:
        return self._shard.device.type == "meta"

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage that the unsharded parameters view."""
        return self.memory.storage

    def was_written(self) -> bool:
        """Whether an unsharded parameter was written to since it was gathered; such a write would be lost. See Note
        [Version counters]."""
        return self.versions() != self._unedited

    def forgive_write(self) -> None:
        self._unedited = self.versions()

    def versions(self) -> list[int]:
        """Numbers that change with every write. A write to a DTensor does not count at the view inside, nor a write to
        that view at the DTensor."""
        with PlainAttributes():
            return [*map(_version_of, self.counters)]

    def has_grad(self) -> bool:
        """Whether autograd has left a gradient on an unsharded parameter that was not taken yet."""
        return [*map(_grad, self.params)] != [None] * len(self.params)  # "!=" compares identities first

    def was_toggled(self) -> bool:
        """Whether forward has set ``requires_grad`` on an unsharded parameter."""
        return self.present_flags() != self.flags

    def present_flags(self) -> list[bool]:
        return [*map(_requires_grad, self.params)]

    def set_flags(self, flags: list[bool]) -> None:
        """Set ``requires_grad`` of the parameters."""
        for param, flag in zip(self.params, flags, strict=True):
            param.requires_grad_(flag)
        self.flags = flags


def error_of_late_access(rank: int, label: Label) -> str:
    """The error for code that reads parameters while they are sharded."""
    return (
        f"rank {rank}: unsharded parameters of {label.group} were used while they are sharded. If you keep a parameter "
        "in forward (as an attribute, in a list, in a hook), keep a clone(); and forward must return every tensor that "
        "a loss is computed from, or keep it as an attribute of its module"
    )


def explain_refused_access(error: BaseException | None) -> None:
    """Add a note to a torch error that may not say so: it is about parameters that were read too late, or that
    functional mode shows."""
    for cls, text, note in _EXPLAINED:
        if isinstance(error, cls) and text in str(error) and not hasattr(error, "__notes__"):
            add_note = getattr(error, "add_note", None)  # Python 3.11
            if add_note is not None:
                add_note(note)


_EXPLAINED: Sequence[tuple[type[Exception], str, str]] = (
    (
        RuntimeError,
        "Cannot access data pointer of Storage that is invalid",
        "fsdp_compose: if this tensor is (a view of) a parameter of a fully_shard'ed module, it was used while the "
        "module is sharded. Inside forward, clone() any parameter that you keep, and do not compute with a parameter "
        "outside the forward of its module",
    ),
    (
        ValueError,
        "Cannot assign non-leaf Tensor to parameter",
        "fsdp_compose: in functional mode, the parameters that forward sees are results of a gather that autograd "
        "differentiates. torch registers only leaves as parameters, so torch.nn.utils.parametrize cannot be put on "
        "inside forward: put it on before fully_shard(), or leave functional_mode()",
    ),
)
