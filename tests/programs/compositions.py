"""Compositions of parallelism: small mixtures of experts in random layouts, trained for two steps as one process does.

A ``Composition`` says how ranks are laid out (pipeline, replicas, shards, experts, tensors), which layers there are,
and what a training loop does. It is written in our spelling and in FSDP2's, which ``drop_in`` runs too.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import fsdp, pipelining
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fsdp_compose import checkpoint as our_checkpoint
from fsdp_compose import (
    clip_grad_norm_,
    drop_in,
    flat_parameters,
    fully_shard,
    no_sync,
    set_requires_all_reduce,
    set_reshard_after_backward,
)
from fsdp_compose.pipelining import PipelineStage
from tests.mixtures import DIM, NUM_EXPERTS, Block, Layout, spread

from .description import _Short
from .modules import mixed

EXACT = 1e-12
SYSTEMS = ("fsdp_compose", "drop_in", "FSDP2")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
KINDS = ("dense", "tensor", "sequence", "experts", "few experts", "LoRA")
ROWS = 12  # of each data rank: a multiple of what microbatches and sequence parallelism divide


@dataclass(frozen=True, repr=False)
class Piece(_Short):
    """A layer.

    ``hidden``: of a dense one, odd sizes are spread unevenly; ``has_group``: else its parameters are the root's.
    """

    kind: str
    hidden: int = 8
    has_group: bool = True
    reshard: bool | int | None = None
    is_frozen: bool = False
    recomputes: bool = False
    is_repeated: bool = False  # runs once more at the end of the model
    capacity: int | None = None


@dataclass(frozen=True, repr=False)
class Composition(_Short):
    layout: Layout
    pieces: tuple[Piece, ...]
    is_tied: bool = False  # the first layer's weight is the last one's
    accumulation: int = 1
    how: str = "each is reduced"  # or "no_sync", "no all-reduce"
    max_norm: float | None = None
    optimizer: str = "sgd"
    goes_on: Layout | None = None  # the second step is in another layout, from a checkpoint
    is_uneven: bool = False  # data ranks have different numbers of rows
    schedule: str = "GPipe"
    granularity: str | None = None
    stays: bool | int | None = None  # set_reshard_after_backward: what is left between backward and forward
    system: str = "fsdp_compose"

    @property
    def has_stages(self) -> bool:
        return any(layout.pp > 1 for layout in (self.layout, self.goes_on) if layout is not None)


class Dense(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.enter, self.norm = nn.Identity(), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)
        self.scale = nn.Parameter(torch.ones(1))  # most ranks have nothing of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.up(self.norm(self.enter(x))).tanh())


class FewExperts(nn.Module):
    """Five, which ranks have unevenly, or not at all; each gets all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 5), nn.Parameter(torch.randn(5, DIM, DIM) / 2)
        self.ep: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + mixed(x, self.router(x).softmax(-1), self.experts, self.ep)


