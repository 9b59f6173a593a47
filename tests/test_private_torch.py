"""Every private torch API that the package uses still exists and behaves as ``_torch.py`` says, one named
test for each; and no other file uses one, except for a short list."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._mesh_layout as _mesh_layout
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable import contract
from torch.distributed.checkpoint import _consolidate_hf_safetensors as consolidation
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp_compose
from fsdp_compose import _torch, drop_in
from tests.harness import ROOT, distributed, fake_process_group, run_forked

PACKAGE = Path(fsdp_compose.__file__).parent

# Underscore names of torch that files other than _torch.py use. Attributes that every tensor, module and process group
# of torch 2.12 to 2.15 has, and that the hot path or a plain reading of the code wants by their own names.
ALLOWED = {
    "_MEM_FORMAT_ENCODING": "a class that pickles of torch's checkpoint metadata name; a format",
    "_allgather_base": "all-gather on the process group object, without the cost of torch.distributed's checks",
    "_amp_foreach_non_finite_check_and_unscale_": "an operator: what GradScaler calls",
    "_backward_hooks": "gradient hooks of a parameter that would be lost",
    "_base": "the tensor that an output is a view of",
    "_extra_state": "what state_dict() calls the result of get_extra_state(); a format",
    "_gradient_checkpointing_func": "of models of transformers: no name of torch",
    "_foreach_max": "an operator",
    "_foreach_norm": "an operator: what clip_grad_norm_ calls",
    "_foreach_zero_": "an operator: what zero_grad calls",
    "_fsdp_use_orig_params": "what Dynamo reads on a managed module",
    "_get_layout": "a function that pickles of torch's checkpoint metadata name; a format",
    "_is_fsdp_managed_module": "what Dynamo reads on a managed module",
    "_mesh_axis": "of spmd_types, where torch's own FSDP2 calls it: no name of torch",
    "_is_param": "what makes a tensor subclass an nn.Parameter",
    "_exit": "of os: no name of torch",
    "_like": "no name: how names of operators end",
    "_local_scalar_dense": "an operator: what item() calls",
    "_modules": "children of a module by name",
    "_parameters": "parameters of a module by name: what a swap exchanges",
    "_embedding_bag": "an operator: what F.embedding_bag() calls",
    "_embedding_bag_forward_only": "an operator: what it calls without gradients",
    "_pin_memory": "an operator: what pin_memory() calls",
    "_post_accumulate_grad_hooks": "gradient hooks of a parameter that would be lost",
    "_pytree": "torch.utils._pytree, where users register their containers; it has no public name",
    "_reduce_scatter_base": "reduce-scatter on the process group object, as _allgather_base",
    "_reshape_alias": "an operator: what some reshapes call",
    "_schema": "of an operator: which arguments it writes to",
    "_to_copy": "an operator: what to() calls",
    "_unsafe_view": "an operator: what some reshapes call",
    "_version": "version counters, which autograd's documentation describes",
}


# ---- no other file uses private names --------------------------------------------------------------------------------


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the package defines: functions, classes, variables, arguments, attributes of ``self``, slots."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            names.update(ast.literal_eval(node.value))
    return names


def private_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names with one leading underscore that are read or written as attributes, imported, or spelled as strings."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "sys":
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value]
        for name in found:
            if re.fullmatch(r"_[A-Za-z]\w*", name):
                yield name, node.lineno


def test_no_other_file_uses_private_names_of_torch():
    files = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = own_names(list(files.values()))
    used = {
        (name, f"{path.name}:{line}")
        for path, tree in files.items()
        if path.name != "_torch.py"
        for name, line in private_names(tree)
        if name not in own and not name.startswith("_fsdp_compose")
    }
    assert not {item for item in used if item[0] not in ALLOWED}, "wrap them in fsdp_compose/_torch.py"
    assert ALLOWED.keys() == {name for name, _ in used}, "take names that are no longer used from the list"


def test_every_name_in_the_private_file_has_a_test():
    names = []
    for node in ast.parse((PACKAGE / "_torch.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    public = {name for name in names if not name.startswith("_")}
    outside = {
        "Iterator",
        "Mapping",
        "TypeVar",
        "annotations",
        "OrderedDict",
        "Counter",
        "defaultdict",
        "FileSystemWriter",
        "HuggingFaceStorageWriter",
        "SerializationFormat",
        "MisuseError",
        "Callable",
        "Sequence",
        "FrameType",
        "timedelta",
        "cache",
        "count",
        "Any",
        "cast",
    }
    missing = {name for name in public - outside if f"test_{name}" not in globals()}
    assert not missing, f"tests are missing for {missing}"


VERSIONS = {"2.11.1": False, "1.13.0+cu117": False, "2.12.0a0+git1": True, "3.0": True}


def import_on_other_torches(_rank: int) -> None:
    for version, works in VERSIONS.items():
        for name in [name for name in sys.modules if name.startswith("fsdp_compose")]:
            del sys.modules[name]
        torch.__version__ = version
        try:
            importlib.import_module("fsdp_compose")
        except ImportError as error:
            assert not works and f"needs torch 2.12 or newer; this is torch {version}" in str(error), version
        else:
            assert works, version


def test_importing_on_an_older_torch_says_so(tmp_path):
    ((code, text),) = run_forked(1, tmp_path, import_on_other_torches)
    assert code == 0, text


# ---- autograd --------------------------------------------------------------------------------------------------------


class Backward(torch.autograd.Function):
    """Calls ``action`` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Any) -> torch.Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.action()
        return grad, None


def test_NormPartial():
    placement = _torch.NormPartial(3.0)
    assert placement.is_partial() and placement.norm_type == 3.0 and placement != Partial()


def test_current_graph_task_id():
    assert _torch.current_graph_task_id() == -1
    x, outer, inner = torch.ones(2, requires_grad=True), [], []

    def nested() -> None:
        outer.append(_torch.current_graph_task_id())
        with torch.enable_grad():
            leaf = torch.ones(1, requires_grad=True)
            Backward.apply(leaf, lambda: inner.append(_torch.current_graph_task_id())).sum().backward()
        outer.append(_torch.current_graph_task_id())

    for _ in range(2):
        Backward.apply(x, nested).sum().backward()
    assert _torch.current_graph_task_id() == -1
    assert min(outer + inner) >= 0
    assert outer[0] == outer[1] != outer[2] == outer[3]
    assert len({outer[0], outer[2], *inner}) == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_is_checkpoint_recomputing(use_reentrant):
    """Only where a checkpoint of the innermost backward repeats a forward."""
    seen, x = [], torch.ones(2, requires_grad=True)

    def note(where: str) -> None:
        seen.append((where, _torch.is_checkpoint_recomputing()))

    def hook(_grad: torch.Tensor) -> None:
        note("hook")

    def part(x: torch.Tensor) -> torch.Tensor:
        note("part")
        y = x.sin()
        if y.requires_grad:
            y.register_hook(hook)
        return y

    note("outside")
    y = checkpoint(part, x, use_reentrant=use_reentrant)
    Backward.apply(y, lambda: note("backward")).sum().backward()
    expected = [("outside", False), ("part", False), ("backward", False)]
    # With the other kind the hook is of the first graph, and runs before the forward is repeated.
    rest = [("part", True), ("hook", False)]
    assert seen == [*expected, *(rest if use_reentrant else reversed(rest))]


def test_queue_end_of_backward():
    x, events = torch.ones(2, requires_grad=True), []
    x.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    Backward.apply(x, lambda: _torch.queue_end_of_backward(lambda: events.append("end"))).sum().backward()
    assert events == ["gradient", "end"]

    def fail() -> None:
        _torch.queue_end_of_backward(lambda: events.append("never"))
        raise ValueError("by the test")

    with pytest.raises(ValueError, match="by the test"):
        Backward.apply(x, fail).sum().backward()
    Backward.apply(x, lambda: None).sum().backward()
    assert events == ["gradient", "end", "gradient"]
    with pytest.raises(RuntimeError, match="backward"):
        _torch.queue_end_of_backward(lambda: None)


def test_queue_end_of_backward_raises_what_the_callback_raises():
    def fail() -> None:
        raise ValueError("at the end")

    x = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="at the end"):
        Backward.apply(x, lambda: _torch.queue_end_of_backward(fail)).sum().backward()


@pytest.mark.parametrize("leaf", [torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))])
def test_gradient_hooks(leaf):
    assert _torch.gradient_hooks(leaf) == []
    handle = leaf.register_hook(hook := lambda grad: None)
    assert _torch.gradient_hooks(leaf) == [hook]
    handle.remove()
    assert _torch.gradient_hooks(leaf) == []


@pytest.mark.parametrize("leaf", [torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))])
def test_post_accumulate_hooks(leaf):
    assert _torch.post_accumulate_hooks(leaf) == []
    handle = leaf.register_post_accumulate_grad_hook(hook := lambda param: None)
    assert _torch.post_accumulate_hooks(leaf) == [hook]
    handle.remove()
    assert _torch.post_accumulate_hooks(leaf) == []


