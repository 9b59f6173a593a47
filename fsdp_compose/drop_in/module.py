"""``FSDPModule``: FSDP2's methods on sharded modules, and ``isinstance()`` checks for them.

As in FSDP2, a sharded module's class becomes one derived from its own and from ``FSDPModule``, which here derives from
torch's class of this name: frameworks that ask for torch's find it, under any name. The methods call functions of the
core. Thin adapters provide the private attributes of FSDP2's states that other packages read."""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import new_class
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed import fsdp

from .._arguments import checked
from .._torch import data_parallelism_of_torch, fsdp2_mesh_info
from ..errors import MisuseError, MisuseRuntimeError, MisuseTypeError
from ..extension import UnshardHandle, _FSDPState, controls, get_state, states_to_run
from .custom_comms import GATHER, REDUCE, separate, set_comm

# ---- Adapters for the private attributes of FSDP2's states that other packages read.
#
# torch's pipelining (until 2.14) finishes a step through ``_state_ctx.all_states``, ``_fsdp_param_groups``,
# ``post_backward()`` and ``_root_post_backward_final_callback()``; later versions compare ``_comm_ctx``. verl sets
# ``_auto_reshard_after_forward`` and ``post_forward_mesh_info``, torchtitan ``_all_reduce_hook``. Any other attribute
# raises an AttributeError that names it, when it is read and when it is set.


class _Face:
    _module: nn.Module
    _state: _FSDPState

    def __init__(self, module: nn.Module) -> None:
        state = get_state(module)
        assert state is not None, "the module is sharded"
        vars(self).update(_module=module, _state=state)

    def __setattr__(self, name: str, value: object) -> None:
        # Each access makes a new adapter: what it stored would be lost without a word.
        own = getattr(type(self), name, None)
        if not isinstance(own, property) or own.fset is None:
            raise AttributeError(
                f"fsdp_compose does not have the attribute {name} of {type(self).__doc__} Setting it would have no "
                "effect: use the public methods of FSDPModule"
            )
        own.fset(self, value)


class StateFace(_Face):
    """FSDP2's ``FSDPState`` of one sharded module."""

    @property
    def _fsdp_param_groups(self) -> list[GroupFace]:
        return [GroupFace(self._module)] if self._state._handles else []

    @property
    def _fsdp_param_group(self) -> GroupFace | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _state_ctx(self) -> StateFace:
        return self

    @property
    def all_states(self) -> list[StateFace]:
        """The states of the module and of all modules below it."""
        return [StateFace(state.live_modules()[0]) for state, _ in states_to_run(self._module)]

    @property
    def _comm_ctx(self) -> object:
        """An object that models share if they share streams and buffers; here each root has its own."""
        return self._state if self._state.root is None else self._state.root

    @property
    def _is_root(self) -> bool | None:
        """``None`` before the first forward."""
        return None if self._state.root is None else self._state.is_root

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self._state.options.reshard_after_forward is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, is_automatic: bool) -> None:
        if is_automatic:
            self._state.set_options(reshard_after_forward=None)
        elif self._auto_reshard_after_forward:
            self._state.set_options(reshard_after_forward=True)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that backwards without gradient sync accumulated."""
        controls.reduce_as_set(self._module)


class GroupFace(_Face):
    """FSDP2's ``FSDPParamGroup`` of one sharded module."""

    def post_backward(self) -> None:
        """Do nothing: ``_root_post_backward_final_callback()`` follows and reduces all groups."""

    def reshard(self) -> None:
        controls.reshard(self._module)

    @property
    def mesh_info(self) -> Any:
        """The mesh, as FSDP2 describes it."""
        return fsdp2_mesh_info(self._state.mesh.mesh)

    @property
    def post_forward_mesh_info(self) -> Any:
        """``None`` if the group stays gathered after forward."""
        return None if self._state.options.reshard_after_forward is False else self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, mesh_info: Any) -> None:
        controls.set_reshard_after_forward(self._module, mesh_info is not None, recurse=False)

    @property
    def _all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        return self._state.options.reduction.hook

    @_all_reduce_hook.setter
    def _all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        controls.set_post_reduction_hook(self._module, hook, recurse=False)


# ---- ``FSDPModule``


_RESET_DROPS_GRADIENTS = hasattr(torch.distributed.fsdp, "GradientReductionHandle")  # torch >= 2.15


class GradientReductionHandle:
    """Result of ``finalize_backward(async_op=True)``, which reduces everything before it returns."""

    def wait(self) -> None:
        """Do nothing."""


