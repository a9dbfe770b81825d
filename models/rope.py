"""Rotary position embedding and its stretched forms.

Letters: B batch · S sequence · H heads · h rotated elements of a head.

Frequencies and angles are fp32 whatever the model's dtype, as published checkpoints were trained
and as transformers computes them: at position 100000 another rounding would turn a fast pair by
more than a hundredth of a radian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moe_tp.models.config import AttentionConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return fp32 radians a position for each rotated pair of a head.

    Args:
        rope: the embedding.
        head_dim: elements of a head, rotated or not.
    """
    dim = rope.rotated(head_dim)
    power = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inverse = 1.0 / (rope.theta**power)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, rope.theta**power, dim)
    return inverse


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Stretch long wavelengths, keep short ones, and blend between (arXiv:2407.21783)."""
    assert rope.original_positions is not None
    turns = rope.original_positions * inverse / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(rope: RopeConfig, wavelength: torch.Tensor, dim: int) -> torch.Tensor:
    """Blend by a ramp over the dimensions (arXiv:2309.00071, section 3.2)."""
    assert rope.original_positions is not None

    def dimension(rotations: float) -> float:
        span = rope.original_positions or 1
        return dim * math.log(span / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    keep = 1.0 - ramp
    return (1.0 / (rope.factor * wavelength)) * (1.0 - keep) + (1.0 / wavelength) * keep


def _temperature(factor: float, strength: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * strength * math.log(factor) + 1.0


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor on cos and sin, 1 but for yarn (arXiv:2309.00071, section 3.4)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _temperature(rope.factor, rope.mscale) / _temperature(
            rope.factor, rope.mscale_all_dim
        )
    return _temperature(rope.factor)


def score_scale(attention: AttentionConfig, rope: RopeConfig) -> float:
    """Return the factor on attention scores.

    Latent attention takes yarn's temperature here rather than in cos and sin, because only part of
    its heads is rotated (arXiv:2405.04434).
    """
    if attention.scale is not None:
        return attention.scale
    if attention.mla is None:
        return float(attention.head_dim**-0.5)
    scale = float(attention.mla.qk_dim**-0.5)
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= _temperature(rope.factor, rope.mscale_all_dim) ** 2
    return scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of a batch's positions, one a rotated pair.

    Args:
        cos_BSh, sin_BSh: fp32 or wider.
        interleaved: pairs are neighbours.
        turn_BS2h: minus sine and sine, for rotations without gradient of halves; see `at`.
    """

    cos_BSh: torch.Tensor
    sin_BSh: torch.Tensor
    interleaved: bool
    turn_BS2h: torch.Tensor | None = None

    def at(self, positions_B: torch.Tensor) -> Rotation:
        """Return the rotation of one column, whose rows are at these positions of the table.

        Args:
            positions_B: into dimension 1 of cosines and sines `[1, positions, h]`.
        """
        cos_B1h, sin_B1h = (
            table[0].index_select(0, positions_B)[:, None] for table in (self.cos_BSh, self.sin_BSh)
        )
        turn = None if self.interleaved else torch.stack([-sin_B1h, sin_B1h], dim=-2)
        return Rotation(
            cos_BSh=cos_B1h, sin_BSh=sin_B1h, interleaved=self.interleaved, turn_BS2h=turn
        )

    def _turn(self, x_BSHh: torch.Tensor, turn_BS2h: torch.Tensor) -> torch.Tensor:
        """Return whole heads rotated in a third of the calls: a product, and a product added."""
        halves = x_BSHh.unflatten(-1, (2, -1))
        turned = torch.addcmul(
            halves * self.cos_BSh[:, :, None, None], halves.flip(-2), turn_BS2h[:, :, None]
        )
        return turned.flatten(-2).to(x_BSHh.dtype)

    def __call__(self, x_BSHh: torch.Tensor) -> torch.Tensor:
        """Return the heads rotated by their positions; elements past the rotated ones pass."""
        half = self.cos_BSh.shape[-1]
        if self.turn_BS2h is not None and x_BSHh.shape[-1] == 2 * half:
            return self._turn(x_BSHh, self.turn_BS2h)
        cos, sin = self.cos_BSh[:, :, None, :], self.sin_BSh[:, :, None, :]
        turned, rest = x_BSHh[..., : 2 * half], x_BSHh[..., 2 * half :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        a, b = first * cos - second * sin, second * cos + first * sin
        # Interleaved pairs come out as halves: queries and keys alike, so that scores are the same.
        out = torch.cat([a, b], dim=-1).to(x_BSHh.dtype)
        return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out


def rotation(
    rope: RopeConfig, head_dim: int, positions_BS: torch.Tensor, dtype: torch.dtype
) -> Rotation:
    """Return the rotation of a batch.

    Args:
        rope: the embedding.
        head_dim: elements of a head (of its rotated part for latent attention).
        positions_BS: positions in their documents.
        dtype: of the heads; fp64 heads get fp64 factors of the same fp32 angles.
    """
    inverse = inverse_frequencies(rope, head_dim).to(positions_BS.device)
    angle = positions_BS[..., None].to(torch.float32) * inverse
    factor = attention_factor(rope)
    cos, sin = angle.cos(), angle.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    wide = torch.promote_types(dtype, torch.float32)
    return Rotation(cos_BSh=cos.to(wide), sin_BSh=sin.to(wide), interleaved=rope.interleaved)
