"""The buckets of a replicated group, averaged as soon as all their gradients have arrived.

In each bucket one parameter has a hook: the one whose gradient arrived last, which then finds the bucket complete.
While that parameter is not known, or if another one turns out to be last, all parameters have hooks. Large parameters
always have one, which copies their gradient to the bucket at once. Buckets are averaged in a fixed order, from the
last parameters to the first: a complete bucket waits for those before it. Buckets that are still incomplete when the
group's backward is done (this rank has not used a parameter) are averaged then, like any other group.

Note [Only buckets]. When a bucket is complete depends on which parameters a rank has used, so it may differ between
ranks. Other collectives on the process group would then interleave with buckets differently on each rank. So buckets
are averaged early only if there are no others: no other group of the root has parameters, and no other model has a
backward to come.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from ..flat import LARGE_BYTES, FlatParamHandle, move_to_average
from ..group import Root, _FSDPState, never_traced
from .group_ops import reduce_early


def watch_buckets(state: _FSDPState) -> None:
    """Hook the unsharded parameters of a replicated group, to notice when its buckets are complete."""
    if state.mesh.replicate_group is None or state.persistent.has_bucket_hooks:
        return
    state.persistent.has_bucket_hooks = True
    for handle in state._handles:
        _Bucket(state, handle).listen_to_all()


class _Bucket:
    """The hooks of one bucket. The hooks keep this object alive."""

    __slots__ = ("_handle", "_last", "_removable", "_state")

    def __init__(self, state: _FSDPState, handle: FlatParamHandle) -> None:
        self._state, self._handle = weakref.ref(state), weakref.ref(handle)
        self._removable: list[RemovableHandle] = []
        self._last: int | None = None  # the parameter whose gradient comes last, if known

    def listen_to_all(self) -> None:
        handle = self._handle()
        if handle is not None:
            self._listen(handle.unsharded.params, range(len(handle.unsharded.params)))
            self._last = None

    def _listen(self, params: Sequence[nn.Parameter], indexes: Iterable[int]) -> None:
        """Put hooks on these parameters and on large ones, and remove all others."""
        for item in self._removable:
            item.remove()
        large = [i for i, param in enumerate(params) if param.numel() * param.element_size() >= LARGE_BYTES]
        hooks = [(params[i], partial(_note, self, i)) for i in {*indexes, *large} if params[i].requires_grad]
        self._removable = [param.register_post_accumulate_grad_hook(hook) for param, hook in hooks]

    def arrived(self, index: int) -> None:
        """Called when the gradient of a hooked parameter has arrived."""
        state, handle = self._state(), self._handle()
        if state is None or handle is None or state.root is None:
            return
        params, progress, options = handle.unsharded.params, state.backward, state.options
        is_running = state.root.backward is not None and progress.was_reached and not progress.is_reduced
        if not (is_running and options.requires_gradient_sync and options.requires_all_reduce):
            return
        if params[index].numel() * params[index].element_size() >= LARGE_BYTES:
            move_to_average(handle, index)
        if self._last not in (None, index):
            return
        if _is_complete(handle):
            if self._last is None:
                self._listen(params, (index,))
                self._last = index
            # A backward that comes back to a use (a hook that calls autograd.grad()) brings more gradients.
            if not progress.is_iterated:
                _reduce_complete(state.root, state)
        elif self._last is not None:
            self.listen_to_all()


@never_traced
def _note(bucket: _Bucket, index: int, _param: torch.Tensor) -> None:
    bucket.arrived(index)


def _is_complete(handle: FlatParamHandle) -> bool:
    """Whether all gradients that can arrive have arrived."""
    params, placed = handle.unsharded.params, handle.pending_gradients.placed
    for i, param in enumerate(params):
        if param.grad is None and i not in placed and param.requires_grad:
            return False
    return True


def _reduce_complete(root: Root, state: _FSDPState) -> None:
    """Average complete buckets, up to the first incomplete one."""
    backward, progress = root.backward, state.backward
    assert backward is not None
    if backward.has_only_buckets is None:  # see Note [Only buckets]
        backward.has_only_buckets = root.has_one_group() and not root.order.has_others_in_backward(root)
    handles = state._handles
    while backward.has_only_buckets and progress.num_early < len(handles) and _is_complete(handles[progress.num_early]):
        reduce_early(root, state)
