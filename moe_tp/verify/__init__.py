"""The check of a layout against one process that shares no code with it; `verify` is the way in.

`hub`, `family`, `attention`, `gate` and `reference` are the one-process path: plain functional
torch over the tensors of a hub folder. They import nothing of this library but its errors, so that
a fault in a dispatcher, a collective, a router or a name rule cannot hide by being on both sides.
`run` drives the layout and `compare` judges it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_tp.verify.compare import Report
    from moe_tp.verify.run import verify

__all__ = ["Report", "verify"]

_WHERE = {"Report": "moe_tp.verify.compare", "verify": "moe_tp.verify.run"}


def __getattr__(name: str) -> Any:
    """Return a public name; its module is imported at first use, so the reference loads alone."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
