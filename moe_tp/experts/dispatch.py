"""The contract between the router, the ranks that hold the experts, and the expert compute.

Letters: T tokens on this rank · D width · R rows after dispatch · P (row, expert) pairs · e experts
on this rank.

`dispatch` brings every token once to each rank that holds one of its experts, as a row, with a
short list of (expert, weight) for it. The expert compute returns one partial sum for each row, and
`combine` brings those back and adds them. A dispatcher keeps nothing between the two calls: what
`combine` needs travels in `Received.route`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from moe_tp.routing.assignment import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Rows that this rank's experts work on.

    Args:
        rows_RD: one row for each (token, this rank); unique.
        pair_row_P: int64, the row of each pair; pairs are sorted by local expert slot, and within
            a slot by row. Pairs past `counts_e.sum()` are padding.
        pair_weight_P: routing weight of each pair, on the autograd path.
        counts_e: int64, pairs of each local expert slot.
        counts: the same numbers on the host, where the dispatcher has them there.
        route: what `combine` needs; opaque to everybody else.
        early: may be called in backward, once, with the gradient of `rows_RD`, which then starts
            on its way while other gradients are worked out.
        identity_R: int64, of each row's token, where the assignment has it.
        sum_dtype: dtype to which a row's sum may be rounded, once, because nothing is added to it;
            None: sums come in fp32 or more.
    """

    rows_RD: torch.Tensor
    pair_row_P: torch.Tensor
    pair_weight_P: torch.Tensor
    counts_e: torch.Tensor
    counts: tuple[int, ...] | None = None
    route: Any = None
    early: Callable[[torch.Tensor], None] | None = None
    identity_R: torch.Tensor | None = None
    sum_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A dispatch whose rows are in flight: everything of `Received` but the rows.

    Args:
        handle: carries the gradient of the rows sent; holds no memory.
        sent: what will be the rows once it has arrived, without gradient.
        pair_row_P, pair_weight_P, counts_e, counts, identity_R: as in `Received`.
        way: the dispatcher's own.
    """

    handle: torch.Tensor
    sent: torch.Tensor
    pair_row_P: torch.Tensor
    pair_weight_P: torch.Tensor
    counts_e: torch.Tensor
    way: Any
    counts: tuple[int, ...] | None = None
    identity_R: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Wire:
    """What this rank sends to and gets from other ranks for one dispatch and its combine.

    Args:
        rows_sent, rows_received: rows on their way to the experts, one for each (token, rank).
        bytes_sent, bytes_received: of rows, partial sums and all that travels with them, forward.
    """

    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: Wire) -> Wire:
        """Return the sums."""
        return Wire(
            self.rows_sent + other.rows_sent,
            self.rows_received + other.rows_received,
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
        )


class Dispatcher(Protocol):
    """Moves rows to experts and partial sums back; see the module docstring."""

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return the rows that arrive here. Every rank of the expert group must call it."""
        ...

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `[T, D]`, in `dtype` or that of x, the sum of each token's partial sums."""
        ...


@runtime_checkable
class CountingDispatcher(Protocol):
    """A dispatcher that knows on the host what it sends."""

    def wire(self, received: Received) -> Wire:
        """Return the rows and bytes of a dispatch and its combine, without synchronisation."""
        ...


@runtime_checkable
class SplitDispatcher(Protocol):
    """A dispatcher that lets other work run while its rows are in flight."""

    def start(self, x_TD: torch.Tensor, assignment: Assignment) -> Pending:
        """Return a dispatch whose rows are on their way."""
        ...

    def send(self, x_TD: torch.Tensor, pending: Pending) -> torch.Tensor:
        """Return the rows of an earlier `start` on their way once more, without gradient."""
        ...

    def finish(self, pending: Pending) -> Received:
        """Return the dispatch that `start` began, once its rows are here."""
        ...