def test_renew_hooks():
    leaf, events = nn.Parameter(torch.ones(2)), []
    first = leaf.register_hook(lambda grad: events.append("gradient"))
    leaf.register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    torch.utils.swap_tensors(leaf, nn.Parameter(torch.zeros(2)))
    leaf.sum().backward()
    assert not events, "swap_tensors() keeps hooks now: renew_hooks() can go"
    _torch.renew_hooks(leaf)
    leaf.sum().backward()
    assert events == ["gradient", "accumulated"]
    first.remove()  # the same records as before
    leaf.register_hook(lambda grad: events.append("later"))
    events.clear()
    leaf.sum().backward()
    assert events == ["later", "accumulated"]


def test_set_leaf_hooks():
    leaf, events = nn.Parameter(torch.ones(2)), []
    for _ in range(2):  # again after autograd's own record of them was exchanged
        _torch.set_leaf_hooks(leaf, lambda grad: events.append(grad.tolist()), lambda p: events.append(p.grad.tolist()))
        leaf.grad = None
        (leaf * 3).sum().backward()
        assert events == [[3, 3], [3, 3]]
        leaf.grad = None
        torch.utils.swap_tensors(leaf, nn.Parameter(torch.ones(2)))
        events.clear()


def test_hook_gradient():
    x, events = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: events.append("before"))
    _torch.hook_gradient(y, lambda grad: events.append(grad.tolist()))
    removable = y.register_hook(lambda grad: events.append("removed"))
    y.register_hook(lambda grad: events.append("after"))
    removable.remove()
    y.backward(torch.tensor([3.0, 4.0]), retain_graph=True)
    assert events == ["before", [3.0, 4.0], "after"]
    assert x.grad.tolist() == [6.0, 8.0]
    z = x * 2  # no hook before, several after
    _torch.hook_gradient(z, lambda grad: events.append("first"))
    _torch.hook_gradient(z, lambda grad: events.append("second"))
    events.clear()
    (z * z).sum().backward()
    assert events == ["first", "second"]


def test_hook_gradient_of_a_view_whose_base_was_written_to():
    x, events = torch.ones(4, requires_grad=True), []
    base = x * 1
    view = base[:2]
    base.mul_(3)
    _torch.hook_gradient(view, lambda grad: events.append(grad.tolist()))
    view.sum().backward()
    assert events == [[1.0, 1.0]] and x.grad.tolist() == [3.0, 3.0, 0.0, 0.0]


def test_hook_gradient_keeps_nothing_alive():
    """The hook belongs to the graph: it goes with the tensor."""
    import weakref

    class Hook:
        def __call__(self, grad: torch.Tensor) -> None: ...

    hook, y = Hook(), torch.ones(2, requires_grad=True) * 2
    _torch.hook_gradient(y, hook)
    reference = weakref.ref(hook)
    del hook
    assert reference() is not None
    del y
    assert reference() is None


def test_version_counters():
    """``_version``: shared by views, not by ``.data``; a refilled storage is no edit for autograd."""
    flat = torch.zeros(4)
    base = flat.data
    param = nn.Parameter(base[1:3])
    versions = base._version
    flat.add_(1)
    assert base._version == param._version == versions
    with torch.no_grad():
        param.mul_(2)
    assert base._version == versions + 1
    assert flat._version == 1 and flat.tolist() == [1, 2, 2, 1]
    out = (param * param).sum()  # saves param
    storage = flat.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    flat.fill_(5)
    out.backward()
    assert param.grad.tolist() == [10, 10]


def test_base_of_a_view():
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    assert y._base is None and y[:2]._base is y and y[:2][:1]._base is y and y.detach()._base is None


# ---- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_foreach_copy_(source):
    flat = torch.full((7,), 9.0)
    targets = [flat[0:2], flat[3:3], flat[4:7].view(3, 1)]
    _torch.foreach_copy_(targets, [torch.ones(shape, dtype=source) for shape in (2, 0, (3, 1))])
    assert flat.tolist() == [1, 1, 9, 9, 1, 1, 1]


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_foreach_add_(source):
    flat = torch.full((5,), 0.5)
    _torch.foreach_add_([flat[0:2], flat[2:2], flat[3:5]], [torch.ones(n, dtype=source) for n in (2, 0, 2)])
    assert flat.dtype == torch.float32 and flat.tolist() == [1.5, 1.5, 0.5, 1.5, 1.5]


def test_foreach_lerp_():
    values = [torch.zeros(2), torch.zeros(0), torch.zeros(1)]
    _torch.foreach_lerp_(values, [torch.full_like(value, 2.0) for value in values], 0.25)
    assert torch.equal(torch.cat(values), torch.full((3,), 0.5))


