"""Move rows by a way of your own: a class with `dispatch` and `combine` is all it takes.

Here every rank hands its tokens round a ring: rank after rank sees them, adds what its experts owe
them, and passes them on. It moves more bytes than an all-to-all, but never holds more than two
ranks' tokens at once, and it shows the contract: `dispatch` returns the rows that this rank's
experts work on, with a list of (row, expert, weight) pairs sorted by expert; `combine` turns one
partial sum a row into the sum of each token. Nothing is kept between the two but `Received.route`.
The collectives are differentiable, so there is no backward to write.
"""

from __future__ import annotations

import torch

from moe_tp import Mesh, MoE, ParallelLayout, settle_gradients
from moe_tp.experts.dispatch import Received
from moe_tp.experts.local import sort_pairs
from moe_tp.parallel.collectives import all_to_all
from moe_tp.routing import Assignment, ExpertTable, RouterConfig
from moe_tp.testing import run_ranks

TOKENS = 6  # of every rank


class RingDispatcher:
    """Every token visits every rank of ep, one neighbour after the other.

    Args:
        mesh: names ep; etp must be 1.
        table: which rank holds which expert.
        tokens: of every rank, the same number.
    """

    def __init__(self, mesh: Mesh, table: ExpertTable, tokens: int) -> None:
        self.group, self.tokens = mesh.group("ep"), tokens
        self.slots = table.slots_per_rank
        self.slot_of_expert = torch.tensor([held[0] for held in table.replicas])

    def _pass_on(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Return the tensor of the rank `step` places before this one in the ring."""
        size, rank, rows = self.group.size, self.group.rank, x.shape[0]
        send, recv = [0] * size, [0] * size
        send[(rank + step) % size] = recv[(rank - step) % size] = rows
        return all_to_all(x, send, recv, self.group)

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return everybody's tokens as rows, and the pairs of this rank's experts."""
        ids_TK = assignment.ids_TK
        slot_TK = torch.where(ids_TK >= 0, self.slot_of_expert[ids_TK.clamp_min(0)], -1)
        rows, slots, weights = x_TD, slot_TK, assignment.weights_TK
        all_rows, all_slots, all_weights = [rows], [slots], [weights]
        for _ in range(self.group.size - 1):
            rows, slots, weights = (self._pass_on(t, 1) for t in (rows, slots, weights))
            all_rows.append(rows)
            all_slots.append(slots)
            all_weights.append(weights)
        slot_NK = torch.cat(all_slots) - self.group.rank * self.slots
        mine_NK = (slot_NK >= 0) & (slot_NK < self.slots)
        return Received(
            rows_RD=torch.cat(all_rows),
            **sort_pairs(torch.where(mine_NK, slot_NK, -1), self.slots, torch.cat(all_weights)),
            route=x_TD.dtype,
        )

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return each token's sum: every rank sends back what it owes, and the owner adds up."""
        parts = partial_RD.split(self.tokens)
        total = parts[0]
        for step, part in enumerate(parts[1:], start=1):
            # the tokens that came from `step` places before go home
            total = total + self._pass_on(part, self.group.size - step)
        return total.to(dtype or received.route)


def layer_on_ranks(own: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and input gradient of one rank's tokens, by the ring or by the library."""
    mesh = Mesh(ParallelLayout(ep=4))
    table = ExpertTable(8, mesh.size("ep"))
    dispatcher = RingDispatcher(mesh, table, TOKENS) if own else None
    moe = MoE(16, 32, RouterConfig(8, 2), mesh, table=table, dispatcher=dispatcher, seed=0)
    x = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(mesh.rank)).requires_grad_()
    y, _ = moe(x)
    y.square().sum().backward()
    settle_gradients(moe)
    assert x.grad is not None
    return y.detach(), x.grad


def main() -> None:
    """Print that the ring gives what the library's own dispatcher gives."""
    ring, own = run_ranks(layer_on_ranks, 4, True), run_ranks(layer_on_ranks, 4, False)
    for rank, (got, want) in enumerate(zip(ring, own, strict=True)):
        errors = [float((a - b).abs().max()) for a, b in zip(got, want, strict=True)]
        print(f"rank {rank}: largest difference {max(errors):.1e} in output and input gradient")
        assert max(errors) < 1e-5


if __name__ == "__main__":
    main()
