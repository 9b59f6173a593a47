"""What tests read inside the package: states, handles, gathered memory, collectives."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose import RaggedDTensor, reshard, unshard
from fsdp_compose._torch import Shown
from fsdp_compose.core.comm import failure
from fsdp_compose.core.flat.flat_param import FlatParamHandle
from fsdp_compose.core.group.registry import _get_fsdp_handles, _get_fsdp_states, get_state, states_to_run
from fsdp_compose.core.group.state import _FSDPState
from fsdp_compose.plugins.gloo import journal
from fsdp_compose.plugins.gloo.journal import Journal
from tests.harness import ROOT


def import_all() -> None:
    """Import every file of the package but those of ``drop_in``, frameworks and the command line, also what is imported
    on demand: for what patches a name in each module that has it."""
    for path in (ROOT / "fsdp_compose").rglob("[!_]*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not name.startswith(("fsdp_compose.drop_in", "fsdp_compose.integrations")):
            importlib.import_module(name)


def executed_lines(call: Callable[[], object]) -> int:
    """How many lines of Python ``call()`` executes on this thread: work, however fast the machine is."""
    count = 0

    def trace(_frame: object, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of a sharded model, whole, by FQN. All ranks must call it."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for state, module in sharded_modules(model):
        unshard(module)
        for handle in state._handles:
            for sharded, whole in zip(handle.sharded_params, handle.unsharded.params, strict=True):
                found[names[id(sharded)]] = whole.detach().clone()
        reshard(module)
    return {name: found[name] for name in names.values()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Every gradient of a sharded model, whole, by FQN; ``None`` where there is none. All ranks must call it."""
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, torch.Tensor | None] = {}
    for state, _ in sharded_modules(model):
        for handle in state._handles:
            flat = torch.zeros_like(handle.shard)
            for sharded, (start, stop, _shape) in zip(handle.sharded_params, handle.local_shards, strict=True):
                if sharded.grad is not None:
                    flat[start:stop] = sharded.grad.to_local().flatten()
            whole = torch.empty(handle.layout.flat_numel, dtype=flat.dtype)
            dist.all_gather_into_tensor(whole, flat)
            for sharded, view in zip(handle.sharded_params, handle.full_views_of(whole), strict=True):
                found[names[id(sharded)]] = view.clone() if sharded.grad is not None else None
    return {name: found[name] for name in names.values()}


def sharded_modules(model: nn.Module) -> list[tuple[_FSDPState, nn.Module]]:
    return [(state, state.modules[0]()) for state, _ in states_to_run(model)]


def sharded_params(model: nn.Module) -> list[nn.Parameter]:
    return [sharded for handle in _get_fsdp_handles(model) for sharded in handle.sharded_params]


def assert_nothing_is_unsharded(model: nn.Module) -> None:
    for handle in _get_fsdp_handles(model):
        assert not handle.unsharded.is_allocated and handle.unsharded.memory.nbytes() == 0, f"unsharded: {handle.fqns}"
        assert handle.unsharded.work is None
        assert all(param.grad is None for param in handle.unsharded.params)
    roots = [state.root for state in _get_fsdp_states(model) if state.root is not None]
    assert not any(root.communicator._in_flight for root in roots)


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Ranks that wait for each other tell so after 0.2 seconds, not after three: those of groups made inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "STALL_SECONDS", 0.2)
        for module in (journal, failure):
            patch.setattr(module, "PERIOD", 0.1)
        yield


class Collectives(TorchDispatchMode):
    """Counts the collectives issued inside, by name; also those made of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __enter__(self) -> Collectives:
        enter = Journal.enter

        def count(journal: Journal, kind: str, *args: Any) -> int:
            name = {"all-gather": "allgather_base", "reduce-scatter": "reduce_scatter_base"}.get(kind, kind)
            self.count[name] += 1
            return enter(journal, kind, *args)

        self.patch = mock.patch.object(Journal, "enter", count)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self.patch.stop()
        super().__exit__(*args)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The operators shown for messages are not counted twice.
        if function.namespace == "c10d" and Shown not in types:
            self.count[function._schema.name.removeprefix("c10d::").strip("_")] += 1
        return function(*args, **(kwargs or {}))


def unsharded_bytes(module: nn.Module) -> int:
    """Bytes of unsharded storage that ``module``'s own group holds now."""
    state = get_state(module)
    assert state is not None
    return sum(handle.unsharded.memory.nbytes() for handle in state._handles)


def states_of(model: nn.Module) -> list[_FSDPState]:
    return [state for state, _ in states_to_run(model)]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor: of a sharded one, its local part."""
    return tensor.to_local() if isinstance(tensor, RaggedDTensor) else tensor


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def handles_of(model: nn.Module) -> list[FlatParamHandle]:
    """The flat parameters of a model that has some."""
    handles = _get_fsdp_handles(model)
    assert handles
    return handles


def all_unsharded_bytes(model: nn.Module) -> int:
    """Bytes of unsharded storage that all groups of ``model`` hold now."""
    return sum(handle.unsharded.memory.nbytes() for handle in handles_of(model))


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results. Operators take them alone or in lists, nothing deeper."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(*value)
    return found
