"""Balancing without a loss: the correction bias, moved once an optimiser step (L4).

E experts
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_tp.errors import ConfigError
from moe_tp.routing.config import RouterConfig

__all__ = ["bias_rate_at", "update_bias"]


def update_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Return the bias moved by `rate` up for experts below the mean load and down for those above.

    A new tensor; the given one is left alone. The comparison is between integers (count * E against
    the total), because bf16 counts near 40000 are 256 apart. The mean is not subtracted from the
    bias. Wang et al., arXiv 2408.15664, algorithm 1.

    Args:
        bias_E: fp32 or fp64.
        counts_E: choices per expert over the whole optimiser step, summed over every rank that owns
            tokens; int64 (fp32 and fp64 are taken too if they hold whole numbers).
        rate: step size, in units of scores.
    """
    if bias_E.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"bias_E is {bias_E.dtype}, in which 1.0 + {rate} may be 1.0; keep it in float32"
        )
    if counts_E.dtype in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"counts_E is {counts_E.dtype}, which does not count exactly; pass int64 counts"
        )
    if not 0 <= rate < math.inf:
        raise ConfigError(f"rate={rate} is not a finite number >= 0; choose rate >= 0")
    if bias_E.shape != counts_E.shape:
        raise ConfigError(
            f"bias_E of shape {tuple(bias_E.shape)} and counts_E of shape {tuple(counts_E.shape)} "
            "differ; pass one of each an expert"
        )
    counts_E = counts_E.detach().to(torch.int64)
    above_E = counts_E * counts_E.shape[-1] - counts_E.sum(dim=-1, keepdim=True)
    return bias_E.detach() - rate * torch.sign(above_E).to(bias_E.dtype)


def bias_rate_at(config: RouterConfig, step: int) -> float:
    """Return the rate of `update_bias` for an optimiser step.

    `constant`: bias_rate before `bias_steps`, bias_rate_end from there on (DeepSeek-V3, arXiv
    2412.19437, section 4.2: 0.001, then 0 for the last part). `linear` and `cosine` go from one to
    the other over `bias_steps`. Without `bias_steps`, bias_rate always. A frozen router: 0.

    Args:
        config: the router.
        step: optimiser steps done so far.
    """
    if config.frozen:
        return 0.0
    if config.bias_steps is None:
        return config.bias_rate
    part = min(max(step / config.bias_steps, 0.0), 1.0)
    if config.bias_schedule == "constant":
        return config.bias_rate if part < 1 else config.bias_rate_end
    if config.bias_schedule == "cosine":
        part = (1 - math.cos(math.pi * part)) / 2
    return config.bias_rate + (config.bias_rate_end - config.bias_rate) * part
