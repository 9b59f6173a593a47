"""The schedule of a step: hand-made events, with times that arithmetic gives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsdp_compose import MisuseError
from fsdp_compose.inspect import Issue, Operation, Wait
from fsdp_compose.tuning import Curve, Device, Level, Network, schedule

TERA = 1e12
GPU = Device("gpu", "", {"float32": TERA}, (TERA, TERA / 2), memory=1e9, kernel=0, host=0, collective=0)
CPU = Device(
    "cpu", "", {"float32": TERA}, (TERA, TERA), memory=1e9, kernel=0, host=0, collective=0, overlaps=False,
    collectives={"all-gather": Curve((100.0,), (0.5,))},
)  # fmt: skip
WIRE = Network((Level(0, 1e9, 0.0),), start=0.0)
FREE = Network((Level(0, math.inf, 0.0),), start=0.0)
RANKS = (0, 1)


def product(seconds: float, phase: str = "forward", is_repeated: bool = False) -> Operation:
    return Operation("mm", phase, seconds * TERA, 0, torch.float32, is_repeated=is_repeated)


def elementwise(seconds: float, phase: str = "forward", name: str = "add") -> Operation:
    return Operation(name, phase, 0.0, int(seconds * 1e9), torch.float32)


def collective(number: int, seconds: float, kind: str = "all-gather", group: str = "a", ranks=RANKS) -> Issue:
    whole = seconds * 1e9 * len(ranks) / (len(ranks) - 1) / (2 if kind == "all-reduce" else 1)
    return Issue(number, kind, group, round(whole), ranks, "forward")


def seconds_of(*events, device=GPU, network=WIRE, **options) -> float:
    return schedule(events, device, network, **options).seconds


def test_operations_take_turns():
    assert seconds_of(product(2), elementwise(3)) == pytest.approx(5)


def test_a_product_takes_as_long_as_its_numbers_or_as_its_bytes():
    slow = Operation("mm", "forward", TERA, 4_000_000_000, torch.float32)
    assert seconds_of(slow) == pytest.approx(4)


def test_a_collective_runs_beside_what_comes_after_it():
    found = schedule((collective(0, 3), product(2), Wait(0), product(1)), GPU, WIRE)
    assert found.seconds == pytest.approx(4)
    assert (found.exposed, found.communication, found.compute) == pytest.approx((1, 3, 3))


def test_a_collective_begins_when_what_came_before_it_is_done():
    assert seconds_of(product(2), collective(0, 3), Wait(0)) == pytest.approx(5)


def test_collectives_of_one_process_group_take_turns_and_others_do_not():
    same = (collective(0, 3), collective(1, 3), Wait(0), Wait(1))
    other = (collective(0, 3), collective(1, 3, ranks=(0, 2)), Wait(0), Wait(1))
    assert seconds_of(*same) == pytest.approx(6)
    assert seconds_of(*other) == pytest.approx(3)


def test_nobody_waits_but_the_step_ends_later():
    assert seconds_of(collective(0, 3), product(1)) == pytest.approx(3)


def test_the_second_stage_of_a_hybrid_reduction_begins_when_the_first_one_ends():
    # A CPU waits for the first stage at the next reduction; on an accelerator the second one is issued at once.
    events = (
        collective(0, 1, "reduce-scatter"),
        product(5),
        Wait(0),
        collective(1, 2, "all-reduce", ranks=(0, 2)),
        product(1),
        Wait(1),
    )
    assert seconds_of(*events) == pytest.approx(6)
    late = [event for event in events if event != Wait(0)]  # of another group: begins where it is issued
    assert seconds_of(*late) == pytest.approx(7)


def test_the_host_may_be_slower_than_the_device():
    device = Device("gpu", "", {"float32": TERA}, (TERA, TERA), 1e9, kernel=0, host=2.0, collective=1.0)
    found = schedule((product(1), collective(0, 0.0), Wait(0), product(1)), device, WIRE)
    assert found.host == pytest.approx(5)
    assert found.seconds == pytest.approx(6)


def test_micro_batches_repeat_everything_but_the_optimizers_step():
    events = (product(2), collective(0, 1, "reduce-scatter"), Wait(0), elementwise(4, "optimizer"))
    assert seconds_of(*events) == pytest.approx(7)
    found = schedule(events, GPU, WIRE, num_batches=3)
    assert found.seconds == pytest.approx(13)
    assert found.optimizer == pytest.approx(4)
    assert found.flops == pytest.approx(6 * TERA)


def test_what_is_recomputed_is_no_use_of_the_device():
    device = Device("gpu", "", {"float32": TERA}, (TERA, TERA), 1e9, kernel=0, host=0, peak={"float32": 2 * TERA})
    found = schedule((product(2), product(2, "backward", is_repeated=True)), device, WIRE)
    assert found.seconds == pytest.approx(4)
    assert found.mfu == pytest.approx(0.25)


def test_offloaded_shards_are_copied_in_and_gradients_out_and_the_host_steps():
    device = Device(
        "gpu",
        "",
        {"float32": TERA},
        (TERA, TERA),
        1e9,
        kernel=0,
        host=0,
        collective=0,
        host_link=1e9,
        host_memory=0.5e9,
    )
    events = (
        collective(0, 1),  # of 2e9 bytes: half of them are this rank's
        Wait(0),
        product(1),
        collective(1, 1, "reduce-scatter"),
        Wait(1),
        elementwise(1, "optimizer"),
    )
    assert seconds_of(*events, device=device) == pytest.approx(4)
    assert seconds_of(*events, device=device, is_offloaded=True) == pytest.approx(1 + 3 + 1 + 2)


def test_compiled_blocks_move_fewer_bytes_and_the_optimizer_does_not():
    events = (elementwise(1), elementwise(1, "optimizer"))
    assert seconds_of(*events, is_compiled=True) == pytest.approx(GPU.fused + 1)


def test_compiled_blocks_move_fewer_bytes_where_times_are_measured_too():
    curve = Curve((0.0, 2e9), (0.0, 2.0))
    device = replace(GPU, curves={"add": curve, "add_": curve}, host=0.0, fused=0.25)
    assert seconds_of(elementwise(1), device=device) == pytest.approx(1)
    assert seconds_of(elementwise(1), device=device, is_compiled=True) == pytest.approx(0.25)
    product = Operation("mm", "forward", 1.0, 1_000_000_000, torch.float32)
    assert seconds_of(product, is_compiled=True) == seconds_of(product) == pytest.approx(1)


def test_what_the_optimizer_computes_is_not_the_models():
    device = replace(GPU, peak={"float32": TERA})
    found = schedule((product(1), product(1, "optimizer")), device, WIRE)
    assert found.flops == TERA and found.mfu == pytest.approx(0.5)


def test_an_accelerator_takes_a_list_of_tensors_at_once():
    device = replace(GPU, kernel=1.0, curves={"add_": Curve((0.0, 1e9), (0.0, 1.0))})
    many = Operation("add_", "optimizer", 0.0, 8, torch.float32, num_tensors=8)
    assert seconds_of(many, device=device) == pytest.approx(1)
    assert seconds_of(many, device=replace(device, overlaps=False)) == pytest.approx(8)


def test_on_a_cpu_collectives_take_the_cores_time():
    gather = Issue(0, "all-gather", "a", 100, RANKS, "forward")
    assert seconds_of(gather, product(1), Wait(0), device=CPU, network=FREE) == pytest.approx(1.5)
    alone = Issue(0, "all-gather", "a", 100, (0,), "forward")
    assert seconds_of(alone, product(1), Wait(0), device=CPU, network=FREE) == pytest.approx(1)


def test_on_a_cpu_bytes_travel_beside():
    gather = Issue(0, "all-gather", "a", 100, RANKS, "forward")
    slow = Network((Level(0, 25.0, 0.0),), start=0.0)  # 50 bytes leave a rank
    assert seconds_of(gather, product(1), Wait(0), device=CPU, network=slow) == pytest.approx(2.5)


def test_operations_are_slower_while_a_collective_runs():
    device = replace(GPU, beside=1.5)
    assert seconds_of(collective(0, 9), product(2), Wait(0), device=device) == pytest.approx(9)
    found = schedule((collective(0, 3), product(4), Wait(0), product(1)), device, WIRE)
    assert found.seconds == pytest.approx(
        3 + (4 - 3 / 1.5) + 1
    )  # in the 3 s of the collective, two thirds of 3 are done
    assert found.exposed == 0


def test_micro_batches_before_the_last_one_may_differ():
    events = (
        product(2), product(1, "backward"), product(2), product(1, "backward"), collective(0, 1, "reduce-scatter"),
        Wait(0), elementwise(4, "optimizer"),
    )  # fmt: skip
    assert seconds_of(*events, num_batches=2) == pytest.approx(3 + 4 + 4)
    assert seconds_of(*events, num_batches=5) == pytest.approx(4 * 3 + 4 + 4)


def test_spans_are_what_takes_time():
    found = schedule((collective(0, 3), product(2), Wait(0)), GPU, WIRE, keeps_spans=True)
    assert [(span.lane, span.name, span.start, span.end) for span in found.spans] == [
        ("all-gather", "a", 0, pytest.approx(3)),
        ("compute", "mm", 0, pytest.approx(2)),
    ]


def test_curves_are_for_each_tensor_of_a_list():
    device = Device("cpu", "", {}, (1, 1), 1e9, kernel=0, host=0, overlaps=False, curves={"add_": Curve((8,), (1.0,))})
    many = Operation("add_", "optimizer", 0.0, 16, torch.float32, num_tensors=2)
    assert seconds_of(many, device=device) == pytest.approx(2)
    assert seconds_of(elementwise(16e-9, name="add_"), device=device) == pytest.approx(2)


def test_a_dtype_that_the_hardware_does_not_know_is_named():
    half = Operation("mm", "forward", 1.0, 0, torch.float16)
    with pytest.raises(MisuseError, match=r"matmul\.float16"):
        seconds_of(half)


def test_the_layout_of_matrices_decides_if_the_hardware_tells_them_apart():
    device = Device("cpu", "", {"float32": TERA, "float32 nt": TERA / 2}, (1, 1), 1e9, kernel=0, host=0, overlaps=False)
    by_columns = Operation("mm", "forward", TERA, 0, torch.float32, layout="nt")
    assert seconds_of(by_columns, device=device) == pytest.approx(2)
    assert seconds_of(product(1), device=device) == pytest.approx(1)
