"""``python -m fsdp_compose COMMAND``: tools that need no running job."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from ._arguments import size_of
from .extension import MixedPrecisionPolicy, bytes_of_limit
from .inspect import Plan, check_picture, dtype_of, explain_logs, load_factory, plan, world_sizes_of
from .optim import Muon, muon_groups
from .tuning import BUSY, Tuning, calibrate, hardware_of, tune, write_hardware

# ---- ``python -m fsdp_compose plan``: the arguments of ``plan()`` as options, with progress and errors on stderr.


_OF_TUNE = ("hardware", "software", "measured", "write", "node-bandwidth", "node-size", "max-memory", "compiled")
USAGE, FAILURE, INTERRUPTED = 2, 1, 130  # exit statuses
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="module:factory",
        help="a function that returns the model, or (model, loss_of); also path/to/file.py:factory",
    )
    parser.add_argument("--set", action="append", default=[], metavar="name=value", help="an argument of the factory")
    parser.add_argument("--world-size", default="8", metavar="8,64,1024", help="numbers of ranks (default: 8)")
    parser.add_argument("--mesh", metavar="RxS", help="R replicas of S shards; * stands for the remaining ranks: *x8")
    parser.add_argument(
        "--wrap", metavar="Class,...", help="classes of the modules that become groups (default: items of lists)"
    )
    parser.add_argument("--strategy", help="a strategy's name, as for fully_shard")
    parser.add_argument("--keep-gathered", action="store_true", help="reshard_after_forward=False")
    parser.add_argument("--dtype", metavar="bf16", help="param_dtype: dtype of compute and all-gathers")
    parser.add_argument("--reduce-dtype", metavar="fp32", help="dtype of gradient reductions")
    parser.add_argument(
        "--batch", metavar="4", help="sequences per rank, if the factory returns no loss function; --tune: or 1,2,4"
    )
    parser.add_argument("--seq", type=int, help="tokens per sequence")
    parser.add_argument(
        "--optimizer", default="AdamW", help="a class of torch.optim, muon (ours), or none (default: AdamW)"
    )
    parser.add_argument(
        "--loop", action="store_true", help="step the parameters one by one, as optimizers do by default on the CPU"
    )
    parser.add_argument(
        "--limits", metavar="'1 group,4GiB'", help="values of limit_unsharded_bytes to compare: peak against overlap"
    )
    parser.add_argument("--no-sync", action="store_true", help="micro-batches but the last are under no_sync")
    tuning = parser.add_argument_group("which settings are fastest", "docs/planning.md")
    tuning.add_argument("--tune", action="store_true", help="compare settings, and print the code of the fastest")
    tuning.add_argument("--hardware", metavar="h100", help="a preset (default: h100), or calibrate's file")
    tuning.add_argument("--software", metavar="2026", help="of a preset: its generation (default: the newest)")
    tuning.add_argument("--measured", metavar="0.85s", help="the default setting's step on the real machine")
    tuning.add_argument("--write", type=Path, metavar="FILE", help="write the hardware to a file, for --hardware")
    tuning.add_argument("--node-bandwidth", type=float, metavar="GB/s", help="between two nodes")
    tuning.add_argument("--node-size", type=int, metavar="N", help="ranks in a node (default: the hardware's)")
    tuning.add_argument("--max-memory", metavar="80GB", help="of a rank (default: the hardware's)")
    tuning.add_argument("--compiled", action="store_true", help="the blocks will be compiled")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a chart: .png, .svg, .pdf")
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def run_plan(args: argparse.Namespace) -> int:
    """Print a plan. Errors of the arguments, the factory and the model are reported in a few lines on stderr."""
    progress = _Progress(sys.stderr, args.quiet)

    try:
        world_sizes, options = world_sizes_of(args.world_size), _options_of(args)
        run: Callable[..., Plan | Tuning] = partial(plan, world_sizes=world_sizes, **options)
        given = [name for name in _OF_TUNE if getattr(args, name.replace("-", "_"))]
        if given and not args.tune:
            raise ValueError(f"--{given[0]} is for --tune: add it, or leave it out")
        if args.tune:
            tune_options = _tune_options_of(args, world_sizes, options)
            run = partial(tune, **tune_options)
            if args.write is not None:
                write_hardware(tune_options["hardware"], args.write)
                print(f"written: {args.write}", file=sys.stderr)
        if args.plot is not None:
            check_picture(args.plot)
        progress.note(f"importing {args.model}")
        factory = load_factory(args.model)
    except (ValueError, ImportError, OSError) as error:
        return progress.failed(USAGE, _located(error))
    except Exception as error:
        return progress.failed(FAILURE, f"--model {args.model}: {_located(error)}")
    try:
        found = run(partial(factory, **_settings_of(args.set)), note=progress.note)
    except KeyboardInterrupt:
        return progress.failed(INTERRUPTED, f"interrupted ({progress.doing}): nothing was written")
    except Exception as error:
        return progress.failed(FAILURE, f"{progress.doing}: {_located(error)}")
    progress.clear()
    print(found.json() if args.json else found)
    if args.plot is not None:
        try:
            found.save(args.plot)
        except (ValueError, OSError) as error:
            return progress.failed(FAILURE, str(error))
        print(f"written: {args.plot}", file=sys.stderr)
    return 0


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as arguments of ``plan()``. Raises ValueError for an invalid one."""
    compute, reduce = dtype_of(args.dtype, "--dtype"), dtype_of(args.reduce_dtype, "--reduce-dtype")
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    # What is invalid raises here, before the factory is imported.
    _settings_of(args.set)
    limits = [text.strip() for text in (args.limits or "").split(",") if text.strip()]
    for limit in limits:
        bytes_of_limit(limit)
    return {
        "mesh": args.mesh,
        "wrap": None if args.wrap is None else [name for name in args.wrap.split(",") if name],
        "mp_policy": None if compute is reduce is None else policy,
        "reshard_after_forward": False if args.keep_gathered else None,
        "strategy": args.strategy,
        "batch": _batch_of(args),
        "seq": args.seq,
        "limits": limits,
        "accumulates": args.no_sync,
        **_optimizer_of(args.optimizer, not args.loop),
    }


