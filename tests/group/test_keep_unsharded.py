"""``keep_unsharded``: forwards without grad mode gather nothing twice, unless parameters were edited in between."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from fsdp_compose import (
    MixedPrecisionPolicy,
    flat_parameters,
    fully_shard,
    functional_mode,
    keep_unsharded,
    register_forward_method,
    reshard,
    set_reshard_after_forward,
    summon_full_params,
)
from fsdp_compose.checkpoint import get_model_state_dict, set_model_state_dict
from tests.harness import distributed
from tests.internals import sharded_modules
from tests.runtime.test_edits_in_forward import EDITS, Editing, inputs, shard
from tests.training import assert_parameters_match, local_part


def is_gathered(model: nn.Module) -> list[bool]:
    return [
        handle.unsharded.memory.nbytes() > 0 for state, _ in sharded_modules(model) for handle in state._handles
    ]  # of the root, first, target, last, source: the root has no parameters of its own


def num_collectives(model: nn.Module) -> int:
    root = fully_shard.state(model).root
    return root.order.count


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"mp_policy": "bf16"}])
@distributed(world_size=(1, 2))
def test_forwards_without_grad_gather_once_and_the_end_frees(options):
    if options.get("mp_policy"):
        options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    model, reference = shard(Editing(), **options), Editing()
    is_alone = dist.get_world_size() == 1 and "mp_policy" not in options
    with torch.no_grad():
        model(inputs(0))
        assert not any(is_gathered(model)) or is_alone
        with keep_unsharded(model):
            model(inputs(0))
            assert is_gathered(model)[:3] == [True] * 3
            before = num_collectives(model)
            for i in range(3):
                tolerance = 3e-2 if "mp_policy" in options else 1e-6
                torch.testing.assert_close(model(inputs(i)).float(), reference(inputs(i)), rtol=0, atol=tolerance)
            with torch.inference_mode():
                model(inputs(0))
            assert num_collectives(model) == before
        assert not any(is_gathered(model)) or is_alone
        model(inputs(0))
        assert num_collectives(model) == before + (0 if is_alone else 3)


@pytest.mark.parametrize("mode", ["default", "functional"])
@distributed(world_size=(2, 3))
def test_every_edit_of_sharded_parameters_shows_in_the_next_forward(mode):
    model, reference = shard(Editing()), Editing()
    with functional_mode(model) if mode == "functional" else nullcontext(), keep_unsharded(model), torch.no_grad():
        model(inputs(0))
        for name, edit in EDITS.items():
            for both in (model, reference):
                edit(both)
            theirs, before = reference(inputs(1)), num_collectives(model)
            torch.testing.assert_close(model(inputs(1)), theirs, msg=lambda text, name=name: f"{name}: {text}")
            assert num_collectives(model) == before + 1, f"{name}: only what was edited is gathered again"
            model(inputs(2))
            assert num_collectives(model) == before + 1


@distributed(world_size=2)
def test_values_that_come_from_elsewhere_show_in_the_next_forward(tmp_path):
    model, reference, other = shard(Editing()), Editing(), Editing()
    for p in other.parameters():
        p.data.mul_(0.5)
    with keep_unsharded(model), torch.no_grad():

        def check() -> None:
            torch.testing.assert_close(model(inputs(1)), reference(inputs(1)))

        check()
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
        with summon_full_params(model):
            model.target.weight.mul_(0.5)
        reference.target.weight.mul_(0.5)
        check()
        dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path)
        reference.load_state_dict(Editing().state_dict())
        check()
        sharded_other = shard(copy.deepcopy(other))
        set_model_state_dict(model, get_model_state_dict(sharded_other))
        reference.load_state_dict(other.state_dict())
        check()
        for both in (model, reference):
            both.double()
        torch.testing.assert_close(model(inputs(1).double()), reference(inputs(1).double()))
        for both in (model, reference):
            both.float()
            for p in both.target.parameters():
                p.data = p.detach() * 2
        check()


@distributed(world_size=(2, 3))
def test_flat_views_and_training_in_between(world_size):
    model, reference = shard(Editing()), Editing()
    ours = torch.optim.SGD(flat_parameters(model), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with keep_unsharded(model):
        for i in range(4):
            with torch.no_grad():
                torch.testing.assert_close(model(inputs(i)), reference(inputs(i)))
                assert is_gathered(model)[:3] == [True] * 3
            for both, optimizer, share in ((model, ours, local_part), (reference, theirs, lambda x: x)):
                both(share(inputs(i))).square().mean().backward()
                assert both is reference or not any(is_gathered(model))
                with torch.no_grad():
                    both(inputs(i))  # between backward and step
                optimizer.step()
                optimizer.zero_grad()
    assert_parameters_match(model, reference, tolerance=1e-6)


@distributed(world_size=(2, 3))
def test_write_to_local_memory_raises_until_what_was_kept_is_freed():
    model = shard(Editing())
    with torch.no_grad(), keep_unsharded(model):
        model(inputs(0))
        for p in model.target.parameters():
            p.to_local().mul_(0.5)
        with pytest.raises(RuntimeError, match=r"rank \d.*through its local memory.*target\.weight"):
            model(inputs(0))
        reshard(model.target)
        reference = Editing()
        for p in reference.target.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(model(inputs(0)), reference(inputs(0)))


@distributed(world_size=2)
def test_what_is_kept_ends_with_the_context_however_it_ends():
    model = shard(Editing())
    set_reshard_after_forward(model, False)
    with torch.no_grad(), pytest.raises(ValueError, match="on purpose"), keep_unsharded(model):
        model(inputs(0))
        raise ValueError("on purpose")
    assert not any(is_gathered(model))
    with torch.no_grad(), keep_unsharded(model.target):
        with keep_unsharded(model):
            model(inputs(0))
            assert is_gathered(model)[:3] == [True] * 3
        assert is_gathered(model)[:3] == [False, True, False], "the inner context frees what it kept"
        model(inputs(0))
        reshard(model.target)
        assert not any(is_gathered(model))
        model(inputs(0))
    assert not any(is_gathered(model))

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    with torch.no_grad(), keep_unsharded(model):
        model(inputs(0))
        hook = model.last.register_forward_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(inputs(0))
        hook.remove()
        with pytest.warns(UserWarning, match="interrupted"):
            torch.testing.assert_close(model(inputs(0)), Editing()(inputs(0)))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids).cumsum(1))))

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, num: int) -> torch.Tensor:
        for _ in range(num):
            ids = torch.cat([ids, self.forward(ids)[:, -1:].argmax(-1)], dim=1)
        return ids


@pytest.mark.parametrize("is_method", [False, True])
@distributed(world_size=2)
def test_generation_equals_that_of_the_unsharded_model(is_method):
    model, reference = Generator(), Generator()
    for module in (model.mix, model.head, model):
        fully_shard(module)
    if is_method:
        register_forward_method(model, "generate")
    prompt = torch.tensor([[1, 2]])
    with torch.no_grad(), keep_unsharded(model):
        for _ in range(2):
            if is_method:
                ids = model.generate(prompt, 5)
            else:
                ids = prompt
                for _ in range(5):
                    ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
            assert torch.equal(ids, reference.generate(prompt, 5))
            for both in (model, reference):
                both.head.weight.mul_(-0.5)