def test_flex_attention_by():
    query, key = (torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _torch.flex_attention_by(nn.functional.scaled_dot_product_attention):
            mixed = flex_attention(query, key, key, score_mod=lambda score, *_: score, scale=0.5, enable_gqa=True)
    mixed.sum().backward()
    expected = nn.functional.scaled_dot_product_attention(query, key, key, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(mixed, expected)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(query, key, key, enable_gqa=True)


def test_foreach_zero_():
    flat = torch.ones(5)
    _torch.foreach_zero_([flat[0:2], flat[2:2], flat[4:5]])
    assert flat.tolist() == [0, 0, 1, 1, 0]


def test_foreach_mul_():
    values = [torch.ones(2), torch.ones(0)]
    _torch.foreach_mul_(values, torch.tensor(3.0))
    assert values[0].tolist() == [3, 3]


def test_foreach_norm():
    norms = _torch.foreach_norm([torch.tensor([3.0, 4.0]).bfloat16(), torch.ones(1)], 2, dtype=torch.float32)
    assert [norm.item() for norm in norms] == [5, 1] and norms[0].dtype == torch.float32


def test_non_persistent_buffers():
    module = nn.Module()
    module.register_buffer("left_out", torch.ones(1), persistent=False)
    module.register_buffer("saved", torch.ones(1))
    module.child = nn.BatchNorm1d(2)
    assert _torch.non_persistent_buffers(module) == {"left_out"}
    module.left_out = torch.zeros(2)  # assigning a tensor keeps it what it was
    assert _torch.non_persistent_buffers(module) == {"left_out"} and "left_out" not in module.state_dict()


def test_is_profiling():
    assert not _torch.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_profiling()
    assert not _torch.is_profiling()


def test_num_dispatch_modes():
    assert _torch.num_dispatch_modes() == 0
    with CommDebugMode():
        assert _torch.num_dispatch_modes() == 1
    assert _torch.num_dispatch_modes() == 0


@distributed(world_size=2)
def test_Shown():
    shown = _torch.Shown(torch.ones(2))
    whole = _torch.Shown(torch.zeros(4))
    with CommDebugMode() as communication:
        dist.all_gather_into_tensor(whole, shown)  # one rank alone may call it
        assert communication.get_total_counts() == 1
        if dist.get_rank() == 0:
            dist.all_reduce(whole)
    assert communication.get_total_counts() == 2 - dist.get_rank()
    assert not whole.tensor.any() and whole.data_ptr() == whole.tensor.data_ptr()
    assert (shown + 1).tensor.tolist() == [2, 2] and shown.view(torch.int32).tensor.dtype == torch.int32


def test_in_transform():
    assert not _torch.in_transform()
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.in_transform())
        return x

    one = torch.ones(())
    torch.func.grad(look)(one)
    torch.func.vmap(look)(torch.ones(2))
    torch.func.jvp(look, (one,), (one,))
    torch.func.vjp(look, one)
    torch.func.functionalize(look)(one)
    assert seen == [True] * 5 and not _torch.in_transform()


def test_temporarily_clear_interpreter_stack():
    seen = []

    def outside(x: torch.Tensor) -> torch.Tensor:
        with _torch.temporarily_clear_interpreter_stack():
            seen.append(_torch.in_transform())
        seen.append(_torch.in_transform())
        return x

    torch.func.grad(lambda x: torch.func.vmap(outside)(x).sum())(torch.ones(2))
    assert seen == [False, True]


def test_unwrapped():
    x = torch.ones(2)
    seen = []
    torch.func.grad(lambda x: torch.func.vmap(lambda y: (seen.append(y), y)[1])(x).sum())(x)
    assert _torch.unwrapped(seen[0]).data_ptr() == x.data_ptr() and _torch.unwrapped(x) is x


def test_in_forward_ad():
    assert not _torch.in_forward_ad()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.in_forward_ad()
    seen = []
    torch.func.jvp(lambda x: (seen.append(_torch.in_forward_ad()), x)[1], (torch.ones(1),), (torch.ones(1),))
    assert seen == [True]


def test_is_in_functional_call():
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return _torch.is_in_functional_call()

    module = Looks(1, 1)
    assert not module(torch.ones(1))
    assert torch.func.functional_call(module, {}, (torch.ones(1),))
    assert torch.nn.utils.stateless.functional_call(module, {}, (torch.ones(1),))


def test_is_in_functional_call_since_a_frame():
    class Outer(nn.Module):
        """Looks before and inside a ``functional_call()`` of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self) -> list[bool]:
            frame = sys._getframe()
            return [_torch.is_in_functional_call(frame), torch.func.functional_call(self.inner, {}, (frame,))]

    class Inner(nn.Module):
        def forward(self, frame: Any) -> bool:
            return _torch.is_in_functional_call(frame)

    assert Outer()() == [False, True]
    assert torch.func.functional_call(Outer(), {}) == [False, True]
    assert torch.func.functional_call(Inner(), {}, (None,))


def test_is_in_functional_call_past_the_frames_of_a_hook():
    found = []

    def hook(*_: Any) -> None:
        found.append(look())

    def look() -> bool:  # a frame between, as in the package
        return _torch.is_in_functional_call(frames[0], 4)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frames[:] = [sys._getframe()]
            self.inner(x)
            torch.func.functional_call(self.inner, {}, (x,))
            return torch.func.functional_call(self.inner[0], {}, (x,))

    frames: list[Any] = []
    module = Outer()
    module.inner[0].register_forward_pre_hook(hook)
    torch.func.functional_call(module, {}, (torch.ones(1),))
    assert found == [False, True, True]


def test_is_swapping_tensors():
    class Looks(torch.Tensor):
        def view_as(self, other: torch.Tensor) -> torch.Tensor:  # which swap_tensors() calls
            seen.append(_torch.is_swapping_tensors())
            return super().view_as(other)

    seen: list[bool] = []
    one, other = (torch.ones(1).as_subclass(Looks).requires_grad_() for _ in range(2))
    (one * 2).sum()
    kept = one.view_as(one)  # the node is alive
    torch.utils.swap_tensors(one, other)
    del kept
    assert seen == [False, True]


def test_has_saved_tensors_hooks():
    seen = []
    assert not _torch.has_saved_tensors_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert _torch.has_saved_tensors_hooks()
    output = checkpoint(
        lambda x: (seen.append(_torch.has_saved_tensors_hooks()), x * x)[1],
        torch.ones(2, requires_grad=True),
        use_reentrant=False,
    )
    output.sum().backward()
    assert seen == [True, True] and not _torch.has_saved_tensors_hooks()


def test_overload_packet():
    assert _torch.overload_packet(torch.ops.aten.mm.out) == torch.ops.aten.mm


def test_storage_use_counter():
    flat = torch.zeros(4)
    storage = flat.untyped_storage()
    count = _torch.storage_use_counter(storage)
    alone = count()
    view = flat[1:]
    assert count() == alone + 1
    detached = flat.detach()
    assert count() == alone + 2
    del view, detached
    assert count() == alone
    kept = [torch.ones(3, requires_grad=True) * flat[1:]]  # the graph has saved the view for backward
    assert count() == alone + 1
    kept.clear()
    assert count() == alone


def test_same_storage():
    flat = torch.zeros(4)
    assert _torch.same_storage(flat.untyped_storage(), flat[1:].detach().untyped_storage())
    assert not _torch.same_storage(flat.untyped_storage(), flat.clone().untyped_storage())


def test_preserved_versions():
    weight, wrapper = torch.zeros(4), TwoTensor(torch.zeros(2), torch.zeros(2))
    saved = (weight.clone().requires_grad_() * weight).sum()
    with _torch.preserved_versions([weight, wrapper]):
        weight.add_(1)
        wrapper.add_(1)
    assert weight._version == wrapper._version == 0 and weight.tolist() == [1] * 4
    saved.backward()  # no error: for autograd there was no edit
    weight.add_(1)
    assert weight._version == 1


def test_storage_id():
    tensor, other = torch.ones(2), torch.ones(2)
    number = _torch.storage_id(tensor.untyped_storage())
    assert number == _torch.storage_id(tensor[1:].untyped_storage()) != _torch.storage_id(other.untyped_storage())


def test_watched_storages():
    first, second = torch.ones(4).untyped_storage(), torch.empty(0).untyped_storage()
    resized, exchanged = [], []
    with _torch.watched_storages(
        lambda item: resized.append(item.nbytes()), lambda a, b: exchanged.append((a.nbytes(), b.nbytes()))
    ):
        first.resize_(32)
        bound = first.resize_
        _torch.memory_exchange(first, second)()
    bound(0)  # what was bound within still tells
    second.resize_(0)
    assert resized == [32, 0] and exchanged == [(0, 32)]
    assert not {"resize_", "_swap_data_ptr_"} & vars(torch.UntypedStorage).keys(), "torch's own again"


def test_DispatchMode():
    class Heard(_torch.DispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Heard() as heard:
        torch.ones(2).add_(1)
    assert heard.names == ["aten::ones", "aten::add_"]


def test_is_composite():
    aten = torch.ops.aten
    assert _torch.is_composite(aten.linear.default) and not _torch.is_composite(aten.addmm.default)
    assert not _torch.is_composite(aten.silu_backward.default), "it has both, and the CPU uses its own"


def test_operators_decompose_or_say_that_they_do_not():
    aten, x = torch.ops.aten, torch.ones(2, 2)
    assert torch.equal(aten.linear.default.decompose(x, x), x @ x)
    assert aten.addmm.default.decompose(x, x, x) is NotImplemented


def test_memory_exchange():
    full, empty = torch.arange(4.0), torch.empty(0)
    view = full[1:]
    exchange = _torch.memory_exchange(full.untyped_storage(), empty.untyped_storage())
    exchange()
    assert full.untyped_storage().nbytes() == 0 and empty.untyped_storage().nbytes() == 16
    empty.set_(empty.untyped_storage(), 0, (4,), (1,))
    assert empty.tolist() == [0, 1, 2, 3]
    exchange()
    assert view.tolist() == [1, 2, 3] and empty.untyped_storage().nbytes() == 0


def test_refuse_access():
    """Where this fails, parameters that are kept beyond forward crash the process, and nothing else is worse."""
    reader, flat = torch.empty(0), torch.arange(6.0, requires_grad=True)
    storage = reader.untyped_storage()
    assert _torch.refuse_access(storage, "refused: the weight of a test")
    plain = flat.detach()
    exchange = _torch.memory_exchange(storage, plain.untyped_storage())
    exchange()  # memory and flag: `reader` can be read, `plain` cannot
    reader.set_(storage, 0, (2, 3), (3, 1))
    graph = (torch.ones(2, 3, requires_grad=True) * reader).sum()
    view, half = reader.t(), reader.bfloat16()
    assert reader.sum() == 15 and half.shape == (2, 3)
    exchange()
    assert plain.sum() == 15
    error = "refused: the weight of a test|Cannot access data pointer|out of bounds for storage of size 0"
    linear = torch.nn.functional.linear
    for access in (
        lambda: reader + 1,
        lambda: view * 2,
        lambda: reader.add_(1),
        lambda: reader @ torch.ones(3),
        lambda: linear(torch.ones(1, 3), reader),
        lambda: linear(torch.ones(1, 3), torch.ones(2, 3), view[0]),
        lambda: torch.layer_norm(torch.ones(2, 3), (3,), reader[0]),
        lambda: torch.conv1d(torch.ones(1, 1, 5), reader.view(2, 1, 3)),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), reader),
        lambda: torch._foreach_copy_([torch.ones(2, 3)], [reader]),
        reader.clone,
        reader.data_ptr,
        reader.tolist,
        reader.numpy,
        graph.backward,
    ):
        with pytest.raises(RuntimeError, match=error):
            access()


# ---- DTensor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    with fake_process_group(world_size=4, rank=1):
        yield init_device_mesh("cpu", (4,))


def plain_spec(mesh: Any, shape: tuple[int, ...], placement: Any) -> Any:
    meta = _torch.TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return _torch.DTensorSpec(mesh, (placement,), meta)


def test_DTensorSpec(mesh):
    spec = plain_spec(mesh, (8, 2), Shard(0))
    assert spec.shape == (8, 2) and spec.placements == (Shard(0),) and spec.mesh is mesh
    assert callable(spec._verify_shard_order) and hash(spec) == hash(plain_spec(mesh, (8, 2), Shard(0)))
    with pytest.raises(AssertionError):  # only a RaggedSpec can carry a RaggedShard
        plain_spec(mesh, (8, 2), fsdp_compose.RaggedShard((2, 2, 2, 2)))


def test_TensorMeta():
    meta = _torch.TensorMeta(torch.Size((2,)), (1,), torch.float32)
    assert (meta.shape, meta.stride, meta.dtype) == (torch.Size((2,)), (1,), torch.float32)


def test_DTensor(mesh):
    """A subclass gets its operations, and those of stock DTensors with it among the arguments."""
    seen = []

    class Own(DTensor):
        def __init__(self, *_: Any) -> None:
            pass

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return [torch.zeros(())] * 2 if "foreach" in func._schema.name else torch.zeros(())

    own = _torch.make_dtensor(Own, torch.zeros(2), plain_spec(mesh, (8,), Shard(0)))
    stock = _torch.make_dtensor(DTensor, torch.zeros(2), plain_spec(mesh, (8,), Shard(0)))
    _ = (own + 1, stock + own, own.norm(), torch._foreach_norm([stock, own]))
    assert seen == ["aten::add", "aten::add", "aten::linalg_vector_norm", "aten::_foreach_norm"]


def test_make_dtensor(mesh):
    buffer = torch.arange(10.0)
    tensor = _torch.make_dtensor(DTensor, buffer[4:6], plain_spec(mesh, (8,), Shard(0)))
    assert tensor.data_ptr() == 0 and tensor.storage_offset() == 0 and tensor.shape == (8,)
    assert tensor.to_local().data_ptr() == buffer[4:].data_ptr()


@pytest.mark.skipif(_torch.grad_dtype_slot is None, reason="this torch has no grad_dtype")
def test_grad_dtype_slot():
    param = nn.Parameter(torch.zeros(2))
    _torch.grad_dtype_slot.__set__(param, torch.float64)
    assert param.grad_dtype == _torch.grad_dtype_slot.__get__(param) == torch.float64


def test_has_grad_dtype_override():
    param = nn.Parameter(torch.zeros(2))
    assert not _torch.has_grad_dtype_override(param)
    if hasattr(torch.Tensor, "_has_grad_dtype_override"):  # since torch 2.15
        param.grad_dtype = torch.float32
        assert _torch.has_grad_dtype_override(param)
    else:
        assert torch.__version__ < "2.15"


@pytest.mark.parametrize("requires_grad", [True, False])
def test_as_parameter(mesh, requires_grad):
    """It has what ``nn.Parameter()`` gives to its alias."""
    tensor = _torch.make_dtensor(DTensor, torch.zeros(2), plain_spec(mesh, (8,), Shard(0)))
    wanted = nn.Parameter(tensor, requires_grad)
    param = _torch.as_parameter(tensor, requires_grad)
    assert param is tensor and wanted is not tensor
    for item in (param, wanted):
        assert isinstance(item, nn.Parameter) and type(item) is DTensor and item.is_leaf and not item._is_view()
        assert item.requires_grad is requires_grad and vars(item) == vars(wanted)
    module = nn.Module()
    module.weight = param
    assert [*module.parameters()] == [param]


def test_local_tensor(mesh):
    local = torch.zeros(2)
    tensor = _torch.make_dtensor(DTensor, local, plain_spec(mesh, (8,), Shard(0)))
    assert _torch.local_tensor(tensor) is local


def test_set_local_tensor(mesh):
    tensor = _torch.make_dtensor(DTensor, torch.zeros(2), plain_spec(mesh, (8,), Shard(0)))
    other = torch.ones(2)
    _torch.set_local_tensor(tensor, other)
    assert tensor._local_tensor is other


def test_dtensor_spec(mesh):
    spec = plain_spec(mesh, (8,), Shard(0))
    assert _torch.dtensor_spec(_torch.make_dtensor(DTensor, torch.zeros(2), spec)) is spec


def test_compute_local_shape_and_global_offset(mesh):
    shape, offset = _torch.compute_local_shape_and_global_offset((8, 3), mesh, (Shard(0),))
    assert (tuple(shape), tuple(offset)) == ((2, 3), (2, 0))


def test_rank_of_mesh(mesh):
    assert _torch.rank_of_mesh(mesh) == dist.get_rank()
    assert _torch.rank_of_mesh(pickle.loads(pickle.dumps(mesh))) == dist.get_rank()


def test_share_versions():
    found = []

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            base = torch.zeros(3)
            with _torch.share_versions():
                view = base[1:]
            torch.autograd.graph.increment_version(view)
            found.append(base._version)
            return torch.zeros(())

    _ = torch.Tensor._make_wrapper_subclass(Wrapper, (2,)) + 1
    assert found == [1]


def test_allow_in_foreach():
    class Own(torch.Tensor):
        pass

    _torch.allow_in_foreach(Own)
    for types in (_torch._types_of_optimizers, _torch._types_of_clipping):
        assert types.pop() is Own
        assert fsdp_compose.RaggedDTensor in types


# ---- Dynamo ----------------------------------------------------------------------------------------------------------


def test_PlainAttributes():
    class Tensor(torch.Tensor):
        asked = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.asked += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Tensor)
    with _torch.PlainAttributes():
        assert tensor.grad is None and not tensor.requires_grad
        tensor.grad = torch.ones(2)
    assert Tensor.asked == 0
    assert tensor.grad is not None
    assert Tensor.asked > 0


def test_without_dispatch():
    two = TwoTensor(torch.ones(2, 3), torch.ones(2, 3))
    with _torch.without_dispatch():
        torch.ops.aten.t_(two)
    assert two.shape == (3, 2) and two.a.shape == (2, 3)


def test_skip_frame():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    seen = []

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def hook(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x))
        return [helper(x) for _ in range(2)][0]

    _torch.skip_frame(hook)
    x = torch.ones(2)
    for _ in range(2):  # what the hook was told outlasts a reset
        seen.clear()
        counter = CompileCounter()
        compiled = torch.compile(lambda x: hook(x * 2) + 1, backend=counter)
        torch.testing.assert_close(compiled(x), (x * 2).sin() + 1)
        compiled(x)
        assert counter.frame_count == 2  # before the call and after it
        assert counter.op_count == 2  # nothing of the hook itself, nor of what it calls
        assert seen == [torch.Tensor] * 2
        with pytest.raises(torch._dynamo.exc.Unsupported, match="fsdp_compose hook"):
            torch.compile(lambda x: hook(x * 3) + 1, backend="eager", fullgraph=True)(x)
        torch._dynamo.reset()


def test_skip_top_frame():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()

    def hook(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.compiler.is_dynamo_compiling() else x

    _torch.skip_top_frame(hook)
    counter, x = CompileCounter(), torch.ones(2)
    assert torch.compile(hook, backend=counter)(x) is x and counter.frame_count == 0  # as it is
    inside = torch.compile(lambda x: hook(x) + 1, backend=counter, fullgraph=True)
    torch.testing.assert_close(inside(x), x.sin() + 1)  # traced
    assert counter.frame_count == 1
    torch._dynamo.reset()


@_torch.mark_constant
def _found_out(module: nn.Module, key: str) -> tuple[Any, ...]:
    _calls.append((type(module), key))
    return (key, (("weight", 0), (torch.float32, None, True)))


_calls: list[Any] = []


def test_mark_constant():
    torch._dynamo.reset()
    module, x = nn.Linear(2, 2), torch.ones(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        _, ((name, index), (dtype, nothing, is_true)) = _found_out(module, "a")
        return x.to(dtype) + index + 1 if name == "weight" and nothing is None and is_true else x

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), x + 1)
    assert _calls == [(nn.Linear, "a")]
    torch._dynamo.reset()


def test_change_modules_while_traced():
    """Within activation checkpointing Dynamo refuses side effects, but these."""
    torch._dynamo.reset()
    module = nn.Linear(2, 2)

    def change(value: int) -> None:
        module.__dict__["seen"] = value

    def body(x: torch.Tensor) -> torch.Tensor:
        _torch.change_modules_while_traced(change, 1)
        return x.sin()

    def refused(x: torch.Tensor) -> torch.Tensor:
        change(2)
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    for function in (body, refused):
        compiled = torch.compile(
            lambda x, function=function: checkpoint(function, x, use_reentrant=False), backend="eager", fullgraph=True
        )
        if function is body:
            compiled(x)
            assert module.__dict__["seen"] == 1
        else:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="[Ss]ide effect"):
                compiled(x)
    torch._dynamo.reset()


def test_call_after_compilation():
    """Before what was compiled runs; an exception reaches the caller, and later compilations call it again."""
    torch._dynamo.reset()
    calls: list[str] = []
    attempts: list[object] = []

    @_torch.mark_constant
    def note(number: int) -> int:
        attempts.append(_torch.tracing_attempt())
        _torch.call_after_compilation(after)
        return number

    def after() -> None:
        calls.append("compiled")
        if len(calls) == 1:
            raise RuntimeError("of ours")

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append("run")
            return graph(*args)

        return run

    compiled = torch.compile(lambda x: x + note(1) + note(2), backend=backend, fullgraph=True, dynamic=False)
    with pytest.raises(RuntimeError, match="of ours"):
        compiled(torch.ones(2))
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    assert calls == ["compiled", "compiled", "run", "compiled", "run"]
    assert attempts[0] is attempts[1] is not attempts[2] and None not in attempts
    torch._dynamo.reset()  # counts what is pending


def test_was_written_in_graph():
    from torch._functorch.aot_autograd import aot_function
    from torch._subclasses import FakeTensorMode

    seen: list[bool] = []

    def function(x: torch.Tensor, *, writes: bool) -> torch.Tensor:
        made = x * 2
        if writes:
            made.data.mul_(3)
        seen.append(_torch.was_written_in_graph(made))
        return made + 1

    for writes in (False, True):
        aot_function(functools.partial(function, writes=writes), lambda graph, _inputs: graph)(torch.ones(2))
        assert seen and seen[-1] is writes
    assert not _torch.was_written_in_graph(torch.ones(2))
    assert not _torch.was_written_in_graph(torch.ones(2).mul_(2))
    with FakeTensorMode():
        assert not _torch.was_written_in_graph(torch.ones(2))
        assert _torch.was_written_in_graph(torch.ones(2).mul_(2))


def test_in_compiled_autograd():
    from torch._dynamo import compiled_autograd

    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = (x * 2).sum()
        with compiled_autograd._enable(lambda graph: graph):
            y.register_hook(lambda grad: seen.append(_torch.in_compiled_autograd()))
            y.backward()
    assert seen and all(seen) and not _torch.in_compiled_autograd()


def test_tracing_attempt():
    assert _torch.tracing_attempt() is None


def test_functional_collectives():
    with fake_process_group(world_size=2):
        ops, name = _torch.functional_collectives(), dist.group.WORLD.group_name
        x = torch.ones(4)
        assert ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name)).shape == (8,)
        assert ops.wait_tensor(ops.reduce_scatter_tensor(x, "avg", 2, name)).shape == (2,)
        assert ops.wait_tensor(ops.all_reduce(x, "sum", name)).shape == (4,)


def test_namespaces_of_collectives():
    names = "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"
    for namespace, name in zip(_torch.namespaces_of_collectives, names, strict=True):
        assert getattr(getattr(torch.ops, namespace), name).default.namespace == namespace
    assert _torch.functional_collectives().name == _torch.namespaces_of_collectives[1]


def test_process_group_of():
    """Operations take a group as an object, boxed, or by its name."""
    with fake_process_group(world_size=2):
        group, seen = dist.group.WORLD, []

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                names = [item.name for item in func._schema.arguments]
                seen.extend(args[names.index(name)] for name in ("process_group", "group_name") if name in names)
                return func(*args, **(kwargs or {}))

        x = torch.ones(2)
        with Seen():
            dist.all_reduce(x)
            _torch.functional_collectives().all_reduce(x, "sum", group.group_name)
        assert len(seen) == 2 and all(_torch.process_group_of(item).size() == 2 for item in (*seen, group))


def test_all_to_all_on_cpu():
    with fake_process_group(world_size=2):
        placed, names = DTensor.from_local(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(1)]), []

        class Skipped(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace != "_dtensor":
                    return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))
                names.append(func._schema.name)
                return func(torch.empty_like(args[0], device="meta"), *args[1:])

        with _torch.all_to_all_on_cpu(), Skipped():
            assert placed.redistribute(placements=[Shard(0)]).to_local().shape == (2, 4)
        assert names == ["_dtensor::shard_dim_alltoall"]


def test_register_work():
    x = torch.zeros(2)
    _torch.register_work(x, _torch.WorkOfGraph(lambda: x.add_(1), x))
    gc.collect()
    assert _torch.functional_collectives().wait_tensor(x) is x
    torch.testing.assert_close(x, torch.ones(2))


@functools.cache
def _define_times() -> Any:
    """An operation whose result is there when it is waited for, and what keeps it defined."""

    def issue(x: torch.Tensor, number: int) -> torch.Tensor:
        result = torch.empty_like(x)
        _torch.register_work(result, _torch.WorkOfGraph(lambda: result.copy_(x * number), x))
        return result

    schema = "times(Tensor x, int number) -> Tensor"
    library = _torch.define_operations("fsdp_compose_test", {schema: (issue, lambda x, number: torch.empty_like(x))})
    return torch.ops.fsdp_compose_test.times, library


def test_define_operations():
    from torch._subclasses import FakeTensorMode

    operation, wait = _define_times()[0], _torch.functional_collectives().wait_tensor
    torch.testing.assert_close(wait(operation(torch.ones(2), 3)), torch.full((2,), 3.0))
    with FakeTensorMode():
        assert operation(torch.ones(2), 3).shape == (2,)


def test_lower_as_collective():
    """An operation of ours in a graph of Inductor: its input keeps its memory until the result is waited for."""
    import torch._inductor.lowering

    torch._dynamo.reset()
    operation, _ = _define_times()
    _torch.lower_as_collective([operation.default])
    wait = _torch.functional_collectives().wait_tensor

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flight = operation(x @ x, 3)  # by functions of torch's: a compiler of C++ takes seconds
        other = x @ x.T  # of the size of what is read meanwhile
        return other, wait(flight)  # which is the order of what runs

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with torch._inductor.config.patch(force_disable_caches=True):  # which do not know how an operation is lowered
        other, found = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(found, x @ x * 3)
    torch.testing.assert_close(other, x @ x.T)
    torch._dynamo.reset()


def test_skip_frame_does_not_import_dynamo():
    code = """
        import sys
        from fsdp_compose._torch import skip_frame

        def hook():
            pass

        skip_frame(hook)
        assert "torch._dynamo" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


def test_annotations_are_what_dynamo_reads():
    """Equal modules with both annotations share a graph whose parameters are inputs, read anew at each call."""
    from torch._dynamo.testing import CompileCounter

    from fsdp_compose.core.group.hook_decorators import _annotate_modules_for_dynamo

    torch._dynamo.reset()
    counter = CompileCounter()
    layers = [Scale() for _ in range(3)]
    for layer in layers:
        _annotate_modules_for_dynamo(layer, set(), True)
        layer.compile(backend=counter, fullgraph=True)
    x = torch.randn(2, 3)
    for _ in range(2):
        for layer in layers:
            torch.testing.assert_close(layer(x), x * layer.weight + layer.bias)
            layer._parameters = {name: nn.Parameter(value + 1) for name, value in layer._parameters.items()}
    assert counter.frame_count == 1
    torch._dynamo.reset()


# ---- modules and the composable contract -----------------------------------------------------------------------------


def test_parameters_dict_of_a_module_can_be_exchanged():
    linear = nn.Linear(2, 2)
    own, other = linear._parameters, {"weight": nn.Parameter(torch.eye(2)), "bias": None}
    linear.__dict__["_parameters"] = other
    assert linear.weight is other["weight"] and linear.bias is None
    assert list(linear.parameters()) == [other["weight"]]
    assert linear(torch.ones(1, 2)).tolist() == [[1, 1]]
    linear._parameters = own
    assert linear.weight is own["weight"]


def test_hooks_that_would_be_lost_are_seen_on_a_parameter():
    param = nn.Parameter(torch.ones(1))
    assert not param._backward_hooks and not param._post_accumulate_grad_hooks
    param.register_hook(lambda grad: None)
    param.register_post_accumulate_grad_hook(lambda param: None)
    assert param._backward_hooks and param._post_accumulate_grad_hooks


def test_add_composable_state():
    """What it leaves on modules is what ``contract`` leaves, so the APIs of torch see it."""
    ours, theirs, pair = nn.Linear(1, 1), nn.Linear(1, 1), [nn.Linear(1, 1), nn.Linear(1, 1)]
    registered, state = contract(state_cls=_torch.ComposableState)(does_nothing), _torch.ComposableState()
    registered(theirs)
    _torch.add_composable_state([ours], does_nothing, state)
    _torch.add_composable_state(pair, does_nothing, state)
    assert registered.state(ours) is registered.state(pair[0]) is registered.state(pair[1]) is state
    for key in (_torch.STATE_KEY, _torch.REGISTRY_KEY):
        found = [(type(vars(item)[key]), [*vars(item)[key]]) for item in (theirs, ours, *pair)]
        assert found == [found[0]] * 4
    items = [_torch.composable_registry(item)["does_nothing"] for item in (theirs, ours, *pair)]
    assert len({*map(type, items)}) == 1 and items[2] is items[3]
    with pytest.raises(AssertionError, match="does_nothing"):  # has already been applied
        registered(ours)
    contract()(other_api)(ours)
    _torch.add_composable_state([theirs], other_api, state)
    assert [*_torch.composable_registry(ours)] == [*_torch.composable_registry(theirs)] == ["does_nothing", "other_api"]


def test_ComposableState():
    class State(_torch.ComposableState):
        def __init__(self) -> None:
            self.ready = True

    registered = contract(state_cls=State)(lambda module: module)
    assert registered.state(registered(nn.Linear(1, 1))).ready


def test_composable_registry():
    module = nn.Linear(1, 1)
    assert _torch.composable_registry(module) == {}
    contract()(does_nothing)(module)
    assert list(_torch.composable_registry(module)) == ["does_nothing"]


def test_REGISTRY_KEY():
    module = nn.Linear(1, 1)
    contract()(does_nothing)(module)
    assert list(vars(module)[_torch.REGISTRY_KEY]) == ["does_nothing"]


def test_composable_states():
    module = nn.Linear(1, 1)
    assert _torch.composable_states(module) == {}
    assert _torch.STATE_KEY not in vars(module)
    registered = contract()(does_nothing)
    registered(module)
    assert _torch.composable_states(module) == {does_nothing: registered.state(module)}


def test_STATE_KEY():
    module = nn.Linear(1, 1)
    registered = contract()(does_nothing)
    registered(module)
    assert vars(module)[_torch.STATE_KEY][does_nothing] is registered.state(module)


def does_nothing(module: Any) -> Any:
    """A composable API that does nothing."""
    return module


def other_api(module: Any) -> Any:
    """Another one."""
    return module


# ---- process groups --------------------------------------------------------------------------------------------------


@distributed(world_size=(2, 3))
def test_AllgatherOptions(world_size):
    """In place: the input is a slice of the output; asynchronous; uneven neighbours of the slices are not touched."""
    options = _torch.AllgatherOptions()
    options.asyncOp = True
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        whole = torch.full((4 * world_size + 1,), 99).to(dtype)
        own = whole[4 * rank : 4 * rank + 4]
        own.copy_(torch.arange(4) + 10 * rank)
        work = dist.group.WORLD._allgather_base(whole[:-1], own, options)
        work.wait()
        assert whole.tolist() == [10 * r + i for r in range(world_size) for i in range(4)] + [99]


@distributed(world_size=(2, 3))
def test_ReduceScatterOptions(world_size):
    """Averages, into a tensor of its own or into this rank's slice of the input."""
    rank = dist.get_rank()
    average = (world_size - 1) / 2
    for operation, expected in ((dist.ReduceOp.AVG, average), (dist.ReduceOp.SUM, average * world_size)):
        options = _torch.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = operation, True
        for dtype in (torch.float32, torch.bfloat16):
            for in_place in (False, True):
                whole = torch.full((4 * world_size,), float(rank), dtype=dtype)
                output = whole[4 * rank : 4 * rank + 4] if in_place else torch.empty(4, dtype=dtype)
                dist.group.WORLD._reduce_scatter_base(output, whole, options).wait()
                assert output.tolist() == [expected] * 4


@distributed(world_size=(2, 3))
def test_AllreduceOptions(world_size):
    options = _torch.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp(dist.ReduceOp.MAX), True
    memory = bytearray([dist.get_rank(), 255 - dist.get_rank(), 7])
    dist.group.WORLD.allreduce([torch.frombuffer(memory, dtype=torch.uint8)], options).wait()
    assert list(memory) == [world_size - 1, 255, 7]


@distributed(world_size=3)
def test_make_gloo_group():
    """Two are connected when both first send to each other; a third one need not be there."""
    for name in ("a", "b"):
        made = _torch.make_gloo_group(
            dist.group.WORLD, dist.PrefixStore(f"test_make_gloo_group/{name}", _torch.default_store())
        )
        rank, value = dist.get_rank(), torch.zeros(1)
        if rank < 2:
            messages = _torch.gloo_messages(made)
            works = [messages.recv([value], 1 - rank, 5), messages.send([torch.ones(1) + rank], 1 - rank, 5)]
            assert all(work.wait(timedelta(seconds=20)) for work in works) and value.item() == 2 - rank
        dist.barrier()


@distributed(world_size=3, fresh=True)
def test_make_gloo_group_connects_ranks_when_they_first_send():
    """Only the connections that there are, are looked at, and closed."""
    made = _torch.make_gloo_group(dist.group.WORLD, dist.PrefixStore("remember", _torch.default_store()))
    rank, value, connected = dist.get_rank(), torch.zeros(1), list[int]()
    if rank < 2:
        messages = _torch.gloo_messages(made)
        works = [messages.recv([value], 1 - rank, 5), messages.send([torch.ones(1)], 1 - rank, 5)]
        assert all(work.wait(timedelta(seconds=20)) for work in works)
        connected.append(1 - rank)
    assert not any(_torch.is_gloo_connection_closed(made, other, connected) for other in range(3) if other != rank)
    dist.barrier()
    if rank == 0:
        _torch.close_gloo_connections(made, connected)
    elif rank == 1:
        deadline = time.monotonic() + 20
        while not _torch.is_gloo_connection_closed(made, 0, connected) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _torch.is_gloo_connection_closed(made, 0, connected)
    dist.barrier()


CHUNK = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))


