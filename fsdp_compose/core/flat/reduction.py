"""The reduction of one flat gradient, in stages: the memory it reads, the collective in flight, and where the result
goes.

``Communicator`` issues a stage, waits for it, and calls what follows. Which stages there are is decided here, when a
reduction is made and when it is given its target: hybrid sharding, ``replicate``, ``no_sync`` and host memory differ in
that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch

from ..._torch import foreach_zero_
from ..comm import DataParallelMesh, Label, Work
from .layout import FlatLayout, full_views

Hook = Callable[[torch.Tensor], None]


@cache
def _padding(flat_numel: int, bounds: tuple[tuple[int, int], ...]) -> object:
    """One object for equal paddings, so comparing identities tells whose zeros are in the buffer."""
    return (bounds,)


@dataclass(frozen=True, slots=True)
class ReductionOptions:
    """How the gradients of a group are reduced.

    Attributes:
        divide_factor: the divisor of their sum over the ranks; ``None``: the number of ranks.
        forces_sum: the collective sums and the division comes after it, even if the collective could average.
        hook: called with each reduced gradient, before it is added to ``.grad``; see ``set_post_reduction_hook``.
        fills_unused: a parameter that no rank has used gets a gradient of zeros, not ``None``.
    """

    divide_factor: float | None = None
    forces_sum: bool = False
    hook: Hook | None = None
    fills_unused: bool = False

    def factors(self, world_size: int, missing_factor: int, is_half: bool) -> tuple[float, bool, float]:
        """The divisor of gradients before the collective over ``world_size`` ranks, whether the collective averages,
        and the divisor after it; ``missing_factor``: see ``DataParallelMesh``."""
        if not (is_half or self.forces_sum or self.divide_factor is not None):
            return 1, True, missing_factor
        whole = world_size * missing_factor if self.divide_factor is None else self.divide_factor
        before = _first_factor(world_size) if is_half else 1
        return before, False, whole / before


AVERAGE = ReductionOptions()

Then = Callable[[Any, Any], "ReplicaAverage | None"]
"""What follows the first stage of a reduction; takes the flat parameter and the reduction, and returns the next stage,
if there is one."""


def bring_result(output: torch.Tensor, target: torch.Tensor, is_added: bool, after: float, hook: Hook | None) -> None:
    """Move the result of a reduction to ``target``, divided by ``after``; ``hook``: see ``ReductionOptions``."""
    if after != 1:
        output.div_(after)
    if hook is not None:
        hook(output)
    if is_added:
        target.add_(output)
    elif output is not target:
        target.copy_(output)


def add_scattered(output: torch.Tensor, earlier: torch.Tensor | None, kept_dtype: torch.dtype) -> torch.Tensor:
    """The sum of a scattered result and of earlier ones. Overwrites one of them. Without earlier ones, returns the
    result in ``kept_dtype``."""
    # That may be wider than the dtype of the reduction: 256 + 1 + 1 is 256 in bf16.
    if earlier is None:
        return output.to(kept_dtype)
    if earlier.dtype == output.dtype:
        return output.add_(earlier)
    return earlier.add_(output)  # no new memory: this may run on another stream


@dataclass(slots=True, eq=False, repr=False)
class ReduceBuffer:
    """The pooled input of reduce-scatters of one dtype on one device: a storage that grows to the largest layout."""

    # One, not several: a second reduce-scatter in flight took a block of memory and saved no time when measured.

    dtype: torch.dtype
    device: torch.device
    pool: object  # identifies the communicator that owns it
    storage: torch.UntypedStorage = field(init=False)
    nbytes: int = 0  # current size of the storage
    zeroed_gaps: object = None  # the padding that is known to be zero

    def __post_init__(self) -> None:
        self.storage = torch.empty(0, dtype=self.dtype, device=self.device).untyped_storage()

    def make_room(self, nbytes: int) -> None:
        if self.nbytes < nbytes:
            self.storage.resize_(0)  # the content need not be copied
            self.storage.resize_(nbytes)
            self.nbytes = nbytes
            self.zeroed_gaps = None

    def view(self, numel: int) -> torch.Tensor:
        """View the first elements as a tensor."""
        self.make_room(numel * self.dtype.itemsize)
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(0, dtype=self.dtype, device=self.device)
            flat.set_(self.storage, 0, (numel,), (1,))
        return flat

    def take(self, reduction: Reduction) -> None:
        """Make room for a reduction, with zeros in its padding."""
        # Flat parameters of different layouts share the buffer, and flat gradients are padded with zeros: a reduction
        # that takes the buffer over from another layout zeroes its own padding.
        if self.zeroed_gaps is not reduction.gap_bounds:  # otherwise there is room: equal paddings mean equal lengths
            self.make_room(reduction.flat.nbytes)
            if reduction.gaps:
                foreach_zero_(reduction.gaps)
            self.zeroed_gaps = reduction.gap_bounds

    def free(self) -> None:
        self.storage.resize_(0)
        self.nbytes = 0
        self.zeroed_gaps = None


class Reduction:
    """The reduction of one flat gradient, through one memory; used again and again.

    Its first stage is a reduce-scatter over the shard group. ``then`` is the function that follows when that is done:
    ``finish`` moves the result to its target; with replicas, ``average_replicas`` makes the second stage, which no
    longer uses this memory; and without their average, the caller's function keeps the scattered sum for a later
    reduction.

    Args:
        layout, mesh: those of the flat parameter.
        dtype: the sharded gradient's.
        flat: its input, which it may overwrite, of the layout's length; a view of ``buffer`` if that is given.

    Attributes:
        buffer: the pooled memory that ``flat`` views, if any.
        views: views of ``flat``, in the parameters' shapes.
        gaps: the padding of ``flat``; ``gap_bounds`` is one object for equal paddings.
        goes_direct: the result can arrive in the target.
        has_own_output: a result that cannot arrives in memory of its own, not in ``flat``.
        work: the collective in flight, for which the caller waits.
        output: where the result arrives, while it is in flight.
        then: what follows the first stage.
    """

    what, span = "reduce-scatter", "reduce_scatter"

    work: Work | None
    output: torch.Tensor | None
    then: Then
    _target: torch.Tensor | None
    _earlier: torch.Tensor | None

    __slots__ = (
        "_earlier", "_factors", "_following", "_is_added", "_kept_dtype", "_mesh", "_options", "_own_slice", "_target",
        "buffer", "flat", "gap_bounds", "gaps", "goes_direct", "has_own_output", "output", "then", "views", "work",
    )  # fmt: skip

    def __init__(
        self,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        flat: torch.Tensor,
        buffer: ReduceBuffer | None = None,
    ) -> None:
        numel = layout.shard_numel
        self._mesh, self.flat, self.buffer = mesh, flat, buffer
        with torch.inference_mode(False), torch.no_grad():
            self.views = full_views(layout, flat)
            bounds = layout.gaps()
            self.gap_bounds = _padding(layout.flat_numel, bounds)
            self.gaps = [flat[start:stop] for start, stop in bounds]
            self._own_slice = flat[mesh.shard_rank * numel : (mesh.shard_rank + 1) * numel]
        self._apply_options(AVERAGE)
        self._kept_dtype = torch.promote_types(flat.dtype, dtype)
        self.goes_direct = flat.dtype == dtype and mesh.data_world_size > 1
        has_replicas = mesh.replica_transport is not None  # the result outlives the content of the buffer
        self.has_own_output = has_replicas or layout.in_chunks  # where it would arrive, there may be other padding
        self._following: Then = average_replicas if has_replicas else finish
        self.then = self._following
        self.discard()

    def _apply_options(self, options: ReductionOptions) -> None:
        self._options = options
        mesh, is_half = self._mesh, self.flat.dtype == torch.float16
        self._factors = options.factors(mesh.data_world_size, mesh.missing_factor, is_half)

    def set_target(
        self, options: ReductionOptions, target: torch.Tensor | None, is_added: bool, earlier: torch.Tensor | None
    ) -> None:
        """Choose how to reduce, the target of the result, and whether the result is added there. ``earlier``: what
        earlier backwards have scattered."""
        if options is not self._options:
            self._apply_options(options)
        self._target, self._is_added, self._earlier, self.then = target, is_added, earlier, self._following
        if self.goes_direct and not is_added:
            self.output = target
        else:
            self.output = torch.empty_like(self._own_slice) if self.has_own_output else self._own_slice

    def set_keeper(self, options: ReductionOptions, keep: Then, earlier: torch.Tensor | None) -> None:
        """Like ``set_target``, without the average over replicas: ``keep`` calls ``take_scattered``."""
        if options is not self._options:
            self._apply_options(options)
        self._earlier, self.then, self.output = earlier, keep, torch.empty_like(self._own_slice)

    def issue(self, mesh: DataParallelMesh, label: Label) -> None:
        """Issue the first stage, on the current stream, if there is another rank."""
        output, flat = self.output, self.flat
        assert output is not None
        before, is_average, _ = self._factors
        if before != 1:
            flat.div_(before)
        if mesh.shard_world_size > 1:
            self.work = mesh.transport.reduce_scatter(output, flat, is_average, label)
        elif output is not self._own_slice:
            output.copy_(self._own_slice)

    def discard(self) -> None:
        """Called after the first stage, when its result is not needed, or was taken."""
        self.work = self.output = self._target = self._earlier = None

    def take_scattered(self) -> torch.Tensor:
        """Called after the first stage: return this rank's shard of the sum over the shard group, plus those of earlier
        reductions, to be kept."""
        assert self.output is not None
        scattered = add_scattered(self.output, self._earlier, self._kept_dtype)
        self.output = self._earlier = None
        return scattered


def finish(_handle: object, reduction: Reduction) -> None:
    """Move the result of the only stage to its target. Nothing was scattered earlier: for that there are replicas."""
    output, target = reduction.output, reduction._target
    assert output is not None and target is not None
    reduction.work = reduction.output = reduction._target = None
    after, hook = reduction._factors[2], reduction._options.hook
    if output is not target or after != 1 or hook is not None:
        bring_result(output, target, reduction._is_added, after, hook)


def average_replicas(_handle: object, reduction: Reduction) -> ReplicaAverage:
    """Make the second stage, from the result of the first."""
    output, target, earlier = reduction.output, reduction._target, reduction._earlier
    _, is_average, after = reduction._factors
    assert output is not None and target is not None
    # Keep both terms of the sum until everything is done: another stream may read them.
    terms = output, earlier
    reduction.output = reduction._target = reduction._earlier = None
    # With streams this runs as soon as the first stage is issued, and compute still has to wait for that stage.
    reduction.then = _forget
    scattered = add_scattered(output, earlier, output.dtype)
    return ReplicaAverage(scattered, target, reduction._is_added, is_average, after, reduction._options.hook, terms)


def _forget(_handle: object, reduction: Reduction) -> None:
    reduction.discard()


@dataclass(slots=True, eq=False, repr=False)
class ReplicaAverage:
    """The second or only stage of a reduction: averages scattered sums, or whole gradients, over the replicas, in
    memory of its own."""

    output: torch.Tensor  # the memory
    target: torch.Tensor  # where the average goes
    is_added: bool  # to the content of the target
    is_average: bool  # the collective averages
    after: float  # the divisor of its result
    hook: Hook | None  # see ``ReductionOptions``
    terms: object = None  # tensors to keep alive until then
    work: Work | None = None  # the collective in flight, for which the caller waits

    what: ClassVar = "all-reduce"
    span: ClassVar = "all_reduce"

    def issue(self, mesh: DataParallelMesh, label: Label) -> None:
        """Issue the collective, on the current stream."""
        assert mesh.replica_transport is not None
        self.work = mesh.replica_transport.all_reduce(self.output, self.is_average, label)

    def then(self, _handle: object, _average: object) -> None:
        """Move the result to its target, after the collective."""
        bring_result(self.output, self.target, self.is_added, self.after, self.hook)

    def discard(self) -> None:
        """Called instead of ``then``, when the result is not needed."""


def _first_factor(world_size: int) -> int:
    """The divisor of fp16 gradients before they are summed."""
    # A plain sum can overflow, so about the square root of the world size is divided out first, the rest afterwards.
    before = 1
    while world_size % (before * 2) == 0 and before * before < world_size:
        before *= 2
    return before
