"""Parameters whose class keeps several tensors, and which train: the gradient is a plain sharded tensor, the optimizer
steps what the class makes of each rank's rows, and training equals that of FSDP2 and of the unsharded model."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RaggedDTensor,
    clip_grad_norm_,
    describe,
    distribute_ragged,
    find_unreduced_parameters,
    flat_parameters,
    fully_shard,
    no_sync,
    record_collectives,
    summon_full_params,
)
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    save,
    set_state_dict,
)
from fsdp_compose.core.group.registry import get_state
from tests.harness import distributed, fake_process_group, lasting_mesh
from tests.training import local_part

DIM = 8
aten = torch.ops.aten


class TwoTensors(torch.Tensor):
    """Two tensors inside, of equally many rows."""

    INNER: tuple[str, str]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.INNER], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(*(inner[name] for name in cls.INNER))  # type: ignore[call-arg]


class Pair(TwoTensors):
    """Every operation runs on both tensors, which are gathered as they are."""

    INNER = "a", "b"

    @staticmethod
    def __new__(cls: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    @classmethod
    def of(cls, weight: torch.Tensor) -> Pair:
        return cls(weight.clone(), weight.clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        a, b = [
            func(*tree_map_only(Pair, pick, args), **tree_map_only(Pair, pick, kwargs or {}))
            for pick in (lambda pair: pair.a, lambda pair: pair.b)
        ]
        if func._schema.name.endswith("_"):
            return None if isinstance(args[0], (list, tuple)) else args[0]
        if isinstance(a, (list, tuple)):
            return [cls(*both) for both in zip(a, b, strict=True)]
        return cls(a, b) if isinstance(a, torch.Tensor) else a

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        # As FSDP2 wants it: every rank sends equally many rows.
        rows, sent = -(-outer_size[0] // mesh.size()), []
        for part in (self.a, self.b):
            sent.append(part.new_zeros(rows, *part.shape[1:]))
            sent[-1][: len(part)].copy_(part)
        return tuple(sent), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        a, b = outputs
        if out is None:
            return Pair(a, b).to(param_dtype), (a, b)
        if a.dtype != param_dtype:
            out.a.copy_(a)
            out.b.copy_(b)
        return None


class Quantized(TwoTensors):
    """A byte an element, and a scale for each row, as torchao's weights for training in int8: gradients and states of
    optimizers are plain, and what is written to it is rounded."""

    INNER = "codes", "scale"

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantized:
        scale = weight.abs().amax(1) / 127
        return cls((weight / scale.clip(1e-12)[:, None]).round().to(torch.int8), scale)

    def values(self) -> torch.Tensor:
        return self.codes * self.scale[:, None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return Product.apply(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0]
        if func in (aten.detach.default, aten.clone.default, aten.slice.Tensor):
            return cls(func(first.codes, *args[1:], **kwargs), func(first.scale, *args[1:], **kwargs))
        if func is aten.split.Tensor:
            return [*map(cls, func(first.codes, *args[1:]), func(first.scale, *args[1:]))]
        if func in (aten.new_zeros.default, aten.new_empty.default):  # FSDP2 asks for these
            return cls(first.codes.new_zeros(args[1]), first.scale.new_zeros(args[1][:1]))
        if func in (aten.view.default, aten.as_strided.default):
            return cls(first.codes, first.scale)
        if func is aten.zeros_like.default:
            return torch.zeros(first.shape, dtype=first.dtype)
        if func is aten.copy_.default:
            source = args[1] if isinstance(args[1], cls) else cls.of(args[1])
            first.codes.copy_(source.codes)
            first.scale.copy_(source.scale)
            return first
        if func in (aten.add_.Tensor, aten.addcdiv_.default, aten.mul_.Tensor):
            return first.copy_(func(first.values(), *args[1:], **kwargs))
        raise NotImplementedError(f"{cls.__name__} has no {func}")

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        rows, sent = -(-outer_size[0] // mesh.size()), []
        for part in (self.codes, self.scale if mp_policy.param_dtype is None else self.scale.to(mp_policy.param_dtype)):
            sent.append(part.new_zeros(rows, *part.shape[1:]))
            sent[-1][: len(part)].copy_(part)
        return tuple(sent), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (Quantized(*outputs), outputs)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.codes.t().to(x.dtype)) * weight.scale.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (grad * weight.scale.to(grad.dtype)) @ weight.codes.to(grad.dtype), grad.t() @ x


class Unwrap(torch.autograd.Function):
    """The mean of a pair; its gradient is the same for both, or ``factor`` times that for the second."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, pair: Any) -> torch.Tensor:
        return (pair.a + pair.b) / 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Pair(grad, grad * Unwrap.factor)


class PlainGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> torch.Tensor:
        return grad.a + grad.b if isinstance(grad, Pair) else grad


CLASSES: dict[str, Any] = {"Pair": Pair, "Quantized": Quantized}
torch.serialization.add_safe_globals([Pair, Quantized])


class Layer(nn.Module):
    def __init__(self, cls: Any, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, rows, bias=False), nn.Linear(rows, DIM)
        self.up.weight = nn.Parameter(cls.of(self.up.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(PlainGradient.apply(x))
        return self.down((Unwrap.apply(hidden) if isinstance(hidden, Pair) else hidden).tanh())


class Net(nn.Module):
    def __init__(self, cls: Any, rows: int = DIM) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(cls, rows) for _ in range(2)), nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def made(cls: Any, rows: int = DIM, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(cls, rows)


def shard(model: Net, how: Callable[..., Any] = fully_shard, **options: Any) -> Net:
    for layer in model.layers:
        how(layer, **options)
    how(model, **options)
    return model


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, eps=1e-3, weight_decay=0.1, amsgrad=True)


def foreach(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True)


def values_of(tensor: Any) -> torch.Tensor:
    """The elements that a whole tensor stands for."""
    if isinstance(tensor, Pair):
        assert torch.equal(tensor.a, tensor.b)
        return tensor.a
    return tensor.values() if isinstance(tensor, Quantized) else tensor


def whole(tensor: Any) -> torch.Tensor:
    """The elements of a whole tensor, also of one that FSDP2 has sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, RaggedDTensor) or not isinstance(tensor, DTensor):
        return values_of(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    group = tensor.device_mesh.get_group(-1)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, values_of(tensor.to_local()).contiguous(), group)
    return torch.cat(parts)


def fsdp2_no_sync(model: Any) -> Any:
    @contextmanager
    def without() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return without()


def train(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    without_sync: Callable[[nn.Module], Any] | None = None,
    microbatches: int = 1,
    share: Callable[[torch.Tensor], torch.Tensor] = local_part,
    clip: Callable[..., Any] | None = None,
) -> list[float]:
    """Losses and norms of gradients of three steps."""
    optimizer, found = make_optimizer(model.parameters()), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for i in range(microbatches):
            batch = share(torch.randn(12, DIM, generator=generator))
            with nullcontext() if i + 1 == microbatches or without_sync is None else without_sync(model):
                loss = model(batch).float().square().mean()
                loss.backward()
        found.append(loss.item())
        if clip is not None:
            norm = clip(model.parameters(), 0.05)
            found.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return found


BF16 = (torch.bfloat16, torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no reshard": {"reshard_after_forward": False},
    "uneven": {"rows": 5},
    "few rows": {"rows": 1},
    "no_sync": {"microbatches": 2, "is_synced": False},
    "accumulated": {"microbatches": 2},
    "clipped": {"clips": True},
    "hybrid": {"is_hybrid": True},
    "bf16": {"dtypes": BF16},
}


def train_both(
    cls: Any,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    theirs_makes: Callable[[Any], torch.optim.Optimizer] | None = None,
    rows: int = DIM,
    is_synced: bool = True,
    clips: bool = False,
    is_hybrid: bool = False,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    microbatches: int = 1,
    **options: Any,
) -> None:
    if is_hybrid:
        shape = (2, dist.get_world_size() // 2) if dist.get_world_size() > 2 else (1, dist.get_world_size())
        options["mesh"] = lasting_mesh(("replicate", "shard"), shape)
    policies = (
        [{}, {}] if dtypes is None else [{"mp_policy": make(*dtypes)} for make in (MixedPrecisionPolicy, TorchPolicy)]
    )
    ours, theirs = made(cls, rows), made(cls, rows)
    shard(ours, **options, **policies[0])
    shard(theirs, torch_fully_shard, **options, **policies[1])
    given: dict[str, Any] = {"microbatches": microbatches}
    got = train(
        ours,
        make_optimizer,
        **given,
        without_sync=None if is_synced else no_sync,
        clip=clip_grad_norm_ if clips else None,
    )
    expected = train(
        theirs,
        theirs_makes or make_optimizer,
        **given,
        without_sync=None if is_synced else fsdp2_no_sync,
        clip=nn.utils.clip_grad_norm_ if clips else None,
    )
    is_exact = dist.get_world_size() < 3 and not clips and make_optimizer is not fused
    torch.testing.assert_close(got, expected, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-6)
    check_equal(ours, theirs, 0 if is_exact else 1e-6)


def check_equal(ours: Net, theirs: Net, tolerance: float) -> None:
    for (name, param), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert param.requires_grad and param.grad is None
        note = f"{name}: {{}}".format
        torch.testing.assert_close(whole(param), whole(other), rtol=tolerance, atol=tolerance, msg=note)
    weight, other = ours.layers[0].up.weight, theirs.layers[0].up.weight
    assert type(weight.to_local()) is type(other.to_local() if isinstance(other, DTensor) else other)


def train_unsharded(model: Net, make_optimizer: Callable[[Any], torch.optim.Optimizer], microbatches: int = 1) -> None:
    """With gradients averaged over the ranks' shares of each batch, in their order."""
    optimizer, generator = make_optimizer(model.parameters()), torch.Generator().manual_seed(1)
    for _ in range(3):
        batches = [torch.randn(12, DIM, generator=generator) for _ in range(microbatches)]
        sums: list[Any] = [0] * len([*model.parameters()])
        for rank in range(dist.get_world_size()):
            for batch in batches:
                model(batch.chunk(dist.get_world_size())[rank]).float().square().mean().backward()
            sums = [total + values_of(param.grad) for total, param in zip(sums, model.parameters(), strict=True)]
            model.zero_grad()
        for param, total in zip(model.parameters(), sums, strict=True):
            param.grad = total / dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=2)
