"""What users may set on a sharded module, and explicit calls: ``no_sync``, ``unshard``, ``reshard``, prefetch lists.

Each function checks its arguments, changes the options of the groups concerned, and leaves the work to the runtime.
``register_forward_method`` is here too: it lets methods other than ``forward`` compute with a sharded module's
parameters. Called by users and by ``drop_in``; no file of a lower wing imports this one."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn as nn

from ..group import BoundToModule, Root, _FSDPState, get_state, states_to_run
from ..runtime import (
    enter_alone,
    post_forward,
    pre_forward,
    reduce_accumulated,
    serve_peers,
    unshard_in_rounds,
    wait_for_unshard,
)
from ..runtime import reshard as _reshard
from ..runtime import unshard as _unshard


class UnshardHandle:
    """Result of ``unshard(module, async_op=True)``; ``wait()`` makes the parameters usable."""

    def __init__(self, state: _FSDPState) -> None:
        self._state: _FSDPState | None = state

    def wait(self) -> None:
        """Wait for the all-gather; a second call does nothing."""
        state, self._state = self._state, None
        if state is not None and state.root is not None:
            wait_for_unshard(state.root, state)


def unshard(module: nn.Module, async_op: bool = False, *, until_reshard: bool = False) -> UnshardHandle | None:
    """All-gather the parameters of ``module``'s group ahead of its forward.

    Only storage is materialised: the module's next forward uses it, and frees it as it always does. Meant for use
    inside the outermost forward, ahead of a module's own: what is unsharded when the outermost forward begins is
    gathered again, since parameters may have been edited in between (after ``set_reshard_after_backward(False)``, as
    with ``until_reshard``, only if the ranks have written to them).

    With ``until_reshard`` the group stays gathered over any number of forwards and backwards, until
    ``reshard(module)``: one all-gather for all chunks of a loss::

        unshard(model.head, until_reshard=True)
        for part in hidden.detach().requires_grad_().chunk(8):
            loss_of(model.head(part)).backward()
        reshard(model.head)

    Edits of the sharded parameters meanwhile are followed, or raise, as inside ``keep_unsharded``.

    Ranks: all ranks of the mesh must call it, in the same order among their other collectives.

    Args:
        module: a module given to ``fully_shard``. Nested groups are not touched.
        async_op: return at once, with a handle to wait for.
        until_reshard: stay gathered until ``reshard(module)``.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
    """
    state = _own_state(module, "unshard")
    if until_reshard and state.options.is_optional:
        raise ValueError(
            f"unshard(until_reshard=True): the fully_shard group {state.name} is optional, so that it is gathered on "
            "some ranks only, and only within one forward"
        )
    root = enter_alone(state, module)
    if root.rounds is None:
        _unshard(root, state)
    else:
        unshard_in_rounds(root, state)
    if until_reshard:
        state.set_options(is_held=True)
    if state.options.follows_writes():
        for item in state._handles:
            item.unsharded.be_left(not item.unsharded.never_freed)
    handle = UnshardHandle(state)
    if async_op:
        return handle
    handle.wait()
    return None


def sync_optional_groups(module: nn.Module) -> None:
    """Take part in gathering optional groups (``fully_shard(optional=True)``) that other ranks run, until all ranks are
    here: call it before a collective of your own inside forward, in which this rank would wait for one that still
    waits for it::

        features = self.vision(images) if images is not None else None   # on some ranks
        sync_optional_groups(self)                                             # on all
        dist.all_reduce(count)

    Does nothing where there are no optional groups.

    Ranks: all ranks of the mesh, in the same order among the groups that are not optional.

    Args:
        module: any module given to ``fully_shard``, of a model whose forward is running.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
        RuntimeError: the ranks are at different points; another one has raised, or did not come.
    """
    root = _own_state(module, "sync_optional_groups").root
    if root is not None and (root.forward.depth or root.backward is not None):
        serve_peers(root)


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters of ``module``'s group. Local: no communication.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
        RuntimeError: a forward or backward of the group is running.
    """
    state = _own_state(module, "reshard")
    if state.progress.running_forwards or state.backward.active_uses:
        raise RuntimeError(f"reshard(): a forward or backward of the fully_shard group {state.name} is running")
    state.set_options(is_held=False)
    if state.root is not None:
        for handle in state._handles:
            handle.unsharded.keep_allocated(False)
        _reshard(state.root, state)


