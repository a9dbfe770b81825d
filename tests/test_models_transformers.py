"""Parity with transformers in one process: tiny random models of every family, fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import CASES, error, hub_config
from test_models_config import reference

from moe_tp.checkpoint.gather import gather_named
from moe_tp.experts.router import Router
from moe_tp.models.config import ModelConfig
from moe_tp.models.decoder import Decoder
from moe_tp.models.load import build, from_pretrained, save_pretrained
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.losses import pooled_load_balance_loss


def both(case: str, folder: Path, **changes: Any) -> tuple[Any, Decoder]:
    theirs = reference(hub_config(case, **changes))
    with torch.no_grad():
        for name, value in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if name.endswith(("bias", "sinks")):
                value.normal_(std=0.3)  # HF starts them at zero, which would hide them
    theirs.save_pretrained(folder)
    return theirs, from_pretrained(folder, Mesh.single())


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients(case: str, tmp_path: Path) -> None:
    """G1, R3: each family equals transformers within 1e-5, gradients by hub name included."""
    theirs, ours = both(case, tmp_path)
    torch.manual_seed(1)
    ids = torch.randint(0, 61, (3, 11))
    labels = ids.clone()
    labels[0, 3:6] = -100
    expected = theirs(ids, labels=labels)
    expected.loss.backward()
    out = ours(ids, labels=labels, return_logits=True)
    assert out.logits is not None
    assert out.loss is not None
    assert error(out.logits, expected.logits) < 1e-5
    assert abs(float(out.loss.detach() - expected.loss.detach())) < 1e-5
    out.loss.backward()
    settle_gradients(ours)
    grads = gather_named(ours, "grad")
    named = {n: p.grad for n, p in theirs.named_parameters()}
    total = float(torch.stack([g.norm() for g in named.values() if g is not None]).norm())
    assert clip_grad_norm(ours, 1e9) == pytest.approx(total, rel=1e-5)
    checked = 0
    for name, grad in hub_gradients(case, named, theirs).items():
        assert error(grads[name], grad, total) < 1e-5, name
        checked += 1
    assert checked == len(grads) - sum("correction_bias" in name for name in grads)


def hub_gradients(
    case: str, named: dict[str, torch.Tensor | None], model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Return transformers' gradients under hub names: saved as a model, as it saves weights."""
    import tempfile

    from safetensors.torch import load_file

    with torch.no_grad():
        for name, param in model.named_parameters():
            grad = named[name]
            param.copy_(torch.zeros_like(param) if grad is None else grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder, "model.safetensors"))
    return {n: t for n, t in tensors.items() if not n.endswith("correction_bias")}


def test_pooled_aux_loss(tmp_path: Path) -> None:
    """L5: the pooled form over the routers' logits is transformers' aux loss, with padding."""
    theirs, ours = both("mixtral", tmp_path)
    seen: list[Assignment] = []
    for module in ours.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda m, a, out: seen.append(out))
    ids = torch.randint(0, 61, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    expected = theirs(ids, attention_mask=mask, output_router_logits=True, labels=ids)
    ours(ids, attention_mask=mask)
    real = mask.bool().flatten()
    pooled = pooled_load_balance_loss([a.logits_TE[real] for a in seen], 2)
    assert float(pooled.detach()) == pytest.approx(float(expected.aux_loss.detach()), rel=1e-5)


@pytest.mark.parametrize("case", ["mixtral-window-tied", "gpt_oss", "deepseek_v3", "olmoe"])
def test_padding_and_packing(case: str, tmp_path: Path) -> None:
    """C54, R6: left padding, and documents packed in a row, give what each gives alone."""
    theirs, ours = both(case, tmp_path)
    torch.manual_seed(2)
    first, second = torch.randint(0, 61, (1, 7)), torch.randint(0, 61, (1, 5))
    with torch.no_grad():
        alone = [theirs(ids).logits[0] for ids in (first, second)]
        packed = torch.cat([first, second], 1)
        at = torch.cat([torch.arange(7), torch.arange(5)])[None]
        for mask in (None, torch.ones_like(packed)):
            got = ours(packed, attention_mask=mask, position_ids=at).logits
            assert error(got[0, :7], alone[0]) < 1e-5
            assert error(got[0, 7:], alone[1]) < 1e-5
        ids = torch.zeros(2, 7, dtype=torch.int64)
        ids[0], ids[1, 2:] = first[0], second[0]
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        got = ours(ids, attention_mask=mask).logits
        assert error(got[0], alone[0]) < 1e-5
        assert error(got[1, 2:], alone[1]) < 2e-5
        assert bool(torch.isfinite(got).all())


def test_changes_before_a_border_do_not_pass_it(tmp_path: Path) -> None:
    """C54: the second document's logits do not move with the first one's tokens."""
    _, ours = both("mixtral", tmp_path)
    at = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad():
        one = ours(torch.tensor([[5, 6, 7, 8, 9]]), position_ids=at).logits
        other = ours(torch.tensor([[4, 6, 7, 8, 9]]), position_ids=at).logits
    torch.testing.assert_close(one[:, 3:], other[:, 3:], rtol=1e-5, atol=1e-5)
    assert bool((one[:, 1] != other[:, 1]).any())


def test_label_at_a_restart_is_no_target(tmp_path: Path) -> None:
    """C54, L1: the loss of packed documents is the mean over each one's own targets."""
    _, ours = both("mixtral", tmp_path)
    ids = torch.randint(0, 61, (1, 8))
    at = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    with torch.no_grad():
        packed = ours(ids, labels=ids, position_ids=at)
        first, second = (ours(part, labels=part) for part in (ids[:, :5], ids[:, 5:]))
    assert float(packed.loss) == pytest.approx(
        (4 * float(first.loss) + 2 * float(second.loss)) / 6, rel=1e-5
    )


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_exact(case: str, tmp_path: Path) -> None:
    """K1: hub folder, model, hub folder: every tensor bit for bit, and transformers loads it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    theirs = reference(hub_config(case)).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "in")
    ours = from_pretrained(tmp_path / "in", Mesh.single())
    save_pretrained(ours, tmp_path / "out")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("in", "out"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        if "correction_bias" in name:
            assert after[name].dtype == torch.float32
        else:
            assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].float(), tensor.float()), name
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert again.dtype == torch.bfloat16


@pytest.mark.parametrize("case", CASES)
def test_from_scratch_model_trains(case: str) -> None:
    """A random model of each family learns one batch."""
    config = ModelConfig.from_hub(hub_config(case, initializer_range=0.05))
    model = build(config, Mesh.single(), seed=3)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert config.num_params() == sum(p.numel() for p in trained)
    torch.manual_seed(0)
    ids = torch.randint(0, 61, (2, 12))
    optimiser = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for _ in range(8):
        out = model(ids, labels=ids)
        assert out.loss is not None
        (out.loss + out.aux.loss).backward()
        settle_gradients(model)
        losses.append(float(out.loss.detach()))
        optimiser.step()
        optimiser.zero_grad()
    assert losses[-1] < losses[0] - 0.5, losses


def test_float64(tmp_path: Path) -> None:
    """fp64 models compute in fp64 throughout (but for rope's fp32 angles, as everywhere)."""
    reference(hub_config("gpt_oss")).to(torch.float64).save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path, Mesh.single())
    ids = torch.randint(0, 61, (2, 5))
    out = ours(ids, labels=ids, return_logits=True)
    assert out.logits is not None
    assert out.loss is not None
    assert out.logits.dtype == out.loss.dtype == torch.float64
    full = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(out.loss.detach()) == pytest.approx(float(full.detach()), rel=1e-12)
