"""The default mode: the group's own memory is filled for a forward and freed after it; hooks bring it back in backward.

The all-gather has mostly been started by the group before (``schedule``), and is only waited for. Under grad mode the
forward leaves a use, whose hooks do the same in backward (``use``); without it none, since no backward comes.
"""

from __future__ import annotations

import torch

from ..._torch import is_checkpoint_recomputing
from ...group import Root, _FSDPState
from ...ragged import toggles
from ..schedule import prefetch_forward
from ..steps import follow_toggles, unshard_again, unshard_for_use, wait_for_unshard
from ..use import DefaultUse

_is_grad_enabled = torch.is_grad_enabled


class DefaultMode:
    """See the module's opening paragraph."""

    __slots__ = ()

    def enter(self, root: Root, state: _FSDPState, is_recomputed: bool) -> tuple[DefaultUse | None, DefaultUse | None]:
        has_grad_mode = _is_grad_enabled()
        if not is_recomputed:
            root.forward.enter()
            if has_grad_mode and state.past.num_toggles != toggles.count:
                follow_toggles(root, state)
            unshard_for_use(root, state)
            prefetch_forward(root, state)
            if len(state.modules) > 1 and not state.progress.pending_modules:
                state.progress.pending_modules.update([id(ref()) for ref in state.modules])
        elif state.backward.active_uses:
            unshard_again(root, state)  # its backward computes with what was gathered
        else:
            unshard_for_use(root, state)
        wait_for_unshard(root, state)
        use = watcher = None
        if has_grad_mode:
            forward = root.forward
            use = DefaultUse(state, forward.record, forward.innermost)
            forward.begin_use(use)
            # A recomputation for a backward that already waits for this group: the original graph has the hooks.
            if not (is_recomputed and state.backward.active_uses and is_checkpoint_recomputing()):
                watcher = use
        state.swap.show_unsharded()
        return use, watcher


DEFAULT = DefaultMode()
