"""Every private torch API that the package uses, in one place.

Each was checked on torch 2.12 to 2.15; ``tests/test_private_torch.py`` fails by name when one of them moves.
No other file of the package may import a name with a leading underscore from torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import os
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import count
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
import torch.nn as nn
from torch._C._dynamo import eval_frame as _eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor as _FunctionalTensor
from torch.autograd import forward_ad as _forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.distributed import _state_dict_utils
from torch.distributed import distributed_c10d as _distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable.contract import RegistryItem as _RegistryItem
from torch.distributed._composable_state import _State as ComposableState
from torch.distributed._functional_collectives import AsyncCollectiveTensor as _AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint import _consolidate_hf_safetensors as _consolidation
from torch.distributed.checkpoint import planner_helpers as _planning
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import _validate_global_plan as plan_errors
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh as _DeviceMesh
from torch.distributed.fsdp import _fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info as fsdp2_mesh_info
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as _tensor_utils
from torch.distributed.tensor import placement_types as _placement_types
from torch.distributed.tensor._api import _FromTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as _shape_and_offset
from torch.distributed.tensor.placement_types import Shard as _Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.utils.stateless import _functional_call
from torch.optim.optimizer import _foreach_supported_types as _types_of_optimizers
from torch.utils import checkpoint as _checkpoint
from torch.utils._foreach_utils import _foreach_supported_types as _types_of_clipping
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as _tree_leaves
from torch.utils._pytree import tree_map_only as _tree_map_only

from .errors import MisuseError

_F = TypeVar("_F", bound=Callable[..., Any])
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

__all__ = [  # what only other files use; the rest needs no list
    "DispatchMode",
    "IncompatibleKeys",
    "NormPartial",
    "StorageInfo",
    "TensorMeta",
    "dedup_save_plans",
    "fsdp2_mesh_info",
    "plan_errors",
]

# -1 outside of backward, else the number of the autograd graph task that runs on this thread.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

foreach_copy_ = torch._foreach_copy_
foreach_add_ = torch._foreach_add_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

# While entered, reading an attribute of a tensor subclass does not look for a ``__torch_function__`` of its class: not
# half the host time, in passes over thousands of parameters. DTensors use none.
PlainAttributes = torch._C.DisableTorchFunctionSubclass

# While entered, an operation on a wrapper is that of the wrapper, without its class: changes of its shape in place.
without_dispatch = torch._C._DisableTorchDispatch

AllgatherOptions = _c10d.AllgatherOptions
AllreduceOptions = _c10d.AllreduceOptions
ReduceScatterOptions = _c10d.ReduceScatterOptions


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """``tensor.register_hook(hook)`` for a non-leaf, without the handle to remove it: half the host time."""
    # Read before hooks are set: for a view whose base was written to, this makes the node anew, and torch 2.13 crashes
    # if there were hooks by then.
    grad_fn = tensor.grad_fn
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    hooks[_hook_ids.__next__()] = hook


# Keys that no ``RemovableHandle`` uses: those count upwards from 0.
_hook_ids = count(-1, -1)


def set_leaf_hooks(
    leaf: torch.Tensor, on_gradient: Callable[[torch.Tensor], None], after_accumulation: Callable[[torch.Tensor], None]
) -> None:
    """Make these the hooks that autograd runs before and after it adds to ``leaf.grad``."""
    # Not by register_hook(): after swap_tensors() it would have no effect (see renew_hooks).
    leaf._backward_hooks = OrderedDict({next(_hook_ids): on_gradient})
    leaf._post_accumulate_grad_hooks = OrderedDict({next(_hook_ids): after_accumulation})


def renew_hooks(leaf: torch.Tensor) -> None:
    """Let autograd call the hooks of a leaf that ``swap_tensors()`` has given other contents: that exchanges autograd's
    own record of the hooks but not the Python attributes (torch 2.13), so none would run, not even later ones."""
    if leaf._backward_hooks is not None:
        leaf._backward_hooks = leaf._backward_hooks
    if leaf._post_accumulate_grad_hooks is not None:
        leaf._post_accumulate_grad_hooks = leaf._post_accumulate_grad_hooks


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks that ``register_hook`` has put on a leaf."""
    return [*(tensor._backward_hooks or {}).values()]


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The hooks that ``register_post_accumulate_grad_hook`` has put on a leaf."""
    return [*(tensor._post_accumulate_grad_hooks or {}).values()]


def intercept_backward_inputs(run: Callable[[Callable[..., Any], tuple[Any, ...], bool, bool], Any]) -> None:
    """From now on ``backward(inputs=...)`` and ``autograd.grad()`` call ``run(original, inputs, allow_unused,
    accumulates)``, where ``original(inputs, allow_unused)`` does what torch does."""
    original = torch.autograd._engine_run_backward

    def run_backward(
        outputs: Any,
        gradients: Any,
        retain: Any,
        create: Any,
        inputs: Any,
        allow_unreachable: bool,
        *,
        accumulate_grad: bool,
    ) -> Any:
        def with_inputs(inputs: Any, allow_unreachable: bool) -> Any:
            return original(
                outputs, gradients, retain, create, inputs, allow_unreachable, accumulate_grad=accumulate_grad
            )

        backwards.count += 1
        if current_graph_task_id() == -1:
            backwards.num_outermost += 1
        if not inputs:  # a plain backward(), for which this costs two calls in Python
            return with_inputs(inputs, allow_unreachable)
        return run(with_inputs, inputs, allow_unreachable, accumulate_grad)

    skip_frame(run_backward)  # of autograd.grad() where a graph breaks
    torch.autograd._engine_run_backward = cast(Any, run_backward)


class _Backwards:
    """How many backwards have begun in this process since they are intercepted, and how many of them in no other."""

    count = num_outermost = 0


backwards = _Backwards()


# Whether a tensor has no memory of its own, but tensors inside that have.
is_wrapper: Callable[[object], bool] = _is_traceable_wrapper_subclass


def is_fake(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this class have shapes, but no elements and no memory."""
    return issubclass(kind, _FakeTensor)