def test_training_is_that_of_fsdp2(name, way):
    """FSDP2 itself cuts the rows of ``Quantized`` only evenly: it expects a scale in the shape of the rows."""
    if name == "Pair" or "rows" not in WAYS[way]:
        train_both(CLASSES[name], **WAYS[way])


@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=(3, 4))
def test_training_is_that_of_fsdp2_on_more_ranks(name):
    ways = ["plain", "uneven", "few rows", "no_sync"] if name == "Pair" else []
    for way in (*ways, *(["hybrid", "no_sync"] if dist.get_world_size() == 4 else [])):
        train_both(CLASSES[name], **WAYS[way])


@pytest.mark.parametrize("rows", [DIM, 5, 1])
@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=(1, 2, 3))
def test_training_is_that_of_the_unsharded_model(name, rows):
    place = [DIM, 5, 1].index(rows) + dist.get_world_size()  # every two of rows, optimizers and microbatches meet
    for make_optimizer, microbatches in zip((sgd, adamw), ((1, 2), (2, 1))[place % 2], strict=True):
        ours, theirs = shard(made(CLASSES[name], rows)), made(CLASSES[name], rows)
        train(ours, make_optimizer, microbatches=microbatches, without_sync=no_sync)
        train_unsharded(theirs, make_optimizer, microbatches)
        check_equal(ours, theirs, 1e-6)


@pytest.mark.parametrize("make_optimizer", [sgd, adam, foreach, fused])
@distributed(world_size=2)
def test_optimizers_step_what_the_class_makes_of_its_rows(make_optimizer):
    """Some of their states are of the class. Lists mix it with plain parameters, which FSDP2 then steps once for each
    tensor inside the class; so FSDP2 steps one by one."""
    one_by_one = adamw if make_optimizer in (foreach, fused) else None
    for rows in (DIM, 5):
        train_both(Pair, make_optimizer, one_by_one, rows)


def full_state(model: Net, optimizer: Any, **options: Any) -> Any:
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, **options))


