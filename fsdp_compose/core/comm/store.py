"""What ranks do through the key-value store: rendezvous, names that separate process groups, and records for errors.

All of it is rare, bounded in time and independent of the collectives, so it still works when those hang. A rendezvous
compares one payload per rank and ends the same way on every rank: all return, or all raise the same error. It is used
where a collective would hang or pair wrongly: at the first forward, and after an interrupted iteration.

If all payloads must be equal, ranks send digests, and the long texts behind them stay where they are: when a digest
differs from the first rank's, the first rank asks that one rank for its text. The keys of a round::

    open      the first rank has begun it                          payload/3   rank 3's payload; rank 3 deletes it
    verdict   how it ends, and which ranks were absent             details     the text of an asked rank; told: the
    error

Cost: three operations on each rank but the first, less than 300 bytes of keys and values, and looks for two keys, at
most four a second (of more than 2,048 ranks, 8,192 of all together). The first rank waits for, reads and judges one
small value per rank, and deletes the other keys in a later round.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from ..._torch import default_store, group_timeout
from ...errors import RankLostError, RanksDifferError, class_of, name_of
from .context import kept_for, known_for
from .failure import TIMEOUT_ENV, Meeting, class_of_difference, failure_of, give_up, gone, limit_of

# ---- The keys in the key-value store that belong to one initialization of a process group.
#
# A store can outlive the processes that use it: ``torchrun --max-restarts`` starts new ones on the store of the dead
# ones, and a program may destroy its process group and make another. Whatever was written before that looks like an
# answer. So this package keeps everything under a name that the ranks of a process group agree on when they first meet,
# and that no other initialization has.
#
# How they agree, in a store where any key may be an old one: every rank has a random token. The first rank writes its
# own, the *challenge*, under a fixed key. The others answer it under keys that contain the challenge. The first rank
# grants each answer under a key that contains the answering rank's token. Keys that contain a token of this
# initialization cannot be old. So the first rank counts only fresh answers, and a rank that has answered an old
# challenge is granted nothing and answers again when a new challenge appears. The challenge is the name.
#
# Cost, once per process group: about ten operations per rank, however many ranks; all keys but the challenge are
# deleted.


_FIRST_CHALLENGE_LOOK, _RAREST_CHALLENGE_LOOK = 0.002, 0.5  # seconds between looks for a newer challenge
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25  # seconds between looks for keys
_MOST_LOOKS = 8192  # a second, of all ranks together: each costs the process of the store about 7 us

Absence = Callable[[Sequence[int]], Exception]
"""Return the error to raise when these ranks did not arrive."""


def _new_token() -> str:
    return secrets.token_hex(8)


@dataclass(slots=True, eq=False)
class _Rendezvous:
    """What one rank knows of the rendezvous of a process group."""

    # Tells this initialization of the ranks from earlier ones.
    token: str = field(default_factory=_new_token)
    namespace: dist.Store | None = None  # the store that only this initialization writes to, once ranks have agreed
    # By purpose, the number of the next round, as far as this rank knows; part of the keys.
    next_rounds: Counter[str] = field(default_factory=Counter)
    # By purpose, the keys of finished rounds; on the first rank.
    leftovers: defaultdict[str, list[_Round]] = field(default_factory=lambda: defaultdict(list))


def known_namespace(group: dist.ProcessGroup) -> dist.Store | None:
    """Return the store that only this initialization of ``group`` writes to; ``None`` before ranks agree on it."""
    known = known_for(group, _Rendezvous)
    return None if known is None else known.namespace


def record_of(group: dist.ProcessGroup) -> _Rendezvous:
    """Where the namespace of ``group`` will be once ranks have agreed on it; outlives the group."""
    return kept_for(group, _Rendezvous)


def agree_on_name(
    ranks: str, rank: int, size: int, timeout: timedelta, grace: timedelta, absence: Absence, token: str = ""
) -> str:
    """Return a name that ranks agree on, and no earlier initialization used. All of them must call it.

    Args:
        ranks, rank, size: a name of these ranks, this rank's number among them, and how many they are.
        timeout: how long the first rank waits for the others; they wait ``grace`` longer.
        token: this rank's, if a call that failed may be repeated.

    Raises:
        Exception: the one that ``absence`` returns for the ranks that did not arrive.
    """
    base, token = f"fsdp_compose/{ranks}", token or _new_token()
    store = dist.PrefixStore(f"{base}/challenge", default_store())
    if rank == 0:
        _challenge(store, token, size, timeout, absence)
        return f"{base}/{token}"
    return f"{base}/{_answer(store, token, rank, timeout + grace, absence)}"


def _challenge(store: dist.Store, token: str, size: int, timeout: timedelta, absence: Absence) -> None:
    """What the first rank does."""
    store.set("now", token)
    answers = [f"answer/{token}/{rank}" for rank in range(1, size)]
    if not answers:
        return
    if not wait_for(store, answers, timeout):
        raise absence([rank for rank, key in enumerate(answers, 1) if not store.check([key])])
    granted = [f"granted/{answer.decode()}" for answer in store.multi_get(answers)]
    store.multi_set(granted, [token] * len(granted))  # type: ignore[attr-defined]  # torch 2.13 has no stub for it


def _answer(store: dist.Store, token: str, rank: int, timeout: timedelta, absence: Absence) -> str:
    """What the other ranks do. Return the challenge that holds."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause, granted, answered = _FIRST_CHALLENGE_LOOK, f"granted/{token}", ""
    if not wait_for(store, ["now"], timeout):
        raise absence([0])
    while not store.check([granted]):  # wait() would print a warning at each look that comes too early
        challenge = store.get("now").decode()
        if challenge != answered:
            _forget(store, answered, rank)
            store.set(f"answer/{challenge}/{rank}", token)
            answered = challenge
        elif time.monotonic() > deadline:
            raise absence([0])
        time.sleep(pause)
        pause = min(2 * pause, _RAREST_CHALLENGE_LOOK)
    challenge = store.get(granted).decode()
    _forget(store, answered, rank)
    store.delete_key(granted)
    return challenge


