"""Exported folders of real families: transformers loads them, vLLM's loaders know every name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import CASES, error, hub_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_models_config import reference

from moe_tp.checkpoint import HubFolder, Quantise, inspect_folder, save_hub
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models.config import ModelConfig
from moe_tp.models.load import build, from_pretrained, save_pretrained
from moe_tp.parallel.gradients import parameter_groups, settle_gradients
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train.step import forward_backward

Layout = dict[str, int]
IDS = torch.arange(2 * 7).reshape(2, 7) * 5 % 61
WIDE: dict[str, dict[str, Any]] = {  # every size a multiple of 8
    "mixtral": {"num_local_experts": 12},
    "qwen3_moe": {"head_dim": 16},
    "deepseek_v3": {"q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "gpt_oss": {},
}
EXPERTS = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.11.w2.weight",
    "qwen3_moe": "model.layers.2.mlp.experts.7.up_proj.weight",
    "deepseek_v3": "model.layers.2.mlp.experts.7.gate_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj",
}
LAYOUTS: list[Layout] = [
    {"tp": 2},
    {"dp": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"dp": 2, "zero": 3},
    {"dp": 2, "tp": 2, "zero": 2},
    {"pp": 2},
]


def trained_and_exported(source: str, target: str, layout: Layout) -> torch.Tensor:
    """One SGD step under the layout, an export, and the sharded model's logits."""
    mesh = Mesh(ParallelLayout(**layout))
    model = from_pretrained(source, mesh, dtype=torch.float32)
    own = IDS[mesh.coordinate("dp") :: mesh.size("dp")]
    forward_backward(model, [{"input_ids": own, "labels": own}] * mesh.size("pp"))
    settle_gradients(model)
    torch.optim.SGD(parameter_groups(model), lr=0.1).step()
    save_pretrained(model, target, dtype=torch.float32, max_shard_size="10kB")
    with torch.no_grad():
        logits = model(IDS).logits
    assert logits is not None
    return logits


