"""Routers' losses: on, off, not supported, and with a router that is frozen (C56)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_hubs
import torch

from moe_tp.errors import ConfigError
from moe_tp.experts.router import update_router_bias
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks
from moe_tp.train.config import TrainConfig
from moe_tp.train.freeze import choose_trained
from moe_tp.train.lora import LoRAConfig, apply_lora
from moe_tp.train.optim import make_optimizer
from moe_tp.train.overrides import set_balance
from moe_tp.train.settings import from_mapping
from moe_tp.train.step import forward_backward

MIXTRAL: dict[str, Any] = {**tiny_hubs.SMALLEST, "initializer_range": 0.2}
DEEPSEEK: dict[str, Any] = {**tiny_hubs.DEEPSEEK, "vocab_size": 29, "initializer_range": 0.2}


def make(hub: dict[str, Any], layout: dict[str, int] | None = None, **more: Any) -> Decoder:
    split = torch.distributed.is_initialized()
    mesh = Mesh(ParallelLayout(**(layout or {}))) if split else Mesh.single()
    return build(ModelConfig.from_hub({**hub, **more}), mesh, seed=1)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 12).view(2, 12) * 7 % 29
    return {"input_ids": ids, "labels": ids}


def router_entries(model: Decoder) -> list[torch.Tensor]:
    """Weights, biases and counters of all routers."""
    found = [to_local(e.param) for e in named_specs(model) if ".router." in e.fqn]
    return [*found, *(b for n, b in model.named_buffers() if ".router." in n)]


def test_the_balance_loss_does_not_wait_for_router_logits(tmp_path: Path) -> None:
    """C56: loss(0.01) - loss(0) is 0.01 x aux; that of transformers, given on request, is top_k
    times as large, since it is top_k and not 1 at perfect balance."""
    from transformers import MixtralForCausalLM

    totals: dict[tuple[float, bool], float] = {}
    for coef, asked in ((0.0, False), (0.0, True), (0.01, True), (0.01, False)):
        folder = tmp_path / str(coef)
        hub = {"router_aux_loss_coef": coef, "output_router_logits": asked}
        save_pretrained(make(MIXTRAL, **hub), folder)
        model = from_pretrained(folder, Mesh.single(), dtype=torch.float32)
        out = forward_backward(model, [batch()])
        totals[coef, asked] = float(out.loss + out.aux.loss)
    other = MixtralForCausalLM.from_pretrained(tmp_path / "0.01", dtype=torch.float32)
    with torch.no_grad():
        expected = other(**batch(), output_router_logits=True)
    aux = float(expected.aux_loss) / 2
    for asked in (False, True):
        difference = totals[0.01, asked] - totals[0.0, asked]
        assert difference == pytest.approx(0.01 * aux, abs=1e-6)
        assert totals[0.0, asked] == pytest.approx(float(expected.loss) - 0.02 * aux, abs=1e-5)


def test_a_family_without_the_loss_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """C56: a coefficient that nothing reads is named; the setting works for every family."""
    model = make(DEEPSEEK, router_aux_loss_coef=0.01)
    with caplog.at_level(logging.WARNING):
        set_balance(model, None, None)
    assert "router_aux_loss_coef=0.01, which models of type deepseek_v3 do not use" in caplog.text
    assert float(forward_backward(model, [batch()]).aux.loss) == 0.0
    caplog.clear()
    losses = []
    for coef in (0.01, 0.02):
        set_balance(model, coef, None)
        losses.append(float(forward_backward(model, [batch()]).aux.loss))
    assert losses[1] == pytest.approx(2 * losses[0])
    assert losses[0] > 0.005
    assert "router_aux" not in caplog.text
    assert model.hub_config.get("router_aux_loss_coef") == 0.01  # an export says what it said


def train_frozen(layout: dict[str, int]) -> None:
    model = make(DEEPSEEK, layout)
    set_balance(model, 0.01, 0.001)
    choose_trained(model, ["router"], [])
    optimizer = make_optimizer(model, TrainConfig(steps=3, lr=1e-2, weight_decay=0.1))
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    before = [t.clone() for t in router_entries(model)]
    others = {e.fqn: to_local(e.param).clone() for e in named_specs(model)}
    for _ in range(3):
        optimizer.zero_grad()
        forward_backward(model, [batch(), batch()])
        settle_gradients(model)
        optimizer.step()
        update_router_bias(model)
    after = router_entries(model)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for entry in named_specs(model):
        moved = not torch.equal(to_local(entry.param), others[entry.fqn])
        trained = ".router." not in entry.fqn
        assert (id(entry.param) in owned) == trained
        assert moved == trained or to_local(entry.param).numel() == 0, entry.fqn


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"dp": 2, "ep": 2, "zero": 3})])
def test_a_frozen_router_is_frozen_whole(world: int, layout: dict[str, int]) -> None:
    """C56, L4: no decay, no bias update, no counter, no optimiser entry."""
    run_ranks(train_frozen, world, layout)


def test_the_loss_of_a_frozen_router_goes_upstream() -> None:
    """C56: backward of aux alone; into weights before it, or LoRA on attention alone."""
    model = make(DEEPSEEK)
    set_balance(model, 0.01, None)
    choose_trained(model, ["router"], [])
    model(**batch()).aux.loss.backward()
    grads = {e.fqn: e.param.grad for e in named_specs(model)}
    assert all(grad is None for name, grad in grads.items() if ".router." in name)
    assert float(to_local(grads["embed.weight"]).norm()) > 0
    model = make(DEEPSEEK)
    set_balance(model, 0.01, None)
    apply_lora(model, LoRAConfig(rank=2, alpha=4.0, targets=("attention",)))
    before = [t.clone() for t in router_entries(model)]
    for entry in named_specs(model):
        if entry.param.requires_grad:
            with torch.no_grad():
                to_local(entry.param).fill_(0.1)
    model(**batch()).aux.loss.backward()
    norms = [float(to_local(p.grad).norm()) for p in model.parameters() if p.requires_grad]
    assert norms
    assert max(norms) > 0
    update_router_bias(model)
    assert all(torch.equal(a, b) for a, b in zip(before, router_entries(model), strict=True))


def test_the_balance_loss_of_a_run_is_chosen() -> None:
    """L2: by `train.balance_kind`, in the routers and in what a step asks; a name is checked."""
    model = make(MIXTRAL)
    seen = set()
    for kind in ("micro_batch", "sequence", "global_batch_exact"):
        set_balance(model, 0.01, None, kind)  # type: ignore[arg-type]
        seen.add(round(float(forward_backward(model, [batch()]).aux.loss), 7))
    # one micro-batch is the step; its two sequences by themselves are less even
    assert len(seen) == 2
    assert model.config.moe.router.balance_exact
    with pytest.raises(ConfigError, match="balance_kind"):
        from_mapping(TrainConfig, {"steps": 1, "balance_kind": "batch"}, "test", "train.")
