"""Places at an expert: how many, and who keeps one when more tokens ask (D7).

T tokens on this rank · E experts · K choices · P = T*K pairs
"""

from __future__ import annotations

from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor

from moe_tp.routing.config import RouterConfig

__all__ = ["capacity_bound", "capacity_for", "drop_over_capacity"]

_Count = TypeVar("_Count", int, Tensor)


def _ceil_div(a: _Count, b: int) -> _Count:
    return -(-a // b)


def capacity_for(num_tokens: _Count, config: RouterConfig) -> _Count:
    """Return the places at each expert: ceil(factor * tokens * K / E), rounded up to the multiple.

    In integers with the factor as the short fraction that was meant, because in floating point
    ceil(1.1 * 10) is 12. GShard, arXiv 2006.16668, section 3.2.

    Args:
        num_tokens: real tokens of this call: an int, or a tensor (then no host synchronisation).
        config: the router; a capacity_factor of None counts as 1.
    """
    factor = Fraction(1 if config.capacity_factor is None else config.capacity_factor)
    factor = factor.limit_denominator(1_000_000)
    wanted = num_tokens * (config.top_k * factor.numerator)
    places = _ceil_div(wanted, config.num_experts * factor.denominator)
    if isinstance(places, Tensor):
        places = places.clamp_min(config.min_capacity)
    else:
        places = max(places, config.min_capacity)
    return _ceil_div(places, config.capacity_multiple) * config.capacity_multiple


def capacity_bound(num_rows: int, config: RouterConfig) -> int:
    """Return the most slots an expert can get from this many rows, masked or not, on the host.

    Args:
        num_rows: T.
        config: the router.
    """
    return capacity_for(num_rows, config)


def drop_over_capacity(
    ids_TK: Tensor, weights_TK: Tensor, config: RouterConfig, *, mask_T: Tensor | None = None
) -> Tensor:
    """Return ids_TK with -1 where a token found no place left at its expert.

    `position`: all first choices come before all second choices, and among those the earlier row
    (GShard, arXiv 2006.16668, algorithm 1). `weight`: the larger weight, then the earlier row, then
    the better choice (batch priority routing, arXiv 2106.05974, section 4). The weights of what is
    left are not raised to make up for what was dropped.

    Args:
        ids_TK: int64, -1 for none.
        weights_TK: routing weights, read without gradient.
        config: the router.
        mask_T: True where a token is real; only those count for the capacity.
    """
    rows, choices = ids_TK.shape
    places = capacity_for(rows, config) if mask_T is None else capacity_for(mask_T.sum(), config)
    if config.drop_policy == "position":
        asking_P = ids_TK.t().reshape(-1)
        rank_P = _place_in_queue(asking_P, config.num_experts)
        rank_TK = rank_P.view(choices, rows).t()
    else:
        order_P = torch.argsort(weights_TK.detach().reshape(-1), descending=True, stable=True)
        rank_sorted_P = _place_in_queue(ids_TK.reshape(-1)[order_P], config.num_experts)
        rank_TK = (
            torch.empty_like(rank_sorted_P).scatter_(0, order_P, rank_sorted_P).view_as(ids_TK)
        )
    return ids_TK.masked_fill(rank_TK >= places, -1)


def _place_in_queue(ids_P: Tensor, num_experts: int) -> Tensor:
    """Return how many earlier entries ask for the same expert."""
    sorted_P, order_P = torch.sort(ids_P, stable=True)
    experts = torch.arange(-1, num_experts, device=ids_P.device)
    start_E = torch.searchsorted(sorted_P, experts)
    rank_P = torch.arange(ids_P.shape[0], device=ids_P.device) - start_E[sorted_P + 1]
    return torch.empty_like(rank_P).scatter_(0, order_P, rank_P)