def _forget(store: dist.Store, challenge: str, rank: int) -> None:
    if challenge:
        store.delete_key(f"answer/{challenge}/{rank}")


def wait_for(
    store: dist.Store,
    keys: Sequence[str],
    timeout: timedelta,
    alarm: Callable[[], bool] = bool,
    num_ranks: int = 1,
) -> bool:
    """Wait for ``keys``, and return whether all of them appeared in time. ``alarm``: returns whether to stop waiting.
    ``num_ranks``: how many ranks may wait at the same time."""
    # Not by a wait of the store's own: nothing can end that early, and torch (2.13) prints two warnings when it ends
    # without the keys. So look again and again, more and more rarely.
    deadline, pause, keys = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE, [*keys]
    longest_pause = max(_LONGEST_PAUSE, num_ranks / _MOST_LOOKS)
    while not store.check(keys):
        left = deadline - time.monotonic()
        if left <= 0 or alarm():
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest_pause)
    return True


# ---- The last collective of every rank, for errors: enabled by ``FSDP_COMPOSE_DEBUG=1`` on all ranks before the first
# forward.
#
# Each collective is then recorded in the key-value store before it is issued, at the cost of one round trip to the
# store. An error can then say what every rank was doing, even one that hangs or is gone. When it is off, none of this
# code runs.


DEBUG_ENV = "FSDP_COMPOSE_DEBUG"
_MAX_RANKS = 64  # that an error lists


def is_on() -> bool:
    """Whether collectives are recorded."""
    return os.environ.get(DEBUG_ENV) == "1"


def note(group: dist.ProcessGroup, what: str) -> None:
    """Record that this rank is about to issue a collective on ``group``; ``what`` describes it."""
    store = _store(group)
    if store is not None:
        store.set(str(group.rank()), what)


def last_of_every_rank(group: dist.ProcessGroup) -> str:
    """The last collective that each rank has entered, as the end of an error message; empty when recording is off."""
    if not is_on():
        return ""
    store = _store(group)
    if store is None:
        return ""
    try:
        lines = [
            f"rank {rank}: {store.get(str(rank)).decode() if store.check([str(rank)]) else 'none'}"
            for rank in range(min(group.size(), _MAX_RANKS))
        ]
    except dist.DistNetworkError:
        return ""  # the process that hosted the store is gone
    return f"\nThe last collective of each rank ({DEBUG_ENV}=1):\n" + "\n".join(lines)


