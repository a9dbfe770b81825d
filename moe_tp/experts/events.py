"""A log of what a layer does in which order, to see whether work and transfers overlap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_logs: list[list[str]] = []


@contextlib.contextmanager
def record_events() -> Iterator[list[str]]:
    """Record the layers' events on this rank, in order, while the context is open."""
    log: list[str] = []
    _logs.append(log)
    try:
        yield log
    finally:
        # by identity: two logs may hold the same events
        _logs[:] = [other for other in _logs if other is not log]


def note(event: str) -> None:
    """Add an event to every open log."""
    for log in _logs:
        log.append(event)
