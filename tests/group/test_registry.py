"""The outside of fully_shard: torch's composable registry, look-ups, traversal, names and identities."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import MixedPrecisionPolicy, fully_shard, unshard
from fsdp_compose.core.group.hook_decorators import _annotate_modules_for_dynamo
from fsdp_compose.core.group.registry import _get_fsdp_handles, _get_fsdp_states, _get_fsdp_states_with_modules
from tests.harness import distributed, fake_process_group
from tests.training import assert_parameters_match, local_part, pair


class Leaf(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)


class Branch(nn.Module):
    """Registers its second leaf before the first that it calls: the order of ``modules()`` is that of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Leaf()
        self.first = Leaf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.middle, self.right = Branch(), Leaf(), Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.middle(self.left(x)))


def shard_all(tree: nn.Module, **options: Any) -> nn.Module:
    for module in reversed(list(tree.modules())):  # inner modules before outer ones
        if module is not tree:
            fully_shard(module, **options)
    return fully_shard(tree, **options)


# ---- look-ups --------------------------------------------------------------------------------------------------------


def test_state_of_sharded_modules_and_of_no_others(one_process):
    tree = Tree()
    fully_shard(tree.left)
    state = fully_shard.state(tree.left)
    assert state is not None and _get_fsdp_states(tree.left) == [state]
    for module in (tree, tree.left.first, tree.middle, tree.right):
        assert fully_shard.state(module) is None
    fully_shard(tree)
    assert fully_shard.state(tree) is not state and fully_shard.state(tree.left) is state


def test_looking_for_a_state_leaves_no_trace(one_process):
    leaf = Leaf()
    before = set(leaf.__dict__)
    assert fully_shard.state(leaf) is None and _get_fsdp_states(leaf) == []
    assert set(leaf.__dict__) == before


def test_modules_sharded_together_have_one_state(one_process):
    tree = Tree()
    together = [tree.left, tree.middle]
    assert fully_shard(together) is together
    assert fully_shard.state(tree.left) is fully_shard.state(tree.middle) is not None
    assert _get_fsdp_states(tree) == [fully_shard.state(tree.left)]
    (handle,) = _get_fsdp_handles(tree)
    assert len(handle.sharded_params) == 6


NESTED = {
    "inner first": lambda tree: [tree.left.first, tree.left],
    "outer first": lambda tree: [tree.left, tree.left.first],
    "twice the same": lambda tree: [tree.left, tree.left],
}


@pytest.mark.parametrize("order", NESTED)
def test_of_nested_or_repeated_modules_in_a_list_only_the_outermost_is_registered(one_process, order):
    tree = Tree()
    fully_shard(NESTED[order](tree))
    state = fully_shard.state(tree.left)
    assert state is not None and fully_shard.state(tree.left.first) is None
    assert _get_fsdp_states(tree) == [state]
    assert sorted(state._handles[0].fqns) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    fully_shard(tree)
    assert tree(torch.randn(2, 3)).shape == (2, 3)


def test_torchs_registry_shows_fully_shard(one_process):
    tree = Tree()
    fully_shard([tree.left, tree.middle])
    for module in (tree.left, tree.middle):
        assert list(_get_registry(module)) == ["fully_shard"]
    assert not _get_registry(tree) and not _get_registry(tree.left.first)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(tree.left)


# ---- traversal -------------------------------------------------------------------------------------------------------


def test_states_come_in_the_order_of_modules(one_process):
    tree = shard_all(Tree())
    states, modules = _get_fsdp_states_with_modules(tree)
    assert modules == list(tree.modules())
    assert states == [fully_shard.state(module) for module in modules] == _get_fsdp_states(tree)
    assert _get_fsdp_handles(tree) == [handle for state in states for handle in state._handles]
    assert _get_fsdp_states_with_modules(tree.right)[1] == list(tree.right.modules())


def test_handles_of_one_state_stay_together(one_process):
    tree = Tree()
    tree.left.first.double()
    tree.middle.weight.requires_grad_(False)
    fully_shard(tree.left)
    fully_shard(tree)
    handles = _get_fsdp_handles(tree)
    assert [handle.fqns[0] for handle in handles] == [
        "middle.weight",
        "middle.bias",
        "second.weight",
        "first.weight",
    ]


