"""Flat views for optimizers: a few tensors instead of thousands of sharded parameters.

``flat_parameters`` makes them (``FlatSegment``). ``ShardedGradient`` gives them gradients and notices when the user
changes those. Two global hooks surround optimizer steps: the first refuses optimizers that would compute wrong results
on flat views, and copies gradients that the user assigned; the second records the step, for the version check of the
next backward. The start of this file decides which optimizers are elementwise and may train flat views."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import ClassVar, TypeVar

import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ..._arguments import checked
from ...errors import MisuseError, MisuseRuntimeError, MisuseTypeError
from ..flat import (
    FlatParamHandle,
    add_segment,
    are_untouched,
    check_segments,
    handle_of,
    segment_over,
    segment_owners,
)
from ..group import _get_fsdp_states, after_every_step, before_every_step
from ..ragged import note_write_of_all_ranks
from .blockwise import block_of, declared, refuse_divided_blocks

# ---- Elementwise optimizers: only these may train flat views.


_Class = TypeVar("_Class", bound=type[Optimizer])

elementwise_classes: list[type[Optimizer]] = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop,
]  # fmt: skip


class MatrixOptimizer(Optimizer):
    """The base of optimizers that step parameters as whole matrices, which no flat view is.

    Attributes:
        reason: why no flat view is one, for messages.
        takes_flat_views: for parameters that are no matrices.
        is_simple: whether a copy can step one small tensor, which tells what state it keeps.
    """

    reason: ClassVar[str]
    takes_flat_views: ClassVar[bool] = False
    is_simple: ClassVar[bool] = True


_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "it keeps averages of the rows and columns of each parameter",
    torch.optim.Muon: "it orthogonalizes each parameter as a matrix",
    torch.optim.LBFGS: "it gathers the whole gradient and its history on every rank, so flat views gain nothing, "
    "and its inner products are wrong on local tensors",
    torch.optim.SparseAdam: "it takes sparse gradients only",
}

# Optimizers of other packages whose formulas are elementwise, unless one of the options below is on. They are
# listed by name because none of these packages is a dependency. `tests_integration/test_optimizers.py` runs them.
ELEMENTWISE_ELSEWHERE = {
    "optimi": "Adam AdamW Adan Lion RAdam Ranger SGD",
    "pytorch_optimizer": "ADOPT AdaBelief AdaBound AdaDelta AdaMax AdaPNM AdEMAMix Adan AggMo DiffGrad EXAdam LaProp "
    "Lion MADGRAD PAdam PNM QHAdam QHM RAdam SGDW ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD SignSGD "
    "SimplifiedAdEMAMix Tiger Yogi",
    "schedulefree": "AdamWScheduleFree AdamWScheduleFreeClosure AdamWScheduleFreePaper AdamWScheduleFreeReference "
    "RAdamScheduleFree RAdamScheduleFreeClosure SGDScheduleFree SGDScheduleFreeClosure SGDScheduleFreeReference",
    "timm": "AdaBelief AdamWLegacy Adan Adopt LaProp Lion MADGRAD NAdamLegacy NAdamW RAdamLegacy RMSpropTF SGDW",
}
_elementwise_names = {f"{package}.{name}" for package, names in ELEMENTWISE_ELSEWHERE.items() for name in names.split()}
# With these they scale updates by a norm or a mean over the parameter, or clip by the norm of all gradients.
_COUPLING = ("adanorm", "caution", "cautious", "clipping_threshold", "max_grad_norm", "stable_adamw", "use_gc")


def declare_elementwise(optimizer: _Class) -> _Class:
    """Declare that an optimizer class and its subclasses can train flat views: how they update an element depends only
    on the gradient and state of that element, never on the shape, norm or name of its parameter.

    Can be used as a decorator. Ranks: no communication.

    Args:
        optimizer: a subclass of ``torch.optim.Optimizer``.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not such a class.
        ValueError: it is, or inherits from, an optimizer of ``torch.optim`` that is known not to be element-wise.
    """
    _check_class(optimizer, "declare_elementwise", "element-wise")
    elementwise_classes.append(optimizer)
    return optimizer


def declare_blockwise(optimizer: _Class, block: int = 256) -> _Class:
    """Declare that an optimizer class and its subclasses apply one formula to every block of so many elements.

    Optimizers that quantize their state do so (8-bit Adam): how they update an element depends only on gradients and
    state of its block.

    Such an optimizer trains sharded parameters, and flat views, without communication and with the bits of one process,
    if no shard boundary lies inside a block: shard with ``granularity=lambda fqn, param: block``. Its steps raise
    otherwise. State with one number for each block (scales) must be made by ``optim.zeros_per_block``, so that
    checkpoints have it for any number of ranks.

    Ranks: no communication.

    Args:
        optimizer: a subclass of ``torch.optim.Optimizer``.
        block: elements of a block, counted from the start of each parameter.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not such a class.
        ValueError: ``block`` is not a number of elements, or the class is known to need whole matrices.
    """
    _check_class(optimizer, "declare_blockwise", "block-wise")
    if type(block) is not int or block < 1:
        raise MisuseError(f"declare_blockwise(block={block!r}): expected a number of elements above 0")
    declared[optimizer] = block
    _add_hooks()  # whose checks are also for sharded parameters
    return optimizer


def _check_class(optimizer: type[Optimizer], call: str, kind: str) -> None:
    if not isinstance(optimizer, type) or not issubclass(optimizer, Optimizer):
        raise MisuseTypeError(f"{call}(): expected a subclass of torch.optim.Optimizer, got {optimizer!r}")
    known = _known_to_need_more(optimizer)
    if known is not None:
        raise MisuseError(f"{call}({optimizer.__name__}): {known[0]} is not {kind}: {known[1]}")


def _known_to_need_more(optimizer: type[Optimizer]) -> tuple[str, str] | None:
    """The name of a class that is known not to be elementwise, and why; ``None`` if nothing is known."""
    if issubclass(optimizer, MatrixOptimizer):
        return next(cls.__name__ for cls in optimizer.__mro__ if "reason" in vars(cls)), optimizer.reason
    return next(((cls.__name__, reason) for cls, reason in _REFUSED.items() if issubclass(optimizer, cls)), None)


_FLAT = "train flat_parameters()"


def refuse_unless_elementwise(optimizer: Optimizer, what: str = _FLAT) -> None:
    """Raise TypeError if an optimizer is not known to be elementwise, as it must be to do ``what``."""
    if isinstance(optimizer, tuple(elementwise_classes)):
        return
    if what == _FLAT and block_of(optimizer) is not None:
        return
    kind = type(optimizer)
    remedy = "Give it the sharded parameters themselves: model.parameters()"
    if what != _FLAT:
        remedy = "Leave its state on the device"
    elif f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" in _elementwise_names:
        settings = [optimizer.__dict__, *optimizer.param_groups]
        coupling = [name for name in _COUPLING if any([each.get(name) for each in settings])]
        if not coupling:
            return
        raise MisuseTypeError(
            f"{kind.__name__} cannot {what} with its option {coupling[0]}, which makes the update of an element depend "
            f"on the rest of its parameter. {remedy}"
        )
    known = _known_to_need_more(kind)
    if known is not None:
        raise MisuseTypeError(f"{kind.__name__} cannot {what}: {known[1]}. {remedy}")
    name = kind.__name__.lower()
    if any([syllable in name for syllable in _MATRICES]):
        raise MisuseTypeError(
            f"{kind.__name__} cannot {what}: by its name, it computes with whole matrices. {remedy}, to "
            f"fsdp_compose.optim.Muon or to fsdp_compose.optim.Matrixwise(params, {kind.__name__})"
        )
    if any([syllable in name for syllable in _QUANTIZED]):
        raise MisuseTypeError(
            f"{kind.__name__} was asked to {what}. By its name, it quantizes its state in blocks: if it does, and "
            f"treats every block alike, declare it with fsdp_compose.declare_blockwise({kind.__name__}, block=256). "
            f"{remedy}"
        )
    raise MisuseTypeError(
        f"{kind.__name__} was asked to {what}, but is not known to treat every element alike: if its updates "
        "do not depend on the shapes or norms of parameters, declare it with "
        f"fsdp_compose.declare_elementwise({kind.__name__}). {remedy}"
    )


# For messages alone: what an optimizer that nobody has declared may be, by syllables of its name.
_MATRICES = ("dion", "kron", "muon", "shampoo", "soap", "splus")
_QUANTIZED = ("4bit", "8bit", "fp8")


# ---- The flat views of a model's parameters


@checked(where="a function from (FQN, parameter) to a bool")
def flat_parameters(
    model: nn.Module,
    where: Callable[[str, nn.Parameter], bool] | None = None,
    *,
    local: bool = False,
) -> list[nn.Parameter]:
    """Return the trainable parameters of a sharded model as a few flat tensors, so that an optimizer step costs the
    host next to nothing.

    Each of these *flat views* is a leaf parameter in the memory of the sharded parameters themselves: stepping one
    steps the other, and the model's ``state_dict()`` does not change. If you select all parameters of a flat parameter
    of a ``fully_shard`` group, the view is one stock 1-D ``DTensor`` with ``Shard(0)``, including the padding (always
    zero). Otherwise there is one 1-D ``RaggedDTensor`` for each longest run of adjacent selected parameters. Parameters
    that tensor parallelism has cut get flat views of their own, one for each run that is cut over the same dimensions:
    a 1-D ``RaggedDTensor`` on both meshes, including the padding. Trainable parameters that no group manages
    (``ignored_params``) are returned unchanged.

    Use them with elementwise optimizers, whose update of an element depends on that element alone. In ``torch.optim``
    these are SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adadelta, Adagrad, ASGD, RMSprop, Rprop and their subclasses.
    All of schedulefree's and optimi's are accepted too, except StableAdamW, and so are the elementwise ones of timm
    and pytorch-optimizer (Lion, Adan, AdaBelief, ADOPT, LaProp, ...). Other optimizers raise at their first step,
    unless you declare them with ``declare_elementwise``. (torch 2.13 has no rules on stock DTensors for Rprop, nor
    for SGD and Adagrad with ``fused=True``: these raise unless you pass ``local=True``.) An optimizer's
    ``state_dict()`` fits models with the same ``fully_shard`` groups on the same number of ranks.

    Gradients: ``.grad`` of a flat view and of its sharded parameters are views of the same memory, which the
    reduce-scatter has written. ``zero_grad()`` of the optimizer or the model drops both, at the latest when the next
    forward or backward begins. If you assign to ``.grad`` of either, the new gradient is copied when the next forward,
    backward, step or call of our ``clip_grad_norm_`` begins. ``GradScaler.unscale_()`` and torch's clipping do not see
    a gradient assigned to a sharded parameter: before calling them, change it in place (``.mul_()``, ``.copy_()``).
    ``.grad`` is ``None`` if none of the parameters was used; unused parameters next to used ones have a zero gradient
    (weight decay and momentum move them). Hooks on a flat view run once in each backward that reduces.

    If you move or convert the model, its flat views follow at the next forward. The parameters of one flat view must be
    frozen together.

    Ranks: call it on every rank with the same arguments, outside ``forward``, before or after the first one. No
    communication.

    Args:
        model: a module with ``fully_shard`` groups, or a part of one.
        where: a function of (FQN in ``model``, parameter) that says whether to select the parameter; the default
            selects all. Call ``flat_parameters`` once for each parameter group.
        local: return plain tensors with this rank's shard instead of DTensors. Norms are then those of each rank alone,
            so ``torch.nn.utils.clip_grad_norm_`` and ``GradScaler`` differ between ranks
            (``fsdp_compose.clip_grad_norm_`` is correct).

    Returns:
        The flat views, in the order of the model; empty if nothing is selected. The same call returns the same
        objects.

    Raises:
        TypeError: ``model`` is not a module, or ``where`` is not callable.
        ValueError: nothing below ``model`` is sharded; a parameter is already in a flat view that an earlier call made
            from another selection; or a selected one consists of several tensors (quantized weights that train).
        RuntimeError: called inside ``forward``.

    Example::

        decay = flat_parameters(model, lambda fqn, p: p.ndim > 1)
        others = flat_parameters(model, lambda fqn, p: p.ndim <= 1)
        optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}], fused=True)
    """
    states = _get_fsdp_states(model)
    for state in states:
        state.end_left()
    if any(state.is_complete and state.swap.num_shows for state in states):
        raise MisuseRuntimeError(
            "flat_parameters() was called inside forward or backward of the model; call it outside"
        )
    selected = [(owner, _ranges(owner, indices, local)) for owner, indices in _select(model, where).items()]
    for owner, ranges in selected:
        if isinstance(owner, FlatParamHandle):
            for sharded_params in ranges:
                segment_over(owner, sharded_params, local)  # raises what there is to raise before anything is made
    _add_hooks()
    # torch does not combine norms of several meshes, so with tensor parallelism no flat view may be a stock DTensor.
    among_cut = any(handle.tensor_parallel is not None for state in states for handle in state._handles)
    result: list[nn.Parameter] = []
    for owner, ranges in selected:
        if isinstance(owner, FlatParamHandle):
            segments = [
                segment_over(owner, sharded_params, local) or add_segment(owner, sharded_params, local, among_cut)
                for sharded_params in ranges
            ]
            result += [segment.parameter for segment in segments]
        else:
            result.append(owner)
    return result


def _select(
    model: nn.Module, where: Callable[[str, nn.Parameter], bool] | None
) -> dict[FlatParamHandle | nn.Parameter, set[int]]:
    """The selected parameters of each handle, and those of no handle."""
    chosen: dict[FlatParamHandle | nn.Parameter, set[int]] = {}
    is_sharded = False
    for fqn, param in model.named_parameters():
        handle, index = handle_of(param) or (None, 0)
        is_sharded |= handle is not None
        if not param.requires_grad or not (where is None or where(fqn, param)):
            continue
        if handle is None:
            chosen[param] = set()
        elif handle.kind.codec.is_composite:
            raise MisuseError(
                f"flat_parameters(): {fqn} is a {handle.kind.codec.gathered_by}, which consists of several tensors "
                "that its class steps, so it has no flat view: leave it out (where=lambda fqn, param: ...), and give "
                "the optimizer the parameter itself"
            )
        else:
            chosen.setdefault(handle, set()).add(index)
    if not is_sharded:
        raise MisuseError(
            f"flat_parameters(): no parameter of this {type(model).__name__} is sharded: call fully_shard() first"
        )
    return chosen


def _ranges(owner: FlatParamHandle | nn.Parameter, indices: Iterable[int], local: bool) -> list[range]:
    """The longest ranges of consecutive indices; unless ``local``, tensor parallelism has cut the parameters of a range
    over the same dimensions."""
    own = owner.tensor_parallel if isinstance(owner, FlatParamHandle) and not local else None
    result: list[range] = []
    for i in sorted(indices):
        if result and result[-1].stop == i and (own is None or own.sharded_dims(i) == own.sharded_dims(i - 1)):
            result[-1] = range(result[-1].start, i + 1)
        else:
            result.append(range(i, i + 1))
    return result


# ---- Hooks around optimizer steps


@cache
def _add_hooks() -> None:
    before_every_step(_before_step)
    after_every_step(_after_step)


def _handles_of(optimizer: Optimizer) -> set[FlatParamHandle]:
    """The handles whose flat views ``optimizer`` trains."""
    if not segment_owners:
        return set()
    owners = {owner for group in optimizer.param_groups for owner in map(segment_owners.get, map(id, group["params"]))}
    return {handle for owner in owners if owner is not None and (handle := owner[0]()) is not None}


def _before_step(optimizer: Optimizer) -> None:
    block = block_of(optimizer)
    if block is not None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                refuse_divided_blocks(param, block, f"{type(optimizer).__name__}.step()")
    handles = _handles_of(optimizer)
    if not handles:
        return
    if not (isinstance(optimizer, MatrixOptimizer) and optimizer.takes_flat_views):
        refuse_unless_elementwise(optimizer)
    # A step of parameters that module.to() has moved since the last forward would be lost.
    for handle in handles:
        check_segments(handle)
    if not are_untouched([handle.gradient for handle in handles]):
        for handle in handles:
            handle.follow_user()


def _after_step(optimizer: Optimizer) -> None:
    handles = _handles_of(optimizer)
    # Fused and foreach kernels do not raise the versions of stock DTensors, and a step on flat views does not raise
    # those of the shard and the sharded parameters.
    if handles:
        note_write_of_all_ranks([tensor for handle in handles for tensor in (handle.shard, *handle.sharded_params)])
    if block_of(optimizer) is not None:  # such steps write to local tensors
        params = [param for group in optimizer.param_groups for param in group["params"]]
        note_write_of_all_ranks([param for param in params if param.grad is not None])
