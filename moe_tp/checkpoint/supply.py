"""Where the values of a folder that is being written come from: a model's ranks, or another folder.

In each round every rank has a window of slabs to write. `pack` gathers what this rank owes to the
windows of all, `exchange` moves it, `unpack` yields the slabs of this rank's window. Both ends list
the contributions in the same order from the same tables, so only values travel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_tp.checkpoint.blocks import Aligned, Overlap, clip, numel
from moe_tp.checkpoint.files import Slab
from moe_tp.checkpoint.holdings import Cell, Holding
from moe_tp.checkpoint.load import Target
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules
from moe_tp.errors import CheckpointError
from moe_tp.parallel.collectives import Group, raw_all_to_all

_ALIGN = 8  # bytes: contributions start on a multiple of the widest element
_REMEMBER = 64  # hub tensors whose overlaps are kept


@dataclass(frozen=True, slots=True)
class Packed:
    """What a rank sends in a round: bytes for each rank, and how many come from each."""

    data: torch.Tensor
    send: list[int]
    receive: list[int]


class Supply(Protocol):
    """Values for the slabs of windows."""

    def pack(self, windows: Sequence[Sequence[Slab]]) -> Packed:
        """Return what this rank owes to every rank's window; no collective."""
        ...

    def exchange(self, packed: Packed) -> torch.Tensor:
        """Return what the others owe to this rank's window; one all-to-all or nothing."""
        ...

    def unpack(self, window: Sequence[Slab], data: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logical values of each slab of this rank's window; no collective."""
        ...


class OwnSupply(ABC):
    """Values that each rank comes by alone, slab by slab, so that nothing travels."""

    def pack(self, windows: Sequence[Sequence[Slab]]) -> Packed:
        """Return nothing: each rank sees to its own window."""
        none = [0] * len(windows)
        return Packed(torch.empty(0, dtype=torch.uint8), none, none)

    def exchange(self, packed: Packed) -> torch.Tensor:
        """Return nothing; no collective."""
        return packed.data

    def unpack(self, window: Sequence[Slab], data: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the values of each slab."""
        for slab in window:
            yield self.values(slab)

    @abstractmethod
    def values(self, slab: Slab) -> torch.Tensor:
        """Return the logical values of a slab in its dtype."""


class FolderSupply(OwnSupply):
    """Values read from a folder, under the same names or through two sets of name rules.

    Args:
        folder: read from.
        routes: hub tensor to write -> the hub tensors that hold its blocks; names that are not
            in it are read as they are.
    """

    def __init__(self, folder: HubFolder, routes: Mapping[str, Sequence[Route]] | None = None):
        self.folder = folder
        self.routes = routes or {}

    def values(self, slab: Slab) -> torch.Tensor:
        """Return the logical values of a slab in its dtype, read from the folder."""
        name = slab.tensor.logical
        if name not in self.routes:
            return self.folder.read(name, slab.logical).to(slab.tensor.values)
        out = torch.empty([len(r) for r in slab.logical], dtype=slab.tensor.values)
        filled = 0
        for route in self.routes[name]:
            shared = clip(route.out, slab.logical)
            if shared is None:
                continue
            inside, placed = shared
            wanted = route.source_ranges(inside)
            hull = tuple(range(r.start, r[-1] + 1) for r in wanted)
            block = self.folder.read(route.source, hull)
            part = block[tuple(slice(None, None, r.step) for r in wanted)]
            out[placed] = route.turn(part)
            filled += part.numel()
        if filled != out.numel():
            raise CheckpointError(
                f"tensor {name!r}: the name rules fill {filled} of {out.numel()} elements"
            )
        return out


@dataclass(frozen=True, slots=True)
class Route:
    """A block of a tensor to write and the block of a tensor to read that holds it.

    Args:
        out: its ranges in the tensor to write.
        source: name of the tensor to read.
        hub: its ranges there.
        dims: for each dimension of `source`, the dimension of `out` that it is, or None.
    """

    out: tuple[range, ...]
    source: str
    hub: tuple[range, ...]
    dims: tuple[int | None, ...]

    def source_ranges(self, inside: Sequence[slice]) -> tuple[range, ...]:
        """Return the ranges to read for a part of the block."""
        return tuple(
            r if d is None else r[inside[d]] for r, d in zip(self.hub, self.dims, strict=True)
        )

    def turn(self, block: torch.Tensor) -> torch.Tensor:
        """Return what was read with the dimensions of the tensor to write."""
        known = [d for d in self.dims if d is not None]
        view = block.squeeze([i for i, d in enumerate(self.dims) if d is None])
        order = sorted(range(len(known)), key=lambda i: known[i])
        view = view.permute(order)
        for d in range(len(self.out)):
            if d not in known:
                view = view.unsqueeze(d)
        return view


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank's cell contributes to one hub tensor."""

    rank: int
    fqn: str
    aligned: Aligned
    overlap: Overlap


class ModelSupply:
    """Values sent by the ranks that hold them.

    Args:
        rules: the model's name rules.
        targets: this rank's tensors.
        holdings: how every parameter is held.
        group: the ranks.
        device: where collectives take their tensors.
        folder: read for tensors that the model does not hold (carried on).
    """

    def __init__(
        self,
        rules: NameRules,
        targets: Sequence[Target],
        holdings: Mapping[str, Holding],
        group: Group,
        device: torch.device,
        folder: FolderSupply | None = None,
    ) -> None:
        self.group, self.device, self.folder = group, device, folder
        self.holdings = holdings
        self.local = {target.fqn: target.local for target in targets}
        self.sources: dict[str, list[tuple[str, Aligned]]] = {}
        for fqn, pieces in rules.pieces.items():
            if fqn not in holdings:
                raise CheckpointError(f"parameter {fqn!r} of the name rules is held by no rank")
            for piece in pieces:
                aligned = Aligned(piece, holdings[fqn].shape)
                self.sources.setdefault(piece.hub_name, []).append((fqn, aligned))
        self._shares: dict[str, list[_Share]] = {}

    def pack(self, windows: Sequence[Sequence[Slab]]) -> Packed:
        """Return this rank's parts of every window, cast to the slabs' dtypes, in rank order."""
        send, parts = [], []
        for window in windows:
            size = 0
            for slab in window:
                for share, inside, _ in self._contributions(slab):
                    if share.rank != self.group.rank:
                        continue
                    view = share.aligned.hub_view(self.local[share.fqn], share.overlap)[inside]
                    parts.append((view, slab.tensor.values))
                    size += _aligned(view.numel() * slab.tensor.values.itemsize)
            send.append(size)
        data = torch.empty(sum(send), dtype=torch.uint8, device=self.device)
        at = 0
        for view, dtype in parts:
            size = view.numel() * dtype.itemsize
            data[at : at + size].view(dtype).view(view.shape).copy_(view)
            at += _aligned(size)
        receive = [0] * self.group.size
        for slab in windows[self.group.rank]:
            for share, inside, _ in self._contributions(slab):
                count = math.prod(s.stop - s.start for s in inside)
                receive[share.rank] += _aligned(count * slab.tensor.values.itemsize)
        return Packed(data, send, receive)

    def exchange(self, packed: Packed) -> torch.Tensor:
        """Return the others' parts of this rank's window.

        Collectives: one all-to-all over the group.
        """
        return raw_all_to_all(packed.data, packed.send, packed.receive, self.group)

    def unpack(self, window: Sequence[Slab], data: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the values of each slab of this rank's window."""
        data = data.cpu()
        starts = self._starts(window)
        for slab in window:
            if slab.tensor.logical not in self.sources:
                assert self.folder is not None
                yield self.folder.values(slab)
                continue
            shape = [len(r) for r in slab.logical]
            dtype = slab.tensor.values
            out: torch.Tensor | None = None
            filled = 0
            for share, inside, placed in self._contributions(slab):
                sizes = [s.stop - s.start for s in inside]
                count = math.prod(sizes)
                at = starts[share.rank]
                starts[share.rank] += _aligned(count * dtype.itemsize)
                part = data[at : at + count * dtype.itemsize].view(dtype).view(sizes)
                filled += count
                if sizes == shape:
                    out = part  # one rank holds the whole slab
                    continue
                out = torch.empty(shape, dtype=dtype) if out is None else out
                out[placed] = part
            if filled != numel(slab.logical) or out is None:
                raise CheckpointError(
                    f"tensor {slab.tensor.logical!r}: {filled} of {numel(slab.logical)} elements "
                    f"were sent"
                )
            yield out

    def _starts(self, window: Sequence[Slab]) -> list[int]:
        sizes = [0] * self.group.size
        for slab in window:
            for share, inside, _ in self._contributions(slab):
                count = math.prod(s.stop - s.start for s in inside)
                sizes[share.rank] += _aligned(count * slab.tensor.values.itemsize)
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += size
        return starts

    def _contributions(
        self, slab: Slab
    ) -> Iterator[tuple[_Share, tuple[slice, ...], tuple[slice, ...]]]:
        for share in self._shares_of(slab.tensor.logical):
            shared = clip(share.overlap.hub, slab.logical)
            if shared is not None:
                yield share, *shared

    def _shares_of(self, name: str) -> list[_Share]:
        """Return every cell's share of a hub tensor, in the order in which shares travel."""
        known = self._shares.get(name)
        if known is not None:
            return known
        found = []
        for fqn, aligned in self.sources.get(name, ()):
            holding = self.holdings[fqn]
            cells: Sequence[Cell] = holding.cells
            if holding.by_first and len(aligned.param[0]) == 1:
                cells = holding.by_first[aligned.param[0].start]
            for cell in cells:
                overlap = aligned.overlap(cell.box)
                if overlap is not None:
                    found.append(_Share(cell.rank, fqn, aligned, overlap))
        if len(self._shares) >= _REMEMBER * self.group.size:
            self._shares.clear()
        self._shares[name] = found
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
