"""Start N local ranks of a command, watch them, and when one fails end the rest and say why (F1).

The ranks are fresh processes of the same command line. They meet through a file in a run folder,
so no port is needed, and leave their failures there. This process computes nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from moe_tp.cli import RUN_FOLDER
from moe_tp.cli.failures import Failure, first_cause, read

__all__ = ["GRACE_S", "PARENT_PIPE", "launch"]

PARENT_PIPE = "MOE_TP_PARENT_PIPE"  # the end of a pipe that closes when this process goes
GRACE_S = 60.0  # after SIGTERM: time for the ranks to save and leave
_POLL_S = 0.05
_SETTLE_S = 1.0  # after the first failure: time for the others to leave theirs, then for SIGTERM


def launch(
    words: Sequence[str],
    nproc: int,
    *,
    debug: bool,
    grace: float = GRACE_S,
    program: Sequence[str] = ("-m", "moe_tp"),
) -> int:
    """Return the exit code of the run: the largest of the ranks', or that of the first failure.

    Rank 0 has this process's stdout and stderr; the others' stdout is dropped, and their stderr
    shown with `debug`, or in part where a rank dies without a word. SIGTERM, or a first SIGINT, is
    handed on to the ranks as SIGTERM, and they may save and leave by themselves. A second SIGTERM
    changes nothing, so that it breaks no save; a second SIGINT ends them at once.

    Args:
        words: the command line after the program's name.
        nproc: number of ranks.
        debug: show tracebacks.
        grace: seconds that the ranks have to leave after such a signal.
        program: what the interpreter runs in each rank, before `words`.
    """
    command = [sys.executable, *program, *words]
    with tempfile.TemporaryDirectory(prefix="moe_tp_run_") as name, _parent_pipe() as pipe:
        folder = Path(name)
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            with _stop_flag() as told_to_stop:
                with _sigint_blocked():
                    ranks += [
                        _start(command, rank, nproc, folder, pipe, debug) for rank in range(nproc)
                    ]
                failure = _watch(ranks, folder, told_to_stop, grace)
        finally:
            _end(ranks)
        if failure is None:
            return max(rank.returncode for rank in ranks)
        if debug and failure.trace:
            print(failure.trace, file=sys.stderr)
        print(_sentence(failure), file=sys.stderr)
        return failure.code


def _start(
    command: Sequence[str], rank: int, nproc: int, folder: Path, pipe: int, debug: bool
) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        RUN_FOLDER: str(folder),
        PARENT_PIPE: str(pipe),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    if rank == 0:
        return subprocess.Popen(command, env=env, pass_fds=[pipe])
    with open(folder / f"stderr-{rank}", "wb") as quiet:
        return subprocess.Popen(
            command,
            env=env,
            pass_fds=[pipe],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if debug else quiet,
        )


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    told_to_stop: Callable[[], bool],
    grace: float,
) -> Failure | None:
    """Return the first cause of failure as soon as it is known, or None when all ranks are done.

    Raises:
        KeyboardInterrupt: a signal came and not all ranks left by themselves.
    """
    deaths: dict[int, Failure] = {}
    first_seen: float | None = None
    end: float | None = None  # of the time that a signal leaves to the ranks
    while True:
        codes = [rank.poll() for rank in ranks]
        if end is None and told_to_stop():
            end = time.monotonic() + grace
            for process, code in zip(ranks, codes, strict=True):
                if code is None:
                    process.terminate()
        # A rank that had no handler yet is gone, and no other can save without it.
        if end is not None and (-signal.SIGTERM in codes or time.monotonic() > end):
            raise KeyboardInterrupt
        left = read(folder)
        told = {failure.rank for failure in left}
        for rank, code in enumerate(codes):
            if code and rank not in told and rank not in deaths and not _finished(folder, rank):
                deaths[rank] = _death(rank, code, folder)
        failures = [*left, *(death for rank, death in deaths.items() if rank not in told)]
        if failures and first_seen is None:
            first_seen = time.monotonic()
        ended = None not in codes
        if failures and first_seen is not None:
            settled = time.monotonic() - first_seen > _SETTLE_S
            if ended or settled:
                return first_cause(failures)
        elif ended:
            return None
        time.sleep(_POLL_S)


def _finished(folder: Path, rank: int) -> bool:
    """Return whether the rank ended by itself with a non-zero exit code, as a failed check does."""
    return (folder / f"done-{rank}").exists()


def _death(rank: int, code: int, folder: Path) -> Failure:
    """Return the failure of a rank that left no word, with the end of its stderr."""
    how = f"exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            how = f"signal {signal.Signals(-code).name}"
    stderr = folder / f"stderr-{rank}"
    last = stderr.read_text(errors="replace").strip()[-2000:] if stderr.exists() else ""
    hint = "; out of memory is the usual reason" if code == -signal.SIGKILL else ""
    said = f"; its last words: {last.splitlines()[-1]}" if last else ""
    return Failure(
        rank=rank,
        when=time.time(),
        kind="RankDied",
        message=f"died with {how}{hint}{said}",
        trace=last,
        expected=True,
    )


def _sentence(failure: Failure) -> str:
    text = failure.message or "no message"
    if failure.expected and re.match(r"rank \d+: ", text):  # it names the rank where it began
        return f"moe-tp: error: {text}"
    if failure.expected:
        return f"moe-tp: rank {failure.rank}: error: {text}"
    return f"moe-tp: rank {failure.rank}: error: {failure.kind}: {text} (--debug shows where)"


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every rank that still runs, first with SIGTERM."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _SETTLE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


@contextlib.contextmanager
def _parent_pipe() -> Iterator[int]:
    """Have the reading end of a pipe whose writing end only this process holds."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Yield whether SIGTERM or SIGINT has come; a second SIGINT is a KeyboardInterrupt."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Have SIGINT wait here and in the processes started meanwhile, there for good.

    A terminal sends it to all of them; this process alone answers it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