def plans_of_two_ranks() -> list[SavePlan]:
    data = TensorWriteData(CHUNK, TensorProperties(torch.float32), torch.Size([2]))
    item = WriteItem(MetadataIndex("w", CHUNK.offsets), WriteItemType.SHARD, tensor_data=data)
    return [SavePlan([item]), SavePlan([item])]


def test_dedup_save_plans():
    """If two ranks plan to save one part, one of them keeps it."""
    plans = _torch.dedup_save_plans(plans_of_two_ranks(), False)
    assert sorted(len(plan.items) for plan in plans) == [0, 1]


def test_admit_several_chunks():
    """What is replaced is there, and torch calls it with these arguments; tests/checkpoint/test_torch_writers.py tries
    what becomes of it."""
    arguments = {
        dcp.FileSystemWriter._write_data: ["self", "planner", "file_queue"],
        dcp.HuggingFaceStorageWriter.prepare_global_plan: ["self", "plans"],
        planner_helpers._create_write_item_for_bytesio: ["fqn", "bytes"],
        consolidation._write_sub_tensor_to_file_optimized: [
            *("full_tensor_mv", "sub_tensor_bytes", "element_size"),
            *("tensor_shape", "sub_tensor_offsets", "sub_tensor_shape"),
        ],
    }
    for function, names in arguments.items():
        assert function.__module__.startswith("torch.") and hasattr(function, "__wrapped__")
        assert [*inspect.signature(function).parameters] == names


