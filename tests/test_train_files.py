"""Data files: which are found, and the records in them, whatever wrote them."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_tp.errors import DataError
from moe_tp.train.files import list_files, read_records


def texts(path: Path) -> list[str]:
    return [record.fields["text"] for record in read_records(path)]


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_lines_of_text_files_end_in_one_way(tmp_path: Path, end: str) -> None:
    """As `datasets` reads text; in JSON and CSV a return within a value is the value's own."""
    (tmp_path / "a.txt").write_bytes(f"to be{end}{end}or not{end}".encode())
    assert texts(tmp_path / "a.txt") == ["to be\n\nor not\n"]
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a\\r\\nb"}\r\n{"text": "c"}\r\n')
    assert texts(tmp_path / "b.jsonl") == ["a\r\nb", "c"]
    (tmp_path / "c.csv").write_bytes(b'text\r\n"a\r\nb"\r\nc\r\n')
    assert texts(tmp_path / "c.csv") == ["a\r\nb", "c"]


def test_names_in_capitals_and_lines_in_json(tmp_path: Path) -> None:
    """As other tools write them: an object a line under the name .json, endings in capitals."""
    lines = '{"text": "one"}\n\n{"text": "two"}\r\n'
    for name in ("a.json", "B.JSONL", "C.Json"):
        (tmp_path / name).write_bytes(lines.encode())
        assert texts(tmp_path / name) == ["one", "two"]
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "D.TXT").write_text("x")
    assert [path.name for path in list_files([tmp_path / "many"])] == ["D.TXT"]


@pytest.mark.parametrize("opened", [gzip.open, bz2.open, lzma.open])
def test_compressed_files(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """The records of the file inside; what is cut off or no such file is said in one sentence."""
    ending = {gzip.open: ".gz", bz2.open: ".bz2", lzma.open: ".xz"}[opened]
    contents = {
        "a.jsonl": '{"text": "one"}\n{"text": "two"}\n',
        "b.json": '[{"text": "one"}, {"text": "two"}]',
        "c.csv": "text\none\ntwo\n",
    }
    for name, text in contents.items():
        path = tmp_path / f"{name}{ending}"
        with opened(path, "wt") as file:
            file.write(text)
        assert texts(path) == ["one", "two"]
    assert len(list_files([tmp_path / f"*{ending}"])) == 3
    path = tmp_path / f"a.jsonl{ending}"
    whole = path.read_bytes()
    for damaged in (whole[:-9], b'{"text": "plain"}'):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"a.jsonl{ending} cannot be read: "):
            texts(path)
    (tmp_path / f"x.parquet{ending}").write_bytes(whole)
    with pytest.raises(DataError, match="no data file that can be read"):
        list_files([tmp_path / f"x.parquet{ending}"])


def test_globs(tmp_path: Path) -> None:
    """As of a shell, in a fixed order; a file of that very name is that file."""
    data = tmp_path / "globbed"
    for name in ("b/2.jsonl", "b/1.jsonl", "a.jsonl", "notes.md", "c/d/3.jsonl"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("x")

    def found(*patterns: str) -> list[str]:
        paths = list_files([data / pattern for pattern in patterns])
        return [str(path.relative_to(data)) for path in paths]

    assert found("*.jsonl") == ["a.jsonl"]
    assert found("b/[12].jsonl", "a.jsonl") == ["b/1.jsonl", "b/2.jsonl", "a.jsonl"]
    assert found("**/*.jsonl") == ["a.jsonl", "b/1.jsonl", "b/2.jsonl", "c/d/3.jsonl"]
    assert found("?") == ["b/1.jsonl", "b/2.jsonl", "c/d/3.jsonl"]
    assert found("*") == ["a.jsonl", "b/1.jsonl", "b/2.jsonl", "c/d/3.jsonl"]
    assert found("**") == found("*")
    (data / "[12].jsonl").write_text("x")
    assert found("[12].jsonl") == ["[12].jsonl"]
    with pytest.raises(DataError, match=r"\*\.csv fits no data file; it can fit \.txt"):
        found("*.csv")


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="is not UTF-8 text: byte 3"):
        texts(tmp_path / "bad.txt")
    with pytest.raises(DataError, match="does not exist"):
        list_files(["no/such.txt"])
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(DataError, match="no data file that can be read"):
        list_files([tmp_path / "a.docx"])


def test_folders_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "b").mkdir(parents=True)
    for name in ("b/1.txt", "c.jsonl", "a.txt", "notes.md"):
        (data / name).write_text("x")
    names = [str(p.relative_to(data)) for p in list_files([data])]
    assert names == ["a.txt", "b/1.txt", "c.jsonl"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        list_files([tmp_path / "none"])
