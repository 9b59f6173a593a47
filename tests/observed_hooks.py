"""Gradient hooks on a sharded model and on its unsharded twin, and when they should have been called.

A hook of ``register_hook`` doubles the gradient, on both; a hook after accumulation notes the gradient that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn

from fsdp_compose import RaggedDTensor
from fsdp_compose.core.flat.accumulation import UnreducedGradient
from fsdp_compose.core.flat.flat_param import handle_of

ON_GRADIENT, AFTER_ACCUMULATION = "on gradient", "after accumulation"


class ObservedHooks:
    """Hooks on some parameters.

    Args:
        wanted: (number of a parameter, ``ON_GRADIENT`` or ``AFTER_ACCUMULATION``) of each hook.
        may_repeat: parts of a backward run by themselves (reentrant checkpointing), so that hooks of parameters in
            functional mode, or of a root of which such a part is the whole backward, are called several times.
        has_inner_roots: there are roots inside of the model, with groups of theirs, of which that may be so.
    """

    def __init__(self, wanted: Sequence[tuple[int, str]], may_repeat: bool, has_inner_roots: bool) -> None:
        self._wanted, self._may_repeat, self._has_inner_roots = wanted, may_repeat, has_inner_roots
        self._hooked: dict[int, int] = {}  # by number of a hook, its parameter
        self._num_calls: dict[int, int] = {}  # by number of a hook, in the present backward
        self._seen: dict[int, torch.Tensor] = {}  # by number of a hook, this rank's gradient
        self._reached: set[int] = set()  # parameters of the unsharded model, by the present backward
        self._unreduced: set[int] = set()  # those that backwards without sync have reached
        self._unknown: set[int] = set()  # those of which not even that is known: the loss had a term on them

    def register(self, ours: Sequence[nn.Parameter], theirs: Sequence[nn.Parameter], hooks: slice) -> None:
        """Register some of the hooks, on those parameters that require grad."""
        for number in range(len(self._wanted))[hooks] if ours else ():
            at, kind = self._wanted[number]
            index = at % len(ours)
            if ours[index].requires_grad:
                self._hooked[number] = index
                self._register(number, kind, ours[index], theirs[index])

    def _register(self, number: int, kind: str, ours: nn.Parameter, theirs: nn.Parameter) -> None:
        def on_gradient(grad: torch.Tensor) -> torch.Tensor:
            self._num_calls[number] = self._num_calls.get(number, 0) + 1
            assert isinstance(grad, RaggedDTensor) and grad.shape == theirs.shape
            return grad * 2

        def after_accumulation(param: torch.Tensor) -> None:
            self._num_calls[number] = self._num_calls.get(number, 0) + 1
            if not isinstance(param.grad, UnreducedGradient):
                self._seen[number] = param.grad.to_local().clone()

        if kind == ON_GRADIENT:
            ours.register_hook(on_gradient)
            theirs.register_hook(lambda grad: grad * 2)
        else:
            ours.register_post_accumulate_grad_hook(after_accumulation)
        index = self._hooked[number]
        theirs.register_post_accumulate_grad_hook(lambda _: self._reached.add(index))

    def begin_backward(self, theirs: Sequence[nn.Parameter]) -> None:
        """Called before a backward of both models."""
        # A backward inside the forward that has just run may have reduced what was accumulated before.
        self._unreduced -= {self._hooked[number] for number in self._num_calls}
        for known in (self._unreduced, self._unknown):
            known -= {i for i in known if theirs[i].grad is None}
        self._reached.clear()
        self._num_calls.clear()
        self._seen.clear()

    def check(self, sharded_params: Sequence[nn.Parameter], with_terms: set[int], reaches_groups: bool) -> list[str]:
        """The differences after a backward. A hook is called once by a backward that reduces the gradient of its
        parameter, or in which the loss has a term on the parameter itself, and else not at all; after accumulation it
        has seen the gradient as it is now. ``reaches_groups``: else the loss has terms on parameters alone, whose
        backward reduces nothing."""
        differences = []
        reduced: set[int] = set()
        for number, index in self._hooked.items():
            place = handle_of(sharded_params[index])
            assert place is not None
            state = place[0].owner()
            expected = index in with_terms
            syncs = state.persistent.was_functional or state.options.requires_gradient_sync
            # A backward of another root leaves it as it is.
            if reaches_groups and syncs and type(sharded_params[index].grad) is not UnreducedGradient:
                expected |= index in self._reached | self._unreduced
                reduced.add(index)
            num_calls = self._num_calls.get(number, 0)
            may_repeat = self._may_repeat and (
                state.persistent.was_functional or state.is_root or self._has_inner_roots
            )
            may_be = num_calls > expected > 0 and may_repeat
            may_be |= index in self._unknown and index in reduced and num_calls == 1
            if num_calls != expected and not may_be:
                differences.append(f"hook {number} was called {num_calls} times, expected {int(expected)}")
            grad = sharded_params[index].grad
            if number in self._seen and not (grad is not None and torch.equal(grad.to_local(), self._seen[number])):
                differences.append(f"hook {number} saw {self._seen[number]}, and the gradient is {grad}")
        self._unreduced = (self._unreduced | self._reached - with_terms) - reduced
        self._unknown = (self._unknown | with_terms) - reduced
        self._num_calls.clear()
        return differences
