"""The one value that routing hands on: who goes where, with what weight, and what the losses need.

T tokens on this rank · E experts · K choices
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_tp.routing.capacity import capacity_bound, drop_over_capacity
from moe_tp.routing.config import RouterConfig
from moe_tp.routing.scores import compute_scores, full_precision, promote
from moe_tp.routing.select import count_experts

__all__ = ["Assignment", "RoutingFunction", "assign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where each token goes. K is `top_k`, but E for expert choice; any slot may be -1 (nobody).

    Args:
        ids_TK: int64, the expert of each slot; -1 in masked rows and in dropped slots.
        weights_TK: fp32 or fp64, differentiable; 0 where the id is -1.
        scores_TE: probabilities or sigmoids, differentiable; 0 in masked rows.
        counts_E: int64, slots that each expert gets: what dispatch sends.
        chosen_TK, chosen_E: ids and counts before capacity dropped any: what losses and the bias
            update use. The same tensors as above when nothing can be dropped.
        logits_TE: the router's logits without noise, for the z-loss.
        mask_T: True where a token is real; None if all are.
        normalized: each real row of scores_TE sums to 1.
        capacity: the most slots that an expert can get from this call, known on the host, or None.
        identity_T: int64, a number for each token, the same in every layout, which is to travel
            with its rows; None: nothing does.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    counts_E: Tensor
    chosen_TK: Tensor
    chosen_E: Tensor
    logits_TE: Tensor
    mask_T: Tensor | None = None
    normalized: bool = True
    capacity: int | None = None
    identity_T: Tensor | None = None

    @property
    def num_tokens(self) -> Tensor | int:
        """Return the number of real tokens: an int without a mask, else a tensor on the device."""
        return self.ids_TK.shape[0] if self.mask_T is None else self.mask_T.sum()

    @property
    def num_experts(self) -> int:
        """Return E."""
        return self.scores_TE.shape[-1]


class RoutingFunction(Protocol):
    """A user's own routing: `RouterConfig(function=...)` calls it in place of `kind`.

    It gets logits in fp32 or more with masked rows zeroed and bad rows refused, and usually ends
    with `return assign(ids_TK, logits_TE, config, mask_T=mask_T)`. It must not communicate.
    """

    def __call__(
        self,
        logits_TE: Tensor,
        config: RouterConfig,
        *,
        bias_E: Tensor | None,
        mask_T: Tensor | None,
        token_ids_T: Tensor | None,
        generator: torch.Generator | None,
    ) -> Assignment:
        """Return where each token goes."""
        ...


def assign(
    ids_TK: Tensor,
    logits_TE: Tensor,
    config: RouterConfig,
    *,
    mask_T: Tensor | None = None,
    steered_TE: Tensor | None = None,
    scores_TE: Tensor | None = None,
    placed_TK: Tensor | None = None,
) -> Assignment:
    """Return the assignment of given choices: weights from unbiased scores, capacity, counts.

    Args:
        ids_TK: int64, the chosen experts, -1 for none.
        logits_TE: the router's logits.
        config: the router.
        mask_T: True where a token is real.
        steered_TE: logits with noise and expert dropout, if they differ; scores come from these.
        scores_TE: scores of steered_TE, if they are there already.
        placed_TK: the choices that found a place before; None: capacity decides now.
    """
    with full_precision(logits_TE.device):
        logits_TE = promote(logits_TE, config.dtype)
        steered_TE = logits_TE if steered_TE is None else steered_TE
        if scores_TE is None:
            scores_TE = compute_scores(steered_TE, config.score)
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
            scores_TE = torch.where(mask_T.unsqueeze(-1), scores_TE, 0.0)
        weights_TK = choice_weights(ids_TK, steered_TE, scores_TE, config)
        chosen_E = count_experts(ids_TK, config.num_experts)
        chosen_TK, counts_E, capacity = ids_TK, chosen_E, None
        if config.capacity_factor is not None and config.kind != "expert_choice":
            if placed_TK is None:
                ids_TK = drop_over_capacity(ids_TK, weights_TK, config, mask_T=mask_T)
            else:
                ids_TK = placed_TK
            weights_TK = torch.where(ids_TK >= 0, weights_TK, 0.0)
            counts_E = count_experts(ids_TK, config.num_experts)
            capacity = capacity_bound(ids_TK.shape[0], config)
    return Assignment(
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        scores_TE=scores_TE,
        counts_E=counts_E,
        chosen_TK=chosen_TK,
        chosen_E=chosen_E,
        logits_TE=logits_TE,
        mask_T=mask_T,
        normalized=config.score != "sigmoid",
        capacity=capacity,
    )


def choice_weights(
    ids_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, config: RouterConfig
) -> Tensor:
    """Return weights_TK of the chosen experts: gathered without any bias, normalised, then scaled.

    Gathering before any bias is added matters: (score + bias) - bias loses a small score (C04).

    Args:
        ids_TK: -1 gets weight 0 and counts in no sum.
        logits_TE, scores_TE: fp32 or fp64.
        config: the router.
    """
    taken_TK = ids_TK >= 0
    index_TK = ids_TK.clamp_min(0)
    if config.score == "softmax_topk":
        # The lowest finite number, not -inf: a row without any choice must give 0, not NaN.
        lowest = torch.finfo(logits_TE.dtype).min
        chosen_TK = logits_TE.gather(-1, index_TK).masked_fill(~taken_TK, lowest)
        weights_TK = torch.where(taken_TK, torch.softmax(chosen_TK, dim=-1), 0.0)
    else:
        weights_TK = torch.where(taken_TK, scores_TE.gather(-1, index_TK), 0.0)
        if config.normalize:
            sum_T1 = weights_TK.sum(dim=-1, keepdim=True)
            if config.eps_use == "add":
                weights_TK = weights_TK / (sum_T1 + config.normalize_eps)
            else:
                weights_TK = weights_TK / sum_T1.clamp_min(config.normalize_eps)
    return weights_TK if config.scale == 1.0 else weights_TK * config.scale
