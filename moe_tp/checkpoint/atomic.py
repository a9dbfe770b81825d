"""A folder appears whole or not at all (K5).

A save writes into a hidden folder beside the target, with a marker file inside that makes every
reader refuse it by name. When all files are on the disk the marker goes, and one rename puts the
folder in place; an older folder of that name is exchanged for it in the same step where the system
can (Linux), so that at no moment is there neither. Only the first rank calls these functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from pathlib import Path

from moe_tp.checkpoint.scan import CONFIG, HIDDEN, UNFINISHED
from moe_tp.checkpoint.storage import TEMPLATES
from moe_tp.errors import CheckpointError
from moe_tp.log import get_logger

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

_log = get_logger(__name__)


def begin(target: Path) -> Path:
    """Return a new hidden folder beside `target`, marked as unfinished.

    Raises:
        CheckpointError: `target` is a file, or a folder that is no model folder.
    """
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    who = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    work = target.parent / f".{target.name}{HIDDEN}{who}"
    work.mkdir()
    note = {
        "what": f"an unfinished save of {target.name}; delete this folder",
        "process": who,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_bytes(work / UNFINISHED, json.dumps(note).encode())
    sync_folder(work)
    sync_folder(target.parent)
    return work


def check_target(target: Path) -> None:
    """Check that a save may put its folder at `target`.

    Raises:
        CheckpointError: what lies there would be lost and is no model folder.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target}: expected a folder or nothing to save to, found a file")
    entries = sorted(entry.name for entry in target.iterdir())
    if not entries or UNFINISHED in entries:
        return
    folders = [
        name
        for name in entries
        if (target / name).is_dir() and not name.startswith(".") and name != TEMPLATES
    ]
    if CONFIG not in entries or folders:
        odd = folders[0] if folders else entries[0]
        raise CheckpointError(
            f"{target}: expected a model folder to replace, found {odd!r} in it, which a save "
            f"would delete; choose another path or remove it yourself"
        )


def finish(work: Path, target: Path) -> None:
    """Put the finished folder in the place of `target`."""
    os.unlink(work / UNFINISHED)
    sync_folder(work)
    if not target.exists():
        os.rename(work, target)
        sync_folder(target.parent)
        return
    if not _exchange(work, target):
        old = work.with_name(work.name + "-old")
        os.rename(target, old)
        os.rename(work, target)
        work = old
    sync_folder(target.parent)
    # What is left under the hidden name is the older folder.
    write_bytes(work / UNFINISHED, b'{"what": "an older folder that is being deleted"}')
    abandon(work)


def abandon(work: Path) -> None:
    """Delete a hidden folder, its marker last; what cannot be deleted stays marked."""
    with contextlib.suppress(OSError):
        for entry in sorted(work.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != UNFINISHED:
                os.unlink(entry)
        shutil.rmtree(work)


def remove_leftovers(target: Path) -> None:
    """Delete hidden folders of killed saves to `target` that ran on this machine."""
    start = f".{target.name}{HIDDEN}{_host()}-"
    for left in target.parent.iterdir():
        process = re.match(r"[0-9]+", left.name.removeprefix(start))
        if left.name.startswith(start) and process is not None and not _alive(int(process[0])):
            _log.warning("%s: deleting what a killed save left behind", left)
            abandon(left)


def _host() -> str:
    """Return this machine's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:64]


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    code = libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    if code == 0:
        return True
    reason = ctypes.get_errno()
    if reason in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(reason, os.strerror(reason), str(other))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
