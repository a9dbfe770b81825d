"""The contract between the router, the ranks that hold the experts, and the expert compute.

Letters: T tokens on this rank · D width · R rows after dispatch · P (row, expert) pairs · e experts
on this rank.

`dispatch` brings every token once to each rank that holds one of its experts, as a row, with a
short list of (expert, weight) for it. The expert compute returns one partial sum for each row, and
`combine` brings those back and adds them. A dispatcher keeps nothing between the two calls: what
`combine` needs travels in `Received.route`.
"""

from __future__ import annotations

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
    """

    rows_RD: torch.Tensor
    pair_row_P: torch.Tensor
    pair_weight_P: torch.Tensor
    counts_e: torch.Tensor
    counts: tuple[int, ...] | None = None
    route: Any = None


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
class SplitDispatcher(Protocol):
    """A dispatcher that lets other work run while its rows are in flight."""

    def start(self, x_TD: torch.Tensor, assignment: Assignment) -> Any:
        """Return a dispatch whose rows are on their way."""
        ...

    def finish(self, pending: Any) -> Received:
        """Return the dispatch that `start` began, once its rows are here."""
        ...