def test_plan_errors():
    """What is missing, and what is there twice, is told."""
    for chunks, is_wrong in (([CHUNK], False), ([CHUNK, CHUNK], True), ([], True)):
        metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), chunks)})
        assert bool(_torch.plan_errors(plans_of_two_ranks(), metadata)) == is_wrong


@pytest.mark.parametrize("is_like_another", (False, True))
@distributed(world_size=3)
def test_make_group_of(world_size, is_like_another):
    """Two of three ranks make it alone; what torch offers for all its groups works on it."""
    if dist.get_rank() == 0:
        return
    like = dist.group.WORLD if is_like_another else None
    made = _torch.make_group_of((1, 2), f"test_make_group_of/{is_like_another}", timedelta(seconds=60), like)
    assert dist.get_backend(made) == "gloo"
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value, group=made)
    objects = [None, None]
    dist.all_gather_object(objects, dist.get_rank(), group=made)
    assert value.item() == world_size and objects == [1, 2] and dist.get_process_group_ranks(made) == [1, 2]
    assert _torch.group_timeout(made) == timedelta(seconds=60) and not _torch.is_destroyed(made)
    dist.destroy_process_group(made)
    assert _torch.is_destroyed(made)


@distributed(world_size=2)
def test_mend_mesh():
    """Whole files of each version are loaded by tests/checkpoint/test_written_checkpoints.py."""
    mesh = init_device_mesh("cpu", (2,))
    pickled = pickle.loads(pickle.dumps(mesh))
    vars(pickled).pop("_preserve_rank_order", None)
    if hasattr(_mesh_layout, "_FlatLayout"):  # since 2.13; what 2.12 pickles
        pickled._layout = object.__new__(_mesh_layout._MeshLayout)
        vars(pickled._layout).update(shape=2, stride=1)
    _torch.mend_mesh(pickled)
    assert pickled == mesh and pickled.mesh.tolist() == [0, 1] and pickled.get_group().size() == 2


