"""A run without kernels and without memory: operations return tensors with shapes, strides and storages, but nothing is
computed into them. A ledger tracks how many bytes of each kind exist at each moment."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from .._torch import (
    DispatchMode,
    all_to_all_on_cpu,
    current_graph_task_id,
    flex_attention_by,
    functional_collectives,
    is_composite,
    is_fake,
    is_wrapper,
    namespaces_of_collectives,
    overload_packet,
    process_group_of,
    storage_id,
)
from ..extension import CollectiveKind, Work
from .plan_report import ACTIVATIONS, GATHERED, KINDS, OTHER, TEMPORARY, CollectiveFacts, Moment
from .step_events import Operation, StepEvent, nbytes_of, operation_of

# ---- The ledger: allocations and frees of a run, in order, and the bytes of each kind at each moment.
#
# A storage is followed from the operation that first returns it until it dies. The kind of some storages is known only
# later (a gradient, once it is in ``.grad``), so the peaks are computed at the end.


@dataclass
class _Item:
    """One storage. ``kind`` may change when more is known."""

    kind: str
    nbytes: int
    reference: weakref.ref[torch.UntypedStorage]
    has_values: bool = True


class Ledger:
    """Tracks the storages of a run."""

    def __init__(self) -> None:
        self.phase = ""
        self.events: list[StepEvent] = []  # what this step does, in order
        self._items: dict[int, _Item] = {}
        self._phases: list[tuple[str, list[tuple[_Item, int]]]] = [("", [])]  # with what changed, by how many bytes
        self._kind = OTHER
        self.has_recomputed = False  # whether backward recomputed a forward, that is, made tensors with grad mode on

    def begin(self, name: str, kind: str) -> None:
        """Begin the phase ``name``. New storages are of ``kind`` until ``label`` says otherwise."""
        self.phase = name
        self._phases.append((name, []))
        self._kind = kind

    # ---- storages

    def see(self, tensor: torch.Tensor) -> None:
        """Track the storage of a tensor that an operation returned."""
        self._item(tensor.untyped_storage())

    def label(self, kind: str, *tensors: torch.Tensor | None) -> None:
        """Set the kind of the tensors' storages, for their whole lives."""
        plain = (inner for tensor in tensors if tensor is not None for inner in plain_tensors(tensor))
        for inner in plain:
            storage = inner.untyped_storage()
            if inner.device.type != "meta" and storage_id(storage) in self._items:
                self._items[storage_id(storage)].kind = kind

    def lose_values(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's elements were not computed."""
        self._item(tensor.untyped_storage()).has_values = False

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements are those of a real run."""
        item = self._items.get(storage_id(tensor.untyped_storage()))
        return item is None or item.has_values

    def resized(self, storage: torch.UntypedStorage) -> None:
        item = self._items.get(storage_id(storage))
        if item is not None:
            self._change(item, storage.nbytes() - item.nbytes)

    def exchanged(self, a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
        """Note that two storages exchanged their memory, as those of unsharded parameters do."""
        items = first, second = self._item(a), self._item(b)
        first.has_values, second.has_values = second.has_values, first.has_values
        first.kind = second.kind = GATHERED
        now = zip(items, (a.nbytes(), b.nbytes()), strict=True)
        for item, nbytes in sorted(now, key=lambda pair: pair[1]):  # shrink first: the memory never exists twice
            self._change(item, nbytes - item.nbytes)

    def _item(self, storage: torch.UntypedStorage) -> _Item:
        key = storage_id(storage)
        item = self._items.get(key)
        if item is None:
            kind = self._kind
            if self.is_recomputing:
                kind, self.has_recomputed = ACTIVATIONS, True
            item = self._items[key] = _Item(kind, 0, weakref.ref(storage, partial(self._died, key)))
            self._change(item, storage.nbytes())
        return item

    @property
    def is_recomputing(self) -> bool:
        # A backward that makes tensors with grad mode on recomputes a forward.
        return self._kind == TEMPORARY and current_graph_task_id() != -1 and torch.is_grad_enabled()

    def _died(self, key: int, _: object) -> None:
        item = self._items.pop(key)
        self._change(item, -item.nbytes)

    def _change(self, item: _Item, growth: int) -> None:
        if growth:
            item.nbytes += growth
            self._phases[-1][1].append((item, growth))

    # ---- afterwards

    def peaks(self) -> list[Moment]:
        """Return the peak of each phase, by kind, in order; among equal peaks, the first."""
        found = []
        now: Counter[str] = Counter()
        for name, changes in self._phases:
            most, best = sum(now.values()), dict(now)
            total = most
            for item, growth in changes:
                now[item.kind] += growth
                total += growth
                if total > most:
                    most, best = total, dict(now)
            found.append(Moment(name, {kind: best.get(kind, 0) for kind in KINDS}))
        return found


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own inside ``tensor``, or ``tensor`` itself."""
    if not is_wrapper(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor counts its mesh too
            yield from plain_tensors(inner)


# ---- Operations without their kernels: results have shapes, strides and storages, but nothing is computed into them.
#
# The machine does not provide memory that nobody writes to, so tensors may be arbitrarily large. Everything else works
# as in a real run: autograd, hooks, resized storages, addresses, versions. Small tensors whose elements are known
# (positions, masks, step counts) are computed, so control flow that depends on them is right.
#
# If an operation needs elements that were not computed (``item()``, ``nonzero()``), it raises ``Undecided`` from the
# user's line.


_MOST_BYTES, _MOST_FLOAT_BYTES = 1 << 24, 1 << 20  # of operands, or results, that are computed: indices; numbers
_NOTE_EVERY = 500  # operations

# Operations that return views although their schemas do not say so; and operations that reshape in place.
_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "_c10d_functional::wait_tensor"}
_RESHAPING = {
    "aten::resize_", "aten::resize_as_", "aten::set_", "aten::t_", "aten::transpose_", "aten::squeeze_",
    "aten::unsqueeze_", "aten::as_strided_", "aten::swapaxes_", "aten::swapdims_", "aten::detach_",
}  # fmt: skip


class Undecided(RuntimeError):
    """The program needs elements that were not computed."""


@dataclass(frozen=True)
class _Operation:
    """Properties of an operation, read from its schema."""

    is_view: bool  # it makes or changes views and computes nothing
    written: tuple[tuple[int, str], ...]  # position and name of each argument that it may write to
    results: tuple[int | None, ...]  # for each, the index in ``written`` of the argument that it is; None: a new tensor
    has_out: bool  # the results are ``out`` arguments, which it resizes
    is_in_place: bool  # all results are arguments, which keep their shapes
    is_composite: bool  # it is composed of other operations
    needs_elements: bool  # its result, or the shape of it, depends on elements of its arguments
    is_product: bool  # a matrix product, convolution or attention, which take most of a step's time
    placing: tuple[str, ...]  # its arguments for a device, pinned memory or a random generator


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
        needs_elements=torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags,
        is_product="scaled_dot_product" in name or "grouped_mm" in name or overload_packet(func) in flop_registry,
        placing=tuple(item.name for item in arguments if item.name in ("device", "pin_memory", "generator")),
    )


