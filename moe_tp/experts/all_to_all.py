"""Dispatch by all-to-all over ep, each token once per rank, and all-gather over etp.

Letters: T tokens on this rank · K choices · D width · R rows after dispatch · P pairs after
dispatch.

| step     | forward                               | backward                                    |
|----------|---------------------------------------|---------------------------------------------|
| dispatch | rows all-to-all (ep), gathered (etp)  | summed over etp, all-to-all back, summed    |
| combine  | summed over etp, all-to-all back, sum | rows all-to-all (ep), gathered (etp)        |

A token with several experts on one rank goes there once: with k = 8 of 64 experts on 8 ranks that
is 5.4 rows instead of 8. Sums are taken in fp32 in rank order. Gradients of rows and of sums travel
in the dtype of x.

The way may have several hops (`two_hop.py`). Dispatch is cut in two, `start` and `finish`, so that
other work can run while the rows of the first hop are in flight; in backward the same work lies
between their duals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function

from moe_tp.errors import ConfigError
from moe_tp.experts.dispatch import Pending, Received, Wire
from moe_tp.experts.events import note
from moe_tp.experts.hop import (
    CODE_BYTES,
    COUNT_BYTES,
    MOST_SLOTS,
    Hop,
    decode,
    plan_hop,
    send_pairs,
)
from moe_tp.experts.rows import stable_order
from moe_tp.experts.wire import FP8, check_wire, decode_rows, encode, return_dtype
from moe_tp.parallel.collectives import (
    Group,
    all_gather_rows,
    raw_all_gather_rows,
    raw_all_to_all,
    raw_reduce_scatter_rows,
)
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.select import count_experts
from moe_tp.routing.table import ExpertTable, slots_of_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """All hops of one dispatch, and so of the way back.

    Args:
        hops: in the order of dispatch.
        etp: the group that shares each expert.
        etp_rows: rows of each of its ranks.
        dtype: of x.
        wire: dtype of rows on the wire, None for that of x.
        identity_bytes: of what travels forward with a row to say whose it is, 0 for nothing.
        flying: in backward, the gradient of the rows where it was sent early.
    """

    hops: tuple[Hop, ...]
    etp: Group
    etp_rows: list[int]
    dtype: torch.dtype
    wire: torch.dtype | None
    identity_bytes: int = 0
    flying: list[torch.Tensor] = field(default_factory=list)

    def send_back(self, d_rows_RD: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows sent by the first hop, still on its way."""
        rows = raw_reduce_scatter_rows(
            d_rows_RD.contiguous(), self.etp_rows, self.etp, phase="backward"
        )
        for hop in reversed(self.hops[1:]):
            rows = hop.arrive_back(hop.start_back(rows, "backward")).to(self.dtype)
        note("issue dispatch backward")
        return self.hops[0].start_back(rows, "backward")

    def send_early(self, d_rows_RD: torch.Tensor) -> None:
        """Start the gradient of the rows on its way before autograd asks for it."""
        self.flying[:] = [self.send_back(d_rows_RD)]


