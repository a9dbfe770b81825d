"""Configurations and name rules: what is read, what is written, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from model_cases import CASES, hub_config
from transformers import AutoConfig, AutoModelForCausalLM

from moe_tp.errors import ConfigError
from moe_tp.models.config import ModelConfig
from moe_tp.models.families import family, model_types, preset, rules_for
from moe_tp.models.rope import attention_factor, inverse_frequencies, rotation


def reference(config: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model.eval()


PUBLISHED = {
    ("mixtral", "8x7b"): (46.70, 12.88),
    ("mixtral", "8x22b"): (140.6, 39.2),
    ("qwen2_moe", "qwen1.5-a2.7b"): (14.3, 2.7),
    ("qwen2_moe", "57b-a14b"): (57.4, 14.2),
    ("qwen3_moe", "30b-a3b"): (30.5, 3.35),
    ("qwen3_moe", "235b-a22b"): (235.1, 22.2),
    ("qwen3_moe", "coder-480b-a35b"): (480.2, 35.5),
    ("olmoe", "1b-7b"): (6.92, 1.28),
    ("granitemoe", "1b-a400m"): (1.335, 0.43),
    ("granitemoe", "3b-a800m"): (3.30, 0.88),
    ("deepseek_v2", "lite"): (15.7, 2.7),
    ("deepseek_v2", "v2"): (235.7, 21.4),
    ("deepseek_v3", "v3"): (671.0, 37.6),
    ("deepseek_v3", "moonlight-16b-a3b"): (16.0, 2.9),
    ("kimi_k2", "k2"): (1026.4, 32.9),
    ("glm4_moe", "4.5"): (352.8, 33.6),
    ("glm4_moe", "4.5-air"): (106.9, 13.4),
    ("gpt_oss", "20b"): (20.9, 4.2),
    ("gpt_oss", "120b"): (116.8, 5.7),
}


@pytest.mark.parametrize(("where", "billions"), PUBLISHED.items(), ids=lambda v: str(v))
def test_published_totals(where: tuple[str, str], billions: tuple[float, float]) -> None:
    """A preset has the published number of parameters, in all and for one token."""
    config = preset(*where)
    for count, expected in zip(
        (config.num_params(), config.num_active_params()), billions, strict=True
    ):
        digits = len(str(expected).split(".")[1])
        assert abs(count / 1e9 - expected) <= 0.501 * 10.0**-digits, (count, expected)


def test_every_preset_is_published() -> None:
    named = {(m, p) for m in model_types() for p in family(m).presets if p != "tiny"}
    assert named == set(PUBLISHED)


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_of_transformers(case: str, tmp_path: Any) -> None:
    """The rules name every tensor that transformers writes, with its shape, and no other."""
    from safetensors import safe_open

    raw = hub_config(case)
    reference(raw).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    config = ModelConfig.from_hub(written)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    rules = rules_for(config, shapes)
    assert rules.hub_shapes() == shapes
    assert config == ModelConfig.from_hub(raw | {"dtype": config.dtype})


@pytest.mark.parametrize("case", CASES)
def test_num_params_equals_transformers(case: str) -> None:
    raw = hub_config(case)
    model = reference(raw)
    assert ModelConfig.from_hub(raw).num_params() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_written_config_is_read_by_transformers(case: str) -> None:
    """Both spellings are written, and transformers reads the same model from them."""
    raw = hub_config(case)
    ours = ModelConfig.from_hub({**raw, "torch_dtype": "bfloat16", "future_key": {"a": 1}}).to_hub()
    assert ours["future_key"] == {"a": 1}
    assert ours["dtype"] == ours["torch_dtype"] == "bfloat16"
    assert ours["rope_theta"] == ours["rope_parameters"]["rope_theta"]
    theirs, direct = AutoConfig.for_model(**ours), AutoConfig.for_model(**raw)
    ids = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        one = reference(raw)
        other = AutoModelForCausalLM.from_config(theirs).to(torch.float32).eval()
        other.load_state_dict(one.state_dict())
        torch.testing.assert_close(one(ids).logits, other(ids).logits, rtol=0, atol=0)
    assert theirs.rope_parameters["rope_theta"] == direct.rope_parameters["rope_theta"]


def test_old_and_new_spelling_are_one_config() -> None:
    base = hub_config("mixtral")
    old = {**base, "rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "float16"}
    new = {
        **base,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "dtype": "float16",
    }
    assert ModelConfig.from_hub(old) == ModelConfig.from_hub(new)
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    old = {**base, "rope_theta": 5e5, "rope_scaling": scaling}
    new = {**base, "rope_parameters": {**scaling, "rope_type": "yarn", "rope_theta": 5e5}}
    assert ModelConfig.from_hub(old).rope == ModelConfig.from_hub(new).rope
    assert ModelConfig.from_hub(old).rope.factor == 8.0


def test_null_fields_take_the_family_default() -> None:
    nulls = dict.fromkeys(("head_dim", "sliding_window", "rope_scaling", "rms_norm_eps"))
    config = ModelConfig.from_hub({**hub_config("mixtral"), **nulls, "num_key_value_heads": None})
    assert config.attention.head_dim == 8
    assert config.attention.num_kv_heads == 4
    assert config.window(0) == 0
    assert config.norm_eps == 1e-5
    assert config.rope.theta == 1e6


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}, (0, 1, 2, 3)),
        ({"num_hidden_layers": 5, "decoder_sparse_step": 3, "mlp_only_layers": None}, (2,)),
    ],
)
def test_sparse_layers_qwen(changes: dict[str, Any], sparse: tuple[int, ...]) -> None:
    """C46 a, b."""
    config = ModelConfig.from_hub(hub_config("qwen3_moe", **changes))
    assert config.moe_layers == sparse
    assert ModelConfig.from_hub(config.to_hub()) == config


def test_sparse_layers_deepseek_and_extra_layer() -> None:
    """C46 c, d, e."""
    raw = hub_config("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1)
    assert ModelConfig.from_hub(raw).moe_layers == (1, 2)
    config = ModelConfig.from_hub({**raw, "num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    rules = rules_for(config)
    assert rules.matches("passthrough", "model.layers.2.eh_proj.weight")
    assert not rules.matches("passthrough", "model.layers.1.self_attn.o_proj.weight")
    assert not rules.matches("passthrough", "model.layers.20.self_attn.o_proj.weight")
    rules = rules_for(ModelConfig.from_hub({**raw, "num_hidden_layers": 64}))
    assert "model.layers.61.self_attn.o_proj.weight" in rules.hub_shapes()
    assert not rules.matches("passthrough", "model.layers.61.self_attn.o_proj.weight")


def test_fused_form_is_read_where_the_folder_has_it() -> None:
    config = ModelConfig.from_hub(hub_config("mixtral"))
    name = "model.layers.0.mlp.experts.down_proj"
    shapes = rules_for(config, [name]).hub_shapes()
    assert shapes[name] == (6, 32, 24)
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (6, 48, 32)
    assert "model.layers.0.mlp.gate.weight" in shapes
    per_expert = rules_for(config).hub_shapes()
    assert "model.layers.0.block_sparse_moe.experts.5.w2.weight" in per_expert
    assert name not in per_expert


@pytest.mark.parametrize("case", CASES)
def test_an_absent_field_is_what_transformers_takes(case: str) -> None:
    """K2: each field of the config taken away by itself: the family's default is the same one, or
    the field is asked for; none is another in silence."""
    raw = hub_config(case)
    whole = AutoConfig.for_model(**raw).to_dict()
    fixed = {"model_type", "dtype", "architectures", "num_hidden_layers", "num_attention_heads"}
    for field in sorted({*whole} - fixed):
        given = {name: value for name, value in whole.items() if name != field}
        if field == "num_key_value_heads" and "kv_lora_rank" not in whole:
            given["num_attention_heads"] = 16  # which their defaults divide
        full = AutoConfig.for_model(**given).to_dict() | {"dtype": whole["dtype"]}
        if "kv_lora_rank" in whole:  # there transformers does not look at them
            full["num_key_value_heads"] = full["num_attention_heads"]
        found, expected = outcome(given), outcome(full)
        if found != expected:
            assert f"has no {field!r}, which this family needs" in str(found), field


def outcome(raw: dict[str, Any]) -> ModelConfig | str:
    try:
        return ModelConfig.from_hub(raw)
    except ConfigError as refusal:
        return str(refusal)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_next"}, ("qwen3_next", "linear-attention", "mixtral")),
        ({"model_type": None}, ("model_type", "mixtral")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ({"rope_scaling": {"type": "longrope"}}, ("longrope", "yarn")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads=3", "4")),
        ({"num_attention_heads": 5}, ("hidden_size=32", "head_dim")),
        ({"hidden_size": None}, ("hidden_size", "mixtral")),
        ({"hidden_size": "32"}, ("hidden_size='32'", "whole number")),
        ({"num_local_experts": 1, "num_experts_per_tok": 2}, ("top_k", "num_experts")),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings", "true or false")),
        ({"partial_rotary_factor": 1.5}, ("partial_rotary_factor",)),
        ({"residual_dropout": 1.0}, ("residual_dropout",)),
    ],
)
def test_bad_config_is_one_sentence(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """F3: unsupported or broken fields are refused with the fix named."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hub(hub_config("mixtral", **changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_a_published_top_1_model_is_read(case: str) -> None:
    """F3: a weight that is always 1 cannot train a router, but a model that has it answers."""
    config = ModelConfig.from_hub(hub_config(case, num_experts_per_tok=1))
    assert config.moe.router.top_k == 1
    assert config.moe.router.allow_constant


