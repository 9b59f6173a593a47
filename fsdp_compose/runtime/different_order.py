"""The error that all ranks raise together once they know that they have not issued the same collectives."""

from __future__ import annotations

import hashlib

from ..comm import known_journal, last_of_every_rank, meet
from ..group import Root, first_difference_of_traces


def raise_different_order(root: Root, code: int) -> None:
    """Raise, on every rank, an error that names the first collective that differs. Ranks: all, for each knows of it.

    Args:
        code: of what this rank is about to do.
    """
    group = root.mesh.peers
    lasts = last_of_every_rank(group)
    lines = root.order.trace_as_text(root, code)

    def explain(rank: int, ours: str, theirs: str) -> str:
        difference = first_difference_of_traces(ours, theirs)
        assert difference is not None, "digests of the codes differ"
        position, a, b = difference
        return (
            f"the ranks issued different collectives in this iteration: collective {position} was {a} on "
            f"rank 0 and {b} on rank {rank}. No gradient was published. Ranks must run the same "
            "fully_shard groups in the same order: shard modules that only some ranks use (experts, modalities) with "
            "fully_shard(optional=True), or in one group with their parent, or run all of them on every rank; run "
            f"several models in the same order on every rank{lasts}"
        )

    details = "\n".join(lines)
    codes = [line.partition("\t")[0] for line in lines]  # what they name may be gone on some ranks only
    digest = hashlib.sha256("\n".join(codes).encode()).hexdigest()
    journal = known_journal(group)
    if journal is not None:
        journal.wait(journal.count)  # another rank may wait for a collective of ours: tell what this one has entered
    try:
        meet(group, "comparing collectives", digest, lambda _: "", details, explain)
    except RuntimeError as error:
        if journal is not None and journal.difference:
            raise RuntimeError(journal.difference) from error
        raise
    finally:
        if journal is not None:
            journal.go_on()
        root.order.close()  # all ranks know: other models shall not hear of it again
    raise RuntimeError("the ranks issued different collectives in this iteration; no gradient was published")
