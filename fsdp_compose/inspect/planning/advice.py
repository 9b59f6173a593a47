"""Advice, read off the facts."""
from __future__ import annotations
from .facts import WorldFacts
def advise(facts: WorldFacts) -> WorldFacts:
    return facts
