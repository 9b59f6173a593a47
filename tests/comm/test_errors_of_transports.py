"""A transport, a wire format or a model of the user raises on one rank: the others, which wait for it, are told."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import RankLostError, set_transport, set_wire_formats
from fsdp_compose.core.comm.transport import TransportRole, TransportWrapper
from fsdp_compose.plugins.transports import Bfloat16
from tests.harness import distributed
from tests.models import Stack, rows, shard_layers
from tests.training import mean_square


class Raises:
    """Raises when it is armed, on this rank."""

    where, error = "", RuntimeError("mine")

    def at(self, where: str) -> None:
        if where == self.where:
            raise self.error


class Format(Bfloat16):
    name = "of the user"

    def __init__(self, trip: Raises) -> None:
        self.trip = trip

    def encode(self, source: torch.Tensor, packed: torch.Tensor) -> None:
        self.trip.at("encode")
        super().encode(source, packed)

    def decode(self, packed: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        self.trip.at("decode")
        super().decode(packed, out, adds)


class Wait:
    def __init__(self, work: Any, trip: Raises) -> None:
        self.work, self.trip = work, trip

    def wait(self) -> None:
        self.work.wait()
        self.trip.at("wait")


class Wrapper(TransportWrapper):
    def __init__(self, inner: Any, trip: Raises) -> None:
        super().__init__(inner)
        self.trip = trip

    def all_gather(self, *args: Any) -> Any:
        self.trip.at("all_gather")
        return Wait(super().all_gather(*args), self.trip)

    def reduce_scatter(self, *args: Any) -> Any:
        self.trip.at("reduce_scatter")
        return super().reduce_scatter(*args)

    def all_reduce(self, *args: Any) -> Any:
        self.trip.at("all_reduce")
        return super().all_reduce(*args)


def trained(where: str, is_hybrid: bool = False) -> tuple[nn.Module, Raises]:
    trip, size = Raises(), dist.get_world_size()
    torch.manual_seed(0)
    model = Stack()
    model.blocks[1].up.register_forward_pre_hook(lambda *_: trip.at("model"))
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")) if is_hybrid else None
    shard_layers(model, mesh=mesh)
    if where in ("encode", "decode"):
        set_wire_formats(model, all_gather=Format(trip))
    else:
        set_transport(model, lambda transport, role: Wrapper(transport, trip) if role in _ROLES else transport)
    for _ in range(2):
        mean_square(model, rows()).backward()
    return model, trip


_ROLES = (TransportRole.SHARDS, TransportRole.REPLICAS)


def check_told(model: nn.Module, trip: Raises, where: str, error: Exception, who: int) -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == who:
        trip.where, trip.error = where, error
    begin = time.monotonic()
    with pytest.raises(Exception) as raised:
        for _ in range(2):
            mean_square(model, rows()).backward()
    text = f"{type(raised.value).__name__}: {raised.value}"
    if rank == who:  # this process lives on, and does something else
        assert str(error) in text, text
        others = [f"told {other}" for other in range(dist.get_world_size()) if other != rank]
        store.wait(others, timedelta(seconds=50))
    else:
        store.set(f"told {rank}", b"")
        assert isinstance(raised.value, RankLostError), text
        assert f"rank {who} has raised {type(error).__name__}: {error}" in text, text
        assert time.monotonic() - begin < 20, "not the timeout of the process group"


@pytest.mark.parametrize(
    "where, kind",
    [
        ("encode", ValueError),
        ("decode", RuntimeError),
        ("all_gather", RuntimeError),
        ("wait", ValueError),
        ("wait", RuntimeError),
        ("reduce_scatter", ValueError),
        ("model", RuntimeError),
    ],
)
@distributed(world_size=(2, 3), fresh=True)
def test_the_others_are_told_what_one_rank_has_raised(world_size, kind, where):
    model, trip = trained(where)
    check_told(model, trip, where, kind("of this program"), who=world_size - 1)


@pytest.mark.parametrize("where", ["all_gather", "all_reduce"])
@distributed(world_size=4, fresh=True)
def test_they_are_told_with_hybrid_sharding(where):
    model, trip = trained(where, is_hybrid=True)
    check_told(model, trip, where, ValueError("of this program"), who=1)


@pytest.mark.parametrize("where", ["encode", "reduce_scatter", "model"])
@distributed(world_size=(2, 3))
def test_all_ranks_that_raise_go_on(where):
    """What each has told the others is taken back, so that a slow rank is not taken for one that has raised."""
    model, trip = trained(where)
    trip.where, trip.error = where, ValueError("of this program")
    with pytest.raises(ValueError, match="of this program"):
        mean_square(model, rows()).backward()
    trip.where = ""
    if dist.get_rank() == 0:
        time.sleep(5)  # longer than the others are patient
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mean_square(model, rows())
    if dist.get_rank() == 0:
        time.sleep(5)
    mean_square(model, rows()).backward()
    assert all(param.grad is not None for param in model.parameters())
