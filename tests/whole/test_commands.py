"""Every command that README.md, docs/ and the heads of the examples name runs, and every option of the examples, on 2
and on 4 processes. What does not run here is in a table, with its reason."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_compose import __main__ as command_line
from fsdp_compose.strategies import STRATEGIES
from tests import harness
from tests.harness import ROOT
from tests.whole import pages

EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "benchmarks"
SIZES = (2, 4)  # processes
for module in ("tqdm", "matplotlib.pyplot", "transformers", "peft", "accelerate"):
    harness.preload(module)


# ---- The examples

GPT = (
    "--steps=4 --log-every=1 --val-every=4 --val-batches=1 --batch=4 --seq-len=16 --dim=16 --layers=2 --heads=2 "
    "--sample-bytes=4 --data=text.txt --out=out"
)
LLAMA = "--steps=4 --log-every=1 --layers=2 --dim=32 --batch=8 --seq-len=16 --lr=1e-2 --out=out --heads=4 --device=cpu"
PROGRAMS = {  # example: for each run its options, where {2|4} is "2" on 2 processes and "4" on 4
    "train_gpt.py": [
        *(
            f"{GPT} --strategy={name}" + (" --mesh={1x2|2x2}" if row.num_dims == 2 else "")
            for name, row in STRATEGIES.items()
        ),
        f"{GPT} --no-tie --checkpoint-activations --bf16 --seed=1 --lr=1e-3 --temperature=1 --prompt=class",
        f"{GPT} --tie --compile --max-bytes=2000 --layers=1",
        f"{GPT} --save-every=2 --resume=auto",  # there is nothing yet
        f"{GPT} --save-every=2 --resume --steps=5 --save-async --keep=1",  # from the run before
    ],
    "hf_llama.py": [f"{LLAMA} --tie", f"{LLAMA} --no-tie --vocabulary=32 --seed=1"],
    "lora.py": [f"{LLAMA} --rank=4"],
    "accelerate_trainer.py": [LLAMA],
    "pipeline.py": [
        "--steps=2 --schedule=GPipe --stages=2",
        "--steps=2 --schedule=1F1B --stages={2|4} --microbatches=4 --batch=16 --max-norm=0.5 --seed=1",
        *(f"--steps=2 --schedule={name}" for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")),
    ],
    "tensor_parallel.py": ["--steps=2 --mesh={1x2|2x2} --batch=8 --seed=1", "--steps=2 --mesh={2x1|1x2x2}"],
    "adam_8bit.py": ["--steps=11"],
    "muon.py": [
        "--steps=4 --val-every=2 --batch=4 --seq-len=16 --dim=16 --layers=2 --heads=2 --lr=1e-3 --muon-lr=1e-2 "
        "--seed=1 --data=text.txt"
    ],
    "vision_language.py": [
        "--steps=2 --system=ours --seed=1 --batch=12 --seq-len=16 --dim=32 --layers=1 --lr=1e-3 --timeout=60"
    ],
}
OF_HF_LLAMA = ("lora.py", "accelerate_trainer.py")  # their models and common options are those of hf_llama.py
ELSEWHERE = {  # options and choices of examples that do not run here
    "--device=cuda": "needs a GPU for each process",
    "--system=fsdp2": "FSDP2 fails: test_vision_language_example.py",
    "--base": "needs a model that hf_llama.py has saved: test_hf_examples.py",
    "--help": "argparse's",
}


def on(processes: int, options: str) -> list[str]:
    return shlex.split(re.sub(r"\{(.*?)\|(.*?)\}", r"\1" if processes == 2 else r"\2", options))


def run(folder: Path, processes: int, script: Path, *options: str) -> str:
    """What a program says that torchrun runs to its end in ``folder``."""
    command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}"]
    command += ["--run-path", "--start-method=fork", str(script), *options]
    ((code, said),) = harness.run_forked(1, folder, in_folder, str(folder), command, f"{ROOT}:{EXAMPLES}", timeout=200)
    assert code == 0, f"{script.name} {' '.join(options)}, {processes} processes\n{said[-3000:]}"
    return said


def in_folder(_rank: int, folder: str, command: list[str], path: str) -> None:
    os.chdir(folder)
    os.environ.update(PYTHONPATH=path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", OMP_NUM_THREADS="1")
    sys.path[:0] = path.split(":")
    torch.distributed.run.main(command)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", PROGRAMS)
def test_an_example_trains_alike_on_two_and_four_processes_with_each_option(tmp_path: Path, example: str):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 50)
    losses: dict[str, list[float]] = {}
    for number, options in enumerate(PROGRAMS[example]):
        for processes in SIZES:
            out = tmp_path / f"out-{processes}" / (str(number) if "--save-every" not in options else "saved")
            out.parent.mkdir(exist_ok=True)
            arguments = [f"--out={out}" if item == "--out=out" else item for item in on(processes, options)]
            said = run(tmp_path, processes, EXAMPLES / example, *arguments)
            if example == "train_gpt.py":
                found = [entry["loss"] for entry in json.loads((out / "log.json").read_text())["log"]]
            else:
                found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
            assert len(found) >= 2, said[-3000:]
            first = losses.setdefault(options, found)
            assert found == pytest.approx(first, abs=3e-2 if "bf16" in options else 2e-3), (options, processes)
    if example == "train_gpt.py":
        same = [found for options, found in losses.items() if "strategy" in options or options.endswith("=auto")]
        assert len(same) == len(STRATEGIES) + 1
        assert all(found == pytest.approx(same[0], abs=1e-4) for found in same)


def parser_of(script: Path, arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of a program, after it has parsed ``arguments``; the program ends there."""
    parse, found = argparse.ArgumentParser.parse_args, []

    class Parsed(BaseException):
        pass

    def parse_args(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        found.append(parser)
        if arguments:
            parse(parser, [*arguments])
        raise Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        pytest.raises(Parsed),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return found[0]


def test_every_option_and_choice_of_the_examples_runs():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    # a module for the command `plan`, and a program that needs torchft: tests_integration/test_elastic.py runs it
    assert scripts - PROGRAMS.keys() == {"plan_models.py", "elastic.py"}
    for example, programs in PROGRAMS.items():
        if example in OF_HF_LLAMA:
            programs = [*programs, *PROGRAMS["hf_llama.py"]]
        for processes in SIZES:
            used = {item for options in programs for item in on(processes, options) if item.startswith("--")}
            used |= {item.partition("=")[0] for item in used}
            for action in parser_of(EXAMPLES / example)._actions:
                names = {name for name in action.option_strings if name.startswith("--")}
                if not isinstance(action, argparse.BooleanOptionalAction):
                    names = {f"{name}={choice}" for name in names for choice in action.choices or ()} or names
                missing = names - used - ELSEWHERE.keys()
                assert not missing, f"{example}: no run on {processes} processes with {missing}"


# ---- The commands that pages and the heads of examples name


def commands_of(text: str) -> Iterator[str]:
    """Commands in blocks of shell, after a `$`, and alone on an indented line."""
    text = text.replace("\\\n", " ")
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from (line for line in block.splitlines() if not line.startswith("#"))
    yield from re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    yield from re.findall(r"^ {4}((?:[A-Z_]+=\S+ )*(?:torchrun|python) .*)$", text, re.MULTILINE)
    for inline in re.findall(r"(?<!`)`([^`]+)`", text):
        if re.match(
            r"(\S+=\S+ )?(\S*/)?(torchrun .*\.py|python .*\.py|python -m fsdp_compose plan .)", inline, re.DOTALL
        ):
            yield inline


def documented() -> dict[str, str]:
    """The commands, and where each is."""
    places = [*pages.all_pages(), *EXAMPLES.glob("*.py")]
    found: dict[str, str] = {}
    for path in places:
        if path.parent != ROOT / "docs/reference" and path.name != "changelog.md":
            for command in commands_of(path.read_text()):
                plain = " ".join(command.partition(" #")[0].replace(".venv/bin/", "").split())
                if plain:
                    found.setdefault(plain, str(path.relative_to(ROOT)))
    return found


INSTALLS, NODES = "installs packages: `make wheel` does", "needs several machines or eight GPUs"
REASONS = {  # commands that do not run here
    r"git clone .*": "needs a network",
    r"pip .*": INSTALLS,
    r"make demo": f"{INSTALLS}; then it runs examples/train_gpt.py",
    r"make test": "tests/, by itself",
    r"make faults.*": "an hour; test_faults.py runs the quick form",
    r"PYTHONPATH=. \S+/python -m benchmarks.faults .*": "needs torchft: tests_integration/test_elastic.py",
    r"torchrun --nnodes 2 .*": NODES,
    r"torchrun --standalone --nproc_per_node 8 train.py": NODES,
    r"(export|head_node=|srun) ?.*": NODES,
    r"torchrun .* -m torchtitan.train .*": f"{NODES}; `make test-titan` runs its trainer on two processes",
    r"torchrun .* -m fsdp_compose.integrations.llamafactory .*": "tests_integration/ runs it, on two processes",
    r"python -m fsdp_compose plan --model module:factory .*": "a placeholder",
    r"python -m fsdp_compose calibrate .*": "a minute; tests/tuning/test_calibration.py runs one round",
    r"python -m tests.tools.torch_tests .*": "needs a checkout of torch: test_torch_tests.py has a file of its own",
    r"python -m fsdp_compose hang LOGS...": "needs logs of a run that hangs: test_hang.py",
    r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun .*--max-restarts 3 .*": "test_train_gpt.py, with a crash",
    r"torchft_lighthouse .*": "needs torchft: tests_integration/test_elastic.py starts one",
    r"TORCHFT_LIGHTHOUSE=\S+ .*examples/elastic.py --group \d": "needs torchft: tests_integration/test_elastic.py",
    r"OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 step.py": "test_documentation.py runs that program",
    r"python -c .import fsdp_compose; .*": "any test imports it",
}


def test_every_documented_command_runs_or_has_a_reason():
    runs = [run for run, _ in RUNS]
    commands = documented()
    assert len(commands) > 50
    missing = {
        command: place
        for command, place in commands.items()
        if not any(re.fullmatch(pattern, command) for pattern in (*runs, *REASONS))
    }
    assert not missing, f"give a run or a reason to {missing}"
    stale = [pattern for pattern in (*runs, *REASONS) if not any(re.fullmatch(pattern, item) for item in commands)]
    assert not stale, f"no page has a command like {stale}"


def parses(command: str, tmp_path: Path) -> None:
    """Check the options of an example, which PROGRAMS runs smaller, or of a benchmark."""
    words = shlex.split(command)
    script = next(ROOT / word for word in words if word.endswith(".py"))
    options = words[words.index(str(script.relative_to(ROOT))) + 1 :]
    options = ["2" if option in ("N", "...") else option for option in options if option != "..."]
    assert script.name in PROGRAMS or script.name in (ROOT / "tests/whole/test_benchmarks.py").read_text(), script
    if options:
        parser_of(script, options)


def runs_train_py(command: str, tmp_path: Path) -> None:
    """Run the file that the page puts together, with as many processes as its blocks are for, and with four."""
    place = ROOT / documented()[command]
    section = next(section for section in pages.read(place).sections if section.ranks == 2)
    (tmp_path / "train.py").write_text("\n".join(block.code for block in (*section.setup, *section.blocks[:1])))
    for processes in SIZES:
        run(tmp_path, processes, tmp_path / "train.py")


def plans(command: str, tmp_path: Path) -> None:
    arguments = shlex.split(command)[3:]
    ((code, said),) = harness.run_forked(1, tmp_path, run_plan, str(tmp_path), arguments, timeout=120)
    assert code == 0, said
    assert "ranks" in said and "MiB" in said
    place = ROOT / documented()[command]
    _, _, below = re.sub(r" \\\n +", " ", place.read_text()).partition(f"{command}\n```\n")
    for part in (text_block(below) or "").split("...\n"):
        assert part in f"{said}\n", f"{place}: {command} prints no such figures:\n{part}\nbut\n{said}"
    for i, option in enumerate(arguments):
        assert option != "--plot" or (tmp_path / arguments[i + 1]).stat().st_size > 1000


def text_block(below: str) -> str | None:
    """The next block of text, if no other block comes first."""
    found = re.search(r"^```(\w+)\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)
    return found[2] if found and found[1] == "text" else None


def run_plan(_rank: int, folder: str, arguments: list[str]) -> None:
    os.chdir(folder)
    (Path(folder) / "examples").symlink_to(EXAMPLES)
    sys.exit(command_line.main(arguments))


RUNS: list[tuple[str, Callable[[str, Path], None]]] = [
    (r"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 train.py", runs_train_py),
    (r"python -m fsdp_compose plan (--tune )?--model examples/.*", plans),
    (r"torchrun --standalone --nproc_per_node \d examples/\S+\.py.*", parses),
    (r"python benchmarks/\S+\.py.*", parses),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command", [item for item in documented() if any(re.fullmatch(pattern, item) for pattern, _ in RUNS)]
)
def test_a_documented_command_runs(tmp_path: Path, command: str):
    next(function for pattern, function in RUNS if re.fullmatch(pattern, command))(command, tmp_path)
