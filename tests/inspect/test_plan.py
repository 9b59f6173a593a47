"""``plan()`` and ``python -m fsdp_compose plan``: the facts agree with what is sharded and with arithmetic, nothing is
left behind, and what users get wrong is said in a line. (That its peaks are those of real runs:
``tests/whole/test_plan_measured.py``.)"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MisuseError, MixedPrecisionPolicy, Plan, fully_shard, plan, set_replicas
from fsdp_compose.__main__ import main
from tests.harness import ROOT, fake_process_group

SGD = partial(torch.optim.SGD, lr=0.1)
WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, width: int = WIDTH, tie: bool = False, checkpoints: bool = False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, width), nn.Linear(width, 128, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.checkpoints = checkpoints
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def parameter_bytes(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def advice_of(found: Plan) -> dict[str, str]:
    return {item.about: item.text for item in found.worlds[0].advice}


# ---- the facts


def test_shards_gradients_and_optimizer_state_get_smaller_with_the_ranks():
    for world in plan(Net, [1, 2, 8], batch=2, seq=16).worlds:
        share = parameter_bytes(Net()) / world.world_size
        (optimizer,) = [moment for moment in world.moments if moment.doing == "optimizer"]
        kept = {kind: optimizer.bytes_by_kind[kind] for kind in ("parameters", "gradients")}
        assert kept == {"parameters": world.layout.kept_bytes, "gradients": world.layout.kept_bytes}
        assert share <= world.layout.kept_bytes <= 1.02 * share
        assert 2 * share <= optimizer.bytes_by_kind["optimizer"] <= 2 * 1.02 * share + 1024, "and step counts"


def test_the_collectives_of_a_step_are_those_of_the_groups():
    (world,) = plan(Net, 4, batch=2, seq=16).worlds
    gathers = [item for item in world.collectives if item.kind == "all-gather"]
    scatters = [item for item in world.collectives if item.kind == "reduce-scatter"]
    blocks = [f"blocks.{i}" for i in range(4)]
    assert [item.group for item in gathers] == ["(root)", *blocks, *reversed(blocks)]
    assert [item.group for item in scatters] == [*reversed(blocks), "(root)"]
    assert {item.num_ranks for item in world.collectives} == {4}
    flat_bytes = {group.name: group.flat_parameters[0].flat_bytes for group in world.layout.groups}
    assert all(item.nbytes == flat_bytes[item.group] for item in world.collectives)
    assert gathers[0].sent_bytes == gathers[0].nbytes * 3 // 4


class Normed(nn.Module):
    def __init__(self, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(make_norm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_rms_norms_keep_their_input_alone_as_on_accelerators():
    def peak(make_norm: Callable[[int], nn.Module]) -> int:
        rows = torch.empty(1 << 14, WIDTH)
        found = plan(lambda: (Normed(make_norm), lambda model: model(rows).square().mean()), 4, optimizer=None)
        return found.worlds[0].moments[-2].nbytes

    layer_norm = peak(partial(nn.LayerNorm, bias=False))
    assert peak(nn.RMSNorm) == pytest.approx(layer_norm, rel=0.01)
    assert layer_norm < 0.8 * peak(RmsOfParts)


def test_another_thread_computes_norms_while_a_plan_is_made():
    rows = torch.randn(1 << 14, WIDTH)
    expected, found = nn.functional.rms_norm(rows, (WIDTH,)), []

    def loss_of(model: nn.Module) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.append(nn.functional.rms_norm(rows, (WIDTH,))))
        thread.start()
        thread.join()
        return model(torch.empty(4, WIDTH)).mean()

    plan(lambda: (Normed(nn.RMSNorm), loss_of), 2, optimizer=None)
    assert found and all(torch.equal(item, expected) for item in found)


class RmsOfParts(nn.RMSNorm):
    """Made of several operations, as on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_a_machine_with_an_accelerator_makes_no_difference(monkeypatch):
    expected = plan(Net, 4, batch=2, seq=16)

    def current_accelerator(**_: bool) -> torch.device | None:
        is_ours = sys._getframe(1).f_globals["__name__"].startswith("fsdp_compose")
        return torch.device("cuda") if is_ours else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    found = plan(Net, 4, batch=2, seq=16)
    assert found.worlds[0].moments == expected.worlds[0].moments
    assert found.worlds[0].collectives == expected.worlds[0].collectives


