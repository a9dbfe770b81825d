"""Dispatch of the few tokens of a generation step: one message out and one back, or one in all.

Letters: T tokens on this rank · N tokens of the group · K choices · D width · P pairs · G ranks.

All ranks of ep x etp bring equally many tokens, so that nothing need be counted and the host waits
for nothing; a token's row, weights and slots travel as one run of bytes. Where every rank of tp
holds all tokens (`moe_tp.parallel.whole`) and tp has all experts, nothing travels but the sums. No
gradient.
"""

from __future__ import annotations

import math

import torch

from moe_tp.errors import RankMismatchError
from moe_tp.experts.dispatch import Received
from moe_tp.experts.local import sort_pairs
from moe_tp.parallel.collectives import add_in_order, raw_all_gather, raw_reduce_scatter_rows
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.table import ExpertTable, slots_of_ids


class ServingDispatcher:
    """Every token to every rank of ep x etp; each computes what its experts owe.

    Args:
        mesh: names ep and etp.
        table: which slot holds which expert.
    """

    def __init__(self, mesh: Mesh, table: ExpertTable) -> None:
        self._ep, self._etp = mesh.group("ep"), mesh.group("etp")
        self._num_slots = table.slots_per_rank
        self._lookup = table.lookup(mesh.device, owner=mesh.coordinate("stage"))

    def slots_of(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return the global slot of each choice, -1 for none."""
        return slots_of_ids(ids_TK, *self._lookup)

    def gather(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, weights and slots of all tokens of the group.

        A slot is counted from this rank's first; others than its own lie outside its number.

        Collectives: an all-gather over ep and one over etp.
        """
        slot_TK = self.slots_of(ids_TK)
        if self._ep.size * self._etp.size == 1:
            return x_TD, weights_TK, slot_TK
        parts = (x_TD, weights_TK, slot_TK)
        packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        packed = raw_all_gather(raw_all_gather(packed, self._ep), self._etp)
        rows, start = [], 0
        for part in parts:
            size = math.prod(part.shape[1:]) * part.element_size()
            piece = packed[:, start : start + size].contiguous()
            rows.append(piece.view(part.dtype))
            start += size
        rows_ND, weights_NK, slot_NK = rows
        slot_NK = slot_NK - self._ep.rank * self._num_slots
        return rows_ND, weights_NK, slot_NK

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return all tokens of the group as rows; pairs of other ranks' experts are padding.

        Collectives: an all-gather over ep and one over etp.
        """
        rows_ND, weights_NK, slot_NK = self.gather(x_TD, assignment.ids_TK, assignment.weights_TK)
        mine_NK = (slot_NK >= 0) & (slot_NK < self._num_slots)
        return Received(
            rows_RD=rows_ND,
            **sort_pairs(torch.where(mine_NK, slot_NK, -1), self._num_slots, weights_NK),
            route=assignment.ids_TK,
        )

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `[T, D]`, the sum of each token's partial sums, in `dtype` or that of the rows.

        Collectives: those of `scatter`.
        """
        return self.scatter(partial_RD, received.route).to(dtype or received.rows_RD.dtype)

    def scatter(self, partial_RD: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]`, the sum of each token's partial sums, in their dtype.

        Args:
            partial_RD: of the rows that `gather` returned.
            ids_TK: what `gather` was given.

        Collectives: a reduce-scatter over etp and one over ep, summed in fp32.
        """
        y = partial_RD
        for group in (self._etp, self._ep):
            y = raw_reduce_scatter_rows(y, [y.shape[0] // group.size] * group.size, group)
        return y


class WholeDispatcher(ServingDispatcher):
    """No token to nobody: each rank of tp has all of them, and computes what its experts owe.

    Ranks of tp that hold the same shard of the same experts share those experts' work.

    Args:
        mesh: names tp, ep and etp; ep x etp divides tp.
        table: which slot holds which expert.
    """

    def __init__(self, mesh: Mesh, table: ExpertTable) -> None:
        super().__init__(mesh, table)
        self._tp, self._rank = mesh.group("tp"), mesh.rank
        block = self._ep.size * self._etp.size
        self._copies, self._copy = self._tp.size // block, self._tp.rank // block
        # one choice of an expert's replica for all ranks that have the token
        self._lookup = table.lookup(mesh.device, owner=mesh.coordinate("dp"))

    def gather(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows and weights as they are, and slots as `ServingDispatcher` does.

        Collectives: none.
        """
        slot_TK = self.slots_of(ids_TK) - self._ep.rank * self._num_slots
        if self._copies > 1:
            slot_TK = torch.where(slot_TK % self._copies == self._copy, slot_TK, -1)
        return x_TD, weights_TK, slot_TK

    def scatter(self, partial_RD: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]` on every rank of tp: the sum of the partial sums, as `sum_whole` does.

        The choices travel along: ranks that chose unlike would leave an expert out, or add it
        twice, in silence.

        Raises:
            RankMismatchError: ranks chose other experts for the same tokens.

        Collectives: an all-gather over tp.
        """
        width = partial_RD.shape[1]
        both = torch.cat([partial_RD, ids_TK.to(partial_RD.dtype)], dim=1)
        both_GTN = raw_all_gather(both[None], self._tp)
        ids_GTK = both_GTN[..., width:]
        same = (ids_GTK == ids_GTK[:1]).all()
        if same.is_cuda:  # as for token ids: stops the device, and the host waits for nothing
            torch.ops.aten._assert_async.msg(same, "ranks of tp chose unlike experts")
        elif not bool(same):
            raise RankMismatchError(
                f"rank {self._rank}: the ranks {list(self._tp.ranks)} of tp chose unlike experts "
                f"for the same tokens of a generation step: {ids_GTK.long().tolist()}; run them on "
                f"devices of one kind with the same number of threads"
            )
        return add_in_order(both_GTN[..., :width])
