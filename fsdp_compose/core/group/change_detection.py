"""Detects changes that the user makes to a model between two iterations or inside forward, by passes over plain lists.

A ``ChangeDetector`` is built when a root is set up, and again after every change that it has noticed. Its passes are on
the hot path (each top-level forward, every parameter), so they only compare; the slow path in ``runtime/lazy_init``
finds out who changed what. Three rarer changes are here too: parameters that a loader has assigned, buffers that were
never written after ``to_empty()``, and groups that sleep in host memory."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..._torch import (
    PlainAttributes,
    backwards,
    gradient_hooks,
    local_tensor,
    non_persistent_buffers,
    post_accumulate_hooks,
)
from ...errors import MisuseError, MisuseRuntimeError
from ..flat import ParamAttribute, check_grad_dtype, handle_of, is_sharded_like, local_elements, take_over
from ..ragged import RaggedDTensor, is_alike, requires_grad_writes, was_left_empty
from .kept_tensors import BatchedKeptTensors
from .parameter_swap import Held, ParameterSwap
from .replaced_params import make_proxies, remember_sharded_param
from .state import ParameterDetector, _FSDPState

_data_ptr = torch.Tensor.data_ptr
_grad, _requires_grad, _version_of = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("_version")


class ChangeDetector:
    """A picture of the parameters and modules of all groups of a root."""

    def __init__(self, states: Sequence[_FSDPState]) -> None:
        handles = [handle for state in states for handle in state._handles]
        self._slots = Held([item for state in states for item in state.swap.watched_dicts()])
        self._sharded_params = [sharded for handle in handles for sharded in handle.sharded_params]
        # A parameter that is given other memory gets another local tensor, but a local tensor can also be pointed to
        # other memory itself: compare identities, then addresses.
        self._locals = [*map(local_elements, self._sharded_params)]
        self._filled = [local for local in self._locals if local.numel()]
        self.follow_addresses()
        self._unsharded = [param for handle in handles for param in handle.unsharded.params]
        self._no_grads = [None] * len(self._sharded_params)
        self._flags = [flag for handle in handles for flag in handle.unsharded.flags]
        self._unsharded_slots = Held([item for state in states for item in state.swap.unsharded_dicts()])
        self._handles = handles
        self._num_toggles = self._ended_backward = -1
        self._counters = [tensor for handle in handles for tensor in handle.unsharded.counters]
        self._versions = [*map(_version_of, self._counters)]
        self._has_meta = any(handle.unsharded.is_meta for handle in handles)
        # Without the root's own group: its module's attributes lead to the object that holds this one, and the cycle
        # would keep the model alive.
        self._keepers = {id(state.swap.kept): weakref.ref(state) for state in states[1:]}
        self._quiet = BatchedKeptTensors([state.swap.kept for state in states[1:]])

    def is_unchanged(self) -> bool:
        """Whether every slot holds what it held, every parameter is where it was and requires grad as it did, and no
        gradient was left on an unsharded parameter."""
        with PlainAttributes():
            return (
                not self._has_meta
                and self._slots.is_same()
                and not self.was_toggled()
                and all(map(is_, map(local_elements, self._sharded_params), self._locals))
                and [*map(_data_ptr, self._filled)] == self._addresses
                and (self._ended_backward == backwards.count or not self.has_unsharded_grads())
            )

    def newly_kept(self) -> list[tuple[_FSDPState, list[torch.Tensor]]]:
        """Tensors that a forward has kept on modules of groups that kept nothing in earlier forwards."""
        kept = [(self._keepers[id(item)](), item.new_ones()) for item in self._quiet.changed()]
        return [(state, tensors) for state, tensors in kept if state is not None]

    def backward_has_ended(self) -> None:
        """Note that all gradients of the present backward were taken, so none is left until another backward begins."""
        self._ended_backward = backwards.count

    def follow_addresses(self) -> None:
        """Note that the memory of sharded parameters has moved, with the same elements."""
        self._addresses = [*map(_data_ptr, self._filled)]

    def has_unsharded_grads(self) -> bool:
        """Whether autograd has left a gradient on some unsharded parameter that was not taken yet."""
        with PlainAttributes():
            return [*map(_grad, self._unsharded)] != self._no_grads  # "==" looks at identities first

    def has_grads(self) -> bool:
        """Whether some sharded parameter has a gradient."""
        with PlainAttributes():
            return [*map(_grad, self._sharded_params)] != self._no_grads

    def was_toggled(self) -> bool:
        """Whether ``requires_grad`` of a sharded parameter was set and now differs from that of the unsharded one."""
        count = requires_grad_writes.count
        if count == self._num_toggles:
            return False
        if any([handle.was_toggled() for handle in self._handles]):
            return True
        self._num_toggles = count
        return False

    def was_forward_unchanged(self) -> bool:
        """Whether no forward replaced, added, removed, froze, thawed or wrote to an unsharded parameter."""
        with PlainAttributes():
            return (
                self._unsharded_slots.is_same()
                and [*map(_version_of, self._counters)] == self._versions
                and [*map(_requires_grad, self._unsharded)] == self._flags
            )


# ---- Parameters that a loader assigned
#
# Loaders replace a group's parameters by others that are sharded the same way
# (``DTensor.from_local(local, p.device_mesh, p.placements)``). The group's own parameters take over the elements and
# return to their slots. An optimizer that holds the loader's parameters gets the group's own.
#
# An assignment concerns one slot. If another slot still shows the group's own parameter, or a second parameter, the
# assignment unties the two, and the next forward adds the assigned parameter to the group (``tied_params``).
#
# Before the first forward, when ranks still compare their models, a parameter in another layout may be assigned too: a
# plain one, equal on all ranks, or a DTensor on the same mesh.


_Places = list[tuple[dict[str, Any], str]]


def _assigned(swap: ParameterSwap) -> Iterator[tuple[nn.Parameter, _Places, nn.Parameter | None, list[nn.Parameter]]]:
    """The parameters of a group that have lost slots to others that are sharded like them: each with its slots, the
    parameter that replaces it (if it has lost all), and those that are untied from it."""
    owned: dict[nn.Parameter, _Places] = {}
    for params, name, handle, index in swap.slots():
        owned.setdefault(handle.sharded_params[index], []).append((params, name))
    for own, places in owned.items():
        present = {id(value): value for params, name in places if (value := params.get(name)) is not None}
        given = [
            value
            for value in present.values()
            # If it has a handle, it is another parameter of the same model: a tie.
            if handle_of(value) is None and _is_laid_out_like(value, own)
        ]
        if not given:
            continue
        successor, untied = (None, given) if id(own) in present else (given[0], given[1:])
        yield own, places, successor, untied


def _is_laid_out_like(value: torch.Tensor, own: nn.Parameter) -> bool:
    if isinstance(value, RaggedDTensor):
        return is_sharded_like(value, own)
    return isinstance(own, RaggedDTensor) and is_alike(value, own._spec)


def take_over_assigned(swap: ParameterSwap) -> None:
    """Take over the elements of assigned parameters in the modules of a group. Local."""
    for own, places, given, _ in [*_assigned(swap)]:
        if given is not None:
            _take_over(own, given, places)


def _take_over(own: nn.Parameter, given: nn.Parameter, places: _Places) -> None:
    check_grad_dtype(own, given)
    take_over(own, given)
    own.requires_grad_(given.requires_grad)
    remember_sharded_param(given, own)
    for params, name in places:
        if params.get(name) is given:
            params[name] = own


class Replacement(NamedTuple):
    """A parameter that replaces one of a group's own before the first forward, and is laid out otherwise.

    Attributes:
        own: the group's own parameter.
        given: what replaces it: a plain parameter, whole on this rank, or a DTensor on the same mesh.
        places: their slots.
    """

    own: nn.Parameter
    given: nn.Parameter
    places: _Places

    @property
    def whole(self) -> torch.Tensor | None:
        """What was given, if every rank has all of it."""
        if not isinstance(self.given, DTensor):
            return self.given.detach()
        is_whole = all(placement.is_replicate() for placement in self.given.placements)
        return local_tensor(self.given).detach() if is_whole else None

    def take_over(self) -> None:
        """Let the group's own parameter take over the elements, and return to its slots. Ranks: all of the mesh."""
        _take_over(self.own, self.given, self.places)
        make_proxies([(self.given, self.own)])


