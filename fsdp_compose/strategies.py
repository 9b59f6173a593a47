"""The strategies that ``fully_shard(strategy=...)`` accepts: what each rank keeps of parameters, gradients and
optimizer state, over each dimension of a mesh. docs/meshes.md has the table."""

from .group import STRATEGIES, Kept, Strategy

__all__ = ["STRATEGIES", "Kept", "Strategy"]
