"""How parameters are stored in shards and gathered: one codec for each kind of parameter.

- ``ParameterCodec``: by their elements, as they are. Most models have no other.
- ``ExtensionCodec``: the class of the parameter has an all-gather of its own (FSDP2's extension protocol).
- ``CompositeCodec``: it consists of several tensors (``__tensor_flatten__``; quantized weights), stored as their bytes.

A codec is chosen when flat parameters are built, in ``param_kind``. The last two are in the plug-in
``parameter_classes``."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from ..._torch import is_wrapper
from ...errors import MisuseError
from ..ragged import RaggedDTensor, RaggedSpec
from .layout import FlatLayout, LocalShards, full_views, local_views

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class ParameterCodec:
    """How the parameters of a flat parameter are stored in its shard and gathered. Here: by their elements."""

    is_composite: ClassVar[bool] = False  # a parameter consists of several tensors

    @property
    def gathered_by(self) -> str | None:
        """The name of the class that gathers the only parameter, or builds it from what is gathered, if one does."""
        return None

    def of_a_copy(self, memo: dict[int, Any]) -> ParameterCodec:
        """The codec for a copy of the parameters' module, which ``memo`` (of ``copy.deepcopy``) holds, or will hold."""
        return self

    def dtype_of(self, shard: torch.Tensor) -> torch.dtype:
        """The dtype of the parameters with this shard."""
        return shard.dtype

    def shard_numel(self, layout: FlatLayout) -> int:
        """The length of a shard."""
        return layout.shard_numel

    def locals_of(self, shard: torch.Tensor, local_shards: LocalShards) -> list[torch.Tensor]:
        """Views of a shard: the local tensors of the sharded parameters."""
        return local_views(shard, local_shards)

    def sharded(self, local: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
        """Make the tensor of a sharded parameter over one of ``locals_of``."""
        return RaggedDTensor(local, spec)

    def wholes_of(self, flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
        """The whole parameters in ``flat``, the shards of all ranks: views of it, unless a class builds something else
        from it."""
        return full_views(layout, flat)


BY_ELEMENTS = ParameterCodec()


def has_protocol(param: torch.Tensor) -> bool:
    """Whether the class of a parameter has an all-gather of its own."""
    return hasattr(param, PRE) or hasattr(param, POST)


def is_composite(param: torch.Tensor) -> bool:
    """Whether a parameter that is not a DTensor consists of more than one tensor of its own shape and dtype."""
    if not is_wrapper(param) or isinstance(param, DTensor):
        return False
    from ...plugins.parameter_classes import inner_tensors

    tensors = inner_tensors(param)
    if len(tensors) != 1:
        return True
    (inner,) = tensors.values()
    return (inner.shape, inner.dtype) != (param.shape, param.dtype) or is_wrapper(inner)


def num_arguments(param: Any) -> int:
    """The number of arguments of the first method."""
    return len(inspect.signature(param.fsdp_pre_all_gather).parameters)


def releases(param: Any) -> bool:
    """The third method's answer, if there is one."""
    return hasattr(param, RELEASES) and getattr(param, RELEASES)()


def check_protocol(param: torch.Tensor, fqn: str) -> None:
    """Raise ValueError if the class of a parameter has only part of the protocol."""
    cls, methods = type(param).__name__, [name for name in (PRE, POST) if hasattr(param, name)]
    if len(methods) == 1:
        raise MisuseError(
            f"fully_shard(): the class {cls} of the parameter {fqn} has only {methods[0]}: an all-gather of its own "
            f"needs both {PRE} and {POST}"
        )
    if hasattr(param, RELEASES):
        if not methods:
            raise MisuseError(
                f"fully_shard(): the class {cls} of the parameter {fqn} has {RELEASES} without {PRE} and {POST}"
            )
        answer = getattr(param, RELEASES)()
        if not isinstance(answer, bool):
            raise MisuseError(
                f"fully_shard(): {cls}.{RELEASES}(), of the parameter {fqn}, returned {answer!r}, expected True or "
                "False"
            )
    if methods and num_arguments(param) not in (1, 5):
        raise MisuseError(
            f"fully_shard(): {cls}.{PRE}(), of the parameter {fqn}, takes {num_arguments(param)} arguments, expected "
            "(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
        )
