"""``full_parameters``, ``changed_since``: weights for other programs, in buckets that all ranks gather together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compose import (
    flat_parameters,
    full_parameters,
    fully_shard,
    replicate,
    summon_full_params,
)
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict, set_model_state_dict
from fsdp_compose.core.comm import Label, Transport
from fsdp_compose.core.comm import store as rendezvous
from fsdp_compose.core.comm.store import TIMEOUT_ENV
from fsdp_compose.core.comm.transport import TRANSPORT_ENV
from fsdp_compose.core.group.registry import _get_fsdp_handles
from fsdp_compose.sync import ParameterSnapshot, apply_changes, changed_since, snapshot_parameters
from fsdp_compose.sync.changes import Form, as_bits, changed_elements, gather_elements
from tests.behavior.test_expert_parallel import mixture, spread
from tests.flat.test_tensor_parallel import mesh_of, parallel_uneven, parallelize, sharded_gpt
from tests.harness import distributed, environment, lasting_mesh, same_on_every_rank
from tests.models import GPT, batches, gpt_loss, shard_layers
from tests.training import adamw, local_part, train

State = dict[str, torch.Tensor]
PLAIN = (torch.Tensor, nn.Parameter)


class Mixed(nn.Module):
    """Parameters of several dtypes, frozen, tied, empty and 0-dim ones, one that is ignored, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[1].to(torch.bfloat16)
        self.layers[2].weight.requires_grad_(False)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.alone = nn.Parameter(torch.randn(5, 7), requires_grad=False)
        self.numbers = nn.Parameter(torch.arange(9), requires_grad=False)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(ids)) * self.scale
        x = self.layers[1](x.bfloat16()).float()
        return self.head(self.layers[2](x))


def mixed(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Mixed()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, ignored_params={model.alone}, **options)


def shard_some(model: GPT) -> GPT:
    """Some blocks are sharded, one is replicated, and the root is neither."""
    for i, block in enumerate(model.blocks):
        (replicate if i == 1 else fully_shard)(block)
    return model


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def expert_parallel() -> nn.Module:
    mesh = lasting_mesh(("edp", "ep"))
    data, model = mesh._flatten("dp"), mixture()
    spread(model, mesh["ep"])
    fully_shard(model.experts, mesh=mesh["edp"])
    return fully_shard(model, mesh=data)


# What is made of the ranks there are; those of four ranks alone are listed apart.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: shard_layers(GPT(layers=1)),
    "tied": lambda: shard_layers(GPT(tie=True, layers=1)),
    "one group": lambda: fully_shard(GPT(layers=1)),
    "mixed": mixed,
    "not sharded": lambda: GPT(layers=1),
    "replicated": lambda: replicate(GPT(layers=1)),
    "in part": lambda: shard_some(GPT(layers=2)),
    "by rows": lambda: shard_layers(GPT(layers=1), granularity=lambda *_: "whole"),
}
MODELS_OF_FOUR: dict[str, Callable[[], nn.Module]] = {
    "hybrid": lambda: shard_layers(GPT(layers=1), mesh=lasting_mesh(("replicate", "shard"))),
    "hfsdp": lambda: shard_layers(GPT(layers=1), reshard_after_forward=2),
    "tensor": lambda: sharded_gpt(mesh_of(2, 2), layers=1),
    "tensor, in some blocks": lambda: sharded_gpt(mesh_of(2, 2), "some", layers=2),
    "vocabulary": lambda: sharded_gpt(mesh_of(2, 2), "vocabulary", layers=1),
    "experts": expert_parallel,
    "tensor parallel only": lambda: parallelize(GPT(layers=1), lasting_mesh(("tp",), (4,)), "vocabulary"),
    "FSDP2": lambda: torch_fully_shard(GPT(layers=1)),
    "uneven": lambda: parallel_uneven(mesh_of(2, 2)),
    "tensor alone": lambda: parallel_uneven(mesh_of(1, 4)),
}


def cast(state: State, dtype: torch.dtype | None) -> State:
    return {k: v.to(dtype) if dtype is not None and v.is_floating_point() else v for k, v in state.items()}


