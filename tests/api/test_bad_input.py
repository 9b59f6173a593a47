"""Each bad input gets one clear error before anything is changed, and then the call can be made properly."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses import FakeTensorMode
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compose import (
    MixedPrecisionPolicy,
    RaggedDTensor,
    drop_in,
    fully_shard,
    replicate,
    reshard,
    set_requires_gradient_sync,
    set_reshard_after_forward,
    unshard,
)
from fsdp_compose.core.group.registry import _get_fsdp_states
from tests.harness import distributed, fake_process_group, same_on_every_rank


@pytest.fixture
def fake_group() -> Iterator[None]:
    with fake_process_group(world_size=4):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def local_of(param: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter: of a sharded one, its local part."""
    return param._local_tensor if isinstance(param, RaggedDTensor) else param


def facts_of(param: nn.Parameter) -> tuple[Any, ...]:
    local = local_of(param)
    return id(param), id(param.grad), dir(param), param._version, local._version, local.data_ptr(), local.shape


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that ``fully_shard`` could have changed: types, attributes, registries, hooks, parameters."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in module.__dict__.items() if key.endswith("_hooks")}
        params = {key: None if param is None else facts_of(param) for key, param in module._parameters.items()}
        buffers = {key: id(buffer) for key, buffer in module._buffers.items()}
        attributes = {key: id(value) for key, value in module.__dict__.items()}
        found.append((name, id(module), type(module), hooks, params, buffers, attributes))
    return found


@contextmanager
def refused(error: type[Exception], *words: str, model: nn.Module) -> Iterator[None]:
    """The body raises ``error`` with all ``words`` (regular expressions) in it, and ``model`` stays as it was."""
    before = snapshot(model)
    with pytest.raises(error) as caught:
        yield
    for word in words:
        assert re.search(word, str(caught.value)), f"no {word!r} in: {caught.value}"
    assert snapshot(model) == before


def assert_trains(model: nn.Module, x: torch.Tensor | None = None) -> None:
    model(torch.ones(2, 4) if x is None else x).sum().backward()
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)


# ---- mesh and process group ------------------------------------------------------------------------------------------


def test_neither_mesh_nor_process_group():
    model = Net()
    with refused(RuntimeError, "no mesh", r"init_process_group\(\)", r"mesh=init_device_mesh", model=model):
        fully_shard(model)
    with fake_process_group(world_size=2):
        assert_trains(fully_shard(model))


def test_mesh_of_three_dimensions(fake_group):
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))
    with refused(
        ValueError, "one dimension, or with two", "3 dimensions", r"\(2, 2, 1\)", r"mesh\['shard'\]", model=model
    ):
        fully_shard(model, mesh=mesh)
    assert_trains(fully_shard(model, mesh=mesh["replicate", "shard"]))


@pytest.mark.parametrize("mesh", [4, "cpu", torch.arange(4), [0, 1]], ids=["int", "str", "tensor", "list"])
def test_mesh_of_the_wrong_type(fake_group, mesh):
    model = Net()
    with refused(TypeError, "mesh", "DeviceMesh", type(mesh).__name__, model=model):
        fully_shard(model, mesh=mesh)
    with refused(TypeError, "mesh", "DeviceMesh", "ProcessGroup", model=model):
        fully_shard(model, mesh=dist.group.WORLD)
    assert_trains(fully_shard(model))


def test_rank_outside_the_mesh():
    model = Net()
    with fake_process_group(rank=3, world_size=4):
        mesh = DeviceMesh("cpu", [0, 1])
        with refused(ValueError, "rank 3 is not in the mesh", model=model):
            fully_shard(model, mesh=mesh)
        assert_trains(fully_shard(model, mesh=DeviceMesh("cpu", [2, 3])))


