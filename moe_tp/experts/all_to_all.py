"""Dispatch by all-to-all over ep, each token once per rank, and all-gather over etp.

Letters: T tokens on this rank · K choices · D width · S rows sent · Q pairs sent · R rows after
dispatch · P pairs after dispatch.

| step     | forward                               | backward                                    |
|----------|---------------------------------------|---------------------------------------------|
| dispatch | rows all-to-all (ep), gathered (etp)  | summed over etp, all-to-all back, summed    |
| combine  | summed over etp, all-to-all back, sum | rows all-to-all (ep), gathered (etp)        |

A token with several experts on one rank goes there once: with k = 8 of 64 experts on 8 ranks that
is 5.4 rows instead of 8. Sums are taken in fp32 in rank order. Beside the rows travel 6 bytes a
pair (weight and slot) and, before them, two counts a rank: the only thing the host waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from moe_tp.errors import ConfigError
from moe_tp.experts.dispatch import Received
from moe_tp.experts.rows import SumPlan, plan_sums, sum_rows
from moe_tp.parallel.collectives import (
    Group,
    apply_function,
    exchange_counts,
    raw_all_gather,
    raw_all_gather_rows,
    raw_all_to_all,
    raw_reduce_scatter_rows,
)
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.select import count_experts
from moe_tp.routing.table import ExpertTable, slots_of_ids

MOST_SLOTS = 1 << 14  # of one rank: a slot and a flag travel in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What the host knows of a dispatch: rows and pairs to and from each rank."""

    send_rows: list[int]
    send_pairs: list[int]
    recv_rows: list[int]
    recv_pairs: list[int]
    etp_rows: list[int]
    etp_pairs: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """The way of one dispatch, and so the way back.

    Args:
        sizes: counts on the host.
        token_S: the token of each row sent.
        sums: which returning rows a token adds up.
        choice_Q: place in the flat `[T * K]` of each pair sent.
        order_P: received pairs sorted by slot.
        shape: `[T, K]`.
        dtype: of x.
        ep, etp: groups.
        wire: dtype of partial sums on the way back.
    """

    sizes: _Sizes
    token_S: torch.Tensor
    sums: SumPlan
    choice_Q: torch.Tensor
    order_P: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    ep: Group
    etp: Group
    wire: torch.dtype


class _Dispatch(Function):
    """Tokens and weights to rows and pair weights; see the table above."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, pair_weight_P: torch.Tensor, route: _Route
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.route = route
        rows_RD = _send_rows(x_TD.index_select(0, route.token_S), route, "forward")
        weight_P = pair_weight_P.index_select(0, route.order_P)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(rows_RD)
        return rows_RD, weight_P

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        route: _Route = ctx.route
        d_x, d_weight = None, None
        if ctx.needs_input_grad[0]:
            d_x = _return_rows(grads[0], route, route.dtype, "backward").to(route.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(grads[1]).index_copy_(0, route.order_P, grads[1])
        return d_x, d_weight, None


class _SendWeights(Function):
    """Weights of the pairs sent, packed with their slots into one message of bytes."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_TK: torch.Tensor,
        code_Q: torch.Tensor,
        choice_Q: torch.Tensor,
        sizes: _Sizes,
        ep: Group,
        etp: Group,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.sizes, ctx.ep, ctx.etp = sizes, ep, etp
        ctx.choice_Q, ctx.shape = choice_Q, weights_TK.shape
        weight_Q = weights_TK.reshape(-1).index_select(0, choice_Q)
        parts = [
            t.view(torch.uint8).view(len(code_Q), t.element_size()) for t in (weight_Q, code_Q)
        ]
        bytes_QB = torch.cat(parts, dim=1)
        got = raw_all_to_all(bytes_QB, sizes.send_pairs, sizes.recv_pairs, ep)
        got = raw_all_gather_rows(got, sizes.etp_pairs, etp)
        split = weight_Q.element_size()
        weight_P = got[:, :split].reshape(-1).view(weight_Q.dtype)
        code_P = got[:, split:].reshape(-1).view(torch.int16)
        ctx.mark_non_differentiable(code_P)
        return weight_P, code_P

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes: _Sizes = ctx.sizes
        d_weight = raw_reduce_scatter_rows(
            grads[0].contiguous(), sizes.etp_pairs, ctx.etp, phase="backward"
        )
        d_weight = raw_all_to_all(
            d_weight, sizes.recv_pairs, sizes.send_pairs, ctx.ep, phase="backward"
        )
        out = d_weight.new_zeros(ctx.shape)
        out.view(-1).index_copy_(0, ctx.choice_Q, d_weight)
        return out, None, None, None, None, None


