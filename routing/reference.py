"""The slow and obvious form of everything here: loops over Python numbers, one token at a time.

The fast forms are tested against these. Nothing is shared with them but `RouterConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from moe_tp.routing.config import RouterConfig

__all__ = [
    "ReferenceAssignment",
    "reference_load_balance_loss",
    "reference_route",
    "reference_sequence_loss",
    "reference_z_loss",
]

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceAssignment:
    """Per token the (expert, weight) pairs that it keeps, and the ids chosen before drops."""

    chosen: list[list[int]]
    kept: list[list[tuple[int, float]]]
    scores: list[list[float]]
    counts: list[int]
    chosen_counts: list[int]


def reference_route(
    logits: Matrix,
    config: RouterConfig,
    *,
    bias: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    token_ids: Sequence[int] | None = None,
) -> ReferenceAssignment:
    """Return where each token goes, without noise.

    Args:
        logits: T rows of E numbers.
        config: the router; `random` is taken without a source of noise.
        bias: correction bias of each expert.
        mask: whether each token is real.
        token_ids: vocabulary ids, for `kind="hash"`.
    """
    real = [True] * len(logits) if mask is None else list(mask)
    scores = [
        _scores(row, config) if on else [0.0] * len(row)
        for row, on in zip(logits, real, strict=True)
    ]
    if config.kind == "expert_choice":
        chosen = _by_experts(scores, config, real)
    else:
        plan = _sinkhorn(logits, config, real) if config.kind == "sinkhorn" else None
        chosen, turn = [], 0
        for t, row in enumerate(logits):
            if not real[t]:
                chosen.append([])
                continue
            if config.kind == "balanced":
                picked = [(turn + j) % config.num_experts for j in range(config.top_k)]
                turn += config.top_k
            elif config.kind in ("hash", "random"):
                assert config.kind == "random" or token_ids is not None
                key = t if token_ids is None or config.kind == "random" else token_ids[t]
                picked = _best([_hash(key, e, config) for e in range(len(row))], config.top_k)
            elif plan is not None:
                picked = _best(plan[t], config.top_k)
            else:
                picked = _top_k(row, scores[t], config, bias)
            chosen.append(picked)
    weights = [_weights(ids, logits[t], scores[t], config) for t, ids in enumerate(chosen)]
    kept = [list(zip(ids, row, strict=True)) for ids, row in zip(chosen, weights, strict=True)]
    if config.capacity_factor is not None and config.kind != "expert_choice":
        kept = _drop(kept, config, sum(real))
    return ReferenceAssignment(
        chosen=chosen,
        kept=kept,
        scores=scores,
        counts=_count([[e for e, _ in row] for row in kept], config.num_experts),
        chosen_counts=_count(chosen, config.num_experts),
    )


def reference_load_balance_loss(
    scores: Matrix,
    chosen: Sequence[Sequence[int]],
    *,
    mask: Sequence[bool] | None = None,
    counts: Sequence[int] | None = None,
    num_tokens: int | None = None,
) -> float:
    """Return E * sum over experts of (share of the choices) * (mean probability).

    Args:
        scores: T rows of E, normalised here.
        chosen: ids per token.
        mask: whether each token is real.
        counts, num_tokens: totals over more tokens than these.
    """
    rows = [t for t in range(len(scores)) if mask is None or mask[t]]
    if not rows:
        return 0.0
    experts = len(scores[0])
    if counts is None:
        counts = _count([chosen[t] for t in rows], experts)
    tokens = len(rows) if num_tokens is None else num_tokens
    total, loss = sum(counts), 0.0
    for e in range(experts):
        mean = sum(scores[t][e] / sum(scores[t]) for t in rows) / tokens
        loss += experts * (counts[e] / total) * mean
    return loss


def reference_sequence_loss(
    scores: Matrix,
    chosen: Sequence[Sequence[int]],
    sequence: Sequence[int],
    *,
    mask: Sequence[bool] | None = None,
) -> float:
    """Return the mean over sequences of each one's load-balance loss.

    Args:
        scores, chosen, mask: as in `reference_load_balance_loss`.
        sequence: the sequence of each token.
    """
    real = [t for t in range(len(scores)) if mask is None or mask[t]]
    losses = []
    for s in sorted({sequence[t] for t in real}):
        mine = [t for t in real if sequence[t] == s]
        losses.append(
            reference_load_balance_loss([scores[t] for t in mine], [chosen[t] for t in mine])
        )
    return sum(losses) / len(losses) if losses else 0.0


def reference_z_loss(logits: Matrix, *, mask: Sequence[bool] | None = None) -> float:
    """Return the mean over tokens of the squared logarithm of the sum of exponentials.

    Args:
        logits: T rows of E numbers.
        mask: whether each token is real.
    """
    rows = [row for t, row in enumerate(logits) if mask is None or mask[t]]
    total = 0.0
    for row in rows:
        high = max(row)
        total += (high + math.log(sum(math.exp(x - high) for x in row))) ** 2
    return total / max(len(rows), 1)


def _softmax(row: Sequence[float]) -> list[float]:
    high = max(row)
    powers = [math.exp(x - high) for x in row]
    return [p / sum(powers) for p in powers]


def _scores(row: Sequence[float], config: RouterConfig) -> list[float]:
    if config.score == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    return _softmax(row)


def _best(values: Sequence[float], k: int) -> list[int]:
    """Return the k largest, largest first, the lowest index first among equals."""
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]


def _top_k(
    row: Sequence[float],
    scores: Sequence[float],
    config: RouterConfig,
    bias: Sequence[float] | None,
) -> list[int]:
    base = row if config.score == "softmax_topk" else scores
    choice = [x + (bias[e] if bias is not None else 0.0) for e, x in enumerate(base)]
    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    value = []
    for members in groups:
        best = sorted((choice[e] for e in members), reverse=True)
        value.append(best[0] if config.group_score == "max" else sum(best[:2]))
    open_groups = _best(value, config.top_groups)
    allowed = [e for g in sorted(open_groups) for e in groups[g]]
    return [allowed[i] for i in _best([choice[e] for e in allowed], config.top_k)]


def _weights(
    ids: Sequence[int], row: Sequence[float], scores: Sequence[float], config: RouterConfig
) -> list[float]:
    if not ids:
        return []
    if config.score == "softmax_topk":
        weights = _softmax([row[e] for e in ids])
    else:
        weights = [scores[e] for e in ids]
        if config.normalize:
            total = sum(weights)
            eps = config.normalize_eps
            divisor = total + eps if config.eps_use == "add" else max(total, eps)
            weights = [w / divisor for w in weights]
    return [w * config.scale for w in weights]


def _places(num_tokens: int, config: RouterConfig) -> int:
    factor = 1.0 if config.capacity_factor is None else config.capacity_factor
    exact = Fraction(str(factor)) * num_tokens * config.top_k / config.num_experts
    places = max(math.ceil(exact), config.min_capacity)
    return math.ceil(places / config.capacity_multiple) * config.capacity_multiple


def _drop(
    kept: list[list[tuple[int, float]]], config: RouterConfig, num_tokens: int
) -> list[list[tuple[int, float]]]:
    places = _places(num_tokens, config)
    queue = [(t, j) for t, row in enumerate(kept) for j in range(len(row))]
    if config.drop_policy == "position":
        queue.sort(key=lambda tj: (tj[1], tj[0]))
    else:
        queue.sort(key=lambda tj: (-kept[tj[0]][tj[1]][1], tj[0], tj[1]))
    used = [0] * config.num_experts
    stays = set()
    for t, j in queue:
        expert = kept[t][j][0]
        if used[expert] < places:
            used[expert] += 1
            stays.add((t, j))
    return [[pair for j, pair in enumerate(row) if (t, j) in stays] for t, row in enumerate(kept)]


def _by_experts(scores: Matrix, config: RouterConfig, real: Sequence[bool]) -> list[list[int]]:
    tokens = [t for t in range(len(scores)) if real[t]]
    chosen: list[list[int]] = [[] for _ in scores]
    for e in range(config.num_experts):
        ranked = sorted(tokens, key=lambda t: (-scores[t][e], t))
        for t in ranked[: _places(len(tokens), config)]:
            chosen[t].append(e)
    return chosen


def _sinkhorn(logits: Matrix, config: RouterConfig, real: Sequence[bool]) -> list[list[float]]:
    plan = [[math.exp(x) for x in row] if real[t] else [] for t, row in enumerate(logits)]
    rows = [t for t in range(len(logits)) if real[t]]
    experts = range(config.num_experts)
    for _ in range(config.sinkhorn_iterations):
        for e in experts:
            column = sum(plan[t][e] for t in rows)
            for t in rows:
                plan[t][e] *= len(rows) / config.num_experts / column
        for t in rows:
            total = sum(plan[t])
            plan[t] = [p / total for p in plan[t]]
    return plan


def _hash(key: int, expert: int, config: RouterConfig) -> int:
    """Return 40 bits of MurmurHash3's finaliser over (seed, key, expert)."""
    golden, word = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = ((x ^ (x >> 33)) * factor) & word
        return x ^ (x >> 33)

    seeded = mix((key * 2 + 1 + config.seed * golden) & word)
    return mix((seeded + expert * golden) & word) & ((1 << 40) - 1)


def _count(rows: Sequence[Sequence[int]], experts: int) -> list[int]:
    return [sum(1 for ids in rows for e in ids if e == expert) for expert in range(experts)]
