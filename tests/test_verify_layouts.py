"""verify on a chosen few of all layouts, on every family, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from verify_families import CASES, saved
from verify_models import MIXTRAL_6, MIXTRAL_8, MODELS, write_folder
from verify_sweep import Case, cases, failed, run_cases, sweep

from moe_tp.errors import CheckpointError, ConfigError, MoeTpError
from moe_tp.models import ModelConfig, from_pretrained
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.verify import verify
from moe_tp.verify.compare import Findings, relative_error, tolerances_for
from moe_tp.verify.run import _refuse
from moe_tp.verify.watch import Choices, watch

L = ParallelLayout
FEW = ("mixtral-window-tied", "qwen2_moe", "deepseek_v3", "gpt_oss")  # the others are slow ones
# A chosen few; `make parity` runs all. On 8 ranks: tp inside ep.
CHOSEN: dict[int, tuple[ParallelLayout, ...]] = {
    2: (L(), L(tp=2), L(ep=2), L(etp=2), L(tp=2, ep=2), L(tp=2, etp=2)),
    4: (L(ep=2, etp=2), L(tp=2, ep=4), L(tp=4, ep=2, etp=2), L(tp=2, etp=4)),
    8: (L(tp=2, ep=4, etp=2),),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("verify")
    return {name: str(write_folder(root / name, config)) for name, config in MODELS.items()}


# (axes, zero, recompute): pipeline, context, ZeRO and recompute with each other and with the rest;
# `make parity` runs them all.
COMBINED: dict[int, tuple[tuple[dict[str, int], int, str], ...]] = {
    2: (
        ({}, 1, "selective"),
        ({"ep": 2}, 2, "none"),
        ({"tp": 2}, 3, "full"),
        ({"cp": 2, "etp": 2}, 0, "none"),
        ({"cp": 2, "ep": 2}, 3, "selective"),
        ({"pp": 2}, 0, "none"),
        ({"pp": 2}, 1, "full"),
    ),
    4: (
        ({"tp": 2, "ep": 4}, 3, "selective"),
        ({"cp": 2, "ep": 4}, 2, "none"),
        ({"pp": 2, "tp": 2, "ep": 2}, 0, "selective"),
        ({"pp": 2, "cp": 2, "etp": 2}, 0, "none"),
    ),
    8: (({"pp": 2, "cp": 2, "tp": 2, "ep": 4}, 0, "full"),),
}


def _check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row.get("passed"), row
        assert row["routing_flips"] == 0


@pytest.mark.parametrize("world", CHOSEN)
def test_layouts(world: int, folders: dict[str, str]) -> None:
    """G1, G3, G5, L1, L2, D2, D3, D4, D9, C17: loss, gradients, norm, weights after 5 steps."""
    layouts = [layout.resolve(world) for layout in CHOSEN[world]]
    models = ("mixtral-8", "mixtral-6")
    todo = [Case(models[i % 2], layout) for i, layout in enumerate(layouts)]
    _check(run_ranks(run_cases, world, folders, todo, 5, timeout=240.0)[0])


@pytest.mark.parametrize("world", COMBINED)
def test_all_axes(world: int, folders: dict[str, str]) -> None:
    """G1, G3, G5, L1, L2, N3: pp, cp, ZeRO and recompute combined, with a shared expert."""
    todo = [
        Case("qwen2-16", L(**axes, zero=zero).resolve(world), recompute)
        for axes, zero, recompute in COMBINED[world]
    ]
    _check(run_ranks(run_cases, world, folders, todo, 3, timeout=240.0)[0])


def test_other_optimiser_and_dtypes(folders: dict[str, str]) -> None:
    """G5: SGD with momentum in fp32, AdamW in fp64 within 1e-9; bf16 within its tolerances."""
    layout = L(tp=2, ep=2, etp=2).resolve(4)
    todo = [
        Case("mixtral-6", layout, optimizer="sgd"),
        Case("mixtral-6", layout, dtype="float64"),
        Case("mixtral-8", replace(layout, zero=3), dtype="bfloat16"),
    ]
    rows = run_ranks(run_cases, 4, folders, todo, 3, timeout=120.0)[0]
    _check(rows[:2])
    assert all(float(e) < 1e-9 for e in rows[1]["max_relative_error"].values())
    assert rows[2]["passed"], rows[2]


def test_bf16_is_no_worse_than_one_process(folders: dict[str, str]) -> None:
    """G1: a layout in bf16 is at most 1.5 times as far from fp32 as one process in bf16."""
    alone = verify(folders["mixtral-8"], dtype=torch.bfloat16, steps=0, tokens=61)
    layout = L(tp=2, ep=2).resolve(2)
    row = run_ranks(
        run_cases, 2, folders, [Case("mixtral-8", layout, dtype="bfloat16")], 0, timeout=120.0
    )[0][0]
    assert float(row["max_relative_error"]["loss"]) <= 2e-2  # one number may be right by accident
    most = 1.5 * float(alone.max_relative_error["gradients"] or 0.0)
    assert float(row["max_relative_error"]["gradients"]) <= most


@pytest.mark.parametrize(
    "case",
    [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_families(case: str, tmp_path: Path) -> None:
    """G1, R3, D8: every family on 2 ranks with tp and ep, and with tp and etp."""
    saved(case, tmp_path)
    todo = [Case(case, layout.resolve(2)) for layout in (L(tp=2, ep=2), L(tp=2, etp=2))]
    _check(run_ranks(run_cases, 2, {case: str(tmp_path)}, todo, 2, timeout=120.0)[0])


def test_report(folders: dict[str, str]) -> None:
    """G1: the report holds what CONTRACT promises, is JSON, and leaves weights out at 0 steps."""
    report = verify(folders["mixtral-6"], steps=0, tokens=40)
    found = json.loads(json.dumps(report.to_json()))
    assert found["passed"] is True
    assert found["layout"] == "one process"
    assert set(found["loss"]) == {"reference", "layout"}
    assert set(found["max_relative_error"]) == {
        *("logits", "loss", "gradients", "grad_norm", "weights"),
    }
    assert found["max_relative_error"]["weights"] is None
    assert found["worst_parameter"].startswith("model.layers.")
    assert found["first_divergent_layer"] is None
    assert found["routing_flips"] == 0
    assert str(report).startswith("passed one process: ")


def test_ties_are_no_flips(tmp_path: Path) -> None:
    """R1, C01: a router of zeros ties every expert; both sides take the lowest."""
    folder = write_folder(tmp_path / "ties", {**MIXTRAL_8, "num_local_experts": 5})
    _zero_routers(folder)
    report = verify(folder, steps=1, tokens=40)
    assert report.passed, report
    assert report.routing_flips == 0


def _zero_routers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("gate.weight"):
            tensors[name].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_routing_is_replayed(folders: dict[str, str]) -> None:
    """R1: the layout computes the reference's choice, not its own, and keeps its own apart."""
    mesh = Mesh.single()
    model = from_pretrained(folders["mixtral-8"], mesh)
    ids = torch.arange(7)[None]
    forced = torch.stack([torch.arange(7) % 8, (torch.arange(7) + 3) % 8], dim=1)
    choices = {layer: Choices(torch.arange(7), forced) for layer in (0, 1)}
    with watch(model, choices) as seen:
        out = model(ids, ids)
    assert out.aux.counts_LE[0].equal(torch.bincount(forced.flatten(), minlength=8))
    chosen = seen.joined()["chosen"][0]
    assert chosen.shape == forced.shape
    assert not chosen.equal(forced)