@pytest.mark.parametrize("rows", [DIM, 5])
@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=(1, 2, 3))
def test_state_dicts_continue_training(name, rows):
    """Whole and sharded, of the model and of an optimizer whose states are of the class (``Pair``) or plain."""
    cls, box = CLASSES[name], [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    model = shard(made(cls, rows))
    optimizer = adamw(model.parameters())
    steps(model, optimizer, 2)
    whole_states = full_state(model, optimizer)
    assert type(whole_states[0]["layers.0.up.weight"]) is cls
    exp_avg = whole_states[1]["state"]["layers.0.up.weight"]["exp_avg"]
    assert type(exp_avg) is (Pair if cls is Pair else torch.Tensor) and exp_avg.shape == (rows, DIM)
    sharded_states = copy.deepcopy(get_state_dict(model, optimizer))
    plain_dict, plain_optimizer_dict = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save(state, Path(str(box[0]), "ours"))
    dcp.save(state, checkpoint_id=Path(str(box[0]), "torch"))
    expected = steps(model, optimizer, 2, seed=5)

    def fresh() -> tuple[Net, torch.optim.Optimizer]:
        other = shard(made(cls, rows, seed=1))
        return other, adamw(other.parameters())

    for states, options in ((whole_states, StateDictOptions(full_state_dict=True)), (sharded_states, None)):
        other, its_optimizer = fresh()
        set_state_dict(
            other, its_optimizer, model_state_dict=states[0], optim_state_dict=copy.deepcopy(states[1]), options=options
        )
        assert steps(other, its_optimizer, 2, seed=5) == expected
    other, its_optimizer = fresh()
    other.load_state_dict(plain_dict)
    its_optimizer.load_state_dict(plain_optimizer_dict)
    assert steps(other, its_optimizer, 2, seed=5) == expected
    for how, read in (("ours", load), ("torch", dcp.load)):
        other, its_optimizer = fresh()
        steps(other, its_optimizer, 1)
        state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, its_optimizer)}
        read(
            state,
            **({"folder": Path(str(box[0]), how)} if how == "ours" else {"checkpoint_id": Path(str(box[0]), how)}),
        )
        set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert steps(other, its_optimizer, 2, seed=5) == expected


