"""DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437), Moonlight and Kimi-K2.

Latent attention, shared experts, dense first layers. V2 routes by softmax and the best of each
group; V3 by sigmoid with a correction bias and the sum of each group's best two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.errors import ConfigError
from moe_tp.models.config import AttentionConfig, MLAConfig, ModelConfig, MoEConfig
from moe_tp.models.hub import Family, HubFields, common_fields, read_rope, write_common
from moe_tp.models.names import choose, fused_experts, name_rules
from moe_tp.models.sigmoid_router import (
    SHARED_NAMES,
    read_first_dense,
    read_sigmoid_moe,
    write_shared_moe,
)
from moe_tp.routing.config import RouterConfig


def _attention(fields: HubFields) -> AttentionConfig:
    mla = MLAConfig(
        # null is a full query projection; an absent key is transformers' default
        q_rank=fields.optional_integer("q_lora_rank") if "q_lora_rank" in fields.config else 1536,
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )
    heads, bias = fields.integer("num_attention_heads"), fields.flag("attention_bias", False)
    shared = fields.integer("num_key_value_heads", heads)
    if shared != heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={shared} differs from num_attention_heads={heads}; "
            f"latent attention has one key head for each query head"
        )
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=mla.rope_dim,
        mla=mla,
        qkv_bias=bias,
        out_bias=bias,
        dropout=fields.number("attention_dropout", 0.0),
    )


def _softmax_moe(fields: HubFields) -> MoEConfig:
    """Return V2's experts; weights are not rescaled, whatever norm_topk_prob says."""
    fields.must_be("scoring_func", ("softmax",), "softmax")
    fields.must_be("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    fields.must_be("norm_topk_prob", (False,), False)
    grouped = fields.text("topk_method", "greedy") == "group_limited_greedy"
    expert_dim = fields.integer("moe_intermediate_size")
    return MoEConfig(
        router=RouterConfig(
            allow_constant=True,
            num_experts=fields.experts(("n_routed_experts", "num_experts"), 64),
            top_k=fields.integer("num_experts_per_tok"),
            normalize=False,
            scale=fields.number("routed_scaling_factor", 1.0),
            num_groups=fields.integer("n_group", 1) if grouped else 1,
            top_groups=fields.integer("topk_group", 1) if grouped else 1,
            group_score="max",
        ),
        expert_dim=expert_dim,
        shared_dim=expert_dim * fields.integer("n_shared_experts", 2),
    )


def _from_hub(config: Mapping[str, Any], *, version: int) -> ModelConfig:
    fields = HubFields(config)
    fields.must_be("mlp_bias", (False,), False)
    fields.must_be("moe_layer_freq", (1,), 1)
    if version == 2:
        moe, interleaved = _softmax_moe(fields), True
    else:
        moe = read_sigmoid_moe(fields, experts=256, scale=2.5, groups=8, top_groups=4)
        interleaved = fields.flag("rope_interleave", True)
    return ModelConfig(
        **common_fields(fields),
        attention=_attention(fields),
        rope=read_rope(fields, interleaved=interleaved),
        moe=moe,
        dense_dim=fields.integer("intermediate_size"),
        dense_layers=read_first_dense(fields, 0 if version == 2 else 3),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 2048 if version == 2 else 4096),
        num_mtp_layers=fields.integer("num_nextn_predict_layers", 0 if version == 2 else 1),
    )


def _to_hub(config: ModelConfig, *, version: int) -> dict[str, Any]:
    mla = config.attention.mla
    assert mla is not None
    result = (
        write_common(config, f"DeepseekV{version}ForCausalLM")
        | write_shared_moe(config)
        | {
            "num_key_value_heads": config.attention.num_heads,
            "attention_bias": config.attention.qkv_bias,
            "q_lora_rank": mla.q_rank,
            "kv_lora_rank": mla.kv_rank,
            "qk_nope_head_dim": mla.nope_dim,
            "qk_rope_head_dim": mla.rope_dim,
            "v_head_dim": mla.value_dim,
        }
    )
    if version == 2:
        grouped = config.moe.router.num_groups > 1
        result["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    else:
        result["rope_interleave"] = config.rope.interleaved
        result["num_nextn_predict_layers"] = config.num_mtp_layers
    return result


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    fused = fused_experts(SHARED_NAMES, "mlp.experts")
    return name_rules(config, choose(tensors, SHARED_NAMES, fused))


_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
_V2: dict[str, Any] = {
    **_LATENT,
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 1e4,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
_V3: dict[str, Any] = {
    **_LATENT,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 1e4,
    "rope_scaling": {**_V2["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
_K2: dict[str, Any] = {
    **_V3,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072,
    "rope_theta": 5e4,
    "rope_scaling": {**_V3["rope_scaling"], "factor": 32.0},
}
_SMALL_V2: dict[str, Any] = {
    **_V2,
    "hidden_size": 2048,
    "q_lora_rank": None,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_MOONLIGHT: dict[str, Any] = {
    **_V3,
    "vocab_size": 163840,
    "hidden_size": 2048,
    "q_lora_rank": None,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192,
    "rope_theta": 5e4,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
}


def _family(model_type: str, version: int, presets: Mapping[str, Mapping[str, Any]]) -> Family:
    return Family(
        model_type=model_type,
        from_hub=partial(_from_hub, version=version),
        to_hub=partial(_to_hub, version=version),
        name_rules=_rules,
        presets=presets,
    )


FAMILIES = {
    "deepseek_v2": _family(
        "deepseek_v2",
        2,
        {
            "tiny": {**_TINY, "topk_method": "group_limited_greedy"},
            "lite": _SMALL_V2,
            "v2": _V2,
        },
    ),
    "deepseek_v3": _family(
        "deepseek_v3",
        3,
        {
            "tiny": {**_TINY, "num_nextn_predict_layers": 0},
            "v3": _V3,
            "moonlight-16b-a3b": _MOONLIGHT,
        },
    ),
    # Kimi-K2 is DeepSeek-V3 under a name of its own.
    "kimi_k2": _family(
        "kimi_k2",
        3,
        {
            "tiny": {**_TINY, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1},
            "k2": _K2,
        },
    ),
}
