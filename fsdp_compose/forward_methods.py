"""Methods other than ``forward`` that compute with a sharded module's parameters: ``generate``, ``encode``, ..."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.nn as nn

from .group import BoundToModule, get_state
from .runtime import post_forward, pre_forward


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the parameters of ``module``'s group while its method ``method_name`` runs, as around ``forward``.

    Without it, a method that is called directly sees the sharded parameters, and an operation that mixes them with
    plain tensors raises. Calls of ``module`` itself and of its submodules inside the method work as always; the method
    can be trained through.

    Ranks: the call is local; a call of the method is like a forward, to be made by all ranks of the mesh.

    Args:
        module: a module; nothing happens if ``fully_shard`` was not called on it, so that code can be shared with
            unsharded models.
        method_name: an attribute of ``module`` that can be called.

    Raises:
        ValueError: ``module`` has no such method.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_forward_method(): a {type(module).__name__} has no method {method_name!r}")
    if get_state(module) is None or isinstance(module.__dict__.get(method_name), _ForwardMethod):
        return
    if isinstance(method, MethodType) and method.__self__ is module:
        module.__dict__[method_name] = _ForwardMethod(module, method.__func__, is_bound=True)
    else:
        module.__dict__[method_name] = _ForwardMethod(module, method, is_bound=False)


class _ForwardMethod(BoundToModule):
    """Stands in an instance's ``__dict__`` before the method of its class.

    Args:
        module: the instance.
        function: what is called, with the instance as first argument if ``is_bound``: not for static methods and other
            callable attributes.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], is_bound: bool) -> None:
        super().__init__(module)
        functools.update_wrapper(self, function)
        self._function, self._is_bound = function, is_bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        args, kwargs = pre_forward(module, args, kwargs)
        output = None
        try:
            output = self._function(module, *args, **kwargs) if self._is_bound else self._function(*args, **kwargs)
        except BaseException:
            post_forward(module, args, None)
            raise
        replaced = post_forward(module, args, output)
        return output if replaced is None else replaced

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> _ForwardMethod:
        function = self._function if self._is_bound else copy.deepcopy(self._function, memo)
        return _ForwardMethod(module, function, self._is_bound)