@distributed(world_size=4)
def test_flatten_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flattened = _torch.flatten_mesh(mesh)
    assert flattened.ndim == 1 and flattened.mesh.tolist() == [0, 1, 2, 3]
    assert _torch.flatten_mesh(mesh).get_group() is flattened.get_group()


def test_root_mesh():
    with fake_process_group(world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert _torch.root_mesh(mesh) is mesh and _torch.root_mesh(mesh["b"]) is mesh
        assert _torch.root_mesh(mesh._flatten()) is mesh


def test_mesh_slices():
    with fake_process_group(world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert _torch.mesh_slices(mesh).tolist() == [[[0, 1], [2, 3]]]
        assert _torch.mesh_slices(mesh["a"]).tolist() == [[0, 2], [1, 3]]
        assert _torch.mesh_slices(mesh._flatten()).tolist() == [[0, 1, 2, 3]]


def test_fsdp2():
    assert _torch.fsdp2.fully_shard is torch.distributed.fsdp.fully_shard
    with fake_process_group():
        assert isinstance(_torch.fsdp2.fully_shard(nn.Linear(2, 2)), _torch.fsdp2.FSDPModule)


def test_fsdp2_mesh_info():
    with fake_process_group(world_size=4):
        for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard"))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            assert _torch.fsdp2_mesh_info(mesh).mesh is mesh


@distributed(world_size=2)
def test_is_destroyed():
    group = dist.new_group()
    dist.barrier(group)  # all have connected
    assert not _torch.is_destroyed(group) and not _torch.is_destroyed(dist.group.WORLD)
    dist.destroy_process_group(group)
    assert _torch.is_destroyed(group) and not _torch.is_destroyed(dist.group.WORLD)


@distributed(world_size=3, fresh=True)
def test_close_gloo_connections():
    """A rank that waits for one that has given up hears of it."""
    if dist.get_rank() == 0:
        _torch.close_gloo_connections(dist.group.WORLD)
    with pytest.raises(RuntimeError, match="losed|closure|reset"):
        dist.group.WORLD.recv([torch.empty(1)], 0 if dist.get_rank() else 1, 0).wait()


@distributed(world_size=3, fresh=True)
def test_is_gloo_connection_closed():
    """Noticed without being waited for; looking leaves open connections as they are."""
    group, rank = dist.group.WORLD, dist.get_rank()
    others = [other for other in range(3) if other != rank]
    for _ in range(3):
        assert not any(_torch.is_gloo_connection_closed(group, other) for other in others)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 3
    if rank == 0:
        _torch.close_gloo_connections(group)
        return
    deadline = time.monotonic() + 20
    while not _torch.is_gloo_connection_closed(group, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _torch.is_gloo_connection_closed(group, 0)


@distributed(world_size=2, fresh=True)
def test_has_closed():
    """As ``is_gloo_connection_closed``, whoever has made the connections."""
    group, other = dist.group.WORLD, 1 - dist.get_rank()
    assert not _torch.has_closed(group, other)
    dist.barrier()
    if other == 1:
        _torch.close_gloo_connections(group)
        return
    deadline = time.monotonic() + 20
    while not _torch.has_closed(group, other) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _torch.has_closed(group, other)


@distributed(world_size=2, fresh=True)
def test_stop_waiting_for():
    """A message is waited for no more, whether it was to be sent or received; others are."""
    group, other = dist.group.WORLD, 1 - dist.get_rank()
    for tag, begin in enumerate((group.recv, group.send)):
        message, stopped = begin([torch.empty(1)], other, tag), []
        timer = threading.Timer(0.1, lambda message=message, stopped=stopped: stopped.append(stop(message)))
        timer.start()
        assert message.wait(timedelta(seconds=20)) is False
        timer.join()
        assert stopped == [True]
    value = torch.zeros(1)
    works = [group.recv([value], other, 6), group.send([torch.ones(1)], other, 6)]
    assert all(work.wait(timedelta(seconds=20)) for work in works) and value.item() == 1
    work = dist.all_reduce(value, async_op=True)
    assert not stop(work) and not stop(None) and not stop(value)
    work.wait()
    assert value.item() == 2


def stop(message):
    return _torch.stop_waiting_for(message)


@distributed(world_size=2)
def test_gloo_messages():
    """``test_make_gloo_group`` sends some."""
    for backend in ("gloo", "cpu:gloo", None):
        group = dist.new_group(backend=backend)
        assert _torch.gloo_messages(group) is not None, backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        dist.set_debug_level_from_env()
        try:
            assert _torch.gloo_messages(dist.new_group()) is not None
        finally:
            patch.undo()
            dist.set_debug_level_from_env()


def test_a_fake_group_has_no_gloo_messages():
    with fake_process_group():
        assert _torch.gloo_messages(dist.group.WORLD) is None


def test_collectives_of_the_fake_group():
    with fake_process_group(rank=1, world_size=4):
        whole = torch.ones(8)
        for call, tensors in (("_allgather_base", (whole, whole[2:4])), ("_reduce_scatter_base", (whole[2:4], whole))):
            options = _torch.AllgatherOptions() if call == "_allgather_base" else _torch.ReduceScatterOptions()
            getattr(dist.group.WORLD, call)(*tensors, options).wait()


@distributed(world_size=2)
def test_default_store():
    store = _torch.default_store()
    store.set(f"test_default_store/{dist.get_rank()}", "hello")
    store.wait([f"test_default_store/{rank}" for rank in range(2)], timedelta(seconds=20))
    assert store.get("test_default_store/1") == b"hello"
    with pytest.raises(dist.DistStoreError):
        store.wait(["test_default_store/never"], timedelta(seconds=0.1))


@distributed(world_size=2)
def test_group_device_types():
    assert "cpu" in _torch.group_device_types(dist.group.WORLD)
    assert _torch.group_device_types(dist.group.WORLD) <= {"cpu", "cuda", "mps", "xpu", "hpu"}


@distributed(world_size=2)
def test_group_timeout():
    seconds = 123.0
    assert _torch.group_timeout(dist.new_group(timeout=timedelta(seconds=seconds))).total_seconds() == seconds


@distributed(world_size=2, fresh=True)
def test_group_timeout_reader():
    group = dist.group.WORLD
    read = _torch.group_timeout_reader(group)
    _torch.set_group_timeout(timedelta(seconds=77))
    assert read() == _torch.group_timeout(group) == timedelta(seconds=77)


def test_group_timeout_of_a_group_that_has_none():
    with fake_process_group():
        assert _torch.group_timeout(dist.group.WORLD) >= timedelta(minutes=1)


@distributed(world_size=2, fresh=True)
def test_set_group_timeout():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch 2.14 and later: the private name is deprecated
        _torch.set_group_timeout(timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.barrier()


def test_finalizes_gradients():
    """Whole schedules: tests/drop_in/test_pipeline.py."""

    class Schedule(ScheduleGPipe):
        def ask(self):
            return _torch.finalizes_gradients()

    schedule = object.__new__(Schedule)
    assert _torch.finalizes_gradients() and schedule.ask()
    for finalizes in (False, True):
        schedule._finalize_gradients = finalizes
        assert schedule.ask() is finalizes
    has_it = "finalize_gradients" in inspect.signature(ScheduleGPipe.step).parameters
    assert has_it == ("_finalize_gradients" in inspect.getsource(ScheduleGPipe))


def test_fake_store():
    dist.init_process_group("fake", store=_torch.fake_store(), rank=3, world_size=1024)
    try:
        dist.barrier()
        assert (dist.get_rank(), dist.get_world_size()) == (3, 1024)
    finally:
        dist.destroy_process_group()


# ---- wrappers and state dicts


def test_notice_optimizers(monkeypatch):
    """Also one whose class leaves out the constructor of the base class, which marks the class."""

    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            """Do nothing."""

    class Alone(torch.optim.Optimizer):
        def __init__(self, params, lr):
            self.param_groups, self.state, self.defaults = [{"params": [*params], "lr": lr}], {}, {}

    monkeypatch.setattr(torch.optim.Optimizer, "__new__", torch.optim.Optimizer.__new__)
    seen: list[Any] = []
    assert not hasattr(vars(Own)["step"], "hooked")
    assert _torch.notice_optimizers(seen.append), "Own is nobody's"
    optimizer, param = Own([nn.Parameter(torch.zeros(1))], {}), nn.Parameter(torch.zeros(1))
    assert hasattr(vars(Own)["step"], "hooked")
    twins = [
        copy.copy(optimizer),
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(torch.optim.SGD([torch.zeros(1)], 0.1))),
        Alone([param], lr=0.1),
    ]
    assert len(seen) == 6 and all(any(item is twin for item in seen) for twin in (optimizer, *twins))


def test_loads_as_torch():
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)

    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    assert _torch.loads_as_torch(optimizer) and not _torch.loads_as_torch(Own([param], lr=0.1))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"wide": torch.zeros(1)}}})
    assert optimizer.state[param]["wide"].dtype == torch.bfloat16, "what the package undoes"


