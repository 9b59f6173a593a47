"""Settings of a sharded module, and explicit calls: ``no_sync``, ``unshard``, ``reshard``, prefetch lists.

Each function checks its arguments, changes the options of the groups concerned, and leaves the work to the runtime.
``register_forward_method`` is here too: it lets methods other than ``forward`` compute with a sharded module's
parameters. Users and ``drop_in`` call these functions; no lower wing imports this file."""

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

from .._arguments import checked
from ..errors import MisuseError, MisuseRuntimeError
from .group import BoundToModule, _FSDPState, contexts_of, get_state, own_state, states_for
from .runtime import enter_alone, leave_shown, reduce_accumulated, registered
from .runtime import reshard as _reshard


class UnshardHandle:
    """Result of ``unshard(module, async_op=True)``; ``wait()`` makes the parameters usable."""

    def __init__(self, state: _FSDPState) -> None:
        self._state: _FSDPState | None = state

    def wait(self) -> None:
        """Wait for the all-gather; a second call does nothing."""
        state, self._state = self._state, None
        if state is not None and state.root is not None:
            state.root.communicator.wait_for(state._handles)
            leave_shown(state)


@checked()
def unshard(module: nn.Module, async_op: bool = False, *, until_reshard: bool = False) -> UnshardHandle | None:
    """All-gather the parameters of ``module``'s group ahead of its forward.

    This only fills the memory of the unsharded parameters; the module's next forward uses and frees it as usual. Call
    it inside the outermost forward, ahead of the module's own. A group that is already unsharded when the outermost
    forward begins is gathered again, because parameters may have been edited in between (with ``until_reshard`` or
    after ``set_reshard_after_backward(False)``, only if the ranks have written to them).

    With ``until_reshard`` the group stays gathered through any number of forwards and backwards, until
    ``reshard(module)``. For example, one all-gather serves all chunks of a loss::

        unshard(model.head, until_reshard=True)
        for chunk in hidden.detach().requires_grad_().chunk(8):
            loss_of(model.head(chunk)).backward()
        reshard(model.head)

    Edits of the sharded parameters in the meantime take effect or raise, as inside ``keep_unsharded``.

    Ranks: all ranks of the mesh must call it, in the same order relative to their other collectives.

    Args:
        module: a module given to ``fully_shard``. Nested groups are not touched.
        async_op: return a handle at once instead of waiting.
        until_reshard: stay gathered until ``reshard(module)``.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
    """
    state = own_state(module, "unshard")
    if until_reshard and state.options.is_optional:
        raise MisuseError(
            f"unshard(until_reshard=True): the fully_shard group {state.name} is optional: it is gathered only on the "
            "ranks that run it, and only within one forward"
        )
    root = enter_alone(state, module)
    root.scheduler.unshard(root, state)
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


@checked()
def sync_optional_groups(module: nn.Module) -> None:
    """Help other ranks gather the optional groups (``fully_shard(optional=True)``) that they run, until all ranks have
    made this call.

    Call it inside forward before a collective of your own. Without it, this rank could wait in your collective for a
    rank that in turn waits for this one to take part in a gather::

        features = self.vision(images) if images is not None else None   # on some ranks
        sync_optional_groups(self)                                       # on all ranks
        dist.all_reduce(count)

    It does nothing if the model has no optional groups.

    Ranks: all ranks of the mesh, in the same order relative to the groups that are not optional.

    Args:
        module: any module given to ``fully_shard``, in a model whose forward is running.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
        RuntimeError: the ranks are at different points; another rank raised or did not arrive.
    """
    root = own_state(module, "sync_optional_groups").root
    if root is not None and (root.forward.depth or root.backward is not None):
        root.scheduler.serve_peers(root)


@checked()
def reshard(module: nn.Module) -> None:
    """Free the gathered parameters of ``module``'s group. Local: no communication.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``.
        RuntimeError: a forward or backward of the group is running.
    """
    state = own_state(module, "reshard")
    if state.progress.running_forwards or state.backward.active_uses:
        raise MisuseRuntimeError(f"reshard(): a forward or backward of the fully_shard group {state.name} is running")
    state.set_options(is_held=False)
    if state.root is not None:
        for handle in state._handles:
            handle.unsharded.keep_allocated(False)
        _reshard(state.root, state)


