"""`moe-tp export --quantize`: the quantised formats in which families are published."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hubs import DEEPSEEK, MIXTRAL

from moe_tp import Mesh, ParallelLayout
from moe_tp.checkpoint import HubFolder, export_folder
from moe_tp.cli.main import main
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.models.families import rules_for
from moe_tp.models.quantised import quantised
from moe_tp.testing import run_ranks

IDS = torch.arange(24).view(2, 12) % 50
QWEN = {
    **{k: v for k, v in MIXTRAL.items() if k != "num_local_experts"},
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "head_dim": 4,
}
GPT_OSS = {**MIXTRAL, "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 32}


def folder(path: Path, config: dict[str, Any]) -> Path:
    model = build(ModelConfig.from_hub(config), Mesh.single(), seed=3, dtype=torch.bfloat16)
    save_pretrained(model, path)
    return path


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return from_pretrained(path, Mesh.single(), dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize(
    ("config", "kind"),
    [(QWEN, "fp8"), (DEEPSEEK, "fp8"), (GPT_OSS, "mxfp4")],
    ids=["qwen3_moe", "deepseek_v3", "gpt_oss"],
)
def test_quantised_and_back(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    """K1, C42, C43: attention and experts (experts alone in MXFP4) come in the published format,
    all else bit for bit; what is written back without the option is what was decoded."""
    source, small, plain = folder(tmp_path / "in", config), tmp_path / "q", tmp_path / "plain"
    assert main(["export", str(source), str(small), "--quantize", kind]) == 0
    before, after = HubFolder(source), HubFolder(small)
    quant = after.config["quantization_config"]
    assert quant["quant_method"] == kind
    assert after.logical.keys() == before.logical.keys()
    for name, tensor in after.logical.items():
        expert = r".*\.mlp\.experts\.(gate_up|down)_proj"
        if kind == "fp8":
            expert = r"model\.layers.*(_proj|kv_a_proj_with_mqa)\.weight"
        assert tensor.kind == (kind if re.fullmatch(expert, name) else "plain"), name
        found, wanted = after.read_slice(name), before.read_slice(name)
        if tensor.kind == "plain":
            assert torch.equal(found, wanted)
        else:
            assert (found - wanted).norm() <= (0.2 if kind == "mxfp4" else 0.04) * wanted.norm()
    if config is QWEN:
        assert quant["modules_to_not_convert"] == [
            "lm_head",
            "model.layers.0.mlp.gate",
            "model.layers.1.mlp.gate",
        ]
    assert main(["export", str(small), str(plain)]) == 0
    again = HubFolder(plain)
    assert "quantization_config" not in again.config
    for name in after.logical:
        assert torch.equal(again.read_slice(name), after.read_slice(name))
    assert torch.equal(logits(plain), logits(small))


def test_a_source_in_fp8_keeps_its_blocks(tmp_path: Path) -> None:
    """C42: an fp8 folder with blocks of its own size is written in that size again, and values
    that were in fp8 stay within a step of what they were."""
    source, first, second = folder(tmp_path / "in", QWEN), tmp_path / "a", tmp_path / "b"
    found = HubFolder(source)
    config = ModelConfig.from_hub(found.config)
    rules = rules_for(config, found.logical.keys())
    small = replace(quantised("fp8", config, rules), block=(8, 4))
    export_folder(found, first, rules=rules, quantise=small)
    assert main(["export", str(first), str(second), "--quantize", "fp8"]) == 0
    before, again = HubFolder(first), HubFolder(second)
    assert again.config["quantization_config"]["weight_block_size"] == [8, 4]
    assert {n: t.shape for n, t in again.tensors.items()} == {
        n: t.shape for n, t in before.tensors.items()
    }
    for name in again.logical:
        one, two = before.read_slice(name).float(), again.read_slice(name).float()
        assert (one - two).norm() <= 0.04 * one.norm()


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (MIXTRAL, ["fp8"], "mixtral has no fp8 form on disk .*leave --quantize out"),
        (GPT_OSS, ["fp8"], "gpt_oss has no fp8 form on disk .*its own format is mxfp4"),
        (QWEN, ["mxfp4"], "qwen3_moe has no mxfp4 form on disk .*its own format is fp8"),
        (QWEN, ["fp8", "--experts", "fused"], "add --experts per-expert"),
    ],
)
def test_formats_that_a_family_does_not_have(
    tmp_path: Path,
    config: dict[str, Any],
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F3: refused with exit code 2, before anything is written."""
    source = folder(tmp_path / "in", config)
    assert main(["export", str(source), str(tmp_path / "q"), "--quantize", *words]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "q").exists()


def on_ranks(source: str, out: str) -> None:
    found = HubFolder(source)
    config = ModelConfig.from_hub(found.config)
    rules = rules_for(config, found.logical.keys())
    mesh = Mesh(ParallelLayout(dp=2))
    wanted = quantised("fp8", config, rules)
    export_folder(found, out, mesh=mesh, rules=rules, quantise=wanted, max_shard_size="6KB")


def test_many_ranks_write_the_same_bytes(tmp_path: Path) -> None:
    """K1: one process from the command line and two ranks give equal files."""
    source = folder(tmp_path / "in", QWEN)
    words = ["--quantize", "fp8", "--max-shard-size", "6KB"]
    assert main(["export", str(source), str(tmp_path / "one"), *words]) == 0
    run_ranks(on_ranks, 2, str(source), str(tmp_path / "two"))
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two
    assert len(one) > 4


def test_transformers_reads_what_was_quantised(tmp_path: Path) -> None:
    """C42: transformers' own dequantiser gives the same logits from the fp8 folder."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    source, small = folder(tmp_path / "in", QWEN), tmp_path / "q"
    assert main(["export", str(source), str(small), "--quantize", "fp8"]) == 0
    options = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        small, quantization_config=options, dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(IDS).logits
    assert (logits(small) - expected).norm() <= 1e-2 * expected.norm()
