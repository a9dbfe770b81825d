"""What happens between the last backward of a step and the optimiser.

A gradient's placements are its debt: `Partial` over an axis is a sum still owed over it.
`settle_gradients` pays, `clip_grad_norm` measures each distinct element once, `parameter_groups`
hands the optimiser lists that it can treat alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_tp.errors import ConfigError
from moe_tp.parallel.collectives import Group, accumulate_dtype, raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import NamedSpec, mesh_of, named_specs
from moe_tp.parallel.replicas import refuse_unsummed, slot_shares, sum_replicas
from moe_tp.parallel.shards import axis_names, gradient_placements, local_index, splits, to_local
from moe_tp.parallel.spec import REPLICA_AXES, ParamSpec
from moe_tp.parallel.zero import reshard

_BUCKET_BYTES = 64 << 20
# Models whose ranks were found to train the same parameters, at their first step.
_COMPARED: WeakSet[nn.Module] = WeakSet()


def library_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that this library reduces: what a host wrapper must leave alone."""
    return [entry.param for entry in named_specs(model)]


def owed_axes(grad: torch.Tensor) -> tuple[str, ...]:
    """Return the mesh axes over which a sum of this gradient is still owed."""
    assert isinstance(grad, DTensor)
    names = axis_names(grad.device_mesh)
    return tuple(a for a, p in zip(names, grad.placements, strict=True) if p.is_partial())


def settle_gradients(model: nn.Module) -> None:
    """Pay every sum that the gradients of the library's parameters still owe.

    Call once a step, after the last backward, on every rank. A parameter that took no part gets a
    zero gradient, so that all ranks join the same collectives. Other parameters of the model are
    left alone. A second call finds no debt and changes nothing.

    Raises:
        ConfigError: a parameter that ZeRO should have sharded is not sharded.
        RankMismatchError: at a model's first step: ranks train unlike parameters.

    Collectives: at a model's first step an exchange of names through the store; all-reduces in fp32
        over the owed axes (dense: dp_cp, with tp where the gradient covers owned tokens only;
        experts: edp; a tied embedding under pp: also the pipeline's two ends), in buckets of
        64 MiB; where experts have replicas, those of `sum_replicas` after.
    """
    reshard(model)  # a forward without backward leaves whole parameters, which carry no gradient
    debts: dict[tuple[str, ...], list[tuple[NamedSpec, torch.Tensor]]] = defaultdict(list)
    paid: list[NamedSpec] = []
    # A parameter that two pipeline ranks hold never rests sharded, so it always shows a debt.
    mesh: Mesh | None = None
    entries = list(named_specs(model))
    if entries and model not in _COMPARED:
        _compare_trained(entries)
        _COMPARED.add(model)
    for entry in entries:
        if not entry.param.requires_grad:
            continue
        mesh = entry.module.mesh
        _check_wrapped(entry)
        grad = _gradient(entry.param, entry.spec)
        _drop_untrained(entry, to_local(grad))
        paid.append(entry)
        axes = owed_axes(grad)
        if axes:
            ends = ("pp_ends",) if entry.spec.copies > 1 else ()
            debts[axes + ends].append((entry, to_local(grad)))
    for axes in sorted(debts):
        assert mesh is not None
        _pay(debts[axes], _joint_groups(mesh, axes))
    for entry in paid:
        sum_replicas(entry)


def _compare_trained(entries: Sequence[NamedSpec]) -> None:
    """Raise if ranks that sum the same parameters train unlike ones: their sums would mix."""
    mesh = entries[0].module.mesh
    for domain, axis in (("dense", "stage"), ("expert", "edp")):
        mine = [e for e in entries if e.spec.domain == domain and e.param.requires_grad]
        trained = " ".join(entry.fqn for entry in mine)
        mesh.agree(f"which {domain} parameters are trained", trained, axis=axis)


def _drop_untrained(entry: NamedSpec, grad: torch.Tensor) -> None:
    """Zero the gradient of the part of a parameter that is not trained."""
    kept = entry.module.trained_rows.get(entry.name)
    if kept is not None:
        index = local_index(entry.param, entry.spec)[0].tolist()
        idle = [row for row, place in enumerate(index) if place not in kept]
        grad[torch.tensor(idle, dtype=torch.int64, device=grad.device)] = 0


