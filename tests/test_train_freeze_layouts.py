"""Ranks and stages with nothing to train: they join every collective, and nothing else moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import hub_config
from test_train_lora import Layout, batches, close, gather

from moe_tp.experts.router import update_router_bias
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora, merge_lora
from moe_tp.train.config import FinetuneConfig, TrainConfig
from moe_tp.train.freeze import choose_trained
from moe_tp.train.loop import finetune
from moe_tp.train.optim import make_optimizer
from moe_tp.train.settings import from_mapping
from moe_tp.train.step import forward_backward

CHOICES: dict[str, dict[str, Any]] = {
    "last-layer": {"only": ("model.layers.1.*",)},
    "first-layer": {"only": ("model.layers.0.*",)},
    "one-expert": {"only": ("experts.0",)},
    "router": {"only": ("router",)},
    "embeddings": {"only": ("embeddings",)},
    "adapters-of-one-expert": {"lora": {"targets": ("experts",), "experts": (0,)}},
    "adapters-of-one-layer": {"lora": {"targets": ("model.layers.0.self_attn.q_proj",)}},
}


def moved(layout: Layout, choice: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    """Return the weights after two steps, the norms, and how many parameters this rank trains."""
    kinds = Runtime(**runtime)
    mesh = Mesh(ParallelLayout(**layout), kinds) if layout else Mesh.single(kinds)
    config = ModelConfig.from_hub(hub_config("mixtral"))
    model = build(config, mesh, seed=3, dtype=torch.float64)
    if "lora" in choice:
        apply_lora(model, LoRAConfig(rank=2, alpha=4.0, **choice["lora"]))
    choose_trained(model, choice.get("freeze", ()), choice.get("only", ()))
    train = TrainConfig(steps=2, lr=1e-2, weight_decay=0.1, eps=1e-4)
    optimizer, norms = make_optimizer(model, train), []
    trained = sum(entry.param.requires_grad for entry in named_specs(model))
    for step in range(2):
        optimizer.zero_grad()
        forward_backward(model, batches(mesh), step=step)
        settle_gradients(model)
        norms.append(clip_grad_norm(model, 1.0))
        optimizer.step()
        update_router_bias(model)
    if "lora" in choice:
        merge_lora(model)
    return {"weights": gather(model, "value"), "norms": norms, "trained": trained}


def all_choices(layout: Layout, runtime: dict[str, Any]) -> list[dict[str, Any]]:
    return [moved(layout, choice, runtime) for choice in CHOICES.values()]


LAYOUTS: list[Any] = [
    pytest.param(2, {"pp": 2}, {}, id="pp2", marks=pytest.mark.slow),
    pytest.param(2, {"pp": 2}, {"recompute": "full"}, id="pp2-recompute"),
    pytest.param(2, {"dp": 2, "ep": 2}, {}, id="ep2", marks=pytest.mark.slow),
    *(
        pytest.param(2, {"dp": 2, "ep": 2, "zero": zero}, {}, id=f"ep2-zero{zero}", marks=marks)
        for zero, marks in ((1, pytest.mark.slow), (2, pytest.mark.slow), (3, ()))
    ),
    pytest.param(
        4, {"pp": 2, "dp": 2, "ep": 2, "zero": 1}, {}, id="pp2-ep2-zero1", marks=pytest.mark.slow
    ),
    pytest.param(
        4,
        {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "zero": 3},
        {},
        id="ep2-etp2",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("world", "layout", "runtime"), LAYOUTS)
def test_every_layout_trains_the_same_part(
    world: int, layout: Layout, runtime: dict[str, Any]
) -> None:
    """G5: frozen stages, experts of other ranks and adapters of one layer, at each ZeRO stage."""
    expected = all_choices({}, {})
    idle = 0
    for found in run_ranks(all_choices, world, layout, runtime):
        for name, want, got in zip(CHOICES, expected, found, strict=True):
            weights = got["weights"]
            assert [n for n in weights if not close(weights[n], want["weights"][n], 1e-8)] == [], (
                name
            )
            assert got["norms"] == pytest.approx(want["norms"], rel=1e-9), name
            idle += got["trained"] == 0
    assert (idle > 0) == ("pp" in layout)  # an expert's rank holds the stack of its layer


def run(folder: str, layout: Layout, choice: dict[str, Any], output: str, steps: int) -> None:
    tree: dict[str, Any] = {
        "model": f"{folder}/model",
        "output": f"{folder}/{output}",
        "data": {"train": f"{folder}/train.jsonl", "seq_len": 16},
        "train": {
            "steps": steps, "schedule": "constant", "lr": 1e-2, "global_batch": 4, "save_every": 2,
        },
        "parallel": layout,
    }  # fmt: skip
    tree["train"] |= {name: list(value) for name, value in choice.items() if name != "lora"}
    if "lora" in choice:
        tree["lora"] = {"rank": 2, "alpha": 4, **choice["lora"]}
    config = from_mapping(FinetuneConfig, tree, "test")
    finetune(config, Mesh(config.parallel, config.runtime), quiet=True, resume=True)


def runs(folder: str, layout: Layout, name: str) -> None:
    run(folder, layout, CHOICES[name], f"{name}-whole", 4)
    for steps in (2, 4):
        run(folder, layout, CHOICES[name], f"{name}-parts", steps)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ({"pp": 2}, "last-layer"),
        ({"pp": 2}, "adapters-of-one-layer"),
        ({"dp": 2, "ep": 2, "zero": 3}, "one-expert"),
        pytest.param(
            {"dp": 2, "ep": 2, "zero": 1}, "adapters-of-one-expert", marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_such_a_run_is_saved_resumed_and_exported(
    tmp_path: Path, layout: Layout, name: str
) -> None:
    """K4: a rank without any state of the optimiser saves and loads with the others."""
    config = ModelConfig.from_hub(hub_config("mixtral"))
    save_pretrained(build(config, Mesh.single(), seed=1), tmp_path / "model")
    lines = [json.dumps({"input_ids": [(7 * n + 3 * i) % 61 for i in range(16)]}) for n in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    run_ranks(runs, 2, str(tmp_path), layout, name)
    curves = []
    for part in ("whole", "parts"):
        text = (tmp_path / f"{name}-{part}" / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in text])
        assert (tmp_path / f"{name}-{part}" / "final" / "config.json").is_file()
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]
    assert len(set(curves[0])) == 4