class _Start(Function):
    """Tokens to rows of the first hop, not waited for, and a handle that carries the gradient.

    The handle holds no memory: what is on the wire may be bytes, which have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.way = way
        note("issue dispatch")
        sent = way.hops[0].start(encode(x_TD, way.wire), "forward")
        handle_SD = x_TD.new_zeros(()).expand(way.hops[0].row_S.shape[0], x_TD.shape[1])
        ctx.mark_non_differentiable(sent)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(handle_SD)
        return handle_SD, sent

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        way: Way = ctx.way
        d_x = way.hops[0].arrive_back(grads[0]).to(way.dtype)
        note("wait dispatch backward")
        return d_x, None


class _Finish(Function):
    """Rows in flight to rows here, through the other hops and over etp."""

    @staticmethod
    def forward(ctx: Any, handle_SD: torch.Tensor, sent: torch.Tensor, way: Way) -> torch.Tensor:
        ctx.way = way
        rows = way.hops[0].arrive(sent)
        note("wait dispatch")
        for hop in way.hops[1:]:
            rows = hop.arrive(hop.start(rows, "forward"))
        rows = decode_rows(raw_all_gather_rows(rows, way.etp_rows, way.etp), way.wire, way.dtype)
        return rows.view_as(rows) if rows is sent else rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        way: Way = ctx.way
        d_sent = way.flying.pop() if way.flying else way.send_back(grads[0])
        return d_sent, None, None


class _Combine(Function):
    """Partial sums of rows to sums of tokens; see the table above."""

    @staticmethod
    def forward(ctx: Any, partial_RD: torch.Tensor, way: Way, dtype: torch.dtype) -> torch.Tensor:
        ctx.way = way
        wire = return_dtype(way.wire, way.dtype)
        rows = raw_reduce_scatter_rows(partial_RD.contiguous(), way.etp_rows, way.etp)
        for hop in reversed(way.hops):
            rows = hop.arrive_back(hop.start_back(rows.to(wire), "forward"))
        return rows.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        way: Way = ctx.way
        # The gradient travels in the dtype of x, though the sum it belongs to is in fp32.
        rows = grads[0].to(way.dtype)
        for hop in way.hops:
            rows = hop.arrive(hop.start(rows, "backward"))
        return raw_all_gather_rows(rows, way.etp_rows, way.etp, phase="backward"), None, None


def start_rows(x_TD: torch.Tensor, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the handle of the rows and the rows themselves, on their way.

    Collectives: all-to-all of rows over the way's first group; backward the reverse.
    """
    handle_SD, sent = apply_function(_Start, x_TD, way)
    return handle_SD, sent


def send_identity(identity_T: torch.Tensor | None, way: Way) -> torch.Tensor | None:
    """Return the identity of each row's token; None where nobody asks for it.

    Collectives: where it is asked for, those of the rows.
    """
    if identity_T is None:
        return None
    for hop in way.hops:
        identity_T = raw_all_to_all(
            identity_T.index_select(0, hop.row_S), hop.send_rows, hop.recv_rows, hop.group
        )
    return raw_all_gather_rows(identity_T, way.etp_rows, way.etp)


def identity_bytes(identity_T: torch.Tensor | None) -> int:
    """Return the bytes of it that travel with a row."""
    return 0 if identity_T is None else identity_T.element_size()


