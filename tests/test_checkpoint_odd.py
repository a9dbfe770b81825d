"""Odd but real folders: what a run left behind, dead links, one expert a token."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import error, hub_config
from safetensors.torch import load_file, save_file
from test_models_config import reference

from moe_tp import Mesh, forward_backward
from moe_tp.checkpoint import inspect_folder
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.train.freeze import choose_trained

STALE = (
    *("trainer_state.json", "training_args.json", "latest", "zero_to_fp32.py", ".gitattributes"),
    *("events.out.tfevents.17.host", "adapter_config.json", "pytorch_model.bin.index.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json", "optimizer.pt"),
)
KEPT = ("tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md", "LICENSE")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_pretrained(build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single()), path)
    return path


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def add(path: Path, name: str, value: torch.Tensor | None) -> None:
    """Put a tensor into the weight file, or take it out."""
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if value is None else {name: value}), path / "model.safetensors")


def test_what_speaks_of_other_weights_is_not_carried(folder: Path, tmp_path: Path) -> None:
    """K1: transformers would look for the adapter and resume the run, engines would dequantise."""
    for name in (*STALE, *KEPT):
        (folder / name).write_bytes(name.encode())
    save_pretrained(from_pretrained(folder, Mesh.single()), tmp_path / "out")
    carried = {entry.name for entry in (tmp_path / "out").iterdir()}
    assert carried == {*KEPT, "config.json", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == name.encode() for name in KEPT)


def test_quantisation_under_its_other_name(folder: Path, tmp_path: Path) -> None:
    """K1, K2: engines read `compression_config` where `quantization_config` is not there."""
    about = {"quant_method": "compressed-tensors"}
    raw = hub_config("mixtral", compression_config=about)
    save_pretrained(build(ModelConfig.from_hub(raw), Mesh.single()), tmp_path / "out")
    assert "compression_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    edit(folder, compression_config=about)
    with pytest.raises(CheckpointError, match=r"compression_config\.quant_method='compressed-te"):
        from_pretrained(folder, Mesh.single())


def test_a_dead_link_is_told_before_a_save_needs_it(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """K2: a load warns and `inspect` reports it; a save refuses to lose the file in silence."""
    (folder / "tokenizer.json").symlink_to("/nowhere/at/all")
    (problem,) = inspect_folder(folder)["problems"]
    assert problem.startswith("tokenizer.json: expected a file, found a link that leads nowhere")
    with caplog.at_level(logging.WARNING, logger="moe_tp"):
        model = from_pretrained(folder, Mesh.single())
    assert f"{folder}: {problem}" in [record.getMessage() for record in caplog.records]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a file"):
        save_pretrained(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "here", "changes", "hint"),
    [
        ("model.layers.0.foo.weight", True, {}, None),
        ("model.layers.1.self_attn.q_proj.weight", False, {}, None),
        ("model.layers.2.foo.weight", True, {}, "num_hidden_layers"),
        ("model.layers.1.block_sparse_moe.experts.3.w1.weight", False, {}, "num_local_experts"),
        ("model.norm.weight", True, {"num_hidden_layers": 3}, "num_hidden_layers"),
    ],
)
def test_the_field_named_is_the_one_that_decides(
    name: str, here: bool, changes: dict[str, Any], hint: str | None, folder: Path
) -> None:
    """C39, K2: one tensor of a layer that is there says nothing about the number of layers."""
    add(folder, name, torch.ones(32) if here else None)
    edit(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(folder, Mesh.single())
    said = f"(decided by {hint} in config.json)" if hint else "decided by"
    assert (said in str(caught.value)) == (hint is not None)


def test_layers_of_multi_token_prediction_name_their_field(tmp_path: Path) -> None:
    """C46: tensors of a layer beyond the last, where the config does not count it."""
    raw = hub_config("deepseek_v3")
    save_pretrained(build(ModelConfig.from_hub(raw), Mesh.single()), tmp_path)
    add(tmp_path, "model.layers.3.eh_proj.weight", torch.ones(2, 2))
    with pytest.raises(CheckpointError, match="num_hidden_layers, num_nextn_predict_layers in"):
        from_pretrained(tmp_path, Mesh.single())
    edit(tmp_path, num_nextn_predict_layers=1)
    from_pretrained(tmp_path, Mesh.single())


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_one_expert_a_token_is_evaluated_and_not_trained(case: str, tmp_path: Path) -> None:
    """R5: a published model whose one weight is always 1 answers as transformers' does; its router
    is not trained, and no model is begun so."""
    raw = hub_config(case, num_experts_per_tok=1)
    theirs = reference(raw)
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path, Mesh.single())
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = [{"input_ids": ids, "labels": ids}]
    with torch.no_grad():
        assert error(ours(ids).logits, theirs(ids).logits) < 1e-5
    assert torch.isfinite(forward_backward(ours, batch, backward=False).loss)
    for train in (
        lambda: ours(ids, labels=ids),
        lambda: forward_backward(ours, batch),
        lambda: choose_trained(ours, [], []),
        lambda: choose_trained(ours, [], ["router"]),
        lambda: build(ours.config, Mesh.single()),
    ):
        with pytest.raises(ConfigError, match="the router would never learn"):
            train()


def test_the_experts_of_a_frozen_router_are_trained(tmp_path: Path) -> None:
    """R5: with its router frozen the rest of such a model has gradients."""
    reference(hub_config("mixtral", num_experts_per_tok=1)).save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path, Mesh.single())
    choose_trained(ours, ["router"], [])
    ids = torch.arange(12)[None]
    forward_backward(ours, [{"input_ids": ids, "labels": ids}])
    grads = {name: p.grad for name, p in ours.named_parameters()}
    assert {name for name, grad in grads.items() if grad is None} == {
        f"layers.{layer}.moe.router.weight" for layer in range(2)
    }
