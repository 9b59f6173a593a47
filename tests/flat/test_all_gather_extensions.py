"""Parameters whose class has an all-gather of its own (``fsdp_pre_all_gather``): what forward sees, the bytes that
travel, memory, and training, which equals that of an unsharded model with weights rounded as the class rounds them."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    flat_parameters,
    fully_shard,
    keep_unsharded,
    no_sync,
    record_collectives,
    replicate,
    reshard,
    set_functional_mode,
    set_reshard_after_backward,
    summon_full_params,
    unshard,
)
from fsdp_compose.checkpoint import get_model_state_dict, set_model_state_dict
from fsdp_compose.core.flat import param_kind
from fsdp_compose.core.group.registry import get_state
from tests.flat.test_parameter_classes import CastWhenUsed
from tests.harness import distributed, fake_process_group, lasting_mesh
from tests.models import shard_layers
from tests.training import adamw, gathered, local_part, mean_over_ranks, mean_square_in_float

DIM = 8
aten = torch.ops.aten


class Wrapper(CastWhenUsed):
    """A wrapper around one tensor of its own shape and dtype, of another class than other tests have warned of."""


class Rounded(torch.Tensor):
    """What forward sees: eight bits for an element, and a scale; computes in ``dtype``."""

    _data: torch.Tensor
    _scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.size(), dtype=dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self._data, self._scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data", "_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any) -> Rounded:
        return Rounded(inner["_data"], inner["_scale"], dtype)

    def values(self) -> torch.Tensor:
        return self._data.to(self.dtype) * self._scale.to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return Rounded(args[0]._data, args[0]._scale, args[0].dtype)
        return func(*tree_map_only(Rounded, Rounded.values, args), **(kwargs or {}))


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    return largest.float().clamp(min=1e-12) / 127


def rounded(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (tensor.float() / scale).round().to(torch.int8)


class EightBit(Wrapper):
    """One input, of a byte an element, with a scale of all ranks; the result is a view of what was gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        largest = self._inner.abs().max()
        if mesh.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        return (rounded(self._inner, scale_of(largest)),), (scale_of(largest),)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        ((data,), (scale,)) = outputs, metadata
        if out is not None:
            assert type(out) is Rounded and out._data.data_ptr() == data.data_ptr()
            out._scale = scale
            return None
        return Rounded(data, scale, param_dtype), (data,)

    @staticmethod
    def by_hand(weight: torch.Tensor) -> torch.Tensor:
        scale = scale_of(weight.abs().max())
        return rounded(weight, scale).to(weight.dtype) * scale.to(weight.dtype)


class RowScales(Wrapper):
    """Two inputs, the second in fp32; the result is a plain tensor with memory of its own. Takes all arguments."""

    seen: list[Any] = []

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        self.seen.append((mesh.ndim, tuple(outer_size), tuple(outer_stride), module, mp_policy.param_dtype))
        scale = scale_of(self._inner.abs().amax(1, keepdim=True))
        return (rounded(self._inner, scale), scale), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        data, scale = outputs
        assert data.shape[0] == scale.shape[0]
        result = data.to(param_dtype) * scale.to(param_dtype)
        if out is None:
            return result, (result,)
        out.copy_(result)
        return None

    @staticmethod
    def by_hand(weight: torch.Tensor) -> torch.Tensor:
        scale = scale_of(weight.abs().amax(1, keepdim=True))
        return rounded(weight, scale).to(weight.dtype) * scale.to(weight.dtype)


