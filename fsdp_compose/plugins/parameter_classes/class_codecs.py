"""How parameters are stored and gathered whose class says so, or that consist of several tensors.

- ``ExtensionCodec``: the class of the parameter has an all-gather of its own. Such a parameter is gathered in another
  form than it is stored and trained in, often with fewer bytes (torchao's weights for float8 training).
- ``CompositeCodec``: it consists of several tensors, stored as their bytes.

What codecs do by themselves is here; what they do while a model runs is in ``unsharded_extension``.

A class with an all-gather has two methods. Each rank calls the first one on its shard of a parameter, which is an
instance of the class. The returned tensors are gathered one by one, concatenated along dim 0. From them, the second
method makes the tensor that forward sees::

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (tensor, inner tensors); None if given ``out``

Both may communicate on ``mesh``. A tensor by itself stands for a tuple of one. ``out`` is the result of an earlier
call, to be filled again. The inner tensors are the memory of the result: it is freed, and allocated again, together
with the gathered tensors. A third method is optional::

    fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool

If it returns True, the gathered tensors are freed as soon as the second method has made the result, which must not be a
view of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ..._torch import is_wrapper, same_storage
from ...core.flat import FlatLayout, MixedPrecisionPolicy
from ...core.flat.codecs import ParameterCodec, has_protocol, num_arguments, releases
from ...core.flat.layout import LocalShards
from ...core.ragged import RaggedSpec
from ...errors import MisuseError
from .parts import (
    PART_ALIGNMENT_BYTES,
    InnerTensor,
    Parts,
    are_equal,
    context_of,
    describe_part,
    first_rows,
    inner_tensors,
    remade,
    rows_of,
)
from .subclass_views import CompositeDTensor


@dataclass(frozen=True, eq=False)
class ExtensionCodec(ParameterCodec):
    """The all-gather of one parameter's class. No two are equal, so the parameter gets a flat parameter of its own."""

    cls: type[Any]
    inner: str | None  # the attribute that holds an instance's elements; None if the instance itself does
    context: Any  # the other data that an instance is made from
    shape: torch.Size  # of the parameter
    module: weakref.ref[nn.Module]  # that has the parameter
    policy: MixedPrecisionPolicy
    is_short: bool  # the first method takes only the mesh
    releases: bool  # the gathered tensors are not needed once the result is made

    @property
    def gathered_by(self) -> str:
        return self.cls.__name__

    def of_a_copy(self, memo: dict[int, Any]) -> ExtensionCodec:
        module = self.module()
        return self if module is None else replace(self, module=weakref.ref(copy.deepcopy(module, memo)))

    def over(self, local: torch.Tensor) -> Any:
        """Make an instance of the class over some rows."""
        if self.inner is None:
            instance = local.as_subclass(self.cls)
            instance.__dict__.update(self.context)
            return instance
        return remade(self.cls, {self.inner: local}, self.context, local.shape, local.stride())

    def over_shard(self, shard: torch.Tensor) -> Any:
        """Make an instance of the class over all of a shard."""
        return self.over(shard.view(-1, *self.shape[1:]))

    def own_attributes(self, instance: Any) -> dict[str, Any]:
        """The attributes that were set on an instance, besides its elements."""
        return {key: value for key, value in vars(instance).items() if key != self.inner}

    def inputs(self, instance: Any, mesh: DeviceMesh) -> tuple[list[torch.Tensor], Any]:
        """Return what to gather of this rank's rows, and the metadata. Ranks: all of ``mesh``."""
        if self.is_short:
            inputs, metadata = instance.fsdp_pre_all_gather(mesh)
        else:
            stride = torch.empty(self.shape, device="meta").stride()
            arguments = (mesh, self.shape, stride, self.module(), self.policy)
            inputs, metadata = instance.fsdp_pre_all_gather(*arguments)
        return [inputs] if isinstance(inputs, torch.Tensor) else [*inputs], metadata

    def make(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Make the tensor that forward sees from the gathered tensors; return it with its memory."""
        made: tuple[torch.Tensor, Sequence[torch.Tensor]] = instance.fsdp_post_all_gather(outputs, metadata, dtype)
        return made

    def fill(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, out: torch.Tensor
    ) -> None:
        """Update the result of ``make`` from newly gathered tensors."""
        instance.fsdp_post_all_gather(outputs, metadata, dtype, out=out)


def codec_of_class(
    param: nn.Parameter,
    module: nn.Module,
    policy: MixedPrecisionPolicy,
    compute: torch.dtype | None,
    is_composite: bool,
) -> ParameterCodec:
    """See ``codec_of``: for a parameter whose class gathers it, or that is composite."""
    has = has_protocol(param)
    policy = replace(policy, param_dtype=compute, param_dtype_override_fn=None)
    is_short, frees, reference = has and num_arguments(param) == 1, has and releases(param), weakref.ref(module)
    if is_composite:
        return CompositeCodec(type(param), None, None, param.shape, reference, policy, is_short, frees, has)
    inner, context = None, dict[str, Any]()
    if is_wrapper(param):
        (inner,), context = inner_tensors(param), context_of(param)
    else:
        context = {key: value for key, value in param.__dict__.items() if key != "_is_param"}
    return ExtensionCodec(type(param), inner, context, param.shape, reference, policy, is_short, frees)


# ---- Parameters of a class that holds several tensors, which each rank stores as bytes (see ``parts``)
#
# Only the class knows how to cut rows, so it is asked, by ``split()`` or ``narrow()``, as FSDP2 does. Its answer is
# checked tensor by tensor, so putting the shards together again gives the original, bit for bit. If the class has an
# all-gather of its own, the parameter is gathered by that; otherwise tensor by tensor, and forward sees the original
# again.
#
# Rows that the ranks cannot share evenly are cut as FSDP2 cuts them, if every tensor has the parameter's rows: the last
# ranks hold fewer. Their bytes are filled up with zeros, and the class gathers equally many rows of every rank.
#
# It can train if all its tensors are cut; the gradient is a plain tensor of its shape and dtype, sharded by rows.


@dataclass(frozen=True, eq=False)
class CompositeCodec(ExtensionCodec):
    """A composite parameter: the shard holds the bytes of its tensors; layout, local shards and gradient are those of
    the elements that it stands for, equal rows on every rank."""

    is_composite: ClassVar[bool] = True

    has_protocol: bool = False  # it is gathered by its class; otherwise tensor by tensor
    parts: Parts | None = None  # how it is cut, once that is known

    @property
    def bytes(self) -> Parts:
        """How it is stored in a rank's bytes."""
        assert self.parts is not None, "known when it is sharded"
        return self.parts

    def dtype_of(self, shard: torch.Tensor) -> torch.dtype:
        return self.bytes.dtype

    def shard_numel(self, layout: FlatLayout) -> int:
        return self.bytes.nbytes

    def locals_of(self, shard: torch.Tensor, local_shards: LocalShards) -> list[torch.Tensor]:
        return [shard]

    def sharded(self, local: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
        return CompositeDTensor.made(local, spec, self.bytes)

    def wholes_of(self, flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
        return [self.bytes.whole_of(flat)]

    def over(self, local: torch.Tensor) -> Any:
        return self.bytes.over(local)

    def over_shard(self, shard: torch.Tensor) -> Any:
        return self.bytes.padded(shard)

    def own_attributes(self, instance: Any) -> dict[str, Any]:
        names = {item.name for item in self.bytes.inner}
        return {key: value for key, value in vars(instance).items() if key not in names}

    def inputs(self, instance: Any, mesh: DeviceMesh) -> tuple[list[torch.Tensor], Any]:
        if self.has_protocol:
            return super().inputs(instance, mesh)
        return [getattr(instance, item.name) for item in self._gathered()], None

    def make(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        if self.has_protocol:
            return super().make(instance, outputs, metadata, dtype)
        tensors = {item.name: getattr(instance, item.name) for item in self.bytes.inner}
        tensors |= {item.name: output for item, output in zip(self._gathered(), outputs, strict=True)}
        return self.bytes.whole(tensors), outputs

    def fill(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, out: torch.Tensor
    ) -> None:
        if self.has_protocol:
            super().fill(instance, outputs, metadata, dtype, out)

    def _gathered(self) -> list[InnerTensor]:
        """The tensors that are cut over ranks; with a single rank, all of them."""
        return [item for item in self.bytes.inner if item.is_cut or self.bytes.num_ranks == 1]


def refusal(param: torch.Tensor, fqn: str, why: str) -> MisuseError:
    """The error about a parameter that cannot be cut."""
    parts = ", ".join(f"{name}: {describe_part(tensor)}" for name, tensor in inner_tensors(param).items())
    return MisuseError(
        f"fully_shard(): the parameter {fqn} is a {type(param).__name__} of shape {tuple(param.shape)} and "
        f"{param.dtype}, which is stored as ({parts}) and cannot be sharded: {why}. Or leave it out with "
        "ignored_params (every rank then keeps all of it)"
    )


def check_composite(param: nn.Parameter, fqn: str, is_gathered: bool) -> None:
    """Raise ValueError if a composite parameter is refused for reasons that show before it is cut."""
    if not is_gathered:
        raise refusal(param, fqn, "replicate() gathers nothing: shard it with fully_shard()")
    if not param.is_contiguous():
        raise refusal(param, fqn, "it is not contiguous: make it contiguous")
    for name, tensor in inner_tensors(param).items():
        if not isinstance(tensor, torch.Tensor) or is_wrapper(tensor) or not tensor.is_contiguous():
            raise refusal(param, fqn, f"{name} is not a contiguous plain tensor: make it one")


def cut(
    param: torch.Tensor,
    fqn: str,
    ranks: tuple[int, int],
    device: torch.device,
    gather_bytes: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[Parts, torch.Tensor]:
    """Cut a checked composite parameter; return the cut and this rank's bytes. No communication.

    Args:
        ranks: their number, and this rank.
        device: to compute on.
        gather_bytes: see ``Parts``.

    Raises:
        ValueError: its class cannot cut its rows for these ranks, or it cannot train.
    """
    num_ranks, rank = ranks
    with torch.no_grad():
        whole = param.detach() if param.device == device or param.is_meta else param.detach().to(device)
        wholes, num_rows = inner_tensors(whole), whole.shape[0] if whole.dim() else 0
        has_rows = all(tensor.dim() and tensor.shape[0] == num_rows for tensor in wholes.values())
        is_uneven = num_ranks > 1 and num_rows > 0 and num_rows % num_ranks != 0 and has_rows
        # Shards of fewer rows are made from the first one, which has the most.
        index = 0 if is_uneven else rank
        shard = whole if num_ranks == 1 else _shard_by_class(whole, fqn, num_ranks, index, is_uneven)
        inner, start = [], 0
        for name, tensor in inner_tensors(shard).items():
            is_cut = is_uneven or (num_ranks > 1 and tensor.shape != wholes[name].shape)
            if is_cut and tensor.dim():
                rows = tensor.shape[0]
                has_all = is_uneven or torch.Size([rows * num_ranks, *tensor.shape[1:]]) == wholes[name].shape
                is_right = has_all and are_equal(wholes[name][index * rows : (index + 1) * rows], tensor)
            else:
                is_right = not is_cut and are_equal(tensor, wholes[name])
            if not is_right:
                raise refusal(
                    param,
                    fqn,
                    f"its class cuts {name} into {num_ranks} parts of shape {tuple(tensor.shape)}, which together are "
                    "not the whole",
                )
            inner.append(InnerTensor(name, tensor.shape, tensor.dtype, start, is_cut))
            start += -(-inner[-1].nbytes // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES
        contexts = context_of(shard), context_of(whole)
        parts = Parts(type(param), param.shape, param.dtype, tuple(inner), start, *contexts, *ranks, gather_bytes)
        if param.requires_grad and parts.uncut:
            raise refusal(
                param,
                fqn,
                f"it is trainable, but {', '.join(parts.uncut)} is the same on every rank, and each would train a copy "
                "of its own: freeze it, .requires_grad_(False)",
            )
        local = torch.zeros(start, dtype=torch.uint8, device=whole.device)
        if is_uneven:
            _check_first_rows(parts, local, whole, fqn)
        parts.write(local, whole)
    return parts, local


def _check_first_rows(parts: Parts, local: torch.Tensor, whole: torch.Tensor, fqn: str) -> None:
    """Raise, on every rank, if the class cannot leave out rows at the end of a shard."""
    num_rows, storage = len(rows_of(parts.shape, parts.num_ranks, parts.num_ranks - 1)), local.untyped_storage()
    try:
        shard = first_rows(parts.padded(local), num_rows)
    except Exception as error:  # whatever a class raises if it cannot cut
        what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    else:
        views = inner_tensors(shard).values() if type(shard) is type(whole) else ()
        are_views = [same_storage(view.untyped_storage(), storage) and view.shape[0] == num_rows for view in views]
        if are_views and all(are_views):
            return
        what = f"a {type(shard).__name__} of shape {tuple(shard.shape)}, not a view"
    raise refusal(
        whole,
        fqn,
        f"its {parts.shape[0]} rows are not a multiple of the {parts.num_ranks} ranks, and its class cannot leave out "
        f"rows at the end of a part (aten.slice: {what}). Choose a number of ranks that divides them",
    )


def _shard_by_class(whole: torch.Tensor, fqn: str, num_ranks: int, rank: int, is_uneven: bool) -> torch.Tensor:
    """One rank's rows, cut by the class; if the cut is uneven, only the first ranks' are asked for."""
    num_rows = whole.shape[0] if whole.dim() else 0
    if not num_rows or (num_rows % num_ranks and not is_uneven):
        raise refusal(
            whole,
            fqn,
            f"its {num_rows} rows are not a multiple of the {num_ranks} ranks. Choose a number of ranks that divides "
            "them",
        )
    rows, answers = -(-num_rows // num_ranks), list[str]()
    for how in ("split", "narrow"):
        try:
            shard = whole.split(rows)[rank] if how == "split" else whole.narrow(0, rank * rows, rows)
        except Exception as error:  # whatever a class raises if it cannot cut
            first_line = str(error).strip().partition("\n")[0]
            answers.append(f"{how}(): {type(error).__name__}: {first_line[:200]}")
            continue
        if type(shard) is type(whole) and shard.shape == torch.Size([rows, *whole.shape[1:]]):
            return shard
        answers.append(f"{how}(): a {type(shard).__name__} of shape {tuple(shard.shape)}")
    raise refusal(
        whole,
        fqn,
        f"its class cannot cut it into {num_ranks} parts of {rows} rows each ({'; '.join(answers)}). Choose a number "
        "of ranks that keeps blocks and scales whole",
    )
