"""Heads of attention on tp ranks: which are whose, their projections, norms and sinks.

Query heads divide over tp. Key and value heads that do not are whole on every rank, which then
computes only those that its queries need: each copy's gradient is a part, and `settle_gradients`
sums the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_tp.errors import ConfigError
from moe_tp.parallel.collectives import accumulate_dtype, all_reduce, replicate
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.spec import ONES, ZEROS, Init, ParamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """Which heads a rank computes.

    Args:
        queries: number of query heads.
        first_kv, num_kv: key and value heads, a run.
        kv_of_query: index into that run for each query head.
        split_kv: key and value heads divide over tp; else they are whole on every rank.
        counted_kv: for each of this rank's key heads, whether it speaks for it in sums over tp.
    """

    queries: int
    first_kv: int
    num_kv: int
    kv_of_query: tuple[int, ...]
    split_kv: bool
    counted_kv: tuple[bool, ...]

    @property
    def regular(self) -> bool:
        """Whether equal runs of query heads share a key head, as grouped kernels want it."""
        if self.queries % self.num_kv:
            return False
        run = self.queries // self.num_kv
        return self.kv_of_query == tuple(i // run for i in range(self.queries))


def share_heads(num_heads: int, num_kv_heads: int, mesh: Mesh) -> HeadShare:
    """Return the heads of this rank.

    Raises:
        ConfigError: query heads do not divide over tp.
    """
    tp, rank = mesh.size("tp"), mesh.coordinate("tp")
    if num_heads % tp:
        options = [d for d in range(1, num_heads + 1) if num_heads % d == 0]
        raise ConfigError(
            f"num_attention_heads={num_heads} does not split over tp={tp}; choose tp among "
            f"{options}"
        )
    queries, group = num_heads // tp, num_heads // num_kv_heads
    kv = [head // group for head in range(rank * queries, (rank + 1) * queries)]
    run = range(kv[0], kv[-1] + 1)
    return HeadShare(
        queries=queries,
        first_kv=run.start,
        num_kv=len(run),
        kv_of_query=tuple(g - run.start for g in kv),
        split_kv=num_kv_heads % tp == 0,
        counted_kv=tuple(g * group // queries == rank for g in run),
    )


class HeadLinear(ParallelModule):
    """A projection to heads: split over tp, or whole on every rank and sliced in use.

    Args:
        dim: input width.
        heads: heads over all ranks.
        size: elements of a head.
        mesh: the mesh.
        dtype: parameter dtype.
        bias: with a bias.
        init: first values of the weight.
        part: the heads (start, stop) this rank computes where the weight is whole on every rank;
            None splits the heads over tp.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        size: int,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        bias: bool,
        init: Init,
        part: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(mesh)
        self.rows = None if part is None else slice(part[0] * size, part[1] * size)
        shards = {"tp": 0} if part is None else {}
        whole = part is not None
        spec = ParamSpec(shape=(heads * size, dim), shards=shards, partial=whole, init=init)
        self.add_parameter("weight", spec, dtype)
        if bias:
            spec = ParamSpec(
                shape=(heads * size,), shards=shards, partial=whole, init=ZEROS, role="bias"
            )
            self.add_parameter("bias", spec, dtype)

    def weight_rows(self) -> torch.Tensor:
        """Return the weight of this rank's heads."""
        weight = self.local("weight")
        return weight if self.rows is None else weight[self.rows]

    def bias_rows(self) -> torch.Tensor | None:
        """Return the bias of this rank's heads, or None without one."""
        if "bias" not in self.specs:
            return None
        bias = self.local("bias")
        return bias if self.rows is None else bias[self.rows]


class FullWidthNorm(ParallelModule):
    """RMSNorm over all heads at once (OLMoE, arXiv:2409.02060), which needs a sum over tp.

    Args:
        heads: heads over all ranks.
        size: elements of a head.
        eps: added to the mean square.
        mesh: the mesh.
        dtype: parameter dtype; never below fp32.
        share: this rank's heads; None where the norm's heads are the query heads.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        eps: float,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        share: HeadShare | None = None,
    ) -> None:
        super().__init__(mesh)
        self.eps, self.width, self.size = eps, heads * size, size
        split = share is None or share.split_kv
        self.rows: slice | None = None
        self.counted: tuple[bool, ...] | None = None
        if share is not None and not split:
            self.rows = slice(share.first_kv * size, (share.first_kv + share.num_kv) * size)
            self.counted = share.counted_kv
        spec = ParamSpec(
            shape=(self.width,),
            shards={"tp": 0} if split else {},
            partial=True,
            init=ONES,
            role="norm",
            keep_fp32=True,
        )
        self.add_parameter("weight", spec, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed heads, in their dtype.

        Args:
            x: `[B, S, heads of this rank, size]`.

        Collectives: all-reduce over tp of one number a token, and again in backward.
        """
        group = self.mesh.group("tp")
        weight = self.local("weight")
        weight = weight if self.rows is None else weight[self.rows]
        wide = x.to(accumulate_dtype(x.dtype))
        mine = wide
        if self.counted is not None:
            mine = wide[:, :, [i for i, counted in enumerate(self.counted) if counted]]
        square = mine.square().sum((-2, -1), keepdim=True)
        # Each rank's heads feed the sum, and the sum feeds each rank's heads.
        total = replicate(all_reduce(square, group), group)
        scale = torch.rsqrt(total / self.width + self.eps)
        return (wide * scale * weight.view(-1, self.size)).to(x.dtype)


class Sinks(ParallelModule):
    """One learned logit for each query head, split over tp (arXiv:2309.17453; GPT-OSS)."""

    def __init__(self, heads: int, mesh: Mesh, *, dtype: torch.dtype, init: Init) -> None:
        super().__init__(mesh)
        spec = ParamSpec(shape=(heads,), shards={"tp": 0}, init=init, role="bias")
        self.add_parameter("weight", spec, dtype)

    def logits(self) -> torch.Tensor:
        """Return the logits of this rank's heads."""
        return self.local("weight")
