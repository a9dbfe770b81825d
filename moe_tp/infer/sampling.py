"""Which token comes next: the likeliest, or one drawn by a number that the layout cannot change.

Letters: B rows · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from moe_tp.errors import ConfigError
from moe_tp.parallel.collectives import Group, raw_all_gather, raw_all_reduce
from moe_tp.parallel.random import hash_bits, key_of


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number, one of numpy's included, and not below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= least


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen from its logits.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest; 0 for all.
        top_p: draw among the fewest likeliest whose probabilities reach p (arXiv:1904.09751).
        seed: of the draws, which depend on it, the row and the number of the new token alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            raise ConfigError(
                f"temperature={self.temperature} must be 0 (the likeliest token) or above"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]; 1 draws among all tokens")
        if not is_whole(self.top_k, 0):
            raise ConfigError(f"top_k={self.top_k} must be a whole number, 0 (all tokens) or above")


def gather_logits(part_BV: torch.Tensor, group: Group, vocab_size: int) -> torch.Tensor:
    """Return `[B, V]` on every rank, from each rank's part of the vocabulary.

    Collectives: all-gather over `group`.
    """
    return raw_all_gather(part_BV, group, 1)[:, :vocab_size]


def likeliest(part_BV: torch.Tensor, group: Group, vocab_size: int) -> torch.Tensor:
    """Return int64 `[B]`, the lowest id among the likeliest; -1 where the logits are not finite.

    Args:
        part_BV: this rank's part of the vocabulary, padded at its end.
        group: the ranks that share the vocabulary.
        vocab_size: V without padding.

    Collectives: all-gather of two numbers a row over `group`.
    """
    width = part_BV.shape[1]
    start = group.rank * width
    real = max(0, min(width, vocab_size - start))
    if real == 0:
        top_B = part_BV.new_full(part_BV.shape[:1], -torch.inf)
        id_B = torch.zeros_like(top_B, dtype=torch.int64)
    else:
        top_B, id_B = part_BV[:, :real].max(dim=-1)
    if group.size > 1:
        pair_B2 = torch.stack([top_B.to(torch.float64), (id_B + start).to(torch.float64)], dim=-1)
        pair_GB2 = raw_all_gather(pair_B2[None], group)
        best_B = pair_GB2[..., 0].argmax(0, keepdim=True)
        pair_B2 = pair_GB2.gather(0, best_B[..., None].expand(-1, -1, 2))[0]
        top_B, id_B = pair_B2[:, 0], pair_B2[:, 1].to(torch.int64)
    return torch.where(torch.isfinite(top_B), id_B, -1)


def draw(
    logits_BV: torch.Tensor, sampling: Sampling, row_B: torch.Tensor, number: int
) -> torch.Tensor:
    """Return int64 `[B]`, one drawn token a row; -1 where the logits are not finite.

    A uniform number, hashed from seed, row and `number`, is looked up in the cumulated
    probabilities in the order of the vocabulary: another layout's rounding moves a border by its
    own size and no more.

    Args:
        logits_BV: the whole vocabulary.
        sampling: with a temperature above 0.
        row_B: number of each row in the batch of all ranks.
        number: of the new token, from 0.
    """
    logits_BV = logits_BV.to(torch.float64)
    top_B1 = logits_BV.amax(-1, keepdim=True)
    finite_B = torch.isfinite(top_B1[:, 0])
    # from the top down: a temperature near 0 takes the others to -inf, and not the top to inf
    logits_BV = torch.where(finite_B[:, None], logits_BV - top_B1, 0.0) / sampling.temperature
    words = logits_BV.shape[1]
    if 0 < sampling.top_k < words:
        least_B1 = torch.topk(logits_BV, sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    p_BV = logits_BV.softmax(-1)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = torch.sort(p_BV, dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        out_BV = torch.zeros_like(p_BV, dtype=torch.bool)
        out_BV.scatter_(1, order_BV, before_BV >= sampling.top_p)
        p_BV = p_BV.masked_fill(out_BV, 0.0)
    sums_BV = p_BV.cumsum(-1)
    key = key_of(sampling.seed, "generate", number)
    bits_B = hash_bits(key, row_B.to(torch.int64)) & ((1 << 53) - 1)
    uniform_B = bits_B.to(torch.float64) / (1 << 53)
    target_B1 = (uniform_B.to(sums_BV.device) * sums_BV[:, -1])[:, None]
    id_B = torch.searchsorted(sums_BV, target_B1, right=True)[:, 0]
    # rounding may leave the target at the very end: the last token that can be drawn
    last_B = words - 1 - (p_BV > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.where(finite_B, torch.minimum(id_B, last_B), -1)


def choose(
    part_BV: torch.Tensor | None,
    sampling: Sampling,
    *,
    row_B: torch.Tensor,
    number: int,
    vocab_size: int,
    tp: Group,
    pp: Group,
) -> torch.Tensor:
    """Return int64 `[B]`, the next token of each row, the same on all ranks that share the batch.

    Args:
        part_BV: this rank's part of the logits; None on pipeline ranks without the head.
        sampling: how.
        row_B: number of each row in the batch of all ranks.
        number: of the new token, from 0.
        vocab_size: V.
        tp, pp: the ranks that share the vocabulary, and the pipeline.

    Collectives: over tp an all-gather of two numbers a row, or of the logits and an all-reduce of a
        number a row where tokens are drawn; over pp an all-reduce of a number a row.
    """
    if part_BV is None:
        id_B = torch.zeros_like(row_B)
    elif sampling.temperature == 0.0:
        id_B = likeliest(part_BV, tp, vocab_size)
    else:
        id_B = draw(gather_logits(part_BV, tp, vocab_size), sampling, row_B, number)
        # sums of floats may differ by a bit between devices: the first rank's word counts
        id_B = raw_all_reduce(id_B if tp.rank == 0 else torch.zeros_like(id_B), tp)
    return raw_all_reduce(id_B, pp)
