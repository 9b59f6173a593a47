"""The interface between the hooks and the modes: a mode decides where the parameters of a forward come from, and how
its backward finds the group.

The hooks choose the mode of each forward, in one place, and do what is common to all modes: they find the root, cast
and alias the inputs, check what forward has done, and reshard. A mode makes modules show full parameters and returns a
use, whose methods the hooks call to end the forward (see ``GroupUse``). Each mode is one file (``default_mode``,
``functional_mode``, ``graph_mode``) and does not refer to the others."""

from __future__ import annotations

from typing import Protocol

from ..group import GroupUse, Root, _FSDPState
from .inputs_outputs import InputWatcher


class Mode(Protocol):
    """A way in which groups compute. May be an object made for one forward."""

    def enter(self, root: Root, state: _FSDPState, is_recomputed: bool) -> tuple[GroupUse | None, InputWatcher | None]:
        """Make the modules of a group whose forward begins show full parameters (``ParameterSwap``).

        A forward that is not ``is_recomputed`` is counted (``root.forward.enter``), but only after all checks that may
        raise: if a counted forward raises before it has its use, the next forward sees an interrupted iteration.

        Returns:
            The use that ends the forward, or ``None`` if this mode has nothing to do at its end; and the watcher of
            inputs that require grad, if there is one.
        """
