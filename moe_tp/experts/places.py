"""Places of pairs whose numbers an expert are round, for oneDNN's products on a CPU.

Letters: P pairs · N pairs that have an expert · Q places · R rows · S terms of sums · D width.

oneDNN compiles a product for the sizes that it is given: for a number of rows that it has not seen
before a call takes 2 to 9 times as long (0.3 to 1.2 ms on top of 0.1 to 2.4), and no two steps of
a training route alike. So each expert gets a round number of places, of which there are few, and
those that no pair takes hold zeros, which add nothing to a product's sum over rows. Sums of rows
that are rounded to 16 bits once, at their end, are taken here too, over all pairs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_tp.experts import workspace
from moe_tp.experts.rows import SumPlan, plan_sums, stable_order, sum_rows
from moe_tp.experts.runs import even_out, find_runs
from moe_tp.parallel.product import batches, compiles_each_size

_NOTHING = torch.empty(0, dtype=torch.int64)
_LEAST_SUM = 1 << 16  # elements; below, plans of sums, and of fp32 places, cost more than they save


def round_up(count: int) -> int:
    """Return the places for so many pairs: at most an eighth more, a sixteenth from 256 on."""
    bits = count.bit_length()
    grain = 1 << max(min(bits - 4, 4), bits - 6, 0)
    return -(-count // grain) * grain


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the pairs lie.

    Args:
        counts: places of each expert.
        place_N: the place of each pair; None where each place holds the pair of its number.
        row_Q: the row of each place, 0 in empty ones.
        empty: places without a pair, in order.
        runs: numbers of neighbouring experts with equally many places, whose products are one
            call; empty where each expert has its own.
        sums: adds the places of each row, for sums in the rows' own dtype; None: wider ones.
    """

    counts: tuple[int, ...]
    row_Q: torch.Tensor
    place_N: torch.Tensor | None = None
    empty: tuple[int, ...] = ()
    runs: tuple[int, ...] = ()
    sums: SumPlan | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return what autograd is to keep for `with_tensors`."""
        sums = self.sums
        plan = (None, None) if sums is None else (sums.order_S, sums.bounds_N)
        return (self.row_Q, self.place_N, *plan)

    def without_tensors(self) -> Places:
        """Return the numbers alone, for `with_tensors`."""
        return Places(counts=self.counts, row_Q=_NOTHING, empty=self.empty, runs=self.runs)

    def with_tensors(self, tensors: Sequence[Any]) -> Places:
        """Return the numbers with what `tensors` returned."""
        row_Q, place_N, order_S, bounds_N = tensors
        sums = None if order_S is None else SumPlan(order_S, bounds_N)
        return replace(self, row_Q=row_Q, place_N=place_N, sums=sums)

    def spread(self, value_P: torch.Tensor) -> torch.Tensor:
        """Return what each place has of a value of pairs, 0 in empty ones."""
        if self.place_N is None:
            return value_P
        value_Q = value_P.new_zeros(self.row_Q.shape[0])
        return value_Q.index_copy_(0, self.place_N, value_P[: self.place_N.shape[0]])

    def collect(self, value_Q: torch.Tensor, num_pairs: int) -> torch.Tensor:
        """Return what each pair has of a value of places, 0 for pairs without an expert."""
        if self.place_N is None:
            return value_Q
        value_P = value_Q.new_zeros(num_pairs)
        torch.index_select(value_Q, 0, self.place_N, out=value_P[: self.place_N.shape[0]])
        return value_P

    def buffer(self, rows_RD: torch.Tensor) -> torch.Tensor | None:
        """Return an uninitialised row for each place, to be summed; None where blocks are added."""
        if self.sums is None:
            return None
        shape = (self.row_Q.shape[0], rows_RD.shape[1])
        return workspace.empty(shape, rows_RD.dtype, rows_RD.device)

    def total(self, y_QD: torch.Tensor, weight_Q: torch.Tensor | None = None) -> torch.Tensor:
        """Return `[R, D]`, the sum of each row's places, each times its weight.

        Args:
            y_QD: one row a place.
            weight_Q: fp32.
        """
        assert self.sums is not None
        return sum_rows(y_QD, self.sums, weight_S=weight_Q, dtype=y_QD.dtype)


def make_places(
    pair_row_P: torch.Tensor, counts: Sequence[int], rows_RD: torch.Tensor, hidden: int = 0
) -> Places:
    """Return the places of all pairs; where oneDNN multiplies, round numbers of them.

    Args:
        pair_row_P: int64, the row of each pair, sorted by expert.
        counts: pairs of each expert.
        rows_RD: the rows.
        hidden: of an expert whose weights lie in one stack, for `moe_tp.experts.runs`; 0: each
            expert stays alone.
    """
    num, in_16_bits = sum(counts), rows_RD.dtype == torch.bfloat16
    is_small = num * rows_RD.shape[1] < _LEAST_SUM
    if not compiles_each_size(rows_RD) or (is_small and not in_16_bits):
        return Places(counts=tuple(counts), row_Q=pair_row_P)
    sizes = tuple(round_up(count) for count in counts)
    runs: tuple[int, ...] = ()
    if hidden and batches(rows_RD):
        runs = find_runs(counts, sizes, dim=rows_RD.shape[1], hidden=hidden)
        sizes = even_out(sizes, runs) if runs else sizes
    row_N = pair_row_P[:num]
    place_N, row_Q = None, row_N
    empty: list[int] = []
    if sizes != tuple(counts):
        shift, at = [], 0
        for count, size in zip(counts, sizes, strict=True):
            shift.append(len(empty))
            empty += range(at + count, at + size)
            at += size
        moved_N = torch.tensor(shift).repeat_interleave(torch.tensor(counts), output_size=num)
        place_N = moved_N.add_(torch.arange(num))
        row_Q = row_N.new_zeros(at).index_copy_(0, place_N, row_N)
    sums = None
    if in_16_bits and not is_small:
        rows = rows_RD.shape[0]
        sums = plan_sums(row_N, rows, stable_order(row_N, rows))
        if place_N is not None:
            sums = SumPlan(place_N.index_select(0, sums.order_S), sums.bounds_N)
    return Places(
        counts=sizes, row_Q=row_Q, place_N=place_N, empty=tuple(empty), runs=runs, sums=sums
    )
