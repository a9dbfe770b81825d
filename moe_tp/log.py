"""Loggers under the name `moe_tp`, silent unless the application configures logging."""

from __future__ import annotations

import logging

__all__ = ["get_logger", "warn_once"]

_ROOT = "moe_tp"
_warned: set[str] = set()

logging.getLogger(_ROOT).addHandler(logging.NullHandler())


def get_logger(name: str) -> logging.Logger:
    """Return the logger for a module, below the library's root logger.

    Args:
        name: usually `__name__`; names outside the library are put below its root.
    """
    if name == _ROOT or name.startswith(_ROOT + "."):
        return logging.getLogger(name)
    return logging.getLogger(f"{_ROOT}.{name}")


def warn_once(key: str, message: str) -> bool:
    """Return True if the warning was logged, False if one with this key was logged before.

    Args:
        key: identifies the warning, not its wording.
        message: one sentence.
    """
    if key in _warned:
        return False
    _warned.add(key)
    logging.getLogger(_ROOT).warning(message)
    return True