def make_wrapper(
    cls: type[torch.Tensor], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Make a tensor of a wrapper class without calling the class, and without the tensors inside."""
    make = torch.Tensor._make_wrapper_subclass
    return make(cls, torch.Size(shape), strides=tuple(stride), dtype=dtype, device=device)


def is_part_of_multi_grad_hook(hook: Callable[[Any], Any]) -> bool:
    """Whether a hook is one of those that ``register_multi_grad_hook(mode="all")`` puts on each tensor."""
    name = getattr(hook, "__qualname__", "")
    return getattr(hook, "__module__", "") == "torch.autograd.graph" and name.startswith("register_multi_grad_hook.")


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the autograd graph task that is running now ends without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_CHECKPOINT_FRAMES = {
    (_checkpoint.__file__, "backward"),  # of CheckpointFunction: use_reentrant=True
    (_checkpoint.__file__, "recompute_fn"),  # of use_reentrant=False
}
_ENGINE_CODE = _engine_run_backward.__code__


def is_checkpoint_recomputing() -> bool:
    """Whether the innermost backward that runs has called ``torch.utils.checkpoint`` to recompute, and that the
    caller."""
    # Nothing else tells. What the backward has called is above the frame that started the engine, or, if the engine has
    # a thread of its own, above none.
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _ENGINE_CODE:
            return False
        if (code.co_filename, code.co_name) in _CHECKPOINT_FRAMES:
            return True
        frame = frame.f_back
    return False


def skip_frame(function: _F) -> _F:
    """Tell Dynamo never to trace the frame of ``function`` nor the frames below it, and to break the graph where it is
    called. Return ``function``."""
    skip_top_frame(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "fsdp_compose hook"  # type: ignore[attr-defined]
    return function


def skip_top_frame(function: _F) -> _F:
    """Tell Dynamo to begin no graph with the frame of ``function``, nor with those below it; as a part of a graph that
    has begun, it is traced. Return ``function``."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def functional_collectives() -> Any:
    """Collectives as operations that return their result, which ``wait_tensor`` waits for: compilers know them."""
    return torch.ops._c10d_functional


# Of operations that are collectives: with the group as an object, with its name, and DTensor's own.
namespaces_of_collectives = ("c10d", "_c10d_functional", "_dtensor")


def compute_local_shape_and_global_offset(
    shape: tuple[int, ...], mesh: _DeviceMesh, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """torch's function, also inside ``with torch.device("meta")``: it computes with tensors, and reads them."""
    with torch.device("cpu"):
        return _shape_and_offset(shape, mesh, placements)


class WorkOfGraph(_c10d.Work):
    """A collective in flight, for ``register_work``; ``kept`` lives as long."""

    def __init__(self, wait: Callable[[], Any], kept: object) -> None:
        super().__init__()
        self._wait, self._kept = wait, kept

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait()
        self._kept = None
        return True


# (tensor, work): a functional ``wait_tensor`` of the tensor waits for the work.
register_work: Callable[[torch.Tensor, _c10d.Work], Any] = _c10d._register_work


def define_operations(
    namespace: str, operations: Mapping[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]]
) -> torch.library.Library:
    """Define operators by their schemas, each with what it does and what it does without elements. They go with the
    returned object."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema, (function, fake) in operations.items():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return library


def lower_as_collective(operations: Sequence[Any]) -> None:
    """Tell Inductor, which is imported, that operators issue what ``wait_tensor`` waits for."""
    # Their inputs are read until then, so their memory must not be reused before.
    from torch._inductor import ir, lowering

    def lower(operation: Any) -> None:
        def lowered(tensor: Any, *constants: Any) -> Any:
            kernel: Any = ir._CollectiveKernel.create_out_of_place(operation, tensor, *constants)
            return ir.TensorBox.create(kernel)

        lowering.add_layout_constraint(operation, lowering.constrain_to_fx_strides)
        lowering.register_lowering(operation)(lowered)

    for operation in operations:
        lower(operation)


def was_written_in_graph(tensor: torch.Tensor) -> bool:
    """Whether code that is being captured has written to a tensor that it has made. ``False`` while nothing is
    captured."""
    # AOTAutograd knows the memory, so it also sees writes through .data, which no version counts. Dynamo does not.
    if isinstance(tensor, _FunctionalTensor):
        was_mutated: Callable[[torch.Tensor], bool] = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
        return bool(tensor._version) or was_mutated(tensor.elem)
    return isinstance(tensor, _FakeTensor) and bool(tensor._version)


def in_compiled_autograd() -> bool:
    """Whether the backward that runs is one that compiled autograd has captured, or is capturing."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled or module.in_compiled_autograd_region)


# An object for each attempt of Dynamo to trace a frame, while it does.
tracing_attempt: Callable[[], object] = torch._guards.TracingContext.try_get


def call_after_compilation(function: Callable[[], None]) -> None:
    """Call ``function`` whenever Dynamo has compiled something, before it runs; until Dynamo is reset. What it raises
    reaches whoever has called what was compiled. Only while tracing."""
    handler = torch._dynamo.callback.callback_handler
    if any(getattr(known, "function", None) is function for known in handler.end_callbacks):
        return

    def callback(_args: Any) -> None:
        try:
            function()
        except BaseException:  # the handler forgets to count down
            count = "_CompilationCallbackHandler__pending_callbacks_counter"
            setattr(handler, count, getattr(handler, count) - 1)
            raise

    callback.function = function  # type: ignore[attr-defined]
    handler.register_end_callback(callback)


def process_group_of(value: Any) -> dist.ProcessGroup:
    """The process group that is an argument of an operation, in one of its forms."""
    if isinstance(value, str):
        return _distributed_c10d._resolve_process_group(cast(Any, value))
    return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)


def change_modules_while_traced(function: Callable[..., None], *args: Any) -> None:
    """Call ``function``, inside a graph that Dynamo traces, without the check that refuses side effects within
    activation checkpointing: for changes that are undone there, or repeated as they were. Only while tracing."""
    torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)


