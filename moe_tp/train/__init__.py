"""Data, loop, optimisers, metrics and report; the public names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_tp.lazy import on_first_use

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

__getattr__, __dir__ = on_first_use(__name__, _HOME)
