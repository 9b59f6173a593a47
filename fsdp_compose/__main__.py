"""``python -m fsdp_compose COMMAND``: what can be asked without a model in memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .inspect import explain_logs
from .plan_command import add_plan_arguments, run_plan


def _add_hang(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", type=Path, help="files of what ranks wrote to stderr, or folders")


def _hang(args: argparse.Namespace) -> int:
    missing = [str(path) for path in args.logs if not path.exists()]
    if missing:
        print(f"there is no {', '.join(missing)}", file=sys.stderr)
        return 2
    print(explain_logs(args.logs))
    return 0


Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
COMMANDS: dict[str, Command] = {
    "hang": ("who waits for whom, from the logs of ranks that stand still", _add_hang, _hang),
    "plan": ("what a training step takes on many ranks, found out without them", add_plan_arguments, run_plan),
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
