"""Grouped-query attention with heads split over tp and the sequence gathered and scattered inside.

Letters: B batch · S sequence · T owned tokens · N tokens of the tp group · D width · H query heads
and G key and value heads of this rank · h head size · w value head size.

The block hands in owned tokens `[T, D]`; one gather serves queries, keys and values; this rank's
heads attend over whole sequences; the output product leaves each owner its summed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from moe_tp.models.cache import LayerCache, attend_cached
from moe_tp.models.config import ModelConfig
from moe_tp.models.context import SharedSequences
from moe_tp.models.heads import FullWidthNorm, HeadLinear, Sinks, share_heads
from moe_tp.models.rope import Rotation, score_scale
from moe_tp.parallel.collectives import accumulate_dtype
from moe_tp.parallel.linear import RowParallelLinear, gather_linear
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import DropoutKey, dropout
from moe_tp.parallel.sequence import RMSNorm
from moe_tp.parallel.spec import Init
from moe_tp.parallel.whole import sharers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """What attention must know of the batch, alike on all ranks that share it.

    Args:
        batch, length: B and S.
        rotation: of the positions.
        mask_BSS: True where a query (row) may look at a key, `[B or 1, 1, S, S]`; None is causal
            over whole rows. With columns in the cache `[B, 1, S, L]`, and None is all of them.
        dropout_key: identity of this layer's attention dropout with one id a query, B*S of them;
            None outside training.
        context: how the ranks of cp share the sequences; S is then this rank's share, and the mask
            speaks of whole sequences. None where each rank has them whole.
        cache: keys and values of earlier columns, which these join; None outside generation.
        whole: every rank of tp holds all tokens, see `moe_tp.parallel.whole`.
    """

    batch: int
    length: int
    rotation: Rotation
    mask_BSS: torch.Tensor | None = None
    dropout_key: DropoutKey | None = None
    context: SharedSequences | None = None
    cache: LayerCache | None = None
    whole: bool = False


class Attention(nn.Module):
    """Grouped-query attention of one layer (arXiv:2305.13245).

    Args:
        config: the model.
        mesh: the mesh.
        dtype: parameter dtype.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, *, dtype: torch.dtype) -> None:
        super().__init__()
        a = self.config = config.attention
        self.mesh = mesh
        self.share = share_heads(a.num_heads, a.num_kv_heads, mesh)
        self.scale = score_scale(a, config.rope)
        init, share = Init(value=config.init_std), self.share
        part = None if share.split_kv else (share.first_kv, share.first_kv + share.num_kv)

        def heads(count: int, part: tuple[int, int] | None) -> HeadLinear:
            return HeadLinear(
                config.dim,
                count,
                a.head_dim,
                mesh,
                dtype=dtype,
                bias=a.qkv_bias,
                init=init,
                part=part,
            )

        self.q = heads(a.num_heads, None)
        self.k = heads(a.num_kv_heads, part)
        self.v = heads(a.num_kv_heads, part)
        self.o = RowParallelLinear(
            a.num_heads * a.head_dim, config.dim, mesh, dtype=dtype, bias=a.out_bias, init=init
        )
        if a.qk_norm == "head":
            self.q_norm: nn.Module = RMSNorm(a.head_dim, config.norm_eps, mesh, dtype=dtype)
            self.k_norm: nn.Module = RMSNorm(a.head_dim, config.norm_eps, mesh, dtype=dtype)
        elif a.qk_norm == "full":
            eps = config.norm_eps
            self.q_norm = FullWidthNorm(a.num_heads, a.head_dim, eps, mesh, dtype=dtype)
            self.k_norm = FullWidthNorm(
                a.num_kv_heads, a.head_dim, eps, mesh, dtype=dtype, share=share
            )
        self.sinks = Sinks(a.num_heads, mesh, dtype=dtype, init=init) if a.sinks else None

    def forward(self, x_TD: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Return `[T, D]`, what attention adds to the residual.

        Args:
            x_TD: owned tokens after the norm.
            sequences: the batch.

        Collectives: gather of x over tp, reduce-scatter of the output over tp, and their duals;
            of whole tokens a sum of the output; with full-width norms an all-reduce of one number
            a token for each.
        """
        q, k, v = self.project(x_TD, sequences)
        q, k = sequences.rotation(q), sequences.rotation(k)
        if not self.share.regular:
            index = torch.tensor(self.share.kv_of_query, device=q.device)
            k, v = k.index_select(2, index), v.index_select(2, index)
        out_BSHw = attend(
            q,
            k,
            v,
            scale=self.scale,
            sequences=sequences,
            sinks_H=None if self.sinks is None else self.sinks.logits(),
            drop=self.config.dropout if self.training else 0.0,
            first_head=self.mesh.coordinate("tp") * self.share.queries,
        )
        rows, whole = x_TD.shape[0] * sharers(self.mesh, sequences.whole).size, sequences.whole
        out: torch.Tensor = self.o(pad_rows(out_BSHw.flatten(0, 1).flatten(1), rows), whole=whole)
        return out

    def project(
        self, x_TD: torch.Tensor, sequences: Sequences
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's queries, keys and values `[B, S, heads, h]`, not yet rotated."""
        parts = (self.q, self.k, self.v)
        flat = gather_linear(
            x_TD,
            [p.weight_rows() for p in parts],
            [p.bias_rows() for p in parts],
            sharers(self.mesh, sequences.whole),
        )
        flat = tuple(p.with_low_rank(x_TD, y) for p, y in zip(parts, flat, strict=True))
        tokens = sequences.batch * sequences.length
        shape, size = (sequences.batch, sequences.length), self.config.head_dim
        counts = (self.share.queries, self.share.num_kv, self.share.num_kv)
        q, k, v = (y[:tokens].view(*shape, n, size) for y, n in zip(flat, counts, strict=True))
        if self.config.qk_norm != "none":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.clip_qkv is not None:
            bound = self.config.clip_qkv
            q, k, v = (y.clamp(-bound, bound) for y in (q, k, v))
        return q, k, v


def pad_rows(x_ND: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `x_ND` with zero rows at its end up to `rows`."""
    missing = rows - x_ND.shape[0]
    return F.pad(x_ND, (0, 0, 0, missing)) if missing else x_ND


def attend(
    q_BSHh: torch.Tensor,
    k_BSGh: torch.Tensor,
    v_BSGw: torch.Tensor,
    *,
    scale: float,
    sequences: Sequences,
    sinks_H: torch.Tensor | None = None,
    drop: float = 0.0,
    first_head: int = 0,
) -> torch.Tensor:
    """Return `[B, S, H, w]`, each query's weighted sum of values.

    With a cache the new keys and values join it; the first call of a cache attends as without one.

    Args:
        q_BSHh, k_BSGh, v_BSGw: this rank's heads, rotated; equal runs of query heads share a key
            head.
        scale: factor on the scores.
        sequences: the batch with its mask.
        sinks_H: logits that join the softmax and take no value.
        drop: probability of dropping an attention weight.
        first_head: global number of this rank's first query head, for the dropout mask.

    Collectives: none; where cp shares the sequences, its exchanges.
    """
    if sequences.cache is not None:
        first = sequences.cache.columns == 0
        k_BGLh, v_BGLw = sequences.cache.extend(k_BSGh, v_BSGw)
        if not first:
            return attend_cached(
                q_BSHh,
                k_BGLh,
                v_BGLw,
                scale=scale,
                mask_BSL=sequences.mask_BSS,
                sinks_H=sinks_H,
            )
    key = sequences.dropout_key if drop > 0.0 else None

    def whole(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        return _attend_whole(q, k, v, scale, mask, sinks_H, drop, key, first_head)

    mask = sequences.mask_BSS
    if sequences.context is None:
        return whole(q_BSHh, k_BSGh, v_BSGw, mask, sinks_H)
    return sequences.context.attend(
        q_BSHh, k_BSGh, v_BSGw, scale=scale, mask=mask, sinks_H=sinks_H, whole=whole
    )


def _attend_whole(
    q_BSHh: torch.Tensor,
    k_BSGh: torch.Tensor,
    v_BSGw: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    drop: float,
    key: DropoutKey | None,
    first_head: int,
) -> torch.Tensor:
    """Return `[B, S, H, w]` over whole sequences, by a fused kernel where one serves."""
    q, k, v = (y.transpose(1, 2) for y in (q_BSHh, k_BSGh, v_BSGw))
    if q.numel() == 0 or drop > 0.0:
        out = _attend_plainly(q, k, v, scale, mask, sinks_H, drop, key, first_head)
        return out.transpose(1, 2)
    value_dim, shifted = v.shape[-1], False
    if sinks_H is not None:
        shifted = mask is None
        q, k, v, mask = _with_sink(q, k, v, mask, sinks_H, scale)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if shifted:
        out = out[:, :, 1:]
    return out[..., :value_dim].transpose(1, 2)


def _with_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks_H: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return operands with one more key before the others, whose score is the sink's logit.

    The logit rides on an added element of each query against a 1 in the added key, so fused kernels
    and their gradients serve; without a mask an added query keeps causal order.
    """
    extra = 8  # one element is needed; kernels want widths that divide by 8
    batch, heads, length, _ = q.shape
    column = (sinks_H.to(q.dtype) / scale).view(1, heads, 1, 1).expand(batch, heads, length, 1)
    q = torch.cat([q, F.pad(column, (0, extra - 1))], dim=-1)
    k, v = F.pad(k, (0, extra)), F.pad(v, (0, k.shape[-1] + extra - v.shape[-1]))
    first = torch.zeros_like(k[:, :, :1])
    first[..., -extra] = 1.0
    k = torch.cat([first, k], dim=2)
    v = F.pad(v, (0, 0, 1, 0))
    if mask is None:
        return F.pad(q, (0, 0, 1, 0)), k, v, None
    return q, k, v, F.pad(mask, (1, 0), value=True)


def _attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    drop: float,
    key: DropoutKey | None,
    first_head: int,
) -> torch.Tensor:
    """Return attention from whole score matrices: for empty batches and for exact dropout."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)).to(accumulate_dtype(q.dtype)) * scale
    batch, heads, length, _ = scores.shape
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sink = sinks_H.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, length, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if key is not None:
        head = torch.arange(first_head, first_head + heads, device=q.device)
        features = (head[:, None] * 2**32 + torch.arange(length, device=q.device)).flatten()
        flat = weights.transpose(1, 2).reshape(batch * length, heads * length)
        flat = dropout(flat, drop, key, features=features)
        weights = flat.view(batch, length, heads, length).transpose(1, 2)
    return weights.to(v.dtype) @ v
