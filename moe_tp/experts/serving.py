"""Dispatch of the few tokens of a generation step: one message out, one back.

Letters: T tokens on this rank · N tokens of the group · K choices · D width · P pairs.

All ranks of ep x etp bring equally many tokens, so that nothing need be counted and the host waits
for nothing; a token's row, weights and slots travel as one run of bytes. No gradient.
"""

from __future__ import annotations

import math

import torch

from moe_tp.experts.dispatch import Received
from moe_tp.experts.local import sort_pairs
from moe_tp.parallel.collectives import raw_all_gather, raw_reduce_scatter_rows
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
        )

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `[T, D]`, the sum of each token's partial sums, in `dtype` or that of the rows.

        Collectives: a reduce-scatter over etp and one over ep, summed in fp32.
        """
        return self.scatter(partial_RD).to(dtype or received.rows_RD.dtype)

    def scatter(self, partial_RD: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]`, the sum of each token's partial sums, in their dtype.

        Collectives: a reduce-scatter over etp and one over ep, summed in fp32.
        """
        y = partial_RD
        for group in (self._etp, self._ep):
            y = raw_reduce_scatter_rows(y, [y.shape[0] // group.size] * group.size, group)
        return y