Take = Callable[[CollectiveFacts, dist.ProcessGroup], Work]


class DryRun(DispatchMode):
    """A dispatch mode that skips the kernels of operations on CPU tensors. ``note`` is called every now and then with
    the number of operations so far; ``take`` with each collective of the model itself and its process group, for its
    work."""

    def __init__(self, ledger: Ledger, note: Callable[[int], None], take: Take) -> None:
        super().__init__()
        self._ledger, self._note, self._take = ledger, note, take
        self._in_flight: dict[int, Work] = {}  # by the storages of their results
        self._num_operations = 0
        # By operation and arguments, since layers repeat the same ones: results, as meta tensors; and what is noted.
        self._shapes: dict[Hashable, Any] = {}
        self._events: dict[Hashable, Operation | None] = {}
        self.computed: set[str] = set()  # those of which torch cannot infer the shapes of results
        self.num_products = 0  # matrix products, convolutions and attentions so far

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_fake, types)):
            return func(*args, **kwargs)  # how DTensors find out the shapes of results
        if any(item.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for item in types):
            return NotImplemented  # DTensors and the like: operations on their inner tensors come back here
        tensors = _tensors((args, kwargs))
        if any(item.is_meta for item in tensors) or torch.device(kwargs.get("device") or "cpu").type == "meta":
            return func(*args, **kwargs)  # meta tensors have no memory
        self._num_operations += 1
        if self._num_operations % _NOTE_EVERY == 0:
            self._note(self._num_operations)
        operation = _operation(func)
        self.num_products += operation.is_product
        if operation.is_composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if operation.is_view or func.namespace == "c10d":
            result = self._done(func, args, kwargs)
            if func.namespace in namespaces_of_collectives:
                self._collective(func, args, result)
            return result
        # Integers are promoted to the default dtype.
        key = func, _key_of((args, kwargs)), torch.get_default_dtype()
        result = self._run(func, operation, args, kwargs, tensors, key)
        if func.namespace in namespaces_of_collectives:
            self._collective(func, args, result)
        else:
            self._note_event(func, operation, args, kwargs, result, key)
        return result

    def _collective(self, func: Any, args: Any, result: Any) -> None:
        """Note a collective that the model itself calls, or its wait for one. Works of asynchronous ones are no
        operations: they count as if they were waited for at once, but for those that return their results."""
        if func._schema.name.endswith("wait_tensor"):
            work = self._in_flight.pop(storage_id(result.untyped_storage()), None)
            if work is not None:
                work.wait()
        found = _collective_of(func, args, result)
        if found is None:
            return
        work, made = self._take(*found), _tensors(args[0] if func.namespace == "c10d" else result)
        for item in made if found[0].kind == CollectiveKind.ALL_TO_ALL else ():
            self._ledger.lose_values(item)
        if func.namespace != functional_collectives().name:
            work.wait()
            return
        self._in_flight |= {storage_id(item.untyped_storage()): work for item in made}

    def _note_event(self, func: Any, operation: _Operation, args: Any, kwargs: Any, result: Any, key: Hashable) -> None:
        ledger = self._ledger
        is_repeated = ledger.is_recomputing
        key = key, ledger.phase, is_repeated
        if key in self._events:
            event = self._events[key]
        else:
            event = operation_of(func, args, kwargs, result, _tensors, ledger.phase)
            if event is not None and is_repeated:
                event = replace(event, is_repeated=True)
            if not operation.needs_elements:  # on which the sizes of results may depend
                self._events[key] = event
        if event is not None:
            ledger.events.append(event)

    def _run(
        self, func: Any, operation: _Operation, args: Any, kwargs: Any, tensors: list[torch.Tensor], key: Hashable
    ) -> Any:
        can_compute = all(map(self._ledger.has_values, tensors)) and _are_small(tensors)
        if operation.is_in_place:
            return self._done(func, args, kwargs) if can_compute else self._written(operation, args, kwargs, [])
        if func._schema.name in ("aten::index", "aten::_unsafe_index"):
            args = (args[0], [index for item in args[1] for index in self._without_mask(func, item)], *args[2:])
            key = func, _key_of((args, kwargs)), key
        elif operation.needs_elements:
            if not can_compute:
                raise Undecided(_error_of(func))
            return self._done(func, args, kwargs)
        return self._made(func, operation, args, kwargs, can_compute, key)

    def _without_mask(self, func: Any, index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Return an index as a list; a mask is replaced by the positions of its true elements, one per dimension."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        if not self._ledger.has_values(index):
            raise Undecided(_error_of(func))
        return index.nonzero().unbind(1)

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for item in _tensors(result):
            self._ledger.see(item)
        return result

    def _made(self, func: Any, operation: _Operation, args: Any, kwargs: Any, can_compute: bool, key: Hashable) -> Any:
        try:
            shapes = self._shapes.get(key)
            if shapes is None:
                shapes = self._shapes[key] = _shapes_of(func, operation, args, kwargs)
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
        """Return results without elements, new ones with ``shapes``. Written arguments lose their elements too."""
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in operation.written]
        for item in _tensors(written):
            self._ledger.lose_values(item)
        if not operation.results:
            return None
        whole = shapes if isinstance(shapes, (tuple, list)) and len(operation.results) > 1 else [shapes]
        found = []
        for i, place in enumerate(operation.results):
            if place is None:
                found.append(self._empty_like(whole[i]))
                continue
            if operation.has_out and written[place].shape != whole[i].shape:
                written[place].resize_(whole[i].shape)
                self._ledger.see(written[place])
            found.append(written[place])
        return found[0] if len(found) == 1 else tuple(found)

    def _empty_like(self, shape: Any) -> Any:
        if not isinstance(shape, torch.Tensor):
            return [self._empty_like(item) for item in shape] if isinstance(shape, (list, tuple)) else shape
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        self._ledger.see(made)
        self._ledger.lose_values(made)
        return made


