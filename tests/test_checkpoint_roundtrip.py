"""Hub folder -> any layout -> hub folder, and what each rank asks of the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toy import Toy, fill_nan, hub_tensors, make_mesh, toy_rules, write_folder
from safetensors import safe_open

from moe_tp.checkpoint import HubFolder, gather_named, load_into, save_hub
from moe_tp.checkpoint.rules import ExpertFormat
from moe_tp.parallel.shards import to_local
from moe_tp.parallel.zero import WrapUnit, apply_zero
from moe_tp.testing import run_ranks

LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {"ep": 2}),
    (2, {"etp": 2}),
    (2, {"tp": 2}),
    (4, {"ep": 4}),
    (4, {"ep": 2, "etp": 2, "tp": 2}),
    (4, {"tp": 4, "etp": 4}),
    (8, {"ep": 4, "etp": 2, "tp": 2}),
]
FORMATS: tuple[ExpertFormat, ...] = (
    "per_expert",
    "fused",
    "fused_transposed",
    "fused_interleaved",
    "flat",
)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by the safetensors library; each in one file only."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.offset_keys():
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def there_and_back(
    source: str, target: str, world: int, layout: dict[str, int], form: ExpertFormat, dtype: Any
) -> tuple[int, int, int]:
    rules = toy_rules(6, form)
    model = Toy(make_mesh(world, **layout), 6, dtype)
    fill_nan(model)
    folder = HubFolder(source)
    load_into(model, folder, rules)
    shard = 0
    for tensor in (*model.parameters(), *model.buffers()):
        assert not to_local(tensor).isnan().any()
        shard += to_local(tensor).numel()
    save_hub(model, target, rules, {"model_type": "toy"}, max_shard_size=900, carry_from=source)
    return folder.counter.slices, folder.counter.gaps, shard


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_round_trip_is_bit_exact(
    tmp_path: Path, world: int, layout: dict[str, int], form: ExpertFormat
) -> None:
    """K1, K3, K6, C39, C50: same bits back at every layout and expert format, NaN pre-fill gone."""
    rules = toy_rules(6, form)
    tensors = hub_tensors(rules)
    source = write_folder(tmp_path / "in", tensors, shards=3)
    target = tmp_path / "out"
    results = run_ranks(
        there_and_back, world, str(source), str(target), world, layout, form, torch.bfloat16
    )
    back = read_all(target)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for file in ("tokenizer.json", "generation_config.json"):
        assert (target / file).read_bytes() == (source / file).read_bytes()
    config = json.loads((target / "config.json").read_text())
    assert config == {"model_type": "toy", "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    # K6: a rank asks for the elements it holds (fp32 here at most 4 bytes each), nothing else.
    for slices, _, shard in results:
        assert slices <= 2 * shard + 2 * 6
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def same_bytes(source: str, target: str, world: int, layout: dict[str, int]) -> None:
    rules = toy_rules(6)
    model = Toy(make_mesh(world, **layout), 6, torch.float32)
    load_into(model, HubFolder(source), rules)
    save_hub(model, target, rules, {"a": 1}, dtype=torch.float32, max_shard_size=2000)


def test_output_is_the_same_for_every_layout(tmp_path: Path) -> None:
    """K1, C47: files, index and config are byte for byte the same from 1, 2, 4 and 8 ranks."""
    source = write_folder(tmp_path / "in", hub_tensors(toy_rules(6), mtp=False))
    digests = []
    for number, (world, layout) in enumerate(LAYOUTS):
        target = tmp_path / f"out{number}"
        run_ranks(same_bytes, world, str(source), str(target), world, layout)
        digests.append({f.name: f.read_bytes() for f in target.iterdir()})
    assert len(digests[0]) > 4
    for digest in digests[1:]:
        assert digest == digests[0]


def named(source: str, world: int, layout: dict[str, int]) -> dict[str, torch.Tensor]:
    rules = toy_rules(6)
    model = Toy(make_mesh(world, **layout))
    load_into(model, HubFolder(source), rules)
    return gather_named(model, rules=rules)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS[:6], ids=str)
def test_gather_named_returns_hub_tensors(
    tmp_path: Path, world: int, layout: dict[str, int]
) -> None:
    """K1: full tensors under hub names on every rank, -0.0 and all."""
    tensors = hub_tensors(toy_rules(6), mtp=False)
    tensors["q.weight"][0, 0] = -0.0
    source = write_folder(tmp_path / "in", tensors)
    for found in run_ranks(named, world, str(source), world, layout):
        assert list(found) == list(toy_rules(6).hub_shapes())
        for name, tensor in tensors.items():
            assert torch.equal(
                found[name].to(tensor.dtype).view(torch.uint8), tensor.view(torch.uint8)
            )


def through_zero(source: str, target: str, stage: int) -> int:
    mesh = make_mesh(4, dp=2, tp=2, ep=2, zero=stage)
    model = Toy(mesh, 6, torch.bfloat16)
    apply_zero(model, mesh, [WrapUnit(model.experts, "expert"), WrapUnit(model.head, "dense")])
    rules = toy_rules(6)
    fill_nan(model)
    load_into(model, HubFolder(source), rules)
    save_hub(model, target, rules, {}, max_shard_size=900, carry_from=source)
    found = gather_named(model, rules=rules)
    assert not any(tensor.isnan().any() for tensor in found.values())
    return sum(to_local(p).numel() for p in model.parameters())


def test_zero_shards_load_and_save(tmp_path: Path) -> None:
    """K1, K6: parameters sharded over replicas (ZeRO 3) read and send their own rows only."""
    tensors = hub_tensors(toy_rules(6))
    source = write_folder(tmp_path / "in", tensors)
    sizes = {}
    for stage in (0, 3):
        target = tmp_path / f"out{stage}"
        sizes[stage] = run_ranks(through_zero, 4, str(source), str(target), stage)
        back = read_all(target)
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert max(sizes[3]) < 0.75 * max(sizes[0])
