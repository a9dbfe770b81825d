"""Sums of rows that land on the same row, in a fixed order, in fp32.

Letters: S rows to add · D width · N rows they land on.

A scatter with atomic adds gives other bits in every run on a GPU, and a bf16 one loses what is
small beside what is there already. Here the rows of one sum are listed once (`plan_sums`) and then
added in the order in which they came.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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


def plan_sums(
    target_S: torch.Tensor, num_rows: int, order_S: torch.Tensor | None = None
) -> SumPlan:
    """Return the plan by which row s is added to row `target_S[s]`.

    Args:
        target_S: int64; entries of `num_rows` or more are left out.
        num_rows: N, rows of the result.
        order_S: their stable order, where it is known.
    """
    if order_S is None:
        order_S = torch.argsort(target_S, stable=True)
    rows = torch.arange(num_rows + 1, device=target_S.device)
    return SumPlan(order_S, torch.searchsorted(target_S.index_select(0, order_S), rows))


def stable_order(key_S: torch.Tensor, most: int) -> torch.Tensor:
    """Return int64, the places of the keys in rising order, equal ones as they came.

    Args:
        key_S: int64.
        most: no key is below 0 or above this.
    """
    if key_S.device.type == "cpu" and most < 1 << 15:
        # numpy sorts 16-bit integers by radix: 0.05 ms for 16384 of them where torch takes 0.84
        order = np.argsort(key_S.to(torch.int16).numpy(), kind="stable")
        return torch.from_numpy(order)
    return torch.argsort(key_S, stable=True)


def sum_rows(
    y_SD: torch.Tensor,
    plan: SumPlan,
    *,
    weight_S: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `[N, D]`, zero where nothing lands; added in fp32 (fp64 for fp64).

    Args:
        y_SD: rows to add.
        plan: from `plan_sums`.
        weight_S: fp32, a factor on each row; only with `dtype` of bf16.
        dtype: of the result: that of `y_SD`, each sum rounded once at its end, or None for the
            dtype in which they are added.
    """
    exact = torch.promote_types(y_SD.dtype, torch.float32)
    if y_SD.shape[0] == 0 or plan.num_rows == 0:
        return y_SD.new_zeros((plan.num_rows, y_SD.shape[1]), dtype=dtype or exact)
    order_S, bounds_N, weights = plan.order_S, plan.bounds_N, None
    if weight_S is not None:
        # two bf16 numbers that add up to the weight (to 2^-17 of it), a term of the sum for each
        sorted_S = weight_S.index_select(0, order_S)
        high_S = sorted_S.to(y_SD.dtype)
        low_S = (sorted_S - high_S).to(y_SD.dtype)
        weights = torch.stack([high_S, low_S], dim=1).flatten()
        order_S, bounds_N = order_S.repeat_interleave(2), bounds_N * 2
    # a bag sum walks its rows one after the other, on CPU and GPU alike, and adds 16-bit ones in
    # fp32 on a CPU
    return torch.embedding_bag(
        y_SD if dtype == y_SD.dtype else y_SD.to(exact), order_S, bounds_N,
        mode=0, include_last_offset=True, per_sample_weights=weights,
    )[0]  # fmt: skip
