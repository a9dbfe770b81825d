"""LoRA: equal to folded weights on every layout, reduced, merged, and read by PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import hub_config
from safetensors.torch import load_file

from moe_tp.errors import ConfigError, MoeTpError
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.random import fill_normal, key_of
from moe_tp.parallel.shards import full_logical, local_index, to_local
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora, load_adapter, merge_lora, save_adapter
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.loop import finetune
from moe_tp.train.lora import adapters
from moe_tp.train.resume import export_checkpoint
from moe_tp.train.settings import from_mapping
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
        e.fqn: to_local(e.param.grad)
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
    return float((got - want).detach().abs().max()) <= tolerance * max(
        1.0, float(want.detach().abs().max())
    )


def peft_logits(
    folder: Path, adapter: Path, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of transformers' model without, and through PEFT with, an adapter."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    hub = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        base = hub(ids).logits
        return base, peft.PeftModel.from_pretrained(hub, adapter).eval()(ids).logits


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
    copies: dict[str, torch.Tensor] = {}
    for got in run_ranks(run_step, world, layout, case, {}):
        for fqn, copy in got["copies"].items():
            assert torch.equal(copies.setdefault(fqn, copy), copy), fqn
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
    assert seen
    assert all(".low_rank." in fqn or ".adapter." in fqn for fqn in seen)


# --- C55 ----------------------------------------------------------------------------------------


NARROW = {
    "model_type": "mixtral",
    "vocab_size": 61,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "initializer_range": 0.5,
}


@pytest.mark.parametrize("hidden", [4, 8], ids=["2F=H", "F=H"])
def test_trained_merged_and_reloaded_agree(hidden: int, tmp_path: Path) -> None:
    """C55 b): two steps; unmerged, merged, exported and reloaded agree; every expert has moved."""

    def fresh() -> Decoder:
        config = ModelConfig.from_hub({**NARROW, "intermediate_size": hidden})
        return build(config, Mesh.single(), seed=3)

    model = fresh()
    apply_lora(model, LoRAConfig(rank=2, alpha=4.0))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        forward_backward(model, batches(None))
        settle_gradients(model)
        optimiser.step()
        optimiser.zero_grad()
    ids = batches(None, 1)[0]["input_ids"]
    model.eval()
    unmerged = model(ids).logits
    save_adapter(model, tmp_path / "adapter")
    merge_lora(model)
    assert close(model(ids).logits, unmerged, 1e-5)
    save_pretrained(model, tmp_path / "merged")
    assert close(from_pretrained(tmp_path / "merged", Mesh.single())(ids).logits, unmerged, 1e-5)
    other = fresh()
    load_adapter(other, tmp_path / "adapter")
    assert close(other(ids).logits, unmerged, 1e-5)
    moved, base = gather(model, "value"), gather(fresh(), "value")
    for fqn in (f for f in base if "moe.experts" in f):
        assert (moved[fqn] != base[fqn]).flatten(1).any(1).all(), fqn


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("attenton",), "did you mean 'attention'"),
        (("attention", "*.nothing"), r"\['\*.nothing'\] match nothing"),
        (("shared_experts",), "match nothing in this model"),
        (("lm_head",), "model.layers.\\*.self_attn.q_proj"),
        (("w1",), "adapted together"),
        ((), "empty"),
    ],
)
def test_target_that_names_nothing(targets: tuple[str, ...], said: str) -> None:
    """C55 d): an error that lists what exists."""
    with pytest.raises(ConfigError, match=said):
        apply_lora(make({}), LoRAConfig(rank=2, alpha=2.0, targets=targets))


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("all-linear",), {"q", "k", "v", "o", "gate_up", "down"}),
        (("*",), {"q", "k", "v", "o", "gate_up", "down"}),
        (("router",), {"router"}),
        (("block_sparse_moe.gate", "q_proj"), {"router", "q"}),
        (("model.layers.1.self_attn.[qk]_proj",), {"q", "k"}),
        (("experts.*",), {"gate_up", "down"}),
    ],
)
def test_patterns(targets: tuple[str, ...], names: set[str]) -> None:
    """C55 d): the router is adapted only if named; all else that is not adapted is frozen."""
    model = make({})
    apply_lora(model, LoRAConfig(rank=2, alpha=2.0, targets=targets))
    found = [f.fqn.removesuffix(".weight").rsplit(".", 1)[-1] for f in adapters(model)]
    assert set(found) == names
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(found)
    assert all(".low_rank." in n or ".adapter." in n for n in trained)


# --- the rest -----------------------------------------------------------------------------------


def dropped(layout: Layout) -> dict[str, Any]:
    targets = ("attention", "shared_experts")
    model = adapted(layout, "deepseek_v3", targets=targets, dropout=0.3)
    model.train()
    out = forward_backward(model, batches(model.mesh, 1), step=4)
    settle_gradients(model)
    return {"loss": float(out.loss), "grads": gather(model, "grad")}


def test_dropout_follows_the_token() -> None:
    """G5: the masks of one process on every layout, and none in evaluation."""
    one = run_ranks(dropped, 1, {})[0]
    plain = alone("deepseek_v3", targets=("attention", "shared_experts"))
    assert abs(one["loss"] - plain["loss"]) > 1e-6
    for got in run_ranks(dropped, 4, {"dp": 2, "tp": 2}):
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert got["grads"].keys() == one["grads"].keys()
        assert all(close(got["grads"][n], one["grads"][n]) for n in one["grads"])


def test_a_stage_without_adapters_still_passes_gradients() -> None:
    """Adapters in the last layer only: the first stage has nothing to train and does not hang."""
    changes = {"targets": ("model.layers.1.self_attn.*",)}
    one = alone(**changes)
    grads: dict[str, torch.Tensor] = {}
    for got in run_ranks(run_step, 2, {"pp": 2}, "mixtral", changes):
        grads |= got["grads"]
    assert grads.keys() == one["grads"].keys()
    assert all(close(grads[n], one["grads"][n]) for n in grads)


def test_refusals() -> None:
    """What is not defined is refused, with the way out."""
    with pytest.raises(ConfigError, match="not defined for router"):
        apply_lora(make({}), LoRAConfig(rank=2, alpha=2.0, targets="router", dropout=0.1))
    with pytest.raises(ConfigError, match="has adapters already"):
        apply_lora(adapted({}), LoRAConfig(rank=2, alpha=2.0))
    for call in (merge_lora, lambda model: save_adapter(model, "nowhere")):
        with pytest.raises(ConfigError, match="has no adapters"):
            call(make({}))
    with pytest.raises(ConfigError, match="not Linear"):
        apply_lora(torch.nn.Linear(2, 2), LoRAConfig(rank=2, alpha=2.0))
    for bad in ({"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            LoRAConfig(**{"rank": 2, "alpha": 2.0, **bad})


def test_bf16_weights_keep_fp32_adapters() -> None:
    """Adapters are never below fp32; the weight is rounded once, after the sum."""
    model = adapted({}, dtype=torch.bfloat16)
    assert {f.adapter.get_parameter(f.a).dtype for f in adapters(model)} == {torch.float32}
    out = forward_backward(model, batches(None))
    settle_gradients(model)
    assert torch.isfinite(out.loss)
    first = next(adapters(model))
    a, b = first.whole()
    before = to_local(first.base.get_parameter(first.name)).clone()
    merge_lora(model)
    want = (before.double() + (b.double() @ a.double()) * (5.0 / 3.0)).bfloat16()
    got = to_local(first.base.get_parameter(first.name))
    assert (got == want).float().mean() > 0.99


def tune(tree: dict[str, Any], resume: bool) -> dict[str, Any]:
    config = from_mapping(FinetuneConfig, tree, "test")
    return finetune(config, Mesh(config.parallel), quiet=True, resume=resume)


def export(path: Path, target: Path) -> None:
    export_checkpoint(path, target, Mesh(ParallelLayout()))


def losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_run_resumed_and_exported(tmp_path: Path) -> None:
    """K4: a run goes on from a checkpoint with its adapters and their dropout, bit for bit in the
    same layout and within 1e-5 in another; export merges."""
    model = make({}, dtype=torch.float32)
    save_pretrained(model, tmp_path / "model")
    lines = [json.dumps({"input_ids": [(i * k) % 61 for k in range(1, 12)]}) for i in range(1, 13)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    tree: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "output": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "data.jsonl"), "seq_len": 12},
        "train": {"steps": 4, "global_batch": 4, "lr": 1e-2, "save_every": 2, "eps": 1e-6},
        "lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"], "dropout": 0.1},
    }
    first = run_ranks(tune, 1, tree, False)[0]
    written = (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
    curve = losses(tmp_path / "run")
    assert len(set(curve)) == 4
    final = load_file(next((tmp_path / "run" / "final").glob("*.safetensors")))
    run_ranks(export, 1, tmp_path / "run" / "checkpoint-4", tmp_path / "export")
    exported = load_file(next((tmp_path / "export").glob("*.safetensors")))
    assert all(torch.equal(exported[n], final[n]) for n in final)
    start = load_file(next((tmp_path / "model").glob("*.safetensors")))
    moved = {n for n in final if not torch.equal(final[n], start[n])}
    assert moved == {n for n in final if "self_attn" in n or ".experts." in n}
    other = from_pretrained(tmp_path / "model", Mesh.single())
    load_adapter(other, tmp_path / "run" / "adapter")
    merge_lora(other)
    ids = batches(None, 1)[0]["input_ids"]
    want = from_pretrained(tmp_path / "run" / "final", Mesh.single())(ids).logits
    assert torch.equal(other(ids).logits, want)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    tree["lora"]["targets"] = ["experts", "attention"]  # their order means nothing
    run_ranks(tune, 1, tree, True)
    assert losses(tmp_path / "run") == curve
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes() == written
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    tree["parallel"] = {"tp": 2}
    for again in run_ranks(tune, 2, tree, True):
        assert again["loss"] == pytest.approx(first["loss"], rel=1e-5)
    tree["lora"]["alpha"] = 8
    with pytest.raises(MoeTpError, match=r"lora.alpha"):
        run_ranks(tune, 1, tree | {"parallel": {}}, True)


def test_settings_by_position() -> None:
    """CONTRACT: rank, alpha, targets, dropout, seed in this order; one target without a tuple."""
    config = LoRAConfig(2, 4, "experts", 0.0, 7)
    assert (config.rank, config.alpha, config.targets, config.seed) == (2, 4, ("experts",), 7)
    with pytest.raises(ConfigError, match=r"rank=2\.5"):
        LoRAConfig(2.5, 4)  # type: ignore[arg-type]
