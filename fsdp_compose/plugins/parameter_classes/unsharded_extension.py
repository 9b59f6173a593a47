"""The unsharded side of a flat parameter whose only parameter is gathered by its class; see ``codecs``.

The class converts the shard, to other dtypes and shapes, and the result is gathered instead of the shard. From the
gathered tensors, the class makes the parameter that forward computes with: one object that stays the same while its
memory comes and goes. Other flat parameters use plain ``Unsharded`` and never run this code::

    shard (its padding too)  -pre->  inputs  -all-gather->  memory  -post->  unsharded parameter
    |rows|                           |....|                 |....|....|      views of the memory, or memory of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..._torch import preserved_versions, same_storage
from ...core.comm import DataParallelMesh, Label, Work, mesh_of_this_rank, streams_of
from ...core.flat import FlatLayout
from ...core.flat.codecs import RELEASES
from ...core.flat.param_kind import plain_gradient
from ...core.flat.sharded_param import NOT_COPIED, share_attributes
from ...core.flat.unsharded import Unsharded, UnshardedMemory, error_of_late_access
from ...core.ragged import writes
from ...errors import MisuseError
from .class_codecs import ExtensionCodec
from .subclass_views import show_as


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

    def holds(self, tensor: torch.Tensor) -> bool:
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
        for part in self.parts:
            part.allocate()

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)


@dataclass(slots=True, eq=False)
class _Works:
    """Several collectives in flight."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class ExtendedUnsharded(Unsharded):
    """The parameter that ``forward`` computes with, made by its class from gathered tensors.

    Args:
        codec: the all-gather of the class.
        shard, layout, mesh, dtype, label: as for ``Unsharded``; the layout has equal rows on every rank.
    """

    __slots__ = (
        "_bearer", "_codec", "_copied", "_face", "_gradient_hook", "_inner", "_inputs", "_instance", "_label", "_mesh",
        "_metadata", "_num_padded", "_own", "_shard_mesh",
    )  # fmt: skip

    memory: ExtendedMemory
    shows_shards = False

    def __init__(
        self,
        codec: ExtensionCodec,
        shard: torch.Tensor,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        label: Label,
    ) -> None:
        self.dtype, self._shard, self.post_forward, self.never_freed = dtype, shard, None, False
        self._codec, self._mesh, self._shard_mesh, self._label = codec, mesh, mesh.shard_mesh(), label
        self._num_padded = layout.flat_numel // layout.params[0].row_numel
        self._face: Any = None  # the sharded parameter
        self._gradient_hook: Any = None
        self._inner: list[tuple[torch.Tensor, int]] = []  # the result's own memory, with its size in bytes
        self._inputs: list[torch.Tensor] = []  # what this rank contributes, during an all-gather
        self._metadata: Any = None
        with torch.inference_mode(False), torch.no_grad():
            self._instance = codec.over_shard(shard)
            # The class has attributes of its own on the unsharded parameter. So another tensor bears those that the
            # user has set on the sharded one; they are copied to the unsharded one and back.
            self._bearer = nn.Parameter(shard.new_empty(0, dtype=dtype), requires_grad=False)
            if shard.is_meta:  # replaced before anything is gathered
                self._inputs = [shard]
            else:
                # Its form is known before the ranks meet; its content is not. This rank asks the class alone, but for
                # several tensors, the shape of the result depends on the number of ranks.
                is_alone = mesh.shard_world_size > 1 and not codec.is_composite
                self._prepare(mesh_of_this_rank(shard.device.type) if is_alone else self._shard_mesh)
            error = error_of_late_access(mesh.rank, label)
            self.memory = ExtendedMemory(self._inputs, mesh.shard_world_size, error, shard.device)
            param = self._bearer if shard.is_meta else self._make()
            self._inputs = []
        self._own = {*vars(param)}  # names of attributes that belong to the class
        self._copied: dict[str, Any] = {}  # attributes of the user that both sides have
        self._begin([param], [param], False)

    def set_flags(self, flags: list[bool]) -> None:
        super().set_flags(flags)
        if flags[0] and self._gradient_hook is None:  # what is computed with a class may give gradients of the class
            self._gradient_hook = self.params[0].register_hook(partial(plain_gradient, label=self._label))

    # ---- Attributes

    @property
    def bearers(self) -> Sequence[nn.Parameter]:
        return [self._bearer]

    def take_attributes(self, sharded_params: Sequence[nn.Parameter]) -> None:
        (self._face,) = sharded_params
        show_as(self._face, self._codec)
        share_attributes(self._face, self._bearer)
        self._show_attributes()

    def _show_attributes(self) -> None:
        """Copy the user's attributes from the sharded parameter to the unsharded one."""
        (param,) = self.params
        if param is self._bearer:
            return
        present, outside = vars(param), vars(self._bearer)
        for key in self._copied.keys() - outside.keys():
            present.pop(key, None)
        self._copied = {key: outside[key] for key in outside.keys() - self._own - NOT_COPIED}
        present.update(self._copied)

    def _keep_attributes(self) -> None:
        """Do to the sharded parameter what the user has done to attributes of the unsharded one."""
        (param,) = self.params
        if param is self._bearer:
            return
        present, outside = vars(param), vars(self._bearer)
        for key in self._copied.keys() - present.keys():
            outside.pop(key, None)
        known, missing = self._copied, object()
        self._copied = {key: value for key, value in present.items() if key not in self._own}
        outside.update({key: value for key, value in self._copied.items() if known.get(key, missing) is not value})

    # ---- The class

    def _prepare(self, mesh: DeviceMesh) -> None:
        if isinstance(self._face, DTensor):  # with the attributes that the class has set there
            vars(self._instance).update(self._codec.own_attributes(self._face._local_tensor))
        inputs, self._metadata = self._codec.inputs(self._instance, mesh)
        self._inputs = [item.detach().contiguous() for item in inputs]

    def _make(self) -> nn.Parameter:
        """Ask the class to make the unsharded parameter; its memory is then freed."""
        self.memory.show()
        result, inner = self._codec.make(self._instance, self._outputs(), self._metadata, self.dtype)
        if result.shape != self._codec.shape:
            raise MisuseError(
                f"{self._codec.gathered_by}.fsdp_post_all_gather() returned a tensor of shape {tuple(result.shape)} "
                f"for the parameter {self._label}, which has shape {tuple(self._codec.shape)}"
            )
        self._inner = [(item, item.untyped_storage().nbytes()) for item in inner if not self.memory.holds(item)]
        if self._codec.releases and (len(self._inner) < len(inner) or not inner):
            raise MisuseError(
                f"{self._codec.gathered_by} asks to free what it gathers of the parameter {self._label} early "
                f"({RELEASES}), but fsdp_post_all_gather() returned views of it, or no inner tensors"
            )
        if self._inner:  # memory of the class, which cannot refuse access
            self.memory.is_guarded = False
        self._free()
        return nn.Parameter(result, requires_grad=False)

    def _outputs(self) -> tuple[torch.Tensor, ...]:
        """The gathered tensors of each input, without rows that are padding."""
        wholes = [
            part.shown.view(-1, *given.shape[1:]) for part, given in zip(self.memory.parts, self._inputs, strict=True)
        ]
        num_rows = self._codec.shape[0]
        return tuple([whole[:num_rows] if whole.shape[0] == self._num_padded else whole for whole in wholes])

    # ---- Gathering

    def gather_on(self, mesh: DataParallelMesh) -> None:
        self._mesh = mesh

    def keep_storage(self, keeps: bool) -> None:
        assert not keeps, "the caller has refused it"

    def allocate(self) -> None:
        self.memory.restore()
        self.is_allocated = True

    def gather(self, segments: int) -> None:
        self.gathered = self._shard._version, segments, writes.count
        with torch.inference_mode(False), torch.no_grad():
            self.work = self._issue()
        self.is_allocated = True
        if self.work is None:
            self.arrive()

    def _issue(self) -> Work | None:
        """Ask the class for the tensors to gather, and issue their all-gathers; ``None`` if they are complete."""
        self._prepare(self._shard_mesh)
        if not self.is_allocated or self._codec.releases:
            self.memory.restore()
        pairs = [(part.hidden, item.view(-1)) for part, item in zip(self.memory.parts, self._inputs, strict=True)]
        # As in ``unsharded``: on an accelerator the work of one rank still orders the copy before compute.
        if self._mesh.shard_world_size == 1 and streams_of(self.memory.shown.device) is None:
            for hidden, flat in pairs:
                hidden.copy_(flat)
            return None
        transport = self._mesh.transport.exact  # some of it are scales
        return _Works([transport.all_gather(*pair, self._label) for pair in pairs if pair[0].numel()])

    def arrive(self) -> None:
        self.work = None
        self._keep_attributes()
        (param,) = self.params
        with torch.inference_mode(False), torch.no_grad():
            self.memory.show()
            for tensor, nbytes in self._inner:
                tensor.untyped_storage().resize_(nbytes)
            before = {*vars(param)}
            with preserved_versions([param, *(tensor for tensor, _ in self._inner)]):
                self._codec.fill(self._instance, self._outputs(), self._metadata, self.dtype, param)
            self._own |= vars(param).keys() - before
            self._inputs, self._metadata = [], None
            if self._codec.releases:
                self.memory.free()
        self._show_attributes()

    def free(self) -> None:
        self._keep_attributes()
        self._free()
        self.is_allocated = self.left_by_forward = False

    def _free(self) -> None:
        self.memory.free()
        for tensor, _ in self._inner:
            tensor.untyped_storage().resize_(0)

    def nbytes(self) -> int:
        return self.memory.nbytes() + sum(tensor.untyped_storage().nbytes() for tensor, _ in self._inner)
