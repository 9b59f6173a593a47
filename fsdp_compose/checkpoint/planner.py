"""``LoadPlanner`` and ``SavePlanner`` for ``torch.distributed.checkpoint``, and the check that all ranks' writes fit.

``LoadPlanner`` loads optimizer dicts as they were saved, whatever state and parameter groups the optimizer has now.
``SavePlanner`` saves shards without copying them. ``storage`` uses both; users may pass them to torch's own functions.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import LoadPlanner as TorchLoadPlanner
from torch.distributed.tensor import DTensor

from .._nested import GROUPS, PARAMS, STATE, Path, is_flattened, leaves_of, longest_prefix, put_leaf
from .._torch import dedup_save_plans, plan_errors
from ..errors import MisuseError
from ..extension import (
    CompositeDTensor,
    PlaceState,
    digests_of,
    is_shared_name,
    pending_like,
    says_what_it_holds,
)
from .values import is_beside, is_of_one_rank, is_optimizer_dict, optimizer_dicts, read_value

# ---- Checking that the ranks' chunks make up whole tensors, by sorting intervals instead of comparing boxes.
#
# A rank's shard of a tensor that is sharded by rows or elements consists of boxes that are ranges of the flattened
# tensor. Sorted by their starts, ranges overlap only with their neighbors. torch's own check compares all boxes that
# overlap in the longest dimension. For a stack of experts that is sharded between elements these are all boxes, and
# the first rank's time grows with the square of the number of ranks (12.8 s a layer at 4,096, torch 2.13).


def problems_of(plans: list[SavePlan], metadata: Metadata) -> list[str]:
    """Return problems with the chunks of all tensors. ``metadata`` belongs to ``plans``, the plans of all ranks."""
    found = []
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or not tensor.size:
            continue
        ranges = [_range_of(tensor.size, chunk) for chunk in tensor.chunks]
        known = [item for item in ranges if item is not None]
        if len(known) < len(ranges):  # boxes across the tensor, or outside of it
            found += plan_errors(plans, Metadata({key: tensor}))
            continue
        filled = sorted(item for item in known if item[0] < item[1])
        found += [
            f"{key}: two ranks write the elements {start} to {min(stop, next_stop) - 1} of the flattened tensor"
            for (_, stop), (start, next_stop) in pairwise(filled)
            if start < stop
        ]
        numel, written = prod(tensor.size), sum(stop - start for start, stop in filled)
        if len(plans) > 1 and written != numel:
            found.append(f"{key}: {written} elements are written, but the tensor has {numel}")
    return found


def _range_of(shape: Sequence[int], chunk: ChunkStorageMetadata) -> tuple[int, int] | None:
    """Return start and stop of a box in the flattened tensor; ``None`` if it is not one range, or not inside."""
    sizes, offsets = tuple(chunk.sizes), tuple(chunk.offsets)
    if len(sizes) != len(shape) or any(
        offset < 0 or size < 0 or offset + size > whole
        for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        return None
    start, stride, is_cut = 0, 1, False
    for offset, size, whole in zip(reversed(offsets), reversed(sizes), reversed(shape), strict=True):
        if is_cut and size > 1:  # the box covers only part of an inner dimension, so it has gaps
            return None
        is_cut = is_cut or size != whole
        start += offset * stride
        stride *= whole
    return start, start + prod(sizes)


# ---- The planners


_MAX_PROBLEMS = 5  # listed in an error
_MAX_KEYS = 3


class LoadPlanner(DefaultLoadPlanner):
    """A planner that loads optimizer dicts as they were saved:
    ``torch.distributed.checkpoint.load(state_dict, planner=LoadPlanner())``.

    torch's own planner loads the keys of the given dict. This one takes the parameter groups, their contents, and the
    state of each parameter from the checkpoint. Everything else is the same.

    Args:
        allow_pickle: unpickle values other than tensors and plain containers, as torch's own planner does. That can run
            any code (and so can ``torch.distributed.checkpoint.load`` itself, before it calls a planner).
        place_state: returns a tensor to load a part of an optimizer's state into that the optimizer does not have yet,
            from the FQN of the parameter, the path in its state, shape and dtype; ``None``: not known.
        check: called by our ``load`` with the state dict when its values are loaded, and nothing is in its tensors yet.
    """

    def __init__(
        self,
        *arguments: Any,
        allow_pickle: bool = True,
        place_state: PlaceState | None = None,
        check: Callable[[dict[str, Any]], None] = lambda _: None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.allow_pickle, self._place_state, self.check = allow_pickle, place_state, check

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self.allow_pickle:
            super().load_bytes(read_item, value)
            return
        loaded = read_value(value)
        if self.flatten_state_dict:
            put_leaf(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
        else:
            self.state_dict[read_item.dest_index.fqn] = loaded

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        tensors = [*_tensors(state_dict, ())]
        with torch.inference_mode(False):  # optimizers will write to loaded tensors
            for path, optimizer in optimizer_dicts(state_dict, ()):
                _follow(optimizer, _Saved(metadata, path, tensors, self._place_state))
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        try:
            return super().create_local_plan()
        except ValueError as error:  # another shape, or no tensor
            raise MisuseError(f"{error}. Build the model and its optimizer as they were saved") from error
        except RuntimeError as error:
            assert self.metadata is not None
            saved = self.metadata.state_dict_metadata
            missing = [key for key in self.state_dict if key not in saved]
            if not missing:
                raise
            unused = [key for key in saved if key not in self.state_dict]
            raise MisuseError(
                f"the checkpoint lacks {_some(missing)}. It has, without a place in the state dict: {_some(unused)}"
            ) from error


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
    return (", ".join(keys[:_MAX_KEYS]) or "nothing") + more


# ---- What the given state has no place for.


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a state dict by their keys in a checkpoint."""
    planner = SavePlanner()
    planner.set_up_planner(state)
    found: dict[str, Any] = planner.state_dict
    return found


