"""Hub folders and training state on disk."""

from moe_tp.checkpoint.load import LoadReport, load_into
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules, Piece

__all__ = ["HubFolder", "LoadReport", "NameRules", "Piece", "load_into"]
