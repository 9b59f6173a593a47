"""All-gathers of flat parameters, on their stream: the base of ``Communicator``, where Note [Memory and streams] is."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from ..comm import difference_of, give_up
from .flat_param import FlatParamHandle
from .home import Home
from .ranges import in_range
from .streams import streams_of


class AllGathers:
    """The stream of all-gathers that the groups below one root share, and errors of collectives.

    Attributes:
        homes: where shards or gradients live, if not on the device: what was issued for them is awaited when a
            top-level forward ends.
    """

    __slots__ = ("__weakref__", "_all_gather_stream", "_device", "_module", "homes")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = streams_of(device)
        self.homes: tuple[Home, ...] = ()
        self._all_gather_stream = self._module.Stream(device, priority=-1) if self._module else None

    def serve(self, handles: Iterable[FlatParamHandle]) -> None:
        """These are the flat parameters of the groups."""
        self.homes = tuple({handle.home for handle in handles if handle.home.has_host_gradients})

    # ---- for agreement before collectives, which another class has (see ``lockstep``); here they do nothing

    def announce(self, handle: FlatParamHandle, what: str) -> None:
        """A collective is about to be issued that the other methods do not issue."""

    def announce_exchange(self, root: object, code: int) -> None:
        """A control exchange is about to begin."""

    def announce_recovery(self, root: object) -> None:
        """All ranks are about to throw away what an interrupted iteration left."""

    # ---- parameters

    @in_range("all_gather")
    def unshard(self, handle: FlatParamHandle) -> None:
        """Allocate the unsharded memory of a handle, if it has none, and start the all-gather into it."""
        segments = handle.segment_version() if handle.segments else 0
        if self._all_gather_stream is None:
            handle.unsharded.gather(segments)
            return
        if not handle.unsharded.is_allocated:
            handle.unsharded.allocate()
        self._all_gather_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._all_gather_stream):
            handle.unsharded.gather(segments)

    @in_range("all_gather")
    def unshard_parts(self, handle: FlatParamHandle) -> None:
        """As ``unshard``, of the parts that ``reshard_to_part`` has kept, among the ranks that share them."""
        handle.unsharded.allocate()
        if self._all_gather_stream is None:
            handle.unsharded.gather_parts()
            return
        self._all_gather_stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._all_gather_stream):
            handle.unsharded.gather_parts()

    def refresh(self, handle: FlatParamHandle) -> None:
        """Gather again into the storage of a handle that was left unsharded; its shard may have changed."""
        if handle.unsharded.never_freed:
            return
        self.wait(handle)
        handle.unsharded.hide()
        AllGathers.unshard(self, handle)

    @in_range("wait all_gather")
    def wait(self, handle: FlatParamHandle) -> None:
        """Make the unsharded parameters usable by what is issued from here on."""
        work = handle.unsharded.work
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure("all-gather", handle, error) from error
            if self._all_gather_stream is not None and handle.mesh.is_simulated:
                self._wait_for_stream(self._all_gather_stream)
            handle.unsharded.arrive()

    @in_range("reshard", when=attrgetter("unsharded.may_be_freed"))
    def reshard(self, handle: FlatParamHandle) -> None:
        """Free the unsharded memory, if it may be freed; nothing is in flight then."""
        unsharded = handle.unsharded
        if unsharded.work is not None:
            self.wait(handle)
        if unsharded.keep or not unsharded.is_allocated:
            return
        try:
            unsharded.free()
        except RuntimeError as error:
            raise self._refuse_exported(handle, error) from error

    def reshard_to_part(self, handle: FlatParamHandle) -> None:
        """As ``reshard``, but let this rank's part of what was gathered stay, if it is to keep one."""
        unsharded = handle.unsharded
        if unsharded.part is not None and unsharded.is_allocated and not unsharded.keep:
            if unsharded.work is not None:
                self.wait(handle)
            unsharded.keep_part()
        self.reshard(handle)

    @in_range("all_gather")
    def all_gather_copy(self, handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
        """The whole flat parameter in its compute dtype, gathered from ``shard``, a tensor like the handle's own, into
        memory of its own and waited for: for functional mode."""
        mesh, shard = handle.mesh, handle.home.on_device(shard).to(handle.unsharded.dtype)
        if mesh.shard_world_size == 1:
            return shard.clone()
        flat = torch.empty(handle.layout.flat_numel, dtype=shard.dtype, device=shard.device)
        try:
            mesh.transport.all_gather(flat, shard, handle.label).wait()
        except RuntimeError as error:
            raise self._failure("all-gather", handle, error) from error
        return flat

    # ---- for both kinds of collectives

    def _wait_for_stream(self, stream: Any) -> None:
        """Let compute wait for all of a side stream. The work of a simulated group does not wait: what it copies are
        kernels of the stream it was issued on."""
        self._module.current_stream(self._device).wait_stream(stream)

    def _failure(self, what: str, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        group = handle.mesh.peers
        failure = (
            f"rank {handle.mesh.rank}: the {what} of the fully_shard group with {handle.name_of(0)} "
            f"({len(handle.fqns)} parameters) failed: "
        )
        failure += difference_of(group) or f"another rank died, or did not enter the same collective. {error}"
        give_up(group, failure)
        return RuntimeError(failure)

    def _refuse_exported(self, handle: FlatParamHandle, error: RuntimeError) -> RuntimeError:
        names = ", ".join(handle.names)
        return RuntimeError(
            f"rank {handle.mesh.rank}: the memory of unsharded parameters cannot be freed, since forward has "
            f"given it to NumPy, which torch then cannot take away. It is one of {names}. Call .numpy() on a clone() "
            "of the parameter, or outside forward on .full_tensor() of the sharded one; this model cannot go on: build "
            f"it anew ({error})"
        )
