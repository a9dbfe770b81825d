"""Dispatch where every rank holds every expert whole: no row moves.

Letters: T tokens on this rank · K choices · D width · P pairs · e experts.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from moe_tp.errors import ConfigError
from moe_tp.experts.dispatch import Received, Wire
from moe_tp.experts.rows import stable_order
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.select import count_experts
from moe_tp.routing.table import ExpertTable, slots_of_ids


class Pairs(TypedDict):
    """The part of `Received` that lists pairs."""

    pair_row_P: torch.Tensor
    pair_weight_P: torch.Tensor
    counts_e: torch.Tensor


class LocalDispatcher:
    """Rows are the tokens themselves; only the list of pairs is made. No host synchronisation.

    Args:
        mesh: with ep and etp of 1.
        table: which slot holds which expert.

    Raises:
        ConfigError: experts lie on several ranks.
    """

    def __init__(self, mesh: Mesh, table: ExpertTable) -> None:
        if mesh.size("ep") * mesh.size("etp") > 1:
            raise ConfigError(
                f"dispatcher='local' cannot reach the experts of ep={mesh.size('ep')} and "
                f"etp={mesh.size('etp')}; choose dispatcher='auto'"
            )
        self._num_slots = table.slots_per_rank
        self._lookup = table.lookup(mesh.device, owner=mesh.coordinate("stage"))

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return all tokens as rows, with the pairs of dropped choices as padding at the end."""
        slot_TK = slots_of_ids(assignment.ids_TK, *self._lookup)
        return Received(
            rows_RD=x_TD,
            **sort_pairs(slot_TK, self._num_slots, assignment.weights_TK),
            route=x_TD.dtype,
            identity_R=assignment.identity_T,
            sum_dtype=x_TD.dtype,
        )

    def wire(self, received: Received) -> Wire:
        """Return that nothing travels."""
        return Wire()

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the sums, in `dtype` or that of x."""
        return partial_RD.to(dtype or received.route)


def sort_pairs(slot_TK: torch.Tensor, num_slots: int, weights_TK: torch.Tensor) -> Pairs:
    """Return `pair_row_P`, `pair_weight_P` and `counts_e` of all choices, sorted by slot.

    Args:
        slot_TK: local slot of each choice, -1 for none (these come last, as padding).
        num_slots: e.
        weights_TK: routing weights.
    """
    key_P = torch.where(slot_TK >= 0, slot_TK, num_slots).flatten()
    order_P = stable_order(key_P, num_slots)
    return {
        "pair_row_P": torch.div(order_P, max(slot_TK.shape[1], 1), rounding_mode="floor"),
        "pair_weight_P": weights_TK.flatten().index_select(0, order_P),
        "counts_e": count_experts(slot_TK, num_slots),
    }
