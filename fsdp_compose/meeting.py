"""Meetings of all ranks through the key-value store: rare, bounded in time, independent of the collectives.

A meeting compares what each rank brings and ends the same way on every rank: all return, or all raise one error. It is
used where a collective would hang or pair wrongly: at the first forward, and after an interrupted iteration.

Cost: every rank writes two keys and reads one; the first rank reads one small key per rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ._torch import default_store, group_timeout

TIMEOUT_ENV = "FSDP_COMPOSE_TIMEOUT"
_GRACE = timedelta(seconds=5)  # the first rank's verdict may arrive this much after its own timeout

# How many meetings each process group has completed, by purpose: part of the keys. A meeting that failed is not
# counted, so that ranks that try again meet those that come late.
_completed: dict[tuple[str, str], int] = {}


def meet(
    group: dist.ProcessGroup,
    purpose: str,
    payload: str,
    judge: Callable[[list[str]], str],
    details: str = "",
    explain: Callable[[int, str, str], str] | None = None,
) -> str:
    """Bring ``payload`` to a meeting of all ranks of ``group`` and return its verdict, the same on every rank.

    Every rank of ``group`` must call it, for the same ``purpose``.

    Args:
        payload: a short text.
        judge: called on the first rank with every rank's payload; its text is the verdict.
        details: a long text, read only when ``explain`` is given and a payload differs from the first rank's.
        explain: called on the first rank with (rank, its own details, that rank's details) for the first rank whose
            payload differs; its text replaces the verdict and is raised.

    Raises:
        RuntimeError: on every rank that came: some rank did not within the time (``FSDP_COMPOSE_TIMEOUT`` seconds, by
            default the timeout of the process group), naming the call and the absent ranks; or what ``explain`` said.
    """
    rank, world_size, name = group.rank(), group.size(), str(group.group_name)
    timeout = _timeout(group)
    number = _completed.get((name, purpose), 0)
    store = dist.PrefixStore(f"fsdp_compose/{name}/{purpose}/{number}", default_store())
    if explain is not None:
        store.set(f"details/{rank}", details)
    store.set(f"payload/{rank}", payload)
    if rank == 0:
        verdict = _preside(store, world_size, timeout, purpose, judge, explain)
        store.set("verdict", verdict)
    else:
        _wait(store, ["verdict"], timeout + _GRACE, lambda: _absence(store, world_size, purpose, timeout))
        verdict = store.get("verdict").decode()
    kind, _, text = verdict.partition(":")
    if kind == "absent":
        if rank == 0:
            store.delete_key("verdict")  # let a second attempt be judged afresh
        raise RuntimeError(text)
    _completed[name, purpose] = number + 1
    if explain is not None:
        store.delete_key(f"details/{rank}")
    if kind == "error":
        raise RuntimeError(text)
    return text


def _preside(
    store: dist.Store,
    world_size: int,
    timeout: timedelta,
    purpose: str,
    judge: Callable[[list[str]], str],
    explain: Callable[[int, str, str], str] | None,
) -> str:
    keys = [f"payload/{rank}" for rank in range(world_size)]
    try:
        _wait(store, keys, timeout, lambda: _absence(store, world_size, purpose, timeout))
    except RuntimeError as error:
        return f"absent:{error}"
    payloads = [payload.decode() for payload in store.multi_get(keys)]
    if explain is not None:
        for rank, payload in enumerate(payloads):
            if payload != payloads[0]:
                texts = store.multi_get(["details/0", f"details/{rank}"])
                return "error:" + explain(rank, texts[0].decode(), texts[1].decode())
    return "ok:" + judge(payloads)


def _wait(store: dist.Store, keys: Sequence[str], timeout: timedelta, absence: Callable[[], str]) -> None:
    try:
        store.wait(list(keys), timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        raise RuntimeError(absence()) from error


def _absence(store: dist.Store, world_size: int, purpose: str, timeout: timedelta) -> str:
    absent = [rank for rank in range(world_size) if not store.check([f"payload/{rank}"])]
    who = f"rank(s) {', '.join(map(str, absent))} did not" if absent else "the first rank did not judge it"
    return (
        f"{purpose}: {who} come to the meeting of {world_size} ranks within {timeout.total_seconds():g} s. Every rank "
        "must make this call; a rank that is missing has died, hangs in a collective, or took another path "
        f"(set {TIMEOUT_ENV} to wait longer or shorter)"
    )


def _timeout(group: dist.ProcessGroup) -> timedelta:
    seconds = os.environ.get(TIMEOUT_ENV)
    return timedelta(seconds=float(seconds)) if seconds else group_timeout(group)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, Any, Any] | None:
    """The first place where two sequences differ, with both values (``None`` past an end)."""
    for i in range(max(len(ours), len(theirs))):
        a = ours[i] if i < len(ours) else None
        b = theirs[i] if i < len(theirs) else None
        if a != b:
            return i, a, b
    return None
