"""Runs a program on a sharded and on an unsharded model, and compares after every action."""

from __future__ import annotations

import copy
import shutil
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from fsdp_compose import (
    RaggedDTensor,
    clip_grad_norm_,
    flat_parameters,
    functional_mode,
    no_sync,
    set_functional_mode,
    set_reshard_after_forward,
    summon_full_params,
    unshard,
)
from fsdp_compose._torch import default_store
from fsdp_compose.checkpoint import (
    SaveFuture,
    StateDictOptions,
    async_save,
    get_state_dict,
    load,
    set_state_dict,
)
from fsdp_compose.core.flat.accumulation import UnreducedGradient
from fsdp_compose.core.flat.flat_param import handle_of
from fsdp_compose.core.flat.sharded_param import specs_of
from fsdp_compose.core.group.registry import _get_fsdp_handles, _get_fsdp_states, get_state
from tests.forked_writers import fork_writers
from tests.harness import _forget_meshes, lasting_groups
from tests.observed_hooks import ObservedHooks

from .description import Action, Program, parts_of
from .edits import EDITS
from .modules import DIM, ROWS, ImpossibleError, Meshes, Module, TripError, build, loss_of, shard, spread_experts


class Losses(NamedTuple):
    """One forward: the loss of this rank, and those of all ranks of the unsharded model; the parameters on which it
    has a term of its own; and whether its backward comes to any group, or to such parameters alone."""

    ours: torch.Tensor
    theirs: list[torch.Tensor]
    with_terms: set[int]
    reaches_groups: bool

    def plus(self, other: Losses) -> Losses:
        theirs = [a + b for a, b in zip(self.theirs, other.theirs, strict=True)]
        reaches_groups = self.reaches_groups or other.reaches_groups
        return Losses(self.ours + other.ours, theirs, self.with_terms | other.with_terms, reaches_groups)


