"""Public names of a package that are loaded on first use (PEP 562); imports nothing of the library.

A package stays light that way: importing one module of it pulls in no other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["on_first_use"]


def on_first_use(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`; its `__all__` has the names of `homes`.
        homes: the module of each public name that is loaded on first use.
    """

    def load(name: str) -> object:
        """Return the public name, importing its module the first time it is asked for."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        """Return the public names, loaded or not, and all else that the package holds."""
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return load, names