def test_activations_are_those_that_backward_needs():
    def of_one_linear() -> tuple[nn.Module, partial]:
        x = torch.zeros(1024, WIDTH)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Sigmoid()), lambda model: model(x).sum()

    (world,) = plan(of_one_linear, 2, optimizer=SGD).worlds
    forward = world.moments[0]
    # What the linear layer returns, which is there until the sigmoid has been computed, and what that returns.
    assert forward.bytes_by_kind["activations"] == 2 * 1024 * WIDTH * 4
    assert 0 <= forward.bytes_by_kind["other"] - 1024 * WIDTH * 4 < 64, "x, and a few numbers"


def test_checkpointing_is_noticed_and_takes_less():
    whole = plan(Net, 2, batch=64, seq=32).worlds[0]
    repeated = plan(partial(Net, checkpoints=True), 2, batch=64, seq=32).worlds[0]
    assert (whole.recomputes, repeated.recomputes) == (False, True)
    assert repeated.peak.nbytes < 0.8 * whole.peak.nbytes
    assert "activations" in {item.about for item in whole.advice} - {item.about for item in repeated.advice}


def test_low_precision_is_gathered_and_reduced_as_asked():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    full, half = (plan(Net, 2, batch=2, seq=16, mp_policy=item).worlds[0] for item in (None, policy))
    for kind, ratio in (("all-gather", 2), ("reduce-scatter", 1)):
        sizes = [sum(item.nbytes for item in world.collectives if item.kind == kind) for world in (full, half)]
        assert sizes[0] == ratio * sizes[1]
    assert full.layout.kept_bytes == half.layout.kept_bytes


