"""Parameters tied across groups: one parameter in modules of several groups, each sharded by its own call.

If an earlier call has already sharded a parameter, the next call puts the sharded parameter into its slot
(``registry``). At the first forward of the root, this file moves the parameter to the innermost group that encloses all
modules that use it. That group keeps it unsharded from the first use to the last, and reduces its gradient once, after
all uses::

    root (head)                 root (embed.weight = head.weight, head.bias)
     |- embed (weight) ---.      |- embed ()
     |- blocks ...         > ->  |- blocks ...
     `- head.weight = -----'

A module shows the parameters of one group, so the other parameters of a module with a tied parameter move with it. The
sharded parameters stay the same objects, so optimizers are not affected.

A parameter that the user unties from another after ``fully_shard`` (assigns to one of its slots) belongs to no group
yet. It joins the innermost group around the modules that use it, at the next forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch.nn as nn

from ...errors import MisuseError
from ..flat import FlatParamHandle, ManagedParameter, ParameterKind, handle_of, owner_of, shard_again
from .change_detection import find_untied
from .registry import group_modules, partition, prepare_swap
from .state import _FSDPState, state_of


@dataclass(frozen=True)
class Move:
    """Parameters that move to another group, with their names in the root.

    Attributes:
        untied: those that belong to no group yet, because they were untied from another after ``fully_shard``, each
            with the kind that it gets.
    """

    sharded_params: dict[nn.Parameter, str]
    target: _FSDPState
    untied: dict[nn.Parameter, ParameterKind]


def find_moves(root: nn.Module, states: Sequence[_FSDPState]) -> list[Move]:
    """Find what must move before the root's first forward. Local; changes nothing.

    Args:
        root: the module whose forward begins iterations.
        states: every group below it, outer ones first.

    Raises:
        ValueError: no group encloses all modules that share a parameter, or the parameter has a gradient.
    """
    group_around = {module: state for state in states for module in group_modules(state.live_modules())}
    untied = {param: own for state in states for param, own in find_untied(state.swap).items()}
    names = {module: name for name, module in root.named_modules()}
    # The modules that hold each parameter, and the parameters that each module holds.
    places: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for module in group_around:
        for name, param in module._parameters.items():
            if param is not None and (handle_of(param) is not None or param in untied):
                prefix = names.get(module, type(module).__name__)  # a module of a group may be outside the root
                fqn = f"{prefix}.{name}" if prefix else name
                places.setdefault(param, {})[module] = fqn
    inside: dict[nn.Module, list[nn.Parameter]] = {}
    for param, at in places.items():
        for module in at:
            inside.setdefault(module, []).append(param)
    moves: list[Move] = []
    seen: set[nn.Parameter] = set()
    for param, at in places.items():
        if param in seen or (len(at) == 1 and _group_of(param) is group_around[next(iter(at))]):
            continue
        together = _together(param, places, inside)
        seen |= together.keys()
        modules = {module for sharded in together for module in places[sharded]}
        target = _innermost_around(modules, states, root)
        if target is None or any(_group_of(untied.get(sharded, sharded)) not in states for sharded in together):
            raise MisuseError(
                f"{_names_of_ties(together, places, states)}: these weights are tied across fully_shard groups, but no "
                "fully_shard'ed module whose forward runs contains all of these groups: call fully_shard() on "
                "their common parent too (and run that one first), or shard them in one call, fully_shard([a, b])"
            )
        moved = {sharded: fqn for sharded, fqn in together.items() if _group_of(sharded) is not target}
        for sharded, fqn in moved.items():
            place = handle_of(sharded)
            if place is not None and place[0].segments:
                raise MisuseError(
                    f"{fqn} is tied across fully_shard groups, or is in a module with a parameter that is, so it "
                    "must move to another group at this first forward; but flat_parameters() has already put it "
                    "into a flat view: call flat_parameters() after a first forward"
                )
            if sharded.grad is not None and sharded not in untied:
                raise MisuseError(
                    f"{fqn} is tied across fully_shard groups, or is in a module with a parameter that is, and has "
                    "a gradient, which would be lost when it moves to another group: call zero_grad() first"
                )
        if moved:
            kinds = {sharded: _kind_in(target, untied[sharded]) for sharded in moved if sharded in untied}
            moves.append(Move(moved, target, kinds))
    return moves


def _together(
    param: nn.Parameter, places: dict[nn.Parameter, dict[nn.Module, str]], inside: dict[nn.Module, list[nn.Parameter]]
) -> dict[nn.Parameter, str]:
    """The parameters that must be in the same group as ``param`` (a module shows those of one group), with names."""
    found: dict[nn.Parameter, str] = {}
    waiting = [param]
    while waiting:
        sharded = waiting.pop()
        if sharded not in found:
            found[sharded] = next(iter(places[sharded].values()))
            waiting += [other for module in places[sharded] for other in inside[module]]
    return found


def _names_of_ties(
    together: Iterable[nn.Parameter],
    places: dict[nn.Parameter, dict[nn.Module, str]],
    states: Sequence[_FSDPState],
) -> str:
    found: list[str] = []
    for sharded in together:
        is_elsewhere = _group_of(sharded) not in states
        if is_elsewhere or len(places[sharded]) > 1:
            found += places[sharded].values()
        if is_elsewhere:
            group, fqn = owner_of(sharded) or ("?", "?")
            found.append(f"{fqn} of the sharded {group}")
    return " and ".join(found)


def _innermost_around(modules: set[nn.Module], states: Sequence[_FSDPState], root: nn.Module) -> _FSDPState | None:
    """The innermost group that lies on every path from the root to ``modules``."""
    around = None
    for state in states:
        tops = state.live_modules()
        inside = {item for top in tops for item in top.modules()}
        # On every path: a module that is in several places may be called in each of them.
        if modules <= inside and modules.isdisjoint(_reachable(root, without=set(tops))):
            around = state
    return around


def _reachable(module: nn.Module, without: set[nn.Module]) -> set[nn.Module]:
    """The modules below ``module`` that can be reached without passing through those in ``without``."""
    found: set[nn.Module] = set()
    waiting = [module]
    while waiting:
        present = waiting.pop()
        if present not in found and present not in without:
            found.add(present)
            waiting += present.children()
    return found


def apply_moves(moves: Iterable[Move]) -> None:
    """Rebuild the flat parameters of the affected groups, with their present elements.

    Ranks: all ranks of the mesh; every parameter of these groups is all-gathered once.
    """
    moves = [*moves]
    # In the same order on every rank, which a set of parameters would not be.
    moved = dict.fromkeys(sharded for move in moves for sharded in move.sharded_params)
    donors = [group for group in dict.fromkeys(map(_group_of, moved)) if group is not None]
    # The old handles keep the sharded parameters' gradient hooks alive until the targets have them.
    before = [donor._handles for donor in donors]
    for donor in donors:  # all of them first: two groups may have exchanged parameters
        _plan_anew(donor, leaving=moved)
    for move in moves:
        arriving = [sharded for sharded in move.sharded_params if sharded not in move.untied]
        if arriving:
            _plan_anew(move.target, arriving=arriving)
        if move.untied:
            # In flat parameters of their own, so the others, and the optimizer state for them, stay as they are.
            _set_handles(move.target, move.target._handles, move.untied)
    del before


def _plan_anew(
    state: _FSDPState, leaving: Collection[nn.Parameter] = (), arriving: Sequence[nn.Parameter] = ()
) -> None:
    present = [sharded for handle in state._handles for sharded in handle.sharded_params if sharded not in leaving]
    _set_handles(state, [], {sharded: _kind_in(state, sharded) for sharded in (*present, *arriving)})


def _set_handles(
    state: _FSDPState, present: Sequence[FlatParamHandle], kinds: dict[nn.Parameter, ParameterKind]
) -> None:
    """Let a group have the flat parameters ``present``, and new ones for the parameters in ``kinds``."""
    names = {id(sharded): "?" for sharded in kinds}
    tops = state.live_modules()
    for i, top in reversed([*enumerate(tops)]):
        prefix = f"{i}." if len(tops) > 1 else ""  # as group_modules() has it: names must be unique in the group
        names |= {id(param): prefix + name for name, param in top.named_parameters() if id(param) in names}
    managed = []
    for sharded, kind in kinds.items():
        place = handle_of(sharded)
        # Experts stay on the mesh of the ranks that hold the same shard of them.
        mesh = place[0].mesh if place is not None and place[0].mesh.ranks() < state.mesh.ranks() else state.mesh
        managed.append(ManagedParameter(names[id(sharded)], sharded, kind=kind, mesh=mesh))
    options = state.options
    made = [
        shard_again(items, items[0].mesh, options.granularity, options.offload) for items in partition(managed, options)
    ]
    state.set_flat_params([*present, *made])
    prepare_swap(state)


def _kind_in(state: _FSDPState, sharded: nn.Parameter) -> ParameterKind:
    """The kind that a parameter gets in the group of ``state``."""
    place, group = handle_of(sharded), _group_of(sharded)
    assert place is not None and group is not None
    return place[0].kind.in_group(group.options.mp_policy, state.options.mp_policy)


def _group_of(sharded: nn.Parameter) -> _FSDPState | None:
    place = handle_of(sharded)
    return None if place is None else state_of(place[0])
