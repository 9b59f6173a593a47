"""The reduction of one flat gradient: the memory it reads, the collective in flight, and where the result goes.

``Communicator`` drives it. Note [Padding is zero]. Shards and flat gradients are padded with zeros. Flat parameters of
different layouts share the reduce buffer, so a reduction that takes it over from another layout first zeroes its own
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

import torch

from .._torch import foreach_copy_, foreach_zero_
from ..comm import DataParallelMesh, Label, Work
from .layout import FlatLayout, full_views

Hook = Callable[[torch.Tensor], None]

pool_ids = count()

# Equal paddings are one object, so comparing identities tells whose zeros are in the buffer.
_same_bounds: dict[object, object] = {}


class ReduceBuffer:
    """The pooled input of reduce-scatters of one dtype on one device: a storage that grows to the largest layout.

    It has one slot: a second reduce-scatter in flight took a block of memory and saved no time when measured.
    ``pool_id``: the communicator that owns it.
    """

    __slots__ = ("device", "dtype", "nbytes", "pool_id", "storage", "zeroed_gaps")

    def __init__(self, dtype: torch.dtype, device: torch.device, pool_id: int) -> None:
        self.dtype, self.device = dtype, device
        self.pool_id = pool_id
        self.storage = torch.empty(0, dtype=dtype, device=device).untyped_storage()
        self.nbytes = 0  # current size of the storage
        self.zeroed_gaps: object = None  # the padding that is known to be zero

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
        if self.zeroed_gaps is not reduction.gap_bounds:  # otherwise there is room: equal paddings mean equal lengths
            self.make_room(reduction.flat.nbytes)
            if reduction.gaps:
                foreach_zero_(reduction.gaps)
            self.zeroed_gaps = reduction.gap_bounds

    def free(self) -> None:
        self.storage.resize_(0)
        self.nbytes = 0
        self.zeroed_gaps = None


@dataclass(frozen=True, slots=True)
class ReductionOptions:
    """How the gradients of a group are reduced.

    Attributes:
        divide_factor: the divisor of their sum over the ranks; ``None``: the number of ranks.
        forces_sum: the collective sums and the division comes after it, even if the collective could average.
        hook: called with each reduced gradient, before it is added to ``.grad``; see ``set_post_reduction_hook``.
    """

    divide_factor: float | None = None
    forces_sum: bool = False
    hook: Hook | None = None

    def factors(self, world_size: int, missing_factor: int, is_half: bool) -> tuple[float, bool, float]:
        """The divisor of gradients before the collective over ``world_size`` ranks, whether the collective averages,
        and the divisor after it; ``missing_factor``: see ``DataParallelMesh``."""
        if not (is_half or self.forces_sum or self.divide_factor is not None):
            return 1, True, missing_factor
        whole = world_size * missing_factor if self.divide_factor is None else self.divide_factor
        before = _first_factor(world_size) if is_half else 1
        return before, False, whole / before


AVERAGE = ReductionOptions()


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


Destination = tuple["torch.Tensor | None", bool, "torch.Tensor | None"]
"""The target of a reduction's result, whether the result is added there, and what earlier backwards have scattered."""

_NOWHERE: Destination = (None, False, None)


class Stage(Enum):
    """What follows the first stage of a reduction."""

    FINISH = "the result goes to its target"
    AVERAGE = "it is averaged over the replicas"
    WAIT = "it waits for a later reduction, which averages over the replicas"


FINISH, AVERAGE_REPLICAS, WAIT = Stage.FINISH, Stage.AVERAGE, Stage.WAIT  # module-level names for the hot path


def add_scattered(output: torch.Tensor, earlier: torch.Tensor | None, kept_dtype: torch.dtype) -> torch.Tensor:
    """The sum of a scattered result and of earlier ones, which may be in a wider dtype than the reduction: 256 + 1 + 1
    is 256 in bf16. Overwrites one of them. Without earlier ones, returns the result in ``kept_dtype``."""
    if earlier is None:
        return output.to(kept_dtype)
    if earlier.dtype == output.dtype:
        return output.add_(earlier)
    return earlier.add_(output)  # no new memory: this may run on another stream


