"""What a flat parameter makes of other memory for its sharded parameters, and of writes to them."""

from __future__ import annotations

from typing import Any

from ..ragged import note_write_of_all_ranks, writes
from .flat_param import FlatParamHandle
from .sharded_param import copy_attributes, local_elements
from .tensor_parallel import specs_of


def reflatten(handle: FlatParamHandle) -> None:
    """Take the sharded parameters' present elements, wherever they are, into a new shard.

    Raises:
        ValueError: the sharded parameters no longer agree on dtype or device, or one has another shape.
    """
    locals_ = [local_elements(sharded) for sharded in handle.sharded_params]
    first = f"{handle.name_of(0)}"
    for fqn, local, (_, _, shape) in zip(handle.fqns, locals_, handle.local_shards, strict=True):
        if (local.dtype, local.device) != (locals_[0].dtype, locals_[0].device):
            raise ValueError(
                f"the parameters of one fully_shard group no longer agree: {handle.label.names(fqn)} is {local.dtype} "
                f"on {local.device}, {first} is {locals_[0].dtype} on {locals_[0].device}; convert or move "
                "the whole sharded module, or shard the part that differs by its own fully_shard() call"
            )
        if tuple(local.shape) != tuple(shape):
            raise ValueError(
                f"the sharded parameter {handle.label.names(fqn)} was given data of shape {tuple(local.shape)} on rank "
                f"{handle.mesh.rank}, where its local shard has shape {tuple(shape)}: assign data of that shape"
            )
    device = locals_[0].device
    home = handle.home.device(handle.mesh)
    if device.type not in ("meta", home.type):
        where = "its offload_policy keeps it on" if handle.home.is_host else "its mesh is on"
        raise ValueError(
            f"the sharded parameter {first} was moved to {device}, but {where} {home}; move it back before the next "
            "forward"
        )
    handle.gradient.detach_segments()
    shard = handle.flatten()
    # One that no shard had before.
    note_write_of_all_ranks((shard,) * max(handle.shard._version + 1 - shard._version, 1))
    for segment in handle.segments:
        segment.rebind(shard)
    for sharded, unsharded in zip(handle.sharded_params, handle.unsharded.bearers, strict=True):
        copy_attributes(unsharded, sharded)  # module.to() loses them
    handle.hooks.listen_again()
    was_unsharded = handle.unsharded.is_allocated
    handle.adopt(shard)
    if was_unsharded and not handle.unsharded.never_freed and not handle.unsharded.is_meta:
        handle.unsharded.allocate()  # to be gathered again when the other ranks do


def is_stale(handle: FlatParamHandle) -> bool:
    """Whether the ranks have written to the sharded parameters since these were gathered. The same on all ranks.

    Raises:
        RuntimeError: this rank has, by itself.
    """
    version, segments, num_writes = handle.unsharded.gathered
    if handle.unsharded.never_freed:
        return False
    if handle.segments and handle.segment_version() != segments:
        return True
    if handle.shard._version == version:
        return False
    if num_writes != writes.count:
        return True
    names = ", ".join(handle.names)
    raise RuntimeError(
        f"rank {handle.mesh.rank}: a sharded parameter was written to through its local memory (to_local(), or "
        "a flat view made with local=True) after it had been gathered, which other ranks cannot know, so that "
        f"what was gathered would be used with old values. It is one of {names}. Write to the sharded parameter "
        "itself, under torch.no_grad(); or outside forward, where no keep_unsharded() keeps what was gathered (the "
        "group that comes next in a forward is gathered ahead)"
    )


def describe(handle: FlatParamHandle) -> list[dict[str, Any]]:
    """The facts that must be the same on every rank: one for each parameter, then one for the whole."""
    specs, extension = specs_of(handle.tensor_parallel, len(handle.fqns)), handle.kind.extension
    facts: list[dict[str, Any]] = [
        {
            "parameter": handle.label.names(placement.fqn),
            "shape": list(placement.shape if spec is None else spec.shape),
            **({} if spec is None else {"placements": str(spec.placements)}),
            "dtype": str(handle.shard.dtype),
            "compute dtype": str(handle.unsharded.dtype),
            "reduce dtype": str(handle.contributions.dtype),
            "gradient dtype": str(handle.gradient.dtype),
            **({} if extension is None else {"gathered by": extension.cls.__name__}),
            "requires_grad": sharded.requires_grad,
        }
        for placement, sharded, spec in zip(handle.layout.params, handle.sharded_params, specs, strict=True)
    ]
    offsets = [placement.offset for placement in handle.layout.params]
    return [*facts, {"elements per rank": handle.layout.shard_numel, "offsets": offsets}]
