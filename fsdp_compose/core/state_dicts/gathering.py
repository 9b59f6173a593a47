"""Gather whole tensors from sharded ones, for state dicts. Values are moved between ranks, never changed.

A flat parameter is gathered by one collective, whose memory is the only extra, or by messages straight into the
result. Tensors split by tensor parallelism are gathered one by one."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from ..._nested import Path, leaves_of, map_leaves
from ..._torch import dtensor_spec, is_wrapper, local_tensor, make_dtensor
from ...plugins.gloo import Messages
from ...plugins.parameter_classes import CompositeDTensor, with_local
from ..flat import FlatParamHandle, gather_flat, local_of
from ..ragged import RaggedDTensor, ReplicatedDTensor
from .fqns import ModelNames, Place

Key = tuple[Any, ...]
"""(FQN, name of the optimizer's state, path in lists and dicts...); the name is empty for the parameter itself."""


@dataclass
class _Bundle:
    """Tensors that are sharded like parameters of one flat parameter, and gathered together."""

    handle: FlatParamHandle
    locals: dict[int, torch.Tensor] = field(default_factory=dict)  # by index of the parameter
    keys: dict[Key, int] = field(default_factory=dict)


def facts_of(values: Mapping[Key, Any]) -> list[str]:
    """Return the facts that ranks must agree on before they gather ``values``: the sharded tensors, in order."""
    return [
        f"{key_text(key)} of shape {tuple(leaf.shape)}, {leaf.dtype}, {layout_of(leaf)}"
        for key, leaf in _leaves(values).items()
        if isinstance(leaf, DTensor)
    ]


def key_text(key: Key) -> str:
    """Format a key for error messages."""
    fqn, *path = key
    name = ".".join(map(str, path))
    return f"{name} of {fqn}" if name else fqn


def layout_of(tensor: DTensor) -> str:
    """Describe a tensor's layout, in the same words on every rank."""
    # Without the ranks of the mesh: other ranks may be in another mesh.
    mesh, placements = tensor.device_mesh, [*map(str, map(repr, tensor.placements))]
    if isinstance(tensor, RaggedDTensor) and not tensor._spec.is_only_ragged:
        placements[tensor._spec.ragged_dim] = "RaggedShard"  # without sizes, which may differ on other ranks
    return f"placed [{', '.join(placements)}] on a {mesh.device_type} mesh of shape {tuple(mesh.shape)}"


def gather_values(
    names: ModelNames, values: Mapping[Key, Any], *, to_cpu: bool, rank0_only: bool, is_first: bool
) -> dict[Key, Any]:
    """Return ``values`` with DTensors replaced by whole tensors, also inside lists and dicts. They share no memory with
    ``values``; a tensor that occurs several times in ``values`` is one tensor in the result.

    Ranks: all ranks of the meshes, with equal ``facts_of(values)``.

    Args:
        values: tensors and other values.
        to_cpu: put the result on the CPU.
        rank0_only: the ranks that are not ``is_first`` get an empty dict, and hold no more than their shards.
    """
    is_wanted = is_first or not rank0_only
    leaves, copies, wholes = _leaves(values), Copies(to_cpu), dict[Key, Any]()
    bundles: dict[Any, _Bundle] = {}  # by flat parameter, name of state, and dtype
    alone = dict[Key, Any]()
    for key, leaf in leaves.items():
        place = names.place(key[0])
        if place is None or not is_sharded_like(leaf, place):
            alone[key] = leaf
            continue
        handle, index = place
        bundle = bundles.setdefault((handle, key[1:], leaf.dtype), _Bundle(handle))
        bundle.locals[index] = local_tensor(leaf)
        bundle.keys[key] = index
    for bundle in bundles.values():
        wholes.update(_gather_bundle(bundle, to_cpu, rank0_only))
    for key, leaf in alone.items():
        whole = full_tensor(leaf) if isinstance(leaf, DTensor) else leaf
        if is_wanted:
            # If this rank holds everything, full_tensor() returns the live memory.
            is_fresh = isinstance(leaf, DTensor) and not storage_of(whole) == storage_of(leaf) != 0
            wholes[key] = copies.of(whole) if not is_fresh else whole.cpu() if to_cpu else whole
    if not is_wanted:
        return {}
    gathered: dict[Key, Any] = map_leaves(lambda path, _: wholes[path[0] + path[1:]], dict(values))
    return gathered


def _leaves(values: Mapping[Key, Any]) -> dict[Key, Any]:
    return {path[0] + path[1:]: leaf for path, leaf in leaves_of(dict(values))}


class Copies:
    """Makes copies that share no memory with their originals. What is given twice is copied once, so ties stay ties."""

    def __init__(self, to_cpu: bool) -> None:
        self._copy: Callable[[torch.Tensor], torch.Tensor] = copy_to_cpu if to_cpu else torch.clone
        self._made: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # (original, which must stay alive, and copy)

    def of(self, value: Any) -> Any:
        """Return a copy of a tensor, sharded in the same way, or of any other value."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        value = value.detach()
        local = local_of(value)
        if type(local) is not torch.Tensor or local.layout != torch.strided or local.is_meta or not local.numel():
            return self._copy(value)
        # By memory: state_dict() makes another object of a tensor for each of its names.
        key = (type(value), local.data_ptr(), local.shape, local.stride(), local.dtype, local.device)
        if key not in self._made:
            self._made[key] = (value, self._copy(value))
        return self._made[key][1]


def full_tensor(value: DTensor) -> torch.Tensor:
    """Gather all of ``value``, outside autograd. Ranks: all ranks of its mesh."""
    with torch.no_grad():
        whole: torch.Tensor = value.full_tensor()
    return whole.detach()


def is_sharded_like(value: Any, place: Place) -> bool:
    """Whether ``value`` is sharded like the parameter at ``place``, which tensor parallelism has not split."""
    sharded = place[0].sharded_params[place[1]]
    return (
        isinstance(value, RaggedDTensor)
        and not isinstance(value, CompositeDTensor)
        and value.shape == sharded.shape
        and isinstance(sharded, RaggedDTensor)
        and sharded._spec.is_only_ragged
        and value._spec.is_sharded_like(sharded._spec)
    )


def _gather_bundle(bundle: _Bundle, to_cpu: bool, rank0_only: bool) -> dict[Key, torch.Tensor]:
    handle = bundle.handle
    transport = handle.mesh.transport.exact.unrecorded  # other ranks may record nothing
    if isinstance(transport, Messages):
        wholes = _gather_by_messages(bundle, transport, rank0_only)
    else:
        flat = gather_flat(handle, _as_shard(handle, bundle.locals), rank0_only, to_cpu)
        views = [] if flat is None else handle.full_views_of(flat)
        # Copies: a view would keep, and torch.save() write, the whole flat parameter for each of its tensors.
        wholes = {index: views[index].clone() for index in bundle.locals if views}
    return {key: wholes[index] for key, index in bundle.keys.items() if wholes}


def _gather_by_messages(bundle: _Bundle, transport: Messages, rank0_only: bool) -> dict[int, torch.Tensor]:
    """Gather whole tensors by index, on ranks that want them, straight into the result."""
    layout, mesh = bundle.handle.layout, bundle.handle.mesh
    sizes = [layout.params[index].numel * local.element_size() for index, local in bundle.locals.items()]
    if rank0_only and not mesh.is_first_replica:
        transport.skip(sum(sizes), bundle.handle.label)
        return {}
    mine = mesh.shard_rank
    is_wanted = mine == 0 or not rank0_only
    receivers = [rank for rank in range(1 if rank0_only else mesh.shard_world_size) if rank != mine]
    sent = [(rank, local) for local in bundle.locals.values() for rank in receivers if local.numel()]
    wholes: dict[int, torch.Tensor] = {}
    received = []
    for index, local in bundle.locals.items() if is_wanted else ():
        whole = wholes[index] = local.new_empty(layout.params[index].numel)
        for rank, shard in layout.local_shards_of(index).items():
            place = whole[shard.param_start :][: shard.numel]
            if rank == mine:
                place.copy_(local.reshape(-1))
            else:
                received.append((rank, place))
    transport.exchange(sent, received, sum(sizes), bundle.handle.label)
    return {index: layout.whole_of(index, elements) for index, elements in wholes.items()}


def _as_shard(handle: FlatParamHandle, locals_: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return local tensors at their places in a shard: the shard itself, if they are views of it."""
    own = handle.shard.detach()
    views = handle.views_of(own)
    if all(shares_memory(local, views[index]) for index, local in locals_.items()):
        return own
    shard = next(iter(locals_.values())).new_zeros(handle.layout.shard_numel)
    views = handle.views_of(shard)
    for index, local in locals_.items():
        views[index].copy_(local)
    return shard


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous local tensors are the same elements."""
    return a.numel() == b.numel() and a.dtype == b.dtype and (not a.numel() or a.data_ptr() == b.data_ptr())


def same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one layout share their memory."""
    return a.shape == b.shape and shares_memory(local_of(a), local_of(b))


def storage_of(tensor: torch.Tensor) -> int:
    """Return the storage address of this rank's shard of a tensor; 0 if it has none (a subclass that wraps others)."""
    local = local_of(tensor)
    if local.layout != torch.strided:
        return 0
    return local.untyped_storage().data_ptr() if local.data_ptr() else 0


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, sharded in the same way."""
    return on_local(tensor, lambda local: local.to("cpu", copy=True))


def on_local(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor placed like this one, with what ``function`` makes of this rank's elements."""
    if isinstance(tensor, RaggedDTensor):
        return with_local(tensor, function(local_tensor(tensor).detach()))
    if isinstance(tensor, DTensor):
        kind = ReplicatedDTensor if isinstance(tensor, ReplicatedDTensor) else DTensor
        made: torch.Tensor = make_dtensor(kind, function(local_tensor(tensor).detach()), dtensor_spec(tensor))
        return made
    plain = function(tensor.detach())
    if says_what_it_holds(tensor):
        for name in _HOLDING_FIELDS:
            setattr(plain, name, getattr(tensor, name))
    return plain


_HOLDING_FIELDS = [*getattr(getattr(dcp, "CheckpointableTensor", None), "__annotations__", ())]  # since torch 2.14


def says_what_it_holds(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor says which piece of a larger one it is, as ``torch.distributed.checkpoint`` reads it."""
    return bool(_HOLDING_FIELDS) and all(hasattr(tensor, name) for name in _HOLDING_FIELDS)


# ---- Plain tensors: each rank has its own, but a checkpoint and a full state dict have one value for each.


def digests_of(value: Any, path: Path = ()) -> dict[str, str]:
    """Describe the numbers and plain tensors (dtype, shape, checksum) in a value, by their keys in a checkpoint."""
    found = {}
    for at, leaf in leaves_of(value, path):
        if type(leaf) in (bool, int, float, complex):
            found[".".join(map(str, at))] = repr(leaf)
        tensors = [*_memory_of(leaf)] if isinstance(leaf, torch.Tensor) else []
        if tensors:
            checksum = 0
            for tensor in tensors:
                on_cpu = tensor.resolve_conj().resolve_neg().cpu().contiguous()
                checksum = zlib.crc32(on_cpu.view(-1).view(torch.uint8).numpy().data, checksum)
            found[".".join(map(str, at))] = f"{leaf.dtype} of shape {tuple(leaf.shape)} with checksum {checksum:08x}"
    return found


def _memory_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a plain tensor, or those that it wraps (quantized state); nothing of a piece of a larger tensor."""
    if hasattr(tensor, "__create_write_items__") or says_what_it_holds(tensor):
        return
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _memory_of(getattr(tensor, name))
    elif type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not tensor.is_meta:
        if tensor.layout == torch.strided and not tensor.is_quantized:
            yield tensor.detach().as_subclass(torch.Tensor)
