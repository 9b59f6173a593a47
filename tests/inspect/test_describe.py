"""``describe``: its numbers agree with the model, and with what each rank holds; it reads, and does nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compose import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    record_collectives,
    replicate,
    reshard,
    set_modules_to_forward_prefetch,
    summon_full_params,
    unshard,
)
from fsdp_compose.core.group.registry import states_to_run
from fsdp_compose.inspect.describe import collect
from fsdp_compose.inspect.describe_formats import names_of, report_of
from fsdp_compose.inspect.report import as_page, as_terminal_text, as_text
from tests.flat import test_composite_parameters as composite_parameters
from tests.harness import distributed, fake_process_group
from tests.models import GPT, Net, batches, gpt_loss, shard_layers
from tests.training import local_part


def uneven() -> nn.Module:
    return shard_layers(Net())


def tied() -> nn.Module:
    return shard_layers(GPT(tie=True))


def frozen() -> nn.Module:
    model = Net()
    model.layers[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return shard_layers(model)


def mixed_dtypes() -> nn.Module:
    model = Net()
    model.layers[0].to(torch.bfloat16)
    model.head.to(torch.float64)
    return shard_layers(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def hybrid() -> nn.Module:
    return shard_layers(Net(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Net()
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"linear": ColwiseParallel()})
    return shard_layers(model, mesh=mesh["data"])


def replicated() -> nn.Module:
    return replicate(Net())


def partly() -> nn.Module:
    """One group of two modules, one replicated, the rest in none; and a parameter without elements."""
    model = Net()
    model.layers[2].nothing = nn.Parameter(torch.empty(0, 3))
    fully_shard([model.layers[0], model.layers[2]], offload_policy=CPUOffloadPolicy(pin_memory=False))
    replicate(model.layers[1])
    return model


def quantised() -> nn.Module:
    return shard_layers(composite_parameters.made())


MODELS = [quantised, uneven, tied, frozen, mixed_dtypes, hybrid, tensor_parallel, replicated, partly]


def facts_of(model: nn.Module) -> dict[str, Any]:
    return json.loads(describe(model, format="json"))


@pytest.mark.parametrize("make", MODELS)
def test_sums_agree_with_the_model(make: Callable[[], nn.Module]):
    with fake_process_group(rank=1, world_size=4):
        model = make()
        facts = facts_of(model)
        params = dict(model.named_parameters())
        flats = [flat for group in facts["groups"] for flat in group["flat_parameters"]]
        managed = [param for flat in flats for param in flat["parameters"]]
        assert {param["fqn"] for param in (*managed, *facts["others"])} == params.keys()
        assert facts["totals"]["numel"] == sum(param.numel() for param in params.values())
        for param in managed:
            assert tuple(param["shape"]) == params[param["fqn"]].shape
            assert (
                sum(part["stop"] - part["start"] for part in param["parts"]) == torch.Size(param["local_shape"]).numel()
            )
        handles = [handle for state, _ in states_to_run(model) for handle in state._handles]
        for flat, handle in zip(flats, handles, strict=True):
            flat_bytes = flat["num_shards"] * flat["shard_bytes"]
            assert sum(flat["held_bytes"]) + flat["padding_bytes"] == flat_bytes
            assert handle.shard.nbytes == flat["shard_bytes"]
            if flat["unsharded_bytes"] is not None:
                numel = flat["num_shards"] * flat["shard_numel"]
                assert flat["unsharded_bytes"] == numel * getattr(torch, flat["compute"]).itemsize
                if flat["compute"] == flat["dtype"]:
                    assert flat["unsharded_bytes"] == flat_bytes
            pieces = [part for param in flat["parameters"] for part in param["parts"]]
            held = sum(part["shard_stop"] - part["shard_start"] for part in pieces) * handle.shard.element_size()
            assert held == sum(flat["held_bytes"])
        totals, whole = facts["totals"], sum(other["nbytes"] for other in facts["others"])
        assert totals["kept_bytes"] == sum(handle.shard.nbytes for handle in handles) + whole
        for format in ("text", "html"):
            text = describe(model, format=format, all_groups=True)
            assert all(name in text for name in params)


@distributed(world_size=2)
def test_one_rank_alone_describes_what_all_hold_before_and_after_the_first_forward():
    torch.manual_seed(0)
    model = GPT(tie=True)
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    shard_layers(model)
    rank, others = dist.get_rank(), [facts_of(model)]
    params = dict(model.named_parameters())
    for when in ("before", "after"):
        with record_collectives(model) as lines:
            if rank == 1:  # rank 0 goes on
                for format in ("text", "html"):
                    assert "blocks.0.qkv.weight" in describe(model, format=format)
                assert facts_of(model)["rank"] == 1
            assert not lines
        facts = facts_of(model)
        resharding = {group["options"]["reshard_after_forward"] for group in facts["groups"]}
        assert resharding == ({"default (True; False for the root)"} if when == "before" else {"True", "False"})
        gpt_loss(model, local_part(next(batches(1)))).backward()
    dist.all_gather_object(others := [None, None], {**facts, "rank": 0, "totals": 0})
    assert others[0] == others[1]
    for group, (state, _) in zip(facts["groups"], states_to_run(model), strict=True):
        unshard(state.modules[0]())
        for flat, handle in zip(group["flat_parameters"], state._handles, strict=True):
            assert handle.unsharded.memory.nbytes() == flat["unsharded_bytes"]
            for param in flat["parameters"]:
                mine = [part for part in param["parts"] if rank in part["ranks"]]
                start, stop = (mine[0]["start"], mine[0]["stop"]) if mine else (0, 0)
                local = params[param["fqn"]].to_local()
                assert torch.equal(local.flatten(), whole[param["fqn"]].flatten()[start:stop])
                if mine and mine[0]["rows"]:
                    first, last = mine[0]["rows"]
                    assert torch.equal(local, whole[param["fqn"]][first:last])
        reshard(state.modules[0]())
    (tie,) = [
        param
        for group in facts["groups"]
        for flat in group["flat_parameters"]
        for param in flat["parameters"]
        if param["tied"]
    ]
    assert (tie["fqn"], tie["tied"]) == ("tokens.weight", ["head.weight"])


def test_text():
    with fake_process_group(rank=1, world_size=4):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 40), nn.Linear(40, 1, bias=False))
        model[1].bias.requires_grad_(False)
        fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model[1], reshard_after_forward=False)
        set_modules_to_forward_prefetch(model[0], [model[1]])
        text = describe(model)
    assert_expected_inline(
        text,
        """\
