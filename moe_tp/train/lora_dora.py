"""DoRA (Liu et al., arXiv:2402.09353): a weight as a length for each output and a direction.

The row i of an adapted weight is `m_i V_i / ||V_i||` with `V = W + s B A` (equation 5). The length
of a row is not differentiated (section 4.3), as in PEFT. It needs no product of B and A:

    ||V_i||^2 = ||W_i||^2 + 2 s (W A^T)_i . B_i + s^2 B_i (A A^T) B_i^T

Each term is a sum over the inputs, so where inputs are split over ranks the lengths are one
all-reduce of a number an output.
"""

from __future__ import annotations

import torch

from moe_tp.parallel.collectives import Group, accumulate_dtype, raw_all_reduce


@torch.no_grad()
def row_lengths(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, group: Group | None
) -> torch.Tensor:
    """Return `||W + s B A||` for each of this rank's outputs, in fp32 (fp64 for fp64).

    Args:
        weight: `[out, in]`, this rank's part.
        a: `[r, in]`, the same inputs.
        b: `[out, r]`, the same outputs.
        scale: s.
        group: ranks that the inputs are split over, or None.

    Collectives: all-reduce of `[out]` over `group`.
    """
    dtype = accumulate_dtype(weight.dtype)
    weight, a, b = weight.to(dtype), a.to(dtype), b.to(dtype)
    square = weight.square().sum(1)
    square += (b * (2.0 * scale * (weight @ a.t()) + scale**2 * (b @ (a @ a.t())))).sum(1)
    if group is not None:
        square = raw_all_reduce(square, group)
    return square.clamp_min(torch.finfo(dtype).tiny).sqrt()


def lengths(weight: torch.Tensor) -> torch.Tensor:
    """Return the length of each row of a whole matrix."""
    found: torch.Tensor = torch.linalg.vector_norm(weight, dim=1)
    return found