def test_flips_by_gap() -> None:
    """R1: a flip at a rounding gap passes, one at a wider gap fails and is counted."""
    limits = tolerances_for(torch.float32)
    near = Findings(flips=2, widest_flip=1e-7)
    assert near.failures(limits, steps=0) == ()
    far = Findings(flips=2, widest_flip=1e-3)
    assert "2 choices differ" in far.failures(limits, steps=0)[0]


def test_divergent_layer() -> None:
    """G1: the first layer with a wrong output, else the last with a wrong gradient."""
    limits = tolerances_for(torch.float32)
    both = Findings(forward={0: 1e-7, 1: 1e-3, 2: 1e-2}, backward={0: 1.0})
    assert both.divergent_layer(limits) == 1
    behind = Findings(forward={0: 0.0, 1: 0.0}, backward={0: 1e-2, 1: 1e-3, 2: 1e-7})
    assert behind.divergent_layer(limits) == 1
    assert Findings(forward={0: 1e-7}, backward={0: 1e-7}).divergent_layer(limits) is None
    assert Findings(forward={0: float("nan")}).divergent_layer(limits) == 0


def test_errors_are_never_lost() -> None:
    """G1: other shapes, NaN and names on one side only are infinite errors."""
    one = torch.ones(3)
    assert relative_error(one, torch.ones(4), 1.0) == float("inf")
    assert relative_error(one * float("nan"), one, 1.0) == float("inf")
    assert relative_error(one * 0 + 1e-9, one * 0, 1.0) == pytest.approx(1e-3 * 3**0.5)
    findings = Findings()
    findings.compare_named("gradients", {"a": one}, {"a": one, "b": one})
    assert findings.errors["gradients"] == float("inf")
    assert "the layout has no gradients for b" in findings.notes
    assert findings.worst[1] == "b"


