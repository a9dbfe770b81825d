"""What recompute keeps of a block, what its second run sends, and that nothing is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models_axes import config, micro_batches, relative

from moe_tp import Mesh, ParallelLayout, Runtime, settle_gradients
from moe_tp.checkpoint import gather_named
from moe_tp.models import build
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.live import LiveBytes, tensors_of
from moe_tp.testing import run_ranks

LAYERS = 3


def second_run(layout: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    """Bytes kept by a forward, what its backward sends forwards again, and the gradients."""
    mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
    model = build(config("mixtral", LAYERS), mesh, seed=3, dtype=torch.float64)
    batch = micro_batches(mesh.size("dp"), mesh.coordinate("dp"))[0]
    with LiveBytes() as live:
        live.add(tensors_of(model))
        before = live.now()
        out = model(**batch)
        kept = live.now() - before
        with record_traffic() as log:
            (out.loss + out.aux.loss).backward()
    settle_gradients(model)
    again: dict[str, int] = {}
    for axis, op, phase, size in log.entries:
        if phase == "forward":
            again[f"{axis} {op}"] = again.get(f"{axis} {op}", 0) + size
    return {"kept": kept, "again": again, "grads": gather_named(model, "grad")}


@pytest.mark.parametrize(("world", "layout"), [(2, {"ep": 2}), (4, {"tp": 2, "ep": 2, "etp": 2})])
def test_selective_keeps_received_rows(world: int, layout: dict[str, Any]) -> None:
    """N3, D11: selective sends no row again, `resend_rows` and full do; none after the experts."""
    runs = {
        name: run_ranks(second_run, world, layout, runtime)[0]
        for name, runtime in {
            "none": {},
            "selective": {"recompute": "selective"},
            "resend": {"recompute": "selective", "resend_rows": True},
            "full": {"recompute": "full"},
        }.items()
    }
    for name, run in runs.items():
        for key, want in runs["none"]["grads"].items():
            assert relative(run["grads"][key], want, 1e-9) < 1e-12, f"{name} {key}"
    assert runs["none"]["again"] == {}
    rows = {name: run["again"].get("ep all_to_all", 0) for name, run in runs.items()}
    assert rows["selective"] == 0
    assert "etp all_gather" not in runs["selective"]["again"]
    assert rows["resend"] == rows["full"] > 0
    for name in ("selective", "resend", "full"):
        assert "etp reduce_scatter" not in runs[name]["again"]  # sums of experts are not needed
    kept = {name: run["kept"] for name, run in runs.items()}
    assert kept["full"] < kept["resend"] < kept["selective"] < kept["none"]


def test_live_bytes_follow_what_is_freed() -> None:
    """D11: views count once, a freed or emptied storage no more, the peak stays."""
    with LiveBytes() as live:
        first = torch.ones(1000)
        view = first.view(10, 100)
        assert live.now() == 4000
        second = view + 1
        assert live.now() == live.peak == 8000
        del second
        assert live.now() == 4000
        first.untyped_storage().resize_(0)
        assert live.now() == 0
        assert live.peak == 8000
    del view
