"""The unsharded side of a flat parameter whose only parameter is gathered by its class; see ``codecs``.

The class converts the shard, to other dtypes and shapes, and the result is gathered instead of the shard. From the
gathered tensors, the class makes the parameter that forward computes with: one object that stays the same while its
memory comes and goes. Other flat parameters use plain ``Unsharded`` and never run this code::

    shard (its padding too)  -pre->  inputs  -all-gather->  memory  -post->  unsharded parameter
    |rows|                           |....|                 |....|....|      views of the memory, or memory of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import preserved_versions, same_storage
from ..comm import DataParallelMesh, Label, Work, mesh_of_this_rank
from ..errors import MisuseError
from ..ragged import show_as, writes
from .codecs import RELEASES, ExtensionCodec
from .layout import FlatLayout
from .param_kind import plain_gradient
from .sharded_param import NOT_COPIED, share_attributes
from .unsharded import Unsharded, UnshardedMemory, error_of_late_access


class ExtendedMemory(UnshardedMemory):
    """The memory of all tensors that are gathered for one parameter, hidden at first.

    Args:
        inputs: the tensors that one rank contributes.
        world_size: the number of ranks.
        error: see ``UnshardedMemory``.

    Attributes:
        parts: one for each tensor.
    """

    __slots__ = ("parts",)

    def __init__(self, inputs: Sequence[torch.Tensor], world_size: int, error: str, device: torch.device) -> None:
        wholes = [item.new_empty(item.numel() * world_size, requires_grad=False) for item in inputs]
        self.parts = [UnshardedMemory(whole, error) for whole in wholes]
        self.shown = self.hidden = torch.empty(0, device=device)  # placeholders where versions are compared
        self.storage = self.shown.untyped_storage()
        self.is_guarded = all(part.is_guarded for part in self.parts)

    def refuse_no_access(self) -> None:
        """Give up refusing access: the tensor that forward sees has memory of its own, which cannot refuse it."""
        self.is_guarded = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the memory."""
        return any(same_storage(tensor.untyped_storage(), part.storage) for part in self.parts)

    def rename(self, error: str) -> None:
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
    """What the class of a parameter makes from it: the tensors to gather, and the parameter that forward sees.

    Args:
        extension: the all-gather of the class.
        shard, layout, mesh, label: those of the flat parameter, which has equally many rows on every rank.
        dtype: the compute dtype.

    Attributes:
        mesh: the ranks.
        memory: the memory that the all-gathers write to.
        param: the unsharded parameter.
        extension: as given.
        bearer: has the attributes that the user has set on the sharded parameter, because the class has attributes of
            its own on the unsharded one; those of users are copied from one to the other.
    """

    __slots__ = (
        "_copied", "_dtype", "_face", "_inner", "_inputs", "_instance", "_label", "_metadata", "_num_padded", "_own",
        "_shard_mesh", "bearer", "extension", "memory", "mesh", "param",
    )  # fmt: skip

    def __init__(
        self,
        extension: ExtensionCodec,
        shard: torch.Tensor,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        label: Label,
    ) -> None:
        self.mesh, self.extension, self._dtype, self._label = mesh, extension, dtype, label
        self._shard_mesh = mesh.shard_mesh()
        self._num_padded = layout.flat_numel // layout.params[0].row_numel
        self._instance = extension.over_shard(shard)
        self._face: Any = None
        self.bearer = nn.Parameter(shard.new_empty(0, dtype=dtype), requires_grad=False)
        self._inner: list[tuple[torch.Tensor, int]] = []  # the result's own memory, with its size in bytes
        if shard.is_meta:  # replaced before anything is gathered
            self._inputs, self._metadata = [shard], None
        else:
            # Its form is known before the ranks meet; its content is not. This rank asks the class alone, but for
            # several tensors, the shape of the result depends on the number of ranks.
            is_alone = mesh.shard_world_size > 1 and not extension.is_composite
            self._prepare(mesh_of_this_rank(shard.device.type) if is_alone else self._shard_mesh)
        error = error_of_late_access(mesh.rank, label)
        self.memory = ExtendedMemory(self._inputs, mesh.shard_world_size, error, shard.device)
        self.param = self.bearer if shard.is_meta else self._make()
        self._inputs = []
        self._own = {*vars(self.param)}  # names of attributes that belong to the class
        self._copied: dict[str, Any] = {}  # attributes of the user that both sides have

    def belong_to(self, sharded: nn.Parameter) -> None:
        """Set ``sharded``, the other side of the parameter."""
        self._face = sharded
        share_attributes(sharded, self.bearer)
        self.show_attributes()

    def show_attributes(self) -> None:
        """Copy the user's attributes from the sharded parameter to the unsharded one."""
        if self.param is self.bearer:
            return
        present, outside = vars(self.param), vars(self.bearer)
        for key in self._copied.keys() - outside.keys():
            present.pop(key, None)
        self._copied = {key: outside[key] for key in outside.keys() - self._own - NOT_COPIED}
        present.update(self._copied)

    def keep_attributes(self) -> None:
        """Do to the sharded parameter what the user has done to attributes of the unsharded one."""
        if self.param is self.bearer:
            return
        present, outside = vars(self.param), vars(self.bearer)
        for key in self._copied.keys() - present.keys():
            outside.pop(key, None)
        known, missing = self._copied, object()
        self._copied = {key: value for key, value in present.items() if key not in self._own}
        outside.update({key: value for key, value in self._copied.items() if known.get(key, missing) is not value})

    def _prepare(self, mesh: DeviceMesh) -> None:
        """Ask the class for the tensors to gather."""
        if isinstance(self._face, DTensor):  # with the attributes that the class has set there
            vars(self._instance).update(self.extension.own_attributes(self._face._local_tensor))
        inputs, self._metadata = self.extension.inputs(self._instance, mesh)
        self._inputs = [item.detach().contiguous() for item in inputs]

    def _make(self) -> nn.Parameter:
        """Ask the class to make the unsharded parameter; its memory is then freed."""
        self.memory.show()
        result, inner = self.extension.make(self._instance, self._outputs(), self._metadata, self._dtype)
        if result.shape != self.extension.shape:
            raise MisuseError(
                f"{self.extension.cls.__name__}.fsdp_post_all_gather() returned a tensor of shape "
                f"{tuple(result.shape)} for the parameter {self._label}, which has shape {tuple(self.extension.shape)}"
            )
        self._inner = [(item, item.untyped_storage().nbytes()) for item in inner if not self.memory.holds(item)]
        if self.extension.releases and (len(self._inner) < len(inner) or not inner):
            raise MisuseError(
                f"{self.extension.cls.__name__} asks to free what it gathers of the parameter {self._label} early "
                f"({RELEASES}), but fsdp_post_all_gather() returned views of it, or no inner tensors"
            )
        if self._inner:
            self.memory.refuse_no_access()
        self.free()
        return nn.Parameter(result, requires_grad=False)

    def _outputs(self) -> tuple[torch.Tensor, ...]:
        """The gathered tensors of each input, without rows that are padding."""
        wholes = [
            part.shown.view(-1, *given.shape[1:]) for part, given in zip(self.memory.parts, self._inputs, strict=True)
        ]
        num_rows = self.extension.shape[0]
        return tuple([whole[:num_rows] if whole.shape[0] == self._num_padded else whole for whole in wholes])

    def gather(self, is_allocated: bool) -> Work | None:
        """Ask the class for the tensors to gather, and issue their all-gathers; ``None`` if they are complete."""
        self._prepare(self._shard_mesh)
        if not is_allocated or self.extension.releases:
            self.memory.restore()
        pairs = [(part.hidden, item.view(-1)) for part, item in zip(self.memory.parts, self._inputs, strict=True)]
        # As in ``unsharded``: on an accelerator the work of one rank still orders the copy before compute.
        if self.mesh.shard_world_size == 1 and self.memory.shown.device.type == "cpu":
            for hidden, flat in pairs:
                hidden.copy_(flat)
            return None
        return _Works([self.mesh.transport.all_gather(*pair, self._label) for pair in pairs if pair[0].numel()])

    def show(self) -> None:
        """Called when the all-gathers are complete: the class fills the parameter."""
        self.memory.show()
        for tensor, nbytes in self._inner:
            tensor.untyped_storage().resize_(nbytes)
        before = {*vars(self.param)}
        with preserved_versions([self.param, *(tensor for tensor, _ in self._inner)]):
            self.extension.fill(self._instance, self._outputs(), self._metadata, self._dtype, self.param)
        self._own |= vars(self.param).keys() - before
        self._inputs, self._metadata = [], None
        if self.extension.releases:
            self.memory.free()

    def free(self) -> None:
        self.memory.free()
        for tensor, _ in self._inner:
            tensor.untyped_storage().resize_(0)

    def nbytes(self) -> int:
        """The bytes that are allocated."""
        return self.memory.nbytes() + sum(tensor.untyped_storage().nbytes() for tensor, _ in self._inner)


