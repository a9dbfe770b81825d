"""ZeRO 1-3 over the replicas of each parameter, by torch's `fully_shard` (FSDP2).

| stage | parameters            | gradients                         | optimiser state |
|-------|-----------------------|-----------------------------------|-----------------|
| 0     | whole                 | whole                             | whole           |
| 1     | whole within a step   | whole until the last micro-batch  | sharded         |
| 2     | whole within a step   | sharded after each micro-batch    | sharded         |
| 3     | whole while in use    | sharded after each micro-batch    | sharded         |

(ZeRO: arXiv:1910.02054, section 5.) Dense parameters are sharded over dp x cp, experts over edp.
Norms, routers, gates, replicated KV heads and biases that are added on owned tokens stay whole:
they are small, kept out of the bf16 cast, and `settle_gradients` sums them in fp32. All reductions
are sums; the loss has been divided already.

With `dp_replicate` (HSDP, arXiv:2304.11277, section 3.2.2) the shards lie on the ranks of one
replica and gradients are summed in two hops: a reduce-scatter inside the replica as the stage says,
and an all-reduce of the shards across replicas after the last micro-batch. Experts are replicated
as often, their shards within the same runs of ranks; where each lies on one rank (edp 1) there is
nothing to do. With `offload` what is sharded rests in host memory, with its gradient and so its
optimiser state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from moe_tp.parallel.collectives import accumulate_dtype
from moe_tp.parallel.mesh import Domain, Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import splits

_ROOTS = "_zero_roots"  # wrapped modules beside the module tree of the model they belong to


@dataclass(frozen=True, slots=True)
class WrapUnit:
    """A module whose parameters are gathered and freed together, in its own forward."""

    module: nn.Module
    domain: Domain


def apply_zero(
    model: nn.Module,
    mesh: Mesh,
    units: Sequence[WrapUnit],
    *,
    roots: Sequence[nn.Module] | None = None,
) -> None:
    """Shard the parameters of a model in place, as the mesh's layout asks.

    Args:
        model: built on the meta device or with values.
        mesh: its layout's `zero` picks the stage; at 0 nothing is done.
        units: inner units before the outer ones that contain them.
        roots: what is called in training and holds the rest: the model, or its pipeline stages.

    Collectives: none now; all-gathers over the replicas in forward (and backward at stage 3) and
    reduce-scatters in backward.
    """
    stage, runtime = mesh.layout.zero, mesh.runtime
    if stage == 0:
        return
    widest = max((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    policy = MixedPrecisionPolicy(
        param_dtype=runtime.compute_dtype,
        reduce_dtype=accumulate_dtype(widest),
        cast_forward_inputs=False,
    )
    pinned = mesh.device.type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if runtime.offload else OffloadPolicy()
    whole = {entry.param for entry in named_specs(model) if not entry.spec.zero_sharded}
    tops = [WrapUnit(root, "dense") for root in roots or [model]]
    for unit in (*units, *tops):
        replicas = mesh.replicas(unit.domain)
        size = replicas.size(-1)
        fully_shard(
            unit.module,
            mesh=replicas,
            reshard_after_forward=stage == 3 and unit not in tops,
            shard_placement_fn=functools.partial(_shard_dim, size=size),
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
        )
    model.__dict__[_ROOTS] = [] if roots is None else list(roots)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _shard_dim(param: nn.Parameter, *, size: int) -> Shard:
    """Return the dimension to shard: one that divides evenly and no model axis splits."""
    taken: set[int] = set()
    local: torch.Tensor = param
    if isinstance(param, DTensor):
        taken = {split.dim for split in splits(param)}
        local = param.to_local()
    even = [dim for dim, n in enumerate(local.shape) if n and n % size == 0]
    free = [dim for dim in even if dim not in taken]
    return Shard((free or even or [0])[0])


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the wrapped modules of a model, its pipeline stages included; empty at zero 0."""
    found = dict.fromkeys(model.modules())
    found.update(dict.fromkeys(model.__dict__.get(_ROOTS, [])))
    return [module for module in found if isinstance(module, FSDPModule)]


def set_last_micro_batch(model: nn.Module, mesh: Mesh, last: bool) -> None:
    """Say whether the next backward is the step's last.

    Until then stages 1 and 2 keep whole parameters, stage 1 sums no gradients, and stages 2 and 3
    sum none across the replicas of HSDP.
    """
    stage = mesh.layout.zero
    for module in fsdp_modules(model):
        if stage < 3:
            module.set_reshard_after_backward(last, recurse=False)
        if stage == 1:
            module.set_requires_gradient_sync(last, recurse=False)
        elif mesh.runtime.dp_replicate > 1:
            module.set_requires_all_reduce(last, recurse=False)


def hooked(output: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the output of a wrapped module as a tensor of its own, where ZeRO shards its weights.

    FSDP hangs the start of backward onto outputs; on a view, an operation in place would drop it.
    """
    return output.clone() if mesh.layout.zero and output._is_view() else output


def reshard(model: nn.Module) -> None:
    """Free whole parameters that a forward without backward has left behind."""
    for module in fsdp_modules(model):
        module.reshard()
