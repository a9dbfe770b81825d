"""Random numbers that are a function of names and positions, never of the layout.

Every number is a hash of (key, counter), in the manner of counter-based generators (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011); the mixing function is the finaliser of
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). Only integer arithmetic and one final product are
used, so that a value has the same bits on every rank, shard shape and device.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_BLOCK = 1 << 18


def key_of(*parts: object) -> int:
    """Return a signed 64-bit key for a tuple of names and numbers."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _wrapped(value: int) -> int:
    """Return `value` as a signed 64-bit number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical right shift of int64."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def hash_bits(key: int | torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Return int64 with 64 well-mixed bits for each counter (wrapping arithmetic)."""
    return _mix(counter * _GOLDEN + key)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Return `z` mixed in place."""
    if z.device.type == "cpu":
        # numpy multiplies 64-bit integers several times faster, in the same memory.
        _mix_on_cpu(z.numpy().view(np.uint64))
        return z
    z ^= _shift(z, 30)
    z *= _MIX_1
    z ^= _shift(z, 27)
    z *= _MIX_2
    z ^= _shift(z, 31)
    return z


def _mix_on_cpu(z: npt.NDArray[np.uint64]) -> None:
    """Mix in place; the same bits as the tensor form."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1 % (1 << 64))
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2 % (1 << 64))
    z ^= z >> np.uint64(31)


_LANES = 0x0000FFFF0000FFFF  # two 16-bit numbers in the low halves of two 32-bit lanes


def hash_normal(key: int, counter: torch.Tensor) -> torch.Tensor:
    """Return float64 with mean 0 and variance 1 for each counter.

    The sum of twelve 16-bit uniforms (Irwin-Hall): normal to the eye up to 3 sigma, bounded by 6
    sigma, and exact in integers, which no logarithm is.
    """
    lanes = torch.zeros_like(counter)
    start = counter * _wrapped(3 * _GOLDEN) + key  # of the counters 3 c, 3 c + 1 and 3 c + 2
    for word in range(3):
        bits = _mix(start + _wrapped(word * _GOLDEN))
        lanes += bits.bitwise_and(_LANES)
        lanes += bits.bitwise_right_shift_(16).bitwise_and_(_LANES)
    total = lanes.bitwise_and(0xFFFFFFFF).add_(lanes.bitwise_right_shift_(32))
    return total.sub_(6 * 0xFFFF).to(torch.float64).mul_(1.0 / 65536)


def fill_normal(
    out: torch.Tensor, key: int, index: tuple[torch.Tensor, ...], shape: tuple[int, ...], std: float
) -> None:
    """Fill `out` with normal numbers that depend on the logical element only.

    Args:
        out: local tensor, filled in place.
        key: from the seed and the parameter's name.
        index: for each dimension, the logical index of each local element; -1 fills with 0.
        shape: logical global shape.
        std: standard deviation.
    """
    if out.numel() == 0:
        return
    if out.dim() > 1:
        lead, stride = index[0], 1
        for size in shape[1:]:
            stride *= size
        rest = index[-1].to(out.device)
        step = shape[-1]
        for dim in range(len(shape) - 2, 0, -1):
            block = index[dim].to(out.device)
            rest = (block[:, None] * step + rest[None, :]).flatten()
            step *= shape[dim]
    else:
        lead, stride = index[0], 1
        rest = torch.zeros(1, dtype=torch.int64, device=out.device)
    flat = out.view(out.shape[0], -1)
    rows = max(1, _BLOCK // max(1, flat.shape[1]))
    for start in range(0, flat.shape[0], rows):
        place = lead[start : start + rows].to(out.device)
        counter = place[:, None] * stride + rest[None, :]
        values = hash_normal(key, counter).mul_(std)
        values[place < 0] = 0.0
        flat[start : start + rows] = values.to(out.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """What the dropout mask of one site in one step depends on.

    Args:
        seed: seed of the run.
        step: optimiser step.
        layer: global layer number.
        site: which dropout of the layer.
        token_ids_T: identity of each token in the global batch, any int64 that is unique
            to it: sample of the global batch x 2^32 + position.
    """

    seed: int
    step: int
    layer: int
    site: str
    token_ids_T: torch.Tensor


def dropout(
    x_TD: torch.Tensor, p: float, key: DropoutKey, *, features: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x_TD` with each element zeroed with probability `p`, the rest scaled by 1/(1-p).

    Args:
        x_TD: activations of owned tokens.
        p: probability in [0, 1).
        key: makes the mask a function of token, layer, site, step and feature.
        features: global index of each column where the columns are a shard.
    """
    if p == 0.0:
        return x_TD
    base = key_of(key.seed, key.step, key.layer, key.site)
    token_T = hash_bits(base, key.token_ids_T.to(x_TD.device))
    if features is None:
        features = torch.arange(x_TD.shape[-1], device=x_TD.device)
    return drop_features(x_TD, p, token_T, features)


def drop_features(
    x_TD: torch.Tensor, p: float, key_T: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Return `x_TD` with elements dropped by a key for each row and the index of the column.

    Args:
        x_TD: activations.
        p: probability in [0, 1).
        key_T: well-mixed int64, from `hash_bits`.
        features: global index of each column.
    """
    draw = _shift(hash_bits(key_T[:, None], features[None, :]), 32)
    keep = draw >= int(p * (1 << 32))
    # where(), not a product: the factor stays exact in bf16, and one byte an element is saved.
    return torch.where(keep, x_TD * (1.0 / (1.0 - p)), x_TD.new_zeros(()))
