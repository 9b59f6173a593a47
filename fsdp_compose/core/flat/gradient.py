"""The flat gradient of one shard: its memory, when backwards write to it, and when and in which form the user sees it.

Its ``FlatParamHandle`` owns it. ``Communicator`` writes it; ``publish`` shows it at the end of backward, as views from
its ``GradientMemory``. A gradient that the user keeps is never written to again. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter, is_
from sys import getrefcount
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from ..._torch import (
    PlainAttributes,
    foreach_zero_,
    gradient_hooks,
    post_accumulate_hooks,
    set_local_tensor,
    storage_use_counter,
)
from ...errors import MisuseRuntimeError
from .gradient_hooks import GradientHooks
from .param_kind import expect_gradient
from .sharded_param import follow_layout, local_elements, local_of, make_gradient

if TYPE_CHECKING:
    from .flat_views import FlatSegment

# ---- The memory of a flat gradient, and its views: the tensors in ``.grad`` of sharded parameters and flat views


LocalShard = tuple[int, int, tuple[int, ...]]


class GradientMemory:
    """A flat gradient's memory, which comes and goes, and the views of it, which are built once and recycled. While the
    user still holds one of them, the memory is left to the user, and new memory is made.

    Args:
        sharded_params: the sharded parameters, in the order of the layout.
        local_shards: for each sharded parameter, (start, stop, shape) of its local shard inside the shard, in elements.
        segments: the flat views over the shard; the list is the handle's own.
        numel, dtype, device: those of the flat gradient.
        empty: called as ``torch.empty(numel, dtype=dtype)``, which is the default, to make it.

    Attributes:
        flat: the flat gradient; ``None`` before its first use, and after its memory was left to the user.
        views: one for each sharded parameter; ``locals``: the local tensors that they were made with. Empty without
            ``flat``.
        is_allocated: ``flat`` has memory.
    """

    def __init__(
        self,
        sharded_params: Sequence[nn.Parameter],
        local_shards: Sequence[LocalShard],
        segments: list[FlatSegment],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        empty: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.sharded_params, self.segments, self._local_shards = sharded_params, segments, local_shards
        self.numel, self.dtype, self.device = numel, dtype, device
        self._nbytes = numel * dtype.itemsize
        self._empty = partial(torch.empty, device=device) if empty is None else empty
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.locals: list[torch.Tensor] = []
        self.is_allocated = False
        self._objects: list[torch.Tensor] = []  # views and locals, whose reference counts are compared
        self._references: list[int] = []
        self._num_others = (0, 0)  # references to the segments' views, and uses of the storage

    def local_shard_of(self, flat: torch.Tensor | None, index: int) -> torch.Tensor:
        """The elements of ``flat`` that belong to a sharded parameter, in its shape."""
        assert flat is not None
        start, stop, shape = self._local_shards[index]
        return flat[start:stop].view(shape)

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding: (start, stop) of each range that belongs to no sharded parameter."""
        ranges = sorted((start, stop) for start, stop, _ in self._local_shards if stop > start)
        starts, stops = [0, *(stop for _, stop in ranges)], [*(start for start, _ in ranges), self.numel]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def zero_gaps(self) -> None:
        """Make the padding zero again, after the flat gradient was scaled or written to as a whole."""
        assert self.flat is not None
        for start, stop in self.gaps:
            self.flat[start:stop].zero_()

    # ---- Memory

    def ensure_writable(self) -> None:
        """Make sure that there is memory, with views that nobody else holds."""
        if self.is_allocated and self._is_held_elsewhere():
            self._forget()
        if self.flat is None:
            self._build()
        elif not self.is_allocated:
            self._storage.resize_(self._nbytes)
            self.is_allocated = True

    def release(self) -> None:
        """Free the memory; if somebody else holds it, leave it to them."""
        if self._is_held_elsewhere():
            self._forget()
            return
        try:
            self._storage.resize_(0)
        except RuntimeError:  # NumPy has seen it: torch can never resize it again
            self._forget()
        else:
            self.is_allocated = False

    def attach(self, segment: FlatSegment) -> None:
        """Give a segment, the last of the list, its view."""
        if self.flat is None:
            return
        if not self.is_allocated:
            self._forget()
            return
        before = self._count_others()
        self._view_for(segment)
        after, known = self._count_others(), self._num_others
        self._num_others = (known[0] + after[0] - before[0], known[1] + after[1] - before[1])

    def _build(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            flat = self.flat = self._empty(self.numel, dtype=self.dtype)
            self.locals = [self.local_shard_of(flat, i) for i in range(len(self.sharded_params))]
            self.views = [make_gradient(*item) for item in zip(self.locals, self.sharded_params, strict=True)]
        for segment in self.segments:
            self._view_for(segment)
        self._storage = flat.untyped_storage()
        self._count_uses = storage_use_counter(self._storage)
        self.is_allocated = True
        self._objects = [*self.views, *self.locals]
        self._references, self._num_others = [*map(getrefcount, self._objects)], self._count_others()

    def _view_for(self, segment: FlatSegment) -> None:
        assert self.flat is not None
        with torch.inference_mode(False), torch.no_grad():
            segment.have_gradient(self.flat)

    def _forget(self) -> None:
        self.flat, self.views, self.locals, self._objects = None, [], [], []
        for segment in self.segments:
            segment.have_gradient(None)
        del self._storage, self._count_uses
        self.is_allocated = False

    def _is_held_elsewhere(self) -> bool:
        return (
            [*map(getrefcount, self._objects)] != self._references
            or self._count_others() != self._num_others
            or not self.is_in_place()
        )

    def _count_others(self) -> tuple[int, int]:
        count = 0
        for segment in self.segments:
            if segment.gradient is not None:
                count += getrefcount(segment.gradient) + getrefcount(local_of(segment.gradient))
        return count, self._count_uses()

    # ---- Checks for what the user may have done to the views

    def is_in_place(self) -> bool:
        """Whether the sharded parameters' views have their own memory (nobody assigned to their ``.data``)."""
        return all(map(is_, map(local_elements, self.views), self.locals))

    def holds(self, segment: FlatSegment) -> bool:
        """Whether a segment's view has its own memory."""
        assert self.flat is not None and segment.gradient is not None
        return segment.is_at(self.flat, segment.gradient)

    def take_in(self, segment: FlatSegment, given: torch.Tensor) -> None:
        """Copy a gradient that the user gave to a segment."""
        if segment.gradient is given:  # its .data was assigned to
            self._view_for(segment)
        assert segment.gradient is not None
        segment.gradient.copy_(given)
        self.zero_gaps()


# ---- The flat gradient of one shard, as the user sees it, and what the user does to it between backwards
#
# ``zero_grad()`` is noticed by looking; the next forward then frees the memory.
#
# Note [One owner]. If an optimizer has flat views (``flat_views``), their ``.grad`` and those of the sharded parameters
# are views of the same memory. Dropping one side drops the other, and tensors that the user has put where our views
# were are copied into the flat gradient: when a forward begins, before a backward adds, and before the optimizer's step
# (``follow_user``).


class WriteMode(Enum):
    """How a newly reduced gradient meets what is already in ``sharded.grad``."""

    FRESH = "no sharded parameter has a gradient: the flat gradient is overwritten"
    ADDED = "the sharded parameters' gradients are our views: the flat gradient is added to"
    FOREIGN = "a sharded parameter holds a gradient that the user put there: the result is added to each one's own"


# Module-level names for the hot path: attribute access on an Enum is slow.
FRESH, ADDED, FOREIGN = WriteMode.FRESH, WriteMode.ADDED, WriteMode.FOREIGN

_grad = attrgetter("grad")


# What the fields of a ``ShardedGradient`` are, from step to step (a bucket keeps its memory throughout):
#
#                                          memory            _is_published    target        write_mode
#   before the first backward              none              nobody           None          FRESH
#   first reduction after zero_grad()      made or reused    as before        memory.flat   FRESH
#   a reduction that accumulates           the same          who has views    memory.flat   ADDED
#   ... onto tensors that the user put     the same or none  as before        new memory    FOREIGN
#   published                              the same          who was used     None          as above
#   no result (ranks differ, a failure)    the same          as before        None          as above
#   a forward after zero_grad()            freed             nobody           None          as above
#
# ``_is_dropped`` holds from a forward that found no gradient until something is published: it spares ``prepare`` a look
# at each ``.grad``.


class ShardedGradient:
    """The flat gradient of a shard.

    Args:
        memory: its memory, and the views of it.
        hooks: the gradient hooks of the sharded parameters, which ``publish`` calls.
        keeps_memory: keep the memory also while there is no gradient, as a bucket does.

    Attributes:
        target: from ``prepare`` until ``publish``, the flat tensor that takes the result: to be overwritten (FRESH,
            FOREIGN) or added to (ADDED).
        write_mode: the last decision of ``prepare``.
    """

    __slots__ = (
        "_hooks", "_is_dropped", "_is_published", "_keeps_memory", "_segments", "_sharded_params", "dtype", "memory",
        "target", "write_mode",
    )  # fmt: skip

    def __init__(self, memory: GradientMemory, hooks: GradientHooks, keeps_memory: bool = False) -> None:
        self.memory, self.dtype, self._hooks, self._keeps_memory = memory, memory.dtype, hooks, keeps_memory
        self._sharded_params, self._segments = memory.sharded_params, memory.segments
        for param in (*self._sharded_params, *(segment.parameter for segment in self._segments)):
            expect_gradient(param, self.dtype)
        self._is_dropped = False  # no sharded parameter had a gradient when the current forward began
        self._is_published = bytes(len(self._sharded_params))
        self.write_mode = FRESH
        self.target: torch.Tensor | None = None

    # ---- Between backwards

    def release_if_dropped(self, is_known_to_be: bool = False) -> None:
        """Free the memory if the user has dropped the gradient (``zero_grad()``), or is known to have."""
        if self._segments:
            is_known_to_be = not self.follow_user()
        self._is_dropped = is_known_to_be
        if not self.memory.is_allocated:
            return
        if not is_known_to_be:
            for grad in map(_grad, self._sharded_params):
                if grad is not None:
                    return
        if not self._keeps_memory:
            self.memory.release()
        self._is_published = bytes(len(self._sharded_params))

    # ---- Together with flat views; Note [One owner]

    def attach(self, segment: FlatSegment) -> None:
        """Show a new segment, the last of the list, the gradient that may already exist."""
        expect_gradient(segment.parameter, self.dtype)
        self.memory.attach(segment)
        views = self.memory.views
        if views and any(self._sharded_params[i].grad is views[i] for i in segment.sharded_params):
            segment.parameter.grad = segment.gradient

    def detach_segments(self) -> None:
        """Detach flat views, before the shard is replaced. Gradients that flat views have dropped are dropped; the
        others stay with the sharded parameters."""
        for segment in self._segments:
            if segment.parameter.grad is None:
                self._drop_views(segment)
            segment.parameter.grad = None
            segment.have_gradient(None)

    def is_untouched(self) -> bool:
        """Whether every gradient is our view in our memory, or ``None`` where none was published."""
        return are_untouched((self,))

    def _shown(self) -> Sequence[torch.Tensor | None]:
        """``.grad`` of the sharded parameters, unless the user has changed something."""
        memory, published = self.memory, self._is_published
        if not memory.is_allocated:
            return [None] * len(self._sharded_params)
        if 0 in published:
            return [view if done else None for done, view in zip(published, memory.views)]
        return memory.views

    def _are_segments_untouched(self) -> bool:
        for segment in self._segments:
            is_shown = segment.is_among(self._is_published)
            if segment.parameter.grad is not (segment.gradient if is_shown else None):
                return False
            if is_shown and not (self.memory.is_allocated and self.memory.holds(segment)):
                return False
        return True

    @property
    def flat(self) -> torch.Tensor | None:
        """The flat gradient, if some sharded parameter has elements in it; valid only while ``is_untouched``."""
        return self.memory.flat if self.memory.is_allocated and 1 in self._is_published else None

    def published_locals(self, sharded_params: Iterable[int]) -> list[torch.Tensor]:
        """This rank's shards of the gradients of some sharded parameters; those without a gradient are left out."""
        return [self.memory.locals[i] for i in sharded_params if self._is_published[i]]

    def zero_unpublished(self) -> None:
        """Zero the padding, and the elements of sharded parameters without a gradient, after the flat gradient was
        scaled."""
        memory = self.memory
        memory.zero_gaps()
        if 0 in self._is_published:
            foreach_zero_([memory.locals[i] for i, done in enumerate(self._is_published) if not done])

    def follow_user(self) -> bool:
        """Make sharded parameters and flat views agree after the user has changed gradients of either.

        Returns:
            Whether there is a gradient.

        Raises:
            RuntimeError: the user assigned a gradient to a sharded parameter that is part of a flat view.
        """
        if self.is_untouched():
            return self.flat is not None
        has_gradient = False
        for segment in self._segments:
            given = segment.parameter.grad
            if given is None:
                self._drop_views(segment)
                continue
            if given is segment.gradient and all(self._sharded_params[i].grad is None for i in segment.sharded_params):
                segment.parameter.grad = None
            else:
                has_gradient = True
        if not has_gradient:
            for grad in map(_grad, self._sharded_params):
                if grad is not None:
                    break
            else:
                self._is_published = bytes(len(self._sharded_params))
                return False
        if not self.is_untouched():
            self._take_in()
        return True

    def show_to_segments(self, sharded_params: Sequence[int]) -> None:
        """Call the hooks of flat views for gradients that reached some sharded parameters through autograd."""
        for segment in self._segments:
            if any(i in segment.sharded_params for i in sharded_params):
                if gradient_hooks(segment.parameter):
                    raise MisuseRuntimeError(
                        "a gradient reached a sharded parameter through autograd (functional mode, or a loss term "
                        "computed from the parameter itself), and its flat view has a register_hook() hook, which "
                        "cannot see that gradient: register the hook on the model's parameters"
                    )
                _call_hooks_after_accumulation(segment.parameter)

    def _drop_views(self, segment: FlatSegment) -> None:
        if self.memory.views:
            indices = slice(segment.sharded_params.start, segment.sharded_params.stop)
            for sharded, view in zip(self._sharded_params[indices], self.memory.views[indices], strict=True):
                if sharded.grad is view:
                    sharded.grad = None

    @torch.no_grad()
    def _take_in(self) -> None:
        """Copy the tensors that the user put where our views were into the flat gradient, and zero what was dropped."""
        memory, sharded_params = self.memory, self._sharded_params
        replaced = [
            (item, item.parameter.grad)
            for item in self._segments
            if item.parameter.grad is not None and not (item.parameter.grad is item.gradient and memory.holds(item))
        ]
        is_ours = [p.grad is view for p, view in zip(sharded_params, memory.views)] or [False] * len(sharded_params)
        self._refuse_foreign(is_ours)
        self._is_dropped = False
        given_ours = [item for item in self._segments if item.parameter.grad is item.gradient is not None]
        if not any(is_ours) and not given_ours:  # the flat gradient is empty
            memory.ensure_writable()
            assert memory.flat is not None
            memory.flat.zero_()
        for sharded, view, local in zip(sharded_params, memory.views, memory.locals, strict=True):
            if sharded.grad is None:
                local.zero_()
            elif sharded.grad is not view:
                view.copy_(sharded.grad)
                sharded.grad = view
            elif local_elements(view) is not local:  # somebody assigned to its .data
                local.copy_(local_elements(view))
                set_local_tensor(view, local)
        for segment, given in replaced:
            memory.take_in(segment, given)
            for i in segment.sharded_params:
                sharded_params[i].grad = memory.views[i]
        self._is_published = bytes(sharded.grad is not None for sharded in sharded_params)
        for segment in self._segments:
            segment.parameter.grad = segment.gradient if segment.is_among(self._is_published) else None

    def _refuse_foreign(self, is_ours: Sequence[bool]) -> None:
        """Refuse a gradient that was assigned to a part of a flat view."""
        # The optimizer of a flat view, GradScaler and torch's clipping look only at the flat view.
        for segment in self._segments:
            for i in segment.sharded_params:
                if self._sharded_params[i].grad is not None and not is_ours[i] and not self._hooks.has_arrived(i):
                    name, first = self._hooks.name_of(i), self._hooks.name_of(segment.sharded_params.start)
                    raise MisuseRuntimeError(
                        f".grad of the sharded parameter {name} was assigned to, but it is part of a flat view of "
                        f"flat_parameters() (the one that begins with {first}): code that looks at the flat view "
                        "before the step (GradScaler.unscale_(), torch's clip_grad_norm_) would miss the assigned "
                        "gradient. Change the gradient in place, or assign to .grad of the flat view"
                    )

    # ---- While a backward runs

    def prepare(self) -> WriteMode:
        """Decide where the gradient that is about to be reduced goes; called once per reduction. A second reduction in
        the same backward is added to the first."""
        if self.target is not None:
            return ADDED
        # Hot path: ask only if there may be hooks. If that is unknown, publish() checks again.
        if not self._is_dropped or ((self._hooks.on_gradient or self._segments) and self._want_gradients()):
            if self._segments:
                self.follow_user()
            for grad in map(_grad, self._sharded_params):
                if grad is not None:
                    return self._prepare_to_add()
        self.memory.ensure_writable()
        self.write_mode, self.target = FRESH, self.memory.flat
        return FRESH

    def _prepare_to_add(self) -> WriteMode:
        grads, memory = [sharded.grad for sharded in self._sharded_params], self.memory
        is_ours = memory.views and memory.is_in_place() and not self._want_gradients()
        if is_ours and all(grad is None or grad is view for grad, view in zip(grads, memory.views, strict=True)):
            for i, grad in enumerate(grads):
                if grad is None and self._is_published[i]:  # the user has dropped it: it starts from zero again
                    memory.local_shard_of(memory.flat, i).zero_()
            self._is_published = bytes(grad is not None for grad in grads)
            self.write_mode, self.target = ADDED, memory.flat
            if self._segments:
                memory.zero_gaps()  # scaling by NaN leaves NaN in the padding
        else:
            self.write_mode = FOREIGN
            self.target = torch.empty(memory.numel, dtype=memory.dtype, device=memory.device)
        return self.write_mode

    def publish(self, is_used: bytes, has_others: bool = True) -> None:
        """Show the reduced gradient: ``sharded.grad`` of every sharded parameter for which ``is_used`` holds a 1. The
        others stay as they are (``None`` if they had none). ``has_others``: sharded parameters may have gradients that
        are not ours."""
        self._is_dropped = False
        memory = self.memory
        if self.write_mode is FRESH:
            if has_others:
                is_used = self._add_others(is_used)
            if self._hooks.on_gradient or self._hooks.after_accumulation:
                self._publish_through_hooks(is_used)
            elif 0 not in is_used:
                with PlainAttributes():
                    for sharded, view in zip(self._sharded_params, memory.views):
                        sharded.grad = view
            else:
                for used, sharded, view in zip(is_used, self._sharded_params, memory.views, strict=True):
                    if used:
                        sharded.grad = view
            self._is_published = is_used
        elif self.write_mode is FOREIGN and self._segments:
            self._publish_separately(is_used)
        elif self.write_mode is FOREIGN:
            for i, sharded in enumerate(self._sharded_params):
                if is_used[i]:
                    self._hooks.add_to_grad(i, make_gradient(memory.local_shard_of(self.target, i), sharded))
                else:
                    follow_layout(sharded)
        else:
            published = self._is_published
            for i, (sharded, view) in enumerate(zip(self._sharded_params, memory.views, strict=True)):
                if is_used[i] and not published[i]:
                    _add_other(sharded, view)
                    sharded.grad = view
                if is_used[i] and not self._hooks.is_empty:
                    self._hooks.accumulated(i)
            self._is_published = bytes(a | b for a, b in zip(published, is_used, strict=True))
        if self._segments:
            self._publish_segments(is_used)
            self._hooks.forget(is_used)
        self.target = None

    def _publish_through_hooks(self, is_used: bytes) -> None:
        for i, (sharded, view) in enumerate(zip(self._sharded_params, self.memory.views, strict=True)):
            if is_used[i]:
                self._hooks.replace(i, view)
                sharded.grad = view
                self._hooks.accumulated(i)

    def _publish_separately(self, is_used: bytes) -> None:
        """Add to the flat gradient the gradients that hooks want to see separately."""
        memory, result = self.memory, self.target
        assert memory.flat is not None and result is not None
        used = [i for i in range(len(self._sharded_params)) if is_used[i]]
        with torch.no_grad():
            for i in used:
                reduced = make_gradient(memory.local_shard_of(result, i), self._sharded_params[i])
                if not self._hooks.take_arrival(i, reduced, memory.views[i]):
                    _add_other(self._sharded_params[i], memory.views[i])
                self._hooks.replace(i, reduced)
            for segment in self._segments:
                if segment.is_among(is_used):
                    _call_gradient_hooks(segment.parameter, segment.make_gradient(result))
            memory.flat.add_(result)
        self._is_published = bytes(a | b for a, b in zip(self._is_published, is_used, strict=True))
        for i in used:
            self._sharded_params[i].grad = memory.views[i]
            self._hooks.accumulated(i)

    def _publish_segments(self, is_used: bytes) -> None:
        """Show the gradient of flat views of which a part was used."""
        for segment in self._segments:
            if not segment.is_among(is_used):
                continue
            param, gradient = segment.parameter, segment.gradient
            assert gradient is not None
            _add_other(param, gradient)  # terms of the loss on the flat view itself
            if self.write_mode is FRESH:
                _call_gradient_hooks(param, gradient)
            param.grad = gradient
            _call_hooks_after_accumulation(param)

    def _want_gradients(self) -> bool:
        if self._hooks.want_gradients:
            return True
        for segment in self._segments:
            if gradient_hooks(segment.parameter):
                return True
        return False

    def _add_others(self, is_used: bytes) -> bytes:
        """Add what autograd has put into ``sharded.grad`` in the same backward.

        Returns:
            Which sharded parameters have a gradient now.
        """
        used = bytearray(is_used)
        for i, (sharded, view) in enumerate(zip(self._sharded_params, self.memory.views, strict=True)):
            if sharded.grad is not None:  # from a loss term computed from the sharded parameter
                _add_other(sharded, view)
                used[i] = 1
        return bytes(used)

    def forget_result(self) -> None:
        """Do not publish the reduced gradient."""
        self.target = None

    def discard(self) -> None:
        """Make every sharded parameter's gradient ``None``."""
        for sharded in self._sharded_params:
            sharded.grad = None
        for segment in self._segments:
            segment.parameter.grad = None
        self._is_published = bytes(len(self._sharded_params))
        self.target = None


def are_untouched(gradients: Sequence[ShardedGradient]) -> bool:
    """Whether all gradients are untouched, in one pass: an optimizer asks for all its handles before its step."""
    with PlainAttributes():
        sharded_params = chain.from_iterable([gradient._sharded_params for gradient in gradients])
        shown = chain.from_iterable([gradient._shown() for gradient in gradients])
        return (
            all([gradient._are_segments_untouched() for gradient in gradients])
            and all(map(is_, map(_grad, sharded_params), shown))
            and all([gradient.memory.is_in_place() for gradient in gradients])
        )


def _add_other(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Add the gradient in ``parameter.grad``, unless it is our view, to that view, which is about to replace it."""
    other = parameter.grad
    if other is not None and other is not view:
        with torch.no_grad():
            view.add_(other)


def _call_gradient_hooks(param: torch.Tensor, gradient: torch.Tensor) -> None:
    """Call the hooks of ``register_hook``; a gradient that they return is copied over the original."""
    hooks = gradient_hooks(param)
    if hooks:
        with torch.no_grad():
            for hook in hooks:
                result = hook(gradient)
                if result is not None:
                    gradient.copy_(result)


def _call_hooks_after_accumulation(param: torch.Tensor) -> None:
    hooks = post_accumulate_hooks(param)
    if hooks:
        with torch.no_grad():
            for hook in hooks:
                hook(param)
