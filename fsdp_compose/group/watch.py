"""A watch over what the user may do to a model between two iterations, or inside forward: passes over plain lists.

Built when a root is set up, and again after every change that it has noticed. The passes are on the hot path (each
top-level forward, every parameter), so they compare and nothing more; who changed what is found out by the slow path
in ``user_changes``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from .._torch import PlainAttributes, backwards
from ..flat import local_elements
from ..ragged import toggles
from .kept_tensors import QuietGroups
from .state import _FSDPState
from .swap import Held

_data_ptr = torch.Tensor.data_ptr
_unsharded_version = attrgetter("unsharded.memory.shown._version")
_grad, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")


class Watch:
    """A picture of the parameters and modules of all groups of a root."""

    def __init__(self, states: Sequence[_FSDPState]) -> None:
        handles = [handle for state in states for handle in state._handles]
        self._slots = Held([item for state in states for item in state.swap.watched_dicts()])
        self._sharded_params = [sharded for handle in handles for sharded in handle.sharded_params]
        self._memory = _Memory(self._sharded_params)
        self._unsharded = [param for handle in handles for param in handle.unsharded.params]
        self._no_grads = [None] * len(self._sharded_params)
        self._flags = [flag for handle in handles for flag in handle.unsharded.flags]
        self._unsharded_slots = Held([item for state in states for item in state.swap.unsharded_dicts()])
        self._handles = handles
        self._num_toggles = self._ended_backward = -1
        self._dtensors = [param for handle in handles for param in handle.unsharded.dtensors]
        self._versions = self._present_versions()
        self._has_meta = any(handle.unsharded.is_meta for handle in handles)
        self._keepers = {id(state.swap.kept): weakref.ref(state) for state in states[1:]}
        self._quiet = QuietGroups([state.swap.kept for state in states[1:]])

    def is_quiet(self) -> bool:
        """Whether every slot holds what it held, every parameter is where it was and requires grad as it did, and no
        gradient was left on an unsharded parameter."""
        with PlainAttributes():
            return (
                not self._has_meta
                and self._slots.is_same()
                and not self.was_toggled()
                and self._memory.is_same()
                and (self._ended_backward == backwards.count or not self.has_unsharded_grads())
            )

    def newly_kept(self) -> list[tuple[_FSDPState, list[torch.Tensor]]]:
        """The tensors that a forward has kept on modules of groups that had kept nothing in the forwards before."""
        kept = [(self._keepers[id(item)](), item.new_ones()) for item in self._quiet.changed()]
        return [(state, tensors) for state, tensors in kept if state is not None]

    def backward_has_ended(self) -> None:
        """All gradients of the present backward were taken: none is left until another one begins."""
        self._ended_backward = backwards.count

    def follow_addresses(self) -> None:
        """The memory of sharded parameters is elsewhere now, with the same elements."""
        self._memory.follow_addresses()

    def has_unsharded_grads(self) -> bool:
        """Whether autograd has left a gradient on some unsharded parameter, not taken yet."""
        with PlainAttributes():
            return [*map(_grad, self._unsharded)] != self._no_grads  # "==" looks at identities first

    def has_grads(self) -> bool:
        """Whether some sharded parameter has a gradient."""
        with PlainAttributes():
            return [*map(_grad, self._sharded_params)] != self._no_grads

    def was_toggled(self) -> bool:
        """Whether ``requires_grad`` of a sharded parameter was set, and differs from that of its unsharded one."""
        count = toggles.count
        if count == self._num_toggles:
            return False
        if any([handle.was_toggled() for handle in self._handles]):
            return True
        self._num_toggles = count
        return False

    def _present_versions(self) -> list[int]:
        """Of the unsharded parameters; DTensors count their own."""
        return [*map(_unsharded_version, self._handles), *[param._version for param in self._dtensors]]

    def was_forward_quiet(self) -> bool:
        """Whether no forward replaced, added, removed, froze, thawed or wrote to an unsharded parameter."""
        with PlainAttributes():
            return (
                self._unsharded_slots.is_same()
                and self._present_versions() == self._versions
                and [*map(_requires_grad, self._unsharded)] == self._flags
            )


class _Memory:
    """Where the elements of sharded parameters are. One that is given other memory gets another local tensor, which
    itself may be pointed elsewhere too."""

    __slots__ = ("_addresses", "_filled", "_locals", "_params")

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = params
        self._locals = [*map(local_elements, params)]
        self._filled = [local for local in self._locals if local.numel()]
        self._addresses = [*map(_data_ptr, self._filled)]

    def follow_addresses(self) -> None:
        self._addresses = [*map(_data_ptr, self._filled)]

    def is_same(self) -> bool:
        return (
            all(map(is_, map(local_elements, self._params), self._locals))
            and [*map(_data_ptr, self._filled)] == self._addresses
        )
