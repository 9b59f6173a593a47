"""Flat views: contiguous ranges (segments) of a flat parameter, each one leaf parameter, for optimizers that ignore
shapes.

``FlatParamHandle`` owns the segments of its flat parameter, ``optimizers/flat_parameters`` asks for them, and
``ShardedGradient`` gives them their gradients. Nothing here communicates::

    flat parameter   |a a a a|b b|-|c c c|-|      two ranks, sharded parameters a, b and c
    whole            |x x x x x x x x x x x x|    stock DTensor, Shard(0): the shards are equal, padding included
    a and b only     |x x x x|x x|                RaggedDTensor: rank 0 holds 6 elements, rank 1 none

Parameters that tensor parallelism has split get flat views of their own, which hold the ranks' shards one after
the other. For all other parameters, the ranks of the tensor-parallel mesh hold the same elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._torch import DTensorSpec, TensorMeta, make_dtensor, renew_hooks, set_local_tensor
from ..comm import DataParallelMesh
from ..ragged import RaggedDTensor, RaggedShard
from .layout import FlatLayout
from .sharded_param import ParamAttribute, copy_attributes, local_of, shown_on


class FlatSegment:
    """Adjacent sharded parameters of one flat parameter, as one 1-D parameter: a flat view.

    Args:
        layout: the flat parameter's layout.
        mesh: the ranks.
        sharded_params: the adjacent parameters, as a range of indices; if it has all of them, the flat view is the
            whole shard, with its padding.
        is_local: the flat view is a plain tensor of what this rank holds, instead of a DTensor.
        shard: this rank's shard, of which the flat view shows a range.
        cut: the dimensions of the tensor-parallel mesh over which all of these parameters are split, if any.
        among_cut: other parameters of the model are split by tensor parallelism; torch cannot combine their norms with
            those of stock DTensors.
    """

    __slots__ = (
        "_cut", "_is_stock", "_mesh", "_placement", "_shape", "gradient", "is_local", "is_whole", "parameter",
        "sharded_params", "start", "stop",
    )  # fmt: skip

    def __init__(
        self,
        layout: FlatLayout,
        mesh: DataParallelMesh,
        sharded_params: range,
        is_local: bool,
        shard: torch.Tensor,
        cut: Sequence[tuple[DeviceMesh, int]] = (),
        among_cut: bool = False,
    ) -> None:
        self.sharded_params, self.is_local = sharded_params, is_local
        self.is_whole = len(sharded_params) == len(layout.params)
        self._mesh, self._cut, self._is_stock = mesh, cut, self.is_whole and not cut and not among_cut
        last = layout.params[sharded_params[-1]]
        begin, end = layout.params[sharded_params[0]].offset, last.offset + last.numel
        if cut or layout.in_chunks:  # with the padding: ranks may hold unequal shares of the last parameter
            following = layout.params[sharded_params.stop :]
            end = following[0].offset if following else layout.flat_numel
        if self.is_whole:
            begin, end = 0, layout.flat_numel
        # Its range in the shard, in elements.
        self.start, self.stop = layout.range_in_shard(begin, end, mesh.shard_rank)
        self._shape = (prod([end - begin, *(tensor_mesh.size(dim) for tensor_mesh, dim in cut)]),)
        self._placement = RaggedShard(layout.counts_of(begin, end), flat=True)
        # For parameter.grad, a view of the flat gradient; None while that has no memory.
        self.gradient: torch.Tensor | None = None
        self.parameter = self._make_parameter(shard)  # the flat view, a leaf; permanently the same object
        setattr(self.parameter, ParamAttribute.FLAT, True)

    def rebind(self, shard: torch.Tensor) -> None:
        """Make the parameter a view of another shard; its gradient is dropped."""
        self.parameter.grad = None
        fresh = self._make_parameter(shard)
        torch.utils.swap_tensors(self.parameter, fresh)
        renew_hooks(self.parameter)
        copy_attributes(fresh, self.parameter)

    def is_at(self, flat: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, the parameter or its gradient, is still a view of ``flat``, the shard or flat gradient:
        nobody assigned to its ``.data``."""
        address = local_of(tensor).data_ptr()
        return self.start == self.stop or address == flat.data_ptr() + self.start * flat.element_size()

    def is_among(self, is_used: bytes) -> bool:
        """Whether ``is_used``, one byte per sharded parameter, holds a 1 for a parameter of this segment."""
        return 1 in is_used[self.sharded_params.start : self.sharded_params.stop]

    def have_gradient(self, flat: torch.Tensor | None) -> None:
        """Make ``gradient`` a view of ``flat``, the flat gradient, from now on; or ``None``."""
        self.gradient = None if flat is None else self.make_gradient(flat)

    def make_gradient(self, flat: torch.Tensor) -> torch.Tensor:
        """Make the tensor for ``parameter.grad``, over a flat gradient."""
        gradient = self.placed(flat[self.start : self.stop])
        return shown_on(self.parameter.device, gradient) if isinstance(gradient, DTensor) else gradient

    def _make_parameter(self, shard: torch.Tensor) -> nn.Parameter:
        with torch.inference_mode(False), torch.no_grad():
            local = shard[self.start : self.stop]
            parameter = nn.Parameter(self.placed(local))
            if not self.is_local:
                set_local_tensor(parameter, local)
        return parameter

    def placed(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor sharded like the flat view, from this rank's ``local``."""
        if self.is_local:
            return local
        mesh, placements = self._mesh.mesh, self._mesh.placements(self._placement)
        if self._cut:
            tensor_mesh, dims = self._cut[0][0], [dim for _, dim in self._cut]
            mesh = self._mesh.beside(tensor_mesh)
            placements = (*placements, *(Shard(0) if dim in dims else Replicate() for dim in range(tensor_mesh.ndim)))
        if not self._is_stock:
            return RaggedDTensor._from_elements(local, mesh, placements, self._shape)
        meta, placements = TensorMeta(torch.Size(self._shape), (1,), local.dtype), self._mesh.placements(Shard(0))
        tensor: torch.Tensor = make_dtensor(DTensor, local, DTensorSpec(mesh, placements, meta))
        return tensor
