"""Modules and parameters that other sharded data parallel systems refuse, replace or break, symptom by symptom.

Each is shown right, or refused by a named error, on at least two ranks. What other files show already is not repeated:

==================================================================  ===================================================
symptom                                                             shown by
==================================================================  ===================================================
the class of a module changes; copies and registries of classes     here; test_registry: test_classes_names_and_modules_
break                                                               are_unchanged; test_summon: copies
tied embedding and head in different groups                         test_ties
several dtypes in one group                                         test_features: test_one_group_of_several_dtypes_...
frozen parameters get gradients, or cannot be mixed with others     here: LoRA; test_features: test_requires_grad_
                                                                    toggled_between_steps; test_memory: frozen groups
methods other than forward, parameters used by another module       here; test_summon: test_registered_methods_...
a child's forward before the root's; parents sharded first          test_features: test_forward_of_a_child_before_...;
                                                                    test_bad_input: test_parent_sharded_before_its_child
double backward                                                     test_summon: test_double_backward_raises_...
hooks, attributes and classes of parameters are lost                here: classes; test_sharded_params: hooks, ...
scalars, small and empty parameters, lists of modules               test_features: test_parameters_of_odd_shapes, ...;
                                                                    test_bad_input: test_container_without_a_forward
model.to() after sharding                                           test_edits: test_change_of_dtype_...
batch norm: dtypes under a policy, statistics                       here; test_features: test_batch_norm_...
==================================================================  ===================================================
"""

from __future__ import annotations

import abc
import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_compose import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, no_sync
from fsdp_compose.core.group.registry import _get_fsdp_handles
from tests.harness import distributed, same_on_every_rank
from tests.models import DIM, Layer, Net, inputs, shard_layers
from tests.training import Twins, local_part, mean_square, pair, plain_sgd

# ---- classes of modules

REGISTRY: dict[str, type] = {}


class Registered(nn.Module, abc.ABC):
    """An abstract class with slots, which remembers every class made of it."""

    __slots__ = ("note",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.__name__] = cls

    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Concrete(Registered):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.note = nn.Linear(DIM, DIM), "kept"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@distributed(world_size=2)
def test_classes_are_neither_changed_nor_made():
    twins = Twins(nn.Sequential(Concrete(), Concrete()), lambda model: [fully_shard(part) for part in (*model, model)])
    twins.train(steps=2)
    assert REGISTRY == {"Concrete": Concrete}
    assert all(type(part) is Concrete and part.note == "kept" for part in twins.sharded)
    copied = copy.deepcopy(twins.sharded)
    assert all(type(part) is Concrete for part in copied)
    unsharded = pickle.loads(pickle.dumps(twins.reference))
    (x,) = inputs()
    torch.testing.assert_close(copied(local_part(x)), unsharded(local_part(x)))


# ---- frozen parameters


