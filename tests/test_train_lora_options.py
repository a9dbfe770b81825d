"""rsLoRA, DoRA, adapters of some experts, and layouts against folded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import hub_config
from test_train_lora import (
    Layout,
    adapted,
    batches,
    close,
    gather,
    make,
    randomise,
    run_step,
)
from tiny_hubs import MIXTRAL
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.layout import Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.random import fill_normal, key_of
from moe_tp.parallel.shards import local_index, to_local
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora, load_adapter, merge_lora, save_adapter
from moe_tp.train.config import TrainConfig
from moe_tp.train.lora import adapters
from moe_tp.train.optim import make_optimizer
from moe_tp.train.step import forward_backward


def stretch(model: Decoder) -> Decoder:
    """Return the model with DoRA's lengths off their first values, alike in every layout."""
    for f in adapters(model):
        if "m" in f.adapter.specs:
            param, spec = f.adapter.get_parameter("m"), f.adapter.specs["m"]
            noise = torch.empty_like(to_local(param))
            fill_normal(noise, key_of("m", f.fqn), local_index(param, spec), spec.shape, 0.2)
            to_local(param).mul_(1.0 + noise)
    return model


def with_biases(model: Decoder) -> Decoder:
    """Return the model with biases that are not zero, alike in every layout."""
    for entry in named_specs(model):
        if entry.fqn.endswith(".bias"):
            index = local_index(entry.param, entry.spec)
            fill_normal(to_local(entry.param), key_of(entry.fqn), index, entry.spec.shape, 0.3)
    return model


def dora_step(layout: Layout, case: str) -> dict[str, Any]:
    model = with_biases(stretch(adapted(layout, case, dora=True, targets=("attention",))))
    ids = batches(None, 1)[0]["input_ids"]
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
    model.train()
    out = forward_backward(model, batches(model.mesh))
    settle_gradients(model)
    grads = gather(model, "grad")
    merge_lora(model)
    model.eval()
    with torch.no_grad():
        merged = model(ids).logits
    return {
        "loss": float(out.loss),
        "logits": logits,
        "merged": merged,
        "grads": grads,
        "weights": gather(model, "value"),
    }


DORA_LAYOUTS: dict[str, tuple[int, Layout, str]] = {
    "tp2": (2, {"tp": 2}, "deepseek_v3"),
    "kv-whole-tp4": (4, {"tp": 4, "ep": 2, "etp": 2}, "mixtral"),
    "biases-zero3-tp2": (4, {"dp": 2, "tp": 2, "zero": 3}, "gpt_oss"),
}


@pytest.mark.parametrize("name", DORA_LAYOUTS)
def test_dora_on_layouts(name: str) -> None:
    """G4 for DoRA: values, gradients and merged bits of one process; rows split over ranks too."""
    world, layout, case = DORA_LAYOUTS[name]
    one = run_ranks(dora_step, 1, {}, case)[0]
    assert close(one["logits"], one["merged"])
    assert any(n.endswith(".m") for n in one["grads"])
    for got in run_ranks(dora_step, world, layout, case):
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert close(got["logits"], one["logits"])
        assert got["grads"].keys() == one["grads"].keys()
        for fqn, grad in got["grads"].items():
            assert close(grad, one["grads"][fqn]), fqn
        for fqn, weight in got["weights"].items():
            assert torch.equal(weight, one["weights"][fqn]), fqn


def test_dora_starts_as_the_model_and_keeps_lengths() -> None:
    """Equation 5: before training nothing changes; a merged row has the length m."""
    model = make({})
    ids = batches(None, 1)[0]["input_ids"]
    base = model(ids).logits
    apply_lora(model, LoRAConfig(rank=2, alpha=3.0, targets=("attention",), dora=True))
    assert close(model(ids).logits, base)
    model = stretch(adapted({}, dora=True, targets=("attention",)))
    wanted = {f.fqn: f.whole_lengths() for f in adapters(model)}
    merge_lora(model)
    weights = gather(model, "value")
    for fqn, length in wanted.items():
        assert close(weights[fqn].norm(dim=1), length), fqn


def test_scales() -> None:
    """rsLoRA divides by the root of the rank (arXiv:2312.03732)."""
    assert LoRAConfig(rank=16, alpha=8.0).scale == 0.5
    assert LoRAConfig(rank=16, alpha=8.0, rslora=True).scale == 2.0


