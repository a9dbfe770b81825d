"""The families that this library knows, by their hub `model_type`."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.checkpoint.states import KIND
from moe_tp.errors import ConfigError
from moe_tp.models.config import ModelConfig
from moe_tp.models.hub import Family

_MODULES = {
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "qwen2_moe": "qwen2_moe",
    "olmoe": "olmoe",
    "granitemoe": "granite",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "glm4_moe": "glm4",
    "gpt_oss": "gpt_oss",
}

_NOT_YET = {
    "qwen3_next": "its linear-attention layers",
    "qwen3_5_moe": "its linear-attention layers",
    "gemma4": "its router and its dense MLP beside the experts",
    "llama4": "its chunked attention and its weights on the experts' input",
    "phimoe": "its sparsemixer router",
    "dbrx": "its fused attention weights",
}


def model_types() -> tuple[str, ...]:
    """Return the supported families by hub name."""
    return tuple(_MODULES)


def family(model_type: str) -> Family:
    """Return a family by its hub name.

    Raises:
        ConfigError: it is not supported.
    """
    if model_type not in _MODULES:
        lacks = _NOT_YET.get(model_type.removesuffix("_text"))
        reason = f" ({lacks})" if lacks else ""
        raise ConfigError(
            f"model_type={model_type!r} is not supported{reason}; supported: {', '.join(_MODULES)}"
        )
    module = importlib.import_module(f"moe_tp.models.{_MODULES[model_type]}")
    found = module.FAMILIES[model_type]
    assert isinstance(found, Family)
    return found


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a hub config.

    Raises:
        ConfigError: it names no family, one that is not supported, or a model of several parts.
    """
    model_type, inner = config.get("model_type"), config.get("text_config")
    known = str(model_type).removesuffix("_text") in {*_MODULES, *_NOT_YET}
    if isinstance(inner, dict) and not known:
        raise ConfigError(
            f"model_type={model_type!r} is a model of several parts, with a language model of "
            f"model_type={inner.get('model_type')!r} in its text_config; give a folder that holds "
            f"that language model alone, with text_config as its config.json"
        )
    if not isinstance(model_type, str):
        raise ConfigError(
            f"config.json has model_type={model_type!r}, so its family is unknown; it must be one "
            f"of {', '.join(_MODULES)}"
        )
    if model_type == KIND:
        raise ConfigError(
            "the folder is a training checkpoint and no model folder; write one of it first: "
            "moe-tp export CHECKPOINT OUT"
        )
    return family(model_type)


def preset(model_type: str, name: str = "tiny", **changes: Any) -> ModelConfig:
    """Return a configuration of a published size, or the tiny one for tests and demonstrations.

    Args:
        model_type: the family.
        name: one of its presets.
        changes: hub config fields to set, by their hub names.

    Raises:
        ConfigError: no such family or preset.
    """
    found = family(model_type)
    if name not in found.presets:
        raise ConfigError(
            f"preset={name!r} is unknown for {model_type}; choose one of {', '.join(found.presets)}"
        )
    return found.from_hub({**found.presets[name], "model_type": model_type, **changes})


def rules_for(config: ModelConfig, tensors: Collection[str] = ()) -> NameRules:
    """Return the name rules of a model.

    Args:
        config: the model.
        tensors: hub names in the folder it is read from, which decide between forms.
    """
    return family(config.model_type).name_rules(config, tensors)
