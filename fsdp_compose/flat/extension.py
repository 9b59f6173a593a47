"""Classes of parameters that have an all-gather of their own, by the protocol of FSDP2: gathered in another form, often
in fewer bytes, than they are kept and trained in (torchao's weights for float8 training).

A class has two methods. Each rank calls the first on what it has of a parameter, an instance of the class; what it
returns is gathered, tensor by tensor, concatenated along dim 0, and the second makes of that what forward sees::

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (tensor, inner tensors); None if given ``out``

Both may communicate on ``mesh``. ``out`` is what an earlier call returned, to be filled again. The inner tensors are
the memory of the result: it is freed, and allocated again, with the gathered tensors. A third method is optional::

    fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool

If it returns True, the gathered tensors are freed as soon as the second has made the result, which is no view of them.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch import is_wrapper
from .policy import MixedPrecisionPolicy

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@dataclass(frozen=True, eq=False)
class Extension:
    """The all-gather of one parameter's class. No two are equal: its parameter is in a flat parameter by itself.

    Attributes:
        cls: the class.
        inner: the attribute in which an instance has its elements; ``None``: they are its own.
        context: what else an instance is made of.
        shape: of the parameter.
        module: the module in which it stands.
        policy: what the user has decided about dtypes.
        is_short: the first method takes the mesh alone.
        releases: what was gathered is not needed once the result is made.
        is_composite: an instance is several tensors.
    """

    cls: type[Any]
    inner: str | None
    context: Any
    shape: torch.Size
    module: weakref.ref[nn.Module]
    policy: MixedPrecisionPolicy
    is_short: bool
    releases: bool

    is_composite: ClassVar[bool] = False

    def of_a_copy(self, memo: dict[int, Any]) -> Extension:
        """For the copy of the module, which ``memo`` has, or gets."""
        module = self.module()
        return self if module is None else replace(self, module=weakref.ref(copy.deepcopy(module, memo)))

    @property
    def name(self) -> str:
        """Of the class."""
        return self.cls.__name__

    def dtype_of(self, shard: torch.Tensor) -> torch.dtype:
        """Of the parameter with this shard."""
        return shard.dtype

    def over(self, local: torch.Tensor) -> Any:
        """An instance of the class over some rows."""
        if self.inner is None:
            instance = local.as_subclass(self.cls)
            instance.__dict__.update(self.context)
            return instance
        return self.cls.__tensor_unflatten__({self.inner: local}, self.context, local.shape, local.stride())

    def over_shard(self, shard: torch.Tensor) -> Any:
        """The same, over all of a shard."""
        return self.over(shard.view(-1, *self.shape[1:]))

    def whole_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter, of the whole of what its ranks keep."""
        return whole

    def own_attributes(self, instance: Any) -> dict[str, Any]:
        """What was set on an instance, besides its elements."""
        return {key: value for key, value in vars(instance).items() if key != self.inner}

    def inputs(self, instance: Any, mesh: DeviceMesh) -> tuple[list[torch.Tensor], Any]:
        """What is gathered, and the metadata, of this rank's rows. Ranks: all of ``mesh``."""
        if self.is_short:
            inputs, metadata = instance.fsdp_pre_all_gather(mesh)
        else:
            stride = torch.empty(self.shape, device="meta").stride()
            arguments = (mesh, self.shape, stride, self.module(), self.policy)
            inputs, metadata = instance.fsdp_pre_all_gather(*arguments)
        return [*inputs], metadata

    def make(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What forward sees of what was gathered, and the memory of that."""
        made: tuple[torch.Tensor, Sequence[torch.Tensor]] = instance.fsdp_post_all_gather(outputs, metadata, dtype)
        return made

    def fill(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, out: torch.Tensor
    ) -> None:
        """Let what ``make`` has made show what was gathered now."""
        instance.fsdp_post_all_gather(outputs, metadata, dtype, out=out)


def has_protocol(param: torch.Tensor) -> bool:
    """Whether the class of a parameter has an all-gather of its own."""
    return hasattr(param, PRE) or hasattr(param, POST)


def extension_of(param: nn.Parameter, module: nn.Module, policy: MixedPrecisionPolicy) -> Extension | None:
    """The all-gather of the class of ``param``, a checked parameter in ``module``, if it has one."""
    if not has_protocol(param) or not param.numel() or not param.dim():
        return None
    inner, context = None, dict[str, Any]()
    if is_wrapper(param):
        (inner,), context = param.__tensor_flatten__()  # type: ignore[attr-defined]
    else:
        context = {key: value for key, value in param.__dict__.items() if key != "_is_param"}
    is_short = num_arguments(param) == 1
    return Extension(type(param), inner, context, param.shape, weakref.ref(module), policy, is_short, releases(param))


def num_arguments(param: Any) -> int:
    """Of the first method."""
    return len(inspect.signature(param.fsdp_pre_all_gather).parameters)


def releases(param: Any) -> bool:
    """What the third method says, if there is one."""
    return hasattr(param, RELEASES) and getattr(param, RELEASES)()


def check_protocol(param: torch.Tensor, fqn: str) -> None:
    """Raise ValueError if the class of a parameter has the protocol in part."""
    cls, methods = type(param).__name__, [name for name in (PRE, POST) if hasattr(param, name)]
    if len(methods) == 1:
        raise ValueError(
            f"fully_shard(): the class {cls} of the parameter {fqn} has {methods[0]} alone: an all-gather of its own "
            f"is {PRE} and {POST}"
        )
    if hasattr(param, RELEASES):
        if not methods:
            raise ValueError(
                f"fully_shard(): the class {cls} of the parameter {fqn} has {RELEASES} without {PRE} and {POST}"
            )
        answer = getattr(param, RELEASES)()
        if not isinstance(answer, bool):
            raise ValueError(
                f"fully_shard(): {cls}.{RELEASES}(), of the parameter {fqn}, returned {answer!r}, expected True or "
                "False"
            )
    if methods and num_arguments(param) not in (1, 5):
        raise ValueError(
            f"fully_shard(): {cls}.{PRE}(), of the parameter {fqn}, takes {num_arguments(param)} arguments, expected "
            "(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
        )
