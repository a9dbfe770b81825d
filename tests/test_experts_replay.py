"""Routing that is decided once: in recompute, and recorded and replayed over whole models."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from experts_cases import draw, joined, mesh_of_layout, own_rows
from model_cases import BASE, CASES

from moe_tp import Mesh, MoE, forward_backward, settle_gradients
from moe_tp.checkpoint import gather_named
from moe_tp.errors import ConfigError, RoutingError
from moe_tp.experts.replay import load_routing, record_routing, replay_routing, save_routing
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.recompute import recomputing, run_block
from moe_tp.parallel.shards import to_local
from moe_tp.routing import Assignment, RouterConfig, assign
from moe_tp.testing import run_ranks

# the package's attribute of that name is the function
route_module = importlib.import_module("moe_tp.routing.route")
assignment_module = importlib.import_module("moe_tp.routing.assignment")
ROUTER = {"balance_coef": 0.1, "z_coef": 0.01, "correction_bias": True, "bias_rate": 0.01}


@pytest.mark.parametrize("router", [{}, {"capacity_factor": 0.8, "noise_std": 0.5}], ids=str)
def test_recompute_decides_nothing_again(router: dict[str, Any]) -> None:
    """C26, N3, R1, L3: a second run that would choose and drop otherwise gets the first's ids."""
    for layout, tokens in ((None, [16]), ({"ep": 2}, [9, 7])):
        runs = {}
        for mode in ("none", "selective", "full"):
            args = (layout, tokens, mode, router)
            results = run_ranks(_perturbed, 2, *args) if layout else [_perturbed(*args)]
            runs[mode] = joined(results)
        for mode in ("selective", "full"):
            for name, value in runs["none"].items():
                assert torch.equal(runs[mode][name], value), (mode, name)


def _perturbed(
    layout: dict[str, int] | None, tokens: list[int], mode: str, router: dict[str, Any]
) -> dict[str, torch.Tensor]:
    mesh = mesh_of_layout(layout)
    layer = MoE(8, 8, RouterConfig(5, 2, **ROUTER, **router), mesh, seed=0)
    select, drop = route_module.select_top_k, assignment_module.drop_over_capacity

    def other_choice(scores_TE: torch.Tensor, config: RouterConfig) -> torch.Tensor:
        return select(-scores_TE if recomputing() else scores_TE, config)

    def other_drop(ids_TK: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
        return ids_TK.fill_(-1) if recomputing() else drop(ids_TK, *args, **rest)

    x = draw(sum(tokens), 8, dtype=torch.float64)[own_rows(tokens, mesh.rank)].float()
    x.requires_grad_()
    torch.manual_seed(7 + mesh.rank)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux = layer(torch.nn.functional.dropout(x, 0.1))
        return y, aux.loss

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(route_module, "select_top_k", other_choice))
        stack.enter_context(mock.patch.object(assignment_module, "drop_over_capacity", other_drop))
        for _ in range(2):
            y, loss = run_block(block, mode, x)  # type: ignore[arg-type]
            (y.square().sum() + loss).backward()
    own_counts = layer.router.step_counts_E.clone()
    assert own_counts.sum() == 2 * 2 * tokens[mesh.rank]
    settle_gradients(layer)
    gradients = {n: to_local(p.grad) for n, p in layer.router.named_parameters()
                 if p.grad is not None}  # fmt: skip
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients}


def test_a_rule_that_changes_its_mind_is_an_error() -> None:
    """C26: a user's routing function is asked again, and must answer as it did."""
    layer = MoE(8, 8, RouterConfig(5, 2, function=_fickle), Mesh.single(), seed=0)
    x = draw(6, 8, dtype=torch.float32).requires_grad_()
    y, _ = run_block(layer, "full", x)
    with pytest.raises(RoutingError, match="chose other experts in the recompute"):
        y.sum().backward()


def _fickle(
    logits_TE: torch.Tensor, config: RouterConfig, *, mask_T: torch.Tensor | None, **_: Any
) -> Assignment:
    ids_TK = logits_TE.topk(2).indices
    return assign((ids_TK + int(recomputing())) % 5, logits_TE, config, mask_T=mask_T)


LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"pp": 2}, {"recompute": "full"}),
    (2, {"cp": 2, "ep": 2}, {"recompute": "selective"}),
    (4, {"tp": 2, "ep": 2, "etp": 2}, {}),
]


def test_a_whole_models_routing_in_a_file(tmp_path: Path) -> None:
    """C26, N3, issue 5: recorded on one process, replayed by other weights in every layout."""
    path = tmp_path / "routing.safetensors"
    _record(None, {}, str(path))
    want = _replayed(None, {}, str(path))
    ids = load_routing(path)
    assert sorted(ids) == [(0, 0), (1, 0)]
    counts = torch.stack([ids.to_tensors()[f"layer.{i}.call.0"].long().flatten().bincount(
        minlength=6) for i in (0, 1)])  # fmt: skip
    assert torch.equal(want["counts"], counts)
    assert not torch.equal(_replayed(None, {}, None)["counts"], counts)
    for world, layout, runtime in LAYOUTS:
        for got in run_ranks(_replayed, world, layout, runtime, str(path)):
            assert torch.equal(got["counts"], counts)
            for name, value in want.items():
                assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-12), (layout, name)
    # recorded by four ranks, the file is the same
    other = tmp_path / "ranks.safetensors"
    run_ranks(_record, 4, LAYOUTS[2][1], {}, str(other))
    again = load_routing(other).to_tensors()
    assert all(torch.equal(again[name], value) for name, value in ids.to_tensors().items())
    assert path.stat().st_size < 4000


def _model(layout: dict[str, Any] | None, runtime: dict[str, Any], seed: int) -> Any:
    config = ModelConfig.from_hub({**BASE, **CASES["mixtral"]})
    return build(config, mesh_of_layout(layout, **runtime), seed=seed, dtype=torch.float64)


def _batches(mesh: Mesh) -> list[dict[str, Any]]:
    result = []
    for m in range(2):
        ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(m))
        mask = torch.ones_like(ids)
        mask[1, 7 - m :] = 0
        rows = slice(mesh.coordinate("dp"), 2, mesh.size("dp"))
        result.append({"input_ids": ids[rows], "labels": ids[rows], "attention_mask": mask[rows],
                       "sample_offset": 2 * m + mesh.coordinate("dp")})  # fmt: skip
    return result


def _record(layout: dict[str, Any] | None, runtime: dict[str, Any], path: str) -> None:
    model = _model(layout, runtime, seed=1)
    with record_routing(model) as record:
        forward_backward(model, _batches(model.mesh))
        forward_backward(model, _batches(model.mesh), backward=False)  # replaces the same
    save_routing(record, path, model.mesh)


def _replayed(
    layout: dict[str, Any] | None, runtime: dict[str, Any], path: str | None
) -> dict[str, torch.Tensor]:
    model = _model(layout, runtime, seed=2)
    with ExitStack() as stack:
        if path is not None:
            stack.enter_context(replay_routing(model, load_routing(path)))
        out = forward_backward(model, _batches(model.mesh))
    settle_gradients(model)
    return {"loss": out.loss, "aux": out.aux.loss, "counts": out.aux.counts_LE,
            **gather_named(model, "grad")}  # fmt: skip


def test_what_cannot_be_replayed_says_so(tmp_path: Path) -> None:
    """Issue 5: tokens that were not recorded, no file, two records at once, no identity."""
    model = _model(None, {}, seed=1)
    ids = torch.arange(12).view(2, 6)
    with record_routing(model) as record:
        model(ids[:1])
        with pytest.raises(ConfigError, match="recorded or replayed already"):
            replay_routing(model, record).__enter__()
    with (
        replay_routing(model, record),
        pytest.raises(RoutingError, match="column 0 of sample 1"),
    ):
        model(ids)
    with pytest.raises(RoutingError, match="cannot be read"):
        load_routing(tmp_path / "none")
    layer = MoE(8, 8, RouterConfig(5, 2), Mesh.single(), seed=0)
    with record_routing(layer), pytest.raises(ConfigError, match="pass identity="):
        layer(draw(3, 8, dtype=torch.float32))
