"""Errors have public classes, the same on every rank that raises them, and are the built-in errors that they were."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn

import fsdp_compose
from fsdp_compose import (
    CheckpointDamagedError,
    MisuseError,
    RankLostError,
    RanksDifferError,
    clip_grad_norm_,
    errors,
    full_parameters,
    fully_shard,
    replicate,
    summon_full_params,
)
from fsdp_compose.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    load,
    load_hf,
    save,
    save_hf,
    set_model_state_dict,
)
from tests.checkpoint.states import shared_folder
from tests.harness import distributed, environment
from tests.models import Stack, rows
from tests.training import mean_square

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
FIRST = StateDictOptions(full_state_dict=True)
Program = Callable[[], None]


def rank() -> int:
    return dist.get_rank()


def stack() -> Stack:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def trained() -> Stack:
    model = stack()
    mean_square(model, rows()).backward()
    return model


def refused(program: Program) -> BaseException:
    try:
        program()
    except Exception as error:
        return error
    pytest.fail("no error")


def test_an_error_can_be_sent_to_another_process():
    for cls in CLASSES:
        copy = pickle.loads(pickle.dumps(cls("what happened")))
        assert type(copy) is cls and str(copy) == "what happened"


def test_every_class_is_a_builtin_error_too():
    for cls in CLASSES:
        if cls is not errors.FSDPComposeError:
            assert issubclass(cls, errors.FSDPComposeError) and issubclass(cls, (RuntimeError, ValueError)), cls
    assert {cls.__name__ for cls in CLASSES if cls.__base__ is not MisuseError} <= {*fsdp_compose.__all__}


# ---- ranks that differ


def start_from_other_seeds() -> None:
    torch.manual_seed(rank())
    fully_shard(nn.Linear(4, 4))(torch.ones(2, 4))


def have_other_shapes() -> None:
    torch.manual_seed(0)
    fully_shard(nn.Linear(4, 4 + rank()))(torch.ones(2, 4))


def have_other_replicas() -> None:
    torch.manual_seed(0)
    model = replicate(nn.Linear(4, 4))
    model(torch.ones(2, 4))
    fsdp_compose.broadcast_replicas(nn.Linear(4, 4 + rank()))


def skip_a_block() -> None:
    model = trained()
    if rank():
        model.blocks = model.blocks[:-1]
    mean_square(model, rows()).backward()


def run_one_forward_more() -> None:
    model = trained()
    if rank() == 0:
        model(rows())
    mean_square(model, rows()).backward()


def make_one_step_more() -> None:
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model, rows()).backward()
    for _ in range(1 + rank()):
        optimizer.step()
    mean_square(model, rows()).backward()


def compare_before_each_collective() -> None:
    with environment(FSDP_COMPOSE_DEBUG="1"):
        run_one_forward_more()


def wait_in_other_places() -> None:
    model = trained()
    if rank():
        get_model_state_dict(model, options=FIRST)
    else:
        mean_square(model, rows()).backward()


def load_other_keys() -> None:
    model, folder = trained(), shared_folder() / "step"
    save({"model": get_model_state_dict(model)}, folder)
    load({"model": get_model_state_dict(model), **({"step": 0} if rank() else {})}, folder)


def summon_with_other_arguments() -> None:
    with summon_full_params(trained(), writeback=bool(rank())):
        pass


def leave_a_loop_early() -> None:
    with full_parameters(trained(), bucket_bytes=64) as buckets:
        for _ in buckets:
            if rank():
                break


DIFFERENT = [
    start_from_other_seeds,
    have_other_shapes,
    have_other_replicas,
    skip_a_block,
    run_one_forward_more,
    make_one_step_more,
    compare_before_each_collective,
    wait_in_other_places,
    load_other_keys,
    summon_with_other_arguments,
    leave_a_loop_early,
]


@pytest.mark.parametrize("program", DIFFERENT)
@distributed(world_size=2, fresh=True)
def test_ranks_that_differ(program):
    error = refused(program)
    assert type(error) is RanksDifferError and isinstance(error, RuntimeError), repr(error)


@distributed(world_size=3, fresh=True)
def test_a_later_try_raises_the_class_of_the_first_error():
    model = trained()
    if rank() == 2:
        model.blocks = model.blocks[:-1]
    first = refused(lambda: mean_square(model, rows()).backward())
    again = refused(lambda: model(rows()))
    assert type(first) is RanksDifferError and type(again) in (RanksDifferError, RankLostError), repr(again)


# ---- a rank that is lost


def without(who: int, run: Program) -> None:
    """All ranks but one call it; that one stays alive, elsewhere."""
    if rank() != who:
        run()


def at_the_first_forward() -> Program:
    model = stack()
    return lambda: model(rows())


def in_a_forward() -> Program:
    model = trained()
    return lambda: mean_square(model, rows())


def in_a_backward() -> Program:
    loss = mean_square(trained(), rows())
    return loss.backward


def in_clipping() -> Program:
    model = trained()
    return lambda: clip_grad_norm_(model.parameters(), 1.0)


def in_a_state_dict() -> Program:
    model = trained()
    return lambda: get_model_state_dict(model, options=FIRST)


def in_save() -> Program:
    state, folder = {"model": get_model_state_dict(trained())}, shared_folder() / "step"
    return lambda: save(state, folder)


LOST = [at_the_first_forward, in_a_forward, in_a_backward, in_clipping, in_a_state_dict, in_save]


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("prepare", LOST)
@distributed(world_size=3, fresh=True)
def test_a_rank_that_does_not_come(prepare, who):
    run = prepare()
    dist.barrier()
    if rank() == who:
        return
    with environment(FSDP_COMPOSE_TIMEOUT="1"):
        error = refused(run)
        assert type(error) is RankLostError and isinstance(error, RuntimeError), repr(error)


@distributed(world_size=2, pg_timeout=2)
def test_recovery_after_a_lost_rank_raises_its_class():
    model = trained()
    if rank() == 0:
        assert type(refused(lambda: mean_square(model, rows()).backward())) is RankLostError
        assert type(refused(lambda: model(rows()))) is RankLostError


# ---- damaged checkpoints


def saved() -> tuple[Path, nn.Module]:
    folder, model = shared_folder() / "step", trained()
    save({"model": get_model_state_dict(model)}, folder)
    return folder, model


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_off, flip, os.remove])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@distributed(world_size=2)
def test_a_damaged_checkpoint(damage, name):
    folder, model = saved()
    if rank() == 0:
        damage(folder / name)
    dist.barrier()
    error = refused(lambda: load({"model": get_model_state_dict(model)}, folder))
    assert type(error) is CheckpointDamagedError and isinstance(error, RuntimeError), repr(error)


@pytest.mark.parametrize("damage", [cut_off, os.remove])
@pytest.mark.parametrize("name", ["model-00002-of-*.safetensors", "model.safetensors.index.json"])
@distributed(world_size=2)
def test_damaged_safetensors(damage, name):
    folder, model = shared_folder() / "hub", trained()
    save_hf(model, folder, max_file_bytes=64)
    if rank() == 0:
        damage(next(folder.glob(name)))
    dist.barrier()
    error = refused(lambda: load_hf(model, folder))
    missing = damage is os.remove and name.endswith(".json")  # then the folder was never one of several files
    assert type(error) is (errors.MisuseRuntimeError if missing else CheckpointDamagedError), repr(error)


# ---- misuse


def unshard_what_is_not_sharded() -> None:
    fsdp_compose.unshard(nn.Linear(4, 4))


def shard_twice() -> None:
    fully_shard(fully_shard(nn.Linear(4, 4)))


def name_no_strategy() -> None:
    fully_shard(nn.Linear(4, 4), strategy=3)  # type: ignore[arg-type]


def shard_no_module() -> None:
    fully_shard("model")  # type: ignore[arg-type]


def step_before_backward() -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model, rows()).backward()
    loss = mean_square(model, rows())
    optimizer.step()
    loss.backward()  # autograd raises what a hook of ours raised


def mix_with_a_plain_tensor() -> None:
    torch.ones(3, 3) @ trained().blocks[0].up.weight


def write_in_forward() -> None:
    model = stack()
    model.blocks[0].register_forward_pre_hook(lambda module, _: module.up.weight.data.mul_(2))
    model(rows())


def load_what_it_lacks() -> None:
    folder, model = saved()
    load({"model": get_model_state_dict(model), "step": 0}, folder)


def load_from_nowhere() -> None:
    load({"step": 0}, shared_folder() / "nowhere")


def save_where_something_is() -> None:
    folder, model = saved()
    save({"model": get_model_state_dict(model)}, folder)


def set_another_shape_on_one_rank() -> None:
    state = get_model_state_dict(model := trained(), options=FIRST)
    if rank():
        state[next(iter(state))] = torch.ones(1, 1, 1)
    set_model_state_dict(model, state, options=FIRST)


def set_too_few_keys() -> None:
    set_model_state_dict(trained(), {}, options=FIRST)


def step_within_a_loop_over_buckets() -> None:
    with full_parameters(model := trained(), bucket_bytes=64) as buckets:
        for _ in buckets:
            with torch.no_grad():
                next(model.parameters()).mul_(2)


MISUSED = [
    (unshard_what_is_not_sharded, ValueError),
    (shard_twice, ValueError),
    (name_no_strategy, TypeError),
    (shard_no_module, TypeError),
    (step_before_backward, RuntimeError),
    (mix_with_a_plain_tensor, RuntimeError),
    (write_in_forward, RuntimeError),
    (load_what_it_lacks, RuntimeError),
    (load_from_nowhere, RuntimeError),
    (save_where_something_is, RuntimeError),
    (set_another_shape_on_one_rank, RuntimeError),
    (set_too_few_keys, RuntimeError),
    (step_within_a_loop_over_buckets, RuntimeError),
]


@pytest.mark.parametrize(("program", "builtin"), MISUSED)
@distributed(world_size=2)
def test_misuse(program, builtin):
    error = refused(program)
    assert isinstance(error, MisuseError) and isinstance(error, builtin), repr(error)


@pytest.mark.parametrize("compiles", [torch.compile, fsdp_compose.compile])
@distributed(world_size=2, timeout=120)
def test_misuse_in_compiled_code(compiles):
    model = stack()
    compiled = compiles(model, backend="eager")
    for _ in range(2):
        compiled(rows()).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = compiled(rows()).square().mean()
    optimizer.step()
    error = refused(loss.backward)
    assert isinstance(error, MisuseError) and isinstance(error, RuntimeError), repr(error)


class Trouble(Exception):
    pass


class Failing:
    """One rank cannot make its state."""

    def state_dict(self) -> dict[str, int]:
        if rank():
            raise Trouble("no state")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@distributed(world_size=2)
def test_what_the_user_raised_has_no_class_of_ours():
    error = refused(lambda: save({"loader": Failing()}, shared_folder() / "step"))
    assert type(error) is RuntimeError and "no state" in str(error), repr(error)


# ---- programs that catch them


def misuse_it(_: int) -> None:
    unshard_what_is_not_sharded()


def test_spawn_tells_the_class():
    with pytest.raises(mp.ProcessRaisedException, match=r"fsdp_compose\.errors\.MisuseError: unshard\(\)"):
        mp.spawn(misuse_it, nprocs=1)