class Released(RowScales):
    """What was gathered is not needed once the result is made (torch 2.15)."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class PlainWithProtocol(torch.Tensor):
    """Plain data with a class on top; halves what travels."""

    factor: float

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        assert self.factor == 2.0
        return (self.as_subclass(torch.Tensor).to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (data,) = outputs
        if out is None:
            result = data.to(param_dtype)
            return result, (result,)
        out.copy_(data)
        return None

    @staticmethod
    def by_hand(weight: torch.Tensor) -> torch.Tensor:
        return weight.bfloat16().to(weight.dtype)


class ShortForm(RowScales):
    """``__tensor_unflatten__`` without the context, as the class of torch's own tests has it; it returns what is
    inside."""

    def __init__(self, inner: torch.Tensor) -> None:
        super().__init__(inner)
        self.is_made_by_its_class = True

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert self.is_made_by_its_class
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    @staticmethod
    def __tensor_unflatten__(inner: Any, outer_size: Any, outer_stride: Any) -> Any:
        return inner["_inner"]


class OldForm(ShortForm):
    """... as the first versions of torch had it."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any) -> Any:
        return OldForm(inner["_inner"])


class MethodWithoutContext(ShortForm):
    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *, outer_size: Any = None, outer_stride: Any = None) -> Any:
        return cls(inner["_inner"])


class StaticForm(ShortForm):
    """Exactly what torch calls."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        assert meta is None and inner["_inner"].shape == outer_size and inner["_inner"].stride() == outer_stride
        return StaticForm(inner["_inner"])


class Inside(ShortForm):
    """Called as torch calls it, it returns what is inside."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return inner["_inner"]


def make(cls: Any, data: torch.Tensor) -> nn.Parameter:
    if cls is PlainWithProtocol:
        param = nn.Parameter(data.as_subclass(cls))
        param.factor = 2.0
        return param
    return nn.Parameter(cls(data))


CLASSES: dict[str, Any] = {
    "EightBit": EightBit,
    "RowScales": RowScales,
    "Released": Released,
    "PlainWithProtocol": PlainWithProtocol,
}
# All of them in one model: each for a weight before and one behind the rows, beside another one in its group.
TOGETHER = {
    "in order": (EightBit, RowScales, Released, PlainWithProtocol),
    "exchanged": (RowScales, EightBit, PlainWithProtocol, Released),
}