def reference(model: nn.Module, dtype: torch.dtype | None = None) -> State:
    """The full state dict, without buffers."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return cast({name: full[name] for name, _ in model.named_parameters(remove_duplicate=False)}, dtype)


def collected(model: nn.Module, **options: Any) -> State:
    with full_parameters(model, **options) as buckets:
        pairs = [pair for bucket in buckets for pair in bucket]
    assert len(dict(pairs)) == len(pairs), "every name once"
    return dict(pairs)


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert type(found[name]) is torch.Tensor and not found[name].requires_grad, name
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=(1, 2, 3))
def test_every_parameter_comes_once_as_in_the_full_state_dict(name):
    check_buckets(seeded(MODELS[name]))


@pytest.mark.parametrize("name", ["GPT", "mixed", "by rows", "long"])
@distributed(world_size=3)
def test_every_parameter_comes_once_by_collectives(name):
    with environment(**{TRANSPORT_ENV: "collectives"}):
        model = linears(1024, 3) if name == "long" else seeded(MODELS[name])  # of which each rank has megabytes
        check_buckets(model)
        for rank0_only in (True, False):
            snapshot, weights = snapshot_parameters(model, dtype=torch.bfloat16), collected(model, dtype=torch.bfloat16)
            write_in_places(model, 1)
            expected = collected(model, dtype=torch.bfloat16)
            found = updated(model, snapshot, weights, rank0_only=rank0_only)
            assert_same_bits(found, expected if not rank0_only or dist.get_rank() == 0 else weights)


# Every two options: dtypes, bytes of a bucket, and whether the first rank alone is given them.
BUCKETS = [
    (None, 1, False),
    (torch.bfloat16, 1, True),
    (torch.bfloat16, 700, False),
    (None, 700, True),
    (torch.bfloat16, 1 << 20, True),
    (None, 1 << 20, False),
]


def check_buckets(model: nn.Module) -> None:
    full = reference(model)
    expected = {dtype: cast(full, dtype) for dtype in (None, torch.bfloat16)}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    for dtype, bucket_bytes, rank0_only in BUCKETS:
        found = collected(model, dtype=dtype, bucket_bytes=bucket_bytes, rank0_only=rank0_only)
        assert_same(found, expected[dtype] if is_first or not rank0_only else {})


@distributed(world_size=2)
def test_buffers_come_if_asked_for_in_their_own_dtype():
    model = mixed()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_same(collected(model, include_buffers=True), full)
    assert collected(model, include_buffers=True, dtype=torch.float16)["mean"].dtype == torch.float32
    assert "mean" not in collected(model)


@distributed(world_size=2)
def test_names_are_those_of_the_unwrapped_model():
    model = GPT(layers=2)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model.blocks[0])
    model.blocks[0] = torch.compile(model.blocks[0])
    assert_same(collected(torch.compile(fully_shard(model))), expected)
    model = GPT(layers=1)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert_same(collected(nn.parallel.DistributedDataParallel(model)), same_from_first_rank(expected))


def same_from_first_rank(state: State) -> State:
    for tensor in state.values():
        dist.broadcast(tensor, 0)
    return state


@distributed(world_size=2)
def test_a_part_of_a_group_comes_alone():
    model = fully_shard(GPT())
    full = collected(model)
    for name in ("blocks.1", "blocks.1.up", "norm"):
        part = collected(model.get_submodule(name), bucket_bytes=500)
        assert_same(part, {fqn[len(name) + 1 :]: full[fqn] for fqn in full if fqn.startswith(f"{name}.")})


@distributed(world_size=2)
def test_tied_names_come_together_with_one_tensor():
    with full_parameters(shard_layers(GPT(tie=True)), bucket_bytes=1) as buckets:
        sizes = [(len(bucket), {tensor.data_ptr() for _, tensor in bucket}) for bucket in buckets]
    assert sorted(size for size, _ in sizes)[-2:] == [1, 2] and all(len(addresses) == 1 for _, addresses in sizes)


@distributed(world_size=(1, 2, 4))
def test_after_training_they_are_those_of_the_unsharded_model():
    torch.manual_seed(0)
    expected = GPT(tie=True)
    model = shard_layers(seeded(lambda: GPT(tie=True)))
    train(expected, adamw)
    train(model, adamw, share=local_part)
    found = collected(model, bucket_bytes=3000)
    for name, param in expected.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-5)


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-2)


def write_locally(model: nn.Module) -> None:
    for param in model.parameters():
        param.to_local().data.add_(1)


def give_other_memory(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 3


def convert(model: nn.Module) -> None:
    model.double()


def step_flat_views(model: nn.Module) -> None:
    views = flat_parameters(model)
    for view in views:
        view.grad = torch.ones_like(view)
    torch.optim.SGD(views, lr=0.5).step()


@pytest.mark.parametrize("edit", [write, write_locally, give_other_memory, convert, step_flat_views])
@pytest.mark.parametrize("when", ["before the first forward", "after a forward", "left unsharded"])
@distributed(world_size=2)
def test_edits_since_the_last_forward_are_seen(edit, when):
    model = shard_layers(GPT(), reshard_after_forward=when != "left unsharded")
    snapshot = snapshot_parameters(model, dtype=None)
    if when != "before the first forward":
        gpt_loss(model, local_part(next(batches(1))))
    edit(model)
    expected = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    for bucket_bytes in (900, 1 << 20):
        assert_same(collected(model, bucket_bytes=bucket_bytes), expected)
    if edit is convert:
        with pytest.raises(RuntimeError, match="the snapshot was taken of another model, or .*dtypes"):
            updated(model, snapshot, expected)
    else:
        assert_same(
            updated(model, snapshot, {name: torch.zeros_like(value) for name, value in expected.items()}), expected
        )


@distributed(world_size=2)
def test_training_goes_on_between_and_after_syncs():
    model, other = shard_layers(seeded(GPT)), shard_layers(seeded(GPT))
    optimizers = [adamw(item.parameters()) for item in (model, other)]
    for batch in batches(3):
        for item, optimizer in zip((model, other), optimizers):
            gpt_loss(item, local_part(batch)).backward()
            if item is model:
                collected(item, bucket_bytes=1000)  # with gradients
            optimizer.step()
            if item is model:
                collected(item, dtype=torch.float16, rank0_only=True)
            optimizer.zero_grad()
    assert_same(collected(model), collected(other))


# ---- memory and bytes ------------------------------------------------------------------------------------------------


def linears(dim: int = 256, layers: int = 6) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(layers)])
    for pair in (model[:2], model[2:4]):
        fully_shard([*pair])
    return fully_shard(model)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators of this thread make, while they live. (A profiler does not see
    what another thread frees, such as one of gloo's.)"""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if type(tensor) in PLAIN}
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for tensor in tree_leaves(result):
            if type(tensor) in PLAIN and (storage := tensor.untyped_storage())._cdata not in given:
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return result


