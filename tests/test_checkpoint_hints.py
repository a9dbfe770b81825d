"""What a load or a save says when a folder, a config or an argument is wrong."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import hub_config
from transformers import AutoConfig, AutoModelForCausalLM

from moe_tp import Mesh
from moe_tp.checkpoint import gather_named, inspect_folder
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.train import load_adapter, save_adapter
from moe_tp.train.lora import LoRAConfig, apply_lora

INDEX = "model.safetensors.index.json"


def tiny(case: str = "mixtral", **changes: Any) -> Decoder:
    return build(ModelConfig.from_hub(hub_config(case, **changes)), Mesh.single())


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, "int8", "half-ish"])
def test_only_floating_dtypes_are_weights(dtype: Any, tmp_path: Path) -> None:
    """F3: build, load and save refuse a dtype that weights cannot have and name the rest."""
    model = tiny()
    save_pretrained(model, tmp_path / "good")
    for act in (
        lambda: save_pretrained(model, tmp_path / "bad", dtype=dtype),
        lambda: from_pretrained(tmp_path / "good", Mesh.single(), dtype=dtype),
        lambda: build(model.config, Mesh.single(), dtype=dtype),
    ):
        with pytest.raises(ConfigError, match=r"float32, bfloat16, float16, float64"):
            act()
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "bf16"])
def test_dtypes_by_name(name: str, tmp_path: Path) -> None:
    """F3: a dtype may be given by its name, as in a config."""
    save_pretrained(tiny(), tmp_path, dtype=name)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert inspect_folder(tmp_path)["dtypes"].keys() == {"BF16"}
    model = from_pretrained(tmp_path, Mesh.single(), dtype=name)
    assert model.embed is not None
    assert model.embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("targets", [("q_proj",), ("experts",)])
def test_a_save_with_adapters_names_the_two_ways(targets: Any, tmp_path: Path) -> None:
    """F3: a model with adapters is not written as a whole; the error says what to call."""
    model = tiny()
    apply_lora(model, LoRAConfig(rank=2, alpha=4, targets=targets))
    with pytest.raises(CheckpointError, match=r"merge_lora\(model\).*save_adapter\(model, path\)"):
        save_pretrained(model, tmp_path / "m")


ROPES: dict[str, dict[str, Any]] = {
    "linear beside default": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear"}},
    "theta in both": {"rope_scaling": {"rope_type": "linear", "rope_theta": 700.0}},
    "theta beside": {"rope_theta": 700.0, "rope_scaling": {"rope_type": "default"}},
}


@pytest.mark.parametrize("case", ROPES)
def test_rope_scaling_beside_rope_parameters(case: str, tmp_path: Path) -> None:
    """C40, E1: where the two spellings differ the logits are those of transformers."""
    raw = {
        **hub_config("mixtral"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw)).save_pretrained(tmp_path)
    changes = ROPES[case]
    scaling = {"factor": 2.0, **changes["rope_scaling"]}
    edit(tmp_path / "config.json", **{**changes, "rope_scaling": scaling})
    ids = torch.randint(0, 61, (2, 9))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = from_pretrained(tmp_path, Mesh.single(), dtype="float32").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"), [("rope_theta", 500.0), ("partial_rotary_factor", 0.5)]
)
def test_a_rope_value_that_would_be_lost(field: str, value: float) -> None:
    """F3: transformers would take its default for it in silence; the error names both fields."""
    new = {"rope_type": "default", field: value}
    raw = hub_config("mixtral", rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ConfigError, match=f"rope_scaling .*rope_parameters.*{field}={value}"):
        ModelConfig.from_hub({**raw, "rope_parameters": new})


def test_a_wrong_total_in_the_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """K2: `moe-tp inspect` reports it and a load warns once, as no weight depends on it."""
    save_pretrained(tiny(), tmp_path, max_shard_size="20KB")
    right = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    assert inspect_folder(tmp_path)["problems"] == []
    edit(tmp_path / INDEX, metadata={"total_size": 17})
    (problem,) = inspect_folder(tmp_path)["problems"]
    assert f"total_size={right}" in problem
    assert "found 17" in problem
    with caplog.at_level(logging.WARNING, logger="moe_tp"):
        from_pretrained(tmp_path, Mesh.single())
    assert [r.getMessage() for r in caplog.records if "total_size" in r.getMessage()] == [
        f"{tmp_path}: {problem}"
    ]


WRONG: list[tuple[str, str, int, str, str]] = [
    ("mixtral", "vocab_size", 62, "lm_head.weight", "vocab_size"),
    ("mixtral", "hidden_size", 40, "lm_head.weight", "hidden_size"),
    ("mixtral", "intermediate_size", 25, "0.w1.weight", "intermediate_size"),
    ("mixtral", "num_local_experts", 7, "gate.weight", "num_local_experts"),
    ("qwen3_moe", "num_experts", 9, "mlp.gate.weight", "num_experts"),
    ("qwen3_moe", "moe_intermediate_size", 17, "0.down_proj.weight", "moe_intermediate_size"),
    ("deepseek_v3", "kv_lora_rank", 17, "kv_a_layernorm.weight", "kv_lora_rank"),
    ("deepseek_v3", "n_routed_experts", 16, "mlp.gate.weight", "n_routed_experts"),
    ("gpt_oss", "num_local_experts", 7, "down_proj", "num_local_experts"),
    ("gpt_oss", "intermediate_size", 40, "gate_up_proj", "intermediate_size"),
    ("granitemoe", "num_local_experts", 7, "input_linear.weight", "num_local_experts"),
]


@pytest.mark.parametrize(("case", "field", "value", "tensor", "named"), WRONG)
def test_a_shape_names_the_field_of_its_dimension(
    case: str, field: str, value: int, tensor: str, named: str, tmp_path: Path
) -> None:
    """C39, K2: the config field that a wrong dimension follows from, by the family's own key."""
    save_pretrained(tiny(case), tmp_path)
    edit(tmp_path / "config.json", **{field: value})
    rules = family_rules(tmp_path)
    lines = inspect_folder(tmp_path, rules=rules)["problems"]
    (line,) = [x for x in lines if re.search(rf"{re.escape(tensor)}': expected shape", x)][:1]
    assert line.endswith(f"(decided by {named} in config.json)"), line
    with pytest.raises(CheckpointError):
        from_pretrained(tmp_path, Mesh.single())


