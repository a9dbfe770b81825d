"""Attention over columns that were computed before.

Letters: B batch · S new columns · L columns in all · H query heads and G key and value heads of
this rank · h head size · w value head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from moe_tp.parallel.collectives import accumulate_dtype


class LayerCache(Protocol):
    """What a layer's attention keeps of earlier columns; `moe_tp.infer.cache` holds them."""

    @property
    def columns(self) -> int:
        """Columns before this call; 0 in the first."""
        ...

    def extend(self, *new_BSGh: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the new columns may look at, themselves last, as `[B, G, L, h]` each.

        Args:
            new_BSGh: new columns of each kept tensor, in the same order in every call.
        """
        ...


def attend_cached(
    q_BSHh: torch.Tensor,
    k_BGLh: torch.Tensor,
    v_BGLw: torch.Tensor,
    *,
    scale: float,
    mask_BSL: torch.Tensor | None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `[B, S, H, w]`, each new query's weighted sum of values.

    The query heads that share a key head become rows of one product, so that no key is copied.

    Args:
        q_BSHh: rotated queries of the new columns.
        k_BGLh, v_BGLw: keys and values of all columns that may be seen; G divides H.
        scale: factor on the scores.
        mask_BSL: `[B, 1, S, L]`, True where a query may look at a key; None: at all of them.
        sinks_H: logits that join the softmax and take no value.
    """
    batch, length, heads, size = q_BSHh.shape
    groups = k_BGLh.shape[1]
    run = heads // groups
    if q_BSHh.numel() == 0:
        return q_BSHh.new_zeros(batch, length, heads, v_BGLw.shape[-1])
    q = q_BSHh.view(batch, length, groups, run, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, run * length, size)
    if mask_BSL is not None and length > 1:
        mask_BSL = mask_BSL.repeat(1, 1, run, 1)
    if sinks_H is None:
        out = F.scaled_dot_product_attention(q, k_BGLh, v_BGLw, attn_mask=mask_BSL, scale=scale)
    else:
        scores = (q @ k_BGLh.transpose(-1, -2)).to(accumulate_dtype(q.dtype)) * scale
        if mask_BSL is not None:
            scores = scores.masked_fill(~mask_BSL, -torch.inf)
        sink = sinks_H.to(scores.dtype).view(1, groups, run, 1, 1)
        sink = sink.expand(batch, groups, run, length, 1).reshape(batch, groups, run * length, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        out = weights.to(v_BGLw.dtype) @ v_BGLw
    out = out.view(batch, groups, run, length, v_BGLw.shape[-1]).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, v_BGLw.shape[-1])