def _batch_of(args: argparse.Namespace) -> int | list[int] | None:
    if args.batch is None:
        return None
    sizes = [size.strip() for size in args.batch.split(",")]
    if not all(map(str.isdecimal, sizes)) or (len(sizes) > 1 and not args.tune):
        expected = "numbers, for example 1,2,4" if args.tune else "a number (several are for --tune)"
        raise ValueError(f"--batch {args.batch}: expected {expected}")
    return int(sizes[0]) if len(sizes) == 1 else [*map(int, sizes)]


def _seconds_of(text: str | None) -> float | None:
    """Parse ``0.85s`` or ``850ms``."""
    match = re.fullmatch(r"(\d*\.?\d+) ?(ms|s)?", text or "")
    if text is not None and match is None:
        raise ValueError(f"--measured {text}: expected a time such as 0.85s or 850ms")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else None


def _tune_options_of(args: argparse.Namespace, sizes: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as arguments of ``tune()``. Raises ValueError for an invalid one."""
    given = dict(options)
    chosen = [given.pop(name) for name in ("mesh", "reshard_after_forward", "strategy", "limits")]
    if args.keep_gathered or any(chosen):
        raise ValueError("--tune: it chooses --mesh, --strategy, --keep-gathered and --limits itself: leave them out")
    if len(sizes) > 1:
        raise ValueError(f"--tune: expected one --world-size, got {args.world_size}")
    memory = None if args.max_memory is None else size_of(args.max_memory, f"--max-memory {args.max_memory}")
    if args.node_size is not None and args.node_size < 1:
        raise ValueError(f"--node-size {args.node_size}: expected at least 1")
    return given | {
        "world_size": sizes[0],
        "hardware": hardware_of(args.hardware or "h100", args.software),
        "node_size": args.node_size,
        "measured": _seconds_of(args.measured),
        "node_bandwidth": None if args.node_bandwidth is None else args.node_bandwidth * 1e9,
        "max_memory": memory,
        "is_compiled": args.compiled,
    }


def _optimizer_of(name: str, foreach: bool) -> dict[str, Any]:
    if name.lower() == "none":
        return {"optimizer": None}
    if name.lower() == "muon":  # torch's takes matrices alone
        return {"optimizer_of": muon}
    classes = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    found: Any = classes.get(name.lower())
    if found is None or not issubclass(found, torch.optim.Optimizer) or found is torch.optim.Optimizer:
        raise ValueError(f"--optimizer {name}: expected none, muon, or a class of torch.optim: AdamW, SGD, ...")
    has_foreach = "foreach" in inspect.signature(found).parameters
    return {"optimizer": partial(found, **{"foreach": foreach}) if has_foreach else found}


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(muon_groups(model))


def _settings_of(texts: list[str]) -> dict[str, Any]:
    """Parse ``name=value`` texts; a value that is not a Python literal stays a string."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError(f"--set {text}: expected name=value, an argument of the factory")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    return settings


def _located(error: BaseException) -> str:
    """Format an error with the user's line that caused it: the innermost frame outside torch and this package."""
    message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_OWN, "<")):
            return f"{message}\n  at {frame.filename}, line {frame.lineno}, in {frame.name}"
    return message


