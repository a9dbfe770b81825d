"""bf16 compute over fp32 weights, on layouts of every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models_axes import config, micro_batches

from moe_tp import Mesh, ParallelLayout, Runtime, forward_backward, settle_gradients
from moe_tp.checkpoint import gather_named
from moe_tp.models import build
from moe_tp.testing import run_ranks

EVERY = {"num_local_experts": 6, "num_experts_per_tok": 6}  # no choice that rounding could flip
Found = tuple[float, torch.Tensor]


def step(layout: dict[str, Any], runtime: dict[str, Any]) -> Found:
    """The loss and all gradients in one vector."""
    mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
    model = build(config("mixtral", 2, **EVERY), mesh, seed=3)
    found = forward_backward(model, micro_batches(mesh.size("dp"), mesh.coordinate("dp")))
    settle_gradients(model)
    grads = gather_named(model, "grad")
    return found.loss.item(), torch.cat([grads[k].flatten().float() for k in sorted(grads)])


Cases = list[tuple[int, dict[str, Any], dict[str, Any]]]
CASES: Cases = [
    (2, {"zero": 3, "ep": 2}, {"recompute": "selective"}),
    (4, {"tp": 2, "ep": 2, "etp": 2, "zero": 1}, {}),
]
MORE: Cases = [
    (2, {"pp": 2}, {}),
    (2, {"cp": 2, "etp": 2}, {"cp_kind": "ring", "recompute": "full"}),
    (4, {"tp": 2, "pp": 2, "ep": 2}, {"recompute": "selective"}),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_no_layout_is_worse_than_one_process(cases: Cases) -> None:
    """G1, R4: loss within 2e-2 of fp32; gradients at most 1.5 times as far off as on one rank."""
    loss, grads = run_ranks(step, 1, {}, {})[0]
    half: dict[str, Any] = {"compute_dtype": torch.bfloat16}

    def off(found: Found) -> float:
        assert found[0] == pytest.approx(loss, abs=2e-2)
        return float((found[1] - grads).norm() / grads.norm())

    alone = off(run_ranks(step, 1, {}, half)[0])
    assert alone > 1e-3
    for world, layout, runtime in cases:
        found = off(run_ranks(step, world, layout, {**runtime, **half})[0])
        assert found <= 1.5 * alone, (layout, runtime)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_model_under_autocast(family: str) -> None:
    """R4: the bits of `Runtime(compute_dtype=...)`, loss and gradients."""
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    found = []
    for compute in (torch.bfloat16, None):
        mesh = Mesh.single(Runtime(compute_dtype=compute))
        model = build(config(family, 2), mesh, seed=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=compute is None):
            out = model(ids, labels=ids)
        (out.loss + out.aux.loss).backward()
        settle_gradients(model)
        found.append({"loss": out.loss.detach(), **gather_named(model, "grad")})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
