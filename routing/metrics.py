"""How even the load is, as tensors on the device: reading them is the caller's synchronisation.

T tokens on this rank · E experts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_tp.routing.assignment import Assignment

__all__ = ["LoadMetrics", "load_metrics", "router_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetrics:
    """Scalars (or one a layer, if the counts had a leading dim).

    Args:
        max_ratio: largest load over mean load; 1 at perfect balance, 0 without tokens.
        dead_experts: int64, experts without a token.
        load_entropy: entropy of the load over log E; 1 at perfect balance.
        dropped_share: part of the choices that found no place.
    """

    max_ratio: Tensor
    dead_experts: Tensor
    load_entropy: Tensor
    dropped_share: Tensor


@torch.no_grad()
def load_metrics(counts_E: Tensor, *, chosen_E: Tensor | None = None) -> LoadMetrics:
    """Return the metrics of a load.

    Args:
        counts_E: int64, slots per expert (or `[L, E]`), summed over ranks as wanted.
        chosen_E: int64, before capacity dropped any; None: nothing was dropped.
    """
    chosen_E = counts_E if chosen_E is None else chosen_E
    experts = counts_E.shape[-1]
    total = counts_E.sum(dim=-1)
    asked = chosen_E.sum(dim=-1)
    share_E = counts_E.to(torch.float32) / total.clamp_min(1).unsqueeze(-1)
    entropy = torch.special.entr(share_E).sum(dim=-1)
    return LoadMetrics(
        max_ratio=share_E.amax(dim=-1) * experts,
        dead_experts=(counts_E == 0).sum(dim=-1),
        load_entropy=entropy / torch.log(torch.tensor(float(max(experts, 2)))).item(),
        dropped_share=(asked - total).to(torch.float32) / asked.clamp_min(1),
    )


@torch.no_grad()
def router_entropy(assignment: Assignment) -> Tensor:
    """Return the sum over real tokens of the entropy of their probabilities (nats).

    A sum, so that ranks can add theirs up and divide by the tokens.

    Args:
        assignment: from `route`; sigmoid scores are normalised per token.
    """
    scores_TE = assignment.scores_TE
    tiny = torch.finfo(scores_TE.dtype).tiny
    prob_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp_min(tiny)
    entropy: Tensor = torch.special.entr(prob_TE).sum()
    return entropy