def _store(group: dist.ProcessGroup) -> dist.Store | None:
    namespace = known_namespace(group)
    return None if namespace is None else dist.PrefixStore("records", namespace)


# ---- Rendezvous


RECOVERY_TIMEOUT = timedelta(seconds=60)  # after all ranks were interrupted
_BROKEN_TIMEOUT = timedelta(seconds=5)  # once a rank is known to be dead or stuck: the others notice at once
_GRACE = timedelta(seconds=5)  # the first rank's verdict may arrive this much after its own timeout
_FIRST_LOOK = 5.0  # seconds of waiting between checks whether ranks have died
_NO_GRACE = timedelta(0)
_MOST_NAMED = 32  # ranks that an error lists
_DIGEST_LENGTH = 64
_OK = "ok"  # how a round ends if nothing is wrong


class _RankGone(RuntimeError):
    pass


def meet(
    group: dist.ProcessGroup,
    purpose: str,
    payload: str,
    judge: Callable[[list[str]], str],
    details: str = "",
    explain: Callable[[int, str, str], str] | None = None,
    where: str = "",
    timeout: timedelta | None = None,
    aside: str = "",
) -> str:
    """Send ``payload`` to a rendezvous of all ranks of ``group``. Return the verdict, the same on every rank.

    Every rank of ``group`` must call it, for the same ``purpose``. The first rank opens a round, waits for the others
    and judges it. A failed round stays closed: ranks that try again, and late ranks, meet in the next one.

    Args:
        payload: a short text. With ``explain``, all ranks must send the same; a long one is sent as a digest.
        judge: called on the first rank with every rank's payload (or aside, if there is one); returns the verdict.
        details: a long text. It is sent only if ``explain`` is given and this rank's payload is the first that differs
            from the first rank's.
        explain: called on the first rank with (rank, its own details, that rank's details) for the first rank whose
            payload differs; every rank raises the text it returns as a ``RanksDifferError``, or the error it raises.
        where: added to ``purpose`` in the message about absent ranks.
        timeout: how long to wait, unless ``FSDP_COMPOSE_TIMEOUT`` is set or a collective of the group has failed
            before; default: the timeout of the group.
        aside: one line for ``judge`` that may differ between ranks; given on all ranks or on none.

    Raises:
        RankLostError: on every rank that arrived: some rank did not arrive in time (the message names the call and the
            absent ranks), or the store is gone.
        RanksDifferError: on every rank that arrived: ``explain`` returned a text.
    """
    if explain is not None and len(payload) > _DIGEST_LENGTH:
        payload = hashlib.sha256(payload.encode()).hexdigest()
    try:
        waits = _Waits(group, purpose, where, _timeout(group, timeout))
        return _meet(waits, f"{payload}\n{aside}", judge, details, explain)
    except _RankGone as error:
        lost = RankLostError(str(error))
        give_up(group, lost)
        raise lost from None
    except dist.DistNetworkError as error:
        raise RankLostError(
            f"{purpose}{where}: the key-value store cannot be reached: the process that hosts it (torchrun, or the "
            f"first rank's) is gone, or does not answer. Restart the processes from a checkpoint. {error}"
        ) from error