class FSDPModule(fsdp.FSDPModule):
    """A module that ``drop_in.fully_shard`` was called on, with the methods of FSDP2's class of this name, which it
    derives from.

    Each method calls the function of ``fsdp_compose`` that its docstring names. Methods that this package has no use
    for do nothing or warn.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is FSDPModule:
            raise MisuseTypeError("FSDPModule cannot be instantiated: call fully_shard() on a module")
        return cls.__bases__[1](*args, **kwargs)  # a slice of a sharded container is a plain one

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, args, *state = cast(Any, super().__reduce_ex__(protocol))
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]  # typeshed lacks it
            return function, args, *state
        return _new, type(self).__bases__[1:], *state

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        _state(_module(self)).end_left()
        return super(fsdp.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]  # torch's looks for its own

    # ---- gathering and freeing parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """``fsdp_compose.unshard``. Not recursive. Ranks: all."""
        return controls.unshard(_module(self), async_op)

    def reshard(self) -> None:
        """``fsdp_compose.reshard``. Not recursive."""
        controls.reshard(_module(self))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """``fsdp_compose.set_reshard_after_forward``."""
        controls.set_reshard_after_forward(_module(self), reshard_after_forward, recurse=recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """``fsdp_compose.set_reshard_after_backward``."""
        controls.set_reshard_after_backward(_module(self), reshard_after_backward, recurse=recurse)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """``fsdp_compose.set_keep_unsharded_storage``."""
        controls.set_keep_unsharded_storage(_module(self), keep, recurse=recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers the parameters of this module's group. Not recursive. ``False`` saves an
        all-gather where no gradient depends on them (an embedding). A backward that reads them all the same raises.
        Ranks: all must set the same."""
        if not isinstance(unshard_in_backward, bool):
            raise MisuseTypeError(f"set_unshard_in_backward(): expected True or False, got {unshard_in_backward!r}")
        _state(_module(self)).set_options(gathers_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """``fsdp_compose.set_modules_to_forward_prefetch``."""
        controls.set_modules_to_forward_prefetch(_module(self), modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """``fsdp_compose.set_modules_to_backward_prefetch``."""
        controls.set_modules_to_backward_prefetch(_module(self), modules)

    # ---- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``fsdp_compose.set_requires_gradient_sync``, and ``fsdp_compose.set_requires_all_reduce`` with the same
        flag."""
        controls.set_requires_gradient_sync(_module(self), requires_gradient_sync, recurse=recurse)
        controls.set_requires_all_reduce(_module(self), requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """``fsdp_compose.set_requires_all_reduce``."""
        controls.set_requires_all_reduce(_module(self), requires_all_reduce, recurse=recurse)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """``fsdp_compose.set_gradient_divide_factor``. Not recursive."""
        controls.set_gradient_divide_factor(_module(self), factor, recurse=False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        warnings.warn("use set_gradient_divide_factor()", FutureWarning, stacklevel=3)
        controls.set_gradient_divide_factor(_module(self), factor, recurse=False)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """``fsdp_compose.set_force_sum_reduction_for_comms``. Not recursive."""
        controls.set_force_sum_reduction_for_comms(_module(self), enable, recurse=False)

    @checked()
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that no rank has used get a gradient of zeros, if backward reaches their group. Ranks
        may use different parameters either way."""
        controls.fill_unused(_module(self), reduce_scatter_unused_params, recurse=recurse)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """``fsdp_compose.set_post_reduction_hook``. Not recursive. With ``stream``, the hook runs on that stream, after
        the reduction and before later work on the gradient."""
        module = _module(self)
        if stream is not None:
            if _state(module).mesh.replicate_group is not None:
                raise MisuseError(
                    "set_all_reduce_hook(stream=...): on a mesh (replicate, shard) the hook runs on the reduction's "
                    "own stream: leave stream out"
                )
            hook = _on_stream(hook, stream)
        controls.set_post_reduction_hook(module, hook, recurse=False)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """``fsdp_compose.set_is_last_backward``: every backward is complete at its end."""
        controls.set_is_last_backward(_module(self), is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Do nothing: whether or not ``finalize_backward()`` follows, backwards reduce and reshard as set."""
        if not isinstance(enabled, bool):
            raise MisuseTypeError(f"set_manual_backward_finalization(): expected True or False, got {enabled!r}")

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients accumulated without gradient sync, then reshard, as the groups' flags say now.

        This is ``fsdp_compose.reduce_gradients``, except that it follows the flags: it reduces only groups set to
        synchronize gradients, and frees only groups set to reshard after backward.

        Ranks: all ranks that run this module.
        """
        module = _module(self)
        controls.reduce_as_set(module)
        for state, _ in states_to_run(module):
            if not state.options.keeps_after_backward():
                controls.reshard(state.live_modules()[0])
        return GradientReductionHandle() if async_op else None

    def reset_iter_state(self) -> None:
        """Drop all gradients below this root module, reduced or not, as torch 2.15 and later do; do nothing on older
        torch versions. The next forward discards an interrupted iteration, on all ranks together."""
        module = _module(self)
        state = _state(module)
        if state.root is not None and not state.is_root:
            raise MisuseRuntimeError(
                f"reset_iter_state(): {state.name} is not the root module: call it on the module whose forward begins "
                "an iteration"
            )
        if _RESET_DROPS_GRADIENTS:
            for below, _ in states_to_run(module):
                for handle in below._handles:
                    handle.drop_iteration(is_tainted=True)

    # ---- methods without effect: results are the same

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Do nothing: all-gathers wait for all earlier work on the compute stream."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing: reductions take buffers from a pool as needed."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise MisuseTypeError(
                f"set_reduce_scatter_max_input_buffers(): expected a number, got {max_input_buffers!r}"
            )
        if max_input_buffers < 1:
            raise MisuseError(f"set_reduce_scatter_max_input_buffers(): expected 1 or more, got {max_input_buffers}")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: prefetches are asynchronous if the backend is."""

    # ---- unsupported ways of communicating: same results, with a warning

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Warn: collectives use the parameters' own memory."""
        if enable:
            _without_effect("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Warn: collectives use the parameters' own memory."""
        _without_effect("set_symm_mem_for_comm")

    # ---- collectives of the user

    def set_custom_all_gather(self, comm: Any) -> None:
        """Let ``comm`` do the all-gathers of this module's group. Not recursive. Ranks: all.

        Flat parameters are copied into and out of the memory that ``comm`` allocates. Since it might round, nothing
        looks for writes to the unsharded parameters through ``.data`` in forward, which are lost."""
        set_comm(_module(self), GATHER, comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Let ``comm`` do the reduce-scatters of this module's group, in memory that it allocates. Not recursive.
        Ranks: all."""
        set_comm(_module(self), REDUCE, comm)

    @checked()
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Let reduce-scatters go over a process group of their own, so that a backend which does one collective of a
        group at a time can gather meanwhile. Ranks: all."""
        module = _module(self)
        for item in module.modules() if recurse else [module]:
            if isinstance(item, FSDPModule):
                separate(item, enable)

    def set_all_gather_input_fn(self, *args: Any, **kwargs: Any) -> None:
        """Raise: torch 2.15 does not have it yet, and flat parameters are gathered as a whole."""
        raise NotImplementedError(
            "set_all_gather_input_fn(): the parameters of a group are gathered as one flat tensor, so no function sees "
            "them one by one: use fsdp_compose.set_transport(), which sees the flat tensor, or a tensor subclass with "
            "fsdp_pre_all_gather()"
        )

    # ---- private, but read by other packages

    def _get_fsdp_state(self) -> StateFace:  # type: ignore[override]
        return StateFace(_module(self))


_METHODS = vars(FSDPModule).keys() - {*dir(nn.Module)}


def refuse_clash(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError if one of ``modules`` has an attribute of its own with the name of a method, or a class that has
    no subclasses."""
    for module in modules:
        # It has some, but fully_shard() refuses it for being data-parallel already.
        if data_parallelism_of_torch(module):
            continue
        # Not hasattr(): wrappers forward attributes of the module inside them.
        own = {*dir(type(module)), *vars(module), *vars(module).get("_modules", ()), *vars(module).get("_buffers", ())}
        taken = () if isinstance(module, FSDPModule) else _METHODS & own
        if taken:
            raise MisuseError(
                f"fully_shard(): a {type(module).__name__} has attributes of its own named {', '.join(sorted(taken))}, "
                "which clash with the methods that FSDP2 adds to a sharded module: rename them, or use "
                "fsdp_compose.fully_shard(), which adds no methods"
            )
        try:
            _class_for(type(module))
        except Exception as error:
            raise MisuseError(
                f"fully_shard(): making a subclass of {type(module).__name__}, as FSDP2 does, failed with "
                f"{type(error).__name__}: {error}. Let that class have subclasses, or use fsdp_compose.fully_shard(), "
                "which leaves classes as they are"
            ) from error


def add_methods(modules: Iterable[nn.Module]) -> None:
    """Make sharded modules instances of ``FSDPModule``."""
    for module in modules:
        for name in _METHODS & vars(module).keys():  # explanations of the own fully_shard()
            del module.__dict__[name]
        module.__class__ = _class_for(type(module))


def _class_for(cls: type[nn.Module]) -> type[nn.Module]:
    for known in cls.__subclasses__():
        if "_is_made" in vars(known):  # one whose making has failed may still be there
            return known
    names = {"__module__": cls.__module__}
    made: Any = new_class(f"FSDP{cls.__name__}", (FSDPModule, cls), exec_body=lambda namespace: namespace.update(names))
    made._is_made = True
    return made


def _new(cls: type[nn.Module]) -> nn.Module:
    """A module of that class that a copy is made of."""
    return object.__new__(_class_for(cls))


@checked()
def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Do nothing: all models on a process group already share one order of collectives.

    Raises:
        ValueError: one of ``modules`` is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise MisuseError(f"share_comm_ctx(): expected modules given to fully_shard(), got {module!r}")


def _module(self: FSDPModule) -> nn.Module:
    return cast(nn.Module, self)


def _state(module: nn.Module) -> Any:
    state = get_state(module)
    assert state is not None, "it has the methods"
    return state


def _on_stream(hook: Callable[[torch.Tensor], None], stream: torch.Stream) -> Callable[[torch.Tensor], None]:
    def run(gradient: torch.Tensor) -> None:
        current = torch.accelerator.current_stream(gradient.device)
        stream.wait_stream(current)
        with stream:
            hook(gradient)
        current.wait_stream(stream)

    return run


def _without_effect(method: str) -> None:
    why = "collectives use the parameters' own memory"
    warnings.warn(f"{method}() has no effect in fsdp_compose: {why}", stacklevel=4)