@checked()
@contextmanager
def keep_unsharded(module: nn.Module) -> Iterator[None]:
    """Inside this context, forwards without grad mode leave the parameters of all groups below ``module`` gathered for
    the next forward.

    Use it for generation, where otherwise the forward of every token would gather the whole model::

        with torch.no_grad(), keep_unsharded(model):
            for _ in range(num_tokens):
                ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)

    Every rank then holds the whole model in its compute dtype from the first forward until the end of the context, a
    call of ``reshard(module)``, or the end of a backward. Forwards under grad mode follow ``reshard_after_forward`` as
    usual.

    You may edit the sharded parameters inside the context, on all ranks: operations on them, on their views, their
    ``.data`` or flat views, steps of ``torch.optim`` optimizers, ``load_state_dict``, loading by
    ``torch.distributed.checkpoint``, ``summon_full_params`` and ``module.to()`` all take effect in the next forward. A
    write to a rank's local memory (``to_local()``) raises at the next forward of that rank. A write that bypasses
    torch's version counter (``.data`` of the result of ``to_local()``, NumPy, a kernel that is given an address) cannot
    be detected: call ``reshard()`` on the written groups afterwards, on all ranks.

    Ranks: all ranks of the mesh must enter and leave it at the same place in their programs. Local: no communication.

    Args:
        module: root of the tree to keep.

    Raises:
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    # An outer context keeps the others.
    states = [state for state in states_for(module, "keep_unsharded") if not state.options.keeps_unsharded]
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


@checked()
def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Set whether later backwards reduce gradients, or accumulate them unsharded and without communication.

    Unsharded accumulation keeps gradients of the whole group on every rank, in ``reduce_dtype`` (of a model that is
    whole on every rank, in the gradients' dtype if that is wider). The next backward that reduces includes the
    accumulated gradients.

    Ranks: all ranks must set the same value. Local: no communication.

    Args:
        module: root of the tree to set.
        requires_gradient_sync: ``True``: reduce; ``False``: accumulate.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    for state in states_for(module, "set_requires_gradient_sync", recurse):
        state.set_options(requires_gradient_sync=requires_gradient_sync)


@checked()
@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Inside this context, backward accumulates gradients without communication; see ``set_requires_gradient_sync``.

    Leaving the context restores the flags of all groups below ``module``, also after an exception.

    Raises:
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    with _option_within("no_sync", module, "requires_gradient_sync", False):
        yield


@checked()
def reduce_gradients(module: nn.Module) -> None:
    """Reduce gradients that earlier backwards accumulated without gradient sync or without all-reduce over replicas.

    Call it outside of any backward. It is meant for schedules that run many backwards in an order of their own
    (pipelines), where no backward is known to be the last::

        with no_sync(model):
            for chunk in batch.chunk(8):
                loss_of(model(chunk)).backward()
        reduce_gradients(model)
        optimizer.step()

    It issues one reduction for each flat parameter with gradients and one exchange between the ranks, as at the end of
    a backward. The flags of ``set_requires_gradient_sync`` and ``set_requires_all_reduce`` stay as they are.

    Ranks: all ranks that run ``module`` together; between iterations, or between the forwards and backwards of one.

    Args:
        module: the module whose forward begins an iteration, or a module that contains such modules.

    Raises:
        RuntimeError: a forward or backward is running; the ranks did different things.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    roots = contexts_of(states_for(module, "reduce_gradients"))
    options = [(state, state.options) for root in roots for state in root.live_states()]
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
    """``reduce_gradients()``, but only for the groups that are set to synchronize gradients.

    Ranks: all ranks that run ``module`` together.

    Raises:
        RuntimeError: a forward or backward is running; the ranks did different things.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    roots = contexts_of(states_for(module, "reduce_gradients"))
    for root in roots:
        if root.backward is not None or root.forward.depth:
            raise MisuseRuntimeError(f"reduce_gradients(): a forward or backward of {root.label} is running")
    for root in roots:
        reduce_accumulated(root)


@checked()
def set_functional_mode(module: nn.Module, is_functional: bool = True, *, recurse: bool = True) -> None:
    """Set whether later forwards gather parameters in a way that autograd can differentiate any number of times.

    In functional mode, double backward (``create_graph=True``: gradient penalties) and ``autograd.grad(loss,
    model.parameters())`` give the same results as for the unsharded model, as DTensors and averaged over the ranks like
    every gradient. Gathered parameters live until the graph is freed, as if the model were replicated for that long.
    Every backward reduces (``no_sync`` has no effect on it). Activation checkpointing must wrap whole groups. Forwards
    without grad mode do not change.

    Ranks: all ranks must set the same value. Local: no communication.

    Args:
        module: root of the tree to set.
        is_functional: ``True``: functional mode; ``False``: the default mode.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    for state in states_for(module, "set_functional_mode", recurse):
        state.set_options(is_functional=is_functional)