class _Waits:
    """Which ranks meet, for what purpose, and how long they wait for each other."""

    def __init__(self, group: dist.ProcessGroup, purpose: str, where: str, timeout: timedelta) -> None:
        self.group, self.purpose, self.timeout = group, purpose, timeout
        self.text = purpose + where

    def wait(
        self,
        this: _Round,
        keys: Sequence[str],
        awaited: Callable[[], Sequence[int]],
        grace: timedelta = _NO_GRACE,
    ) -> None:
        """Wait for keys of a round, checking now and then whether an awaited rank has died, and all the time whether
        the watchdog has found out why it does not come.

        Raises:
            RankLostError: they did not appear in time.
            RanksDifferError: they will not.
            _RankGone: a rank has died.
        """
        deadline = time.monotonic() + (self.timeout + grace).total_seconds()
        had_failed = bool(failure_of(self.group))
        meeting = Meeting(self.group, f"the rendezvous of {self.text}", f"rendezvous {self.purpose}", this.number)
        with meeting:

            def alarm() -> bool:
                return bool(meeting.difference) or (not had_failed and bool(failure_of(self.group)))

            while True:
                left = deadline - time.monotonic()
                limit = timedelta(seconds=max(0.0, min(_FIRST_LOOK, left)))
                if wait_for(this.store, keys, limit, alarm, self.group.size()):
                    return
                if meeting.difference:
                    raise class_of_difference(meeting.difference)(f"{self.text}: {meeting.difference}")
                if left <= _FIRST_LOOK and not alarm():
                    raise RankLostError(_absence(awaited(), self.group, self.text, self.timeout))
                if alarm():  # as if it had failed before: see ``_timeout``
                    had_failed, deadline = True, min(deadline, time.monotonic() + _BROKEN_TIMEOUT.total_seconds())
                error = _is_gone(self.group, self.text, awaited)
                # A rank may have died after it came.
                if error and not this.store.check([*keys]):
                    raise _RankGone(error)


