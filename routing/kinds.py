"""Choices other than top-k: by the experts, by a balanced plan, by token id, at random, in turn.

Those that look across tokens look over the rows of this call, which is what one rank owns; see
`RouterConfig.layout_dependence`.

T tokens on this rank · E experts · K choices
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tp.errors import RoutingError
from moe_tp.log import warn_once
from moe_tp.routing.capacity import capacity_for
from moe_tp.routing.config import RouterConfig
from moe_tp.routing.select import stable_top_k

__all__ = [
    "select_balanced",
    "select_by_experts",
    "select_by_hash",
    "select_random",
    "select_sinkhorn",
]

# Odd 64-bit constants of MurmurHash3's finaliser and the golden ratio, as signed integers.
_MIX_A = -0xAE502812AA7333
_MIX_B = -0x3B314601E57A13AD
_GOLDEN = -0x61C8864680B583EB


def select_by_experts(
    logits_TE: Tensor, scores_TE: Tensor, config: RouterConfig, mask_T: Tensor | None
) -> Tensor:
    """Return ids_TE: each expert takes the tokens that score highest with it, ties to the earlier.

    A row lists its experts in ascending order, then -1. Every expert takes
    ceil(capacity_factor * tokens * K / E) tokens (all, if there are fewer), so a token may get
    none.
    Zhou et al., arXiv 2202.09368, section 3.2.

    Args:
        logits_TE: -inf keeps an expert out.
        scores_TE: fp32 or fp64.
        config: the router; a capacity_factor of None counts as 1.
        mask_T: True where a token is real.
    """
    warn_once(
        "routing.expert_choice",
        "kind='expert_choice' lets every expert see all tokens of the batch, later tokens of a "
        "causal model among them: training leaks the future, and generation routes otherwise",
    )
    rows, experts = scores_TE.shape
    most = min(rows, capacity_for(rows, config))
    choice_ET = scores_TE.masked_fill(torch.isneginf(logits_TE), float("-inf")).t()
    taken_Ec = torch.ones(experts, most, dtype=torch.bool, device=scores_TE.device)
    if mask_T is not None:
        choice_ET = choice_ET.masked_fill(~mask_T, float("-inf"))
        real = mask_T.sum()
        places = torch.minimum(real, capacity_for(real, config))
        taken_Ec = (torch.arange(most, device=scores_TE.device) < places).expand(experts, most)
    token_Ec = stable_top_k(choice_ET, most)
    taken_Ec = taken_Ec & ~torch.isneginf(choice_ET.gather(-1, token_Ec))
    member_ET = torch.zeros_like(choice_ET, dtype=torch.bool).scatter(-1, token_Ec, taken_Ec)
    expert_E = torch.arange(experts, device=scores_TE.device)
    ids_TE = torch.where(member_ET.t(), expert_E, experts).sort(dim=-1).values
    return ids_TE.masked_fill(ids_TE == experts, -1)


def sinkhorn_plan(logits_TE: Tensor, config: RouterConfig, mask_T: Tensor | None) -> Tensor:
    """Return the logarithm of a plan whose rows sum to 1 and whose columns are nearly even.

    A fixed number of normalisations in log space: no host synchronisation, no overflow. Cuturi,
    arXiv 1306.0895, algorithm 1; Clark et al., arXiv 2202.01169, section 3.1.

    Args:
        logits_TE: fp32 or fp64.
        config: the router.
        mask_T: True where a token is real; others take no part.
    """
    if logits_TE.shape[0] == 0:
        return logits_TE
    out_TE = torch.isneginf(logits_TE)
    if mask_T is not None:
        out_TE = out_TE | ~mask_T.unsqueeze(-1)
    real = (~out_TE.all(dim=1)).sum().clamp_min(1).to(logits_TE.dtype)
    experts = (~out_TE.all(dim=0)).sum().clamp_min(1)
    # A low finite number inside: -inf minus -inf is NaN where a whole row or column is out.
    lowest = torch.finfo(logits_TE.dtype).min / 4
    log_TE = logits_TE.masked_fill(out_TE, lowest)
    for _ in range(config.sinkhorn_iterations):
        log_TE = log_TE - torch.logsumexp(log_TE, dim=0, keepdim=True) + torch.log(real / experts)
        log_TE = log_TE.masked_fill(out_TE, lowest)
        log_TE = log_TE - torch.logsumexp(log_TE, dim=1, keepdim=True)
        log_TE = log_TE.masked_fill(out_TE, lowest)
    return log_TE.masked_fill(out_TE, float("-inf"))


def select_sinkhorn(logits_TE: Tensor, config: RouterConfig, mask_T: Tensor | None) -> Tensor:
    """Return ids_TK, the largest entries of each row of the Sinkhorn plan.

    Args:
        logits_TE: fp32 or fp64.
        config: the router.
        mask_T: True where a token is real.
    """
    plan_TE = sinkhorn_plan(logits_TE, config, mask_T)
    ids_TK = stable_top_k(plan_TE, config.top_k)
    return ids_TK.masked_fill(torch.isneginf(plan_TE.gather(-1, ids_TK)), -1)


def select_by_hash(
    token_ids_T: Tensor | None,
    config: RouterConfig,
    table_VK: Tensor | None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Return ids_TK, K different experts that depend on the token id alone.

    Roller et al., arXiv 2106.04426. Without a table, the experts with the largest hash of (seed,
    token id, expert), which is even over ids.

    Args:
        token_ids_T: int64 vocabulary ids, at least 0.
        config: the router.
        table_VK: int64, the experts of each vocabulary id, if a checkpoint brings them.
        mask_T: True where a token is real; the ids of others, -100 say, are not looked at.
    """
    if token_ids_T is None:
        raise RoutingError(
            "kind='hash' routes by token id, and token_ids_T is None; pass the ids of the tokens"
        )
    if mask_T is not None:
        token_ids_T = torch.where(mask_T, token_ids_T, 0)
    if table_VK is not None:
        return table_VK.to(token_ids_T.device)[token_ids_T].to(torch.int64)
    return _largest_hash(token_ids_T.to(torch.int64), config)