def test_shared_modules_and_states_are_visited_once(one_process):
    tree = Tree()
    tree.right.first = tree.left.first
    tree.again = tree.left
    fully_shard(tree.left.first)
    fully_shard([tree.left, tree.right])
    fully_shard(tree)
    states, modules = _get_fsdp_states_with_modules(tree)
    assert modules == [tree, tree.left, tree.left.first]
    assert len(set(map(id, states))) == 3
    handles = _get_fsdp_handles(tree)
    assert len(handles) == 3 and len({id(handle) for handle in handles}) == 3


def test_a_cycle_of_modules_ends(one_process):
    tree = Tree()
    fully_shard(tree.left)
    tree.left.__dict__["_modules"]["parent"] = tree
    assert len(_get_fsdp_states(tree)) == 1
    del tree.left._modules["parent"]


def root_states(module: nn.Module) -> list[object]:
    """The states whose modules begin iterations; none before a first forward."""
    return [state for state in _get_fsdp_states(module) if state.is_root]


def test_root_states_are_known_from_the_first_forward(one_process):
    tree = Tree()
    for module in (tree.left, tree.right, tree.right.first):
        if module is not tree.right:
            fully_shard(module)
    fully_shard(tree.right)
    assert root_states(tree) == []
    for branch in (tree.left, tree.right):
        branch(torch.randn(2, 3))
    assert root_states(tree) == [fully_shard.state(tree.left), fully_shard.state(tree.right)]
    assert root_states(tree.right) == [fully_shard.state(tree.right)]
    fully_shard(tree)
    tree(torch.randn(2, 3))
    assert root_states(tree) == [fully_shard.state(tree)]


def test_traversal_does_not_descend_into_a_replicated_module(one_process):
    tree = Tree()
    fully_shard(tree.left.first)
    fully_shard(tree.middle)
    replicate(tree.left)
    assert _get_fsdp_states_with_modules(tree)[1] == [tree.middle]
    assert _get_fsdp_states(tree.left) == [] == _get_fsdp_handles(tree.left)
    assert _get_fsdp_states(tree.left.first) == [fully_shard.state(tree.left.first)]


# ---- torch's replicate next to fully_shard ---------------------------------------------------------------------------


def train(model: nn.Module, share: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        batch = torch.randn(12, 3, generator=torch.Generator().manual_seed(step))
        loss = model(share(batch)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(world_size=(2, 3))
def test_sharded_child_of_a_replicated_parent_trains():
    torch.manual_seed(0)
    model, reference = pair(Tree())
    fully_shard(model.left)
    fully_shard(model.right)
    replicate(model)
    losses = torch.tensor(train(model, local_part))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), torch.tensor(train(reference, lambda batch: batch)))
    torch.testing.assert_close(model.middle.weight, reference.middle.weight)
    for module, whole in ((model.left, reference.left), (model.right, reference.right)):
        assert_parameters_match(module, whole)


@distributed(world_size=2)
def test_replicated_child_of_a_sharded_parent_trains():
    torch.manual_seed(0)
    model, reference = pair(Tree())
    replicate(model.left)
    fully_shard(model)
    managed = {id(sharded) for handle in _get_fsdp_handles(model) for sharded in handle.sharded_params}
    assert not managed & {id(param) for param in model.left.parameters()}
    train(model, local_part)
    train(reference, lambda batch: batch)
    for ours, theirs in zip(model.left.parameters(), reference.left.parameters()):
        torch.testing.assert_close(ours, theirs)
    unshard(model)
    for handle in _get_fsdp_handles(model):
        for fqn, whole in zip(handle.fqns, handle.unsharded.params):
            torch.testing.assert_close(whole.data, reference.get_parameter(fqn).data)


# ---- names and identities --------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_classes_names_and_modules_are_unchanged():
    tree = Tree()
    classes = [type(module) for module in tree.modules()]
    modules = [id(module) for module in tree.modules()]
    names = [name for name, _ in tree.named_parameters()], [name for name, _ in tree.named_modules()]
    keys = list(tree.state_dict())
    shard_all(tree)
    for _ in range(2):
        assert [type(module) for module in tree.modules()] == classes
        assert [id(module) for module in tree.modules()] == modules
        assert ([name for name, _ in tree.named_parameters()], [name for name, _ in tree.named_modules()]) == names
        assert list(tree.state_dict()) == keys
        assert isinstance(tree.left, Branch) and isinstance(tree.middle, nn.Linear)
        assert all(isinstance(param, nn.Parameter) for param in tree.parameters())
        train(tree, local_part)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(world_size=2)
