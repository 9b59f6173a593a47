"""Two memories on a machine with one: each storage is on the host or on the device, whatever torch calls its device.

Offload is bookkeeping: what is where, and how often it is copied. Without an accelerator, CPU-only torch (2.13) has no
second device that could show a mistake. ``cpu:1`` is ``cpu`` (the index is dropped). ``meta`` and fake tensors have no
numbers. A backend made in Python for ``privateuse1`` has tensors without storage, where flat parameters are views whose
storages come and go; one in C++ needs a compiler, which the tests may not ask for, and gloo would not carry it: no
training on several ranks could be compared with anything.

So real CPU tensors are trained with, by real gloo ranks, and ``TwoMemories`` watches each operator that reaches the
dispatcher, those of backward, optimizers and collectives included. Memory is on the host if ``host_memory`` has made
it, or if an operator has made it from what is there; else it is on the device. What devices would refuse, or the
design forbids, raises:

- an operator that reads or writes elements of both (0-dim tensors are exempt, as with torch) and is no copy;
- a collective on host memory.

Copies between the two are counted, with their bytes. It cannot see what a stream would have done in another order, nor
memory that is made for the wrong side by ``torch.empty(..., device=...)`` and never meets the other: tests look at
where tensors are (``is_on_host``).
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compose._torch import is_wrapper
from fsdp_compose.core.flat import local_of
from tests.internals import import_all, tensors_of

import_all()

_MAKERS = [
    sys.modules["fsdp_compose.core.flat.shard_storage"],
    *(
        sys.modules[f"fsdp_compose.plugins.offloading.{name}"]
        for name in ("model_offload", "checkpointed_inputs", "state_offload")
    ),
]
IN, OUT = "host to device", "device to host"
_COPIES = {"aten::copy_", "aten::_foreach_copy_", "aten::_to_copy"}


class TwoMemories(TorchDispatchMode):
    """While entered, knows which storages are on the host.

    Attributes:
        copies: the sizes in bytes of the copies in either direction, in their order.
        refuses_host_collectives: a collective on host memory raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, StorageWeakRef] = {}
        self._made = _MAKERS[0].host_memory
        self.copies: dict[str, list[int]] = {IN: [], OUT: []}
        self.refuses_host_collectives = True

    def __enter__(self) -> TwoMemories:
        self._patches = [mock.patch.object(module, "host_memory", self._host_memory) for module in _MAKERS]
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def _host_memory(self, numel: int, dtype: torch.dtype, pins: bool) -> torch.Tensor:
        made = self._made(numel, dtype, pins)
        self._note(made)
        return made

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        local = local_of(tensor)
        return not local.numel() or self._is_host(local.untyped_storage())

    def num_bytes(self) -> Counter[str]:
        return Counter({direction: sum(sizes) for direction, sizes in self.copies.items()})

    def forget_copies(self) -> None:
        self.copies = {IN: [], OUT: []}

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = StorageWeakRef(storage)  # which keeps the number from being given again

    def _is_host(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of(*args, *kwargs.values())
        if any(map(is_wrapper, given)):
            return NotImplemented  # what the subclass does inside comes here again
        name = func._schema.name
        with_elements = [item for item in given if item.layout == torch.strided and item.dim() and item.numel()]
        sides = [self._is_host(item.untyped_storage()) for item in with_elements]
        if name in _COPIES:
            self._count(name, args)
        elif name.startswith("c10d::") and any(sides) and self.refuses_host_collectives:
            raise AssertionError(f"{name} on host memory: {[tuple(item.shape) for item in given]}")
        elif any(sides) and not all(sides) and not _is_about_memory(name):
            places = [(tuple(item.shape), "host" if side else "device") for item, side in zip(with_elements, sides)]
            raise AssertionError(f"{name} mixes host and device memory: {places}")
        known = {item.untyped_storage()._cdata for item in given if item.layout == torch.strided}
        result = func(*args, **kwargs)
        if any(sides):
            for made in tensors_of(result):
                if made.layout == torch.strided:
                    if made.untyped_storage()._cdata not in known:
                        self._note(made)
        return result

    def _count(self, name: str, args: Any) -> None:
        if name == "aten::_to_copy":
            return  # of one device to itself: it changes the dtype
        targets, sources = args[:2] if name == "aten::_foreach_copy_" else ([args[0]], [args[1]])
        for target, source in zip(targets, sources, strict=True):
            if not (target.numel() and target.dim() and source.dim()):
                continue
            to_host, from_host = (self._is_host(item.untyped_storage()) for item in (target, source))
            if to_host != from_host:
                self.copies[OUT if to_host else IN].append(target.numel() * target.element_size())


def _is_about_memory(name: str) -> bool:
    return name in ("aten::set_", "aten::set_data", "aten::alias", "aten::detach")
