"""Records from data files: .txt, .jsonl, .json, .csv, .parquet, .arrow, or a folder of them.

Files of text may be compressed (.jsonl.gz); they are decompressed as they are read. A .txt file is
one record, its lines ended by newlines alone, whatever system wrote it.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moe_tp.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record and where it stands, for messages.

    Args:
        fields: its values by key.
        where: file and line or number.
        whole_file: the record is a text file, which has no records of its own.
    """

    fields: dict[str, Any]
    where: str
    whole_file: bool = False


def list_files(names: Sequence[str | Path]) -> list[Path]:
    """Return data files in a fixed order; a folder stands for the data files below it.

    A name with `*`, `?` or `[` that no file has is a glob, and stands for the data files, and
    those below the folders, that it fits; `**` goes down any number of folders.

    Raises:
        DataError: one does not exist, is of no known kind, or a folder or a glob holds none.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = _inside(path)
            if not inside:
                raise DataError(f"{path} holds no data file; it can hold {_kinds()}")
            found += inside
        elif path.is_file():
            if _kind(path) not in _READERS:
                raise DataError(f"{path} is no data file that can be read; it can be {_kinds()}")
            found.append(path)
        elif glob.has_magic(str(name)):
            found += _fitting(str(name))
        else:
            raise DataError(f"{path} does not exist; check the paths in data.train and data.eval")
    return found


def _inside(folder: Path) -> list[Path]:
    """Return the data files below a folder."""
    inside = sorted(p for p in folder.rglob("*") if _kind(p) in _READERS and p.is_file())
    # A folder that `datasets` has saved holds JSON about itself beside its data.
    saved = {p.parent for p in inside if _kind(p) == ".arrow"}
    return [
        p
        for p in inside
        if p.name != "dataset_dict.json"
        and not (p.parent in saved and p.name in ("state.json", "dataset_info.json"))
    ]


def _fitting(pattern: str) -> list[Path]:
    """Return the data files that a glob fits, and those below the folders that it fits.

    Raises:
        DataError: there is none.
    """
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    files = {p for p in paths if p.is_file() and _kind(p) in _READERS}
    files |= {below for p in paths if p.is_dir() for below in _inside(p)}
    if not files:
        raise DataError(f"{pattern} fits no data file; it can fit {_kinds()}")
    return sorted(files)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of one file in order.

    Raises:
        DataError: the file cannot be read, a record is malformed, or there is none.
    """
    count = 0
    for record in _READERS[_kind(path)](path):
        count += 1
        yield record
    if count == 0:
        raise DataError(f"{path} is empty; remove it from the settings or fill it")


def _read_text(path: Path) -> str:
    with _opened(path) as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(path, error.start) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Have a file's bytes, decompressed.

    Raises:
        DataError: it cannot be read; also from reading in the context.
    """
    try:
        with _OPEN.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read: {why}") from error


def _txt(path: Path) -> Iterator[Record]:
    text = _read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    if text.strip():
        yield Record(fields={"text": text}, where=str(path), whole_file=True)


def _jsonl(path: Path) -> Iterator[Record]:
    # Line by line, so that a file may be larger than memory; and cut at newlines alone, since
    # JSON strings may hold other ends of lines, such as U+2028.
    with _opened(path) as file:
        at = 0
        for number, raw in enumerate(file, start=1):
            line = _utf8(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, path, at)
            at += len(raw)
            if line.strip():
                where = f"{path} line {number}"
                yield Record(fields=_object(decode_json(line, where), where), where=where)


def _utf8(raw: bytes, path: Path, at: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_text(path, at + error.start) from error


def _not_text(path: Path, byte: int) -> DataError:
    return DataError(f"{path} is not UTF-8 text: byte {byte} cannot be decoded; convert the file")


def _json(path: Path) -> Iterator[Record]:
    text = _read_text(path)
    if not text.strip():
        return
    try:
        content = decode_json(text, str(path))
    except DataError:
        if not text.lstrip().startswith("{"):
            raise
        yield from _jsonl(path)  # an object a line under the name .json, as many tools write it
        return
    if isinstance(content, dict):
        content = [content]  # a file of one line, or of one record
    if not isinstance(content, list):
        raise DataError(f"{path} holds {type(content).__name__} where a list of records must stand")
    for number, item in enumerate(content):
        where = f"{path} record {number}"
        yield Record(fields=_object(item, where), where=where)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    try:
        names = reader.fieldnames or ()
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise DataError(f"{path} names column {twice[0]!r} twice in its first line; rename one")
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where} has another number of columns than the first line")
            yield Record(fields=dict(row), where=where)
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num} is not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow; pip install 'moe-tp[parquet]'") from error
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield Record(fields=row, where=f"{path} row {number}")
                number += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _arrow(path: Path) -> Iterator[Record]:
    """Yield the rows of a file of a `datasets` folder, an Arrow stream."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow; pip install 'moe-tp[parquet]'") from error
    number = 0
    try:
        with pyarrow.memory_map(str(path)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                for row in batch.to_pylist():
                    yield Record(fields=row, where=f"{path} row {number}")
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as an Arrow stream: {error}") from error


def decode_json(text: str, what: str) -> Any:
    """Return what JSON text holds.

    Args:
        text: of a file, a line or a field.
        what: it is, as the subject of a message.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON: {error}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} holds {type(value).__name__} where an object must stand")
    return value


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


_OPEN: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_BINARY = (".parquet", ".arrow")


def _kind(path: Path) -> str:
    """Return the kind of a data file, of a compressed one that of what it holds."""
    kind = path.suffix.lower()
    if kind not in _OPEN:
        return kind
    inner = Path(path.stem).suffix.lower()
    return kind if inner in _BINARY else inner


def _kinds() -> str:
    text = ", ".join(kind for kind in _READERS if kind not in _BINARY)
    return f"{text} (each also as {', '.join(_OPEN)}), {', '.join(_BINARY)}"
