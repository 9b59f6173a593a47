"""``plan()``: estimate a training step's memory and communication on one CPU process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from .._arguments import checked
from ..errors import MisuseError, MisuseTypeError
from ..extension import MixedPrecisionPolicy, bytes_of_limit, fully_shard, no_sync, states_for, states_to_run
from .plan_report import Plan, advise, mesh_shape_of
from .simulated_step import LossOf, MakeOptimizer, OptimizerOf, simulate

ADAMW: MakeOptimizer = partial(torch.optim.AdamW, foreach=True)


@checked()
def plan(
    factory: Callable[[], Any],
    world_sizes: int | Sequence[int] = 8,
    *,
    mesh: str | None = None,
    wrap: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    strategy: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    optimizer: MakeOptimizer | None = ADAMW,
    optimizer_of: OptimizerOf | None = None,
    limits: Sequence[int | str] = (),
    accumulates: bool = False,
    note: Callable[[str], None] | None = None,
) -> Plan:
    """Estimate what a training step needs on one rank of many: memory by kind, collectives and padding, with advice.

    For each number of ranks, this runs two training steps of the model on the CPU as the first rank would run them, but
    skips the kernels: results have shapes and untouched memory, which the machine does not need to have. Collectives
    move no data. So it needs no GPU, no other process and little memory. docs/planning.md explains what the figures
    mean and what they leave out.

    Ranks: call it in a process without a process group.

    Args:
        factory: returns the model, or a pair of the model and a function that takes the model, makes a batch and
            returns its loss. The model may be on the CPU or on the meta device. ``factory`` may shard the model itself
            (it runs with a process group of all ranks); otherwise the model is sharded as ``mesh``, ``wrap``,
            ``mp_policy``, ``reshard_after_forward`` and ``strategy`` say.
        world_sizes: numbers of ranks.
        mesh: ``"2x4"`` for 2 replicas of 4 shards each; one of the numbers may be ``*``. Default: shard over all ranks.
        wrap: class names of the modules that become groups, besides the model itself; default: the children of the
            outermost ``nn.ModuleList`` s, and blocks of one class in an ``nn.Sequential``.
        mp_policy, reshard_after_forward, strategy: as for ``fully_shard``.
        batch, seq: number of sequences in a rank's batch and of tokens in each. Needed if ``factory`` returns no loss
            function: the model is then called with token ids, which also serve as labels.
        optimizer: makes the optimizer from a list of parameters; ``None``: no optimizer. Default: AdamW with
            ``foreach=True``, its default on accelerators, which updates all parameters at once and needs more memory
            than the CPU's loop.
        optimizer_of: makes the optimizer from the model, where a list of parameters does not say enough:
            ``lambda model: Muon(muon_groups(model))``. Replaces ``optimizer``.
        limits: values of ``limit_unsharded_bytes`` to compare, for example ``["1 group", "2 groups"]``: the step is run
            once more with each, for its peak and for how many collectives nothing overlaps then.
        accumulates: a step has several micro-batches, and all but the last run under ``no_sync``: unsharded
            gradients are kept in between. The figures are those of two.
        note: called with a line of text about the progress.

    Returns:
        The figures.

    Raises:
        ValueError: arguments contradict each other or the model; ``mesh`` does not fit the number of ranks.
        TypeError: ``factory`` returns something else.
        RuntimeError: there is a process group; or the model has data-dependent control flow.

    Example::

        facts = plan(lambda: (GPT(config), lambda model: model(tokens).mean()), [8, 64])
        print(facts.worlds[0].peak.nbytes)
    """
    sizes = [world_sizes] if isinstance(world_sizes, int) else [*world_sizes]
    if not sizes or min(sizes) < 1:
        raise MisuseError(f"plan(world_sizes={world_sizes!r}): expected one or more numbers of ranks, each at least 1")
    if (batch is None) != (seq is None) or min(batch or 1, seq or 1) < 1:
        raise MisuseError(f"plan(batch={batch}, seq={seq}): expected both, at least 1 each, or neither")
    shapes = [mesh_shape_of(mesh, size) for size in sizes]  # refused before anything is built
    options = {"mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward, "strategy": strategy}
    given = {name: value for name, value in options.items() if value is not None}
    make = optimizer_of
    if make is None and optimizer is not None:
        make = partial(of_parameters, optimizer)
    for limit in limits:
        bytes_of_limit(limit)
    worlds = []
    for size, shape in zip(sizes, shapes, strict=True):
        build = partial(_build, factory, shape if mesh is not None else None, wrap, given, batch, seq)
        step = partial(simulate, make_optimizer=make, world_size=size, note=note or (lambda _: None))
        if accumulates:
            step = partial(step, without_sync=no_sync)
        limited = [step(partial(_with_limit, build, limit)).with_limit(limit) for limit in limits]
        worlds.append(replace(advise(step(build)), limited=(*limited,)))
    return Plan(_name_of(optimizer_of or optimizer), "" if batch is None else f"{batch} x {seq} tokens", (*worlds,))


def of_parameters(make_optimizer: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of the parameters that are trained."""
    return make_optimizer([param for param in model.parameters() if param.requires_grad])