class LoRA(nn.Module):
    """A frozen matrix and a trainable update of rank 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 1, bias=False), nn.Linear(1, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("nested", [False, True])
@distributed(world_size=(2, 3))
def test_gradients_of_adapters_take_the_bytes_of_the_trainable_parameters_only(nested, world_size):
    dim = 192  # 99 % are frozen

    def shard(model: nn.Module) -> None:
        for layer in model if nested else ():
            fully_shard(layer)
        fully_shard(model)

    twins = Twins(nn.Sequential(LoRA(dim), LoRA(dim)), shard)
    trainable = sum(param.numel() for param in twins.reference.parameters() if param.requires_grad)
    assert trainable < 0.011 * sum(param.numel() for param in twins.reference.parameters())
    (x,) = inputs(1, dim)
    for _ in range(2):
        twins.backward(mean_square, x)
        handles = _get_fsdp_handles(twins.sharded)
        gradients = [handle.gradient.memory for handle in handles if handle.gradient.memory.is_allocated]
        padding = (
            sum(handle.layout.flat_numel for handle in handles if handle.pending_gradients.is_trainable) - trainable
        )
        assert sum(buffer.flat.numel() for buffer in gradients) * world_size == trainable + padding
        assert padding < 16 * len(handles) * world_size
        assert all(param.grad is None for param in twins.sharded.parameters() if not param.requires_grad)
        twins.step()
    for twin in twins.both:  # and then everything trains, and then the adapters by themselves again
        twin.requires_grad_(True)
    twins.backward(mean_square, x)
    twins.step()
    for twin in twins.both:
        for layer in twin:
            layer.base.requires_grad_(False)
    twins.backward(mean_square, x)
    twins.step()


# ---- parameters that another module computes with


@distributed(world_size=2)
def test_attention_whose_output_projection_is_sharded_by_itself_names_the_parameter():
    """``nn.MultiheadAttention`` computes with ``out_proj.weight`` and never calls ``out_proj``."""
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2, batch_first=True)})
    model.forward = lambda x: model["a"](x, x, x, need_weights=False)[0]
    together = copy.deepcopy(model["a"])
    fully_shard(model["a"].out_proj)
    fully_shard(model)
    x = torch.randn(2, 3, 4)
    with pytest.raises(RuntimeError, match=r"parameter a\.out_proj\.\w+ of the fully_shard group a\.out_proj, which"):
        model(x)
    fully_shard(together)  # the remedy
    expected = nn.MultiheadAttention(4, 2, batch_first=True)
    with torch.no_grad():
        for param, ours in zip(expected.parameters(), together.parameters(), strict=True):
            param.copy_(ours.full_tensor())
    torch.testing.assert_close(together(x, x, x)[0], expected(x, x, x)[0])


COMPUTE = {
    "matrix product": lambda x, child: F.linear(x, child.weight),
    "element-wise": lambda x, child: x * child.bias,
}


class UsesAChildsWeight(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.child = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return COMPUTE[self.how](self.first(x), self.child)


@pytest.mark.parametrize("how", COMPUTE)
@distributed(world_size=2)
def test_parent_that_computes_with_a_sharded_childs_weight_is_told_which_and_what_to_do(how):
    model = UsesAChildsWeight(how)
    fully_shard(model.child)
    fully_shard(model)
    with pytest.raises(
        RuntimeError, match=r"parameter child\.\w+ of the fully_shard group child.*do not make a separate group"
    ):
        model(torch.randn(2, DIM))
    Twins(UsesAChildsWeight(how), fully_shard).backward(mean_square, next(inputs()))


# ---- classes of parameters


class Tagged(nn.Parameter):
    """A parameter with a method and a tag."""

    def doubled(self) -> torch.Tensor:
        return self * 2


class UsesTagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.tag = Tagged(torch.randn(DIM)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Tagged)
        self.tag = getattr(self.weight, "tag", None)
        return torch.tanh(x * self.weight.doubled())


@distributed(world_size=2)
def test_class_of_a_parameter_survives_in_forward_conversions_and_copies():
    def shard(model: nn.Sequential) -> None:
        for part in model:
            part.weight.tag = "mine"
            fully_shard(part)
        fully_shard(model)

    twins = Twins(nn.Sequential(UsesTagged(), UsesTagged()), shard, plain_sgd)
    twins.train(steps=2)
    for twin in twins.both:
        twin.double()
    for x in inputs(2):
        twins.backward(mean_square, x.double())
        twins.step()
    copied = copy.deepcopy(twins.sharded)
    (x,) = inputs()
    torch.testing.assert_close(copied(x.double()), twins.reference(x.double()))
    assert [part.tag for part in (*twins.sharded, *copied)] == ["mine"] * 4


@distributed(world_size=2)
def test_parameters_sharded_by_tensor_parallelism_on_the_same_ranks_are_refused_by_name():
    model, mesh = Net(), init_device_mesh("cpu", (2,))
    weight = model.layers[1].linear.weight
    model.layers[1].linear.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"layers\.1\.linear\.weight is already a DTensor.*Shard\(dim=0\)") as error:
        fully_shard(model)
    same_on_every_rank(str(error.value))
    assert fully_shard.state(model) is None


# ---- changes after sharding


def tie(model: nn.Sequential) -> None:
    model[1].linear.weight = model[0].linear.weight


def shard_both(model: nn.Sequential) -> None:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.parametrize(
    ("shard", "trained"), [(fully_shard, False), (fully_shard, True), (shard_both, True)], ids=["one", "trained", "two"]
)
@distributed(world_size=2)
def test_tying_parameters_after_sharding_raises_with_their_names(shard, trained):
    model = nn.Sequential(Layer(), Layer())
    shard(model)
    if trained:
        mean_square(model, next(inputs())).backward()
    tie(model)
    with pytest.raises((RuntimeError, ValueError), match=r"1\.linear\.weight") as error:
        mean_square(model, next(inputs())).backward()
    same_on_every_rank(str(error.value))


@distributed(world_size=2)
def test_parameters_of_two_groups_tied_before_the_first_forward_train_as_tied():
    model, reference = pair(nn.Sequential(Layer(), Layer()))
    shard_both(model)
    for twin in (model, reference):
        tie(twin)
    optimizers = plain_sgd(model.parameters()), plain_sgd(reference.parameters())
    for x in inputs(2):
        for twin, optimizer, part in zip((model, reference), optimizers, (local_part(x), x)):
            mean_square(twin, part).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


# ---- mixed precision


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x.unsqueeze(1))).mean(-1))


@distributed(world_size=2)
def test_batch_norm_under_a_bf16_policy_raises_and_trains_in_a_group_of_its_own_with_fp32_statistics():
    torch.manual_seed(0)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    together = fully_shard(Convolved(), mp_policy=low)
    with pytest.raises(RuntimeError, match="BFloat16"):  # torch mixes no bf16 weight with fp32 statistics
        mean_square(together, next(inputs()))
    model, reference = pair(Convolved())
    fully_shard(model.norm, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=low)
    optimizers = plain_sgd(model.parameters()), plain_sgd(reference.parameters())
    for x in inputs(3):
        part = local_part(x)  # statistics are each rank's own
        for twin in (model, reference):
            mean_square(twin, part).float().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(theirs.grad, op=dist.ReduceOp.AVG)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0.05, atol=5e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(model.norm, name), getattr(reference.norm, name), rtol=0.02, atol=5e-3)


@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
@distributed(world_size=3)
def test_grad_scaler_with_clipping_between_trains_as_unsharded_with_empty_runs_too(clip):
    """Five elements a row on three ranks, scalars and biases: most ranks hold nothing of most parameters."""
    twins = Twins(Net(1), shard_layers, plain_sgd)
    assert any(not param.to_local().numel() for param in twins.sharded.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in twins.both]
    for step, x in enumerate(inputs(5)):
        scale = float("inf") if step == 2 else 1.0  # a step that must be skipped everywhere
        for model, optimizer, scaler, part, clipping in zip(
            twins.both, twins.optimizers, scalers, (x, local_part(x)), (torch.nn.utils.clip_grad_norm_, clip)
        ):
            scaler.scale(mean_square(model, part) * scale).backward()
            scaler.unscale_(optimizer)
            norm = clipping(model.parameters(), 0.1)
            assert norm.isfinite() == (step != 2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        twins.check_parameters()


@distributed(world_size=2)
def test_grad_scaler_with_a_policy_of_fp16_skips_what_overflows_on_one_rank_everywhere():
    model = shard_layers(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer = plain_sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [param.to_local().clone() for param in model.parameters()]
    for x, moves in zip(inputs(2), (False, True)):
        factor = 1e5 if dist.get_rank() == 1 and not moves else 1.0  # no fp16 gradient can hold it
        scaler.scale(model(local_part(x)).float().square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters()) if a.numel()]
        assert any(changed) == moves
    assert scaler.get_scale() == 512.0


# ---- gradients that are not strided


@distributed(world_size=2)
def test_sparse_gradients_of_an_embedding_are_reduced_as_dense_ones():
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    fully_shard(model)
    ids = torch.randint(7, (8,), generator=torch.Generator().manual_seed(0))
    with no_sync(model):
        mean_square(model, local_part(ids)).backward()
    mean_square(model, local_part(ids)).backward()
    for _ in range(2):
        mean_square(reference, ids).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.to_dense())


@distributed(world_size=2)
def test_saving_a_sharded_module_whole_says_what_to_do_and_its_parameters_can_be_saved():
    model = shard_layers(Net())
    with pytest.raises(NotImplementedError, match=r"group .*cannot be pickled.*model\.state_dict\(\)") as error:
        torch.save(model, io.BytesIO())
    same_on_every_rank(str(error.value))
