"""Arguments of wrong types are refused where they are given, and a size is written the same way everywhere."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from fsdp_compose import WireFormat, drop_in, fully_shard, replicate, set_transport, set_wire_formats
from fsdp_compose._arguments import checked, size_of
from fsdp_compose.errors import MisuseError, MisuseTypeError
from tests.harness import ROOT, distributed

SIZES = {
    123: 123, "123": 123, "12 B": 12, "256MB": 256 * 10**6, "40.5GB": 40_500_000_000, "1.5 GiB": 3 << 29,
    "4kib": 4096, "2T": 2 * 10**12, "0.5KiB": 512,
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    assert size_of(size, "f(size={})") == SIZES[size]


@pytest.mark.parametrize("size", ["", "MB", "256 groups", "-1MB", "1.5.GB", "0", "0.1B", 0, -5])
def test_no_sizes(size):
    with pytest.raises(
        MisuseError, match=r"f\(size=.*\): expected a positive number of bytes, or a text such as '256MB'"
    ):
        size_of(size, "f(size={})")


@pytest.mark.parametrize("size", [None, True, 2.5, [1], torch.tensor(3)])
def test_sizes_of_wrong_types(size):
    with pytest.raises(MisuseTypeError, match=r"f\(size=.*number of bytes"):
        size_of(size, "f(size={})")


@checked(wrap="a function that wraps")
def call(
    module: nn.Module,
    number: int = 1,
    *,
    factor: float | None = None,
    folder: str | Path = ".",
    flag: bool = False,
    dtype: torch.dtype | None = None,
    wrap: Callable[[int], int] | None = None,
    names: Sequence[str] = (),
) -> str:
    return f"{number} {factor}"


def test_arguments_of_the_annotated_types_pass():
    numpy = pytest.importorskip("numpy")
    assert call(nn.Linear(1, 1), numpy.int64(3), factor=2, folder=Path(), wrap=abs, names=["a"]) == "3 2"
    assert call(nn.ReLU(), factor=torch.tensor(0.5), dtype=torch.half, names=nn.ModuleList()) == "1 0.5"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"module": nn.ReLU}, f"call(module={nn.ReLU}): expected an nn.Module"),
        ({"number": "3"}, r"call(number='3'): expected a whole number, got str"),
        ({"number": True}, r"call(number=True): expected a whole number, got bool"),
        ({"factor": "0.1"}, r"call(factor='0.1'): expected a number or None, got str"),
        ({"folder": 3}, r"call(folder=3): expected a string or a path, got int"),
        ({"flag": 1}, r"call(flag=1): expected True or False, got int"),
        ({"dtype": "bf16"}, r"call(dtype='bf16'): expected a torch.dtype such as torch.bfloat16 or None, got str"),
        ({"wrap": nn.Parameter()}, r"call(wrap=...): expected a function that wraps, got Parameter"),
        ({"names": "Block"}, r"call(names='Block'): expected a list, got str"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_other_types_are_refused(wrong, message):
    with pytest.raises(MisuseTypeError) as raised:
        call(**{"module": nn.ReLU()} | wrong)
    assert str(raised.value) == message


# ---- All public functions and constructors

MODULES = ("", ".checkpoint", ".drop_in", ".sync", ".testing", ".tuning")
# What they return, or base classes, or torch's; nobody calls them with arguments of their own.
NOT_CALLED = {
    "ChangedElements", "DataParallelMeshDims", "FSDPGroup", "FSDPModule", "GradientReductionHandle", "LoadPlanner",
    "OffloadPolicy", "ParameterSnapshot", "Plan", "RaggedDTensor", "RaggedShard", "Rejected", "Replicas", "Result",
    "SaveFuture", "SavePlanner", "Schedule", "Shards", "Span", "Trace", "TraceEvent", "Transport", "TransportRole",
    "Tuning", "UnreducedParameter", "UnshardHandle", "WireFormat", "drop_in.CPUOffloadPolicy",
    "drop_in.MixedPrecisionPolicy", "drop_in.DataParallelMeshDims", "drop_in.OffloadPolicy",
}  # fmt: skip
# Their arguments are checked by what they have, and their errors say more.
OWN_CHECKS = {"fully_shard", "replicate", "drop_in.fully_shard", "declare_blockwise", "declare_elementwise"}
TOLD = {"replicas", "model_state_dict", "optim_state_dict"}  # by other means, or to all ranks
REFERENCE = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))


def public() -> dict[str, Callable[..., object]]:
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"fsdp_compose{name}")
        documented = getattr(module, "__all__", None) or [key for key in vars(module) if f"## `{key}`" in REFERENCE]
        for key in documented:
            value, path = getattr(module, key), f"{name}.{key}".strip(".")
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if callable(value) and not is_error and not {key, path} & (NOT_CALLED | OWN_CHECKS):
                found[path] = value
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_refuses_arguments_of_other_types_by_name(name):
    function = PUBLIC[name]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name not in TOLD:
            with pytest.raises(MisuseTypeError, match=f"{parameter.name}="):
                function(**{parameter.name: object()})


@pytest.mark.parametrize("function", [fully_shard, drop_in.fully_shard, replicate])
def test_functions_that_shard_refuse_arguments_of_other_types_by_name(function):
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            with pytest.raises(MisuseTypeError, match=f"{name}="):
                function(nn.Linear(2, 2), **{name: object()})


class Halves(WireFormat):
    """bf16 that counts the bytes of ``size`` for each element."""

    def __init__(self, size: int) -> None:
        self._size = size

    def nbytes(self, numel: int) -> int:
        return self._size * numel

    def encode(self, source: torch.Tensor, packed: torch.Tensor) -> None:
        packed.view(torch.bfloat16).copy_(source)

    def decode(self, packed: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        out.copy_(packed.view(torch.bfloat16))


@distributed(world_size=1)
def test_transports_and_formats_are_tried_where_they_are_given():
    model = drop_in.fully_shard(nn.Linear(4, 4))
    with pytest.raises(MisuseTypeError, match=r"set_transport\(wrap='int8'\): .*set_wire_formats\(\) takes formats"):
        set_transport(model, "int8")
    with pytest.raises(MisuseTypeError, match="the format Halves has no name: set one"):
        set_wire_formats(model, all_gather=Halves(2))
    small = Halves(1)
    small.name = "small"
    with pytest.raises(
        MisuseError, match=r"Halves fails on 1000 elements of fp32: .*Expected nbytes\(\) to return the"
    ):
        set_wire_formats(model, reduce_scatter=small)
    for method in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(
            MisuseTypeError, match=rf"{method.__name__}\(\): expected an object like torch's .*; got None"
        ):
            method(None)
    with pytest.raises(
        MisuseTypeError, match=r"set_reduce_scatter_unused_params\(reduce_scatter_unused_params='yes'\)"
    ):
        model.set_reduce_scatter_unused_params("yes")
    fine = Halves(2)
    fine.name = "fine"
    set_wire_formats(model, all_gather=fine)
    model(torch.ones(2, 4)).sum().backward()
