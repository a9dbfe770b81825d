"""The exceptions that this library raises on purpose; everything else that escapes is a bug.

Every message is one sentence that a user can act on: which setting, its value, the rule it breaks,
the other value involved, and what to change. The classes also inherit the closest built-in
exception, so that code which knows nothing of this library can still catch them.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MoeTpError",
    "RankFailedError",
    "RankMismatchError",
    "RoutingError",
    "reads_like_a_lost_peer",
    "reads_like_an_ended_peer",
]

_PEER_ENDED = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "remote process exited",
)
_PEER_LOST = (
    *_PEER_ENDED,
    "connection refused",
    "timed out waiting",
    "nccl",
    "still ran when another rank failed",
    "while this rank waited for it",
)


class MoeTpError(Exception):
    """Base of every exception that this library raises on purpose."""


class ConfigError(MoeTpError, ValueError):
    """A setting, or a combination of settings, that cannot work; the message names the fix."""


class CheckpointError(MoeTpError, ValueError):
    """A folder on disk that cannot be read as what it claims to be; names file and tensor."""


class DataError(MoeTpError, ValueError):
    """Training or evaluation data that cannot be used; the message names file and line."""


class RoutingError(MoeTpError, ValueError):
    """Router scores that give no assignment (NaN, all -inf); names rank, layer and token."""


class RankMismatchError(MoeTpError, RuntimeError):
    """Ranks that should agree do not (layout, config, version, shapes); names who differs."""


class RankFailedError(MoeTpError, RuntimeError):
    """Another rank failed or died; the message names the rank and the first cause."""


def reads_like_a_lost_peer(message: str) -> bool:
    """Return whether a failure is the consequence of another rank's: the loss of a peer."""
    return any(part in message.lower() for part in _PEER_LOST)


def reads_like_an_ended_peer(message: str) -> bool:
    """Return whether a failure says that another rank has closed its connections."""
    return any(part in message.lower() for part in _PEER_ENDED)
