"""The classes of errors that a program may want to catch. Each is also the built-in error that it specializes.

An error that all ranks raise travels between them as the name of its class and its text. Nothing here is private: what
is raised can be pickled, and copied to other processes.
"""

from __future__ import annotations

import itertools


class FSDPComposeError(Exception):
    """The base of the classes below. What is none of them stays a built-in error: an operator that sharded tensors do
    not support, a full disk, an exception of your own code that other ranks are told of."""


class RanksDifferError(FSDPComposeError, RuntimeError):
    """The ranks have different models, start from different values, or do different things. Every rank raises it."""


class RankLostError(FSDPComposeError, RuntimeError):
    """A rank did not arrive in time, or is gone; or the key-value store is gone. The process group cannot be used any
    more: end the process, so that its launcher restarts all of them from a checkpoint."""


class CheckpointDamagedError(FSDPComposeError, RuntimeError):
    """Files of a checkpoint are missing, incomplete or not as they were written. Nothing was loaded: try an earlier
    checkpoint."""


class MisuseError(FSDPComposeError, ValueError):
    """A call that cannot work, whatever the other ranks do: an argument does not fit, or it comes at the wrong time.

    Subclasses are a ``RuntimeError`` or a ``TypeError`` too, where that is the usual error for the mistake."""


class MisuseRuntimeError(MisuseError, RuntimeError):
    """Misuse that depends on what happened before, or on what a checkpoint holds."""


class MisuseTypeError(MisuseError, TypeError):
    """Misuse by an argument of a wrong type."""


_BY_NAME: dict[str, type[RuntimeError]] = {
    cls.__name__: cls for cls in (RanksDifferError, RankLostError, CheckpointDamagedError, MisuseRuntimeError)
}


def name_of(error: BaseException) -> str:
    """How an error that all ranks raise is called when it is sent to them: always a RuntimeError."""
    name = type(error).__name__
    return name if name in _BY_NAME else MisuseRuntimeError.__name__ if isinstance(error, MisuseError) else ""


def class_of(name: str) -> type[RuntimeError]:
    """The class that ``name_of`` means; RuntimeError for what has none here."""
    return _BY_NAME.get(name, RuntimeError)


def text_of(problem: str | Exception) -> str:
    """Format a problem, or the exception that it is, for an error that other ranks raise too."""
    if isinstance(problem, str):
        return problem
    if str(problem) and (isinstance(problem, FSDPComposeError) or type(problem) is RuntimeError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}"


_MAX_LINES = 20  # of problems that an error lists


def list_problems(what: str, problems: list[str], remedy: str) -> str:
    """Format several problems as one text; empty if there are none."""
    if not problems:
        return ""
    lines = [f"  {problem}" for problem in problems[:_MAX_LINES]]
    if len(problems) > _MAX_LINES:
        lines.append(f"  and {len(problems) - _MAX_LINES} more")
    return "\n".join([f"{what}; nothing was changed:", *lines, remedy])


def as_ranges(numbers: list[int], separator: str = ",") -> str:
    """Numbers, for example of ranks, as text such as ``0-3,8``."""
    runs = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])  # the same while numbers are adjacent
    texts = [[str(number) for _, number in run] for _, run in runs]
    return separator.join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in texts)
