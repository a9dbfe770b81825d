"""Routing and router losses of the reference, written out; slow on purpose.

Letters: T tokens · E experts · K choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_tp.verify.family import Gate

__all__ = [
    "Routing",
    "balance_loss",
    "choose",
    "flip_gap",
    "pooled_balance_loss",
    "sequence_balance_loss",
    "step_balance_loss",
    "z_loss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens of one batch go in one layer."""

    logits_TE: torch.Tensor
    choice_TE: torch.Tensor  # what chooses: scores, plus the correction bias where there is one
    own_ids_TK: torch.Tensor  # the reference's own choice, -1 for a padding token
    ids_TK: torch.Tensor  # what was computed: the own choice, or the one given
    weights_TK: torch.Tensor
    real_T: torch.Tensor


def choose(
    logits_TE: torch.Tensor,
    gate: Gate,
    bias_E: torch.Tensor | None,
    real_T: torch.Tensor,
    forced_TK: torch.Tensor | None,
) -> Routing:
    """Return the routing of a batch of tokens; the lowest expert wins a tie.

    Args:
        logits_TE: router scores.
        gate: the family's rules.
        bias_E: correction bias; chooses, never weighs.
        real_T: False where the token is padding; it goes nowhere.
        forced_TK: experts to compute instead of the own choice.
    """
    if gate.score == "softmax":
        score_TE = logits_TE.softmax(-1)
    elif gate.score == "sigmoid":
        score_TE = logits_TE.sigmoid()
    else:
        score_TE = logits_TE
    choice_TE = score_TE.detach() if bias_E is None else score_TE.detach() + bias_E
    allowed_TE = choice_TE.masked_fill(~_in_best_groups(choice_TE, gate), gate.dropped)
    own_TK = allowed_TE.sort(dim=-1, descending=True, stable=True).indices[:, : gate.top_k]
    ids_TK = own_TK if forced_TK is None else forced_TK
    picked_TK = score_TE.gather(1, ids_TK.clamp(min=0))
    weights_TK = picked_TK.softmax(-1) if gate.score == "softmax_topk" else picked_TK
    if gate.normalize and gate.score != "softmax_topk":
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + gate.floor)
    nowhere_TK = (~real_T)[:, None].expand_as(own_TK)
    return Routing(
        logits_TE=logits_TE,
        choice_TE=choice_TE,
        own_ids_TK=own_TK.masked_fill(nowhere_TK, -1),
        ids_TK=ids_TK.masked_fill(nowhere_TK, -1),
        weights_TK=weights_TK * gate.scale,
        real_T=real_T,
    )


