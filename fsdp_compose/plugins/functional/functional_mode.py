"""Functional mode: a forward gathers with an operation that autograd differentiates, and modules show its results.

So autograd does by itself what hooks do in the default mode (see ``differentiable_gather``). A recomputation uses the
mode of the group's last forward, even if the user has left the mode since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..._torch import in_transform, temporarily_clear_interpreter_stack, unwrapped
from ...core.flat import FlatParamHandle, local_of, specs_of, whole_like_original
from ...core.group import Root, _FSDPState, begins_forward
from ...core.ragged import RaggedDTensor
from ...core.runtime import reshard
from ...core.runtime.untracked_writes import written
from ...errors import MisuseError, MisuseRuntimeError
from ..tensor_parallel import placed
from .differentiable_gather import GroupGather, refuse_accumulated

# ---- Values that replace sharded parameters for one forward, by ``torch.func.functional_call()``
#
# During that forward the slots of the modules hold other tensors. Full (plain) tensors are used as they are, and their
# gradients stay on each rank. DTensors that are sharded like the parameter are gathered like the parameter, and their
# gradients are averaged. Either way the forward runs in functional mode, so that gradients reach the given tensors.


class GivenValues:
    """The values given for the parameters of a group, by the id of the unsharded parameter that they replace."""

    def __init__(self, values: Mapping[int, torch.Tensor]) -> None:
        self._values = values

    def shards(self, handle: FlatParamHandle) -> list[torch.Tensor | None]:
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
    """The values that replace parameters in the slots of the group's modules. Raises ValueError if one has the wrong
    shape or is sharded in a different way."""
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


# ---- The mode


class FunctionalMode:
    """Functional mode for one forward of a group, with the values of ``functional_call()``, if there are any."""

    __slots__ = ("_given",)

    def __init__(self, state: _FSDPState, is_given: bool) -> None:
        """``is_given``: the forward uses values of ``functional_call()``."""
        self._given = functional_call_params(state) if is_given else GivenValues({})

    @begins_forward
    def enter(self, root: Root, state: _FSDPState, is_recomputed: bool) -> tuple[FunctionalUse, None]:
        with temporarily_clear_interpreter_stack():  # setup must not run under the torch.func transform
            refuse_accumulated(state)
            _refuse_unsupported(root, state)
            if not is_recomputed:
                root.forward.depth += 1
                if not state.progress.running_forwards:
                    reshard(root, state)  # parameters that unshard() has gathered ahead are not used in this mode
                    # reshard() leaves groups that stay unsharded: end their all-gathers
                    root.communicator.wait_for(state._handles)
        return FunctionalUse(root, state, self._given), None


def _refuse_unsupported(root: Root, state: _FSDPState) -> None:
    for handle in state._handles:
        gathered_by = handle.kind.codec.gathered_by
        if gathered_by is not None:
            raise NotImplementedError(
                f"the parameter {handle.name_of(0)} of the fully_shard group {state.name} is a "
                f"{gathered_by}, gathered by its class (fsdp_pre_all_gather). Functional "
                "mode, torch.func and functional_call() cannot differentiate that: use the default mode"
            )
    for handle in state._handles:
        own = handle.tensor_parallel
        if own is not None and not own.is_shown_as_stored:
            on_data_dims = "DTensors on the data-parallel dimensions, too (dp_mesh_dims)"
            how = on_data_dims if own.is_shown_on_data_dims else "annotated by spmd_types on other dimensions, too"
            raise NotImplementedError(
                f"the parameters of the fully_shard group {state.name} are {how}. In functional mode, torch.func and "
                "functional_call(), their gradients would be summed over the wrong ranks: use the default mode"
            )
    if root.scheduler.skips:
        raise NotImplementedError(
            f"the fully_shard group {state.name} runs in functional mode (or in a torch.func transform, or with "
            "values of functional_call()) in a model with optional groups. Only the default mode can gather these on "
            "ranks that skip them: leave functional mode, or shard the model without optional=True"
        )
    if state.mesh.replicas is not None and torch.is_grad_enabled():
        raise NotImplementedError(
            f"the fully_shard group {state.name} runs in functional mode (or in a torch.func transform, or with values "
            "of functional_call()) in a model whose gradients are averaged over replica groups (set_replicas()), which "
            "agree at the end of a backward in the default mode only: leave functional mode"
        )


class FunctionalUse:
    """One forward of one group in functional mode."""

    __slots__ = ("_before", "_given", "_has_addresses", "_shard_versions", "_shown", "_state", "_whole", "outer")

    has_check = True

    def __init__(self, root: Root, state: _FSDPState, given: GivenValues) -> None:
        self._state, self.outer = state, root.forward.innermost
        found = {handle: given.shards(handle) for handle in state._handles}
        handles = [handle for handle, shards in found.items() if any(shard is not None for shard in shards)]
        gather = GroupGather(root, state, handles)
        params = [param for handle in handles for param in handle.unsharded.params]
        whole = gather.apply([shard for handle in handles for shard in found[handle]]) if handles else ()
        specs = [spec for handle in handles for spec in specs_of(handle.tensor_parallel, len(handle.fqns))]
        shown_as = [item if spec is None else placed(item, spec) for item, spec in zip(whole, specs, strict=True)]
        restored = [*map(whole_like_original, gather.sharded_params, shown_as)]
        names = [name for handle in handles for name in handle.names]
        self._has_addresses = not in_transform()  # tensors of a transform of torch.func have none
        self._before = [*zip(names, restored, map(self._marks, shown_as), strict=True)]
        self._given, self._shard_versions = given, state.shard_versions()
        self._whole = {id(p): item for p, item in zip(params, whole, strict=True)}
        shown = {id(p): item for p, item in zip(params, restored, strict=True)}
        self._shown = state.swap.show_instead({**shown, **given.full_values(state._handles)})

    def abandon(self) -> None:
        """Do nothing: nothing waits for this use."""

    def check(self) -> None:
        """Raise if forward has written to a gathered parameter, or replaced one: the change would be lost."""
        state = self._state
        state.swap.check_shown(self._shown)
        for name, tensor, before in self._before:
            if self._marks(tensor) != before:
                raise MisuseRuntimeError(
                    f"the parameter {name} of the fully_shard group {state.name} was modified in place inside forward, "
                    "or its .data assigned to; the change is lost, since it does not reach the sharded parameter. "
                    "Modify parameters outside forward, or keep values that change in forward in a buffer"
                )

    def hook_outputs(self, module: nn.Module, output: Any, is_recomputed: bool) -> bool:
        return True  # autograd finds them by itself

    def find_writes(self) -> dict[FlatParamHandle, list[int]]:
        return {handle: written(handle, flat) for handle, flat in self._gathered().items()}

    def _marks(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Values that change if the tensor is written to or gets other memory."""
        local = local_of(tensor)
        return (tensor._version, *((local.data_ptr(), local.stride()) if self._has_addresses else ()))

    def _gathered(self) -> dict[FlatParamHandle, torch.Tensor]:
        """The gathered flat tensors, if no shard was written to since."""
        state = self._state
        if state.shard_versions() != self._shard_versions:
            return {}
        found = {}
        for handle in state._handles:
            first = self._whole.get(id(handle.unsharded.params[0]))
            shards = zip(self._given.shards(handle), handle.sharded_params, strict=True)
            if first is not None and all(shard is sharded for shard, sharded in shards):
                flat = torch.empty(0, dtype=handle.unsharded.dtype, device=handle.storage.compute_device(handle.shard))
                found[handle] = flat.set_(first.untyped_storage(), 0, (handle.layout.flat_numel,))  # type: ignore[call-overload]
        return found