def test_loads_as_torch_module():
    def known(*_):
        return None

    class Own(nn.Module):
        def _load_from_state_dict(self, *arguments):
            super()._load_from_state_dict(*arguments)

    module = nn.Linear(1, 1)
    assert _torch.loads_as_torch_module(module, known) and not _torch.loads_as_torch_module(Own(), known)
    module.register_load_state_dict_pre_hook(known)
    assert _torch.loads_as_torch_module(module, known)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    assert not _torch.loads_as_torch_module(module, known)


def test_saves_as_torch_module():
    class Own(nn.Module):
        def _save_to_state_dict(self, *arguments):
            super()._save_to_state_dict(*arguments)

    module = nn.Linear(1, 1)
    assert _torch.saves_as_torch_module(module) and not _torch.saves_as_torch_module(Own())
    module._save_to_state_dict = lambda *_: None
    assert not _torch.saves_as_torch_module(module) and not module.state_dict(), "which torch calls"


def test_hook_saved_first():
    model, seen = nn.Sequential(nn.Linear(1, 1)), []
    model[0].register_state_dict_post_hook(lambda _, state, *__: seen.append(("theirs", [*state])))
    _torch.hook_saved_first(model[0], lambda _, state, prefix, __: seen.append((prefix, [*state])))
    model.state_dict()
    assert seen == [("0.", ["0.weight", "0.bias"]), ("theirs", ["0.weight", "0.bias"])]


def test_versions_of():
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    assert _torch.versions_of(state) == {"": {"version": 1}, "0": {"version": 2}} and _torch.versions_of({}) == {}


def test_with_versions():
    seen = []

    class Versioned(nn.Module):
        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *_):
            seen.append(local_metadata.get("version"))

    nn.Sequential(Versioned()).load_state_dict(_torch.with_versions({}, {"0": {"version": 7}}))
    assert seen == [7]


def test_CheckpointWrapper():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    assert type(checkpoint_wrapper(nn.Linear(1, 1))) is _torch.CheckpointWrapper


def test_data_parallelism_of_torch():
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with fake_process_group():
        applied = {
            "DistributedDataParallel": nn.parallel.DistributedDataParallel(nn.Linear(1, 1)),
            "FSDP1": FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu")),
            "FSDP2": fully_shard(nn.Linear(1, 1)),
            "replicate": replicate(nn.Linear(1, 1)),
        }
        for name, module in applied.items():
            assert name in _torch.data_parallelism_of_torch(module)
        assert _torch.data_parallelism_of_torch(drop_in.fully_shard(nn.Linear(1, 1))) == ""
    assert _torch.data_parallelism_of_torch(nn.Linear(1, 1)) == ""


