"""A training step on one rank of many, without the other ranks and without memory, and the facts of it.

``plan()`` runs it. Operations give results with shapes, strides and storages that no one fills; a transport moves
nothing and notes what would have moved; a ledger keeps how many bytes of which kind there are at each moment."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_map

from .._torch import (
    DispatchMode,
    current_graph_task_id,
    fake_store,
    is_composite,
    is_wrapper,
    refuse_access,
    simplified,
    storage_id,
    watched_storages,
)
from ..comm import ALL_GATHER, ALL_REDUCE, GATHER, REDUCE_SCATTER, Label, Transport, Work
from ..group import states_to_run
from .describe import collect
from .diagnose import find_unreduced_parameters
from .plan_report import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    REDUCTIONS,
    TEMPORARY,
    CollectiveFacts,
    Moment,
    WorldFacts,
)

# ---- How many bytes there are, of which kind, at each moment of a run: a list of what was allocated and freed, in
# order.
#
# Storages are followed from the operation that first returns them until they die; some are known for what they are only
# later (a gradient, when ``.grad`` shows it), so kinds are decided at the end, and then the moments are gone through.


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


# ---- Operations on tensors without their work: results have shapes, strides and storages, and no one fills them.
#
# Memory that is not written to is not taken from the machine, so tensors may be as large as they like. All else is as
# in a real run: autograd, hooks, storages that are resized, addresses, versions; and small tensors whose elements are
# known (positions, masks, step counts) are computed, so that what depends on them goes the way it would.
#
# Where operations cannot know their result without the elements (``item()``, ``nonzero()``) and these were not
# computed, ``Undecided`` is raised, from the user's line.


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


# ---- The transport of a dry run: nothing moves, and what would have is noted.


class _Done:
    """What is over at once."""

    def wait(self) -> None:
        """There is nothing to wait for."""


class NothingMoves(Transport):
    """Moves nothing over ``group``.

    Args:
        group: the process group.
        name: of the ``fully_shard`` group that it serves.
        ledger: what storages there are.
        take: gets each collective.
    """

    name = "nothing moves"

    def __init__(
        self, group: dist.ProcessGroup, name: str, ledger: Ledger, take: Callable[[CollectiveFacts], None]
    ) -> None:
        super().__init__(group)
        self._of, self._ledger, self._take = name, ledger, take

    def among(self, peers: dist.ProcessGroup) -> Transport:
        return self

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Work:
        self._ledger.label(whole, GATHERED)
        return self._note(ALL_GATHER, whole.nbytes, whole)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, is_average: bool, label: Label) -> Work:
        self._ledger.label(whole, REDUCTIONS)
        self._ledger.label(shard, REDUCTIONS)  # those that are gradients will be known as such
        return self._note(REDUCE_SCATTER, whole.nbytes, shard)

    def all_reduce(self, tensor: torch.Tensor, is_average: bool, label: Label) -> Work:
        self._ledger.label(tensor, REDUCTIONS)
        return self._note(ALL_REDUCE, tensor.nbytes, tensor)

    def gather(
        self,
        whole: torch.Tensor | None,
        part: torch.Tensor,
        ranges: Sequence[tuple[int, int]],
        is_everywhere: bool,
        label: Label,
    ) -> None:
        nbytes = sum(stop - start for start, stop in ranges) * part.element_size()
        self._note(GATHER, nbytes, whole)

    def _note(self, kind: str, nbytes: int, filled: torch.Tensor | None) -> Work:
        if filled is not None:
            self._ledger.lose_values(filled)
        self._take(CollectiveFacts(kind, self._of, nbytes, self.group.size()))
        return _Done()


# ---- The step, and its facts


NUM_STEPS = 2  # in the first one, groups learn their order, and the optimizer's state is made


class Trained(Protocol):
    """What a step needs: built anew for each number of ranks."""

    def build(self) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        """The sharded model, and what makes a loss of it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Of its parameters."""


def simulate(trained: Trained, world_size: int, note: Callable[[str], None]) -> WorldFacts:
    """Build the model as the first of ``world_size`` ranks, and train it for some steps.

    Args:
        trained: what to build.
        note: is told how far it has come.
    """
    with one_of_many(world_size):
        try:
            return _Simulation(world_size, note).run(trained)
        finally:
            gc.collect()  # models are cycles: the memory is needed for the next


@contextmanager
def one_of_many(world_size: int) -> Iterator[None]:
    """Be the first rank of a process group whose collectives move nothing.

    Raises:
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"rank {dist.get_rank()}: plan() makes process groups of its own, and this process has one already: plan "
            "in a process by itself, or before init_process_group()"
        )
    excepthook = sys.excepthook  # torch's writes the rank before each line, once more for each process group
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