def without_place(state: dict[str, Any], metadata: Metadata) -> dict[str, Path]:
    """Return key and path of what the checkpoint has below the names in ``state``, and ``state`` has no place for. (Of
    optimizers only that which ``LoadPlanner`` does not find a place for itself.)"""
    known, followed = flattened(state), [path for path, _ in optimizer_dicts(state, ())]
    found = {}
    for key, saved in metadata.state_dict_metadata.items():
        path = tuple((metadata.planner_data or {}).get(key, (key,)))
        is_followed = any(
            path[: len(at)] == at and str(path[len(at)]).partition(".")[0] in (STATE, GROUPS) for at in followed
        )
        if path[0] in state and not is_followed and (key not in known or _is_outgrown(state, path, known[key], saved)):
            found[key] = path
    return found


def _is_outgrown(state: Mapping[str, Any], path: Path, value: Any, saved: Any) -> bool:
    """Whether a saved tensor does not fit a given value, which its owner takes through a setter."""
    is_tensor = isinstance(value, torch.Tensor)
    if not isinstance(saved, TensorStorageMetadata) or not is_whole(value) or (is_tensor and value.shape == saved.size):
        return False
    is_extra = any(str(step).endswith("_extra_state") for step in path)
    is_of_model = all(isinstance(beside, torch.Tensor) for beside in state.values())  # without a name of its own
    return not is_tensor or is_extra or (not is_of_model and is_beside(path[0], state[path[0]]))


def make_places(state: dict[str, Any], metadata: Metadata, lacking: Mapping[str, Path]) -> None:
    """Let the containers in ``state`` grow places for saved values.

    Raises:
        MisuseError: the containers are those of sharded parameters.
    """
    refused = [key for key, path in lacking.items() if _is_of_parameters(state, path)]
    of_optimizers = tuple(f"{'.'.join(path)}." for path, _ in optimizer_dicts(state, ()))
    given = [key for key in flattened(state) if not key.startswith(of_optimizers)]
    if refused and metadata.state_dict_metadata.keys() >= {*given}:  # else LoadPlanner says what the checkpoint lacks
        raise MisuseError(
            f"the checkpoint has {_some(refused)}, and the state dict, which has sharded tensors beside, no place for "
            "it. Nothing was changed. Load into the model that was saved, or into an empty dict; to load only what has "
            "a place: planner=torch.distributed.checkpoint.DefaultLoadPlanner()"
        )
    for key in (key for key in lacking if key not in refused):
        put_leaf(state, lacking[key], _whole_place(metadata, key))


def _is_of_parameters(state: Any, path: Path) -> bool:
    """Whether a path leads to a dict of sharded parameters, but to no place in it."""
    for step in path:
        is_known = (
            step in state if isinstance(state, Mapping) else isinstance(state, list) and step in range(len(state))
        )
        if not is_known:
            return isinstance(state, Mapping) and any(isinstance(value, DTensor) for value in state.values())
        state = state[step]
    return any(isinstance(leaf, DTensor) for _, leaf in leaves_of(state))


