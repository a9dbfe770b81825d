"""Which positions of a sequence each rank of cp holds.

Causal work grows with the position, so each rank takes one chunk from the front and its mirror
image from the back (as in zigzag ring attention): every rank then has the same number of pairs.
"""

from __future__ import annotations

import torch


def padded_length(length: int, cp: int) -> int:
    """Return the sequence length with the padding that lets `cp` ranks share it."""
    if cp == 1:
        return length
    return -(-length // (2 * cp)) * 2 * cp


def share(length: int, cp: int, rank: int) -> torch.Tensor:
    """Return the positions `[length / cp]` that a rank holds, in rising order.

    Args:
        length: from `padded_length`.
        cp: ranks that share the sequence.
        rank: one of them.
    """
    if cp == 1:
        return torch.arange(length)
    chunk = length // (2 * cp)
    front = torch.arange(rank * chunk, (rank + 1) * chunk)
    back = torch.arange(length - (rank + 1) * chunk, length - rank * chunk)
    return torch.cat([front, back])


def order(length: int, cp: int) -> torch.Tensor:
    """Return for each position its place in the ranks' shares laid end to end."""
    laid = torch.cat([share(length, cp, rank) for rank in range(cp)])
    place = torch.empty_like(laid)
    place[laid] = torch.arange(length)
    return place
