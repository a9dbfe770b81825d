"""Which experts a token gets: a function of its row of choice scores alone, ties to the lowest id.

T tokens on this rank · E experts · K choices · G groups
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tp.routing.config import RouterConfig

__all__ = ["count_experts", "limit_groups", "select_top_k", "stable_top_k"]

_SORT_UP_TO = 16
_SORT_FEW = 1024  # numbers in all: one call in place of ten


def stable_top_k(values_RE: Tensor, k: int) -> Tensor:
    """Return ids_RK of the k largest of each row, largest first, ties to the lowest column (R1).

    `torch.topk` promises no order among equals. Two exact ways, by measurement on CPU (2048 rows,
    one thread; ms for k of E):

    ==============  ==========  ===========  =============  ==============
    E, k            8, 2        64, 8        256, 8         512, 10
    ==============  ==========  ===========  =============  ==============
    stable sort     0.11        3.9          20.7           45.9
    composite key   0.17        1.4          6.1            9.8
    torch.topk      0.05        1.6          4.9            9.5
    ==============  ==========  ===========  =============  ==============

    The composite key is (order-preserving integer of the fp32 number, -column) in one int64: all
    keys of a row differ, so any top-k gives the one answer. fp64 takes the sort.

    Args:
        values_RE: fp32 or fp64, any strides.
        k: at most the number of columns.
    """
    columns = values_RE.shape[-1]
    small = columns <= _SORT_UP_TO or values_RE.numel() <= _SORT_FEW
    if small or values_RE.dtype != torch.float32:
        return torch.sort(values_RE, dim=-1, descending=True, stable=True).indices[..., :k]
    # + 0.0 turns -0.0 into 0.0; flipping the lower bits of negatives orders them as integers.
    bits_RE = (values_RE.contiguous() + 0.0).view(torch.int32)
    ordered_RE = bits_RE ^ ((bits_RE >> 31) & 0x7FFFFFFF)
    down_E = torch.arange(columns - 1, -1, -1, device=values_RE.device)
    return torch.topk(ordered_RE.to(torch.int64) * columns + down_E, k, dim=-1).indices


def limit_groups(choice_TE: Tensor, config: RouterConfig) -> Tensor:
    """Return choice_TE with -inf outside each token's best groups of experts.

    DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) ranks groups by their best expert, DeepSeek-V3
    (arXiv 2412.19437, section 2.1.2) by the sum of their two best.

    Args:
        choice_TE: what experts are ranked by.
        config: the router.
    """
    if config.num_groups == 1:
        return choice_TE
    grouped_TGe = choice_TE.unflatten(-1, (config.num_groups, -1))
    if config.group_score == "max":
        group_TG = grouped_TGe.amax(dim=-1)
    else:
        best_TGe = torch.topk(grouped_TGe, min(2, grouped_TGe.shape[-1]), dim=-1).values
        second_TGe = best_TGe[..., 1:]
        # A group whose second best does not take part is worth its best, not -inf.
        second_TGe = second_TGe.masked_fill(torch.isneginf(second_TGe), 0.0)
        group_TG = best_TGe[..., 0] + second_TGe.sum(dim=-1)
    best = stable_top_k(group_TG, config.top_groups)
    out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(-1, best, False)
    limited_TE: Tensor = grouped_TGe.masked_fill(out_TG.unsqueeze(-1), float("-inf")).flatten(-2)
    return limited_TE


def select_top_k(choice_TE: Tensor, config: RouterConfig) -> Tensor:
    """Return ids_TK, best expert first; a slot left without an admissible expert is -1.

    Args:
        choice_TE: what experts are ranked by; -inf where an expert is not admissible.
        config: the router.
    """
    limited_TE = limit_groups(choice_TE, config)
    ids_TK = stable_top_k(limited_TE, config.top_k)
    return ids_TK.masked_fill(torch.isneginf(limited_TE.gather(-1, ids_TK)), -1)


def count_experts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return counts_E int64, how often each expert occurs; -1 is nobody.

    Integer additions: exact and the same in every order. No host synchronisation, unlike
    `torch.bincount` on an accelerator.

    Args:
        ids_TK: int64, any shape.
        num_experts: E.
    """
    flat = ids_TK.reshape(-1) + 1
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    return counts.index_add_(0, flat, torch.ones_like(flat))[1:]