@distributed(world_size=(2, 3))
def test_a_loop_holds_one_bucket():
    """Messages arrive in the result. (What gloo's collectives hold is not seen.)"""
    model = linears(1024, 6)
    num_bytes = 1024 * 1024 * 2  # of one weight, as it is sent
    for weights in (0.5, 1, 2, 3):
        bucket = max(1, int(weights)) * num_bytes
        for rank0_only in (False, True):
            options = {"dtype": torch.bfloat16, "rank0_only": rank0_only, "bucket_bytes": int(weights * num_bytes)}
            with LiveBytes() as live, full_parameters(model, **options) as buckets:
                num = 0
                for content in buckets:
                    for _, tensor in content:
                        num += tensor.numel()
                        del tensor
            is_wanted = not rank0_only or dist.get_rank() == 0
            assert num == (6 * 1024 * 1024 if is_wanted else 0)
            # Of a rank that wants nothing, its own part of the bucket: that may be all of it.
            assert live.peak < bucket + 2**16, (weights, rank0_only, live.peak - bucket)
            assert not is_wanted or live.peak >= bucket, (weights, rank0_only, live.peak - bucket)


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends in messages."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name == "c10d::send":
            self.num += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


def total_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


@distributed(world_size=(2, 4))
def test_parameters_travel_once_and_cast(world_size):
    model = linears()
    for bucket_bytes in (1, 1 << 17, 1 << 30):
        for dtype in (torch.float32, torch.bfloat16):
            with SentBytes() as sent:
                collected(model, dtype=dtype, bucket_bytes=bucket_bytes)
            assert total_over_ranks(sent.num) == 6 * 256 * 256 * dtype.itemsize * (world_size - 1)