def mark_constant(function: _F) -> _F:
    """Let Dynamo call ``function`` while it traces, and take the result, of plain constants, for the same in all calls
    of the graph. Without importing Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Whether a transform of ``torch.func`` (grad, vmap, jvp, ...) runs on this thread. A look at the stack of transforms
# would make one, which autograd then copies with every node of every graph.
in_transform: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappers that ``torch.func`` transforms have put around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """For tensors of ours: whatever mode the user's code is in (inference mode, a transform of ``torch.func``, a
    dispatch mode) concerns them not, when they are made, and when they are computed with."""
    is_plain = not (torch.is_inference_mode_enabled() or in_transform() or num_dispatch_modes())
    if is_plain:
        yield
        return
    with torch.inference_mode(False), torch.no_grad(), without_modes():
        with temporarily_clear_interpreter_stack() if in_transform() else contextlib.nullcontext():
            yield


def in_forward_ad() -> bool:
    """Whether forward-mode differentiation is on: ``torch.autograd.forward_ad.dual_level``, ``torch.func.jvp``."""
    return _forward_ad._current_level >= 0


_CODE_OF_FUNCTIONAL_CALL = _functional_call.__code__


def is_in_functional_call(since: FrameType | None = None, num_skipped: int = 0) -> bool:
    """Whether ``torch.func.functional_call()`` is on the stack: other tensors stand in parameter slots for a while.

    Args:
        since: what has called this frame, or a caller of it, does not count.
        num_skipped: so many frames, from the caller's on, are known to be none.
    """
    # Each frame that Python code sees must be made an object first, so the known ones are skipped, not compared.
    frame: FrameType | None = sys._getframe(1 + num_skipped)
    while frame is not None and frame is not since:
        if frame.f_code is _CODE_OF_FUNCTIONAL_CALL:
            return True
        frame = frame.f_back
    return False


def is_swapping_tensors() -> bool:
    """Whether ``torch.utils.swap_tensors()`` is on the stack."""
    # It looks at the node that accumulates a gradient, to mark it as out of use.
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not torch.utils.swap_tensors.__code__:
        frame = frame.f_back
    return frame is not None


# Whether a profiler runs that takes ranges (``torch.profiler.record_function``).
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class Shown(torch.Tensor):
    """Stands for ``tensor`` in a call of ``torch.distributed`` that dispatch modes and profilers see, and that does
    nothing: a collective of such tensors is done at once. Everything else works on ``tensor``."""

    tensor: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Shown:
        shown: Shown = torch.Tensor._make_subclass(cls, tensor)  # of the same memory
        shown.tensor = tensor
        return shown

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            done = _c10d.FakeWork().boxed()
            return done if len(func._schema.returns) == 1 else (args[0], done)
        args, kwargs = _tree_map_only(Shown, lambda shown: shown.tensor, (args, kwargs or {}))
        return _tree_map_only(torch.Tensor, Shown, func(*args, **kwargs))


def has_saved_tensors_hooks() -> bool:
    """Whether hooks for saved tensors are set (``torch.autograd.graph.saved_tensors_hooks``, by checkpoints too)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# The operator of which another one is an overload.
overload_packet = operator.attrgetter("_overloadpacket")


def storage_use_counter(storage: torch.UntypedStorage) -> Callable[[], int]:
    """A function that counts the tensors and Python storage objects that refer to the memory behind ``storage``, this
    object included; to be called only while it exists."""
    return functools.partial(torch._C._storage_Use_Count, storage._cdata)


def preserved_versions(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Within this context, writes to ``tensors`` do not count."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def same_storage(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    """Whether both are the same storage; unlike their addresses this can be asked of one that refuses access."""
    return a._cdata == b._cdata


# A number that no other storage has while this one lives.
storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


@contextlib.contextmanager
def watched_storages(
    resized: Callable[[torch.UntypedStorage], None],
    exchanged: Callable[[torch.UntypedStorage, torch.UntypedStorage], None],
) -> Iterator[None]:
    """Within, hear of each storage that Python has resized, and of each two that have exchanged their memory: no
    dispatch mode does. Of bound methods that are kept, those are heard that were bound within."""
    cls: Any = torch.UntypedStorage
    resize, exchange = cls.resize_, getattr(cls, "_swap_data_ptr_", None)

    def resize_(self: torch.UntypedStorage, size: int) -> None:
        resize(self, size)
        resized(self)

    def exchange_(self: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        assert exchange is not None
        exchange(self, other)
        exchanged(self, other)

    cls.resize_ = resize_
    if exchange is not None:
        cls._swap_data_ptr_ = exchange_
    try:
        yield
    finally:
        del cls.resize_
        if exchange is not None:
            del cls._swap_data_ptr_


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others on the CPU."""
    # Dispatch modes see those others instead, except where autograd is off altogether (inference mode).
    keys = torch._C.DispatchKey
    has_own = func.has_kernel_for_dispatch_key(keys.CPU)
    return not has_own and func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)


def memory_exchange(a: torch.UntypedStorage, b: torch.UntypedStorage) -> Callable[[], Any]:
    """A function that exchanges the memory of two storages, of which one is empty, and which of them refuses access.
    What tensors over them see changes; no tensor, view or graph has to be made anew."""
    return functools.partial(a._swap_data_ptr_, b)  # type: ignore[attr-defined]


def refuse_access(storage: torch.UntypedStorage, error: str) -> bool:
    """Let every kernel, and everything else that asks for the address of ``storage``, get a RuntimeError, until another
    one takes that over by ``memory_exchange``. Where torch has a function for it (builds with CUDA) the error says
    ``error``.

    Returns:
        Whether this torch can.
    """
    offsets = _access_flags()
    if offsets is None or not hasattr(storage, "_swap_data_ptr_"):
        return False
    set_message = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if set_message is not None:
        set_message(storage._cdata, error)
    _set_flags(storage, offsets, 1)
    return True


def _set_flags(storage: torch.UntypedStorage, offsets: tuple[int, int], value: int) -> None:
    for offset in offsets:
        ctypes.c_ubyte.from_address(storage._cdata + offset).value = value


