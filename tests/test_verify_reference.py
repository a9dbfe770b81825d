"""The reference path against transformers, by family, on small random models that it saved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from verify_families import BASE, CASES, saved

from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.verify import gate as gating
from moe_tp.verify.data import Batch, Losses, targets
from moe_tp.verify.hub import read_config
from moe_tp.verify.reference import Reference


def _batch(padded: bool = True) -> Batch:
    torch.manual_seed(2)
    ids = torch.randint(0, BASE["vocab_size"], (3, 11))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4] = -100
    return Batch(input_ids=ids, labels=labels, attention_mask=mask)


def _error(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    a, b = a.detach(), b.detach()
    return float((a - b).norm() / max(float(b.norm()), floor, 1e-30))


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    """G1, R3: loss, logits, router logits and every gradient equal transformers'."""
    model = saved(case, tmp_path)
    reference = Reference.load(tmp_path)
    batch = _batch()
    out = reference.step([[batch]])
    theirs = model(
        input_ids=batch.input_ids,
        labels=batch.labels,
        attention_mask=batch.attention_mask,
        output_router_logits=case != "deepseek_v2",
    )
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    real = batch.real
    assert _error(out.logits[0][0][real], logits[real]) < 1e-5
    own_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets(batch).flatten(), ignore_index=-100
    )
    assert float(out.loss) == pytest.approx(float(own_loss.detach()), rel=1e-5)
    if case != "deepseek_v2":
        for mine, router in zip(out.routing[0][0], theirs.router_logits, strict=True):
            assert _error(mine.logits_TE[mine.real_T], router[mine.real_T]) < 1e-5
    own_loss.backward()
    # transformers holds fused tensors: its own saving code gives their gradients the names of the
    # folder.
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    model.save_pretrained(tmp_path / "gradients")
    gradients = Reference.load(tmp_path / "gradients").weights
    floor = 1e-6 * out.grad_norm
    assert set(gradients) == set(out.gradients)
    for name, mine in out.gradients.items():
        assert _error(mine, gradients[name].detach(), floor) < 1e-5, name


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe"])
def test_pooled_loss_equals_transformers(case: str, tmp_path: Path) -> None:
    """L5: the pooled balance loss equals transformers' `aux_loss`, padding left out."""
    extra = {"mlp_only_layers": []} if case == "qwen3_moe" else {}
    model = saved(case, tmp_path, **extra)
    batch = _batch()
    theirs = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=batch.labels,
        output_router_logits=True,
    )
    out = Reference.load(tmp_path).step(
        [[batch]], Losses(balance=0.7, kind="pooled"), backward=False
    )
    assert float(out.aux_loss) == pytest.approx(0.7 * float(theirs.aux_loss), rel=1e-5)


def test_packed_documents_equal_separate_rows(tmp_path: Path) -> None:
    """L1: documents packed by restarting positions give loss and gradients of separate rows."""
    saved("mixtral", tmp_path)
    reference = Reference.load(tmp_path, torch.float64)
    ids = torch.randint(0, 61, (1, 11), generator=torch.Generator().manual_seed(3))
    position = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]])
    packed = Batch(input_ids=ids, labels=ids, position_ids=position)
    rows = [Batch(input_ids=part, labels=part) for part in ids.split([4, 1, 6], dim=1)]
    one, many = reference.step([[packed]]), reference.step([rows])
    assert one.targets == many.targets == 8
    assert float(one.loss) == pytest.approx(float(many.loss), rel=1e-12)
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(gradient, many.gradients[name], rtol=1e-10, atol=1e-12)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """R6, L1: padded rows give losses and gradients of the rows without padding."""
    saved("qwen2_moe", tmp_path)
    reference = Reference.load(tmp_path, torch.float64)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    padded = Batch(input_ids=ids, labels=ids, attention_mask=mask)
    rows = [Batch(input_ids=x, labels=x) for x in (ids[:1, :6], ids[1:])]
    losses = Losses(balance=0.3, z=0.1)
    one, many = reference.step([[padded]], losses), reference.step([rows], losses)
    assert float(one.loss) == pytest.approx(float(many.loss), rel=1e-12)
    assert float(one.aux_loss) == pytest.approx(float(many.aux_loss), rel=1e-12)
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(gradient, many.gradients[name], rtol=1e-9, atol=1e-12)


def test_no_targets_is_zero(tmp_path: Path) -> None:
    """L1, D2: a step without a target, even without a token, has loss 0 and zero gradients."""
    saved("mixtral", tmp_path)
    reference = Reference.load(tmp_path)
    empty = torch.zeros(0, 5, dtype=torch.long)
    ids = torch.zeros(2, 3, dtype=torch.long)
    parts = [
        Batch(input_ids=empty, labels=empty),
        Batch(input_ids=ids, labels=torch.full_like(ids, -100)),
    ]
    out = reference.step([parts])
    assert float(out.loss) == 0.0
    assert out.targets == 0
    assert out.grad_norm == 0.0


def test_forced_routing(tmp_path: Path) -> None:
    """R1: routing given from outside is computed, and the own choice is still reported."""
    saved("deepseek_v3", tmp_path)
    reference = Reference.load(tmp_path)
    batch = _batch()
    free = reference.step([[batch]])
    own = [[[layer.own_ids_TK for layer in free.routing[0][0]]]]
    again = reference.step([[batch]], forced=own)
    assert torch.equal(free.logits[0][0], again.logits[0][0])
    other = [[[(ids + 1) % 8 for ids in own[0][0]]]]
    forced = reference.step([[batch]], forced=other)
    first = forced.routing[0][0][0]
    assert torch.equal(first.own_ids_TK, own[0][0][0])
    assert torch.equal(first.ids_TK[first.real_T], other[0][0][0][first.real_T])
    assert _error(forced.logits[0][0], free.logits[0][0]) > 1e-3


def test_flip_gap() -> None:
    """R1: the gap of a flip is the distance of the scores that it turned on."""
    gate = gating.Gate(
        score="softmax",
        top_k=2,
        normalize=True,
        scale=1.0,
        groups=1,
        top_groups=1,
        group_score="max",
        floor=0.0,
        dropped=-math.inf,
    )
    scores = torch.tensor([0.4, 0.3, 0.299, 0.001])
    assert gating.flip_gap(scores, gate, [0, 1], [1, 0]) == 0.0
    assert gating.flip_gap(scores, gate, [0, 1], [0, 2]) == pytest.approx(0.001, abs=1e-6)
    assert gating.flip_gap(scores, gate, [0, 1], [0, 3]) == pytest.approx(0.299, abs=1e-6)
    assert gating.flip_gap(scores, gate, [0, 1], [0, -1]) == math.inf


def test_refusals(tmp_path: Path) -> None:
    """K2, F3: an unknown family, a missing tensor and an unknown one are errors that name it."""
    saved("mixtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    reference = Reference.load(tmp_path)
    tensors = {name: leaf.detach() for name, leaf in reference.weights.items()}
    with pytest.raises(ConfigError, match="model_type='bert'"):
        Reference(tensors, {**config, "model_type": "bert"})
    with pytest.raises(ConfigError, match="rope_type='longrope'"):
        Reference(tensors, {**config, "rope_parameters": {"rope_type": "longrope"}})
    less = {n: t for n, t in tensors.items() if n != "model.layers.1.self_attn.v_proj.weight"}
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj"):
        Reference(less, config).step([[_batch()]])
    more = {**tensors, "model.layers.1.extra.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"layers\.1\.extra"):
        Reference(more, config).step([[_batch()]])
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path / "nowhere")
