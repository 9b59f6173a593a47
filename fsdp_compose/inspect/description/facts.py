"""The facts of a model's layout, as plain data: which rank holds what of each parameter, and in how many bytes.

Numbers and names only, so that they can be printed, written and compared; ``collecting`` reads them off a model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The elements of a parameter in one shard.

    Attributes:
        ranks: that hold the shard, by their numbers in the default process group: one, or one of each replica.
        start, stop: of the elements, in the flattened parameter.
        rows: the same as indices of dim 0, where shard boundaries lie between these; else ``None``.
        shard_start, shard_stop: where they are, in elements of the shard.
    """

    ranks: tuple[int, ...]
    start: int
    stop: int
    rows: tuple[int, int] | None
    shard_start: int
    shard_stop: int


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter of a flat parameter.

    Attributes:
        fqn: its name in the model; ``tied``: its other names there.
        shape, numel: of the whole parameter.
        local_shape: of what this rank's flat parameter has of it, and ``parts`` count in: less than ``shape`` where
            tensor parallelism has cut it.
        dtype: that it is kept in.
        offset: of its first element, in elements of the flat parameter.
        granule: so many consecutive elements no shard boundary divides.
        placements: of the sharded parameter on its mesh.
        parts: those that are not empty, by shard.
    """

    fqn: str
    tied: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    local_shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    offset: int
    granule: int
    placements: tuple[str, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class FlatParameterFacts:
    """One flat parameter. Bytes and elements are those of one replica.

    Attributes:
        dtype: of the shards; ``compute``: of the unsharded parameters; ``reduce``: of the reduction; ``gradient``: of
            the sharded gradients.
        gathered_by: the class of its only parameter, if that class gathers it in a form of its own.
        home: where the shards live.
        num_shards, shard_numel, shard_bytes: of how many shards it consists, and how long each is, padding included.
        held_bytes: of parameters in each shard, without padding.
        padding_bytes: in all shards.
        unsharded_bytes: while it is gathered; ``None``: its class decides, or there is nothing to gather.
    """

    dtype: str
    compute: str
    reduce: str
    gradient: str
    gathered_by: str | None
    home: str
    num_shards: int
    shard_numel: int
    shard_bytes: int
    held_bytes: tuple[int, ...]
    padding_bytes: int
    unsharded_bytes: int | None
    parameters: tuple[ParameterFacts, ...]

    @property
    def flat_bytes(self) -> int:
        """Of all shards."""
        return self.num_shards * self.shard_bytes


@dataclass(frozen=True)
class GroupFacts:
    """What one call of ``fully_shard`` or ``replicate`` manages.

    Attributes:
        names: of the modules given to it; ``classes``: theirs.
        is_replicated: ``replicate`` made it.
        mesh_shape, mesh_dims: of its mesh; ``device``: where it computes.
        shard_ranks: for each shard, the ranks that hold it, by their numbers in the default process group.
        policy: dtypes that the user chose.
        options: what else he did, where it is not the default; and ``reshard_after_forward``.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    is_replicated: bool
    mesh_shape: tuple[int, ...]
    mesh_dims: tuple[str, ...]
    device: str
    shard_ranks: tuple[tuple[int, ...], ...]
    policy: dict[str, str]
    options: dict[str, str]
    flat_parameters: tuple[FlatParameterFacts, ...]

    @property
    def name(self) -> str:
        """The name of the group."""
        return ", ".join(name or "(root)" for name in self.names)


@dataclass(frozen=True)
class OtherParameter:
    """A parameter that no group manages: every rank has it whole."""

    fqn: str
    shape: tuple[int, ...]
    numel: int
    dtype: str
    requires_grad: bool
    nbytes: int


@dataclass(frozen=True)
class ModelFacts:
    """A model.

    Attributes:
        name: its class.
        rank, world_size: of the process that looks.
    """

    name: str
    rank: int
    world_size: int
    groups: tuple[GroupFacts, ...]
    others: tuple[OtherParameter, ...]

    @property
    def flat_parameters(self) -> list[FlatParameterFacts]:
        return [flat for group in self.groups for flat in group.flat_parameters]

    @property
    def num_parameters(self) -> int:
        return sum(len(flat.parameters) for flat in self.flat_parameters) + len(self.others)

    @property
    def numel(self) -> int:
        """The elements of all parameters, whole."""
        managed = sum(param.numel for flat in self.flat_parameters for param in flat.parameters)
        return managed + sum(other.numel for other in self.others)

    @property
    def kept_bytes(self) -> int:
        """What this rank keeps between iterations."""
        return sum(flat.shard_bytes for flat in self.flat_parameters) + sum(other.nbytes for other in self.others)

    @property
    def padding_bytes(self) -> int:
        return sum(flat.padding_bytes for flat in self.flat_parameters)

    @property
    def flat_bytes(self) -> int:
        """Of all shards, and of what is whole."""
        return sum(flat.flat_bytes for flat in self.flat_parameters) + sum(other.nbytes for other in self.others)
