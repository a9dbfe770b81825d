"""One hop of rows over one group: who gets which row, and the way back.

Letters: T rows here before the hop · N (row, slot) pairs here · S rows sent · Q pairs sent · R rows
and P pairs here after the hop · G ranks of the group.

A row goes once to each rank that holds one of its slots. Two counts a rank are exchanged first (the
only thing the host waits for), then 6 bytes a pair: its weight, its slot there, and whether it is
the first of its row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from moe_tp.experts.rows import SumPlan, plan_sums, stable_order, sum_rows
from moe_tp.parallel.collectives import (
    Group,
    Phase,
    exchange_counts,
    finish,
    raw_all_gather,
    raw_all_to_all,
    start_all_to_all,
)
from moe_tp.parallel.functions import apply_function
from moe_tp.routing.select import count_experts

COUNT_BYTES = 16  # of the counts for a rank
CODE_BYTES = 2  # of a pair, beside its weight
MOST_SLOTS = 1 << 14  # of one rank: a slot and a flag travel in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The plan of one hop, made before any row moves.

    Args:
        group: the ranks.
        send_rows, recv_rows, send_pairs, recv_pairs: counts by rank, on the host.
        row_S: the row here that each row sent is a copy of.
        sums: which returning rows each row here adds up.
        choice_Q: which of the N pairs each pair sent is.
        code_Q: twice its slot on the rank it goes to, plus 1 for the first pair of a row.
        beside: counts of this rank and its peers in a second group, gathered along.
    """

    group: Group
    send_rows: list[int]
    recv_rows: list[int]
    send_pairs: list[int]
    recv_pairs: list[int]
    row_S: torch.Tensor
    sums: SumPlan
    choice_Q: torch.Tensor
    code_Q: torch.Tensor
    beside: list[tuple[int, int]]

    def start(self, x_TD: torch.Tensor, phase: Phase) -> torch.Tensor:
        """Return the rows that arrive, still on their way; see `arrive`."""
        rows_SD = x_TD.index_select(0, self.row_S)
        return start_all_to_all(rows_SD, self.send_rows, self.recv_rows, self.group, phase=phase)

    def start_back(self, y_RD: torch.Tensor, phase: Phase) -> torch.Tensor:
        """Return the rows that come back, still on their way; see `arrive_back`."""
        return start_all_to_all(y_RD, self.recv_rows, self.send_rows, self.group, phase=phase)

    def arrive(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Return what `start` sent for."""
        return finish(rows_RD) if self.group.size > 1 else rows_RD

    def arrive_back(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]` in fp32 or more, each row's copies added up."""
        return sum_rows(self.arrive(rows_SD), self.sums)


def plan_hop(
    row_N: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    per_rank: int,
    num_rows: int,
    group: Group,
    beside: Group,
) -> Hop:
    """Return the plan by which each row reaches the ranks of its slots.

    Args:
        row_N: int64, ascending, the row of each pair.
        slot_N: int64, its slot in the group's numbering, -1 for none.
        per_rank: slots of one rank.
        num_rows: T.
        group: the ranks.
        beside: a second group whose ranks want to know each other's R and P.

    Collectives: all-to-all of two counts a rank over `group`, all-gather of two over `beside`.
    """
    ranks = group.size
    dest_N = torch.where(slot_N >= 0, slot_N // per_rank, ranks)
    goes_TG = row_N.new_zeros(num_rows * (ranks + 1))
    goes_TG[row_N * (ranks + 1) + dest_N] = 1
    rows_G = goes_TG.view(num_rows, ranks + 1)[:, :ranks].sum(0)
    pairs_G = count_experts(dest_N, ranks + 1)[:ranks]
    send_G2 = torch.stack([rows_G, pairs_G], dim=1)
    recv_G2 = exchange_counts(send_G2, group)
    beside_G2 = raw_all_gather(recv_G2.sum(0, keepdim=True), beside)
    rows, pairs = torch.cat([send_G2, recv_G2, beside_G2]).t().tolist()

    choice_Q = stable_order(dest_N, ranks)[: sum(pairs[:ranks])]
    row_Q, dest_Q = row_N.index_select(0, choice_Q), dest_N.index_select(0, choice_Q)
    first_Q = torch.ones_like(row_Q, dtype=torch.bool)
    first_Q[1:] = (row_Q[1:] != row_Q[:-1]) | (dest_Q[1:] != dest_Q[:-1])
    row_S = row_Q.new_empty(sum(rows[:ranks]))
    row_S.scatter_(0, first_Q.cumsum(0) - 1, row_Q)
    slot_Q = slot_N.index_select(0, choice_Q) % per_rank
    return Hop(
        group=group,
        send_rows=rows[:ranks],
        recv_rows=rows[ranks : 2 * ranks],
        send_pairs=pairs[:ranks],
        recv_pairs=pairs[ranks : 2 * ranks],
        row_S=row_S,
        sums=plan_sums(row_S, num_rows),
        choice_Q=choice_Q,
        code_Q=(slot_Q * 2 + first_Q).to(torch.int16),
        beside=list(zip(rows[2 * ranks :], pairs[2 * ranks :], strict=True)),
    )


class _SendPairs(Function):
    """Weights of the pairs sent, packed with their codes into one message of bytes."""

    @staticmethod
    def forward(ctx: Any, weight_N: torch.Tensor, hop: Hop) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.hop, ctx.pairs = hop, weight_N.shape[0]
        weight_Q = weight_N.index_select(0, hop.choice_Q)
        got = raw_all_to_all(
            pack_bytes(weight_Q, hop.code_Q), hop.send_pairs, hop.recv_pairs, hop.group
        )
        weight_P, code_P = unpack_bytes(got, weight_Q.dtype, torch.int16)
        ctx.mark_non_differentiable(code_P)
        return weight_P, code_P

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        hop: Hop = ctx.hop
        d_weight_Q = raw_all_to_all(
            grads[0], hop.recv_pairs, hop.send_pairs, hop.group, phase="backward"
        )
        d_weight_N = d_weight_Q.new_zeros(ctx.pairs)
        return d_weight_N.index_copy_(0, hop.choice_Q, d_weight_Q), None


def send_pairs(weight_N: torch.Tensor, hop: Hop) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `weight_P`, on the autograd path, and `code_P` of the pairs that arrive.

    Collectives: all-to-all over the hop's group; backward the reverse, of weights alone.
    """
    weight_P, code_P = apply_function(_SendPairs, weight_N, hop)
    return weight_P, code_P


def decode(code_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 `row_P` and `slot_P` of codes that lie in the order of the rows."""
    return (code_P & 1).cumsum(0) - 1, (code_P >> 1).to(torch.int64)


def pack_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Return `[n, bytes]` uint8 holding row i of every part; a part is `[n]` or `[n, ...]`."""
    rows = parts[0].shape[0]
    flat = []
    for part in parts:
        size = math.prod(part.shape[1:]) * part.element_size()
        # flat first: without rows a tensor may have strides that a view as bytes refuses
        flat.append(part.reshape(-1).view(torch.uint8).view(rows, size))
    return torch.cat(flat, dim=1)


def unpack_bytes(
    packed: torch.Tensor, first: torch.dtype, second: torch.dtype, width: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two parts of `pack_bytes`: `[n * width]` of the first, `[n]` of the second."""
    at = first.itemsize * width
    return packed[:, :at].reshape(-1).view(first), packed[:, at:].reshape(-1).view(second)
