"""Callables among a module's own attributes, in the place of methods of its class."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch.nn as nn

_T = TypeVar("_T", bound="BoundToModule")


class BoundToModule:
    """Something that is called with one module. Refers to it weakly (a model is freed without the garbage collector),
    and in a copy of the module to the copy. No look at a module's attributes for what ``forward`` has kept sees it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def __self__(self) -> nn.Module:
        """The module, as of a method."""
        module = self._module()
        assert module is not None, "the module is gone"
        return module

    def for_copy(self: _T, module: nn.Module, memo: dict[int, Any]) -> _T:
        """The same for ``module``, a copy."""
        raise NotImplementedError

    def __deepcopy__(self: _T, memo: dict[int, Any]) -> _T:
        module = self.__self__
        return self.for_copy(memo.get(id(module), module), memo)
