"""Bytes of the files of one folder, local or remote, by range."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import torch

from moe_tp.errors import CheckpointError
from moe_tp.parallel.collectives import Group

TEMPLATES = "additional_chat_templates"  # the one sub-folder that belongs to a model folder
GAP = 4096  # bytes: what one page costs anyway
_MAX_OPEN = 64
_MAX_READ = 1 << 30  # Linux returns at most 2 GiB a call
_MAX_VIEWS = 1024  # and fills at most so many buffers


class Storage(Protocol):
    """Read-only access to the files of one folder.

    Attributes:
        where: the folder, for messages.
        first_read: bytes to ask for first of a file whose header length is not known yet.
        gap: bytes between two wanted stretches that are read along rather than asked around.
    """

    where: str
    first_read: int
    gap: int

    def sizes(self) -> dict[str, int]:
        """Return every file's size in bytes by name; -1 where a link leads nowhere."""
        ...

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`; fewer only at the end of the file."""
        ...

    def read_into(self, file: str, offset: int, *out: memoryview) -> None:
        """Fill `out`, one after the other, from `offset` on; CheckpointError if the file ends."""
        ...

    def expect(self, file: str, offset: int, length: int) -> None:
        """Say that these bytes will be asked for soon."""
        ...

    def prepare(self, files: list[str], group: Group, device: torch.device) -> None:
        """Get ready to read weights from these files; all ranks of `group` call it."""
        ...

    def close(self) -> None:
        """Close open files."""
        ...


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path on this machine, `~` in front read as the home folder.

    Settings files and Python do not pass through a shell, which would have read it so.
    """
    return Path(os.path.expanduser(path))


class LocalStorage:
    """A folder on a local or mounted file system; links (hub caches) are followed.

    Positioned reads, no memory map: a file that is cut while it is read gives an error, where a map
    would kill the process.

    Args:
        path: the folder.

    Raises:
        CheckpointError: it is no folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        self.where = str(self.path)
        self.first_read = 8
        self.gap = GAP
        self._open: OrderedDict[str, int] = OrderedDict()
        if not self.path.is_dir():
            found = "a file" if self.path.exists() else "nothing"
            raise CheckpointError(
                f"{self.where}: expected a model folder, found {found}; "
                f"give the folder that holds config.json"
            )

    def sizes(self) -> dict[str, int]:
        """Return every file's size in bytes by name; -1 where a link leads nowhere."""
        found: dict[str, int] = {}
        for folder in ("", TEMPLATES):
            try:
                entries = sorted(os.scandir(self.path / folder), key=lambda e: e.name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                try:
                    if entry.is_file():
                        found[name] = entry.stat().st_size
                    elif entry.is_symlink() and not entry.is_dir():
                        found[name] = -1
                except OSError:
                    found[name] = -1
        return found

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`; fewer only at the end of the file."""
        try:
            return os.pread(self._descriptor(file), length, offset)
        except OSError as error:
            raise CheckpointError(f"{self.where}/{file}: cannot be read ({error})") from error

    def read_into(self, file: str, offset: int, *out: memoryview) -> None:
        """Fill `out`, one after the other, from `offset` on; CheckpointError if the file ends."""
        descriptor = self._descriptor(file)
        left = [view for view in out if len(view)]
        done = 0
        try:
            while left:
                views = [v if len(v) <= _MAX_READ else v[:_MAX_READ] for v in left[:_MAX_VIEWS]]
                got = os.preadv(descriptor, views, offset + done)
                if got == 0:
                    raise CheckpointError(
                        f"{self.where}/{file}: expected {sum(map(len, out))} bytes from byte "
                        f"{offset}, found the end of the file after {done}; it was cut while it "
                        f"was read"
                    )
                done += got
                left = _after(left, got)
        except OSError as error:
            raise CheckpointError(f"{self.where}/{file}: cannot be read ({error})") from error

    def expect(self, file: str, offset: int, length: int) -> None:
        """Say that these bytes will be asked for soon, so that the disk reads them in one go."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice only: some file systems refuse it
                os.posix_fadvise(self._descriptor(file), offset, length, os.POSIX_FADV_WILLNEED)

    def prepare(self, files: list[str], group: Group, device: torch.device) -> None:
        """Do nothing: the files are here."""

    def close(self) -> None:
        """Close open files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, file: str) -> int:
        known = self._open.get(file)
        if known is not None:
            self._open.move_to_end(file)
            return known
        try:
            descriptor = os.open(self.path / file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{self.where}/{file}: cannot be opened ({error})") from error
        self._open[file] = descriptor
        if len(self._open) > _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return descriptor


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left to fill of `views` when `count` bytes have come."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