class Reduction:
    """The reduction of one flat gradient, through one memory; used again and again.

    It has one or two stages: a reduce-scatter over the shard group and, if there are replicas, an all-reduce of its
    result over the replicate group (``ReplicaAverage``), which no longer uses this memory. With ``Stage.WAIT`` it ends
    after the first stage: the scattered sum waits for a later reduction.

    Args:
        layout, mesh, label: those of the flat parameter.
        dtype: the sharded gradient's.
        flat: its input, which it may overwrite, of the layout's length; a view of ``buffer`` if that is given.

    Attributes:
        buffer: the pooled memory that ``flat`` views, if any.
        views: views of ``flat``, in the parameters' shapes.
        gaps: the padding of ``flat``; ``gap_bounds`` is one object for equal paddings.
        goes_direct: the result can arrive in the caller's memory.
        work: the collective in flight, for which the caller waits.
        output: where the result arrives, while it is in flight.
        then: what follows the first stage.
    """

    __slots__ = (
        "_destination", "_factors", "_kept_dtype", "_label", "_mesh", "_options", "_own_slice", "buffer", "flat",
        "gap_bounds", "gaps", "goes_direct", "output", "then", "views", "work",
    )  # fmt: skip

    def __init__(
        self,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        label: Label,
        dtype: torch.dtype,
        flat: torch.Tensor,
        buffer: ReduceBuffer | None = None,
    ) -> None:
        numel = layout.shard_numel
        self._mesh, self._label, self.flat, self.buffer = mesh, label, flat, buffer
        with torch.inference_mode(False), torch.no_grad():
            self.views = full_views(layout, flat)
            bounds = layout.gaps()
            self.gap_bounds = _same_bounds.setdefault((layout.flat_numel, bounds), (bounds,))
            self.gaps = [flat[start:stop] for start, stop in bounds]
            self._own_slice = flat[mesh.shard_rank * numel : (mesh.shard_rank + 1) * numel]
        self._apply_options(AVERAGE)
        self._kept_dtype = torch.promote_types(flat.dtype, dtype)
        self.goes_direct = flat.dtype == dtype and mesh.data_world_size > 1
        self._destination: Destination = _NOWHERE
        self.work: Work | None = None
        self.output: torch.Tensor | None = None
        self.then = WAIT

    def _apply_options(self, options: ReductionOptions) -> None:
        self._options = options
        mesh, is_half = self._mesh, self.flat.dtype == torch.float16
        self._factors = options.factors(mesh.data_world_size, mesh.missing_factor, is_half)

    def set_destination(self, options: ReductionOptions, destination: Destination) -> None:
        """Choose how to reduce, and where the result goes."""
        if options is not self._options:
            self._apply_options(options)
        self._destination = destination
        target, is_added, _ = destination
        if target is None:
            self.then, self.output = WAIT, torch.empty_like(self._own_slice)
            return
        goes_direct = self.goes_direct and not is_added
        if self._mesh.replica_transport is None:
            self.then, self.output = FINISH, target if goes_direct else self._own_slice
        else:  # otherwise it outlives the content of the buffer
            self.then, self.output = AVERAGE_REPLICAS, target if goes_direct else torch.empty_like(self._own_slice)

    def issue(self) -> None:
        """Issue the first stage, on the current stream, if there is another rank."""
        output, flat, mesh = self.output, self.flat, self._mesh
        assert output is not None
        before, is_average, _ = self._factors
        if before != 1:
            flat.div_(before)
        if mesh.shard_world_size > 1:
            self.work = mesh.transport.reduce_scatter(output, flat, is_average, self._label)
        elif output is not self._own_slice:
            output.copy_(self._own_slice)

    def discard(self) -> None:
        """Called after the first stage, when its result is not needed, or was taken."""
        self.work, self.output, self._destination = None, None, _NOWHERE

    def take_scattered(self) -> torch.Tensor:
        """Called after the first stage, if it is the last for now: return this rank's part of the sum over the shard
        group, plus those of earlier reductions."""
        output, (_, _, earlier) = self.output, self._destination
        assert output is not None
        self.output, self._destination = None, _NOWHERE
        return add_scattered(output, earlier, self._kept_dtype if self.then is WAIT else output.dtype)

    def average_replicas(self) -> ReplicaAverage:
        """Called after the first stage: issue the second one, on the current stream."""
        (target, is_added, earlier), (_, is_average, after) = self._destination, self._factors
        assert target is not None
        # Keep both terms of the sum until everything is done: another stream may read them.
        terms = self.output, earlier
        result = ReplicaAverage(self.take_scattered(), target, is_added, is_average, after, self._options.hook, terms)
        result.issue(self._mesh, self._label)
        return result

    def finish(self) -> None:
        """Called after the only stage: move the result to its destination."""
        output, (target, is_added, earlier) = self.output, self._destination
        assert output is not None and target is not None
        self.work, self.output, self._destination = None, None, _NOWHERE
        if earlier is not None:
            output.add_(earlier)
        after, hook = self._factors[2], self._options.hook
        if output is not target or after != 1 or hook is not None:
            bring_result(output, target, is_added, after, hook)


