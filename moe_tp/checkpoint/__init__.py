"""Hub folders and training state on disk."""

from moe_tp.checkpoint.gather import gather_named
from moe_tp.checkpoint.load import LoadReport, load_into
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules, Piece
from moe_tp.checkpoint.writer import Quantise, SaveReport, save_hub

__all__ = [
    "HubFolder",
    "LoadReport",
    "NameRules",
    "Piece",
    "Quantise",
    "SaveReport",
    "gather_named",
    "load_into",
    "save_hub",
]