class Layer(nn.Module):
    def __init__(self, rows: int = DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, rows), nn.Linear(rows, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    def __init__(self, rows: int = DIM, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(rows) for _ in range(2)), nn.Linear(DIM, 2)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


def is_wrapped(name: str) -> bool:
    return name.endswith(("up.weight", "down.weight"))


def class_of(cls: Any, name: str) -> Any:
    """``cls``: a class, or four, of the wrapped weights in order."""
    return cls[2 * int(name.split(".")[1]) + name.endswith("down.weight")] if isinstance(cls, tuple) else cls


def nets(cls: Any, rows: int = DIM, checkpoints: bool = False) -> tuple[Net, Net]:
    """Two equal models; the first with weights of the class."""
    torch.manual_seed(0)
    model = Net(rows, checkpoints)
    reference = copy.deepcopy(model)
    for name, module in model.named_modules():
        if is_wrapped(f"{name}.weight"):
            module.weight = make(class_of(cls, f"{name}.weight"), module.weight.detach())
    return model, reference


def gradients_by_hand(
    reference: Net, cls: Any, batch: torch.Tensor, world_size: int, low: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients at rounded weights, which go to the exact ones; and the loss."""
    twin, losses = copy.deepcopy(reference), []
    with torch.no_grad():
        for name, param in twin.named_parameters():
            if is_wrapped(name):
                param.copy_(class_of(cls, name).by_hand(param))
    for share in batch.chunk(world_size):
        loss = mean_square_in_float(twin, share) / world_size
        loss.backward()
        losses.append(loss.item())
    return {name: param.grad for name, param in twin.named_parameters()}, sum(losses)


def whole(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no reshard": {"reshard_after_forward": False},
    "flat views": {"is_flat": True},
    "no_sync": {"wrap": no_sync},
    "accumulated": {"wrap": lambda model: nullcontext()},
    "clipped": {"clips": True},
    "checkpointed": {"checkpoints": True},
    "uneven": {"rows": 5},
    "few rows": {"rows": 1},
    "hybrid": {"is_hybrid": True},
    "parts": {"reshard_after_forward": 2},
    "kept after backward": {"before": lambda model: set_reshard_after_backward(model, False)},
    "bf16 reduction": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), "tolerance": 2e-2},
}


def check_training(
    cls: Any,
    rows: int = DIM,
    checkpoints: bool = False,
    is_flat: bool = False,
    is_hybrid: bool = False,
    before: Callable[[nn.Module], Any] = lambda model: None,
    clips: bool = False,
    wrap: Callable[[nn.Module], Any] | None = None,
    tolerance: float = 2e-6,
    **options: Any,
) -> tuple[Net, Net]:
    world_size = dist.get_world_size()
    if is_hybrid:
        shape = (2, world_size // 2) if world_size > 2 else (1, world_size)
        options["mesh"] = lasting_mesh(("replicate", "shard"), shape)
    model, reference = nets(cls, rows, checkpoints)
    shard_layers(model, **options)
    before(model)
    mine = flat_parameters(model) if is_flat else [*model.parameters()]
    optimizers = [adamw(mine), adamw(reference.parameters())]
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        batches = [torch.randn(12, DIM, generator=generator) for _ in range(2 if wrap else 1)]
        expected: dict[str, Any] = {}
        for i, batch in enumerate(batches):
            with wrap(model) if wrap is not None and i == 0 else nullcontext():
                loss = mean_square_in_float(model, local_part(batch))
                loss.backward()
            grads, by_hand = gradients_by_hand(reference, cls, batch, world_size)
            assert abs(mean_over_ranks(loss) - by_hand) <= 1e-5
            expected = {name: grad + expected.get(name, 0) for name, grad in grads.items()}
        for name, got in gathered({name: param.grad for name, param in model.named_parameters()}).items():
            wanted = expected[name]
            assert got.dtype == wanted.dtype == torch.float32
            torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
            reference.get_parameter(name).grad = got.clone()
        if clips:
            norm = clip_grad_norm_(mine, 0.05)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, got in gathered(dict(model.named_parameters())).items():
            torch.testing.assert_close(got, reference.get_parameter(name).detach(), atol=1e-6, rtol=1e-6)
            with torch.no_grad():  # what is rounded must not differ by a bit
                reference.get_parameter(name).copy_(got)
    return model, reference


@pytest.mark.parametrize(("name", "way"), [*((name, "plain") for name in CLASSES), *itertools.product(TOGETHER, WAYS)])
@distributed(world_size=2)
def test_training_equals_that_of_rounded_weights(name, way):
    check_training((CLASSES | TOGETHER)[name], **WAYS[way])


@pytest.mark.parametrize("name", TOGETHER)
@distributed(world_size=(1, 3, 4))
def test_training_equals_that_of_rounded_weights_at_other_world_sizes(name):
    for way in ("plain", "uneven", "few rows", *(["hybrid"] if dist.get_world_size() == 4 else [])):
        check_training(TOGETHER[name], **WAYS[way])


@pytest.mark.parametrize("cls", [ShortForm, OldForm, MethodWithoutContext, StaticForm, Inside])
@distributed(world_size=2)
def test_any_form_of_tensor_unflatten(cls):
    """FSDP2 never calls this method."""
    check_training(cls, rows=5)
    model, reference = nets(cls)
    shard_layers(model)
    assert type(model.layers[0].up.weight._local_tensor) is cls
    model.double()
    model(torch.randn(2, DIM, dtype=torch.float64)).sum().backward()
    assert model.layers[0].up.weight._local_tensor.dtype == torch.float64
    for name, param in get_model_state_dict(model).items():
        assert torch.equal(param.full_tensor(), reference.get_parameter(name).double()), name


@pytest.mark.parametrize("cls", [ShortForm, OldForm])
@distributed(world_size=2)
def test_any_form_of_tensor_unflatten_of_a_class_without_the_protocol(cls):
    param_kind._warned.clear()
    linear = nn.Linear(DIM, DIM)
    reference = copy.deepcopy(linear)
    weight = type("Without", (Wrapper,), {"__tensor_unflatten__": cls.__dict__["__tensor_unflatten__"]})
    linear.weight = nn.Parameter(weight(linear.weight.detach()))
    with pytest.warns(UserWarning, match="without the class"):
        fully_shard(linear)
    batch = torch.randn(4, DIM)
    assert torch.equal(linear(batch), reference(batch))


@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=2)
def test_the_result_is_in_param_dtype_and_gradients_are_in_high_precision(name):
    model, _ = nets(CLASSES[name])
    shard_layers(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    seen: list[Any] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(module.up.weight))
    for _ in range(2):
        mean_square_in_float(model, torch.randn(4, DIM)).backward()
    assert seen[0] is seen[1] and seen[0].dtype == torch.bfloat16 and seen[0].requires_grad
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@distributed(world_size=2)
def test_the_method_is_given_the_mesh_the_whole_shape_the_module_and_the_policy():
    for with_replicas in (False, True):
        RowScales.seen.clear()
        model, _ = nets(RowScales, 12)
        mesh = lasting_mesh(("a", "b"), (1, 2)) if with_replicas else None
        shard_layers(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16), mesh=mesh)
        model(torch.randn(2, DIM))
        layer = model.layers[0]
        assert RowScales.seen[:2] == [
            (1, (12, DIM), (DIM, 1), layer.up, torch.bfloat16),
            (1, (DIM, 12), (12, 1), layer.down, torch.bfloat16),
        ]
        RowScales.seen.clear()
        clone = copy.deepcopy(model)
        clone(torch.randn(2, DIM))
        assert RowScales.seen[0][3] is clone.layers[0].up


class PadsItself(Wrapper):
    """As FSDP2 wants it: a part with fewer rows is filled up to those of the other ranks, whose number is known; and
    what is made from an instance is one."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda item: item._inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*plain[0], **plain[1]))

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        if outer_size[0] % mesh.size() == 0:
            return (self._inner.to(torch.bfloat16),), None
        sent = torch.zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:], dtype=torch.bfloat16)
        sent[: self._inner.shape[0]].copy_(self._inner)
        return (sent,), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (data,) = outputs
        if out is None:
            result = data.to(param_dtype)
            return result, (data, result)
        out.copy_(data[: out.shape[0]])  # FSDP2 passes padding too
        return None


