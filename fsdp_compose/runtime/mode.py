"""The seam between the hooks and the modes: where the parameters that a forward computes with come from, and how its
backward finds the group.

The hooks choose the mode of each forward, in one place, and do themselves what is the same in all: they find the root,
cast and alias the inputs, look at what forward has done, reshard. A mode lets modules show full parameters and answers
with a use, by whose methods the hooks end the forward (see ``GroupUse``). Each mode is one file (``default_mode``,
``functional_mode``, ``graph_mode``) and knows no other."""

from __future__ import annotations

from typing import Protocol

from ..group import GroupUse, Root, _FSDPState
from .inputs_outputs import InputWatcher


class Mode(Protocol):
    """A way in which groups compute; may be an object that is made for one forward."""

    def enter(self, root: Root, state: _FSDPState, is_recomputed: bool) -> tuple[GroupUse | None, InputWatcher | None]:
        """Let the modules of a group, whose forward begins, show full parameters (``ParameterSwap``).

        A forward that is not ``is_recomputed`` is counted (``root.forward.enter``) once nothing more can be refused:
        the next forward takes one that was counted, and raised before it had its use, for an interrupted iteration.

        Returns:
            The use, by which the forward ends, or ``None`` if its end leaves nothing for this mode to do; and what
            wants to know of inputs that require grad, if anything does.
        """
