"""Which rank holds which elements of every parameter, known to all ranks.

Each element has one owner, the lowest rank that holds it. Owners are found by cutting a parameter
at every border of any rank's slices into cells, each a dense box inside one rank's local tensor.
Parameters that lie alike share one table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_tp.checkpoint.agree import gather_json
from moe_tp.checkpoint.blocks import Box, Run, runs_of
from moe_tp.checkpoint.header import CODES, DTYPES
from moe_tp.checkpoint.load import Target
from moe_tp.errors import CheckpointError
from moe_tp.parallel.collectives import Group

Signature = tuple[tuple[tuple[int, int, int], ...], ...]  # runs of each dimension


@dataclass(frozen=True, slots=True)
class Cell:
    """A dense box of a parameter and the rank (of the group) that speaks for it."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class Holding:
    """One parameter as the ranks hold it.

    Args:
        shape: logical shape.
        dtype: of the local tensors.
        keep_fp32: it stays in fp32 whatever dtype the model has.
        cells: disjoint cells that cover it.
        by_first: for each index of dimension 0, the cells that hold it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    keep_fp32: bool
    cells: tuple[Cell, ...]
    by_first: tuple[tuple[Cell, ...], ...]


def gather_holdings(
    targets: Sequence[Target], group: Group, device: torch.device
) -> dict[str, Holding]:
    """Return how every parameter of the whole model is held.

    Args:
        targets: this rank's tensors.
        group: the ranks.
        device: where collectives take their tensors.

    Raises:
        CheckpointError: an element lies on no rank, or ranks disagree about a shape.

    Collectives: all-gather of a table of contents over `group`.
    """
    kinds: dict[Signature, int] = {}
    mine = {}
    for target in targets:
        runs = tuple(
            tuple((r.local, r.logical, r.length) for r in runs_of(index)) for index in target.index
        )
        kind = kinds.setdefault(runs, len(kinds))
        dtype = CODES[target.local.dtype]
        mine[target.fqn] = [list(target.shape), dtype, target.keep_fp32, kind]
    everyone = gather_json([list(kinds), mine], group, device)
    held: dict[str, tuple[list[object], list[tuple[int, Signature]]]] = {}
    for rank, (signatures, table) in enumerate(everyone):
        frozen = [tuple(tuple(map(tuple, runs)) for runs in s) for s in signatures]
        for fqn, (*facts, kind) in table.items():
            known, holders = held.setdefault(fqn, (facts, []))
            if known != facts:
                raise CheckpointError(
                    f"parameter {fqn!r}: rank {group.ranks[rank]} holds it as {facts}, rank "
                    f"{group.ranks[holders[0][0]]} as {known}"
                )
            holders.append((rank, frozen[kind]))
    tables: dict[object, tuple[tuple[Cell, ...], tuple[tuple[Cell, ...], ...]]] = {}
    result = {}
    for fqn, (facts, holders) in held.items():
        size, code, keep = facts
        assert isinstance(size, list)
        shape = tuple(size)
        key = (shape, tuple(holders))
        if key not in tables:
            cells = _cells(fqn, shape, holders)
            tables[key] = cells, _by_first(cells, shape)
        result[fqn] = Holding(shape, DTYPES[str(code)], bool(keep), *tables[key])
    return result


def _cells(
    fqn: str, shape: tuple[int, ...], holders: Sequence[tuple[int, Signature]]
) -> tuple[Cell, ...]:
    """Cut a parameter at every border of a slice and give each cell to the lowest rank."""
    spans: list[list[tuple[int, int]]] = []
    for dim, size in enumerate(shape):
        borders = {0, size}
        for _, runs in holders:
            for _, logical, length in runs[dim]:
                borders.update((logical, logical + length))
        edges = sorted(borders)
        spans.append(list(itertools.pairwise(edges)))
    starts = [{start: i for i, (start, _) in enumerate(dim)} for dim in spans]
    # For each holder and dimension: number of the interval -> its place in the local tensor.
    where: list[tuple[int, list[dict[int, int]]]] = []
    for rank, runs in holders:
        maps: list[dict[int, int]] = []
        for dim, dim_runs in enumerate(runs):
            found: dict[int, int] = {}
            for local, logical, length in dim_runs:
                at = starts[dim][logical]
                while at < len(spans[dim]) and spans[dim][at][0] < logical + length:
                    found.setdefault(at, local + spans[dim][at][0] - logical)
                    at += 1
            maps.append(found)
        where.append((rank, maps))
    cells = []
    for numbers in itertools.product(*(range(len(dim)) for dim in spans)):
        for rank, maps in where:
            if all(n in found for n, found in zip(numbers, maps, strict=True)):
                box = tuple(
                    Run(found[n], dim[n][0], dim[n][1] - dim[n][0])
                    for n, found, dim in zip(numbers, maps, spans, strict=True)
                )
                cells.append(Cell(rank, box))
                break
        else:
            lost = [dim[n][0] for n, dim in zip(numbers, spans, strict=True)]
            raise CheckpointError(f"parameter {fqn!r}: no rank holds its element {lost}")
    return tuple(cells)


def _by_first(cells: Sequence[Cell], shape: tuple[int, ...]) -> tuple[tuple[Cell, ...], ...]:
    if not shape:
        return ()
    rows: list[list[Cell]] = [[] for _ in range(shape[0])] if len(shape) > 2 else []
    for cell in cells if rows else ():
        first = cell.box[0]
        for i in range(first.logical, first.logical + first.length):
            rows[i].append(cell)
    return tuple(map(tuple, rows))