def test_parameters_are_the_same_objects_for_ever_outside_forward(reshard_after_forward):
    class Failing(Tree):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if self.fails:
                raise ValueError("by the user")
            return x

    tree = shard_all(Failing(), reshard_after_forward=reshard_after_forward)
    identities = [id(param) for param in tree.parameters()]

    def check() -> None:
        assert [id(param) for param in tree.parameters()] == identities

    batch = torch.randn(4, 3)
    train(tree, local_part)
    check()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            tree.eval()(batch)
        check()
    tree.train()
    loss = tree(batch).sum()
    check()
    loss.backward()
    check()
    tree.fails = True
    with pytest.raises(ValueError):
        tree(batch)
    check()
    tree.fails = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(tree, local_part)
    check()
    tree.load_state_dict(copy.deepcopy(tree.state_dict()))
    tree.requires_grad_(False).requires_grad_(True)
    tree.to(torch.float64)
    check()
    tree(batch.double())
    check()
    unshard(tree)
    check()


# ---- annotations for Dynamo ------------------------------------------------------------------------------------------


def annotations(module: nn.Module) -> tuple[Any, Any]:
    return getattr(module, "_is_fsdp_managed_module", None), getattr(module, "_fsdp_use_orig_params", None)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_annotation_marks_every_module_except_the_ignored_ones(use_orig_params):
    tree = Tree()
    ignored = {tree.left, tree.right.first}
    _annotate_modules_for_dynamo(tree, ignored, use_orig_params)
    for module in tree.modules():
        assert annotations(module) == ((None, None) if module in ignored else (True, use_orig_params))


def test_fully_shard_marks_the_modules_below_it_and_no_others(one_process):
    tree = Tree()
    fully_shard([tree.left, tree.right.first])
    managed = {tree.left, *tree.left.modules(), tree.right.first}
    for module in tree.modules():
        assert annotations(module) == ((True, True) if module in managed else (None, None))
    names = [name for name in tree.state_dict() if "fsdp" in name]
    assert not names


def test_fully_shard_does_not_mark_what_torch_replicates(one_process):
    tree = Tree()
    replicate(tree.left)
    fully_shard(tree)
    for module in tree.modules():
        is_replicated = module in set(tree.left.modules())
        assert annotations(module) == ((None, None) if is_replicated else (True, True))


# ---- rejected calls --------------------------------------------------------------------------------------------------


def give_gradient(tree: Tree) -> None:
    tree(torch.randn(2, 3)).sum().backward()


def failing_granularity(fqn: str, param: nn.Parameter) -> None:
    if fqn == "first.bias":
        raise LookupError("by the user")