def steps(model: Net, optimizer: torch.optim.Optimizer, num: int, seed: int = 2) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(num):
        loss = model(local_part(torch.randn(12, DIM, generator=generator))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(world_size=2)
def test_gradients_of_the_class_whose_tensors_differ_raise():
    model = shard(made(Pair))
    x, before = torch.randn(4, DIM), model.layers[0].up.weight.full_tensor()
    Unwrap.factor = 2.0
    try:
        with pytest.raises(
            RuntimeError, match=r"gradient of layers.1.up.weight is a Pair of several different tensors"
        ):
            model(x).square().mean().backward()
    finally:
        Unwrap.factor = 1.0
    assert all(param.grad is None for param in model.parameters())
    model(x).square().mean().backward()
    gradient = model.layers[0].up.weight.grad
    assert type(gradient) is RaggedDTensor and type(gradient.to_local()) is torch.Tensor
    assert torch.equal(model.layers[0].up.weight.full_tensor().a, before.a)


class PureNet(nn.Module):
    """As in torch's own tests: no bias, and everything behind the first layer is of the class, also the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        for layer in self.layers[:2]:
            layer.weight = nn.Parameter(Pair.of(layer.weight.detach()))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


@distributed(world_size=2)
def test_plain_parameters_behind_the_class_are_accumulated_once():
    """Their gradients are of the class too."""
    for reshard_after_forward in (True, False):
        found = []
        for how, without in ((fully_shard, no_sync), (torch_fully_shard, fsdp2_no_sync)):
            torch.manual_seed(0)
            model = shard(PureNet(), how, reshard_after_forward=reshard_after_forward)  # type: ignore[arg-type]
            optimizer = torch.optim.Adam([*model.parameters()], lr=1e-2)
            generator = torch.Generator().manual_seed(1)
            for _ in range(3):
                for context in (without(model), nullcontext()):
                    with context:
                        model(local_part(torch.randn(4, DIM, generator=generator))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([whole(param) for param in model.parameters()])
        for got, expected in zip(*found, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=2)
def test_frozen_and_trained_again_copied_summoned_and_written_to(name):
    cls = CLASSES[name]
    model, x = shard(made(cls, 5)), torch.randn(4, DIM)
    weight = model.layers[0].up.weight
    for flag in (False, True):
        weight.requires_grad_(flag)
        model.zero_grad()
        model(x).square().mean().backward()
        assert (weight.grad is not None) == flag
    clone = copy.deepcopy(model)
    assert all(param.requires_grad for param in clone.parameters())
    assert torch.equal(clone(x), model(x))
    with summon_full_params(model, with_grads=True):
        summoned = model.layers[0].up.weight
        assert type(summoned) is cls and summoned.shape == (5, DIM) and summoned.requires_grad
        gradient = summoned.grad.clone()
        summoned.grad.mul_(2)
    assert torch.equal(whole(weight.grad), gradient * 2)
    with torch.no_grad():
        weight.copy_(cls.of(torch.ones(5, DIM)))
        assert torch.equal(whole(weight), torch.ones(5, DIM))
        weight.copy_(distribute_ragged(torch.full((5, DIM), 2.0), weight.device_mesh, weight.placements))
        assert torch.equal(whole(weight), torch.full((5, DIM), 2.0))
        weight.mul_(0.5)
    assert torch.equal(whole(weight), torch.ones(5, DIM)) and not torch.equal(clone(x), model(x))
    assert describe(model) and not find_unreduced_parameters(model)


class Replacing(Quantized):
    """A class whose ``copy_`` replaces the tensors inside instead of writing to them."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default:
            source = args[1] if isinstance(args[1], cls) else cls.of(args[1])
            args[0].codes, args[0].scale = source.codes.clone(), source.scale.clone()
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


@distributed(world_size=2)
def test_a_class_may_replace_the_tensors_inside_when_it_is_written_to():
    for rows in (DIM, 5):
        ours, theirs = shard(made(Replacing, rows)), shard(made(Quantized, rows))
        assert train(ours, adamw) == train(theirs, adamw)
        check_same = zip(ours.parameters(), theirs.parameters(), strict=True)
        assert all(torch.equal(whole(a), whole(b)) for a, b in check_same)


@distributed(world_size=2)
def test_what_does_not_fit_raises_by_name():
    model = shard(made(Pair))
    model(torch.randn(4, DIM))
    weight = model.layers[0].up.weight
    with pytest.raises(ValueError, match=r"flat_parameters\(\): .*layers.0.up.weight is a Pair.*where="):
        flat_parameters(model)
    assert len(flat_parameters(model, lambda fqn, param: not fqn.endswith("up.weight")))
    for what in (weight.norm, lambda: weight @ weight, lambda: weight.view(-1)):
        with pytest.raises(NotImplementedError, match=r"the sharded Pair layers.0.up.weight of the fully_shard group"):
            what()
    with pytest.raises(ValueError, match=r"offload_policy=.*weight is a Pair"):
        shard(made(Pair), offload_policy=CPUOffloadPolicy())


def test_uneven_rows_of_a_class_that_cannot_leave_rows_out_are_refused():
    model = made(NoRows, 5)
    with fake_process_group(rank=0, world_size=2):
        with pytest.raises(ValueError, match=r"up.weight is a NoRows.*5 rows are not a multiple of the 2 ranks.*slice"):
            shard(model)
        shard(made(NoRows, 4))


class NoRows(Quantized):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.slice.Tensor:
            raise NotImplementedError("no slices")
        return super().__torch_dispatch__(func, types, args, kwargs)


class NoProtocol(Quantized):
    """Gathered tensor by tensor."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("fsdp_"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@distributed(world_size=(1, 2, 3))
def test_a_class_without_the_protocol_trains_too():
    for rows in (DIM, 5):
        ours, theirs = shard(made(NoProtocol, rows)), made(Quantized, rows)
        train(ours, adamw)
        train_unsharded(theirs, adamw)
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(whole(param), whole(other), rtol=1e-6, atol=1e-6)


@distributed(world_size=2)
def test_as_many_bytes_travel_as_the_class_has():
    model = shard(made(Quantized))
    model(torch.randn(4, DIM)).square().mean().backward()
    with record_collectives(model) as lines:
        model(torch.randn(4, DIM)).square().mean().backward()
    gathers = [line for line in lines if line.startswith("all-gather layers.0.up.weight")]
    assert len(gathers) == 4 and sum(f"{DIM * DIM} x int8" in line for line in gathers) == 2, lines
    (reduction,) = [line for line in lines if line.startswith("reduce-scatter layers.0.up.weight")]
    assert f"{DIM * DIM} x float32" in reduction
    handle = get_state(model.layers[0])._handles[0]
    (handle,) = [each for each in get_state(model.layers[0])._handles if each.kind.codec.gathered_by is not None]
    assert handle.shard.nbytes == DIM * DIM // 2 + 4 * DIM // 2 and handle.unsharded.nbytes() == 0


@distributed(world_size=2)
def test_from_the_meta_device():
    with torch.device("meta"):
        model = shard(made(Pair, 5), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for param in model.parameters():
        nn.init.trunc_normal_(param)
    drawn = whole(model.layers[0].up.weight)
    assert drawn.std() > 0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    assert all(loss < float("inf") for loss in steps(model, optimizer, 3))
    assert not torch.equal(whole(model.layers[0].up.weight), drawn)