def _name_of(optimizer: MakeOptimizer | OptimizerOf | None) -> str:
    if optimizer is None:
        return "no optimizer"
    made_by = optimizer.func if isinstance(optimizer, partial) else optimizer
    name = getattr(made_by, "__name__", "")
    return name if name.isidentifier() else "an optimizer"


def _build(
    factory: Callable[[], Any],
    mesh_shape: tuple[int, ...] | None,
    wrap: Sequence[str] | None,
    options: dict[str, Any],
    batch: int | None,
    seq: int | None,
) -> tuple[nn.Module, LossOf]:
    """Make the model, sharded, and the function that returns its loss. ``options`` holds those that were given."""
    model, loss_of = model_of(factory, batch, seq)
    if states_to_run(model):
        given = [*options, *(["mesh"] if mesh_shape is not None else []), *(["wrap"] if wrap is not None else [])]
        if given:
            raise MisuseError(
                f"{', '.join(given)}: the factory returns an already sharded model; leave these options out"
            )
        return model, loss_of
    mesh = None
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    modules = modules_to_wrap(model, wrap)
    for module in (*modules, *([] if model in modules else [model])):
        fully_shard(module, mesh=mesh, **options)
    return model, loss_of


def model_of(factory: Callable[[], Any], batch: int | None, seq: int | None) -> tuple[nn.Module, LossOf]:
    """Make the model and the function that returns its loss; see ``plan``. Raises TypeError if ``factory`` returns
    something else, ValueError if ``batch`` and ``seq`` are missing, or are too much."""
    made = factory()
    model, loss_of = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (loss_of is None or callable(loss_of)):
        raise MisuseTypeError(
            "the factory must return a model, or (model, loss_of), where loss_of(model) returns the loss of a "
            f"batch; got {_what(made)}"
        )
    if loss_of is not None and batch is not None:
        raise MisuseError(
            "--batch and --seq: the factory returns a loss function, which makes its own batch; leave them out"
        )
    if loss_of is None:
        if batch is None or seq is None:
            raise MisuseError(
                "the factory returns no loss function: give --batch and --seq to run it on token ids, or let it return "
                "(model, loss_of)"
            )
        loss_of = partial(_token_loss, torch.zeros(batch, seq, dtype=torch.int64))
    return model, loss_of


def _with_limit(build: Callable[[], tuple[nn.Module, LossOf]], limit: int | str) -> tuple[nn.Module, LossOf]:
    model, loss_of = build()
    states_for(model, "plan", recurse=False)[0].set_options(limit_unsharded_bytes=limit)
    return model, loss_of


def modules_to_wrap(model: nn.Module, wrap: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules that become groups, inner ones first; see ``plan``. Raises ValueError if ``model`` contains no
    module of one of these classes."""
    if wrap is None:
        return [child for blocks in _outermost_lists(model) for child in blocks if _has_parameters(child)]
    classes = {type(module).__name__ for module in model.modules()}
    missing = [name for name in wrap if name not in classes]
    if missing:
        own = sorted({type(module).__name__ for module in model.modules() if any(True for _ in module.children())})
        raise MisuseError(f"wrap: no module is a {missing[0]}; classes with submodules are {', '.join(own)}")
    found = [module for module in model.modules() if type(module).__name__ in wrap]
    return [module for module in reversed(found) if _has_parameters(module)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _outermost_lists(module: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """The items of each outermost ``ModuleList``. Of a ``Sequential``, which may hold other modules too, those of one
    class, if there are several and they are no single layers."""
    if isinstance(module, nn.Sequential):
        blocks = [child for child in module if next(child.children(), None) is not None]
        of_each: dict[type, list[nn.Module]] = {}
        for block in blocks:
            of_each.setdefault(type(block), []).append(block)
        most = max(of_each.values(), key=len, default=[])
        if len(most) > 1:
            yield most
            return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield [*child]
        else:
            yield from _outermost_lists(child)


def _token_loss(ids: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Compute the loss of a batch of token ids, which also serve as labels: the model's own, if its result has one;
    else the cross entropy of its logits; else, for a model that does not return logits for each token, the mean of its
    output."""
    names = inspect.signature(model.forward).parameters
    if "labels" in names and "input_ids" in names:
        output = model(input_ids=ids, labels=ids)
    else:
        output = model(ids)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    if not isinstance(output, torch.Tensor):
        raise MisuseTypeError(
            f"called with token ids, {type(model).__name__} returns {_what(output)}: expected logits, or an object "
            "with a loss; let the factory return (model, loss_of) for other models"
        )
    if output.ndim == 3 and output.shape[:2] == ids.shape:
        return F.cross_entropy(output.flatten(0, 1), ids.flatten())
    return output.float().mean()


def _what(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value)}"
    return f"a {type(value).__name__}" if value is not None else "None"
