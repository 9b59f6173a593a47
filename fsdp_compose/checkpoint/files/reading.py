"""Reading the files of a checkpoint for ``torch.distributed.checkpoint``: values before tensors, and no value that
could run code."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner

from ..moving.agreement import problem_text
from .contents import Contents
from .cut_otherwise import read_cut_otherwise
from .planner import LoadPlanner

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # in torch's error about a value that it does not unpickle


class Told(RuntimeError):
    """An error as text, which can be sent to the other ranks, whatever object of the user's has raised it."""


class Refused(Told):
    """A value was not unpickled; no tensor has been read yet."""


@contextmanager
def telling() -> Iterator[None]:
    """Around what one rank does alone: the other ranks can be told of every error."""
    try:
        yield
    except Told:
        raise
    except Exception as error:
        raise Told(_with_reason(error)) from None


def _with_reason(error: Exception) -> str:
    """An error as text, with what the system has said: torch's writer, closed after a disk was full, speaks of
    positions in a file only."""
    text, earlier = problem_text(error), error.__cause__ or error.__context__
    while earlier is not None and not isinstance(earlier, OSError):
        earlier = earlier.__cause__ or earlier.__context__
    return text if earlier is None or isinstance(error, OSError) else f"{earlier} ({text})"


class Reader(FileSystemReader):
    """Reads a checkpoint whose ``contents`` have been checked."""

    def __init__(self, contents: Contents, allow_pickle: bool) -> None:
        super().__init__(contents.folder)
        self._contents, self._allow_pickle = contents, allow_pickle

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = self._contents.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: AnyLoadPlanner) -> Any:
        """Values first: one that is refused is refused before a tensor has been written to."""
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        reader: Any = planner if self._allow_pickle else _Checking(planner, self._contents)
        with telling():
            read = super().read_data
            read(replace(plan, items=values), reader)
            rest = read_cut_otherwise(replace(plan, items=tensors), planner, self._contents.metadata, read)
            return read(rest, planner)


class _Checking:
    """Stands between the reader and a planner, which may unpickle whatever it is given."""

    def __init__(self, planner: AnyLoadPlanner, contents: Contents) -> None:
        self._planner, self._contents = planner, contents
        self._is_careful = type(planner) is LoadPlanner and not planner.allow_pickle

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        try:
            if self._is_careful:
                self._planner.load_bytes(item, value)
                return
            plain = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise Refused(self._why(item, error)) from None
        harmless = io.BytesIO()  # not the same bytes: two readers of pickles need not read the same
        torch.save(plain, harmless)
        harmless.seek(0)
        self._planner.load_bytes(item, harmless)

    def _why(self, item: ReadItem, error: pickle.UnpicklingError) -> str:
        found = _GLOBAL.search(str(error))
        what = f"refers to {found[1]}" if found else "is no plain value"
        return (
            f"{item.storage_index.fqn} in {self._contents.folder} {what}: unpickling it could run any code. Load with "
            "allow_pickle=True if no one else could have written there; or save tensors, numbers, texts and plain "
            "containers of such only"
        )