def find_replacements(swaps: Iterable[ParameterSwap], modules: Iterable[nn.Module]) -> list[Replacement]:
    """The parameters that replace those of some groups, besides those that ``take_over_assigned`` takes over; but not
    those that ``modules`` show elsewhere too. Local."""
    num_shown = Counter(value for module in {*modules} for value in module._parameters.values() if value is not None)
    found = []
    for swap in swaps:
        owned: dict[nn.Parameter, _Places] = {}
        for params, name, handle, index in swap.slots():
            owned.setdefault(handle.sharded_params[index], []).append((params, name))
        for own, places in owned.items():
            given, *others = {params.get(name) for params, name in places}
            # A parameter that is shown elsewhere too would be a new tie.
            if given is None or others or num_shown[given] > len(places):
                continue
            if _can_replace(given, own):
                found.append(Replacement(own, given, places))
    return found


def _can_replace(given: nn.Parameter, own: nn.Parameter) -> bool:
    if given is own or not isinstance(own, RaggedDTensor) or own.is_composite or given.is_meta:
        return False
    if (given.shape, given.dtype) != (own.shape, own.dtype) or handle_of(given) is not None:
        return False
    if given.grad is not None or gradient_hooks(given) or post_accumulate_hooks(given):
        return False  # they would be lost
    if not own.is_meta and given.device != own.device:
        return False
    if isinstance(given, DTensor):
        return given.device_mesh == own.device_mesh
    return type(given) is nn.Parameter and ParamAttribute.SHARDED not in given.__dict__


