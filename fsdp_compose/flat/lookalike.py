"""Options of torch's own classes in the place of ours: they have the same names and meanings."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from .policy import CPUOffloadPolicy

_T = TypeVar("_T")


def as_ours(cls: type[_T], given: Any, where: str) -> _T:
    """``given``, an instance of ``cls`` or of a class of torch's of that name, as an instance of ``cls``.

    Args:
        where: what it was given as, for messages.

    Raises:
        TypeError: it is something else.
        ValueError: it says something that ``cls`` cannot say.
    """
    if isinstance(given, cls):
        return given
    names = {base.__name__ for base in type(given).__mro__}
    if isinstance(given, type) or not is_dataclass(given) or cls.__name__ not in names:
        raise TypeError(f"{where}: expected fsdp_compose's {cls.__name__} or torch's, got {given!r}")
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]
    for item in fields(given):
        if item.name not in known and getattr(given, item.name) != item.default:
            raise ValueError(
                f"{where}: {type(given).__name__}({item.name}={getattr(given, item.name)!r}) is not supported: leave "
                f"it at {item.default!r}"
            )
    return cls(**{item.name: getattr(given, item.name) for item in fields(given) if item.name in known})


def as_offload_policy(given: Any, where: str) -> CPUOffloadPolicy | None:
    """Our ``CPUOffloadPolicy`` for ours or torch's; ``None`` for ``None``, and for torch's ``OffloadPolicy``, which is
    nothing.

    Raises:
        TypeError: it is something else.
    """
    if given is None or (is_dataclass(given) and type(given).__name__ == "OffloadPolicy"):
        return None
    policy = as_ours(CPUOffloadPolicy, given, where)
    for item in fields(policy):
        value = getattr(policy, item.name)
        if not isinstance(value, bool):
            raise TypeError(f"{where}: CPUOffloadPolicy({item.name}={value!r}): expected True or False")
    return policy