class ExtendedUnsharded(Unsharded):
    """The parameter that ``forward`` computes with, made by its class from gathered tensors.

    Args:
        extension: the all-gather of the class.
        shard, layout, mesh, dtype, label: as for ``Unsharded``; the layout has equal rows on every rank.
    """

    __slots__ = ("_gradient_hook", "_label", "form")

    shows_shards = False

    def __init__(
        self,
        extension: ExtensionCodec,
        shard: torch.Tensor,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        label: Label,
    ) -> None:
        self.dtype, self._shard, self.part, self.never_freed = dtype, shard, None, False
        self._label = label
        self._gradient_hook: Any = None
        with torch.inference_mode(False), torch.no_grad():
            self.form = _Form(extension, shard, layout, mesh, dtype, label)
            self.memory = self.form.memory
        self._begin([self.form.param], [self.form.param], False)

    @property
    def bearers(self) -> Sequence[nn.Parameter]:
        return [self.form.bearer]

    def take_attributes(self, sharded_params: Sequence[nn.Parameter]) -> None:
        show_as(sharded_params[0], self.form.extension)
        self.form.belong_to(sharded_params[0])

    def set_flags(self, flags: list[bool]) -> None:
        super().set_flags(flags)
        if flags[0] and self._gradient_hook is None:  # what is computed with a class may give gradients of the class
            self._gradient_hook = self.params[0].register_hook(partial(plain_gradient, label=self._label))

    def gather_on(self, mesh: DataParallelMesh) -> None:
        self.form.mesh = mesh

    def keep_storage(self, keeps: bool) -> None:
        assert not keeps, "the caller has refused it"

    def allocate(self) -> None:
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
        self.form.keep_attributes()
        with torch.inference_mode(False), torch.no_grad():
            self.form.show()
        self.form.show_attributes()

    def free(self) -> None:
        self.form.keep_attributes()
        self.form.free()
        self.is_allocated = self.left_by_forward = False
