"""``Muon`` for sharded parameters: each matrix is orthogonalized once, by one rank, as a whole; see ``matrices``.

Momentum is sharded like the parameter and is updated element by element, so states are saved and loaded as those of
AdamW are. Only updates travel, in ``ns_dtype``. The next bucket is on its way while one is computed, and results come
back while the next one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from .._arguments import checked, size_of
from .._torch import (
    foreach_add_,
    foreach_copy_,
    foreach_lerp_,
    foreach_mul_,
    is_wrapper,
)
from ..errors import MisuseError
from ..extension import (
    FlatParamHandle,
    Label,
    MatrixOptimizer,
    handle_of,
    handle_of_segment,
    local_of,
    never_traced,
    note_write_of_all_ranks,
    noticing_loss,
)
from .matrices import (
    Bucket,
    Member,
    Plan,
    Stack,
    gather_cut,
    name_of,
    own_cut,
    refuse_block_rows,
    refuse_other_shard,
    shape_of,
)
from .matrix_report import MatricesReport, buckets_of, report_of
from .step_agreement import Gradients, Trained, begin_step

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Matrices whose shorter side is in this range are computed together, one product for all: from 256 on that takes longer
# on the CPU, and below 8 other bits may result.
_SMALL = range(8, 256)
_MUON, _ADAMW = "muon", "adamw"
_ADJUSTMENTS = ("original", "match_rms_adamw")


# ---- The mathematics


def orthogonalize(matrices: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """Newton-Schulz iterations on each of some matrices, (count, rows, cols), in their dtype. Their memory may be
    overwritten. A quintic with the coefficients of Keller Jordan's Muon
    (https://kellerjordan.github.io/posts/muon/); in bfloat16 the bits of ``torch.optim.Muon``."""
    if len(matrices) > 1 and min(matrices.shape[1:]) not in _SMALL:
        return torch.stack([_orthogonalize(matrix, coefficients, steps, eps) for matrix in matrices])
    if len(matrices) == 1:
        return _orthogonalize(matrices[0], coefficients, steps, eps)[None]
    a, b, c = coefficients
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _orthogonalize(x: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    a, b, c = coefficients
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        x = x.mT
    x.div_(x.norm().clamp(min=eps))  # the spectral norm is at most this one
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


# ---- The optimizer


class _Known(NamedTuple):
    """What is found out once about the parameters of an optimizer: what that depends on, and plans for the matrices of
    each shard group."""

    key: object
    trained: Trained
    plans: list[Plan]


@checked()
class Muon(MatrixOptimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) with the arguments and defaults of ``torch.optim.Muon``, for
    sharded parameters; given equal gradients, with the same result as on whole matrices in one process.

    Every matrix is orthogonalized by one of the ranks that share its shards. They send it what they have of the
    update, in ``ns_dtype``, and get their shards of the result back, in one all-to-all for each bucket and direction.
    Matrices that lie whole on a rank do not move. Parameters of more than two dimensions are stacks of matrices (as of
    experts), their last two dimensions. A parameter group with ``algorithm="adamw"`` is trained by AdamW, for
    parameters that are no matrices, and with ``betas``, ``eps=1e-8`` and ``weight_decay=0.01`` unless it says
    otherwise; ``muon_groups`` makes the usual two groups.

    Ranks: all ranks of the model step together, with gradients for the same parameters.

    Args:
        params: parameters or parameter groups: sharded ones, also with tensor parallelism, and plain ones. Groups for
            AdamW may have flat views (``flat_parameters``).
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as of ``torch.optim.Muon``;
            may differ between parameter groups. The rows and columns by which ``adjust_lr_fn`` adjusts are those of the
            whole matrix, or of a block.
        algorithm: ``"muon"`` or ``"adamw"``; may differ between parameter groups.
        block_rows: orthogonalize each block of so many rows by itself, as of attention heads; may differ between
            parameter groups.
        ns_dtype: dtype of the iterations, and of what travels. In bfloat16, rounding amplifies differences between
            summation orders of gradients.
        bucket_bytes: size of the matrices that travel together, in bytes or as ``"256MB"``; at least one matrix does.
            One bucket arrives, one is computed, one returns: together they take at most four times as much memory, and
            a few times the largest matrix.
        over_replicas: with hybrid sharding or ``replicate()``, let each replica orthogonalize some of the matrices and
            gather the results, instead of all of them.

    Raises:
        ValueError: an argument or an option is out of range or of another type, or not known to Muon (``amsgrad``,
            ``fused``), or a parameter of a Muon group is no matrix. Steps and loading check options, too.

    Example::

        optimizer = Muon(muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-4}))
    """

    reason = "it orthogonalizes each parameter as a matrix"
    takes_flat_views = True  # in groups for AdamW

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        algorithm: str = _MUON,
        block_rows: int | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: int | str = 256 << 20,
        over_replicas: bool = False,
    ) -> None:
        if not ns_dtype.is_floating_point:
            raise MisuseError(f"Muon(ns_dtype={ns_dtype}): expected a floating-point dtype")
        self._ns_dtype, self._over_replicas = ns_dtype, over_replicas
        self._bucket_bytes = size_of(bucket_bytes, "Muon(bucket_bytes={})")
        self._known = _Known((), Trained(), [])
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "block_rows": block_rows, "algorithm": algorithm,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and param_group.get("algorithm", self.defaults["algorithm"]) == _ADAMW:
            # Muon's defaults of the same names mean something else.
            param_group = {"eps": 1e-8, "weight_decay": 0.01, "betas": (0.9, 0.999), **param_group}
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        _check_options(group)
        _check_params(group)
        self.param_groups.append(_usual(group))

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("_ns_dtype", "_bucket_bytes", "_over_replicas")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take copied or pickled state, or what torch has made of loaded state."""
        groups = state["param_groups"]
        for number, own in enumerate(self.__dict__.get("param_groups", ())):  # loaded, maybe from another optimizer
            groups[number] = {"block_rows": own["block_rows"], **groups[number], "algorithm": own["algorithm"]}
            _check_options(groups[number])
            for param in own["params"]:
                for name in _STATE[own["algorithm"]] if state["state"].get(param) else ():
                    refuse_other_shard("Muon.load_state_dict()", param, name, state["state"][param].get(name))
        known = _Known((), Trained(), [])
        super().__setstate__({**state, "param_groups": [*map(_usual, groups)], "_known": known})

    @torch.no_grad()
    @never_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Ranks: all ranks of the model. They first agree, by one small exchange, that all step and have gradients for the
        same parameters.

        Args:
            closure: computes the loss again; its result is returned.

        Raises:
            RanksDifferError: on every rank: a rank does not step, trains other parameters, or has gradients for others;
                or a rank cannot step, for the reason that it raises itself. Nothing was changed.
            RankLostError: on every rank that came: another one did not. Nothing was changed if it was lost before the
                step, as the message then says. If it was lost in the middle of it, momenta of all buckets so far, and
                parameters of earlier buckets, have changed, and those of AdamW's groups have not: load a checkpoint.
            RuntimeError, ValueError: a gradient is not reduced, or is not sharded like its parameter. Nothing was
                changed.
        """
        head = f"ns_dtype={self._ns_dtype}, bucket_bytes={self._bucket_bytes}, over_replicas={self._over_replicas}"
        loss, gradients = begin_step(self, closure, lambda: self._plan().trained, [head], [*_OPTIONS])
        for plan in self._known.plans:
            self._step_muon(plan, gradients)
        for group in self.param_groups:
            if group["algorithm"] == _ADAMW:
                self._step_adamw(group, gradients)
        return loss

    def describe(self) -> MatricesReport:
        """Describe what a step does: who orthogonalizes what, how evenly, what moves, and what memory that takes.

        Ranks: any; nothing is communicated."""
        plans = self._plan().plans
        temporary = max([_temporary_bytes(plan, buckets_of(plan)) for plan in plans], default=0)
        return report_of("Muon", plans, 2, temporary)

    # ---- AdamW, element by element

    def _step_adamw(self, group: dict[str, Any], gradients: Gradients) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        for param in params:
            if not self.state[param]:
                zeros = [torch.zeros_like(param.grad, memory_format=torch.preserve_format) for _ in range(2)]
                self.state[param].update(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))
                self.state[param]["step"] = torch.tensor(0.0)
        states = [self.state[param] for param in params]
        adamw(
            [local_of(param) for param in params], [gradients[id(param)] for param in params],
            [local_of(state["exp_avg"]) for state in states], [local_of(state["exp_avg_sq"]) for state in states],
            [], [state["step"] for state in states], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        note_write_of_all_ranks(params)

    # ---- Muon

    def _plan(self) -> _Known:
        groups = self.param_groups
        for group in groups:
            _check_options(group)
        # Parameters that were moved or sharded anew have other specs.
        params = [(i, group, param) for i, group in enumerate(groups) for param in group["params"]]
        key = [(i, id(param), id(getattr(param, "_spec", None)), group["block_rows"]) for i, group, param in params]
        if self._known.key == key:
            return self._known
        members: dict[Any, tuple[FlatParamHandle | None, list[Member]]] = {}
        for number, group, param in params:
            if group["algorithm"] == _MUON:
                handle, _ = handle_of(param) or (None, 0)
                where = None if handle is None else (handle.mesh.shard_group, handle.mesh.replicate_group)
                member = Member(param, number, shape_of(param, group["block_rows"]))
                members.setdefault(where, (handle, []))[1].append(member)
        settings = self._over_replicas, self._bucket_bytes, self._ns_dtype
        plans = [Plan(found, handle, *settings) for handle, found in members.values()]
        self._known = _Known(key, Trained.by(groups), plans)
        return self._known

    def _step_muon(self, plan: Plan, gradients: Gradients) -> None:
        present = bytes([member.param.grad is not None for member in plan.members])
        if 1 not in present:
            return
        label, buckets = plan.exchanges_of(present)
        route = plan.route(label)
        leaving: Callable[[], list[tuple[int, int, torch.Tensor]]] | None = None

        def begin(bucket: Bucket) -> Callable[[], list[torch.Tensor]]:
            updates = self._update(plan, bucket, gradients)
            return bucket.exchange.gather(updates, route, {i: start for i, start, _ in bucket.slices})

        coming: Callable[[], list[torch.Tensor]] | None = begin(buckets[0])
        for number, bucket in enumerate(buckets):
            assert coming is not None
            stacks, coming = coming(), None  # which frees what has arrived, before the next bucket takes memory
            if number + 1 < len(buckets):
                coming = begin(buckets[number + 1])
            _compute(plan, bucket.exchange.owned, stacks, self.param_groups)
            if leaving is not None:
                _apply(plan, leaving(), self.param_groups)
                leaving = None
            is_shared = plan.num_replicas > 1  # then other replicas get what this rank keeps
            if not is_shared:
                _apply(plan, bucket.exchange.kept_of(stacks), self.param_groups)
            arrive = bucket.exchange.scatter(stacks, route, with_kept=is_shared)
            leaving = partial(_arrived, plan, bucket, arrive, label)
            del stacks, arrive
        assert leaving is not None
        _apply(plan, leaving(), self.param_groups)
        note_write_of_all_ranks([member.param for member in plan.members if member.param.grad is not None])

    def _update(self, plan: Plan, bucket: Bucket, gradients: Gradients) -> dict[int, torch.Tensor]:
        """Update the momentum of a bucket's matrices. Return this rank's shards of their updates before they are
        orthogonalized, by parameter, 1-D, in ``ns_dtype``."""
        by_group: dict[int, list[tuple[int, int, int]]] = {}
        for place in bucket.slices:
            by_group.setdefault(plan.members[place[0]].group, []).append(place)
        updates, most = {}, plan.most_together
        for number, places in by_group.items():
            group = self.param_groups[number]
            grads, buffers = [], []
            for i, start, numel in places:
                param = plan.members[i].param
                buffers.append(self._momentum_of(param).view(-1)[start : start + numel])
                grads.append(gradients[id(param)].reshape(-1)[start : start + numel])
            foreach_lerp_(buffers, grads, 1 - group["momentum"])
            for (i, _, _), grad, buffer in zip(places, grads, buffers, strict=True):
                if not group["nesterov"]:
                    updates[i] = buffer  # is copied on its way
                    continue
                updates[i] = torch.empty_like(buffer, dtype=plan.ns_dtype)
                # Piece by piece: each takes memory in its own dtype.
                for update, start, end in zip(*[item.split(most) for item in (updates[i], grad, buffer)], strict=True):
                    update.copy_(start.lerp(end, group["momentum"]))
        return updates

    def _momentum_of(self, param: torch.Tensor) -> torch.Tensor:
        """This rank's shard."""
        state = self.state[param]
        if not state:
            assert param.grad is not None
            state["momentum_buffer"] = torch.zeros_like(param.grad, memory_format=torch.contiguous_format)
        if not local_of(state["momentum_buffer"]).is_contiguous():  # was loaded so
            state["momentum_buffer"] = state["momentum_buffer"].contiguous()
        return local_of(state["momentum_buffer"])


