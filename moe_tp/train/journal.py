"""What a run writes as it goes: lines of metrics and load, trackers, the line in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_tp.train.load import StepLoad, scalars
from moe_tp.train.metrics import LOAD, METRICS, LineWriter
from moe_tp.train.progress import ProgressLine
from moe_tp.train.trackers import Tracker


class Journal:
    """A context manager that takes each step as it ends.

    Args:
        output: the run's folder; None writes nothing (ranks other than 0).
        trackers: where numbers go too.
        progress: the line that people see.
        done: steps already done; lines of later ones, of a run that was killed, are dropped.
        load_every: steps between lines of load.
        last: step whose load is written in any case.
    """

    def __init__(
        self,
        output: Path | None,
        trackers: Sequence[Tracker],
        progress: ProgressLine,
        *,
        done: int,
        load_every: int,
        last: int,
    ) -> None:
        self._lines, self._loads = (
            LineWriter(None if output is None else output / name, keep_below=done + 1)
            for name in (METRICS, LOAD)
        )
        self._trackers, self._progress = trackers, progress
        self._load_every, self._last = load_every, last
        self._stack = ExitStack()

    def __enter__(self) -> Journal:
        self._stack.callback(self._lines.close)
        self._stack.callback(self._loads.close)
        for tracker in self._trackers:
            self._stack.callback(tracker.close)
        self._stack.enter_context(self._progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def step(self, line: Mapping[str, Any], load: StepLoad) -> None:
        """Take a step.

        Args:
            line: for metrics.jsonl.
            load: its load goes to load.jsonl where it is due.
        """
        step = int(line["step"])
        self._lines.write(line)
        if step % self._load_every == 0 or step in (1, self._last):
            self._loads.write({"step": step, **load.line()})
        if self._trackers:
            values = scalars(line, load.layers)
            for tracker in self._trackers:
                tracker.log(step, values)
        self._progress.step(line)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._progress.note(text)

    def text(self, step: int, name: str, text: str) -> None:
        """Show a text, and hand it to the trackers."""
        self._progress.note(f"{name}: {text}")
        for tracker in self._trackers:
            tracker.text(step, name, text)
