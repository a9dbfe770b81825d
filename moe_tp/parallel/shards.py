"""Where a parameter's elements lie: what splits a DTensor, and which logical elements are here."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from moe_tp.parallel.collectives import raw_all_gather
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.spec import REPLICA_AXES, ParamSpec


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes; their numbers where a host gave them none."""
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


class Split(NamedTuple):
    """One mesh axis that splits one dimension of a DTensor."""

    axis: str
    dim: int
    size: int
    rank: int


def split_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement splits; None for Replicate and Partial.

    torch's strided form, which FSDP puts on a dimension that tp splits too, answers False to
    `is_shard`, so the question is put to its `dim`.
    """
    dim: int | None = getattr(placement, "dim", None)
    return dim


def splits(value: torch.Tensor) -> list[Split]:
    """Return the axes that split a DTensor, in the order in which they do.

    Model axes come first; the replicas' axis stands before them in the mesh but splits last what
    they leave (ZeRO), in the chunks of `torch.chunk`.
    """
    assert isinstance(value, DTensor)
    grid = value.device_mesh
    place = grid.get_coordinate()
    assert place is not None
    found = []
    axes = zip(axis_names(grid), value.placements, grid.shape, place, strict=True)
    for axis, placement, size, rank in axes:
        dim = split_dim(placement)
        if dim is not None:
            found.append(Split(axis, dim, size, rank))
    return sorted(found, key=lambda split: split.axis in REPLICA_AXES)


def gradient_placements(param: DTensor, spec: ParamSpec) -> list[Placement]:
    """Return what a local gradient of `param` is: its debt is `Partial` over an axis."""
    result: list[Placement] = []
    for axis, placement in zip(axis_names(param.device_mesh), param.placements, strict=True):
        if split_dim(placement) is not None:
            result.append(placement)
        else:
            owed = axis in REPLICA_AXES or spec.partial
            result.append(Partial() if owed else Replicate())
    return result


def local_index(param: torch.Tensor, spec: ParamSpec) -> tuple[torch.Tensor, ...]:
    """Return for each dimension the logical index of each local element, -1 for padding.

    The local tensor is the outer product of these indices. Model axes split first, then the
    replicas' axis splits what is left (ZeRO), in the chunks of `torch.chunk`.
    """
    assert isinstance(param, DTensor)
    index = []
    for dim, (size, padded) in enumerate(zip(spec.shape, param.shape, strict=True)):
        if dim == 0 and spec.slots is not None:
            index.append(torch.tensor(spec.slots, dtype=torch.int64))
        else:
            full = torch.arange(padded)
            full[size:] = -1
            index.append(full)
    for split in splits(param):
        chunk = -(-len(index[split.dim]) // split.size)
        index[split.dim] = index[split.dim][split.rank * chunk : (split.rank + 1) * chunk]
    return tuple(index)


def to_local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, off the autograd path."""
    if isinstance(value, DTensor):
        local: torch.Tensor = value.detach().to_local()  # type: ignore[attr-defined]
        return local
    return value.detach()


def full_logical(value: torch.Tensor, spec: ParamSpec, mesh: Mesh) -> torch.Tensor:
    """Return the whole logical tensor of a parameter or settled gradient, on every rank.

    Collectives: all-gather over the axes that split it. For checks on small models.
    """
    assert isinstance(value, DTensor)
    full = to_local(value).to(mesh.device)
    steps, length = [], list(value.shape)
    for split in splits(value):
        steps.append((split, length[split.dim]))
        length[split.dim] = -(-steps[-1][1] // split.size)
    for split, whole in reversed(steps):
        chunk = -(-whole // split.size)
        missing = [0, 0] * (full.dim() - 1 - split.dim) + [0, chunk - full.shape[split.dim]]
        full = raw_all_gather(F.pad(full, missing), mesh.group(split.axis), split.dim)
        full = full.narrow(split.dim, 0, whole)
    if spec.slots is not None:
        slots = torch.tensor(spec.slots)
        # A replicated expert has several slots with equal values; the first one speaks.
        first = {int(e): slot for slot, e in reversed(list(enumerate(slots.tolist()))) if e >= 0}
        full = full[[first[e] for e in range(spec.shape[0])]]
    return full[: spec.shape[0]].clone()
