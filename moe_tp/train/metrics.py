"""The lines of metrics.jsonl and load.jsonl: writing and reading them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_tp.errors import DataError

METRICS, LOAD = "metrics.jsonl", "load.jsonl"


class LineWriter:
    """Appends JSON objects to a file, a line each, every one on disk before the next step.

    Args:
        path: the file; None writes nothing (ranks other than 0).
        keep_below: lines of an earlier run whose step is not below this are dropped.
    """

    def __init__(self, path: Path | None, *, keep_below: int = 0) -> None:
        self._file = None
        if path is None:
            return
        kept = [line for line in read_lines(path) if line["step"] < keep_below]
        path.write_text("".join(_dump(line) for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is not None:
            self._file.write(_dump(line))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of lines; without the file none.

    A last line that was cut off while it was written is left out.

    Raises:
        DataError: another line is no JSON.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"{path} line {number} is not JSON: {error}") from error
    return found


def column(lines: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of the lines that hold a number under this name."""
    pairs = [(int(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _dump(line: Mapping[str, Any]) -> str:
    # Bare NaN is no JSON; a step that was left out shows null.
    safe = {key: _finite(value) for key, value in line.items()}
    return json.dumps(safe, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def summary(result: Mapping[str, Any]) -> str:
    """Return the result of a run as one sentence."""
    text = f"{result['steps']} steps, {result['tokens']:,} tokens in {result['seconds']:.0f} s"
    if result["loss"] is not None:
        text += f"; loss {result['loss']:.4f}"
    if result["eval_loss"] is not None:
        text += f", held out {result['eval_loss']:.4f}"
    if result["unigram_loss"] is not None:
        text += f" (a unigram model has {result['unigram_loss']:.4f})"
    if result["final"] is None:
        return f"{text}; told to stop, saved a checkpoint: --resume goes on from it"
    return f"{text}; wrote {result['final']}"