@contextmanager
def keep_unsharded(module: nn.Module) -> Iterator[None]:
    """Within this context forwards without grad mode leave the parameters of all groups below ``module`` gathered, for
    the next forward: generation, where one forward a token would gather the whole model each time::

        with torch.no_grad(), keep_unsharded(model):
            for _ in range(num_tokens):
                ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)

    Every rank then holds the whole model in its compute dtype, from the first forward to the end of the context, or to
    ``reshard(module)``, or to the end of a backward. At the end of the context it is freed. Forwards under grad mode
    keep what ``reshard_after_forward`` says.

    Edits inside the context are followed: what the ranks write to the sharded parameters (operations on them, on views
    and ``.data`` of them, on flat views, steps of ``torch.optim`` optimizers, ``load_state_dict``, loading by
    ``torch.distributed.checkpoint``, ``summon_full_params``, ``module.to()``) shows in the next forward. A write to a
    rank's local memory (``to_local()``) raises at the next forward of that rank. A write that torch does not count
    (``.data`` of what ``to_local()`` returned, NumPy, a kernel that is given an address) cannot be noticed: call
    ``reshard()`` after it, on the groups in question, on all ranks.

    Ranks: all ranks of the mesh must enter and leave it at the same place of their programs. Local: no communication.

    Args:
        module: root of the tree to keep.
    """
    # The others are kept by an outer context.
    states = [state for state in _states(module, recurse=True) if not state.options.keeps_unsharded]
    for state in states:
        state.set_options(keeps_unsharded=True)
    try:
        yield
    finally:
        for state in states:
            state.set_options(keeps_unsharded=False)
            is_at_work = state.progress.running_forwards or state.backward.active_uses
            if state.root is not None and not is_at_work and not state.options.is_held:
                _reshard(state.root, state)


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether the backwards to come reduce gradients, or accumulate them unsharded, without communication.

    Unsharded accumulation holds ``reduce_dtype`` gradients of the whole group on every rank. The backward that
    reduces again includes what was accumulated.

    Ranks: all ranks must set the same. Local: no communication.

    Args:
        module: root of the tree to set.
        requires_gradient_sync: the flag.
        recurse: set it for all groups below ``module``, not only its own.
    """
    for state in _states(module, recurse):
        state.set_options(requires_gradient_sync=requires_gradient_sync)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Within this context backward accumulates gradients without communication; see ``set_requires_gradient_sync``.

    The flags of all groups below ``module`` are restored at the end, also after an exception.
    """
    with _option_within(module, "requires_gradient_sync", False):
        yield


def reduce_gradients(module: nn.Module) -> None:
    """Reduce, outside of any backward, what backwards without gradient sync, or without the average over replicas,
    have accumulated: for schedules that run many backwards in an order of their own (pipelines), in which none is
    known to be the last::

        with no_sync(model):
            for part in batch.chunk(8):
                loss_of(model(part)).backward()
        reduce_gradients(model)
        optimizer.step()

    One reduction for each flat parameter with gradients, and one exchange between the ranks, as at the end of a
    backward. The flags of ``set_requires_gradient_sync`` and ``set_requires_all_reduce`` are left as they are.

    Ranks: all ranks that run ``module`` together. Between iterations, or between the forwards and backwards of one.

    Args:
        module: a module whose forward begins iterations, or one above such modules.

    Raises:
        RuntimeError: a forward or backward is running; the ranks have done different things.
    """
    options = [(state, state.options) for root in _roots_of(module) for state in root.live_states()]
    try:
        for state, _ in options:
            state.set_options(requires_gradient_sync=True, requires_all_reduce=True)
        reduce_as_set(module)
    finally:
        for state, before in options:
            state.set_options(
                requires_gradient_sync=before.requires_gradient_sync, requires_all_reduce=before.requires_all_reduce
            )


def reduce_as_set(module: nn.Module) -> None:
    """``reduce_gradients()``, of the groups that are set to synchronise gradients. Ranks: all that run ``module``
    together. RuntimeError: a forward or backward is running, or the ranks have done different things."""
    roots = _roots_of(module)
    for root in roots:
        if root.backward is not None or root.forward.depth:
            raise RuntimeError(f"reduce_gradients(): a forward or backward of {root.label} is running")
    for root in roots:
        reduce_accumulated(root)


