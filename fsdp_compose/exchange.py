"""The control exchange: once per backward, every rank learns whether all ranks did the same.

One all-reduce (MAX, bytes) on a CPU process group of its own::

    | hash of the order of collectives | its complement | used, 1 byte a parameter | late, 1 byte a group |

Equal hashes mean that every rank issued the same collectives in the same order: collectives of equal size pair
silently otherwise. ``used`` is how ranks agree which parameters have a gradient (``None`` is the same everywhere).
``late`` marks groups that received gradients after they had been reduced on some rank.

``FSDP_COMPOSE_EXCHANGE=first`` stops exchanging after the first ``FIRST_BACKWARDS`` backwards of a root: from then on
the set of used parameters is taken to be what was seen until then, and a rank that sees another one raises.
"""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from ._torch import AllreduceOptions, make_gloo_group
from .meeting import own_store

EXCHANGE_ENV = "FSDP_COMPOSE_EXCHANGE"
FIRST_BACKWARDS = 10
_HASH_BYTES = 8

_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo group over the ranks of ``group`` that carries the exchanges; made once, by all ranks of ``group``."""
    control = _control_groups.get(group)
    if control is None:
        store = dist.PrefixStore("control", own_store(group, "making the control group"))
        control = make_gloo_group(group, store)
        _control_groups[group] = control
    return control


class ControlExchange:
    """The exchanges of one root. ``control`` is ``None`` where there is nobody to exchange with; ``may_stop``: the
    environment may say that only the first backwards exchange."""

    def __init__(
        self, num_params: int, num_groups: int, control: dist.ProcessGroup | None, may_stop: bool = True
    ) -> None:
        self._control = control
        self._buffer = bytearray(2 * _HASH_BYTES + num_params + num_groups)
        self._tensor = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._view = memoryview(self._buffer)
        self.used = self._view[2 * _HASH_BYTES : 2 * _HASH_BYTES + num_params]
        self.late = self._view[2 * _HASH_BYTES + num_params :]
        self._options = AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._options.asyncOp = True
        self._work: dist.Work | None = None
        self._num_backwards = 0
        self._stops = may_stop and os.environ.get(EXCHANGE_ENV) == "first"
        self._learned = bytearray(num_params)

    @property
    def is_on(self) -> bool:
        """Whether this backward exchanges (with real peers or by itself)."""
        return not (self._stops and self._num_backwards >= FIRST_BACKWARDS)

    def start(self, order_hash: int) -> None:
        """Send off this rank's ``used`` and ``late``, which the caller has filled in, and the hash."""
        digest = order_hash & (2 ** (8 * _HASH_BYTES) - 1)
        own = digest.to_bytes(_HASH_BYTES, "little")
        self._view[:_HASH_BYTES] = own
        self._view[_HASH_BYTES : 2 * _HASH_BYTES] = bytes(255 - byte for byte in own)
        if self._control is not None and self.is_on:
            self._work = self._control.allreduce([self._tensor], self._options)

    def wait(self) -> bool:
        """Wait for the answer, after which ``used`` and ``late`` are every rank's together.

        Returns:
            Whether all ranks issued the same collectives in the same order.

        Raises:
            RuntimeError: a rank did not take part; or exchanges have stopped and this rank uses other parameters.
        """
        if not self.is_on:
            self._check_learned()
            return True
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    "the control exchange at the end of backward failed: another rank died, or did not run this "
                    f"backward. {error}"
                ) from error
        if self._stops:
            self._learned[:] = bytes(a | b for a, b in zip(self._learned, self.used, strict=True))
        self._num_backwards += 1
        head = self._view
        return all(head[i] + head[_HASH_BYTES + i] == 255 for i in range(_HASH_BYTES))

    def abandon(self) -> None:
        """Wait for an exchange that an exception left in flight and forget it."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _check_learned(self) -> None:
        if any(used and not learned for used, learned in zip(self.used, self._learned, strict=True)):
            raise RuntimeError(
                "a parameter received a gradient that had none in the first "
                f"{FIRST_BACKWARDS} backwards, and control exchanges are off ({EXCHANGE_ENV}=first), so the ranks "
                f"cannot agree on it; unset {EXCHANGE_ENV}"
            )
        self.used[:] = self._learned


def order_hash(trace: list[int], seed: int) -> int:
    """A hash of a sequence of small integers that is the same in every process (integers are not salted)."""
    return hash((seed, *trace))
