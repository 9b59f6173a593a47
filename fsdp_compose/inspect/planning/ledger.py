"""How many bytes there are, of which kind, at each moment of a run: a list of what was allocated and freed, in order.

Storages are followed from the operation that first returns them until they die; some are known for what they are only
later (a gradient, when ``.grad`` shows it), so kinds are decided at the end, and then the moments are gone through.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from ..._torch import current_graph_task_id, is_wrapper, storage_id
from .facts import ACTIVATIONS, GATHERED, KINDS, OTHER, TEMPORARY, Moment


@dataclass
class _Item:
    """One storage. ``kind``: as far as is known."""

    kind: str
    nbytes: int
    reference: weakref.ref[torch.UntypedStorage]
    has_values: bool = True


@dataclass
class _Chapter:
    """What happens while one thing is done: the changes of storages, each with the bytes it grew by."""

    name: str
    changes: list[tuple[_Item, int]] = field(default_factory=list)


class Ledger:
    """Follows storages, from when it is made on.

    Attributes:
        has_recomputed: a forward was repeated in backward: something was made there for autograd to look at.
    """

    def __init__(self) -> None:
        self._items: dict[int, _Item] = {}
        self._chapters = [_Chapter("")]
        self._kind = OTHER
        self.has_recomputed = False

    @property
    def nbytes(self) -> int:
        """What there is now."""
        return sum(item.nbytes for item in self._items.values())

    def begin(self, name: str, kind: str) -> None:
        """From here on, ``name`` is done, and storages are of ``kind`` unless more is known of them."""
        self._chapters.append(_Chapter(name))
        self._kind = kind

    # ---- storages

    def see(self, tensor: torch.Tensor) -> None:
        """An operation has returned it: its memory is new, or known."""
        self._item(tensor.untyped_storage())

    def label(self, tensor: torch.Tensor, kind: str) -> None:
        """Its memory is of ``kind``, and has been."""
        for inner in plain_tensors(tensor):
            storage = inner.untyped_storage()
            if inner.device.type != "meta" and storage_id(storage) in self._items:
                self._items[storage_id(storage)].kind = kind

    def lose_values(self, tensor: torch.Tensor) -> None:
        """What should be in it was not computed."""
        self._item(tensor.untyped_storage()).has_values = False

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether the elements are what they would be."""
        item = self._items.get(storage_id(tensor.untyped_storage()))
        return item is None or item.has_values

    def resized(self, storage: torch.UntypedStorage) -> None:
        item = self._items.get(storage_id(storage))
        if item is not None:
            self._change(item, storage.nbytes() - item.nbytes)

    def exchanged(self, a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
        """Two storages have exchanged their memory: those of unsharded parameters do."""
        items = first, second = self._item(a), self._item(b)
        first.has_values, second.has_values = second.has_values, first.has_values
        first.kind = second.kind = GATHERED
        now = zip(items, (a.nbytes(), b.nbytes()), strict=True)
        for item, nbytes in sorted(now, key=lambda pair: pair[1]):  # there is no moment with twice the memory
            self._change(item, nbytes - item.nbytes)

    def _item(self, storage: torch.UntypedStorage) -> _Item:
        key = storage_id(storage)
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(self._kind_of_new(), 0, weakref.ref(storage, partial(self._died, key)))
            self._change(item, storage.nbytes())
        return item

    def _kind_of_new(self) -> str:
        if self._kind != TEMPORARY or current_graph_task_id() == -1 or not torch.is_grad_enabled():
            return self._kind
        self.has_recomputed = True
        return ACTIVATIONS

    def _died(self, key: int, _: object) -> None:
        self._change(self._items.pop(key), None)

    def _change(self, item: _Item, growth: int | None) -> None:
        growth = -item.nbytes if growth is None else growth
        if growth:
            item.nbytes += growth
            self._chapters[-1].changes.append((item, growth))

    # ---- afterwards

    def peaks(self) -> list[Moment]:
        """The moment of most bytes in each chapter, by kind, in their order; of several such moments the first."""
        found = []
        now: Counter[str] = Counter()
        for chapter in self._chapters:
            most, best = sum(now.values()), dict(now)
            total = most
            for item, growth in chapter.changes:
                now[item.kind] += growth
                total += growth
                if total > most:
                    most, best = total, dict(now)
            found.append(Moment(chapter.name, {kind: best.get(kind, 0) for kind in KINDS}))
        return found


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own inside a tensor, or itself."""
    if not is_wrapper(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor counts its mesh too
            yield from plain_tensors(inner)


def label_all(ledger: Ledger, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
    for tensor in tensors:
        if tensor is not None:
            ledger.label(tensor, kind)