def set_functional_mode(module: nn.Module, is_functional: bool = True, *, recurse: bool = True) -> None:
    """Whether the forwards to come gather parameters in a way that autograd can differentiate any number of times.

    In functional mode double backward (``create_graph=True``: gradient penalties) and ``autograd.grad(loss,
    model.parameters())`` give what they give for the unsharded model, averaged over the ranks like every gradient, as
    DTensors. Gathered parameters live until the graph is freed, as if the model were replicated for that long; every
    backward reduces (``no_sync`` has no effect on it). Activation checkpointing must wrap whole groups. Forwards
    without grad mode are as always.

    Ranks: all ranks must set the same. Local: no communication.

    Args:
        module: root of the tree to set.
        is_functional: the mode.
        recurse: set it for all groups below ``module``, not only its own.
    """
    for state in _states(module, recurse):
        state.set_options(is_functional=is_functional)


@contextmanager
def functional_mode(module: nn.Module) -> Iterator[None]:
    """Within this context forwards of ``module`` run in functional mode (see ``set_functional_mode``); their backward
    may come later. The modes of all groups below ``module`` are restored at the end, also after an exception::

        with functional_mode(critic):
            score = critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + (slope.norm() - 1) ** 2).backward()
    """
    with _option_within(module, "is_functional", True):
        yield


def set_reshard_after_forward(module: nn.Module, reshard_after_forward: bool | int, *, recurse: bool = True) -> None:
    """Set ``reshard_after_forward`` (see ``fully_shard``) from the next forward on, the same on all ranks.

    It is about the time between a forward and its backward. After a forward without grad mode parameters are freed all
    the same, for an edit before the next one may leave no trace: see ``keep_unsharded``.

    Args:
        module: root of the tree to set.
        reshard_after_forward: a bool; or the number that the groups were made with.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: it is neither.
        ValueError: it is a number, and a group was made with another one, or with none.
    """
    _set_resharding("reshard_after_forward", module, reshard_after_forward, recurse)


def set_reshard_after_backward(module: nn.Module, reshard_after_backward: bool | int, *, recurse: bool = True) -> None:
    """Whether groups are freed after their backward, or stay gathered for the next forward: in accumulation over
    several batches, memory for all-gathers.

    A group that has stayed is gathered again in the next forward if the ranks have written to its sharded parameters
    (an optimizer's step); a write to a rank's local memory alone raises there. See ``keep_unsharded``.

    With the number that ``fully_shard(reshard_after_forward=...)`` had, the parts that stay between forward and
    backward stay until a step, too: all gathers but the first one after a step are among the ranks that share parts.

    Ranks: all ranks must set the same; compared at the first forward. Local: no communication.

    Args:
        module: root of the tree to set.
        reshard_after_backward: ``True`` at first: free them; ``False``: they stay; or the number.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: it is neither a bool nor a number.
        ValueError: it is a number, and a group was made with another one, or with none.
    """
    _set_resharding("reshard_after_backward", module, reshard_after_backward, recurse)


def set_gradient_divide_factor(module: nn.Module, factor: float | None, *, recurse: bool = True) -> None:
    """Divide the sum of the ranks' gradients by ``factor`` in place of the number of ranks, from the next reduction on.

    The reductions of the groups follow it. Gradients of terms that are computed from sharded parameters by DTensor
    operations (``p.norm()``), and those that ``autograd.grad()`` returns in the default mode, stay averages.

    Ranks: all ranks must set the same; compared at the first forward. Local: no communication.

    Args:
        module: root of the tree to set.
        factor: a positive number; ``None``: the number of ranks, so that gradients are averages.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        ValueError: ``factor`` is not a positive, finite number.
    """
    if factor is not None and not (isinstance(factor, (int, float)) and 0 < factor < float("inf")):
        raise ValueError(f"set_gradient_divide_factor(): expected a positive number or None, got {factor!r}")
    _set_reduction(module, recurse, divide_factor=factor)


def set_force_sum_reduction_for_comms(module: nn.Module, forces_sum: bool = True, *, recurse: bool = True) -> None:
    """Let the reduction sum, and divide after it, also where the backend could average: some communicate without a copy
    only so.

    Ranks: all ranks must set the same; compared at the first forward. Local: no communication.

    Args:
        module: root of the tree to set.
        forces_sum: the flag; ``False`` at first.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: the flag is not a bool.
    """
    _check_flag("set_force_sum_reduction_for_comms", forces_sum)
    _set_reduction(module, recurse, forces_sum=forces_sum)