@distributed(world_size=2)
def test_what_is_kept_stays_valid():
    model = shard_layers(GPT())
    expected = reference(model)
    with full_parameters(model, bucket_bytes=1000) as buckets:
        lists = []
        kept = [pair for bucket in buckets for pair in (lists.append(bucket), [*bucket])[1]]
    assert all(not bucket for bucket in lists), "the lists themselves are emptied"
    write(model)
    assert_same(dict(kept), expected)
    for _, tensor in kept:
        tensor.zero_()  # and shares nothing with the model
    assert_same(collected(model), {name: -2 * value for name, value in expected.items()})


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def consume(model: nn.Module, action: Callable[[int], None], **options: Any) -> None:
    """Takes all buckets, and calls ``action`` with the number of each; ``StopIteration`` leaves the loop."""
    with full_parameters(model, **options) as buckets:
        for i, _ in enumerate(buckets):
            try:
                action(i)
            except StopIteration:
                break


def leave_at(number: int, rank: int, error: type[BaseException]) -> Callable[[int], None]:
    def action(i: int) -> None:
        if i == number and dist.get_rank() == rank:
            raise error("by the consumer")

    return action


def check_that_it_still_trains(model: nn.Module) -> None:
    gpt_loss(model, local_part(next(batches(1)))).backward()
    assert_same(collected(model), reference(model))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [0, 5])
@distributed(world_size=(2, 3))
def test_a_rank_that_leaves_its_loop_early_is_one_error_on_all(number, rank):
    model = shard_layers(GPT(layers=1))
    with pytest.raises(RuntimeError, match=rf"rank\(s\) {rank}: left its loop after {number + 1} of") as caught:
        consume(model, leave_at(number, rank, StopIteration), bucket_bytes=1)
    same_on_every_rank(str(caught.value))
    assert f"asks for bucket {number + 2} of" in str(caught.value)
    check_that_it_still_trains(model)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_last", [False, True])
@distributed(world_size=(2, 3))
def test_an_exception_in_one_consumer_reaches_all_ranks(is_last, rank):
    model = shard_layers(GPT(layers=1))
    number = len(list(model.parameters())) - 1 if is_last else 2
    expected = KeyError if dist.get_rank() == rank else RuntimeError
    with pytest.raises(expected, match="by the consumer") as caught:
        consume(model, leave_at(number, rank, KeyError), bucket_bytes=1)
    if expected is RuntimeError:
        assert f"rank(s) {rank}: left its loop after {number + 1} of" in str(caught.value)
    check_that_it_still_trains(model)


@distributed(world_size=3)
def test_an_interrupted_consumer_reaches_all_ranks():
    model = shard_layers(GPT(layers=1))
    expected = KeyboardInterrupt if dist.get_rank() == 1 else RuntimeError
    with pytest.raises(expected, match="by the consumer"):
        consume(model, leave_at(1, 1, KeyboardInterrupt), bucket_bytes=1)


@pytest.mark.parametrize("number", [0, 3])
@distributed(world_size=2)
def test_all_ranks_may_leave_at_the_same_place(number):
    model = shard_layers(GPT(layers=1))

    def leave(i: int) -> None:
        if i == number:
            raise StopIteration

    consume(model, leave, bucket_bytes=1)
    with full_parameters(model) as buckets:  # or take none
        assert len(buckets) == 1
    with pytest.raises(RuntimeError, match="inside its context, which has ended"):
        next(buckets)
    check_that_it_still_trains(model)


@distributed(world_size=3)
def test_no_rank_is_more_than_a_bucket_ahead():
    model, store = shard_layers(GPT(layers=1)), dist.distributed_c10d._get_default_store()
    key = "no rank is more than a bucket ahead"
    slow = 0.02 * dist.get_rank()

    def action(i: int) -> None:
        others = [store.add(f"{key}/{rank}", int(rank == dist.get_rank())) for rank in range(3)]
        assert all(abs(other - (i + 1)) <= 1 for other in others), (i, others)
        time.sleep(slow)

    consume(model, action, bucket_bytes=1)


