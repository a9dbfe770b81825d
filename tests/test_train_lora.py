"""LoRA: equal to folded weights on every layout, reduced, merged, and read by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import hub_config
from safetensors.torch import load_file, save_file

from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import full_logical, named_specs, to_local
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora, load_adapter, merge_lora, save_adapter
from moe_tp.train.lora import adapters
from moe_tp.train.lora_io import pack_experts, unpack_experts
from moe_tp.train.step import forward_backward

Layout = dict[str, Any]
TARGETS = ("all-linear", "router")
SETTINGS: dict[str, Any] = {"rank": 3, "alpha": 5.0, "targets": TARGETS, "seed": 9}


def make(layout: Layout, case: str = "mixtral", dtype: torch.dtype = torch.float64) -> Decoder:
    mesh = Mesh(ParallelLayout(**layout)) if layout else Mesh.single()
    return build(ModelConfig.from_hub(hub_config(case)), mesh, seed=3, dtype=dtype)


def adapted(layout: Layout, case: str = "mixtral", **changes: Any) -> Decoder:
    """Return a model with adapters whose B is not zero, alike in every layout."""
    model = make(layout, case, changes.pop("dtype", torch.float64))
    apply_lora(model, LoRAConfig(**(SETTINGS | changes)))
    randomise(model)
    return model


def randomise(model: Decoder) -> None:
    from moe_tp.parallel.parameter import local_index
    from moe_tp.parallel.random import fill_normal, key_of

    for f in adapters(model):
        param, spec = f.adapter.get_parameter(f.b), f.adapter.specs[f.b]
        key = key_of("test", f.fqn)
        fill_normal(to_local(param), key, local_index(param, spec), spec.shape, 0.1)


def batches(mesh: Mesh | None, count: int = 2) -> list[dict[str, torch.Tensor]]:
    """Return this rank's micro-batches of one global batch."""
    ids = torch.randint(0, 61, (8, 9), generator=torch.Generator().manual_seed(1))
    dp, rank = (1, 0) if mesh is None else (mesh.size("dp"), mesh.coordinate("dp"))
    # the ranks' parts of one micro-batch are one micro-batch alone: router losses are means over it
    parts = [ids[i::count].chunk(dp)[rank] for i in range(count)]
    return [{"input_ids": part, "labels": part} for part in parts]


def gather(model: Decoder, what: str) -> dict[str, torch.Tensor]:
    """Return whole values or gradients of this stage's adapters or weights, by name."""
    result = {}
    for entry in named_specs(model):
        value = entry.param if what == "value" else entry.param.grad
        if value is not None:
            result[entry.fqn] = full_logical(value, entry.spec, model.mesh)
    return result


def run_step(layout: Layout, case: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a step's loss, logits and gradients, and the merged model's weights and logits."""
    model = adapted(layout, case, **changes)
    ids = batches(None, 1)[0]["input_ids"]
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
    model.train()
    out = forward_backward(model, batches(model.mesh))
    settle_gradients(model)
    grads = gather(model, "grad")
    copies = {
        e.fqn: to_local(e.param.grad).sum().item()
        for e in named_specs(model)
        if e.param.grad is not None and not e.spec.shards
    }
    merge_lora(model)
    model.eval()
    with torch.no_grad():
        merged = model(ids).logits
    weights = gather(model, "value")
    assert all(e.param.requires_grad for e in named_specs(model) if "correction" not in e.fqn)
    return {
        "loss": float(out.loss),
        "logits": logits,
        "merged": merged,
        "grads": grads,
        "weights": weights,
        "copies": copies,
    }


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-9) -> bool:
    return float((got - want).detach().abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


def alone(case: str = "mixtral", **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(run_step, 1, {}, case, changes)[0]
    return found


def test_equals_folded_weights() -> None:
    """G4 on one process: logits are those of W + s B A, gradients its chain rule."""
    one = alone()
    assert close(one["logits"], one["merged"])
    base = make({})
    ids = batches(None, 1)[0]["input_ids"]
    assert not close(base(ids).logits, one["logits"], 1e-3)
    model = adapted({})
    factors = {f.fqn: f for f in adapters(model)}
    whole = {fqn: f.whole() for fqn, f in factors.items()}
    merge_lora(model)
    forward_backward(model, batches(None))
    settle_gradients(model)
    dense = gather(model, "grad")
    for fqn, (a, b) in whole.items():
        want_a = 5.0 / 3.0 * b.transpose(-1, -2) @ dense[fqn]
        want_b = 5.0 / 3.0 * dense[fqn] @ a.transpose(-1, -2)
        if fqn.endswith("gate_up"):
            want_a = want_a.sum(1, keepdim=True)
        f, owner = factors[fqn], fqn.rsplit(".", 1)[0]
        owner += ".adapter" if "experts" in fqn and "shared" not in fqn else ".low_rank"
        assert close(one["grads"][f"{owner}.{f.a}"], want_a), fqn
        assert close(one["grads"][f"{owner}.{f.b}"], want_b), fqn


LAYOUTS: dict[str, tuple[int, Layout, str]] = {
    "tp2": (2, {"tp": 2}, "mixtral"),
    "ep2": (2, {"dp": 2, "ep": 2}, "mixtral"),
    "dp2": (2, {"dp": 2}, "mixtral"),
    "pp2": (2, {"pp": 2}, "mixtral"),
    "cp2": (2, {"cp": 2}, "mixtral"),
    "dp2tp2-ep2etp2": (4, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "mixtral"),
    "pp2tp2-etp2": (4, {"pp": 2, "tp": 2, "etp": 2}, "mixtral"),
    "mla-shared-tp2": (2, {"tp": 2, "ep": 2}, "deepseek_v3"),
    "kv-whole-tp4": (4, {"tp": 4, "ep": 2, "etp": 2}, "mixtral"),
    "zero1": (2, {"dp": 2, "zero": 1}, "mixtral"),
    "zero3-ep2": (4, {"dp": 4, "ep": 2, "zero": 3}, "mixtral"),
}
_ALONE: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    """G4, C55 c): each layout computes and merges as one process; copies are equal in bits."""
    world, layout, case = LAYOUTS[name]
    one = _ALONE.setdefault(case, {}) or alone(case)
    _ALONE[case] = one
    seen: set[str] = set()
    for got in run_ranks(run_step, world, layout, case, {}):
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-9)
        if got["logits"] is not None:
            assert close(got["logits"], one["logits"])
            assert close(got["merged"], one["logits"])
        for fqn, grad in got["grads"].items():
            assert close(grad, one["grads"][fqn]), fqn
        for fqn, weight in got["weights"].items():
            assert torch.equal(weight, one["weights"][fqn]), fqn
        seen |= got["grads"].keys()
    assert seen == one["grads"].keys()
    assert seen and all(".low_rank." in fqn or ".adapter." in fqn for fqn in seen)
