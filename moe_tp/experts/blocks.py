"""Matrix products of groups of rows with the experts that own them.

Letters: P pairs sorted by expert · n pairs of one block · e experts · N, K matrix sizes.

A `Block` is a run of experts and their pairs. The sliced back end runs a plain matmul an expert
into given buffers; a block holds as many experts as fit into one elementwise pass, because
gathering, activating and adding a few rows at a time costs more in calls and waiting threads than
in work. The grouped back end has a single block of all experts and one `grouped_mm` a product. The
kernel is written once against the three products below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_tp.experts import workspace
from moe_tp.experts.quantized import QuantizedStack
from moe_tp.experts.rows import plan_sums, sum_rows
from moe_tp.parallel.product import product

Stack = torch.Tensor | QuantizedStack  # the matrices of all experts
PASS = 1 << 19  # elements of the activation in one pass: a few buffers of it stay in cache


@dataclass(frozen=True, slots=True)
class Block:
    """Pairs `start:stop`, owned by some neighbouring experts, or by all where `ends_e` is set.

    Args:
        start, stop: the pairs.
        first: local slot of the first expert.
        counts: places of each expert; unused where `ends_e` is set.
        ends_e: int32, end of each expert's pairs; then the block holds every expert.
        valid_P1: False in padding pairs, where there may be any.
        empty: places of the block that hold no pair, see `moe_tp.experts.places`; None without.
        runs: numbers of neighbouring experts whose products are one call; empty: each has its own.
        turned: the pre-activations lie turned: of each expert one column after the other. With AMX
            oneDNN's products leave and take them quickest so; see `moe_tp/experts/passes.c`.
    """

    start: int
    stop: int
    first: int = 0
    counts: tuple[int, ...] = ()
    ends_e: torch.Tensor | None = None
    valid_P1: torch.Tensor | None = None
    empty: torch.Tensor | None = None
    runs: tuple[int, ...] = ()
    turned: bool = False

    @property
    def busy(self) -> int:
        """Experts with rows."""
        return len(self.counts) - self.counts.count(0)

    def own(self, value_e: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what each of the block's experts has of a stack, or each run of them, stacked."""
        own_e = value_e[self.first : self.first + len(self.counts)]
        if not self.runs:
            return own_e.unbind(0)
        if len(self.runs) == 1:
            return (own_e,)
        return tuple(x[0] if x.shape[0] == 1 else x for x in own_e.split_with_sizes(self.runs))

    def rows(self, value_n: torch.Tensor, turned: bool = False) -> tuple[torch.Tensor, ...]:
        """Return each expert's rows of the block's, or those of each run, one matrix an expert.

        Args:
            value_n: its rows one after the other, or, `turned`, each expert's columns.
        """
        if not self.runs and not turned:
            return value_n.split_with_sizes(self.counts)
        if len(self.runs) == 1:
            many, size = self.runs[0], self.counts[0]
            return (value_n.view(many, -1, size).mT if turned else value_n.view(many, size, -1),)
        parts, start, slot = [], 0, 0
        for many in self.runs or (1,) * len(self.counts):
            size = self.counts[slot]
            own = value_n[start : start + many * size]
            if turned:
                own = own.view(many, -1, size).mT if size else own[None]
                parts.append(own[0] if many == 1 else own)
            else:
                parts.append(own if many == 1 else own.unflatten(0, (many, size)))
            start, slot = start + many * size, slot + many
        return tuple(parts)

    def clear(self, value_n: torch.Tensor) -> torch.Tensor:
        """Return `value_n` with zeros in the empty places."""
        return value_n if self.empty is None else value_n.index_fill_(0, self.empty, 0)

    def nt(
        self,
        x_nK: torch.Tensor,
        weight_eNK: Stack,
        out: torch.Tensor | None = None,
        turned: bool = False,
    ) -> torch.Tensor:
        """Return `x W^T` for each row's expert, `[n, N]`; in `out` where that is of use.

        With `turned` the result lies so; then `out` is there, and the weights are not quantized.
        """
        if isinstance(weight_eNK, QuantizedStack):
            made = weight_eNK.matrices(self.first, self.counts, x_nK.dtype, transposed=True)
            return self._one_by_one(x_nK, made, weight_eNK.shape[1], out)
        return self.nn(x_nK, weight_eNK.transpose(-2, -1), out, turned)

    def nn(
        self,
        x_nN: torch.Tensor,
        weight_eNK: Stack,
        out: torch.Tensor | None = None,
        turned: bool = False,
    ) -> torch.Tensor:
        """Return `x W` for each row's expert, `[n, K]`; `out` and `turned` as for `nt`."""
        if isinstance(weight_eNK, QuantizedStack):
            made = weight_eNK.matrices(self.first, self.counts, x_nN.dtype, transposed=False)
            return self._one_by_one(x_nN, made, weight_eNK.shape[2], out)
        if self.ends_e is not None:
            return F.grouped_mm(x_nN, weight_eNK, offs=self.ends_e)
        if self.runs or turned or 2 * self.busy > len(self.counts):
            own = self.own(weight_eNK)
            return self._one_by_one(x_nN, own, weight_eNK.shape[2], out, turned)
        if out is None:
            out = x_nN.new_empty((x_nN.shape[0], weight_eNK.shape[2]))
        start = 0  # a few tokens that meet a few of many experts
        for slot, count in enumerate(self.counts, self.first):
            if count:
                rows = slice(start, start + count)
                product(x_nN[rows], weight_eNK[slot], out[rows])
                start += count
        return out

    def _one_by_one(
        self,
        x_n: torch.Tensor,
        weights: Iterable[torch.Tensor],
        columns: int,
        out: torch.Tensor | None,
        turned: bool = False,
    ) -> torch.Tensor:
        if out is None:
            out = x_n.new_empty((x_n.shape[0], columns))
        for x, weight, y in zip(self.rows(x_n), weights, self.rows(out, turned), strict=True):
            if turned:
                product(weight.mT, x.mT, y.mT)
            else:
                product(x, weight, y)
        return out

    def tn(
        self,
        a_nN: torch.Tensor,
        b_nK: torch.Tensor,
        out_eNK: torch.Tensor,
        turned: tuple[bool, bool] = (False, False),
    ) -> None:
        """Fill the block's experts of `out_eNK` with `a^T b`, zero for an expert without rows.

        Args:
            a_nN, b_nK: a row a pair.
            out_eNK: filled.
            turned: whether a and b lie so.
        """
        if self.ends_e is None:
            all_a, all_b = self.rows(a_nN, turned[0]), self.rows(b_nK, turned[1])
            for a, b, out in zip(all_a, all_b, self.own(out_eNK), strict=True):
                if a.numel():
                    product(a.mT, b, out)
                else:
                    out.zero_()
        else:
            out_eNK.copy_(F.grouped_mm(a_nN.t(), b_nK, offs=self.ends_e))

    def column_sums(self, a_nN: torch.Tensor, weight_n: torch.Tensor, out_eN: torch.Tensor) -> None:
        """Fill the block's experts of `out_eN` with the sum over rows of `weight * a`."""
        if self.ends_e is None:
            weighed_nN = a_nN * weight_n[:, None]
            for weighed, out in zip(self.rows(weighed_nN), self.own(out_eN), strict=True):
                torch.sum(weighed, dim=-2, out=out)
        else:
            # eight equal columns, because grouped_mm wants rows of 16 bytes; its order is fixed
            columns = weight_n.to(a_nN.dtype)[:, None].expand(-1, 8).contiguous()
            out_eN.copy_(F.grouped_mm(a_nN.t(), columns, offs=self.ends_e)[..., 0])

    def each_row(self, bias_eN: torch.Tensor) -> torch.Tensor:
        """Return the bias of each row's expert, `[n, N]` or `[1, N]`."""
        if self.ends_e is None:
            own_eN = bias_eN[self.first : self.first + len(self.counts)]
            if len(self.counts) == 1:
                return own_eN
            counts = torch.tensor(self.counts, device=bias_eN.device)
            return own_eN.repeat_interleave(counts, 0, output_size=self.stop - self.start)
        pairs = torch.arange(self.stop - self.start, device=bias_eN.device, dtype=torch.int32)
        slot_P = torch.searchsorted(self.ends_e, pairs, right=True)
        return bias_eN.index_select(0, slot_P.clamp_(max=bias_eN.shape[0] - 1))

    def value_of(self, value_e: torch.Tensor) -> torch.Tensor:
        """Return the value of each pair's expert, `[n]`, or `[1]` where all have one."""
        return self.each_row(value_e[:, None])[:, 0]

    def rows_of(self, pair_row_P: torch.Tensor) -> torch.Tensor:
        """Return the row of each of the block's pairs, row 0 for padding."""
        row_n = pair_row_P[self.start : self.stop]
        return row_n if self.valid_P1 is None else torch.where(self.valid_P1[:, 0], row_n, 0)

    def add_to_rows(
        self, out_RD: torch.Tensor, row_n: torch.Tensor, y_nD: torch.Tensor
    ) -> torch.Tensor:
        """Return `out_RD` with each pair's row added, of its dtype, in the order of the pairs."""
        if self.ends_e is None:
            if not out_RD.is_cuda:  # one row after the other
                return out_RD.index_add_(0, row_n, y_nD)
            # a row meets an expert at most once, so no two additions meet in one call
            for row, y in zip(self.rows(row_n), self.rows(y_nD), strict=True):
                out_RD.index_add_(0, row, y)
            return out_RD
        if self.valid_P1 is not None:
            row_n = torch.where(self.valid_P1[:, 0], row_n, out_RD.shape[0])
        return out_RD.add_(sum_rows(y_nD, plan_sums(row_n, out_RD.shape[0])))


