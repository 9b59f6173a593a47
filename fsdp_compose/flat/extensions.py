"""Parameters whose class has an all-gather of its own (FSDP2's extension protocol), and those that consist of several
tensors (quantised weights).

The first kind is gathered in another form, often in fewer bytes, than it is kept and trained in (torchao's weights for
float8 training). Used when flat parameters are built and by ``unsharded_extension``; other parameters never come here.

A class has two methods. Each rank calls the first on what it has of a parameter, an instance of the class; what it
returns is gathered, tensor by tensor, concatenated along dim 0, and the second makes of that what forward sees::

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (tensor, inner tensors); None if given ``out``

Both may communicate on ``mesh``. ``out`` is what an earlier call returned, to be filled again. The inner tensors are
the memory of the result: it is freed, and allocated again, with the gathered tensors. A third method is optional::

    fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool

If it returns True, the gathered tensors are freed as soon as the second has made the result, which is no view of them.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import is_wrapper
from .policy import MixedPrecisionPolicy

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@dataclass(frozen=True, eq=False)
class Extension:
    """The all-gather of one parameter's class. No two are equal: its parameter is in a flat parameter by itself.

    Attributes:
        cls: the class.
        inner: the attribute in which an instance has its elements; ``None``: they are its own.
        context: what else an instance is made of.
        shape: of the parameter.
        module: the module in which it stands.
        policy: what the user has decided about dtypes.
        is_short: the first method takes the mesh alone.
        releases: what was gathered is not needed once the result is made.
        is_composite: an instance is several tensors.
    """

    cls: type[Any]
    inner: str | None
    context: Any
    shape: torch.Size
    module: weakref.ref[nn.Module]
    policy: MixedPrecisionPolicy
    is_short: bool
    releases: bool

    is_composite: ClassVar[bool] = False

    def of_a_copy(self, memo: dict[int, Any]) -> Extension:
        """For the copy of the module, which ``memo`` has, or gets."""
        module = self.module()
        return self if module is None else replace(self, module=weakref.ref(copy.deepcopy(module, memo)))

    @property
    def name(self) -> str:
        """Of the class."""
        return self.cls.__name__

    def dtype_of(self, shard: torch.Tensor) -> torch.dtype:
        """Of the parameter with this shard."""
        return shard.dtype

    def over(self, local: torch.Tensor) -> Any:
        """An instance of the class over some rows."""
        if self.inner is None:
            instance = local.as_subclass(self.cls)
            instance.__dict__.update(self.context)
            return instance
        return self.cls.__tensor_unflatten__({self.inner: local}, self.context, local.shape, local.stride())

    def over_shard(self, shard: torch.Tensor) -> Any:
        """The same, over all of a shard."""
        return self.over(shard.view(-1, *self.shape[1:]))

    def whole_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter, of the whole of what its ranks keep."""
        return whole

    def own_attributes(self, instance: Any) -> dict[str, Any]:
        """What was set on an instance, besides its elements."""
        return {key: value for key, value in vars(instance).items() if key != self.inner}

    def inputs(self, instance: Any, mesh: DeviceMesh) -> tuple[list[torch.Tensor], Any]:
        """What is gathered, and the metadata, of this rank's rows. Ranks: all of ``mesh``."""
        if self.is_short:
            inputs, metadata = instance.fsdp_pre_all_gather(mesh)
        else:
            stride = torch.empty(self.shape, device="meta").stride()
            arguments = (mesh, self.shape, stride, self.module(), self.policy)
            inputs, metadata = instance.fsdp_pre_all_gather(*arguments)
        return [*inputs], metadata

    def make(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What forward sees of what was gathered, and the memory of that."""
        made: tuple[torch.Tensor, Sequence[torch.Tensor]] = instance.fsdp_post_all_gather(outputs, metadata, dtype)
        return made

    def fill(
        self, instance: Any, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, out: torch.Tensor
    ) -> None:
        """Let what ``make`` has made show what was gathered now."""
        instance.fsdp_post_all_gather(outputs, metadata, dtype, out=out)


def has_protocol(param: torch.Tensor) -> bool:
    """Whether the class of a parameter has an all-gather of its own."""
    return hasattr(param, PRE) or hasattr(param, POST)


def extension_of(param: nn.Parameter, module: nn.Module, policy: MixedPrecisionPolicy) -> Extension | None:
    """The all-gather of the class of ``param``, a checked parameter in ``module``, if it has one."""
    if not has_protocol(param) or not param.numel() or not param.dim():
        return None
    inner, context = None, dict[str, Any]()
    if is_wrapper(param):
        (inner,), context = param.__tensor_flatten__()  # type: ignore[attr-defined]
    else:
        context = {key: value for key, value in param.__dict__.items() if key != "_is_param"}
    is_short = num_arguments(param) == 1
    return Extension(type(param), inner, context, param.shape, weakref.ref(module), policy, is_short, releases(param))


def num_arguments(param: Any) -> int:
    """Of the first method."""
    return len(inspect.signature(param.fsdp_pre_all_gather).parameters)


def releases(param: Any) -> bool:
    """What the third method says, if there is one."""
    return hasattr(param, RELEASES) and getattr(param, RELEASES)()


def check_protocol(param: torch.Tensor, fqn: str) -> None:
    """Raise ValueError if the class of a parameter has the protocol in part."""
    cls, methods = type(param).__name__, [name for name in (PRE, POST) if hasattr(param, name)]
    if len(methods) == 1:
        raise ValueError(
            f"fully_shard(): the class {cls} of the parameter {fqn} has only {methods[0]}: an all-gather of its own "
            f"needs both {PRE} and {POST}"
        )
    if hasattr(param, RELEASES):
        if not methods:
            raise ValueError(
                f"fully_shard(): the class {cls} of the parameter {fqn} has {RELEASES} without {PRE} and {POST}"
            )
        answer = getattr(param, RELEASES)()
        if not isinstance(answer, bool):
            raise ValueError(
                f"fully_shard(): {cls}.{RELEASES}(), of the parameter {fqn}, returned {answer!r}, expected True or "
                "False"
            )
    if methods and num_arguments(param) not in (1, 5):
        raise ValueError(
            f"fully_shard(): {cls}.{PRE}(), of the parameter {fqn}, takes {num_arguments(param)} arguments, expected "
            "(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
        )


# ---- Parameters of a class that keeps several tensors of other shapes and dtypes (quantised weights: packed data,
# scales).
#
# Each rank keeps its rows of such a parameter as bytes: the tensors inside an instance of the class over these rows,
# one after the other. How rows are cut is the class's own affair: it is asked, by ``split()`` or ``narrow()``, as FSDP2
# asks. What it answers is checked, tensor by tensor: one inside is either cut in the same places (dim 0), or the same
# on every rank (a mean, a table)::
#
#     whole    data |a a a a|b b b b|   scales |a|b|   mean |m|
#     rank 0   bytes |a a a a|a|m|
#     rank 1   bytes |b b b b|b|m|
#
# So putting the parts together again gives the original, bit for bit. If the class has an all-gather of its own, it is
# gathered by that; else tensor by tensor, and forward sees the original again.


PART_ALIGNMENT_BYTES = 16  # of each tensor in the bytes, and of the whole


@dataclass(frozen=True)
class InnerTensor:
    """One tensor inside an instance of the class over one rank's rows.

    Attributes:
        name: the attribute.
        start: its first byte.
        is_cut: the whole one is this rank's and the other ranks', one after the other along dim 0; else it is this one.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    is_cut: bool

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """It, in the bytes ``local``."""
        return local[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class Parts:
    """How the tensors inside a parameter are cut, and lie in the bytes of one rank.

    Attributes:
        cls: the class.
        shape, dtype: of the parameter.
        inner: the tensors.
        nbytes: of one rank.
        context, whole_context: what else an instance over one rank's rows is made of; and the whole.
        num_ranks, rank: of the shard group.
        gather_bytes: from this rank's bytes those of all ranks.
    """

    cls: type[Any]
    shape: torch.Size
    dtype: torch.dtype
    inner: tuple[InnerTensor, ...]
    nbytes: int
    context: Any
    whole_context: Any
    num_ranks: int
    rank: int
    gather_bytes: Callable[[torch.Tensor], torch.Tensor]

    @property
    def name(self) -> str:
        return self.cls.__name__

    def is_like(self, other: Any) -> bool:
        """Whether both have the same bytes for the same instance."""
        return (self.cls, self.shape, self.dtype, self.inner) == (other.cls, other.shape, other.dtype, other.inner)

    def over(self, local: torch.Tensor) -> Any:
        """An instance over this rank's rows, sharing the memory of the bytes."""
        tensors = {item.name: item.view(local) for item in self.inner}
        return _instance(self.cls, tensors, self.context, _rows(self.shape, self.num_ranks))

    def part_in_own_memory(self, local: torch.Tensor) -> Any:
        """The same, whose tensors are copies, each in memory of its own."""
        tensors = {item.name: item.view(local).clone() for item in self.inner}
        return _instance(self.cls, tensors, self.context, _rows(self.shape, self.num_ranks))

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """A whole instance, of whole tensors."""
        return _instance(self.cls, tensors, self.whole_context, self.shape)

    def whole_of(self, flat: torch.Tensor) -> Any:
        """A whole instance, in memory of its own, of the bytes of all ranks."""
        locals_ = [*flat.view(self.num_ranks, self.nbytes)]
        tensors = {}
        for item in self.inner:
            if item.is_cut:
                tensors[item.name] = torch.cat([item.view(local) for local in locals_])
            else:
                tensors[item.name] = item.view(locals_[0]).clone()
        return self.whole(tensors)

    def gather(self, local: torch.Tensor) -> Any:
        """The same, of this rank's bytes. Ranks: all of the shard group."""
        return self.whole_of(self.gather_bytes(local))

    def write(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's part of a whole instance into ``local``.

        Raises:
            ValueError: its tensors are of other shapes.
        """
        whole = whole.detach()
        for item in self.inner:
            tensor = getattr(whole, item.name, None)
            expected = _times(item.shape, self.num_ranks) if item.is_cut else item.shape
            if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (expected, item.dtype):
                raise ValueError(
                    f"got a {self.name} of shape {tuple(self.shape)} with {item.name} {_describe(tensor)}, but the "
                    f"sharded one has {item.dtype} {tuple(expected)}: quantize it the same way"
                )
        for item in self.inner:
            tensor = getattr(whole, item.name)
            if item.is_cut:
                tensor = tensor[self.rank * item.shape[0] : (self.rank + 1) * item.shape[0]]
            item.view(local).copy_(tensor)

    def write_rows(self, local: torch.Tensor, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Write this rank's part into ``local``, of pieces of a whole that was cut for another number of ranks.

        Args:
            pieces: each with its first row, in their order; together they have all rows of this rank.

        Raises:
            ValueError: their tensors cannot be cut for these ranks.
        """
        num_rows = self.shape[0] // self.num_ranks
        begin = self.rank * num_rows
        written = []
        for item in self.inner:
            tensors = [getattr(piece, item.name) for _, piece in pieces]
            first, rows = tensors[0], pieces[0][1].shape[0]
            if first.shape == item.shape and rows != num_rows:
                written.append(first)  # the same on every rank
                continue
            length = item.shape[0] if item.shape else 0
            start, rest = divmod((begin - pieces[0][0]) * length, num_rows)
            part = torch.cat(tensors)[start : start + length] if first.dim() else first
            is_whole = not rest and first.dim() and first.shape[0] * num_rows == length * rows
            if not is_whole or (part.shape, part.dtype) != (item.shape, item.dtype):
                raise ValueError(
                    f"{item.name} of a {self.name} of shape {tuple(self.shape)} was saved as {_describe(first)} for "
                    f"{rows} rows, from which no rank of {self.num_ranks} can get its {item.dtype} "
                    f"{tuple(item.shape)}: load it on as many ranks as saved it"
                )
            written.append(part)
        for item, tensor in zip(self.inner, written, strict=True):
            item.view(local).copy_(tensor)


@dataclass(frozen=True, eq=False)
class CompositeExtension(Extension):
    """How a composite parameter is gathered.

    Attributes:
        has_protocol: by its class; else tensor by tensor.
        parts: how it is cut, once that is known.
    """

    is_composite: ClassVar[bool] = True

    has_protocol: bool = False
    parts: Parts | None = None

    @property
    def bytes(self) -> Parts:
        """How it lies in the bytes of a rank."""
        assert self.parts is not None, "known when it is sharded"
        return self.parts

    def dtype_of(self, shard: torch.Tensor) -> torch.dtype:
        return self.bytes.dtype

    def over(self, local: torch.Tensor) -> Any:
        return self.bytes.over(local)

    def over_shard(self, shard: torch.Tensor) -> Any:
        return self.bytes.over(shard)

    def whole_of(self, whole: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.bytes.whole_of(whole)
        return result

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
        """The tensors that one rank has a part of; of one rank alone, all."""
        return [item for item in self.bytes.inner if item.is_cut or self.bytes.num_ranks == 1]


def composite_extension_of(
    param: nn.Parameter, module: nn.Module, policy: MixedPrecisionPolicy
) -> CompositeExtension | None:
    """How ``param``, a checked composite parameter in ``module``, is gathered; how it is cut is not known yet."""
    has = has_protocol(param)
    is_short = has and num_arguments(param) == 1
    reference = weakref.ref(module)
    frees = has and releases(param)
    return CompositeExtension(type(param), None, None, param.shape, reference, policy, is_short, frees, has)


def is_composite(param: torch.Tensor) -> bool:
    """Whether a parameter, which is no DTensor, is more than one tensor of its own shape and dtype."""
    if not is_wrapper(param) or isinstance(param, DTensor):
        return False
    tensors = inner_tensors(param)
    if len(tensors) != 1:
        return True
    (inner,) = tensors.values()
    return (inner.shape, inner.dtype) != (param.shape, param.dtype) or is_wrapper(inner)


def inner_tensors(param: Any) -> dict[str, Any]:
    """What is inside a wrapper, by attribute."""
    return {name: getattr(param, name) for name in param.__tensor_flatten__()[0]}


def refusal(param: torch.Tensor, fqn: str, why: str) -> ValueError:
    """The error about a parameter that cannot be cut."""
    parts = ", ".join(f"{name}: {_describe(tensor)}" for name, tensor in inner_tensors(param).items())
    return ValueError(
        f"fully_shard(): the parameter {fqn} is a {type(param).__name__} of shape {tuple(param.shape)} and "
        f"{param.dtype}, which is stored as ({parts}) and cannot be sharded: {why}. Or leave it out with "
        "ignored_params (every rank then keeps all of it)"
    )


def check_composite(param: nn.Parameter, fqn: str, is_gathered: bool) -> None:
    """Raise ValueError if a composite parameter is refused for what can be seen before it is cut."""
    if not is_gathered:
        raise refusal(param, fqn, "replicate() gathers nothing: shard it with fully_shard()")
    if param.requires_grad:
        raise refusal(param, fqn, "it is trainable, but its parts cannot train: freeze it, .requires_grad_(False)")
    if param.is_meta:
        raise refusal(param, fqn, "it is on the meta device: materialize it first")
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
    """How a checked composite parameter is cut, and this rank's bytes of it. No communication.

    Args:
        ranks: their number, and which one this is.
        device: to compute on.
        gather_bytes: see ``Parts``.

    Raises:
        ValueError: its class cannot cut its rows in equal parts for these ranks.
    """
    num_ranks, rank = ranks
    with torch.no_grad():
        whole = param.detach() if param.device == device else param.detach().to(device)
        part = whole if num_ranks == 1 else _part(whole, fqn, num_ranks, rank)
        tensors, wholes = inner_tensors(part), inner_tensors(whole)
        inner, start = [], 0
        for name, tensor in tensors.items():
            is_cut = num_ranks > 1 and tensor.shape != wholes[name].shape
            if is_cut:
                own = wholes[name][rank * tensor.shape[0] : (rank + 1) * tensor.shape[0]] if tensor.dim() else tensor
                is_right = _times(tensor.shape, num_ranks) == wholes[name].shape and _are_equal(own, tensor)
            else:
                is_right = _are_equal(tensor, wholes[name])
            if not is_right:
                raise refusal(
                    param,
                    fqn,
                    f"its class cuts {name} into {num_ranks} parts of shape {tuple(tensor.shape)}, which together are "
                    "not the whole",
                )
            inner.append(InnerTensor(name, tensor.shape, tensor.dtype, start, is_cut))
            start += -(-inner[-1].nbytes // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES
        contexts = part.__tensor_flatten__()[1], whole.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        parts = Parts(type(param), param.shape, param.dtype, tuple(inner), start, *contexts, *ranks, gather_bytes)
        local = torch.zeros(start, dtype=torch.uint8, device=device)
        for item in inner:
            item.view(local).copy_(tensors[item.name])
    return parts, local


def _part(whole: torch.Tensor, fqn: str, num_ranks: int, rank: int) -> torch.Tensor:
    """One rank's rows, as the class cuts them."""
    num_rows = whole.shape[0] if whole.dim() else 0
    if not num_rows or num_rows % num_ranks:
        raise refusal(
            whole,
            fqn,
            f"its {num_rows} rows are not a multiple of the {num_ranks} ranks. Choose a number of ranks that divides "
            "them",
        )
    rows, answers = num_rows // num_ranks, list[str]()
    for how in ("split", "narrow"):
        try:
            part = whole.split(rows)[rank] if how == "split" else whole.narrow(0, rank * rows, rows)
        except Exception as error:  # whatever a class raises that cannot
            first_line = str(error).strip().partition("\n")[0]
            answers.append(f"{how}(): {type(error).__name__}: {first_line[:200]}")
            continue
        if type(part) is type(whole) and part.shape == _rows(whole.shape, num_ranks):
            return part
        answers.append(f"{how}(): a {type(part).__name__} of shape {tuple(part.shape)}")
    raise refusal(
        whole,
        fqn,
        f"its class cannot cut it into {num_ranks} parts of {rows} rows each ({'; '.join(answers)}). Choose a number "
        "of ranks that keeps blocks and scales whole",
    )


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _rows(shape: torch.Size, num_ranks: int) -> torch.Size:
    return torch.Size([shape[0] // num_ranks, *shape[1:]])


def _times(shape: torch.Size, num_ranks: int) -> torch.Size:
    return torch.Size([shape[0] * num_ranks, *shape[1:]]) if shape else shape


def _instance(cls: Any, tensors: Mapping[str, torch.Tensor], context: Any, shape: Sequence[int]) -> Any:
    stride = torch.empty(shape, device="meta").stride()
    return cls.__tensor_unflatten__({**tensors}, context, torch.Size(shape), stride)


def _describe(part: object) -> str:
    return f"{part.dtype} {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
