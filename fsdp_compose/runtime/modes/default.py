"""The default mode: the group's own memory is filled for a forward and freed after it; hooks bring it back in backward.

The all-gather has mostly been started by the group before (``schedule``), and is only waited for. Under grad mode the
forward leaves a use, whose hooks do the same in backward (``use``); without it none, since no backward comes.
"""

from __future__ import annotations

import torch

from ..._torch import is_checkpoint_recomputing
from ...group import Root, _FSDPState, begins_forward
from ...ragged import toggles
from ..optional import check_place, gather_for_forward, gather_for_recomputation, gather_optional, refuse_unannounced
from ..schedule import following_in_forward, prefetch_forward
from ..steps import follow_toggles, unshard_again, unshard_for_use, wait_for_unshard
from ..use import DefaultUse

_is_grad_enabled = torch.is_grad_enabled


class DefaultMode:
    """See the module's opening paragraph."""

    __slots__ = ()

    @begins_forward
    def enter(self, root: Root, state: _FSDPState, is_recomputed: bool) -> tuple[DefaultUse | None, DefaultUse | None]:
        forward, has_grad_mode = root.forward, _is_grad_enabled()
        rounds = root.rounds
        if rounds is not None and not is_recomputed:
            check_place(root, rounds, state)
        use = DefaultUse(state, forward.record, forward.innermost) if has_grad_mode else None
        if not is_recomputed:
            forward.enter(use)
            if has_grad_mode and state.past.num_toggles != toggles.count:
                if rounds is None or state.place.index not in rounds.hosts:
                    follow_toggles(root, state)
            if rounds is None:
                unshard_for_use(root, state)
                prefetch_forward(root, state)
            elif state.place.index in rounds.hosts:
                gather_optional(root, rounds, state, use)
            else:
                gather_for_forward(root, rounds, state, following_in_forward(root, state))
            if len(state.modules) > 1 and not state.progress.pending_modules:
                state.progress.pending_modules.update([id(ref()) for ref in state.modules])
        elif rounds is not None and rounds.is_on:
            gather_for_recomputation(root, rounds, state, use)
        elif state.backward.active_uses:
            unshard_again(root, state)  # its backward computes with what was gathered
        else:
            unshard_for_use(root, state)
        if rounds is not None and not rounds.is_on:
            refuse_unannounced(rounds, state)
        wait_for_unshard(root, state)
        watcher = use
        if is_recomputed and use is not None:
            forward.begin_use(use)
            # For a backward that already waits for this group: the original graph has the hooks.
            if state.backward.active_uses and is_checkpoint_recomputing():
                watcher = None
        state.swap.show_unsharded()
        return use, watcher


DEFAULT = DefaultMode()
