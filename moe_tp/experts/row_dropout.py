"""Dropout of what low-rank terms of experts see, by token and expert, alike in every layout.

Letters: R rows · n pairs · D width · F expert hidden (this rank's share) · e local experts.

A mask is a function of (seed, step, layer, site), the token's place in the global batch, the number
of the expert and the feature (see `moe_tp.parallel.random`), never of the rank, row or slot that
the token came to. Nothing is kept for backward, which draws the same numbers again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_tp.parallel.random import drop_features, hash_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDropout:
    """Which elements of the terms' inputs are dropped.

    Args:
        p: probability in (0, 1).
        gate_up, down: key of each projection's site, from `key_of`.
        expert_e: number of the expert in each local slot.
        first: global index of the first of this rank's F.
        identity_R: of each row's token; None until the rows are there.
    """

    p: float
    gate_up: int
    down: int
    expert_e: torch.Tensor
    first: int
    identity_R: torch.Tensor | None = None

    def input(
        self, x_nD: torch.Tensor, row_n: torch.Tensor, expert_n: torch.Tensor
    ) -> torch.Tensor:
        """Return what gate and up see of `x_nD`, or the gradient of it.

        Args:
            x_nD: rows of pairs.
            row_n: the row of each.
            expert_n: the expert of each, or one for all.
        """
        return self._drop(x_nD, self.gate_up, row_n, expert_n, 0)

    def hidden(
        self, h_nF: torch.Tensor, row_n: torch.Tensor, expert_n: torch.Tensor
    ) -> torch.Tensor:
        """Return what down sees of `h_nF`, or the gradient of it; as in `input`."""
        return self._drop(h_nF, self.down, row_n, expert_n, self.first)

    def _drop(
        self, x: torch.Tensor, site: int, row_n: torch.Tensor, expert_n: torch.Tensor, first: int
    ) -> torch.Tensor:
        assert self.identity_R is not None
        token_n = hash_bits(site, self.identity_R.index_select(0, row_n))
        features = torch.arange(first, first + x.shape[1], device=x.device)
        return drop_features(x, self.p, hash_bits(token_n, expert_n), features)