def test_hybrid_sharding_reduces_over_replicas():
    worlds = plan(Net, [8, 16], mesh="*x4", batch=2, seq=16).worlds
    for world in worlds:
        assert {group.mesh_shape for group in world.layout.groups} == {(world.world_size // 4, 4)}
        ranks = {item.kind: item.num_ranks for item in world.collectives}
        assert ranks == {"all-gather": 4, "reduce-scatter": 4, "all-reduce": world.world_size // 4}
    assert worlds[0].layout.kept_bytes == worlds[1].layout.kept_bytes


def test_a_model_may_come_sharded_with_its_own_mesh():
    def sharded() -> nn.Module:
        model = Net()
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    (world,) = plan(sharded, 4, batch=2, seq=16).worlds
    assert [group.name for group in world.layout.groups] == ["(root)", "blocks.0, blocks.1"]
    with pytest.raises(ValueError, match="mesh: the factory returns an already sharded model"):
        plan(sharded, 4, mesh="2x2", batch=2, seq=16)


def test_a_model_on_the_meta_device_is_planned_alike():
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Net()

    built, meta = (plan(factory, 4, batch=2, seq=16).worlds[0] for factory in (Net, on_meta))
    assert built.moments == meta.moments and built.collectives == meta.collectives
    assert meta.building.nbytes < built.building.nbytes, "shards alone"


class Positions(Net):
    """Has buffers, as transformers has: of positions, in no state dict, and a flag that decides how forward goes on."""

    def __init__(self, flag_device: str | None = None, frequency_device: str | None = None):
        super().__init__()
        self.register_buffer("frequencies", torch.ones(WIDTH, device=frequency_device), persistent=False)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=True)
        self.register_buffer("num_used", torch.tensor(2, device=flag_device), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.frequencies.cos() * self.scale
        for block in self.blocks[: int(self.num_used)]:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("frequency_device", [None, "cpu"])
@pytest.mark.parametrize("shards_itself", [False, True])
def test_buffers_of_a_model_on_the_meta_device(frequency_device, shards_itself):
    """Buffers on the meta device need no values. Buffers built on the CPU keep theirs: forward may depend on them."""

    def made(is_on_meta: bool) -> nn.Module:
        with torch.device("meta" if is_on_meta else "cpu"):
            model = Positions(flag_device="cpu", frequency_device=frequency_device)
        if shards_itself:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        return model

    built, meta = (plan(partial(made, is_on_meta), 4, batch=2, seq=16).worlds[0] for is_on_meta in (False, True))
    assert built.moments == meta.moments and built.collectives == meta.collectives
    with torch.device("meta"):
        meta_model = Positions()
    with pytest.raises(RuntimeError, match="data-dependent|depends on"):  # on a value that nobody knows
        plan(lambda: meta_model, 4, batch=2, seq=16)


def test_without_an_optimizer_there_is_no_state():
    found = plan(Net, 2, batch=2, seq=16, optimizer=None)
    assert {moment.bytes_by_kind["optimizer"] for moment in found.worlds[0].moments} == {0}
    assert "no optimizer" in found.text()


def test_a_tensor_for_which_the_machine_has_no_addresses_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"no address space .* you tried to allocate \d+ bytes.*overcommit_memory=1"):
        plan(lambda: nn.Linear(1 << 24, 1 << 24, device="meta"), batch=1, seq=1)  # a petabyte
    assert not dist.is_initialized()


def test_no_memory_is_taken_and_nothing_is_computed():
    """Parameters of 26 GB, and activations of more, in a process that may not have them."""

    def large() -> nn.Module:
        return Net(width=16384)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (world,) = plan(large, 64, batch=8, seq=4096).worlds
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert world.building.nbytes > 30e9 and world.peak.nbytes > 10e9
    assert taken < 0.5e9, f"{taken:,} bytes"


class Pieces(nn.Module):
    """Two large modules of pieces that run one after another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(*[Block(WIDTH) for _ in range(4)]) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)
        for part in self.parts:
            for piece in part if how != "one group each" else ():
                fully_shard(piece)
            if how != "pieces alone":
                fully_shard(part)  # has parameters only if the pieces have not taken them
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.parts[1](self.parts[0](x)))


def exposed(how: str) -> tuple[int, list[str]]:
    def loss_of(model: nn.Module) -> torch.Tensor:
        return model(torch.zeros(2, WIDTH)).sum()

    (world,) = plan(lambda: (Pieces(how), loss_of), 8, optimizer=None).worlds
    return world.exposed[1], [f"{item.kind} {item.group}" for item in world.collectives if item.is_exposed]


def test_a_large_group_in_pieces_overlaps_itself():
    whole, names = exposed("one group each")
    assert names == ["all-gather (root)", "all-gather parts.0", "reduce-scatter parts.0", "reduce-scatter (root)"]
    for how in ("pieces alone", "pieces in groups without parameters of their own"):
        pieces, names = exposed(how)
        # Only the first gather and the last reductions have nothing beside them.
        first, last = "all-gather parts.0.0", "reduce-scatter parts.0.0"
        assert names == ["all-gather (root)", first, last, "reduce-scatter (root)"]
        assert pieces < 0.26 * whole


LIMITS = ("1 group", "2 groups", "3 groups", 1 << 30)


def test_limits_are_compared():
    (world,) = plan(Net, 8, batch=1, seq=4, optimizer=None, limits=LIMITS).worlds
    peaks = [item.peak.nbytes for item in world.limited]
    counts = [item.num_exposed for item in world.limited]
    assert [item.limit for item in world.limited] == [*LIMITS]
    assert peaks[0] < peaks[1] < peaks[2] <= peaks[3] == world.peak.nbytes
    assert counts[0] > counts[1] > counts[2] >= counts[3] == world.exposed[0] >= 3
    text = plan(Net, 8, batch=1, seq=4, optimizer=None, limits=["1 group"]).text()
    assert re.search(r"peak memory with limit_unsharded_bytes\n.*ranks +limit +peak +in +exposed", text)
    with pytest.raises(MisuseError, match="expected a positive number of bytes.*, or of groups"):
        plan(Net, 8, batch=1, seq=4, limits=["1 block"])


def test_other_steps_than_the_last_are_no_larger():
    """What a plan counts is how it goes on."""
    from fsdp_compose.inspect import simulated_step as step

    found = []
    for num_steps in (2, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "NUM_STEPS", num_steps)
            found.append(plan(Net, 4, batch=2, seq=16).worlds[0])
    assert found[0].moments == found[1].moments and found[0].collectives == found[1].collectives


# ---- advice


def test_small_shards_are_to_be_merged_or_replicated():
    def blocks(width: int) -> nn.Module:
        return Net(width=width)

    small = advice_of(plan(partial(blocks, 256), 64, batch=2, seq=16))["small shards"]
    assert "5 of 5 groups gather less than 1 MiB from each rank" in small
    assert re.search(r"shard over 2 ranks and replicate \(--mesh \*x2\)", small)
    merged = advice_of(plan(partial(blocks, 256), 4, batch=2, seq=16))["small shards"]
    assert "Make one group of 2 adjacent modules" in merged
    assert "small shards" not in advice_of(plan(partial(blocks, 512), 2, batch=2, seq=16))


def test_one_large_group_is_named():
    large = advice_of(plan(partial(Net, width=512), 2, wrap=[], batch=2, seq=16))["one large group"]
    assert "(root) has 100% of the parameters" in large
    assert "one large group" not in advice_of(plan(partial(Net, width=512), 2, batch=2, seq=16))


def test_tied_weights_are_named():
    tied = advice_of(plan(partial(Net, tie=True), 2, batch=2, seq=16))["tied"]
    assert "embedding.weight = head.weight is one parameter of the group (root)" in tied


def test_a_dimension_that_would_do_better_replicated_is_named():
    assert "replicate()" in advice_of(plan(Net, 8, batch=64, seq=128))["replicate"]
    assert "replicate" not in advice_of(plan(partial(Net, width=512), 8, batch=1, seq=16))


# ---- errors of the model and of the factory


def test_what_depends_on_elements_is_refused_with_the_line():
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y[y > 0]

    def routed() -> tuple[nn.Module, partial]:
        return Routed(), lambda model: model(torch.zeros(4, 512)).sum()

    with pytest.raises(RuntimeError, match="needs elements of a tensor that a dry run does not compute"):
        plan(routed, 2)


def test_known_elements_decide():
    def masked() -> tuple[nn.Module, partial]:
        def loss_of(model: nn.Module) -> torch.Tensor:
            lengths = torch.tensor([3, 5])
            mask = torch.arange(8) < lengths[:, None]
            assert mask.sum().item() == 8
            return model(torch.zeros(2, 8, WIDTH))[mask].sum()

        return nn.Linear(WIDTH, WIDTH), loss_of

    assert plan(masked, 2, optimizer=SGD).worlds[0].collectives


@pytest.mark.parametrize(
    "returned, error, text",
    [
        (None, TypeError, "the factory must return a model, or .* got None"),
        ((1, 2, 3), TypeError, "got a tuple of int, int, int"),
        (nn.Linear(2, 2), ValueError, "give --batch and --seq"),
        ((nn.Linear(2, 2), lambda model: 1.5), ValueError, "the loss must be a tensor of one element.* got 1.5"),
        ((nn.Linear(2, 2), lambda model: model(torch.ones(2))), ValueError, r"got torch.float32 of shape \(2,\)"),
    ],
)
def test_what_a_factory_must_return_is_said(returned: object, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        plan(lambda: returned, 2)
    assert not dist.is_initialized()


def test_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="the factory returns a loss function, which makes its own batch"):
        plan(lambda: (nn.Linear(2, 2), lambda model: model(torch.ones(2)).sum()), 2, batch=1, seq=2)
    with pytest.raises(ValueError, match=r"expected both"):
        plan(Net, 2, batch=1)
    with pytest.raises(ValueError, match="expected one or more numbers of ranks"):
        plan(Net, [], batch=1, seq=1)
    with pytest.raises(ValueError, match="no module is a Blok; classes with submodules are Block, ModuleList, Net"):
        plan(Net, 2, wrap=["Blok"], batch=1, seq=1)
    with fake_process_group(), pytest.raises(RuntimeError, match="this process already has one"):
        plan(Net, 2, batch=1, seq=1)


def test_nothing_is_left_behind_by_an_error():
    hook = sys.excepthook
    with pytest.raises(ZeroDivisionError):
        plan(lambda: (Net(), lambda model: model(torch.zeros(1, 2, dtype=torch.int64)).sum() / (1 // 0)), 2)
    assert not dist.is_initialized() and sys.excepthook is hook
    assert not {"resize_", "_swap_data_ptr_"} & vars(torch.UntypedStorage).keys()
    assert (torch.ones(2) + 1).tolist() == [2, 2], "operations are done again"


# ---- the documentation


def test_the_example_in_the_documentation_prints_what_is_below_it():
    page = (ROOT / "docs" / "planning.md").read_text()
    (code, text), *_ = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "planning.md", "exec"), {"__name__": "__main__"})
    assert output.getvalue() == text


# ---- the command

FACTORIES = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=32, tie=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, width), nn.Linear(width, 128, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def net(width=32, tie=False):
    return Net(width, tie)

def broken():
    raise KeyError("no such config")

def slow():
    print("at it", flush=True)
    time.sleep(60)

value = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


def command(*arguments: object) -> tuple[int, str, str]:
    """The exit status, and what was said on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["plan", *map(str, arguments)])
        except SystemExit as error:
            status = error.code
    return status, out.getvalue(), err.getvalue()


def test_the_command_prints_tables_and_progress(file: Path):
    status, out, err = command(
        "--model", f"{file}:net", "--set", "tie=True", "--world-size", "2,8", "--batch=2", "--seq=8"
    )
    assert status == 0, err
    assert out.startswith("Net: 7 parameters of 7,264 elements, 4 groups; AdamW; 2 x 8 tokens on each rank\n")
    rows = [line.split()[0] for line in out.partition("advice")[0].splitlines() if re.match(r" +[28] ", line)]
    assert rows == ["2", "8"] * 3, "memory, collectives, layout"
    assert "embedding.weight = head.weight" in out.partition("advice")[2]
    assert err.splitlines()[:3] == [
        f"importing {file}:net",
        "2 ranks: building",
        "2 ranks: step 1 of 2: forward",
    ]


def test_the_command_prints_all_facts_as_json(file: Path):
    options = (
        "--world-size 4 --mesh 2x2 --dtype bf16 --reduce-dtype fp32 --batch 2 --seq 8 --optimizer none --json --quiet"
    )
    status, out, err = command("--model", f"{file}:net", *options.split())
    assert (status, err) == (0, "")
    (world,) = json.loads(out)["worlds"]
    assert world["peak"]["nbytes"] == max(moment["nbytes"] for moment in world["moments"])
    assert all(sum(moment["bytes_by_kind"].values()) == moment["nbytes"] for moment in world["moments"])
    assert world["layout"]["groups"][0]["policy"]["param_dtype"] == "bfloat16"
    assert {item["kind"] for item in world["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_the_command_plans_muon(file: Path):
    options = "--world-size 2,4 --batch 2 --seq 8 --optimizer Muon --quiet"
    status, out, err = command("--model", f"{file}:net", *options.split())
    assert (status, err) == (0, "")
    assert " muon; 2 x 8 tokens" in out and "all-to-alls" in out
    assert re.search(r"\b2 ranks: Muon: \d+ matrices on 2 rank", out) and "matrices on 4 rank(s)" in out


def test_a_module_is_found_in_the_current_folder(file: Path):
    arguments = ["--model", "factories:net", "--batch=2", "--seq=8", "--quiet"]
    run = [sys.executable, "-m", "fsdp_compose", "plan", *arguments]
    done = subprocess.run(
        run, cwd=file.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=110
    )
    assert done.returncode == 0 and done.stdout.startswith(b"Net: "), done.stderr.decode()


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--model nowhere_to_be_found:net", "there is no module nowhere_to_be_found on Python's path"),
        ("--model {file}", "expected module:factory"),
        ("--model {file}.py:net", "there is no file"),
        ("--model {file}:nett", "nett does not exist in .*; it has net, broken, slow"),
        ("--model {file}:value", "value is not a function"),
        ("--model {file}:net --world-size 8,many", "--world-size 8,many: expected numbers of ranks"),
        ("--model {file}:net --world-size 0", "--world-size 0: expected numbers of ranks"),
        ("--model {file}:net --dtype int8", "--dtype int8: expected one of fp32, float32"),
        ("--model {file}:net --optimizer Adamm", "--optimizer Adamm: expected none, muon, or a class of torch.optim"),
        ("--model {file}:net --set width", "--set width: expected name=value"),
        ("--model {file}:net --plot plan.gif", "--plot plan.gif: expected a name that ends in .png, .svg, .pdf"),
        ("--model {file}:net --plot no/such/plan.png", "there is no folder no/such"),
    ],
)
def test_a_wrong_option_is_said_in_a_line(file: Path, arguments: str, said: str):
    status, out, err = command(*arguments.format(file=file).split(), "--quiet")
    assert (status, out) == (2, "")
    assert re.search(said, err) and "Traceback" not in err, err


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--model {file}:broken", r"8 ranks: building: KeyError: 'no such config'\n  at .*s.py, line \d+, in broken"),
        ("--model {file}:net --set depth=3", "TypeError: net.. got an unexpected keyword argument 'depth'"),
        ("--model {file}:net", "give --batch and --seq"),
        ("--model {file}:net --mesh 2x3 --batch 2 --seq 8", "--mesh 2x3: needs 6 ranks, but --world-size is 8"),
        ("--model {file}:net --mesh *x3 --batch 2 --seq 8", "--mesh .x3: needs a multiple of 3 ranks"),
        ("--model {file}:net --mesh 2x2x2 --batch 2 --seq 8", "expected the number of shards, or RxS"),
        ("--model {file}:net --strategy zero9 --batch 2 --seq 8", "zero9"),
        ("--model {file}:net --wrap Layer --batch 2 --seq 8", "no module is a Layer"),
    ],
)  # fmt: skip
def test_what_fails_later_is_said_with_where(file: Path, arguments: str, said: str):
    status, out, err = command(*arguments.format(file=file).split(), "--quiet")
    assert (status, out) == (1, "")
    assert re.search(said, err) and "Traceback" not in err, err
    assert not dist.is_initialized()


