"""Data, loop, optimisers, metrics and report; the public names are loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_tp.train.lora import LoRAConfig, apply_lora, merge_lora
    from moe_tp.train.lora_io import load_adapter, save_adapter

_HOME = {
    "LoRAConfig": "moe_tp.train.lora",
    "apply_lora": "moe_tp.train.lora",
    "load_adapter": "moe_tp.train.lora_io",
    "merge_lora": "moe_tp.train.lora",
    "save_adapter": "moe_tp.train.lora_io",
}

__all__ = ["LoRAConfig", "apply_lora", "load_adapter", "merge_lora", "save_adapter"]


def __getattr__(name: str) -> object:
    """Return the public name, importing its module the first time it is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'moe_tp.train' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
