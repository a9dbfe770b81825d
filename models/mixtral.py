"""Mixtral (arXiv:2401.04088): grouped queries; softmax over all experts, the best two rescaled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.models.config import AttentionConfig, ModelConfig, MoEConfig
from moe_tp.models.hub import Family, HubFields, common_fields, read_rope, write_common
from moe_tp.models.names import HubNames, choose, fused_experts, name_rules
from moe_tp.routing.config import RouterConfig

_NAMES = HubNames(
    router="block_sparse_moe.gate.weight",
    layout="per_expert",
    gate_up=("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
    down="block_sparse_moe.experts.{e}.w2.weight",
)
_FUSED = fused_experts(_NAMES, "mlp.experts", router="mlp.gate.weight")


def _from_hub(config: Mapping[str, Any]) -> ModelConfig:
    fields = HubFields(config)
    heads, layers = fields.integer("num_attention_heads", 32), fields.integer("num_hidden_layers")
    window = fields.integer("sliding_window", 0)
    return ModelConfig(
        **common_fields(fields),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.kv_heads(heads, 8),
            head_dim=fields.head_dim(),
            dropout=fields.number("attention_dropout", 0.0),
        ),
        rope=read_rope(fields, theta=1e6),
        moe=MoEConfig(
            router=RouterConfig(
                allow_constant=True,
                num_experts=fields.experts(("num_local_experts", "num_experts"), 8),
                top_k=fields.integer("num_experts_per_tok", 2),
                balance_coef=fields.number("router_aux_loss_coef", 0.001),
                input_jitter=fields.number("router_jitter_noise", 0.0),
            ),
            expert_dim=fields.integer("intermediate_size"),
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 131072),
        windows=(window,) * layers if window else (),
    )


def _to_hub(config: ModelConfig) -> dict[str, Any]:
    router = config.moe.router
    return write_common(config, "MixtralForCausalLM") | {
        "num_key_value_heads": config.attention.num_kv_heads,
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.moe.expert_dim,
        "num_local_experts": router.num_experts,
        "num_experts_per_tok": router.top_k,
        "router_aux_loss_coef": router.balance_coef,
        "router_jitter_noise": router.input_jitter,
        "sliding_window": config.window(0) or None,
    }


def _rules(config: ModelConfig, tensors: Collection[str]) -> NameRules:
    return name_rules(config, choose(tensors, _NAMES, _FUSED))


_8X7B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_8X7B,
        "vocab_size": 32000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    "8x7b": _8X7B,
    "8x22b": {
        **_8X7B,
        "vocab_size": 32768,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "max_position_embeddings": 65536,
        "router_aux_loss_coef": 0.001,
    },
}

FAMILIES = {
    "mixtral": Family(
        model_type="mixtral",
        from_hub=_from_hub,
        to_hub=_to_hub,
        name_rules=_rules,
        presets=_PRESETS,
    )
}
