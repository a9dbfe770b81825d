"""Folders that are not on this machine: `s3://`, `gs://` and others by range reads, and hub ids.

A remote folder is read like a local one, a slice a request. Of a hub repository the headers are
read by range first; then each machine downloads, once for all its ranks, only the shards that they
need, into the cache that huggingface_hub shares with other programs.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_tp.checkpoint.agree import gather_json, together
from moe_tp.checkpoint.scan import CONFIG, PICKLES
from moe_tp.checkpoint.storage import GAP, TEMPLATES, LocalStorage, Storage
from moe_tp.errors import CheckpointError
from moe_tp.log import get_logger
from moe_tp.parallel.collectives import Group

T = TypeVar("T")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_FIRST_READ = 64 << 10  # bytes: most headers come with the first request
_GAP = 4 << 20  # bytes that come in the time of one more request
_PART = 8 << 20  # bytes a request of a large read, several of which run at once
_WEIGHTS = (".safetensors", *PICKLES, ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data")

_log = get_logger(__name__)


def open_storage(
    where: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Storage:
    """Return the storage of a local folder, a remote URL, or a hub id; no collective.

    Args:
        where: a path, a URL such as `s3://bucket/folder`, or a hub id such as `owner/name`. What
            lies on this machine under that path is preferred to a hub id.
        revision: branch, tag or commit, for hub ids.
        token: of the hub; None takes the stored one.

    Raises:
        CheckpointError: there is no such folder or repository.
    """
    text = os.fspath(where)
    if _URL.match(text):
        return FsspecStorage(text)
    repo, _, branch = text.partition("@")
    if not Path(text).exists() and _HUB_ID.fullmatch(repo) and "/" in repo:
        return HubStorage(repo, revision=revision or branch or None, token=token)
    return LocalStorage(text)


def _named(where: str, work: Callable[[], T]) -> T:
    """Run a call of a foreign library, turning its errors into ours."""
    try:
        return work()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: {type(error).__name__}: {error}") from error


class FsspecStorage:
    """A folder behind a URL that fsspec can open (an extra: `pip install fsspec`, s3fs, gcsfs).

    Args:
        url: such as `s3://bucket/folder`.
        options: for the file system, such as `endpoint_url`.

    Raises:
        CheckpointError: fsspec or its back end is missing, or the folder is.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.where = url.rstrip("/")
        self.first_read = _FIRST_READ
        self.gap = _GAP
        try:
            url_to_fs = importlib.import_module("fsspec.core").url_to_fs
        except ImportError as error:
            raise CheckpointError(
                f"{url}: fsspec is needed for remote folders; pip install 'moe-tp[remote]' and the "
                f"back end of the URL (s3fs, gcsfs, ...)"
            ) from error
        self._fs, self._root = _named(self.where, lambda: url_to_fs(self.where, **(options or {})))
        self._sizes: dict[str, int] | None = None

    def sizes(self) -> dict[str, int]:
        """Return every file's size in bytes by name."""
        if self._sizes is None:
            entries = _named(self.where, lambda: self._fs.ls(self._root, detail=True))
            self._sizes = {
                str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]: int(entry["size"])
                for entry in sorted(entries, key=lambda e: str(e["name"]))
                if entry["type"] == "file"
            }
        return self._sizes

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`."""
        if length == 0:
            return b""
        path = f"{self._root.rstrip('/')}/{file}"
        return bytes(
            _named(
                f"{self.where}/{file}",
                lambda: self._fs.cat_file(path, start=offset, end=offset + length),
            )
        )

    def read_into(self, file: str, offset: int, *out: memoryview) -> None:
        """Fill `out`, one after the other, from `offset` on; CheckpointError if the file ends."""
        total = sum(map(len, out))
        if not total:
            return
        starts = list(range(offset, offset + total, _PART))
        ends = [*starts[1:], offset + total]
        paths = [f"{self._root.rstrip('/')}/{file}"] * len(starts)

        def ask() -> list[bytes]:
            parts = self._fs.cat_ranges(paths, starts, ends)
            for part in parts:
                if isinstance(part, Exception):  # what it returns rather than raise
                    raise part
            return list(parts)

        parts = _named(f"{self.where}/{file}", ask)
        found = sum(map(len, parts))
        if found != total:
            raise CheckpointError(
                f"{self.where}/{file}: expected {total} bytes from byte {offset}, found "
                f"{found}; it was cut while it was read"
            )
        left = [memoryview(part) for part in parts]
        for view in out:
            at = 0
            while at < len(view):
                step = left[0][: len(view) - at]
                view[at : at + len(step)] = step
                at += len(step)
                left[0] = left[0][len(step) :]
                if not left[0]:
                    del left[0]

    def expect(self, file: str, offset: int, length: int) -> None:
        """Do nothing: a remote store reads no further than it is asked."""

    def prepare(self, files: list[str], group: Group, device: torch.device) -> None:
        """Do nothing: slices are read in place."""

    def close(self) -> None:
        """Do nothing: connections belong to fsspec."""


class HubStorage:
    """A hub repository at one commit: headers by range, shards from the shared cache.

    Args:
        repo: hub id.
        revision: branch, tag or commit.
        token: of the hub; None takes the stored one.

    Raises:
        CheckpointError: the repository or revision is not there, or not for this token.
    """

    def __init__(
        self, repo: str, *, revision: str | None = None, token: str | bool | None = None
    ) -> None:
        self.repo, self.token, self.revision = repo, token, revision
        self.where = repo if revision is None else f"{repo}@{revision}"
        self.first_read = _FIRST_READ
        self.gap = GAP
        self._local: dict[str, LocalStorage] = {}
        self._sizes: dict[str, int] | None = None
        self._remote: Any = None
        try:
            self._commit, self._sizes = self._ask(revision)
        except CheckpointError as error:
            # Without a network the cache may still hold the repository as it was.
            folder = self._cached(CONFIG, revision)
            if folder is None:
                raise
            _log.warning("%s: %s; using the copy in the cache", self.where, error)
            storage = LocalStorage(folder.parent)
            self._sizes = storage.sizes()
            self._commit = revision or folder.parent.name
            self._local = dict.fromkeys(self._sizes, storage)

    def sizes(self) -> dict[str, int]:
        """Return every file's size in bytes by name."""
        assert self._sizes is not None
        return self._sizes

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`: from the cache, or a range of the hub's."""
        storage = self._in_cache(file)
        if storage is None and not file.endswith(_WEIGHTS):
            storage = self._download(file)
        if storage is not None:
            return storage.read(file, offset, length)
        return self._range(file, offset, length)

    def read_into(self, file: str, offset: int, *out: memoryview) -> None:
        """Fill `out` from `offset` on; the file is downloaded first if `prepare` has not."""
        storage = self._in_cache(file) or self._download(file)
        storage.read_into(file, offset, *out)

    def expect(self, file: str, offset: int, length: int) -> None:
        """Say that these bytes will be asked for soon."""
        storage = self._in_cache(file)
        if storage is not None:
            storage.expect(file, offset, length)

    def prepare(self, files: list[str], group: Group, device: torch.device) -> None:
        """Download the shards that the ranks of this machine need, once for all of them.

        Collectives: all-gather of file lists and an agreement over `group`.
        """
        wanted = gather_json([socket.gethostname(), files], group, device)
        here = [(rank, names) for rank, (host, names) in enumerate(wanted) if host == _host()]
        first = min(rank for rank, _ in here)

        def download() -> None:
            if group.rank == first:
                for file in sorted({name for _, names in here for name in names}):
                    if self._in_cache(file) is None:
                        self._download(file)

        together(download, group, device)

    def close(self) -> None:
        """Close open files."""
        for storage in self._local.values():
            storage.close()

    def _ask(self, revision: str | None) -> tuple[str, dict[str, int]]:
        from huggingface_hub import HfApi

        info = _named(
            self.where,
            lambda: HfApi(token=self.token).model_info(
                self.repo, revision=revision, files_metadata=True
            ),
        )
        # Of sub-folders (other formats, pictures) only the chat templates belong to the model.
        sizes = {
            s.rfilename: int(s.size or 0)
            for s in info.siblings or []
            if s.rfilename.rpartition("/")[0] in ("", TEMPLATES)
        }
        if info.sha is None:
            raise CheckpointError(f"{self.where}: expected a commit from the hub, found none")
        return info.sha, dict(sorted(sizes.items()))

    def _cached(self, file: str, revision: str | None) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, file, revision=revision)
        return Path(found) if isinstance(found, str) else None

    def _in_cache(self, file: str) -> LocalStorage | None:
        if file not in self._local:
            path = self._cached(file, self._commit)
            if path is None:
                return None
            self._local[file] = self._folder(path, file)
        return self._local[file]

    def _download(self, file: str) -> LocalStorage:
        from huggingface_hub import hf_hub_download

        # Asked for by branch, config.json leaves a note in the cache which commit that was.
        revision = self.revision if file == CONFIG else self._commit
        path = _named(
            f"{self.where}/{file}",
            lambda: hf_hub_download(self.repo, file, revision=revision, token=self.token),
        )
        self._local[file] = self._folder(Path(path), file)
        return self._local[file]

    def _folder(self, path: Path, file: str) -> LocalStorage:
        root = path.parents[file.count("/")]
        same = next((s for s in self._local.values() if s.path == root), None)
        return same or LocalStorage(root)

    def _range(self, file: str, offset: int, length: int) -> bytes:
        from huggingface_hub import HfFileSystem

        if self._remote is None:
            self._remote = HfFileSystem(token=self.token)
        path = f"{self.repo}@{self._commit}/{file}"
        return bytes(
            _named(
                f"{self.where}/{file}",
                lambda: self._remote.cat_file(path, start=offset, end=offset + length),
            )
        )


def _host() -> str:
    return socket.gethostname()
