"""Small random hub folders for the tests of verify and for the parity sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MIXTRAL_8: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "router_aux_loss_coef": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MIXTRAL_6 = {**MIXTRAL_8, "num_attention_heads": 4, "num_local_experts": 6, "head_dim": 8}
QWEN2_16: dict[str, Any] = {
    **{key: value for key, value in MIXTRAL_8.items() if key != "num_local_experts"},
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS_4: dict[str, Any] = {
    **MIXTRAL_8,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "head_dim": 8,
    "attention_bias": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "router_aux_loss_coef": 0.02,
}
MODELS = {
    "mixtral-8": MIXTRAL_8,
    "mixtral-6": MIXTRAL_6,
    "qwen2-16": QWEN2_16,
    "gpt-oss-4": GPT_OSS_4,
}


def write_folder(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a random model and return its folder.

    Matrices have a spread that keeps activations near 1, so that attention is not uniform and
    routers are not tied; vectors (norms, biases) differ from their usual 1 and 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(config).items():
        tensor = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor = 1 + 0.2 * tensor
        elif len(shape) == 1:
            tensor = 0.2 * tensor
        else:
            tensor = tensor * shape[-1] ** -0.5
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    kv = config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        stem = f"model.layers.{i}."
        shapes[stem + "input_layernorm.weight"] = (width,)
        shapes[stem + "post_attention_layernorm.weight"] = (width,)
        for name, rows in (("q", heads * size), ("k", kv), ("v", kv)):
            shapes[f"{stem}self_attn.{name}_proj.weight"] = (rows, width)
            if config["model_type"] in ("qwen2_moe", "gpt_oss"):
                shapes[f"{stem}self_attn.{name}_proj.bias"] = (rows,)
        shapes[stem + "self_attn.o_proj.weight"] = (width, heads * size)
        if config["model_type"] == "gpt_oss":
            shapes[stem + "self_attn.o_proj.bias"] = (width,)
            shapes[stem + "self_attn.sinks"] = (heads,)
        shapes.update(_experts(stem, config))
    return shapes


def _experts(stem: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = config["hidden_size"]
    if config["model_type"] == "gpt_oss":
        count, hidden = config["num_local_experts"], config["intermediate_size"]
        return {
            stem + "mlp.router.weight": (count, width),
            stem + "mlp.router.bias": (count,),
            stem + "mlp.experts.gate_up_proj": (count, width, 2 * hidden),
            stem + "mlp.experts.gate_up_proj_bias": (count, 2 * hidden),
            stem + "mlp.experts.down_proj": (count, hidden, width),
            stem + "mlp.experts.down_proj_bias": (count, width),
        }
    if config["model_type"] == "mixtral":
        block, names = stem + "block_sparse_moe.", ("w1", "w3", "w2")
        experts, hidden = config["num_local_experts"], config["intermediate_size"]
    else:
        block, names = stem + "mlp.", ("gate_proj", "up_proj", "down_proj")
        experts, hidden = config["num_experts"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {block + "gate.weight": (experts, width)}
    for e in range(experts):
        for name in names[:2]:
            shapes[f"{block}experts.{e}.{name}.weight"] = (hidden, width)
        shapes[f"{block}experts.{e}.{names[2]}.weight"] = (width, hidden)
    if config["model_type"] == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        shapes[block + "shared_expert.gate_proj.weight"] = (shared, width)
        shapes[block + "shared_expert.up_proj.weight"] = (shared, width)
        shapes[block + "shared_expert.down_proj.weight"] = (width, shared)
        shapes[block + "shared_expert_gate.weight"] = (1, width)
    return shapes
