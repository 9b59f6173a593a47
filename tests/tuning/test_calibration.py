"""``calibrate``: real processes measure this machine, with small sizes. It may be busy, so they count CPU time."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fsdp_compose import __main__ as command_line
from fsdp_compose.core.comm import CollectiveKind as Kind
from fsdp_compose.errors import MisuseError, MisuseRuntimeError
from fsdp_compose.inspect import Operation
from fsdp_compose.tuning import Curve, Hardware, Level, Workload, calibrate, calibration, hardware_of, write_hardware
from fsdp_compose.tuning.calibration import busy_of, curves_of, fitted_beside, fitted_network, fitted_products
from fsdp_compose.tuning.workload import BESIDE, NUM_GATHERS, NUM_PRODUCTS, Sample
from tests.harness import ROOT, fake_process_group
from tests.tuning.failing_sizes import EndsOneRank, FailsOnOneRank, StopsOneRank

pytestmark = pytest.mark.timeout(300)
SMALL = Workload(
    products=((32, 32, 32), (128, 128, 128), (64, 256, 128)),
    attentions=((1, 4, 64, 32),),
    tensor_bytes=(1 << 12, 1 << 16, 1 << 19),
    collective_bytes=(1 << 12, 1 << 16, 1 << 18),
    seconds=0.001,
)
MIX = ((96, 160, 224), 1 << 18)  # no size is one of those that are measured


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return calibrate(processes=2, rounds=3, clock="cpu", most_busy=math.inf, workload=SMALL)


# ---- What is measured


def test_the_file_is_read_back_as_it_was_written(hardware: Hardware, tmp_path: Path):
    write_hardware(hardware, tmp_path / "hardware.json")
    assert hardware_of(str(tmp_path / "hardware.json")) == hardware
    assert [path.name for path in tmp_path.iterdir()] == ["hardware.json"]
    written = hardware.calibrated
    assert (written["processes"], written["threads"], written["rounds"], written["clock"]) == (2, 1, 3, "cpu")
    assert written["torch"] == torch.__version__ and written["busy"] > 0.5 and written["seconds"] > 0


def test_everything_is_measured(hardware: Hardware):
    device = hardware.device
    assert {*device.matmul} == {"float32", "float32 nn", "float32 nt", "float32 tn"}
    assert {*device.curves} == {
        "add", "add_", "copy_", "gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward",
        "log_softmax", "addcdiv_", "lerp_",
    }  # fmt: skip
    assert {*device.collectives} == {
        Kind.ALL_GATHER,
        Kind.REDUCE_SCATTER,
        Kind.ALL_REDUCE,
    }
    for curve in (*device.curves.values(), *device.collectives.values()):
        assert [*curve.nbytes] == sorted({*curve.nbytes}) and len(curve.nbytes) == 3
        assert [*curve.seconds] == sorted(curve.seconds) and curve.seconds[0] > 0
        assert curve.seconds[-1] < 1
    assert device.curves["add"].nbytes == (3 << 12, 3 << 16, 3 << 19)  # as ``operation_of`` counts
    assert not device.overlaps and device.kernel == 0.0 and device.host > 0
    assert 1 << 28 < device.capacity <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    assert hardware.network.levels == (Level(0, math.inf, 0.0),)
    assert hardware.network.seconds(Kind.ALL_GATHER, 1 << 20, range(2)) == 0.0


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """As in ``calibrate``: where cores are busy, threads that wait for each other take CPU time, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_operations_that_were_not_measured_take_about_as_long_as_predicted(hardware: Hardware):
    (m, k, n), nbytes = MIX
    a, b, x = torch.randn(m, k), torch.randn(n, k), torch.randn(nbytes // 4)
    predicted = [
        Operation("mm", "", 2.0 * m * k * n, 4 * (m * k + k * n + m * n), torch.float32, layout="nt"),
        Operation("gelu", "", 0.0, 2 * nbytes, torch.float32),
        Operation("mul_", "", 0.0, 2 * nbytes, torch.float32),
    ]
    expected = sum(hardware.device.seconds(item) for item in predicted)
    times = []
    for _ in range(30):
        begun = time.process_time()
        torch.mm(a, b.t())
        F.gelu(x)
        x.mul_(1.0)
        times.append(time.process_time() - begun)
    assert expected / 4 < sorted(times)[len(times) // 2] < expected * 4


# ---- Refusals and failures


def test_a_busy_machine_is_refused():
    """No machine computes without CPU time: where a tenth of that counts as busy, each one is."""
    refusal = r"the machine is busy: computing took \d+\.\d\d times its CPU time"
    with pytest.raises(MisuseRuntimeError, match=refusal):
        calibrate(processes=1, rounds=1, most_busy=0.1, workload=SMALL)


@pytest.mark.parametrize(
    ("sizes", "time_limit", "message"),
    [
        (FailsOnOneRank, 100, r"(?s)^calibrate: failed on ranks \[1\] of 2\n.*Traceback.*ValueError: no sizes here"),
        (EndsOneRank, 100, r"(?s)^calibrate: failed on ranks \[.*1\] of 2\n.*the process exited, signal 9"),
        (StopsOneRank, 15, r"^calibrate: ranks \[0, 1\] of 2 did not finish within"),
    ],
)
def test_what_happens_to_one_rank_ends_all(sizes: type[tuple], time_limit: float, message: str):
    workload, others = replace(SMALL, products=sizes(SMALL.products)), {*multiprocessing.active_children()}
    with pytest.raises(RuntimeError, match=message):
        calibrate(processes=2, rounds=1, workload=workload, time_limit=time_limit)
    assert {*multiprocessing.active_children()} <= others


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "0 processes, 1 threads, 7 rounds: expected at least 1 of each"),
        ({"rounds": 0}, "2 processes, 1 threads, 0 rounds: expected at least 1 of each"),
        ({"node_bandwidth": 0.0}, "a bandwidth between nodes of 0.0 bytes a second: expected a positive number"),
        ({"clock": "sun"}, "clock='sun': expected 'wall' or 'cpu'"),
        ({"clock": "cpu", "threads": 2}, "CPU time: expected a CPU and one thread for each process"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict, message: str):
    with pytest.raises(MisuseError, match=message):
        calibrate(**{"processes": 2, **options})


def test_it_needs_a_process_without_a_process_group():
    with fake_process_group(), pytest.raises(MisuseRuntimeError, match="already has one"):
        calibrate()


# ---- The command


def test_the_command_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """However busy the machine is: CPU time does not count what others do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "Workload", lambda: SMALL)
    monkeypatch.setattr(command_line, "BUSY", 0.1)  # each machine is so busy
    assert command_line.main(["calibrate", "--processes=1", "--rounds=1", "--cpu-time"]) == 0
    out, err = capsys.readouterr()
    assert out == "written: hardware.json\n"
    assert "starting 1 process\n" in err and "measuring\n" in err
    assert hardware_of("hardware.json").calibrated["processes"] == 1
    assert os.listdir() == ["hardware.json"]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--output=nowhere/hardware.json"], 2, "--output nowhere/hardware.json: there is no folder nowhere\n"),
        (["--output=."], 2, "--output .: this is a folder\n"),
        (["--dtypes=fp32,fp5"], 2, "--dtypes fp5: expected one of "),
        (["--processes=0"], 2, "0 processes, 1 threads, 7 rounds: expected at least 1 of each\n"),
    ],
)
def test_the_command_refuses_mistakes(
    options: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["calibrate", *options]) == status
    assert message in capsys.readouterr().err
    assert not os.listdir()


def test_the_command_fails_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    with fake_process_group():
        assert command_line.main(["calibrate", "--quiet"]) == 1
    assert capsys.readouterr().err.endswith("\nnothing was written\n")
    assert not os.listdir()


def test_ctrl_c_leaves_nothing(tmp_path: Path):
    """As in a terminal: all its processes get the signal."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit to ignore it
    program = subprocess.Popen(
        [sys.executable, "-m", "fsdp_compose", "calibrate", "--processes=2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, earlier)
    try:
        assert program.stderr is not None
        lines = iter(program.stderr.readline, "")
        assert "starting 2 processes\n" in lines
        time.sleep(0.5)
        os.killpg(program.pid, signal.SIGINT)
        said = program.communicate(timeout=90)[1]
        assert said.endswith("interrupted (starting 2 processes): nothing was written\n"), said
        assert "Traceback" not in said
        assert program.returncode == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    assert not os.listdir(tmp_path)


# ---- What the times say


def product(key: str, m: int, k: int, n: int, rate: float, bandwidth: float) -> tuple[str, float, float, float]:
    flops, nbytes = 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)
    return key, flops, nbytes, flops / rate + (nbytes / bandwidth if bandwidth else 0.0)


@pytest.mark.parametrize("bandwidth", [3e10, 0.0])
def test_the_fit_finds_the_rates_and_the_bandwidth(bandwidth: float):
    sizes = [(64, 64, 64), (512, 512, 512), (128, 1024, 1024), (1, 1024, 1024)]
    rates = {"float32 nn": 1e11, "float32 nt": 8e10, "float32": 5e10}
    found, bytes_found = fitted_products(
        product(key, *size, rate, bandwidth) for key, rate in rates.items() for size in sizes
    )
    assert found == pytest.approx(rates, rel=1e-6)
    assert bytes_found == pytest.approx(bandwidth, rel=1e-6) or (bandwidth == 0.0 and bytes_found > 1e15)


def test_products_that_get_faster_with_bytes_are_fitted_without_them():
    rows = [("float32", 1e9, 1e6, 0.010), ("float32", 1e9, 4e6, 0.009)]
    rates, bandwidth = fitted_products(rows)
    assert bandwidth == 0.0
    assert 1e9 / 0.010 < rates["float32"] < 1e9 / 0.009


def test_curves_ascend_where_a_larger_size_was_faster():
    found = curves_of([("add", 30, 2.0), ("add", 10, 1.0), ("add", 20, 2.5), ("copy_", 10, 1.0)])
    assert found == {"add": Curve((10, 20, 30), (1.0, 2.5, 2.5)), "copy_": Curve((10,), (1.0,))}


def test_a_machine_is_as_busy_as_half_of_what_computes():
    small = Operation("add", "", 0.0, 1 << 12, torch.float32)
    large = Operation("mm", "", 1e9, 1 << 20, torch.float32)
    samples = [Sample("add", 1.1, 1.0, small), Sample("mm", 3.0, 6.0, large), Sample("all-gather", 9.0, 1.0)]
    assert busy_of(samples, threads=2) == pytest.approx(1.1)  # several threads multiply
    assert busy_of(samples[:1] * 2 + samples[1:], threads=1) == pytest.approx(1.1)


def test_products_beside_all_gathers_are_slower_by_what_they_still_lack_after_them():
    large = Operation("mm", "", 1e12, 1 << 20, torch.bfloat16)
    samples = [Sample("mm", 0.5, 0.0, replace(large, flops=1e9)), Sample("mm", 1.0, 0.0, large)]
    gathers = [
        Sample(Kind.ALL_GATHER, 0.1, 0.0, nbytes=4),
        Sample(Kind.ALL_GATHER, 2.0, 0.0, nbytes=1 << 28),
    ]
    beside = Sample(BESIDE, NUM_PRODUCTS * 1.0 + NUM_GATHERS * 2.0 * (1 - 1 / 1.25), 0.0)
    assert fitted_beside([*samples, *gathers, beside]) == pytest.approx(1.25)
    assert fitted_beside([*samples, *gathers, replace(beside, wall=1.0)]) == 1.0  # never faster
    assert fitted_beside(samples) == 1.0


def test_the_network_of_gpus_is_fitted_to_all_gathers():
    def gather(nbytes: int) -> Sample:
        return Sample(Kind.ALL_GATHER, 1e-5 + nbytes * 0.75 / 1e11, 0.0, nbytes=nbytes)

    network = fitted_network([gather(4), gather(1 << 28)], "wall", True, 4, 2e11)
    assert network.levels[0].ranks == 4 and network.levels[0].bandwidth == pytest.approx(1e11)
    assert network.levels[1] == Level(0, 5e10, 5e-6)  # a fourth of the node's
    assert network.seconds(Kind.ALL_GATHER, 1 << 20, range(4)) == pytest.approx(gather(1 << 20).wall, rel=1e-3)