class Runner:
    """Does each action to both models and notes where they differ."""

    def __init__(self, program: Program, meshes: Meshes, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        models, built = build(program)
        self.hold(models)
        self.reference: Any = copy.deepcopy(self.model)
        self.reference_roots = [self.reference] if len(models) == 1 else list(self.reference)
        self.twins = list(self.reference.parameters())
        self.reference_roots[0].trip.share = 1 / self.world_size
        num_early = len(program.hooks) // 2
        may_repeat = any(part.recompute for part in parts_of(program.root))
        self.hooks = ObservedHooks(program.hooks, may_repeat, has_inner_roots=not program.shards_root)
        spread_experts(program, built, meshes)
        self.hooks.register(list(self.model.parameters()), self.twins, slice(0, num_early))
        self.shard(built, meshes)
        self.hooks.register(self.params, self.twins, slice(num_early, None))
        self.optimizers = [self.make_optimizer(model) for model in (self.model, self.reference)]
        self.differences: list[str] = []
        self.generator = torch.Generator().manual_seed(1)
        self.is_exact = all(param.dtype == torch.float64 for param in self.params)
        self.has_unreduced = False
        self.lagging: set[nn.Parameter] = set()  # whose gradients have been dropped by flat views only, as yet
        self.num_forwards = 0
        self.saving: tuple[SaveFuture, Any] | None = None  # and the state at the call

    def hold(self, models: nn.ModuleList) -> None:
        """Work with these models. ``model`` has the parameters of all of them."""
        self.roots: list[Module] = list(models)  # type: ignore[arg-type]
        self.model: Any = models if len(models) > 1 else models[0]

    def shard(self, built: list[Module], meshes: Meshes) -> None:
        shard(self.program, self.roots[0], built, meshes)
        self.params = list(self.model.parameters())
        self.roots[0].trip.rank = self.rank
        if self.program.compiled:
            torch._dynamo.reset()
            torch._functorch.config.donated_buffer = False  # a backward may run twice
            for root in self.roots:
                root.compile(backend="aot_eager")

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        is_flat = self.program.optimizer == "flat"
        params = flat_parameters(model) if is_flat and self.params and model is self.model else list(model.parameters())
        params = params or [nn.Parameter(torch.zeros(1))]
        if is_flat:  # where a gradient of zero is none: in a flat view it is
            return torch.optim.SGD(params, lr=0.1)
        if self.program.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)

    def run(self) -> None:
        for i, action in enumerate(self.program.actions):
            what = f"action {i} ({action.kind})"
            getattr(self, "do_" + action.kind)(action, what)
            self.compare(what)
            if self.differences:
                return
        self.finish_save("at the end")

    # ---- forward and backward

    def inputs(self) -> list[torch.Tensor]:
        """Return the inputs of all ranks, in their order."""
        whole = torch.randn(self.world_size * ROWS, DIM, generator=self.generator, dtype=torch.float64)
        return [part.clone().requires_grad_(self.program.input_requires_grad) for part in whole.chunk(self.world_size)]

    def losses(self, inputs: list[torch.Tensor], term: str = "", at: int = 0, which: int = 0) -> Losses:
        """A forward of one of the sharded models, and of its twin."""
        model, reference = self.roots[which], self.reference_roots[which]
        self.num_forwards += 1
        model.trip.number = reference.trip.number = self.num_forwards
        model.trip.num_local_losses = 0
        term = term if self.params else ""
        terms = self.terms_on(at, term) if "before" in term else None
        self.lagging.difference_update(model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = loss_of(model, inputs[self.rank].detach().requires_grad_(inputs[0].requires_grad))
        if any("all gradients are None" in str(item.message) for item in caught):
            self.reference.zero_grad()
            self.has_unreduced = False
        theirs = []
        for rank, part in enumerate(inputs):
            reference.trip.rank, reference.trip.does_edits = rank, rank == 0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs.append(loss_of(reference, part) / self.world_size)
        reference.trip.does_edits = True
        if model.trip.num_local_losses:
            self.note_unreduced()
        self.check_close(ours.detach() / self.world_size, theirs[self.rank].detach(), "loss")
        if ours.requires_grad != theirs[self.rank].requires_grad:
            self.differences.append(f"loss.requires_grad is {ours.requires_grad}")
        losses = Losses(ours, theirs, set(), ours.requires_grad)
        return losses.plus(terms or self.terms_on(at, term)) if term else losses

    def terms_on(self, at: int, term: str) -> Losses:
        """Terms of the loss on parameter number ``at`` itself."""
        index = at % len(self.params)
        sharded, twin = self.params[index], self.twins[index]
        # The gradient of a whole tensor goes the way of the group's own; other terms bring theirs through autograd.
        goes_with_group = term != "norm" and handle_of(sharded)[0].owner().root is not None
        with_terms = {index} if sharded.requires_grad and not goes_with_group else set()
        if term.startswith("product"):  # as a loss computed by F.linear(x, weight) outside of forward
            ours = (sharded.full_tensor().sum() * (self.rank + 1)).square()
            factors = range(1, self.world_size + 1)
            theirs = [(twin.sum() * i).square() / self.world_size for i in factors]
            return Losses(ours, theirs, with_terms, goes_with_group)
        if term == "norm":
            ours, theirs = sharded.norm().full_tensor(), twin.norm()
        else:
            # Plain autograd takes what forward writes to .data for what the term was computed from.
            parts = [module.part.kind for module in self.reference.modules() if isinstance(module, Module)]
            whole = twin.clone() if "edits data" in parts else twin
            ours, theirs = sharded.full_tensor().square().sum(), whole.square().sum()
        return Losses(ours, [theirs / self.world_size] * self.world_size, with_terms, goes_with_group)

    def backward(self, losses: Losses, retain: bool = False) -> None:
        if not all(loss.requires_grad for loss in losses.theirs):
            return
        self.hooks.begin_backward(self.twins)
        try:
            sum(losses.theirs).backward(retain_graph=retain)
        except RuntimeError as error:
            raise ImpossibleError from error
        losses.ours.backward(retain_graph=retain)
        self.note_unreduced(losses.reaches_groups)
        self.differences += self.hooks.check(self.params, losses.with_terms, losses.reaches_groups)

    def note_unreduced(self, reaches_groups: bool = True) -> None:
        """A backward has run."""
        had_unreduced = self.has_unreduced
        self.has_unreduced = not all(state.options.requires_gradient_sync for state in _get_fsdp_states(self.model))
        if had_unreduced and not (self.program.shards_root and reaches_groups):
            # Each child may be a root of its own: those that no backward has reached keep what they have accumulated.
            self.has_unreduced |= any(type(param.grad) is UnreducedGradient for param in self.params)

    def do_train(self, action: Action, what: str) -> None:
        """``how``: the order of forwards and backwards."""
        has_others = len(self.roots) > 1
        of_first, of_second = {"": (0, 0), "other": (1, 1), "both": (0, 1)}[action.root if has_others else ""]
        with nullcontext() if action.sync else no_sync(self.model):
            first = self.losses(self.inputs(), action.term, action.at, of_first)
            if action.toggles and self.params:
                for param in (self.params[action.at % len(self.params)], self.twins[action.at % len(self.params)]):
                    param.requires_grad_(not param.requires_grad)
            if action.how == "":
                self.backward(first)
            elif action.how == "twice":
                self.backward(first, retain=True)
                self.backward(first)
            elif action.how != "forward only":
                second = self.losses(self.inputs(), which=of_second)
                if action.how == "together":
                    self.backward(first.plus(second))
                elif action.how == "in order":
                    self.backward(first)
                    self.backward(second)
                elif action.how == "reversed":
                    self.backward(second)
                    self.backward(first)
                elif action.how == "only second":
                    self.backward(second)

    def do_evaluate(self, action: Action, what: str) -> None:
        with torch.inference_mode() if action.how == "inference" else torch.no_grad():
            self.losses([part.detach() for part in self.inputs()], which=action.at % len(self.roots))

    def do_fail(self, action: Action, what: str) -> None:
        """An exception in the middle, caught; then training goes on."""
        trip = self.roots[0].trip
        trip.where, trip.left = action.how, action.at
        try:
            with nullcontext() if action.sync else no_sync(self.model):
                loss = loss_of(self.roots[0], self.inputs()[self.rank])
                if loss.requires_grad:
                    loss.backward()
        except RuntimeError as error:
            if "this checkpoint() is not necessary" in str(error):
                raise ImpossibleError from error
            raise
        except TripError:
            self.losses([part.detach() for part in self.inputs()])
        else:  # it was not reached
            self.model.zero_grad()
            self.reference.zero_grad()
            self.has_unreduced = False
        finally:
            trip.left = -1

    def do_input_gradient(self, action: Action, what: str) -> None:
        """``torch.autograd.grad`` with respect to the input: no gradient of a parameter changes."""
        inputs = [part.detach().requires_grad_() for part in self.inputs()]
        mine = inputs[self.rank].detach().requires_grad_()
        loss = loss_of(self.roots[0], mine)
        self.reference_roots[0].trip.rank = self.rank
        expected = loss_of(self.reference_roots[0], inputs[self.rank])
        if loss.requires_grad and expected.requires_grad:
            (got,) = torch.autograd.grad(loss, mine, allow_unused=True)
            (want,) = torch.autograd.grad(expected, inputs[self.rank], allow_unused=True)
            if (got is None) != (want is None):
                self.differences.append(f"{what}: input gradient {got}, expected {want}")
            elif got is not None:
                self.check_close(got, want, "input gradient")

    def do_penalise(self, action: Action, what: str) -> None:
        """The gradients of the parameters are in the loss: needs functional mode."""
        self.drop_unreduced()
        with functional_mode(self.model):
            losses = self.losses(self.inputs())
        if not all(loss.requires_grad for loss in losses.theirs):
            return
        penalties = []
        for loss, params in ((losses.ours, self.params), (sum(losses.theirs), self.twins)):
            params = [param for param in params if param.requires_grad]
            grads = torch.autograd.grad(loss, params, allow_unused=True, create_graph=True) if params else ()
            whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]
            penalties.append(sum((grad.square().sum() for grad in whole), torch.zeros((), dtype=torch.float64)))
        ours, theirs = penalties
        self.check_close(ours.detach(), theirs.detach(), "penalty")
        self.backward(losses.plus(Losses(0.1 * ours, [0.1 * theirs / self.world_size] * self.world_size, set(), True)))

    # ---- between iterations

    def do_step(self, action: Action, what: str) -> None:
        if self.has_unreduced:
            return self.do_zero(action, what)
        if action.at:
            total = clip_grad_norm_(self.model.parameters(), 0.5)
            expected = torch.nn.utils.clip_grad_norm_(self.reference.parameters(), 0.5)
            self.check_close(total.to(expected.dtype), expected, "norm of the gradients")
        for optimizer in self.optimizers:
            optimizer.step()
        self.do_zero(action, what)

    def do_zero(self, action: Action, what: str) -> None:
        # Where flat views drop gradients, the sharded parameters do so when the next forward begins; and the reverse.
        self.lagging = set(self.params) if self.program.optimizer == "flat" and action.how != "keep" else set()
        if action.how == "model":
            self.model.zero_grad()
            self.reference.zero_grad()
        elif action.how != "keep":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=action.how != "in place")

    def drop_unreduced(self) -> None:
        """Drop what was accumulated without sync: functional mode, and some other steps, refuse to run with it."""
        if self.has_unreduced:
            self.model.zero_grad()
            self.reference.zero_grad()
            self.has_unreduced = False

    def do_edit(self, action: Action, what: str) -> None:
        """``at``: which parameter, where it is one."""
        pairs = list(zip(self.model.parameters(), self.reference.parameters(), strict=True))
        if not pairs:
            return
        index = action.at % len(pairs)
        if action.how == "scale a gradient":
            self.drop_unreduced()
        for model, chosen in ((self.model, pairs[index][0]), (self.reference, pairs[index][1])):
            EDITS[action.how](model, chosen)
        if self.has_unreduced:
            self.has_unreduced = any(type(param.grad) is UnreducedGradient for param in self.params)

    def do_set_reshard(self, action: Action, what: str) -> None:
        state = [module for module in self.model.modules() if get_state(module) is not None]
        set_reshard_after_forward(state[action.at % len(state)], action.sync, recurse=False)

    def do_set_functional(self, action: Action, what: str) -> None:
        self.drop_unreduced()
        modules = [module for module in self.model.modules() if get_state(module) is not None]
        if action.how == "all":
            set_functional_mode(self.model, action.sync)
        else:
            set_functional_mode(modules[action.at % len(modules)], action.sync, recurse=False)

    def do_summon(self, action: Action, what: str) -> None:
        """Full parameters between iterations; ``how``: what is done to one of them."""
        if not self.params:
            return
        with_grads = action.how == "scale its gradient" and not self.lagging
        if with_grads:
            self.drop_unreduced()
        index = action.at % len(self.params)
        name, twin = list(self.reference.named_parameters())[index]
        with summon_full_params(
            self.model, writeback=action.how != "look", offload_to_cpu=action.sync, with_grads=with_grads
        ):
            full = self.model.get_parameter(name)
            self.check_close(full.detach(), twin.detach(), f"{what}: full {name}")
            with torch.no_grad():
                full.mul_(0.5)
            if with_grads and full.grad is not None:
                full.grad.mul_(3)
        if action.how != "look":
            with torch.no_grad():
                twin.mul_(0.5)
        if with_grads and twin.grad is not None:
            twin.grad.mul_(3)

    def do_checkpoint(self, action: Action, what: str) -> None:
        """State dicts (``how``) are made, everything is changed, and they are loaded into another optimizer."""
        if not self.params:
            return
        is_full = action.how != "sharded"
        options = StateDictOptions(
            full_state_dict=is_full,
            broadcast_from_rank0=action.how == "first rank",
            cpu_offload=action.how == "first rank",
            flatten_optimizer_state_dict=action.sync,
            keep_foreign_params=True,
        )
        saved = copy.deepcopy(get_state_dict(self.model, self.optimizers[0], options=options))
        with torch.no_grad():
            for sharded in self.params:
                sharded.mul_(-3)
        self.optimizers[0] = self.make_optimizer(self.model)
        set_state_dict(
            self.model, self.optimizers[0], model_state_dict=saved[0], optim_state_dict=saved[1], options=options
        )

    def do_save(self, action: Action, what: str) -> None:
        """An asynchronous save. The program goes on, and looks at it before the next one, or at its end."""
        self.finish_save(what)
        if not self.params:
            return
        options = StateDictOptions(keep_foreign_params=True)
        model, optimizer = get_state_dict(self.model, self.optimizers[0], options=options)
        state = {"model": model, "optimizer": optimizer}
        expected = copy.deepcopy(state)
        # Never a folder that a program before this one used: if it was refused, its last save may still be under way.
        names = [f"save-{time.time_ns()}"]
        fork_writers()
        dist.broadcast_object_list(names)
        self.saving = async_save(state, self.folder / names[0]), expected

    def finish_save(self, what: str) -> None:
        """The last asynchronous save has what there was at its call, bit for bit."""
        if self.saving is None:
            return
        (future, expected), self.saving = self.saving, None
        path = future.result()
        loaded = tree_map(lambda item: torch.zeros_like(item) if isinstance(item, torch.Tensor) else item, expected)
        load(loaded, path)
        found = leaves(loaded)
        for where, want in leaves(expected).items():
            got = found.get(where)
            pair = [item.to_local() if isinstance(item, DTensor) else item for item in (got, want)]
            is_tensor = isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
            if got is None and isinstance(want, torch.Tensor) and not pair[1].any() and "['state']" in where:
                continue  # what no step has made yet is not saved
            if not (torch.equal(*pair) if is_tensor else got == want):
                self.differences.append(f"{what}: {where} in {path.name} is {got}, there was {want} at the call")
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)

    def do_restart(self, action: Action, what: str) -> None:
        """As a program that is started again: a new process group, a new model, and what the first one has saved."""
        self.finish_save(what)
        options = StateDictOptions(full_state_dict=True, keep_foreign_params=True)
        saved = copy.deepcopy(get_state_dict(self.model, self.optimizers[0], options=options)) if self.params else None
        models, built = build(self.program)
        self.hold(models)
        meshes = restart_process_group(is_whole=action.sync)
        spread_experts(self.program, built, meshes)
        self.shard(built, meshes)
        for sharded, twin in zip(self.params, self.twins, strict=True):
            sharded.requires_grad_(twin.requires_grad)
        self.optimizers[0] = self.make_optimizer(self.model)
        if saved is not None:
            set_state_dict(
                self.model, self.optimizers[0], model_state_dict=saved[0], optim_state_dict=saved[1], options=options
            )
        self.reference.zero_grad()
        self.has_unreduced = False
        self.lagging = set()

    def do_unshard(self, action: Action, what: str) -> None:
        modules = [module for module in self.model.modules() if get_state(module) is not None]
        module = modules[action.at % len(modules)]
        if not (self.program.ties and get_state(module).root is None):  # a group is not run first without its ties
            unshard(module)

    # ---- comparing

    def compare(self, what: str) -> None:
        if any(ours is not sharded for ours, sharded in zip(self.model.parameters(), self.params, strict=True)):
            self.differences.append(f"{what}: model.parameters() are other objects")
        expected = dict(self.reference.named_parameters())
        for name, sharded in self.model.named_parameters():
            twin = expected[name]
            self.check_local_shard(sharded, sharded, twin.detach(), f"{what}: {name}")
            grad = sharded.grad
            if sharded in self.lagging:
                continue
            if (grad is None) != (twin.grad is None):
                self.differences.append(f"{what}: the gradient of {name} is {grad}, expected {twin.grad}")
            elif grad is not None and type(grad) is not UnreducedGradient:
                if self.has_unreduced:
                    continue
                self.check_local_shard(sharded, grad, twin.grad, f"{what}: gradient of {name}")
            elif grad is not None and not self.has_unreduced:
                self.differences.append(f"{what}: the gradient of {name} is not reduced")
        roots = [state.root for state in _get_fsdp_states(self.model) if state.root is not None]
        if any(root.communicator._in_flight for root in roots):
            self.differences.append(f"{what}: a reduction is in flight")
        for handle in _get_fsdp_handles(self.model):
            if handle.unsharded.work is not None:
                self.differences.append(f"{what}: a collective of {handle.fqns} is in flight")
            if any(param.grad is not None for param in handle.unsharded.params):
                self.differences.append(f"{what}: an unsharded gradient was left in {handle.fqns}")

    def check_local_shard(self, sharded: nn.Parameter, tensor: torch.Tensor, whole: torch.Tensor, what: str) -> None:
        """Compare the elements of this rank."""
        place = handle_of(sharded)
        if place is None:
            self.differences.append(f"{what}: is not sharded")
            return
        handle, index = place
        own = specs_of(handle.tensor_parallel, len(handle.fqns))[index]
        if own is not None:
            whole = distribute_tensor(whole.detach(), own.mesh, own.placements, src_data_rank=None).to_local()
        part = handle.layout.local_shard(index, handle.mesh.shard_rank)
        assert isinstance(tensor, RaggedDTensor), f"{what}: {type(tensor)}"
        got = tensor.to_local().detach().reshape(-1)
        self.check_close(got, whole.reshape(-1)[part.param_start : part.param_start + part.numel], what)

    def check_close(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            self.differences.append(f"{what}: {got.shape} {got.dtype}, expected {expected.shape} {expected.dtype}")
        elif got.numel():
            tolerance = (1e-11 if self.is_exact else 2e-5) * (1 + expected.abs().max().item())
            difference = (got - expected).abs().max().item()
            if not difference <= tolerance:
                self.differences.append(f"{what} differs by {difference}: {got.tolist()}, not {expected.tolist()}")


def leaves(state: Any) -> dict[str, Any]:
    """What is in nested dicts and lists, by path."""
    found, _ = tree_flatten_with_path(state)
    return {keystr(path): item for path, item in found}


# ---- on every rank

# A step looks on each rank alone, which names the first of its groups that were moved.
FLAT_VIEWS_LAG = "Flat views follow only at the next forward"
# Words of the errors with which a program may be refused, on every rank alike: its ranks run different groups, a loss
# term leaves the model where it is not looked for, or a parameter was changed between a forward and its backward by a
# write of which autograd knows nothing; a graph breaks between the modules of a group.
REFUSALS = (
    "the ranks issued different collectives",
    "without passing its module's outputs",
    "without passing any of its module's",
    FLAT_VIEWS_LAG,
    "between a forward and its backward, so the gradients would be wrong",
    "which torch.compile runs in a graph",
    "a graph runs only some of the modules of the fully_shard group",
)
# Where ranks run different groups, collectives may find no partners: then each rank names its own, after the timeout.
DIVERGED = "not all ranks have"

_meshes: dict[int, Meshes] = {}  # by generation: after a failure others are used
_present_generation = 0


def _meshes_of(generation: int) -> Meshes:
    global _present_generation
    _present_generation = generation
    if generation not in _meshes:
        _meshes[generation] = Meshes(_make_group)
    return _meshes[generation]


def _make_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group = dist.new_group([*ranks], timeout=timedelta(seconds=10))
    if isinstance(group, dist.ProcessGroup):  # this rank is in it
        lasting_groups.add(group)
    return group


def restart_process_group(is_whole: bool) -> Meshes:
    """The ranks in a new process group; ``is_whole``: the default one is made anew too, over the same store."""
    if is_whole:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore("again", default_store())
        dist.destroy_process_group()
        _meshes.clear()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    else:
        for group in _meshes.pop(_present_generation).groups.values():
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
    _forget_meshes()  # torch finds equal meshes again, with the process groups that are gone
    return _meshes_of(_present_generation)


def run_on_every_rank(program: Program, generation: int, report: str) -> None:
    """Run ``program``; the first rank writes to the file ``report`` what went wrong. Called on every rank."""
    differences, error = [], ""
    try:
        # A program that fails may leave a save under way; the next one has another generation.
        runner = Runner(program, _meshes_of(generation), Path(report).parent / f"saves-{generation}")
        differences = runner.differences
        runner.run()
    except ImpossibleError:
        error = "refused: also by the unsharded model"
    except Exception as raised:
        error = "".join(traceback.format_exception(raised, limit=-5))
        if isinstance(raised, RuntimeError) and any(words in str(raised) for words in REFUSALS):
            error = f"refused: {FLAT_VIEWS_LAG if FLAT_VIEWS_LAG in str(raised) else raised}"
        elif DIVERGED in str(raised) and any(part.kind == "switch" for part in parts_of(program.root)):
            error = f"refused: {DIVERGED}"
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (differences, error))
    if dist.get_rank() == 0:
        is_refused = error.startswith("refused: ") and outcomes == [([], error)] * len(outcomes)
        Path(report).write_text("refused" if is_refused else "".join(map(_describe, range(len(outcomes)), outcomes)))


def _describe(rank: int, outcome: tuple[list[str], str]) -> str:
    differences, error = outcome
    return "".join(f"rank {rank}: {text}\n" for text in (*differences[:5], error) if text)