def test_mesh_on_a_device_that_is_not_there(fake_group):
    absent = next(kind for kind in ("cuda", "xpu") if not torch.get_device_module(kind).is_available())
    model = Net()
    with refused((ValueError, RuntimeError), "mesh", absent, model=model):
        fully_shard(model, mesh=init_device_mesh(absent, (4,)))
    assert_trains(fully_shard(model, mesh=init_device_mesh("cpu", (4,))))


def test_parameter_on_another_device_than_the_mesh(fake_group):
    model = Net()
    weight = model.head.weight
    with FakeTensorMode():
        model.head.weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
    words = ("head.weight", "on cuda:0", "mesh is on cpu", r"module.to\('cpu'\)", "mesh on cuda")
    try:
        fully_shard(model)
    except ValueError as error:
        for word in words:
            assert re.search(word, str(error)), f"no {word!r} in: {error}"
    else:
        pytest.fail("not refused")
    assert not _get_fsdp_states(model)
    model.head.weight = weight
    assert_trains(fully_shard(model))


def test_groups_of_one_model_on_different_meshes(fake_group):
    model = Net()
    fully_shard(model.layers[0], mesh=DeviceMesh("cpu", [0, 1]))
    fully_shard(model)
    with pytest.raises(ValueError, match=r"different meshes: layers\.0.*Use meshes with the same ranks"):
        model(torch.ones(2, 4))


# ---- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [None, "model", nn.Linear, torch.ones(2), [], (nn.Linear(2, 2),), [nn.Linear(2, 2), None], iter([nn.Linear(2, 2)])],
    ids=["None", "str", "class", "tensor", "empty list", "tuple", "list with None", "iterator"],
)
def test_anything_but_modules(fake_group, module):
    with pytest.raises(TypeError, match="expected an nn.Module or a non-empty list of nn.Modules"):
        fully_shard(module)


@pytest.mark.parametrize("container", [nn.ModuleList, lambda parts: nn.ModuleDict({"a": parts[0], "b": parts[1]})])
def test_container_without_a_forward(fake_group, container):
    parts = container([nn.Linear(4, 4), nn.Linear(4, 4)])
    with refused(ValueError, type(parts).__name__, "forward", model=parts):
        fully_shard(parts)
    model = nn.Sequential(*parts.children())
    fully_shard(list(parts.children()))
    assert_trains(model)


@pytest.mark.parametrize("container", [nn.ParameterList, lambda parts: nn.ParameterDict({"a": parts[0]})])
def test_container_of_parameters(fake_group, container):
    parts = container([nn.Parameter(torch.ones(4))])
    with refused(
        ValueError, type(parts).__name__, "forward", "the module that contains it", "^(?!.*children)", model=parts
    ):
        fully_shard(parts)


def test_module_sharded_twice(fake_group):
    model = Net()
    fully_shard(model.layers[0])
    for again in (model.layers[0], [model.layers[0]], [model.layers[1], model.layers[0]]):
        with refused(ValueError, "already called", "Sequential", "once", model=model):
            fully_shard(again)
    fully_shard(model)
    with refused(ValueError, "already called", "Net", model=model):
        fully_shard(model)
    assert_trains(model)


def test_parent_sharded_before_its_child(fake_group):
    model = Net()
    fully_shard(model)
    words = ("0.weight of this Sequential", "layers.1.0.weight of the sharded Net", "inner modules before outer")
    with refused(ValueError, *words, model=model):
        fully_shard(model.layers[1])
    assert_trains(model)


def test_parameter_in_two_groups(fake_group):
    model = Net()
    model.head.weight = model.layers[1][0].weight
    for layer in (model.layers[1], model.head):
        fully_shard(layer)
    words = (
        "^weight and 0.weight of the sharded Sequential: these weights are tied",
        "common parent",
        r"fully_shard\(\[a, b\]\)",
    )
    with pytest.raises(ValueError, match=".*".join(words)):
        model.head(torch.ones(2, 4))  # alone, without a group around both
    assert_trains(fully_shard(model))

    model = Net()
    model.head.weight = model.layers[1][0].weight
    fully_shard([model.layers[1], model.head])
    assert_trains(fully_shard(model))