class _Simulation:
    def __init__(self, world_size: int, note: Callable[[str], None]) -> None:
        self._world_size, self._note = world_size, note
        self._ledger = Ledger()
        self._mode = DryRun(self._ledger, self._tell)
        self._doing = ""
        self._began = time.monotonic()
        self._collectives: list[CollectiveFacts] = []

    def run(self, trained: Trained) -> WorldFacts:
        ledger = self._ledger
        refuse_access(torch.empty(0).untyped_storage(), "")  # found out once in a process, by operations that are done
        with watched_storages(ledger.resized, ledger.exchanged), torch.compiler.set_stance("force_eager"), self._mode:
            self._begin("building", OTHER)
            model, loss_of = trained.build()
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                model.to_empty(device="cpu")
            optimizer = trained.optimizer(model)
            self._listen(model)
            layout, unreduced = collect(model), tuple(map(str, find_unreduced_parameters(model)))
            label_all(ledger, model.parameters(), PARAMETERS)
            recomputes = False
            for number in range(1, NUM_STEPS + 1):
                gc.collect()
                self._collectives.clear()
                recomputes = self._step(model, loss_of, optimizer, f"step {number} of {NUM_STEPS}: ")
            label_all(ledger, model.parameters(), PARAMETERS)
        moments = ledger.peaks()
        return WorldFacts(
            world_size=self._world_size,
            layout=layout,
            moments=tuple(moments[-3:]),
            building=moments[1],
            collectives=tuple(self._collectives),
            recomputes=recomputes,
            unreduced=unreduced,
            computed=tuple(sorted(self._mode.computed)),
        )

    def _listen(self, model: nn.Module) -> None:
        for state, name in states_to_run(model):
            for handle in state._handles:
                handle.change_transports(
                    lambda transport, name=name or "(root)": NothingMoves(  # type: ignore[misc]
                        transport.group, name, self._ledger, self._collectives.append
                    )
                )

    def _step(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module], torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        prefix: str,
    ) -> bool:
        """A training step; whether forwards were repeated in its backward."""
        self._begin("forward", ACTIVATIONS, prefix)
        loss = loss_of(model)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                "the loss must be a tensor of one element that depends on parameters which require gradients, got "
                + (f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:80])
            )
        self._begin("backward", TEMPORARY, prefix)
        loss.backward()
        del loss
        label_all(self._ledger, (param.grad for param in model.parameters()), GRADIENTS)
        self._begin("optimizer", TEMPORARY, prefix)
        if optimizer is None:
            for param in model.parameters():
                param.grad = None
        else:
            optimizer.step()
            for state in optimizer.state.values():
                label_all(self._ledger, (item for item in state.values() if isinstance(item, torch.Tensor)), OPTIMIZER)
            optimizer.zero_grad()
        return self._ledger.has_recomputed

    def _begin(self, name: str, kind: str, prefix: str = "") -> None:
        self._ledger.begin(name, kind)
        self._doing = f"{prefix}{name}"
        self._tell(0)

    def _tell(self, num_operations: int) -> None:
        seconds = time.monotonic() - self._began
        count = f", {num_operations:,} operations" if num_operations else ""
        self._note(f"{self._world_size:,} ranks: {self._doing}{count} ({seconds:.0f} s)")
