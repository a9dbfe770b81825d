"""Upcycling: a dense model and the MoE made of it compute the same, in transformers and here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_tp.cli.main import main
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models import from_pretrained
from moe_tp.models.upcycle import UpcycleConfig, UpcycleSupply, upcycle
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    "llama-scaled": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
        "head_dim": 16,
    },
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "attention_bias": True},
}
COPY = UpcycleConfig(num_experts=3, top_k=2, seed=5)
KINDS = {
    "copy": COPY,
    "split": UpcycleConfig(num_experts=6, top_k=4, kind="split", parts=2, seed=5),
    "split-3": UpcycleConfig(num_experts=6, top_k=3, kind="split", parts=3, seed=5),
}


def dense_folder(path: Path, case: str = "llama", **changes: Any) -> Any:
    """Return transformers' model, having saved it."""
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(
        case.split("-")[0], **(SMALL | CASES[case] | changes)
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # else zeros and ones would hide a mistake
            torch.nn.init.normal_(value, mean=0.5, std=0.3)
    model.save_pretrained(path)
    return model


def ids() -> torch.Tensor:
    return torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def hub_logits(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids()).logits


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("llama", "copy"),
        ("llama-scaled", "split-3"),
        ("mistral", "split"),
        ("qwen2", "split"),
        ("qwen3", "copy"),
    ],
)
def test_the_moe_starts_as_the_dense_model(case: str, kind: str, tmp_path: Path) -> None:
    """Logits of transformers on both folders, and of this library on the new one, are equal."""
    with torch.no_grad():
        want = dense_folder(tmp_path / "dense", case)(ids()).logits
    config, report = upcycle(tmp_path / "dense", tmp_path / "moe", KINDS[kind])
    assert error(hub_logits(tmp_path / "moe"), want) < 2e-6
    model = from_pretrained(tmp_path / "moe", Mesh.single()).eval()
    with torch.no_grad():
        assert error(model(ids()).logits, want) < 2e-6
    assert report.elements == config.num_params()
    assert (tmp_path / "moe" / "generation_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_and_kind(case: str, kind: str, tmp_path: Path) -> None:
    """The same for all pairs."""
    test_the_moe_starts_as_the_dense_model(case, kind, tmp_path)


def test_noise_is_of_the_size_asked_for(tmp_path: Path) -> None:
    """Experts differ from the MLP and from each other by noise x rms; little in the logits."""
    want = dense_folder(tmp_path / "dense")(ids()).logits.detach()
    config = UpcycleConfig(num_experts=4, kind="noise", noise=0.02)
    upcycle(tmp_path / "dense", tmp_path / "moe", config)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    moe = load_file(tmp_path / "moe" / "model.safetensors")
    for hub, part in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        source = dense[f"model.layers.1.mlp.{hub}.weight"]
        experts = [
            moe[f"model.layers.1.block_sparse_moe.experts.{e}.{part}.weight"] for e in range(4)
        ]
        for expert in experts:
            assert float((expert - source).std() / source.square().mean().sqrt()) == pytest.approx(
                0.02, rel=0.1
            )
        assert not torch.equal(experts[0], experts[1])
    assert 1e-4 < error(hub_logits(tmp_path / "moe"), want) < 0.2


def write_on(layout: dict[str, int], dense: Path, out: Path) -> None:
    mesh = Mesh(ParallelLayout(**layout)) if layout else Mesh.single()
    config = UpcycleConfig(num_experts=4, kind="noise", noise=0.1)
    upcycle(dense, out, config, mesh=mesh, max_shard_size="40KB", dtype=torch.bfloat16)


def test_same_bytes_from_any_number_of_ranks(tmp_path: Path) -> None:
    """K6: ranks share the files; what they write does not depend on how many there are."""
    dense_folder(tmp_path / "dense", "qwen2")
    run_ranks(write_on, 1, {}, tmp_path / "dense", tmp_path / "one")
    run_ranks(write_on, 2, {"dp": 2}, tmp_path / "dense", tmp_path / "two")
    names = sorted(f.name for f in (tmp_path / "one").iterdir())
    assert sum(name.endswith(".safetensors") for name in names) > 2
    assert names == sorted(f.name for f in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_reads_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K6: what is read at once is a window of what is written, not the model."""
    dense_folder(tmp_path / "dense")
    monkeypatch.setattr("moe_tp.checkpoint.writer.WINDOW", 4096)
    monkeypatch.setattr("moe_tp.checkpoint.writer._LEAST", 4096)
    largest = 0
    plain = UpcycleSupply.values

    def watched(self: UpcycleSupply, slab: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, slab.nbytes)
        return plain(self, slab)

    monkeypatch.setattr(UpcycleSupply, "values", watched)
    upcycle(tmp_path / "dense", tmp_path / "moe", COPY)
    assert 0 < largest <= 4096


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`moe-tp upcycle`: what it says, exit code 2 and one sentence for what cannot be."""
    dense_folder(tmp_path / "dense")
    words = ["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), "--experts", "6"]
    split = ["--top-k", "4", "--kind", "split", "--parts", "2", "--dtype", "bf16", "--json", "-"]
    assert main([*words, *split]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["experts"], said["top_k"], said["expert_dim"]) == (6, 4, 24)
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("mixtral", "bfloat16")
    assert config["router_aux_loss_coef"] == 0.01
    assert main([*words, "--top-k", "1"]) == 2
    assert "top_k=1 of num_experts=6" in capsys.readouterr().err


def test_refusals(tmp_path: Path) -> None:
    """What would not be the same model is refused by name, and nothing is written."""
    dense_folder(tmp_path / "dense", attention_bias=True)
    with pytest.raises(ConfigError, match="attention_bias=True"):
        upcycle(tmp_path / "dense", tmp_path / "moe", COPY)
    dense_folder(tmp_path / "dense")
    split = UpcycleConfig(num_experts=10, top_k=5, kind="split", parts=5)
    with pytest.raises(ConfigError, match="intermediate_size=48 does not split into parts=5"):
        upcycle(tmp_path / "dense", tmp_path / "moe", split)
    file = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, said in (
        ({n: t for n, t in tensors.items() if n != name}, "found none"),
        ({**tensors, name: torch.ones(48, 31)}, r"expected shape \[48, 32\], found \[48, 31\]"),
        ({**tensors, "model.extra.weight": torch.ones(2)}, "model.extra.weight.*would be lost"),
    ):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=said):
            upcycle(tmp_path / "dense", tmp_path / "moe", COPY)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "dense" / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="'gpt2' is no dense model"):
        upcycle(tmp_path / "dense", tmp_path / "moe", COPY)
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 1}, "top_k=1"),
        ({"top_k": 5}, "top_k=5"),
        ({"parts": 2}, "parts=2"),
        ({"kind": "split"}, "parts=1"),
        ({"kind": "split", "parts": 2, "top_k": 3}, "multiples of parts=2"),
        ({"kind": "noise", "noise": 0.0}, "noise=0.0"),
        ({"kind": "half"}, "kind='half'"),
    ],
)
def test_settings(changes: dict[str, Any], said: str) -> None:
    """R5 among them: a choice of one expert would never teach its router."""
    with pytest.raises(ConfigError, match=said):
        UpcycleConfig(**{"num_experts": 4, **changes})