def test_parameter_tied_between_two_lists(fake_group):
    model = Net()
    model.head.weight = model.embed.weight
    fully_shard([model.layers[0], model.embed])
    fully_shard([model.layers[1], model.head])
    assert_trains(fully_shard(model))


def test_torchs_own_apis_on_the_same_module(fake_group):
    model = Net()
    torch_fully_shard(model.layers[0])
    with refused(ValueError, r"torch's fully_shard\(\)", "Sequential", model=model):
        fully_shard(model.layers[0])
    torch_replicate(model.layers[1])
    with refused(ValueError, r"torch's replicate\(\)", "Sequential", model=model):
        fully_shard(model.layers[1])


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_uninitialised_parameters(fake_group):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    before = {key: id(param) for key, param in model.named_parameters()}
    with pytest.raises(ValueError, match=r"1.weight is not initialized \(lazy module\); run a forward first"):
        fully_shard(model)
    assert {key: id(param) for key, param in model.named_parameters()} == before
    assert not _get_fsdp_states(model)
    model(torch.ones(2, 4))
    assert_trains(fully_shard(model))


def test_parameter_with_a_gradient(fake_group):
    model = Net()
    model.layers[1][0].bias.grad = torch.zeros(4)
    with refused(ValueError, "layers.1.0.bias has a gradient", r"zero_grad\(\)", model=model):
        fully_shard(model)
    model.zero_grad()
    assert_trains(fully_shard(model))


def test_parameters_partly_on_the_meta_device(fake_group):
    model = Net()
    model.layers[1].to("meta")
    with refused(ValueError, "layers.1.0.weight is on the meta device", "materialize", model=model):
        fully_shard(model)
    model.layers[1].to_empty(device="cpu")
    assert_trains(fully_shard(model))


def test_first_forward_with_parameters_on_the_meta_device(fake_group):
    with torch.device("meta"):
        model = fully_shard(Net())
    with refused(RuntimeError, "still on the meta device", r"model.to_empty\(device=...\)", model=model):
        model(torch.ones(2, 4))
    model.to_empty(device="cpu")
    assert_trains(model)


@pytest.mark.parametrize(
    "ignored", [lambda model: ["head.weight"], lambda model: model.head.weight, lambda model: [model.head], lambda _: 5]
)
def test_ignored_params_that_are_no_parameters(fake_group, ignored):
    model = Net()
    with refused(TypeError, "ignored_params", model=model):
        fully_shard(model, ignored_params=ignored(model))
    assert_trains(fully_shard(model, ignored_params=iter([model.head.weight])))


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", 16, float, torch.Tensor], ids=str)
def test_policy_with_something_that_is_no_dtype(field, dtype):
    with pytest.raises(TypeError, match=rf"{field}={re.escape(repr(dtype))}.*torch.dtype such as torch.bfloat16"):
        MixedPrecisionPolicy(**{field: dtype})


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_policy_with_a_dtype_that_is_not_floating_point(field, dtype):
    with pytest.raises(ValueError, match=rf"{field}={dtype}.*floating-point dtype such as torch.bfloat16"):
        MixedPrecisionPolicy(**{field: dtype})


@pytest.mark.parametrize("policy", [torch.bfloat16, "bf16"], ids=repr)
def test_policy_of_the_wrong_type(fake_group, policy):
    model = Net()
    with refused(TypeError, "mp_policy", "MixedPrecisionPolicy or torch's", model=model):
        fully_shard(model, mp_policy=policy)
    assert_trains(fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16)))


@pytest.mark.parametrize("flag", [0, -1, 3, 1.0, "true", torch.tensor(True)], ids=repr)
def test_reshard_after_forward_that_is_neither_a_bool_nor_a_factor(fake_group, flag):
    model = Net()
    error = ValueError if isinstance(flag, int) else TypeError
    with refused(error, "reshard_after_forward", model=model):
        fully_shard(model, reshard_after_forward=flag)
    fully_shard(model)
    with refused(error, "set_reshard_after_forward", model=model):
        set_reshard_after_forward(model, flag)
    assert_trains(model)


