"""The reduction of one flat gradient: the memory it reads, the collective in flight, and where the result goes.

Driven by ``communicator``. Note [Padding is zero]. Shards and flat gradients are padded with zeros. The reduce buffer
is shared by flat parameters of different layouts, so a reduction that takes it over from another layout zeroes its own
padding first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from .._torch import foreach_copy_, foreach_zero_
from ..comm import DataParallelMesh, Label, Work
from .layout import FlatLayout
from .views import full_views

pool_ids = count()

# Equal paddings are one object, so that "whose zeros are in the buffer" is a comparison of identities.
_same_bounds: dict[object, object] = {}


class ReduceBuffer:
    """The pooled input of reduce-scatters of one dtype on one device: a storage that grows to the largest layout.

    There is one slot: a second reduce-scatter in flight cost a block of memory and gained no time when measured.
    ``pool_id``: of the communicator that owns it.
    """

    __slots__ = ("device", "dtype", "nbytes", "pool_id", "storage", "zeroed_gaps")

    def __init__(self, dtype: torch.dtype, device: torch.device, pool_id: int) -> None:
        self.dtype, self.device = dtype, device
        self.pool_id = pool_id
        self.storage = torch.empty(0, dtype=dtype, device=device).untyped_storage()
        self.nbytes = 0  # of the storage as it is now
        self.zeroed_gaps: object = None  # the padding that is known to be zero

    def make_room(self, nbytes: int) -> None:
        if self.nbytes < nbytes:
            self.storage.resize_(0)  # the content is not worth a copy
            self.storage.resize_(nbytes)
            self.nbytes = nbytes
            self.zeroed_gaps = None

    def view(self, numel: int) -> torch.Tensor:
        """The first elements, as a tensor."""
        self.make_room(numel * self.dtype.itemsize)
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(0, dtype=self.dtype, device=self.device)
            flat.set_(self.storage, 0, (numel,), (1,))
        return flat

    def take(self, reduction: Reduction) -> None:
        """Make room for a reduction, with zeros in its padding."""
        self.make_room(reduction.flat.nbytes)
        if self.zeroed_gaps is not reduction.gap_bounds:
            if reduction.gaps:
                foreach_zero_(reduction.gaps)
            self.zeroed_gaps = reduction.gap_bounds

    def free(self) -> None:
        self.storage.resize_(0)
        self.nbytes = 0
        self.zeroed_gaps = None


@dataclass(frozen=True)
class ReductionOptions:
    """How the gradients of a group are reduced.

    Attributes:
        divide_factor: what their sum over the ranks is divided by; ``None``: the number of ranks.
        forces_sum: the collective sums, and the division comes after it, also where it could average.
        hook: called with each reduced gradient, before it is added to ``.grad``; see ``set_post_reduction_hook``.
    """

    divide_factor: float | None = None
    forces_sum: bool = False
    hook: Callable[[torch.Tensor], None] | None = None

    def factors(self, world_size: int, is_half: bool) -> tuple[float, bool, float]:
        """What gradients are divided by before the collective, whether that averages, and what they are divided by
        after it."""
        if not (is_half or self.forces_sum or self.divide_factor is not None):
            return 1, True, 1
        whole = world_size if self.divide_factor is None else self.divide_factor
        before = _first_factor(world_size) if is_half else 1
        return before, False, whole / before


AVERAGE = ReductionOptions()


class Reduction:
    """A reduce-scatter of one flat gradient, through one memory; begun again and again.

    Args:
        layout, mesh, label: of the flat parameter.
        dtype: of the shard.
        flat: what it reads and may overwrite, of the layout's length; a view of ``buffer`` if that is given.

    Attributes:
        buffer: the pooled memory that ``flat`` is a view of, if it is one.
        views: of ``flat``, with the parameters' shapes.
        gaps: of ``flat``, the padding; ``gap_bounds`` is one object for equal paddings.
        goes_direct: the result can arrive in memory of the caller's.
        work: the collective in flight, for which the caller waits.
        output: where the result arrives, while it is in flight.
    """

    __slots__ = (
        "_factors", "_label", "_mesh", "_options", "_own_slice", "_target", "buffer", "flat",
        "gap_bounds", "gaps", "goes_direct", "is_added", "output", "views",
        "work",
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
        self._follow(AVERAGE)
        self.goes_direct = flat.dtype == dtype and mesh.shard_world_size > 1
        self._target: torch.Tensor | None = None
        self.work: Work | None = None
        self.output: torch.Tensor | None = None
        self.is_added = False

    def fill(self, grads: list[torch.Tensor], missing: Sequence[int]) -> None:
        """Copy the gradients there are into the views, and zeros for those that are missing."""
        if not missing:
            copy_gradients(self.views, grads)
            return
        foreach_zero_([self.views[i] for i in missing])
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if present:
            copy_gradients([self.views[i] for i in present], [grads[i] for i in present])

    def _follow(self, options: ReductionOptions) -> None:
        self._options = options
        self._factors = options.factors(self._mesh.shard_world_size, self.flat.dtype == torch.float16)

    def aim(self, target: torch.Tensor, is_added: bool, options: ReductionOptions) -> None:
        """Choose how to reduce, where the result goes, and whether it is added to what is there."""
        if options is not self._options:
            self._follow(options)
        self._target, self.is_added = target, is_added
        self.output = target if self.goes_direct and not is_added else self._own_slice

    def issue(self) -> None:
        """Issue the collective, on the present stream, if there is another rank."""
        output, flat, mesh = self.output, self.flat, self._mesh
        assert output is not None
        if mesh.shard_world_size == 1:
            return
        before, is_average, _ = self._factors
        if before != 1:
            flat.div_(before)
        self.work = mesh.transport.reduce_scatter(output, flat, is_average, self._label)

    def discard(self) -> None:
        """The collective is done, and its result of no use."""
        self.work = self.output = self._target = None

    def finish(self) -> None:
        """The collective is done: bring the result to where it goes."""
        self.work = None
        output, target = self.output, self._target
        assert output is not None and target is not None
        after = self._factors[2]
        if after != 1:
            output.div_(after)
        if self._options.hook is not None:
            self._options.hook(output)
        if self.is_added:
            target.add_(output)
        elif output is not target:
            target.copy_(output)
        self.output = self._target = None


def _first_factor(world_size: int) -> int:
    """What fp16 gradients are divided by before they are summed: a plain sum can overflow, so about the square root of
    the world size goes first."""
    before = 1
    while world_size % (before * 2) == 0 and before * before < world_size:
        before *= 2
    return before


def copy_gradients(views: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    try:
        foreach_copy_(views, grads)
    except RuntimeError:
        if all(grad.layout == torch.strided for grad in grads):
            raise
        foreach_copy_(views, [grad.to_dense() for grad in grads])  # of nn.Embedding(sparse=True)
