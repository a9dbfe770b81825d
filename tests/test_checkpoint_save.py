"""Saving and exporting: in the right dtypes and formats, with what must come along."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from checkpoint_toy import (
    Toy,
    hub_tensors,
    make_mesh,
    save,
    toy_rules,
    write_folder,
)
from safetensors.torch import load_file, save_file

from moe_tp.checkpoint import HubFolder, Quantise, export_folder, load_into, save_hub
from moe_tp.checkpoint.files import parse_size, size_text
from moe_tp.checkpoint.inspect import inspect_folder
from moe_tp.checkpoint.rules import ExpertFormat
from moe_tp.errors import ConfigError
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks


def test_saving_over_the_source_keeps_what_it_carries(tmp_path: Path) -> None:
    """K1, K5: in place: passed-through tensors and files survive, byte for byte."""
    tensors = hub_tensors(toy_rules(6))
    path = write_folder(tmp_path / "m", tensors)
    (path / "chat_template.jinja").write_bytes(b"{% x %}\r\n")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_bytes(b"t")
    (path / "pytorch_model.bin").write_bytes(b"stale")
    model = Toy(Mesh.single())
    load_into(model, HubFolder(path), toy_rules(6))
    save(model, path, carry_from=path)
    folder = HubFolder(path)
    assert torch.equal(folder.read_slice("mtp.0.weight"), tensors["mtp.0.weight"])
    assert (path / "chat_template.jinja").read_bytes() == b"{% x %}\r\n"
    assert (path / "additional_chat_templates" / "tool.jinja").read_bytes() == b"t"
    assert not (path / "pytorch_model.bin").exists()


def dtypes_after(path: str, target: str, dtype: torch.dtype | None, carry: bool) -> None:
    model = Toy(make_mesh(2, ep=2), 6, torch.bfloat16)
    rules = toy_rules(6)
    load_into(model, HubFolder(path), rules)
    model.to(torch.bfloat16)
    source = path if carry else None
    save_hub(model, target, rules, {"torch_dtype": "x"}, dtype=dtype, carry_from=source)


def test_correction_bias_stays_fp32(tmp_path: Path) -> None:
    """C48, L4, R4: bias bitwise the same through .to(bf16), load and save; router and norm come
    back in the dtype of the source, or the model's where there is none."""
    tensors = hub_tensors(toy_rules(6), mtp=False)
    bias = torch.tensor([10.16, 10.17, 10.18, 10.20, 10.1601, 10.1602])
    tensors["mlp.gate.bias"] = bias
    path = write_folder(tmp_path / "in", tensors)
    for number, (dtype, carry) in enumerate(
        [(None, True), (None, False), (torch.bfloat16, True), (torch.float32, False)]
    ):
        target = tmp_path / f"out{number}"
        run_ranks(dtypes_after, 2, str(path), str(target), dtype, carry)
        back = load_file(target / "model.safetensors")
        expected = dtype or torch.bfloat16
        assert torch.equal(back["mlp.gate.bias"], bias)
        assert back["mlp.gate.bias"].dtype == torch.float32
        for name in ("mlp.gate.weight", "norm.weight", "q.weight"):
            assert back[name].dtype == expected
            assert torch.equal(back[name], tensors[name].to(expected))
        config = json.loads((target / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == str(expected)[6:]


def test_dtypes_of_the_source_by_default(tmp_path: Path) -> None:
    """K1: a mixed folder loaded in fp32 goes back tensor by tensor in its own dtypes."""
    tensors = hub_tensors(toy_rules(6))
    tensors["o.weight"] = torch.randn(8, 16)
    path = write_folder(tmp_path / "in", tensors)
    model = Toy(Mesh.single(), 6, torch.float32)
    load_into(model, HubFolder(path), toy_rules(6))
    save(model, tmp_path / "out", carry_from=path)
    back = HubFolder(tmp_path / "out")
    for name, tensor in tensors.items():
        assert back.find(name).dtype == tensor.dtype
        assert torch.equal(back.read_slice(name), tensor)
    save(model, tmp_path / "bare")
    assert HubFolder(tmp_path / "bare").find("q.weight").dtype == torch.float32


def quantised_save(path: str, target: str, world: int, layout: dict[str, int]) -> None:
    model = Toy(make_mesh(world, **layout), 6)
    load_into(model, HubFolder(path), toy_rules(6))
    fp8 = Quantise(kind="fp8", names=(r"mlp\.experts\..*", r"q\.weight"), block=(4, 4))
    save(model, target, quantise=fp8)


def test_quantised_save_is_the_same_for_every_layout(tmp_path: Path) -> None:
    """K1, C42: fp8 written from slices equals fp8 written by one process, whatever the blocks."""
    path = write_folder(tmp_path / "in", hub_tensors(toy_rules(6), mtp=False))
    found = []
    for number, (world, layout) in enumerate([(1, {}), (4, {"ep": 2, "etp": 2, "tp": 2})]):
        target = tmp_path / f"out{number}"
        run_ranks(quantised_save, world, str(path), str(target), world, layout)
        found.append({f.name: f.read_bytes() for f in target.iterdir()})
    assert found[0] == found[1]
    folder = HubFolder(tmp_path / "out0")
    assert folder.find("mlp.experts.3.w2").kind == "fp8"
    assert folder.find("o.weight").kind == "plain"
    before = HubFolder(path).read_slice("mlp.experts.3.w2").float()
    after = folder.read_slice("mlp.experts.3.w2").float()
    assert float((after - before).abs().max()) < 0.1


def exported(source: str, target: str, out: ExpertFormat, world: int) -> None:
    mesh = make_mesh(world, ep=world)
    rules, rules_out = toy_rules(6), toy_rules(6, out)
    export_folder(source, target, mesh=mesh, rules=rules, rules_out=rules_out, max_shard_size=700)


@pytest.mark.parametrize("form", ["fused", "fused_interleaved", "flat"])
def test_export_changes_the_expert_format(tmp_path: Path, form: ExpertFormat) -> None:
    """K1: per expert -> fused -> per expert is bit-exact, with the same bytes from 1 and 2 ranks,
    and equal to what a model of those rules holds."""
    source = write_folder(tmp_path / "in", hub_tensors(toy_rules(6)), shards=2)
    for world in (1, 2):
        run_ranks(exported, world, str(source), str(tmp_path / f"fused{world}"), form, world)
    one, two = (
        {f.name: f.read_bytes() for f in (tmp_path / d).iterdir()} for d in ("fused1", "fused2")
    )
    assert one == two
    models = []
    for path, rules in ((source, toy_rules(6)), (tmp_path / "fused1", toy_rules(6, form))):
        models.append(Toy(Mesh.single()))
        load_into(models[-1], HubFolder(path), rules)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(to_local(a), to_local(b))
    export_folder(
        tmp_path / "fused1", tmp_path / "back", rules=toy_rules(6, form), rules_out=toy_rules(6)
    )
    before, after = HubFolder(source), HubFolder(tmp_path / "back")
    assert list(before.logical) == list(after.logical)
    for name in before.logical:
        assert torch.equal(before.read_slice(name), after.read_slice(name)), name
        assert before.find(name).dtype == after.find(name).dtype


def test_export_without_rules_changes_dtype_and_shards(tmp_path: Path) -> None:
    """C48: names of correction biases stay fp32 even where no rules are known."""
    tensors = {"a.weight": torch.randn(30, 4), "gate.e_score_correction_bias": torch.randn(5)}
    source = write_folder(tmp_path / "in", tensors)
    report = export_folder(source, tmp_path / "out", dtype=torch.bfloat16, max_shard_size="0.2KB")
    assert report.files == tuple(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    folder = HubFolder(tmp_path / "out")
    assert torch.equal(folder.read_slice("a.weight"), tensors["a.weight"].bfloat16())
    bias = folder.read_slice("gate.e_score_correction_bias")
    assert torch.equal(bias, tensors["gate.e_score_correction_bias"])


def test_inspect(tmp_path: Path) -> None:
    """The JSON of `moe-tp inspect`: counts from headers, active parameters, no problems."""
    config = {"model_type": "toy", "num_hidden_layers": 1, "num_local_experts": 6}
    config |= {"num_experts_per_tok": 2}
    tensors = hub_tensors(toy_rules(6))
    path = write_folder(tmp_path, tensors, shards=2, config=config)
    found = inspect_folder(path, rules=toy_rules(6))
    total = sum(t.numel() for n, t in tensors.items() if n != "mtp.0.weight")
    experts = sum(t.numel() for n, t in tensors.items() if ".experts." in n)
    assert found["problems"] == []
    assert (found["model_type"], found["layers"]) == ("toy", 1)
    assert (found["experts"], found["top_k"]) == (6, 2)
    assert found["params_total"] == total
    assert found["params_active"] == total - experts * 4 // 6
    assert found["tensors"] == len(tensors)
    assert found["dtypes"] == {"BF16": total + 15 - 6, "F32": 6}
    assert found["bytes"] == sum(f.stat().st_size for f in path.glob("*.safetensors"))
    json.dumps(found)


def test_inspect_of_many_files_is_quick_and_names_problems(tmp_path: Path) -> None:
    """K2: 500 shards are inspected within seconds, and all that is wrong is listed by file."""
    names = [f"model-{n:05d}-of-00500.safetensors" for n in range(1, 501)]
    for number, name in enumerate(names):
        save_file({f"layers.{number}.w": torch.ones(4)}, tmp_path / name)
    weight_map = {f"layers.{n}.w": name for n, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    start = time.monotonic()
    found = inspect_folder(tmp_path)
    assert time.monotonic() - start < 5.0
    assert (found["files"], found["tensors"], found["problems"]) == (500, 500, [])
    (tmp_path / names[7]).unlink()
    (tmp_path / names[300]).write_bytes((tmp_path / names[300]).read_bytes()[:-3])
    problems = inspect_folder(tmp_path)["problems"]
    assert len(problems) == 2
    assert all(any(names[n] in text for text in problems) for n in (7, 300))


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 KB", 1500), ("2GiB", 2**31), ("77", 77), (9, 9), ("3k", 3000)],
)
def test_sizes(text: int | str, size: int) -> None:
    """Shard sizes as users write them."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (48, "48 B"), (999, "999 B"), (999_499, "999 KB"), (999_500, "1 MB"),
     (1_234_567_890, "1.23 GB"), (52_400_000_000, "52.4 GB"), (2.5e12, "2.5 TB"),
     (7e15, "7000 TB")],
)  # fmt: skip
def test_sizes_as_text(size: float, text: str) -> None:
    """In the unit that suits them, so that a small model's is not 0.0 GB."""
    assert size_text(size) == text


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5 pounds", "1iB"])
def test_sizes_that_are_none(text: str) -> None:
    """K2: one clear sentence."""
    with pytest.raises(ConfigError, match="max_shard_size="):
        parse_size(text)
