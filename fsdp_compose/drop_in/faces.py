"""Private attributes of FSDP2's states that other packages read, as thin faces of ours.

Who reads what: torch's pipelining (until 2.14) finishes a step by ``_state_ctx.all_states``, ``_fsdp_param_groups``,
``post_backward()`` and ``_root_post_backward_final_callback()``, and since then compares ``_comm_ctx``; verl sets
``_auto_reshard_after_forward`` and ``post_forward_mesh_info``. Nothing else is here: an attribute that is missing is an
AttributeError that names it.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from .. import controls
from .._torch import fsdp2_mesh_info
from ..group import _FSDPState, get_state, states_to_run


class StateFace:
    """FSDP2's ``FSDPState`` of one sharded module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        state = get_state(module)
        assert state is not None, "the module is sharded"
        self._state = state

    @property
    def _fsdp_param_groups(self) -> list[GroupFace]:
        return [GroupFace(self._module, self._state)] if self._state._handles else []

    @property
    def _fsdp_param_group(self) -> GroupFace | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _state_ctx(self) -> StateFace:
        return self

    @property
    def all_states(self) -> list[StateFace]:
        """Those of the module and of all below it."""
        return [StateFace(state.live_modules()[0]) for state, _ in states_to_run(self._module)]

    @property
    def _comm_ctx(self) -> object:
        """What models have in common that share streams and buffers: here each root is by itself."""
        return self._state if self._state.root is None else self._state.root

    @property
    def _is_root(self) -> bool | None:
        """``None`` before the first forward."""
        return None if self._state.root is None else self._state.is_root

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self._state.options.reshard_after_forward is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, is_automatic: bool) -> None:
        if is_automatic:
            self._state.set_options(reshard_after_forward=None)
        elif self._auto_reshard_after_forward:
            self._state.set_options(reshard_after_forward=True)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what backwards without gradient sync have left."""
        controls.reduce_as_set(self._module)


class GroupFace:
    """FSDP2's ``FSDPParamGroup`` of one sharded module."""

    def __init__(self, module: nn.Module, state: _FSDPState) -> None:
        self._module, self._state = module, state

    def post_backward(self) -> None:
        """Nothing yet: ``_root_post_backward_final_callback()``, which follows, reduces all groups."""

    def reshard(self) -> None:
        controls.reshard(self._module)

    @property
    def mesh_info(self) -> Any:
        """The mesh, as FSDP2 describes it."""
        return fsdp2_mesh_info(self._state.mesh.mesh)

    @property
    def post_forward_mesh_info(self) -> Any:
        """``None`` if the group stays gathered after forward."""
        return None if self._state.options.reshard_after_forward is False else self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, mesh_info: Any) -> None:
        controls.set_reshard_after_forward(self._module, mesh_info is not None, recurse=False)
