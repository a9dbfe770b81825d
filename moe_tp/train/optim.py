"""The optimiser of a run, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moe_tp.errors import ConfigError
from moe_tp.parallel.gradients import parameter_groups
from moe_tp.parallel.parameter import named_specs
from moe_tp.train.adamw import SmallAdamW
from moe_tp.train.config import TrainConfig
from moe_tp.train.muon import Muon, is_matrix


def make_optimizer(model: nn.Module, config: TrainConfig, *, seed: int = 0) -> Optimizer:
    """Return the optimiser of the trainable parameters; its groups remember their highest rate.

    Args:
        model: its parameters, usually fp32, are the master weights.
        config: kind, rates, decay.
        seed: of stochastic rounding.

    Raises:
        ConfigError: torchao is asked for and not installed, or weights are in fp16.
    """
    groups = parameter_groups(
        model, weight_decay=config.weight_decay, lr=config.lr, router_lr=config.router_lr
    )
    if not groups:  # a pipeline rank of frozen layers
        groups = [{"params": [], "lr": config.lr, "weight_decay": 0.0}]
    dtypes = {param.dtype for group in groups for param in group["params"]}
    if torch.float16 in dtypes:
        raise ConfigError(
            "the model's weights are in float16, in which they cannot be trained: small gradients "
            "and steps become 0; load it with dtype=torch.float32, or torch.bfloat16"
        )
    for group in groups:
        group["peak_lr"] = group["lr"]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    common: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    narrow = torch.bfloat16 in dtypes
    if config.optimizer == "adamw" and config.moments == "float32" and not narrow:
        kernel: dict[str, Any] = {} if config.kernel in ("auto", "loop") else {config.kernel: True}
        if config.kernel == "loop":
            kernel = {"foreach": False, "fused": False}
        return torch.optim.AdamW(groups, **common, **kernel)
    entries = list(named_specs(model))
    common |= {"moments": config.moments, "seed": seed}
    if config.optimizer == "adamw":
        return SmallAdamW(groups, entries, **common)
    matrices = {entry.param for entry in entries if is_matrix(entry)}
    return Muon(_parted(groups, matrices), entries, momentum=config.momentum, **common)


def _parted(groups: list[dict[str, Any]], matrices: set[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups of which each holds matrices only, or none."""
    found = []
    for group in groups:
        for kind in (True, False):
            params = [p for p in group["params"] if (p in matrices) == kind]
            if params or not (kind or group["params"]):
                found.append({**group, "params": params, "matrices": kind})
    return found


def rate_factor(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step as a part of the highest.

    The warmup rises linearly and reaches 1 at step `warmup_steps`. From there `linear` and `cosine`
    (arXiv:1608.03983) fall to `min_lr_ratio` at the last step; `wsd` (arXiv:2404.06395) stays at 1
    and falls linearly over its last `decay_steps`.

    Args:
        config: the schedule.
        step: from 0.
        steps: of the whole run.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    low = config.min_lr_ratio
    if config.schedule == "constant":
        return 1.0
    start = config.warmup_steps
    if config.schedule == "wsd":
        decay = config.decay_steps if config.decay_steps is not None else max(1, steps // 10)
        start = max(start, steps - 1 - decay)
    done = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    if config.schedule == "cosine":
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done))
    return low + (1.0 - low) * (1.0 - done)


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Return the learning rate of the first group, having set that of each to its part.

    Args:
        optimizer: from `make_optimizer`.
        factor: part of the highest rate.
    """
    group: dict[str, Any]
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return float(optimizer.param_groups[0]["peak_lr"]) * factor