def find_untied(swap: ParameterSwap) -> dict[nn.Parameter, nn.Parameter]:
    """The parameters in slots of a group that were untied from one of its own, each with that one. Local."""
    return {
        param: own
        for own, _, _, untied in _assigned(swap)
        if isinstance(own, RaggedDTensor) and not own.is_composite
        for param in untied
    }


# ---- Non-persistent buffers of modules that are sharded on the meta device
#
# ``to_empty()`` gives them uninitialized memory, and no state dict holds them, so nothing would ever fill them in:
# rotary frequencies would be whatever was in that memory, different on every rank. So ``fully_shard`` replaces each by
# a ``MetaBuffer``. Where ``to_empty()`` asks for an empty tensor, the ``MetaBuffer`` makes one full of poison (NaN, the
# lowest integer, or the highest for unsigned integers), and the first forward refuses poison. A buffer that was
# written to or replaced is accepted.


_POISONED = "_fsdp_compose_poison"


class MetaBuffer(torch.Tensor):
    """A meta tensor whose ``empty_like`` on another device is filled with poison."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with PlainAttributes():
            result = function(*args, **(kwargs or {}))
        if function is not torch.empty_like or result.is_meta or result.dtype == torch.bool:
            return result
        result.fill_(_poison(result.dtype))
        setattr(result, _POISONED, 0 if result.is_inference() else result._version)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with PlainAttributes():
            memo[id(self)] = twin = torch.empty_like(self).as_subclass(MetaBuffer)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin


def detect_meta_buffers(modules: Iterable[nn.Module]) -> None:
    """From now on notice when non-persistent meta buffers of these modules get memory."""
    for module in modules:
        for name, buffer in _non_persistent(module):
            if type(buffer) is torch.Tensor and buffer.is_meta:
                watched = buffer.as_subclass(MetaBuffer)
                vars(watched).update(vars(buffer))
                setattr(module, name, watched)


def refuse_unwritten_buffers(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if ``to_empty()`` gave a buffer memory and nothing has written to it."""
    found = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in modules
        for name, buffer in _non_persistent(module)
        if _is_poison(buffer)
    ]
    if found:
        raise MisuseError(
            f"{len(found)} non-persistent buffer(s) were on the meta device and were not written since to_empty(): "
            f"{', '.join(found[:5])}{' ...' if len(found) > 5 else ''}. No state dict holds them: recompute them "
            "(with the module's own initialization) or assign them before the first forward"
        )


