"""Sequence shares of all heads for whole sequences of some heads, and back.

DeepSpeed-Ulysses (arXiv:2309.14509, section 3): one all-to-all before and one after attention, so
that attention itself sees whole sequences and needs no change.
"""

from __future__ import annotations

import math

import torch

from moe_tp.errors import ConfigError
from moe_tp.parallel.collectives import Group, all_to_all
from moe_tp.parallel.context.sequence import order, share


def check_heads(num_heads: int, cp: int) -> None:
    """Refuse a head count that cannot be dealt to `cp` ranks.

    KV heads are repeated where needed (`kv_repeats`): a multiple of both the KV heads and cp, such
    as the number of query heads, is a multiple of what they are repeated to.

    Args:
        num_heads: query heads of this tensor-parallel rank.

    Raises:
        ConfigError: cp does not divide them.
    """
    if num_heads % cp:
        raise ConfigError(
            f"{num_heads} attention heads a tp rank do not divide by cp={cp}, which "
            f'cp_kind="ulysses" needs; choose cp among the divisors of {num_heads}, or '
            f'cp_kind="ring"'
        )


def kv_repeats(num_kv_heads: int, cp: int) -> int:
    """Return how often each KV head is repeated so that `cp` ranks get whole heads."""
    return cp // math.gcd(num_kv_heads, cp)


def to_heads(x_BHSd: torch.Tensor, group: Group) -> torch.Tensor:
    """Return whole sequences of this rank's share of the heads.

    Args:
        x_BHSd: `[B, H, S / cp, d]`, this rank's positions (see `sequence.share`) of all heads.
        group: the cp group; its size divides H.

    Returns:
        `[B, H / cp, S, d]` in the order of positions.

    Collectives: all-to-all over `group`; backward the reverse.
    """
    cp = group.size
    if cp == 1:
        return x_BHSd
    batch, heads, length, width = x_BHSd.shape
    sent = x_BHSd.reshape(batch, cp, heads // cp, length, width).transpose(0, 1)
    got = all_to_all(sent.contiguous(), [1] * cp, [1] * cp, group)
    whole = got.permute(1, 2, 0, 3, 4).reshape(batch, heads // cp, cp * length, width)
    return whole[:, :, order(cp * length, cp).to(whole.device)]


def to_sequence(x_BHSd: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's positions of all heads: the inverse of `to_heads`.

    Collectives: all-to-all over `group`; backward the reverse.
    """
    cp = group.size
    if cp == 1:
        return x_BHSd
    batch, heads, length, width = x_BHSd.shape
    laid = torch.cat([share(length, cp, rank) for rank in range(cp)]).to(x_BHSd.device)
    sent = x_BHSd[:, :, laid].reshape(batch, heads, cp, length // cp, width)
    got = all_to_all(sent.permute(2, 0, 1, 3, 4).contiguous(), [1] * cp, [1] * cp, group)
    return got.transpose(0, 1).reshape(batch, heads * cp, length // cp, width)
