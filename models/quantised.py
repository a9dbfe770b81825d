"""The quantised formats in which families are published, for an export that writes them again.

A format is written only for families whose published folders have it, so that what reads those
reads these too: fp8 in blocks of 128 (DeepSeek-V3 and Kimi-K2, arXiv 2412.19437; Qwen3-MoE) and
MXFP4 experts (GPT-OSS). Embeddings, head, norms, routers and biases stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from moe_tp.checkpoint.files import Quantise
from moe_tp.checkpoint.rules import NameRules
from moe_tp.errors import ConfigError
from moe_tp.models.config import ModelConfig

FORMATS: dict[str, tuple[str, ...]] = {
    "fp8": ("deepseek_v3", "kimi_k2", "qwen3_moe"),
    "mxfp4": ("gpt_oss",),
}
_MATRICES = (
    r"model\.layers\.\d+\.self_attn\.(\w+_proj|kv_a_proj_with_mqa)\.weight",
    r"model\.layers\.\d+\.mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj\.weight",
)
_MX_EXPERTS = (r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj",)
_MX_KEPT = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)


def quantised(kind: Literal["fp8", "mxfp4"], config: ModelConfig, rules: NameRules) -> Quantise:
    """Return which tensors of a model are written in a quantised format.

    Args:
        kind: the format.
        config: the model; the block size of its own `quantization_config` is kept.
        rules: name rules of the folder to write.

    Raises:
        ConfigError: the family is not published in this format, or not with experts in this form.
    """
    if config.model_type not in FORMATS[kind]:
        own = [name for name, families in FORMATS.items() if config.model_type in families]
        instead = f"; its own format is {own[0]}" if own else ""
        raise ConfigError(
            f"quantize={kind}: {config.model_type} has no {kind} form on disk (those that have: "
            f"{', '.join(FORMATS[kind])}){instead}; leave --quantize out to write plain weights"
        )
    if kind == "mxfp4":
        return Quantise(kind=kind, names=_MX_EXPERTS, kept=_MX_KEPT)
    shapes = rules.hub_shapes()
    if any(".experts." in name and len(shape) > 2 for name, shape in shapes.items()):
        raise ConfigError(
            f"quantize={kind} writes one matrix an expert, but the experts are fused here; add "
            f"--experts per-expert"
        )
    return Quantise(kind=kind, names=_MATRICES, kept=_routers(shapes), block=_block(config))


def _routers(names: Collection[str]) -> tuple[str, ...]:
    """Return the linear modules that stay plain, as readers want them listed."""
    plain = (".mlp.gate.weight", "lm_head.weight")
    return tuple(name.removesuffix(".weight") for name in names if name.endswith(plain))


def _block(config: ModelConfig) -> tuple[int, int]:
    before = config.hub_config.get("quantization_config") or {}
    rows, columns = before.get("weight_block_size") or (128, 128)
    return rows, columns
