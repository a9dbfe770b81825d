"""Balance losses and the z-loss, without coefficients, as sums that ranks can add up (L2).

Every balance loss here is E * sum_e f_e P_e with f_e the share of the choices that went to expert e
and P_e the mean probability of e: 1.0 at perfect balance for any E and K (transformers' form, kept
under its own name, is K there: multiply a transformers coefficient by K to use it here).

Counts are integers without gradient, so they may be summed over ranks first; then each rank's value
is its own tokens' part, the parts add up to the global value, and their gradients to its gradient.

T tokens on this rank · E experts · K choices · S sequences
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_tp.errors import ConfigError
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.config import BalanceKind
from moe_tp.routing.masks import as_mask
from moe_tp.routing.scores import full_precision, promote
from moe_tp.routing.select import count_experts, stable_top_k

__all__ = ["load_balance_loss", "pooled_load_balance_loss", "sequence_counts", "z_loss"]


def load_balance_loss(
    assignment: Assignment,
    *,
    mask_T: Tensor | None = None,
    kind: BalanceKind = "micro_batch",
    counts_E: Tensor | None = None,
    num_tokens: Tensor | int | None = None,
    sequence_T: Tensor | None = None,
    num_sequences: Tensor | int | None = None,
) -> Tensor:
    """Return the load-balance loss as a scalar in fp32 or more; 0 (with a graph) without tokens.

    `micro_batch`: f and P over the union of the ranks' tokens (Fedus et al., arXiv 2101.03961, eq.
    4-6, with K choices).

    `global_batch`: f over the whole optimiser step (Qiu et al., arXiv 2501.11873). Pass
    `num_tokens` of the step, so that the parts of its micro-batches add up, and `counts_E`: of the
    whole step (exact: then equal to one batch with all tokens), or of the step so far, this
    micro-batch included (an estimate, exact in the last micro-batch only).

    `sequence`: the mean over sequences of each one's loss (DeepSeek-V3, arXiv 2412.19437, eq.
    17-20). Scores that do not sum to 1 are normalised per token first (eq. 19), in every kind.

    Args:
        assignment: from `route`; choices before any capacity drop count.
        mask_T: bool, narrows the assignment's own mask.
        kind: see above.
        counts_E: choices per expert, already summed over ranks; `[S, E]` for `sequence`. None: the
            tokens here are all there are.
        num_tokens: tokens that P is a mean over, already summed; `[S]` for `sequence`.
        sequence_T: int64, the sequence of each token; any numbers, or rows of `counts_E` if given.
        num_sequences: sequences that the mean is over, already summed over data-parallel ranks.
    """
    with full_precision(assignment.scores_TE.device):
        chosen_TK, mask_T = _narrow(assignment, mask_T)
        prob_TE = _probabilities(assignment)
        if mask_T is not None:
            prob_TE = torch.where(mask_T.unsqueeze(-1), prob_TE, 0.0)
        if kind == "sequence":
            return _sequence_loss(
                prob_TE, chosen_TK, mask_T, counts_E, num_tokens, sequence_T, num_sequences
            )
        if kind not in ("micro_batch", "global_batch"):
            raise ConfigError(
                f"kind={kind!r} is no load-balance loss; choose 'micro_batch', 'global_batch' or "
                "'sequence'"
            )
        if counts_E is None:
            counts_E = count_experts(chosen_TK, assignment.num_experts)
        if num_tokens is None:
            num_tokens = prob_TE.shape[0] if mask_T is None else mask_T.sum()
        share_E = _share(counts_E, prob_TE.dtype)
        return (
            (prob_TE.sum(dim=0) * share_E).sum()
            * assignment.num_experts
            / _at_least_one(num_tokens)
        )


def sequence_counts(
    assignment: Assignment, sequence_T: Tensor, num_sequences: int, *, mask_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return counts_SE and tokens_S, int64, to sum over the ranks that share sequences.

    Args:
        assignment: from `route`.
        sequence_T: int64 in [0, S).
        num_sequences: S.
        mask_T: bool, narrows the assignment's own mask.
    """
    chosen_TK, mask_T = _narrow(assignment, mask_T)
    return _count_by_sequence(chosen_TK, mask_T, sequence_T, num_sequences, assignment.num_experts)


def z_loss(
    logits_TE: Tensor, *, mask_T: Tensor | None = None, num_tokens: Tensor | int | None = None
) -> Tensor:
    """Return the mean over tokens of the squared log-sum-exp of the logits; 0 without tokens.

    Zoph et al., arXiv 2202.08906, eq. 5.

    Args:
        logits_TE: raw logits, any floating dtype.
        mask_T: bool, True where a token is real.
        num_tokens: already summed total; None: the tokens here. With it the parts of ranks add up.
    """
    with full_precision(logits_TE.device):
        logits_TE = promote(logits_TE)
        if mask_T is not None:
            mask_T = as_mask(mask_T)
            logits_TE = torch.where(mask_T.unsqueeze(-1), logits_TE, 0.0)
        square_T = torch.logsumexp(logits_TE, dim=-1).square()
        if mask_T is not None:
            square_T = torch.where(mask_T, square_T, 0.0)
        if num_tokens is None:
            num_tokens = square_T.shape[0] if mask_T is None else mask_T.sum()
        return square_T.sum() / _at_least_one(num_tokens)