@pytest.mark.parametrize(
    ("case", "changes", "word"),
    [
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("mixtral", {"num_experts": 5}, "num_local_experts=6 and num_experts=5"),
        ("mixtral", {"num_attention_heads": 0}, "num_attention_heads=0"),
        ("mixtral", {"num_hidden_layers": float("inf")}, "num_hidden_layers=inf"),
        ("mixtral", {"initializer_range": float("nan")}, "initializer_range=nan"),
        ("mixtral", {"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ("mixtral", {"rope_theta": 0}, "rope_theta=0"),
        ("mixtral", {"sliding_window": -1}, "sliding_window=-1"),
        ("mixtral", {"rope_scaling": {"factor": 4.0}}, "factor=4.0 but no rope_type"),
        ("mixtral", {"rope_parameters": {"rope_type": "linear"}}, "'linear' needs a factor"),
        ("mixtral", {"rope_scaling": "linear"}, "rope_scaling='linear' must be a mapping"),
        ("qwen2_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            "mixtral",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
    ],
)
def test_what_would_be_passed_over_is_refused(
    case: str, changes: dict[str, Any], word: str
) -> None:
    """F3: transformers does not look at these fields; the families' own code and engines do."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hub(hub_config(case, **changes))
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("case", "own", "other"),
    [
        ("mixtral", "num_local_experts", "num_experts"),
        ("gpt_oss", "num_local_experts", "num_experts"),
        ("granitemoe", "num_local_experts", "num_experts"),
        ("qwen3_moe", "num_experts", "num_local_experts"),
        ("qwen2_moe", "num_experts", "num_local_experts"),
        ("olmoe", "num_experts", "num_local_experts"),
        ("deepseek_v2", "n_routed_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
    ],
)
def test_the_number_of_experts_has_two_names(case: str, own: str, other: str) -> None:
    """C39: one `attribute_map` of transformers for each; the family's default is not taken."""
    raw = hub_config(case)
    changed = {**raw, other: raw[own], own: None}
    assert ModelConfig.from_hub(changed).moe == ModelConfig.from_hub(raw).moe
    both = {**raw, other: raw[own]}
    assert ModelConfig.from_hub(both).moe == ModelConfig.from_hub(raw).moe


def test_null_groups_are_no_groups() -> None:
    """R3: engines take n_group=null for routing without groups, not for the published 8 of 4."""
    null = hub_config("deepseek_v3", n_group=None, topk_group=None)
    router = ModelConfig.from_hub(null).moe.router
    assert (router.num_groups, router.top_groups) == (1, 1)


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ("kimi_vl", "several parts, with a language model of model_type='deepseek_v3'"),
        (None, "several parts, with a language model of model_type='deepseek_v3'"),
        ("llama4", "model_type='llama4' is not supported .its chunked attention"),
    ],
)
def test_a_wrapper_of_a_language_model_is_one_sentence(outer: str | None, message: str) -> None:
    """F3: a config with a nested text_config (vision and language) says what to give instead; a
    family that is known not to be supported keeps its own reason."""
    inner = hub_config("deepseek_v3")
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hub({"model_type": outer, "text_config": inner})
    assert ModelConfig.from_hub({**inner, "text_config": {"a": 1}}).model_type == "deepseek_v3"


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="8x7b"):
        preset("mixtral", "9x9b")
    assert preset("mixtral", "tiny", num_local_experts=6).moe.router.num_experts == 6