class _Progress:
    """Shows progress: in a terminal one line that changes, otherwise one line for each step."""

    def __init__(self, file: TextIO, is_quiet: bool) -> None:
        self._file, self._is_quiet, self._is_terminal = file, is_quiet, file.isatty()
        self.doing = "starting"  # the current step, without counts

    def note(self, line: str) -> None:
        doing = line.partition(", ")[0].partition(" (")[0]
        is_new, self.doing = doing != self.doing, doing
        if self._is_quiet or not (is_new or self._is_terminal):
            return
        end = "\x1b[K\r" if self._is_terminal else "\n"
        print(line if self._is_terminal else doing, end=end, file=self._file, flush=True)

    def failed(self, status: int, text: str) -> int:
        """Say what went wrong. Returns the exit status."""
        self.clear()
        print(text, file=self._file)
        return status

    def clear(self) -> None:
        if self._is_terminal and not self._is_quiet:
            print("\x1b[K", end="", file=self._file, flush=True)


# ---- ``python -m fsdp_compose calibrate``: the arguments of ``calibrate()`` as options


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("hardware.json"), metavar="FILE", help="hardware.json")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="how many measure at the same time (default: one per GPU; CPU: 2)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each process, on the CPU (default: 1)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="measure everything N times (default: 7)")
    parser.add_argument(
        "--dtypes", metavar="fp32,bf16", help="dtypes of matrix products (default: fp32, and bf16 on GPUs)"
    )
    parser.add_argument("--node-bandwidth", type=float, metavar="GB/s", help="between two nodes like this one")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time: for a CPU that is never idle")
    parser.add_argument("--busy-ok", action="store_true", help="write the file even if the machine is busy")
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def _calibrate(args: argparse.Namespace) -> int:
    """Write what ``calibrate()`` measures. Errors are reported in a few lines on stderr."""
    progress = _Progress(sys.stderr, args.quiet)

    if not args.output.absolute().parent.is_dir():  # not after a minute
        return progress.failed(USAGE, f"--output {args.output}: there is no folder {args.output.parent}")
    if args.output.is_dir():
        return progress.failed(USAGE, f"--output {args.output}: this is a folder")
    try:
        dtypes = [*filter(None, (dtype_of(name, "--dtypes") for name in (args.dtypes or "").split(",") if name))]
        hardware = calibrate(
            processes=args.processes,
            threads=args.threads,
            rounds=args.rounds,
            dtypes=dtypes,
            clock="cpu" if args.cpu_time else "wall",
            node_bandwidth=None if args.node_bandwidth is None else args.node_bandwidth * 1e9,
            most_busy=math.inf if args.busy_ok else BUSY,
            note=progress.note,
        )
        write_hardware(hardware, args.output)
    except KeyboardInterrupt:
        return progress.failed(INTERRUPTED, f"interrupted ({progress.doing}): nothing was written")
    except (RuntimeError, OSError) as error:
        return progress.failed(FAILURE, f"{error}\nnothing was written")
    except ValueError as error:
        return progress.failed(USAGE, str(error))
    progress.clear()
    print(f"written: {args.output}")
    return 0


# ---- The commands


def _add_hang(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", type=Path, help="log files with the ranks' stderr, or folders of them")


def _hang(args: argparse.Namespace) -> int:
    missing = [str(path) for path in args.logs if not path.exists()]
    if missing:
        print(f"no such file or folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    print(explain_logs(args.logs))
    return 0


Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
COMMANDS: dict[str, Command] = {
    "calibrate": ("measure this machine, for predictions of how long a step takes", _add_calibrate, _calibrate),
    "hang": ("read the logs of ranks that hang, and tell which rank is late and where", _add_hang, _hang),
    "plan": ("estimate memory and communication of a training step on many ranks", add_plan_arguments, run_plan),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp_compose", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (what, add_arguments, _) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=what, description=what))
    args = parser.parse_args(arguments)
    return COMMANDS[args.command][2](args)


if __name__ == "__main__":
    sys.exit(main())