def test_refusals(folders: dict[str, str], tmp_path: Path) -> None:
    """R1, F3, K2: what cannot be compared is refused by name, as is a folder that is none."""
    config = ModelConfig.from_hub(MIXTRAL_6)

    def with_router(**changes: Any) -> ModelConfig:
        return replace(
            config, moe=replace(config.moe, router=replace(config.moe.router, **changes))
        )

    with pytest.raises(ConfigError, match="capacity_factor=1"):
        _refuse(with_router(capacity_factor=1.0), "adamw", 1)
    with pytest.raises(ConfigError, match="kind='expert_choice'"):
        _refuse(with_router(kind="expert_choice"), "adamw", 1)
    with pytest.raises(ConfigError, match="optimizer='lion'"):
        verify(folders["mixtral-6"], optimizer="lion")
    with pytest.raises(ConfigError, match="tokens=0"):
        verify(folders["mixtral-6"], tokens=0)
    with pytest.raises(ConfigError, match="steps=-1"):
        verify(folders["mixtral-6"], steps=-1)
    with pytest.raises(ConfigError, match="float16"):
        verify(folders["mixtral-6"], dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"cp\*tp\*pp=2"):
        verify(folders["mixtral-6"], L(tp=2))
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "nowhere")


def _error_of(folder: str, layout: ParallelLayout) -> str:
    try:
        verify(folder, layout)
    except MoeTpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_errors_reach_every_rank(folders: dict[str, str]) -> None:
    """F2, F3: a layout that the model cannot take is refused on every rank, without a hang."""
    errors = run_ranks(_error_of, 4, folders["mixtral-6"], L(dp=2, tp=4))
    assert all(error.startswith("ConfigError") for error in errors), errors


def test_dropout_is_off(tmp_path: Path) -> None:
    """N2: a folder trained with dropout is verified as in evaluation."""
    folder = write_folder(tmp_path / "drop", {**MIXTRAL_6, "residual_dropout": 0.1})
    assert verify(folder, steps=1, tokens=40).passed


def test_named_dispatchers_and_back_ends(folders: dict[str, str]) -> None:
    """D1: the same answer through every dispatcher and expert back end that is named."""
    for runtime in (Runtime(experts="loop"), Runtime(dispatcher="all_to_all")):
        report = verify(folders["mixtral-6"], steps=1, tokens=40, runtime=runtime)
        assert report.passed, report


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_layout(tmp_path: Path) -> None:
    """G1-G3, G5: every layout of dp, tp, ep and etp on 1, 2, 4 and 8 ranks, or its refusal."""
    done: dict[str, Any] = {}
    todo = cases("base", [1, 2, 4, 8])
    sweep(tmp_path, todo, steps=5, done=done, keep=lambda row: None)
    assert len(done) == len(todo)
    assert failed(done.values()) == []