@distributed(world_size=(2, 3, 4))
def test_rows_are_those_of_fsdp2_whatever_their_length():
    """A row of three elements is no multiple of 16 bytes."""
    found = []
    for how in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 3))
        for linear in (model[0], model[2]):
            linear.weight = nn.Parameter(PadsItself(linear.weight.detach()))
        how(model, reshard_after_forward=False)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            batch = torch.randn(12, 3, generator=torch.Generator().manual_seed(step))
            losses.append(mean_square_in_float(model, local_part(batch)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((torch.stack(losses), [model[i].weight.to_local().shape for i in (0, 2)]))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@distributed(world_size=2)
def test_one_byte_an_element_travels():
    model, _ = nets(EightBit, 16)
    shard_layers(model)
    with record_collectives(model) as lines:
        mean_square_in_float(model, torch.randn(4, DIM)).backward()
    gathers = [line for line in lines if line.startswith("all-gather") and "up.weight" in line]
    assert gathers and all(f"{16 * DIM} x int8" in line for line in gathers), lines
    reductions = [line for line in lines if line.startswith("reduce-scatter") and "up.weight" in line]
    assert reductions and all("float32" in line for line in reductions), lines


@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=2)
def test_nothing_of_what_was_gathered_outlives_its_use(name):
    cls = CLASSES[name]
    model, _ = nets(cls)
    shard_layers(model, reshard_after_forward=True)
    held: list[list[int]] = []

    def note(*_: Any) -> None:
        held.append([bytes_of(layer) for layer in model.layers])

    def bytes_of(layer: nn.Module) -> int:
        total = 0
        for handle in get_state(layer)._handles:
            if handle.kind.codec.gathered_by is not None:
                unsharded = handle.unsharded
                total += unsharded.nbytes()
                assert not unsharded._inputs or unsharded.work is not None
        return total

    for layer in model.layers:
        layer.register_forward_hook(note)
    for _ in range(2):
        mean_square_in_float(model, torch.randn(4, DIM)).backward()
        note()
    one = {
        "EightBit": 2 * 64,
        "RowScales": 2 * (64 + 32 + 256),
        "Released": 2 * 256,
        "PlainWithProtocol": 2 * (128 + 256),
    }[name]
    assert all(0 in pair or max(pair) <= one for pair in held) and held[-1] == [0, 0], held
    assert max(map(max, held)) <= one
    for _ in range(2):
        unshard(model.layers[0])
        assert bytes_of(model.layers[0]) == one
        reshard(model.layers[0])
        assert bytes_of(model.layers[0]) == 0


@distributed(world_size=2)
def test_weights_that_are_kept_refuse_to_be_read_after_forward():
    model, _ = nets(EightBit)
    shard_layers(model)
    kept: list[Any] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: kept.append(module.up.weight))
    model(torch.randn(2, DIM))
    if get_state(model.layers[0])._handles[0].unsharded.memory.is_guarded:
        with pytest.raises(RuntimeError):
            kept[0].values()