@pytest.mark.parametrize("granule", ["row", 0, -1, 2.0, True, (0, 1), (1, 1, 1), (), [2, 2]], ids=repr)
def test_granularity_that_returns_no_granule(fake_group, granule):
    model = Net()

    def granularity(fqn, param):
        return granule if fqn == "layers.1.0.weight" else None

    with refused(ValueError, "layers.1.0.weight", r"\(4, 4\)", re.escape(repr(granule)), "expected", model=model):
        fully_shard(model, granularity=granularity)
    assert_trains(fully_shard(model, granularity=lambda fqn, param: "whole"))


def test_granularity_that_is_no_function_or_that_raises(fake_group):
    model = Net()
    with refused(TypeError, "granularity", "function", model=model):
        fully_shard(model, granularity="rows")
    with refused(ZeroDivisionError, model=model):
        fully_shard(model, granularity=lambda fqn, param: 1 / 0)
    assert_trains(fully_shard(model))


@pytest.mark.parametrize("call", [unshard, reshard], ids=lambda call: call.__name__)
def test_steering_a_module_that_is_not_sharded(fake_group, call):
    model = Net()
    fully_shard(model.layers[0])
    for module in (model, model.head, model.layers[0][0]):
        with refused(ValueError, call.__name__, "not called", type(module).__name__, model=model):
            call(module)
    with refused(ValueError, "not called", "Net", model=model):
        set_requires_gradient_sync(model, False, recurse=False)
    with pytest.raises(ValueError, match="expected an nn.Module"):
        call("model")


def test_reshard_while_forward_runs(fake_group):
    model = fully_shard(Net())
    hook = model.head.register_forward_pre_hook(lambda *_: reshard(model))
    with pytest.raises(RuntimeError, match=r"reshard\(\): a forward or backward .* is running"):
        model(torch.ones(2, 4))
    hook.remove()
    with pytest.warns(UserWarning, match="interrupted"):
        assert_trains(model)


# ---- models that change after fully_shard ----------------------------------------------------------------------------


def test_trainable_parameter_added_before_the_first_forward(fake_group):
    model = fully_shard(Net())
    model.layers[1].late = nn.Parameter(torch.ones(2))
    with refused(ValueError, "layers.1.late", r"after fully_shard\(\)", "ignored_params", model=model):
        model(torch.ones(2, 4))
    model.layers[1].late.requires_grad_(False)
    assert_trains(model)


def test_module_added_before_the_first_forward(fake_group):
    model = fully_shard(Net())
    model.layers.append(nn.Linear(4, 4))
    with refused(ValueError, "layers.2.weight, layers.2.bias", r"after fully_shard\(\)", model=model):
        model(torch.ones(2, 4))
    fully_shard(model.layers[2])
    assert_trains(model)


@pytest.mark.parametrize("after_a_forward", [False, True])
def test_parameter_replaced_after_fully_shard(fake_group, after_a_forward):
    model = fully_shard(Net())
    if after_a_forward:
        assert_trains(model)
    sharded = model.layers[1][0].weight
    width = 4 if after_a_forward else 5  # before the first forward, one of the same shape is taken over
    model.layers[1][0].weight = nn.Parameter(torch.ones(4, width))
    with refused((ValueError, RuntimeError), "layers.1.0.weight", "replaced", r"fully_shard\(\)", model=model):
        model(torch.ones(2, 4))
    model.layers[1][0].weight = sharded
    assert_trains(model)


