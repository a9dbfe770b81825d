"""Granite-MoE: four constant factors, softmax over the chosen experts, a tied head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.errors import ConfigError
from moe_tp.models.config import AttentionConfig, ModelConfig, MoEConfig
from moe_tp.models.hub import Family, HubFields, common_fields, read_rope, write_common
from moe_tp.models.names import HubNames, choose, fused_experts, name_rules
from moe_tp.routing.config import RouterConfig

_NAMES = HubNames(
    router="block_sparse_moe.router.layer.weight",
    layout="fused",
    gate_up=("block_sparse_moe.input_linear.weight",),
    down="block_sparse_moe.output_linear.weight",
)
_FUSED = fused_experts(_NAMES, "block_sparse_moe.experts", router="block_sparse_moe.router.weight")


def _from_hub(config: Mapping[str, Any]) -> ModelConfig:
    fields = HubFields(config)
    heads, bias = fields.integer("num_attention_heads"), fields.flag("attention_bias", False)
    divisor = fields.number("logits_scaling", 1.0)
    if divisor == 0.0:
        raise ConfigError("config.json: logits_scaling=0 would divide the logits by zero")
    return ModelConfig(
        **common_fields(fields),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.head_dim(),
            qkv_bias=bias,
            out_bias=bias,
            scale=fields.number("attention_multiplier", 1.0),
            dropout=fields.number("attention_dropout", 0.0),
        ),
        rope=read_rope(fields),
        moe=MoEConfig(
            router=RouterConfig(
                allow_constant=True,
                num_experts=fields.experts(("num_local_experts", "num_experts"), 8),
                top_k=fields.integer("num_experts_per_tok", 2),
                score="softmax_topk",
                balance_coef=fields.number("router_aux_loss_coef", 0.001),
            ),
            expert_dim=fields.integer("intermediate_size"),
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 2048),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / divisor,
    )


def _to_hub(config: ModelConfig) -> dict[str, Any]:
    router = config.moe.router
    divisor = config.hub_config.get("logits_scaling") or 1.0
    return write_common(config, "GraniteMoeForCausalLM") | {
        "num_key_value_heads": config.attention.num_kv_heads,
        "attention_bias": config.attention.qkv_bias,
        "attention_multiplier": config.attention.scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        # As it was read where that still holds: 1 / (1 / x) is not always x.
        "logits_scaling": divisor
        if 1.0 / divisor == config.logit_scale
        else 1.0 / config.logit_scale,
        "intermediate_size": config.moe.expert_dim,
        "num_local_experts": router.num_experts,
        "num_experts_per_tok": router.top_k,
        "router_aux_loss_coef": router.balance_coef,
    }


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    return name_rules(config, choose(tensors, _NAMES, _FUSED))


_1B: dict[str, Any] = {
    "vocab_size": 49155,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1.5e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "router_aux_loss_coef": 0.0,
    "torch_dtype": "bfloat16",
}

FAMILIES = {
    "granitemoe": Family(
        model_type="granitemoe",
        from_hub=_from_hub,
        to_hub=_to_hub,
        name_rules=_rules,
        presets={
            "tiny": {
                **_1B,
                "vocab_size": 1024,
                "hidden_size": 64,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "max_position_embeddings": 4096,
                "attention_multiplier": 0.0625,
            },
            "1b-a400m": _1B,
            "3b-a800m": {
                **_1B,
                "hidden_size": 1536,
                "num_hidden_layers": 32,
                "num_attention_heads": 24,
                "num_local_experts": 40,
                "logits_scaling": 6.0,
            },
        },
    )
}