@pytest.mark.parametrize("rank", [0, 1])
@distributed(world_size=2, fresh=True)
def test_a_rank_that_does_not_come_is_named_in_bounded_time(rank):
    rendezvous._GRACE = rendezvous._BROKEN_TIMEOUT = timedelta(seconds=0.5)  # five otherwise
    model, store = shard_layers(GPT(layers=1)), dist.distributed_c10d._get_default_store()
    absent = rf"full_parameters.*rank\(s\) {rank} did not arrive.*2 ranks within 1 s"
    with environment(**{TIMEOUT_ENV: "1"}):
        if dist.get_rank() != rank:
            with pytest.raises(RuntimeError, match=absent):
                collected(model)
    dist.barrier()
    gathered = collected(model)
    with environment(**{TIMEOUT_ENV: "1"}):  # and one that hangs in its loop

        def hang(i: int) -> None:
            if i == 2 and dist.get_rank() == rank:
                store.wait([f"rank {1 - rank} has given up"], timedelta(seconds=50))

        with pytest.raises(RuntimeError, match=r"did not arrive at the rendezvous") as caught:
            consume(model, hang, bucket_bytes=1)
        store.set(f"rank {dist.get_rank()} has given up", "")
        assert dist.get_rank() == rank or f"rank(s) {rank} did not arrive" in str(caught.value)
    dist.barrier()
    assert_same(collected(model), gathered)


@distributed(world_size=2)
def test_ranks_that_call_it_differently_get_one_error():
    model, rank = shard_layers(GPT(layers=1)), dist.get_rank()
    for options in ({"bucket_bytes": 5 + rank}, {"dtype": (None, torch.float16)[rank]}, {"rank0_only": rank == 0}):
        with pytest.raises(RuntimeError, match="full_parameters\\(\\): the ranks' arguments differ") as caught:
            collected(model, **options)
        same_on_every_rank(str(caught.value))
    with pytest.raises(RuntimeError, match="arguments differ"):
        collected(model if rank == 0 else model.blocks)
    check_that_it_still_trains(model)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_everywhere", [False, True])
@pytest.mark.parametrize("edit", [write, give_other_memory, step_flat_views])
@distributed(world_size=2)
def test_parameters_that_are_written_to_between_two_buckets_are_an_error_on_all_ranks(edit, is_everywhere):
    model = shard_layers(GPT(layers=1))
    if edit is step_flat_views:
        flat_parameters(model)

    def action(i: int) -> None:
        if i == 1 and (is_everywhere or dist.get_rank() == 1):
            edit(model)

    with pytest.raises(RuntimeError, match=r"rank\(s\) (0, )?1: parameters were written to or moved") as caught:
        consume(model, action, bucket_bytes=1)
    same_on_every_rank(str(caught.value))