def set_post_reduction_hook(
    module: nn.Module, hook: Callable[[torch.Tensor], None] | None, *, recurse: bool = True
) -> None:
    """Call ``hook(gradient)`` on each reduced gradient, before it is added to ``.grad``: another reduction (over
    replicas, say), noise, compression. The part of FSDP2's ``set_all_reduce_hook``.

    Ranks: all ranks must set one, or none; compared at the first forward. A hook that communicates is called on all
    ranks in the same order. Local by itself.

    Args:
        module: root of the tree to set.
        hook: called once for each flat parameter and reduction, with this rank's part of the averaged gradient: 1-D,
            contiguous, in the reduce dtype, with padding of zeros, to be changed in place. ``None``: no hook.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: ``hook`` is not callable.
    """
    if hook is not None and not callable(hook):
        raise TypeError(f"set_post_reduction_hook(): expected a function or None, got {hook!r}")
    _set_reduction(module, recurse, hook=hook)


set_all_reduce_hook = set_post_reduction_hook  # FSDP2's name for it


def set_modules_to_forward_prefetch(module: nn.Module, modules: Sequence[nn.Module] | None) -> None:
    """Gather the groups of ``modules`` ahead when a forward of ``module``'s group begins, in place of the group that
    came next in the last iteration; several, to gather further ahead. ``None``: as before.

    What is gathered ahead and not used is freed when the outermost forward ends: a wrong list costs time and memory,
    and nothing else.

    Ranks: all ranks must set the same. Local: no communication.

    Args:
        module: a module given to ``fully_shard``.
        modules: others, of the same root; those of another one are left out.

    Raises:
        ValueError: ``fully_shard`` was not called on one of the modules.
    """
    _set_prefetch("set_modules_to_forward_prefetch", "forward_prefetch", module, modules)


def set_modules_to_backward_prefetch(module: nn.Module, modules: Sequence[nn.Module] | None) -> None:
    """As ``set_modules_to_forward_prefetch``, when backward comes to ``module``'s group; what is not used is freed when
    that backward ends."""
    _set_prefetch("set_modules_to_backward_prefetch", "backward_prefetch", module, modules)


def set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    """Whether the backwards to come average gradients over replicas too, or over the shard group alone.

    On a mesh (replicate, shard) a backward without it reduce-scatters, and keeps what this rank gets, in the reduce
    dtype, until one that averages: accumulation over several batches costs one all-reduce, and the memory of a shard,
    where ``no_sync`` takes that of the whole model. Meanwhile gradients cannot be read, as inside ``no_sync``, and
    ``zero_grad()`` drops what was kept. Without effect where there are no replicas, and in functional mode, where every
    backward reduces.

    Ranks: all ranks must set the same. Local: no communication.

    Args:
        module: root of the tree to set.
        requires_all_reduce: the flag; ``True`` at first.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: the flag is not a bool.
    """
    _check_flag("set_requires_all_reduce", requires_all_reduce)
    for state in _states(module, recurse):
        state.set_options(requires_all_reduce=requires_all_reduce)


def set_keep_unsharded_storage(module: nn.Module, keeps_storage: bool, *, recurse: bool = True) -> None:
    """Whether unsharded parameters keep their memory while they are sharded, so that it has one address for good: for
    what remembers addresses (CUDA graphs). It costs the memory of the whole of each group.

    Reading them while they are sharded raises as before, where torch can tell.

    Ranks: each may set it for itself. Local: no communication.

    Args:
        module: root of the tree to set.
        keeps_storage: the flag; ``False`` at first. Setting it to ``False`` gives back what is kept.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: the flag is not a bool.
        NotImplementedError: a parameter is of a class that gathers itself, into memory of its own.
    """
    _check_flag("set_keep_unsharded_storage", keeps_storage)
    states = _states(module, recurse)
    for handle in [handle for state in states for handle in state._handles]:
        if keeps_storage and handle.kind.extension is not None:
            raise NotImplementedError(
                f"set_keep_unsharded_storage(): {handle.name_of(0)} is a {handle.kind.extension.cls.__name__}, which "
                "gathers itself, into memory of its own"
            )
    for state in states:
        state.set_options(keeps_storage=keeps_storage)


def set_is_last_backward(module: nn.Module, is_last_backward: bool, *, recurse: bool = True) -> None:
    """Whether the next backward is the last one of several: taken as by FSDP2, and without effect, for here every
    backward is complete at its end. A flag that is no bool is a TypeError."""
    _check_flag("set_is_last_backward", is_last_backward)
    _states(module, recurse)