@distributed(world_size=2)
def test_sharded_parameters_hold_what_the_class_wraps_in_state_dicts_summoned_and_converted():
    model, reference = nets(EightBit)
    model.layers[0].up.weight.tag = "mine"
    shard_layers(model)
    model(torch.randn(2, DIM))
    state = get_model_state_dict(model)
    for name, param in reference.named_parameters():
        assert torch.equal(whole(state[name]), param)
    with summon_full_params(model):
        for name, param in reference.named_parameters():
            assert torch.equal(model.get_parameter(name), param)
    other, _ = nets(EightBit)
    shard_layers(other)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    set_model_state_dict(other, state)
    x = torch.randn(2, DIM)
    assert torch.equal(other(x), model(x)) and other(x).abs().sum() > 0
    assert model.layers[0].up.weight.tag == "mine"
    model.double()
    seen: list[Any] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.tag))
    assert model(x.double()).dtype == torch.float64 and model.layers[0].up.weight.tag == seen[0] == "mine"
    assert "_data" not in model.layers[0].up.weight.__dict__
    mean_square_in_float(model, x.double()).backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}


@distributed(world_size=2)
def test_edits_between_forwards_are_followed_and_gathered_ahead_or_kept():
    model, _ = nets(EightBit)
    shard_layers(model)
    x = torch.randn(2, DIM)
    before = model(x)
    unshard(model.layers[0])
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    after = model(x)
    assert not torch.equal(before, after)
    with keep_unsharded(model), torch.no_grad():
        assert torch.equal(model(x), after) and torch.equal(model(x), after)
    with torch.inference_mode():
        assert torch.equal(model(x), after)
    for _ in range(2):  # frozen ones are gathered the same way
        for name, param in model.named_parameters():
            param.requires_grad_(not is_wrapped(name))
        mean_square_in_float(model, x).backward()
    assert all((param.grad is None) == is_wrapped(name) for name, param in model.named_parameters())


