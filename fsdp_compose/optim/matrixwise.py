"""``Matrixwise``: any optimizer of plain matrices, unmodified, for sharded parameters.

Every matrix has an owner, as under ``Muon`` (see ``matrices``). In a step, parameters and gradients are gathered at
their owners, the optimizer that the user makes steps there, over whole matrices, and each rank gets its shards back::

    shards of all ranks  -- parameters, gradients -->  owners: the user's optimizer steps  -- parameters -->  shards

Its state stays at the owners. ``Optimizer.state`` shows it as tensors that lie whole on one rank, so checkpoints treat
it like any other state. Between steps owners keep no parameters: what others write to them is never missed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim.optimizer import Optimizer

from .._arguments import checked
from .._nested import Path, leaves_of, put_leaf
from .._torch import is_wrapper
from ..errors import MisuseError, MisuseRuntimeError, MisuseTypeError
from ..extension import (
    FlatParamHandle,
    MatrixOptimizer,
    RaggedDTensor,
    RaggedShard,
    handle_of,
    local_of,
    never_traced,
    note_write_of_all_ranks,
)
from .matrices import Member, Plan, gather_cut, name_of, own_cut, refuse_block_rows, shape_of
from .matrix_report import MatricesReport, buckets_of, report_of
from .step_agreement import Gradients, Trained, begin_step, share_changes

_STEP = "Matrixwise.step()"
_ONE_BUCKET = 1 << 62  # the user's optimizer steps once, so all its matrices must be there


_STATE_NUMBERS = "state_numbers"
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # in which numbers are shown


class _Leaf(NamedTuple):
    """What kind of value is in the state of a matrix.

    Attributes:
        shape: of a tensor, ``()`` of a number.
        dtype: its name; ``None``: ``value`` is a text or ``None`` itself, the same on every rank.
        is_number: of Python's, shown as a tensor. In parameter groups, ``state_numbers`` has its path.
    """

    path: Path
    shape: tuple[int, ...] = ()
    dtype: str | None = None
    value: str | None = None
    is_number: bool = False


@checked(make="a function from parameters to an optimizer")
class Matrixwise(MatrixOptimizer):
    """Trains sharded parameters with an optimizer for plain ones, unmodified: Shampoo, SOAP, Adafactor, any that needs
    each matrix as a whole. Given equal gradients, with the bits of that optimizer on whole matrices in one process.

    Every matrix is owned by one of the ranks that share its shards, so the work is shared too. In a step the ranks send
    the owners what they have of parameters and gradients, in one all-to-all each, and get back the new values in a
    third. Matrices that lie whole at their owner do not move. The optimizer's state stays at the owners, and is saved
    and loaded under the names that it would have in one process, on any number of ranks.

    Parameters with more than two dimensions are stacks of matrices (as of experts): the optimizer gets each by itself,
    and the state of matrix ``k`` is in ``state[parameter][str(k)]``. Parameters with fewer dimensions are one matrix,
    in their own shape.

    Parameter groups have the hyperparameters of the optimizer that ``make`` returns: a scheduler that changes ``lr``
    works as ever. What an optimizer computes over several parameters (a norm of all gradients, say) it computes over
    those of one owner: such optimizers are not for ``Matrixwise``.

    Memory: during a step each rank has its matrices and their gradients whole, about two shards more, and up to two
    more while they travel.

    Ranks: all ranks of the model make it and step together, with gradients for the same parameters.

    Args:
        params: parameters or parameter groups, sharded ones and plain ones. Hyperparameters in a parameter group
            override those of ``make``.
        make: makes an optimizer of plain parameters: a function of a list of parameters. It is called for each
            parameter group, once for its hyperparameters and, at the first step, at owners. It must not look at the
            values of parameters.
        block_rows: give the optimizer each block of so many rows by itself, as of attention heads; may differ between
            parameter groups.

    Raises:
        TypeError: ``make`` is not callable, or returns something else than an optimizer.
        ValueError: ``make`` returns an optimizer with several parameter groups, or a parameter is complex, or cut into
            stacks by tensor or expert parallelism.

    Example::

        optimizer = Matrixwise(model.parameters(), lambda params: SOAP(params, lr=3e-3))
    """

    reason = "it steps an optimizer on each parameter as a matrix"
    is_simple = False  # it steps an optimizer of the user's

    def __init__(
        self,
        params: Iterable[Any],
        make: Callable[[list[nn.Parameter]], Optimizer],
        block_rows: int | None = None,
    ) -> None:
        self._make = make
        self._classes: list[str] = []  # of each parameter group, of what ``make`` gave
        self._hyperparameters: list[list[str]] = []  # of each parameter group, the names of those that ``make`` gave
        self._layouts: dict[_Number, list[_Leaf]] = {}  # what the state of any matrix consists of
        self._begin()
        super().__init__(params, {"block_rows": block_rows, _STATE_NUMBERS: ()})

    def _begin(self) -> None:
        self._known = _Known(())
        self._optimizers: list[Optimizer | None] = []  # of each parameter group, for the matrices of this rank
        self._is_made = False  # that is, those before and the two that follow are
        self._wholes: dict[_Number, nn.Parameter] = {}  # this rank's matrices
        self._shown: dict[_Number, list[tuple[Any, Any]]] = {}  # values in the state of matrices, and how it shows them

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("_make", "_classes", "_hyperparameters", "_layouts")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._wholes or self._layouts:
            raise MisuseRuntimeError(
                "Matrixwise.add_param_group(): after the first step, new parameters would change the owners of all: "
                "make a new Matrixwise, and load the state of this one into it"
            )
        given = {*param_group}
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        for param in group["params"]:
            _check(param, group["block_rows"])
        made = self._made([_stand_in(param, group["block_rows"]) for param in group["params"][:1]])
        defaults = {key: value for key, value in made.param_groups[0].items() if key not in ("params", "param_names")}
        self._classes.append(type(made).__name__)
        self._hyperparameters.append([*defaults])
        self.defaults = {**defaults, **self.defaults}  # schedulers look there for what they can cycle
        self.param_groups.append({**group, **{key: value for key, value in defaults.items() if key not in given}})

    def _made(self, params: list[nn.Parameter]) -> Optimizer:
        optimizer = self._make(params)
        if not isinstance(optimizer, Optimizer):
            raise MisuseTypeError(f"Matrixwise: make() returned {optimizer!r}: expected a torch.optim.Optimizer")
        if len(optimizer.param_groups) != 1:
            raise MisuseError(
                f"Matrixwise: make() returned an optimizer with {len(optimizer.param_groups)} parameter groups: "
                "expected one. Give the parameter groups to Matrixwise, which calls make() for each"
            )
        return optimizer

    @torch.no_grad()
    @never_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Ranks: all ranks of the model. They agree by two small exchanges: before, that all step and have gradients for
        the same parameters; and before anything is written to parameters, that every optimizer succeeded.

        Args:
            closure: computes the loss again; its result is returned.

        Raises:
            RanksDifferError: on every rank: a rank does not step, trains other parameters, or has gradients for others.
                Nothing was changed.
            RankLostError: on every rank that came: another one did not.
            RuntimeError: on every rank: the optimizer raised on one. No parameter was changed, but state was: load a
                checkpoint.
            RuntimeError, ValueError: a gradient is not reduced, or is not sharded like its parameter. Nothing was
                changed.
        """
        head = [f"optimizers {self._classes}"]
        options = ["block_rows", *dict.fromkeys(chain.from_iterable(self._hyperparameters))]
        loss, gradients = begin_step(self, closure, self._plan_and_make, head, options)
        known = self._known
        try:
            scatters = [
                _gather(plan, numbers, gradients, self._wholes)
                for plan, numbers in zip(known.plans, known.numbers, strict=True)
                if any(id(member.param) in gradients for member in plan.members)
            ]
            self._step_together(known)
            for scatter in scatters:
                scatter()
        finally:
            for whole in self._wholes.values():
                whole.data, whole.grad = whole.new_zeros(()).expand(whole.shape), None  # without memory
        note_write_of_all_ranks([param for param in known.trained.params if param.grad is not None])
        self._show()
        return loss

    def describe(self) -> MatricesReport:
        """Describe what a step does: who owns what, how evenly, what moves, and what memory that takes.

        Ranks: any; nothing is communicated."""
        plans, temporary = self._plan().plans, 0
        for plan in plans:
            for bucket in buckets_of(plan):
                exchange = bucket.exchange
                # Values and gradients, whole at this rank; and either of them on its way.
                numel = 2 * exchange.num_owned + exchange.num_sent + exchange.num_received
                temporary += plan.ns_dtype.itemsize * numel
        return report_of("Matrixwise", plans, 3, temporary)

    # ---- What is planned once

    def _plan(self) -> _Known:
        # Parameters that were moved or sharded anew have other specs.
        params = [param for group in self.param_groups for param in group["params"]]
        key = tuple([(id(param), id(getattr(param, "_spec", None))) for param in params])
        if self._known.key != key:
            known = _known_of(key, self.param_groups)
            if self._is_made and known.owners != self._known.owners:
                raise MisuseRuntimeError(
                    "Matrixwise: the parameters were sharded otherwise after the first step, so matrices have other "
                    "owners: make a new Matrixwise, and load the state of this one into it. Nothing was changed"
                )
            self._known = known
        return self._known

    def _plan_and_make(self) -> Trained:
        """What can fail on this rank alone before a step: ``make`` is the user's."""
        trained = self._plan().trained
        if not self._is_made:
            self._make_own([self.state.get(param, {}) for param in trained.params])
        return trained

    # ---- The user's optimizers, at owners

    def _make_own(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Make the user's optimizers for all matrices that this rank owns, with the state that parameters have."""
        known, own, wholes = self._plan(), [list[nn.Parameter]() for _ in self.param_groups], {}
        for i, (param, count) in enumerate(zip(known.trained.params, known.counts, strict=True)):
            block_rows = self.param_groups[known.groups[i]]["block_rows"]
            for k in range(count):
                if known.is_own((i, k)):
                    wholes[i, k] = _stand_in(param, block_rows, known.device((i, k)))
                    own[known.groups[i]].append(wholes[i, k])
        self._optimizers = [self._made(params) if params else None for params in own]
        self._wholes, self._layouts = wholes, {}
        for i, entries in enumerate(states):
            for k in range(known.counts[i]):
                found = entries if known.counts[i] == 1 else entries.get(str(k))
                if found:
                    self._take((i, k), found)
        self._is_made = True

    def _step_own(self) -> dict[_Number, list[_Leaf]]:
        """Step this rank's matrices. Return what their state then consists of."""
        for group, names, optimizer in zip(self.param_groups, self._hyperparameters, self._optimizers, strict=True):
            if optimizer is not None:
                optimizer.param_groups[0].update({name: group[name] for name in names})
                optimizer.step()
        states = [(number, self._state_of(number)) for number in self._wholes]
        return {number: [_described(*item) for item in leaves_of(state)] for number, state in states}

    def _step_together(self, known: _Known) -> None:
        """Step this rank's matrices, and share what is new in the state of matrices, or in parameter groups; raise on
        every rank if an optimizer failed on one."""
        layouts: dict[_Number, list[_Leaf]] = {}
        problem, cause = "", None
        try:
            layouts = self._step_own()
        except Exception as error:  # the user's code: the other ranks wait for its results
            rank = f"on rank {dist.get_rank()}, " if known.trained.peers() else ""
            problem = f"{rank}the optimizer raised {type(error).__name__}: {error}".replace("\n", " ")
            cause = error
        changed = {number: layout for number, layout in layouts.items() if layout != self._layouts.get(number)}
        facts: dict[str, Any] = {"problem": problem, "groups": {} if problem else self._changed_groups()}
        facts["layouts"] = [[*number, layout] for number, layout in changed.items()]
        is_news = bool(problem or changed or facts["groups"])
        brought = [facts]
        for group in known.trained.peers():
            brought += map(json.loads, share_changes(_STEP, group, json.dumps(facts) if is_news else ""))
        problems = [item["problem"] for item in brought if item["problem"]]
        if problems:
            raise RuntimeError(
                f"{_STEP}: {problems[0]}. No parameter was changed, but the state of matrices was: load a checkpoint"
            ) from cause
        for item in brought[1:]:
            for i, k, found in item["layouts"]:
                self._layouts[i, k] = [_Leaf(tuple(path), tuple(shape), *rest) for path, shape, *rest in found]
        self._layouts.update(layouts)  # of matrices that every rank has, ranks may know different things
        self._follow_groups([item["groups"] for item in brought])

    def _state_of(self, number: _Number) -> dict[str, Any]:
        optimizer = self._optimizers[self._known.groups[number[0]]]
        assert optimizer is not None
        state: dict[str, Any] = optimizer.state.get(self._wholes[number], {})
        return state

    def _changed_groups(self) -> dict[str, dict[str, Any]]:
        """Hyperparameters that an optimizer of the user's has changed, as those that count steps do."""
        found: dict[str, dict[str, Any]] = {}
        for i, (group, optimizer) in enumerate(zip(self.param_groups, self._optimizers, strict=True)):
            own = {} if optimizer is None else optimizer.param_groups[0]
            changed = {
                name: own[name]
                for name in self._hyperparameters[i]
                if name in own and type(own[name]) in (bool, int, float, str) and own[name] != group[name]
            }
            if changed:
                found[str(i)] = changed
        return found

    def _follow_groups(self, brought: Sequence[dict[str, dict[str, Any]]]) -> None:
        for item in brought:
            for number, values in item.items():
                for name, value in values.items():
                    others = [other.get(number, {}).get(name, value) for other in brought]
                    if any([other != value for other in others]):
                        raise MisuseRuntimeError(
                            f"{_STEP}: the optimizer computes {name} of its parameter group from all its "
                            f"matrices, so ranks have different ones: {value} and "
                            f"{next(other for other in others if other != value)}. It cannot be used matrix by matrix"
                        )
                    self.param_groups[int(number)][name] = value

    # ---- The state that ``Optimizer.state`` shows

    def _show(self) -> None:
        """Show the state of all matrices: tensors that lie whole at their owners."""
        fresh: dict[int, dict[str, Any]] = {}
        for number, layout in sorted(self._layouts.items()):
            i, k = number
            values = [value for _, value in leaves_of(self._state_of(number))] if number in self._wholes else [*layout]
            shown = self._shown.setdefault(number, [])
            if len(shown) == len(values) and all(map(_is_shown, shown, values)):
                continue
            shown[:] = [(value, self._placed(number, leaf, value)) for leaf, value in zip(layout, values, strict=True)]
            fresh.setdefault(i, {})[str(k)] = _nested(layout, [made for _, made in shown])
        for i, by_matrix in fresh.items():
            param = self._known.trained.params[i]
            is_one = self._known.counts[i] == 1
            self.state[param] = by_matrix["0"] if is_one else {**self.state.get(param, {}), **by_matrix}
        if fresh:
            leaves = chain.from_iterable(self._layouts.values())
            numbers = {".".join(map(str, leaf.path)) for leaf in leaves if leaf.is_number}
            for group in self.param_groups:
                group[_STATE_NUMBERS] = tuple(sorted(numbers))

    def _placed(self, number: _Number, leaf: _Leaf, value: Any) -> Any:
        """How a value is shown. ``value``: the value itself at the owner, anything elsewhere."""
        if leaf.dtype is None:
            return leaf.value
        dtype = getattr(torch, leaf.dtype)
        if number not in self._wholes:
            local = torch.empty(0, dtype=dtype, device=self._known.device(number))
        else:
            local = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
        return self._known.placed(number, leaf.shape, local)

    def place_state(
        self, param: torch.Tensor, key: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return an uninitialized tensor that is placed as this optimizer keeps a value in its state, whole at the
        owner; ``None`` if that is no state of a matrix. Checkpoints ask.

        Ranks: any; nothing is communicated.

        Args:
            key: the path in ``state[param]``, with dots: ``"exp_avg"``, and ``"3.exp_avg"`` of matrix 3 of a stack.
            shape, dtype: of the whole value."""
        known = self._plan()
        i = next((i for i, item in enumerate(known.trained.params) if item is param), None)
        first = key.partition(".")[0]
        if i is None or (known.counts[i] > 1 and not (first.isdigit() and int(first) < known.counts[i])):
            return None
        number = (i, int(first) if known.counts[i] > 1 else 0)
        numel = prod(shape) if known.is_own(number) else 0
        return known.placed(number, shape, torch.empty(numel, dtype=dtype, device=known.device(number)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict()``, of parameters that are sharded equally (or see
        ``checkpoint.set_optimizer_state_dict``).

        Ranks: all ranks of the model."""
        given: dict[str, Any] = {}
        # After hooks of the user's.
        hook = self.register_load_state_dict_pre_hook(lambda _, hooked: given.update(self._complete(hooked)))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._make_own(_states_in(given))  # not what torch has cast to the dtype of parameters
        self._show()

    def _complete(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give a state dict options that the user's optimizer does not have. Raise unless it fits."""
        groups = state_dict["param_groups"] = [{_STATE_NUMBERS: (), **group} for group in state_dict["param_groups"]]
        for i, state in enumerate(_states_in(state_dict)[: len(self._plan().trained.params)]):
            self._check_numbers(i, state)
        for group, own, names in zip(groups, self.param_groups, self._hyperparameters, strict=False):
            group["block_rows"] = own["block_rows"]
            if missing := [name for name in names if name not in group]:
                raise MisuseError(
                    f"Matrixwise.load_state_dict(): a parameter group has no {', '.join(missing)}, which the optimizer "
                    "that make() returns has. Was it saved by another optimizer? Nothing was changed"
                )
        return state_dict

    def _check_numbers(self, i: int, given: Mapping[str, Any]) -> None:
        """Raise RuntimeError if the state of a parameter is of other matrices than it has here."""
        count = self._known.counts[i]
        numbers = [key for key, value in given.items() if str(key).isdigit() and isinstance(value, Mapping)]
        if given and (numbers if count == 1 else len(numbers) != len(given) or int(max(numbers, key=int)) >= count):
            expected = "the state of one" if count == 1 else "their numbers"
            raise MisuseRuntimeError(
                f"Matrixwise.load_state_dict(): {name_of(self._known.trained.params[i])} has {count} matrices here, "
                f"and the state has the keys {[*given][:4]}: expected {expected}. Was it saved with another "
                "block_rows, or by another optimizer?"
            )

    def _take(self, number: _Number, entries: Mapping[str, Any]) -> None:
        numbers = self.param_groups[self._known.groups[number[0]]].get(_STATE_NUMBERS, ())
        found = [(path, leaf, ".".join(map(str, path)) in numbers) for path, leaf in leaves_of(entries)]
        layout = self._layouts[number] = [_described(*item) for item in found]
        values = [self._loaded(number, leaf, is_number) for _, leaf, is_number in found]
        if number in self._wholes:
            optimizer = self._optimizers[self._known.groups[number[0]]]
            assert optimizer is not None
            optimizer.state[self._wholes[number]] = _nested(layout, values)

    def _loaded(self, number: _Number, leaf: Any, is_number: bool) -> Any:
        """A value of the state of a matrix as its optimizer keeps it. Ranks: all that have the parameter."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        whole = leaf.detach()
        if isinstance(leaf, DTensor):
            # Whole at the owner already, unless parameters were sharded otherwise; all ranks see the same.
            is_there = [*leaf.placements] == self._known.placements(number, leaf.shape)
            whole = local_of(leaf).detach() if is_there else leaf.full_tensor()
        if number not in self._wholes:
            return None
        whole = whole.reshape(tuple(leaf.shape))
        return whole.item() if is_number else whole.clone()  # the state dict may be another optimizer's


# ---- Which matrices there are, and how they are moved


_Number = tuple[int, int]  # of a parameter, counted over all parameter groups, and of a matrix in it


@dataclass(eq=False)
class _Known:
    """What is found out once about the parameters of an optimizer.

    Attributes:
        key: what it depends on.
        trained: the parameters, and ``groups``: the number of the parameter group of each.
        plans: for the matrices of parameters with equal dtypes whose shards lie on the same ranks.
        places: for each parameter, its plan and its number there; ``numbers``: for each plan, those of its parameters.
    """

    key: object
    trained: Trained = field(default_factory=Trained)
    groups: list[int] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    places: list[tuple[Plan, int]] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)

    @cached_property
    def counts(self) -> list[int]:
        """How many matrices each parameter has."""
        return [plan.members[n].shape.matrices.count * self._blocks(plan.members[n]) for plan, n in self.places]

    @staticmethod
    def _blocks(member: Member) -> int:
        """In how many matrices one that travels is divided: tensor parallelism has cut it, so its blocks travel as
        one."""
        if member.shape.spec is None or member.param.dim() < 2:
            return 1
        return member.param.shape[-2] // member.shape.rows

    def owner(self, number: _Number) -> int:
        (plan, n), k = self.places[number[0]], number[1]
        return plan.owners[n][k // self._blocks(plan.members[n])]

    def is_own(self, number: _Number) -> bool:
        return self.owner(number) == self.places[number[0]][0].rank

    @property
    def owners(self) -> list[list[int]]:
        return [plan.owners[n] for plan, n in self.places]

    def device(self, number: _Number) -> torch.device:
        return self.places[number[0]][0].device

    def placed(self, number: _Number, shape: Sequence[int], local: torch.Tensor) -> torch.Tensor:
        """Return a value in the state of a matrix: a tensor that lies whole at its owner.

        Args:
            local: all of it at the owner, nothing elsewhere; its shape does not matter.
        """
        param = self.trained.params[number[0]]
        if not isinstance(param, DTensor):
            return local.view(tuple(shape))
        placements = self.placements(number, shape)
        if isinstance(param, RaggedDTensor):
            return RaggedDTensor._from_elements(local, param.device_mesh, placements, shape)
        placed: torch.Tensor = DTensor.from_local(
            local.view(tuple(shape)), param.device_mesh, placements, run_check=False
        )
        return placed

    def placements(self, number: _Number, shape: Sequence[int]) -> list[Placement]:
        """How a value in the state of a matrix of a sharded parameter lies."""
        param, (plan, _) = self.trained.params[number[0]], self.places[number[0]]
        assert isinstance(param, DTensor)
        owner, rows = self.owner(number), shape[0] if shape else 1
        whole = RaggedShard([(0, owner), (rows, 1), (0, plan.num_ranks - owner - 1)])
        return [whole if isinstance(item, RaggedShard) else Replicate() for item in param.placements]


def _known_of(key: object, groups: Sequence[dict[str, Any]]) -> _Known:
    known = _Known(key, Trained.by(groups))
    members: dict[Any, tuple[FlatParamHandle | None, list[Member]]] = {}
    positions: list[tuple[Any, int]] = []
    for number, group in enumerate(groups):
        for param in group["params"]:
            handle, _ = handle_of(param) or (None, 0)
            where = None if handle is None else (handle.mesh.shard_group, handle.mesh.replicate_group), param.dtype
            positions.append((where, len(members.setdefault(where, (handle, []))[1])))
            members[where][1].append(Member(param, number, shape_of(param, group["block_rows"])))
            known.groups.append(number)
    plans = {where: Plan(found, handle, False, _ONE_BUCKET, where[1]) for where, (handle, found) in members.items()}
    known.plans += plans.values()
    known.places += [(plans[where], n) for where, n in positions]
    known.numbers += [[i for i, (other, _) in enumerate(known.places) if other is plan] for plan in known.plans]
    for param, number, num_here in zip(known.trained.params, known.groups, known.counts, strict=True):
        block_rows, num_all = groups[number]["block_rows"], 1
        if param.dim() > 1:
            num_all = prod(param.shape[:-2]) * (1 if block_rows is None else param.shape[-2] // block_rows)
        if num_here != num_all:
            raise MisuseError(
                f"Matrixwise: tensor or expert parallelism gives this rank {num_here} of the {num_all} matrices of "
                f"{name_of(param)}: Matrixwise trains parameters of which it cuts the matrices, or that it leaves "
                "whole. Muon trains these"
            )
    return known


def _gather(
    plan: Plan, numbers: Sequence[int], gradients: Gradients, wholes: Mapping[_Number, nn.Parameter]
) -> Callable[[], None]:
    """Give this rank's matrices of one plan their elements and gradients. Return a function that writes the matrices to
    the parameters of all ranks."""
    params = [member.param for member in plan.members]
    label, (bucket,) = plan.exchanges_of(bytes([id(param) in gradients for param in params]))
    exchange, route, nothing = bucket.exchange, plan.route(label), torch.empty(0)
    # One after the other, so that buffers for what moves exist once at a time.
    values = exchange.gather([local_of(param).detach().reshape(-1) for param in params], route)()
    grads = exchange.gather([gradients.get(id(param), nothing).reshape(-1) for param in params], route)()
    stacks: list[tuple[Member | None, torch.Tensor]] = []  # what this rank owns; with the member, if that is cut
    given: list[tuple[nn.Parameter, torch.Tensor]] = []
    for stack, whole, grad in zip(exchange.owned, values, grads, strict=True):
        if not stack.numel:
            stacks.append((None, whole))
            continue
        member = plan.members[stack.param]
        is_cut = member.shape.spec is not None
        if is_cut:
            whole, grad = (gather_cut(member, item).contiguous() for item in (whole, grad))
        stacks.append((member if is_cut else None, whole))
        rows, cols = member.shape.rows, member.shape.cols
        first = stack.start // (stack.rows * stack.cols) * (whole.numel() // (stack.count * rows * cols))
        pairs = zip(whole.view(-1, rows, cols), grad.view(-1, rows, cols), strict=True)
        for k, (view, its_gradient) in enumerate(pairs, first):
            target = wholes[numbers[stack.param], k]
            target.data, target.grad = view.view(target.shape), its_gradient.view(target.shape)
            given.append((target, view))

    def scatter() -> None:
        for target, view in given:
            if target.data_ptr() != view.data_ptr():  # the optimizer has assigned to ``.data``
                view.copy_(target.view(view.shape))
        results = [whole if member is None else own_cut(member, whole) for member, whole in stacks]
        for i, start, result in exchange.scatter(results, route)():
            local = local_of(params[i]).detach()
            if local.numel() == result.numel():  # it may have any strides
                local.copy_(result.view(local.shape))
            else:
                local.view(-1)[start : start + result.numel()].copy_(result)

    return scatter


# ---- Checks, and stand-ins for parameters


def _check(param: torch.Tensor, block_rows: int | None) -> None:
    if param.is_complex() or (is_wrapper(param) and not isinstance(param, DTensor)):
        raise MisuseError(
            f"Matrixwise: {name_of(param)} is a {type(param).__name__} of {param.dtype}: expected a real parameter of "
            "plain elements"
        )
    if block_rows is not None:
        if param.dim() < 2:
            raise MisuseError(f"Matrixwise(block_rows={block_rows}): {name_of(param)} has {param.dim()} dimension(s)")
        refuse_block_rows(param, block_rows)


def _stand_in(param: torch.Tensor, block_rows: int | None, device: torch.device | None = None) -> nn.Parameter:
    """A plain parameter for a matrix of ``param``, without memory."""
    shape = tuple(param.shape[-2:])
    if block_rows is not None:
        shape = (block_rows, shape[1])
    element = torch.zeros((), dtype=param.dtype, device=local_of(param).device if device is None else device)
    return nn.Parameter(element.expand(shape))


# ---- Values in the state of a matrix


def _states_in(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [state_dict["state"].get(number, {}) for group in state_dict["param_groups"] for number in group["params"]]


def _described(path: Path, leaf: Any, is_number: bool = False) -> _Leaf:
    if isinstance(leaf, torch.Tensor):
        return _Leaf(path, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), is_number=is_number)
    if type(leaf) in _DTYPES:
        return _Leaf(path, (), str(_DTYPES[type(leaf)]).removeprefix("torch."), is_number=True)
    if leaf is None or type(leaf) is str:
        return _Leaf(path, value=leaf)
    raise MisuseTypeError(
        f"Matrixwise: the optimizer keeps a {type(leaf).__name__} in its state, as {'.'.join(map(str, path))}: "
        "expected tensors, numbers, texts and None, also in lists and dicts"
    )


def _is_shown(shown: tuple[Any, Any], value: Any) -> bool:
    """Whether a value is still the one that was shown, in the same memory."""
    before, made = shown
    if before is not value or not isinstance(value, torch.Tensor):
        return before is value
    return made.dtype == value.dtype and made.shape == value.shape and local_of(made).data_ptr() == value.data_ptr()


def _nested(layout: Sequence[_Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """Put values where ``layout`` says, into new lists and dicts."""
    result: dict[str, Any] = {}
    for leaf, value in zip(layout, values, strict=True):
        put_leaf(result, leaf.path, value)
    return result
