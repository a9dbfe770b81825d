"""Hub folders and training state on disk."""

from moe_tp.checkpoint.export import export_folder
from moe_tp.checkpoint.files import Quantise
from moe_tp.checkpoint.gather import gather_named
from moe_tp.checkpoint.inspect import Inspection, inspect_folder
from moe_tp.checkpoint.load import LoadReport, load_into
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules, Piece
from moe_tp.checkpoint.writer import SaveReport, save_hub

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