def build(composition: Composition) -> nn.Sequential:
    """The whole model; layers have the names that they have in a stage of a pipeline too."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(DIM, DIM)]
    for piece in composition.pieces:
        if piece.kind == "few experts":
            layers.append(FewExperts())
        elif piece.kind in ("experts", "LoRA"):
            layers.append(Block(piece.capacity, lora=2 if piece.kind == "LoRA" else 0))
        else:
            layers.append(Dense(piece.hidden))
        if piece.is_frozen:
            layers[-1].requires_grad_(False)
    layers += [layers[1 + i] for i, piece in enumerate(composition.pieces) if piece.is_repeated]
    layers.append(nn.Linear(DIM, DIM))
    if composition.is_tied:
        layers[-1].weight = layers[0].weight
    return nn.Sequential(OrderedDict((str(i), layer) for i, layer in enumerate(layers))).double()


def _parallelize(piece: Piece, layer: nn.Module, layout: Layout) -> None:
    if isinstance(layer, Block):
        spread(layer, layout)
    elif isinstance(layer, FewExperts):
        layer.ep = layout.mesh["ep"]
        placed = distribute_tensor(layer.experts.detach(), layer.ep, [Shard(0)])
        layer.experts = nn.Parameter(placed, layer.experts.requires_grad)
    elif piece.kind != "dense" and layout.cuts:
        plan: dict[str, Any] = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        if piece.kind == "sequence":
            plan["up"] = ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
            plan["norm"] = SequenceParallel(sequence_dim=0)
            plan["enter"] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
        parallelize_module(layer, layout.dense["model"], plan)
    if piece.is_frozen:  # SequenceParallel() makes trained parameters
        layer.requires_grad_(False)
    if piece.recomputes:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _info(layout: Layout, is_folded: bool) -> FSDPMeshInfo:
    """FSDP2's description of the ranks that hold the same experts."""
    mesh = layout.mesh_of_folded if is_folded else layout.mesh
    if not layout.has_replicas:
        return FSDPMeshInfo(mesh["fsdp"], shard_mesh_dim=0)
    return HSDPMeshInfo(mesh["replicate", "fsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)


def num_stages(composition: Composition, layout: Layout) -> int:
    return layout.pp * (2 if composition.schedule.startswith("Interleaved") and layout.pp > 1 else 1)


def layers_of_stages(composition: Composition, layout: Layout, num_layers: int) -> list[range]:
    num = num_stages(composition, layout)
    return [range(num_layers * i // num, num_layers * (i + 1) // num) for i in range(num)]


def make_optimizer(composition: Composition, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if composition.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(params, lr=0.01, eps=0.01)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


class Run:
    """The layers of this rank in one layout, sharded, with an optimizer.

    Attributes:
        stages: of the pipeline; without one, the model.
        model: has the layers of all of them.
    """

    def __init__(self, composition: Composition, layout: Layout) -> None:
        self.composition, self.layout, self.is_ours = composition, layout, composition.system == "fsdp_compose"
        self._infos = [_info(layout, is_folded) for is_folded in (False, True)]  # FSDP2 compares them by identity
        whole_model = build(composition)
        ranges = layers_of_stages(composition, layout, len(whole_model))
        here = layout.mesh["pp"].get_local_rank() if layout.pp > 1 else 0
        self.indices = range(here, len(ranges), layout.pp)
        self.stages = [
            nn.Sequential(OrderedDict((str(i), whole_model[i]) for i in ranges[index])) for index in self.indices
        ]
        self.model = self.stages[0]
        if layout.pp > 1:
            self.model = nn.Sequential(OrderedDict(item for stage in self.stages for item in stage.named_children()))
        for stage in self.stages:
            self._shard(stage)
        params = list(self.model.parameters())
        if composition.optimizer == "flat":
            flat = [param for stage in self.stages for param in flat_parameters(stage)]
            params = flat or params  # a stage may have nothing to train, and torch refuses an empty list
        self.optimizer = make_optimizer(composition, params)
        self.schedule = self._schedule() if layout.pp > 1 else None

    def _shard(self, stage: nn.Module) -> None:
        pieces = self.composition.pieces
        for name, layer in stage.named_children():  # a repeated layer comes once
            if 1 <= int(name) <= len(pieces):
                piece = pieces[int(name) - 1]
                _parallelize(piece, layer, self.layout)
                if piece.has_group:
                    self._shard_one(layer, piece.reshard)
        self._shard_one(stage, None)

    def _shard_one(self, module: nn.Module, reshard: bool | int | None) -> None:
        layout, granularity, stays = self.layout, self.composition.granularity, self.composition.stays
        options: dict[str, Any] = {"mesh": layout.data, "reshard_after_forward": reshard}
        if self.is_ours:
            if granularity is not None:
                options["granularity"] = lambda _name, _param: granularity
            fully_shard(module, **options)
            if stays is not None and reshard is not None:
                set_reshard_after_backward(module, stays, recurse=False)
            return
        few = {id(layer.experts) for layer in module.modules() if isinstance(layer, FewExperts)}

        def placement(param: nn.Parameter) -> ShardPlacementResult | None:
            if not (isinstance(param, DTensor) and "ep" in (param.device_mesh.mesh_dim_names or ())):
                return None
            is_folded = layout.folds and id(param) not in few
            if layout.ep * (layout.tp if is_folded else 1) == 1:  # all data ranks have all
                return None
            return ShardPlacementResult(Shard(0), self._infos[is_folded])

        options["shard_placement_fn"] = placement
        (drop_in.fully_shard if self.composition.system == "drop_in" else fsdp.fully_shard)(module, **options)
        if layout.ep > 1 or layout.folds:  # ranks that used an expert are more than hold it
            module.set_gradient_divide_factor(layout.num_parts)

    def _schedule(self) -> Any:
        device, group, num = torch.device("cpu"), self.layout.mesh.get_group("pp"), len(self.indices) * self.layout.pp
        stage_of = pipelining.PipelineStage if self.composition.system == "FSDP2" else PipelineStage
        made = [
            stage_of(stage, i, num, device, group=group) for i, stage in zip(self.indices, self.stages, strict=True)
        ]
        schedule_of = getattr(pipelining, "Schedule" + self.composition.schedule)
        return schedule_of(made if len(made) > 1 else made[0], n_microbatches=self.layout.pp, loss_fn=loss_of)

    def backward(self, x: torch.Tensor, target: torch.Tensor, is_last: bool) -> None:
        if self.schedule is not None:
            self.schedule.step(*[x] if 0 in self.indices else [], **self._targets(target))
            return
        how, waits = self.composition.how, nullcontext()
        if how == "no_sync" and self.is_ours:
            waits = nullcontext() if is_last else no_sync(self.model)
        elif how == "no_sync":
            self.model.set_requires_gradient_sync(is_last)
        elif how == "no all-reduce" and self.is_ours:
            set_requires_all_reduce(self.model, is_last)
        elif how == "no all-reduce":
            self.model.set_requires_all_reduce(is_last)
        with waits:
            loss_of(self.model(x), target).backward()

    def _targets(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"target": target} if len(self.indices) * self.layout.pp - 1 in self.indices else {}

    def clip(self, max_norm: float) -> torch.Tensor:
        """The norm of the gradients of this rank's stages."""
        params = [param for param in self.model.parameters() if param.grad is not None]
        if self.composition.system != "FSDP2":
            return whole(clip_grad_norm_(params, max_norm))
        # torch's clip_grad_norm_ takes parameters of one mesh.
        norm = torch.stack([whole(param.grad).norm() for param in params]).norm()
        for param in params:
            param.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _state(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """The functions of state dicts, the state, and the options."""
        functions: Any = torch_state_dict if self.composition.system == "FSDP2" else our_checkpoint
        # Stages of a pipeline have parameter groups of their own, and not all that were saved.
        has_stages = self.composition.has_stages
        given = {"options": functions.StateDictOptions(flatten_optimizer_state_dict=has_stages, strict=not has_stages)}
        state = functions.get_state_dict(self.model, self.optimizer, **given)
        return functions, dict(zip(("model", "optimizer"), state, strict=True)), given

    def save(self, folder: Path) -> None:
        functions, state, _ = self._state()
        if functions is our_checkpoint:
            our_checkpoint.save(state, folder)
        else:
            dcp.save(state, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        functions, state, given = self._state()
        if functions is our_checkpoint:
            our_checkpoint.load(state, folder)
        else:
            dcp.load(state, checkpoint_id=folder)
        functions.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], **given
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batch(step: int, layout: Layout, is_uneven: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of all data ranks."""
    generator = torch.Generator().manual_seed(step)
    num_rows = [ROWS * (1 + i % 3) if is_uneven else ROWS for i in range(layout.num_parts)]
    drawn = torch.randn(sum(num_rows), 2 * DIM, generator=generator, dtype=torch.float64).split(num_rows)
    return [(x[:, :DIM], x[:, DIM:]) for x in drawn]


def differences(composition: Composition, folder: Path) -> Iterator[str]:
    """Where two steps differ from those of one process. Every rank names the same parameters, or none."""
    truth = build(composition)
    twins = dict(truth.named_parameters())
    theirs = make_optimizer(composition, list(truth.parameters()))
    layout = composition.layout
    run = Run(composition, layout)
    for step in range(2):
        for i in range(composition.accumulation):
            parts = batch(10 * step + i, layout, composition.is_uneven)
            run.backward(*parts[layout.place], is_last=i + 1 == composition.accumulation)
            for x, target in parts:
                (loss_of(truth(x), target) / layout.num_parts).backward()
        yield from _compared(run.model, twins, lambda param: param.grad, f"step {step}: gradient of")
        if composition.max_norm is not None:
            ranges = layers_of_stages(composition, layout, len(truth))
            for rank in range(layout.pp):
                layers = [truth[i] for part in ranges[rank :: layout.pp] for i in part]
                norm = torch.nn.utils.clip_grad_norm_(nn.ModuleList(layers).parameters(), composition.max_norm)
                if rank == run.indices[0]:
                    yield from _difference(run.clip(composition.max_norm), norm, f"step {step}: norm")
        run.optimizer.step()
        run.optimizer.zero_grad()
        theirs.step()
        theirs.zero_grad()
        if step == 0 and composition.goes_on is not None:
            run.save(folder)
            layout = composition.goes_on
            run = Run(composition, layout)
            run.load(folder)
    yield from _compared(run.model, twins, lambda param: param, "after both steps:")


def _compared(model: nn.Module, twins: dict[str, nn.Parameter], of: Any, what: str) -> Iterator[str]:
    for name, param in model.named_parameters():
        ours, theirs = of(param), of(twins[name])
        if (ours is None) != (theirs is None):
            yield f"{what} {name} is {'missing' if ours is None else 'there'}"
        elif ours is not None:
            yield from _difference(whole(ours), theirs.detach(), f"{what} {name}")


def _difference(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> Iterator[str]:
    size = (ours - theirs).abs().max() / (1 + theirs.abs().max())
    if not size <= EXACT:
        yield f"{what} differs by {size:.1e}"


def run_compositions(compositions: list[Composition], folder: Path, results: Path) -> None:
    """Run them, one after the other; what is found is written after each. Called on every rank.

    Raises:
        RuntimeError: the ranks failed in different ways, so that messages may be under way.
    """
    found: list[list[str]] = []
    for i, composition in enumerate(compositions):
        own, error = folder / f"{i}", ""
        said: list[str] = []
        try:
            said = list(differences(composition, own))
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:400]}"
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (error, said))
        errors = sorted({error for error, _ in outcomes})
        if dist.get_rank() == 0:
            found.append(errors if errors != [""] else sorted({text for _, texts in outcomes for text in texts[:3]}))
            torch.save(found, results)
            shutil.rmtree(own, ignore_errors=True)
        if "" in errors and len(errors) > 1:
            raise RuntimeError(f"{composition}: {errors}")


# ---- Random ones


def layouts_of(world_size: int) -> list[Layout]:
    """All factorizations, with what has two ways in both."""
    found = []
    for sizes in itertools.product(*[[i for i in range(1, world_size + 1) if world_size % i == 0]] * 5):
        if math.prod(sizes) == world_size:
            replicate, fsdp, ep, tp, pp = sizes
            found.append(Layout(replicate, fsdp, ep, tp, pp=pp))
            if tp > 1:
                found.append(Layout(replicate, fsdp, ep, tp, folds=True, pp=pp))
    return [*found, *(layout._replace(ones=True) for layout in found)]


def random_composition(random: Random, world_size: int, system: str = "fsdp_compose") -> Composition:
    choose, layouts = random.choice, layouts_of(world_size)
    pieces = tuple(
        Piece(
            choose(KINDS),
            hidden=choose([8, 8, 5, 3]),
            has_group=choose([True, True, False]),
            reshard=choose([None, None, True, False, 2]),
            is_frozen=random.random() < 0.15,
            recomputes=random.random() < 0.2,
            is_repeated=random.random() < 0.1,
            capacity=choose([None, None, 3]),
        )
        for _ in range(random.randint(1, 3))
    )
    return made_possible(
        Composition(
            layout=choose(layouts),
            pieces=pieces,
            is_tied=random.random() < 0.2,
            accumulation=choose([1, 1, 2, 3]),
            how=choose(["each is reduced", "no_sync", "no all-reduce"]),
            max_norm=choose([None, 0.1, 100.0]),
            optimizer=choose(["sgd", "adam", "flat"]) if system == "fsdp_compose" else choose(["sgd", "adam"]),
            goes_on=choose(layouts) if random.random() < 0.2 else None,
            is_uneven=random.random() < 0.2,
            schedule=choose(SCHEDULES),
            granularity=choose([None, None, "elements", "rows", "whole"]),
            stays=choose([None, None, None, 2, False]),
            system=system,
        )
    )


def made_possible(composition: Composition) -> Composition:
    """Without what does not go together."""
    layouts = [composition.layout, *([composition.goes_on] if composition.goes_on else [])]
    pieces = composition.pieces
    changes: dict[str, Any] = {}
    if composition.has_stages:
        # Layers of one stage only; microbatches are equal in size, and each has its own capacity.
        pieces = tuple(replace(piece, is_repeated=False, capacity=None) for piece in pieces)
        most = max(num_stages(composition, layout) for layout in layouts)
        pieces += (Piece("dense"),) * (most - 2 - len(pieces))
        # Each step of torch's schedules divides what earlier ones have accumulated again.
        changes = {"is_tied": False, "is_uneven": False, "accumulation": 1}
    for layout in layouts:
        if NUM_EXPERTS % (layout.ep * (layout.tp if layout.folds else 1)):
            fewer = "few experts"
            pieces = tuple(replace(item, kind=fewer) if item.kind in ("experts", "LoRA") else item for item in pieces)
        if layout.folds:  # each rank has capacity for its share of a batch
            pieces = tuple(replace(piece, capacity=None) for piece in pieces)
        if layout.fsdp % 2:  # there are no two to divide by
            pieces = tuple(replace(piece, reshard=None if piece.reshard == 2 else piece.reshard) for piece in pieces)
    kinds = {piece.kind for piece in pieces}
    if "few experts" in kinds:  # which gather tokens, equally many of each rank
        changes["is_uneven"] = False
    if kinds & {"few experts", "tensor", "sequence"} or any(layout.tp == 3 for layout in layouts):
        # What ranks hold may be uneven, so that they would have different rows.
        changes["granularity"] = None if composition.granularity == "rows" else composition.granularity
    # Of two ranks, two are all: a group that was made with 2 was made with True.
    keeps_parts = all(piece.reshard == 2 for piece in pieces) and not any(layout.fsdp == 2 for layout in layouts)
    if changes.get("stays", composition.stays) == 2 and not keeps_parts:
        changes["stays"] = False
    return replace(composition, pieces=pieces, **changes)


def simpler(composition: Composition) -> Iterator[Composition]:
    """Yield compositions that have one feature, option or layer less."""
    for item in fields(composition):
        if item.name not in ("layout", "pieces", "system"):
            yield replace(composition, **{item.name: item.default})
    for i, piece in enumerate(composition.pieces):
        others = composition.pieces[:i], composition.pieces[i + 1 :]
        yield replace(composition, pieces=(*others[0], *others[1]))
        for item in fields(piece):
            if item.name != "kind":
                yield replace(composition, pieces=(*others[0], replace(piece, **{item.name: item.default}), *others[1]))
    yield replace(composition, layout=composition.layout._replace(ones=False))
    yield replace(composition, layout=composition.layout._replace(folds=False))