@distributed(world_size=2)
def test_a_model_on_the_meta_device_is_gathered_by_its_classes_once_it_is_materialised():
    exact, _ = nets(EightBit)
    with torch.device("meta"):
        model = Net()
        for layer in model.layers:
            for linear in (layer.up, layer.down):
                linear.weight = make(EightBit, linear.weight.detach())
    shard_layers(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, source in zip(model.parameters(), shard_layers(exact).parameters(), strict=True):
            param.copy_(source)
    x = torch.randn(2, DIM)
    assert torch.equal(model(x), exact(x))
    mean_square_in_float(model, x).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_many_simulated_ranks():
    model, _ = nets(EightBit, 128)
    with fake_process_group(rank=3, world_size=64):
        shard_layers(model)
        for _ in range(2):
            mean_square_in_float(model, torch.randn(2, DIM)).backward()
        assert model.layers[0].up.weight.grad.to_local().shape[0] == 2


@distributed(world_size=2)
def test_ranks_with_different_classes_are_one_error():
    model, _ = nets(EightBit if dist.get_rank() else RowScales)
    shard_layers(model)
    with pytest.raises(RuntimeError, match=r"different models.*gathered by.*RowScales.*gathered by.*EightBit"):
        model(torch.randn(2, DIM))


class Precomputed(EightBit):
    """Its scale may have been computed ahead, for all parameters at once."""

    scale: torch.Tensor | None = None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        if self.scale is None:
            return super().fsdp_pre_all_gather(mesh)
        return (rounded(self._inner, self.scale),), (self.scale,)


@pytest.mark.parametrize("rows", [DIM, 5])
@distributed(world_size=2)
def test_the_class_is_found_in_the_sharded_parameter_and_what_is_set_on_it_there_is_followed(rows):
    model, _ = nets(Precomputed, rows)
    shard_layers(model)
    x = torch.randn(2, DIM)
    expected = model(x)

    def weights() -> list[Any]:
        return [param for name, param in model.named_parameters() if is_wrapped(name)]

    @torch.no_grad()
    def set_scales(factor: float) -> None:
        for weight, norm in zip(weights(), torch._foreach_norm(weights(), float("inf")), strict=True):
            assert type(weight._local_tensor) is Precomputed and weight._local_tensor is weight._local_tensor
            assert weight._local_tensor.shape == weight.to_local().shape
            weight._local_tensor.scale = scale_of(norm.full_tensor()) * factor

    set_scales(1.0)
    assert torch.equal(model(x), expected)
    set_scales(4.0)
    coarse = model(x)
    assert not torch.equal(coarse, expected)
    mean_square_in_float(model, x).backward()
    optimizer = adamw(model.parameters())
    optimizer.step()
    set_scales(1.0)
    fresh, _ = nets(Precomputed, rows)
    shard_layers(fresh)
    set_model_state_dict(fresh, get_model_state_dict(model))
    assert torch.equal(model(x), fresh(x))
    weight, local = model.layers[0].up.weight, model.layers[0].up.weight._local_tensor
    with torch.no_grad():
        weight.zero_()
    assert local is weight._local_tensor and not local._inner.any()
    model.double()
    assert not isinstance(weight.to_local(), Precomputed) and weight.to_local().dtype == torch.float64
    model(x.double())
    assert weight._local_tensor._inner.dtype == torch.float64 and weight._local_tensor.scale is None
    assert type(copy.deepcopy(weight).to_local()) is type(weight.detach()._local_tensor) is torch.Tensor


@distributed(world_size=2)
def test_the_whole_weight_is_not_kept():
    whole = torch.randn(DIM, DIM)
    for cls in (EightBit, Wrapper):
        linear = nn.Linear(DIM, DIM)
        linear.weight = nn.Parameter(cls(whole.clone()))
        inner = weakref.ref(linear.weight._inner)
        linear.weight.tag = "mine"
        param_kind._warned.add(cls)
        fully_shard(linear)
        linear(torch.randn(2, DIM)).sum().backward()
        gc.collect()
        assert inner() is None and linear.weight.tag == "mine" and "_inner" not in linear.weight.__dict__


@distributed(world_size=2)
def test_functional_mode_refuses_by_name():
    model, _ = nets(EightBit)
    shard_layers(model)
    set_functional_mode(model, True)
    with pytest.raises(NotImplementedError, match="layers.0.up.weight.*is a EightBit, gathered by its class"):
        model(torch.randn(2, DIM))
    set_functional_mode(model, False)
    mean_square_in_float(model, torch.randn(2, DIM)).backward()


@distributed(world_size=2)
def test_replicated_parameters_are_not_gathered_and_it_is_said():
    param_kind._warned.clear()
    model, _ = nets(EightBit)
    with pytest.warns(UserWarning, match="up.weight is a EightBit, with nothing to gather"):
        replicate(model)
    mean_square_in_float(model, torch.randn(2, DIM)).backward()
    assert all(param.grad is not None for param in model.parameters())


class AliasReleased(EightBit):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return True


class Undecided(EightBit):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return None


class ReleasesAlone(Wrapper):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return True


class Half(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError


class Odd(Half):
    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:
        raise AssertionError

    def fsdp_post_all_gather(self, *args: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Half, "class Half of the parameter up.weight has only fsdp_pre_all_gather"),
        (Odd, r"Odd.fsdp_pre_all_gather\(\), of the parameter up.weight, takes 2 arguments, expected \(mesh\) or"),
        (AliasReleased, "AliasReleased.* of the parameter up.weight.*views of it"),
        (Undecided, r"Undecided.fsdp_should_release_\w+\(\), of the parameter up.weight, returned None"),
        (ReleasesAlone, "class ReleasesAlone of the parameter up.weight has fsdp_should_release_"),
    ],
)
def test_an_incomplete_protocol_is_refused_by_name(cls, match):
    model, _ = nets(cls)
    with fake_process_group(rank=0, world_size=2), pytest.raises(ValueError, match=match):
        fully_shard(model.layers[0])


