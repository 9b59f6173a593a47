"""Random models, sharded in random ways, in random training loops, with the unsharded model: see ``programs``.

``FSDP_COMPOSE_FUZZ=5000 pytest tests/whole/test_fuzz.py`` runs so many programs at each world size, other ones each
time. A program that fails is printed as it is written in Python, so that it can become an ``@example`` below.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.harness import run_distributed
from tests.observed_hooks import AFTER_ACCUMULATION, ON_GRADIENT
from tests.programs import (
    CALLS,
    COMPOUNDS,
    EDITORS,
    EDITS,
    INNER_BACKWARDS,
    LEAVES,
    TERMS,
    WAYS,
    Action,
    Group,
    Part,
    Program,
    parts_of,
    run_on_every_rank,
)

NUM_PROGRAMS = int(os.environ.get("FSDP_COMPOSE_FUZZ", "0"))

_groups = st.none() | st.builds(
    Group,
    way=st.sampled_from(["", *WAYS]),
    reshard=st.sampled_from([None, True, False]),
    wide_reduction=st.booleans(),
    granularity=st.sampled_from([None, "elements", "rows", "whole"]),
)
_leaves = st.builds(
    Part,
    kind=st.sampled_from(LEAVES),
    group=_groups,
    recompute=st.sampled_from([None, None, True, False]),
    frozen=st.sampled_from([False, False, False, True]),
    narrow=st.sampled_from([False, False, False, True]),
)
_again = st.builds(Part, kind=st.just("again"), refers_to=st.integers(0, 9))


def _compounds(children: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    return st.builds(
        Part,
        kind=st.sampled_from([*COMPOUNDS, *CALLS]),
        children=st.lists(children, min_size=1, max_size=3).map(tuple),
        group=_groups,
        recompute=st.sampled_from([None, None, True, False]),
        frozen=st.sampled_from([False, False, False, True]),
        together=st.booleans(),
    )


_parts = st.recursive(_leaves | _again, _compounds, max_leaves=6)
_roots = st.builds(
    Part,
    kind=st.sampled_from(["chain", "residual", "container", "opaque", "auxiliary"] * 3 + [*EDITORS, *INNER_BACKWARDS]),
    children=st.lists(_parts, min_size=2, max_size=4).map(tuple),
    group=_groups,
    together=st.booleans(),
)
_train = st.builds(
    Action,
    kind=st.just("train"),
    sync=st.sampled_from([True, True, False]),
    how=st.sampled_from(["", "", "together", "in order", "reversed", "only second", "twice", "forward only"]),
    at=st.integers(0, 9),
    term=st.sampled_from(["", "", *TERMS]),
    root=st.sampled_from(["", "other", "both"]),
    toggles=st.sampled_from([False, False, False, True]),
)
_others = st.one_of(
    st.builds(
        Action,
        kind=st.just("step"),
        how=st.sampled_from(["optimizer", "model", "in place", "keep"]),
        at=st.sampled_from([0, 1]),
    ),
    st.builds(Action, kind=st.just("evaluate"), how=st.sampled_from(["no_grad", "inference"])),
    st.builds(Action, kind=st.just("edit"), how=st.sampled_from(sorted(EDITS)), at=st.integers(0, 9)),
    st.builds(
        Action,
        kind=st.just("fail"),
        sync=st.booleans(),
        how=st.sampled_from(["forward", "backward"]),
        at=st.integers(0, 9),
    ),
    st.just(Action("input_gradient")),
    st.builds(Action, kind=st.just("unshard"), at=st.integers(0, 5)),
    st.builds(Action, kind=st.just("set_reshard"), sync=st.booleans(), at=st.integers(0, 5)),
    st.builds(
        Action,
        kind=st.just("set_functional"),
        sync=st.sampled_from([True, True, False]),
        how=st.sampled_from(["", "all"]),
        at=st.integers(0, 5),
    ),
    st.just(Action("penalise")),
    st.builds(
        Action,
        kind=st.just("summon"),
        sync=st.booleans(),
        how=st.sampled_from(["look", "write", "scale its gradient"]),
        at=st.integers(0, 9),
    ),
    st.builds(
        Action,
        kind=st.just("checkpoint"),
        sync=st.booleans(),
        how=st.sampled_from(["sharded", "full", "first rank"]),
    ),
    st.builds(Action, kind=st.just("restart"), sync=st.booleans()),
    st.just(Action("save")),
)


_actions = st.booleans().flatmap(lambda trains: _train if trains else _others)


def _without(actions: tuple[Action, ...], *kinds: str) -> tuple[Action, ...]:
    return tuple(action for action in actions if action.kind not in kinds)


def _changed(part: Part, change: Callable[[Part], Part]) -> Part:
    """``change`` done to every part, innermost first."""
    return change(replace(part, children=tuple(_changed(child, change) for child in part.children)))


def _with_own_group(part: Part) -> Part:
    """The last child of what edits is a group of its own: the parameters of a group that runs cannot be edited."""
    if part.kind not in EDITORS:
        return part
    *others, last = part.children
    return replace(part, children=(*others, replace(last, group=last.group or Group())), together=False)


def _plain(part: Part) -> Part:
    """Run once in each forward, by every rank, and not recomputed."""
    kind = {"again": "linear", "twice": "chain", "switch": "chain"}.get(part.kind, part.kind)
    return replace(part, kind=kind, recompute=None)


def _without_forces(part: Part) -> Part:
    return replace(part, kind="chain") if part.kind == "forces" else part


def _not_reentrant(part: Part) -> Part:
    """Dynamo makes one checkpoint of both kinds: where no input requires grad there are gradients all the same."""
    return replace(part, recompute=None if part.recompute is None else False)


def _without_experts(part: Part) -> Part:
    """Their collectives break the graph of a whole model."""
    return replace(part, kind="cube") if part.kind == "experts" else part


def _not_by_rows(part: Part) -> Part:
    """Five experts are not evenly spread: what "rows" means would differ between ranks, which is refused."""
    is_by_rows = part.group is not None and part.group.granularity == "rows"
    return replace(part, group=replace(part.group, granularity=None)) if is_by_rows else part


def _made_possible(program: Program) -> Program:
    """The program without what does not go together; see ``_is_possible`` for the rest."""
    root, actions = program.root, program.actions
    part_kinds = {part.kind for part in parts_of(root)}
    kinds = {action.kind for action in actions}
    if part_kinds & {*EDITORS}:
        # A recomputation would edit again; a parameter that one rank has used before has another value for the next.
        is_default = not kinds & {"set_functional", "penalise"}
        if part_kinds & {"edits", "edits data"} or not is_default:  # those of the default mode can be frozen
            root = _changed(root, _with_own_group)
        root = _changed(_changed(root, _plain), _without_forces)
        program = replace(program, ties=(), second_root=None)
        actions = _without(actions, "fail")
        if part_kinds & {"edits", "edits data"}:  # a second forward edits what the first one's backward needs
            actions = tuple(replace(action, how="") if action.kind == "train" else action for action in actions)
    elif part_kinds & {*INNER_BACKWARDS, "late auxiliary"}:
        # A backward within a recomputation; a recomputation that is not what the forward was.
        root = _changed(root, lambda part: replace(part, recompute=None, kind=_plain(part).kind))
    if "local loss" in part_kinds:  # whose forwards are done by both models, on all ranks
        program = replace(program, hooks=())
        actions = _without(actions, "fail", "input_gradient", "penalise")
    if "freezes" in part_kinds or any(action.toggles for action in actions):
        program = replace(program, hooks=(), optimizer="adamw" if program.optimizer == "flat" else program.optimizer)
    if program.second_root is not None or "restart" in kinds or not program.shards_root:
        program = replace(program, ties=(), hooks=() if "restart" in kinds else program.hooks)
        actions = _without(actions, "fail")  # an interruption of one root is not the others' affair
    if "experts" in part_kinds:  # whose ranks exchange tokens: all run them, equally often, to the end
        root = _changed(root, lambda part: replace(part, kind="chain") if part.kind == "switch" else part)
        root = _changed(root, _not_by_rows)
        # A term of the loss on a parameter itself must say how gradients differ between ranks.
        actions = tuple(replace(action, term="") for action in _without(actions, "fail"))
    return replace(program, root=root, actions=actions)


def _is_possible(program: Program) -> bool:
    """Whether a user who knows the rules would write it."""
    parts = list(parts_of(program.root))
    kinds = {action.kind for action in program.actions}
    recomputes = any(part.recompute is not None for part in parts)
    for part in parts:
        if part.recompute is not None and part.kind in ("container", "opaque"):
            return False  # reentrant checkpointing passes on tensors only
        if part.kind == "switch":
            below = [item for child in part.children for item in parts_of(child)]
            if part.together or any(
                item.group is not None or item.together or item.kind in ("again", "detach", "switch") for item in below
            ):
                return False  # ranks run the same groups, and backward reaches the same
    if kinds & {"set_functional", "penalise"}:  # whole groups are recomputed; a tied module is of the group above both
        if any(part.recompute is not None and (part.group is None or program.ties) for part in parts):
            return False
    if not program.shards_root:  # each child is a root
        if program.root.together or program.root.kind in ("auxiliary", "late auxiliary"):
            return False
    if program.optimizer == "flat":  # what is tied moves, and what is in one flat view is frozen together
        if program.ties or any(action.how == "toggle requires_grad" for action in program.actions):
            return False
    if kinds & {"input_gradient", "penalise"} and recomputes:
        return False  # torch refuses autograd.grad() with reentrant checkpointing
    if "penalise" in kinds and any(kind == ON_GRADIENT for _, kind in program.hooks):
        return False  # autograd.grad() does not call the hooks of sharded parameters
    return not (any(part.kind == "switch" for part in parts) and "fail" in kinds)


_programs = st.builds(
    Program,
    root=_roots,
    actions=st.builds(lambda first, others: (first, *others), _train, st.lists(_actions, min_size=1, max_size=6)),
    ties=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=2).map(tuple),
    shards_root=st.sampled_from([True, True, True, False]),
    second_root=st.sampled_from([None, None, None, 0, 1, 2]),
    optimizer=st.sampled_from(["sgd", "adamw", "flat"]),
    input_requires_grad=st.booleans(),
    ep=st.sampled_from([1, 2, 3, 4]),
    hooks=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([ON_GRADIENT, AFTER_ACCUMULATION])), max_size=3).map(
        tuple
    ),
)
_programs = _programs.map(_made_possible).filter(_is_possible)

# A group whose output cannot be hooked stays unsharded, and is gathered again ahead of a functional forward.
_STAYS_UNSHARDED = Program(
    root=Part("opaque", children=(Part("container", children=(Part("scalar"),)),)),
    actions=(Action("train"), Action("penalise")),
    input_requires_grad=True,
)

# Of two roots one alone runs again: gradients of the other's own parameters, which flat views have dropped, lag on.
_LAGS = Program(
    root=Part("chain", children=(Part("linear"), Part("linear"))),
    actions=(
        Action("train"),
        Action("train", at=4, term="square"),
        Action("step", how="optimizer"),
        Action("train"),
        Action("train", root="both"),
    ),
    second_root=0,
    optimizer="flat",
)

# A tie moves a parameter at the first forward, when a term computed before it has its gradient to come; a hook on
# another parameter wants to see gradients by themselves.
_TERM_BEFORE_A_MOVE = Program(
    root=Part(
        "chain",
        children=(
            Part("late auxiliary", children=(Part("scale"),)),
            Part("chain", children=(Part("linear"), Part("linear", group=Group()))),
        ),
    ),
    actions=(Action("train", at=2, term="square before forward"), Action("step", how="optimizer")),
    ties=((0, 1),),
    hooks=((0, ON_GRADIENT),),
)

# The same, but the parameter moves to a group on another mesh.
_TERM_BEFORE_ANOTHER_MESH = Program(
    root=Part(
        "auxiliary",
        children=(
            Part("sum", children=(Part("linear"), Part("linear")), together=True),
            Part("local loss", children=(Part("linear"), Part("linear")), together=True),
            Part("local loss", children=(Part("linear"),), together=True),
        ),
        group=Group(way="one column"),
    ),
    actions=(Action("train", at=3, term="product before forward"),),
    ties=((1, 3),),
)

# Loading by assignment exchanges parameters whose root never ran, and which have hooks.
_HOOK_BEFORE_ASSIGNMENT = Program(
    root=Part("chain", children=(Part("nothing"),)),
    actions=(Action("edit", how="load by assignment"), Action("train", term="norm")),
    second_root=0,
    hooks=((2, ON_GRADIENT),),
)

# A graph has computed the gradient of a parameter that is frozen since: the norm must not know of it.
_FROZEN_BEFORE_BACKWARD = Program(
    root=Part("chain", children=(Part("linear"), Part("again"), Part("linear"))),
    actions=(Action("train", toggles=True, at=1), Action("train"), Action("step", how="keep", at=1)),
)

# A graph writes to a 0-dim parameter, of which one rank has nothing.
_NUMBER_EDITED = Program(
    root=Part(
        "chain", children=(Part("linear"), Part("edits", children=(Part("linear"), Part("scalar", group=Group()))))
    ),
    actions=(Action("train"), Action("step", how="optimizer")),
)

_generation = itertools.count()
_present = [next(_generation)]


def check(program: Program, world_size: int, report: Path) -> bool:
    """Run one program on every rank; whether it went through, and was not refused."""
    report.unlink(missing_ok=True)
    arguments = {"program": program, "generation": _present[0], "report": str(report)}
    try:
        # The process that writes an asynchronous save takes seconds to start.
        is_slow = program.compiled or any(action.kind == "save" for action in program.actions)
        run_distributed(run_on_every_rank, world_size, arguments, timeout=200 if is_slow else 40)
        outcome = report.read_text()
    except pytest.fail.Exception as failure:  # a rank crashed or hangs
        outcome = str(failure)
    if outcome not in ("", "refused"):
        _present[0] = next(_generation)  # whatever is still in flight does not reach the next program
        pytest.fail(f"{program}\n{outcome}", pytrace=False)
    return not outcome


def compilable(program: Program) -> Program | None:
    """The program with its models compiled whole, as far as that is possible."""
    if any(part.kind == "freezes" for part in parts_of(program.root)):
        return None  # Dynamo fails at requires_grad_() of a number that it takes for a symbol
    actions = _without(program.actions, "penalise")  # torch.compile does not differentiate twice
    root = _changed(program.root, lambda part: _not_reentrant(_without_experts(part)))
    return replace(program, compiled=True, actions=actions, root=root)


def check_random_programs(world_size: int, num_programs: int, report: Path, compiled: bool = False) -> None:
    """``compiled``: the whole model, by torch.compile."""
    went_through: list[bool] = []

    @settings(
        max_examples=NUM_PROGRAMS or num_programs,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        derandomize=not NUM_PROGRAMS,
        database=None,
    )
    @example(_STAYS_UNSHARDED)
    @example(_LAGS)
    @example(_TERM_BEFORE_A_MOVE)
    @example(_TERM_BEFORE_ANOTHER_MESH)
    @example(_HOOK_BEFORE_ASSIGNMENT)
    @example(_FROZEN_BEFORE_BACKWARD)
    @example(_NUMBER_EDITED)
    @given(_programs)
    def random_programs(program: Program) -> None:
        if compiled:
            if (wanted := compilable(program)) is None:
                return
            program = wanted
        is_right = check(program, world_size, report)
        if is_right or not (compiled and any(part.kind in EDITORS for part in parts_of(program.root))):
            went_through.append(is_right)  # writes to parameters in a graph are to be refused

    random_programs()
    assert sum(went_through) > 0.8 * len(went_through), "too many programs are refused to show anything"


@pytest.mark.parametrize(("world_size", "num_programs"), [(2, 60), (3, 30), (4, 20)])
@pytest.mark.timeout(max(600, NUM_PROGRAMS * 10))
def test_random_programs_train_as_unsharded(world_size, num_programs, tmp_path):
    check_random_programs(world_size, num_programs, tmp_path / "report")
