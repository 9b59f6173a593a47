"""Wire formats, and transports around another one: what arrives, what is compared, and what stays exact."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fsdp_compose import (
    CPUOffloadPolicy,
    MisuseError,
    MixedPrecisionPolicy,
    RanksDifferError,
    TransportWrapper,
    full_parameters,
    fully_shard,
    functional_mode,
    keep_unsharded,
    no_sync,
    plan,
    record_collectives,
    replicate,
    set_replicas,
    set_transport,
    set_wire_formats,
)
from fsdp_compose.checkpoint import get_model_state_dict
from fsdp_compose.core.comm import Label, Transport, TransportRole
from fsdp_compose.errors import MisuseRuntimeError, MisuseTypeError
from fsdp_compose.optim import Muon, muon_groups
from fsdp_compose.plugins.gloo.messages import Messages
from fsdp_compose.plugins.transports import Bfloat16, Int8, Wire, WireFormat
from tests.flat.test_all_gather_extensions import RowScales, make
from tests.harness import distributed, lasting_mesh, same_on_every_rank
from tests.internals import handles_of, local_of, world
from tests.models import Stack, rows, shard_layers
from tests.training import adamw, full, mean_square

LABEL = Label(["some.weight"])
FORMATS: list[WireFormat] = [Bfloat16(), Int8(), Int8(32)]
EVERYWHERE = {
    "bf16": {"all_gather": "bf16", "reduce_scatter": "bf16", "all_reduce": "bf16"},
    "int8": {"all_gather": "int8", "reduce_scatter": "int8", "all_reduce": "int8"},
    "bf16 sums": {"reduce_scatter": "bf16", "all_reduce": "bf16"},
    "int8 gathers": {"all_gather": "int8"},
}


def of_rank(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def rounded(encoding: WireFormat, plain: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    packed = torch.empty(encoding.nbytes(plain.numel()), dtype=torch.uint8)
    encoding.encode(plain, packed)
    result = torch.empty(plain.shape, dtype=dtype)
    encoding.decode(packed, result, False)
    return result


# ---- Formats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 5000, (1 << 18) + 300])
@pytest.mark.parametrize("encoding", FORMATS, ids=lambda item: item.name)
def test_rounding(encoding, numel, dtype):
    plain = of_rank(0, numel, dtype)
    result = rounded(encoding, plain, dtype)
    if encoding.name == "bf16":
        assert torch.equal(result, plain.bfloat16().to(dtype))
        return
    size = int(encoding.name.partition("/")[2])
    for block, found in zip(plain.split(size), result.split(size), strict=True) if numel else ():
        slack = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype == torch.float16 else 1e-6
        limit = block.double().abs().max() * (0.5 / 127 + slack)
        assert (found.double() - block.double()).abs().max() <= limit
    added = torch.ones(numel, dtype=torch.float32)
    packed = torch.empty(encoding.nbytes(numel), dtype=torch.uint8)
    encoding.encode(plain, packed)
    encoding.decode(packed, added, True)
    torch.testing.assert_close(added, 1 + result.float(), rtol=0, atol=2e-2 if dtype.itemsize == 2 else 1e-6)


def test_bytes():
    numel = 256 * 1000
    assert [item.nbytes(numel) / (4 * numel) for item in FORMATS] == [0.5, 0.25390625, 0.28125]


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1e-30, 1e-7, 1e30, 3e38])
def test_int8_has_no_range_of_its_own(scale):
    plain = of_rank(0, 512).clamp(-1, 1) * scale
    result = rounded(Int8(), plain)
    assert result.isfinite().all()
    if scale >= 1e-35:
        relative = (result.double() - plain.double()).norm() / plain.double().norm()
        assert relative < 0.01
    else:
        assert (result - plain).abs().max() <= 1e-37


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_int8_keeps_what_is_not_finite_in_its_block(value):
    plain = of_rank(0, 700)
    plain[300] = value
    result = rounded(Int8(), plain)
    assert not result[256:512].isfinite().any()
    assert result[:256].isfinite().all() and result[512:].isfinite().all()


# ---- Collectives


@pytest.mark.parametrize("inner", [Messages, Transport])
@pytest.mark.parametrize("numel", [1, 100, 5000])
@pytest.mark.parametrize("encoding", FORMATS, ids=lambda item: item.name)
@distributed(world_size=(2, 3, 4))
def test_collectives_of_encoded_tensors(encoding, numel, inner, world_size):
    rank, wire = dist.get_rank(), Wire(inner(world()), encoding, encoding)
    is_shorter = -(-encoding.nbytes(numel) // 16) * 16 < 4 * numel

    def each(plain: torch.Tensor) -> torch.Tensor:
        return rounded(encoding, plain) if is_shorter else plain

    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.empty(world_size * numel, dtype=dtype)
        wire.all_gather(whole, of_rank(rank, numel), LABEL).wait()
        for other, part in enumerate(whole.chunk(world_size)):
            expected = wire.as_gathered(of_rank(other, numel), dtype)
            assert torch.equal(part, expected)
            if dtype == torch.float32:
                assert torch.equal(part, each(of_rank(other, numel)))
    for is_average in (False, True):
        wholes = [of_rank(other, world_size * numel) for other in range(world_size)]
        shard = torch.empty(numel)
        wire.reduce_scatter(shard, wholes[rank].clone(), is_average, LABEL).wait()
        parts = [item.chunk(world_size)[rank] for item in wholes]
        sent = [part if other == rank else each(part) for other, part in enumerate(parts)]
        expected = torch.stack([part.double() for part in sent]).sum(0)
        torch.testing.assert_close(shard, (expected / world_size if is_average else expected).float())
        tensor, exact = of_rank(rank, numel), torch.stack([of_rank(i, numel) for i in range(world_size)]).sum(0)
        wire.all_reduce(tensor, is_average, LABEL).wait()
        same_on_every_rank(str(tensor.tolist()))
        exact = exact / world_size if is_average else exact
        torch.testing.assert_close(tensor, exact, rtol=0, atol=0.08)
    for plain in (torch.arange(world_size * 8), torch.arange(world_size * 8).double() * 1e-300):
        whole = torch.empty_like(plain)
        wire.all_gather(whole, plain.chunk(world_size)[rank].clone(), LABEL).wait()
        assert plain.is_floating_point() or torch.equal(whole, plain)


@distributed(world_size=2)
def test_sums_whose_parts_have_encodings_of_different_lengths():
    for encoding in FORMATS:
        for numel in (17, 513):  # a multiple of what is aligned, and one more
            tensor = of_rank(dist.get_rank(), numel)
            Wire(Transport(world()), encoding, encoding).all_reduce(tensor, False, LABEL).wait()
            same_on_every_rank(str(tensor.tolist()))
            torch.testing.assert_close(tensor, of_rank(0, numel) + of_rank(1, numel), rtol=0, atol=0.08)


@distributed(world_size=2)
def test_a_wait_may_be_repeated():
    rank, wire = dist.get_rank(), Wire(Messages(world()), Int8(), Int8())
    whole, shard, tensor = torch.empty(1000), torch.empty(500), of_rank(rank, 1000)
    works = [
        wire.all_gather(whole, of_rank(rank, 500), LABEL),
        wire.reduce_scatter(shard, of_rank(rank, 1000), True, LABEL),
        wire.all_reduce(tensor, True, LABEL),
    ]
    found = []
    for _ in range(2):
        for work in works:
            work.wait()
        found.append([item.clone() for item in (whole, shard, tensor)])
    assert all(map(torch.equal, *found))


# ---- Training


def gathered(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    with full_parameters(model) as buckets:
        return [pair for bucket in buckets for pair in bucket]


def trained(
    formats: dict[str, Any],
    mode: str = "",
    shard: Callable[..., nn.Module] = shard_layers,
    steps: int = 3,
    **options: Any,
) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = shard(Stack(), **options)
    set_wire_formats(model, **formats)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        with functional_mode(model) if mode == "functional" else nullcontext():
            parts = rows(10 * step + dist.get_rank()).chunk(2 if mode == "accumulation" else 1)
            for i, part in enumerate(parts):
                with no_sync(model) if i + 1 < len(parts) else nullcontext():
                    loss = mean_square(model, part) / len(parts)
                    loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@functools.cache
def exactly_trained(mode: str) -> list[float]:
    return trained({}, mode)[0]


@pytest.mark.parametrize("formats", EVERYWHERE)
@distributed(world_size=(2, 3))
def test_all_ways_of_training_compute_the_same(formats, world_size):
    chosen = EVERYWHERE[formats]
    expected, _ = trained(chosen)
    plain = exactly_trained("")
    assert expected != plain
    assert expected == pytest.approx(plain, rel=0.05)
    ways: list[dict[str, Any]] = [
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy()},
        {"mode": "functional"},
    ]
    for way in ways:
        assert trained(chosen, **way)[0] == expected, way
    assert trained(chosen, "accumulation")[0] == pytest.approx(exactly_trained("accumulation"), rel=0.05)


@distributed(world_size=4)
def test_hybrid_sharding_can_round_between_nodes_only():
    mesh = lasting_mesh(("replicate", "shard"))
    plain, _ = trained({}, mesh=mesh)
    for formats in ({"all_reduce": "int8"}, EVERYWHERE["int8"], EVERYWHERE["bf16"]):
        losses, model = trained(formats, mesh=mesh)
        assert losses != plain and losses == pytest.approx(plain, rel=0.05)
        with record_collectives(model) as lines:
            mean_square(model, rows(0)).backward()
        reductions = [line for line in lines if line.startswith("reduce-scatter")]
        assert bool(reductions) == ("reduce_scatter" not in formats)
        for name, whole in gathered(model):
            same_on_every_rank(f"{name} {whole.tolist()}")
    kept, _ = trained(EVERYWHERE["int8"], mesh=lasting_mesh(("shard",), (4,)), reshard_after_forward=2)
    assert kept == trained(EVERYWHERE["int8"], mesh=lasting_mesh(("shard",), (4,)))[0], "parts stay exact"


@distributed(world_size=(2, 3))
def test_replicate(world_size):
    plain, _ = trained({}, shard=lambda model: replicate(model))
    for name in ("int8", "bf16"):
        losses, model = trained({"all_reduce": name}, shard=lambda model: replicate(model))
        assert losses != plain and losses == pytest.approx(plain, rel=0.05)
        for param in model.parameters():
            same_on_every_rank(str(local_of(param).tolist()))


@distributed(world_size=(2, 3))
def test_all_ranks_compute_with_the_same_bits_and_keep_exact_ones(world_size):
    torch.manual_seed(0)
    reference = Stack()
    model = shard_layers(copy.deepcopy(reference))
    set_wire_formats(model, all_gather="int8", reduce_scatter="int8")
    with torch.no_grad():
        same_on_every_rank(str(model(rows(0)).tolist()))
        assert not torch.equal(model(rows(0)), reference(rows(0)))
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name])
    for name, whole in gathered(model):
        assert torch.equal(whole, expected[name])
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(value, expected[name]) for name, value in whole.items())


@distributed(world_size=2)
def test_bytes_by_count():
    """Sent by the recorded transport: as the network sees it."""
    sizes: dict[str, dict[str, int]] = {}
    for name in ("fp32", "bf16", "int8"):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)))
        if name != "fp32":
            set_wire_formats(model, all_gather=name, reduce_scatter=name)
        counted = dict.fromkeys(("gathers", "sums"), 0)
        with record_collectives(model) as lines:
            model(torch.ones(2, 512)).sum().backward()
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind not in ("all-gather", "reduce-scatter", "all-to-all"):
                continue
            numel, _, dtype, *_ = rest[rest.rindex("(") + 1 :].split()
            nbytes = int(numel) * getattr(torch, dtype).itemsize
            # An all-to-all counts all that moves: with two ranks, half of what each has.
            counted["gathers" if kind == "all-gather" else "sums"] += nbytes
        sizes[name] = counted
    for kind in ("gathers", "sums"):
        assert sizes["bf16"][kind] / sizes["fp32"][kind] == pytest.approx(0.5, abs=1e-3)
        assert 0.25 < sizes["int8"][kind] / sizes["fp32"][kind] < 0.26


def test_plan_counts_what_is_sent():
    def build(formats: dict[str, Any]) -> Any:
        def make() -> Any:
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
            fully_shard(model)
            set_wire_formats(model, **formats)
            return model, lambda model: model(torch.ones(4, 256)).sum()

        return plan(make, 4)

    texts = [str(build(formats)) for formats in ({}, EVERYWHERE["int8"])]
    assert texts[0] != texts[1]


# ---- Guards


@pytest.mark.parametrize("formats", EVERYWHERE)
@pytest.mark.parametrize("mode", ["", "functional"])
@distributed(world_size=2)
def test_writes_that_would_be_lost_are_found(mode, formats):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.writes = nn.Linear(600, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                self.layer.weight.data.mul_(0.5)
            return self.layer(x)

    torch.manual_seed(0)
    model = fully_shard(Writes())
    set_wire_formats(model, **EVERYWHERE[formats])
    with functional_mode(model) if mode else nullcontext():
        model(torch.ones(2, 600)).sum().backward()
        model.writes = True
        with pytest.raises(MisuseRuntimeError, match=r"modified in place inside forward.*layer\.weight"):
            model(torch.ones(2, 600)).sum().backward()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"all_gather": "int8"},
    {"all_gather": Int8(64)},
    {"reduce_scatter": "int8"},
    {"all_reduce": "bf16"},
]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("pair", [(a, b) for a in range(5) for b in range(5) if a < b], ids=str)
@distributed(world_size=4)
def test_ranks_with_other_wires_are_told(pair, is_late):
    mesh = lasting_mesh(("replicate", "shard"))
    torch.manual_seed(0)
    model = shard_layers(Stack(), mesh=mesh)
    if is_late:
        mean_square(model, rows(0)).backward()
    # Sizes are the same, or of one replica only: nothing but the comparison could find it.
    set_wire_formats(model, **SETTINGS[pair[dist.get_rank() >= 2]])
    late = r"set_transport.*Rank 0 now sends by messages.*, rank [23] by messages"
    with pytest.raises(RanksDifferError, match=late if is_late else r'"(shards|replicas)": "messages'):
        mean_square(model, rows(0)).backward()


@distributed(world_size=2)
def test_misuse():
    model = shard_layers(Stack())
    with pytest.raises(MisuseError, match="'int4' is no format: give 'bf16' or 'int8'"):
        set_wire_formats(model, all_gather="int4")
    with pytest.raises(MisuseError, match="no fully_shard group"):
        set_wire_formats(nn.Linear(2, 2), all_gather="int8")
    with pytest.raises(MisuseTypeError, match="not a transport of the same process group"):
        set_transport(model, lambda transport, role: None)  # type: ignore[arg-type,return-value]
    output = model(rows(0))
    with pytest.raises(MisuseRuntimeError, match="between iterations"):
        set_wire_formats(model, all_gather="int8")
    output.sum().backward()

    class Nobody:
        def average(self, tensor: torch.Tensor) -> Any: ...

        def maximum(self, tensor: torch.Tensor) -> bool:
            return True

    set_replicas(model, Nobody())
    with pytest.raises(MisuseError, match="replica groups"):
        set_wire_formats(model, all_reduce="bf16")
    set_wire_formats(model, all_gather="int8")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Linear(300, 4, False), nn.Linear(4, 4), nn.Linear(300, 4, False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self.embed(x)) @ self.head.weight


@pytest.mark.parametrize("kept", ["zero1", "zero2", "keep_unsharded"])
@distributed(world_size=2)
def test_what_is_gathered_follows_a_change_of_formats(kept):
    options = {} if kept == "keep_unsharded" else {"strategy": kept}
    for before, after in ((None, "int8"), ("int8", None), ("bf16", "int8")):
        torch.manual_seed(0)
        model, fresh = nn.Linear(64, 64), nn.Linear(64, 64)
        fresh.load_state_dict(model.state_dict())
        set_wire_formats(fully_shard(fresh), all_gather=after)
        set_wire_formats(fully_shard(model, **options), all_gather=before)
        x, accumulates = torch.ones(1, 64), kept != "keep_unsharded"
        with nullcontext() if accumulates else keep_unsharded(model), torch.set_grad_enabled(accumulates):
            for step in range(6):
                if step == 1:
                    set_wire_formats(model, all_gather=after)
                output = model(x)
                assert torch.equal(output, fresh(x)) or step == 0
                if accumulates:
                    output.sum().backward()


@distributed(world_size=2)
def test_groups_that_ties_give_new_flat_parameters_keep_their_formats():
    torch.manual_seed(0)
    model = Tied()
    for layer in (model.embed, model.head, model.middle):
        fully_shard(layer)
    fully_shard(model)
    set_wire_formats(model, all_gather="int8", reduce_scatter="bf16")
    before = handles_of(model)
    mean_square(model, rows(0, 300)).backward()
    assert {*handles_of(model)} != {*before}
    assert all("gathers as int8/256, sums as bf16" in item.mesh.transport.name for item in handles_of(model))


@distributed(world_size=2)
def test_classes_with_all_gathers_of_their_own_choose_what_is_sent():
    torch.manual_seed(0)
    layer = nn.Linear(8, 256, bias=False)
    expected = RowScales.by_hand(layer.weight.detach())
    layer.weight = make(RowScales, layer.weight.detach())
    fully_shard(layer)
    set_wire_formats(layer, all_gather="int8", reduce_scatter="bf16")
    x = rows(0, 8)
    assert torch.equal(layer(x), x @ expected.T), "the scales are exact"


# ---- Transports of the user


class Counting(TransportWrapper):
    """All-gathers as they are, reductions in bf16 with sums in fp32."""

    name = "counting"

    def __init__(self, inner: Transport, calls: list[str]) -> None:
        super().__init__(inner)
        self.calls = calls

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, label: Label) -> Any:
        self.calls.append(f"gather {label}")
        return super().all_gather(whole, shard, label)


@distributed(world_size=2)
def test_a_transport_of_the_user():
    torch.manual_seed(0)
    model, roles = shard_layers(Stack()), list[TransportRole]()
    calls: list[str] = []

    def wrap(transport: Transport, role: TransportRole) -> Transport:
        roles.append(role)
        return Counting(transport, calls)

    set_transport(model, wrap)
    assert {*roles} == {TransportRole.SHARDS}
    mean_square(model, rows(0)).backward()
    with record_collectives(model) as lines:
        mean_square(model, rows(0)).backward()
    num_gathers = sum(line.startswith("all-gather") for line in lines)
    assert num_gathers and len(calls) == 2 * num_gathers
    twin = copy.deepcopy(model)
    twin(rows(0))
    assert len(calls) > 2 * num_gathers, "a copy has the same transport"
    set_transport(model, None)
    calls.clear()
    mean_square(model, rows(0)).backward()
    assert not calls and all(type(handle.mesh.transport) is Messages for handle in handles_of(model))
    set_wire_formats(model.blocks[0], all_gather="int8", recurse=False)
    set_wire_formats(model.blocks[1], all_gather="int8")
    names = [handle.mesh.transport.name for handle in handles_of(model)]
    assert sum("int8/256" in name for name in names) == 2


@distributed(world_size=2)
def test_a_transport_of_the_user_that_says_nothing_of_rounding_gets_what_is_computed_with():
    torch.manual_seed(0)
    plain = shard_layers(Stack(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    torch.manual_seed(0)
    model = shard_layers(Stack(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    set_transport(model, lambda transport, role: Counting(transport, []))
    for one in (plain, model):
        mean_square(one, rows(0)).backward()
    assert all(torch.equal(full(a.grad), full(b.grad)) for a, b in zip(plain.parameters(), model.parameters()))


class Rounding(TransportWrapper):
    """Does not say what it makes of shards."""

    is_exact = False

    def all_gather(self, whole, shard, label):
        rank, numel = self.group.rank(), shard.numel()
        own = whole[rank * numel : rank * numel + numel].copy_(shard.bfloat16())
        return self.inner.all_gather(whole, own, label)


class Told(Rounding):
    """Knows it only when it is made."""

    is_exact = True

    def __init__(self, inner):
        super().__init__(inner)
        self.is_exact = False


INT8 = "int8"
NESTED: dict[str, tuple[Callable[[Transport], Transport], str | None]] = {
    "counts over a wire": (lambda inner: Counting(Wire(inner, Int8(), None), []), INT8),
    "sums over a wire": (lambda inner: Wire(Wire(inner, Int8(), None), None, Int8()), INT8),
    "says so over a wire": (lambda inner: Told(Wire(inner, Int8(), None)), None),
    "says so": (Rounding, None),
    "says so in an instance": (Told, None),
    "counts over one that says so": (lambda inner: Counting(Rounding(inner), []), None),
    "sums over one that says so": (lambda inner: Wire(Rounding(inner), None, Int8()), None),
}


@pytest.mark.parametrize("name", NESTED)
@distributed(world_size=2)
def test_a_transport_around_one_that_rounds_rounds_too(name):
    wrap, gathered_as = NESTED[name]
    model = shard_layers(Stack())
    set_transport(model, lambda transport, role: wrap(transport))
    (transport,) = {handle.mesh.transport for handle in handles_of(model)[:1]}
    part, wire = torch.randn(300), Wire(transport.exact, Int8(), None)
    for each in (transport, copy.copy(transport), transport.over(lambda inner: inner)):
        assert each.rounds and not each.exact.rounds
        shown = each.as_gathered(part, torch.float32)
        assert shown is None if gathered_as is None else torch.equal(shown, wire.as_gathered(part, torch.float32))
    for _ in range(3):  # with the looks for hidden writes
        mean_square(model, rows(0)).backward()


@distributed(world_size=2)
def test_muon_moves_whole_matrices_exactly():
    results = []
    for formats in ({}, {"all_gather": "int8", "reduce_scatter": None}):
        torch.manual_seed(0)
        model = shard_layers(Stack())
        set_wire_formats(model, **formats)
        optimizer = Muon(muon_groups(model), lr=1e-2)
        for param in model.parameters():
            param.grad = copy.deepcopy(param.detach())
        optimizer.step()
        results.append({name: param.full_tensor() for name, param in model.named_parameters()})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