def test_parameter_added_or_removed_after_the_first_forward(fake_group):
    model = fully_shard(Net())
    assert_trains(model)
    model.head.late = nn.Parameter(torch.ones(2))
    with refused(RuntimeError, "head.late", "added", r"fully_shard\(\)", model=model):
        model(torch.ones(2, 4))
    del model.head.late
    sharded, model.head.bias = model.head.bias, None
    with refused(RuntimeError, "head.bias", "removed", r"fully_shard\(\)", model=model):
        model(torch.ones(2, 4))
    model.head.bias = sharded
    assert_trains(model)


def test_frozen_parameter_added_after_fully_shard_is_left_alone(fake_group):
    model = fully_shard(Net())
    assert_trains(model)
    model.head.late = nn.Parameter(torch.ones(2), requires_grad=False)
    assert_trains(model)
    assert "late" in dict(model.head.named_parameters())


class Misbehaving(Net):
    action: Callable[[Misbehaving], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.action is not None:
            self.action(self)
        return super().forward(x)


def replace_parameter(model: Misbehaving) -> None:
    model.layers[1][0].weight = nn.Parameter(torch.ones(4, 4))


def add_parameter(model: Misbehaving) -> None:
    model.layers[1][0].register_parameter("weight2", nn.Parameter(torch.ones(4, 4)))


def remove_parameter(model: Misbehaving) -> None:
    model.layers[1][0].bias = None


@torch.no_grad()
def edit_in_place(model: Misbehaving) -> None:
    model.layers[1][0].weight.mul_(2)


@torch.no_grad()
def edit_a_view(model: Misbehaving) -> None:
    model.layers[1][0].weight[0].zero_()


@pytest.mark.parametrize("shards_layers", [False, True])
@pytest.mark.parametrize("action", [replace_parameter, add_parameter, remove_parameter, edit_in_place, edit_a_view])
def test_forward_that_changes_its_parameters(fake_group, action, shards_layers):
    model = Misbehaving()
    if shards_layers:  # then the change happens in the forward of the layer that owns the parameter
        fully_shard(model.layers[1])
        model.layers[1].register_forward_pre_hook(lambda *_: model.action and action(model))
    else:
        model.action = action
    fully_shard(model)
    identities = {name: id(param) for name, param in model.named_parameters()}
    values = {name: param.to_local().detach().clone() for name, param in model.named_parameters()}
    model.action = action if not shards_layers else lambda _: None
    error = "modified in place inside forward" if action in (edit_in_place, edit_a_view) else "forward replaced, added"
    with pytest.raises(RuntimeError, match=error) as caught:
        model(torch.ones(2, 4))
    name = "layers.1.0.bias" if action is remove_parameter else "layers.1.0.weight"
    assert name in str(caught.value)
    assert {name: id(param) for name, param in model.named_parameters()} == identities
    model.action = None
    with pytest.warns(UserWarning, match="interrupted"):
        assert_trains(model)
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), values[name])


@pytest.mark.parametrize("several", [["last", "first"], ["first", "last"], ["first"], ["inner"]])
def test_errors_call_parameters_by_their_names_in_the_model(several):
    """Also where a group has several modules, in whatever order."""
    with fake_process_group():
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("first", "middle", "last")})
        model["inner"] = nn.Sequential(nn.Linear(4, 4))
        model.forward = lambda x: model["inner"](model["last"](model["middle"](model["first"](x))))
        fully_shard([model[name] for name in several])
        fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        suffix = "0.weight" if several == ["inner"] else "weight"
        expected = [name for item in several for name in (f"{item}.{suffix}", f"{item}.{suffix[:-6]}bias")]
        (handle,) = fully_shard.state(model[several[0]])._handles
        assert handle.names == expected
        for name in several:
            target = model["inner"][0] if name == "inner" else model[name]
            old, target.weight = target.weight, nn.Parameter(torch.zeros(4, 4))
            with pytest.raises(RuntimeError, match=rf": {name}\.{suffix}\. "):
                model(torch.ones(2, 4))
            target.weight = old
            model(torch.ones(2, 4)).sum().backward()


# ---- torch's own data parallelism, below sharded modules and around them


