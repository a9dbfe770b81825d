"""What a parameter is, wherever it lies.

A `ParamSpec` holds its logical shape, which mesh axis splits which dimension, and what its gradient
still owes. Everything that walks a model (initialisation, checkpoints, norms, optimiser groups)
asks it and never a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_tp.errors import ConfigError
from moe_tp.parallel.mesh import Domain, Mesh

Role = Literal["weight", "norm", "bias", "router", "embedding"]
REPLICA_AXES = ("dp_cp", "edp", "dp_replicate", "dp_shard", "edp_replicate", "edp_shard")


@dataclass(frozen=True, slots=True)
class Init:
    """First values: normal with mean 0 and standard deviation `value`, or the constant `value`."""

    kind: Literal["normal", "constant"] = "normal"
    value: float = 0.02


ONES = Init("constant", 1.0)
ZEROS = Init("constant", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """What a parameter is, independent of this rank.

    Args:
        shape: logical global shape, without padding.
        shards: mesh axis -> dimension that it splits; later axes split what earlier ones left.
        domain: the grid it lies on.
        partial: each rank's gradient covers only the tokens it owns (norms, router, gates) or
            the heads it uses (replicated KV), so a sum over the unsharded model axes is owed.
        init: first values.
        role: decides weight decay and learning-rate groups.
        keep_fp32: never cast below fp32, whatever the model's dtype.
        slots: for dimension 0, the logical index of every padded place, -1 where it is empty.
        pad: allow dimension 0 to be padded at its end so that it splits.
        copies: pipeline ranks that hold it (a tied embedding on the first and the last).
    """

    shape: tuple[int, ...]
    shards: Mapping[str, int] = field(default_factory=dict)
    domain: Domain = "dense"
    partial: bool = False
    init: Init = Init()
    role: Role = "weight"
    keep_fp32: bool = False
    slots: tuple[int, ...] | None = None
    pad: bool = False
    copies: int = 1

    @property
    def zero_sharded(self) -> bool:
        """Whether ZeRO may shard it over the replicas.

        Small fp32 parameters and those whose gradient is partial over tp stay replicated:
        `fully_shard` would cast the former and sum the latter over tp in the compute dtype.
        """
        return not (self.partial or self.keep_fp32 or self.copies > 1)

    def padded_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the global shape with padding, which every shard axis divides.

        Raises:
            ConfigError: a dimension does not split and may not be padded.
        """
        shape = list(self.shape)
        if self.slots is not None:
            shape[0] = len(self.slots)
        for dim in set(self.shards.values()):
            parts = math.prod(mesh.size(axis) for axis, d in self.shards.items() if d == dim)
            if shape[dim] % parts:
                axes = "*".join(axis for axis, d in self.shards.items() if d == dim)
                if not (self.pad and dim == 0):
                    raise ConfigError(
                        f"dimension {dim} of a parameter of shape {list(self.shape)} does not "
                        f"split over {axes}={parts}; choose {axes} among the divisors of "
                        f"{shape[dim]}"
                    )
                shape[dim] = -(-shape[dim] // parts) * parts
        return tuple(shape)
