"""Modules whose parameters are DTensors at rest and local tensors in motion.

`ParallelModule` keeps each parameter's `ParamSpec` beside it; `named_specs` is how everything that
walks a model reads them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moe_tp.errors import ConfigError
from moe_tp.parallel.functions import apply_function, working_dtype
from moe_tp.parallel.held import held, is_holding
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import fill_normal, key_of
from moe_tp.parallel.shards import gradient_placements, local_index, to_local
from moe_tp.parallel.spec import ParamSpec


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


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * shape[dim + 1]
    return tuple(stride)
