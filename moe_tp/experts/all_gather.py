"""Dispatch by all-gather: every token to every rank of ep x etp, sums by reduce-scatter.

Letters: T tokens on this rank · N tokens of the group · K choices · D width · P pairs.

| step     | forward                             | backward                            |
|----------|-------------------------------------|-------------------------------------|
| dispatch | rows gathered over ep, over etp     | summed over etp, over ep            |
| combine  | summed over etp, over ep            | rows gathered over ep, over etp     |

For few ranks or many choices, where nearly every rank would get nearly every token anyway: no list
of rows travels and no size but the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from moe_tp.errors import ConfigError
from moe_tp.experts.all_to_all import identity_bytes
from moe_tp.experts.dispatch import Received, Wire
from moe_tp.experts.local import sort_pairs
from moe_tp.experts.wire import FP8, check_wire
from moe_tp.parallel.collectives import (
    Group,
    raw_all_gather,
    raw_all_gather_rows,
    raw_reduce_scatter_rows,
)
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.table import ExpertTable, slots_of_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """Tokens of each rank of ep, rows of each rank of etp, and what to send them in."""

    ep_rows: list[int]
    etp_rows: list[int]
    ep: Group
    etp: Group
    dtype: torch.dtype
    wire: torch.dtype
    identity_bytes: int


def _gather(x: torch.Tensor, route: _Route, phase: Any) -> torch.Tensor:
    x = raw_all_gather_rows(x.contiguous(), route.ep_rows, route.ep, phase=phase)
    return raw_all_gather_rows(x, route.etp_rows, route.etp, phase=phase)


def _reduce(x: torch.Tensor, route: _Route, wire: torch.dtype, phase: Any) -> torch.Tensor:
    x = raw_reduce_scatter_rows(x.contiguous().to(wire), route.etp_rows, route.etp, phase=phase)
    return raw_reduce_scatter_rows(x, route.ep_rows, route.ep, phase=phase)


class _Gather(Function):
    """Rows, or weights, of the whole group; backward sums them in fp32 in rank order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: _Route) -> torch.Tensor:
        ctx.route = route
        rows = _gather(x, route, "forward")
        return rows.view_as(rows) if rows is x else rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce(grads[0], ctx.route, grads[0].dtype, "backward"), None


class _Reduce(Function):
    """Sums of the group's partial sums, this rank's tokens; backward gathers."""

    @staticmethod
    def forward(
        ctx: Any, partial_ND: torch.Tensor, route: _Route, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.route = route
        return _reduce(partial_ND, route, route.wire, "forward").to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        route: _Route = ctx.route
        return _gather(grads[0].to(route.dtype), route, "backward"), None, None


class AllGatherDispatcher:
    """All tokens of ep x etp on every rank of it; each rank computes what its experts owe them.

    Args:
        mesh: names ep and etp.
        table: which slot holds which expert.
        wire_dtype: dtype of partial sums on the way back; None is fp32.

    Raises:
        ConfigError: rows are to travel in fp8, which is for the all-to-all ways.
    """

    def __init__(
        self, mesh: Mesh, table: ExpertTable, wire_dtype: torch.dtype | None = None
    ) -> None:
        check_wire(wire_dtype)
        if wire_dtype == FP8:
            raise ConfigError(
                f"wire_dtype={FP8} is not sent by dispatcher='all_gather', which adds up what it "
                f"receives; choose dispatcher='all_to_all' or wire_dtype=torch.bfloat16"
            )
        self._ep, self._etp = mesh.group("ep"), mesh.group("etp")
        self._num_slots, self._wire = table.slots_per_rank, wire_dtype
        self._lookup = table.lookup(mesh.device, owner=mesh.coordinate("stage"))

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return all tokens of the group as rows; pairs of other ranks' experts are padding.

        Collectives: all-gathers over ep and etp of the number of tokens, their slots and weights,
        and the rows. Backward: reduce-scatters of weights and rows.
        """
        identity_T = assignment.identity_T
        route = self._make_route(x_TD, identity_bytes(identity_T))
        rows_ND = apply_function(_Gather, x_TD, route)
        weights_NK = apply_function(_Gather, assignment.weights_TK, route)
        slot_TK = slots_of_ids(assignment.ids_TK, *self._lookup).to(torch.int32)
        slot_NK = (
            _gather(slot_TK, route, "forward").to(torch.int64) - self._ep.rank * self._num_slots
        )
        mine_NK = (slot_NK >= 0) & (slot_NK < self._num_slots)
        return Received(
            rows_RD=rows_ND,
            **sort_pairs(torch.where(mine_NK, slot_NK, -1), self._num_slots, weights_NK),
            route=route,
            identity_R=None if identity_T is None else _gather(identity_T, route, "forward"),
        )

    def wire(self, received: Received) -> Wire:
        """Return what travels for a dispatch and its combine."""
        route: _Route = received.route
        width, choices = received.rows_RD.shape[1], received.pair_row_P.shape[0]
        choices //= max(received.rows_RD.shape[0], 1)
        weight = received.pair_weight_P.element_size()
        row = width * route.dtype.itemsize + choices * (weight + 4) + route.identity_bytes
        total = Wire()
        for group, rows in ((route.ep, route.ep_rows), (route.etp, route.etp_rows)):
            mine, others = rows[group.rank], group.size - 1
            theirs, back = sum(rows) - mine, width * route.wire.itemsize
            total += Wire(
                mine * others, theirs,
                others * (8 + mine * row) + theirs * back,
                others * (8 + mine * back) + theirs * row,
            )  # fmt: skip
        return total

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return each token's sum, in `dtype` or that of x.

        Collectives: reduce-scatters over etp and ep. Backward: all-gathers.
        """
        y_TD: torch.Tensor = apply_function(
            _Reduce, partial_RD, received.route, dtype or received.route.dtype
        )
        return y_TD

    def _make_route(self, x_TD: torch.Tensor, identity_bytes: int) -> _Route:
        tokens = torch.tensor([[x_TD.shape[0]]], dtype=torch.int64, device=x_TD.device)
        ep_rows = raw_all_gather(tokens, self._ep)
        etp_rows = raw_all_gather(ep_rows.sum(0, keepdim=True), self._etp)
        counts = torch.cat([ep_rows, etp_rows]).flatten().tolist()
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        return _Route(
            ep_rows=counts[: self._ep.size],
            etp_rows=counts[self._ep.size :],
            ep=self._ep,
            etp=self._etp,
            dtype=x_TD.dtype,
            wire=self._wire if self._wire is not None else exact,
            identity_bytes=identity_bytes,
        )