@pytest.mark.parametrize(
    ("targets", "changes", "said"),
    [
        (("attention", "experts"), {"dora": True}, "dora=True is not defined for experts"),
        (("all-linear",), {"dora": True}, "not defined for experts"),
        (("experts",), {"experts": (0, 99)}, r"lora experts=\[0, 99\] must name experts of 0"),
        (("experts",), {"experts": ()}, "one at least"),
        (("attention",), {"experts": (0,)}, "does not adapt"),
    ],
)
def test_refusals(targets: tuple[str, ...], changes: dict[str, Any], said: str) -> None:
    """What is not defined is refused, with the way out."""
    with pytest.raises(ConfigError, match=said):
        apply_lora(make({}), LoRAConfig(rank=2, alpha=2.0, targets=targets, **changes))


@pytest.mark.parametrize(
    ("targets", "rank", "said"),
    [
        (("attention",), 8, None),  # k and v are 8 x 16
        (
            ("attention", "experts"),
            13,  # of w1 and w3, which share A, 16 is the smaller size
            "model.layers.*.self_attn.k_proj (8 x 16), model.layers.*.self_attn.v_proj (8 x 16), "
            "model.layers.*.block_sparse_moe.experts.*.w2 (16 x 12), where",
        ),
        (("experts",), 17, "experts.*.w3 (24 x 16), model.layers.*.block_sparse_moe.experts.*.w2"),
        (("all-linear", "router"), 17, "self_attn.v_proj (8 x 16), 4 more kinds of matrix, where"),
        (("router",), 7, "rank=7 is above the smaller size of model.layers.*.block_sparse_moe.gate "
         "(6 x 16), where an adapter takes more than the whole matrix and can learn no more; lower "
         "lora.rank to 6, or leave them out of lora.targets"),
    ],
)  # fmt: skip
def test_a_rank_above_the_smaller_size(
    targets: tuple[str, ...], rank: int, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT takes it and so does this library, with a warning that names the matrices."""
    model = build(ModelConfig.from_hub(MIXTRAL), Mesh.single())
    apply_lora(model, LoRAConfig(rank=rank, alpha=2.0, targets=targets))
    assert (said or "") in caplog.text
    assert bool(said) == bool(caplog.records)


def test_a_rank_that_was_chosen_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder's rank, of several its largest, is nothing that who loads it can lower."""
    model, other = (build(ModelConfig.from_hub(MIXTRAL), Mesh.single()) for _ in range(2))
    apply_lora(model, LoRAConfig(rank=9, alpha=2.0, targets=("attention",)))
    save_adapter(model, tmp_path)
    caplog.clear()
    load_adapter(other, tmp_path)
    assert not caplog.records


def subset_steps(layout: Layout, experts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return merged weights after two steps with weight decay, adapters of some experts only."""
    model = make(layout)
    apply_lora(model, LoRAConfig(rank=2, alpha=4.0, targets=("experts",), experts=experts))
    config = TrainConfig(steps=2, lr=1e-2, weight_decay=0.1, eps=1e-4)
    optimizer = make_optimizer(model, config)
    for _ in range(2):
        forward_backward(model, batches(model.mesh))
        settle_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    merge_lora(model)
    return gather(model, "value")


def test_adapters_of_some_experts() -> None:
    """Only they move, on every layout alike."""
    base = gather(make({}), "value")
    one = run_ranks(subset_steps, 1, {}, (0, 3))[0]
    for fqn in (n for n in base if ".moe.experts." in n):
        moved = [bool((one[fqn][e] != base[fqn][e]).any()) for e in range(len(base[fqn]))]
        assert [e for e, m in enumerate(moved) if m] == [0, 3], fqn
    for got in run_ranks(subset_steps, 4, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, (0, 3)):
        assert all(close(got[n], one[n], 1e-8) for n in got)


class Made(TorchDispatchMode):
    """The largest tensor that an operation made anew, beside what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        out = func(*args, **(kwargs or {}))
        # a DTensor's operation comes by again as one of its local tensors
        kinds = [[x for x in tree_leaves(tree) if type(x) is torch.Tensor] for tree in (args, out)]
        known = {x.untyped_storage()._cdata for x in kinds[0]}
        new = (x.untyped_storage() for x in kinds[1])
        self.largest = max(
            [self.largest, *(storage.nbytes() for storage in new if storage._cdata not in known)]
        )
        return out


@pytest.mark.parametrize("backend", ["sliced", "grouped_mm"])
def test_no_copy_of_expert_weights(backend: str) -> None:
    """G4: forward and backward make nothing as large as one expert's matrix."""
    hub = {
        "model_type": "mixtral",
        "vocab_size": 32,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    mesh = Mesh.single(Runtime(experts=backend))
    model = build(ModelConfig.from_hub(hub), mesh, seed=0)
    apply_lora(model, LoRAConfig(rank=2, alpha=4.0))
    ids = torch.arange(12).view(2, 6)
    with Made() as made:
        out = model(ids, labels=ids)
        out.loss.backward()
    assert 0 < made.largest < 128 * 256 * 4, made.largest


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_any_rank_in_grouped_products(rank: int) -> None:
    """D1: torch's grouped products want rows of 16 bytes; adapters of any rank get them."""
    results = []
    for backend in ("loop", "grouped_mm"):
        config = ModelConfig.from_hub({**hub_config("mixtral"), "hidden_size": 32})
        model = build(config, Mesh.single(Runtime(experts=backend)), seed=0)
        apply_lora(model, LoRAConfig(rank=rank, alpha=4.0, targets=("experts",)))
        randomise(model)
        out = forward_backward(model, batches(None, 1))
        settle_gradients(model)
        results.append((out.loss, gather(model, "grad")))
    (loss, grads), (other, others) = results
    assert close(other, loss, 1e-5)
    assert all(close(others[n], grads[n], 1e-5) for n in grads)


# --- the wide sweep -----------------------------------------------------------------------------


def folded(case: str) -> dict[str, Any]:
    """Return logits and adapter gradients that folded weights give in one process, in fp32."""
    model = adapted({}, case, dtype=torch.float32)
    factors = {f.fqn: f for f in adapters(model)}
    whole = {fqn: f.whole() for fqn, f in factors.items()}
    scale = 5.0 / 3.0
    merge_lora(model)
    ids = batches(None, 1)[0]["input_ids"]
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
    model.train()
    forward_backward(model, batches(None))
    settle_gradients(model)
    dense, grads = gather(model, "grad"), {}
    for fqn, (a, b) in whole.items():
        owner = fqn.rsplit(".", 1)[0]
        owner += ".adapter" if ".moe.experts." in fqn else ".low_rank"
        grad_a = scale * b.transpose(-1, -2) @ dense[fqn]
        grads[f"{owner}.{factors[fqn].b}"] = scale * dense[fqn] @ a.transpose(-1, -2)
        grads[f"{owner}.{factors[fqn].a}"] = (
            grad_a.sum(1, keepdim=True) if fqn.endswith("gate_up") else grad_a
        )
    return {"logits": logits, "grads": grads}


SWEEP: dict[str, tuple[int, Layout, str]] = {
    "one": (1, {}, "mixtral"),
    "dp2": (2, {"dp": 2}, "mixtral"),
    "etp2": (2, {"tp": 2, "etp": 2}, "mixtral"),
    "dp2-etp2": (2, {"dp": 2, "etp": 2}, "mixtral"),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}, "mixtral"),
    "pp2-ep2": (4, {"pp": 2, "dp": 2, "ep": 2}, "mixtral"),
    "pp2-etp2": (4, {"pp": 2, "tp": 2, "etp": 2}, "deepseek_v3"),
    "tp2-ep2-etp2": (4, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "deepseek_v3"),
    "zero1-etp2": (4, {"dp": 4, "etp": 2, "zero": 1}, "mixtral"),
    "zero2-ep2": (4, {"dp": 4, "ep": 2, "zero": 2}, "mixtral"),
    "zero3-tp2-etp2": (4, {"dp": 2, "tp": 2, "etp": 2, "zero": 3}, "mixtral"),
    "zero3-ep2-etp2": (4, {"dp": 4, "ep": 2, "etp": 2, "zero": 3}, "gpt_oss"),
    "tp4-ep4": (4, {"tp": 4, "ep": 4}, "qwen3_moe"),
    "dp2-tp2-cp2": (8, {"dp": 2, "tp": 2, "cp": 2, "ep": 4, "etp": 2}, "mixtral"),
    "pp2-tp2-ep2-etp2": (8, {"pp": 2, "dp": 2, "tp": 2, "ep": 2, "etp": 2}, "mixtral"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_folded_weights_on_every_layout(name: str) -> None:
    """G4: logits and gradients of folded weights within 1e-5 in fp32."""
    world, layout, case = SWEEP[name]
    want = folded(case)
    seen: set[str] = set()
    for got in run_ranks(run_step, world, layout, case, {"dtype": torch.float32}):
        if got["logits"] is not None:
            assert error(got["logits"], want["logits"]) < 1e-5
        total = sum(float(g.square().sum()) for g in want["grads"].values()) ** 0.5
        for fqn, grad in got["grads"].items():
            scale = max(float(want["grads"][fqn].norm()), 1e-6 * total)
            assert float((grad - want["grads"][fqn]).norm()) < 1e-5 * scale, fqn
        seen |= got["grads"].keys()
    assert seen == want["grads"].keys()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())
