"""Muon for matrices, AdamW for the rest (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

The update of a matrix is its momentum with all singular values moved near 1, which needs the whole
matrix. Stacked expert weights `[E, ..., F, D]` are as many matrices, and what splits them between
matrices (ep; ZeRO over experts) costs nothing. What splits inside a matrix (tp, etp, ZeRO on dense
weights) is gathered for the step, and each of those ranks then does the same work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from moe_tp.models.head import Head
from moe_tp.parallel.collectives import raw_all_gather
from moe_tp.parallel.parameter import NamedSpec
from moe_tp.parallel.shards import Split, splits, to_local
from moe_tp.train.adamw import SmallAdamW, wide_copies

_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5


class Muon(SmallAdamW):
    """Muon with Nesterov momentum; groups without `matrices` are updated by AdamW.

    The update is scaled by 0.2 sqrt(max(rows, columns)) (arXiv:2502.16982, equation 4), the size of
    AdamW's, so that both kinds share one learning rate and weight decay. The iteration runs in the
    dtype of the arithmetic (fp32), not in bf16.

    Args:
        momentum: of the matrices.
        other arguments: as of `SmallAdamW`.
    """

    def __init__(self, *args: Any, momentum: float, **more: Any) -> None:
        super().__init__(*args, **more)
        for group in self.param_groups:
            group.setdefault("matrices", False)
            group.setdefault("momentum", momentum)

    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments of a group's parameters."""
        return ("momentum_buffer",) if group["matrices"] else super().moment_names(group)

    def update(
        self, param: torch.Tensor, group: Mapping[str, Any], state: Mapping[str, torch.Tensor]
    ) -> None:
        """Update one parameter and its state.

        Collectives: all-gather of the momentum over the axes that split a matrix.
        """
        if not group["matrices"]:
            super().update(param, group, state)
            return
        assert param.grad is not None
        entry = self._entries[param]  # type: ignore[index]
        everything = slice(None)
        stored = to_local(param), to_local(state["momentum_buffer"])
        weight, momentum = wide_copies(stored)
        grad = to_local(param.grad).to(weight.dtype)
        momentum.lerp_(grad, 1.0 - group["momentum"])
        ahead = grad.lerp(momentum, group["momentum"])
        direction = _own_part(orthogonal(_whole(ahead, entry)), ahead, entry)
        rows, columns = entry.spec.shape[-2:]
        scale = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-scale)
        self.store(param, state, everything, zip(stored, (weight, momentum), strict=True))


def is_matrix(entry: NamedSpec) -> bool:
    """Return whether Muon is for this parameter: a hidden layer's matrix, or a stack of them."""
    inside = entry.spec.role == "weight" and not isinstance(entry.module, Head)
    return inside and len(entry.spec.shape) >= 2


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Return the last two dimensions with singular values near 1: five Newton-Schulz steps.

    Args:
        x: `[..., A, B]`; a matrix of zeros stays one.
    """
    wide = x.shape[-2] <= x.shape[-1]
    y = x if wide else x.mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    found: torch.Tensor = y if wide else y.mT
    return found


def _inner_splits(entry: NamedSpec) -> list[tuple[Split, int]]:
    """Return what splits inside a matrix, in order, each with the length that it splits."""
    length, found = list(entry.param.shape), []
    for split in splits(entry.param):
        if split.dim >= len(length) - 2:
            found.append((split, length[split.dim]))
        length[split.dim] = -(-length[split.dim] // split.size)
    return found


def _whole(local: torch.Tensor, entry: NamedSpec) -> torch.Tensor:
    """Return this rank's matrices whole.

    Collectives: an all-gather over each axis that splits a matrix.
    """
    for split, length in reversed(_inner_splits(entry)):
        chunk = -(-length // split.size)
        missing = [0, 0] * (local.dim() - 1 - split.dim) + [0, chunk - local.shape[split.dim]]
        group = entry.module.mesh.group(split.axis)
        local = raw_all_gather(F.pad(local, missing), group, split.dim)
        local = local.narrow(split.dim, 0, length)
    return local


def _own_part(whole: torch.Tensor, local: torch.Tensor, entry: NamedSpec) -> torch.Tensor:
    """Return this rank's part of whole matrices, of the shape of `local`."""
    for split, length in _inner_splits(entry):
        chunk = -(-length // split.size)
        start = min(split.rank * chunk, whole.shape[split.dim])
        size = min(chunk, whole.shape[split.dim] - start)
        whole = whole.narrow(split.dim, start, size)
    assert whole.shape == local.shape, (whole.shape, local.shape)
    return whole
