"""Parameters that ``to_empty()`` gave memory, and nobody initialized, are an error at the first forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from fsdp_compose import drop_in, fully_shard
from fsdp_compose.errors import MisuseRuntimeError
from tests.harness import distributed


def on_meta(shard=fully_shard, dtype=torch.float32, **options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(dtype)
    shard(model[0])
    shard(model, **options)
    model.to_empty(device="cpu")
    return model


@distributed(world_size=(1, 3))
def test_parameters_left_empty_are_the_same_error_on_every_rank():
    for shard, dtype in ((fully_shard, torch.float32), (drop_in.fully_shard, torch.bfloat16)):
        model = on_meta(shard, dtype)
        for _ in range(2):
            with pytest.raises(
                MisuseRuntimeError, match=r"parameter\(s\) were on the meta device and were not written"
            ):
                model(torch.ones(2, 3, dtype=dtype))


@distributed(world_size=3)
def test_one_parameter_left_empty_is_named_on_every_rank():
    model = on_meta()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name != "1.bias":  # one element, which one rank has
                param.zero_()
    with pytest.raises(MisuseRuntimeError, match=r"^1 parameter\(s\) .*: 1.bias\. They hold whatever was in memory"):
        model(torch.ones(2, 3))
    with torch.no_grad():
        model[1].bias.fill_(0.0)
    assert model(torch.ones(2, 3)).eq(0).all()


@distributed(world_size=2)
def test_every_way_to_initialize_counts():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    ways = [
        lambda model: model.load_state_dict(whole.state_dict()),
        lambda model: [nn.init.ones_(param) for param in model.parameters()],
        lambda model: [param.data.fill_(float("nan")) for param in model.parameters()],
        lambda model: [module.reset_parameters() for module in model],
    ]
    for initialize in ways:
        torch.manual_seed(0)
        model = on_meta()
        initialize(model)
        model(torch.ones(2, 3)).sum().backward()
