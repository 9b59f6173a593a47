"""Parameters whose class keeps several tensors of other shapes (quantised weights), below adapters that train: forward
sees what it saw before they were sharded, bit for bit; each rank has its part of the bytes, and no more travel."""

from __future__ import annotations

import copy
import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecisionPolicy,
    broadcast_replicas,
    clip_grad_norm_,
    find_unreduced_parameters,
    flat_parameters,
    fully_shard,
    functional_mode,
    keep_unsharded,
    no_sync,
    offload_model,
    onload_model,
    record_collectives,
    replicate,
    summon_full_params,
    unshard,
)
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict, load, save, save_hf, set_model_state_dict
from fsdp_compose.core.group.registry import _get_fsdp_states, get_state
from fsdp_compose.sync import full_parameters
from tests.harness import distributed, fake_process_group, lasting_mesh
from tests.models import shard_layers
from tests.training import adamw, local_part, mean_over_ranks

DIM, BLOCK = 16, 32
aten = torch.ops.aten


class Blocks(torch.Tensor):
    """Two elements in a byte, a scale for each block of elements, and a mean that is the same for all."""

    INNER = ("packed", "scales", "mean")
    packed: torch.Tensor
    scales: torch.Tensor
    mean: torch.Tensor

    @staticmethod
    def __new__(cls: Any, packed: Any, scales: Any, mean: Any, shape: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=packed.device)

    def __init__(self, packed: torch.Tensor, scales: torch.Tensor, mean: torch.Tensor, shape: Any) -> None:
        self.packed, self.scales, self.mean, self.note = packed, scales, mean, None

    @classmethod
    def of(cls, weight: torch.Tensor) -> Blocks:
        mean = weight.mean()
        blocks = (weight - mean).reshape(-1, BLOCK)
        scales = blocks.abs().amax(1) / 7
        codes = (blocks / scales[:, None]).round().add(8).to(torch.uint8).reshape(-1)
        return cls(codes[::2] * 16 + codes[1::2], scales, mean, weight.shape)

    def values(self) -> torch.Tensor:
        codes = torch.stack([self.packed // 16, self.packed % 16], 1).reshape(-1, BLOCK).to(self.scales.dtype) - 8
        return (codes * self.scales[:, None] + self.mean).reshape(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.INNER], tuple(self.shape)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], shape: Any, *_: Any) -> Blocks:
        return cls(inner["packed"], inner["scales"], inner["mean"], shape)

    def cut(self, parts: int) -> list[Blocks]:
        assert self.scales.numel() % parts == 0, f"{self.scales.numel()} blocks do not make {parts} parts"
        shape = (self.shape[0] // parts, *self.shape[1:])
        both = zip(self.packed.chunk(parts), self.scales.chunk(parts), strict=True)
        return [type(self)(packed, scales, self.mean, shape) for packed, scales in both]

    def __deepcopy__(self, memo: Any) -> Any:
        twin = nn.Parameter(type(self)(*(getattr(self, name).clone() for name in self.INNER), self.shape), False)
        memo[id(self)] = twin
        return twin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return Product.apply(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.view.default):
            return cls(*(getattr(args[0], name) for name in cls.INNER), args[0].shape)
        if func is aten.split.Tensor:
            return args[0].cut(args[0].shape[0] // args[1])
        if func is aten._to_copy.default:
            return cls(*(getattr(args[0], name).to(kwargs.get("device")) for name in cls.INNER), args[0].shape)
        if func is aten.copy_.default and isinstance(args[1], cls):
            for name in cls.INNER:
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func is aten.slice.Tensor and args[1:4] in ((0, 0, args[0].shape[0]), (1, 0, args[0].shape[1])):
            return args[0]
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.values().to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight.values().to(grad.dtype), None


class Gathered(Blocks):
    """With an all-gather of its own, which needs to know how many ranks there are."""

    num_gathers = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        type(self).num_gathers += 1
        return (self.packed, self.scales), (self.mean, self.shape, mesh.size())

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (packed, scales), (mean, shape, num_ranks) = outputs, metadata
        assert param_dtype in (torch.float32, torch.bfloat16)
        if out is not None:
            assert out.packed.data_ptr() == packed.data_ptr() and out.scales.data_ptr() == scales.data_ptr()
            return None
        return type(self)(packed, scales, mean, (shape[0] * num_ranks, *shape[1:])), (packed, scales)


class Misleading(Blocks):
    """Its parts together are not the whole."""

    def cut(self, parts: int) -> list[Blocks]:
        return super().cut(parts)[::-1]


class OnlySlices(Blocks):
    """As inference classes of torchao: no ``split()``."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.split.Tensor:
            raise NotImplementedError(f"{cls.__name__} has no {func}")
        if func is aten.slice.Tensor and args[1] == 0 and args[3] - args[2] < args[0].shape[0]:
            rows = args[3] - args[2]
            return args[0].cut(args[0].shape[0] // rows)[args[2] // rows]
        return super().__torch_dispatch__(func, types, args, kwargs)


torch.serialization.add_safe_globals([Blocks, Gathered, OnlySlices])
CLASSES: dict[str, Any] = {"Blocks": Blocks, "Gathered": Gathered, "OnlySlices": OnlySlices}


class Layer(nn.Module):
    def __init__(self, cls: Any, rows: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(cls.of(torch.randn(rows, DIM) / 4), requires_grad=False)
        self.a, self.b = nn.Linear(DIM, 2, bias=False), nn.Linear(2, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.b(self.a(x))


class Net(nn.Module):
    def __init__(self, cls: Any = Blocks, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(cls) for _ in range(3)), nn.Linear(DIM, 2)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)).tanh()
        return self.head(x)


def made(cls: Any = Blocks, seed: int = 0, checkpoints: bool = False) -> Net:
    torch.manual_seed(seed)
    return Net(cls, checkpoints)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def assert_same(whole: Any, expected: Any) -> None:
    assert type(whole) is type(expected) and whole.shape == expected.shape
    for name in expected.INNER:
        assert torch.equal(getattr(whole, name), getattr(expected, name)), name


def frozen_handle(layer: nn.Module) -> Any:
    (handle,) = [handle for handle in get_state(layer)._handles if handle.kind.codec.gathered_by is not None]
    return handle


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no reshard": {"reshard_after_forward": False},
    "parts": {"reshard_after_forward": 2},
    "checkpointed": {"checkpoints": True},
    "flat views": {"is_flat": True},
    "no_sync": {"accumulates": True},
    "hybrid": {"is_hybrid": True},
    "clipped": {"clips": True},
}


def check_training(
    cls: Any,
    checkpoints: bool = False,
    is_flat: bool = False,
    is_hybrid: bool = False,
    accumulates: bool = False,
    clips: bool = False,
    **options: Any,
) -> None:
    if is_hybrid:
        shape = (2, dist.get_world_size() // 2) if dist.get_world_size() > 2 else (1, dist.get_world_size())
        options["mesh"] = lasting_mesh(("replicate", "shard"), shape)
    model, reference = made(cls, checkpoints=checkpoints), made(cls)
    shard_layers(model, **options)
    mine = flat_parameters(model) if is_flat else trainable(model)
    optimizers = [adamw(mine), adamw(trainable(reference))]
    for step in range(3):
        batch = torch.randn(8, DIM, generator=torch.Generator().manual_seed(step))
        if accumulates:
            with no_sync(model):
                model(local_part(batch)).square().mean().backward()
            reference(batch).square().mean().backward()
        loss, expected = model(local_part(batch)).square().mean(), reference(batch).square().mean()
        loss.backward()
        expected.backward()
        assert mean_over_ranks(loss) == pytest.approx(expected.item(), abs=1e-6)
        if clips:
            norm = clip_grad_norm_(model.parameters(), 0.05)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name)
        if isinstance(expected, Blocks):
            assert_same(param.full_tensor(), expected)
            assert param.grad is None and not param.requires_grad
        else:
            torch.testing.assert_close(param.full_tensor(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=2)
def test_training_equals_that_of_the_unsharded_model(name, way):
    check_training(CLASSES[name], **WAYS[way])


@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=(1, 4))
def test_training_equals_that_of_the_unsharded_model_at_other_world_sizes(name):
    for way in ("plain", "checkpointed", "hybrid"):
        check_training(CLASSES[name], **WAYS[way])


@distributed(world_size=1)
def test_parameters_have_the_dtype_of_their_elements():
    for dtype in (torch.bfloat16, torch.float64):
        layer = nn.Linear(DIM, DIM, bias=False, dtype=dtype)
        layer.weight = nn.Parameter(Blocks.of(layer.weight.detach()), requires_grad=False)
        sharded = fully_shard(layer).weight
        assert {item.dtype for item in (sharded, sharded.detach(), sharded.to_local(), copy.deepcopy(sharded))} == {
            dtype
        }


@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=2)
def test_each_rank_has_its_bytes_and_no_more_travel(name):
    model = shard_layers(made(CLASSES[name]), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model(torch.randn(2, DIM))
    with record_collectives(model) as lines:
        model(torch.randn(2, DIM))
    gathers = [line for line in lines if line.startswith("all-gather layers.0.weight")]
    sizes = [re.search(r"\((\d+) x (\w+)", line).groups() for line in gathers]  # type: ignore[union-attr]
    blocks = DIM * DIM // BLOCK
    assert sorted(sizes) == sorted([(str(DIM * DIM // 2), "uint8"), (str(blocks), "float32")])
    param, handle = model.layers[0].weight, frozen_handle(model.layers[0])
    assert handle.shard.dtype == torch.uint8
    assert handle.shard.numel() == DIM * DIM // 2 // 2 + blocks // 2 * 4 + 16  # the mean takes 16 bytes, aligned
    assert handle.unsharded.nbytes() == 0
    local = param.to_local()
    assert local is param._local_tensor and type(local) is CLASSES[name] and local.shape == (DIM // 2, DIM)
    assert local.packed.untyped_storage().data_ptr() == handle.shard.untyped_storage().data_ptr()
    assert param.shape == (DIM, DIM) and param.dtype == torch.float32
    assert not {"packed", "scales", "mean", "note"} & param.__dict__.keys()  # the whole is not kept by it


@distributed(world_size=2)
def test_the_protocol_of_the_class_gathers_it_in_forward_and_backward():
    Gathered.num_gathers = 0
    model = shard_layers(made(Gathered), reshard_after_forward=True)
    made_by_then = Gathered.num_gathers
    model(torch.randn(2, DIM)).sum().backward()
    assert Gathered.num_gathers - made_by_then == 2 * len(model.layers)
    model.layers[0].weight._local_tensor.note = "mine"
    seen: list[Any] = []
    original = Gathered.fsdp_pre_all_gather
    Gathered.fsdp_pre_all_gather = lambda self, mesh: (seen.append(self.note), original(self, mesh))[1]  # type: ignore[assignment]
    try:
        model(torch.randn(2, DIM))
    finally:
        Gathered.fsdp_pre_all_gather = original  # type: ignore[method-assign]
    assert seen == ["mine", None, None]


@pytest.mark.parametrize("name", ["Blocks", "Gathered"])
@distributed(world_size=2)
def test_copies_summoned_parameters_and_moves(name):
    cls = CLASSES[name]
    model, reference = shard_layers(made(cls)), made(cls)
    model.layers[0].weight.tag = "mine"
    x = torch.randn(2, DIM)
    expected = reference(x)
    assert torch.equal(model(x), expected)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].weight.copy_(cls.of(torch.ones(DIM, DIM) + torch.eye(DIM)))
    assert torch.equal(clone(x), expected) and not torch.equal(model(x), expected)
    assert clone.layers[0].weight.tag == "mine"
    with summon_full_params(clone):
        assert_same(clone.layers[1].weight, reference.layers[1].weight)
        clone.layers[0].weight = nn.Parameter(copy.deepcopy(model).layers[0].weight.full_tensor(), False)
    assert torch.equal(clone(x), model(x))
    clone.cpu().float()
    assert torch.equal(clone(x), model(x))
    offload_model(clone)
    onload_model(clone)
    with keep_unsharded(clone), torch.no_grad():
        unshard(clone.layers[0])
        assert torch.equal(clone(x), model(x)) and torch.equal(clone(x), model(x))
    with torch.no_grad():
        clone.layers[0].weight.data = reference.layers[0].weight
    assert torch.equal(clone(x), expected)
    assert not find_unreduced_parameters(clone)


@pytest.mark.parametrize("name", CLASSES)
@distributed(world_size=2)
def test_state_dicts_are_loaded(name):
    cls = CLASSES[name]
    model, reference = shard_layers(made(cls)), made(cls)
    x = torch.randn(2, DIM)
    expected, full = reference(x), StateDictOptions(full_state_dict=True)

    def is_loaded(into: Any) -> bool:
        return torch.equal(into(x), expected)

    for assign in (False, True):
        other = shard_layers(made(cls, 1))
        other.load_state_dict(model.state_dict(), assign=assign)
        assert is_loaded(other)
    for options in (StateDictOptions(), StateDictOptions(cpu_offload=True), full):
        other = shard_layers(made(cls, 1))
        set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
        assert is_loaded(other)
    state = get_model_state_dict(model, options=full)
    assert_same(state["layers.0.weight"], reference.layers[0].weight)
    other = made(cls, 1)
    other.load_state_dict(state)
    assert is_loaded(other)
    adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert not any(fqn.endswith("weight") and fqn.count(".") == 2 for fqn in adapters)
    other = shard_layers(made(cls))
    with torch.no_grad():
        for param in trainable(other):
            param.zero_()
    set_model_state_dict(other, adapters, options=StateDictOptions(strict=False))
    assert is_loaded(other)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(
        RuntimeError, match=rf"layers.0.weight: a {name} consists of several tensors, which the first rank"
    ):
        set_model_state_dict(shard_layers(made(cls, 1)), state if dist.get_rank() == 0 else {}, options=from_first)


@distributed(world_size=2)
def test_checkpoints_on_disk(tmp_path=None):
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    folder = Path(str(box[0]))
    model, x = shard_layers(made()), torch.randn(2, DIM)
    expected = model(x)
    for name, write, read in (("torch", dcp.save, dcp.load), ("ours", save, load)):
        path = {"checkpoint_id": folder / name} if name == "torch" else {"folder": folder / name}
        write({"model": model.state_dict()}, **path)
        other = shard_layers(made(seed=1))
        state = {"model": other.state_dict()}
        read(state, **path)
        other.load_state_dict(state["model"])
        assert torch.equal(other(x), expected)
    with pytest.raises(RuntimeError, match=r"layers.0.weight is a Blocks, made of several tensors"):
        save_hf(model, folder / "hf")


@distributed(world_size=4)
def test_checkpoints_of_other_numbers_of_ranks_are_loaded():
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    x = torch.randn(2, DIM)
    sizes = 4, 2, 1
    groups = [dist.new_group([*range(size)], timeout=timedelta(seconds=60)) for size in sizes]
    meshes = [
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",)) if dist.get_rank() < size else None
        for size, group in zip(sizes, groups, strict=True)
    ]
    expected = made()(x)
    for saving in range(3):
        folder = Path(str(box[0]), str(sizes[saving]))
        if meshes[saving] is not None:
            save(
                {"model": shard_layers(made(), mesh=meshes[saving]).state_dict()}, folder, process_group=groups[saving]
            )
        dist.barrier()
        for loading in range(3):
            if meshes[loading] is None:
                continue
            other = shard_layers(made(seed=1), mesh=meshes[loading])
            state = {"model": other.state_dict()}
            load(state, folder, process_group=groups[loading])
            other.load_state_dict(state["model"])
            assert torch.equal(other(x), expected), (sizes[saving], sizes[loading])
        dist.barrier()


@distributed(world_size=2)
def test_what_it_cannot_do_raises_by_name():
    model = shard_layers(made(Gathered))
    x, param = torch.randn(2, DIM), model.layers[0].weight
    model(x)
    for what in (lambda: param + 1, lambda: param.norm(), lambda: torch.ones(DIM, DIM) @ param, param.redistribute):
        with pytest.raises(NotImplementedError, match=r"the sharded Gathered layers.0.weight of the fully_shard group"):
            what()
    with pytest.raises(NotImplementedError, match=r"layers.0.weight.* cannot train"):
        param.requires_grad_(True)
    with pytest.raises(NotImplementedError, match=r"cannot be converted to torch.bfloat16"):
        copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"cannot be pickled: save .to_local\(\)"):
        torch.save(param, "/dev/null")
    with pytest.raises(TypeError, match=r"or from a whole Gathered of its shape; got a Tensor"), torch.no_grad():
        param.copy_(torch.zeros(DIM, DIM))
    with pytest.raises(NotImplementedError, match=r"layers.0.weight.*is a Gathered, gathered by its class"):
        with functional_mode(model):
            model(x)
    with pytest.raises(RuntimeError, match=r"layers.0.weight is a Gathered, which consists of several tensors"):
        with full_parameters(model) as buckets:
            next(iter(buckets))
    assert model(x).isfinite().all()


@distributed(world_size=4)
def test_replicas_are_compared_and_made_equal():
    torch.manual_seed(dist.get_rank() // 2)
    model = Net()
    shard_layers(model, mesh=lasting_mesh(("replicate", "shard")))
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="replica"):
        model(x)
    broadcast_replicas(model)
    outputs = [torch.zeros(2, 2) for _ in range(4)]
    dist.all_gather(outputs, model(x).detach())
    assert all(torch.equal(item, outputs[0]) for item in outputs)


@distributed(world_size=2)
def test_a_parameter_tied_across_groups_moves_with_its_bytes():
    def tied() -> Net:
        model = made()
        model.layers[1].weight = model.layers[0].weight
        return model

    model, reference, x = tied(), tied(), torch.randn(2, DIM)
    shard_layers(model)
    assert torch.equal(model(x), reference(x))
    assert model.layers[1].weight is model.layers[0].weight
    assert_same(model.layers[0].weight.full_tensor(), reference.layers[0].weight)


def refused(model: Any, match: str, world_size: int = 2) -> None:
    before = [*model.parameters()]
    with fake_process_group(rank=0, world_size=world_size):
        with pytest.raises(ValueError, match=match) as raised:
            shard_layers(model)
        assert "ignored_params" in str(raised.value)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True)) and not _get_fsdp_states(model)
        shard_layers(model, ignored_params=[layer.weight for layer in model.layers])


def test_what_cannot_be_cut_is_refused_with_its_sizes():
    parts = r"\(packed: torch.uint8 \(128,\), scales: torch.float32 \(8,\), mean: torch.float32 \(\)\)"
    refused(made(), rf"the parameter weight is a Blocks of shape \(16, 16\).*{parts}.* 16 rows .* 3 ranks", 3)
    refused(made(), r"cannot cut it into 16 parts of 1 rows each \(split\(\): AssertionError: 8 blocks", 16)
    refused(made(Misleading), r"cuts packed into 2 parts of shape \(64,\), which together are not the whole")
    model = made()
    model.layers[0].weight.requires_grad_(True)
    refused(
        model, "it is trainable, but mean is the same on every rank, and each would train a copy of its own: freeze"
    )
    with fake_process_group(rank=0, world_size=2), pytest.raises(ValueError, match="replicate.. gathers nothing"):
        replicate(made())


def test_one_that_tensor_parallelism_holds_is_refused():
    with fake_process_group(rank=0, world_size=4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = made()
        for layer in model.layers:
            whole = DTensor.from_local(layer.weight.detach(), mesh["tp"], [Replicate()], run_check=False)
            layer.weight = nn.Parameter(whole, requires_grad=False)
        with pytest.raises(ValueError, match=r"weight is already a DTensor.* of Blocks, which is stored as several"):
            shard_layers(model, mesh=mesh["dp"])


def test_many_simulated_ranks():
    with fake_process_group(rank=5, world_size=8):
        model = shard_layers(made(Gathered))
        for _ in range(2):
            model(torch.randn(2, DIM)).sum().backward()
        assert model.layers[0].weight.to_local().shape == (2, DIM)
