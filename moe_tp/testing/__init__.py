"""Run a function on local ranks: a warm pool, or fresh processes where a rank may die.

`run_ranks` keeps one pool of processes for the whole test run. They are forked from a small server
process that has imported torch and nothing else, so a pool of 8 is there within seconds, and a call
costs 10 (2 ranks) to 80 ms (8 ranks): each call makes a gloo group of its own through a file, so
that whatever a function did to its groups is gone afterwards. A function must be importable by name
(module level), and its arguments and result must pickle; tensors travel by value.
"""

from __future__ import annotations

import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from moe_tp.testing.pool import POOL, fork_context, one_thread, read_text
from moe_tp.testing.rank import run_fresh

__all__ = ["CrashReport", "run_crash", "run_ranks"]


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Return `[fn(*args) on rank 0, on rank 1, ...]`, run on `world_size` local gloo ranks.

    Inside `fn` the default process group is initialised, torch uses one thread and its generator is
    seeded with 0 on every rank. The first rank to fail decides the exception: of its own type, the
    rank in front of its message and its traceback as a note.

    Args:
        fn: a module-level function.
        world_size: number of ranks, from 1.
        timeout: seconds until the ranks are killed and TimeoutError is raised, with each stuck
            rank's stack.

    Collectives: a rendezvous of the ranks before `fn`; none between the caller and the ranks.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} is not a number of ranks; choose 1 or more")
    try:
        return POOL.call(fn, world_size, args, timeout)
    except BaseException:
        # Ranks may be anywhere when the caller is interrupted (pytest-timeout, Ctrl-C).
        if POOL.busy:
            POOL.kill()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """What became of the fresh processes of one `run_crash` call, by rank."""

    exit_codes: list[
        int
    ]  # negative: the signal that ended the rank; -9 also for those killed at the timeout
    stderr: list[str]
    results: list[Any]  # None where the rank did not return
    seconds: list[float]  # from the start of the call to the end of the rank
    timed_out: list[bool]


def run_crash(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> CrashReport:
    """Return how fresh ranks that run `fn(*args)` ended; a rank's failure raises nothing.

    Args:
        fn: a module-level function; a rank whose `fn` raises prints the traceback and exits with 1.
        world_size: number of ranks.
        timeout: seconds until the ranks still running are killed.
        env: environment variables set in the ranks.

    Collectives: a rendezvous of the ranks before `fn`.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory(prefix="moe_tp_crash_") as folder:
        request = pickle.dumps((fn, args))
        start = time.monotonic()
        ranks: list[ForkServerProcess] = []
        for rank in range(world_size):
            job = (folder, rank, world_size, request, list(sys.path), timeout, dict(env or {}))
            process = context.Process(target=run_fresh, args=job, daemon=True)
            with one_thread():
                process.start()
            ranks.append(process)
        ended: list[float | None] = [None] * world_size
        while None in ended and time.monotonic() - start < timeout:
            waiting = [p.sentinel for p, end in zip(ranks, ended, strict=True) if end is None]
            connection.wait(waiting, timeout=max(0.0, start + timeout - time.monotonic()))
            for rank, process in enumerate(ranks):
                if ended[rank] is None and process.exitcode is not None:
                    ended[rank] = time.monotonic() - start
        for process in ranks:
            if process.exitcode is None:
                process.kill()
            process.join()
        out = Path(folder)
        return CrashReport(
            exit_codes=[p.exitcode if p.exitcode is not None else -signal.SIGKILL for p in ranks],
            stderr=[read_text(out / f"stderr{r}") for r in range(world_size)],
            results=[_read_pickle(out / f"result{r}") for r in range(world_size)],
            seconds=[end if end is not None else timeout for end in ended],
            timed_out=[end is None for end in ended],
        )


def _read_pickle(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None
