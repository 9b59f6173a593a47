"""Small random training programs: a description that can be pickled and printed, and what runs it on every rank.

A ``Program`` is a tree of modules, how it is sharded, and a few actions of a training loop. ``runner`` builds the model
twice, shards one, does the same to both, and compares after every action: losses, gradients (also where there is none)
and parameters. The unsharded model plays the ranks in turn, each with that rank's share of the batch, so that what a
module does may depend on the rank.
"""

from .description import (
    CALLS,
    COMPOUNDS,
    EDITORS,
    INNER_BACKWARDS,
    LEAVES,
    TERMS,
    WAYS,
    Action,
    Group,
    Part,
    Program,
    parts_of,
)
from .edits import EDITS
from .runner import run_on_every_rank

__all__ = [
    "CALLS", "COMPOUNDS", "EDITORS", "EDITS", "INNER_BACKWARDS", "LEAVES", "TERMS", "WAYS", "Action", "Group",
    "Part", "Program", "parts_of", "run_on_every_rank",
]  # fmt: skip
