"""State dicts that another thread asks for while the model runs: a server of weights, a logger, a manager of
replicas."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_compose import FSDPComposeError, RaggedDTensor, fully_shard
from fsdp_compose.checkpoint import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict
from tests import harness
from tests.models import rows
from tests.training import local_part, mean_square, sgd, stacks

distributed = functools.partial(harness.distributed, timeout=60)


def in_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or raises, in a thread of its own."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert results, "the thread has not ended"
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def asked_in_forward(model: nn.Module, call: Callable[[], Any]) -> list[Any]:
    """What ``call`` returns in another thread, in a forward of the second block, where its parameters are whole."""
    found: list[Any] = []
    model.blocks[1].trip.look = lambda: found.append(in_thread(call))
    try:
        mean_square(model, local_part(rows())).backward()
    finally:
        model.blocks[1].trip.look = lambda: None
    return found


@pytest.mark.parametrize("keep_vars", [False, True])
@distributed(world_size=(1, 2))
def test_a_state_dict_of_another_thread_is_sharded_and_leaves_forward_its_parameters(world_size, keep_vars):
    model, _ = stacks()
    expected, up = model.state_dict(keep_vars=keep_vars), model.blocks[1].up
    seen = []

    up.register_state_dict_pre_hook(lambda module, *_: seen.append(type(module.weight)))
    (state,) = asked_in_forward(model, lambda: model.state_dict(keep_vars=keep_vars))
    assert seen == [nn.Parameter], "forward has kept what it computes with"
    assert [*state] == [*expected]
    for name, value in state.items():
        assert isinstance(value, RaggedDTensor), name
        assert value.to_local().data_ptr() == expected[name].to_local().data_ptr()
        assert not keep_vars or value is expected[name]


@distributed(world_size=1)
def test_hooks_that_rename_entries_find_sharded_ones():
    model, _ = stacks()

    def rename(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "other"] = state.pop(prefix + "weight")

    model.blocks[1].up.register_state_dict_post_hook(rename)
    (state,) = asked_in_forward(model, model.state_dict)
    assert isinstance(state["blocks.1.up.other"], RaggedDTensor)


class SavesItself(nn.Linear):
    look: Callable[[], None] = staticmethod(lambda: None)
    num_saved = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return super().forward(x)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.num_saved += 1
        destination[prefix + "saved"] = self.weight.detach()


@distributed(world_size=1)
def test_a_module_that_saves_itself_is_refused_by_name_in_another_thread_in_forward_alone():
    model, found = fully_shard(nn.Sequential(SavesItself(3, 3))), []
    model[0].look = lambda: found.append(model.state_dict())
    mean_square(model, rows()).backward()
    found.append(in_thread(model.state_dict))  # between iterations
    assert [type(state["0.saved"]) for state in found] == [RaggedDTensor] * 2
    model[0].look = lambda: in_thread(model.state_dict)
    with pytest.raises(FSDPComposeError, match="another thread.*SavesItself.*shards"):
        model(rows())
    assert model[0].num_saved == 2, "forward might end while the method saves"


@distributed(world_size=1)
def test_loading_in_another_thread_in_forward_is_refused():
    model, _ = stacks()
    state = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}

    def load() -> None:
        model.blocks[1].load_state_dict({name[9:]: v for name, v in state.items() if name.startswith("blocks.1.")})

    with pytest.raises(FSDPComposeError, match="load_state_dict.*another thread"):
        asked_in_forward(model, load)
    with pytest.raises(FSDPComposeError, match="another thread"):
        asked_in_forward(model, lambda: set_model_state_dict(model, state))
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name])
    in_thread(lambda: model.load_state_dict(state))  # between iterations
    assert not any(value.full_tensor().any() for value in model.state_dict().values())


@distributed(world_size=2)
def test_what_communicates_is_refused_by_name_in_another_thread_while_the_model_runs():
    model, _ = stacks()
    optimizer = sgd(model.parameters())
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises(FSDPComposeError, match="another thread"):
        asked_in_forward(model, lambda: get_state_dict(model, optimizer, options=options))
    model, _ = stacks()
    whole = in_thread(lambda: get_model_state_dict(model, options=options))  # between iterations
    assert all(type(value) is torch.Tensor for value in whole.values())


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=1, timeout=120)
def test_state_dicts_in_a_thread_during_hundreds_of_steps(reshard_after_forward):
    model, _ = stacks(reshard_after_forward=reshard_after_forward)
    optimizer, batch = sgd(model.parameters()), rows()
    stop, problems, number = threading.Event(), list[str](), 0

    def ask() -> None:
        nonlocal number
        while not stop.is_set():
            try:
                states = [model.state_dict(), get_state_dict(model, optimizer)[0]]
                wrong = [name for state in states for name, v in state.items() if not isinstance(v, RaggedDTensor)]
                problems.extend(wrong)
            except Exception as error:
                problems.append(repr(error))
            number += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        steps = 0
        while steps < 400 or number <= 50:
            mean_square(model, batch).backward()
            if steps < 20 or steps % 10 == 0:
                optimizer.step()
            optimizer.zero_grad()
            steps += 1
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not problems, problems[:3]
