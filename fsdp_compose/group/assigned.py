"""Parameters that were put in the place of a group's own and are sharded alike, as loaders make them
(``DTensor.from_local(local, p.device_mesh, p.placements)``): the group's own take their elements and their places, and
an optimizer that holds the others gets the group's own.
"""

from __future__ import annotations

from ..flat import handle_of, is_sharded_like, note_write, take_content
from ..ragged import RaggedDTensor
from .rebind import remember_sharded_param
from .swap import ParameterSwap


def take_assigned(swap: ParameterSwap) -> None:
    """Do so in the modules of a group. Local."""
    for params, name, handle, index in swap.slots():
        own, given = handle.sharded_params[index], params.get(name)
        if not isinstance(given, RaggedDTensor) or handle_of(given) is not None:
            continue  # a parameter of the model itself in another's place is a tie
        if is_sharded_like(given, own):
            take_content(own, given)
            note_write(own)
            own.requires_grad_(given.requires_grad)
            remember_sharded_param(given, own)  # type: ignore[arg-type]
            params[name] = own
