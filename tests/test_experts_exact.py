"""The exact global-batch balance loss: a counting pass, then the step with the totals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_cases import draw, mesh_of_layout, own_rows
from model_cases import BASE, CASES

from moe_tp import Mesh, MoE, clip_grad_norm, forward_backward, settle_gradients
from moe_tp.checkpoint import gather_named
from moe_tp.errors import ConfigError
from moe_tp.experts.moe import counted_step
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.shards import full_logical
from moe_tp.routing import RouterConfig
from moe_tp.testing import run_ranks

EXACT: dict[str, Any] = {"balance_kind": "global_batch", "balance_exact": True}
LOSSES = {"balance_coef": 0.5, "z_coef": 0.05}


def _rows() -> list[dict[str, torch.Tensor]]:
    """Eight sequences of unlike lengths and unlike words, so that their load is unlike too."""
    g = torch.Generator().manual_seed(3)
    return [
        {"input_ids": (ids := torch.randint(7 * i, 7 * i + 9, (1, 4 + i % 3), generator=g)),
         "labels": ids} for i in range(8)
    ]  # fmt: skip


def _whole() -> dict[str, torch.Tensor]:
    ids, mask = torch.zeros(8, 6, dtype=torch.int64), torch.zeros(8, 6, dtype=torch.int64)
    for i, row in enumerate(_rows()):
        length = row["input_ids"].shape[1]
        ids[i, :length], mask[i, :length] = row["input_ids"][0], 1
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def _step(
    layout: dict[str, Any] | None,
    runtime: dict[str, Any],
    router: dict[str, Any],
    whole: bool = False,
    backward: bool = True,
) -> dict[str, Any]:
    config = ModelConfig.from_hub({**BASE, **CASES["mixtral"], "vocab_size": 70})
    moe = replace(config.moe, router=replace(config.moe.router, **LOSSES, **router))
    mesh = mesh_of_layout(layout, **runtime)
    model = build(replace(config, moe=moe), mesh, seed=3, dtype=torch.float64)
    share = max(8 // mesh.size("dp"), 1)
    mine = _rows()[mesh.coordinate("dp") * share :][:share]
    out = forward_backward(model, [_whole()] if whole else mine, step=5, backward=backward)
    values = {"loss": out.loss, "aux": out.aux.loss}
    if not backward:
        return values
    settle_gradients(model)
    values |= gather_named(model, "grad") | {"norm": torch.tensor(clip_grad_norm(model, 1e9))}
    # the next step starts anew: nothing of this one is left in the layers
    model.zero_grad()
    again = forward_backward(model, mine[:2], step=5)
    return {**values, "later": again.aux.loss.detach()}


def _close(got: dict[str, Any], want: dict[str, Any], what: object) -> None:
    for name in want:
        if name != "later":
            assert torch.allclose(got[name], want[name], rtol=1e-8, atol=1e-11), (what, name)


LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {}),
    (2, {"pp": 2}, {"recompute": "full"}),
    (2, {"dp": 2, "ep": 2, "zero": 3}, {"recompute": "selective"}),
    (2, {"cp": 2, "etp": 2}, {"cp_kind": "ring"}),
    (4, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
    (8, {"dp": 8, "ep": 2}, {}),
]


@pytest.mark.parametrize("noise", [{}, {"noise_std": 0.4, "expert_dropout": 0.2}], ids=str)
def test_equal_to_one_batch_of_everything(noise: dict[str, Any]) -> None:
    """L2: one unlike sequence a micro-batch, on every layout, as strong as one batch of all."""
    want = _step(None, {}, {"balance_kind": "micro_batch", **noise}, whole=True)
    estimate = _step(None, {}, {"balance_kind": "global_batch", **noise})
    assert abs(estimate["aux"] - want["aux"]) > 1e-4  # the step so far is not the step
    later = _step(None, {}, {**EXACT, **noise})["later"]
    for world, layout, runtime in LAYOUTS if not noise else LAYOUTS[:2]:
        args = (layout or None, runtime, {**EXACT, **noise})
        results = run_ranks(_step, world, *args) if layout else [_step(*args)]
        for got in results:
            _close(got, want, layout)
            if layout.get("dp", 1) == 1:
                assert torch.allclose(got["later"], later, rtol=1e-9)
    values = _step(None, {}, {**EXACT, **noise}, backward=False)
    _close(values, {name: want[name] for name in values}, "values only")


def test_in_a_loop_of_your_own() -> None:
    """L2, L3: `counted_step` around any calls; counted once, and nothing left behind."""
    want = _own(None, 1, counted=False)  # a call that is the whole step counts itself
    for got in (_own(None, 3), *run_ranks(_own, 2, {"ep": 2}, 2)):
        assert got[0] == pytest.approx(want[0], rel=1e-9)
        assert torch.allclose(got[1], want[1], rtol=1e-9)


def _own(
    layout: dict[str, int] | None, parts: int, counted: bool = True
) -> tuple[float, torch.Tensor]:
    mesh = mesh_of_layout(layout)
    config = RouterConfig(5, 2, balance_coef=0.5, **EXACT)
    layer = MoE(4, 4, config, mesh, dtype=torch.float64, seed=0)
    share = [12] if layout is None else [9, 3]
    xs = draw(12, 4, dtype=torch.float64)[own_rows(share, mesh.rank)].tensor_split(parts)
    calls = []

    def count() -> None:
        calls.extend(layer(x)[0].requires_grad for x in xs)

    value = 0.0
    if not counted:
        aux = layer(xs[0])[1]
        aux.loss.backward()
        value = aux.loss.item()
    else:
        with counted_step(layer, count):
            for x in xs:
                y, aux = layer(x, step_tokens=12)
                (aux.loss + 0 * y.sum()).backward()
                value += aux.loss.item()
        assert calls == [False] * parts
    assert layer.router.total_E is None
    assert layer.router.step_counts_E.sum() == 0  # no load is kept for an update that nobody needs
    settle_gradients(layer)
    return value, full_logical(layer.router.weight.grad, layer.router.specs["weight"], mesh)


def test_a_part_of_a_step_must_be_counted() -> None:
    """F3, L2: a part of a step without the totals is refused, not estimated."""
    layer = MoE(4, 4, RouterConfig(5, 2, balance_coef=0.5, **EXACT), Mesh.single(), seed=0)
    with pytest.raises(ConfigError, match="inside `counted_step"):
        layer(draw(3, 4, dtype=torch.float32), step_tokens=12)
