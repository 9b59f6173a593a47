"""Values that replace sharded parameters for one forward, by ``torch.func.functional_call()``.

During that forward the slots of the modules hold other tensors. Full (plain) tensors are used as they are, and their
gradients stay on each rank. DTensors that are sharded like the parameter are gathered like the parameter, and their
gradients are averaged. Either way the forward runs in functional mode, so that gradients reach the given tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from .._torch import is_in_functional_call, unwrapped
from ..errors import MisuseError
from ..flat import FlatParamHandle
from ..group import _FSDPState
from ..ragged import RaggedDTensor

# The frames of is_functional_call(), of the pre-forward hook that calls it, and of at least two more for the module's
# own call (or a registered method and its caller): no functional_call() can be among these.
_NUM_FRAMES_OF_HOOK = 4


class GivenValues:
    """The values given for the parameters of a group, by the id of the unsharded parameter that they replace."""

    def __init__(self, values: Mapping[int, torch.Tensor]) -> None:
        self._values = values

    def are_full(self, handle: FlatParamHandle) -> bool:
        """Whether a full tensor was given for every parameter of ``handle``, so that there is nothing to gather."""
        return bool(self._values) and all(self._full(param) is not None for param in handle.unsharded.params)

    def sharded_parts(self, handle: FlatParamHandle) -> list[torch.Tensor | None]:
        """The tensors to gather: sharded parameters or their given replacements; ``None`` if a full one was given."""
        return [
            None if self._full(param) is not None else self._values.get(id(param), sharded)
            for param, sharded in zip(handle.unsharded.params, handle.sharded_params, strict=True)
        ]

    def full_values(self, handles: Sequence[FlatParamHandle]) -> dict[int, torch.Tensor]:
        """The given full tensors, in the dtype that the group computes in."""
        dtypes = {id(param): param.dtype for handle in handles for param in handle.unsharded.params}
        return {
            key: value.to(dtypes[key]) if key in dtypes and value.is_floating_point() else value
            for key, value in self._values.items()
            if not isinstance(unwrapped(value), DTensor)
        }

    def _full(self, param: torch.Tensor) -> torch.Tensor | None:
        value = self._values.get(id(param))
        return None if value is None or isinstance(unwrapped(value), DTensor) else value


def functional_call_params(state: _FSDPState) -> GivenValues:
    """The values that replace parameters in the slots of the group's modules.

    Raises:
        ValueError: a given tensor has the wrong shape or is sharded in a different way.
    """
    found = state.swap.overrides()
    for handle in state._handles:
        for fqn, param, sharded in zip(handle.fqns, handle.unsharded.params, handle.sharded_params, strict=True):
            value = found.get(id(param))
            if value is None:
                continue
            inner = unwrapped(value)
            is_other = isinstance(inner, DTensor) and not (
                isinstance(inner, RaggedDTensor)
                and isinstance(sharded, RaggedDTensor)
                and inner._spec.is_sharded_like(sharded._spec)
            )
            if (
                is_other
                or inner.ndim < sharded.ndim
                or (not isinstance(inner, DTensor) and value.shape != sharded.shape)
            ):
                layout = list(inner.placements) if isinstance(inner, DTensor) else "a plain tensor"
                raise MisuseError(
                    f"functional_call(): {handle.label.names(fqn)} of the fully_shard group {state.name}, of shape "
                    f"{tuple(sharded.shape)}, was given a value of shape {tuple(value.shape)}, {layout}: pass a full "
                    "tensor of the parameter's shape (.full_tensor() of a sharded one), or one that is sharded like "
                    "the parameter (distribute_ragged(value, p.device_mesh, p.placements))"
                )
    return GivenValues(found)


def is_functional_call(state: _FSDPState) -> bool:
    """Whether this forward of the group's modules uses other values than the group's own. On the hot path.

    The slots of all groups were compared at the start of the outermost forward. So inside it, this first looks at a few
    stack frames instead of the group's slots, which are no longer in the CPU's caches."""
    root = state.root
    forward = None if root is None else root.forward
    if forward is None or not forward.depth or forward.is_given or forward.caller is None:
        swap = state.swap  # None in a copy that has not run
        return swap is not None and swap.is_overridden() and is_in_functional_call()
    return is_in_functional_call(forward.caller, _NUM_FRAMES_OF_HOOK) and state.swap.is_overridden()


@contextmanager
def own_values(states: Sequence[_FSDPState]) -> Iterator[None]:
    """A context in which the modules hold their own parameters, even inside ``functional_call()``."""
    if not is_in_functional_call():
        yield
        return
    given = [item for state in states if state.is_complete for item in state.swap.take_overrides()]
    try:
        yield
    finally:
        for parameters, name, value in given:
            parameters[name] = value
