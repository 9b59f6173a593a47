"""``StateDictOptions``: the ``options`` of the functions of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...flat import as_ours


@dataclass(frozen=True)
class StateDictOptions:
    """How state dicts are made and loaded; names and meaning as in ``torch.distributed.checkpoint.state_dict``.

    Args:
        full_state_dict: getters gather whole tensors, ordinary ones. Setters need not be told: they take whole and
            sharded tensors alike.
        cpu_offload: getters copy to the CPU; with ``full_state_dict`` only the first rank gets a result, the others an
            empty dict.
        ignore_frozen_params: model getters leave out parameters that do not require grad; model setters do not miss
            them.
        keep_submodule_prefixes: with ``submodules=``, whether keys keep the names of these.
        strict: setters refuse missing and unexpected keys. Wrong shapes are always refused.
        broadcast_from_rank0: setters read the dict of the first rank only, and send it, a flat parameter at a time.
            Needs ``full_state_dict``.
        flatten_optimizer_state_dict: optimizer dicts have one level, with keys ``state.<FQN>.<name>`` and
            ``param_groups.<FQN>.<name>``. Setters need not be told.
        keep_foreign_params: what an optimizer trains in addition to the parameters of the model is kept, under names
            like ``param_groups.1.params.0`` (its place in the optimizer), instead of being an error.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    keep_foreign_params: bool = False

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ValueError(
                "StateDictOptions(broadcast_from_rank0=True) needs full_state_dict=True: what the first rank sends are "
                "whole tensors"
            )

    @property
    def is_rank0_only(self) -> bool:
        """Whether only the first rank gets a result."""
        return self.full_state_dict and self.cpu_offload


def as_options(given: Any) -> StateDictOptions:
    """The ``options`` that a user has given: ours, torch's own, or none."""
    return StateDictOptions() if given is None else as_ours(StateDictOptions, given, "options")
