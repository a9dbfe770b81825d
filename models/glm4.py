"""GLM-4.5 (arXiv:2508.06471): the sigmoid router on grouped queries, half of each head rotated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.models.config import AttentionConfig, ModelConfig
from moe_tp.models.hub import Family, HubFields, common_fields, read_rope, write_common
from moe_tp.models.names import choose, fused_experts, name_rules
from moe_tp.models.sigmoid_router import (
    SHARED_NAMES,
    read_first_dense,
    read_sigmoid_moe,
    write_shared_moe,
)


def _from_hub(config: Mapping[str, Any]) -> ModelConfig:
    fields = HubFields(config)
    heads = fields.integer("num_attention_heads")
    return ModelConfig(
        **common_fields(fields),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.kv_heads(heads, 8),
            head_dim=fields.head_dim(),
            qkv_bias=fields.flag("attention_bias", False),
            qk_norm="head" if fields.flag("use_qk_norm", False) else "none",
            dropout=fields.number("attention_dropout", 0.0),
        ),
        rope=read_rope(fields, partial=0.5),
        moe=read_sigmoid_moe(fields, experts=128, scale=1.0, groups=1, top_groups=1),
        dense_dim=fields.integer("intermediate_size", 10944),
        dense_layers=read_first_dense(fields, 1),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 131072),
        num_mtp_layers=fields.integer("num_nextn_predict_layers", 1),
    )


def _to_hub(config: ModelConfig) -> dict[str, Any]:
    return (
        write_common(config, "Glm4MoeForCausalLM")
        | write_shared_moe(config)
        | {
            "num_key_value_heads": config.attention.num_kv_heads,
            "head_dim": config.attention.head_dim,
            "attention_bias": config.attention.qkv_bias,
            "use_qk_norm": config.attention.qk_norm == "head",
            "num_nextn_predict_layers": config.num_mtp_layers,
        }
    )


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    fused = fused_experts(SHARED_NAMES, "mlp.experts")
    return name_rules(config, choose(tensors, SHARED_NAMES, fused))


_AIR: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}

FAMILIES = {
    "glm4_moe": Family(
        model_type="glm4_moe",
        from_hub=_from_hub,
        to_hub=_to_hub,
        name_rules=_rules,
        presets={
            "tiny": {
                **_AIR,
                "vocab_size": 1024,
                "hidden_size": 64,
                "intermediate_size": 96,
                "moe_intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "use_qk_norm": True,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "num_nextn_predict_layers": 0,
                "max_position_embeddings": 4096,
            },
            "4.5-air": _AIR,
            "4.5": {
                **_AIR,
                "hidden_size": 5120,
                "intermediate_size": 12288,
                "moe_intermediate_size": 1536,
                "num_hidden_layers": 92,
                "use_qk_norm": True,
                "n_routed_experts": 160,
                "routed_scaling_factor": 2.5,
                "first_k_dense_replace": 3,
            },
        },
    )
}
