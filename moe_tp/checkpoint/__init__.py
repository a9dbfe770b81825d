"""Hub folders and training state on disk."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_tp.checkpoint.export import export_folder
    from moe_tp.checkpoint.files import Quantise
    from moe_tp.checkpoint.gather import gather_named
    from moe_tp.checkpoint.inspect import Inspection, inspect_folder
    from moe_tp.checkpoint.load import LoadReport, load_into
    from moe_tp.checkpoint.reader import HubFolder
    from moe_tp.checkpoint.rules import NameRules, Piece
    from moe_tp.checkpoint.writer import SaveReport, save_hub

_HOME = {
    "HubFolder": "moe_tp.checkpoint.reader",
    "Inspection": "moe_tp.checkpoint.inspect",
    "LoadReport": "moe_tp.checkpoint.load",
    "NameRules": "moe_tp.checkpoint.rules",
    "Piece": "moe_tp.checkpoint.rules",
    "Quantise": "moe_tp.checkpoint.files",
    "SaveReport": "moe_tp.checkpoint.writer",
    "export_folder": "moe_tp.checkpoint.export",
    "gather_named": "moe_tp.checkpoint.gather",
    "inspect_folder": "moe_tp.checkpoint.inspect",
    "load_into": "moe_tp.checkpoint.load",
    "save_hub": "moe_tp.checkpoint.writer",
}

__all__ = [
    "HubFolder",
    "Inspection",
    "LoadReport",
    "NameRules",
    "Piece",
    "Quantise",
    "SaveReport",
    "export_folder",
    "gather_named",
    "inspect_folder",
    "load_into",
    "save_hub",
]


def __getattr__(name: str) -> object:
    """Return a public name, importing its module the first time it is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'moe_tp.checkpoint' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
