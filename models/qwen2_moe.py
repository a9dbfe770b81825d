"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): q, k and v biases and a gated shared expert."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.models.config import AttentionConfig, ModelConfig, MoEConfig
from moe_tp.models.hub import (
    Family,
    HubFields,
    common_fields,
    layer_types,
    read_rope,
    read_step_layers,
    read_windows,
    write_common,
    write_step_layers,
)
from moe_tp.models.names import QWEN_EXPERTS, choose, fused_experts, name_rules
from moe_tp.routing.config import RouterConfig

_NAMES = replace(
    QWEN_EXPERTS, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate.weight"
)


def _from_hub(config: Mapping[str, Any]) -> ModelConfig:
    fields = HubFields(config)
    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    slides = fields.flag("use_sliding_window", False)
    last = fields.integer("max_window_layers", 28)
    window = fields.integer("sliding_window", 4096) if slides else 0
    return ModelConfig(
        **common_fields(fields),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.kv_heads(heads, 16),
            head_dim=fields.head_dim(),
            qkv_bias=fields.flag("qkv_bias", True),
            dropout=fields.number("attention_dropout", 0.0),
        ),
        rope=read_rope(fields),
        moe=MoEConfig(
            router=RouterConfig(
                allow_constant=True,
                num_experts=fields.experts(("num_experts", "num_local_experts"), 60),
                top_k=fields.integer("num_experts_per_tok", 4),
                normalize=fields.flag("norm_topk_prob", False),
                balance_coef=fields.number("router_aux_loss_coef", 0.001),
            ),
            expert_dim=fields.integer("moe_intermediate_size"),
            shared_dim=fields.integer("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
        dense_dim=fields.integer("intermediate_size", 5632),
        dense_layers=read_step_layers(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 32768),
        windows=read_windows(fields, window, [i % 2 == 0 and i < last for i in range(layers)]),
    )


def _to_hub(config: ModelConfig) -> dict[str, Any]:
    router, moe = config.moe.router, config.moe
    result = (
        write_common(config, "Qwen2MoeForCausalLM")
        | write_step_layers(config)
        | {
            "num_key_value_heads": config.attention.num_kv_heads,
            "qkv_bias": config.attention.qkv_bias,
            "intermediate_size": config.dense_dim,
            "moe_intermediate_size": moe.expert_dim,
            "shared_expert_intermediate_size": moe.shared_dim,
            "num_experts": router.num_experts,
            "num_experts_per_tok": router.top_k,
            "norm_topk_prob": router.normalize,
            "router_aux_loss_coef": router.balance_coef,
            "use_sliding_window": bool(config.windows),
        }
    )
    if config.windows:
        result |= {"sliding_window": max(config.windows), "layer_types": layer_types(config)}
    return result


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    return name_rules(config, choose(tensors, _NAMES, fused_experts(_NAMES, "mlp.experts")))


_A27B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}

FAMILIES = {
    "qwen2_moe": Family(
        model_type="qwen2_moe",
        from_hub=_from_hub,
        to_hub=_to_hub,
        name_rules=_rules,
        presets={
            "tiny": {
                **_A27B,
                "vocab_size": 1024,
                "hidden_size": 64,
                "intermediate_size": 96,
                "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_experts": 8,
                "num_experts_per_tok": 2,
            },
            "qwen1.5-a2.7b": _A27B,
            "57b-a14b": {
                **_A27B,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "moe_intermediate_size": 2560,
                "shared_expert_intermediate_size": 20480,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "max_position_embeddings": 32768,
            },
        },
    )
}
