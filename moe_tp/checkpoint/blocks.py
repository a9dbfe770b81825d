"""Arithmetic of blocks: which part of a local tensor is which part of a hub tensor.

A rank's local tensor is the outer product of one index per dimension. Each index is cut into `Run`s
(consecutive places that hold consecutive logical elements), so a local tensor is a set of dense
boxes, and a box meets a piece of the name rules in at most one block: a slice on each side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moe_tp.checkpoint.rules import Piece, to_ranges


@dataclass(frozen=True, slots=True)
class Run:
    """`length` consecutive places from `local` hold the logical elements from `logical`."""

    local: int
    logical: int
    length: int


Box = tuple[Run, ...]


def runs_of(index: torch.Tensor) -> tuple[Run, ...]:
    """Return the runs of a dimension's logical index, without its padding (-1)."""
    if len(index) == 0:
        return ()
    before, after = index[:-1], index[1:]
    cuts = ((after != before + 1) | (before < 0)).nonzero().flatten() + 1
    starts = [0, *cuts.tolist()]
    ends = [*starts[1:], len(index)]
    return tuple(
        Run(start, value, end - start)
        for start, end, value in zip(starts, ends, index[starts].tolist(), strict=True)
        if value >= 0
    )


def boxes_of(index: Sequence[torch.Tensor]) -> list[Box]:
    """Return the dense boxes of a local tensor, given each dimension's logical index."""
    return list(itertools.product(*(runs_of(i) for i in index)))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A block that a local tensor and a hub tensor share.

    Args:
        local: slices of the local tensor, one a dimension.
        hub: ranges of the hub tensor, one a dimension.
    """

    local: tuple[slice, ...]
    hub: tuple[range, ...]


class Aligned:
    """A piece with each dimension of its parameter tied to one of its hub tensor.

    Args:
        piece: the piece.
        shape: logical shape of the parameter.
    """

    __slots__ = ("drop_hub", "drop_param", "free", "hub", "param", "piece")

    def __init__(self, piece: Piece, shape: Sequence[int]) -> None:
        self.piece = piece
        self.param = to_ranges(piece.param_index, shape, piece.hub_name)
        self.hub = piece.hub_ranges()
        self.drop_param = [d for d, i in enumerate(piece.param_index) if isinstance(i, int)]
        self.drop_hub = [d for d, i in enumerate(piece.hub_slices) if isinstance(i, int)]
        mine = [d for d in range(len(self.param)) if d not in self.drop_param]
        disk = [d for d in range(len(self.hub)) if d not in self.drop_hub]
        if piece.transpose and len(disk) > 1:
            disk[-1], disk[-2] = disk[-2], disk[-1]
        self.free = dict(zip(mine, disk, strict=False))

    def overlap(self, box: Box) -> Overlap | None:
        """Return what a dense box of a local tensor shares with the piece, None for nothing."""
        local, hub = [], list(self.hub)
        for dim, (run, mine) in enumerate(zip(box, self.param, strict=True)):
            # Places of `mine` whose logical index lies inside the run.
            first = max(0, -((mine.start - run.logical) // mine.step))
            last = min(len(mine), -((mine.start - run.logical - run.length) // mine.step))
            if first >= last:
                return None
            start = run.local + mine[first] - run.logical
            local.append(slice(start, start + (last - first - 1) * mine.step + 1, mine.step))
            disk = self.free.get(dim)
            if disk is not None:
                hub[disk] = hub[disk][first:last]
        return Overlap(tuple(local), tuple(hub))

    def hub_view(self, local: torch.Tensor, overlap: Overlap) -> torch.Tensor:
        """Return the view of a local tensor that has the dimensions of the hub tensor."""
        return self.as_hub(local[overlap.local])

    def as_hub(self, view: torch.Tensor) -> torch.Tensor:
        """Return a block of the parameter with the dimensions of the hub tensor."""
        for dim in reversed(self.drop_param):
            view = view.squeeze(dim)
        if self.piece.transpose and view.dim() > 1:
            view = view.transpose(-1, -2)
        for dim in self.drop_hub:
            view = view.unsqueeze(dim)
        return view


def clip(
    hub: Sequence[range], window: Sequence[range]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the part of a block inside a window: slices of the block, slices of the window.

    Args:
        hub: the block's range along each dimension of the hub tensor.
        window: the window's, each with step 1.
    """
    inside, placed = [], []
    for mine, span in zip(hub, window, strict=True):
        first = max(0, -((mine.start - span.start) // mine.step))
        last = min(len(mine), -((mine.start - span.stop) // mine.step))
        if first >= last:
            return None
        start = mine[first] - span.start
        inside.append(slice(first, last))
        placed.append(slice(start, start + (last - first - 1) * mine.step + 1, mine.step))
    return tuple(inside), tuple(placed)


def split(ranges: Sequence[range], limit: int) -> Iterator[tuple[range, ...]]:
    """Yield parts of a dense block, in order, of at most `limit` elements each (at least one).

    Parts are whole along the last dimensions, so each is as few stretches of a file as possible.
    """
    if any(len(r) == 0 for r in ranges):
        return
    inner, cut = 1, len(ranges)
    while cut > 0 and inner * len(ranges[cut - 1]) <= limit:
        cut -= 1
        inner *= len(ranges[cut])
    if cut == 0:
        yield tuple(ranges)
        return
    axis, rest = ranges[cut - 1], tuple(ranges[cut:])
    step = max(1, limit // inner)
    for outer in itertools.product(*ranges[: cut - 1]):
        fixed = tuple(range(i, i + 1) for i in outer)
        for start in range(0, len(axis), step):
            yield (*fixed, axis[start : start + step], *rest)


def numel(ranges: Sequence[range]) -> int:
    """Return the number of elements of a block."""
    total = 1
    for r in ranges:
        total *= len(r)
    return total