def test_wrapper_under_construction():
    class Spy(nn.Module):
        def named_modules(self, *args, **kwargs):
            seen.append(_torch.wrapper_under_construction())
            return super().named_modules(*args, **kwargs)

    seen = []
    inner = Spy()
    inner.weight = nn.Parameter(torch.ones(1))
    with fake_process_group():
        nn.parallel.DistributedDataParallel(inner)
        torch.distributed.fsdp.FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
    assert {("DistributedDataParallel", inner), ("FullyShardedDataParallel", inner)} <= {*seen}
    assert _torch.wrapper_under_construction() is None


def test_wrapped_child():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    linear = nn.Linear(1, 1)
    assert _torch.wrapped_child(linear) is None and _torch.wrapped_child(nn.Sequential(linear)) is None
    wrappers = [checkpoint_wrapper(linear), torch.compile(linear)]
    with fake_process_group():
        wrappers.append(nn.parallel.DistributedDataParallel(linear))
    for wrapper in wrappers:
        name = _torch.wrapped_child(wrapper)
        assert name is not None and wrapper._modules[name] is linear


def test_is_shard_of_rows():
    for placement in (Shard(0), _torch.rows_within(2)):
        assert _torch.is_shard_of_rows(placement)
    for other in (Shard(1), Replicate(), Partial(), None):
        assert not _torch.is_shard_of_rows(other)


def test_StridedShard():
    placement = _torch.StridedShard(0, split_factor=2)
    assert (placement.dim, placement.split_factor) == (0, 2) and not placement.is_replicate()
    with fake_process_group(rank=1, world_size=2):  # the second half of each of two parts
        whole = torch.arange(8)
        part = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [placement], src_data_rank=None)
        assert part.to_local().tolist() == [2, 3, 6, 7]


def test_rows_within():
    assert _torch.rows_within(1) == Shard(0)
    with fake_process_group(rank=1, world_size=4):  # rank 0, 1 of the second dimension
        mesh = init_device_mesh("cpu", (2, 2))
        places = [_torch.rows_within(2), Shard(0)]
        assert _torch.compute_local_shape_and_global_offset((8, 3), mesh, places) == ((2, 3), (4, 0))


def test_IncompatibleKeys():
    result = nn.Linear(1, 1).load_state_dict({"zzz": torch.ones(1)}, strict=False)
    assert type(result) is _torch.IncompatibleKeys
    assert result == _torch.IncompatibleKeys(["weight", "bias"], ["zzz"])


def test_backwards():
    """Counted from the first fully_shard() on; here, a part of the package has been imported that intercepts them."""
    from fsdp_compose.core.runtime import notice_inputs

    notice_inputs()
    before = _torch.backwards.count
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)
    assert _torch.backwards.count == before + 2


def test_intercept_backward_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []

    def run(original: Any, inputs: tuple[Any, ...], allow_unused: bool, accumulates: bool) -> Any:
        calls.append((len(inputs), accumulates))
        return original(inputs, allow_unused)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    _torch.intercept_backward_inputs(run)
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    leaf.sum().backward(inputs=[leaf])
    assert torch.autograd.grad(leaf.sum(), [leaf, other], allow_unused=True)[1] is None
    assert calls == [(1, True), (2, False)]
    torch.testing.assert_close(leaf.grad, torch.full((2,), 2.0))


def test_is_part_of_multi_grad_hook() -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: grad)
    torch.autograd.graph.register_multi_grad_hook([leaf], lambda _: None, mode="any")
    assert not any(map(_torch.is_part_of_multi_grad_hook, _torch.gradient_hooks(leaf)))
    torch.autograd.graph.register_multi_grad_hook([leaf], lambda _: None)
    assert _torch.is_part_of_multi_grad_hook(_torch.gradient_hooks(leaf)[-1])


def test_is_wrapper() -> None:
    assert _torch.is_wrapper(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not _torch.is_wrapper(nn.Parameter(torch.ones(2)))


def test_is_fake() -> None:
    with FakeTensorMode():
        made = torch.ones(2)
    assert _torch.is_fake(type(made)) and not _torch.is_fake(DTensor)


def test_make_wrapper() -> None:
    made = _torch.make_wrapper(TwoTensor, (3, 2), (2, 1), torch.bfloat16, torch.device("cpu"))
    assert type(made) is TwoTensor and not vars(made) and not made.requires_grad
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((3, 2), (2, 1), torch.bfloat16, "cpu")


def test_the_class_of_a_parameter_can_be_changed() -> None:
    """Replaced parameters become stand-ins."""

    class Other(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "intercepted"

    param: Any = nn.Parameter(torch.ones(2))
    param.__class__ = Other
    assert param.grad == param.shape == param.add(1) == torch.add(param, 1) == "intercepted"


# ---- checkpoints and placements


def test_StorageInfo(tmp_path):
    dcp.save({"a": torch.ones(3), "b": 1}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    metadata = pickle.loads((tmp_path / "checkpoint" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        assert type(info) is _torch.StorageInfo
        assert info.relative_path == "__0_0.distcp" and info.offset >= 0 and info.length > 0


@distributed(world_size=2)
def test_admit_placements():
    """torch's from_local, redistribute, distribute_tensor, state-dict setters and the box of a rank call what _torch.py
    has replaced."""
    mesh = init_device_mesh("cpu", (2,))
    placement, rank = fsdp_compose.RaggedShard((5, 1), flat=True), dist.get_rank()
    full = torch.arange(6.0).view(2, 3)
    local = full.view(-1)[:5] if rank == 0 else full.view(-1)[5:]
    made = DTensor.from_local(local.clone().requires_grad_(), mesh, [placement], shape=full.shape, stride=full.stride())
    assert type(made) is fsdp_compose.RaggedDTensor and made.requires_grad
    made.sum().backward()
    assert type(torch.distributed.tensor.distribute_tensor(full, mesh, [placement])) is fsdp_compose.RaggedDTensor
    assert type(DTensor.from_local(full, mesh).redistribute(placements=[placement])) is fsdp_compose.RaggedDTensor
    rows = fsdp_compose.RaggedShard((2, 0))
    assert _torch.compute_local_shape_and_global_offset((2, 3), mesh, [rows]) == ((2 - 2 * rank, 3), (2 * rank, 0))
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = fsdp_compose.fully_shard(nn.Linear(5, 7), granularity=lambda fqn, param: "elements")
        assert model.weight.placements[0].flat
        weight = torch.arange(35.0).view(7, 5)
        state = {"weight": weight, "bias": weight[:, 0].clone()} if rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        assert torch.equal(model.weight.full_tensor(), weight)


def test_outside_modes():
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    def compute() -> torch.Tensor:
        with _torch.outside_modes():
            made = torch.zeros(2)
            made.add_(torch.ones_like(made))
            assert type(made) is torch.Tensor and not made.is_inference() and made.data_ptr()
            return made

    for mode in (contextlib.nullcontext(), torch.inference_mode(), Refusing()):
        with mode:
            made = compute()
        made.add_(1)

    def inside(x: torch.Tensor) -> torch.Tensor:
        compute()
        return x.square()

    torch.func.grad(lambda x: torch.func.vmap(inside)(x).sum())(torch.ones(2))


def test_without_modes():
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        with _torch.without_modes():
            torch.ones(2).add_(1)
        assert mode.count == 0
        torch.ones(2).add_(1)
    assert mode.count == 2


@distributed(world_size=4)
def test_concatenate_meshes():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    joined = _torch.concatenate_meshes([mesh["a", "b"], mesh["c"]])
    assert joined == mesh and joined.mesh_dim_names == ("a", "b", "c") and torch.equal(joined.mesh, mesh.mesh)
    other = _torch.concatenate_meshes([mesh["c"], mesh["a"]])
    assert other.mesh_dim_names == ("c", "a") and torch.equal(other.mesh, mesh.mesh[:, 0].t())
    assert other.get_group(0) is mesh["c"].get_group() and other.get_group("a") is mesh["a"].get_group()
    for wrong in (init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), mesh["c"], init_device_mesh("cpu", (4,))):
        with pytest.raises(RuntimeError):
            _torch.concatenate_meshes([mesh["c"], wrong])


@distributed(world_size=2)
def test_waited():
    """What autograd leaves as the gradient of a DTensor may be the result of a collective that is still in flight."""
    mesh = init_device_mesh("cpu", (2,))
    terms = DTensor.from_local(torch.full((3,), 1.0 + dist.get_rank()), mesh, [Partial()])
    local = terms.redistribute(placements=[Replicate()], async_op=True)._local_tensor
    assert type(local) is not torch.Tensor
    assert type(_torch.waited(local)) is torch.Tensor and torch.equal(_torch.waited(local), torch.full((3,), 3.0))
    plain = torch.ones(2)
    assert _torch.waited(plain) is plain
