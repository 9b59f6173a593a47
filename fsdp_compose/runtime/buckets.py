"""The buckets of a replicated group: averaged as soon as a backward has brought all their gradients.

Of each bucket one parameter has a hook, that whose gradient has come last, and the hook finds the bucket complete.
Until it is known which one that is, and when another one has come last, all of them have. So have large ones, whose
gradients are placed in the bucket at once. Buckets are averaged in one
order, that of their last parameters backwards: one that is complete waits for those before it. What is not complete
when the group's backward is done (this rank has not used a parameter) is averaged then, as all else is.

Note [Only buckets]. When a bucket is complete depends on the parameters that a rank has used. So what else the process
group carries meanwhile must not depend on it. Buckets are averaged early only where there is nothing else: no other
group of the root, and no other model with a backward to come.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from ..flat import LARGE_BYTES, FlatParamHandle, place
from ..group import Root, _FSDPState, never_traced
from .steps import reduce_early


def watch_buckets(state: _FSDPState) -> None:
    """Let hooks on the unsharded parameters of a replicated group tell when its buckets are complete."""
    if state.options.bucket_bytes is None or state.mesh.replicate_group is None or state.past.has_bucket_hooks:
        return
    state.past.hook_buckets()
    for handle in state._handles:
        _Bucket(state, handle).listen_to_all()


class _Bucket:
    """The hooks of one bucket, which hold it."""

    __slots__ = ("_handle", "_last", "_removable", "_state")

    def __init__(self, state: _FSDPState, handle: FlatParamHandle) -> None:
        self._state, self._handle = weakref.ref(state), weakref.ref(handle)
        self._removable: list[RemovableHandle] = []
        self._last: int | None = None  # the parameter whose gradient comes last, if that is known

    def listen_to_all(self) -> None:
        handle = self._handle()
        if handle is not None:
            self._listen(handle.unsharded.params, range(len(handle.unsharded.params)))
            self._last = None

    def _listen(self, params: Sequence[nn.Parameter], indexes: Iterable[int]) -> None:
        """Have hooks on these parameters, and on large ones."""
        for item in self._removable:
            item.remove()
        large = [i for i, param in enumerate(params) if param.numel() * param.element_size() >= LARGE_BYTES]
        hooks = [(params[i], partial(_note, self, i)) for i in {*indexes, *large} if params[i].requires_grad]
        self._removable = [param.register_post_accumulate_grad_hook(hook) for param, hook in hooks]

    def arrived(self, index: int) -> None:
        """Autograd has brought the gradient of a parameter that has a hook."""
        state, handle = self._state(), self._handle()
        if state is None or handle is None or state.root is None:
            return
        params, progress, options = handle.unsharded.params, state.backward, state.options
        is_running = state.root.backward is not None and progress.was_reached and not progress.is_reduced
        if not (is_running and options.requires_gradient_sync and options.requires_all_reduce):
            return
        if params[index].numel() * params[index].element_size() >= LARGE_BYTES:
            place(handle, index)
        if self._last not in (None, index):
            return
        if _is_complete(handle):
            if self._last is None:
                self._listen(params, (index,))
                self._last = index
            if not progress.is_iterated:
                _reduce_complete(state.root, state)
        elif self._last is not None:
            self.listen_to_all()


@never_traced
def _note(bucket: _Bucket, index: int, _param: torch.Tensor) -> None:
    bucket.arrived(index)


def _is_complete(handle: FlatParamHandle) -> bool:
    """Whether all its gradients are there that may come."""
    params, placed = handle.unsharded.params, handle.contributions.placed
    for i, param in enumerate(params):
        if param.grad is None and i not in placed and param.requires_grad:
            return False
    return True


def _reduce_complete(root: Root, state: _FSDPState) -> None:
    """Average the buckets that are complete, up to the first that is not."""
    backward, progress = root.backward, state.backward
    assert backward is not None
    if backward.has_only_buckets is None:
        backward.judge(root.has_one_group() and not root.order.has_others_in_backward(root))
    handles = state._handles
    while backward.has_only_buckets and progress.num_early < len(handles) and _is_complete(handles[progress.num_early]):
        reduce_early(root, state)
