"""Invariant 11: every group that ran was reduced by the end of backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    fully_shard,
)
from fsdp_compose.core.group import get_state
from tests import harness
from tests.harness import our_warnings, same_on_every_rank
from tests.models import DIM, IN, OUT, ROWS, SmallBlock, rows
from tests.training import (
    assert_gradients_match,
    assert_parameters_match,
    local_part,
    mean_square,
    pair,
    sgd,
)

distributed = functools.partial(harness.distributed, timeout=20)  # seconds; a body takes a fraction of one


class Result:
    """A class of the user's that torch knows nothing about."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class Outcome:
    value: torch.Tensor


class Cache:
    """Like a key/value cache: tensors are in objects in a list in an attribute."""

    def __init__(self, entries: Any) -> None:
        self.entries = entries


class Named(NamedTuple):
    value: torch.Tensor
    note: str


class Layer(nn.Module):
    """A block that returns what ``kind`` says; ``read`` gets its value back from that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer, self.gate = nn.Linear(DIM, 7), nn.Linear(7, DIM), nn.Linear(DIM, 3)
        self.kept: torch.Tensor | None = None
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> Any:
        kind = self.kind
        if kind == "auxiliary loss before the output":
            self.aux = self.gate(x).square().mean()
        value = x + self.outer(torch.tanh(self.inner(x)))
        if kind == "auxiliary loss after the output":
            self.aux = self.gate(x * 2).square().mean()
        elif kind == "auxiliary loss of a parameter":
            self.aux = self.gate.weight.square().mean() + self.outer.weight.square().mean()
        elif kind in ("a detached tensor", "a number"):
            self.kept = value
            return value.detach() if kind == "a detached tensor" else 1.5
        elif kind == "None":
            self.kept = value
            return None
        elif kind == "a tensor that the loss does not use":
            self.kept = value
            return value * 2
        makers: dict[str, Callable[[], Any]] = {
            "object": lambda: Result(value),
            "dataclass": lambda: Outcome(value),
            "NamedTuple": lambda: Named(value, "note"),
            "tensor and object": lambda: (value, Result(value)),
            "tensor and parameter": lambda: (value, self.inner.weight),
            "tensor and cache": lambda: (value.detach(), Result(Cache([Result({"value": value}), Result(self)]))),
            "set in an object": lambda: Result(Cache({value})),
            "tensor and function": lambda: (value.detach(), Result(lambda: value)),
            "object with a parameter": lambda: Result([value, self.inner.weight]),
        }
        return makers[kind]() if kind in makers else value

    def read(self, output: Any) -> torch.Tensor:
        if self.kept is not None:
            value, self.kept = self.kept, None
            return value
        if isinstance(output, torch.Tensor):
            return output
        if type(output) is tuple:
            output = output[1] if isinstance(output[1], Result) else Result(output[0])
        value = output.value
        while not isinstance(value, torch.Tensor):  # the first thing inside
            if isinstance(value, dict):
                value = value["value"]
            elif callable(value):
                value = value()
            else:
                value = next(iter(value.entries)) if isinstance(value, Cache) else value[0]
            value = value.value if isinstance(value, Result) else value
        return value


class Layers(nn.Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, DIM)
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer.read(layer(x))
        return x


def gradients_or_an_error_that_names(
    group: str, model: nn.Module, reference: nn.Module, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> bool:
    """Three steps with equal gradients; or, on every rank, an error that names the group. Whether there was none."""
    optimizers = sgd(model.parameters()), sgd(reference.parameters())
    for step in range(3):
        try:
            loss(model, local_part(rows(step))).backward()
        except RuntimeError as error:
            assert group in same_on_every_rank(str(error))
            return False
        loss(reference, rows(step)).backward()
        assert_gradients_match(model, reference, 1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(loss(model, rows()), loss(reference, rows()), rtol=0, atol=1e-6)
    assert_parameters_match(model, reference, 1e-6)
    return True


HOOKABLE = ["NamedTuple", "object", "dataclass", "tensor and object", "tensor and cache", "set in an object"]
SILENT = ["None", "a number", "a detached tensor"]
OPAQUE = ["tensor and function", "tensor and parameter", "object with a parameter"]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", [*HOOKABLE, *SILENT, *OPAQUE])
@distributed(world_size=2)
def test_block_that_returns_no_plain_tensor_is_reduced(kind, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layers("tensor", kind, "tensor", kind))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    with our_warnings() as texts:
        trained = gradients_or_an_error_that_names(
            "layers.1", model, reference, lambda module, batch: mean_square(module, batch)
        )
    assert trained or kind in OPAQUE
    if kind in OPAQUE and trained:
        assert len(texts) == 2, texts  # once for each group
        assert "layers.1" in texts[0] and "layers.3" in texts[1] and "stay unsharded" in texts[0]
    elif kind in HOOKABLE:
        assert trained and not texts
        assert not any(handle.unsharded.is_allocated for handle in get_state(model.layers[1])._handles)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", [*HOOKABLE, *SILENT, *OPAQUE])
@distributed(world_size=2)
def test_root_that_returns_no_plain_tensor_is_reduced(kind, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layer(kind))
    fully_shard(model.inner, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    with our_warnings() as texts:
        trained = gradients_or_an_error_that_names(
            "root",
            model,
            reference,
            lambda module, batch: module.read(module(batch.repeat(1, 2)[:, :DIM])).square().mean(),
        )
    assert trained or kind in OPAQUE
    if kind in OPAQUE and trained:
        assert len(texts) == 1 and "(root)" in texts[0], texts


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("order", ["loss + aux", "aux + loss", "aux"])
@pytest.mark.parametrize(
    "kind",
    ["auxiliary loss before the output", "auxiliary loss after the output", "auxiliary loss of a parameter"],
)
@distributed(world_size=2)
def test_block_that_keeps_an_auxiliary_loss_is_reduced(kind, order, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layers("tensor", kind, "tensor", kind))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)

    def loss(module: Layers, batch: torch.Tensor) -> torch.Tensor:
        main = mean_square(module, batch)
        aux = module.layers[1].aux + module.layers[3].aux
        return {"loss + aux": lambda: main + aux, "aux + loss": lambda: aux + main, "aux": lambda: aux}[order]()

    gradients_or_an_error_that_names("layers.", model, reference, loss)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_block_whose_output_the_loss_does_not_use_is_reduced(reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(Layers("tensor", "a tensor that the loss does not use", "tensor"))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    gradients_or_an_error_that_names("layers.1", model, reference, mean_square)


@pytest.mark.parametrize("kind", ["object", "None"])
@distributed(world_size=2)
def test_root_that_returns_no_plain_tensor_is_reduced_after_a_change_of_dtype(kind):
    torch.manual_seed(0)
    model, reference = pair(Layer(kind))
    fully_shard(model)
    batch = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    with our_warnings():
        model.read(model(local_part(batch))).sum().backward()
        model.zero_grad()
        for module, part in ((model.double(), local_part(batch)), (reference.double(), batch)):
            module.read(module(part.double())).square().mean().backward()
    assert_gradients_match(model, reference, 1e-6)


@pytest.mark.parametrize("kind", ["object", "None", "NamedTuple"])
@distributed(world_size=2)
def test_first_backward_through_two_forwards_of_a_root_that_returns_no_plain_tensor(kind):
    """Backward reaches the aliases of such a root's inputs before anything has told that it began."""
    torch.manual_seed(0)
    model, reference = pair(Layer(kind))
    fully_shard(model)
    params = list(model.parameters())
    with our_warnings():
        for step in range(2):
            for module, share in ((model, local_part), (reference, lambda batch: batch)):
                first, second = (share(rows(2 * step + i, DIM)).requires_grad_() for i in range(2))
                loss = module.read(module(first)).square().mean()
                (loss + module.read(module(second)).square().mean()).backward()
            assert_gradients_match(model, reference, 1e-6)
            assert all(ours is sharded for ours, sharded in zip(model.parameters(), params, strict=True))