def _check_wrapped(entry: NamedSpec) -> None:
    """Refuse a parameter that was laid out for ZeRO and that nothing sums over its replicas."""
    assert isinstance(entry.param, DTensor)
    names = entry.param.device_mesh.mesh_dim_names or ()
    if not set(names) & set(REPLICA_AXES):
        raise ConfigError(
            f"{entry.fqn} was laid out for zero={entry.module.mesh.layout.zero}, but nothing "
            f"shards it, so its gradient would never be summed over its replicas; build it with "
            f"moe_tp.models.build, or give the layer a mesh with zero=0"
        )


def _gradient(param: nn.Parameter, spec: ParamSpec) -> torch.Tensor:
    """Return the parameter's gradient, made of zeros where it took no part."""
    if param.grad is None:
        assert isinstance(param, DTensor)
        local = torch.zeros_like(to_local(param))
        param.grad = _wrap(local, param, gradient_placements(param, spec))
    return param.grad


def _wrap(local: torch.Tensor, param: nn.Parameter, placements: Any) -> DTensor:
    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local,
        param.device_mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _joint_groups(mesh: Mesh, axes: tuple[str, ...]) -> list[Group]:
    """Return groups whose all-reduces in turn sum over all of `axes`."""
    if set(axes) == {"dp_cp", "tp"} or set(axes) == {"edp", "ep", "etp"}:
        return [mesh.group("stage")]
    return [mesh.group(axis) for axis in axes]


def _pay(debts: list[tuple[NamedSpec, torch.Tensor]], groups: list[Group]) -> None:
    groups = [group for group in groups if group.size > 1]
    for bucket in _buckets(debts):
        if groups:
            # One flat buffer a bucket, in fp32: a bf16 sum over ranks would round at every step.
            dtype = accumulate_dtype(bucket[0][1].dtype)
            flat = torch.cat([grad.reshape(-1).to(dtype) for _, grad in bucket])
            for group in groups:
                flat = raw_all_reduce(flat, group)
            parts = flat.split([grad.numel() for _, grad in bucket])
            for (_, grad), part in zip(bucket, parts, strict=True):
                grad.copy_(part.view(grad.shape))
        for entry, grad in bucket:
            if entry.module.gradient_scale != 1.0:
                grad.mul_(entry.module.gradient_scale)
            assert isinstance(entry.param, DTensor)
            entry.param.grad = _wrap(grad, entry.param, entry.param.placements)


