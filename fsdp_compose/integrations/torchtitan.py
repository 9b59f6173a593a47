"""torchtitan's trainer, sharded by fsdp_compose: all configs of its models, by its own option ``--module``::

    torchrun ... -m torchtitan.train --module fsdp_compose.integrations.torchtitan --config llama3_debugmodel

In a function of your own that makes a config: ``return sharded_by_fsdp_compose(config)``. Checked with 0.3.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torchtitan.models
from torch.distributed import fsdp
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from ..drop_in import fully_shard
from .substitution import with_functions


def sharded_by_fsdp_compose(config: Any) -> Any:
    """Let the ``parallelize_fn`` of a ``Trainer.Config``'s model shard by fsdp_compose; return the config."""
    spec = config.model_spec
    own = with_functions(spec.parallelize_fn, {fsdp.fully_shard: fully_shard, apply_fsdp_to_decoder: _apply_to_decoder})
    config.model_spec = replace(spec, parallelize_fn=own)
    return config


def _apply_to_decoder(model: Any, *args: Any, **kwargs: Any) -> Any:
    # Module.parallelize() has made new parameters, and so has untied them. init_states() ties those that are sharded,
    # whose groups would have both.
    if model.enable_weight_tying:
        model.tok_embeddings.weight = model.lm_head.weight
    return with_functions(apply_fsdp_to_decoder, {fsdp.fully_shard: fully_shard})(model, *args, **kwargs)


def __getattr__(name: str) -> Callable[[], Any]:
    """The functions of torchtitan's models that make configs, by their names."""
    for path in sorted(Path(torchtitan.models.__path__[0]).glob("*/config_registry.py")):
        if f"\ndef {name}(" in path.read_text():  # importing all models takes long, and needs packages
            make = getattr(import_module(f"torchtitan.models.{path.parent.name}.config_registry"), name)
            return lambda: sharded_by_fsdp_compose(make())
    raise AttributeError(f"no model of torchtitan has a config {name!r}")
