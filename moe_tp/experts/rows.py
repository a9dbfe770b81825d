"""Sums of rows that land on the same row, in a fixed order, in fp32.

Letters: S rows to add · D width · N rows they land on.

A scatter with atomic adds gives other bits in every run on a GPU, and a bf16 one loses what is
small beside what is there already. Here the rows of one sum are listed once (`plan_sums`) and then
added in the order in which they came.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SumPlan:
    """Which rows each sum takes.

    Args:
        order_S: rows sorted by where they land, those of one sum in their own order.
        bounds_N: where the rows of each sum start in `order_S`, and one end more.
    """

    order_S: torch.Tensor
    bounds_N: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of the result."""
        return self.bounds_N.shape[0] - 1


def plan_sums(target_S: torch.Tensor, num_rows: int) -> SumPlan:
    """Return the plan by which row s is added to row `target_S[s]`.

    Args:
        target_S: int64; entries of `num_rows` or more are left out.
        num_rows: N, rows of the result.
    """
    sorted_S, order_S = torch.sort(target_S, stable=True)
    rows = torch.arange(num_rows + 1, device=target_S.device)
    return SumPlan(order_S, torch.searchsorted(sorted_S, rows))


def sum_rows(y_SD: torch.Tensor, plan: SumPlan) -> torch.Tensor:
    """Return `[N, D]` in fp32 (fp64 for fp64), zero where nothing lands.

    Args:
        y_SD: rows to add.
        plan: from `plan_sums`.
    """
    exact = torch.promote_types(y_SD.dtype, torch.float32)
    if y_SD.shape[0] == 0 or plan.num_rows == 0:
        return y_SD.new_zeros((plan.num_rows, y_SD.shape[1]), dtype=exact)
    # a bag sum walks its rows one after the other, on CPU and GPU alike
    return torch.embedding_bag(
        y_SD.to(exact), plan.order_S, plan.bounds_N, mode=0, include_last_offset=True
    )[0]
