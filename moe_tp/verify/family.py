"""What the reference must know of a family, read from its `config.json` (`facts`).

Letters: D width · H heads · h head size · E experts · F expert hidden.

The table follows transformers 5.24's modeling files, family by family. Whatever shows in the
tensors themselves (biases, query and key norms, sinks, a low-rank query, the number of experts) is
not repeated here: the reference looks whether they are there, and refuses a folder with tensors
that it did not use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_tp.errors import ConfigError

__all__ = ["FAMILIES", "Facts", "Gate", "Latent", "Rope", "facts", "yarn_mscale"]

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
_SAME_AS: dict[Any, str] = {"kimi_k2": "deepseek_v3"}
_ROPE_BASE = {"mixtral": 1e6, "gpt_oss": 150000.0}  # the others: 1e4
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: which part of a head turns, how fast, and in which order its pairs lie."""

    base: float
    dim: int  # leading features of a head that turn
    kind: str  # "default", "linear", "llama3" or "yarn"
    interleaved: bool  # pairs are neighbours (else: first half with second half)
    settings: Mapping[str, Any]
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How a family turns router scores into experts and weights."""

    score: str  # "softmax" over all, "softmax_topk" over the chosen, "sigmoid"
    top_k: int
    normalize: bool
    scale: float
    groups: int
    top_groups: int
    group_score: str  # "max" or "top2_sum"
    floor: float  # added to the sum that weights are divided by
    dropped: float  # score for choice of an expert outside the chosen groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A model as the reference computes it."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    latent: Latent | None
    softmax_scale: float
    windows: tuple[
        int | None, ...
    ]  # per layer: how many positions back a query sees, itself included
    clip_qkv: float | None
    moe_layers: frozenset[int]
    gate: Gate
    gate_limit: float | None  # clamp of gate and up (GPT-OSS), None: plain SwiGLU
    gate_alpha: float
    tied: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    aux_coefficient: float  # `router_aux_loss_coef`, 0 where the family has none


def facts(config: Mapping[str, Any]) -> Facts:
    """Return the facts of a hub config; refuses what the reference does not compute.

    Args:
        config: the parsed `config.json`.
    """
    family = _SAME_AS.get(config.get("model_type"), config.get("model_type"))
    if family not in FAMILIES:
        raise ConfigError(
            f"model_type={family!r} is not one that the reference computes; "
            f"it knows {', '.join(FAMILIES)}"
        )
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act={activation!r}: the reference computes silu only")
    heads = int(config["num_attention_heads"])
    latent = None
    if family in ("deepseek_v2", "deepseek_v3"):
        latent = Latent(
            kv_rank=config["kv_lora_rank"],
            nope=config["qk_nope_head_dim"],
            rope=config["qk_rope_head_dim"],
            value=config["v_head_dim"],
        )
        head_dim = latent.nope + latent.rope
    else:
        default = 64 if family == "gpt_oss" else config["hidden_size"] // heads
        head_dim = int(config.get("head_dim") or default)
    rope = _rope(config, family, latent.rope if latent else head_dim)
    layers = int(config["num_hidden_layers"])
    return Facts(
        family=family,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        eps=float(config.get("rms_norm_eps") or _eps(family)),
        rope=rope,
        latent=latent,
        softmax_scale=_softmax_scale(config, family, head_dim, rope),
        windows=_windows(config, family, layers),
        clip_qkv=config.get("clip_qkv") if family == "olmoe" else None,
        moe_layers=_moe_layers(config, family, layers),
        gate=_gate(config, family),
        gate_limit=float(config.get("swiglu_limit") or 7.0) if family == "gpt_oss" else None,
        gate_alpha=float(config.get("swiglu_alpha") or 1.702),
        tied=bool(config.get("tie_word_embeddings", False)),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / float(config.get("logits_scaling", 1.0)),
        aux_coefficient=_aux_coefficient(config, family),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention magnitude for a stretch by `factor` (arXiv:2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _eps(family: str) -> float:
    return 1e-5 if family in ("mixtral", "olmoe", "glm4_moe", "gpt_oss") else 1e-6


def _rope(config: Mapping[str, Any], family: str, head_dim: int) -> Rope:
    """Read both spellings; where both are there `rope_scaling` decides, as in transformers."""
    new = config.get("rope_parameters") or {}
    settings = dict(config.get("rope_scaling") or new)
    if family == "gpt_oss" and not settings:
        settings = dict(_GPT_OSS_ROPE)
    base = settings.get("rope_theta") or config.get("rope_theta")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(
            f"rope_type={kind!r}: the reference computes default, linear, llama3 and yarn"
        )
    part = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if part is None:
        part = 0.5 if family == "glm4_moe" else 1.0
    return Rope(
        base=float(base or _ROPE_BASE.get(family, 1e4)),
        dim=int(head_dim * part),
        kind=kind,
        interleaved=family == "deepseek_v2"
        or (family == "deepseek_v3" and bool(config.get("rope_interleave", True))),
        settings=settings,
        max_positions=int(config.get("max_position_embeddings") or 4096),
    )


def _softmax_scale(config: Mapping[str, Any], family: str, head_dim: int, rope: Rope) -> float:
    if family == "granitemoe":
        return float(config.get("attention_multiplier", 1.0))
    scale = 1.0 / math.sqrt(head_dim)
    if family in ("deepseek_v2", "deepseek_v3") and rope.kind != "default":
        all_dim = rope.settings.get("mscale_all_dim")
        if all_dim:
            scale *= yarn_mscale(float(rope.settings["factor"]), float(all_dim)) ** 2
    return scale


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family == "gpt_oss":
        window = config.get("sliding_window", 128)
        kinds = config.get("layer_types") or [
            "sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)
        ]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family == "mixtral":
        return (window,) * layers
    if family == "qwen3_moe" and config.get("use_sliding_window"):
        return (window,) * layers
    if family == "qwen2_moe" and config.get("use_sliding_window"):
        last = config.get("max_window_layers", 28)
        kinds = config.get("layer_types") or [
            "sliding_attention" if i % 2 == 0 and i < last else "full_attention"
            for i in range(layers)
        ]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (None,) * layers


def _moe_layers(config: Mapping[str, Any], family: str, layers: int) -> frozenset[int]:
    if family in ("qwen2_moe", "qwen3_moe"):
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        default = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe": 1}[family]
        first = config.get("first_k_dense_replace", default)
        return frozenset(range(first, layers))
    return frozenset(range(layers))


def _gate(config: Mapping[str, Any], family: str) -> Gate:
    top_k = int(config.get("num_experts_per_tok") or 2)
    score, normalize, scale, floor = "softmax", False, 1.0, 0.0
    groups = top_groups = 1
    if family == "mixtral":
        normalize = True
    elif family in ("qwen2_moe", "qwen3_moe", "olmoe"):
        normalize = bool(config.get("norm_topk_prob", False))
    elif family in ("granitemoe", "gpt_oss"):
        score = "softmax_topk"
    elif family == "deepseek_v2":
        scale = float(config.get("routed_scaling_factor", 1.0))
        if config.get("topk_method") == "group_limited_greedy":
            groups, top_groups = int(config["n_group"]), int(config["topk_group"])
    else:
        score, floor = "sigmoid", 1e-20
        normalize = bool(config.get("norm_topk_prob", True))
        scale = float(config.get("routed_scaling_factor", 2.5 if family == "deepseek_v3" else 1.0))
        groups, top_groups = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    return Gate(
        score=score,
        top_k=top_k,
        normalize=normalize,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
        group_score="max" if family == "deepseek_v2" else "top2_sum",
        floor=floor,
        dropped=0.0 if family == "deepseek_v2" else float("-inf"),
    )


def _aux_coefficient(config: Mapping[str, Any], family: str) -> float:
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        return 0.0
    return float(config.get("router_aux_loss_coef") or 0.0)
