"""What integrators set by hand: gathers ahead, groups that stay gathered, and errors for what cannot be meant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp_compose
from fsdp_compose import (
    fully_shard,
    functional_mode,
    no_sync,
    reshard,
    set_force_sum_reduction_for_comms,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_keep_unsharded_storage,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_post_reduction_hook,
    set_requires_all_reduce,
    set_reshard_after_backward,
    set_reshard_after_forward,
    unshard,
)
from fsdp_compose.core.group.registry import _get_fsdp_handles, get_state
from tests.harness import distributed, fake_process_group
from tests.internals import Collectives, all_unsharded_bytes
from tests.models import Net, inputs, shard_layers
from tests.training import Twins, local_part, mean_square, plain_sgd


def num_gathers(collectives: Collectives) -> int:
    return collectives.count["allgather_base"]


def one_batch() -> torch.Tensor:
    return next(iter(inputs(1)))


# ---- gathers ahead

HINTS: dict[str, Callable[[list[nn.Module]], dict[int, list[nn.Module]]]] = {
    "two ahead": lambda layers: {i: layers[i + 1 : i + 3] for i in range(len(layers))},
    "none": lambda layers: {i: [] for i in range(len(layers))},
    "backwards": lambda layers: {i: layers[max(i - 2, 0) : i] for i in range(len(layers))},
    "itself": lambda layers: {i: [layers[i]] for i in range(len(layers))},
    "all": lambda layers: {i: layers for i in range(len(layers))},
    "the last first": lambda layers: {0: layers[::-1]},
}


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("hints", HINTS)
@distributed(world_size=2)
def test_any_list_of_modules_to_gather_ahead_trains_as_unsharded(hints, direction, reshard_after_forward):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    model = twins.sharded
    layers = [module for module in model.modules() if get_state(module) is not None and module is not model]
    set_reshard_after_forward(model, reshard_after_forward)
    for i, ahead in HINTS[hints](layers).items():
        if direction != "backward":
            set_modules_to_forward_prefetch(layers[i], ahead)
        if direction != "forward":
            set_modules_to_backward_prefetch(layers[i], ahead)
    for batch in inputs(3):
        twins.backward(mean_square, batch)
        assert all_unsharded_bytes(model) == 0
        twins.step()
        with torch.no_grad():
            model(local_part(batch))
        assert all_unsharded_bytes(model) == 0


@distributed(world_size=2)
def test_modules_named_are_gathered_when_the_forward_before_them_begins():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    set_modules_to_forward_prefetch(model[0], [model[1], model[2]])
    set_modules_to_forward_prefetch(model[1], [])
    seen: dict[int, list[bool]] = {}
    for i, layer in enumerate(model):
        layer.register_forward_pre_hook(
            lambda module, args, i=i: seen.update({i: [all_unsharded_bytes(item) > 0 for item in model]})
        )
    for _ in range(2):  # also in the second forward, which knows the order
        model(torch.ones(2, 3)).sum().backward()
        assert seen[0] == [True, True, True, False]
        assert seen[1] == [False, True, True, False]
    set_modules_to_forward_prefetch(model[0], None)
    model(torch.ones(2, 3)).sum().backward()
    assert seen[0] == [True, True, False, False]


@distributed(world_size=2)
def test_lists_of_another_model_and_of_copies_are_left_out():
    model, other = Net(), Net()
    shard_layers(model)
    shard_layers(other)
    layers = [module for module in model.modules() if get_state(module) is not None]
    set_modules_to_forward_prefetch(layers[1], [module for module in other.modules() if get_state(module) is not None])
    twin = copy.deepcopy(model)
    for item in (model, twin, other, twin, model):
        mean_square(item, local_part(one_batch())).backward()
        assert all_unsharded_bytes(item) == 0
    assert all(get_state(item).options.forward_prefetch is None for item in twin.modules() if get_state(item))


# ---- groups that stay gathered


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=2)
def test_groups_kept_after_backward_are_gathered_again_only_after_a_step(reshard_after_forward):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    model = twins.sharded
    twins.backward(mean_square, one_batch())
    twins.step()
    set_reshard_after_forward(model, reshard_after_forward)
    set_reshard_after_backward(model, False)
    num_groups = len(_get_fsdp_handles(model))
    for first, second in zip(inputs(2), inputs(2), strict=True):
        twins.backward(mean_square, first)
        kept = all_unsharded_bytes(model)
        assert kept > 0
        with Collectives() as collectives:
            twins.backward(mean_square, second)
        assert all_unsharded_bytes(model) == kept
        if not reshard_after_forward:
            assert num_gathers(collectives) == 0
        else:
            assert num_gathers(collectives) <= num_groups
        twins.step()
    with Collectives() as collectives:
        twins.backward(mean_square, one_batch())
    assert num_gathers(collectives) >= num_groups, "the step's values"
    twins.check_gradients()
    set_reshard_after_backward(model, True)
    twins.backward(mean_square, one_batch())
    assert all_unsharded_bytes(model) == 0


@distributed(world_size=2)
def test_groups_kept_after_backward_accumulate_without_sync_as_unsharded():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    set_reshard_after_backward(twins.sharded, False)
    for _ in range(2):
        for batch in inputs(2):
            with no_sync(twins.sharded):
                twins.backward(mean_square, batch)
        twins.backward(mean_square, one_batch())
        twins.step()


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


def chunked_loss(model: Chunked, x: torch.Tensor) -> torch.Tensor:
    """The loss of each part by itself, so that the logits of all parts are never there together."""
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    total = torch.zeros(())
    for part in leaf.chunk(4):
        loss = model.head(part).square().sum() / len(x)
        loss.backward()
        total += loss.detach()
    hidden.backward(leaf.grad)
    return total


@pytest.mark.parametrize("edit", [None, "between parts", "functional"])
@distributed(world_size=2)
def test_one_gather_for_all_parts_of_a_chunked_loss(edit):
    def shard(model: Chunked) -> None:
        fully_shard(model.head)
        fully_shard(model.body)

    twins = Twins(Chunked(), shard, plain_sgd)
    for step in range(3):
        batch = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        unshard(twins.sharded.head, until_reshard=True)
        with Collectives() as collectives:
            twins.run(chunked_loss, batch)
        assert all_unsharded_bytes(twins.sharded.head) > 0
        if step:
            assert num_gathers(collectives) == 1, "that of the body, a root, which stays until its backward"
        if edit == "between parts":
            with torch.no_grad():
                for model in twins.both:
                    model.head.weight.mul_(2)
            twins.run(chunked_loss, batch)
        elif edit == "functional":
            with functional_mode(twins.sharded.head):
                twins.run(chunked_loss, batch)
        reshard(twins.sharded.head)
        assert all_unsharded_bytes(twins.sharded) == 0
        twins.step()
    twins.run(chunked_loss, batch)
    assert all_unsharded_bytes(twins.sharded) == 0


@distributed(world_size=2)
def test_edits_of_local_memory_of_a_held_group_raise():
    model = nn.Linear(4, 4)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    unshard(model, until_reshard=True)
    with torch.no_grad():
        model.weight.to_local().add_(1)
    with pytest.raises(RuntimeError, match="written to through its local memory"):
        model(torch.ones(2, 4))
    reshard(model)
    model(torch.ones(2, 4)).sum().backward()


# ---- hooks, flags, errors


@distributed(world_size=2)
def test_post_reduction_hook_sees_each_reduced_gradient_once():
    model = Net()
    shard_layers(model)
    seen: list[torch.Tensor] = []
    set_post_reduction_hook(model, lambda gradient: seen.append(gradient.clone()))
    mean_square(model, local_part(one_batch())).backward()
    handles = [handle for handle in _get_fsdp_handles(model) if handle.gradient.flat is not None]
    assert len(seen) == len(handles)
    flats = {handle.gradient.flat.numel(): handle.gradient.flat for handle in handles}
    assert all(gradient.dim() == 1 for gradient in seen)
    assert sum(gradient.sum() for gradient in seen) == pytest.approx(
        sum(handle.gradient.flat.sum().item() for handle in handles), abs=1e-5
    ), flats
    with no_sync(model):
        mean_square(model, local_part(one_batch())).backward()
    assert len(seen) == len(handles)
    set_post_reduction_hook(model, None)
    mean_square(model, local_part(one_batch())).backward()
    assert len(seen) == len(handles)


@distributed(world_size=2)
def test_flags_without_effect_here_change_nothing():
    twins = Twins(Net(), make_optimizer=plain_sgd)
    set_requires_all_reduce(twins.sharded, False)
    set_is_last_backward(twins.sharded, False)
    for batch in inputs(2):
        twins.backward(mean_square, batch)
        twins.step()


WRONG: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "factor 0": (lambda model: set_gradient_divide_factor(model, 0), ValueError, "positive number"),
    "factor nan": (lambda model: set_gradient_divide_factor(model, float("nan")), ValueError, "positive number"),
    "factor str": (lambda model: set_gradient_divide_factor(model, "2"), ValueError, "positive number"),
    "sum 1": (lambda model: set_force_sum_reduction_for_comms(model, 1), TypeError, "True or False"),
    "hook 3": (lambda model: set_post_reduction_hook(model, 3), TypeError, "expected a function"),
    "backward None": (lambda model: set_reshard_after_backward(model, None), TypeError, "True or False or"),
    "last 0": (lambda model: set_is_last_backward(model, 0), TypeError, "True or False"),
    "all-reduce 0": (lambda model: set_requires_all_reduce(model, 0), TypeError, "True or False"),
    "prefetch of a plain module": (
        lambda model: set_modules_to_forward_prefetch(model, [nn.Linear(1, 1)]),
        ValueError,
        "was not called on this Linear",
    ),
    "prefetch for a plain module": (
        lambda model: set_modules_to_backward_prefetch(nn.Linear(1, 1), [model]),
        ValueError,
        "was not called on this Linear",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@distributed(world_size=1)
def test_wrong_values_are_refused(what):
    model = nn.Linear(4, 4)
    fully_shard(model)
    before = get_state(model).options
    call, kind, text = WRONG[what]
    with pytest.raises(kind, match=text):
        call(model)
    assert get_state(model).options == before


# ---- memory that stays


def addresses(model: nn.Module) -> list[int]:
    """Where the unsharded parameters are, as their modules see them in forward."""
    found: list[int] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: found.extend(p.data_ptr() for p in module.parameters(False)))
        for module in model.modules()
        if [*module.parameters(False)]
    ]
    twins = one_batch()
    mean_square(model, local_part(twins)).backward()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("copied", [False, True])
@distributed(world_size=2)
def test_memory_of_unsharded_parameters_stays_where_it_is(copied):
    twins = Twins(Net(), make_optimizer=plain_sgd)
    model = twins.sharded
    set_keep_unsharded_storage(model, True)
    if copied:
        model = copy.deepcopy(model)
    first = addresses(model)
    held = [torch.empty(64) for _ in range(50)]  # what would take the place of memory that was given back
    assert all_unsharded_bytes(model) > 0
    assert addresses(model) == first and len(held) == 50
    model.to(torch.float64)  # other memory, which stays too
    other = addresses(model.to(torch.float32))
    assert addresses(model) == other and all_unsharded_bytes(model) > 0
    set_keep_unsharded_storage(model, False)
    assert all_unsharded_bytes(model) == 0
    addresses(model)
    assert all_unsharded_bytes(model) == 0
    with pytest.raises(TypeError, match="expected True or False"):
        set_keep_unsharded_storage(model, 1)


# ---- controls of what is not sharded

VALUES: dict[str, tuple[Any, ...]] = {
    "set_requires_gradient_sync": (False,),
    "set_functional_mode": (True,),
    "set_reshard_after_forward": (True,),
    "set_reshard_after_backward": (True,),
    "set_gradient_divide_factor": (2.0,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_post_reduction_hook": (None,),
    "set_all_reduce_hook": (None,),
    "set_requires_all_reduce": (False,),
    "set_keep_unsharded_storage": (True,),
    "set_is_last_backward": (True,),
    "set_transport": (None,),
    "set_wire_formats": (),
}
WITHOUT_RECURSE: dict[str, tuple[Any, ...]] = {
    "set_modules_to_forward_prefetch": ([],),
    "set_modules_to_backward_prefetch": ([],),
    "set_replicas": (None,),
}
CONTEXTS = ("no_sync", "keep_unsharded", "functional_mode")
CALLS = ("reduce_gradients", "unshard", "reshard", "sync_optional_groups")
UNSHARDED = {
    "unsharded": lambda: nn.Sequential(nn.Linear(2, 2)),
    "inside a group": lambda: fully_shard(nn.Sequential(nn.Linear(2, 2)))[0],
    "no module": lambda: 42,
}


def call(name: str, module: Any) -> None:
    control = getattr(fsdp_compose, name)
    if name in CONTEXTS:
        with control(module):
            pass
    elif name in CALLS:
        control(module)
    else:
        control(module, *{**VALUES, **WITHOUT_RECURSE}[name])


@pytest.mark.parametrize("target", UNSHARDED)
@pytest.mark.parametrize("name", [*VALUES, *WITHOUT_RECURSE, *CONTEXTS, *CALLS])
def test_a_control_of_what_is_not_sharded_raises(name, target):
    with fake_process_group(world_size=2):
        module = UNSHARDED[target]()
        own = "set_post_reduction_hook" if name == "set_all_reduce_hook" else name
        message = rf"{own}\(\): (there is no fully_shard group below|fully_shard\(\) was not called on) this "
        if target == "no module":
            message = r"\(module=42\): expected an nn.Module, got "
        with pytest.raises(ValueError, match=message + type(module).__name__):
            call(name, module)
        for flag in (True, False) if name in VALUES else ():
            with pytest.raises(ValueError, match=rf"{own}\(.* {type(module).__name__}"):
                getattr(fsdp_compose, name)(module, *VALUES[name], recurse=flag)


def test_the_list_of_controls_above_is_complete():
    known = {*VALUES, *WITHOUT_RECURSE}
    assert {name for name in fsdp_compose.__all__ if name.startswith("set_")} == known
