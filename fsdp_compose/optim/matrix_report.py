"""What optimizers that give whole matrices to owners say of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .matrices import Bucket, Plan


@dataclass(frozen=True)
class MatricesReport:
    """What a step of ``Muon`` or ``Matrixwise`` does if all parameters have gradients; ``str()`` is a text.

    Attributes:
        optimizer: the name of its class.
        num_matrices: how many matrices there are.
        owned: for each rank of this rank's shard group, the matrices that it owns.
        balance: the most work of any rank, relative to the mean.
        bytes_moved: bytes that all ranks of a shard group together send in a step.
        num_collectives: all-to-alls of a step.
        temporary_bytes: an estimate of the most memory that this rank needs beside parameters, gradients and
            the optimizer's state.
        largest_share: the largest matrix's share of all work: the balance cannot be better than this times the number
            of ranks.
        num_workers: the ranks that share the work: those of a shard group, times the replicas with ``over_replicas``.
    """

    optimizer: str
    num_matrices: int
    owned: tuple[int, ...]
    balance: float
    bytes_moved: int
    num_collectives: int
    temporary_bytes: int
    largest_share: float
    num_workers: int

    def __str__(self) -> str:
        bound = max(1.0, self.largest_share * self.num_workers)
        why = "one matrix is that much of the work" if bound > 1.05 else "the work is divisible"
        return (
            f"{self.optimizer}: {self.num_matrices} matrices on {self.num_workers} rank(s), {min(self.owned)} to "
            f"{max(self.owned)} each; "
            f"the busiest rank has {self.balance:.2f} times the mean (at least {bound:.2f}: {why}). A step moves "
            f"{self.bytes_moved:,} bytes in {self.num_collectives} all-to-all(s), and takes {self.temporary_bytes:,} "
            "bytes of temporary memory on this rank"
        )


def buckets_of(plan: Plan) -> list[Bucket]:
    """The buckets of a step if all parameters have gradients."""
    return plan.exchanges_of(b"\1" * len(plan.members))[1]


def report_of(optimizer: str, plans: Sequence[Plan], num_moves: int, temporary_bytes: int) -> MatricesReport:
    """Describe a step. ``num_moves``: how often what does not lie at its owner is sent."""
    num_ranks = max([plan.num_ranks for plan in plans], default=1)
    owned, loads, largest = [0] * num_ranks, Counter[tuple[int, int]](), 0
    matrices = moved = collectives = 0
    num_workers = max([plan.num_ranks * plan.num_replicas for plan in plans], default=1)
    for plan in plans:
        for replica in range(plan.num_replicas):
            of_replica = plan.owners if replica == plan.replica else plan.owners_in(replica)
            for member, owners in zip(plan.members, of_replica, strict=True):
                for owner in owners:
                    if owner >= 0:
                        loads[replica, owner] += member.shape.planned.cost
                        owned[owner] += replica == plan.replica
        matrices += sum([member.shape.planned.count for member in plan.members])
        largest = max([largest, *[member.shape.planned.cost for member in plan.members]])
        counts, size = [bucket.exchange.num_moved for bucket in buckets_of(plan)], plan.ns_dtype.itemsize
        moved += num_moves * size * sum(counts)
        collectives += num_moves * sum(map(bool, counts))
    total = loads.total()
    return MatricesReport(
        optimizer, matrices, tuple(owned), max(loads.values()) * num_workers / total if total else 1.0, moved,
        collectives, temporary_bytes, largest / total if total else 0.0, num_workers,
    )  # fmt: skip
