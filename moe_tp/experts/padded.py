"""Dispatch of sizes that are known beforehand: capacity fixes them, the host waits for nothing.

Letters: T tokens on this rank · K choices · D width · C places of one rank's tokens at an expert ·
e experts on a rank · G ranks of ep · P pairs.

With `RouterConfig(capacity_factor=..., pad_to_capacity=True)` no expert gets more than C of a
rank's tokens, and every rank brings as many tokens (masked ones among them). So each rank sends
each other min(T, e * C) rows and e * C pairs, filled up with pairs of weight 0: no counts travel
before the rows, no size is read from the device, and every expert computes G * C pairs, equal
groups. The price is what is padded, on the wire and in the experts. The number of tokens is
compared between the ranks on the device.
"""

from __future__ import annotations

import torch

from moe_tp.errors import ConfigError
from moe_tp.experts.all_to_all import (
    AllToAllDispatcher,
    Way,
    identity_bytes,
    send_identity,
    start_rows,
)
from moe_tp.experts.dispatch import Pending
from moe_tp.experts.hop import Hop
from moe_tp.experts.rows import plan_sums
from moe_tp.parallel.collectives import (
    all_gather_rows,
    all_to_all,
    raw_all_gather,
    raw_all_gather_rows,
    raw_all_to_all,
)
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.table import ExpertTable, slots_of_ids