def _in_best_groups(choice_TE: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return True for the experts of the groups that a token may choose from."""
    if gate.groups == 1:
        return torch.ones_like(choice_TE, dtype=torch.bool)
    score_TG = _group_scores(choice_TE, gate)
    best = score_TG.sort(dim=-1, descending=True, stable=True).indices[:, : gate.top_groups]
    chosen_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter(1, best, True)
    return chosen_TG.repeat_interleave(choice_TE.shape[1] // gate.groups, dim=1)


def _group_scores(choice_TE: torch.Tensor, gate: Gate) -> torch.Tensor:
    by_group = choice_TE.view(choice_TE.shape[0], gate.groups, -1)
    if gate.group_score == "max":
        return by_group.max(-1).values
    return by_group.sort(dim=-1, descending=True).values[..., :2].sum(-1)


def flip_gap(choice_E: torch.Tensor, gate: Gate, own: Sequence[int], other: Sequence[int]) -> float:
    """Return how far apart the scores are that another choice turns on, 0 for the same set.

    Where the two choices lie in different groups, the groups may be as close as the experts: the
    smaller distance counts.

    Args:
        choice_E: the scores that one token's choice was made by.
        gate: the family's rules.
        own: the experts chosen by these scores.
        other: the experts that the other side chose.
    """
    lost, won = sorted(set(own) - set(other)), sorted(set(other) - set(own))
    if not lost and not won:
        return 0.0
    if not lost or not won or min(won) < 0 or min(lost) < 0:
        return float("inf")
    # The choice is a swap of these sets: in the best pairing no pair is further apart than the
    # largest difference in rank order.
    high = choice_E[lost].sort().values
    low = choice_E[won].sort().values
    gap = float((high - low).abs().max())
    if gate.groups > 1:
        size = choice_E.shape[0] // gate.groups
        mine, theirs = {e // size for e in lost}, {e // size for e in won}
        if mine != theirs:
            score_G = _group_scores(choice_E[None], gate)[0]
            apart = [abs(float(score_G[a] - score_G[b])) for a in mine for b in theirs if a != b]
            gap = min(gap, min(apart))
    return gap


def balance_loss(layers: Sequence[Sequence[Routing]], gate: Gate) -> torch.Tensor:
    """Return the sum over layers of E * sum_e f_e P_e, 1 per layer at perfect balance.

    f_e is the share of choices that fell on e, P_e the mean score of e, both over all real tokens
    of the parts.

    Args:
        layers: for each MoE layer its parts (the same micro-batch on every rank).
        gate: the family's rules.
    """
    total = layers[0][0].logits_TE.new_zeros(())
    for parts in layers:
        share_E, mean_E, _ = _load(parts, gate)
        total = total + share_E.shape[0] * (share_E * mean_E).sum()
    return total


def pooled_balance_loss(layers: Sequence[Sequence[Routing]], gate: Gate) -> torch.Tensor:
    """Return transformers' load-balance loss: one mean over all layers, K at perfect balance.

    Args:
        layers: for each MoE layer its parts.
        gate: the family's rules.
    """
    shares, means = zip(*[_load(parts, gate)[:2] for parts in layers], strict=True)
    share_E, mean_E = torch.stack(shares).mean(0), torch.stack(means).mean(0)
    return gate.top_k * share_E.shape[0] * (share_E * mean_E).sum()


def sequence_balance_loss(
    layers: Sequence[Sequence[Routing]], sequences: Sequence[torch.Tensor], gate: Gate
) -> torch.Tensor:
    """Return the sum over layers of the mean over sequences of each one's balance loss.

    Args:
        layers: for each MoE layer its parts.
        sequences: for each part the number of each token's sequence, `[T]`; another part's
            sequences are others.
        gate: the family's rules.
    """
    total = layers[0][0].logits_TE.new_zeros(())
    for parts in layers:
        losses = []
        for part, sequence_T in zip(parts, sequences, strict=True):
            for number in sequence_T[part.real_T].unique().tolist():
                mine_T = part.real_T & (sequence_T == number)
                share_E, mean_E, _ = _load([replace(part, real_T=mine_T)], gate)
                losses.append(share_E.shape[0] * (share_E * mean_E).sum())
        if losses:
            total = total + torch.stack(losses).mean()
    return total


def step_balance_loss(
    steps: Sequence[Sequence[Sequence[Routing]]], gate: Gate, *, exact: bool
) -> torch.Tensor:
    """Return the sum over layers of the balance loss of a whole step.

    Scores are averaged over all tokens of the step. The share of the choices is that of the whole
    step, or for each micro-batch that of the step up to its end.

    Args:
        steps: for each micro-batch its layers, each with its parts.
        gate: the family's rules.
        exact: the whole step's choices.
    """
    total = steps[0][0][0].logits_TE.new_zeros(())
    for at in range(len(steps[0])):
        everything = [part for layers in steps for part in layers[at]]
        tokens = max(sum(int(part.real_T.sum()) for part in everything), 1)
        for m, layers in enumerate(steps):
            known = everything if exact else [p for earlier in steps[: m + 1] for p in earlier[at]]
            share_E = _load(known, gate)[0]
            _, mean_E, own = _load(layers[at], gate)
            total = total + share_E.shape[0] * (share_E * mean_E).sum() * own / tokens
    return total


def z_loss(layers: Sequence[Sequence[Routing]]) -> torch.Tensor:
    """Return the sum over layers of the mean squared log-sum-exp (arXiv:2202.08906, eq. 5).

    Args:
        layers: for each MoE layer its parts.
    """
    total = layers[0][0].logits_TE.new_zeros(())
    for parts in layers:
        square = torch.cat([p.logits_TE[p.real_T].logsumexp(-1).square() for p in parts])
        total = total + square.sum() / max(square.numel(), 1)
    return total


def _load(parts: Sequence[Routing], gate: Gate) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return each expert's share of the choices, its mean score, and the number of real tokens."""
    logits_TE = torch.cat([p.logits_TE[p.real_T] for p in parts])
    ids = torch.cat([p.ids_TK[p.real_T].reshape(-1) for p in parts])
    if gate.score == "sigmoid":
        score_TE = logits_TE.sigmoid()
        score_TE = score_TE / score_TE.sum(-1, keepdim=True)
    else:
        score_TE = logits_TE.softmax(-1)
    tokens = max(logits_TE.shape[0], 1)
    count_E = torch.bincount(ids, minlength=logits_TE.shape[1]).to(logits_TE.dtype)
    return count_E / (tokens * gate.top_k), score_TE.sum(0) / tokens, tokens
