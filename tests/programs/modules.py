"""The modules of a program, built and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecisionPolicy, fully_shard, replicate, set_reshard_after_backward
from fsdp_compose.core.group.registry import get_state
from tests.models import PassThrough

from .description import EDITORS, INNER_BACKWARDS, LEAVES, Group, Part, Program

DIM, ROWS = 3, 2  # ROWS on each rank
NUM_EXPERTS = 5  # fewer on some ranks, or none
BUCKET_BYTES = 60  # of replicated groups: a few parameters


class TripError(Exception):
    """Raised in the middle of an iteration, on purpose."""


class ImpossibleError(Exception):
    """The unsharded model cannot do it either."""


class Trip:
    """Instructions to the modules of a model. Counts how often forward, or backward, reaches a module of the model;
    raises the time it is told to.

    Attributes:
        rank: whose forward this is.
        does_edits: whether modules that edit parameters do so: of the unsharded model, in one of the ranks' forwards.
        share: of the loss of one rank in that of the model.
        number: of the forward.
        num_local_losses: that forwards have run a backward of.
    """

    def __init__(self) -> None:
        self.where, self.left, self.rank = "", -1, 0
        self.does_edits, self.share, self.number = True, 1.0, 0
        self.num_local_losses = 0

    def reached(self, where: str) -> None:
        if self.where == where and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                raise TripError(where)


class _Box:
    """In which torch finds no tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Gathered(torch.autograd.Function):
    """The rows of all ranks of a group; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Summed.apply(grad, ctx.group).chunk(ctx.group.size())[ctx.group.rank()], None


class Summed(torch.autograd.Function):
    """The sum over all ranks of a group; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, tensor = group, tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Summed.apply(grad, ctx.group), None


