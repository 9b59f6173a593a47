"""One way to shard and train a model, what it does to the model, and the code that does so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.nn as nn

from .._arguments import checked
from ..extension import MixedPrecisionPolicy

NONE, EVERY_SECOND, ALL = CHECKPOINTED = ("none", "every 2nd block", "blocks")
"""Which blocks recompute their activations in backward."""


@checked()
@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        strategy: see ``fully_shard``.
        mesh: the number of shards, or of replicas and shards.
        per_group: blocks that form one group; there may be fewer in the last one.
        splits: large modules inside blocks are groups of their own.
        reshard_after_forward: see ``fully_shard``.
        checkpointed: ``none``, ``every 2nd block`` or ``blocks``: which recompute their activations.
        is_offloaded: parameters, gradients and optimizer state are in host memory.
        batch: sequences of a micro-batch of a rank; 0: what the factory makes.
        num_batches: micro-batches of a step.
        no_sync: only the last of them reduces gradients.
    """

    strategy: str
    mesh: tuple[int, ...]
    per_group: int = 1
    splits: bool = False
    reshard_after_forward: bool | int | None = None
    checkpointed: str = NONE
    is_offloaded: bool = False
    batch: int = 0
    num_batches: int = 1
    no_sync: bool = False

    def __str__(self) -> str:
        words = [self.strategy if len(self.mesh) == 1 else f"{self.strategy} {'x'.join(map(str, self.mesh))}"]
        if self.reshard_after_forward is False:
            words.append("kept gathered")
        elif self.reshard_after_forward is not None and self.reshard_after_forward is not True:
            words.append(f"kept by {self.reshard_after_forward}")
        if self.per_group != 1:
            words.append(f"{self.per_group} blocks a group")
        if self.splits:
            words.append("groups inside blocks")
        if self.checkpointed != NONE:
            words.append(f"recompute {self.checkpointed}")
        if self.is_offloaded:
            words.append("offloaded")
        return ", ".join(words)


@checked()
def apply_setting(
    setting: Setting, model: nn.Module, blocks: Sequence[nn.Module], mp_policy: MixedPrecisionPolicy | None
) -> None:
    """Shard the model, by the code that a report prints."""
    names: dict[str, Any] = {}
    code = code_of(setting, model, blocks, mp_policy, "cpu")
    exec(code, names)
    names["shard"](*[model, mp_policy][: 1 + ("def shard(model, mp_policy)" in code)])


_LARGE = 4  # a child of a block is large if it has at least a quarter of the block's parameters


def large_children(blocks: Sequence[nn.Module]) -> list[str]:
    """The names of several children that have a quarter of a block's parameters or more, in every block."""
    found = []
    for name, _ in blocks[0].named_children():
        if all(_is_large(getattr(block, name, None), block) for block in blocks):
            found.append(name)
    return found if len(found) > 1 else []


def _is_large(child: Any, block: nn.Module) -> bool:
    has_forward = isinstance(child, nn.Module) and not isinstance(child, _CONTAINERS)
    return has_forward and _LARGE * _numel(child) >= _numel(block)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def code_of(
    setting: Setting, model: nn.Module, blocks: Sequence[nn.Module], mp_policy: MixedPrecisionPolicy | None, device: str
) -> str:
    """A function ``shard(model)``, for a program to paste. ``device``: its type, for example ``cuda``."""
    ours, imports, options, arguments = ["fully_shard"], [], ["mesh=mesh"], "model"
    given = _given(mp_policy)
    if any(map(callable, given.values())):  # nobody can print a function
        arguments += ", mp_policy"
        options.append("mp_policy=mp_policy")
    elif mp_policy is not None:
        ours.append("MixedPrecisionPolicy")
        imports.append("import torch")
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        options.append(f"mp_policy=MixedPrecisionPolicy({text})")
    if setting.strategy not in ("zero3", "hybrid"):  # what a mesh of one or two dimensions means by itself
        options.append(f'strategy="{setting.strategy}"')
    if setting.is_offloaded:
        ours.append("CPUOffloadPolicy")
        options.append("offload_policy=CPUOffloadPolicy()")
    inner = "**options"
    if setting.reshard_after_forward is not None:
        inner += f", reshard_after_forward={setting.reshard_after_forward}"
    names = '("replicate", "shard")' if len(setting.mesh) > 1 else '("shard",)'
    lines = [
        f'mesh = init_device_mesh("{device}", {setting.mesh}, mesh_dim_names={names})',
        f"options = dict({', '.join(options)})",
    ]
    if blocks:
        lines.append(f"blocks = {_blocks_text(model, blocks)}")
    if setting.checkpointed != NONE:
        imports += ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
        lines += [
            f"for block in {'blocks' if setting.checkpointed == ALL else 'blocks[::2]'}:",
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        ]
    if blocks and setting.per_group > 1:
        lines += [
            f"for i in range(0, len(blocks), {setting.per_group}):",
            f"    fully_shard(blocks[i : i + {setting.per_group}], {inner})",
        ]
    elif blocks:
        lines.append("for block in blocks:")
        if setting.splits:
            lines += [
                f"    for name in {json.dumps(large_children(blocks))}:",
                f"        fully_shard(block.get_submodule(name), {inner})",
            ]
        lines.append(f"    fully_shard(block, {inner})")
    lines.append("fully_shard(model, **options)")
    if setting.num_batches > 1:
        how = ", all but the last under no_sync(model)" if setting.no_sync else ""
        lines.append(f"# and in a step {setting.num_batches} micro-batches of {setting.batch} sequences{how}")
    imports.append("from torch.distributed.device_mesh import init_device_mesh")
    imports.sort(key=lambda line: line.startswith("from"))
    imports.append(f"from fsdp_compose import {', '.join(sorted(ours))}")
    return "\n".join([*imports, "", "", f"def shard({arguments}):", *(f"    {line}" for line in lines)])


def _given(mp_policy: MixedPrecisionPolicy | None) -> dict[str, Any]:
    """The arguments of a policy that are not the default."""
    items = fields(mp_policy) if mp_policy is not None else ()
    return {item.name: value for item in items if (value := getattr(mp_policy, item.name)) != item.default}


def _blocks_text(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    paths = [names[id(block)] for block in blocks]
    parent = paths[0].rpartition(".")[0]
    container = model.get_submodule(parent)
    if isinstance(container, (nn.ModuleList, nn.Sequential)) and [*map(id, container)] == [*map(id, blocks)]:
        return f'[*model.get_submodule("{parent}")]'
    return f"[model.get_submodule(name) for name in {json.dumps(paths)}]"