class ReplicaAverage:
    """The second or only stage of a reduction: averages scattered sums, or whole gradients, over the replicas, in
    memory of its own.

    Args:
        output: the memory.
        target: where the average goes; ``is_added``: it is added to the content.
        is_average, after: whether the collective averages, and the divisor of its result; ``hook``: see
            ``ReductionOptions``.
        earlier: tensors to keep alive until then.

    Attributes:
        work: the collective in flight, for which the caller waits.
    """

    __slots__ = ("_after", "_earlier", "_hook", "_is_average", "_output", "_target", "is_added", "work")

    def __init__(
        self,
        output: torch.Tensor,
        target: torch.Tensor,
        is_added: bool,
        is_average: bool,
        after: float,
        hook: Hook | None,
        earlier: object = None,
    ) -> None:
        self._output, self._target, self.is_added = output, target, is_added
        self._after, self._hook = after, hook
        self._is_average, self._earlier = is_average, earlier
        self.work: Work | None = None

    def issue(self, mesh: DataParallelMesh, label: Label) -> None:
        """Issue the collective, on the current stream."""
        assert mesh.replica_transport is not None
        self.work = mesh.replica_transport.all_reduce(self._output, self._is_average, label)

    def finish(self) -> None:
        """Called after the collective: move the result to its destination."""
        bring_result(self._output, self._target, self.is_added, self._after, self._hook)


def _first_factor(world_size: int) -> int:
    """The divisor of fp16 gradients before they are summed: a plain sum can overflow, so about the square root of the
    world size is divided out first."""
    before = 1
    while world_size % (before * 2) == 0 and before * before < world_size:
        before *= 2
    return before


def fill(views: list[torch.Tensor], grads: list[torch.Tensor], missing: Sequence[int]) -> None:
    """Copy the gradients into ``views``, with zeros for missing ones (``None`` in the list)."""
    if not missing:
        copy_gradients(views, grads)
        return
    foreach_zero_([views[i] for i in missing])
    present = [i for i, grad in enumerate(grads) if grad is not None]
    if present:
        copy_gradients([views[i] for i in present], [grads[i] for i in present])


def copy_gradients(views: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    try:
        foreach_copy_(views, grads)
    except RuntimeError:
        if all(grad.layout == torch.strided for grad in grads):
            raise
        foreach_copy_(views, [grad.to_dense() for grad in grads])  # sparse, from nn.Embedding(sparse=True)