@checked()
@contextmanager
def functional_mode(module: nn.Module) -> Iterator[None]:
    """Inside this context, forwards of ``module`` run in functional mode (see ``set_functional_mode``).

    Their backward may run after the context. Leaving it restores the modes of all groups below ``module``, also after
    an exception::

        with functional_mode(critic):
            score = critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + (slope.norm() - 1) ** 2).backward()

    Raises:
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    with _option_within("functional_mode", module, "is_functional", True):
        yield


@checked()
def set_reshard_after_forward(module: nn.Module, reshard_after_forward: bool | int, *, recurse: bool = True) -> None:
    """Set ``reshard_after_forward`` (see ``fully_shard``) from the next forward on.

    It applies between a forward and its backward. After a forward without grad mode, parameters are freed anyway,
    because an edit before the next forward may leave no trace; see ``keep_unsharded``.

    Ranks: all ranks must set the same value. Local: no communication.

    Args:
        module: root of the tree to set.
        reshard_after_forward: a bool, or the number that the groups were made with.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: it is neither a bool nor a number.
        ValueError: it is a number, and a group was made with another number or with none; or there is no
            ``fully_shard`` group below ``module``.
    """
    _set_resharding("reshard_after_forward", module, reshard_after_forward, recurse)


@checked()
def set_reshard_after_backward(module: nn.Module, reshard_after_backward: bool | int, *, recurse: bool = True) -> None:
    """Set whether groups are freed after their backward or stay gathered for the next forward.

    Keeping them saves all-gathers at the cost of memory when gradients are accumulated over several batches. The next
    forward gathers a kept group again if the ranks have written to its sharded parameters (an optimizer's step). If
    only one rank wrote to its local memory, that forward raises. See ``keep_unsharded``.

    If you pass the number given to ``fully_shard(reshard_after_forward=...)``, the shards that these ranks keep
    between forward and backward are kept until the next optimizer step. Only the first gather after a step is then
    among all ranks; the others stay within these ranks.

    Ranks: all ranks must set the same value; the first forward compares it. Local: no communication.

    Args:
        module: root of the tree to set.
        reshard_after_backward: ``True`` (the default): free them; ``False``: keep them; or the number.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: it is neither a bool nor a number.
        ValueError: it is a number, and a group was made with another number or with none; or there is no
            ``fully_shard`` group below ``module``.
    """
    _set_resharding("reshard_after_backward", module, reshard_after_backward, recurse)


@checked(factor="a positive number or None")
def set_gradient_divide_factor(module: nn.Module, factor: float | None, *, recurse: bool = True) -> None:
    """Divide the sum of the ranks' gradients by ``factor`` instead of the number of ranks, from the next reduction on.

    It applies to the reductions of the groups. Gradients of terms computed from sharded parameters by DTensor
    operations (``p.norm()``), and gradients that ``autograd.grad()`` returns in the default mode, remain averages.

    Ranks: all ranks must set the same value; the first forward compares it. Local: no communication.

    Args:
        module: root of the tree to set.
        factor: a positive number; ``None``: the number of ranks, which makes gradients averages.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        ValueError: ``factor`` is not a positive, finite number; or there is no ``fully_shard`` group below
            ``module``.
    """
    if factor is not None and not (isinstance(factor, (int, float)) and 0 < factor < float("inf")):
        raise MisuseError(f"set_gradient_divide_factor(): expected a positive number or None, got {factor!r}")
    _set_reduction("set_gradient_divide_factor", module, recurse, divide_factor=factor)


@checked()
def set_force_sum_reduction_for_comms(module: nn.Module, forces_sum: bool = True, *, recurse: bool = True) -> None:
    """Let the reduction sum and divide afterwards, even if the backend could average. Some backends avoid a copy only
    for sums.

    Ranks: all ranks must set the same value; the first forward compares it. Local: no communication.

    Args:
        module: root of the tree to set.
        forces_sum: the flag; the default is ``False``.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: the flag is not a bool.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    _set_reduction("set_force_sum_reduction_for_comms", module, recurse, forces_sum=forces_sum)


def fill_unused(module: nn.Module, fills_unused: bool, *, recurse: bool = True) -> None:
    """Set whether parameters that no rank has used get a gradient of zeros, if backward reaches their group.

    Ranks: all ranks must set the same value; the first forward compares it. Local: no communication.

    Raises:
        TypeError: the flag is not a bool.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    _set_reduction("set_reduce_scatter_unused_params", module, recurse, fills_unused=fills_unused)


@checked()
def set_post_reduction_hook(
    module: nn.Module, hook: Callable[[torch.Tensor], None] | None, *, recurse: bool = True
) -> None:
    """Call ``hook(gradient)`` on each reduced gradient before it is added to ``.grad``.

    A hook may add a further reduction (for example over replicas), noise or compression. FSDP2 calls this function
    ``set_all_reduce_hook``.

    Ranks: all ranks must set a hook, or none; the first forward compares that. All ranks call hooks in the same order,
    so a hook may communicate. The call itself is local.

    Args:
        module: root of the tree to set.
        hook: called once for each flat parameter and reduction, with this rank's shard of the averaged gradient: 1-D,
            contiguous, in the reduce dtype, padded with zeros; it changes the gradient in place. ``None``: no hook.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: ``hook`` is not callable.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    _set_reduction("set_post_reduction_hook", module, recurse, hook=hook)


set_all_reduce_hook = set_post_reduction_hook  # FSDP2's name for it


@checked()
def set_modules_to_forward_prefetch(module: nn.Module, modules: Sequence[nn.Module] | None) -> None:
    """Choose the groups to prefetch when a forward of ``module``'s group begins.

    By default that is the group that came next in the last iteration. Name several modules to prefetch further ahead.
    Groups that are prefetched and not used are freed when the outermost forward ends, so a wrong list costs only time
    and memory.

    Ranks: all ranks must set the same modules. Local: no communication.

    Args:
        module: a module given to ``fully_shard``.
        modules: other modules given to ``fully_shard``, with the same root; those with another root are skipped.
            ``None``: the default.

    Raises:
        ValueError: ``fully_shard`` was not called on one of the modules.
    """
    _set_prefetch("set_modules_to_forward_prefetch", "forward_prefetch", module, modules)


@checked()
def set_modules_to_backward_prefetch(module: nn.Module, modules: Sequence[nn.Module] | None) -> None:
    """Choose the groups to prefetch when backward reaches ``module``'s group.

    Arguments and errors are those of ``set_modules_to_forward_prefetch``. Groups that are prefetched and not used are
    freed when that backward ends.
    """
    _set_prefetch("set_modules_to_backward_prefetch", "backward_prefetch", module, modules)


@checked()
def set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    """Set whether later backwards average gradients over replicas too, or only over the shard group.

    On a mesh (replicate, shard), or with ``set_replicas``, a backward without all-reduce keeps the reduce-scattered
    gradients, in the wider of the reduce dtype and the gradients' dtype, until a backward with all-reduce. Accumulation
    over several batches then costs one all-reduce and the memory of a shard, where ``no_sync`` needs the memory of the
    whole model. Until then gradients cannot be read, as inside ``no_sync``, and ``zero_grad()`` drops the kept ones. It
    has no effect without replicas or in functional mode, where every backward reduces.

    Ranks: all ranks must set the same value. Local: no communication.

    Args:
        module: root of the tree to set.
        requires_all_reduce: the flag; the default is ``True``.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: the flag is not a bool.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    for state in states_for(module, "set_requires_all_reduce", recurse):
        state.set_options(requires_all_reduce=requires_all_reduce)


@checked()
def set_keep_unsharded_storage(module: nn.Module, keeps_storage: bool, *, recurse: bool = True) -> None:
    """Set whether groups keep the memory of their unsharded parameters while they are sharded.

    The unsharded parameters then never change their addresses, as CUDA graphs require. Every group then permanently
    takes the memory of its unsharded parameters. Reading them while they are sharded still raises, if torch can detect
    the access.

    Ranks: each rank may choose for itself. Local: no communication.

    Args:
        module: root of the tree to set.
        keeps_storage: the flag; the default is ``False``. ``False`` releases the kept memory.
        recurse: set it for all groups below ``module``, not only its own.

    Raises:
        TypeError: the flag is not a bool.
        NotImplementedError: the class of a parameter implements its own all-gather, into memory of its own.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    states = states_for(module, "set_keep_unsharded_storage", recurse)
    for handle in [handle for state in states for handle in state._handles]:
        gathered_by = handle.kind.codec.gathered_by
        if keeps_storage and gathered_by is not None:
            raise NotImplementedError(
                f"set_keep_unsharded_storage(): {handle.name_of(0)} is a {gathered_by}, which "
                "implements its own all-gather, into memory of its own"
            )
    for state in states:
        state.set_options(keeps_storage=keeps_storage)


@checked()
def set_is_last_backward(module: nn.Module, is_last_backward: bool, *, recurse: bool = True) -> None:
    """Accepted for FSDP2 compatibility. It has no effect, because every backward here finishes its reductions.

    Raises:
        TypeError: the flag is not a bool.
        ValueError: there is no ``fully_shard`` group below ``module``.
    """
    states_for(module, "set_is_last_backward", recurse)


def _set_resharding(option: str, module: nn.Module, value: bool | int, recurse: bool) -> None:
    states = states_for(module, f"set_{option}", recurse)
    for state in states:
        made_with = state.mesh.post_forward_size
        if not isinstance(value, bool) and value != made_with:
            raise MisuseError(
                f"set_{option}(..., {value}): the fully_shard group {state.name} was made with "
                f"reshard_after_forward={'no number' if made_with is None else made_with}: call "
                f"fully_shard(..., reshard_after_forward={value})"
            )
    for state in states:
        state.set_options(**{option: value})


def _set_reduction(call: str, module: nn.Module, recurse: bool, **changes: Any) -> None:
    for state in states_for(module, call, recurse):
        state.set_options(reduction=replace(state.options.reduction, **changes))


def _set_prefetch(call: str, option: str, module: nn.Module, modules: Sequence[nn.Module] | None) -> None:
    state = own_state(module, call)
    for item in modules or ():
        own_state(item, call)
    # Weak: a model is freed with its last reference.
    refs = None if modules is None else tuple([weakref.ref(item) for item in modules])
    state.set_options(**{option: refs})


@contextmanager
def _option_within(call: str, module: nn.Module, name: str, value: bool) -> Iterator[None]:
    """Set an option of all groups below ``module``, and restore it at the end of the context."""
    before = [(state, getattr(state.options, name)) for state in states_for(module, call)]
    try:
        for state, _ in before:
            state.set_options(**{name: value})
        yield
    finally:
        for state, was in before:
            state.set_options(**{name: was})


# ---- Methods other than ``forward`` that use a sharded module's parameters: ``generate``, ``encode``, ...


@checked()
def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the parameters of ``module``'s group while its method ``method_name`` runs, as around ``forward``.

    Without it, a method that is called directly sees the sharded parameters, and an operation that mixes them with
    plain tensors raises. Calls of ``module`` itself and of its submodules inside the method work as usual, and backward
    works through the method.

    Ranks: this call is local. All ranks of the mesh must call the method itself, as they call forward.

    Args:
        module: a module. Nothing happens if ``fully_shard`` was not called on it, so the same code works for unsharded
            models.
        method_name: the name of a callable attribute of ``module``.

    Raises:
        ValueError: ``module`` has no such method.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise MisuseError(f"register_forward_method(): a {type(module).__name__} has no method {method_name!r}")
    if get_state(module) is None or isinstance(module.__dict__.get(method_name), _ForwardMethod):
        return
    is_bound = isinstance(method, MethodType) and method.__self__ is module
    module.__dict__[method_name] = _ForwardMethod(module, method.__func__ if is_bound else method, is_bound)


register_fsdp_forward_method = register_forward_method  # FSDP2's name for it


class _ForwardMethod(BoundToModule):
    """Replaces a method in an instance's ``__dict__``, where it shadows the method of the class.

    Args:
        module: the instance.
        function: the wrapped callable.
        is_bound: pass the instance as first argument; ``False`` for static methods and other callable attributes.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], is_bound: bool) -> None:
        super().__init__(module)
        functools.update_wrapper(self, function)
        self._function, self._is_bound = function, is_bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        pre_forward, post_forward = registered
        args, kwargs = pre_forward(module, args, kwargs)
        output = None
        try:
            output = self._function(module, *args, **kwargs) if self._is_bound else self._function(*args, **kwargs)
        except BaseException:
            # It finds the exception by itself, as when torch calls it after a forward.
            post_forward(module, args, None)
            raise
        replaced = post_forward(module, args, output)
        return output if replaced is None else replaced

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> _ForwardMethod:
        function = self._function if self._is_bound else copy.deepcopy(self._function, memo)
        return _ForwardMethod(module, function, self._is_bound)
