"""The strategies that ``fully_shard(strategy=...)`` accepts. Each says how parameters, gradients and optimizer state
are sharded over each mesh dimension. docs/meshes.md has the table."""

from .core.group import STRATEGIES, Kept, Strategy

__all__ = ["STRATEGIES", "Kept", "Strategy"]
