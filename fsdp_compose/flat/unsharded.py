"""The memory of one unsharded flat parameter: when it exists, and when it can be read.

Owned by its ``FlatParamHandle``; driven by ``reduction``. Two storages hold one piece of memory in turn::

                       allocate()        show()           free()
    memory is in   -         ->   hidden   ->     shown     ->     -

    hidden   what the all-gather writes to
    shown    what the unsharded parameters are views of

So the parameters have elements from the moment when their all-gather is complete until they are resharded, and at no
other. At all others ``shown`` refuses access. A parameter that was kept somewhere and is read too late, and a backward
that needs parameters which no hook has gathered, get a RuntimeError: freed memory would crash the process, and memory
that an all-gather still fills would give wrong numbers. To show and to hide is to exchange two pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._torch import memory_exchange, refuse_access


class UnshardedMemory:
    """The memory of ``flat``, which is new, and hidden at first. For views of ``shown`` to be made, ``show`` it.

    Args:
        flat: what the all-gather writes to; or, if there is nothing to gather, what is always there.
        error: what is said to those who read the parameters at the wrong time (only builds of torch with CUDA can);
            ``None`` if no time is wrong.

    Attributes:
        hidden: the flat parameter as the all-gather writes it.
        shown: the flat parameter as the unsharded parameters show it.
        storage: what ``shown`` is a view of.
        allocate: makes room for an all-gather.
        is_guarded: access is refused at the wrong time; some versions of torch cannot do that.
    """

    __slots__ = ("_exchange", "_hidden_storage", "_is_shown", "allocate", "hidden", "is_guarded", "shown", "storage")

    def __init__(self, flat: torch.Tensor, error: str | None) -> None:
        self.hidden = flat
        self._hidden_storage = flat.untyped_storage()
        self.allocate: Callable[[], Any] = partial(self._hidden_storage.resize_, self._hidden_storage.nbytes())
        self.shown = torch.empty(0, dtype=flat.dtype, device=flat.device)
        self.storage = self.shown.untyped_storage()
        self.is_guarded = error is not None and refuse_access(self.storage, error)
        self._is_shown = not self.is_guarded
        self._exchange: Callable[[], Any] | None = None
        if self.is_guarded:
            self._exchange = memory_exchange(self.storage, self._hidden_storage)
            self.show()
            self.shown.set_(self.storage, 0, flat.shape, (1,))
            self.hide()
        else:
            self.shown, self.storage = flat.data, self._hidden_storage

    def rename(self, error: str) -> None:
        """Say ``error`` from now on."""
        if not self._is_shown:
            refuse_access(self.storage, error)

    def show(self) -> None:
        """Let the parameters be read: the all-gather is complete."""
        if not self._is_shown and self._exchange is not None:
            self._exchange()
            self._is_shown = True

    def hide(self) -> None:
        """Before another all-gather into the same memory."""
        if self._is_shown and self._exchange is not None:
            self._exchange()
            self._is_shown = False

    def free(self) -> None:
        if self._is_shown and self._exchange is not None:
            self._exchange()
            self._is_shown = False
        self._hidden_storage.resize_(0)

    def nbytes(self) -> int:
        """What is allocated, shown or hidden."""
        return max(self.storage.nbytes(), self._hidden_storage.nbytes())


def explain_refused_access(error: BaseException | None) -> None:
    """Add to an error of torch's, which may not say so, that it is about parameters that were read too late."""
    if isinstance(error, RuntimeError) and _ERROR_OF_TORCH in str(error) and not hasattr(error, "__notes__"):
        add_note = getattr(error, "add_note", None)  # Python 3.11
        if add_note is not None:
            add_note(_NOTE)


_ERROR_OF_TORCH = "Cannot access data pointer of Storage that is invalid"
_NOTE = (
    "fsdp_compose: if this tensor is (a view of) a parameter of a fully_shard'ed module, it was used while the module "
    "is sharded. clone() what is kept of a parameter inside forward, and do not compute with a parameter outside the "
    "forward of its module"
)
