"""Attention of the reference: scores, an explicit mask, an explicit softmax; no fused kernel.

Letters: B batch · S sequence · D width · H heads · G key/value heads · h head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from moe_tp.verify.family import Rope, yarn_mscale

__all__ = ["attend", "documents", "rms_norm", "rotation", "turn", "visible"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) times the weight (arXiv:1910.07467)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def documents(position_BS: torch.Tensor) -> torch.Tensor:
    """Return the number of the packed document each position belongs to, `[B, S]` from 0.

    A document starts wherever a position does not follow on its predecessor.
    """
    starts_BS = torch.zeros_like(position_BS)
    if position_BS.shape[1] > 1:
        starts_BS[:, 1:] = (position_BS[:, 1:] != position_BS[:, :-1] + 1).to(position_BS.dtype)
    return starts_BS.cumsum(1)


def visible(position_BS: torch.Tensor, real_BS: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return `[B, S, S]`, True where query i sees key j.

    That is: a real key, not later, of the same document, within the window.

    Every query sees itself, so that a padding row has a finite softmax.
    """
    length = position_BS.shape[1]
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    near_SS = j <= i
    if window is not None:
        near_SS = near_SS & (i - j < window)
    document_BS = documents(position_BS)
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    seen_BSS = near_SS & same_BSS & real_BS[:, None, :]
    return seen_BSS | (i == j)


def rotation(rope: Rope, position_BS: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return cos and sin `[B, S, dim / 2]` of each pair's angle, times YaRN's magnitude.

    Angles are fp32 whatever the model's dtype, as the published code computes them.
    """
    speed_n, magnitude = _speeds(rope)
    angle_BSn = position_BS[..., None].float() * speed_n
    return (angle_BSn.cos() * magnitude).to(dtype), (angle_BSn.sin() * magnitude).to(dtype)


def _speeds(rope: Rope) -> tuple[torch.Tensor, float]:
    """Return each pair's angle per position and the magnitude of the turned features."""
    length_n = rope.base ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    plain_n = 1.0 / length_n
    if rope.kind == "default":
        return plain_n, 1.0
    settings = rope.settings
    if rope.kind == "linear":
        return plain_n / float(settings["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(plain_n, settings), 1.0
    original = float(settings["original_max_position_embeddings"])
    factor = float(settings.get("factor") or rope.max_positions / original)
    magnitude = settings.get("attention_factor")
    if magnitude is None:
        part, whole = settings.get("mscale"), settings.get("mscale_all_dim")
        if part and whole:
            magnitude = yarn_mscale(factor, part) / yarn_mscale(factor, whole)
        else:
            magnitude = yarn_mscale(factor, 1.0)

    def pair_that_turns(times: float) -> float:
        """Return which pair turns `times` times in the original context (arXiv:2309.00071, 3.2)."""
        wavelength = original / (times * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.base))

    low = pair_that_turns(settings.get("beta_fast") or 32)
    high = pair_that_turns(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = (high - low) or 0.001
    fast_n = 1 - ((torch.arange(rope.dim // 2).float() - low) / span).clamp(0, 1)
    stretched_n = 1.0 / (factor * length_n)
    return stretched_n * (1 - fast_n) + plain_n * fast_n, float(magnitude)


def _llama3(plain_n: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Return speeds with slow pairs slowed by the factor and those between blended (2407.21783)."""
    turns_n = float(settings["original_max_position_embeddings"]) * plain_n / (2 * math.pi)
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    keep_n = ((turns_n - low) / (high - low)).clamp(0, 1)
    return plain_n * keep_n + plain_n / float(settings["factor"]) * (1 - keep_n)


def turn(
    x_BSHh: torch.Tensor, rope: Rope, cos_BSn: torch.Tensor, sin_BSn: torch.Tensor
) -> torch.Tensor:
    """Return heads with the leading `rope.dim` features turned; the order inside a head may change.

    Interleaved pairs come out with all first members in front, for queries and keys alike.
    """
    part, rest = x_BSHh[..., : rope.dim], x_BSHh[..., rope.dim :]
    if rope.interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part.chunk(2, dim=-1)
    cos, sin = cos_BSn[:, :, None], sin_BSn[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attend(
    q_BSHh: torch.Tensor,
    k_BSGh: torch.Tensor,
    v_BSGh: torch.Tensor,
    seen_BSS: torch.Tensor,
    scale: float,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return `[B, S, H, h]`: each query's average of the values it sees.

    Args:
        q_BSHh: queries.
        k_BSGh: keys; a group of H / G query heads shares one.
        v_BSGh: values.
        seen_BSS: which key each query sees.
        scale: factor on the scores.
        sink_H: a score per head that takes its share of the softmax and has no value (GPT-OSS).
    """
    repeat = q_BSHh.shape[2] // k_BSGh.shape[2]
    k_BSHh = k_BSGh.repeat_interleave(repeat, dim=2)
    v_BSHh = v_BSGh.repeat_interleave(repeat, dim=2)
    score_BHSS = torch.einsum("bihd,bjhd->bhij", q_BSHh, k_BSHh) * scale
    score_BHSS = score_BHSS.masked_fill(~seen_BSS[:, None], float("-inf"))
    if sink_H is not None:
        sink = sink_H.view(1, -1, 1, 1).expand(*score_BHSS.shape[:3], 1)
        share_BHSS = torch.cat([score_BHSS, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        share_BHSS = score_BHSS.softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", share_BHSS, v_BSHh)