def _buckets(
    debts: list[tuple[NamedSpec, torch.Tensor]],
) -> Iterator[list[tuple[NamedSpec, torch.Tensor]]]:
    bucket: list[tuple[NamedSpec, torch.Tensor]] = []
    size = 0
    for item in debts:
        grad = item[1]
        if bucket and (size + grad.nbytes > _BUCKET_BYTES or grad.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += grad.nbytes
    if bucket:
        yield bucket


def _weight_of_shard(param: nn.Parameter, copies: int, mesh: Mesh) -> float:
    """Return 1 / (ranks of the world that hold the same elements)."""
    if not isinstance(param, DTensor):
        return 1.0 / mesh.world_size
    shards = math.prod(split.size for split in splits(param))
    return shards / (mesh.layout.stage_size * copies)


def _square(local: torch.Tensor, entry: NamedSpec | None) -> torch.Tensor:
    """Return the sum of squares of a gradient's local part; replicas of an expert share it."""
    shares = None if entry is None else slot_shares(entry.param, entry.spec)
    if shares is None:
        whole: torch.Tensor = torch.linalg.vector_norm(local, dtype=torch.float64)
        return whole.square()
    norms: torch.Tensor = torch.linalg.vector_norm(local.flatten(1), dim=1, dtype=torch.float64)
    return norms.square() @ shares.to(norms.device)


def gradient_norm(model: nn.Module, *, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of a model as one vector, each element counted once.

    Args:
        model: its library parameters must be settled; plain parameters beside them must hold
            the same gradient on every rank.
        norm_type: 2.0 or inf.

    Raises:
        ConfigError: a gradient still owes a sum.

    Collectives: all-reduce of one fp64 number over the world.
    """
    mesh = mesh_of(model)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    entries = {id(entry.param): entry for entry in named_specs(model)}
    for param in model.parameters():
        if param.grad is None:
            continue
        entry = entries.get(id(param))
        if isinstance(param.grad, DTensor) and owed_axes(param.grad):
            raise ConfigError(
                f"the gradient of {entry.fqn if entry else 'a parameter'} still owes a sum over "
                f"{', '.join(owed_axes(param.grad))}; call settle_gradients(model) first"
            )
        if entry is not None:
            refuse_unsummed(entry)
        local = to_local(param.grad)
        if local.numel() == 0:
            continue
        if math.isinf(norm_type):
            value = torch.linalg.vector_norm(local, norm_type, dtype=torch.float64)
            total = torch.maximum(total, value.to(total.device))
        else:
            copies = entry.spec.copies if entry else 1
            total += _square(local, entry).to(total.device) * _weight_of_shard(param, copies, mesh)
    if math.isinf(norm_type):
        # A maximum over ranks may lose a NaN, so that travels beside it.
        pair = torch.stack([total.isnan().to(total.dtype), total.nan_to_num(posinf=torch.inf)])
        bad, top = raw_all_reduce(pair, mesh.group("world"), "max")
        return torch.where(bad > 0, torch.nan, top)
    return raw_all_reduce(total, mesh.group("world")).sqrt()


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> float:
    """Return the global gradient norm, after scaling all gradients down to `max_norm`.

    Args:
        model: with settled gradients.
        max_norm: largest norm that is let through.
        norm_type: 2.0 or inf.
        error_if_nonfinite: raise, on every rank alike, instead of returning nan or inf.

    Raises:
        ConfigError: a gradient still owes a sum, `max_norm` is no bound, or the norm is not finite
            (on request).

    Collectives: all-reduce of one number over the world.
    """
    if not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm} is no bound of a norm; choose a number above 0")
    norm = float(gradient_norm(model, norm_type=norm_type))
    if not math.isfinite(norm):
        if error_if_nonfinite:
            raise ConfigError(f"the gradient norm is {norm}; skip this step or lower the rate")
        return norm
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0:
        for param in model.parameters():
            if param.grad is not None:
                to_local(param.grad).mul_(coefficient)
    return norm


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float | None = None,
    lr: float | None = None,
    router_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return optimiser groups of the trainable parameters that never mix kinds of tensor.

    Plain tensors, and DTensors of each mesh, dtype and device, go apart: the fused and foreach
    optimisers of torch cannot take them in one list.

    Args:
        model: the model.
        weight_decay: for weights; norms and biases get 0. None leaves the optimiser's own.
        lr: learning rate of all groups; None leaves the optimiser's own.
        router_lr: learning rate of routers; None takes `lr`. `RouterConfig.lr_scale` comes on top.

    Raises:
        ConfigError: a module scales its learning rate, and `lr` is not given.
    """
    reshard(model)  # the optimiser must hold the shards, not what a forward has gathered
    roles = {id(entry.param): entry.spec.role for entry in named_specs(model)}
    scales = {id(entry.param): entry.module.lr_scale for entry in named_specs(model)}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for param in model.parameters():
        if not param.requires_grad:
            continue
        role = roles.get(id(param), "weight" if param.dim() > 1 else "norm")
        options: dict[str, Any] = {}
        if weight_decay is not None:
            options["weight_decay"] = 0.0 if role in ("norm", "bias") else weight_decay
        rate = router_lr if role == "router" and router_lr is not None else lr
        scale = scales.get(id(param), 1.0)
        if rate is not None:
            options["lr"] = rate * scale
        elif scale != 1.0:
            raise ConfigError(
                f"lr_scale={scale} of a router scales a learning rate that is not known here; pass "
                "lr= to parameter_groups"
            )
        axes = axis_names(param.device_mesh) if isinstance(param, DTensor) else None
        kind = (axes, param.dtype, param.device, *options.items())
        group = groups.setdefault(kind, {"params": [], **options})
        group["params"].append(param)
    return list(groups.values())
