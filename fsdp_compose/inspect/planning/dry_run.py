"""Operations on tensors without their work: results have shapes, strides and storages, and no one fills them.

Memory that is not written to is not taken from the machine, so tensors may be as large as they like. All else is as in
a real run: autograd, hooks, storages that are resized, addresses, versions; and small tensors whose elements are known
(positions, masks, step counts) are computed, so that what depends on them goes the way it would.

Where operations cannot know their result without the elements (``item()``, ``nonzero()``) and these were not computed,
``Undecided`` is raised, from the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ..._torch import DispatchMode, is_composite, simplified
from .ledger import Ledger

_MOST_BYTES, _MOST_FLOAT_BYTES = 1 << 24, 1 << 20  # of operands, or results, that are computed: indices; numbers
_NOTE_EVERY = 500  # operations

# Views by what they do, which their schemas do not say; and what changes a tensor's shape in place.
_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "_c10d_functional::wait_tensor"}
_RESHAPING = {
    "aten::resize_", "aten::resize_as_", "aten::set_", "aten::t_", "aten::transpose_", "aten::squeeze_",
    "aten::unsqueeze_", "aten::as_strided_", "aten::swapaxes_", "aten::swapdims_", "aten::detach_",
}  # fmt: skip


class Undecided(RuntimeError):
    """What comes next depends on elements that were not computed."""


@dataclass(frozen=True)
class _Operation:
    """What a schema says.

    Attributes:
        is_view: it makes or changes views: nothing is computed.
        written: for each argument that may be written to, its place and name.
        results: for each result, the place in ``written`` of the argument that it is; ``None`` for a new tensor.
        has_out: the results are arguments, which get their shapes.
        is_in_place: no result is new, and each has its shape.
        is_composite: it is made of others.
        needs_elements: the elements of its arguments may decide about the shape of its result, or are it.
        placing: its arguments that say where to make a tensor, or with what random numbers.
    """

    is_view: bool
    written: tuple[tuple[int, str], ...]
    results: tuple[int | None, ...]
    has_out: bool
    is_in_place: bool
    is_composite: bool
    needs_elements: bool
    placing: tuple[str, ...]


@cache
def _operation(func: Any) -> _Operation:
    schema, name = func._schema, func._schema.name
    arguments, infos = schema.arguments, [item.alias_info for item in schema.returns]
    written = [(i, item.name) for i, item in enumerate(arguments) if item.alias_info and item.alias_info.is_write]
    sets = [arguments[i].alias_info.before_set for i, _ in written]
    is_view = bool(infos) and all(info is not None and not info.is_write for info in infos)
    results = tuple(sets.index(info.before_set) if info is not None and info.is_write else None for info in infos)
    has_out = any(arguments[i].is_out for i, _ in written)
    return _Operation(
        is_view=is_view or name in _VIEWS or name in _RESHAPING,
        written=tuple(written),
        results=results,
        has_out=has_out,
        is_in_place=bool(written) and None not in results and not has_out,
        is_composite=is_composite(func),
        needs_elements=not _ELEMENT_TAGS.isdisjoint(func.tags),
        placing=tuple(item.name for item in arguments if item.name in ("device", "pin_memory", "generator")),
    )


_ELEMENT_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DryRun(DispatchMode):
    """While it is entered, operations on tensors of the host are not done.

    Args:
        ledger: what storages there are.
        note: called now and then, with the number of operations so far.

    Attributes:
        computed: operations that had to be computed, whatever it took.
    """

    def __init__(self, ledger: Ledger, note: Callable[[int], None]) -> None:
        super().__init__()
        self._ledger, self._note = ledger, note
        self._num_operations = 0
        self.computed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(item.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for item in types):
            return NotImplemented  # DTensors and the like: what they consist of comes back here
        tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        if any(item.is_meta for item in tensors) or _is_meta(kwargs.get("device")):
            return func(*args, **kwargs)  # has no memory, and shapes alone are asked for
        self._num_operations += 1
        if self._num_operations % _NOTE_EVERY == 0:
            self._note(self._num_operations)
        operation = _operation(func)
        if operation.is_composite:
            with self:
                result = simplified(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if operation.is_view or func.namespace == "c10d":
            return self._done(func, args, kwargs)
        can_compute = all(map(self._ledger.has_values, tensors)) and _are_small(tensors)
        if operation.is_in_place:
            return self._done(func, args, kwargs) if can_compute else self._written(operation, args, kwargs, [])
        if func._schema.name in _INDEXING:
            args = (args[0], [part for item in args[1] for part in self._without_mask(func, item)], *args[2:])
        elif operation.needs_elements:
            if not can_compute:
                raise Undecided(_error_of(func))
            return self._done(func, args, kwargs)
        return self._made(func, operation, args, kwargs, can_compute)

    def _without_mask(self, func: Any, index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """An index; in the place of a mask the numbers of its elements that are true, by dimension."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        if not self._ledger.has_values(index):
            raise Undecided(_error_of(func))
        return index.nonzero().unbind(1)

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        """It is done."""
        result = func(*args, **kwargs)
        for item in _tensors(result):
            self._ledger.see(item)
        return result

    def _made(self, func: Any, operation: _Operation, args: Any, kwargs: Any, can_compute: bool) -> Any:
        """The results of an operation that makes tensors."""
        try:
            shapes = _shapes_of(func, operation, args, kwargs)
        except NotImplementedError:  # torch cannot tell
            result = self._done(func, args, kwargs)
            if not can_compute:
                self.computed.add(str(func))
                for item in _tensors(result):
                    self._ledger.lose_values(item)
            return result
        if can_compute and _are_small(_tensors(shapes)):
            return self._done(func, args, kwargs)
        return self._written(operation, args, kwargs, shapes)

    def _written(self, operation: _Operation, args: Any, kwargs: Any, shapes: Any) -> Any:
        """The results, new ones with ``shapes``, without elements; and what is written to has none either."""
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in operation.written]
        for item in _tensors(written):
            self._ledger.lose_values(item)
        if not operation.results:
            return None
        whole = shapes if isinstance(shapes, (tuple, list)) and len(operation.results) > 1 else [shapes]
        found = []
        for i, place in enumerate(operation.results):
            if place is None:
                found.append(tree_map(self._empty_like, whole[i]))
                continue
            if operation.has_out and written[place].shape != whole[i].shape:
                written[place].resize_(whole[i].shape)
                self._ledger.see(written[place])
            found.append(written[place])
        return found[0] if len(found) == 1 else tuple(found)

    def _empty_like(self, shape: Any) -> Any:
        if not isinstance(shape, torch.Tensor):
            return shape
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        self._ledger.see(made)
        self._ledger.lose_values(made)
        return made