class Recomputing(Layer):
    """Runs its inner part under activation checkpointing."""

    def __init__(self, kind: str, use_reentrant: bool) -> None:
        super().__init__(kind)
        self.use_reentrant = use_reentrant
        self.block = SmallBlock()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(checkpoint(self.block, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", OPAQUE)
@distributed(world_size=2)
def test_group_that_returns_no_plain_tensor_and_recomputes_a_part_of_itself(kind, use_reentrant):
    torch.manual_seed(0)
    model, reference = pair(Recomputing(kind, use_reentrant))
    fully_shard(model)

    def loss(module: Recomputing, batch: torch.Tensor) -> torch.Tensor:
        return module.read(module(batch.repeat(1, 2)[:, :DIM].requires_grad_())).square().mean()

    with our_warnings():
        assert gradients_or_an_error_that_names("root", model, reference, loss)


class Escaping(nn.Module):
    """A block whose auxiliary loss, computed after its output, leaves it by the way that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_calls = kind, 0
        self.inner, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.kept: Any = []

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        value = x + torch.tanh(self.inner(x))
        aux = self.gate(x * 2).square().mean()
        self.num_calls += 1
        self.kept = {
            "list": lambda: [aux],
            "dict": lambda: {"a": aux},
            "dict of lists": lambda: {"a": [aux]},
            "object": lambda: Result(aux),
            "argument": lambda: losses.append(aux),
            "later": lambda: [aux] if self.num_calls > 4 else [],  # switched on after a few steps
        }[self.kind]()
        return value

    def read(self) -> list[torch.Tensor]:
        kept = self.kept
        if isinstance(kept, dict):
            kept = kept["a"]
        return kept if isinstance(kept, list) else [kept.value] if isinstance(kept, Result) else [kept]


class EscapingStack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(IN, DIM), nn.ModuleList(Escaping(kind) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses: list[torch.Tensor] = []
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, losses)
        if self.kind != "argument":
            losses = [loss for layer in self.layers for loss in layer.read()]
        return x, sum(losses, torch.zeros(()))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", ["list", "dict", "dict of lists", "object", "argument"])
@distributed(world_size=2)
def test_auxiliary_loss_that_leaves_a_block_by_another_way_is_reduced(kind, reshard_after_forward):
    torch.manual_seed(0)
    model, reference = pair(EscapingStack(kind))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model)

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value, aux = module(batch)
        return value.square().mean() + aux

    for _ in range(2):  # six steps
        if not gradients_or_an_error_that_names("layers.", model, reference, loss):
            break


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)

    def forward(self, x: torch.Tensor, *, history: list[Any], cache: dict[str, Any]) -> torch.Tensor:
        history.append(len(history))
        cache["last"] = x
        return self.linear(x)


class KeepsALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, IN).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.auxiliary = self.linear(y).square().mean()
        return y


class LateGradients(nn.Module):
    """A frozen layer that gets an input that requires grad at its fifth forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = KeepsALoss(), nn.Parameter(torch.ones(IN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(x)
        return self.layer(x * self.scale)


@distributed(world_size=2)
def test_auxiliary_loss_of_a_frozen_block_whose_first_forwards_had_no_gradient():
    model, reference = pair(LateGradients())
    fully_shard(model.layer)
    fully_shard(model)
    for module, x in ((model, local_part(rows())), (reference, rows())):
        (module(x).square().mean() + module.layer.auxiliary).backward()
    assert_gradients_match(model, reference, 1e-6)


@distributed(world_size=2)
def test_containers_that_forward_writes_to_are_the_callers():
    model = fully_shard(Appends())
    history: list[Any] = ["begin"]
    cache: dict[str, Any] = {}
    for step in range(2):
        model(rows(step), history=history, cache=cache)
    assert history == ["begin", 1, 2] and cache["last"].shape == (ROWS, IN)
