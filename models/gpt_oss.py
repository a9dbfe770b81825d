"""GPT-OSS (arXiv:2508.10925): attention sinks, alternating windows, biases, clamped experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.models.config import AttentionConfig, ModelConfig, MoEConfig
from moe_tp.models.hub import (
    Family,
    HubFields,
    common_fields,
    layer_types,
    read_rope,
    read_windows,
    write_common,
)
from moe_tp.models.names import HubNames, name_rules
from moe_tp.routing.config import RouterConfig

# The published MXFP4 tensors are decoded to this very form by the checkpoint room.
_NAMES = HubNames(
    router="mlp.router.weight",
    router_bias="mlp.router.bias",
    layout="fused_interleaved",
    gate_up=("mlp.experts.gate_up_proj",),
    gate_up_bias="mlp.experts.gate_up_proj_bias",
    down="mlp.experts.down_proj",
    down_bias="mlp.experts.down_proj_bias",
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _from_hub(config: Mapping[str, Any]) -> ModelConfig:
    fields = HubFields(config)
    layers, bias = fields.integer("num_hidden_layers"), fields.flag("attention_bias", True)
    heads = fields.integer("num_attention_heads", 64)
    return ModelConfig(
        **common_fields(fields),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.kv_heads(heads, 8),
            head_dim=fields.integer("head_dim", 64),
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
            dropout=fields.number("attention_dropout", 0.0),
        ),
        rope=read_rope(fields, theta=150000.0, scaling=_YARN),
        moe=MoEConfig(
            router=RouterConfig(
                allow_constant=True,
                num_experts=fields.experts(("num_local_experts", "num_experts"), 128),
                top_k=fields.integer("num_experts_per_tok", fields.raw("experts_per_token", 4)),
                score="softmax_topk",
                linear_bias=True,
                balance_coef=fields.number("router_aux_loss_coef", 0.001),
            ),
            expert_dim=fields.integer("intermediate_size"),
            activation="clamped_swiglu",
            activation_alpha=fields.number("swiglu_alpha", 1.702),
            activation_limit=fields.number("swiglu_limit", 7.0),
            expert_bias=True,
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 131072),
        windows=read_windows(
            fields, fields.integer("sliding_window", 128), [i % 2 == 0 for i in range(layers)]
        ),
    )


def _to_hub(config: ModelConfig) -> dict[str, Any]:
    router, moe = config.moe.router, config.moe
    return write_common(config, "GptOssForCausalLM") | {
        "num_key_value_heads": config.attention.num_kv_heads,
        "head_dim": config.attention.head_dim,
        "attention_bias": config.attention.qkv_bias,
        "intermediate_size": moe.expert_dim,
        "num_local_experts": router.num_experts,
        "num_experts_per_tok": router.top_k,
        "router_aux_loss_coef": router.balance_coef,
        "swiglu_alpha": moe.activation_alpha,
        "swiglu_limit": moe.activation_limit,
        "sliding_window": max(config.windows, default=0) or None,
        "layer_types": layer_types(config),
    }


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    return name_rules(config, _NAMES)


_20B: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": _YARN,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.9,
    "torch_dtype": "bfloat16",
}

FAMILIES = {
    "gpt_oss": Family(
        model_type="gpt_oss",
        from_hub=_from_hub,
        to_hub=_to_hub,
        name_rules=_rules,
        presets={
            "tiny": {
                **_20B,
                "vocab_size": 1024,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "sliding_window": 16,
                "router_aux_loss_coef": 0.001,
            },
            "20b": _20B,
            "120b": {**_20B, "num_hidden_layers": 36, "num_local_experts": 128},
        },
    )
}