def family_rules(path: Path) -> Any:
    from moe_tp.checkpoint import HubFolder
    from moe_tp.models.families import rules_for

    folder = HubFolder(path)
    return rules_for(ModelConfig.from_hub(folder.config), folder.logical.keys())


def test_missing_experts_name_the_familys_key(tmp_path: Path) -> None:
    """C39: experts that are not there are decided by the number of experts alone."""
    save_pretrained(tiny(), tmp_path)
    edit(tmp_path / "config.json", num_local_experts=7)
    with pytest.raises(CheckpointError, match=r"decided by num_local_experts in config\.json\)"):
        from_pretrained(tmp_path, Mesh.single())


def test_home_is_where_a_shell_would_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K2: `~` in a path, which Python does not read as the home folder by itself."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    save_pretrained(tiny(), "~/model")
    assert (home / "model" / "config.json").is_file()
    model = from_pretrained("~/model", Mesh.single())
    apply_lora(model, LoRAConfig(2, 4))
    save_adapter(model, "~/adapter")
    load_adapter(tiny(), "~/adapter")
    assert not list(elsewhere.iterdir())


def test_what_is_gathered_has_a_name() -> None:
    """F3: another word than the two would give weights for gradients."""
    with pytest.raises(ConfigError, match="choose 'param' or 'grad'"):
        gather_named(tiny(), "gradient")  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 3, b"folder"])
def test_a_path_that_is_none(path: Any) -> None:
    """K2: one sentence instead of a TypeError, for reading and for writing."""
    with pytest.raises(CheckpointError, match="expected a folder, a URL or a hub id"):
        from_pretrained(path, Mesh.single())
    with pytest.raises(ConfigError, match="writes into a folder"):
        save_pretrained(tiny(), path)
