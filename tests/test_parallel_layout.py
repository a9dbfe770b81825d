"""Layouts: what is accepted, what is refused and with which advice, and the arithmetic of grids."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from moe_tp.errors import ConfigError
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import _Grid

DENSE, EXPERT = ("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize(
    ("layout", "world", "dp", "edp"),
    [
        (ParallelLayout(), 1, 1, 1),
        (ParallelLayout(), 6, 6, 6),
        (ParallelLayout(tp=2, ep=8), 8, 4, 1),
        (ParallelLayout(dp=1, tp=4, ep=2, etp=2), 4, 1, 1),
        (ParallelLayout(tp=3, ep=2, etp=3), 12, 4, 2),
        (ParallelLayout(cp=2, tp=2, pp=3, ep=2, zero=3), 24, 2, 4),
    ],
)
def test_resolve_fills_dp_and_edp(layout: ParallelLayout, world: int, dp: int, edp: int) -> None:
    """D11: dp fills the world; ep and etp are free of tp and leave edp replicas of each expert."""
    got = layout.resolve(world)
    assert (got.dp, got.edp, got.world_size, got.zero) == (dp, edp, world, layout.zero)
    assert got.stage_size * got.pp == world
    assert got.resolve(world) == got


@pytest.mark.parametrize(
    ("layout", "world", "words"),
    [
        (ParallelLayout(), 0, ["world_size=0", "at least 1"]),
        (ParallelLayout(tp=4), 6, ["cp*tp*pp=4", "6 ranks", "multiple of 4", "lower cp, tp or pp"]),
        (ParallelLayout(dp=3, tp=2), 4, ["dp*cp*tp*pp=6", "choose dp=2", "start 6 ranks"]),
        (ParallelLayout(ep=3), 4, ["ep*etp=3", "dp*cp*tp=4", "divisors of 4"]),
        (ParallelLayout(pp=2, ep=8), 8, ["ep*etp=8", "dp*cp*tp=4", "divisors of 4"]),
    ],
)
def test_resolve_refuses_with_the_fix(layout: ParallelLayout, world: int, words: list[str]) -> None:
    """F3: degrees that do not fill the world are refused, and the message names what to choose."""
    with pytest.raises(ConfigError) as caught:
        layout.resolve(world)
    for word in words:
        assert word in str(caught.value), word


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"tp": 0}, "tp=0 must be a whole number of at least 1"),
        ({"dp": -1}, "dp=-1"),
        ({"ep": 2.0}, "ep=2.0"),
        ({"pp": True}, "pp=True"),
        ({"cp": None}, "cp=None"),
        ({"etp": "2"}, "etp='2'"),
        ({"zero": 4}, "choose 0, 1, 2 or 3"),
        ({"zero": True}, "zero=True"),
    ],
)
def test_a_layout_checks_itself(settings: dict[str, Any], word: str) -> None:
    """F3: a degree that is no positive whole number is refused when the layout is made."""
    with pytest.raises(ConfigError) as caught:
        ParallelLayout(**settings)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"recompute": "some"}, "none, selective, full"),
        ({"cp_kind": "star"}, "ulysses, ring"),
        ({"pp_schedule": "2f2b"}, "gpipe, 1f1b, interleaved_1f1b, zbv"),
        ({"virtual_stages": 0}, "virtual_stages=0"),
        ({"dp_replicate": -2}, "dp_replicate=-2"),
        ({"loss_chunk": 1.5}, "loss_chunk=1.5"),
        ({"compute_dtype": torch.int32}, "compute_dtype=torch.int32"),
        ({"wire_dtype": "bf16"}, "wire_dtype='bf16'"),
        ({"compute_dtype": torch.float8_e4m3fn}, "compute_dtype=torch.float8_e4m3fn"),
        ({"master_dtype": torch.bool}, "master_dtype=torch.bool"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"timeout": math.nan}, "timeout=nan"),
        ({"timeout": math.inf}, "timeout=inf"),
    ],
)
def test_a_runtime_checks_itself(settings: dict[str, Any], word: str) -> None:
    """F3: a runtime value outside its set is refused when the runtime is made."""
    with pytest.raises(ConfigError) as caught:
        Runtime(**settings)
    assert word in str(caught.value)


def test_names_and_unresolved_layouts() -> None:
    """F3: a layout prints as its degrees, and asks to be resolved before it counts ranks."""
    assert str(ParallelLayout(dp=2, tp=2, ep=4, zero=3)) == "dp2 tp2 ep4 zero3"
    assert str(ParallelLayout()) == "one process"
    for ask in ("stage_size", "edp", "world_size"):
        with pytest.raises(ConfigError, match="resolve"):
            getattr(ParallelLayout(), ask)
    assert Runtime(compute_dtype=torch.bfloat16).compute_dtype is torch.bfloat16


def partition(grid: _Grid, axes: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Return the groups along `axes`, having checked that they partition the world."""
    groups: set[tuple[int, ...]] = set()
    covered: set[int] = set()
    for rank in range(math.prod(grid.sizes)):
        if rank not in covered:
            ranks = grid.ranks_along(rank, axes)
            assert rank in ranks
            assert not covered & set(ranks)
            assert grid.ranks_along(ranks[-1], axes) == ranks
            groups.add(ranks)
            covered |= set(ranks)
    return groups


@pytest.mark.parametrize("world", [*range(1, 9), 12, 16, 30, 64])
def test_both_grids_cover_the_ranks(world: int) -> None:
    """G2, D11: along each axis of both grids the groups partition the world, stages alike."""
    checked = 0
    for pp, tp in product(divisors(world), repeat=2):
        if world % (pp * tp):
            continue
        for cp in divisors(world // (pp * tp))[:2]:
            stage = world // pp
            # All (ep, etp) in small worlds; the corners in large ones.
            fits = [(ep, etp) for ep in divisors(stage) for etp in divisors(stage // ep)]
            for ep, etp in fits if world <= 8 else fits[:: max(1, len(fits) // 2)]:
                lay = ParallelLayout(cp=cp, tp=tp, pp=pp, ep=ep, etp=etp).resolve(world)
                assert lay.dp is not None
                dense = _Grid(DENSE, (pp, lay.dp, cp, tp))
                expert = _Grid(EXPERT, (pp, lay.edp, ep, etp))
                for grid in (dense, expert):
                    for axis, size in zip(grid.axes, grid.sizes, strict=True):
                        groups = partition(grid, (axis,))
                        assert {len(ranks) for ranks in groups} == {size}
                stages = partition(dense, ("dp", "cp", "tp"))
                assert stages == partition(expert, ("edp", "ep", "etp"))
                assert stages == {tuple(range(s * stage, (s + 1) * stage)) for s in range(pp)}
                # ETP ranks are neighbours: the widest traffic stays inside a node.
                assert partition(expert, ("etp",)) == {
                    tuple(range(r, r + etp)) for r in range(0, world, etp)
                }
                checked += 1
    assert checked >= len(divisors(world))
