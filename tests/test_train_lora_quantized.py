"""LoRA over experts in 8 or 4 bits: equal to the model of the dequantised weights, never whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import hub_config
from safetensors.torch import load_file
from test_train_lora import Layout, batches, export, gather, randomise, tune
from test_train_lora_options import Made, error

from moe_tp.errors import ConfigError
from moe_tp.experts.quantized import BITS, QuantizedStack
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.plan.job import Job, check
from moe_tp.plan.params import hold, pieces
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora, load_adapter, merge_lora
from moe_tp.train.step import forward_backward

# torchao warns of its own kernels, which are for GPUs
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTHS = {"hidden_size": 32, "intermediate_size": 256, "moe_intermediate_size": 256}
TARGETS = ("attention", "experts")


def make(
    layout: Layout, case: str, runtime: dict[str, Any] | None = None, *, narrow: bool = False
) -> Decoder:
    kinds = Runtime(**(runtime or {}))
    mesh = Mesh(ParallelLayout(**layout), kinds) if layout else Mesh.single(kinds)
    widths = {**WIDTHS, "intermediate_size": 128} if narrow else WIDTHS
    return build(ModelConfig.from_hub(hub_config(case) | widths), mesh, seed=3)


def dequantised(weight: torch.Tensor, kind: str, block: int) -> torch.Tensor:
    """Return what torchao makes of a weight, quantised in blocks of its last dimension."""
    from torchao.quantization import quant_primitives as ao

    most, flat = 2 ** (BITS[kind] - 1) - 1, weight.flatten(0, -2)
    limits = (torch.int8, -most, most)
    scale, zero = ao.choose_qparams_affine(
        flat, ao.MappingType.SYMMETRIC, (1, block), *limits,
        scale_dtype=torch.bfloat16, zero_point_dtype=torch.int8,
    )  # fmt: skip
    codes = ao.quantize_affine(flat, (1, block), scale.float(), zero, *limits)
    back = ao.dequantize_affine(
        codes, (1, block), scale.float(), zero, *limits, output_dtype=torch.float32
    )
    result: torch.Tensor = back.view_as(weight)
    return result


def adapted(
    layout: Layout, case: str, base: str | None, runtime: dict[str, Any], dropout: float = 0.0
) -> Decoder:
    model = make(layout, case, runtime)
    config = LoRAConfig(rank=3, alpha=5.0, targets=TARGETS, base=base, dropout=dropout)
    apply_lora(model, config)
    randomise(model)
    return model


def step(
    layout: Layout, case: str, base: str | None, runtime: dict[str, Any], dropout: float = 0.0,
    kind: str = "int4",
) -> dict[str, Any]:  # fmt: skip
    """Return logits, gradients and merged weights; without a base of weights taken back whole."""
    model = adapted(layout, case, base, runtime, dropout)
    if base is None:
        for entry in named_specs(model):
            if entry.fqn.endswith((".experts.gate_up", ".experts.down")):
                local = to_local(entry.param)
                block = 32 if entry.fqn.endswith("gate_up") else 64
                local.copy_(dequantised(local, kind, block))
    model.eval()
    ids = batches(None, 1)[0]["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    model.train()
    loss = float(forward_backward(model, batches(model.mesh, 1)).loss)
    settle_gradients(model)
    grads = gather(model, "grad")
    merge_lora(model)
    return {"loss": loss, "logits": logits, "grads": grads, "merged": gather(model, "value")}


LAYOUTS: dict[str, tuple[int, Layout, str, dict[str, Any], float]] = {
    "one": (1, {}, "mixtral", {}, 0.0),
    "dp2-ep2": (2, {"dp": 2, "ep": 2}, "mixtral", {"recompute": "selective"}, 0.1),
    "tp2-etp2": (2, {"tp": 2, "etp": 2}, "deepseek_v3", {}, 0.0),
    "pp2-full": (2, {"pp": 2}, "mixtral", {"recompute": "full"}, 0.0),
    "cp2-gathered": (2, {"cp": 2, "ep": 2}, "mixtral", {"dispatcher": "all_gather"}, 0.1),
    "ep2-etp2-biases": (4, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "gpt_oss", {}, 0.0),
    "pp2-ep2-overlap": (4, {"pp": 2, "dp": 2, "ep": 2}, "mixtral", {"overlap": True}, 0.0),
}


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_dequantised_model(name: str, kind: str) -> None:
    """G4 for a quantised base: logits and gradients within 1e-5 in fp32, merged weights in bits."""
    world, layout, case, runtime, dropout = LAYOUTS[name]
    one = step({}, case, None, {}, dropout, kind)
    seen: set[str] = set()
    for got in run_ranks(step, world, layout, case, kind, runtime, dropout):
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-5)
        if got["logits"] is not None:
            assert error(got["logits"], one["logits"]) < 1e-5
        total = sum(float(g.square().sum()) for g in one["grads"].values()) ** 0.5
        for fqn, grad in got["grads"].items():
            scale = max(float(one["grads"][fqn].norm()), 1e-6 * total)
            assert float((grad - one["grads"][fqn]).norm()) < 1e-5 * scale, fqn
        for fqn, value in got["merged"].items():
            assert torch.equal(value, one["merged"][fqn]), fqn
        seen |= got["grads"].keys()
    assert seen == one["grads"].keys()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_bits_and_blocks(kind: str) -> None:
    """A block's error is half a step of its own scale; codes and scales are what is held."""
    weight = torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(0))
    weight[1, :, :64] *= 1e-6
    weight[2, 0] = 0.0
    stack = QuantizedStack(weight, kind, 64)  # type: ignore[arg-type]
    back = torch.stack([stack.matrix(place, torch.float32) for place in range(3)])
    most = weight.view(3, 4, 2, 64).abs().amax(-1, keepdim=True)
    bound = most / (2 ** (BITS[kind] - 1) - 1) * 0.51
    assert ((back - weight).view(3, 4, 2, 64).abs() <= bound).all()
    held = sum(b.nbytes for b in stack.buffers())
    assert held == 3 * 4 * 128 * BITS[kind] // 8 + 3 * 4 * 2 * 2
    again = QuantizedStack(back, kind, 64)  # type: ignore[arg-type]
    assert torch.equal(again.codes, stack.codes)
    assert not stack.state_dict()
    (nothing, second) = stack.matrices(1, (0, 5), torch.float32, transposed=True)
    assert nothing.shape == second.shape == (128, 4)
    assert nothing.untyped_storage().nbytes() < 16  # an expert without rows is not made
    assert torch.equal(second, back[2].t())


