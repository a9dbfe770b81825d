"""Hub configs of models that train in a blink, for tests of runs and their checkpoints."""

from __future__ import annotations

from typing import Any

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
# one layer, a vocabulary of 29, three experts
SMALLEST: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}