class PaddedDispatcher(AllToAllDispatcher):
    """All-to-all of fixed sizes over ep, all-gather of fixed sizes over etp.

    Args:
        mesh: names ep and etp.
        table: which slot holds which expert.
        wire_dtype: as for `AllToAllDispatcher`.
    """

    def __init__(
        self, mesh: Mesh, table: ExpertTable, wire_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(mesh, table, wire_dtype)
        self._ep, self._rank = mesh.group("ep"), mesh.rank
        self._code_bytes = self._count_bytes = 4
        self._etp_count_bytes = 4 * self._ep.size

    def start(self, x_TD: torch.Tensor, assignment: Assignment) -> Pending:
        """Return the dispatch with its rows in flight, for `finish`.

        Raises:
            ConfigError: the assignment has no capacity.

        Collectives: all-to-alls over ep and all-gathers over etp of the pairs' rows and weights,
            and of the rows.
        """
        if assignment.capacity is None:
            raise ConfigError(
                "a padded dispatch needs to know how many tokens an expert takes; set "
                "capacity_factor and pad_to_capacity=True, with a kind other than 'expert_choice'"
            )
        ep, slots, tokens = self._ep, self._num_slots, x_TD.shape[0]
        places = min(assignment.capacity, tokens)
        rows = min(tokens, slots * places)
        choice_GSC, row_GSC, row_S = self._place(assignment, places, rows)
        weight_GSC = assignment.weights_TK.flatten()[choice_GSC.clamp_min(0)]
        weight_GSC = torch.where(choice_GSC >= 0, weight_GSC, 0.0)
        even = [1] * ep.size
        way = self._way(x_TD, rows, slots * places, row_S, assignment.identity_T)
        self._compare(row_GSC.new_full((1,), tokens, dtype=torch.int32))
        told = raw_all_to_all(row_GSC.flatten(1).to(torch.int32), even, even, ep)
        told = raw_all_gather_rows(told, [ep.size] * self._etp.size, self._etp)
        weight = all_to_all(weight_GSC.flatten(1), even, even, ep)
        weight = all_gather_rows(weight, [ep.size] * self._etp.size, self._etp)
        # sources (etp-major) by slots by places -> slots first; each source's rows are a run
        sources = ep.size * self._etp.size
        base = torch.arange(sources, device=told.device)[:, None, None] * rows
        row = told.view(sources, slots, places).to(torch.int64)
        row = torch.where(row >= 0, row + base, 0).transpose(0, 1)
        identity_R = send_identity(assignment.identity_T, way)
        handle, sent = start_rows(x_TD, way)
        return Pending(
            handle=handle,
            sent=sent,
            pair_row_P=row.reshape(-1),
            pair_weight_P=weight.view(sources, slots, places).transpose(0, 1).reshape(-1),
            counts_e=row.new_full((slots,), sources * places),
            counts=(sources * places,) * slots,
            way=way,
            identity_R=identity_R,
        )

    def _compare(self, tokens_1: torch.Tensor) -> None:
        """Stop, on the device, where the ranks of ep and etp bring unequal numbers of tokens.

        Collectives: all-gathers of a number over ep and etp.
        """
        seen = raw_all_gather(raw_all_gather(tokens_1, self._ep), self._etp)
        torch._assert_async(
            (seen == tokens_1).all(),
            f"rank {self._rank}: pad_to_capacity=True with unequal numbers of tokens on the ranks; "
            "bring equally many to every rank, or set pad_to_capacity=False",
        )

    def _place(
        self, assignment: Assignment, places: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which choice fills each place, the row it uses, and the token of each row.

        Args:
            assignment: of the owned tokens.
            places: C.
            rows: sent to each rank.

        Returns:
            choice `[G, e, C]` into T * K and row `[G, e, C]` among a rank's, -1 in empty places;
            token `[G * rows]`, T in rows that nobody uses.
        """
        ids_TK, slots, ranks = assignment.ids_TK, self._num_slots, self._ep.size
        tokens, choices = ids_TK.shape
        slot_P = slots_of_ids(ids_TK, *self._lookup).flatten()
        slot_P = torch.where(slot_P >= 0, slot_P, ranks * slots)
        order_P = torch.argsort(slot_P, stable=True)
        sorted_P = slot_P[order_P]
        first_S = torch.searchsorted(
            sorted_P, torch.arange(ranks * slots + 1, device=slot_P.device)
        )
        place_P = torch.arange(len(order_P), device=slot_P.device) - first_S[sorted_P]
        # one cell more for all that goes nowhere
        none = ranks * slots * places
        cell_P = torch.where(sorted_P < ranks * slots, sorted_P * places + place_P, none)
        choice = order_P.new_full((none + 1,), -1).scatter_(0, cell_P, order_P)[:none]
        goes_TG = slot_P.new_zeros(tokens, ranks + 1)
        goes_TG.scatter_(1, (slot_P // slots).view(tokens, choices), 1)
        goes_TG = goes_TG[:, :ranks]
        place_TG = torch.where(goes_TG > 0, goes_TG.cumsum(0) - 1, rows)
        at_TG = place_TG + torch.arange(ranks, device=slot_P.device) * (rows + 1)
        token = slot_P.new_full((ranks * (rows + 1),), tokens)
        mine_T1 = torch.arange(tokens, device=slot_P.device)[:, None].expand(tokens, ranks)
        token = token.scatter_(0, at_TG.flatten(), mine_T1.reshape(-1)).view(ranks, rows + 1)
        choice_GSC = choice.view(ranks, slots, places)
        token_GSC = (choice_GSC.clamp_min(0) // max(choices, 1)).flatten(1)
        row_GSC = place_TG.t().gather(1, token_GSC).view_as(choice_GSC) if tokens else choice_GSC
        row_GSC = torch.where(choice_GSC >= 0, row_GSC, -1)
        return choice_GSC, row_GSC, token[:, :rows].reshape(-1)

    def _way(
        self,
        x_TD: torch.Tensor,
        rows: int,
        pairs: int,
        token_S: torch.Tensor,
        identity_T: torch.Tensor | None,
    ) -> Way:
        """Return the way of fixed sizes."""
        ranks, tokens = self._ep.size, x_TD.shape[0]
        hop = Hop(
            group=self._ep,
            send_rows=[rows] * ranks,
            recv_rows=[rows] * ranks,
            send_pairs=[pairs] * ranks,
            recv_pairs=[pairs] * ranks,
            row_S=token_S.clamp_max(max(tokens - 1, 0)),
            sums=plan_sums(token_S, tokens),
            choice_Q=token_S,
            code_Q=token_S,
            beside=[(rows * ranks, pairs * ranks)] * self._etp.size,
        )
        return Way(
            hops=(hop,),
            etp=self._etp,
            etp_rows=[rows * ranks] * self._etp.size,
            dtype=x_TD.dtype,
            wire=self._wire,
            identity_bytes=identity_bytes(identity_T),
        )