class WrongShape(EightBit):
    def fsdp_post_all_gather(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros(3), ()


@distributed(world_size=2)
def test_a_result_of_another_shape_is_an_error_that_names_the_parameter():
    model, _ = nets(WrongShape)
    before = [*model.parameters()]
    with pytest.raises(ValueError, match=r"WrongShape.*shape \(3,\) for the parameter up.weight.*\(8, 8\)"):
        shard_layers(model)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_functional_use_of_what_forward_sees():
    """The reference rounds as the classes do."""
    weight = torch.randn(3, DIM)
    x = torch.randn(2, DIM)
    shown = Rounded(rounded(weight, scale_of(weight.abs().max())), scale_of(weight.abs().max()), torch.float32)
    assert torch.equal(F.linear(x, shown), F.linear(x, EightBit.by_hand(weight)))


@pytest.mark.parametrize("is_replicated", [False, True], ids=["sharded", "replicated"])
@distributed(world_size=2)
def test_methods_that_are_set_on_a_local_tensor_are_refused_by_name(is_replicated):
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    (replicate if is_replicated else fully_shard)(model)
    local = model[1].weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    local.fsdp_post_all_gather = lambda outputs, *_, out=None: (outputs[0], outputs)
    with pytest.raises(RuntimeError, match=r"fsdp_pre_all_gather was set .* of 1\.weight .* before fully_shard\(\)"):
        model(torch.randn(4, DIM))
    del local.fsdp_pre_all_gather, local.fsdp_post_all_gather
    model(torch.randn(4, DIM)).sum().backward()


class OneInput(Wrapper):
    """Returns its only input by itself, where others return a tuple."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self._inner.to(torch.bfloat16), None

    fsdp_post_all_gather = PlainWithProtocol.fsdp_post_all_gather


@distributed(world_size=2)
def test_an_only_input_may_be_returned_by_itself():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    weight = model[0].weight.detach().clone()
    model[0].weight = nn.Parameter(OneInput(weight))
    fully_shard(model)
    x = torch.randn(4, DIM)
    for _ in range(2):
        assert torch.equal(model(x), x @ weight.bfloat16().float().T)
