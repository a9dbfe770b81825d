"""Frozen parameters by pattern: what is named stands still to the bit, the rest learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_train_lora import Layout, batches, close, gather, make

from moe_tp.errors import ConfigError
from moe_tp.experts.router import Router, update_router_bias
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.parameter import named_specs
from moe_tp.testing import run_ranks
from moe_tp.train.config import FinetuneConfig, TrainConfig
from moe_tp.train.freeze import choose_trained
from moe_tp.train.optim import make_optimizer, set_rate
from moe_tp.train.settings import from_mapping
from moe_tp.train.step import forward_backward

Patterns = tuple[str, ...]


def moved(layout: Layout, case: str, freeze: Patterns, only: Patterns) -> dict[str, Any]:
    """Return weights after two steps with weight decay."""
    model = make(layout, case)
    for module in model.modules():
        if isinstance(module, Router) and module.config.correction_bias:
            module.config = replace(module.config, bias_rate=0.1)
    choose_trained(model, freeze, only)
    config = TrainConfig(steps=2, lr=1e-2, weight_decay=0.1, eps=1e-4)
    optimizer = make_optimizer(model, config)
    for _ in range(2):
        forward_backward(model, batches(model.mesh))
        settle_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        update_router_bias(model)
    return gather(model, "value")


def changed(case: str, freeze: Patterns, only: Patterns) -> set[str]:
    base, after = gather(make({}, case), "value"), moved({}, case, freeze, only)
    found = set()
    for fqn, value in base.items():
        if ".moe.experts." in fqn:
            places = [e for e in range(len(value)) if not torch.equal(value[e], after[fqn][e])]
            found |= {f"{fqn}[{e}]" for e in places}
        elif not torch.equal(value, after[fqn]):
            found.add(fqn)
    return found


def test_frozen_router_and_norms() -> None:
    """C56: not a bit of a frozen router moves, by decay or by its loss-free bias."""
    assert any("correction_bias" in n for n in changed("deepseek_v3", ("norms",), ()))
    found = changed("deepseek_v3", ("router", "norms"), ())
    assert found
    assert not any("router" in n or "norm" in n for n in found)
    assert any("attention.o" in n for n in found)
    assert any("moe.experts.down[" in n for n in found)


def both(*experts: int) -> set[str]:
    return {f"moe.experts.{n}[{e}]" for n in ("gate_up", "down") for e in experts}


@pytest.mark.parametrize(
    ("freeze", "only", "layers", "said"),
    [
        ((), ("experts.2", "experts.0"), {"0", "1"}, both(0, 2)),
        (("experts.2.*",), ("experts",), {"0", "1"}, both(0, 1, 3, 4, 5)),
        (("model.layers.0.*",), ("q_proj",), {"1"}, {"attention.q.weight"}),
        ((), ("w2",), {"0", "1"}, {n for n in both(*range(6)) if "down" in n}),
    ],
)
def test_patterns(freeze: Patterns, only: Patterns, layers: set[str], said: set[str]) -> None:
    """Single experts, by this library's name and by the hub's; layers; projections."""
    parts = [name.split(".", 2) for name in changed("mixtral", freeze, only)]
    assert {layer for _, layer, _ in parts} == layers
    assert {rest for _, _, rest in parts} == said


def test_some_experts_on_a_layout() -> None:
    """G5: the chosen experts move alike on every layout, the others not at all."""
    freeze, only = ("o_proj",), ("experts.1", "router", "attention")
    one = moved({}, "mixtral", freeze, only)
    for layout in ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"dp": 4, "ep": 2, "zero": 3}):
        for got in run_ranks(moved, 4, layout, "mixtral", freeze, only):
            assert all(close(got[n], one[n], 1e-8) for n in one)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_an_optimiser_of_nothing(kind: Any) -> None:
    """What a pipeline rank of frozen layers has; it steps with the others."""
    model = make({}, dtype=torch.float32).requires_grad_(False)
    optimizer = make_optimizer(model, TrainConfig(steps=2, lr=0.5, optimizer=kind))
    assert set_rate(optimizer, 0.5) == 0.25
    settle_gradients(model)
    assert clip_grad_norm(model, 1.0) == 0.0
    optimizer.step()


@pytest.mark.parametrize(
    ("freeze", "only", "said"),
    [
        (("rooter",), (), "did you mean 'router'"),
        ((), ("experts.77",), "matches no tensor"),
        (("*",), (), "leave nothing to train"),
        ((), ("w1",), "one parameter with it"),
    ],
)
def test_refusals(freeze: Patterns, only: Patterns, said: str) -> None:
    """A pattern that names nothing, everything, or half of a parameter."""
    with pytest.raises(ConfigError, match=said):
        choose_trained(make({}), freeze, only)


def test_not_beside_lora() -> None:
    """The adapters' own settings choose there."""
    tree = {"model": "m", "output": "o", "data": {"train": "t"}, "train": {"steps": 1, "only": "q"}}
    tree["lora"] = {"rank": 2, "alpha": 2}
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        from_mapping(FinetuneConfig, tree, "test")


def test_nothing_is_asked_for() -> None:
    """Without patterns all is trained, and a partly trained parameter is marked."""
    model = make({})
    choose_trained(model, (), ())
    assert all(e.param.requires_grad for e in named_specs(model))
    choose_trained(model, (), ("experts.1",))
    assert [e.fqn for e in named_specs(model) if e.param.requires_grad] == [
        f"layers.{i}.moe.experts.{n}" for i in range(2) for n in ("gate_up", "down")
    ]