def pooled_load_balance_loss(
    logits_LTE: Sequence[Tensor],
    top_k: int,
    *,
    mask_T: Tensor | None = None,
    counts_E: Tensor | None = None,
    num_tokens: Tensor | int | None = None,
) -> Tensor:
    """Return transformers' auxiliary loss: all layers pooled as one, K at balance (L5).

    A layer that always uses expert 0 is hidden by one that always uses expert 1; use
    `load_balance_loss` layer by layer to train, and this one to compare.

    Args:
        logits_LTE: raw logits of each layer.
        top_k: K.
        mask_T: bool, True where a token is real, the same in every layer.
        counts_E: choices summed over layers and ranks; None: from these logits.
        num_tokens: tokens times layers, summed over ranks; None: from these logits.
    """
    if not logits_LTE:
        raise ConfigError("pooled_load_balance_loss got no layer; pass each layer's router logits")
    with full_precision(logits_LTE[0].device):
        logits_NE = torch.cat([promote(layer_TE) for layer_TE in logits_LTE])
        mask_N = None if mask_T is None else as_mask(mask_T).repeat(len(logits_LTE))
        if mask_N is not None:
            logits_NE = torch.where(mask_N.unsqueeze(-1), logits_NE, 0.0)
        prob_NE = torch.softmax(logits_NE, dim=-1)
        ids_NK = stable_top_k(logits_NE.detach(), top_k)
        if mask_N is not None:
            prob_NE = torch.where(mask_N.unsqueeze(-1), prob_NE, 0.0)
            ids_NK = ids_NK.masked_fill(~mask_N.unsqueeze(-1), -1)
        experts = logits_NE.shape[-1]
        if counts_E is None:
            counts_E = count_experts(ids_NK, experts)
        if num_tokens is None:
            num_tokens = logits_NE.shape[0] if mask_N is None else mask_N.sum()
        share_E = _share(counts_E, prob_NE.dtype) * top_k
        return (prob_NE.sum(dim=0) * share_E).sum() * experts / _at_least_one(num_tokens)


def _narrow(assignment: Assignment, mask_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the choices and the mask of the tokens that count."""
    if mask_T is None:
        return assignment.chosen_TK, assignment.mask_T
    mask_T = as_mask(mask_T)
    chosen_TK = assignment.chosen_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
    return chosen_TK, mask_T if assignment.mask_T is None else mask_T & assignment.mask_T


def _probabilities(assignment: Assignment) -> Tensor:
    """Return scores whose real rows sum to 1, at any scale of the scores (C16)."""
    scores_TE = assignment.scores_TE
    if assignment.normalized:
        return scores_TE
    # A floor, not an epsilon that is added: a router can learn to shrink below an epsilon, which
    # makes the loss vanish.
    tiny = torch.finfo(scores_TE.dtype).tiny
    return scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp_min(tiny)


def _at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def _share(counts_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each expert's share of the choices along the last dim; all 0 where there is none."""
    counts_E = counts_E.detach()
    return counts_E.to(dtype) / counts_E.sum(dim=-1, keepdim=True).clamp_min(1).to(dtype)


def _count_by_sequence(
    chosen_TK: Tensor, mask_T: Tensor | None, sequence_T: Tensor, sequences: int, experts: int
) -> tuple[Tensor, Tensor]:
    cell_TK = torch.where(chosen_TK >= 0, sequence_T.unsqueeze(-1) * experts + chosen_TK, -1)
    counts_SE = count_experts(cell_TK, sequences * experts).view(sequences, experts)
    real_T = sequence_T if mask_T is None else sequence_T.masked_fill(~mask_T, -1)
    return counts_SE, count_experts(real_T, sequences)


def _dense_numbers(sequence_T: Tensor) -> Tensor:
    """Return 0, 1, ... for the different numbers in ascending order, without synchronisation."""
    sorted_T, order_T = torch.sort(sequence_T, stable=True)
    step_T = torch.zeros_like(sorted_T)
    step_T[1:] = (sorted_T[1:] != sorted_T[:-1]).to(step_T.dtype)
    return torch.empty_like(sorted_T).scatter_(0, order_T, step_T.cumsum(0))


def _sequence_loss(
    prob_TE: Tensor,
    chosen_TK: Tensor,
    mask_T: Tensor | None,
    counts_SE: Tensor | None,
    tokens_S: Tensor | int | None,
    sequence_T: Tensor | None,
    num_sequences: Tensor | int | None,
) -> Tensor:
    if sequence_T is None:
        raise ConfigError("kind='sequence' needs sequence_T, the sequence of each token")
    if (counts_SE is None) != (tokens_S is None):
        raise ConfigError("kind='sequence' needs counts_E [S, E] and num_tokens [S] together")
    rows, experts = prob_TE.shape
    if counts_SE is None:
        sequence_T = _dense_numbers(sequence_T)
        counts_SE, tokens_S = _count_by_sequence(chosen_TK, mask_T, sequence_T, rows, experts)
    if not isinstance(tokens_S, Tensor) or counts_SE.ndim != 2 or tokens_S.ndim != 1:
        raise ConfigError(
            "kind='sequence' takes counts_E of shape [S, E] and num_tokens of shape [S]"
        )
    if num_sequences is None:
        num_sequences = (tokens_S > 0).sum()
    weight_SE = _share(counts_SE, prob_TE.dtype) * experts / tokens_S.clamp_min(1).unsqueeze(-1)
    return (prob_TE * weight_SE[sequence_T]).sum() / _at_least_one(num_sequences)