@distributed(world_size=2)
def test_forwards_may_run_between_two_buckets():
    model, (batch,) = shard_layers(GPT(layers=1)), batches(1)
    expected = collected(model)
    found: State = {}
    with full_parameters(model, bucket_bytes=1) as buckets:
        for bucket in buckets:
            gpt_loss(model, local_part(batch)).backward()
            found.update(bucket)
    assert_same(found, expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
@distributed(world_size=2)
def test_inside_forward_or_backward_it_is_a_named_error(where):
    model, errors = shard_layers(GPT(layers=1)), []

    def look(*_: Any) -> None:
        if not errors:
            for call in (lambda: collected(model), lambda: snapshot_parameters(model)):
                with pytest.raises(RuntimeError, match="a forward or backward of the fully_shard group .* is running"):
                    call()
                errors.append(call)

    module = model.blocks[0].up
    module.register_forward_hook(look) if where == "forward" else module.register_full_backward_hook(look)
    gpt_loss(model, local_part(next(batches(1)))).backward()
    assert len(errors) == 2
    check_that_it_still_trains(model)


@distributed(world_size=2)
def test_what_cannot_be_gathered_is_a_named_error():
    model = shard_layers(GPT(layers=1))
    with summon_full_params(model):
        with pytest.raises(RuntimeError, match="inside summon_full_params"):
            collected(model)
    for options, error in (({"bucket_bytes": 0}, ValueError), ({"dtype": torch.int8}, TypeError)):
        with pytest.raises(error, match="full_parameters"):
            collected(model, **options)
    with pytest.raises(TypeError, match="expected an nn.Module"):
        collected([model])
    with torch.device("meta"):
        empty = GPT(layers=1)
    with pytest.raises(RuntimeError, match="is on the meta device"):
        collected(shard_layers(empty))


# ---- what has changed ------------------------------------------------------------------------------------------------


def updated(model: nn.Module, snapshot: ParameterSnapshot, state: State, **options: Any) -> State:
    """Copies of whole tensors, with what has changed since a snapshot."""
    state = {name: tensor.clone() for name, tensor in state.items()}
    with changed_since(model, snapshot, **options) as buckets:
        for bucket in buckets:
            apply_changes(state, bucket)
    return state


def assert_same_bits(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(as_bits(found[name].reshape(-1)), as_bits(tensor.reshape(-1))), name


def train_some(model: nn.Module, lr: float) -> Iterator[None]:
    """Steps of AdamW with random gradients, the same on every rank but for where they are."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=lr)
    generator = torch.Generator().manual_seed(5)
    while True:
        for group in optimizer.param_groups:
            for param in group["params"]:
                local = param.to_local() if isinstance(param, DTensor) else param
                noise = torch.randn(local.shape, generator=generator).to(local.dtype)
                param.grad = torch.zeros_like(param)
                (param.grad.to_local() if isinstance(param, DTensor) else param.grad).copy_(noise)
        optimizer.step()
        optimizer.zero_grad()
        yield


def check_changes(model: nn.Module, dtype: torch.dtype | None, lr: float, **options: Any) -> None:
    steps = train_some(model, lr)
    next(steps)
    snapshot, weights = snapshot_parameters(model, dtype=dtype), collected(model, dtype=dtype)
    for _ in range(2):
        next(steps)
        expected = collected(model, dtype=dtype)
        assert lr == 1e-5 or any(not torch.equal(weights[name], value) for name, value in expected.items())
        weights = updated(model, snapshot, weights, **options)
        assert_same_bits(weights, expected)
    with changed_since(model, snapshot, **options) as buckets:
        assert [pair for bucket in buckets for pair in bucket if pair[1].positions is not None] == []


@pytest.mark.parametrize("name", ["GPT", "tied", "one group", "mixed", "in part"])
@distributed(world_size=(1, 2))
def test_changes_applied_to_old_weights_give_the_new_ones_to_the_bit(name):
    model = seeded(MODELS[name])
    if name == "in part":
        for param in model.parameters():
            param.requires_grad_(isinstance(param, DTensor))
        model.blocks[1].requires_grad_(False)
    for dtype, lrs in ((torch.bfloat16, (1e-5, 1e-2)), (None, (1e-2, 1e-5))):  # every two of three
        check_changes(model, dtype, lrs[0])
        check_changes(model, dtype, lrs[1], bucket_bytes=2000)


@pytest.mark.parametrize("name", ["GPT", "tied", "mixed", "in part", "not sharded"])
@distributed(world_size=(1, 2))
def test_full_parameters_and_changes_have_the_same_dtype_by_default(name):
    model = seeded(MODELS[name])
    snapshot, weights = snapshot_parameters(model), collected(model)
    write(model)
    weights = updated(model, snapshot, weights)
    assert_same_bits(weights, collected(model))
    assert_same_bits(weights, reference(model))


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (None, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (None, torch.float64),
        (torch.float8_e5m2, torch.uint8),
    ],
)
@distributed(world_size=2)
def test_changes_are_not_cast_to_the_dtype_of_the_weights(sent, kept):
    model = shard_layers(GPT(layers=1))
    snapshot, weights = snapshot_parameters(model, dtype=sent), collected(model, dtype=sent)
    last = [*weights][-1]
    weights[last] = weights[last].to(kept)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    write(model)
    with changed_since(model, snapshot) as buckets:
        changes = [pair for bucket in buckets for pair in bucket]
    assert changes[-1][0] == last and len(changes) > 1
    expected = f"in {sent or torch.float32} for {last}, got one of shape .* in {kept}.*same dtype=.*Nothing was changed"
    with pytest.raises(ValueError, match=expected):
        apply_changes(weights, changes)
    assert_same_bits(weights, before)


@distributed(world_size=2)
def test_parameters_of_this_process_alone_can_change_too():
    model = seeded(lambda: shard_some(GPT()))
    snapshot, weights = snapshot_parameters(model, dtype=torch.bfloat16), collected(model, dtype=torch.bfloat16)
    write(model)
    weights = updated(model, snapshot, weights, bucket_bytes=1000)
    assert_same_bits(weights, collected(model, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", MODELS_OF_FOUR)
@distributed(world_size=4, timeout=120)
def test_every_parameter_and_changes_come_once_on_meshes(name):
    model = seeded(MODELS_OF_FOUR[name])
    check_buckets(model)
    edits = write, lambda model: write_in_places(model, 1), lambda model: write_in_places(model, 2)
    for number, edit in enumerate(edits):
        sizes = (1500, 1 << 20) if number % 2 else (1 << 20, 1500)
        cases = [*zip((True, False), sizes, strict=True)]
        snapshots, weights = (
            [snapshot_parameters(model, dtype=torch.bfloat16) for _ in cases],
            collected(model, dtype=torch.bfloat16),
        )
        edit(model)
        expected = collected(model, dtype=torch.bfloat16)
        assert any(not torch.equal(weights[fqn], value) for fqn, value in expected.items())
        for snapshot, (rank0_only, bucket_bytes) in zip(snapshots, cases):
            found = updated(model, snapshot, weights, rank0_only=rank0_only, bucket_bytes=bucket_bytes)
            assert_same_bits(found, expected if not rank0_only or dist.get_rank() == 0 else weights)


def write_in_places(model: nn.Module, every: int) -> None:
    """Writes to three elements, wherever they are, of every so manieth parameter."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for whole in [*full.values()][::every]:
        places = torch.randint(
            max(1, whole.numel()), (min(3, whole.numel()),), generator=torch.Generator().manual_seed(every)
        )
        whole.put_(places, whole.take(places) + 1)  # torch 2.12 may give it other strides
    set_model_state_dict(model, full)


@distributed(world_size=2)
def test_bits_count_not_values():
    model = fully_shard(nn.Linear(64, 64))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            param.to_local().view(-1)[:1] = torch.nan
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2):
        snapshot, weights = snapshot_parameters(model, dtype=dtype), collected(model, dtype=dtype)
        with torch.no_grad():
            model.weight.to_local().view(-1)[300:304] *= -1  # zeros
        with changed_since(model, snapshot) as buckets:
            changes = [pair for bucket in buckets for pair in bucket]
        assert [(name, change.positions.numel()) for name, change in changes] == [("weight", 8)]
        apply_changes(weights, changes)
        assert_same_bits(weights, collected(model, dtype=dtype))


@distributed(world_size=2)
def test_a_snapshot_is_renewed_when_all_ranks_have_taken_all():
    model = shard_layers(GPT(layers=1))
    snapshot, weights = (
        snapshot_parameters(model, dtype=torch.bfloat16, device="cpu"),
        collected(model, dtype=torch.bfloat16),
    )
    assert snapshot.nbytes == sum(handle.shard.numel() * 2 for handle in _get_fsdp_handles(model))
    write(model)
    with pytest.raises(RuntimeError, match="left its loop after 1 of"):
        with changed_since(model, snapshot, bucket_bytes=1) as buckets:
            for _ in buckets:
                if dist.get_rank() == 1:
                    break
    with changed_since(model, snapshot, bucket_bytes=1) as buckets:
        next(buckets)  # all leave
    assert_same_bits(updated(model, snapshot, weights), collected(model, dtype=torch.bfloat16))
    with changed_since(model, snapshot) as buckets:
        assert [*map(len, buckets)] == [0]
    with pytest.raises(RuntimeError, match="parameters were written to"):
        with changed_since(model, snapshot) as buckets:
            for _ in buckets:
                write(model)
    other = snapshot_parameters(model, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="arguments differ: .*a snapshot renewed 2 times"):
        updated(model, other if dist.get_rank() else snapshot, weights)


@distributed(world_size=2)
def test_a_snapshot_of_another_model_is_refused():
    model, other = shard_layers(GPT(layers=1)), shard_layers(GPT(layers=1))
    for snapshot in (snapshot_parameters(other), snapshot_parameters(model.blocks)):
        with pytest.raises(RuntimeError, match="the snapshot was taken of another model"):
            updated(model, snapshot, {})
    with pytest.raises(TypeError, match="expected a ParameterSnapshot, got a? ?dict"):
        updated(model, {}, {})
    write(model)
    snapshot = snapshot_parameters(model)
    write(model)
    with pytest.raises(KeyError, match="has changed, but is not among the 0 given tensors"):
        updated(model, snapshot, {})
    for name in ("head.weight", "blocks.0.up.weight"):
        weights = {fqn: torch.zeros(value.shape) for fqn, value in collected(model).items()}
        weights[name] = torch.zeros(3, 5) if name == "head.weight" else torch.zeros(weights[name].t().shape).t()
        with pytest.raises(ValueError, match=f"expected a contiguous tensor of shape .* for {name}, got one of shape"):
            with changed_since(model, snapshot) as buckets:
                for bucket in buckets:
                    apply_changes(weights, bucket)
        assert not any(value.any() for value in weights.values()), "nothing was changed"


@distributed(world_size=(2, 4))
def test_a_step_of_training_moves_fewer_bytes_than_a_full_sync(world_size):
    model = linears()
    steps = train_some(model, lr=1e-6)
    next(steps)
    snapshot, weights = snapshot_parameters(model, dtype=torch.bfloat16), collected(model, dtype=torch.bfloat16)
    next(steps)
    with SentBytes() as sent:
        weights = updated(model, snapshot, weights)
    assert_same_bits(weights, collected(model, dtype=torch.bfloat16))
    with changed_since(model, snapshot) as buckets:
        assert [*map(len, buckets)] == [0]
    full = 6 * 256 * 256 * 2 * (world_size - 1)
    assert 0 < total_over_ranks(sent.num) < full / 10


@distributed(world_size=2)
def test_what_has_changed_all_over_is_sent_whole():
    model = linears()
    snapshot, weights = snapshot_parameters(model, dtype=torch.bfloat16), collected(model, dtype=torch.bfloat16)
    write(model)
    with SentBytes() as sent:
        with changed_since(model, snapshot) as buckets:
            changes = [pair for bucket in buckets for pair in bucket]
    assert all(change.positions is None for _, change in changes) and len(changes) == 6
    assert total_over_ranks(sent.num) == 6 * 256 * 256 * 2 + 3 * 2 * 8  # and a count from each rank
    apply_changes(weights, changes)
    assert_same_bits(weights, collected(model, dtype=torch.bfloat16))


class Loopback(Transport):
    """Ranks one after the other in one process: each leaves its part, and the last one finds all."""

    def __init__(self, num_ranks: int) -> None:
        self.group, self._parts = self, []
        self._size = num_ranks

    def rank(self) -> int:
        return len(self._parts)

    def size(self) -> int:
        return self._size

    def gather(self, whole: torch.Tensor, part: torch.Tensor, ranges: Any, is_everywhere: bool, label: Any) -> None:
        assert part.numel() == ranges[len(self._parts)][1] - ranges[len(self._parts)][0]
        self._parts.append(part.clone())
        for (start, stop), sent in zip(ranges, self._parts):
            whole[start:stop] = sent


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_elements_of_all_ranks_arrive_in_either_form(dtype):
    generator, forms = torch.Generator().manual_seed(0), set()
    for lengths in ((40,), (0, 7, 1000), (64, 64, 1), (0, 0)):
        stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        ranges = [(stop - length, stop) for stop, length in zip(stops, lengths)]
        for share in (0.0, 0.002, 0.02, 0.3, 1.0):
            old = torch.randn(stops[-1], generator=generator).to(dtype)
            chosen = torch.rand(stops[-1], generator=generator) < share
            wide = old.to(torch.promote_types(dtype if dtype.itemsize > 1 else torch.float32, torch.float32))
            new = torch.where(chosen, wide + 9, wide).to(dtype)
            owns = [changed_elements(old[start:stop], new[start:stop]) for start, stop in ranges]
            form = Form.shortest(dtype, [own.positions.numel() for own in owns], ranges)
            forms.add(form.index)
            transport = Loopback(len(lengths))
            for own in owns:
                found = gather_elements(transport, own, form, True, Label(["a test"]))
            rebuilt = as_bits(old).clone()
            rebuilt[found.positions] = as_bits(found.values)
            assert torch.equal(rebuilt, as_bits(new))
            assert torch.equal(found.positions, changed_elements(old, new).positions), "ascending"
            values = sum(form.counts) * dtype.itemsize
            assert form.nbytes <= values + min(4 * sum(form.counts), stops[-1] // 8) + 48 * len(lengths)
    assert forms == {None, torch.int32}


def test_positions_of_the_longest_ranges_take_eight_bytes():
    short, long = (Form.shortest(torch.bfloat16, [1], [(0, 1 << bits)]) for bits in (30, 32))
    assert (short.index, long.index) == (torch.int32, torch.int64)
