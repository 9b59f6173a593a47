"""Roots that share groups: actor and critic around one encoder, two losses on one backbone.

A program may have several roots: modules whose forwards begin iterations. Where their groups are disjoint, each root
has a ``Root`` of its own. Roots that share a group are one ``Root`` together: a use of the shared group in one
root's forward must know of its uses in the others', which one backward may reach too. This module finds out which
modules these are; ``first_forward`` makes the context::

    actor   (root)  .--> encoder --> layers[0], layers[1]        one context: actor, encoder, layers..., critic
    critic  (root)  '
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn

from .registry import states_to_run
from .state import Root, _FSDPState


@dataclass(frozen=True)
class RootModule:
    """A module whose forward begins iterations, with all groups below it, its own first, and their names."""

    module: nn.Module
    groups: list[tuple[_FSDPState, str]]

    @property
    def state(self) -> _FSDPState:
        return self.groups[0][0]

    @property
    def states(self) -> list[_FSDPState]:
        return [state for state, _ in self.groups]


def roots_together(module: nn.Module) -> list[RootModule]:
    """The roots that share groups with ``module``, or with each other, in an order that is the same on all ranks;
    ``module`` itself first, unless it is a part of another one."""
    found = [RootModule(module, states_to_run(module))]
    for root in found:  # grows
        for context in contexts_of(root.states):
            for part in context.parts:
                owner = part[0]()
                if owner is not None and all(owner is not other.state for other in found):
                    found += [RootModule(item, states_to_run(item)) for item in owner.live_modules()[:1]]
    outermost = [
        root
        for root in found
        if not any(root.state is state for other in found if other is not root for state in other.states)
    ]
    return _connected(outermost, states_to_run(module)[0][0])


def contexts_of(states: list[_FSDPState]) -> list[Root]:
    """The contexts in which the groups have run so far."""
    found: list[Root] = []
    for state in states:
        if state.root is not None and state.root not in found:
            found.append(state.root)
    return found


def _connected(roots: list[RootModule], state: _FSDPState) -> list[RootModule]:
    """Those that share groups with the roots of ``state``, directly or by way of others."""
    reached = {state}
    waiting, chosen = list(roots), set()
    while True:
        more = [root for root in waiting if not reached.isdisjoint(root.states)]
        if not more:
            return [root for root in roots if id(root) in chosen]
        for root in more:
            waiting.remove(root)
            chosen.add(id(root))
            reached.update(root.states)
