"""One run an output folder: two at once would mix their metrics and share their checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from moe_tp.checkpoint.agree import together
from moe_tp.errors import ConfigError
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.checks import make_output

PATIENCE = 10.0  # seconds: a run that is started again may meet the last breaths of the one before


@contextlib.contextmanager
def alone_in(folder: Path, mesh: Mesh) -> Iterator[None]:
    """Hold a folder, made if it is not there, against other runs while the context is open.

    The lock is the system's, on the folder itself: it ends with the process at the latest. Where
    the file system knows no such locks nothing is held.

    Args:
        folder: that the run writes to.
        mesh: the run's; its first rank holds the folder.

    Raises:
        ConfigError: another run holds the folder, or it cannot be made or written to.

    Collectives: those of `together`.
    """
    held: list[int] = []

    def hold() -> None:
        if mesh.rank == 0:
            make_output(folder)
            held.append(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
            _wait_for(held[0], folder)

    try:
        together(hold, mesh.group("world"), mesh.device)
        yield
    finally:
        for file in held:
            os.close(file)


def _wait_for(file: int, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not _taken(file):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"output={folder}: another run writes there now; wait for its end, or choose "
                f"another output"
            )
        time.sleep(0.2)


def _taken(file: int) -> bool:
    """Return whether the lock is this file's now, or the file system knows none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
