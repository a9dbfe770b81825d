"""The learning rate of each step, and the optimiser's groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hubs import SMALLEST

from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.testing import run_ranks
from moe_tp.train.config import TrainConfig
from moe_tp.train.lora import LoRAConfig, apply_lora
from moe_tp.train.optim import make_optimizer, rate_factor, set_rate

HUB = SMALLEST


def factors(steps: int, **settings: Any) -> list[float]:
    config = TrainConfig(steps=steps, **settings)
    return [rate_factor(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"schedule": "linear", "min_lr_ratio": 0.4}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]),
        (
            {"schedule": "cosine", "min_lr_ratio": 0.2, "warmup_steps": 2},
            [1 / 3, 2 / 3, 1, 0.8828427, 0.6, 0.3171573, 0.2],
        ),
        (
            {"schedule": "wsd", "min_lr_ratio": 0.0, "decay_steps": 3, "warmup_steps": 1},
            [0.5, 1, 1, 1, 2 / 3, 1 / 3, 0],
        ),
    ],
)
def test_schedules(settings: dict[str, Any], expected: list[float]) -> None:
    assert factors(len(expected), **settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 5, 50])
def test_no_schedule_leaves_its_range(schedule: str, warmup: int) -> None:
    """Also where the warmup is longer than the run, or the run has one step."""
    for steps in (1, 2, 20):
        found = factors(steps, schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.1)
        assert all(0 < value <= 1 for value in found)
        falling = found[warmup:]
        assert falling == sorted(falling, reverse=True)


def test_wsd_falls_over_a_tenth_by_default() -> None:
    found = factors(101, schedule="wsd", min_lr_ratio=0.0)
    assert found[:91] == [1.0] * 91
    assert found[91] == pytest.approx(0.9)
    assert found[-1] == 0.0


def test_routers_keep_a_rate_of_their_own() -> None:
    model = build(ModelConfig.from_hub(HUB), Mesh.single())
    config = TrainConfig(steps=4, lr=1e-2, router_lr=1e-3, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    set_rate(optimizer, 0.1)  # each call counts from the highest rate, not from the last
    assert set_rate(optimizer, 0.5) == pytest.approx(5e-3)
    roles = {id(entry.param): entry.spec.role for entry in named_specs(model)}
    seen = set()
    for group in optimizer.param_groups:
        for param in group["params"]:
            role = roles[id(param)]
            seen.add(role)
            assert group["lr"] == pytest.approx(5e-4 if role == "router" else 5e-3)
            assert group["weight_decay"] == (0.0 if role in ("norm", "bias") else 0.1)
    assert {"router", "norm", "weight"} <= seen


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_takes_its_settings(name: Any) -> None:
    model = build(ModelConfig.from_hub(HUB), Mesh.single())
    config = TrainConfig(steps=1, optimizer=name, lr=1e-2, betas=(0.8, 0.9), eps=1e-4, momentum=0.7)
    group = make_optimizer(model, config).param_groups[0]
    if name == "sgd":
        assert group["momentum"] == 0.7
    else:
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-4)


def test_fp16_weights_are_not_trained() -> None:
    """F3: AdamW divides by an eps that is 0 in fp16; frozen ones may lie in it."""
    model = build(ModelConfig.from_hub(HUB), Mesh.single(), dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"load it with dtype=torch\.float32, or torch\.bfloat16"):
        make_optimizer(model, TrainConfig(steps=1))
    apply_lora(model, LoRAConfig(rank=2, alpha=2.0))
    assert make_optimizer(model, TrainConfig(steps=1)).param_groups[0]["params"]


def ranks_of_groups() -> list[float]:
    from moe_tp import ParallelLayout

    mesh = Mesh(ParallelLayout(tp=2, ep=2))
    model = build(ModelConfig.from_hub(HUB), mesh)
    optimizer = make_optimizer(model, TrainConfig(steps=1, lr=1e-2, router_lr=1e-3))
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    set_rate(optimizer, 0.0)
    before = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    optimizer.step()
    after = [p for g in optimizer.param_groups for p in g["params"]]
    return [float((a - b).abs().sum().full_tensor()) for a, b in zip(after, before, strict=True)]


def test_a_rate_of_zero_changes_nothing_on_ranks() -> None:
    """G5: the optimiser works on sharded parameters."""
    for changes in run_ranks(ranks_of_groups, 2):
        assert changes
        assert set(changes) == {0.0}
