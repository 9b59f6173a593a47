"""What is kept for objects that the package does not own, while other threads make and drop them."""

from __future__ import annotations

import pytest

from fsdp_compose.core.comm import all_kept, context, kept_for


class Owner:
    """What a record can be kept for."""


class Record:
    """A record that is kept."""


def test_owners_that_another_thread_has_dropped_meanwhile_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, other = Owner(), Owner()
    record = kept_for(owner, Record)
    kept_for(other, Record)
    references = context._contexts.keyrefs()  # as the watchdog has them
    del other
    monkeypatch.setattr(context._contexts, "keyrefs", lambda: references)
    assert all_kept(Record) == [(owner, record)]