def _set_resharding(option: str, module: nn.Module, value: bool | int, recurse: bool) -> None:
    if not isinstance(value, int):  # a bool is an int
        raise TypeError(f"set_{option}(): expected True, False or a number of ranks, got {value!r}")
    states = _states(module, recurse)
    for state in states:
        made_with = state.mesh.part_size
        if not isinstance(value, bool) and value != made_with:
            raise ValueError(
                f"set_{option}(..., {value}): the fully_shard group {state.name} was made with "
                f"{'no number of ranks that hold parts' if made_with is None else made_with}: call "
                f"fully_shard(..., reshard_after_forward={value})"
            )
    for state in states:
        state.set_options(**{option: value})


def _check_flag(call: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{call}(): expected True or False, got {flag!r}")


def _set_reduction(module: nn.Module, recurse: bool, **changes: Any) -> None:
    for state in _states(module, recurse):
        state.set_options(reduction=replace(state.options.reduction, **changes))


def _set_prefetch(call: str, option: str, module: nn.Module, modules: Sequence[nn.Module] | None) -> None:
    state = _own_state(module, call)
    for item in modules or ():
        _own_state(item, call)
    refs = None if modules is None else tuple([weakref.ref(item) for item in modules])
    state.set_options(**{option: refs})


@contextmanager
def _option_within(module: nn.Module, name: str, value: bool) -> Iterator[None]:
    """Set an option of all groups below ``module`` for a while."""
    before = [(state, getattr(state.options, name)) for state in _states(module, recurse=True)]
    try:
        for state, _ in before:
            state.set_options(**{name: value})
        yield
    finally:
        for state, was in before:
            state.set_options(**{name: was})


def _own_state(module: nn.Module, call: str) -> _FSDPState:
    state = get_state(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ValueError(f"{call}(): fully_shard() was not called on this {type(module).__name__}")
    return state


def _roots_of(module: nn.Module) -> list[Root]:
    states = _states(module, recurse=True)
    return list(dict.fromkeys(state.root for state in states if state.root is not None))


def _states(module: nn.Module, recurse: bool) -> list[_FSDPState]:
    if recurse:
        return [state for state, _ in states_to_run(module)]
    return [_own_state(module, "recurse=False")]


# ---- Methods other than ``forward`` that compute with a sharded module's parameters: ``generate``, ``encode``, ...


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the parameters of ``module``'s group while its method ``method_name`` runs, as around ``forward``.

    Without it, a method that is called directly sees the sharded parameters, and an operation that mixes them with
    plain tensors raises. Calls of ``module`` itself and of its submodules inside the method work as always; the method
    can be trained through.

    Ranks: the call is local; a call of the method is like a forward, to be made by all ranks of the mesh.

    Args:
        module: a module; nothing happens if ``fully_shard`` was not called on it, so that code can be shared with
            unsharded models.
        method_name: an attribute of ``module`` that can be called.

    Raises:
        ValueError: ``module`` has no such method.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_forward_method(): a {type(module).__name__} has no method {method_name!r}")
    if get_state(module) is None or isinstance(module.__dict__.get(method_name), _ForwardMethod):
        return
    if isinstance(method, MethodType) and method.__self__ is module:
        module.__dict__[method_name] = _ForwardMethod(module, method.__func__, is_bound=True)
    else:
        module.__dict__[method_name] = _ForwardMethod(module, method, is_bound=False)


register_fsdp_forward_method = register_forward_method  # FSDP2's name for it


class _ForwardMethod(BoundToModule):
    """Stands in an instance's ``__dict__`` before the method of its class.

    Args:
        module: the instance.
        function: what is called, with the instance as first argument if ``is_bound``: not for static methods and other
            callable attributes.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], is_bound: bool) -> None:
        super().__init__(module)
        functools.update_wrapper(self, function)
        self._function, self._is_bound = function, is_bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        args, kwargs = pre_forward(module, args, kwargs)
        output = None
        try:
            output = self._function(module, *args, **kwargs) if self._is_bound else self._function(*args, **kwargs)
        except BaseException:
            post_forward(module, args, None)
            raise
        replaced = post_forward(module, args, output)
        return output if replaced is None else replaced

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> _ForwardMethod:
        function = self._function if self._is_bound else copy.deepcopy(self._function, memo)
        return _ForwardMethod(module, function, self._is_bound)