def check_files(source: Path, target: Path, case: str) -> None:
    """Every key once in the map and in exactly that file; sizes, dtype and small files."""
    index = json.loads((target / "model.safetensors.index.json").read_text())
    seen: dict[str, str] = {}
    size = 0
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.offset_keys():
                assert name not in seen
                seen[name] = file.name
                size += opened.get_tensor(name).nbytes
    assert seen == index["weight_map"]
    assert index["metadata"]["total_size"] == size
    assert EXPERTS[case] in seen
    assert len(set(seen.values())) > 5
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def check_export(case: str, layout: Layout, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = tmp_path / "in", tmp_path / "out"
    model = build(ModelConfig.from_hub(hub_config(case, **WIDE[case])), Mesh.single(), seed=1)
    save_pretrained(model, source)
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')
    (source / "tokenizer.json").write_bytes(b'{"x":\r\n1}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    world = math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp"))
    every = run_ranks(trained_and_exported, world, str(source), str(target), layout)
    check_files(source, target, case)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        expected = theirs(IDS).logits
    for logits in every:
        assert error(logits, expected) < 1e-5


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("mixtral", {"tp": 2, "ep": 2}),
        ("mixtral", {"pp": 2}),
        ("qwen3_moe", {"dp": 2, "ep": 2}),
        ("deepseek_v3", {"tp": 2}),
        ("gpt_oss", {"dp": 2, "zero": 3}),
    ],
)
def test_export_loads_in_transformers(case: str, layout: Layout, tmp_path: Path) -> None:
    """C50, K1: one step under a layout, exported in 10 kB files: transformers misses nothing and
    computes the sharded model's logits; names are those of transformers' own folders."""
    check_export(case, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", WIDE)
def test_exports_of_every_kind_of_layout(case: str, layout: Layout, tmp_path: Path) -> None:
    """C50: the same for every family of the case and every kind of layout."""
    check_export(case, layout, tmp_path)


# --- vLLM -----------------------------------------------------------------------------------------

VLLM = json.loads(Path(__file__).with_name("checkpoint_vllm.json").read_text())


def vllm_shapes(case: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return what vLLM's loader of the family reads from a folder of this model."""
    heads = config.attention
    sizes = {
        "1": 1,
        "V": config.vocab_size,
        "D": config.dim,
        "h": heads.head_dim,
        "n": heads.num_heads,
        "H": heads.num_heads * heads.head_dim,
        "K": heads.num_kv_heads * heads.head_dim,
        "E": config.moe.router.num_experts,
        "F": config.moe.expert_dim,
        "S": config.moe.shared_dim,
        "W": config.dense_dim,
    }
    given = set() if config.tie_embeddings else {"untied"}
    if heads.mla is not None:
        given.add("whole_q" if heads.mla.q_rank is None else "low_q")
        latent = heads.mla
        sizes |= {
            "a": latent.q_rank or 0,
            "c": latent.kv_rank,
            "r": latent.rope_dim,
            "Q": heads.num_heads * (latent.nope_dim + latent.rope_dim),
            "U": heads.num_heads * (latent.nope_dim + latent.value_dim),
            "O": heads.num_heads * latent.value_dim,
        }
    layers = range(config.num_layers)
    places = {
        "{l}": list(layers),
        "{s}": list(config.moe_layers),
        "{d}": [n for n in layers if n not in config.moe_layers],
        "": [0],
    }
    found = {}
    for part in VLLM["families"][CASES[case]["model_type"]]:
        for text, shape in VLLM[part].items():
            template, _, condition = text.partition("?")
            if condition and condition not in given:
                continue
            size = tuple(sum(sizes[symbol] for symbol in dim.split("+")) for dim in shape)
            mark = next(m for m in places if m in template)
            for place in places[mark]:
                for expert in range(sizes["E"] if "{e}" in template else 1):
                    name = template.replace(mark, str(place)) if mark else template
                    found[name.replace("{e}", str(expert))] = size
    return found


@pytest.mark.parametrize("case", CASES)
def test_vllm_reads_every_tensor(case: str, tmp_path: Path) -> None:
    """C50: names and shapes of an exported folder are those that vLLM's loaders read, no more and
    no less (vLLM cannot run on this machine; the list says where it comes from)."""
    config = ModelConfig.from_hub(hub_config(case))
    save_pretrained(build(config, Mesh.single()), tmp_path / "m")
    folder = HubFolder(tmp_path / "m")
    assert {n: t.shape for n, t in folder.logical.items()} == vllm_shapes(case, config)


# --- MXFP4 ----------------------------------------------------------------------------------------


def mxfp4_folder(path: Path) -> Path:
    """GPT-OSS as published: blocks and scales `[E, out, in/32, 16]`."""
    raw = hub_config("gpt_oss", intermediate_size=32, num_local_experts=3)
    model = build(ModelConfig.from_hub(raw), Mesh.single(), seed=2)
    names = (r".*\.mlp\.experts\.(gate_up|down)_proj",)
    wanted = Quantise(kind="mxfp4", names=names)
    save_hub(model, path, model.name_rules, model.hub_config, quantise=wanted)
    return path


def test_mxfp4_folder_trains_and_loads_in_transformers(tmp_path: Path) -> None:
    """C43: the published form gives transformers' own dequantised logits; after a step the export
    is the bf16 form `[E, in, out]` without quantization_config, with equal logits again."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source = mxfp4_folder(tmp_path / "in")
    disk = HubFolder(source).tensors
    assert disk["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (3, 64, 1, 16)
    theirs = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    ours = from_pretrained(source, Mesh.single(), dtype=torch.float32)
    with torch.no_grad():
        assert error(ours(IDS).logits, theirs(IDS).logits) < 1e-5
    forward_backward(ours, [{"input_ids": IDS, "labels": IDS}])
    settle_gradients(ours)
    torch.optim.SGD(parameter_groups(ours), lr=0.1).step()
    save_pretrained(ours, tmp_path / "out", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    after = HubFolder(tmp_path / "out")
    found = after.find("model.layers.0.mlp.experts.gate_up_proj")
    assert (found.shape, found.dtype) == ((3, 32, 64), torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    back = from_pretrained(tmp_path / "out", Mesh.single(), dtype=torch.float32)
    with torch.no_grad():
        assert error(back(IDS).logits, again(IDS).logits) < 1e-5


def test_mxfp4_without_its_scales_is_refused(tmp_path: Path) -> None:
    """C43, K2: a missing scales tensor is named, whatever loads the folder."""
    source = mxfp4_folder(tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    gone = "model.layers.1.mlp.experts.down_proj_scales"
    del tensors[gone]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"expected its scales '{gone}', found none"):
        from_pretrained(source, Mesh.single())


# --- head, layers, families -----------------------------------------------------------------------


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
@pytest.mark.parametrize("where", ["top", "text_config"])
def test_the_chosen_head_makes_the_logits(head: str, where: str, tmp_path: Path) -> None:
    """C41: with the tie flag true (also where only a nested text_config has it), logits are
    hidden @ head^T of the head that the file holds, or of the embedding where it holds none."""
    config = ModelConfig.from_hub(hub_config("mixtral"))
    save_pretrained(build(config, Mesh.single(), seed=4), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].clone()
    chosen = tensors["lm_head.weight"].clone() if head == "different" else embedding
    tensors["lm_head.weight"] = chosen.clone()
    if head == "absent":
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("tie_word_embeddings")
    flag = {"tie_word_embeddings": True}
    raw |= flag if where == "top" else {"text_config": flag}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = from_pretrained(tmp_path, Mesh.single())
    hidden: list[torch.Tensor] = []
    assert model.norm is not None
    model.norm.register_forward_hook(lambda module, args, out: hidden.append(out))
    with torch.no_grad():
        logits = model(IDS).logits
    assert error(logits.flatten(0, 1), hidden[0].reshape(-1, config.dim) @ chosen.T) < 1e-6


def test_the_extra_prediction_layer_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C46 d: layer 2 of a model of two layers is passed over with one line, and exported again."""
    raw = hub_config("deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=1)
    model = build(ModelConfig.from_hub(raw), Mesh.single())
    save_pretrained(model, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    extra = {
        "model.layers.2.eh_proj.weight": torch.randn(32, 64),
        "model.layers.2.mlp.experts.3.up_proj.weight": torch.randn(16, 32),
    }
    file = tmp_path / "in" / "model.safetensors"
    save_file(tensors | extra, file, metadata={"format": "pt"})
    with caplog.at_level("INFO", logger="moe_tp"):
        loaded = from_pretrained(tmp_path / "in", Mesh.single())
    lines = [r.getMessage() for r in caplog.records if "eh_proj" in r.getMessage()]
    assert len(lines) == 1
    assert "2 tensors" in lines[0]
    save_pretrained(loaded, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys() | extra.keys()
    for name, tensor in extra.items():
        assert torch.equal(after[name], tensor)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("qwen3_next", "linear-attention"),
        ("qwen3_5_moe", "linear-attention"),
        ("qwen3_5_moe_text", "linear-attention"),
        ("llama4", "chunked attention"),
        ("llama4_text", "chunked attention"),
        ("gemma4", "dense MLP beside the experts"),
        ("gemma4_text", "dense MLP beside the experts"),
        ("phimoe", "sparsemixer"),
        ("dbrx", "fused attention"),
    ],
)
def test_families_to_come_are_refused_by_what_they_need(model_type: str, missing: str) -> None:
    """F3: an unsupported family is refused with the part of it that is missing here."""
    with pytest.raises(ConfigError, match=rf"{model_type}.*not supported.*{missing}"):
        ModelConfig.from_hub({**hub_config("mixtral"), "model_type": model_type})


def test_the_readme_lists_the_families_to_come() -> None:
    """The README names the popular families that are not supported yet."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    for name in ("Qwen3.5", "Qwen3-Next", "Gemma-4", "Llama-4"):
        assert name in text


def test_reference_folder_in_both_spellings(tmp_path: Path) -> None:
    """Formats: config.json of transformers 5 (rope_parameters, dtype) and of transformers 4
    (rope_theta, rope_scaling, torch_dtype) give one model; what is written has both."""
    theirs = reference(
        hub_config("mixtral", rope_parameters={"rope_theta": 77.0, "rope_type": "default"})
    )
    theirs.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in new
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": 77.0, "torch_dtype": "float32"}
    one, other = ModelConfig.from_hub(new), ModelConfig.from_hub(old)
    assert one.rope == other.rope
    assert one.rope.theta == 77.0
    save_pretrained(from_pretrained(tmp_path, Mesh.single()), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 77.0
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert not inspect_folder(tmp_path / "out")["problems"]