def make_blocks(
    counts_e: torch.Tensor,
    counts: tuple[int, ...] | None,
    num_pairs: int,
    *,
    grouped: bool,
    hidden: int,
    empty: Sequence[int] = (),
    runs: Sequence[int] = (),
    turned: bool = False,
) -> list[Block]:
    """Return the blocks that cover all places; reads the counts to the host unless `grouped`.

    Args:
        counts_e: places of each expert.
        counts: the same on the host, or None.
        num_pairs: places, padding included.
        grouped: one block of all.
        hidden: F.
        empty: places without a pair, in order.
        runs: numbers of experts that stay together; empty: each is alone.
        turned: the pre-activations lie so.
    """
    if not grouped or num_pairs == 0:
        if counts is None:
            counts = tuple(counts_e.tolist()) if num_pairs else (0,) * counts_e.shape[0]
        most = max(PASS // max(hidden, 1), 1)
        blocks, start, at_empty = [], 0, 0
        for first, own_runs in _cut(counts, runs or (1,) * len(counts), most):
            own = counts[first : first + sum(own_runs)]
            stop, until = start + sum(own), at_empty
            while until < len(empty) and empty[until] < stop:
                until += 1
            free = [place - start for place in empty[at_empty:until]]
            where = torch.tensor(free, device=counts_e.device) if free else None
            together = own_runs if max(own_runs) > 1 else ()
            blocks.append(Block(start, stop, first, own, empty=where, runs=together, turned=turned))
            start, at_empty = stop, until
        return blocks
    ends_e = counts_e.cumsum(0).to(torch.int32)
    valid_P1 = None
    if counts is None or sum(counts) != num_pairs:
        pairs = torch.arange(num_pairs, device=counts_e.device)
        valid_P1 = (pairs < ends_e[-1])[:, None]
    return [Block(0, num_pairs, ends_e=ends_e, valid_P1=valid_P1)]


def _cut(
    counts: Sequence[int], runs: Sequence[int], most: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the first expert and the runs of each block: as many runs as `most` rows hold."""
    first = expert = rows = 0
    own: list[int] = []
    for many in runs:
        size = many * counts[expert]
        if own and rows + size > most:
            yield first, tuple(own)
            first, rows, own = expert, 0, []
        own.append(many)
        rows += size
        expert += many
    yield first, tuple(own)


class Scratch:
    """Named buffers that each block uses again; they grow to the largest block."""

    def __init__(self, blocks: list[Block], device: torch.device) -> None:
        self._rows = max((block.stop - block.start for block in blocks), default=0)
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised `[rows, columns]`; earlier contents of that name are lost."""
        found = self._buffers.get(name)
        if found is None or found.shape[1] != columns or found.shape[0] < rows:
            size = (max(self._rows, rows), columns)
            found = self._buffers[name] = workspace.empty(size, dtype, self._device)
        return found[:rows]

    def whole(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised `[rows, columns]` that is not used again."""
        return workspace.empty((rows, columns), dtype, self._device)
