"""How backwards write the gradient of one shard: when the flat gradient is written, and when the user sees it.

Owned by its ``FlatParamHandle``; written by ``communicator``; shown by ``publish`` at the end of backward, as views
that ``GradientBuffer`` keeps. A gradient that the user keeps is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from operator import attrgetter

import torch
import torch.nn as nn

from .._torch import PlainAttributes, gradient_hooks, post_accumulate_hooks
from .flat_gradient import FlatGradient
from .gradient_memory import LocalShard
from .gradient_view import FlatSegment
from .hooks import GradientHooks
from .sharded_param import follow_layout, make_gradient

_grad = attrgetter("grad")


class WriteMode(Enum):
    """How a newly reduced gradient meets what is already in ``sharded.grad``."""

    FRESH = "no sharded parameter has a gradient: the flat gradient is overwritten"
    ADDED = "the sharded parameters' gradients are our views: the flat gradient is added to"
    FOREIGN = "a sharded parameter holds a gradient that the user put there: the result is added to each one's own"


# By themselves: on the hot path, where looking into an Enum takes time.
FRESH, ADDED, FOREIGN = WriteMode.FRESH, WriteMode.ADDED, WriteMode.FOREIGN


class ShardedGradient(FlatGradient):
    """The flat gradient of a shard, which backwards write.

    Attributes:
        target: from ``prepare`` until ``publish``, the flat tensor that takes the result: to be overwritten (FRESH,
            FOREIGN) or added to (ADDED).
    """

    __slots__ = ("_write_mode", "target")

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
        super().__init__(sharded_params, local_shards, shard, hooks, segments, keeps_memory, dtype)
        self._write_mode = FRESH
        self.target: torch.Tensor | None = None

    @property
    def write_mode(self) -> WriteMode:
        """What ``prepare`` has decided last."""
        return self._write_mode

    # ---- while a backward runs

    def prepare(self) -> WriteMode:
        """Decide where the gradient that is about to be reduced goes; called once per reduction. A second reduction
        in the same backward is added to the first."""
        if self.target is not None:
            return ADDED
        # On the hot path: asked only where there may be hooks. Where nothing is known, publish() looks again.
        if not self._is_dropped or ((self._hooks.on_gradient or self._segments) and self._want_gradients()):
            if self._segments:
                self.follow_user()
            for grad in map(_grad, self._sharded_params):
                if grad is not None:
                    return self._prepare_to_add()
        self.buffer.ensure_writable()
        self._write_mode, self.target = FRESH, self.buffer.flat
        return FRESH

    def _prepare_to_add(self) -> WriteMode:
        grads, buffer = [sharded.grad for sharded in self._sharded_params], self.buffer
        is_ours = buffer.views and buffer.is_in_place() and not self._want_gradients()
        if is_ours and all(grad is None or grad is view for grad, view in zip(grads, buffer.views, strict=True)):
            for i, grad in enumerate(grads):
                if grad is None and self._is_published[i]:  # dropped by the user since: starts from zero again
                    buffer.local_shard_of(buffer.flat, i).zero_()
            self._is_published = bytes(grad is not None for grad in grads)
            self._write_mode, self.target = ADDED, buffer.flat
            if self._segments:
                buffer.zero_gaps()  # a flat gradient that was scaled by NaN has NaN in its padding
        else:
            self._write_mode = FOREIGN
            self.target = torch.empty(buffer.numel, dtype=buffer.dtype, device=buffer.device)
        return self._write_mode

    def publish(self, is_used: bytes, has_others: bool = True) -> None:
        """Show the reduced gradient: ``sharded.grad`` of every sharded parameter for which ``is_used`` holds a 1; the
        others stay as they are, ``None`` when they had none. ``has_others``: sharded parameters may have gradients that
        are not ours."""
        self._is_dropped = False
        buffer = self.buffer
        if self._write_mode is FOREIGN and self._segments:
            self._publish_separately(is_used)
        elif self._write_mode is FRESH:
            if has_others:
                is_used = self._add_others(is_used)
            if self._hooks.on_gradient or self._hooks.after_accumulation:
                self._publish_through_hooks(is_used)
            elif 0 not in is_used:
                with PlainAttributes():
                    for sharded, view in zip(self._sharded_params, buffer.views):
                        sharded.grad = view
            else:
                for used, sharded, view in zip(is_used, self._sharded_params, buffer.views, strict=True):
                    if used:
                        sharded.grad = view
            self._is_published = is_used
        elif self._write_mode is FOREIGN:
            for i, sharded in enumerate(self._sharded_params):
                if is_used[i]:
                    self._hooks.add_to_grad(i, make_gradient(buffer.local_shard_of(self.target, i), sharded))
                else:
                    follow_layout(sharded)
        else:
            published = self._is_published
            for i, (sharded, view) in enumerate(zip(self._sharded_params, buffer.views, strict=True)):
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
        for i, (sharded, view) in enumerate(zip(self._sharded_params, self.buffer.views, strict=True)):
            if is_used[i]:
                self._hooks.replace(i, view)
                sharded.grad = view
                self._hooks.accumulated(i)

    def _publish_separately(self, is_used: bytes) -> None:
        """Add to the flat gradient what hooks want to see by itself."""
        buffer, result = self.buffer, self.target
        assert buffer.flat is not None and result is not None
        used = [i for i in range(len(self._sharded_params)) if is_used[i]]
        with torch.no_grad():
            for i in used:
                reduced = make_gradient(buffer.local_shard_of(result, i), self._sharded_params[i])
                if not self._hooks.take_arrival(i, reduced, buffer.views[i]):
                    _add_other(self._sharded_params[i], buffer.views[i])
                self._hooks.replace(i, reduced)
            for segment in self._segments:
                if segment.is_among(is_used):
                    _call_gradient_hooks(segment.parameter, segment.make_gradient(result))
            buffer.flat.add_(result)
        self._is_published = bytes(a | b for a, b in zip(self._is_published, is_used, strict=True))
        for i in used:
            self._sharded_params[i].grad = buffer.views[i]
            self._hooks.accumulated(i)

    def _publish_segments(self, is_used: bytes) -> None:
        """Show the gradient of the flat views of which a part was used."""
        for segment in self._segments:
            if not segment.is_among(is_used):
                continue
            param, gradient = segment.parameter, segment.gradient
            assert gradient is not None
            _add_other(param, gradient)  # terms of the loss on the flat view itself
            if self._write_mode is FRESH:
                _call_gradient_hooks(param, gradient)
            param.grad = gradient
            hooks = post_accumulate_hooks(param)
            if hooks:
                with torch.no_grad():
                    for hook in hooks:
                        hook(param)

    def _want_gradients(self) -> bool:
        if self._hooks.want_gradients:
            return True
        for segment in self._segments:
            if gradient_hooks(segment.parameter):
                return True
        return False

    def _add_others(self, is_used: bytes) -> bytes:
        """Add what the same backward has put into ``sharded.grad`` by itself: terms of the loss on the sharded
        parameters.

        Returns:
            Which sharded parameters have a gradient now.
        """
        used = bytearray(is_used)
        for i, (sharded, view) in enumerate(zip(self._sharded_params, self.buffer.views, strict=True)):
            if sharded.grad is not None:
                _add_other(sharded, view)
                used[i] = 1
        return bytes(used)

    def forget_result(self) -> None:
        """Do not publish what was reduced."""
        self.target = None

    def discard(self) -> None:
        """Make every sharded parameter's gradient ``None``."""
        for sharded in self._sharded_params:
            sharded.grad = None
        for segment in self._segments:
            segment.parameter.grad = None
        self._is_published = bytes(len(self._sharded_params))
        self.target = None


def _add_other(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Add what is in ``parameter.grad`` to our view, which is about to take its place, if it is not that view."""
    other = parameter.grad
    if other is not None and other is not view:
        with torch.no_grad():
            view.add_(other)


def _call_gradient_hooks(param: torch.Tensor, gradient: torch.Tensor) -> None:
    """Call the hooks of ``register_hook``; what they return takes the gradient's place, in its memory."""
    hooks = gradient_hooks(param)
    if hooks:
        with torch.no_grad():
            for hook in hooks:
                result = hook(gradient)
                if result is not None:
                    gradient.copy_(result)