@pytest.mark.parametrize("case", CASES)
def test_rope_equals_transformers(case: str) -> None:
    """Cosines and sines of every kind of rope, also far out, are those of transformers."""
    raw = hub_config(case)
    model, config = reference(raw), ModelConfig.from_hub(raw)
    mla = config.attention.mla
    size = config.attention.head_dim if mla is None else mla.rope_dim
    theirs = model.model.rotary_emb
    torch.testing.assert_close(
        inverse_frequencies(config.rope, size), theirs.inv_freq, rtol=1e-6, atol=0
    )
    assert attention_factor(config.rope) == pytest.approx(theirs.attention_scaling)
    positions = torch.tensor([[0, 1, 7, 63]])
    turned = rotation(config.rope, size, positions, torch.float32)
    got = theirs(torch.zeros(1), positions)
    if isinstance(got, tuple):
        half = turned.cos_BSh.shape[-1]
        torch.testing.assert_close(turned.cos_BSh, got[0][..., :half], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(turned.sin_BSh, got[1][..., :half], rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(turned.cos_BSh, got.real, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_with_and_without_truncation(truncate: bool) -> None:
    """At GPT-OSS's published sizes the two differ; transformers has both."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": truncate,
        "original_max_position_embeddings": 4096,
    }
    raw = hub_config("gpt_oss", head_dim=64, rope_parameters=rope)
    ours = inverse_frequencies(ModelConfig.from_hub(raw).rope, 64)
    torch.testing.assert_close(ours, reference(raw).model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_configs_are_frozen() -> None:
    config = preset("mixtral")
    with pytest.raises(AttributeError):
        config.dim = 3  # type: ignore[misc]