def _shapes_of(func: Any, operation: _Operation, args: Any, kwargs: Any) -> Any:
    """The results as tensors of the meta device.

    Raises:
        NotImplementedError: torch cannot tell.
    """
    on_meta = {name: "meta" if name == "device" else None for name in operation.placing}
    args, kwargs = tree_map(_without_elements, (args, {**kwargs, **on_meta}))
    if func._schema.name not in _HALF_ON_META:
        return func(*args, **kwargs)
    dtypes = {item.dtype for item in _tensors(args) if item.is_floating_point()}
    args, kwargs = tree_map(lambda item: _cast(item, torch.bfloat16), (args, kwargs))
    return tree_map(lambda item: _cast(item, *dtypes), func(*args, **kwargs))


_HALF_ON_META = {"aten::_grouped_mm"}  # what the meta device refuses in other dtypes, and the CPU does


def _cast(item: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(item, torch.Tensor) and item.is_floating_point()
    return torch.empty_strided(item.shape, item.stride(), dtype=dtype, device="meta") if is_float else item


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_flatten(tree)[0] if isinstance(item, torch.Tensor)]


def _are_small(tensors: Sequence[torch.Tensor]) -> bool:
    most = _MOST_FLOAT_BYTES if any(item.is_floating_point() for item in tensors) else _MOST_BYTES
    return sum(item.numel() * item.element_size() for item in tensors) <= most


def _without_elements(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    return item


_INDEXING = {"aten::index", "aten::_unsafe_index"}


def _error_of(func: Any) -> str:
    name = func._schema.name.rpartition("::")[2].strip("_")
    what = "item(), tolist() or a condition" if name == "local_scalar_dense" else f"{name}()"
    return (
        f"{what} needs the elements of a tensor that a dry run does not compute, and the model goes on from there. Let "
        "the model not depend on them (a mixture of experts: with a grouped matrix product in the place of a loop over "
        "experts; a loss: without item())"
    )
