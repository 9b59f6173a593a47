"""Rendezvous of all ranks through the key-value store: rare, bounded in time, independent of the collectives.

A rendezvous compares what each rank brings and ends the same way on every rank: all return, or all raise one error. It
is used where a collective would hang or pair wrongly: at the first forward, and after an interrupted iteration.

Cost: every rank writes two keys and reads two; the first rank reads one small key per rank.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from .._torch import group_timeout
from .broken import failure_of, give_up, gone
from .namespace import agree_on_namespace, wait_for
from .records import last_of_every_rank

TIMEOUT_ENV = "FSDP_COMPOSE_TIMEOUT"
RECOVERY_TIMEOUT = timedelta(seconds=60)  # of ranks that were all interrupted
_BROKEN_TIMEOUT = timedelta(seconds=5)  # where a rank is known to be dead or stuck, and the others hear of it at once
_GRACE = timedelta(seconds=5)  # the first rank's verdict may arrive this much after its own timeout
_FIRST_LOOK, _RAREST_LOOK = 5.0, 60.0  # seconds of waiting between looks whether ranks have died

_Gone = Callable[[], str]
"""The error to raise because a rank that is waited for has died; empty if none has."""


class _RankGone(RuntimeError):
    pass


# The number of the next round for each purpose, as far as this rank knows: part of the keys.
_next_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def meet(
    group: dist.ProcessGroup,
    purpose: str,
    payload: str,
    judge: Callable[[list[str]], str],
    details: str = "",
    explain: Callable[[int, str, str], str] | None = None,
    where: str = "",
    timeout: timedelta | None = None,
    is_frequent: bool = False,
    aside: str = "",
) -> str:
    """Bring ``payload`` to a rendezvous of all ranks of ``group`` and return its verdict, the same on every rank.

    Every rank of ``group`` must call it, for the same ``purpose``. The first rank opens a round, waits for the others
    and judges it. A round that failed stays closed: ranks that try again, and those that come late, meet in the next.

    Args:
        payload: a short text. Where ``explain`` is given, all ranks must bring the same.
        judge: called on the first rank with every rank's payload, or aside if there is one; its text is the verdict.
        details: a long text, read only when ``explain`` is given and a payload differs from the first rank's.
        explain: called on the first rank with (rank, its own details, that rank's details) for the first rank whose
            payload differs; its text replaces the verdict and is raised.
        where: what the message about absent ranks adds to ``purpose``.
        timeout: how long to wait, where ``FSDP_COMPOSE_TIMEOUT`` does not say it and a collective of the group has not
            failed before; default: the timeout of the group.
        is_frequent: delete what rounds leave in the store, as soon as no rank can ask for it.
        aside: a line that ``judge`` is to see and that may differ from rank to rank; on all ranks or on none.

    Raises:
        RuntimeError: on every rank that came: some rank did not within the time, naming the call and the absent ranks;
            what ``explain`` said; or the store is gone.
    """
    try:
        text = f"{payload}\n{aside}"
        return _meet(group, purpose, text, judge, details, explain, where, _timeout(group, timeout), is_frequent)
    except _RankGone as error:
        give_up(group, str(error))
        raise RuntimeError(str(error)) from None
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"{purpose}{where}: the key-value store cannot be reached: the process that holds it (torchrun, or that of "
            f"the first rank) has died. Restart the processes from a checkpoint. {error}"
        ) from error


def _meet(
    group: dist.ProcessGroup,
    purpose: str,
    payload: str,
    judge: Callable[[list[str]], str],
    details: str,
    explain: Callable[[int, str, str], str] | None,
    where: str,
    timeout: timedelta,
    is_frequent: bool,
) -> str:
    rank = group.rank()
    first_is_absent = partial(_absence, [0], group, purpose + where, timeout)
    first_is_gone = partial(_is_gone, group, purpose + where, lambda: [0])
    store = dist.PrefixStore(f"rendezvous/{purpose}", own_store(group, purpose + where, timeout))
    rounds = _next_rounds.setdefault(group, Counter())
    number = rounds[purpose]
    if rank != 0:
        while store.check([f"verdict/{number}"]):
            number += 1
        _wait(store, [f"open/{number}"], timeout, first_is_absent, first_is_gone)
    rounds[purpose] = number + 1
    if explain is not None:
        store.set(f"details/{number}/{rank}", details)
    store.set(f"payload/{number}/{rank}", payload)
    if rank == 0:
        store.set(f"open/{number}", "")
        verdict = _preside(store, number, group, timeout, purpose + where, judge, explain)
        store.set(f"verdict/{number}", verdict)
        if is_frequent and verdict.startswith("ok:"):
            _tidy(store, number, group.size())
    else:
        _wait(store, [f"verdict/{number}"], timeout + _GRACE, first_is_absent, first_is_gone)
        verdict = store.get(f"verdict/{number}").decode()
    if explain is not None:
        store.delete_key(f"details/{number}/{rank}")
    kind, _, text = verdict.partition(":")
    if kind == "gone":
        raise _RankGone(text)
    if kind == "error":
        raise RuntimeError(text)
    return text


def own_store(group: dist.ProcessGroup, purpose: str, timeout: timedelta | None = None) -> dist.Store:
    """The store in which only this initialisation of ``group`` writes. At the first call every rank must come."""
    timeout = timeout or _timeout(group, None)

    def error(absent: Sequence[int]) -> RuntimeError:
        return RuntimeError(_absence(absent, group, purpose, timeout))

    return agree_on_namespace(group, timeout, _GRACE, error)


def _preside(
    store: dist.Store,
    number: int,
    group: dist.ProcessGroup,
    timeout: timedelta,
    purpose: str,
    judge: Callable[[list[str]], str],
    explain: Callable[[int, str, str], str] | None,
) -> str:
    keys = [f"payload/{number}/{rank}" for rank in range(group.size())]

    def absent() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]

    def absence() -> str:
        return _absence(absent(), group, purpose, timeout)

    try:
        _wait(store, keys, timeout, absence, partial(_is_gone, group, purpose, absent))
    except _RankGone as error:
        return f"gone:{error}"
    except RuntimeError as error:
        return f"error:{error}"
    brought = [text.decode().rpartition("\n") for text in store.multi_get(keys)]
    payloads, asides = [payload for payload, _, _ in brought], [aside for _, _, aside in brought]
    if explain is not None:
        for rank, payload in enumerate(payloads):
            if payload != payloads[0]:
                texts = store.multi_get([f"details/{number}/0", f"details/{number}/{rank}"])
                return "error:" + explain(rank, texts[0].decode(), texts[1].decode())
    return "ok:" + judge(asides if any(asides) else payloads)


def _tidy(store: dist.Store, number: int, size: int) -> None:
    """All ranks have come to round ``number``: none asks for the one before, and their payloads have been read."""
    for rank in range(size):
        store.delete_key(f"payload/{number}/{rank}")
    store.delete_key(f"open/{number - 1}")
    store.delete_key(f"verdict/{number - 1}")


def _wait(
    store: dist.Store, keys: Sequence[str], timeout: timedelta, absence: Callable[[], str], is_gone: _Gone
) -> None:
    """Wait, and look now and then, less and less often, whether an awaited rank has died."""
    deadline, look = time.monotonic() + timeout.total_seconds(), _FIRST_LOOK
    while True:
        left = max(0.001, deadline - time.monotonic())
        if wait_for(store, keys, timedelta(seconds=min(look, left))):
            return
        if left <= look:
            raise RuntimeError(absence())
        error = is_gone()
        if error and not store.check(list(keys)):
            raise _RankGone(error)
        look = min(2 * look, _RAREST_LOOK)


def _is_gone(group: dist.ProcessGroup, purpose: str, awaited: Callable[[], Sequence[int]]) -> str:
    dead = [] if failure_of(group) else gone(group, [rank for rank in awaited() if rank != group.rank()])
    if not dead:
        return ""
    return (
        f"{purpose}: rank(s) {', '.join(map(str, dead))} have died, or have given up because others did: their "
        f"connections are closed, and they did not come to the rendezvous of {group.size()} ranks. Restart the "
        f"processes from a checkpoint{last_of_every_rank(group)}"
    )


def _absence(absent: Sequence[int], group: dist.ProcessGroup, purpose: str, timeout: timedelta) -> str:
    return (
        f"{purpose}: rank(s) {', '.join(map(str, absent))} did not come to the rendezvous of {group.size()} ranks "
        f"within {timeout.total_seconds():g} s. Every rank must make this call; a rank that is missing has died, "
        f"hangs in a collective, or took another path (set {TIMEOUT_ENV} to wait longer or shorter)"
        f"{last_of_every_rank(group)}"
    )


def _timeout(group: dist.ProcessGroup, default: timedelta | None) -> timedelta:
    seconds = os.environ.get(TIMEOUT_ENV)
    if seconds:
        return timedelta(seconds=float(seconds))
    if failure_of(group):
        return _BROKEN_TIMEOUT
    return min(default, group_timeout(group)) if default else group_timeout(group)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, Any, Any] | None:
    """The first place where two sequences differ, with both values (``None`` past an end)."""
    for i in range(max(len(ours), len(theirs))):
        a = ours[i] if i < len(ours) else None
        b = theirs[i] if i < len(theirs) else None
        if a != b:
            return i, a, b
    return None
