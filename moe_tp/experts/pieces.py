"""Dispatch in pieces, so that memory stays bounded whatever the routing does (D10).

Letters: T tokens on this rank · K choices · P ranks of ep.

Without a bound, a rank whose experts everybody chooses receives every token of its group at once.
With `Runtime(dispatch_rows=N)` the group counts first: the rank with the most rows decides the
number of pieces, n = ceil(most rows / N), for all of them alike. Of the rows for each rank, each
source sends an n-th in each piece, so a piece brings at most N + P rows (P x etp with expert tensor
parallelism), and min(K, local experts) pairs a row. A piece keeps nothing for backward: it is sent
and computed again there, one piece at a time. With `Runtime(overlap=True)` the rows of the next one
are in flight while the experts compute one, forward and backward.

Peak of the layer in bytes, with R = N + P * etp rows of width D, p pairs a row and F hidden a rank,
T tokens of this rank, b bytes an element and 4 for sums:

    R * D * (3 b + 3 * 4)  +  R * p * F * 2 b  +  scratch of one expert, R * (6 F + 4 D) * b
      +  with overlap, R * D * 2 b (the next piece, sent and received)
      +  three times this rank's expert weights (a piece's gradient, and two sums of them)
      +  five times T * D * 4 (output, sums and input gradient)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from moe_tp.experts.dispatch import Pending, Received, SplitDispatcher
from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.select import count_experts
from moe_tp.routing.table import ExpertTable, slots_of_ids


def split_in_pieces(
    assignment: Assignment, mesh: Mesh, table: ExpertTable, limit: int | None
) -> list[Assignment]:
    """Return assignments that together send what `assignment` does, the same number on all ranks.

    Args:
        assignment: of the owned tokens.
        mesh: names ep and etp.
        table: which slot holds which expert.
        limit: rows that a rank may receive in a piece; None for no bound.

    Collectives: all-reduce of a count a rank over ep and etp, where there is a limit.
    """
    ranks = mesh.size("ep")
    if limit is None or ranks * mesh.size("etp") == 1:
        return [assignment]
    tokens = assignment.ids_TK.shape[0]
    lookup = table.lookup(assignment.ids_TK.device, owner=mesh.coordinate("stage"))
    slot_TK = slots_of_ids(assignment.ids_TK, *lookup)
    dest_TK = torch.where(slot_TK >= 0, slot_TK // table.slots_per_rank, ranks)
    goes_TP = slot_TK.new_zeros(tokens, ranks + 1).scatter_(1, dest_TK, 1)
    sent_P = goes_TP.sum(0)
    total_P = raw_all_reduce(raw_all_reduce(sent_P, mesh.group("ep")), mesh.group("etp"))
    most = int(total_P[:ranks].max())
    number = max(-(-most // limit), 1)
    if number == 1:
        return [assignment]
    # place of each token among those for a rank, spread evenly over the pieces
    place_TP = goes_TP.cumsum(0) - 1
    piece_TP = torch.div(place_TP * number, sent_P.clamp_min(1), rounding_mode="floor")
    piece_TK = piece_TP.gather(1, dest_TK)
    return [_piece(assignment, piece_TK == number_of) for number_of in range(number)]


def run_pieces(
    x_TD: torch.Tensor,
    pieces: Sequence[Assignment],
    dispatcher: SplitDispatcher,
    compute: Callable[[Received], torch.Tensor],
    *,
    overlap: bool,
) -> torch.Tensor:
    """Return the sum over pieces of `compute`, in fp32 or more; their rows are not kept.

    Args:
        x_TD: owned tokens.
        pieces: from `split_in_pieces`.
        dispatcher: sends them.
        compute: gives `[T, D]` from the rows that arrived.
        overlap: send the next piece before computing one.

    Collectives: the dispatcher's; in backward the rows again, without counts or pairs.
    """
    pending: list[Pending] = []
    flying: dict[int, torch.Tensor] = {}  # rows of a piece, between their sending and their use

    def start(number: int) -> None:
        begun = dispatcher.start(x_TD, pieces[number])
        flying[number] = begun.sent
        # the graph must not hold the rows
        pending.append(replace(begun, sent=begun.sent.new_empty(0)))

    def send_again(number: int) -> None:
        if number >= 0 and number not in flying:
            flying[number] = dispatcher.send(x_TD, pending[number])

    def run(handle_SD: torch.Tensor, weight_P: torch.Tensor, number: int) -> torch.Tensor:
        again = done[0]
        if again:
            send_again(number)
        begun = replace(
            pending[number], handle=handle_SD, pair_weight_P=weight_P, sent=flying.pop(number)
        )
        received = replace(dispatcher.finish(begun), early=None)
        if again and overlap:
            send_again(number - 1)  # backward takes the pieces from the last to the first
        return compute(received)

    done = [False]
    y_TD = torch.zeros_like(x_TD, dtype=torch.promote_types(x_TD.dtype, torch.float32))
    start(0)
    for number in range(len(pieces)):
        if overlap and number + 1 < len(pieces):
            start(number + 1)
        begun = pending[number]
        y_TD = y_TD + checkpoint(
            run, begun.handle, begun.pair_weight_P, number,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        if not overlap and number + 1 < len(pieces):
            start(number + 1)
    done[0] = True
    return y_TD


def _piece(assignment: Assignment, mine_TK: torch.Tensor) -> Assignment:
    ids_TK = torch.where(mine_TK, assignment.ids_TK, -1)
    return replace(
        assignment,
        ids_TK=ids_TK,
        weights_TK=torch.where(mine_TK, assignment.weights_TK, 0.0),
        counts_E=count_experts(ids_TK, assignment.num_experts),
    )
