"""What people see of a run: a live line in a terminal, plain lines elsewhere; on rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class ProgressLine:
    """A context manager that shows steps as they end.

    Args:
        steps: of the whole run.
        start: steps already done.
        shown: whether this rank shows anything.
        every: seconds between plain lines where stdout is no terminal.
        console: where to; None: stdout.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        shown: bool = True,
        every: float = 5.0,
        console: Console | None = None,
    ) -> None:
        self.steps, self.start, self.every = steps, start, every
        self.console = (console or Console()) if shown else None
        self._began = self._last = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> ProgressLine:
        self._began = self._last = time.monotonic()
        if self.console is not None and self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=20)
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self._task = self._bar.add_task("starting", total=self.steps, completed=self.start)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, line: Mapping[str, Any]) -> None:
        """Show a step.

        Args:
            line: its line of metrics.jsonl.
        """
        if self.console is None:
            return
        now, done = time.monotonic(), int(line["step"])
        text = describe(line, self.steps, self._time_left(done, now))
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=done)
        elif done in (self.start + 1, self.steps) or now - self._last >= self.every:
            self._last = now
            self._say(text)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if self.console is not None:
            self._say(text)

    def _say(self, text: str) -> None:
        assert self.console is not None
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _time_left(self, done: int, now: float) -> float:
        taken = done - self.start
        return (now - self._began) / max(1, taken) * (self.steps - done)


def describe(line: Mapping[str, Any], steps: int, left: float) -> str:
    """Return a step as one line.

    Args:
        line: its line of metrics.jsonl.
        steps: of the whole run.
        left: seconds to its end.
    """
    memory = f"{line['memory_gib']:.2f} GiB  " if "memory_gib" in line else ""
    return (
        f"step {line['step']}/{steps}  loss {line['loss']:.4f}  "
        f"{line['tokens_per_second']:,.0f} tokens/s  {memory}"
        f"balance {line['max_load_ratio']:.2f}  {clock(left)} left"
    )


def clock(seconds: float) -> str:
    """Return a time span as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
