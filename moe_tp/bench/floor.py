"""The least that a layer could take: its matmuls alone, and its rows on the wire alone.

Letters: P (token, expert) pairs of this rank · n pairs of one expert · D width · F expert hidden ·
e experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """An MoE layer: width D, expert hidden F, experts E, choices K."""

    dim: int
    expert_dim: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        """Return it as a table's caption has it."""
        return f"D={self.dim}, F={self.expert_dim}, E={self.experts}, K={self.top_k}"

    def flops(self, tokens: int) -> float:
        """Return the operations of the experts' matmuls, forward and backward."""
        return 18.0 * tokens * self.top_k * self.dim * self.expert_dim


SHAPES = {
    "A": LayerShape(dim=512, expert_dim=1792, experts=8, top_k=2),
    "B": LayerShape(dim=512, expert_dim=256, experts=64, top_k=8),
}


def matmul_floor(
    shape: LayerShape, tokens: int, mesh: Mesh, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that runs this rank's share of a perfectly balanced layer's matmuls.

    Each expert of the rank gets equally many rows, in memory that is there already; forward and
    backward, without activation, routing or autograd.

    Args:
        shape: the layer.
        tokens: of each rank.
        mesh: over whose ep and etp the experts are spread.
        dtype: of everything.
    """
    ep, etp = mesh.size("ep"), mesh.size("etp")
    experts, hidden, width = -(-shape.experts // ep), shape.expert_dim // etp, shape.dim
    rows = max(tokens * shape.top_k * etp // experts, 1)
    options = {"dtype": dtype, "device": mesh.device}
    x_enD = torch.randn(experts, rows, width, **options)  # type: ignore[call-overload]
    gate_up_eND = torch.randn(experts, 2 * hidden, width, **options)  # type: ignore[call-overload]
    down_eDF = torch.randn(experts, width, hidden, **options)  # type: ignore[call-overload]
    hidden_enF = torch.randn(experts, rows, hidden, **options)  # type: ignore[call-overload]
    pre_enN = torch.randn(experts, rows, 2 * hidden, **options)  # type: ignore[call-overload]
    y_enD, d_x_enD = torch.empty_like(x_enD), torch.empty_like(x_enD)
    d_hidden_enF = torch.empty_like(hidden_enF)
    d_gate_up, d_down = torch.empty_like(gate_up_eND), torch.empty_like(down_eDF)

    def run() -> None:
        for e in range(experts):
            torch.mm(x_enD[e], gate_up_eND[e].t(), out=pre_enN[e])
            torch.mm(hidden_enF[e], down_eDF[e].t(), out=y_enD[e])
        for e in range(experts):
            torch.mm(y_enD[e], down_eDF[e], out=d_hidden_enF[e])
            torch.mm(y_enD[e].t(), hidden_enF[e], out=d_down[e])
            torch.mm(pre_enN[e], gate_up_eND[e], out=d_x_enD[e])
            torch.mm(pre_enN[e].t(), x_enD[e], out=d_gate_up[e])

    return run


def exchange_floor(
    assignment: Assignment, dim: int, mesh: Mesh, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that sends this rank's distinct (token, remote rank) rows and nothing else.

    Four all-to-alls over ep: rows out and sums back, forward and backward, all in `dtype`.

    Args:
        assignment: of this rank's tokens.
        dim: D.
        mesh: names ep; the experts lie in order over its ranks.
        dtype: of the rows.

    Collectives: an all-gather of counts over ep; the function itself four all-to-alls.
    """
    group = mesh.group("ep")
    if group.process_group is None:
        return lambda: None
    rank_TK = assignment.ids_TK // -(-assignment.num_experts // group.size)
    distinct = [int((rank_TK == rank).any(dim=1).sum()) for rank in range(group.size)]
    distinct[group.rank] = 0
    mine = torch.tensor(distinct, device=mesh.device)
    everybody = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(everybody, mine, group=group.process_group)
    coming = [int(counts[group.rank]) for counts in everybody]
    out = torch.zeros(sum(distinct), dim, dtype=dtype, device=mesh.device)
    back = torch.zeros(sum(coming), dim, dtype=dtype, device=mesh.device)

    def run() -> None:
        for _ in range(2):
            dist.all_to_all_single(back, out, coming, distinct, group=group.process_group)
            dist.all_to_all_single(out, back, distinct, coming, group=group.process_group)

    return run
