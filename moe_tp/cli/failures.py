"""What a failing rank leaves in the run's folder, and which of several failures came first."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moe_tp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MoeTpError,
    reads_like_a_lost_peer,
)

__all__ = ["Failure", "exit_code", "first_cause", "leave", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one rank ended."""

    rank: int
    when: float  # seconds since the epoch, by the clock of the rank's machine
    kind: str
    message: str
    trace: str = ""
    code: int = 1  # the exit code that the run should have if this is its first cause
    expected: bool = field(default=False)  # one of this library's errors: a sentence for the user

    @property
    def follows_another(self) -> bool:
        """Whether the failure reads like the loss of a peer."""
        return self.kind == "RankFailedError" or (
            not self.expected and reads_like_a_lost_peer(self.message)
        )


def exit_code(error: BaseException) -> int:
    """Return 2 where arguments or input were bad, else 1."""
    return 2 if isinstance(error, (ConfigError, DataError, CheckpointError, OSError)) else 1


def leave(folder: Path, failure: Failure, error: Exception) -> None:
    """Write the failure of a rank to the run's folder, whole or not at all."""
    fields = asdict(failure)
    fields["expected"] = isinstance(error, (MoeTpError, OSError))
    fields["code"] = exit_code(error)
    part = folder / f"failure-{failure.rank}.part"
    part.write_text(json.dumps(fields))
    os.replace(part, folder / f"failure-{failure.rank}.json")


def read(folder: Path) -> list[Failure]:
    """Return the failures that ranks have left."""
    return [Failure(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that led to the others: the earliest that is not the loss of a peer."""
    return min(failures, key=lambda failure: (failure.follows_another, failure.when))