def _whole_place(metadata: Metadata, key: str) -> torch.Tensor | None:
    """Make an unsharded tensor, or ``None``, to load a value into."""
    saved = metadata.state_dict_metadata[key]
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return torch.zeros(saved.size, dtype=saved.properties.dtype)


def _tensors(state: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield path and tensor of the tensors outside optimizer dicts."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield (*path, str(key)), value
        elif isinstance(value, Mapping) and not is_optimizer_dict(value):
            yield from _tensors(value, (*path, str(key)))


def _by_name(tensors: Iterable[tuple[tuple[str, ...], torch.Tensor]], path: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return tensors by the last part of their path, which is the FQN for a model's tensors. Among several models, the
    one nearest to ``path`` wins, then a sharded one."""
    best: dict[str, tuple[tuple[int, bool], torch.Tensor]] = {}
    for at, tensor in tensors:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(at, path)))
        rank = (shared, isinstance(tensor, DTensor))
        if at[-1] not in best or rank > best[at[-1]][0]:
            best[at[-1]] = (rank, tensor)
    return {name: tensor for name, (_, tensor) in best.items()}


class _Saved:
    """The entries of a checkpoint for one optimizer.

    Attributes:
        groups, state: paths of values in the optimizer's dict, by key in the checkpoint.
        tensors: the model's tensors, by FQN.
        name: the dict's name, for messages.
        place: returns a place for a whole value, by its key.
    """

    def __init__(
        self,
        metadata: Metadata,
        path: tuple[str, ...],
        tensors: Iterable[tuple[tuple[str, ...], torch.Tensor]],
        place_state: PlaceState | None,
    ) -> None:
        self._metadata, self._place_state = metadata, place_state
        self.tensors, self.name = _by_name(tensors, path), ".".join(path)
        self.place = partial(_whole_place, metadata)
        prefix = "".join(f"{step}." for step in path)
        paths = {
            key: tuple((metadata.planner_data or {})[key][len(path) :])
            for key in metadata.state_dict_metadata
            if key.startswith((f"{prefix}{STATE}.", f"{prefix}{GROUPS}."))
        }
        self.groups = {key: at for key, at in paths.items() if at[0].startswith(GROUPS)}
        self.state = {key: at for key, at in paths.items() if key not in self.groups}

    def state_place(self, key: str, fqn: str, rest: Sequence[Any], entries: Mapping[str, Any]) -> Any:
        """Return a value to load a parameter's state into: the present one if it fits, or a placeholder sharded like
        the parameter or other state of it.

        Args:
            rest: path in the state of the parameter.
            entries: the parameter's present state.
        """
        present = entries.get(rest[0]) if len(rest) == 1 else None
        saved = self._metadata.state_dict_metadata[key]
        if isinstance(present, torch.Tensor) or (present is not None and not isinstance(saved, TensorStorageMetadata)):
            return present
        if isinstance(saved, TensorStorageMetadata) and self._place_state is not None:
            placed = self._place_state(fqn, rest, saved.size, saved.properties.dtype)
            if placed is not None:
                return placed
        if not isinstance(saved, TensorStorageMetadata) or not saved.size:
            return self.place(key)
        known = [tensor for tensor in (self.tensors.get(fqn), *entries.values()) if isinstance(tensor, torch.Tensor)]
        like = next((tensor for tensor in known if tensor.shape == saved.size), None)
        if like is not None and len(rest) > 1:  # in a list, say, which is copied as a whole
            return torch.zeros_like(like, dtype=saved.properties.dtype)
        if like is not None:
            return pending_like(like, saved.properties.dtype)
        if fqn not in self.tensors and not is_shared_name(fqn) and dist.is_initialized() and dist.get_world_size() > 1:
            raise MisuseError(
                f"the checkpoint holds {key}, of shape {tuple(saved.size)}, but the optimizer has no such state before "
                f"its first step, and the sharding of {fqn} is unknown: load the model's state dict in the same call"
            )
        return self.place(key)

    def wanted(self, trained: Sequence[str], saved: Iterable[str]) -> list[str]:
        """Return the saved names to load: trained parameters, tied ones by any name, and optimizers' shared state."""
        saved = list(saved)
        # By which of its names a tied parameter was saved is not known here: anything of its shape may be it.
        lacking = {self.tensors[fqn].shape for fqn in trained if fqn not in saved and fqn in self.tensors}
        known = set(trained)
        return [
            fqn
            for fqn in saved
            if fqn in known or is_shared_name(fqn) or (fqn in self.tensors and self.tensors[fqn].shape in lacking)
        ]


def _follow(optimizer: dict[str, Any], saved: _Saved) -> None:
    """Make an optimizer dict hold places for all saved state of the parameters it trains, and for nothing else."""
    if not saved.groups:
        return  # torch's planner names what is missing
    was_flattened = not any(at[0] == GROUPS for at in saved.groups.values())
    if was_flattened != is_flattened(optimizer):
        raise MisuseError(
            f"the optimizer dict {saved.name!r} was saved with flatten_optimizer_state_dict={was_flattened}: get the "
            "dict that you load into with the same option"
        )
    if was_flattened:
        _follow_flattened(optimizer, saved)
        return
    before = {str(name): (name, entries) for name, entries in optimizer[STATE].items()}
    trained = [str(name) for group in optimizer[GROUPS] for name in group[PARAMS]]
    groups: dict[int, dict[str, Any]] = {}
    for key, (_, index, *inside) in saved.groups.items():
        put_leaf(groups.setdefault(int(index), {}), inside, saved.place(key))
    by_fqn: dict[str, dict[str, list[Any]]] = {}
    for key, (_, fqn, *rest) in saved.state.items():
        by_fqn.setdefault(fqn, {})[key] = rest
    if all(fqn.isdigit() for fqn in by_fqn) and by_fqn.keys().isdisjoint(trained) and by_fqn:
        raise MisuseError(
            f"the optimizer dict {saved.name!r} was saved as an optimizer's own state_dict(), which numbers "
            "parameters: load it into the state_dict() of an optimizer that has taken a step, and pass that to "
            "set_optimizer_state_dict()"
        )
    state: dict[Any, dict[str, Any]] = {}
    for fqn in saved.wanted(trained, by_fqn):
        name, entries = before.get(fqn, (fqn, {}))
        for key, at in by_fqn[fqn].items():
            put_leaf(state.setdefault(name, {}), at, saved.state_place(key, fqn, at, entries))
    optimizer.update({STATE: state, GROUPS: [groups[index] for index in sorted(groups)]})


def _follow_flattened(optimizer: dict[str, Any], saved: _Saved) -> None:
    trained = [key.partition(".")[2].rpartition(".")[0] for key in optimizer if key.startswith(f"{GROUPS}.")]
    known = {*trained, *saved.tensors}

    def parameter_of(key: str) -> str | None:
        name = key.partition(".")[2]
        stem = ".".join(name.split(".")[:2])
        return stem if is_shared_name(stem) else longest_prefix(name, known)

    entries: dict[str | None, dict[str, Any]] = {}
    present = [key for key in optimizer if key.startswith((f"{STATE}.", f"{GROUPS}."))]
    for key in present:
        entries.setdefault(parameter_of(key), {})[key] = optimizer[key]
    places: dict[str, Any] = {}
    for key, at in saved.groups.items():
        put_leaf(places, at, saved.place(key))
    fqns = {key: parameter_of(at[0]) for key, at in saved.state.items()}
    wanted = {*saved.wanted(trained, dict.fromkeys(fqn for fqn in fqns.values() if fqn is not None))}
    for key, fqn in fqns.items():
        if fqn is not None and fqn in wanted:
            at = saved.state[key]
            put_leaf(places, at, saved.state_place(key, fqn, at, entries.get(fqn, {})))
    for key in present:
        del optimizer[key]
    optimizer.update(places)


class SavePlanner(DefaultSavePlanner):
    """A planner that saves shards without copying them:
    ``torch.distributed.checkpoint.save(state_dict, planner=SavePlanner())``.

    torch's file writer copies tensors that are part of a larger storage, as sharded parameters are, and keeps the
    copies until everything is written. This planner presents the same memory as separate storages. (Do not use it with
    ``async_save()``, which has to copy.)

    With many ranks, its planning time grows only with the number of items, also for stacks of experts.

    Args:
        share: this rank and the number of ranks, if all ranks have the same keys: each value that all ranks have whole
            is then planned by a single rank. Default: every rank plans all its values, and the first rank chooses.
    """

    def __init__(self, *arguments: Any, share: tuple[int, int] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.share = share
        self.caches_plans = bool(options.get("enable_plan_caching", any(arguments[4:5])))

    def create_local_plan(self) -> SavePlan:
        if self.share is None:
            return super().create_local_plan()
        rank, size = self.share
        whole = self.state_dict
        mine = {
            key: value
            for key, value in whole.items()
            if not is_whole(value) or is_of_one_rank(key) or owner_of(key, size) == rank
        }
        try:
            self.state_dict = mine
            plan = super().create_local_plan()
        finally:
            self.state_dict = whole
        if plan.planner_data is not None and rank:
            # The first rank has the other keys too.
            plan = replace(plan, planner_data={key: self.mappings[key] for key in self.mappings if is_of_one_rank(key)})
        self.plan = plan
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _refuse_kinds_that_differ(all_plans)
        if self.caches_plans:
            return super().create_global_plan(all_plans)
        plans, metadata = create_default_global_save_plan(dedup_save_plans(all_plans, self.dedup_save_to_lowest_rank))
        if self.flatten_state_dict:
            paths: dict[str, Any] = {}
            for plan in reversed(plans):  # lower ranks overwrite higher ones
                paths.update(plan.planner_data)
            metadata = replace(metadata, planner_data=paths)
        problems = problems_of(plans, metadata)
        if problems:
            raise MisuseError("; ".join(problems[:_MAX_PROBLEMS]))
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return with_own_storage(value) if isinstance(value, torch.Tensor) else value


def _refuse_kinds_that_differ(all_plans: list[SavePlan]) -> None:
    first: dict[str, tuple[int, WriteItemType]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            known, kind = first.setdefault(item.index.fqn, (rank, item.type))
            if item.type is not kind:
                raise MisuseError(
                    f"{item.index.fqn} is {_KINDS[kind]} on rank {known}, but {_KINDS[item.type]} on rank {rank}: give "
                    "it the same kind of value on every rank, or other names"
                )


_KINDS = {
    WriteItemType.BYTE_IO: "a value that is no tensor",
    WriteItemType.TENSOR: "a whole tensor",
    WriteItemType.SHARD: "a shard of a tensor",
}


def keys_of(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of ``flattened`` values, with the kinds of the values."""
    for key, value in values.items():
        is_plain = isinstance(value, torch.Tensor) and is_whole(value)
        if is_plain and (value.layout != torch.strided or value.is_nested or value.is_meta):
            kind = "nested" if value.is_nested else "on the meta device" if value.is_meta else value.layout
            raise MisuseError(f"{key} is a tensor that files cannot hold ({kind}): save its parts or its to_dense()")
    return [f"{is_whole(value)} {isinstance(value, torch.Tensor)} {key}" for key, value in values.items()]


def optimizer_digests(state: Any, path: Path = ()) -> dict[str, str]:
    """Return ``digests_of`` the optimizer dicts in a state dict."""
    # Other values may well differ from rank to rank: state of data loaders and random number generators.
    found: dict[str, str] = {}
    if isinstance(state, Mapping) and is_optimizer_dict(state):
        for key, value in state.items():
            if str(key).partition(".")[0] in (STATE, GROUPS):
                found |= digests_of(value, (*path, key))
    elif isinstance(state, Mapping):
        for key, value in state.items():
            found |= optimizer_digests(value, (*path, key))
    elif type(state) in (list, tuple):
        for i, value in enumerate(state):
            found |= optimizer_digests(value, (*path, i))
    return found


def is_whole(value: Any) -> bool:
    """Whether this rank has the whole value: a plain tensor not marked as a piece, or not a tensor."""
    if isinstance(value, torch.Tensor):
        return type(value) in (torch.Tensor, torch.nn.Parameter) and not says_what_it_holds(value)
    return not hasattr(value, "__create_write_items__")


def owner_of(key: str, num_ranks: int) -> int:
    """Return the rank that writes a value that all ranks have."""
    # hash() of a text differs from process to process.
    return zlib.crc32(key.encode()) % num_ranks


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Present part of a storage as a storage of its own, which keeps the original alive."""
    tensor = tensor.resolve_conj().resolve_neg()  # which are views that bytes do not show
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    if not is_part or not tensor.nbytes or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return tensor
    as_bytes = torch.from_dlpack(tensor.detach().view(-1).view(torch.uint8))  # DLPack does not know every dtype
    return as_bytes.view(tensor.dtype).view(tensor.shape)


# ---- Dicts with integer keys, which ``torch.distributed.checkpoint`` converts to strings (``MultiStepLR``).


def with_string_keys(value: Any) -> Any:
    """Copy the dicts and lists of a value, with strings as keys.

    Raises:
        ValueError: two keys of a dict convert to the same string.
    """
    if isinstance(value, dict):
        made = {str(key): with_string_keys(item) for key, item in value.items()}
        if len(made) != len(value):
            raise MisuseError(
                f"two keys of a dict convert to the same string, among {[*value][:10]}: checkpoints store keys as "
                "strings"
            )
        return made
    return [with_string_keys(item) for item in value] if type(value) is list else value


def paths_of_numbers(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths, by strings and indices, of dicts with integer keys."""
    if isinstance(value, dict):
        if any(type(key) is int for key in value):
            yield path
        for key, item in value.items():
            yield from paths_of_numbers(item, (*path, str(key)))
    elif type(value) is list:
        for i, item in enumerate(value):
            yield from paths_of_numbers(item, (*path, i))


def give_back(before: Any, loaded: Any, numbers: Collection[Path], path: Path = ()) -> Any:
    """Put the values of ``loaded``, which was made by ``with_string_keys(before)``, back into the dicts of ``before``.

    Args:
        numbers: the ``paths_of_numbers`` of what was saved.
    """
    if isinstance(loaded, dict):
        result = before if isinstance(before, dict) else {}
        keys, known = {str(key): key for key in result}, dict(result)
        result.clear()
        for name, item in loaded.items():
            key = keys.get(name, int(name) if path in numbers and name.lstrip("-").isdigit() else name)
            result[key] = give_back(known.get(key), item, numbers, (*path, name))
        return result
    if type(loaded) is list:
        known_items = before if type(before) is list else []
        padded = [*known_items, *[None] * (len(loaded) - len(known_items))]
        return [give_back(padded[i], item, numbers, (*path, i)) for i, item in enumerate(loaded)]
    return loaded


# ---- Parameters made of several tensors (quantized weights) that were saved on another number of ranks.
#
# A file holds an instance of the parameter's class over the rows of the rank that saved it.
# ``torch.distributed.checkpoint`` would slice rows out of such an instance, which its class may not support. So pieces
# with rows of this rank are read whole, and their inner tensors are sliced one by one.


def read_cut_otherwise(
    plan: LoadPlan, planner: TorchLoadPlanner, metadata: Metadata, read: Callable[[LoadPlan, Any], Any]
) -> LoadPlan:
    """Read composite parameters that were saved with another sharding than this rank's.

    Args:
        plan: a plan for tensors.
        read: the reader's own function to read a plan.

    Returns:
        The rest of the plan.
    """
    targets = getattr(planner, "state_dict", {})
    others, wanted = list[ReadItem](), dict[str, list[ReadItem]]()
    for item in plan.items:
        target, index = targets.get(item.dest_index.fqn), item.storage_index
        entry: Any = metadata.state_dict_metadata[index.fqn]
        # Those of the stored tensor; the item may want less of it.
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        if isinstance(target, CompositeDTensor) and not (item.lengths == sizes == target.local_shape):
            whole = replace(item, storage_offsets=torch.Size([0] * len(sizes)), lengths=sizes)
            wanted.setdefault(item.dest_index.fqn, []).append(whole)
        else:
            others.append(item)
    for fqn, items in wanted.items():
        pieces = _Pieces()
        read(replace(plan, items=items), pieces)
        targets[fqn].write_rows(sorted(pieces.by_row.items()))
    return replace(plan, items=others) if wanted else plan


class _Piece:
    """Takes the place of a tensor that a reader copies into; ``keep`` gets the tensor that was read."""

    def __init__(self, size: torch.Size, keep: Callable[[torch.Tensor], None]) -> None:
        self._size, self.copy_ = size, keep

    def size(self) -> torch.Size:
        return self._size

    def detach(self) -> _Piece:
        return self


class _Pieces:
    """Takes the place of a planner, for the pieces of one parameter, and has them by their first row."""

    def __init__(self) -> None:
        self.by_row: dict[int, torch.Tensor] = {}

    def resolve_tensor(self, item: ReadItem) -> _Piece:
        assert item.storage_index.offset is not None
        return _Piece(item.lengths, partial(self.by_row.__setitem__, item.storage_index.offset[0]))

    def commit_tensor(self, *_: Any) -> None:
        """Do nothing: the piece is kept."""
