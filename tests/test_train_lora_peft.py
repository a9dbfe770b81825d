"""Folders that PEFT reads, and those that it wrote, with the options of LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_lora import (
    adapted,
    batches,
    close,
    gather,
    make,
    peft_logits,
)
from test_train_lora_options import stretch, with_biases

from moe_tp.errors import CheckpointError
from moe_tp.models import from_pretrained, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.train import load_adapter, merge_lora, save_adapter


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mixtral", {"rslora": True, "targets": ("attention", "experts", "router")}),
        ("deepseek_v3", {"dora": True, "rslora": True, "targets": ("attention",)}),
        ("deepseek_v3", {"targets": ("all-linear",)}),
        ("gpt_oss", {"dora": True, "targets": ("attention",)}),
    ],
)
def test_peft_reads_it(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """G4: PEFT's logits on transformers' model are ours, scaled and stretched."""
    save_pretrained(with_biases(make({}, case, torch.float32)), tmp_path / "model")
    model = stretch(with_biases(adapted({}, case, dtype=torch.float32, **changes))).eval()
    save_adapter(model, tmp_path / "adapter")
    ids = batches(None, 1)[0]["input_ids"]
    with torch.no_grad():
        ours = model(ids).logits
    base, theirs = peft_logits(tmp_path / "model", tmp_path / "adapter", ids)
    assert close(ours, theirs, 1e-5)
    assert not close(ours, base, 1e-2)
    other = from_pretrained(tmp_path / "model", Mesh.single()).eval()
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(other(ids).logits, ours)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (
            "mixtral",
            {
                "target_modules": ["q_proj", "o_proj"],
                "target_parameters": ["down_proj", "mlp.experts.gate_up_proj"],
                "use_rslora": True,
            },
        ),
        ("mixtral", {"target_parameters": ["experts.down_proj"], "target_modules": []}),
        (
            "qwen3_moe",
            {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        ),
        (  # gate and up become one parameter of twice the rank
            "qwen3_moe",
            {"target_modules": ["k_proj", "gate_proj", "up_proj", "down_proj"]},
        ),
        (
            "mixtral",
            {
                "target_modules": ["q_proj", "v_proj"],
                "rank_pattern": {"q_proj": 5, "1.self_attn.v_proj": 2},
                "alpha_pattern": {"v_proj": 7},
            },
        ),
        (
            "deepseek_v3",
            {
                "target_modules": r".*1\.self_attn\..*_proj.*",
                "use_dora": True,
                "lora_dropout": 0.1,
            },
        ),
    ],
)
def test_reads_what_peft_wrote(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A folder of PEFT, whatever way it names its targets, gives PEFT's logits here."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    save_pretrained(make({}, case, torch.float32), tmp_path / "model")
    hub = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **settings)
    theirs = peft.get_peft_model(hub, config).eval()
    for name, value in theirs.named_parameters():
        if "magnitude" in name:
            value.data.mul_(1.3)
    theirs.save_pretrained(tmp_path / "adapter")
    model = from_pretrained(tmp_path / "model", Mesh.single()).eval()
    load_adapter(model, tmp_path / "adapter")
    ids = batches(None, 1)[0]["input_ids"]
    with torch.no_grad():
        assert close(model(ids).logits, theirs(ids).logits, 1e-5)
    merge_lora(model)
    with torch.no_grad():
        assert close(model(ids).logits, theirs(ids).logits, 1e-5)


@pytest.mark.parametrize(
    ("matrices", "rslora"),
    [(("w1", "w2", "w3"), False), (("w2",), False), (("w1", "w3"), True)],
)
def test_reads_experts_as_modules(matrices: tuple[str, ...], rslora: bool, tmp_path: Path) -> None:
    """C55: a folder from before transformers 5 gives what PEFT's own conversion gives."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    save_pretrained(make({}, "mixtral", torch.float32), tmp_path / "model")
    shapes = load_file(next((tmp_path / "model").glob("*.safetensors")))
    torch.manual_seed(5)
    tensors = {}
    for name, weight in shapes.items():
        if name.split(".")[-2] in (*matrices, "q_proj"):
            out, width = weight.shape
            start = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{start}.lora_A.weight"] = torch.randn(3, width) / 3
            tensors[f"{start}.lora_B.weight"] = torch.randn(out, 3) / 3
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=[*matrices, "q_proj"],
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    settings.save_pretrained(tmp_path / "adapter")
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    model = from_pretrained(tmp_path / "model", Mesh.single()).eval()
    load_adapter(model, tmp_path / "adapter")
    merge_lora(model)
    scale = 5.0 / (3.0**0.5 if rslora else 3.0)
    got = gather(model, "value")
    rules = model.name_rules.pieces
    for fqn, value in got.items():
        for piece in rules[fqn]:
            start = f"base_model.model.{piece.hub_name.removesuffix('.weight')}"
            want = shapes[piece.hub_name]
            if f"{start}.lora_A.weight" in tensors:
                pair = [tensors[f"{start}.lora_{letter}.weight"] for letter in "BA"]
                want = want + scale * pair[0] @ pair[1]
            assert close(value[piece.param_index], want, 1e-5), piece.hub_name
    if rslora or "w2" not in matrices:
        # PEFT 0.21 doubles alpha with the rank, which is sqrt 2 too much for rsLoRA, and looks for
        # gate and up where they lie beside an adapted down
        return
    hub = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(hub, tmp_path / "adapter").eval()
    ids = batches(None, 1)[0]["input_ids"]
    with torch.no_grad():
        assert close(model(ids).logits, theirs(ids).logits, 1e-5)


def test_a_folder_without_lengths(tmp_path: Path) -> None:
    """What PEFT marks and the file lacks is named; so is what is not computed here."""
    save_adapter(adapted({}, targets=("attention",)), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for change, said in (
        ({"use_dora": True}, "lacks .*lora_magnitude_vector"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"r": 4}, "has 3 rows, but adapter_config.json says rank 4"),
    ):
        file.write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=said):
            load_adapter(make({}), tmp_path)
