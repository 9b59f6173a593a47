"""Methods other than ``forward`` that compute with a sharded module's parameters: ``generate``, ``encode``, ..."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from .runtime import post_forward, pre_forward
from .state import get_state


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
    if get_state(module) is None or isinstance(method, _ForwardMethod):
        return
    module.__dict__[method_name] = _ForwardMethod(module, getattr(method, "__func__", method))


class _ForwardMethod:
    """Stands in an instance's ``__dict__`` before the method of its class. Refers to the instance weakly, and in a copy
    of the instance to the copy."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "the module is gone"
        args, kwargs = pre_forward(module, args, kwargs)
        output = None
        try:
            output = self._function(module, *args, **kwargs)
        except BaseException:
            post_forward(module, args, None)
            raise
        replaced = post_forward(module, args, output)
        return output if replaced is None else replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardMethod:
        module = self._module()
        assert module is not None, "the module is gone"
        return _ForwardMethod(memo.get(id(module), module), self._function)
