"""``set_transport`` and ``set_wire_formats``: how the tensors of ``fully_shard`` groups travel between ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from ..._arguments import checked
from ...core.comm import DataParallelMesh, Transport, TransportRole
from ...core.group import Kind, _FSDPState, states_for
from ...core.ragged import note_write_of_all_ranks
from ...errors import MisuseError, MisuseRuntimeError, MisuseTypeError
from .wire import Bfloat16, Int8, Wire, WireFormat

FORMATS: dict[str, Callable[[], WireFormat]] = {"bf16": Bfloat16, "int8": Int8}


@checked(
    wrap="None or a function from (Transport, TransportRole) to a Transport (set_wire_formats() takes formats, such as "
    "'int8')"
)
def set_transport(
    module: nn.Module, wrap: Callable[[Transport, TransportRole], Transport] | None, *, recurse: bool = True
) -> None:
    """Let collectives of groups go through transports of your own, from the next one on. What is gathered is gathered
    again.

    What must be exact stays as it is: checkpoints, full parameters, the matrices of ``optim.Muon``. So do all-gathers
    that tensor subclasses define, and sums over tensor-parallel ranks.

    Ranks: all ranks, the same way, between the same two iterations. Local: no communication; the first forward, or the
    next backward, compares the transports' names.

    Args:
        module: a module given to ``fully_shard``, or one that contains such modules.
        wrap: called with each group's transport and what it is for. Returns that transport, or a ``TransportWrapper``
            around it. ``None``: go back to the transports that groups have without this.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        MisuseError: there is no such group; graphs of ``torch.compile`` contain it.
        MisuseRuntimeError: a forward or backward is running.
        MisuseTypeError: ``wrap`` returned something that is no transport of the same ranks.
    """
    _change("set_transport", module, wrap, recurse)


@checked()
def set_wire_formats(
    module: nn.Module,
    *,
    all_gather: str | WireFormat | None = None,
    reduce_scatter: str | WireFormat | None = None,
    all_reduce: str | WireFormat | None = None,
    recurse: bool = True,
) -> None:
    """Send fewer bytes, rounded. For networks that are slower than the rounding: docs/howto/slow_networks.md says when.

    Formats are ``"bf16"`` (half of fp32's bytes), ``"int8"`` (0.254 of them: multiples of 1/127 of the largest of 256
    neighbors), or a ``WireFormat``. ``None`` sends what there is, the default. A format that would not be shorter than
    the dtype of a tensor does not change it.

    All ranks compute with the same rounded parameters; shards, optimizer state and checkpoints stay exact. Gradients
    are rounded before they are summed, in fp32, and the result of an all-reduce once more. Parameters of tensor
    subclasses with all-gathers of their own, and sums over tensor-parallel ranks, are sent as they are.

    With hybrid sharding, ``all_reduce`` alone keeps traffic inside a node exact, and rounds that between nodes.

    Ranks: as for ``set_transport``, whose transports this replaces.

    Args:
        module: a module given to ``fully_shard``, or one that contains such modules.
        all_gather: of parameters.
        reduce_scatter: of gradients over the ranks that share the shards.
        all_reduce: of gradients over replicas: hybrid sharding, ``replicate``.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        MisuseError: there is no such format or group; ``all_reduce`` with ``set_replicas``; graphs of
            ``torch.compile`` contain a group.
        MisuseRuntimeError: a forward or backward is running.

    Example::

        set_wire_formats(model, all_gather="int8", reduce_scatter="int8")
    """
    device = states_for(module, "set_wire_formats", recurse)[0].mesh.device
    gathers, scatters, sums = [_format(chosen, device) for chosen in (all_gather, reduce_scatter, all_reduce)]

    def wrap(transport: Transport, role: TransportRole) -> Transport:
        if transport.num_ranks == 1:
            return transport
        if role is TransportRole.SHARDS and (gathers or scatters):
            return Wire(transport, gathers, scatters)
        if role is TransportRole.REPLICAS and sums:
            if transport.replicas is not None:
                raise MisuseError(
                    "set_wire_formats(all_reduce=...): the model averages over replica groups (set_replicas()), which "
                    "choose themselves what they send"
                )
            return Wire(transport, None, sums)
        return transport

    _change("set_wire_formats", module, wrap, recurse)


def _format(chosen: str | WireFormat | None, device: torch.device) -> WireFormat | None:
    if isinstance(chosen, WireFormat):
        _try(chosen, device)
    if chosen is None or isinstance(chosen, WireFormat):
        return chosen
    if isinstance(chosen, str) and chosen in FORMATS:
        return FORMATS[chosen]()
    raise MisuseError(
        f"set_wire_formats(): {chosen!r} is no format: give {' or '.join(map(repr, FORMATS))}, a WireFormat or None"
    )


def _try(wire: WireFormat, device: torch.device) -> None:
    """Raise if a format of the user cannot send a few elements: later, it would fail amid a collective."""
    given = f"set_wire_formats(): the format {type(wire).__name__}"
    if not isinstance(getattr(wire, "name", None), str):
        raise MisuseTypeError(f"{given} has no name: set one, a string that tells all settings, for ranks to compare")
    source = torch.ones(1000, device=device)
    try:
        packed = torch.empty(wire.nbytes(1000), dtype=torch.uint8, device=device)
        wire.encode(source, packed)
        wire.decode(packed, torch.empty_like(source), False)
    except Exception as error:
        raise MisuseError(
            f"{given} fails on 1000 elements of fp32: {error}. Expected nbytes() to return the bytes that encode() "
            "fills and decode() reads"
        ) from error


def _change(
    call: str, module: nn.Module, wrap: Callable[[Transport, TransportRole], Transport] | None, recurse: bool
) -> None:
    states = states_for(module, call, recurse)
    for state in states:
        refuse_unless_between_iterations(call, state)

    def change(transport: Transport, role: TransportRole) -> Transport:
        plain = transport.exact
        wrapped = plain if wrap is None else wrap(plain, role)
        if not isinstance(wrapped, Transport) or wrapped.group is not plain.group:
            raise MisuseTypeError(
                f"{call}(): wrap() returned {wrapped!r} for {role.value}, which is not a transport of the same process "
                "group: return the given one, or a TransportWrapper around it"
            )
        return wrapped

    change_meshes(states, lambda mesh: mesh.with_transports(change))
    for state in states:
        # What is gathered has the old rounding: gather it again, on all ranks.
        note_write_of_all_ranks([handle.shard for handle in state._handles])
        if state.root is not None:
            names = str(state.mesh.transport_names())
            state.root.order.entries.append(state.log.note(Kind.TRANSPORTS, f"{state.name}{names}"))


def change_meshes(states: list[_FSDPState], change: Callable[[DataParallelMesh], DataParallelMesh]) -> None:
    """Let ``states`` and their flat parameters run on ``change(mesh)``, from the next collective on."""
    # Those of the group too: ties give it new flat parameters at the first forward.
    meshes = [mesh for state in states for mesh in (state.mesh, *[handle.mesh for handle in state._handles])]
    changed = {id(mesh): change(mesh) for mesh in meshes}  # one object for equal ones, as before
    for state in states:
        state.mesh = changed[id(state.mesh)]
        for handle in state._handles:
            handle.run_on(changed[id(handle.mesh)])


def refuse_unless_between_iterations(call: str, state: _FSDPState) -> None:
    """Raise if collectives of ``state`` are under way, or if compiled graphs contain them as they are now."""
    if state.persistent.captured is not None:
        raise MisuseError(
            f"{call}(): graphs of torch.compile contain the fully_shard group {state.name}: call it before compiled "
            "code runs"
        )
    if state.is_busy or state.progress.awaiting_backward:
        raise MisuseRuntimeError(
            f"{call}(): a forward or backward of the fully_shard group {state.name} is running or still to come: call "
            "it between iterations"
        )
