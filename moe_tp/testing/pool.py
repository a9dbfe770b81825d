"""The warm pool of local ranks, as the process that calls them sees it."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from moe_tp.errors import RankFailedError, reads_like_a_lost_peer
from moe_tp.testing.rank import serve

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
]
_GRACE_S = 1.0  # how long the other ranks may take to answer once one has failed
_START_S = 120.0
# Ranks that have not met by then never will: gloo's connections stall, or close, once in many
# thousand calls. Nothing of the function has run, so it may be called again, on new processes.
_MEET_S = 60.0
_MEETINGS = 2
# torch caches keep some groups of past calls alive, and each holds gloo threads: past this many a
# process is replaced, before thousands of idle threads slow every rank of the machine.
_MOST_THREADS = 100


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank sends instead of its result."""

    when: float  # time.time(): ranks of one machine share the clock
    exception: bytes | None  # pickled, if it does
    kind: str
    message: str
    trace: str
    met: bool = True  # False: the ranks had not met, so the function did not start on any


@dataclass(frozen=True, slots=True)
class _Worker:
    process: ForkServerProcess
    channel: connection.Connection
    stderr: Path  # what it writes in the current call, Python stacks of a crash included


class Pool:
    """The processes of this test run; a call on n ranks uses the first n of them."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.busy = False
        self.owner = os.getpid()

    def call(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        """Return the ranks' results, or raise the first failure; the pool stays usable."""
        if os.getpid() != self.owner:  # a forked child must not talk into its parent's channels
            self.workers, self.busy, self.owner = [], False, os.getpid()
        if self.busy:
            self.kill()
        body = pickle.dumps((fn, args))
        self.busy = True
        with tempfile.TemporaryDirectory(prefix="moe_tp_ranks_") as folder:
            for attempt in range(_MEETINGS):
                self._grow(world_size)
                store = os.path.join(folder, f"store{attempt}")
                request = list(sys.path), os.getcwd(), store, world_size, timeout, body
                workers = self.workers[:world_size]
                answers, not_met = self._attempt(workers, request, timeout)
                if not_met is None or attempt + 1 == _MEETINGS:
                    break
                self.kill()
                self.busy = True
                warnings.warn(f"new ranks are started: {not_met}", stacklevel=3)
        if not answers:
            raise TimeoutError(not_met)
        failures = {r: a for r, a in enumerate(answers) if isinstance(a, Failure)}
        if failures:
            if len(failures) < world_size or not all(f.trace for f in failures.values()):
                self.kill()  # some ranks finished, died or hang, and would answer the next call
            self.busy = False
            raise labelled(failures, world_size)
        self.busy = False
        if max(_num_threads(worker.process.pid) for worker in workers) > _MOST_THREADS:
            self.kill()
        return [pickle.loads(answer) for answer in answers if isinstance(answer, bytes)]

    def _attempt(
        self, workers: list[_Worker], request: tuple[Any, ...], timeout: float
    ) -> tuple[list[bytes | Failure], str | None]:
        """Return the ranks' answers, and why the function began on none where gloo is the cause."""
        self._ask(workers, request)
        ranks = list(range(len(workers)))
        if not connection.wait([worker.channel for worker in workers], _MEET_S):
            return [], self._end(workers, ranks, "meet", _MEET_S)
        answers = self._collect(workers, timeout)
        sys.stderr.write("".join(read_text(worker.stderr) for worker in workers))
        failures = {r: a for r, a in zip(ranks, answers, strict=True) if isinstance(a, Failure)}
        if len(failures) < len(workers) or any(f.met for f in failures.values()):
            return answers, None
        lost = any(reads_like_a_lost_peer(f.message) for f in failures.values())
        return answers, str(labelled(failures, len(workers))) if lost else None

    def _ask(self, workers: list[_Worker], call: tuple[Any, ...]) -> None:
        request = pickle.dumps(call)
        for worker in workers:
            os.truncate(worker.stderr, 0)
            with contextlib.suppress(BrokenPipeError):  # it died; _collect says so by its rank
                worker.channel.send_bytes(request)

    def _end(self, workers: list[_Worker], ranks: list[int], what: str, seconds: float) -> str:
        """Kill the pool and return what these ranks did not do in time, and where they were."""
        stacks = _stacks(workers, ranks)
        self.kill()
        said = f"ranks {ranks} of {len(workers)} did not {what} within {seconds:g} s"
        return f"{said} and were killed; they were here:\n{stacks}"

    def kill(self) -> None:
        """End every process of the pool; the next call starts new ones."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.channel.close()
            worker.stderr.unlink(missing_ok=True)
        self.workers = []
        self.busy = False

    def _grow(self, world_size: int) -> None:
        context = fork_context()
        added: list[_Worker] = []
        for rank in range(len(self.workers), world_size):
            ours, theirs = context.Pipe()
            handle, name = tempfile.mkstemp(prefix="moe_tp_stderr_")
            os.close(handle)
            process = context.Process(target=serve, args=(theirs, rank, name), daemon=True)
            with one_thread():
                process.start()
            theirs.close()
            added.append(_Worker(process, ours, Path(name)))
        self.workers += added
        for worker in added:
            if not worker.channel.poll(_START_S):
                self.kill()
                raise TimeoutError(f"a test rank did not start within {_START_S:.0f} s")
            worker.channel.recv_bytes()

    def _collect(self, workers: list[_Worker], timeout: float) -> list[bytes | Failure]:
        """Return each rank's answer: a `Failure` where it failed, died or hangs after one."""
        met: set[int] = set()
        answers: list[bytes | Failure | None] = [None] * len(workers)
        deadline = time.monotonic() + timeout
        while None in answers:
            open_ranks = [rank for rank, answer in enumerate(answers) if answer is None]
            ready = connection.wait(
                [workers[rank].channel for rank in open_ranks],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                if any(isinstance(answer, Failure) for answer in answers):
                    break
                raise TimeoutError(self._end(workers, open_ranks, "answer", timeout))
            for rank in open_ranks:
                if workers[rank].channel not in ready:
                    continue
                answer = answers[rank] = _receive(workers[rank], rank in met)
                if answer is None:
                    met.add(rank)
                if isinstance(answer, Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        said = "still ran when another rank failed"
        return [
            Failure(time.time(), None, "RankFailedError", said, "", r in met) if a is None else a
            for r, a in enumerate(answers)
        ]


POOL = Pool()
atexit.register(lambda: POOL.kill() if os.getpid() == POOL.owner else None)


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Return the context whose server process has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Set OMP_NUM_THREADS=1 while a process starts: the fork server reads the environment once."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _receive(worker: _Worker, met: bool) -> bytes | Failure | None:
    """Return an answer, None where the rank says that it has met the others."""
    try:
        kind, body = pickle.loads(worker.channel.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(5.0)
        said, last = f"died with exit code {worker.process.exitcode}", read_text(worker.stderr)
        said += f"; its last words:\n{last.strip()}" if last else ""
        return Failure(time.time(), None, "RankFailedError", said, "", met)
    if kind == "met":
        return None
    return body if kind == "ok" else replace(Failure(*body), met=met)


def labelled(failures: dict[int, Failure], world_size: int) -> BaseException:
    """Return the first cause as an exception of its own type, with rank and traceback.

    That is the earliest failure which does not read like the loss of a peer, nor was raised from
    such a one: under load the news of a death can come after the complaints of those who lost it.
    """

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        return reads_like_a_lost_peer(failure.message + failure.trace), failure.when

    rank = min(failures, key=order)
    first = failures[rank]
    text = f"rank {rank} of {world_size}: {first.message}"
    error: BaseException | None = None
    if first.exception is not None:
        error = pickle.loads(first.exception)
        error.args = (text, *error.args[1:])
    if error is None or text not in str(error):
        error = RankFailedError(f"rank {rank} of {world_size}: {first.kind}: {first.message}")
    note = f"traceback of rank {rank}:\n{first.trace}" if first.trace else ""
    others = [f"rank {r}: {f.kind}: {f.message}" for r, f in sorted(failures.items()) if r != rank]
    if others:
        note += "later failures:\n  " + "\n  ".join(line.splitlines()[0] for line in others)
    if note and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    elif note:
        error.__cause__ = RankFailedError(note)
    return error


def _stacks(workers: list[_Worker], ranks: list[int]) -> str:
    """Return the Python stack of each of these ranks, as they write it on SIGUSR1."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
    time.sleep(0.5)
    return "\n".join(f"rank {r}: {read_text(workers[r].stderr).strip()}" for r in ranks)


def _num_threads(pid: int | None) -> int:
    """Return the threads of a process; 0 where the system does not tell."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def read_text(path: Path) -> str:
    """Return the text of a file; nothing where there is none."""
    return path.read_text(errors="replace") if path.exists() else ""
