"""Experts moved between ranks during training: the same weights, an even load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_cases import draw, mesh_of_layout
from model_cases import BASE, CASES

from moe_tp import Mesh, MoE, forward_backward, parameter_groups, settle_gradients
from moe_tp.checkpoint import gather_named
from moe_tp.errors import ConfigError
from moe_tp.experts.local import LocalDispatcher
from moe_tp.experts.placement import place, rebalance
from moe_tp.models import ModelConfig, build
from moe_tp.routing import ExpertTable, RouterConfig, balanced_table
from moe_tp.testing import run_ranks

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}),
    (2, {"dp": 2, "zero": 3}),
    (4, {"tp": 2, "ep": 2, "etp": 2}),
    (4, {"dp": 4, "ep": 2, "zero": 3}),
    (4, {"pp": 2, "ep": 2, "zero": 1}),
]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_weights_are_those_without_moving(optimizer: str) -> None:
    """G5, K1, issue 5: placement changed after two of four steps, moments and gradients along."""
    want = _train(None, optimizer, move=False)
    for world, layout in LAYOUTS[:: 1 if optimizer == "AdamW" else 2]:
        results = run_ranks(_train, world, layout, optimizer, True)
        assert any(got["moved"] for got in results) == (layout.get("ep", 1) > 1)
        for got in results:
            for name, value in want["weights"].items():
                assert torch.allclose(got["weights"][name], value, rtol=1e-9, atol=1e-12), name
            assert all(after < before for before, after in got["busiest"])


def _train(layout: dict[str, Any] | None, optimizer: str, move: bool) -> dict[str, Any]:
    # no balance loss: it is one of each micro-batch, and those differ between the layouts here
    changes = {"num_local_experts": 5, "router_aux_loss_coef": 0.0}
    config = ModelConfig.from_hub({**BASE, **CASES["mixtral"], **changes})
    mesh = mesh_of_layout(layout)
    model = build(config, mesh, seed=4, dtype=torch.float64)
    kind = getattr(torch.optim, optimizer)
    more = {"momentum": 0.9} if optimizer == "SGD" else {"eps": 1e-4}
    optim = kind(parameter_groups(model), lr=1e-2, **more)
    ids = torch.randint(0, 61, (4, 4, 6), generator=torch.Generator().manual_seed(0))
    # heavy experts side by side, and an even load that nothing would better
    load = torch.tensor([[9, 8, 1, 1, 2], [7, 1, 1, 1, 9]])
    busiest, moved = [], {}
    for step in range(4):
        own = ids[step, mesh.coordinate("dp") :: mesh.size("dp")]
        batches = [{"input_ids": row, "labels": row} for row in own.chunk(2)]
        forward_backward(model, batches, step=step)
        settle_gradients(model)
        if move and step == 1:  # gradients are there: they move too
            tables = {m.layer: m.table for m in model.modules() if isinstance(m, MoE)}
            moved = rebalance(model, optim, load)
            for layer, table in moved.items():
                busiest.append((_busiest(tables[layer], load[layer]),
                                _busiest(table, load[layer])))  # fmt: skip
        optim.step()
        optim.zero_grad()
    return {"weights": gather_named(model, "param"), "busiest": busiest, "moved": len(moved)}


def _busiest(table: ExpertTable, load_E: torch.Tensor) -> int:
    return max(int(sum(load_E[e] for e in table.experts_of_rank(r) if e >= 0))
               for r in range(table.ep))  # fmt: skip


def test_what_cannot_be_moved_is_said() -> None:
    """F3: replicas, other sizes, a dispatcher of the user's, an optimiser with factored moments."""
    mesh = Mesh.single()
    twice = balanced_table([9.0, 1.0, 1.0], 1, extra_slots=1)
    with pytest.raises(ConfigError, match="replicas are not trained yet"):
        MoE(8, 8, RouterConfig(3, 2), mesh, table=twice)
    layer = MoE(8, 8, RouterConfig(3, 2), mesh, seed=0)
    with pytest.raises(ConfigError, match="keep the numbers"):
        place(layer, twice)
    optim = torch.optim.Adafactor(layer.parameters())
    layer(draw(5, 8, dtype=torch.float32))[0].sum().backward()
    optim.state[layer.experts.down]["row_var"] = torch.ones(3, 8, 1)
    with pytest.raises(ConfigError, match="keeps 'row_var'"):
        place(layer, ExpertTable(3, 1, (2, 0, 1)), optim)
    own = LocalDispatcher(mesh, layer.table)
    given = MoE(8, 8, RouterConfig(3, 2), mesh, seed=0, dispatcher=own)
    with pytest.raises(ConfigError, match="was given its dispatcher"):
        place(given, ExpertTable(3, 1, (2, 0, 1)))
