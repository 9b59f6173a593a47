"""Hardware: presets, files, curves, and how long a network takes."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fsdp_compose.core.comm import CollectiveKind as Kind
from fsdp_compose.errors import MisuseError
from fsdp_compose.inspect import Operation
from fsdp_compose.tuning import PRESETS, SOFTWARE, Curve, Device, Level, Network, hardware_of, read_hardware
from tests.harness import ROOT

MINIMAL = """\
{"device": {"name": "mine", "attention": [1e12, 2e12], "memory": 1e11, "matmul": {"float32": 1e13}},
 "network": {"start": 0.0, "levels": [{"ranks": 0, "bandwidth": 1e9, "latency": 1e-6}]}}
"""


# ---- Files


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read_back_as_it_was_written(tmp_path: Path, name: str):
    path = tmp_path / "hardware.json"
    path.write_text(PRESETS[name].json())
    assert read_hardware(path) == PRESETS[name]


def test_curves_infinity_and_what_was_calibrated_are_read_back_too(tmp_path: Path):
    preset = PRESETS["h100"]
    curve = Curve((1.0, 1e16), (1e-300, 0.5))
    device = replace(preset.device, name='a "quoted" name', curves={"add": curve}, collectives={Kind.ALL_GATHER: curve})
    network = Network((Level(0, math.inf, 0.0),), 0.0)
    written = replace(preset, device=device, network=network, calibrated={"on": "it", "busy": 1.02, "rounds": 7})
    path = tmp_path / "hardware.json"
    path.write_text(written.json())
    assert read_hardware(path) == written


def test_a_file_may_leave_out_what_has_a_default(tmp_path: Path):
    path = tmp_path / "hardware.json"
    path.write_text(MINIMAL)
    found = hardware_of(str(path))
    assert found.device.source == str(path) and found.device.attention == (1e12, 2e12)
    assert found.device.overlaps and found.device.kernel == 4e-6 and found.calibrated == {}
    assert found.network == Network((Level(0, 1e9, 1e-6),), 0.0)


def test_the_example_in_the_documentation_is_a_file_and_the_tables_have_every_entry(tmp_path: Path):
    page = (ROOT / "docs/reference/tuning.md").read_text()
    path = tmp_path / "hardware.json"
    path.write_text(page.partition("## The file")[2].partition("```text\n")[2].partition("```")[0])
    assert {*read_hardware(path).device.matmul} == {"float32", "float32 nt"}
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    names = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", rows)}
    entries = {item.name for item in (*fields(Device), *fields(Level))} - {"source"}
    assert names == entries | {"levels"}


WHERE = "hardware {path}: "
ASCENDING = WHERE + "device.curves.add: expected nbytes, ascending, and as many seconds, got "


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{"device"', '["device"', WHERE + "Expecting"),
        ('"device"', '"gpu"', WHERE + "expected an object with the objects device and network"),
        ('"levels"', '"level"', WHERE + "network.levels: expected a list of objects, got None"),
        ('[{"ranks": 0', '{"ranks": [0', WHERE),
        ('"memory": 1e11', '"memory": "1e11"', WHERE + "device: Device(memory='1e11'): expected a number"),
        ('"memory": 1e11', '"memory": [1e11]', WHERE + "device.memory: expected a number, got [100000000000.0]"),
        ('"memory": 1e11', '"memory": 1e11, "overlaps": "no"', WHERE + "device: Device(overlaps='no'): expected True"),
        ("[1e12, 2e12]", "[1e12]", WHERE + "device.attention: expected 2 numbers"),
        ('{"float32": 1e13}', '{"float32": "1e13"}', WHERE + "device.matmul: expected numbers"),
        ('{"float32": 1e13}', "1e13", WHERE + "device.matmul: expected numbers"),
        ('"memory": 1e11', '"memory": 1e11, "curves": 3', WHERE + "device.curves: expected an object, got 3"),
        ('"ranks": 0', '"ranks": 8', "network: expected levels whose ranks are multiples of those before, and 0 (all)"),
        ('"memory"', '"memroy"', WHERE + "device: unknown memroy; known are attention, "),
        ('"memory": 1e11, ', "", WHERE + "device: missing memory"),
        ('"bandwidth": 1e9, ', "", WHERE + "network.levels: missing bandwidth"),
        ('"memory": 1e11', '"memory": 0', WHERE + "device.memory: expected positive numbers, got 0"),
        ('"memory": 1e11', '"memory": NaN', WHERE + "device.memory: expected positive numbers, got nan"),
        ("[1e12, 2e12]", "[1e12, -1.0]", WHERE + "device.attention: expected positive numbers"),
        ('"float32": 1e13', '"float32": 0.0', WHERE + "device.matmul: expected positive numbers"),
        ('"start": 0.0', '"start": -1.0', WHERE + "network.start: expected positive numbers, got -1.0"),
        ('"bandwidth": 1e9', '"bandwidth": 0', WHERE + "network.levels.bandwidth: expected positive numbers"),
        *(
            ('"memory"', f'"curves": {{"add": {item}}}, "memory"', message)
            for item, message in (
                ("3.0", WHERE + "device.curves.add: missing nbytes, seconds"),
                ('{"nbytes": [1, 2], "seconds": [1.0]}', ASCENDING),
                ('{"nbytes": [], "seconds": []}', ASCENDING),
                ('{"nbytes": ["1"], "seconds": [1.0]}', WHERE + "device.curves.add.nbytes: expected numbers"),
                ('{"nbytes": 1, "seconds": 1.0}', WHERE + "device.curves.add.nbytes: expected numbers"),
                ('{"nbytes": [2, 1], "seconds": [1.0, 2.0]}', ASCENDING),
                ('{"nbytes": [1, 1], "seconds": [1.0, 2.0]}', ASCENDING),
            )
        ),
        (
            '"memory"',
            '"collectives": {"all-gather": {"nbytes": [1], "second": [1.0]}}, "memory"',
            WHERE + "device.collectives.all-gather: unknown second; known are nbytes, seconds",
        ),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, old: str, new: str, message: str):
    assert old in MINIMAL
    path = tmp_path / "hardware.json"
    path.write_text(MINIMAL.replace(old, new))
    with pytest.raises(MisuseError) as raised:
        read_hardware(path)
    assert str(raised.value).startswith(message.format(path=path))


def test_hardware_is_a_preset_or_a_file():
    assert hardware_of("H100") == PRESETS["h100"] == hardware_of("h100", "2026")
    with pytest.raises(MisuseError, match=r"^--hardware h1000: expected a100, h100, .*, or a file that calibrate"):
        hardware_of("h1000")


def test_products_in_a_dtype_that_the_file_does_not_have_are_refused():

    product = Operation("mm", "forward", 1e9, 100, torch.float64)
    with pytest.raises(MisuseError, match=r"only in bfloat16, float16, float32: give a file with matmul\.float64"):
        PRESETS["h100"].device.seconds(product)
    whole = replace(product, dtype=torch.int8)
    assert PRESETS["h100"].device.seconds(whole) == pytest.approx(4e-6)


def test_products_of_few_rows_reach_a_smaller_part_of_the_rate():
    """The weight has to be read for a few rows too, and a kernel takes some time for any number."""
    device, columns = PRESETS["h100"].device, 4096

    def rate(rows: int) -> float:
        nbytes = 2 * (2 * rows * columns + columns**2)
        product = Operation("mm", "forward", 2.0 * rows * columns**2, nbytes, torch.bfloat16)
        return product.flops / device.seconds(product)

    rates = [rate(rows) for rows in (1, 16, 128, 4096)]
    assert rates == sorted(rates) and rates[0] < 0.01 * rates[-1] < rates[1]
    assert rates[1] < 0.2 * rates[-1] and 0.8 < rates[-1] / device.matmul["bfloat16"] < 1


# ---- Presets


def test_older_software_is_slower_and_a_file_has_none(tmp_path: Path):
    product = Operation("mm", "forward", 1e12, 100, torch.bfloat16)
    add = Operation("add", "forward", 0.0, 1 << 30, torch.bfloat16)
    old, new = (hardware_of("h100", software).device for software in SOFTWARE)
    assert old.seconds(product) > 1.1 * new.seconds(product)
    assert old.seconds(add) == pytest.approx(2 * new.seconds(add))
    assert old.seconds(add, True) == new.seconds(add, True) == pytest.approx(0.4 * new.seconds(add))
    for text, software, said in (("h100", "2019", "expected 2024 or 2026"), ("mine", "2026", "for presets only")):
        path = tmp_path / "mine"
        path.write_text(MINIMAL)
        with pytest.raises(MisuseError, match=said):
            hardware_of(str(path) if text == "mine" else text, software)


def test_a_preset_says_what_was_compared_with_it():
    assert "published runs" in PRESETS["h100"].device.source
    assert "no run was compared" in PRESETS["mi300x"].device.source


def test_memory_that_others_reserve_is_a_line_each():
    device = PRESETS["h100"].device
    reserved = device.reserved(1000 << 20, 2)
    assert [*reserved.values()] == [150 << 20, 32 << 20, 512 << 20]
    assert replace(device, overlaps=False).reserved(900, 1) == {"a tenth of the memory, which stays free": 100}


# ---- Curves


def test_a_curve_is_linear_between_its_points():
    curve = Curve((10, 20, 40), (1.0, 3.0, 4.0))
    assert [curve.at(size) for size in (0, 5, 10)] == [1.0, 1.0, 1.0]
    assert [curve.at(size) for size in (15, 20, 30, 40)] == [2.0, 3.0, 3.5, 4.0]
    assert curve.at(80) == 8.0  # grows with the size


# ---- The network: nodes of 4, 100 bytes a second inside, 10 for each rank between them

NETWORK = Network((Level(4, 100.0, 0.25), Level(0, 10.0, 2.0)), start=1.0)


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
def test_inside_a_node_all_but_a_rank_s_own_part_arrive_over_its_link(kind: str):
    # 3 steps; 3/4 of 800 bytes at 100 bytes a second
    assert NETWORK.seconds(kind, 800, range(4)) == pytest.approx(1.0 + 3 * 0.25 + 600 / 100)


def test_an_all_reduce_does_it_twice():
    # By a tree: 2 steps up and 2 down, where rings take 6.
    assert NETWORK.seconds(Kind.ALL_REDUCE, 800, range(4)) == pytest.approx(1.0 + 4 * 0.25 + 1200 / 100)


def test_across_nodes_a_group_uses_the_cards_of_all_its_ranks_in_a_node():
    # Two nodes of 4: 7/8 of the bytes at 4 x 10 bytes a second, which is slower than a link. Of 7 steps one crosses.
    expected = 1.0 + 6 * 0.25 + 1 * 2.0 + 700 / 40
    assert NETWORK.seconds(Kind.ALL_GATHER, 800, range(8)) == pytest.approx(expected)
    # Two of a node in each of two nodes: 2 cards.
    expected = 1.0 + 2 * 0.25 + 1 * 2.0 + 600 / 20
    assert NETWORK.seconds(Kind.ALL_GATHER, 800, (0, 1, 4, 5)) == pytest.approx(expected)


def test_links_may_be_slower_than_all_cards_of_a_node():
    network = replace(NETWORK, levels=(NETWORK.levels[0], Level(0, 50.0, 2.0)))
    expected = 1.0 + 6 * 0.25 + 1 * 2.0 + 700 / 100  # 4 x 50 > 100
    assert network.seconds(Kind.ALL_GATHER, 800, range(8)) == pytest.approx(expected)


def test_a_group_with_one_rank_in_each_node_uses_one_card():
    # What replicas of a hybrid mesh do: no link inside a node is used.
    assert NETWORK.seconds(Kind.ALL_REDUCE, 800, (1, 5)) == pytest.approx(1.0 + 2 * 2.0 + 800 / 10)


def test_gathers_pass_on_along_a_ring_and_reductions_of_all_ranks_may_take_a_tree():
    ranks = range(1024)
    ring = (1024 - 256) * 0.25 + 255 * 2.0  # 256 nodes: so many steps cross them
    assert NETWORK.seconds(Kind.ALL_GATHER, 1024, ranks) == pytest.approx(1.0 + ring + 1023 / 40)
    tree = math.log2(4) * 0.25 + math.log2(256) * 2.0
    assert NETWORK.seconds(Kind.ALL_REDUCE, 1024, ranks) == pytest.approx(1.0 + 2 * tree + 2046 / 40)


def test_an_all_to_all_sends_what_it_is_told_to_and_each_rank_over_its_own_card():
    # Of 7 other ranks, 4 are in the other node: their share of 700 bytes at 10 bytes a second.
    expected = 1.0 + 2 * 0.25 + 1 * 2.0 + 700 * (4 / 7) / 10
    assert NETWORK.seconds(Kind.ALL_TO_ALL, 5000, range(8), sent=700) == pytest.approx(expected)
    assert NETWORK.seconds(Kind.ALL_TO_ALL, 5000, range(4), sent=700) == pytest.approx(1.0 + 2 * 0.25 + 7.0)


def test_one_rank_sends_nothing():
    assert NETWORK.seconds(Kind.ALL_REDUCE, 800, (3,)) == 0.0


def test_the_node_with_the_fewest_ranks_is_the_slowest():
    network = Network((Level(8, 1e12, 0.0), Level(0, 1e9, 0.0)), start=0.0)
    assert network.seconds("all-gather", 9_000_000_000, range(9)) == pytest.approx(8)  # all of it by one card


@pytest.mark.parametrize("sizes", [(), (8,), (8, 4, 0), (8, 12, 0), (0, 0), (-1, 0)])
def test_levels_must_nest_and_the_last_one_has_all_ranks(sizes):
    with pytest.raises(MisuseError, match="multiples"):
        Network(tuple(Level(size, 1e9, 0.0) for size in sizes))


def test_a_network_of_one_level_does_not_know_what_connects_nodes():
    with pytest.raises(MisuseError, match="what connects nodes"):
        Network((Level(0, 1e9, 0.0),)).with_node(8)


def test_a_node_s_bandwidth_is_shared_by_its_ranks():
    assert NETWORK.with_node(None, 200.0).levels == (NETWORK.levels[0], Level(0, 50.0, 2.0))
    assert NETWORK.with_node(8, 200.0).levels[1] == Level(0, 25.0, 2.0)


def test_other_nodes_and_other_bandwidths():
    assert NETWORK.with_node(8).seconds(Kind.ALL_GATHER, 800, range(8)) == pytest.approx(1.0 + 7 * 0.25 + 7.0)
    assert NETWORK.with_node(8).levels[1] == NETWORK.levels[1]
    assert NETWORK.scaled(2.0).seconds(Kind.ALL_GATHER, 800, range(4)) == pytest.approx(1.0 + 3 * 0.25 + 3.0)
