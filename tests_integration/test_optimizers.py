"""Every optimizer of torch, timm, pytorch-optimizer, schedulefree and optimi: three steps of a sharded model end where
one process does, or the step raises. The tests find by themselves what new versions of the packages add."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from fsdp_compose import flat_parameters, fully_shard
from fsdp_compose.core.optimizers.flat_parameters import ELEMENTWISE_ELSEWHERE
from tests.harness import distributed
from tests.training import local_part, mean_over_ranks
from tests_integration.optimizers import found, largest_error, model_for, short, three_steps

# Not run. All but one cannot train this model in one process either.
NOT_RUN = {
    "pytorch_optimizer.DeMo": "needs another package, and communicates by itself",
    "pytorch_optimizer.DistributedMuon": "each rank gathers other parameters, so the ranks wait in vain",
    "pytorch_optimizer.LoRARite": "trains pairs of LoRA's matrices only",
    "torch.SparseAdam": "takes sparse gradients only",
}

# What the error says of classes that raise on sharded parameters, and why they do.
_SECOND_ORDER = "create_graph=True"  # it differentiates gradients, which the default mode cannot
_COMMUNICATES = r"c10d.*to_local\(\)"  # it calls collectives on gradients itself, as for DDP
_ADDRESS = r"data_ptr\(\) of the parameter"  # it asks whether reshape() has made a view of the parameter or a copy
REFUSED = {
    "timm": {"Adahessian": _SECOND_ORDER},
    "pytorch_optimizer": {
        "AdaHessian": _SECOND_ORDER,
        "DASH": _ADDRESS,
        "GSAM": _COMMUNICATES,
        "SophiaH": _SECOND_ORDER,
        "WSAM": _COMMUNICATES,
    },
}

# Ranks are given equal batches. Two halves of a batch have the same mean gradient but for rounding, and the bases of
# null spaces, which these optimizers compute with, depend on that: in one process too.
WHOLE_BATCH = {"pytorch_optimizer.SOAP"}

# Let onto flat views, and right there. A class of no table must be refused there.
ELEMENTWISE = {
    **ELEMENTWISE_ELSEWHERE,
    "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
}
# torch has no rules on stock DTensors for some operators of these: they raise unless the flat views are local.
ONLY_LOCAL = {
    "pytorch_optimizer.ADOPT", "pytorch_optimizer.Adan", "pytorch_optimizer.DiffGrad", "pytorch_optimizer.MADGRAD",
    "torch.Rprop",
}  # fmt: skip
# These take the model or matrices, not a list of flat views; or wrap an optimizer, whose class decides.
_OTHERWISE = {
    "pytorch_optimizer.AdaLOMO", "pytorch_optimizer.AdamMini",
    "pytorch_optimizer.LOMO", "pytorch_optimizer.SafeFP16Optimizer", "pytorch_optimizer.SpectralSphere",
    "schedulefree.ScheduleFreeWrapper", "schedulefree.ScheduleFreeWrapperReference", "torch.Muon",
    *(name for name in found() if "create_graph" in REFUSED.get(name.partition(".")[0], {}).get(short(name), "")),
}  # fmt: skip
COUPLING = {
    "timm.lion": {"caution": True},
    "timm.nadamw": {"clipping_threshold": 0.1},
    "pytorch_optimizer.Lion": {"use_gc": True},
    "pytorch_optimizer.AdaBelief": {"adanorm": True},
    "pytorch_optimizer.AdEMAMix": {"cautious": True},
    "pytorch_optimizer.ADOPT": {"stable_adamw": True},
}
RUN = [name for name in found() if name not in NOT_RUN]
ON_FLAT_VIEWS = [name for name in RUN if name not in _OTHERWISE]


def listed(name: str) -> bool:
    return short(name) in ELEMENTWISE.get(name.partition(".")[0], "").split()


def train(name: str, way: str, **options: Any) -> None:
    """Raises what the optimizer raises; else its parameters are those of one process."""
    warnings.simplefilter("ignore")
    model = model_for(name)
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    fully_shard(model)
    params = [*model.parameters()] if way == "sharded" else flat_parameters(model, local=way == "local")
    with torch.compiler.set_stance("force_eager"):
        part = torch.Tensor.clone if name in WHOLE_BATCH else local_part
        three_steps(name, model, params, part, mean_over_ranks, **options)
        three_steps(name, reference, [*reference.parameters()], lambda x: x, torch.Tensor.detach, **options)
    error, fqn = largest_error(model, reference, start)
    assert error < (1e-6 if next(model.parameters()).dtype == torch.float64 else 1e-4), (error, fqn)


def test_the_tables_name_what_there_is():
    names = {name.partition(".")[0] + "." + short(name) for name in found()}
    tables = [f"{package}.{name}" for package, classes in ELEMENTWISE.items() for name in classes.split()]
    tables += [f"{package}.{name}" for package, classes in REFUSED.items() for name in classes]
    assert not {*tables, *NOT_RUN} - names
    assert not ({*ONLY_LOCAL, *COUPLING, *WHOLE_BATCH} | _OTHERWISE) - {*found()}


@pytest.mark.parametrize("name", RUN)
@distributed(world_size=2)
def test_three_steps_on_sharded_parameters(name):
    refused = REFUSED.get(name.partition(".")[0], {}).get(short(name))
    if refused is None:
        train(name, "sharded")
    else:
        with pytest.raises((RuntimeError, NotImplementedError), match=refused):
            train(name, "sharded")


@pytest.mark.parametrize("name", ON_FLAT_VIEWS)
@distributed(world_size=2)
def test_flat_views_take_the_elementwise_ones_alone(name):
    is_cautious = "caution" in getattr(found()[name], "options", {})
    if listed(name) and not is_cautious:
        train(name, "local")
        if name not in ONLY_LOCAL:
            train(name, "flat")
        return
    for way in ("flat", "local"):
        with pytest.raises(TypeError, match=r"cannot train flat_parameters|not known to treat every element alike"):
            train(name, way)


@pytest.mark.parametrize("name", COUPLING)
@distributed(world_size=2)
def test_an_option_that_couples_elements_is_refused_on_flat_views(name):
    assert listed(name)
    with pytest.raises(TypeError, match=f"with its option {next(iter(COUPLING[name]))}"):
        train(name, "local", **COUPLING[name])