@cache
def _access_flags() -> tuple[int, int] | None:
    """Where a storage keeps "some check is on" and "no access at all", as offsets in bytes."""

    def changed_by(setter: Callable[[torch.Tensor], None]) -> list[int]:
        tensor = torch.zeros(1)
        storage = tensor.untyped_storage()
        before = ctypes.string_at(storage._cdata, _STORAGE_BYTES)
        setter(tensor)
        after = ctypes.string_at(storage._cdata, _STORAGE_BYTES)
        return [i for i in range(_STORAGE_BYTES) if before[i] != after[i]]

    # Only builds with CUDA let Python set the second flag. All builds let it set the flags on either side of it, so
    # their places are found by setting them, and the flag must lie in between.
    try:
        mutable = changed_by(torch._C._set_throw_on_mutable_data_ptr)
        warned = changed_by(torch._C._set_warn_deprecated_on_mutable_data_ptr)
    except AttributeError:
        return None
    if len(mutable) != 2 or len(warned) != 2 or warned != [mutable[0], mutable[1] + 2]:
        return None
    offsets = (mutable[0], mutable[1] + 1)
    # That is a guess about another library's memory, so it is tried out: it is used only if every kind of access is
    # refused now, and works again afterwards.
    tensor, other = torch.ones(4), torch.ones(4)
    storage = tensor.untyped_storage()
    _set_flags(storage, offsets, 1)
    accesses: list[Callable[[], Any]] = [
        lambda: tensor + 1, lambda: tensor @ other, lambda: tensor.add_(1), tensor.data_ptr, tensor.tolist,
    ]  # fmt: skip
    is_refused = True
    for access in accesses:
        with contextlib.suppress(RuntimeError):
            access()
            is_refused = False
    _set_flags(storage, offsets, 0)
    return offsets if is_refused and (tensor + 1).tolist() == [2.0] * 4 else None


_STORAGE_BYTES = 72  # of a c10::StorageImpl, that are looked through; it has more


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers of ``module`` itself that its state dict leaves out."""
    return module._non_persistent_buffers_set


def notice_optimizers(notice: Callable[[torch.optim.Optimizer], None]) -> bool:
    """From now on call ``notice`` with each optimizer that is made, copied or unpickled, when it has no parameters yet.
    Returns whether this process may have some already."""
    optimizer = torch.optim.Optimizer
    original = optimizer.__new__

    # Not in the constructor, which a user's class may leave out.
    def new(cls: type[torch.optim.Optimizer], *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        made = original(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        notice(made)
        return made

    optimizer.__new__ = new  # type: ignore[method-assign, assignment]
    classes: list[type] = [optimizer]
    for cls in classes:  # grows
        classes += cls.__subclasses__()
    # torch's constructor marks the step() of a class; other people's classes may leave it out.
    are_others = any(cls.__module__.partition(".")[0] != "torch" for cls in classes)
    return are_others or any(hasattr(vars(cls).get("step"), "hooked") for cls in classes)


def loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.load_state_dict()`` is torch's own, which casts state to the dtype of its parameter."""
    cls, base = type(optimizer), torch.optim.Optimizer
    names = ("load_state_dict", "_process_value_according_to_param_policy")
    return all(getattr(cls, name) is getattr(base, name) for name in names)


def loads_as_torch_module(module: nn.Module, known_hook: Callable[..., Any]) -> bool:
    """Whether ``module`` itself takes from a state dict what is named like its parameters, buffers and extra state, and
    nothing else: it has no hook before loading but the known one, and no ``_load_from_state_dict()`` of its own."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    is_own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return not is_own and all(hook is known_hook for hook in hooks)


def saves_as_torch_module(module: nn.Module) -> bool:
    """Whether ``module`` itself puts its parameters, buffers and extra state into a state dict, each as it is, under
    their own names: it has no ``_save_to_state_dict()`` of its own. (Hooks run before and after that.)"""
    is_own = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    return not is_own and "_save_to_state_dict" not in module.__dict__


def hook_saved_first(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call ``hook(module, state_dict, prefix, metadata)`` when ``module.state_dict()`` has its own entries, before the
    hooks of others."""
    handle = module.register_state_dict_post_hook(hook)
    cast("OrderedDict[int, Any]", module._state_dict_hooks).move_to_end(handle.id, last=False)


def versions_of(state_dict: Any) -> dict[str, Any]:
    """The notes of ``module.state_dict()`` next to the values, by the path of each submodule: the version of its
    format, by which ``_load_from_state_dict()`` of some modules decides how to read. Empty if there is none."""
    return getattr(state_dict, "_metadata", None) or {}


def with_versions(state_dict: dict[str, Any], versions: dict[str, Any]) -> dict[str, Any]:
    """The state dict in the form that ``load_state_dict()`` takes versions from."""
    noted = OrderedDict(state_dict)
    noted._metadata = versions  # type: ignore[attr-defined]
    return noted


def composable_registry(module: nn.Module) -> dict[str, Any]:
    """Names of the composable APIs applied to ``module``; empty when there are none."""
    # Not by attribute: a wrapper may pass look-ups on to the module that it wraps.
    return module.__dict__.get(REGISTRY_KEY) or {}


def composable_states(module: nn.Module) -> dict[Any, Any]:
    """The states that composable APIs keep on ``module``, by API function; empty when there are none."""
    return module.__dict__.get(STATE_KEY) or {}


def add_composable_state(modules: Sequence[nn.Module], function: Callable[..., Any], state: ComposableState) -> None:
    """Register ``function``, a composable API, with one state on modules to which it was not applied yet."""
    # As contract() does, which besides lists all names below the modules, before and after, and compares them.
    item = _RegistryItem()
    for module in modules:
        module.__dict__.setdefault(STATE_KEY, OrderedDict())[function] = state
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[function.__name__] = item