def test_one_expert_at_a_time() -> None:
    """G4: no parameter and no copy of all experts; what is made anew is one expert's matrix."""
    hub = {
        "model_type": "mixtral", "vocab_size": 32, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    model = build(ModelConfig.from_hub(hub), Mesh.single(), seed=0)
    apply_lora(model, LoRAConfig(rank=2, alpha=4.0, base="int4"))
    assert not any(n.endswith((".gate_up", ".down")) for n, _ in model.named_parameters())
    held = sum(b.nbytes for n, b in model.named_buffers() if ".quantized." in n)
    assert held == 8 * 3 * 128 * 256 * (0.5 + 2 / 64)
    ids = torch.arange(12).view(2, 6)
    with Made() as made:
        model(ids, labels=ids).loss.backward()
    assert made.largest == 2 * 256 * 128 * 4  # gate and up of one expert


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_plan_counts_it(kind: str) -> None:
    """P1: the planner's bytes of a layer's weights are those that are held."""
    model = adapted({}, "mixtral", kind, {})
    job = Job(mode="lora", lora_base=kind, compute_bytes=4)  # type: ignore[arg-type]
    layout = ParallelLayout(dp=1, ep=1, etp=1)
    want = hold(model.config, "moe", pieces(model.config, "moe", layout), layout, job).weights
    for block in model.blocks:
        tensors = dict(block.named_parameters()) | {
            n: b for n, b in block.named_buffers() if ".quantized." in n
        }
        held = sum(
            t.nbytes for n, t in tensors.items() if ".adapter." not in n and ".low_rank." not in n
        )
        assert held == want
    with pytest.raises(ConfigError, match="zero=1"):
        check(model.config, ParallelLayout(dp=2, zero=1).resolve(2), replace(job, global_batch=2))


def no_room(layout: Layout) -> str:
    model = make(layout, "mixtral", narrow=True)
    with pytest.raises(ConfigError) as info:
        apply_lora(model, LoRAConfig(rank=2, alpha=2.0, base="int4"))
    return str(info.value)


def test_what_is_refused() -> None:
    """F3: each with the way out, on every rank, before anything is changed."""
    for world, layout, text in (
        (2, {"dp": 2, "zero": 1}, "choose zero=0"),
        (4, {"tp": 4, "etp": 4}, "choose a smaller etp"),
    ):
        assert all(text in said for said in run_ranks(no_room, world, layout))
    with pytest.raises(ConfigError, match="choose int8, int4"):
        LoRAConfig(rank=2, alpha=2.0, base="nf4")
    model = adapted({}, "mixtral", "int8", {"experts": "loop"})
    with pytest.raises(ConfigError, match="one expert at a time"):
        model(torch.arange(4)[None])


def test_a_run_resumed_and_exported(tmp_path: Path) -> None:
    """K4: the checkpoint holds no base, which is read and quantised again; export is as `final`."""
    save_pretrained(make({}, "mixtral"), tmp_path / "model")
    lines = [json.dumps({"input_ids": [(i * k) % 61 for k in range(1, 12)]}) for i in range(1, 13)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    tree: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "output": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "data.jsonl"), "seq_len": 12},
        "train": {"steps": 4, "global_batch": 4, "lr": 1e-2, "save_every": 2, "eps": 1e-6},
        "lora": {"rank": 2, "alpha": 4, "targets": list(TARGETS), "base": "int8", "dropout": 0.1},
    }
    first = run_ranks(tune, 1, tree, False)[0]
    saved = load_file(next((tmp_path / "run" / "checkpoint-4").glob("*.safetensors")))
    assert not any(n.endswith((".experts.gate_up", ".experts.down")) for n in saved)
    final = load_file(next((tmp_path / "run" / "final").glob("*.safetensors")))
    run_ranks(export, 1, tmp_path / "run" / "checkpoint-4", tmp_path / "export")
    exported = load_file(next((tmp_path / "export").glob("*.safetensors")))
    assert all(torch.equal(exported[n], final[n]) for n in final)
    other = from_pretrained(tmp_path / "model", Mesh.single())
    apply_lora(other, LoRAConfig(rank=2, alpha=4.0, targets=TARGETS, base="int8"))
    load_adapter(other, tmp_path / "run" / "adapter")
    merge_lora(other)
    ids = batches(None, 1)[0]["input_ids"]
    want = from_pretrained(tmp_path / "run" / "final", Mesh.single())(ids).logits
    assert torch.equal(other(ids).logits, want)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    tree["parallel"] = {"dp": 2, "ep": 2}
    for again in run_ranks(tune, 2, tree, True):
        assert again["loss"] == pytest.approx(first["loss"], rel=1e-5)