Sequential: 2 groups, 3 flat parameters, 5 parameters of 440 elements
rank 1 of 4 keeps 592 B of 1,888 B, of which 128 B are padding

0 (Linear): sharded over ranks 0-3
  mesh (4) on cpu; param_dtype=bfloat16, reshard_after_forward=default (True; False for the root), forward_prefetch=1
  float32, computed in bfloat16: 4 shards of 64 B, 96 B of padding in all, 128 B unsharded
    parameter  shape   dtype    elements  offset  held by
    0.weight   (8, 4)  float32        32       0  rows 0-3 on 0 | 4-7 on 1
    0.bias     (8,)    float32         8      32  rows 0-7 on 2

1 (Linear): sharded over ranks 0-3
  mesh (4) on cpu; reshard_after_forward=False
  float32: 4 shards of 320 B, no padding, 1,280 B unsharded
    parameter  shape    dtype    elements  offset  held by
    1.weight   (40, 8)  float32       320       0  rows 0-9 on 0 | 10-19 on 1 | 20-29 on 2 | 30-39 on 3
  float32: 4 shards of 48 B, 32 B of padding in all, 192 B unsharded
    parameter  shape  dtype            elements  offset  held by
    1.bias     (40,)  float32, frozen        40       0  rows 0-11 on 0 | 12-23 on 1 | 24-35 on 2 | 36-39 on 3

in no group, whole on every rank; see find_unreduced_parameters(model)
  2.weight (1, 40) float32, 160 B""",
    )


def test_equal_groups_are_shown_once():
    with fake_process_group(rank=1, world_size=4):
        model = nn.Sequential(*[nn.Linear(4, 8 if i == 3 else 4) for i in range(6)])
        for layer in model:
            fully_shard(layer)
        text = describe(model)
        assert_expected_inline(
            text,
            """\
Sequential: 6 groups, 6 flat parameters, 12 parameters of 140 elements
rank 1 of 4 keeps 208 B of 832 B, of which 272 B are padding

{0-2, 4-5} (Linear), 5 equal groups: sharded over ranks 0-3
  mesh (4) on cpu; reshard_after_forward=default (True; False for the root)
  float32: 4 shards of 32 B, 48 B of padding in all, 128 B unsharded
    parameter  shape   dtype    elements  offset  held by
    0.weight   (4, 4)  float32        16       0  rows 0-1 on 0 | 2-3 on 1
    0.bias     (4,)    float32         4      16  rows 0-3 on 2

