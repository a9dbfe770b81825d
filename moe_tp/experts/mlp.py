"""A dense gated MLP split over tp; also the shared expert of an MoE layer.

Letters: T tokens on this rank · D width · F hidden (all ranks).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_tp.experts.activation import Activation, SwiGLU
from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_linear,
)
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.spec import Init
from moe_tp.parallel.whole import sharers


class GatedMLP(torch.nn.Module):
    """`down(act(gate(x), up(x)))` with F split over tp and the tokens gathered inside.

    Args:
        dim: D.
        hidden: F; tp must divide it.
        mesh: the mesh.
        dtype: parameter dtype.
        activation: of gate and up.
        init: first values of all three weights.
        even_tokens: all tp ranks always bring equally many tokens; otherwise each call compares.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        activation: Activation | None = None,
        init: Init | None = None,
        even_tokens: bool = True,
    ) -> None:
        super().__init__()
        self.mesh, self.even_tokens = mesh, even_tokens
        self.activation = activation or SwiGLU()
        self.gate = ColumnParallelLinear(dim, hidden, mesh, dtype=dtype, init=init)
        self.up = ColumnParallelLinear(dim, hidden, mesh, dtype=dtype, init=init)
        self.down = RowParallelLinear(hidden, dim, mesh, dtype=dtype, init=init)

    def forward(self, x_TD: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        """Return `[T, D]` for owned tokens.

        Args:
            x_TD: owned tokens.
            whole: every rank of tp holds all tokens; without gradient or adapter.

        Collectives: all-gather over tp, reduce-scatter over tp; backward the same. With uneven
        tokens an all-reduce of one number over tp before. With `whole` those of `sum_whole`.
        """
        tokens, group = x_TD.shape[0], sharers(self.mesh, whole)
        most = tokens
        if group.size > 1 and not self.even_tokens:
            count = torch.tensor([tokens], device=x_TD.device)
            most = int(raw_all_reduce(count, group, "max").item())
        padded_TD = F.pad(x_TD, (0, 0, 0, most - tokens)) if most > tokens else x_TD
        weights = [self.gate.local("weight"), self.up.local("weight")]
        padded_TD = padded_TD.to(weights[0].dtype)
        gate_NF, up_NF = gather_linear(padded_TD, weights, [None, None], group)
        gate_NF = self.gate.with_low_rank(padded_TD, gate_NF)
        up_NF = self.up.with_low_rank(padded_TD, up_NF)
        y_TD: torch.Tensor = self.down(self.activation.apply(gate_NF, up_NF), whole=whole)
        return y_TD[:tokens].to(x_TD.dtype)
