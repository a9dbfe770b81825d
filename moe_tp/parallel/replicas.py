"""Experts that lie in several slots: one gradient for all their replicas.

Tokens of a replicated expert are dealt over its slots, so each slot's gradient is a part of the
expert's. `sum_replicas` adds the parts up and gives every slot the sum; from equal weights, equal
gradients and equal moments an elementwise optimiser then makes equal weights again.

What travels: for each parameter with replicas an all-reduce over ep, in fp32, of as many slices
[1, ...] as experts are replicated, whatever the number of their replicas: with r of them and n
elements an expert and rank, 2 (ep - 1) / ep * r * n * 4 bytes sent a rank.
"""

from __future__ import annotations

import functools
from collections import Counter

import torch

from moe_tp.errors import ConfigError
from moe_tp.parallel.collectives import accumulate_dtype, raw_all_reduce
from moe_tp.parallel.parameter import NamedSpec
from moe_tp.parallel.shards import local_index, splits, to_local
from moe_tp.parallel.spec import ParamSpec

_SUMMED = "_moe_tp_replicas_summed"  # on a gradient: its version when its replicas were summed


def replicated(spec: ParamSpec) -> tuple[int, ...]:
    """Return the logical indices of dimension 0 that lie in several slots, in order."""
    return () if spec.slots is None else _several(spec.slots)


@functools.lru_cache(maxsize=1024)
def _several(slots: tuple[int, ...]) -> tuple[int, ...]:
    counts = Counter(index for index in slots if index >= 0)
    return tuple(sorted(index for index, count in counts.items() if count > 1))


def slot_shares(param: torch.Tensor, spec: ParamSpec) -> torch.Tensor | None:
    """Return 1 / (slots of the same expert) for each local element of dimension 0.

    None where nothing is replicated.
    """
    if not replicated(spec):
        return None
    counts = Counter(spec.slots)
    shares = [1.0 / counts[i] if i >= 0 else 0.0 for i in local_index(param, spec)[0].tolist()]
    return torch.tensor(shares, dtype=torch.float64)


def owes_replicas(entry: NamedSpec) -> bool:
    """Return whether the gradient of a parameter is not yet the sum of its replicas'."""
    grad = entry.param.grad
    return bool(replicated(entry.spec)) and getattr(grad, _SUMMED, None) is None


def mark_summed(entry: NamedSpec) -> None:
    """Note that a gradient is the sum, as it stands now."""
    grad = entry.param.grad
    if grad is not None and replicated(entry.spec):
        setattr(grad, _SUMMED, to_local(grad)._version)


def sum_replicas(entry: NamedSpec) -> None:
    """Give every replica of an expert the sum of their gradients; a second time changes nothing.

    Args:
        entry: its gradient owes nothing else.

    Collectives: all-reduces in fp32 over what splits the slots (ep; edp where ZeRO deals them).
    """
    grad, spec = entry.param.grad, entry.spec
    assert grad is not None
    local, many = to_local(grad), replicated(spec)
    if not many or getattr(grad, _SUMMED, None) == local._version:
        return
    at = {expert: number for number, expert in enumerate(many)}
    index = local_index(entry.param, spec)[0].tolist()
    mine = [slot for slot, expert in enumerate(index) if expert in at]
    device = entry.module.mesh.device
    slots = torch.tensor(mine, dtype=torch.int64, device=local.device)
    numbers = torch.tensor([at[index[s]] for s in mine], dtype=torch.int64, device=device)
    exact = accumulate_dtype(local.dtype)
    total = torch.zeros((len(many), *local.shape[1:]), dtype=exact, device=device)
    total.index_add_(0, numbers, local.index_select(0, slots).to(device, exact))
    for split in splits(entry.param):
        if split.dim == 0:
            total = raw_all_reduce(total, entry.module.mesh.group(split.axis))
    local.index_copy_(0, slots, total.index_select(0, numbers).to(local.device, local.dtype))
    mark_summed(entry)


def refuse_unsummed(entry: NamedSpec) -> None:
    """Refuse a gradient whose replicas were not summed.

    Raises:
        ConfigError: it was not.
    """
    if owes_replicas(entry):
        raise ConfigError(
            f"the gradient of {entry.fqn} still owes a sum over the replicas of its experts; call "
            f"settle_gradients(model) first"
        )
