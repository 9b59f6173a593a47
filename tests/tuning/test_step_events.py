"""What a dry run notes of a step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

from fsdp_compose import plan
from fsdp_compose.inspect import Issue, Operation, Wait, operation_of
from tests.inspect.test_plan import Block, Net


def events_of(factory, world=2, **options):
    return plan(factory, world, **options).worlds[0].events


def flops_of(events, phase=None, **kinds):
    return sum(
        event.flops
        for event in events
        if isinstance(event, Operation)
        and phase in (None, event.phase)
        and all(getattr(event, name) == value for name, value in kinds.items())
    )


TOKENS = 2 * 16


def test_products_have_the_numbers_of_arithmetic():
    events = events_of(Net, batch=2, seq=16)
    width = 64
    forward = 2 * TOKENS * (4 * 2 * 4 * width * width + width * 128)
    assert flops_of(events, "forward") == forward
    assert flops_of(events, "backward") == 2 * forward
    assert flops_of(events, "optimizer") == 0


def test_what_is_recomputed_is_marked():
    events = events_of(partial(Net, checkpoints=True), batch=2, seq=16)
    first_products = 2 * TOKENS * 4 * 4 * 64 * 64  # torch stops where all that backward needs is there
    assert flops_of(events, is_repeated=True) == first_products
    assert flops_of(events, "backward", is_repeated=False) == 2 * flops_of(events, "forward")


class Attention(torch.nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.linear, self.is_causal = torch.nn.Linear(32, 96), is_causal

    def forward(self, x):
        parts = [part.view(2, 8, 2, 16).transpose(1, 2) for part in self.linear(x).chunk(3, -1)]
        return F.scaled_dot_product_attention(*parts, is_causal=self.is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_half_if_it_is_causal(is_causal):
    def factory():
        return Attention(is_causal), lambda model: model(torch.zeros(2, 8, 32)).sum()

    events, share = events_of(factory), 0.5 if is_causal else 1.0
    product = 2 * 2 * 2 * 8 * 8 * 16  # of one of the matrices
    assert flops_of(events, "forward", is_attention=True) == share * 2 * product
    assert flops_of(events, "backward", is_attention=True) == share * 5 * product


def test_collectives_and_waits_are_in_order_with_their_ranks():
    found = plan(Net, 8, mesh="2x4", batch=2, seq=16).worlds[0]
    issued = [event for event in found.events if isinstance(event, Issue)]
    assert [(one.kind, one.group, one.nbytes) for one in issued] == [
        (one.kind, one.group, one.nbytes) for one in found.collectives
    ]
    assert {(one.kind, tuple(one.ranks)) for one in issued} == {
        ("all-gather", (0, 1, 2, 3)),
        ("reduce-scatter", (0, 1, 2, 3)),
        ("all-reduce", (0, 4)),
    }
    places = {event.number: i for i, event in enumerate(found.events) if isinstance(event, Issue)}
    waits = {event.number: i for i, event in enumerate(found.events) if isinstance(event, Wait)}
    assert waits.keys() == places.keys()
    assert all(waits[number] > place for number, place in places.items())
    assert all(one.phase == ("forward" if i < 5 else "backward") for i, one in enumerate(issued))


def test_bytes_are_those_of_arguments_and_results():
    def factory():
        return torch.nn.Linear(4, 4, bias=False), lambda model: (model(torch.zeros(8, 4)) * 2.0).sum()

    (times,) = [one for one in events_of(factory, 1) if isinstance(one, Operation) and one.name == "mul"][:1]
    assert (times.nbytes, times.dtype, times.flops) == (2 * 8 * 4 * 4, torch.float32, 0)


@torch.library.custom_op("tests_of_events::mixed", mutates_args=())
def mixed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(query)


mixed.register_fake(lambda query, key, value: torch.empty_like(query))


@torch.library.custom_op("tests_of_events::flash_attn_forward", mutates_args=())
def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    return torch.empty_like(query)


flash.register_fake(lambda query, key, value, causal: torch.empty_like(query))


def operations_of(run):
    def factory():
        return torch.nn.Linear(4, 4), lambda model: model(torch.zeros(4)).sum() + 0 * run().sum()

    return [event for event in events_of(factory, 1) if isinstance(event, Operation) and "::" in event.name]


def test_an_operator_without_a_formula_says_what_it_may_hide():
    (found,) = operations_of(lambda: mixed(*(torch.zeros(2, 8, 16, 4) for _ in range(3))))
    assert (found.name, found.flops, found.hidden) == ("tests_of_events::mixed", 0.0, 4.0 * 2 * 8 * 16 * 4 * 16)


def test_an_attention_is_known_by_its_name_and_has_heads_behind_tokens():
    query, key = torch.zeros(2, 16, 8, 4), torch.zeros(2, 32, 8, 4)  # sequences, tokens, heads, width
    full, causal = operations_of(lambda: flash(query, key, key, False) + flash(query, key, key, True))
    assert full.is_attention and full.hidden == 0.0
    assert full.flops == 2 * causal.flops == 2.0 * (2 * 8 * 16 * 32) * (4 + 4)


def test_a_formula_that_was_registered_counts():
    @torch.library.custom_op("tests_of_events::known", mutates_args=())
    def known(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    known.register_fake(torch.empty_like)
    register_flop_formula(torch.ops.tests_of_events.known)(lambda shape, *args, **kwargs: 7 * shape.numel())
    (found,) = operations_of(lambda: known(torch.zeros(5)))
    assert (found.flops, found.hidden) == (35.0, 0.0)


def test_flex_attention_is_an_attention():
    class Flexible(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(32, 96)

        def forward(self, x):
            parts = [part.view(2, 8, 2, 16).transpose(1, 2) for part in self.linear(x).chunk(3, -1)]
            return flex_attention(*parts, score_mod=lambda score, *_: score + 1)

    events = events_of(lambda: (Flexible(), lambda model: model(torch.zeros(2, 8, 32)).sum()))
    product = 2 * 2 * 2 * 8 * 8 * 16
    assert flops_of(events, "forward", is_attention=True) == 2 * product
    assert flops_of(events, "backward", is_attention=True) == 5 * product


def test_integers_become_floats_of_the_default_dtype_of_the_moment():
    found = []

    def loss_of(model):
        for dtype in (torch.float32, torch.bfloat16):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            found.extend((torch.zeros(3000, 3000).dtype, (torch.arange(3_000_000) * 1.5).dtype))
            torch.set_default_dtype(before)
        return model(torch.zeros(4, 4)).sum()

    events_of(lambda: (torch.nn.Linear(4, 4), loss_of), 1)
    assert found[-4:] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(
    ("shapes", "offsets", "flops"),
    [
        (((8, 32), (2, 32, 48)), True, 2 * 8 * 32 * 48),
        (((2, 8, 32), (2, 32, 48)), False, 2 * 2 * 8 * 32 * 48),
        (((16, 32), (32, 48)), True, 2 * 16 * 32 * 48),
        (((2, 16, 32), (32, 48)), True, 2 * 16 * 32 * 48),
    ],
)
def test_products_of_groups_count(shapes, offsets, flops):
    a, b = (torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    func = torch.ops.aten._grouped_mm.default
    event = operation_of(func, (a, b), {}, a, lambda tree: [a, b] if isinstance(tree, tuple) else [a], "forward")
    assert event is not None and event.flops == flops
    assert event.name == "grouped_mm"


def test_what_is_overwritten_is_not_read():
    def loss_of(model):
        kept = torch.ones(1 << 20)  # too large to be computed
        kept.copy_(torch.zeros(1 << 20))
        kept.zero_()
        kept.mul_(2.0)
        return model(torch.zeros(4, 4)).sum()

    found = {}
    for event in events_of(lambda: (torch.nn.Linear(4, 4), loss_of), 1):
        if isinstance(event, Operation) and event.phase == "forward":
            found.setdefault(event.name, event.nbytes)
    size = 4 << 20
    assert (found["copy_"], found["zero_"], found["mul_"]) == (2 * size, size, 2 * size)


def test_the_layout_of_products_is_noted():
    found = {(event.name, event.layout) for event in events_of(Net, batch=2, seq=16) if getattr(event, "flops", 0)}
    assert found == {("addmm", "nt"), ("mm", "nt"), ("mm", "nn"), ("mm", "tn")}


def test_layers_that_repeat_cost_no_more_shapes():
    """The results of an operation are found once for the same shapes, strides, dtypes and other arguments."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block(32), Block(32)])
            self.other = torch.nn.Linear(32, 32)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            y = self.other(x)
            return torch.cat([y, y.double()], 1), y.sum(0, True), y.sum(0, False), y.sum(1), y[:, ::2] + 1, y + True

    def loss_of(model):
        found = model(torch.zeros(6, 32))
        shapes = [(tuple(item.shape), item.stride(), item.dtype) for item in found]
        assert shapes == [
            ((6, 64), (64, 1), torch.float64),
            ((1, 32), (32, 1), torch.float32),
            ((32,), (1,), torch.float32),
            ((6,), (1,), torch.float32),
            ((6, 16), (16, 1), torch.float32),
            ((6, 32), (32, 1), torch.float32),
        ]
        return sum(item.sum().float() for item in found)

    events_of(lambda: (Twice(), loss_of))


def test_a_repeated_forward_of_reentrant_checkpoints_is_marked_too():
    class Old(Net):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    events = events_of(Old, batch=2, seq=16)
    assert flops_of(events, is_repeated=True) == 2 * TOKENS * 4 * 2 * 4 * 64 * 64
