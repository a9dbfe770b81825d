"""What runs on sequence shards: norms on the tokens that a rank owns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from moe_tp.parallel.collectives import (
    Group,
    accumulate_dtype,
    all_reduce,
    replicate,
)
from moe_tp.parallel.few_rows import few_norms, takes_norm
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.spec import ONES, ParamSpec


class _RMSNorm(Function):
    """x * rsqrt(mean(x^2) + eps) * w in fp32, keeping only x and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(accumulate_dtype(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        unit = x.to(scale.dtype) * scale
        grad_w = (grad * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_unit = grad * weight
        mean = (grad_unit * unit).mean(-1, keepdim=True)
        grad_x = grad_unit.sub_(unit.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_w, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the root-mean-square norm over the last dimension (arXiv:1910.07467, equation 4)."""
    if not torch.is_grad_enabled():
        if takes_norm(x, weight):
            return few_norms(x, weight, eps)
        wide = x.to(accumulate_dtype(x.dtype))  # one call in place of six
        return F.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)
    result: torch.Tensor = apply_function(_RMSNorm, x, weight, eps)
    return result


class RMSNorm(ParallelModule):
    """RMSNorm on owned tokens (arXiv:1910.07467, equation 4), computed in fp32.

    Args:
        dim: width over all ranks.
        eps: added to the mean square.
        mesh: the mesh.
        dtype: parameter dtype; never below fp32.
        split: the last dimension is split over tp (a norm over the full width of q or k).
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        split: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.eps, self.dim, self.split = eps, dim, split
        shards = {"tp": 0} if split else {}
        spec = ParamSpec(
            shape=(dim,), shards=shards, partial=True, init=ONES, role="norm", keep_fp32=True
        )
        self.add_parameter("weight", spec, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed input, in its dtype.

        Args:
            x: `[..., dim]` of this rank; `[..., dim / tp]` when `split`.

        Collectives: none; when `split`, an all-reduce over tp of one number a row, and backward.
        """
        weight = self.local("weight")
        if not self.split or self.mesh.size("tp") == 1:
            return rms_norm(x, weight, self.eps)
        group: Group = self.mesh.group("tp")
        wide = x.to(accumulate_dtype(x.dtype))
        # Each rank's features feed the sum, and the sum feeds each rank's features.
        total = replicate(all_reduce(wide.square().sum(-1, keepdim=True), group), group)
        return (wide * torch.rsqrt(total / self.dim + self.eps) * weight).to(x.dtype)
