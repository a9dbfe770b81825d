"""The mesh: every group against an enumeration of its own, and ranks that disagree."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_tp.errors import ConfigError, RankMismatchError
from moe_tp.parallel.collectives import all_gather, raw_all_gather, raw_all_reduce
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.linear import RowParallelLinear
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import initialise
from moe_tp.testing import run_ranks

AXES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp", "dp_cp", "cp_tp", "stage", "world")
LAYOUTS = {
    4: [
        ParallelLayout(),
        ParallelLayout(tp=2, ep=2, etp=2),
        ParallelLayout(tp=4, ep=4),
        ParallelLayout(pp=2, cp=2, ep=2),
        ParallelLayout(cp=2, tp=2, ep=2),
        ParallelLayout(ep=2, etp=2),
    ],
    8: [
        ParallelLayout(cp=2, tp=2, ep=4),
        ParallelLayout(pp=2, tp=2, ep=2, etp=2),
        ParallelLayout(tp=2, ep=2, etp=2),
        ParallelLayout(cp=2, tp=2, ep=2),
        ParallelLayout(pp=2, cp=2, tp=2, ep=4),
    ],
}


def place(rank: int, lay: ParallelLayout) -> dict[str, int]:
    """Return the coordinates of a rank, by division alone."""
    stage = (lay.dp or 0) * lay.cp * lay.tp
    pp, inside = divmod(rank, stage)
    return {
        "pp": pp,
        "dp": inside // (lay.cp * lay.tp),
        "cp": inside // lay.tp % lay.cp,
        "tp": inside % lay.tp,
        "edp": inside // (lay.ep * lay.etp),
        "ep": inside // lay.etp % lay.ep,
        "etp": inside % lay.etp,
    }


SAME = {  # coordinates that the members of a group have in common
    "pp": ("dp", "cp", "tp"),
    "dp": ("pp", "cp", "tp"),
    "cp": ("pp", "dp", "tp"),
    "tp": ("pp", "dp", "cp"),
    "edp": ("pp", "ep", "etp"),
    "ep": ("pp", "edp", "etp"),
    "etp": ("pp", "edp", "ep"),
    "dp_cp": ("pp", "tp"),
    "cp_tp": ("pp", "dp"),
    "stage": ("pp",),
    "world": (),
}


def groups_of(layouts: list[ParallelLayout]) -> list[dict[str, Any]]:
    found = []
    for layout in layouts:
        mesh = Mesh(layout)
        report: dict[str, Any] = {}
        for axis in AXES:
            group = mesh.group(axis)
            heard = raw_all_gather(torch.tensor([mesh.rank]), group).tolist()
            assert mesh.size(axis) == group.size
            assert mesh.coordinate(axis) == group.rank
            report[axis] = (group.axis, group.size, group.rank, group.ranks, tuple(heard))
        rest = {d: mesh.at_rest(d, zero_sharded=False) for d in ("dense", "expert")}
        report["rest"] = {d: (m.mesh_dim_names, tuple(m.shape)) for d, m in rest.items()}
        report["places"] = {d: tuple(m.get_coordinate()) for d, m in rest.items()}
        report["stage_index"] = mesh.stage
        assert mesh.owners is mesh.group("stage")
        found.append(report)
    return found


@pytest.mark.parametrize("world", [4, 8])
def test_every_group_is_the_enumerated_one(world: int) -> None:
    """G2, D11, F2: each axis joins the ranks that agree in all other coordinates, in order."""
    results = run_ranks(groups_of, world, LAYOUTS[world])
    for number, layout in enumerate(LAYOUTS[world]):
        lay = layout.resolve(world)
        places = [place(rank, lay) for rank in range(world)]
        for rank in range(world):
            report = results[rank][number]
            for axis in AXES:
                key = [places[rank][c] for c in SAME[axis]]
                want = tuple(r for r in range(world) if [places[r][c] for c in SAME[axis]] == key)
                assert report[axis] == (axis, len(want), want.index(rank), want, want), (lay, axis)
            at = places[rank]
            assert report["rest"] == {
                "dense": (("dp_cp", "tp"), ((lay.dp or 0) * lay.cp, lay.tp)),
                "expert": (("edp", "ep", "etp"), (lay.edp, lay.ep, lay.etp)),
            }
            assert report["places"] == {
                "dense": (at["dp"] * lay.cp + at["cp"], at["tp"]),
                "expert": (at["edp"], at["ep"], at["etp"]),
            }
            assert report["stage_index"] == at["pp"]


def zero_meshes() -> dict[str, Any]:
    mesh = Mesh(ParallelLayout(tp=2, ep=2, zero=2))
    return {
        f"{domain} {sharded}": mesh.at_rest(domain, zero_sharded=sharded).mesh_dim_names
        for domain in ("dense", "expert")
        for sharded in (True, False)
    } | {d: (mesh.replicas(d).mesh_dim_names, mesh.replicas(d).size()) for d in ("dense", "expert")}


def test_zero_leaves_the_replicas_axis_to_fsdp() -> None:
    """D11: with ZeRO, parameters that it shards are made without the replicas' axis."""
    assert (
        run_ranks(zero_meshes, 4)
        == [
            {
                "dense True": ("tp",),
                "dense False": ("dp_cp", "tp"),
                "expert True": ("ep", "etp"),
                "expert False": ("edp", "ep", "etp"),
                "dense": (("dp_cp",), 2),
                "expert": (("edp",), 2),
            }
        ]
        * 4
    )


