"""Randomness of the choice, in training only: logit noise, input jitter, expert dropout.

Noise is on when a source of it is passed, and off otherwise; nothing here looks at a global
generator. Whoever needs the same draws in every layout and in the recompute (N3) passes draws made
from counters; a plain `torch.Generator` serves one process.

T tokens on this rank · D width · E experts
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_tp.routing.config import RouterConfig

__all__ = ["add_noise", "draw_kept_experts", "draw_uniform", "jitter_input"]


def draw_uniform(
    like: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None
) -> Tensor:
    """Return draws in [0, 1) of the shape and device of `like`.

    Args:
        like: gives shape, device and dtype.
        generator: on the same device.
        dtype: of the draws; that of `like` if None.
    """
    return torch.rand(
        like.shape, generator=generator, device=like.device, dtype=dtype or like.dtype
    )


def jitter_input(
    x_TD: Tensor,
    config: RouterConfig,
    *,
    generator: torch.Generator | None = None,
    uniform_TD: Tensor | None = None,
) -> Tensor:
    """Return the router's input times a factor from [1 - jitter, 1 + jitter), never in place (C09).

    For the router alone: the experts get x_TD itself. Returns x_TD without a source of noise.
    Fedus et al., arXiv 2101.03961, section 2.2.

    Args:
        x_TD: the layer's input.
        config: the router.
        generator: source of noise.
        uniform_TD: draws in [0, 1) in place of the generator.
    """
    if config.input_jitter == 0 or (generator is None and uniform_TD is None):
        return x_TD
    if uniform_TD is None:
        assert generator is not None
        uniform_TD = draw_uniform(x_TD, generator, torch.float32)
    factor_TD = 1 - config.input_jitter + 2 * config.input_jitter * uniform_TD
    return x_TD * factor_TD.to(torch.promote_types(x_TD.dtype, torch.float32))


def add_noise(
    logits_TE: Tensor, uniform_TE: Tensor, config: RouterConfig, noise_logits_TE: Tensor | None
) -> Tensor:
    """Return logits_TE plus Gaussian noise.

    Standard deviation `noise_std` (Riquelme et al., arXiv 2106.05974, section 2.1), or, with noise
    logits, softplus of those, which is learnt (Shazeer et al., arXiv 1701.06538, eq. 4).

    Args:
        logits_TE: fp32 or fp64.
        uniform_TE: draws in [0, 1).
        config: the router.
        noise_logits_TE: a second projection of the router's input, or None.
    """
    # Away from 0 and 1, where the quantile is infinite; 2^-25 is half a step of fp32 draws.
    quantile_TE = uniform_TE.to(logits_TE.dtype).clamp(2**-25, 1 - 2**-24)
    normal_TE = math.sqrt(2) * torch.erfinv(2 * quantile_TE - 1)
    if noise_logits_TE is not None:
        return logits_TE + normal_TE * F.softplus(noise_logits_TE.to(logits_TE.dtype))
    return logits_TE + normal_TE * config.noise_std


def draw_kept_experts(
    config: RouterConfig, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Return kept_E bool: which experts take part in this call; at least `top_k` always do.

    Args:
        config: the router; each expert sits out with probability `expert_dropout`.
        generator: on `device`; the same state on every rank that must agree.
        device: of the result.
    """
    uniform_E = torch.rand(config.num_experts, generator=generator, device=device)
    kept_E = uniform_E >= config.expert_dropout
    return kept_E.scatter(0, torch.topk(uniform_E, config.top_k).indices, True)