3 (Linear): sharded over ranks 0-3
  mesh (4) on cpu; reshard_after_forward=default (True; False for the root)
  float32: 4 shards of 48 B, 32 B of padding in all, 192 B unsharded
    parameter  shape   dtype    elements  offset  held by
    3.weight   (8, 4)  float32        32       0  rows 0-2 on 0 | 3-5 on 1 | 6-7 on 2
    3.bias     (8,)    float32         8      32  rows 0-3 on 2 | 4-7 on 3""",
        )
        everything = describe(model, all_groups=True)
        assert len(facts_of(model)["groups"]) == 6
        page, long_page = (describe(model, format="html", all_groups=each) for each in (False, True))
    assert "equal groups" not in everything
    assert all(f"{i}.{name}" in everything for i in range(6) for name in ("weight", "bias"))
    assert (page.count("<svg"), long_page.count("<svg")) == (2, 6)


def test_blocks_of_a_transformer_are_shown_once():
    with fake_process_group(rank=0, world_size=2):
        model = shard_layers(GPT())
        text = describe(model)
    assert "blocks.0 ... blocks.2 (Block), 3 equal groups: sharded over ranks 0-1" in text
    assert "blocks.0.qkv.weight" in text and "blocks.1.qkv.weight" not in text and "blocks.2.qkv.weight" not in text


def test_groups_that_differ_in_options_or_in_what_is_tied_are_not_equal():
    with fake_process_group(rank=0, world_size=2):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
        model[4].weight = model[0].weight
        for i, layer in enumerate(model):
            fully_shard(layer, reshard_after_forward=i != 2)
        titles = [line for line in describe(model).splitlines() if ": sharded over" in line]
    assert titles == [
        "0 (Linear): sharded over ranks 0-1",
        "1, 3 (Linear), 2 equal groups: sharded over ranks 0-1",
        "2 (Linear): sharded over ranks 0-1",
        "4 (Linear): sharded over ranks 0-1",
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([("a.0",), ("a.1",), ("a.2",)], "a.0 ... a.2"),
        ([("a.0.mlp",), ("a.2.mlp",), ("a.4.mlp",)], "a.{0, 2, 4}.mlp"),
        ([("a.0",), ("a.1",)], "a.0, a.1"),
        ([("encoder",), ("decoder",)], "encoder, decoder"),
        ([("a.0.b.0",), ("a.1.b.1",)], "a.0.b.0, a.1.b.1"),
        ([("",)], "(root)"),
    ],
)
def test_names_of_equal_groups(names: list[tuple[str, ...]], expected: str):
    with fake_process_group(rank=0, world_size=2):
        (group,) = collect(fully_shard(nn.Linear(2, 2))).groups
    assert names_of([replace(group, names=item) for item in names]) == expected


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_by_itself_and_its_picture_is_to_scale():
    with fake_process_group(rank=0, world_size=4):
        model = nn.ModuleDict({"a<b": nn.Linear(8, 3), "c": nn.Linear(5, 5)})
        fully_shard([model["a<b"], model["c"]])
        page, facts = describe(model, format="html"), facts_of(model)
    tags = Tags(page)
    assert not tags.open and "a<b" not in page and "a&lt;b.weight" in page
    names = {name for _, attributes in tags.found for name in attributes}
    assert not names & {"src", "href"} and "url(" not in page and "@import" not in page and "http" not in page
    ((flat,),) = [group["flat_parameters"] for group in facts["groups"]]
    rects = [attributes for tag, attributes in tags.found if tag == "rect"]
    shards = [item for item in rects if item["fill"] == "#f3f3f3"]
    pieces = [item for item in rects if item["fill"] != "#f3f3f3"]
    assert len(shards) == 4 and len(pieces) == sum(len(param["parts"]) for param in flat["parameters"])
    filled = sum(float(item["width"]) for item in pieces) / sum(float(item["width"]) for item in shards)
    assert filled == pytest.approx(sum(flat["held_bytes"]) / (4 * flat["shard_bytes"]), abs=1e-4)


def test_in_a_terminal_rich_draws_tables():
    main, terminal = os.openpty()
    with fake_process_group(rank=0, world_size=2), open(terminal, "w") as output:
        model = fully_shard(nn.Linear(3, 2))
        with contextlib.redirect_stdout(output):
            text = describe(model)
    os.close(main)
    assert "\x1b[" in text and "weight" in text and "rows 0-1" in text


def test_every_form_says_what_is_in_no_group_and_where_to_look():
    with fake_process_group(rank=0, world_size=2):
        report = report_of(collect(partly()), all_groups=False)
    for form in (as_text, as_terminal_text, as_page):
        text = form(report)
        assert "in no group, whole on every rank; see find_unreduced_parameters(model)" in text, form.__name__
        assert all(f"head.{name} " in text for name in ("weight", "bias")), form.__name__


def test_inside_forward_it_is_the_same_and_inside_summon_full_params_an_error():
    with fake_process_group(rank=1, world_size=2):
        model, found = shard_layers(Net()), []
        model.layers[1].register_forward_pre_hook(lambda *_: found.append(describe(model)))
        model(torch.ones(1, 5))
        assert found == [describe(model)]
        with (
            summon_full_params(model.layers[0]),
            pytest.raises(RuntimeError, match=r"rank 1: .*group layers\.0 show full"),
        ):
            describe(model)


def test_what_cannot_be_described():
    with pytest.raises(ValueError, match="expected one of 'text', 'json', 'html'"):
        describe(nn.Linear(1, 1), format="yaml")
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got list"):
        describe([nn.Linear(1, 1)])
    assert "0 groups, 0 flat parameters, 2 parameters of 2 elements" in describe(nn.Linear(1, 1))
