"""The unsharded side of a flat parameter whose only parameter is gathered by its class; see ``extension``.

What is gathered is not the shard but what the class makes of it, of other dtypes and shapes; what forward computes with
is what the class makes of the result: an object that stays the same, whose memory comes and goes. Nothing of this is on
the way of other flat parameters, which are ``Unsharded`` of the plain kind::

    shard (its padding too)  -pre->  inputs  -all-gather->  memory  -post->  unsharded parameter
    |rows|                           |....|                 |....|....|      views of the memory, or memory of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from .._torch import preserved_versions, same_storage
from ..comm import DataParallelMesh, Label, Work
from ..ragged import writes
from .extension import Extension
from .layout import FlatLayout
from .sharded_param import copy_attributes
from .tensor_parallel import TensorParallel
from .unsharded import Unsharded, UnshardedMemory, error_of_late_access


def make_unsharded(
    extension: Extension | None,
    shard: torch.Tensor,
    layout: FlatLayout,
    mesh: DataParallelMesh,
    dtype: torch.dtype,
    label: Label,
    tensor_parallel: TensorParallel | None,
) -> Unsharded:
    """The unsharded side of a flat parameter; for the arguments see ``Unsharded``."""
    if extension is None:
        return Unsharded(shard, layout, mesh, dtype, label, tensor_parallel)
    return ExtendedUnsharded(extension, shard, layout, mesh, dtype, label)


class ExtendedMemory(UnshardedMemory):
    """The memory of all tensors that are gathered for one parameter; there is none before the first all-gather.

    Attributes:
        parts: of each of them.
    """

    __slots__ = ("_error", "parts")

    def __init__(self, error: str, device: torch.device) -> None:
        self._error = error
        self.parts: list[UnshardedMemory] = []
        with torch.inference_mode(False):
            self.shown = self.hidden = torch.empty(0, device=device)  # stands for them where versions are compared
        self.storage = self.shown.untyped_storage()
        self.is_guarded = True

    def make(self, inputs: Sequence[torch.Tensor], world_size: int) -> None:
        """Allocate what takes these inputs of all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            wholes = [item.new_empty(item.numel() * world_size, requires_grad=False) for item in inputs]
            self.parts = [UnshardedMemory(whole, self._error) for whole in wholes]
        self.is_guarded = all(part.is_guarded for part in self.parts)

    def refuse_no_access(self) -> None:
        """What forward sees has memory of its own, which cannot refuse access."""
        self.is_guarded = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the memory."""
        return any(same_storage(tensor.untyped_storage(), part.storage) for part in self.parts)

    def rename(self, error: str) -> None:
        self._error = error
        for part in self.parts:
            part.rename(error)

    def show(self) -> None:
        for part in self.parts:
            part.show()

    def hide(self) -> None:
        for part in self.parts:
            part.hide()

    def free(self) -> None:
        for part in self.parts:
            part.free()

    def restore(self) -> None:
        """Allocate what was freed."""
        for part in self.parts:
            part.allocate()

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)


class _Works:
    """Several collectives in flight."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Form:
    """What the class of a parameter makes of it: what is gathered, and what forward sees.

    Args:
        extension: the all-gather of the class.
        shard, layout, mesh, label: of the flat parameter, which has equal rows on every rank.
        dtype: to compute in.

    Attributes:
        mesh: the ranks.
        memory: what the all-gathers write to.
        bearer: has the attributes that the user has set on the parameter; the class has attributes of its own there.
    """

    __slots__ = (
        "_dtype", "_extension", "_inner", "_inputs", "_instance", "_label", "_metadata", "_num_padded", "_shard_mesh",
        "bearer", "memory", "mesh",
    )  # fmt: skip

    def __init__(
        self,
        extension: Extension,
        shard: torch.Tensor,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        label: Label,
    ) -> None:
        self.mesh, self._extension, self._dtype, self._label = mesh, extension, dtype, label
        self._shard_mesh = mesh.shard_mesh()
        self._num_padded = layout.flat_numel // layout.params[0].row_numel
        self.memory = ExtendedMemory(error_of_late_access(mesh.rank, label), shard.device)
        self._instance = extension.over(shard.view(-1, *extension.shape[1:]))
        self.bearer = nn.Parameter(shard.new_empty(0), requires_grad=False)
        self._metadata: Any = None
        self._inputs: list[torch.Tensor] = []
        self._inner: list[tuple[torch.Tensor, int]] | None = None  # memory of the result's own, and its bytes

    def gather(self, is_allocated: bool) -> Work | None:
        """Let the class make what is gathered, and issue the all-gathers of it; ``None``: they are complete."""
        memory, world_size = self.memory, self.mesh.shard_world_size
        inputs, self._metadata = self._extension.inputs(self._instance, self._shard_mesh)
        self._inputs = [item.detach().contiguous() for item in inputs]
        if not memory.parts:
            memory.make(self._inputs, world_size)
        elif not is_allocated:
            memory.restore()
        pairs = [(part.hidden, item.view(-1)) for part, item in zip(memory.parts, self._inputs, strict=True)]
        if world_size == 1:
            for hidden, flat in pairs:
                hidden.copy_(flat)
            return None
        return _Works([self.mesh.transport.all_gather(*pair, self._label) for pair in pairs if pair[0].numel()])

    def show_in(self, param: nn.Parameter) -> bool:
        """The all-gathers are complete: let the class fill ``param``, or make it, the first time.

        Returns:
            Whether it was made.
        """
        self.memory.show()
        outputs = tuple(map(self._whole, self.memory.parts, self._inputs))
        metadata, self._metadata, self._inputs = self._metadata, None, []
        if self._inner is None:
            self._make(param, *self._instance.fsdp_post_all_gather(outputs, metadata, self._dtype))
            return True
        for tensor, nbytes in self._inner:
            tensor.untyped_storage().resize_(nbytes)
        with preserved_versions([param, *(tensor for tensor, _ in self._inner)]):
            self._instance.fsdp_post_all_gather(outputs, metadata, self._dtype, out=param)
        return False

    def _whole(self, part: UnshardedMemory, given: torch.Tensor) -> torch.Tensor:
        """What was gathered of one input, without the rows that are padding."""
        whole = part.shown.view(-1, *given.shape[1:])
        return whole[: self._extension.shape[0]] if whole.shape[0] == self._num_padded else whole

    def _make(self, param: nn.Parameter, result: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        """Make ``param``, an empty one, what the class has returned; it stays the same object."""
        if result.shape != self._extension.shape:
            raise ValueError(
                f"{self._extension.cls.__name__}.fsdp_post_all_gather() returned a tensor of shape "
                f"{tuple(result.shape)} for the parameter {self._label}, which has {tuple(self._extension.shape)}"
            )
        self._inner = [(item, item.untyped_storage().nbytes()) for item in inner if not self.memory.holds(item)]
        if self._inner:
            self.memory.refuse_no_access()
        torch.utils.swap_tensors(param, nn.Parameter(result, requires_grad=param.requires_grad))
        copy_attributes(self.bearer, param)

    def free(self) -> None:
        self.memory.free()
        for tensor, _ in self._inner or ():
            tensor.untyped_storage().resize_(0)

    def nbytes(self) -> int:
        """The bytes that are allocated."""
        return self.memory.nbytes() + sum(tensor.untyped_storage().nbytes() for tensor, _ in self._inner or ())


class ExtendedUnsharded(Unsharded):
    """The parameter that ``forward`` computes with, made by its class of what it has gathered.

    Args:
        extension: the all-gather of the class.
        shard, layout, mesh, dtype, label: as for ``Unsharded``; the layout has equal rows on every rank.
    """

    __slots__ = ("form",)

    shows_shards = False

    def __init__(
        self,
        extension: Extension,
        shard: torch.Tensor,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        label: Label,
    ) -> None:
        self.dtype, self._shard, self.part, self.never_freed = dtype, shard, None, False
        with torch.inference_mode(False), torch.no_grad():
            self.form = _Form(extension, shard, layout, mesh, dtype, label)
            self.memory = self.form.memory
            # Until the first all-gather, which makes another tensor of it.
            params = [nn.Parameter(shard.new_empty(0), requires_grad=False)]
        self._begin(params, params, False)

    @property
    def bearers(self) -> Sequence[nn.Parameter]:
        return [self.form.bearer]

    def gather_on(self, mesh: DataParallelMesh) -> None:
        self.form.mesh = mesh

    def allocate(self) -> None:
        """Have memory, to be filled; before the first all-gather it is not known how much."""
        self.form.memory.restore()
        self.is_allocated = True

    def gather(self, segments: int) -> None:
        self.gathered = self._shard._version, segments, writes.count
        with torch.inference_mode(False), torch.no_grad():
            self.work = self.form.gather(self.is_allocated)
        self.is_allocated = True
        if self.work is None:
            self.arrive()

    def arrive(self) -> None:
        self.work = None
        with torch.inference_mode(False), torch.no_grad():
            is_made = self.form.show_in(self.params[0])
        if is_made:
            self.forgive_edit()  # its versions may be those of the memory

    def free(self) -> None:
        self.form.free()
        self.is_allocated = self.left_by_forward = False