class _Round:
    """The keys of one round. ``store``: that of its purpose."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self.store, self.number = store, number
        self._keys = [f"{key}/{number}" for key in ("open", "verdict", "details", "told")]
        self.opened, self.verdict, self.details, self.told = self._keys

    def payload(self, rank: int) -> str:
        return f"payload/{self.number}/{rank}"

    def delete(self) -> None:
        for key in self._keys:
            self.store.delete_key(key)


def _meet(
    waits: _Waits,
    payload: str,
    judge: Callable[[list[str]], str],
    details: str,
    explain: Callable[[int, str, str], str] | None,
) -> str:
    group = waits.group
    store = dist.PrefixStore(f"rendezvous/{waits.purpose}", own_store(group, waits.text, waits.timeout))
    rounds = kept_for(group, _Rendezvous).next_rounds
    if group.rank() == 0:
        this = _Round(store, rounds[waits.purpose])
        rounds[waits.purpose] += 1
        kind, text = _preside(waits, this, payload, judge, details, explain)
    else:
        kind = "absent"
        # A round that was over before this rank came counts it as absent: it goes on to the next.
        while kind == "absent":
            this = _Round(store, rounds[waits.purpose])
            waits.wait(this, [this.opened], lambda: [0])
            rounds[waits.purpose] += 1
            kind, text = _attend(waits, this, payload, details)
    if kind == "gone":
        raise _RankGone(text)
    if kind != _OK:
        raise class_of(kind)(text)
    return text


def _attend(waits: _Waits, this: _Round, payload: str, details: str) -> tuple[str, str]:
    """Take part in a round as any rank but the first; return how it ends."""
    store, rank = this.store, waits.group.rank()
    store.set(this.payload(rank), payload)
    waits.wait(this, [this.verdict], lambda: [0], _GRACE)
    kind, absent, text = store.get(this.verdict).decode().split(":", 2)
    store.delete_key(this.payload(rank))
    if str(rank) in absent.split(","):
        return "absent", text
    if kind != "tell":
        return kind, text
    if text == str(rank):
        store.set(this.details, details)
    waits.wait(this, [this.told], lambda: [0], _GRACE)
    kind, _, text = store.get(this.told).decode().partition(":")
    return kind, text


def own_store(group: dist.ProcessGroup, purpose: str, timeout: timedelta | None = None) -> dist.Store:
    """Return the store that only this initialization of ``group`` writes to. Every rank must make the first call; one
    that failed may be repeated."""
    known = kept_for(group, _Rendezvous)
    if known.namespace is None:
        limit = timeout or _timeout(group, None)

        def error(absent: Sequence[int]) -> RuntimeError:
            return RankLostError(_absence(absent, group, purpose, limit))

        ranks = group.group_name, group.rank(), group.size()
        name = agree_on_name(*ranks, limit, _GRACE, error, known.token)
        known.namespace = dist.PrefixStore(name, default_store())
    return known.namespace


def _preside(
    waits: _Waits,
    this: _Round,
    payload: str,
    judge: Callable[[list[str]], str],
    details: str,
    explain: Callable[[int, str, str], str] | None,
) -> tuple[str, str]:
    """Lead a round as the first rank. Return how it ends (``_OK``, "gone" or an error's class) and a text."""
    store, group = this.store, waits.group
    leftovers = kept_for(group, _Rendezvous).leftovers
    keys = [this.payload(rank) for rank in range(1, group.size())]

    def absent() -> list[int]:
        return [rank for rank, key in enumerate(keys, 1) if not store.check([key])]

    store.set(this.opened, "")
    kind, text, missing = _OK, "", ""
    try:
        if keys:
            waits.wait(this, keys, absent)
    except RuntimeError as error:
        kind, text = _kind_of(error), str(error)
        missing = ",".join(map(str, absent()))
    else:
        # All ranks have arrived, and have read the rounds before. A round that some ranks missed stays until all meet
        # for the same purpose: those ranks count on from there.
        for earlier in (*leftovers.pop("", []), *leftovers.pop(waits.purpose, [])):
            earlier.delete()
        brought = [payload, *(item.decode() for item in (store.multi_get(keys) if keys else []))]
        payloads, _, asides = zip(*(item.rpartition("\n") for item in brought), strict=True)
        differing = next((rank for rank, given in enumerate(payloads) if given != payloads[0]), None)
        if explain is not None and differing is not None:
            return _ask(waits, this, differing, details, explain)
        text = judge([*(asides if any(asides) else payloads)])
    store.set(this.verdict, f"{kind}:{missing}:{text}")
    leftovers[waits.purpose if missing else ""].append(this)
    return kind, text


def _ask(
    waits: _Waits, this: _Round, rank: int, details: str, explain: Callable[[int, str, str], str]
) -> tuple[str, str]:
    """Ask a rank for its details, explain the difference to all ranks, and return the explanation."""
    store = this.store
    store.set(this.verdict, f"tell::{rank}")
    try:
        waits.wait(this, [this.details], lambda: [rank])
        raise RanksDifferError(explain(rank, details, store.get(this.details).decode()))
    except RuntimeError as error:  # also: it did not answer
        kind, text = _kind_of(error), str(error)
    store.set(this.told, f"{kind}:{text}")
    kept_for(waits.group, _Rendezvous).leftovers[""].append(this)
    return kind, text


def _kind_of(error: RuntimeError) -> str:
    return "gone" if isinstance(error, _RankGone) else name_of(error)


def _is_gone(group: dist.ProcessGroup, purpose: str, awaited: Callable[[], Sequence[int]]) -> str:
    dead = [] if failure_of(group) else gone(group, [rank for rank in awaited() if rank != group.rank()])
    if not dead:
        return ""
    return (
        f"{purpose}: rank(s) {_listed(dead)} have ended, or gave up because other ranks did: their connections are "
        f"closed, and they did not arrive at the rendezvous of {group.size()} ranks. Restart the processes from a "
        f"checkpoint{last_of_every_rank(group)}"
    )


def _absence(absent: Sequence[int], group: dist.ProcessGroup, purpose: str, timeout: timedelta) -> str:
    return (
        f"{purpose}: rank(s) {_listed(absent)} did not arrive at the rendezvous of {group.size()} ranks within "
        f"{timeout.total_seconds():g} s. Every rank must make this call; a missing rank hangs in a "
        f"collective, took another path, or has ended (set {TIMEOUT_ENV} to wait longer or shorter)"
        f"{last_of_every_rank(group)}"
    )


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more


def _timeout(group: dist.ProcessGroup, default: timedelta | None) -> timedelta:
    if os.environ.get(TIMEOUT_ENV):
        return limit_of(group)
    if failure_of(group):
        return _BROKEN_TIMEOUT
    return min(default, group_timeout(group)) if default else group_timeout(group)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, Any, Any] | None:
    """The first position where two sequences differ, with both values (``None`` past an end)."""
    pairs = enumerate(zip_longest(ours, theirs))
    return next(((i, a, b) for i, (a, b) in pairs if a != b), None)