def mixed(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, ep: DeviceMesh | None) -> torch.Tensor:
    """Each expert gets each token; with those of this rank, those of all ranks over which experts are spread."""
    if ep is None:
        return torch.einsum("te,teo->to", weights, torch.einsum("td,edo->teo", x, experts).tanh())
    group, rank, num = ep.get_group(), ep.get_local_rank(), ep.size()
    own = experts.to_local()
    first = min(rank * -(-len(experts) // num), len(experts))
    x, weights = Gathered.apply(x, group), Gathered.apply(weights, group)[:, first : first + len(own)]
    y = torch.einsum("te,teo->to", weights, torch.einsum("td,edo->teo", x, own).tanh())
    return Summed.apply(y, group).chunk(num)[rank]


class Module(nn.Module):
    def __init__(self, part: Part, children: list[Module], trip: Trip) -> None:
        super().__init__()
        self.part, self.trip = part, trip
        self.inner = nn.ModuleList(children)
        self.auxiliary: torch.Tensor | None = None
        kind = part.kind
        self.register_buffer("shift", torch.linspace(0.0, 0.1, DIM))
        if kind in ("linear", "spare"):
            self.linear = nn.Linear(DIM, DIM, bias=kind == "linear")
        if kind == "spare":
            self.unused = nn.Parameter(torch.randn(2, DIM))
        elif kind == "scale":
            self.scale = nn.Parameter(torch.randn(DIM))
        elif kind == "scalar":
            self.scalar = nn.Parameter(torch.randn(()))
        elif kind == "cube":
            self.cube = nn.Parameter(torch.randn(2, DIM, DIM) * 0.5)
        elif kind == "experts":
            self.router = nn.Linear(DIM, NUM_EXPERTS)
            self.experts = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, DIM) * 0.5)
        elif kind in ("auxiliary", "late auxiliary"):
            self.gate = nn.Linear(DIM, 1)
        self.ep: DeviceMesh | None = None
        if not part.narrow:
            self.double()
        if part.frozen:
            self.requires_grad_(False)

    def run(self, child: Module, x: torch.Tensor) -> torch.Tensor:
        if child.part.recompute is not None:
            return checkpoint(child, x, use_reentrant=child.part.recompute)
        if child.part.kind == "container":
            return child({"x": x, "note": 1})["y"][0]
        result = child(x)
        return result.value if isinstance(result, _Box) else result

    def forward(self, x: Any) -> Any:
        self.trip.reached("forward")
        kind, is_mapping = self.part.kind, isinstance(x, dict)
        x = PassThrough.apply(x["x"] if is_mapping else x, self.trip)
        result = self.leaf(x) if kind in LEAVES else self.compound(x)
        return {"y": (result, None)} if is_mapping else _Box(result) if kind == "opaque" else result

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.part.kind
        y = x.to(self.shift.dtype)
        if kind in ("linear", "spare"):
            y = torch.tanh(self.linear(y))
        elif kind == "scale":
            y = y * self.scale + self.shift
        elif kind == "scalar":
            y = torch.tanh(y * self.scalar)
        elif kind == "cube":
            y = torch.tanh(y @ self.cube[0]) @ self.cube[1]
        elif kind == "experts":
            y = self.mixture(y)
        elif kind == "detach":
            y = y.detach() * 0.5
        else:
            y = torch.tanh(y) + self.shift
        return y.to(x.dtype)

    def mixture(self, x: torch.Tensor) -> torch.Tensor:
        return mixed(x, self.router(x).softmax(-1), self.experts, self.ep)

    def compound(self, x: torch.Tensor) -> torch.Tensor:
        kind, inner = self.part.kind, list(self.inner)
        if kind == "switch":
            return self.run(inner[self.trip.rank % len(inner)], x)
        if kind == "sum":
            return sum((self.run(child, x) for child in inner), x) / (len(inner) + 1)
        if kind in INNER_BACKWARDS:
            return self.forces(x) if kind == "forces" else self.local_losses(x)
        if kind in EDITORS:
            return self.edit(x)
        y = x
        for _ in range(2 if kind == "twice" else 1):
            for child in inner:
                with torch.no_grad() if kind == "without grad" else nullcontext():
                    y = self.run(child, y)
        if kind == "auxiliary" or (kind == "late auxiliary" and self.trip.number > 3):
            self.auxiliary = self.gate(y.to(self.gate.weight.dtype)).square().mean()
        return (x + y) / 2 if kind in ("residual", "without grad") else y

    def forces(self, x: torch.Tensor) -> torch.Tensor:
        """Moves the input against the gradient of an energy before the children see it."""
        if not torch.is_inference_mode_enabled():
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                energy = self.through(self.inner, z).square().sum()
                force = torch.autograd.grad(energy, z, allow_unused=True)[0] if energy.requires_grad else None
            x = x if force is None else x - 0.1 * force
        return self.through(self.inner, x)

    def local_losses(self, x: torch.Tensor) -> torch.Tensor:
        """Each child learns by a loss of its own."""
        y = x.detach()
        for child in self.inner:
            y = self.run(child, y)
            if y.requires_grad:
                (y.square().mean() * self.trip.share).backward()
                self.trip.num_local_losses += 1
            y = y.detach()
        return (x + y) / 2

    def edit(self, x: torch.Tensor) -> torch.Tensor:
        """Does something to a parameter of the last child just before running it."""
        *others, last = self.inner
        y = self.through(others, x)
        kind, param = self.part.kind, next(last.parameters(), None)
        if param is not None and self.trip.does_edits and torch.is_grad_enabled():
            with torch.no_grad():
                if kind == "edits":
                    param.mul_(0.9)
                elif kind == "edits data":
                    param.data.mul_(0.9)
                else:
                    param.requires_grad_(self.trip.number % 2 == 1)
        return self.run(last, y)

    def through(self, children: Any, x: torch.Tensor) -> torch.Tensor:
        for child in children:
            x = self.run(child, x)
        return x


def build(program: Program) -> tuple[nn.ModuleList, list[Module]]:
    """The model, or models, and the parts in the order in which they were built."""
    built: list[Module] = []
    trip = Trip()
    torch.manual_seed(0)

    def make(part: Part) -> Module:
        if part.kind == "again":
            return built[part.refers_to % len(built)] if built else make(Part("nothing"))
        module = Module(part, [make(child) for child in part.children], trip)
        built.append(module)
        return module

    models = [make(program.root)]
    if program.second_root is not None and len(built) > 1:
        shared = Part("again", refers_to=program.second_root % (len(built) - 1))
        models.append(make(Part("chain", children=(shared, Part("linear")), group=Group())))
    linear = [module for module in built if hasattr(module, "linear")]
    for first, second in program.ties:
        if linear:
            one, other = linear[first % len(linear)], linear[second % len(linear)]
            if (one.part.frozen, one.part.narrow) == (other.part.frozen, other.part.narrow):
                other.linear.weight = one.linear.weight
    return nn.ModuleList(models), built


