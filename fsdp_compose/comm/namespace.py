"""The part of the key-value store that belongs to one initialisation of a process group.

A store can outlive the processes that use it: ``torchrun --max-restarts`` starts new ones on the store of the dead
ones, and a program may destroy its process group and make another. What was written before then looks like an answer.
So everything that this package keeps in the store lies under a name that the ranks of a process group agree on when
they first meet, and that no other initialisation has.

How they agree, in a store in which any key may be an old one: every rank has a random token. The first rank puts its
own, the *challenge*, under a fixed key; the others answer it under keys that contain the challenge; the first rank
grants each answer under a key that contains the token it was answered with. Keys that contain a token of this
initialisation cannot be old, so the first rank counts fresh answers only, and a rank that has answered an old challenge
is not granted anything and answers again as soon as there is another. The challenge is the name.

Cost, once per process group: about ten operations a rank, however many ranks; all keys are deleted but the challenge.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from .._torch import default_store

_FIRST_LOOK, _RAREST_LOOK = 0.002, 0.5  # seconds between looks for a newer challenge

Absence = Callable[[Sequence[int]], Exception]
"""The error to raise when these ranks did not come."""


class Ranks(Protocol):
    """Ranks that meet: a process group, or those that are to form one."""

    @property
    def group_name(self) -> str: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


_namespaces: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store] = weakref.WeakKeyDictionary()
_tokens: weakref.WeakKeyDictionary[Ranks, str] = weakref.WeakKeyDictionary()


def known_namespace(group: dist.ProcessGroup) -> dist.Store | None:
    """The store in which only this initialisation of ``group`` writes; ``None`` before the ranks have agreed on it."""
    return _namespaces.get(group)


def agree_on_namespace(group: dist.ProcessGroup, timeout: timedelta, grace: timedelta, absence: Absence) -> dist.Store:
    """The store in which only this initialisation of ``group`` writes. At the first call all ranks must come; a call
    that failed may be made again.

    Args:
        timeout: how long the first rank waits for the others; these wait for ``grace`` longer.

    Raises:
        Exception: what ``absence`` returns for the ranks that did not come.
    """
    namespace = _namespaces.get(group)
    if namespace is None:
        name = agree_on_name(group, timeout, grace, absence)
        namespace = _namespaces[group] = dist.PrefixStore(name, default_store())
    return namespace


def agree_on_name(ranks: Ranks, timeout: timedelta, grace: timedelta, absence: Absence) -> str:
    """A name that ``ranks`` agree on, and that no earlier initialisation has used; otherwise as
    ``agree_on_namespace``."""
    base = f"fsdp_compose/{ranks.group_name}"
    store = dist.PrefixStore(f"{base}/challenge", default_store())
    token = _tokens.get(ranks)
    if token is None:
        token = _tokens[ranks] = secrets.token_hex(8)
    if ranks.rank() == 0:
        name = token
        _challenge(store, token, ranks.size(), timeout, absence)
    else:
        name = _answer(store, token, ranks.rank(), timeout + grace, absence)
    return f"{base}/{name}"


def _challenge(store: dist.Store, token: str, size: int, timeout: timedelta, absence: Absence) -> None:
    """The first rank's part."""
    store.set("now", token)
    answers = [f"answer/{token}/{rank}" for rank in range(1, size)]
    if not answers:
        return
    if not wait_for(store, answers, timeout):
        raise absence([rank for rank, key in enumerate(answers, 1) if not store.check([key])])
    granted = [f"granted/{answer.decode()}" for answer in store.multi_get(answers)]
    store.multi_set(granted, [token] * len(granted))  # type: ignore[attr-defined]  # torch 2.13 has no stub for it


def _answer(store: dist.Store, token: str, rank: int, timeout: timedelta, absence: Absence) -> str:
    """The other ranks' part. Return the challenge that holds."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause, granted, answered = _FIRST_LOOK, f"granted/{token}", ""
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
        pause = min(2 * pause, _RAREST_LOOK)
    challenge = store.get(granted).decode()
    _forget(store, answered, rank)
    store.delete_key(granted)
    return challenge


def _forget(store: dist.Store, challenge: str, rank: int) -> None:
    if challenge:
        store.delete_key(f"answer/{challenge}/{rank}")


def wait_for(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> bool:
    """Whether all ``keys`` were there in time."""
    try:
        store.wait(list(keys), timeout)
    except dist.DistNetworkError:
        raise  # the process that holds the store is gone
    except RuntimeError:
        return False
    return True
