"""Qwen3-MoE (arXiv:2505.09388): a norm on each query and key head, no shared expert."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.models.config import AttentionConfig, ModelConfig, MoEConfig
from moe_tp.models.hub import (
    Family,
    HubFields,
    common_fields,
    read_rope,
    read_step_layers,
    write_common,
    write_step_layers,
)
from moe_tp.models.names import QWEN_EXPERTS, choose, fused_experts, name_rules
from moe_tp.routing.config import RouterConfig


def _from_hub(config: Mapping[str, Any]) -> ModelConfig:
    fields = HubFields(config)
    layers = fields.integer("num_hidden_layers")
    bias = fields.flag("attention_bias", False)
    slides = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window", 4096) if slides else 0
    heads = fields.integer("num_attention_heads")
    return ModelConfig(
        **common_fields(fields),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.kv_heads(heads, 4),
            head_dim=fields.head_dim(),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            dropout=fields.number("attention_dropout", 0.0),
        ),
        rope=read_rope(fields),
        moe=MoEConfig(
            router=RouterConfig(
                allow_constant=True,
                num_experts=fields.experts(("num_experts", "num_local_experts"), 128),
                top_k=fields.integer("num_experts_per_tok", 8),
                normalize=fields.flag("norm_topk_prob", False),
                balance_coef=fields.number("router_aux_loss_coef", 0.001),
            ),
            expert_dim=fields.integer("moe_intermediate_size"),
        ),
        dense_dim=fields.integer("intermediate_size", 6144),
        dense_layers=read_step_layers(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 32768),
        windows=(window,) * layers if window else (),
    )


def _to_hub(config: ModelConfig) -> dict[str, Any]:
    router, window = config.moe.router, config.window(0)
    return (
        write_common(config, "Qwen3MoeForCausalLM")
        | write_step_layers(config)
        | {
            "num_key_value_heads": config.attention.num_kv_heads,
            "head_dim": config.attention.head_dim,
            "attention_bias": config.attention.qkv_bias,
            "intermediate_size": config.dense_dim,
            "moe_intermediate_size": config.moe.expert_dim,
            "num_experts": router.num_experts,
            "num_experts_per_tok": router.top_k,
            "norm_topk_prob": router.normalize,
            "router_aux_loss_coef": router.balance_coef,
            "use_sliding_window": bool(window),
            "sliding_window": window or None,
        }
    )


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    fused = fused_experts(QWEN_EXPERTS, "mlp.experts")
    return name_rules(config, choose(tensors, QWEN_EXPERTS, fused))


_30B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}

FAMILIES = {
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        from_hub=_from_hub,
        to_hub=_to_hub,
        name_rules=_rules,
        presets={
            "tiny": {
                **_30B,
                "vocab_size": 1024,
                "hidden_size": 64,
                "intermediate_size": 96,
                "moe_intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "max_position_embeddings": 4096,
            },
            "30b-a3b": _30B,
            "235b-a22b": {
                **_30B,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "moe_intermediate_size": 1536,
                "num_hidden_layers": 94,
                "num_attention_heads": 64,
            },
            "coder-480b-a35b": {
                **_30B,
                "hidden_size": 6144,
                "intermediate_size": 8192,
                "moe_intermediate_size": 2560,
                "num_hidden_layers": 62,
                "num_attention_heads": 96,
                "num_key_value_heads": 8,
                "num_experts": 160,
                "max_position_embeddings": 262144,
                "rope_theta": 1e7,
            },
        },
    )
}
