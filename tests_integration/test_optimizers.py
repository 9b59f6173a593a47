"""Every optimizer of torch, timm, pytorch-optimizer, schedulefree and optimi: three steps of a sharded model end where
one process does, or the step raises. The tests find by themselves what new versions of the packages add."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from fsdp_compose import flat_parameters, fully_shard
from fsdp_compose.optim.flat_parameters import ELEMENTWISE_ELSEWHERE
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
_COMMUNICATES = "c10d"  # it calls collectives on gradients itself, as for DDP
_MIXES = "mixed a? ?torch.Tensor"  # it keeps plain tensors, such as sums of rows, beside whole results of sharded ones
_WRITES = "cannot write a sharded tensor"  # it writes a product of gradients into a plain tensor
_PLAIN_SCALAR = "^$"  # it writes a norm to a plain scalar: stock DTensor's AssertionError, without a text
_NO_RULE = "does not have a sharding strategy"  # stock DTensor's, on the norms of parameters
REFUSED = {
    "timm": {"Adahessian": _SECOND_ORDER, "Kron": _MIXES, "NvNovoGrad": _PLAIN_SCALAR},
    "pytorch_optimizer": {
        "A2Grad": _MIXES,
        "ASGD": _PLAIN_SCALAR,
        "AdaFactor": _NO_RULE,
        "AdaHessian": _SECOND_ORDER,
        "AdaLOMO": _MIXES,
        "AdaNorm": _MIXES,
        "AdamMini": _PLAIN_SCALAR,
        "Alice": _PLAIN_SCALAR,
        "CAME": _MIXES,
        "DAdaptAdaGrad": _PLAIN_SCALAR,
        "DAdaptAdam": _PLAIN_SCALAR,
        "DAdaptAdan": _PLAIN_SCALAR,
        "DAdaptLion": _PLAIN_SCALAR,
        "DAdaptSGD": _PLAIN_SCALAR,
        "DASH": _WRITES,
        "EmoFact": _MIXES,
        "GSAM": _COMMUNICATES,
        "Kron": _MIXES,
        "Magma": _PLAIN_SCALAR,
        "Prodigy": _PLAIN_SCALAR,
        "RACS": _PLAIN_SCALAR,
        "SM3": _WRITES,
        "SOAP": _MIXES,
        "SPlus": _MIXES,
        "SWATS": _PLAIN_SCALAR,
        "Shampoo": _WRITES,
        "SophiaH": _SECOND_ORDER,
        "StableSPAM": _PLAIN_SCALAR,
        "TRAC": _MIXES,
        "WSAM": _COMMUNICATES,
    },
}

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
        three_steps(name, model, params, local_part, mean_over_ranks, **options)
        three_steps(name, reference, [*reference.parameters()], lambda x: x, torch.Tensor.detach, **options)
    error, fqn = largest_error(model, reference, start)
    assert error < (1e-6 if next(model.parameters()).dtype == torch.float64 else 1e-4), (error, fqn)


def test_the_tables_name_what_there_is():
    names = {name.partition(".")[0] + "." + short(name) for name in found()}
    tables = [f"{package}.{name}" for package, classes in ELEMENTWISE.items() for name in classes.split()]
    tables += [f"{package}.{name}" for package, classes in REFUSED.items() for name in classes]
    assert not {*tables, *NOT_RUN} - names
    assert not ({*ONLY_LOCAL, *COUPLING} | _OTHERWISE) - {*found()}


@pytest.mark.parametrize("name", RUN)
@distributed(world_size=2)
def test_three_steps_on_sharded_parameters(name):
    refused = REFUSED.get(name.partition(".")[0], {}).get(short(name))
    if refused is None:
        train(name, "sharded")
    else:
        with pytest.raises((RuntimeError, NotImplementedError, AssertionError), match=refused):
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
