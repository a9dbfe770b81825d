"""What people see of a long load or save: bytes, speed and time left, on stderr of the first rank.

A rank's own bytes stand for all: ranks have about as much to read or write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

from moe_tp.checkpoint.files import size_text

Progress = Callable[[int, int], None]  # (bytes done, bytes in all) of this rank


class Bar:
    """A context manager that shows how far a load or save is.

    Args:
        what: such as `loading`.
        rank: only rank 0 shows anything.
        progress: called as well with (bytes done, bytes in all); True shows the bar also where
            stderr is no terminal, as lines; False shows nothing; None: in a terminal.
        console: where to; None: stderr.
        delay: seconds after which a bar appears; what is done sooner shows none.
        every: seconds between lines where there is no terminal.
    """

    def __init__(
        self,
        what: str,
        rank: int,
        progress: Progress | bool | None,
        *,
        console: Console | None = None,
        delay: float = 0.5,
        every: float = 5.0,
    ) -> None:
        self.what, self.delay, self.every = what, delay, every
        self.report = progress if callable(progress) else None
        self.console: Console | None = None
        if rank == 0 and progress is not False and self.report is None:
            found = console or Console(stderr=True)
            if found.is_terminal or progress is True:
                self.console = found
        self._began = self._last = time.monotonic()
        self._bar: RichProgress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Bar:
        self._began = self._last = time.monotonic()
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

    def __call__(self, done: int, total: int) -> None:
        """Show that so many of all bytes are done."""
        if self.report is not None:
            self.report(done, total)
        if self.console is None:
            return
        now = time.monotonic()
        if self.console.is_terminal:
            self._draw(done, total, now)
        elif now - self._last >= self.every or done == total:
            self._last = now
            left = (now - self._began) / max(1, done) * (total - done)
            text = f"{self.what}: {size_text(done)} of {size_text(total)}, {left:.0f} s left"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, done: int, total: int, now: float) -> None:
        if self._bar is None:
            if now - self._began < self.delay:
                return
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task(self.what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done)