# ---- The usual parameter groups


@checked(where="a function from (FQN, parameter) to a bool")
def muon_groups(
    model: nn.Module,
    where: Callable[[str, nn.Parameter], bool] | None = None,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return two parameter groups for ``Muon``: the matrices of a model, and the rest for AdamW.

    By default, matrices are the parameters with at least two dimensions, but for those of embeddings
    (``nn.Embedding``), whatever is tied to them, and output layers: those that ``model.get_output_embeddings()``
    returns, or that are named ``head``, ``lm_head``, ``output``, ``unembed``, ``classifier`` or ``score``.

    Ranks: no communication.

    Args:
        model: a model, before or after ``fully_shard``. Parameters that are frozen are in neither group.
        where: a function of (FQN, parameter) that says whether it is a matrix; default: see above.
        muon, adamw: options of the groups, such as ``{"lr": 0.02}``.

    Returns:
        The groups that have parameters, each with its ``param_names``.

    Raises:
        TypeError: an argument has another type.
        ValueError: ``where`` chooses a parameter with fewer than two dimensions.
    """
    others = _ends_of(model)
    groups: dict[str, dict[str, Any]] = {
        name: {**(options or {}), "params": [], "param_names": [], "algorithm": name}
        for name, options in ((_MUON, muon), (_ADAMW, adamw))
    }
    for fqn, param in model.named_parameters():
        if not param.requires_grad:
            continue
        is_matrix = param.dim() >= 2 and id(param) not in others if where is None else where(fqn, param)
        if is_matrix and param.dim() < 2:
            raise MisuseError(f"muon_groups(): where() chose {fqn} of shape {tuple(param.shape)}, which is no matrix")
        group = groups[_MUON if is_matrix else _ADAMW]
        group["params"].append(param)
        group["param_names"].append(fqn)
    return [group for group in groups.values() if group["params"]]


_HEADS = frozenset({"head", "lm_head", "output", "unembed", "classifier", "score"})


def _ends_of(model: nn.Module) -> set[int]:
    """The ids of parameters of embeddings and output layers."""
    modules = [
        module
        for fqn, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or fqn.rpartition(".")[2] in _HEADS
    ]
    head = getattr(model, "get_output_embeddings", None)
    if callable(head) and isinstance(found := head(), nn.Module):
        modules.append(found)
    return {id(param) for module in modules for param in module.parameters(recurse=False)}


# ---- The memory of a step


def _temporary_bytes(plan: Plan, buckets: Sequence[Bucket]) -> int:
    """The most bytes at a time: while a bucket is computed, the next one arrives, and results of the one before it
    return."""
    # By bucket; what moves, with nothing before the first bucket and after the last one.
    moving = [0, *[bucket.exchange.num_sent + bucket.exchange.num_received for bucket in buckets], 0]
    owned = [*[bucket.exchange.num_owned for bucket in buckets], 0]
    updates = [*[sum([numel for _, _, numel in bucket.slices]) for bucket in buckets], 0]
    most = updates[0] + moving[1] + owned[0]
    for i, bucket in enumerate(buckets):
        # What the iterations take for one matrix, or for several small ones: its copy and result, products, workspace.
        largest = max([_taken_together(plan, stack) for stack in bucket.exchange.owned], default=0)
        before, here, coming = moving[i], moving[i + 1], moving[i + 2] + owned[i + 1]
        most = max(most, owned[i] + coming + max(before + max(updates[i + 1], 5 * largest), here))
    return plan.ns_dtype.itemsize * most


def _taken_together(plan: Plan, stack: Stack) -> int:
    numel = stack.rows * stack.cols
    if min(stack.rows, stack.cols) not in _SMALL:
        return numel
    return numel * max(1, min(stack.count, plan.most_together // numel))


# ---- Checks, and the steps of one plan


def _adjusted(lr: float, adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return lr * 0.2 * sqrt(max(rows, cols))
    return lr * sqrt(max(1, rows / cols))


class _AdamWGroup(dict[str, Any]):
    """A parameter group for AdamW. Schedulers that cycle ``momentum`` do it in all groups of an optimizer: in this one
    they cycle the first of ``betas``, as with ``torch.optim.AdamW``."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "momentum":
            key, value = "betas", (value, *self["betas"][1:])
        super().__setitem__(key, value)


def _usual(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group of the class of its algorithm, without what only the other one has."""
    is_adamw = group["algorithm"] == _ADAMW
    group.pop("momentum" if is_adamw else "betas", None)
    return _AdamWGroup(group) if is_adamw else group


def _are_numbers(values: Any, count: int, least: float = 0.0) -> bool:
    values = [*values] if isinstance(values, (tuple, list)) else [values]
    return len(values) == count and all(
        [isinstance(v, (int, float)) and type(v) is not bool and v >= least for v in values]
    )


_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "algorithm": (lambda value: value in (_MUON, _ADAMW), f"{_MUON!r} or {_ADAMW!r}"),
    "block_rows": (
        lambda value: value is None or (type(value) is int and value > 0),
        "a number of rows, or None",
    ),
    "lr": (lambda value: _are_numbers(value, 1), "a number >= 0, or a tensor with one"),
    "weight_decay": (lambda value: _are_numbers(value, 1), "a number >= 0"),
    "eps": (lambda value: _are_numbers(value, 1), "a number >= 0"),
    "betas": (lambda value: _are_numbers(value, 2) and max(value) < 1, "two numbers from 0 to below 1"),
    "momentum": (lambda value: _are_numbers(value, 1) and value <= 1, "a number from 0 to 1"),
    "nesterov": (lambda value: type(value) is bool, "True or False"),
    "ns_coefficients": (lambda value: _are_numbers(value, 3, -inf), "three numbers"),
    "ns_steps": (lambda value: type(value) is int and 0 <= value < 100, "a number of steps below 100"),
    "adjust_lr_fn": (lambda value: value in (None, *_ADJUSTMENTS), f"one of {_ADJUSTMENTS}, or None"),
}
"""The options of parameter groups: a check, and what it expects."""
_NAMES = {_ADAMW: [*_OPTIONS][:6], _MUON: [name for name in _OPTIONS if name != "betas"]}
_STATE = {_ADAMW: ("exp_avg", "exp_avg_sq", "step"), _MUON: ("momentum_buffer",)}
_UNKNOWN = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")


def _check_options(group: Mapping[str, Any]) -> None:
    for name in _NAMES.get(group["algorithm"], _OPTIONS):
        is_valid, expected = _OPTIONS[name]
        if name not in group:
            raise MisuseError(
                f"Muon: a parameter group with algorithm={group['algorithm']!r} has no {name}: expected {expected}. "
                "Was it saved by another optimizer, or its algorithm changed later? Nothing was changed"
            )
        value = group[name]
        if name == "lr" and isinstance(value, torch.Tensor) and value.numel() == 1:
            if value.device.type != "cpu":  # to read it would wait for the device, at each step
                continue
            value = value.item()
        if not is_valid(value):
            raise MisuseError(f"Muon({name}={value!r}): expected {expected}")
    for name in _UNKNOWN:
        if group.get(name):
            raise MisuseError(f"Muon({name}={group[name]!r}): Muon does not have this option of other optimizers")


def _check_params(group: Mapping[str, Any]) -> None:
    for param in group["params"] if group["algorithm"] == _MUON else ():
        if param.dim() < 2 or param.is_complex():
            remedy = 'put it into a parameter group with algorithm="adamw" (muon_groups() makes both groups)'
            if handle_of_segment(param) is not None:
                remedy = "a flat view has none. Give Muon the sharded parameters themselves: Muon(muon_groups(model))"
            raise MisuseError(
                f"Muon: {name_of(param)} of shape {tuple(param.shape)}, {param.dtype}, is no real matrix: {remedy}"
            )
        if is_wrapper(param) and not isinstance(param, DTensor):
            raise MisuseError(f"Muon: {name_of(param)} is a {type(param).__name__}, which is no plain matrix")
        if group["block_rows"] is not None:
            refuse_block_rows(param, group["block_rows"])


def _compute(plan: Plan, owned: Sequence[Stack], stacks: Sequence[torch.Tensor], groups: Sequence[Any]) -> None:
    """Orthogonalize the stacks that this rank owns, in place."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for stack, content in zip(owned, stacks, strict=True):
        member = plan.members[stack.param]
        group, shape = groups[member.group], member.shape
        how = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
        if shape.spec is not None:
            # Tensor parallelism has cut it: its ranks gather it, and each keeps what it has of the result.
            whole = gather_cut(member, content)
            result = orthogonalize(whole.contiguous().view(-1, shape.rows, whole.size(2)), *how)
            content.copy_(own_cut(member, result.reshape(whole.shape)))
        else:
            alike.setdefault((content.shape[1:], how), []).append(content)
    for ((rows, cols), how), contents in alike.items():
        most = max(1, plan.most_together // (rows * cols)) if min(rows, cols) in _SMALL else 1
        chunks = [chunk for content in contents for chunk in content.split(most)]
        for together in _packed(chunks, most):
            given = together[0] if len(together) == 1 else torch.cat(together)
            done = orthogonalize(given, *how)
            foreach_copy_(together, [*done.split([chunk.size(0) for chunk in together])])


def _packed(chunks: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Neighbours that have at most so many matrices together."""
    packed: list[torch.Tensor] = []
    for chunk in chunks:
        if packed and sum([item.size(0) for item in packed]) + chunk.size(0) > most:
            yield packed
            packed = []
        packed.append(chunk)
    if packed:
        yield packed


def _arrived(
    plan: Plan, bucket: Bucket, arrive: Callable[[], list[tuple[int, int, torch.Tensor]]], label: Label
) -> list[tuple[int, int, torch.Tensor]]:
    """The results for this rank's shards, also those of other replicas."""
    results, mesh = arrive(), plan.mesh
    if plan.num_replicas == 1 or mesh is None or mesh.replica_transport is None or mesh.replicate_group is None:
        return results
    numels = [sum([numel for _, _, numel in of_replica]) for of_replica in bucket.by_replica]
    ranges = [*pairwise(accumulate(numels, initial=0))]
    device = plan.device
    mine = torch.empty(numels[plan.replica], dtype=plan.ns_dtype, device=device)
    offsets, offset = {}, 0
    for param, start, numel in bucket.by_replica[plan.replica]:
        offsets[param, start] = offset
        offset += numel
    for param, start, result in results:  # adjacent matrices may have arrived as one
        offset = offsets[param, start]
        mine[offset : offset + result.numel()] = result
    whole = torch.empty(sum(numels), dtype=plan.ns_dtype, device=device)
    transport = mesh.replica_transport.among(mesh.replicate_group)
    with noticing_loss(mesh.replicate_group, f"the exchange of {label} between replicas in an optimizer's step"):
        transport.gather(whole, mine, ranges, True, label)
    everything = [place for of_replica in bucket.by_replica for place in of_replica]
    pieces = whole.split([numel for _, _, numel in everything])
    return [(param, start, piece) for (param, start, _), piece in zip(everything, pieces, strict=True)]


def _apply(plan: Plan, results: Sequence[tuple[int, int, torch.Tensor]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Write results to this rank's shards of the parameters."""
    alike: dict[tuple[int, float, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    flats: dict[int, torch.Tensor] = {}
    for i, start, result in results:
        if not result.numel():
            continue
        member = plan.members[i]
        local, group = local_of(member.param), groups[member.group]
        if i not in flats:
            flats[i] = local.reshape(-1)  # of a plain parameter with other strides, a copy
        target = flats[i][start : start + result.numel()]
        rate = _adjusted(float(group["lr"]), group["adjust_lr_fn"], member.shape.rows, member.shape.cols)
        targets, updates = alike.setdefault((member.group, rate, local.dtype), ([], []))
        result = result.to(local.device)
        # On the CPU torch (2.13) converts all of a tensor before it adds it to one of another dtype.
        most = plan.most_together if result.dtype != local.dtype else result.numel()
        targets += target.split(most)
        updates += result.split(most)
    for (number, rate, _), (targets, updates) in alike.items():
        decay = 1 - float(groups[number]["lr"]) * groups[number]["weight_decay"]
        if targets[0].dtype.itemsize >= 4:
            foreach_mul_(targets, decay)
            foreach_add_(targets, updates, alpha=-rate)
            continue
        for target, update in zip(targets, updates, strict=True):  # foreach rounds a factor otherwise (torch 2.13)
            target.mul_(decay).add_(update, alpha=-rate)
    for i, flat in flats.items():
        local = local_of(plan.members[i].param)
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))