def test_ctrl_c_leaves_nothing_behind(file: Path):
    run = [
        sys.executable,
        "-m",
        "fsdp_compose",
        "plan",
        "--model",
        f"{file}:slow",
        "--plot",
        str(file.parent / "plan.png"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    before = sorted(file.parent.iterdir())
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit to ignore it
    try:
        process = subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, earlier)
    try:
        assert process.stdout is not None and process.stdout.readline() == "at it\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted (8 ranks: building): nothing was written" and "Traceback" not in err
    assert sorted(file.parent.iterdir()) == before


def test_the_picture_is_written_whole(file: Path, tmp_path: Path):
    path = tmp_path / "plan.svg"
    status, _, err = command("--model", f"{file}:net", "--world-size=2,8", "--batch=2", "--seq=8", "--plot", path)
    assert status == 0, err
    assert sorted(tmp_path.glob("*.*")) == sorted([file, path])
    assert path.read_text().count("<!-- activations -->") == 1


def test_without_matplotlib_a_picture_is_refused_before_the_work(file: Path, monkeypatch: pytest.MonkeyPatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    status, out, err = command("--model", f"{file}:net", "--plot", "plan.png", "--quiet")
    assert (status, out) == (2, "")
    assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in err


def test_a_plan_refuses_replica_groups_whose_number_it_cannot_know():
    class Groups:
        def average(self, tensor: torch.Tensor) -> Any:
            raise AssertionError

        def maximum(self, tensor: torch.Tensor) -> bool:
            raise AssertionError

    def factory() -> nn.Module:
        model = fully_shard(Net())
        set_replicas(model, Groups())
        return model

    with pytest.raises(MisuseError, match="replica groups.*plan one group's job"):
        plan(factory, 2, batch=2, seq=16)
