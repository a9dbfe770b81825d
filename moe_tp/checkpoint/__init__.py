"""Hub folders and training state on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_tp.lazy import on_first_use

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

__getattr__, __dir__ = on_first_use(__name__, _HOME)