def select_random(
    uniform_TE: Tensor | None, rows: int, device: torch.device, config: RouterConfig
) -> Tensor:
    """Return ids_TK, K different experts at random, each equally likely.

    Args:
        uniform_TE: draws in [0, 1), or None: a hash of (seed, row), the same in every call.
        rows: T.
        device: of the result.
        config: the router.
    """
    if uniform_TE is None:
        return _largest_hash(torch.arange(rows, device=device), config)
    return stable_top_k(uniform_TE, config.top_k)


def select_balanced(
    rows: int, device: torch.device, config: RouterConfig, mask_T: Tensor | None
) -> Tensor:
    """Return ids_TK that go round the experts in turn: counts differ by at most 1.

    Args:
        rows: T.
        device: of the result.
        config: the router.
        mask_T: True where a token is real; others are not counted.
    """
    index_T = torch.arange(rows, device=device) if mask_T is None else mask_T.cumsum(0) - 1
    turn_K = torch.arange(config.top_k, device=device)
    return (index_T.unsqueeze(-1) * config.top_k + turn_K) % config.num_experts


def _mix(x: Tensor) -> Tensor:
    """Return a 64-bit avalanche of x; int64 wraps, and the mask makes its right shift logical."""
    for factor in (_MIX_A, _MIX_B):
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def _largest_hash(key_T: Tensor, config: RouterConfig) -> Tensor:
    """Return ids_TK of the K largest hashes of (seed, key, expert); all keys of a row differ."""
    experts = config.num_experts
    expert_E = torch.arange(experts, device=key_T.device)
    salt = (config.seed * _GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63)
    seeded_T = _mix(key_T * 2 + 1 + salt)
    hash_TE = _mix(seeded_T.unsqueeze(-1) + expert_E * _GOLDEN) & ((1 << 40) - 1)
    return torch.topk(hash_TE * experts + (experts - 1 - expert_E), config.top_k, dim=-1).indices
