"""Adapters as folders: alike from every layout, read by PEFT, misfits named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_lora import Layout, adapted, batches, close, make, peft_logits, randomise

from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models import from_pretrained, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora, load_adapter, save_adapter
from moe_tp.train.lora import adapters, lora_config
from moe_tp.train.lora_names import pack_experts, unpack_experts

PREFIX = "base_model.model."


def test_expert_order_of_peft() -> None:
    """C55 a): expert slowest in lora_A, fastest in lora_B."""
    a, b = unpack_experts(torch.ones(4, 1), torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 2)
    assert (b @ a).flatten().tolist() == [4.0, 6.0]
    for got, want in zip(pack_experts(a, b), ([[1.0]] * 4, [[1.0, 2.0, 3.0, 4.0]]), strict=True):
        assert got.tolist() == want


def save_from(layout: Layout, case: str, path: str) -> None:
    save_adapter(adapted(layout, case), path)


def load_into(layout: Layout, case: str, path: str) -> dict[str, torch.Tensor]:
    model = make(layout, case)
    load_adapter(model, path)
    return {f.fqn + n: t for f in adapters(model) for n, t in zip("ab", f.whole(), strict=True)}


def test_folder_is_the_same_from_every_layout(tmp_path: Path) -> None:
    """K4 for adapters: the same bytes from 4 ranks as from one, read back on another layout."""
    run_ranks(save_from, 1, {}, "mixtral", str(tmp_path / "one"))
    layout = {"pp": 2, "tp": 2, "ep": 2}
    run_ranks(save_from, 4, layout, "mixtral", str(tmp_path / "four"))
    one, four = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("one", "four"))
    assert one.keys() == four.keys()
    assert all(torch.equal(one[n], four[n]) for n in one)
    want = {
        f.fqn + n: t for f in adapters(adapted({})) for n, t in zip("ab", f.whole(), strict=True)
    }
    for got in run_ranks(load_into, 2, {"tp": 2, "etp": 2}, "mixtral", str(tmp_path / "four")):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "granitemoe", "deepseek_v3"])
def test_peft_reads_it(case: str, tmp_path: Path) -> None:
    """G4: PEFT's logits on transformers' model are ours; experts joined and interleaved."""
    save_pretrained(make({}, case, torch.float32), tmp_path / "model")
    model = from_pretrained(tmp_path / "model", Mesh.single()).eval()
    apply_lora(model, LoRAConfig(rank=3, alpha=5.0, targets=("attention", "experts", "router")))
    randomise(model)
    ids = batches(None, 1)[0]["input_ids"]
    save_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        ours = model(ids).logits
    base, theirs = peft_logits(tmp_path / "model", tmp_path / "adapter", ids)
    assert close(ours, theirs, 1e-5)
    assert not close(ours, base, 1e-2)


def test_folder_that_does_not_fit(tmp_path: Path) -> None:
    """Every misfit is named."""
    with pytest.raises(CheckpointError, match=r"lacks adapter_config.json"):
        load_adapter(make({}), tmp_path)
    save_adapter(adapted({}), tmp_path)
    with pytest.raises(ConfigError, match="rank=2"):
        load_adapter(adapted({}, rank=2), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t.mul(100).to(torch.int8) for n, t in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"lora_[AB].* holds torch.int8"):
        load_adapter(make({}), tmp_path)
    save_file({**tensors, "base_model.model.lm_head.lora_A.weight": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match="lm_head"):
        load_adapter(make({}), tmp_path)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lacks .*q_proj.lora_B"):
        load_adapter(make({}), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_bias": True}))
    with pytest.raises(CheckpointError, match="lora_bias"):
        load_adapter(make({}), tmp_path)
    for changes, said in (({"peft_type": "IA3"}, "peft_type LORA"), ({"r": None}, "r=None")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointError, match=said):
            load_adapter(make({}), tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{")
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_adapter(make({}), tmp_path)


def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    """K2: an adapter of a run that diverged would answer NaN to everything."""
    save_adapter(adapted({}), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    for value in (float("nan"), float("inf")):
        tensors[name].view(-1)[1] = value
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
            load_adapter(make({}), tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_names_of_a_state_dict(dora: bool, tmp_path: Path) -> None:
    """K2: names with the adapter's, and without PEFT's prefix, mean the same tensors."""
    changes: dict[str, Any] = {"dora": True, "targets": ("attention",)} if dora else {}
    save_adapter(adapted({}, **changes), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    plain = load_file(file)
    want = factors_of(tmp_path)

    def named(key: str) -> str:
        if key.endswith("lora_magnitude_vector"):
            return f"{key}.default.weight"
        return key.replace(".weight", ".default.weight")

    for rename in (named, lambda key: key.removeprefix(PREFIX), lambda key: named(key)[17:]):
        save_file({rename(key): value for key, value in plain.items()}, file)
        got = factors_of(tmp_path)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
    first = next(iter(plain))
    save_file({**plain, first.removeprefix(PREFIX): plain[first].clone()}, file)
    with pytest.raises(CheckpointError, match="are one adapter's tensor twice"):
        load_adapter(make({}), tmp_path)
    other = {
        key.replace(".weight", ".second.weight"): value.clone() for key, value in plain.items()
    }
    save_file({named(key): value for key, value in plain.items()} | other, file)
    with pytest.raises(CheckpointError, match="holds the adapters default, second"):
        load_adapter(make({}), tmp_path)


def factors_of(path: Path) -> dict[str, torch.Tensor]:
    model = make({})
    load_adapter(model, path)
    found = {f.fqn + n: t for f in adapters(model) for n, t in zip("ab", f.whole(), strict=True)}
    config = lora_config(model)
    assert config is not None
    if config.dora:
        found |= {f.fqn + "m": f.whole_lengths() for f in adapters(model)}
    return found