class Meshes:
    """The meshes of the ways in which groups lie on the ranks, over process groups that are made when they are needed,
    by all ranks in the same order.

    Attributes:
        groups: these.
    """

    def __init__(self, make_group: Callable[[Sequence[int]], dist.ProcessGroup]) -> None:
        self._make_group = make_group
        self._found: dict[tuple[int, tuple[str, str]], DeviceMesh] = {}
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def whole(self) -> DeviceMesh:
        """All ranks share the shards."""
        return DeviceMesh.from_group(self._group(range(dist.get_world_size())), "cpu", mesh_dim_names=("dp",))

    def of(self, way: str) -> DeviceMesh:
        world_size = dist.get_world_size()
        if way not in ("hybrid", "one row", "one column"):
            return self.whole
        num_shards = {"one row": world_size, "one column": 1}.get(way, 2 if world_size % 2 == 0 else 1)
        return self._rows_of(num_shards, ("replicate", "shard"))

    def of_experts(self, num_ranks: int) -> DeviceMesh:
        """Return this rank's mesh of ranks that share the experts among themselves."""
        num_ranks = num_ranks if dist.get_world_size() % num_ranks == 0 else dist.get_world_size()
        return self._rows_of(num_ranks, ("edp", "ep"))["ep"]

    def _rows_of(self, size: int, names: tuple[str, str]) -> DeviceMesh:
        if (size, names) not in self._found:
            ranks, groups = torch.arange(dist.get_world_size()).view(-1, size), []
            for sets in (ranks.T.tolist(), ranks.tolist()):
                made = [self._group(item) for item in sets]
                groups.append(made[[dist.get_rank() in item for item in sets].index(True)])
            self._found[size, names] = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)
        return self._found[size, names]

    def _group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in self.groups:
            self.groups[key] = self._make_group(key)
        return self.groups[key]


def spread_experts(program: Program, built: list[Module], meshes: Meshes) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in built:
        if module.part.kind == "experts":
            module.ep = meshes.of_experts(program.ep)
            if module.experts not in made:
                placed = distribute_tensor(module.experts.detach(), module.ep, [Shard(0)], src_data_rank=None)
                made[module.experts] = nn.Parameter(placed, module.experts.requires_grad)
            module.experts = made[module.experts]


def shard(program: Program, model: nn.Module, built: list[Module], meshes: Meshes) -> None:
    """Inner modules first. A module that is used in several places has a group of its own: its parameters can be in
    one group only."""
    places: dict[Module, int] = {}
    has_experts = any(module.part.kind == "experts" for module in built)
    for module in built:
        for child in module.inner:
            places[child] = places.get(child, 0) + 1
    for module in built:
        several = list(module.inner)[:2]
        if module.part.together and len(set(several)) == 2:
            if all(places[item] == 1 and get_state(item) is None for item in several):
                fully_shard(several, mesh=meshes.whole)
        group = module.part.group
        if module is model:
            group = (group or Group()) if program.shards_root else None
        elif group is None and (places[module] > 1 or (not program.shards_root and module in model.inner)):
            group = Group()
        if group is not None:
            # replicate() refuses DTensors: what it would do, fully_shard() does over (all, 1).
            is_refused = has_experts and group.way == "replicated"
            _make_group(module, replace(group, way="one column") if is_refused else group, meshes)


def _make_group(module: Module, group: Group, meshes: Meshes) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64) if group.wide_reduction else None
    if group.way == "replicated":
        replicate(module, mesh=meshes.whole, mp_policy=policy, bucket_bytes=BUCKET_BYTES)
        return
    mesh, reshard = meshes.of(group.way), group.reshard
    if group.way in ("parts", "until a step") and mesh.size() % 2 == 0:
        reshard = 2
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard,
        mp_policy=policy,
        granularity=(lambda fqn, param, asked=group.granularity: asked) if group.granularity else None,
    )
    if group.way == "until a step":
        stays = 2 if mesh.size() > 2 and mesh.size() % 2 == 0 else False
        set_reshard_after_backward(module, stays, recurse=False)


def loss_of(model: Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of one of the models that ``build`` has made."""
    for module in model.modules():
        if isinstance(module, Module):
            module.auxiliary = None
    if model.part.kind == "container":
        y = model({"x": x, "note": 1})["y"][0]
    else:
        y = model(x)
        y = y.value if isinstance(y, _Box) else y
    loss = y.square().mean()
    for module in model.modules():
        if isinstance(module, Module) and module.auxiliary is not None:
            loss = loss + module.auxiliary.to(loss.dtype)
    return loss
