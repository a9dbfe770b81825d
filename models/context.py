"""Attention when the ranks of cp share each sequence.

Letters: B batch · S columns of a sequence that this rank holds · H query heads · G key and value
heads · h head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_tp.parallel.collectives import Group
from moe_tp.parallel.context.ring import ring_attention
from moe_tp.parallel.context.sequence import share
from moe_tp.parallel.context.ulysses import kv_repeats, to_heads, to_sequence
from moe_tp.parallel.layout import ContextKind

Whole = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    torch.Tensor,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSequences:
    """Which columns this rank holds, and what it must know of the others'.

    Args:
        group: the cp group.
        kind: how attention is exchanged.
        length: columns of the whole sequences, padding included.
        document: `[B, length]`, number of the document of each column; None is one a row.
        real: `[B, length]`, True where a token is no padding; None if all are.
        window: sliding window in tokens, 0 for none.
    """

    group: Group
    kind: ContextKind
    length: int
    document: torch.Tensor | None
    real: torch.Tensor | None
    window: int = 0

    def attend(
        self,
        q_BSHh: torch.Tensor,
        k_BSGh: torch.Tensor,
        v_BSGw: torch.Tensor,
        *,
        scale: float,
        mask: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
        whole: Whole,
    ) -> torch.Tensor:
        """Return `[B, S, H, w]` for this rank's columns.

        Args:
            q_BSHh, k_BSGh, v_BSGw: this rank's columns of its heads, G dividing H.
            scale: factor on the scores.
            mask: over whole sequences, for the head exchange.
            sinks_H: logits that join the softmax and take no value.
            whole: attention over whole sequences of (q, k, v, mask, sinks), for the head exchange.

        Collectives: all-to-alls over cp; with a ring, exchanges with the next rank.
        """
        q, k, v = (y.transpose(1, 2) for y in (q_BSHh, k_BSGh, v_BSGw))
        if self.kind == "ring":
            out, lse = ring_attention(q, k, v, self.ring_mask, self.group, scale=scale)
            if sinks_H is not None:
                share_of_keys = torch.sigmoid(lse - sinks_H.to(lse.dtype).view(1, -1, 1))
                out = out * share_of_keys[..., None].to(out.dtype)
            return out.transpose(1, 2)
        group = self.group
        repeats = kv_repeats(k.shape[1], group.size)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        q, k, v = (to_heads(y, group).transpose(1, 2) for y in (q, k, v))
        if sinks_H is not None:
            sinks_H = sinks_H.view(group.size, -1)[group.rank]
        out = whole(q, k, v, mask, sinks_H)
        return to_sequence(out.transpose(1, 2), group).transpose(1, 2)

    def ring_mask(self, rank: int) -> torch.Tensor:
        """Return `[B or 1, 1, S, S']`: which of a rank's columns this rank's columns look at."""
        size = self.group.size
        rows, columns = (share(self.length, size, r) for r in (self.group.rank, rank))
        if self.document is not None:
            rows, columns = rows.to(self.document.device), columns.to(self.document.device)
        elif self.real is not None:
            rows, columns = rows.to(self.real.device), columns.to(self.real.device)
        seen = (rows[:, None] >= columns[None, :])[None]
        if self.window:
            seen = seen & (rows[:, None] - columns[None, :] < self.window)
        if self.document is not None:
            seen = seen & (
                self.document[:, rows][:, :, None] == self.document[:, columns][:, None, :]
            )
        if self.real is not None:
            seen = seen & self.real[:, columns][:, None, :]
            seen = seen | (rows[:, None] == columns[None, :])
        return seen[:, None]
