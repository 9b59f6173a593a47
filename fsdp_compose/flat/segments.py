"""The flat views of one flat parameter: made once, checked before they are used."""

from __future__ import annotations

from .flat_param import FlatParamHandle, register_segment
from .gradient_view import FlatSegment


def segment_over(handle: FlatParamHandle, sharded_params: range, is_local: bool) -> FlatSegment | None:
    """The segment over exactly these sharded parameters, if there is one.

    Raises:
        ValueError: there is one that has some of them, or one of the other kind.
    """
    for segment in handle.segments:
        shared = sorted({*segment.sharded_params} & {*sharded_params})
        if shared and (segment.sharded_params != sharded_params or segment.is_local != is_local):
            what = (
                "with other neighbours"
                if segment.sharded_params != sharded_params
                else f"with local={segment.is_local}"
            )
            raise ValueError(
                f"flat_parameters(): the parameter {handle.name_of(shared[0])} is already in a flat "
                f"view that an earlier call has made, {what}. A parameter is in one flat view: let the selections "
                "(where=...) of your parameter groups exclude each other, and repeat them unchanged"
            )
        if shared:
            return segment
    if is_local and handle.home.has_host_gradients and not handle.home.is_host:
        raise ValueError(
            f"flat_parameters(local=True): gradients of {handle.name_of(sharded_params[0])} are in host memory, and "
            "the parameter is on the device (CPUOffloadPolicy(parameters=False)): torch lets no plain tensor have such "
            "a gradient. Leave local out"
        )
    return None


def add_segment(handle: FlatParamHandle, sharded_params: range, is_local: bool, among_cut: bool = False) -> FlatSegment:
    """A new segment, over sharded parameters of which none is in another one, and which all are cut alike by tensor
    parallelism unless ``is_local``; ``among_cut``: it has cut some of the model."""
    own = None if is_local else handle.tensor_parallel
    cut = () if own is None else own.sharded_dims(sharded_params[0])
    segment = FlatSegment(handle.layout, handle.mesh, sharded_params, is_local, handle.shard, cut, among_cut)
    handle.segments.append(segment)
    handle.hooks.listen_to_all()
    handle.gradient.attach(segment)
    register_segment(handle, segment)
    return segment


def check_segments(handle: FlatParamHandle) -> None:
    """Raise RuntimeError if a step of the flat views would be lost: the sharded parameters, or the flat views
    themselves, were given other memory."""
    if not handle.snapshot.has_locals():
        raise RuntimeError(
            f"the parameters of the fully_shard group with {handle.name_of(0)} were moved, converted or "
            "assigned to since the last forward, and flat views follow at the next one: run a forward before the "
            "optimizer's step"
        )
    if not all(segment.is_at(handle.shard, segment.parameter) for segment in handle.segments):
        raise RuntimeError(
            f".data of a flat view over {handle.name_of(0)} and its neighbours was assigned to, so "
            "that it is no part of the model any more: copy_() into it instead"
        )
