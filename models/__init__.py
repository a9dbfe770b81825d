"""What a model is: configuration, blocks, decoder, and one short file for each family."""

from __future__ import annotations

if __name__ != "moe_tp.models":
    raise ImportError(
        f"this folder is the package moe_tp.models and was imported as {__name__!r}, which would "
        "make a second copy of every class; write 'import moe_tp.models'"
    )

from typing import TYPE_CHECKING

from moe_tp.lazy import on_first_use

if TYPE_CHECKING:
    from moe_tp.models.config import ModelConfig
    from moe_tp.models.families import preset
    from moe_tp.models.load import build, from_pretrained, save_pretrained

_HOME = {
    "ModelConfig": "moe_tp.models.config",
    "preset": "moe_tp.models.families",
    "build": "moe_tp.models.load",
    "from_pretrained": "moe_tp.models.load",
    "save_pretrained": "moe_tp.models.load",
}

__all__ = ["ModelConfig", "build", "from_pretrained", "preset", "save_pretrained"]

__getattr__, __dir__ = on_first_use(__name__, _HOME)
