"""The check of a layout against one process that shares no code with it; `verify` is the way in.

`hub`, `family`, `attention`, `gate` and `reference` are the one-process path: plain functional
torch over the tensors of a hub folder. They import nothing of this library but its errors, so that
a fault in a dispatcher, a collective, a router or a name rule cannot hide by being on both sides.
`run` drives the layout and `compare` judges it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_tp.lazy import on_first_use

if TYPE_CHECKING:
    from moe_tp.verify.compare import Report
    from moe_tp.verify.run import verify

__all__ = ["Report", "verify"]

_HOME = {"Report": "moe_tp.verify.compare", "verify": "moe_tp.verify.run"}

# On first use, so that the reference loads alone.
__getattr__, __dir__ = on_first_use(__name__, _HOME)