class _Combine(Function):
    """Partial sums of rows to sums of tokens; see the table above."""

    @staticmethod
    def forward(ctx: Any, partial_RD: torch.Tensor, route: _Route) -> torch.Tensor:
        ctx.route = route
        return _return_rows(partial_RD, route, route.wire, "forward").to(route.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        route: _Route = ctx.route
        # The gradient travels in the dtype of x, though the sum it belongs to is in fp32.
        return _send_rows(grads[0].index_select(0, route.token_S), route, "backward"), None


def _send_rows(rows_SD: torch.Tensor, route: _Route, phase: Any) -> torch.Tensor:
    sizes = route.sizes
    rows = raw_all_to_all(rows_SD, sizes.send_rows, sizes.recv_rows, route.ep, phase=phase)
    return raw_all_gather_rows(rows, sizes.etp_rows, route.etp, phase=phase)


def _return_rows(
    rows_RD: torch.Tensor, route: _Route, wire: torch.dtype, phase: Any
) -> torch.Tensor:
    sizes = route.sizes
    rows = raw_reduce_scatter_rows(rows_RD.contiguous(), sizes.etp_rows, route.etp, phase=phase)
    rows = raw_all_to_all(rows.to(wire), sizes.recv_rows, sizes.send_rows, route.ep, phase=phase)
    return sum_rows(rows, route.sums)


class AllToAllDispatcher:
    """Rows to the ranks of ep, once each; every etp rank of a subgroup gets all its rows.

    Args:
        mesh: names ep and etp.
        table: which slot holds which expert.
        wire_dtype: dtype of partial sums on the way back; None is fp32. In bf16 each of a token's
            sums is rounded once, an error of at most 2^-9 of each term.
    """

    def __init__(
        self, mesh: Mesh, table: ExpertTable, wire_dtype: torch.dtype | None = None
    ) -> None:
        self._ep, self._etp = mesh.group("ep"), mesh.group("etp")
        self._num_slots, self._wire = table.slots_per_rank, wire_dtype
        self._lookup = table.lookup(mesh.device)
        if table.slots_per_rank > MOST_SLOTS:
            raise ConfigError(
                f"{table.slots_per_rank} experts on one rank are more than {MOST_SLOTS}; raise ep"
            )

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return the rows for this rank's experts.

        Collectives: all-to-all over ep of two counts a rank, of 6 bytes a pair and of the rows;
        the same gathered over etp. Backward: the way back, of rows and of pair weights.
        """
        slot_TK = slots_of_ids(assignment.ids_TK, *self._lookup)
        per_rank, ranks = self._num_slots, self._ep.size
        dest_N = torch.where(slot_TK >= 0, slot_TK // per_rank, ranks).flatten()
        order_N = torch.argsort(dest_N, stable=True)
        sizes = self._exchange_sizes(dest_N, slot_TK.shape)

        choice_Q = order_N[: sum(sizes.send_pairs)]
        token_Q = choice_Q // max(slot_TK.shape[1], 1)
        dest_Q = dest_N.index_select(0, choice_Q)
        first_Q = torch.ones_like(token_Q, dtype=torch.bool)
        first_Q[1:] = (token_Q[1:] != token_Q[:-1]) | (dest_Q[1:] != dest_Q[:-1])
        token_S = token_Q.new_empty(sum(sizes.send_rows))
        token_S.scatter_(0, first_Q.cumsum(0) - 1, token_Q)
        local_Q = slot_TK.flatten().index_select(0, choice_Q) % per_rank
        code_Q = (local_Q * 2 + first_Q).to(torch.int16)

        weight_P, code_P = apply_function(
            _SendWeights, assignment.weights_TK, code_Q, choice_Q, sizes, self._ep, self._etp
        )
        slot_P = code_P >> 1
        row_P = (code_P & 1).cumsum(0) - 1
        order_P = torch.argsort(slot_P, stable=True)
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        route = _Route(
            sizes=sizes,
            token_S=token_S,
            sums=plan_sums(token_S, x_TD.shape[0]),
            choice_Q=choice_Q,
            order_P=order_P,
            shape=slot_TK.shape,
            dtype=x_TD.dtype,
            ep=self._ep,
            etp=self._etp,
            wire=self._wire if self._wire is not None else exact,
        )
        rows_RD, pair_weight_P = apply_function(_Dispatch, x_TD, weight_P, route)
        return Received(
            rows_RD=rows_RD,
            pair_row_P=row_P.index_select(0, order_P),
            pair_weight_P=pair_weight_P,
            counts_e=count_experts(slot_P.to(torch.int64), per_rank),
            route=route,
        )

    def combine(self, partial_RD: torch.Tensor, received: Received) -> torch.Tensor:
        """Return each token's sum, in the dtype of x.

        Collectives: reduce-scatter over etp and all-to-all over ep of the partial sums, in fp32
        unless a wire dtype is set. Backward: rows in the dtype of x.
        """
        y_TD: torch.Tensor = apply_function(_Combine, partial_RD, received.route)
        return y_TD

    def _exchange_sizes(self, dest_N: torch.Tensor, shape: torch.Size) -> _Sizes:
        """Return all counts, at one host synchronisation."""
        ranks, (tokens, choices) = self._ep.size, shape
        goes_TP = dest_N.new_zeros(tokens, ranks + 1)
        goes_TP.scatter_(1, dest_N.view(tokens, choices), 1)
        rows_P = goes_TP[:, :ranks].sum(0)
        pairs_P = count_experts(dest_N, ranks + 1)[:ranks]
        send_P2 = torch.stack([rows_P, pairs_P], dim=1)
        recv_P2 = exchange_counts(send_P2, self._ep)
        etp_P2 = raw_all_gather(recv_P2.sum(0, keepdim=True), self._etp)
        table = torch.cat([send_P2, recv_P2, etp_P2]).t().tolist()
        rows, pairs = table[0], table[1]
        return _Sizes(
            send_rows=rows[:ranks],
            send_pairs=pairs[:ranks],
            recv_rows=rows[ranks : 2 * ranks],
            recv_pairs=pairs[ranks : 2 * ranks],
            etp_rows=rows[2 * ranks :],
            etp_pairs=pairs[2 * ranks :],
        )