REJECTED: dict[str, tuple[Callable[[Tree], Any], Callable[[Tree], Any], type[Exception], str]] = {
    # what is done before, the call, the error, its words
    "not a module": (lambda t: None, lambda t: fully_shard("left"), TypeError, r"nn\.Module.*got str"),
    "an empty list": (lambda t: None, lambda t: fully_shard([]), TypeError, "non-empty list"),
    "a list with a tensor": (lambda t: None, lambda t: fully_shard([t.left, torch.ones(1)]), TypeError, "got list"),
    "a mesh that is none": (
        lambda t: None,
        lambda t: fully_shard(t.left, mesh=4),
        TypeError,
        "None, got int",
    ),
    "a mesh of three dimensions": (
        lambda t: None,
        lambda t: fully_shard(t.left, mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))),
        ValueError,
        r"one dimension, or with two.*got one with 3 dimensions.*mesh\[",
    ),
    "a policy that is none": (
        lambda t: None,
        lambda t: fully_shard(t.left, mp_policy=torch.bfloat16),
        TypeError,
        "MixedPrecisionPolicy",
    ),
    "an unknown dtype": (
        lambda t: None,
        lambda t: fully_shard(t.left, mp_policy=MixedPrecisionPolicy("bfloat16")),
        TypeError,
        r"param_dtype='bfloat16'.*torch\.bfloat16",
    ),
    "a reshard_after_forward that is none": (
        lambda t: None,
        lambda t: fully_shard(t.left, reshard_after_forward="node"),
        TypeError,
        "reshard_after_forward='node'",
    ),
    "ignored modules": (
        lambda t: None,
        lambda t: fully_shard(t.left, ignored_params=[t.left.first]),
        TypeError,
        r"ignored_params.*nn\.Parameters, got Leaf",
    ),
    "an unknown granule": (
        lambda t: None,
        lambda t: fully_shard(t.left, granularity=lambda fqn, param: "columns"),
        ValueError,
        "columns",
    ),
    "an error in granularity": (
        lambda t: None,
        lambda t: fully_shard(t.left, granularity=failing_granularity),
        LookupError,
        "by the user",
    ),
    "a parameter with a gradient": (
        give_gradient,
        lambda t: fully_shard(t.left),
        ValueError,
        r"second\.weight.*zero_grad",
    ),
    "a lazy module": (
        lambda t: t.left.add_module("lazy", nn.LazyLinear(3)),
        lambda t: fully_shard(t.left),
        ValueError,
        r"lazy\.weight.*not initialized.*run a forward first",
    ),
    "parameters half on meta": (
        lambda t: t.left.first.to("meta"),
        lambda t: fully_shard(t.left),
        ValueError,
        r"first\.weight is on the meta device",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected_call_leaves_no_trace_and_can_be_repeated(one_process, case):
    prepare, call, error, words = REJECTED[case]
    tree = Tree()
    prepare(tree)
    left = tree.left
    before = {module: dict(vars(module)) for module in left.modules()}
    parameters = {module: dict(module._parameters) for module in left.modules()}
    hooks = {module: (len(module._forward_pre_hooks), len(module._forward_hooks)) for module in left.modules()}
    attributes = [dict(vars(param)) for param in left.parameters()]
    for _ in range(2):
        with pytest.raises(error, match=words):
            call(tree)
        assert fully_shard.state(left) is None and not _get_registry(left)
        for module in left.modules():
            assert vars(module).keys() == before[module].keys()
            assert all(module._parameters[name] is param for name, param in parameters[module].items())
            assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == hooks[module]
            assert annotations(module) == (None, None)
        assert [dict(vars(param)) for param in left.parameters()] == attributes
    tree.left = Branch()
    assert fully_shard(tree.left) is tree.left
    assert tree.left(torch.randn(2, 3)).shape == (2, 3)


REMEDIES: dict[str, Callable[[Tree], Any]] = {
    "a parameter with a gradient": lambda t: t.zero_grad(),
    "parameters half on meta": lambda t: setattr(t.left, "first", Leaf()),
    "an error in granularity": lambda t: None,
    "a mesh of three dimensions": lambda t: None,
    "an unknown dtype": lambda t: None,
}


@pytest.mark.parametrize("case", REMEDIES)
def test_call_works_once_the_remedy_was_followed(one_process, case):
    prepare, call, error, _ = REJECTED[case]
    tree = Tree()
    prepare(tree)
    with pytest.raises(error):
        call(tree)
    REMEDIES[case](tree)
    fully_shard(tree.left)
    assert tree.left(torch.randn(2, 3)).shape == (2, 3)


def test_module_sharded_twice_keeps_its_first_state(one_process):
    tree = Tree()
    fully_shard(tree.left)
    state, params = fully_shard.state(tree.left), list(tree.left.parameters())
    for module in (tree.left, [tree.left, tree.middle]):
        with pytest.raises(ValueError, match="already called on this Branch.*sharded once"):
            fully_shard(module)
    assert fully_shard.state(tree.left) is state and fully_shard.state(tree.middle) is None
    assert all(a is b for a, b in zip(tree.left.parameters(), params))
    assert len(tree.left._forward_pre_hooks) == 1
    fully_shard(tree.middle)


def test_replicated_module_is_refused(one_process):
    tree = Tree()
    replicate(tree.left)
    with pytest.raises(ValueError, match=r"torch's replicate\(\) was already applied.*choose one"):
        fully_shard(tree.left)
    assert list(_get_registry(tree.left)) == ["replicate"]


def test_without_process_group_and_mesh_the_call_says_what_to_do_and_can_be_repeated():
    tree = Tree()
    with pytest.raises(RuntimeError, match=r"no mesh.*init_process_group\(\).*mesh="):
        fully_shard(tree)
    assert fully_shard.state(tree) is None and not _get_registry(tree)
    with fake_process_group(0, 4):
        fully_shard(tree)
        assert tree(torch.randn(2, 3)).shape == (2, 3)
