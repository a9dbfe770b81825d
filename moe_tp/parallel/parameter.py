"""Parameters: DTensors at rest, local tensors in motion.

A `ParamSpec` says what a parameter is, wherever it lies: its logical shape, which mesh axis splits
which dimension, and what its gradient still owes. `ParallelModule` keeps the specs beside the
parameters; everything that walks a model (initialisation, checkpoints, norms, optimiser groups)
asks them and never a name.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from moe_tp.errors import ConfigError
from moe_tp.parallel.collectives import raw_all_gather
from moe_tp.parallel.functions import apply_function, working_dtype
from moe_tp.parallel.held import held, is_holding
from moe_tp.parallel.mesh import Domain, Mesh
from moe_tp.parallel.random import fill_normal, key_of

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


class NamedSpec(NamedTuple):
    """One parameter of a model with all that is known of it."""

    fqn: str
    module: ParallelModule
    name: str
    param: nn.Parameter
    spec: ParamSpec


class LowRankTerm(Protocol):
    """What LoRA does to a linear module's product: `ParallelModule.low_rank` holds one."""

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return what becomes of the module's product `y` for its input `x`."""
        ...


class ParallelModule(nn.Module):
    """A module whose parameters lie on a mesh.

    Attributes:
        mesh: the mesh.
        specs: what each of its own parameters is.
        low_rank: what an adapter does to its product; None without one.
        trained_rows: by name of a parameter of which only a part is trained, the logical indices
            of dimension 0 that are: `settle_gradients` zeroes the gradient of the others.
        gradient_scale: factor that `settle_gradients` applies (1/ranks in a host that averages).
        lr_scale: factor on the learning rate of its parameters, for `parameter_groups`.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.specs: dict[str, ParamSpec] = {}
        self.gradient_scale = 1.0
        self.lr_scale = 1.0
        self.low_rank: LowRankTerm | None = None
        self.trained_rows: dict[str, frozenset[int]] = {}
        self._fp32_buffers: set[str] = set()

    def add_parameter(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> None:
        """Register a parameter with an uninitialised local shard.

        Raises:
            ConfigError: its shape does not split over the mesh.
        """
        if spec.keep_fp32:
            dtype = torch.promote_types(dtype, torch.float32)
        grid = self.mesh.at_rest(spec.domain, zero_sharded=spec.zero_sharded)
        placements: list[Placement] = []
        shape = spec.padded_shape(self.mesh)
        local = list(shape)
        for axis in grid.mesh_dim_names or ():
            dim = spec.shards.get(axis)
            placements.append(Replicate() if dim is None else Shard(dim))
            if dim is not None:
                local[dim] //= self.mesh.size(axis)
        # Under `torch.device("meta")` the local shard is made there and `materialise` allocates it.
        on_meta = torch.empty(0).is_meta
        device = torch.device("meta") if on_meta else self.mesh.device
        value = DTensor.from_local(
            torch.empty(local, dtype=dtype, device=device),
            grid,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=_contiguous_stride(shape),
        )
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(value))

    def register_fp32_buffer(self, name: str, value: torch.Tensor) -> None:
        """Register a persistent buffer that no cast of the module takes below fp32."""
        self._fp32_buffers.add(name)
        self.register_buffer(name, value)

    def local(self, name: str) -> torch.Tensor:
        """Return this rank's part of a parameter, on the autograd path, in the compute dtype."""
        if is_holding() and not torch.is_grad_enabled():
            return held(self, name, functools.partial(self._local, name))
        return self._local(name)

    def _local(self, name: str) -> torch.Tensor:
        param, spec = getattr(self, name), self.specs[name]
        tracked = torch.is_grad_enabled()
        placements = gradient_placements(param, spec) if tracked else None
        value: torch.Tensor = param.to_local(grad_placements=placements)
        if not tracked:
            value = value.detach()
        elif spec.role in ("bias", "norm") or len(spec.shape) < 2:
            value = apply_function(_OwnGradient, value)
        if spec.keep_fp32:
            return value
        dtype = working_dtype(self.mesh.runtime.compute_dtype, value.dtype, self.mesh.device)
        if dtype == value.dtype:
            return value
        shared, key = _casts.get(), (id(self), name, value.requires_grad)
        known = None if shared is None else shared.get(key)
        cast = None if known is None else known()
        if cast is None:
            cast = value.to(dtype)
            if shared is not None:
                shared[key] = weakref.ref(cast)
        return cast

    def with_low_rank(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return `y`, this module's product for the input `x`, with the adapter's term.

        Collectives: those of the adapter, over tp.
        """
        return y if self.low_rank is None else self.low_rank(x, y)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Cast or move, keeping fp32 state in fp32: its values must never pass through bf16."""
        target = fn(torch.empty(0, device=self.mesh.device))
        if target.dtype.itemsize >= 4:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        kept = [name for name, spec in self.specs.items() if spec.keep_fp32]
        stores: tuple[dict[str, Any], ...] = (self._parameters, self._buffers)
        order = [(store, list(store)) for store in stores]
        params = {name: self._parameters.pop(name) for name in kept}
        buffers = {name: self._buffers.pop(name) for name in self._fp32_buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, param in params.items():
            if param is not None and target.device != param.device:
                param.data = param.data.to(target.device)
            self._parameters[name] = param
        for name, buffer in buffers.items():
            self._buffers[name] = None if buffer is None else buffer.to(target.device)
        for store, names in order:  # optimiser state is saved by position
            for name in names:
                store[name] = store.pop(name)
        return self


_Casts = dict[tuple[int, str, bool], "weakref.ref[torch.Tensor]"]
_casts: ContextVar[_Casts | None] = ContextVar("casts", default=None)


@contextlib.contextmanager
def sharing_casts() -> Iterator[None]:
    """Let graphs that are alive together hold one cast of each parameter.

    Without it each of a pipeline's micro-batches in flight keeps its own bf16 copy of fp32 weights.
    Inside, parameters must not change: nothing here would notice.
    """
    token = _casts.set({})
    try:
        yield
    finally:
        _casts.reset(token)


class _OwnGradient(Function):
    """The identity; its gradient is a tensor of its own.

    A sum hands one gradient to all of its terms, and autograd, which copies such a gradient before
    it keeps it, does not see through a DTensor: two parameters would then share their `grad`, and
    what is done to the one in place would be done to both. Only what is added needs this; the
    gradient of a matrix is the result of a product.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].clone()


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


def named_specs(model: nn.Module) -> Iterator[NamedSpec]:
    """Yield every distinct library parameter of a model once, in registration order."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if not isinstance(module, ParallelModule):
            continue
        for name, spec in module.specs.items():
            param = module._parameters.get(name)
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            yield NamedSpec(f"{prefix}.{name}" if prefix else name, module, name, param, spec)


def mesh_of(model: nn.Module) -> Mesh:
    """Return the mesh of the first library module inside `model`.

    Raises:
        ConfigError: there is none.
    """
    for module in model.modules():
        if isinstance(module, ParallelModule):
            return module.mesh
    raise ConfigError("the model holds no module of this library, so it has no mesh")


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


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every library parameter by (seed, name, logical element), alike in every layout."""
    with torch.no_grad():
        for fqn, _, _, param, spec in named_specs(model):
            local = to_local(param)
            if spec.init.kind == "constant":
                local.fill_(spec.init.value)
                continue
            index = local_index(param, spec)
            fill_normal(local, key_of(seed, fqn), index, spec.shape, spec.init.value)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate what was built on the meta device; values are uninitialised.

    Args:
        model: after `apply_zero`.
        device: where it lies, but for what ZeRO keeps in host memory (`Runtime.offload`).
    """
    host = {
        id(entry.param)
        for entry in named_specs(model)
        if entry.module.mesh.runtime.offload and entry.spec.zero_sharded
    }

    def allocate(value: torch.Tensor) -> torch.Tensor:
        if not value.is_meta:
            return value
        return torch.empty_like(value, device="cpu" if id(value) in host else device)

    model._apply(allocate)


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


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * shape[dim + 1]
    return tuple(stride)