def left_empty_error(states: Iterable[_FSDPState]) -> str:
    """What is wrong if ``to_empty()`` gave parameters memory of this rank, and nothing has written to it."""
    handles = [handle for state in states for handle in state._handles if not handle.mesh.is_simulated]
    found = [
        handle.name_of(i)
        for handle in handles
        for i, sharded in enumerate(handle.sharded_params)
        if was_left_empty(local_elements(sharded))
    ]
    if not found:
        return ""
    return (
        f"{len(found)} parameter(s) were on the meta device and were not written since to_empty(): "
        f"{', '.join(found[:5])}{' ...' if len(found) > 5 else ''}. They hold whatever was in memory: initialize them "
        "(with the modules' own reset_parameters(), for example) or load them before the first forward"
    )


def _non_persistent(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    names = non_persistent_buffers(module)
    if not names:
        return []
    return [item for item in module.named_buffers(recurse=False, remove_duplicate=False) if item[0] in names]


def _is_poison(buffer: torch.Tensor) -> bool:
    version = getattr(buffer, _POISONED, None)
    if version is None or not buffer.numel():
        return False
    if not buffer.is_inference() and buffer._version != version:
        return False  # written to since, even if with the poison's own value
    poison = _poison(buffer.dtype)
    return bool((buffer.isnan() if poison != poison else buffer == poison).all())


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


# ---- Sleeping groups, whose shards are in host memory (``offload_model()``): their forwards raise.
#
# A root checks for them when it is set up. If it is set up already, its detector is replaced by one that raises in
# every method, so that forwards of models that are awake pay nothing for the check.


class _SleepingDetector:
    """Replaces the detector of a root while one of its groups sleeps."""

    def __init__(self, original: ParameterDetector, state: _FSDPState) -> None:
        self.original = original
        self._error = state.sleeping_error

    def _refuse(self) -> NoReturn:
        raise MisuseRuntimeError(self._error)

    is_unchanged = has_unsharded_grads = backward_has_ended = was_toggled = _refuse
    has_grads = newly_kept = was_forward_unchanged = follow_addresses = _refuse


def put_to_sleep(states: Iterable[_FSDPState]) -> None:
    """Make forwards of these groups, and of roots that contain them, raise from now on."""
    for state in states:
        state.persistent.is_asleep = True
        for owner in _owners(state):
            if owner.detector is not None and not isinstance(owner.detector, _SleepingDetector):
                owner.detector = _SleepingDetector(owner.detector, state)


def wake(states: Iterable[_FSDPState]) -> None:
    """Let these groups run again. Their shards have the same elements as before, at other addresses."""
    states = [*states]
    for state in states:
        state.persistent.is_asleep = False
    for state in states:
        for owner in _owners(state):
            is_awake = owner.root is None or not any(item.persistent.is_asleep for item in owner.root.live_states())
            if is_awake and isinstance(owner.detector, _SleepingDetector):
                owner.detector = owner.detector.original
            if owner.detector is not None and not isinstance(owner.detector, _SleepingDetector):
                owner.detector.follow_addresses()


def _owners(state: _FSDPState) -> list[_FSDPState]:
    """The states that hold the detector of the group's root."""
    by_root_module = [] if state.root is None else state.root.by_root_module
    return [owner for states in by_root_module if (owner := states[0]()) is not None]