def data_parallelism_of_torch(module: nn.Module) -> str:
    """Which of torch's own implementations reduces the gradients below ``module``, because it was applied to this very
    module; empty if none does."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel"
    if isinstance(module, torch.distributed.fsdp.FullyShardedDataParallel):
        return "torch's FullyShardedDataParallel (FSDP1)"
    # Not its class, which drop_in gives modules too.
    if any(isinstance(state, fsdp2._fully_shard.FSDPState) for state in composable_states(module).values()):
        return "torch's fully_shard() (FSDP2)"
    return "torch's replicate()" if "replicate" in composable_registry(module) else ""


_WRAPPERS = {
    cls.__init__.__code__: cls.__name__
    for cls in (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel)
}


def wrapper_under_construction() -> tuple[str, nn.Module] | None:
    """If the constructor of one of torch's data-parallel wrappers is running: its name, and the module to wrap."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in _WRAPPERS:
        frame = frame.f_back
    return None if frame is None else (_WRAPPERS[frame.f_code], frame.f_locals["module"])


def wrapped_child(module: nn.Module) -> str | None:
    """The name of the child that ``module`` has taken the place of, if it is a wrapper of torch's (data parallel,
    compiled, checkpointed), or says so itself, by the method whose name ``torch.distributed.checkpoint`` knows."""
    if hasattr(type(module), "_fqn_modifiers"):
        hidden: str | None = next(iter(module._fqn_modifiers().values()), None)  # type: ignore[operator]
        return hidden
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module"
    if isinstance(module, CheckpointWrapper):
        return "_checkpoint_wrapped_module"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and without it nothing is compiled
    return "_orig_mod" if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def is_shard_of_rows(placement: object) -> bool:
    """Whether a stock placement shards dim 0, within what other mesh dimensions leave or not."""
    return isinstance(placement, (_Shard, StridedShard)) and placement.dim == 0


def rows_within(num_slices: int) -> Any:
    """The stock placement that shards the rows of each of so many slices, which another mesh dimension has made."""
    return StridedShard(0, split_factor=num_slices) if num_slices > 1 else _Shard(0)


default_store: Callable[[], dist.Store] = _distributed_c10d._get_default_store


def group_device_types(group: dist.ProcessGroup) -> set[str]:
    """The device types that ``group`` has a backend for."""
    return {device.type for device in group._device_types}


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The time after which collectives of ``group`` give up."""
    return group_timeout_reader(group)()


def group_timeout_reader(group: dist.ProcessGroup) -> Callable[[], timedelta]:
    """A function that returns ``group_timeout(group)`` as it is then, without holding the group."""
    # It is called for every message: what it returns runs no Python code.
    for device_type in sorted(group_device_types(group)):
        options = getattr(group._get_backend(torch.device(device_type)), "options", None)
        if getattr(options, "_timeout", None) is not None:
            return functools.partial(getattr, options, "_timeout")  # options are changed in place
    return functools.partial(_distributed_c10d._get_default_timeout, dist.Backend(dist.get_backend(group)))


def set_group_timeout(timeout: timedelta) -> None:
    """From now on collectives of the default process group give up after ``timeout``."""
    set_timeout = getattr(dist, "set_timeout", None) or _distributed_c10d._set_pg_timeout  # public since torch 2.14
    set_timeout(timeout)


def finalizes_gradients() -> bool:
    """Whether the pipeline schedule that is calling should reduce gradients in this step: ``finalize_gradients=`` of
    torch 2.15."""
    # Schedules act on it only for FSDP2's modules, and do not pass it to stages, so it is read from their frame.
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        schedule = frame.f_locals.get("self")
        if isinstance(schedule, _PipelineSchedule):
            return bool(getattr(schedule, "_finalize_gradients", True))
        frame = frame.f_back
    return True


def fake_store() -> dist.Store:
    """What ``init_process_group("fake", store=...)`` takes: one process plays a rank of many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    return FakeStore()


def make_gloo_group(group: dist.ProcessGroup, store: dist.Store) -> dist.ProcessGroup:
    """A gloo group over the ranks of ``group``, which alone make it, and meet in ``store``: one that is new and theirs.
    Two ranks are connected when they first send to each other, which both must do then (torch 2.13). Remember which
    are, for ``close_gloo_connections``."""
    # Not by dist.new_group(use_local_synchronization=True), which makes the name from the number of groups that a rank
    # is in (torch 2.13): ranks in different numbers of groups wait for each other without end.
    gloo = cast(Any, _c10d.ProcessGroupGloo)
    options = gloo._Options()
    options._timeout = group_timeout(group)
    options._threads = 1  # of collectives: messages need none
    # The device that gloo's own choice falls on, or the first that the user names for it. Lazy: ranks that never talk
    # cost neither descriptors nor time.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        options._devices = [gloo.create_device(interface=interface, lazy_init=True)]
    else:
        options._devices = [gloo.create_default_device(lazy_init=True)]
    backend = gloo(store, group.rank(), group.size(), options)
    made = dist.ProcessGroup(store, group.rank(), group.size())
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


def _connected_ranks(group: dist.ProcessGroup, known: Sequence[int] | None) -> Sequence[int]:
    """The other ranks to which this one has connections: all, or the ``known`` ones."""
    return [rank for rank in range(group.size()) if rank != group.rank()] if known is None else known


