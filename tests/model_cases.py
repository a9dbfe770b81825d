"""Tiny hub configs of every family, for the tests of the models room."""

from __future__ import annotations

from typing import Any

import torch

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    # transformers leaves the padding token's embedding without gradient, which is not the sum of
    # its uses; here every token trains.
    "pad_token_id": None,
    "eos_token_id": None,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "rope_parameters": YARN,
}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
    },
    "mixtral-window-tied": {
        "model_type": "mixtral",
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "tie_word_embeddings": True,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "head_dim": 12,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "olmoe": {
        "model_type": "olmoe",
        "intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "clip_qkv": 1.5,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "intermediate_size": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.7,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        **LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **LATENT,
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "intermediate_size": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
}


def hub_config(case: str, **changes: Any) -> dict[str, Any]:
    """Return the hub config of a case."""
    return {**BASE, **CASES[case], **changes}


def error(a: torch.Tensor, b: torch.Tensor, norm: float = 0.0) -> float:
    """RULES' definition: the difference by the larger of b's norm and 1e-6 of the global one."""
    return float((a - b).detach().norm() / max(float(b.norm()), 1e-6 * norm, 1e-30))