def test_one_process_needs_no_group() -> None:
    """D2: Mesh.single() has every axis at size 1; the same layers run and back-propagate."""
    assert not dist.is_initialized()
    mesh = Mesh.single()
    for axis in AXES:
        group = mesh.group(axis)
        assert (group.size, group.rank, group.process_group) == (1, 0, None)
    layer = RowParallelLinear(4, 3, mesh, bias=True)
    initialise(layer, 0)
    x = torch.ones(5, 4, requires_grad=True)
    all_gather(layer(x), mesh.group("tp")).sum().backward()
    assert x.grad is not None
    mesh.agree("anything", "whatever")
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"init_process_group first; .*Mesh.single\(\)"):
        Mesh(ParallelLayout())
    with pytest.raises(ConfigError, match="axis='sp' is unknown; choose one of pp, dp, cp, tp"):
        mesh.group("sp")


def disagree(case: str) -> tuple[str, str, float]:
    last = dist.get_rank() == dist.get_world_size() - 1
    layout, runtime = ParallelLayout(tp=2), Runtime(timeout=30.0)
    if last and case == "layout":
        layout = ParallelLayout(tp=4)
    if last and case == "unfit":
        layout = ParallelLayout(tp=3)
    if last and case == "runtime":
        runtime = Runtime(timeout=30.0, compute_dtype=torch.bfloat16)
    start = time.monotonic()
    try:
        mesh = Mesh(layout, runtime)
        if case == "value":
            mesh.agree("the first batch", "[2, 16]")  # a comparison that passes does no harm
            mesh.agree("the first batch", "[2, 17]" if last else "[2, 16]")
    except RankMismatchError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "no error", 0.0


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("layout", "tp=4"),
        ("unfit", "tp=3"),
        ("runtime", "torch.bfloat16"),
        ("value", "[2, 17]"),
    ],
)
def test_ranks_that_disagree_are_named(case: str, word: str) -> None:
    """F2: every rank raises within seconds and names the rank, the setting and both values."""
    for kind, text, seconds in run_ranks(disagree, 4, case):
        assert kind == "RankMismatchError"
        assert "ranks [3] disagree with rank 0" in text
        assert word in text
        assert ("the first batch" if case == "value" else "layout and runtime") in text
        assert seconds < 10.0


def wrong_alike() -> str:
    try:
        Mesh(ParallelLayout(tp=3))
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_layout_that_no_rank_can_run_is_refused_alike() -> None:
    """F3: every rank of a run with an impossible layout gets the same advice."""
    messages = run_ranks(wrong_alike, 2)
    assert len(set(messages)) == 1
    assert "does not divide the 2 ranks" in messages[0]


def stuck() -> tuple[str, float]:
    mesh = Mesh(ParallelLayout(dp=2, tp=2), Runtime(timeout=1.0))
    start = time.monotonic()
    if mesh.rank != 0:
        time.sleep(4.0)
        return "", 0.0
    try:
        raw_all_reduce(torch.ones(2), mesh.group("tp"))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_a_missing_rank_ends_a_collective_in_time() -> None:
    """F1: a collective that a rank never joins fails after the runtime's timeout."""
    text, seconds = run_ranks(stuck, 4)[0]
    assert "imed out" in text
    assert seconds < 3.5
