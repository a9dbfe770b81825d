"""Multi-head latent attention (arXiv:2405.04434, section 2.1) with heads split over tp.

Letters: B batch · S sequence · T owned tokens · H heads of this rank · h head size.

The projections to latents and their norms run on owned tokens; what travels over tp are the
latents (512 elements a token instead of the width), from which each rank expands its own heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from moe_tp.models.attention import Sequences, attend, pad_rows
from moe_tp.models.cache import attend_cached
from moe_tp.models.config import ModelConfig
from moe_tp.models.heads import HeadLinear, share_heads
from moe_tp.models.rope import score_scale
from moe_tp.parallel.collectives import Group, all_gather
from moe_tp.parallel.linear import ReplicatedLinear, RowParallelLinear, gather_linear
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.sequence import RMSNorm
from moe_tp.parallel.spec import Init
from moe_tp.parallel.whole import sharers

# The latents' norms keep their own epsilon in every published model, whatever rms_norm_eps says.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Latent attention of one layer.

    Args:
        config: the model.
        mesh: the mesh.
        dtype: parameter dtype.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, *, dtype: torch.dtype) -> None:
        super().__init__()
        a = self.config = config.attention
        assert a.mla is not None
        mla = self.mla = a.mla
        self.mesh = mesh
        self.scale = score_scale(a, config.rope)
        self.heads = share_heads(a.num_heads, a.num_heads, mesh).queries
        init, dim = Init(value=config.init_std), config.dim
        bias = a.qkv_bias

        def heads(width: int, size: int) -> HeadLinear:
            return HeadLinear(width, a.num_heads, size, mesh, dtype=dtype, bias=False, init=init)

        def latent(width: int) -> ReplicatedLinear:
            return ReplicatedLinear(dim, width, mesh, dtype=dtype, bias=bias, init=init)

        if mla.q_rank is None:
            self.q = heads(dim, mla.qk_dim)
        else:
            self.q_a = latent(mla.q_rank)
            self.q_a_norm = RMSNorm(mla.q_rank, LATENT_EPS, mesh, dtype=dtype)
            self.q_b = heads(mla.q_rank, mla.qk_dim)
        self.kv_a = latent(mla.kv_rank + mla.rope_dim)
        self.kv_a_norm = RMSNorm(mla.kv_rank, LATENT_EPS, mesh, dtype=dtype)
        self.kv_b = heads(mla.kv_rank, mla.nope_dim + mla.value_dim)
        self.o = RowParallelLinear(
            a.num_heads * mla.value_dim, dim, mesh, dtype=dtype, bias=a.out_bias, init=init
        )

    def forward(self, x_TD: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Return `[T, D]`, what attention adds to the residual.

        Args:
            x_TD: owned tokens after the norm.
            sequences: the batch.

        Collectives: gathers over tp of the query latent (of x without one), of the shared latent
            and of the shared rotated key; reduce-scatter of the output over tp; and their duals. Of
            whole tokens a sum of the output alone.
        """
        mla, shape = self.mla, (sequences.batch, sequences.length)
        sharing = sharers(self.mesh, sequences.whole)
        if mla.q_rank is None:
            q = self._expand(self.q, x_TD, shape, sharing)
        else:
            q = self._expand(self.q_b, self.q_a_norm(self.q_a(x_TD)), shape, sharing)
        latent, turned = self.kv_a(x_TD).split([mla.kv_rank, mla.rope_dim], dim=-1)
        rows = x_TD.shape[0] * sharing.size
        if sequences.cache is not None:
            first = sequences.cache.columns == 0
            seen = self._remember(self.kv_a_norm(latent), turned, sequences)
            if not first:
                out = self._attend_latents(q, seen, sequences)
                flat = pad_rows(out.flatten(0, 1).flatten(1), rows)
                cached: torch.Tensor = self.o(flat, whole=sequences.whole)
                return cached
            sequences = replace(sequences, cache=None)
        kv = self._expand(self.kv_b, self.kv_a_norm(latent), shape, sharing)
        k_plain, v = kv.split([mla.nope_dim, mla.value_dim], dim=-1)
        tokens = shape[0] * shape[1]
        k_turned = all_gather(turned, self.mesh.group("tp"))[:tokens].view(*shape, 1, mla.rope_dim)
        k_turned = sequences.rotation(k_turned).expand(-1, -1, self.heads, -1)
        q_plain, q_turned = q.split([mla.nope_dim, mla.rope_dim], dim=-1)
        out = attend(
            torch.cat([q_plain, sequences.rotation(q_turned)], dim=-1),
            torch.cat([k_plain, k_turned], dim=-1),
            v,
            scale=self.scale,
            sequences=sequences,
            drop=self.config.dropout if self.training else 0.0,
            first_head=self.mesh.coordinate("tp") * self.heads,
        )
        result: torch.Tensor = self.o(pad_rows(out.flatten(0, 1).flatten(1), rows))
        return result

    def _remember(
        self, latent_TC: torch.Tensor, turned_Th: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """Return `[B, 1, L, C + h]`: the normed latent and rotated key of each column so far.

        Collectives: all-gather of both over tp.
        """
        assert sequences.cache is not None
        shape = (sequences.batch, sequences.length)
        sharing = sharers(self.mesh, sequences.whole)
        both = all_gather(torch.cat([latent_TC, turned_Th], dim=-1), sharing)
        both = both[: shape[0] * shape[1]].view(*shape, 1, -1)
        latent, turned = both.split([self.mla.kv_rank, self.mla.rope_dim], dim=-1)
        (seen,) = sequences.cache.extend(torch.cat([latent, sequences.rotation(turned)], dim=-1))
        return seen

    def _attend_latents(
        self, q_BSHh: torch.Tensor, seen: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """Return `[B, S, H, w]` without expanding the cached latents.

        The key's projection is applied to the query and the value's to the weighted sum of latents,
        since both are linear (arXiv:2405.04434, section 2.1.2): all heads share one key.
        """
        mla = self.mla
        weight = self._kv_weight().view(self.heads, mla.nope_dim + mla.value_dim, mla.kv_rank)
        w_key, w_value = weight.split([mla.nope_dim, mla.value_dim], dim=1)
        plain, turned = q_BSHh.split([mla.nope_dim, mla.rope_dim], dim=-1)
        q = torch.einsum("bshn,hnc->bshc", plain, w_key)
        out = attend_cached(
            torch.cat([q, sequences.rotation(turned)], dim=-1),
            seen,
            seen[..., : mla.kv_rank],
            scale=self.scale,
            mask_BSL=sequences.mask_BSS,
        )
        return torch.einsum("bshc,hwc->bshw", out, w_value)

    def _kv_weight(self) -> torch.Tensor:
        """Return the expansion's weight of this rank's heads, with an adapter folded in.

        Collectives: with an adapter, those of its term over tp.
        """
        weight = self.kv_b.weight_rows()
        if self.kv_b.low_rank is None:
            return weight
        # The product with unit vectors is the matrix; each rank brings its share of them.
        tp, width = self.mesh.group("tp"), self.mla.kv_rank
        each = -(-width // tp.size)
        unit = torch.eye(each * tp.size, width, dtype=weight.dtype, device=weight.device)
        mine = unit[tp.rank * each : (tp.rank + 1) * each]
        return self.kv_b.with_low_rank(mine, F.linear(unit, weight))[:width].t()

    def _expand(
        self, linear: HeadLinear, x_TD: torch.Tensor, shape: tuple[int, int], sharing: Group
    ) -> torch.Tensor:
        """Return this rank's heads `[B, S, H, h]` of an input gathered from who shares it."""
        weight = linear.weight_rows()
        (flat,) = gather_linear(x_TD, [weight], [None], sharing)
        flat = linear.with_low_rank(x_TD, flat)
        size = weight.shape[0] // self.heads
        return flat[: shape[0] * shape[1]].view(*shape, self.heads, size)
