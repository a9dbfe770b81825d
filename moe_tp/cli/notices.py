"""The library's warnings as lines on stderr of the first rank, while a command runs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from moe_tp.cli.environment import Place
from moe_tp.log import get_logger

__all__ = ["shown"]


class _Lines(logging.Handler):
    """Prints a record as one line on the stderr of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        print(f"moe-tp: {record.levelname.lower()}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown(place: Place | None) -> Iterator[None]:
    """Show warnings while a command runs; the other ranks have the same to say as the first.

    Args:
        place: this rank of the run; None for one process.
    """
    if place is not None and place.rank:
        yield
        return
    lines, logger = _Lines(logging.WARNING), get_logger("moe_tp")
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)
