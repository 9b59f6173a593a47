"""Arguments of wrong types are refused where they are given, and a size is written the same way everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from fsdp_compose._arguments import checked, size_of
from fsdp_compose.errors import MisuseError, MisuseTypeError

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
        ({"module": nn.ReLU}, r"call(module=ReLU): expected an nn.Module"),
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