class AllToAllDispatcher:
    """Rows to the ranks of ep, once each; every etp rank of a subgroup gets all its rows.

    Args:
        mesh: names ep and etp.
        table: which slot holds which expert.
        wire_dtype: of rows on the wire, see `moe_tp.experts.wire`; None sends the dtype of x and
            partial sums in fp32.
    """

    def __init__(
        self, mesh: Mesh, table: ExpertTable, wire_dtype: torch.dtype | None = None
    ) -> None:
        self._etp, self._early = mesh.group("etp"), mesh.runtime.overlap
        self._num_slots, self._wire = table.slots_per_rank, wire_dtype
        # what travels of a pair beside its weight, and beside the pairs to each rank of ep and etp
        self._code_bytes, self._count_bytes, self._etp_count_bytes = (
            CODE_BYTES,
            COUNT_BYTES,
            COUNT_BYTES,
        )
        self._lookup = table.lookup(mesh.device, owner=mesh.coordinate("stage"))
        check_wire(wire_dtype)
        # group and slots of one of its ranks, hop by hop
        self._groups: Sequence[tuple[Group, int]] = [(mesh.group("ep"), table.slots_per_rank)]
        if table.slots_per_rank > MOST_SLOTS:
            raise ConfigError(
                f"{table.slots_per_rank} experts on one rank are more than {MOST_SLOTS}; raise ep"
            )

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return the rows for this rank's experts.

        Collectives: a hop, all-to-all over ep of two counts a rank, 6 bytes a pair and the rows;
        the same gathered over etp. Backward: the way back, of rows and of pair weights.
        """
        return self.finish(self.start(x_TD, assignment))

    def start(self, x_TD: torch.Tensor, assignment: Assignment) -> Pending:
        """Return the dispatch with its rows in flight, for `finish`."""
        slot_P = slots_of_ids(assignment.ids_TK, *self._lookup).flatten()
        tokens, choices = assignment.ids_TK.shape
        row_P = torch.arange(tokens, device=slot_P.device).repeat_interleave(choices)
        weight_P = assignment.weights_TK.reshape(-1)
        hops: list[Hop] = []
        alone = Group("etp")
        code_P = slot_P
        for number, (group, per_rank) in enumerate(self._groups):
            last = number == len(self._groups) - 1
            hop = plan_hop(
                row_P,
                slot_P,
                per_rank=per_rank,
                num_rows=x_TD.shape[0] if number == 0 else sum(hops[-1].recv_rows),
                group=group,
                beside=self._etp if last else alone,
            )
            weight_P, code_P = send_pairs(weight_P, hop)
            row_P, slot_P = decode(code_P)
            hops.append(hop)
        beside = hops[-1].beside
        way = Way(
            hops=tuple(hops),
            etp=self._etp,
            etp_rows=[rows for rows, _ in beside],
            dtype=x_TD.dtype,
            wire=self._wire,
            identity_bytes=identity_bytes(assignment.identity_T),
        )
        pairs = [count for _, count in beside]
        weight_P = all_gather_rows(weight_P, pairs, self._etp)
        # as bytes: gloo knows no 16-bit integers
        bytes_P2 = raw_all_gather_rows(code_P.view(torch.uint8).view(-1, 2), pairs, self._etp)
        row_P, slot_P = decode(bytes_P2.reshape(-1).view(torch.int16))
        order_P = stable_order(slot_P, self._num_slots)
        identity_R = send_identity(assignment.identity_T, way)
        handle, sent = start_rows(x_TD, way)
        return Pending(
            handle=handle,
            sent=sent,
            pair_row_P=row_P.index_select(0, order_P),
            pair_weight_P=weight_P.index_select(0, order_P),
            counts_e=count_experts(slot_P, self._num_slots),
            way=way,
            identity_R=identity_R,
        )

    def send(self, x_TD: torch.Tensor, pending: Pending) -> torch.Tensor:
        """Return the rows of a dispatch on their way once more, without gradient.

        Args:
            x_TD: the tokens again.
            pending: from `start`.
        """
        note("issue dispatch")
        way: Way = pending.way
        return way.hops[0].start(encode(x_TD.detach(), way.wire), "forward")

    def finish(self, pending: Pending) -> Received:
        """Return the dispatch that `start` began."""
        return Received(
            rows_RD=apply_function(_Finish, pending.handle, pending.sent, pending.way),
            pair_row_P=pending.pair_row_P,
            pair_weight_P=pending.pair_weight_P,
            counts_e=pending.counts_e,
            counts=pending.counts,
            route=pending.way,
            early=pending.way.send_early if self._early else None,
            identity_R=pending.identity_R,
        )

    def wire(self, received: Received) -> Wire:
        """Return what travels for a dispatch and its combine."""
        way: Way = received.route
        width = received.rows_RD.shape[1]
        row = width + 4 if way.wire == FP8 else width * way.dtype.itemsize
        row += way.identity_bytes
        exact = torch.promote_types(way.dtype, torch.float32).itemsize
        back = width * return_dtype(way.wire, way.dtype).itemsize
        pair = received.pair_weight_P.element_size() + self._code_bytes
        total = Wire()
        for hop in way.hops:
            ranks, me = hop.group.size, hop.group.rank
            sent, got, pairs_sent, pairs_got = (
                sum(counts) - counts[me]
                for counts in (hop.send_rows, hop.recv_rows, hop.send_pairs, hop.recv_pairs)
            )
            counted = self._count_bytes * (ranks - 1)
            total += Wire(
                sent, got,
                counted + sent * row + pairs_sent * pair + got * back,
                counted + got * row + pairs_got * pair + sent * back,
            )  # fmt: skip
        etp, others, told = way.etp, way.etp.size - 1, self._etp_count_bytes
        if others:
            pairs, mine = [count for _, count in way.hops[-1].beside], way.etp_rows[etp.rank]
            theirs, at = sum(way.etp_rows) - mine, pairs[etp.rank]
            total += Wire(
                mine * others, theirs,
                others * (told + mine * row + at * pair) + theirs * width * exact,
                others * (told + mine * width * exact)
                + theirs * row + (sum(pairs) - at) * pair,
            )  # fmt: skip
        return total

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return each token's sum, in `dtype` or that of x.

        Collectives: reduce-scatter over etp and a hop back over ep of the partial sums, in fp32
        unless a wire dtype is set. Backward: rows in the dtype of x.
        """
        y_TD: torch.Tensor = apply_function(
            _Combine, partial_RD, received.route, dtype or received.route.dtype
        )
        return y_TD