def wrap_in_ddp(module):
    return nn.parallel.DistributedDataParallel(module)


def wrap_in_fsdp1(module):
    return torch.distributed.fsdp.FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def shard_by_fsdp2(module):
    return torch.distributed.fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


OF_TORCH = {"DistributedDataParallel": wrap_in_ddp, "FSDP1": wrap_in_fsdp1, "FSDP2": shard_by_fsdp2}


@pytest.mark.parametrize("shard", [fully_shard, replicate, drop_in.fully_shard])
@pytest.mark.parametrize("where", ["the module itself", "below it", "in a list"])
@pytest.mark.parametrize("name", OF_TORCH)
@distributed(world_size=2)
def test_what_torch_makes_data_parallel_is_not_sharded_again(name, where, shard):
    torch.manual_seed(0)
    inner = OF_TORCH[name](nn.Linear(4, 4))
    module = inner if where == "the module itself" else nn.Sequential(nn.Linear(4, 4), inner)
    before = [*module.parameters()]
    caller = "replicate" if shard is replicate else "fully_shard"
    words = "fully_shard" if name == "FSDP2" else name
    with pytest.raises(ValueError, match=rf"{caller}\(\): .*{words}.*choose one") as error:
        shard([module] if where == "in a list" else module)
    same_on_every_rank(str(error.value))
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    shard(nn.Sequential(nn.Linear(4, 4)))
    if where == "below it" and shard is not drop_in.fully_shard:
        shard(module, ignored_params=inner.parameters())  # which torch then trains


@pytest.mark.parametrize("part", ["all", "one layer", "replicated"])
@pytest.mark.parametrize("name", ["DistributedDataParallel", "FSDP1"])
@distributed(world_size=2)
def test_wrappers_of_torch_around_a_sharded_model_are_refused(name, part):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicate(model) if part == "replicated" else fully_shard(model if part == "all" else model[1])
    expected = "1.weight" if part == "one layer" else "0.weight"
    with pytest.raises(RuntimeError, match=rf"\(\): {expected} of this Sequential is sharded by fsdp_compose.*without"):
        OF_TORCH[name](model)
    if part != "one layer":
        assert_trains(model)


@distributed(world_size=2)
def test_fsdp2_around_a_sharded_layer_is_refused_by_torch():
    """By errors that torch does not word for it, which docs/limits.md quotes."""
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises((TypeError, RuntimeError), match="Invariant encountered|overlapping meshes"):
        shard_by_fsdp2(model)


# ---- what users of FSDP2 try


@pytest.mark.parametrize("name", ["shard_placement_fn", "dp_mesh_dims"])
def test_keywords_of_fsdp2_name_the_drop_in(name):
    with fake_process_group(world_size=2):
        model = nn.Linear(4, 4)
        with pytest.raises(TypeError, match=rf"{name}'.*FSDP2.*fsdp_compose\.drop_in\.fully_shard\(\)"):
            fully_shard(model, **{name: None})
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'sharding'$"):
            fully_shard(model, sharding=None)
        fully_shard(model)


@pytest.mark.parametrize("name", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_methods_of_fsdp2_name_the_function_and_the_drop_in(name):
    with fake_process_group(world_size=2):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4))))
        for module in (model, model[0], copy.deepcopy(model)):
            with pytest.raises(AttributeError, match=rf"fsdp_compose\.{name}\(module, \.\.\.\).*drop_in\.fully_shard"):
                getattr(module, name)(False)
        assert not isinstance(model, drop_in.FSDPModule)
        like_fsdp2 = drop_in.fully_shard(nn.Linear(4, 4))
        getattr(like_fsdp2, name)(False)


def test_a_method_of_that_name_that_the_module_has_stays():
    class Own(nn.Linear):
        def set_requires_gradient_sync(self, flag):
            return flag

    with fake_process_group(world_size=2):
        assert fully_shard(Own(4, 4)).set_requires_gradient_sync(3) == 3
