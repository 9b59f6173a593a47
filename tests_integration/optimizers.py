"""Every optimizer of torch, timm, pytorch-optimizer, schedulefree and optimi, and three steps of each."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

PACKAGES = ("torch.optim", "timm", "pytorch_optimizer", "schedulefree", "optimi")

# ---- Discovery


@cache
def found() -> dict[str, Callable[..., Any]]:
    """Every optimizer, by name; new versions of the packages may add some."""
    result = {f"timm.{name}": make for name, make in _of_timm()}
    for package in (name for name in PACKAGES if name != "timm"):
        module = importlib.import_module(package)
        for name, item in vars(module).items():
            is_optimizer = inspect.isclass(item) and issubclass(item, Optimizer) and item is not Optimizer
            if is_optimizer and item.__module__.startswith(package):
                result[f"{package.removesuffix('.optim')}.{name}"] = item
            elif name.startswith("ScheduleFreeWrapper") and item.__module__.startswith("schedulefree"):
                result[f"{package}.{name}"] = item  # these are no subclasses of Optimizer
    return result


def _of_timm() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What timm's registry of optimizers has from timm itself. Its models need torchvision; its optimizers do not."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    for name, folder in (("timm", root), ("timm.models", None), ("timm.optim", root / "optim")):
        module = types.ModuleType(name)
        module.__path__ = [] if folder is None else [str(folder)]
        sys.modules[name] = module
    sys.modules["timm.models"].group_parameters = None  # type: ignore[attr-defined]
    orthogonalize = importlib.import_module("timm.optim.muon").zeropower_via_newtonschulz
    # In bfloat16 timm's two ways to compute it, of which one is for DTensors, differ by rounding.
    defaults = orthogonalize.__defaults__
    orthogonalize.__defaults__ = tuple([torch.float64 if item is torch.bfloat16 else item for item in defaults])
    factory = importlib.import_module("timm.optim._optim_factory")
    for info in factory.default_registry._optimizers.values():
        if getattr(info.opt_class, "__module__", "").startswith("timm."):
            yield info.name, _Registered(info.opt_class, dict(info.defaults or {}))
    yield "Lookahead", importlib.import_module("timm.optim.lookahead").Lookahead


class _Registered:
    """A class of timm with the options that its registry gives it."""

    def __init__(self, optimizer: type[Optimizer], options: dict[str, Any]) -> None:
        self.__signature__ = inspect.signature(optimizer)
        self.optimizer, self.options = optimizer, options
        self.step = optimizer.step

    def __call__(self, *args: Any, **kwargs: Any) -> Optimizer:
        return self.optimizer(*args, **{**self.options, **kwargs})


# ---- How each is made


_OPTIONS = {"num_iterations": 10, "num_data": 12}
SECOND_ORDER = ("Adahessian", "AdaHessian", "SophiaH")  # their steps differentiate gradients
_SINGLE_PRECISION = ("FAdam", "TRAC")  # they compute in float32
_SIMPLE = ("AdaLOMO", "ScheduleFreeWrapper", "TRAC")  # they raise for scalars or kernels
_ONLY_MATRICES = ("SpectralSphere", "torch.Muon")
_CLOSURES = ("AliG", "BSAM", "FriendlySAM", "GSAM", "LBFGS", "LookSAM", "SAM", "WSAM")


def _is_in(name: str, table: tuple[str, ...]) -> bool:
    return name in table or short(name) in table


def short(name: str) -> str:
    """The name of the class."""
    construct = found()[name]
    return construct.optimizer.__name__ if isinstance(construct, _Registered) else name.rpartition(".")[2]


def make(name: str, model: nn.Module, params: list[Any]) -> Any:
    construct = found()[name]
    parameters = inspect.signature(construct).parameters
    if _is_in(name, _ONLY_MATRICES):
        params = [p for p in params if p.ndim == 2]
    base = SGD(params, lr=0.1, momentum=0.9)
    given: dict[str, Any] = {"params": params, "model": model, "optimizer": base, "base": base, **_OPTIONS}
    if "base_optimizer" in parameters:
        takes_class = "type" in str(parameters["base_optimizer"].annotation).lower()
        given["base_optimizer"] = SGD if takes_class else base
    chosen = {key: given[key] for key in parameters if key in given}
    if "rho_scheduler" in parameters:
        chosen["rho_scheduler"] = types.SimpleNamespace(step=lambda: 0.05)
    if "lr" in parameters or chosen.get("base_optimizer") is SGD:
        chosen["lr"] = 0.01
    if isinstance(construct, _Registered) and construct.options.get("nesterov") and "momentum" in parameters:
        chosen["momentum"] = 0.9
    if name.startswith("pytorch_optimizer.") and ("Muon" in name or "AdaGO" in name):
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        chosen["params"] = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return construct(**chosen)


# ---- Three steps


class Net(nn.Module):
    """Matrices, vectors and, unless ``is_simple``, a kernel and a scalar, in sizes that few numbers of ranks divide."""

    def __init__(self, is_simple: bool) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.Unflatten(1, (5, 1)))
        if not is_simple:
            self.start = nn.Conv1d(3, 5, 2)
        self.first = nn.Linear(5, 9)
        self.norm = nn.LayerNorm(9)
        self.scale = nn.Parameter(torch.tensor(1.2)) if not is_simple else 1.2
        self.second = nn.Linear(9, 7)
        self.last = nn.Linear(7, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.start(x)).mean(2)
        hidden = torch.tanh(self.norm(self.first(hidden)))
        result: torch.Tensor = self.last(torch.tanh(self.second(hidden)) * self.scale)
        return result


def model_for(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net(_is_in(name, _SIMPLE))
    return model if _is_in(name, _SINGLE_PRECISION) else model.double()


def three_steps(
    name: str,
    model: nn.Module,
    params: list[Any],
    part: Callable[[torch.Tensor], torch.Tensor],
    mean: Callable[[torch.Tensor], torch.Tensor],
    **options: Any,
) -> None:
    """Step three times, each rank with its ``part`` of a batch; ``mean`` averages a loss over the ranks."""
    torch.manual_seed(5)
    optimizer = make(name, model, params)
    for group in optimizer.param_groups if options else ():
        group.update(options)
    dtype = next(model.parameters()).dtype
    if hasattr(optimizer, "train"):
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.train()
    for i in range(3):
        x = torch.randn(12, 3, 6, generator=torch.Generator().manual_seed(i)).to(dtype)

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            result: torch.Tensor = model(part(x)).square().mean()
            return result

        @torch.enable_grad()
        def closure(loss: Callable[[], torch.Tensor] = loss) -> Any:
            optimizer.zero_grad()
            result = loss()
            result.backward(create_graph=_is_in(name, SECOND_ORDER))
            return (None, mean(result)) if short(name) == "GSAM" else mean(result)

        if hasattr(optimizer, "fused_backward"):
            optimizer.fused_backward(loss(), 0.01)
            continue
        closure()
        torch.manual_seed(7 + i)
        optimizer.step(closure) if needs_closure(name) else optimizer.step()


def needs_closure(name: str) -> bool:
    closure = inspect.signature(found()[name].step).parameters.get("closure")
    return _is_in(name, _CLOSURES) or (closure is not None and closure.default is inspect.Parameter.empty)


def largest_error(model: nn.Module, reference: nn.Module, start: nn.Module) -> tuple[float, str]:
    """The largest difference from the reference, relative to how far that parameter has moved, and where."""
    result = (0.0, "")
    triples = zip(model.named_parameters(), reference.parameters(), start.parameters(), strict=True)
    for (fqn, param), expected, before in triples:
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        error = (whole - expected).abs().max() / ((expected - before).abs().max() + 1e-12)
        result = max(result, (float(error.nan_to_num(float("inf"))), fqn))
    return result
