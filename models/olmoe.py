"""OLMoE (arXiv:2409.02060): norms over the full width of queries and keys, weights not rescaled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.models.config import AttentionConfig, ModelConfig, MoEConfig
from moe_tp.models.hub import Family, HubFields, common_fields, read_rope, write_common
from moe_tp.models.names import QWEN_EXPERTS, choose, fused_experts, name_rules
from moe_tp.routing.config import RouterConfig


def _from_hub(config: Mapping[str, Any]) -> ModelConfig:
    fields = HubFields(config)
    heads, bias = fields.integer("num_attention_heads"), fields.flag("attention_bias", False)
    return ModelConfig(
        **common_fields(fields),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.head_dim(),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="full",
            clip_qkv=fields.optional_number("clip_qkv"),
            dropout=fields.number("attention_dropout", 0.0),
        ),
        rope=read_rope(fields),
        moe=MoEConfig(
            router=RouterConfig(
                allow_constant=True,
                num_experts=fields.experts(("num_experts", "num_local_experts"), 64),
                top_k=fields.integer("num_experts_per_tok", 8),
                normalize=fields.flag("norm_topk_prob", False),
                balance_coef=fields.number("router_aux_loss_coef", 0.01),
            ),
            expert_dim=fields.integer("intermediate_size"),
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 4096),
    )


def _to_hub(config: ModelConfig) -> dict[str, Any]:
    router = config.moe.router
    return write_common(config, "OlmoeForCausalLM") | {
        "num_key_value_heads": config.attention.num_kv_heads,
        "attention_bias": config.attention.qkv_bias,
        "clip_qkv": config.attention.clip_qkv,
        "intermediate_size": config.moe.expert_dim,
        "num_experts": router.num_experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.normalize,
        "router_aux_loss_coef": router.balance_coef,
    }


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    fused = fused_experts(QWEN_EXPERTS, "mlp.experts")
    return name_rules(config, choose(tensors, QWEN_EXPERTS, fused))


_7B: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.01,
    "torch_dtype": "bfloat16",
}

FAMILIES = {
    "olmoe": Family(
        model_type="olmoe",
        from_hub=_from_hub,
        to_hub=_to_hub,
        name_rules=_rules,
        presets={
            "tiny": {
                **_7B,
                "vocab_size": 1024,
                "hidden_size": 64,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "num_experts": 8,
                "num_experts_per_tok": 2,
            },
            "1b-7b": _7B,
        },
    )
}
