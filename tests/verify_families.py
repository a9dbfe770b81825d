"""Small random models of every family that the reference knows, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SMALL = {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2}
SIGMOID = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
LATENT = {
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "qk_nope_head_dim": 6,
    "num_key_value_heads": 4,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 20},
    "mixtral-window-tied": {
        "num_local_experts": 6,
        "intermediate_size": 20,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "head_dim": 8,
    },
    "mixtral-llama3": {
        "num_local_experts": 3,
        "intermediate_size": 20,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mixtral-linear": {
        "num_local_experts": 3,
        "intermediate_size": 20,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    },
    "qwen3_moe": {**SMALL, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {**SMALL, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2},
    "olmoe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 12,
        "clip_qkv": 0.8,
    },
    "granitemoe": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        **LATENT,
        **SIGMOID,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {
        **LATENT,
        **SIGMOID,
        "q_lora_rank": 9,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
    },
    "glm4_moe": {**SIGMOID, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "head_dim": 8,
        "sliding_window": 5,
        "rope_parameters": {**YARN, "truncate": False, "mscale": None, "mscale_all_dim": None},
    },
}


def saved(case: str, folder: Path, **extra: Any) -> Any:
    """Save a random model of a case and return it; vectors that start at zero are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(case.split("-")[0], **{**BASE, **CASES[case], **extra})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return model.train()