def _shapes_of(func: Any, operation: _Operation, args: Any, kwargs: Any) -> Any:
    """Return the results as meta tensors. Raises NotImplementedError if torch cannot tell."""
    on_meta = {name: "meta" if name == "device" else None for name in operation.placing}
    args, kwargs = tree_map(_without_elements, (args, {**kwargs, **on_meta}))
    if func._schema.name != "aten::_grouped_mm":
        return func(*args, **kwargs)
    # The CPU has it in all dtypes, but meta only in bfloat16.
    (dtype,) = {item.dtype for item in _tensors(args) if item.is_floating_point()}
    args, kwargs = tree_map(partial(_without_elements, dtype=torch.bfloat16), (args, kwargs))
    return tree_map(partial(_without_elements, dtype=dtype), func(*args, **kwargs))


def _collective_of(func: Any, args: Any, result: Any) -> tuple[CollectiveFacts, dist.ProcessGroup] | None:
    """Describe a collective that the model itself calls, and say of which process group; ``None``: it is none. Every
    rank is taken to send as much as this one, and an equal chunk to each."""
    name = func._schema.name.partition("::")[2].replace("_", "")
    kind = next((kind for word, kind in _COLLECTIVES.items() if word in name), None)
    if func.namespace not in namespaces_of_collectives or kind is None:
        return None
    names = [item.name for item in func._schema.arguments]
    is_in_place = "process_group" in names
    group = process_group_of(args[names.index("process_group" if is_in_place else "group_name")])
    given, made = args[is_in_place and kind != CollectiveKind.ALL_REDUCE], args[0] if is_in_place else result
    sent, num_ranks = nbytes_of(_tensors(given)), group.size()
    if kind == CollectiveKind.ALL_TO_ALL:
        facts = CollectiveFacts(kind, group.group_desc, sent * num_ranks, num_ranks, sent - sent // num_ranks)
    else:
        facts = CollectiveFacts(kind, group.group_desc, max(sent, nbytes_of(_tensors(made))), num_ranks)
    return facts, group


_COLLECTIVES = {  # by a part of the names of torch's operations, without underscores
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "allgather": CollectiveKind.ALL_GATHER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "allreduce": CollectiveKind.ALL_REDUCE,
}


@contextmanager
def kernels_of_devices() -> Iterator[None]:
    """On this thread, let RMSNorm be one operation that keeps its input and a number for each row, as on accelerators;
    on the CPU it is several, which keep more. FlexAttention, which has no backward there, is an attention to all, and
    DTensors exchange chunks by all-to-alls."""
    on_cpu, thread = torch.rms_norm, get_ident()

    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
        has_kernel = weight is None or weight.dtype == input.dtype
        if get_ident() != thread or _are_small([input]) or not has_kernel:  # others compute; small elements are known
            return on_cpu(input, normalized_shape, weight, eps)
        return torch.native_layer_norm(input, normalized_shape, weight, None, 0.0)[0]  # keeps as much

    # Not a mode for torch functions: none is active while autograd recomputes a checkpointed forward.
    torch.rms_norm = rms_norm
    try:
        with flex_attention_by(F.scaled_dot_product_attention), all_to_all_on_cpu():
            yield
    finally:
        torch.rms_norm = on_cpu


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in the arguments or results of an operation."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect((tree,), found)
    return found


def _collect(items: Iterable[Any], found: list[torch.Tensor]) -> None:
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            _collect(item, found)
        elif isinstance(item, dict):
            _collect(item.values(), found)


def _key_of(tree: Any) -> Hashable:
    """Arguments of an operation, but for the elements of tensors. What is known by identity alone is like nothing
    else: it may have changed."""
    if isinstance(tree, torch.Tensor):
        return torch.Tensor, tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple(map(_key_of, tree))
    if isinstance(tree, dict):
        return tuple((name, _key_of(value)) for name, value in tree.items())
    return (type(tree), tree) if isinstance(tree, _VALUES) else object()


_VALUES = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _are_small(tensors: Sequence[torch.Tensor]) -> bool:
    most = _MOST_FLOAT_BYTES if any(item.is_floating_point() for item in tensors) else _MOST_BYTES
    return sum(item.numel() * item.element_size() for item in tensors) <= most


def _without_elements(item: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a meta tensor like ``item``, of ``dtype`` if it has floating-point elements; other objects as they are."""
    if not isinstance(item, torch.Tensor):
        return item
    dtype = dtype if dtype is not None and item.is_floating_point() else item.dtype
    return torch.empty_strided(item.shape, item.stride(), dtype=dtype, device="meta")


def _error_of(func: Any) -> str:
    name = func._schema.name.rpartition("::")[2].strip("_")
    what = "item(), tolist() or a condition" if name == "local_scalar_dense" else f"{name}()"
    return (
        f"{what} needs elements of a tensor that a dry run does not compute, and the model's control flow depends on "
        "them. Avoid that (in a mixture of experts, use a grouped matrix product instead of a loop over experts; in a "
        "loss, avoid item())"
    )
