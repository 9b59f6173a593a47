"""The flat gradient of one shard, as the user sees it, and what he does to it between backwards.

``zero_grad()`` is noticed by looking, and frees the memory at the next forward.

Note [One owner]. Where an optimizer has flat views (``gradient_view``), their ``.grad`` and those of the sharded
parameters are views of the same memory. Dropping one side drops the other, and tensors that the user has put in the
place of views are copied into the flat gradient: when a forward begins, before a backward adds, and before the
optimizer's step (``follow_user``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_

import torch
import torch.nn as nn

from .._torch import PlainAttributes, gradient_hooks, post_accumulate_hooks, set_local_tensor
from .gradient_memory import GradientBuffer, LocalShard
from .gradient_view import FlatSegment
from .hooks import GradientHooks
from .kind import expect_gradient
from .sharded_param import local_elements

_grad = attrgetter("grad")


class FlatGradient:
    """The flat gradient of a shard, between backwards.

    Args:
        sharded_params: the sharded parameters, in the order of the layout.
        local_shards: for each sharded parameter, (start, stop, shape) of its local shard inside the shard, in elements.
        shard: the shard, whose length and device the gradient has.
        hooks: the gradient hooks of the sharded parameters, which ``publish`` calls.
        segments: the flat views over the shard; the list is the handle's own.
        keeps_memory: also while there is no gradient, as a bucket does.
        dtype: of the gradient; ``None``: that of the shard.

    Attributes:
        buffer: the memory, and its views.
    """

    __slots__ = (
        "_hooks", "_is_dropped", "_is_published", "_keeps_memory", "_segments", "_sharded_params", "buffer",
    )  # fmt: skip

    _memory: type[GradientBuffer] = GradientBuffer

    def __init__(
        self,
        sharded_params: Sequence[nn.Parameter],
        local_shards: Sequence[LocalShard],
        shard: torch.Tensor,
        hooks: GradientHooks,
        segments: list[FlatSegment],
        keeps_memory: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._keeps_memory = keeps_memory
        self._sharded_params = sharded_params
        self._hooks = hooks
        self._segments = segments
        self.buffer = self._memory(sharded_params, local_shards, shard, segments, dtype)
        for param in (*sharded_params, *(segment.parameter for segment in segments)):
            expect_gradient(param, self.dtype)
        self._is_dropped = False  # no sharded parameter had a gradient when the present forward began
        self._is_published = bytes(len(sharded_params))

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    def release_if_dropped(self, is_known_to_be: bool = False) -> None:
        """Free the memory when the user has dropped the gradient (``zero_grad()``), or is known to have."""
        if self._segments:
            is_known_to_be = not self.follow_user()
        self._is_dropped = is_known_to_be
        if not self.buffer.is_allocated:
            return
        if not is_known_to_be:
            for grad in map(_grad, self._sharded_params):
                if grad is not None:
                    return
        if not self._keeps_memory:
            self.buffer.release()
        self._is_published = bytes(len(self._sharded_params))

    # ---- together with flat views; Note [One owner]

    def attach(self, segment: FlatSegment) -> None:
        """Give a new segment, the last of the list, the gradient that there may be already."""
        expect_gradient(segment.parameter, self.dtype)
        self.buffer.attach(segment)
        views = self.buffer.views
        if views and any(self._sharded_params[i].grad is views[i] for i in segment.sharded_params):
            segment.parameter.grad = segment.gradient

    def detach_segments(self) -> None:
        """Before the shard is replaced. What flat views have dropped is dropped; what is left is the sharded
        parameters'."""
        for segment in self._segments:
            if segment.parameter.grad is None:
                self._drop_views(segment)
            segment.parameter.grad = None
            segment.have_gradient(None)

    def is_untouched(self) -> bool:
        """Whether every gradient is our view in our memory, or ``None`` where none was published."""
        return are_untouched((self,))

    def _shown(self) -> Sequence[torch.Tensor | None]:
        """``.grad`` of the sharded parameters, if the user has done nothing to it."""
        buffer, published = self.buffer, self._is_published
        if not buffer.is_allocated:
            return [None] * len(self._sharded_params)
        if 0 in published:
            return [view if done else None for done, view in zip(published, buffer.views)]
        return buffer.views

    def _are_segments_untouched(self) -> bool:
        for segment in self._segments:
            is_shown = segment.is_among(self._is_published)
            if segment.parameter.grad is not (segment.gradient if is_shown else None):
                return False
            if is_shown and not (self.buffer.is_allocated and self.buffer.holds(segment)):
                return False
        return True

    @property
    def flat(self) -> torch.Tensor | None:
        """The flat gradient, if some sharded parameter has a part of it; only while ``is_untouched``."""
        return self.buffer.flat if self.buffer.is_allocated and 1 in self._is_published else None

    def published_locals(self, sharded_params: Iterable[int]) -> list[torch.Tensor]:
        """This rank's part of the gradients of some sharded parameters; without those that have none."""
        return [self.buffer.locals[i] for i in sharded_params if self._is_published[i]]

    def zero_unpublished(self) -> None:
        """Zero padding and the parts of sharded parameters without a gradient, after the flat gradient was scaled."""
        buffer = self.buffer
        buffer.zero_gaps()
        if 0 in self._is_published:
            for done, local in zip(self._is_published, buffer.locals, strict=True):
                if not done:
                    local.zero_()

    def follow_user(self) -> bool:
        """Make sharded parameters and flat views agree after what the user did to the gradients of either.

        Returns:
            Whether there is a gradient.

        Raises:
            RuntimeError: the user gave a gradient of his own to a sharded parameter that is a part of a flat view.
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
        """Call the hooks of flat views, which have what autograd has brought to some sharded parameters."""
        for segment in self._segments:
            if any(i in segment.sharded_params for i in sharded_params):
                if gradient_hooks(segment.parameter):
                    raise RuntimeError(
                        "a gradient has come to a sharded parameter through autograd (functional mode, or a term of "
                        "the loss computed from the parameter itself), and its flat view has a hook by "
                        "register_hook(), which cannot see it by itself: register it on the model's parameters"
                    )
                with torch.no_grad():
                    for hook in post_accumulate_hooks(segment.parameter):
                        hook(segment.parameter)

    def _drop_views(self, segment: FlatSegment) -> None:
        if self.buffer.views:
            part = slice(segment.sharded_params.start, segment.sharded_params.stop)
            for sharded, view in zip(self._sharded_params[part], self.buffer.views[part], strict=True):
                if sharded.grad is view:
                    sharded.grad = None

    @torch.no_grad()
    def _take_in(self) -> None:
        """Copy what the user has put in the place of our views into the flat gradient, and zero what was dropped."""
        buffer, sharded_params = self.buffer, self._sharded_params
        replaced = [
            (item, item.parameter.grad)
            for item in self._segments
            if item.parameter.grad is not None and not (item.parameter.grad is item.gradient and buffer.holds(item))
        ]
        is_ours = [p.grad is view for p, view in zip(sharded_params, buffer.views)] or [False] * len(sharded_params)
        self._refuse_foreign(is_ours)
        self._is_dropped = False
        given_ours = [item for item in self._segments if item.parameter.grad is item.gradient is not None]
        if not any(is_ours) and not given_ours:  # there is nothing in the flat gradient
            buffer.ensure_writable()
            assert buffer.flat is not None
            buffer.flat.zero_()
        for sharded, view, local in zip(sharded_params, buffer.views, buffer.locals, strict=True):
            if sharded.grad is None:
                local.zero_()
            elif sharded.grad is not view:
                view.copy_(sharded.grad)
                sharded.grad = view
            elif local_elements(view) is not local:  # its .data was assigned to
                local.copy_(local_elements(view))
                set_local_tensor(view, local)
        for segment, given in replaced:
            buffer.take_in(segment, given)
            for i in segment.sharded_params:
                sharded_params[i].grad = buffer.views[i]
        self._is_published = bytes(sharded.grad is not None for sharded in sharded_params)
        for segment in self._segments:
            segment.parameter.grad = segment.gradient if segment.is_among(self._is_published) else None

    def _refuse_foreign(self, is_ours: Sequence[bool]) -> None:
        """The optimizer of a flat view, ``GradScaler`` and torch's clipping look at the flat view alone."""
        for segment in self._segments:
            for i in segment.sharded_params:
                if self._sharded_params[i].grad is not None and not is_ours[i] and not self._hooks.has_arrived(i):
                    name, first = self._hooks.name_of(i), self._hooks.name_of(segment.sharded_params.start)
                    raise RuntimeError(
                        f".grad of the sharded parameter {name} was assigned to, and it is a part of a flat view of "
                        f"flat_parameters() (the one that begins with {first}): what looks at the flat view before the "
                        "step (GradScaler.unscale_(), torch's clip_grad_norm_) would pass by what was assigned. Change "
                        "the gradient in place, or assign to .grad of the flat view"
                    )


def are_untouched(gradients: Sequence[FlatGradient]) -> bool:
    """Whether all of them are untouched, in one pass: before its step an optimizer asks for all its handles."""
    with PlainAttributes():
        sharded_params = chain.from_iterable([gradient._sharded_params for gradient in gradients])
        shown = chain.from_iterable([gradient._shown() for gradient in gradients])
        return (
            all([gradient._are_segments_untouched() for gradient in gradients])
            and all(map(is_, map(_grad, sharded_params), shown))
            and all([gradient.buffer.is_in_place() for gradient in gradients])
        )