def make_group_of(
    ranks: tuple[int, ...], name: str, timeout: timedelta, like: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """A process group over ``ranks`` of the default one, in their order, which alone make it, of the backends that
    ``like`` has, else on gloo; ``name``: new, and theirs. ``torch.distributed`` knows it, and destroys it with all
    others."""
    # See make_gloo_group() for why not by new_group(use_local_synchronization=True).
    rank, backend = dist.get_rank(), dist.Backend("gloo")
    if like is not None:
        backend = dist.Backend(_distributed_c10d._world.pg_map[like][0])
    group, _ = _distributed_c10d._new_process_group_helper(
        len(ranks), ranks.index(rank), [*ranks], backend, default_store(), cast(Any, name), timeout=timeout
    )
    _distributed_c10d._world.pg_group_ranks[group] = {item: i for i, item in enumerate(ranks)}
    return cast(dist.ProcessGroup, group)


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether ``torch.distributed`` does not know ``group``: it was destroyed, or made past it."""
    return group not in _distributed_c10d._world.pg_map


def close_gloo_connections(group: dist.ProcessGroup, connected: Sequence[int] | None = None) -> None:
    """Close the connections of this rank in ``group``, if they are gloo's, so that ranks that wait for it hear of it.
    ``connected``: in a ``make_gloo_group`` group, the ranks that it has sent to and received from."""
    # gloo closes a connection when an operation on it is not done in time; abort() leaves it open (torch 2.13).
    backend = gloo_messages(group)
    for rank in _connected_ranks(group, connected):
        if backend is not None:
            with contextlib.suppress(RuntimeError):  # dead, closed, or now too late
                backend.recv([torch.empty(1)], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def is_gloo_connection_closed(group: dist.ProcessGroup, rank: int, connected: Sequence[int] | None = None) -> bool:
    """Whether ``rank`` is known to have gone; never, if the connections of ``group`` are not gloo's. ``connected``: as
    for ``close_gloo_connections``."""
    backend = gloo_messages(group)
    if backend is None or rank not in _connected_ranks(group, connected):
        return False
    if connected is None and os.environ.get("TORCH_GLOO_LAZY_INIT"):  # there might be none yet
        return False
    return has_closed(group, rank)


def has_closed(group: dist.ProcessGroup, rank: int) -> bool:
    """``is_gloo_connection_closed`` where there is, or was, a connection of gloo's to ``rank``."""
    # gloo refuses to begin to receive over a connection that the other side has closed. If it is open, a receive that
    # is begun and dropped does no harm (torch 2.13).
    try:
        backend = gloo_messages(group)
        if backend is not None:
            backend.recv([torch.empty(1)], rank, _UNUSED_TAG)
    except RuntimeError:
        return True
    return False


def stop_waiting_for(message: Any) -> bool:
    """Let the thread that waits for a message of gloo's go on: ``wait()`` returns ``False`` there. Whether that could
    be done; it cannot for what is no such message."""
    if type(message) is not dist.Work:
        return False
    # gloo itself does not wake who waits for the message whose bytes were just in transit when a connection closed
    # (torch 2.13; see ``plugins/gloo``). The work has a method for that, which Python is not given.
    address = ctypes.c_void_p.from_address(id(message) + object.__basicsize__).value  # of the C++ object (pybind11)
    if not address or address % ctypes.sizeof(ctypes.c_void_p):
        return False
    abort = _aborts_of_messages().get(ctypes.c_void_p.from_address(address).value or 0)  # by the class that it is of
    if abort is None:
        return False
    abort(address)
    return True


@cache
def _aborts_of_messages() -> dict[int, Callable[[int], None]]:
    """By the address of its table of virtual methods, what ends the waiting for a kind of message."""
    found: dict[int, Callable[[int], None]] = {}
    with contextlib.suppress(OSError, AttributeError, ValueError):  # another platform, or another build
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        for name in ("SendWork", "RecvWork"):
            kind = f"N4c10d16ProcessGroupGloo8{name}"
            table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{kind}E"))
            abort = library[f"_Z{kind}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table + 2 * ctypes.sizeof(ctypes.c_void_p)] = abort  # behind what the Itanium ABI puts first
    return found


def gloo_messages(group: dist.ProcessGroup) -> Any:
    """What moves the tensors of ``group`` that are on the CPU, by ``send`` and ``recv`` of ([tensor], rank, tag);
    ``None`` if that is not gloo."""
    cpu = torch.device("cpu")
    backend: Any = group._get_backend(cpu) if cpu in group._device_types else None
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if isinstance(backend, _c10d.ProcessGroupGloo) else None


_UNUSED_TAG = 7_502  # of messages that no rank sends


# ---- DTensor


def make_dtensor(cls: type[_Tensor], local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> _Tensor:
    """A DTensor (or an instance of a subclass) over ``local``, whose elements it shares."""
    # torch copies the storage offset of ``local`` onto the wrapper, which has no storage. With an offset other than 0,
    # its data_ptr() would not be 0, and deepcopy, torch.save and checkpointing would take it for a real tensor.
    if local.storage_offset():
        at_zero = local.as_strided(local.shape, local.stride(), 0)
        tensor: _Tensor = torch.Tensor._dtensor__new__(cls, at_zero, spec, requires_grad=requires_grad)
        set_local_tensor(tensor, local)
        return tensor
    return torch.Tensor._dtensor__new__(cls, local, spec, requires_grad=requires_grad)


dtensor_spec: Callable[[DTensor], DTensorSpec] = operator.attrgetter("_spec")
"""How a DTensor is placed."""

# By the slot: the name is another thing on our classes that show their local tensor as one of the user's class.
_local_tensor_slot: Any = DTensor.__dict__["_local_tensor"]

local_tensor: Callable[[Any], torch.Tensor] = _local_tensor_slot.__get__
"""The shard of a DTensor that this rank holds, the very object."""

set_local_tensor: Callable[[Any, torch.Tensor], None] = _local_tensor_slot.__set__
"""Let a DTensor be over another local tensor."""


def as_parameter(tensor: Any, requires_grad: bool) -> Any:
    """Make a leaf of a class of its own a parameter: the tensor itself, of which ``nn.Parameter()`` takes an alias."""
    tensor._is_param = True
    return tensor.requires_grad_(requires_grad)


grad_dtype_slot: Any = getattr(torch.Tensor, "grad_dtype", None)
"""Reads and sets ``grad_dtype`` of a tensor of any class; ``None`` in a torch without it."""


def has_grad_dtype_override(tensor: torch.Tensor) -> bool:
    """Whether ``grad_dtype`` was set, to whatever dtype. Before torch 2.15 nothing tells: ``False``."""
    return bool(getattr(tensor, "_has_grad_dtype_override", False))


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that may be the result of a collective in flight, as DTensors make them."""
    return tensor.wait() if isinstance(tensor, _AsyncCollectiveTensor) else tensor


def concatenate_meshes(meshes: list[_DeviceMesh]) -> _DeviceMesh:
    """One mesh of the dimensions of several, which are parts of one mesh.

    Raises:
        RuntimeError: they are not, or have ranks in common, or a mesh has no names.
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise RuntimeError("a mesh without names is no part of another one")
    joined: _DeviceMesh = _DeviceMesh._concatenate(meshes)
    return joined


def mend_mesh(mesh: _DeviceMesh) -> None:
    """Give a mesh that another version of torch has pickled what this version looks for in it: 2.13 changed how the
    layout is kept, 2.15 added an attribute."""
    layout = mesh._layout
    if "axes" not in vars(layout) and "axes" in getattr(type(layout), "__annotations__", {}):  # before 2.13
        sizes, strides = ((n,) if isinstance(n, int) else n for n in (vars(layout)["shape"], vars(layout)["stride"]))
        mesh._layout = type(layout).from_sizes_strides(sizes, strides)
    if (
        "_preserve_rank_order" not in vars(mesh) and "_preserve_rank_order" in _DeviceMesh.__annotations__
    ):  # before 2.15
        setattr(mesh, "_preserve_rank_order", False)  # noqa: B010
    if mesh._root_mesh is not None and mesh._root_mesh is not mesh:
        mend_mesh(mesh._root_mesh)


def rank_of_mesh(mesh: _DeviceMesh) -> int | None:
    """The rank that made a mesh: another one's, if that has pickled it. ``None`` for the mesh's stand-in in a graph."""
    return getattr(mesh, "_rank", None)


def root_mesh(mesh: _DeviceMesh) -> _DeviceMesh:
    """The mesh that ``mesh`` is a part of; itself if it is of none."""
    return mesh._root_mesh or mesh


def mesh_slices(mesh: _DeviceMesh) -> torch.Tensor:
    """The ranks of a mesh, and those of the other slices of the mesh that it is a part of: (slice, *dimensions)."""
    slices: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return slices


def flatten_mesh(mesh: _DeviceMesh) -> _DeviceMesh:
    """All ranks of a mesh in one dimension, in their order; made once. Ranks: all of the default process group, the
    first time."""
    flattened: _DeviceMesh = mesh._flatten()
    return flattened


_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def share_versions() -> Any:
    """A context in which views made inside a ``__torch_dispatch__`` share the version counter of what they are views
    of, as they do outside."""
    if torch.is_inference_mode_enabled():
        return contextlib.nullcontext()  # nothing has a version there
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include, exclude - _VERSIONS)


def allow_in_foreach(cls: Any) -> None:
    """Let optimizers and ``clip_grad_norm_`` use their fast paths for ``cls``."""
    # They look up the exact type in these lists; a subclass of DTensor would step parameter by parameter.
    for types in (_types_of_optimizers, _types_of_clipping):
        if cls not in types:
            types.append(cls)


def admit_placements(
    is_ours: Callable[[Any], bool],
    from_local: Callable[[torch.Tensor, Any, Any, Any], torch.Tensor],
    as_placed: Callable[[Any, Any], Any],
    distribute: Callable[..., Any],
    fill: Callable[[Any, torch.Tensor], Any],
    redistribute: Callable[..., Any],
) -> None:
    """Let what torch builds DTensors with know of placements that stock DTensor refuses, or takes for others. To be
    called once.

    Args:
        is_ours: whether there is such a placement among these.
        from_local: for ``DTensor.from_local``: the local tensor, mesh, placements, shape of the whole (or ``None``).
        as_placed: a gradient of such a tensor, in given placements.
        distribute: for ``distribute_tensor``.
        fill: for ``torch.distributed.checkpoint.state_dict``: given a sharded tensor and the whole one that it is to
            become, the result: the sharded one, written to, or a new one if it is on the meta device.
        redistribute: for ``DTensor.redistribute`` of a stock DTensor: the tensor, mesh, placements, other keywords.
    """
    _admit_in_from_local(is_ours, from_local, as_placed)
    _admit_in_layouts(is_ours, redistribute)
    original = torch.distributed.tensor.distribute_tensor

    @functools.wraps(original)
    def distribute_tensor(tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        has_ours = isinstance(tensor, DTensor) and is_ours(tensor.placements)
        if placements is not None and (has_ours or is_ours(placements)):
            return distribute(tensor, device_mesh, placements, **options)
        return original(tensor, device_mesh, placements, **options)

    for module in list(sys.modules.values()):  # also where it was imported by name
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get("distribute_tensor") is original:
            names["distribute_tensor"] = distribute_tensor
    distribute_all = _state_dict_utils._distribute_tensors

    @functools.wraps(distribute_all)
    def distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *arguments: Any, **options: Any) -> None:
        for key in keys:
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple) and isinstance(pair[0], DTensor) and is_ours(pair[0].placements):
                local_state_dict[key] = fill(*pair)
        distribute_all(local_state_dict, keys, *arguments, **options)

    _state_dict_utils._distribute_tensors = distribute_tensors


def _admit_in_layouts(is_ours: Callable[[Any], bool], redistribute: Callable[..., Any]) -> None:
    stock_shard, stock_redistribute = _tensor_utils._compute_local_shape_and_global_offset, DTensor.redistribute

    @functools.wraps(stock_shard)
    def shard(
        global_shape: Any, mesh_shape: Any, my_coordinate: Any, placements: Any, skip_offset: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not is_ours(placements) or not global_shape:
            return stock_shard(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
        # torch applies placements from left to right; ours is innermost, wherever it stands.
        others = [torch.distributed.tensor.Replicate() if is_ours([item]) else item for item in placements]
        (rows, *sizes), (first, *offsets) = stock_shard(global_shape, mesh_shape, my_coordinate, others)
        coordinate = my_coordinate if callable(my_coordinate) else my_coordinate.__getitem__
        for dim, item in enumerate(placements):
            if is_ours([item]):
                rows, offset = item.local_shard_size_and_offset(rows, mesh_shape[dim], coordinate(dim))
                first += offset
        return (rows, *sizes), () if skip_offset else (first, *offsets)

    @functools.wraps(stock_redistribute)
    def to_layout(self: DTensor, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        if placements is None or not is_ours(placements):
            return stock_redistribute(self, device_mesh, placements, **options)
        result: DTensor = redistribute(self, device_mesh, placements, **options)
        return result

    _tensor_utils._compute_local_shape_and_global_offset = shard
    DTensor.redistribute = to_layout  # type: ignore[method-assign]


def _admit_in_from_local(
    is_ours: Callable[[Any], bool],
    from_local: Callable[[torch.Tensor, Any, Any, Any], torch.Tensor],
    as_placed: Callable[[Any, Any], Any],
) -> None:
    stock_forward, stock_backward = _FromTorchTensor.forward, _FromTorchTensor.backward

    @functools.wraps(stock_forward)
    def forward(
        ctx: Any, input: torch.Tensor, device_mesh: Any, placements: Any, run_check: Any, shape: Any = None, *rest: Any
    ) -> Any:
        ctx.fsdp_compose = None
        if not is_ours(placements):
            return stock_forward(ctx, input, device_mesh, placements, run_check, shape, *rest)
        ctx.fsdp_compose = (placements, 4 + len(rest))
        ctx.set_materialize_grads(False)
        return from_local(input, device_mesh, placements, shape)

    @functools.wraps(stock_backward)
    def backward(ctx: Any, grad_output: Any) -> Any:
        if ctx.fsdp_compose is None:
            return stock_backward(ctx, grad_output)
        placements, num_others = ctx.fsdp_compose
        local = None if grad_output is None else as_placed(grad_output, placements).to_local()
        return (local, *[None] * num_others)

    _FromTorchTensor.forward = staticmethod(forward)  # type: ignore[method-assign, assignment]
    _FromTorchTensor.backward = staticmethod(backward)  # type: ignore[method-assign]


def admit_several_chunks(is_sharded: Callable[[Any], bool]) -> None:
    """Let torch's storage writers keep all chunks of tensors of which a rank has several: a safetensors file has one
    tensor a name, so each further chunk gets a file of its own. What would keep one rank's alone is refused. To be
    called once, with what tells such tensors."""
    write, plan_all = FileSystemWriter._write_data, HuggingFaceStorageWriter.prepare_global_plan
    plan_pickle, copy = _planning._create_write_item_for_bytesio, _consolidation._write_sub_tensor_to_file_optimized

    @functools.wraps(write)
    def write_all(self: Any, planner: Any, file_queue: Any) -> Any:
        if self.serialization_format == SerializationFormat.SAFETENSORS:
            for path, name, items in [file_queue.get_nowait() for _ in range(file_queue.qsize())]:
                stem, suffix = os.path.splitext(name)
                files, counts = defaultdict[int, list[Any]](list), Counter[str]()
                for item in items:
                    files[counts[item.index.fqn]].append(item)
                    counts[item.index.fqn] += 1
                for i, chunks in files.items():
                    other = f"{stem}-{i}{suffix}"
                    place = (self.fs.concat_path(self.path, other), other) if i else (path, name)
                    file_queue.put((*place, chunks))
        return write(self, planner, file_queue)

    @functools.wraps(plan_all)
    def plan_files(self: Any, plans: list[Any]) -> list[Any]:
        counts = Counter(item.index.fqn for plan in plans for item in plan.items)
        for fqn, number in counts.items():
            if number > 1 and not self.save_distributed:
                raise MisuseError(
                    f"HuggingFaceStorageWriter: {fqn} is sharded, in {number} parts, and all ranks would write to the "
                    "same file. Pass it save_distributed=True, or save a whole state dict (full_state_dict=True)"
                )
        return plan_all(self, plans)

    @functools.wraps(plan_pickle)
    def plan_checked(fqn: str, value: Any) -> Any:
        for tensor in filter(is_sharded, _tree_leaves(value)):
            raise MisuseError(
                f"{fqn} is a {type(value).__name__} with a sharded tensor of shape {tuple(tensor.shape)}, of which one "
                "rank would pickle its own part as the whole. Keep sharded tensors in dicts and lists, and let the "
                "planner flatten them (flatten_state_dict=True, its default)"
            )
        return plan_pickle(fqn, value)

    @functools.wraps(copy)
    def copy_piece(whole: memoryview, piece: bytes, nbytes: int, shape: Any, *places: Any) -> None:
        if shape:
            copy(whole, piece, nbytes, shape, *places)
        else:  # a single number, which torch 2.15 still takes for an empty tensor
            whole[:] = piece

    FileSystemWriter._write_data = write_all  # type: ignore[method-assign]
    HuggingFaceStorageWriter.prepare_global_plan = plan_files  # type: ignore[method-assign]
    _planning._create_write_item_for_bytesio = plan_checked  # type: ignore[assignment]
    _consolidation._write_sub_tensor_to_file_optimized = copy_piece  # type: ignore[assignment]


@contextlib.contextmanager
def all_to_all_on_cpu() -> Iterator[None]:
    """Let DTensors that are sharded along another dimension than before send what other devices send. On the CPU they
    gather everything, since gloo had no all-to-all."""
    before = _placement_types.shard_dim_alltoall

    def all_to_all(tensor: torch.Tensor, gathered: int, sharded: int, mesh: _DeviceMesh, dim: int) -> torch.Tensor:
        return torch.ops._dtensor.shard_dim_alltoall(tensor, gathered, sharded, mesh.get_group(dim).group_name)

    _placement_types.shard_dim_alltoall = all_to_all
    try:
        yield
    finally:
        _placement_types.shard_dim_alltoall = before


@contextlib.contextmanager
def flex_attention_by(attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let FlexAttention be ``attend(query, key, value, scale=..., enable_gqa=True)``, on any device."""
    from torch.nn.attention import flex_attention as module

    names = "_validate_device", "flex_attention_hop"
    before = [getattr(module, name) for name in names]

    def attend_with_sums(query: Any, key: Any, value: Any, _: Any, __: Any, scale: Any, *___: Any, **____: Any) -> Any:
        sums = query.new_zeros(query.shape[:-1], dtype=torch.float32)
        return attend(query, key, value, scale=scale, enable_gqa=True), sums, sums

    for name, replaced in zip(names, (lambda *_: None, attend_with_sums), strict=True):
        setattr(module, name, replaced)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            yield
    finally:
        for name, item in zip(names, before, strict=True):
            setattr(module, name, item)
