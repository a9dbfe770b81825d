"""Run a function on local ranks: a warm pool, or fresh processes where a rank may die.

`run_ranks` keeps one pool of processes for the whole test run. They are forked from a small server
process that has imported torch and nothing else, so a pool of 8 is there within seconds, and a call
costs 10 (2 ranks) to 80 ms (8 ranks): each call makes a gloo group of its own through a file, so
that whatever a function did to its groups is gone afterwards. A function must be importable by name
(module level), and its arguments and result must pickle; tensors travel by value.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_tp.errors import MoeTpError, RankFailedError, reads_like_a_lost_peer

__all__ = ["CrashReport", "run_crash", "run_ranks"]

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
]
_GRACE_S = 1.0  # how long the other ranks may take to answer once one has failed
_START_S = 120.0
# torch caches keep some groups of past calls alive, and each holds gloo threads: past this many a
# process is replaced, before thousands of idle threads slow every rank of the machine.
_MOST_THREADS = 100


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
        return _POOL.call(fn, world_size, args, timeout)
    except BaseException:
        # Ranks may be anywhere when the caller is interrupted (pytest-timeout, Ctrl-C).
        if _POOL.busy:
            _POOL.kill()
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
    context = _context()
    with tempfile.TemporaryDirectory(prefix="moe_tp_crash_") as folder:
        request = pickle.dumps((fn, args))
        start = time.monotonic()
        ranks: list[ForkServerProcess] = []
        for rank in range(world_size):
            job = (folder, rank, world_size, request, list(sys.path), timeout, dict(env or {}))
            process = context.Process(target=_run_fresh, args=job, daemon=True)
            with _one_thread():
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
            stderr=[_read_text(out / f"stderr{r}") for r in range(world_size)],
            results=[_read_pickle(out / f"result{r}") for r in range(world_size)],
            seconds=[end if end is not None else timeout for end in ended],
            timed_out=[end is None for end in ended],
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank sends instead of its result."""

    when: float  # time.time(): ranks of one machine share the clock
    exception: bytes | None  # pickled, if it does
    kind: str
    message: str
    trace: str


@dataclass(frozen=True, slots=True)
class _Worker:
    process: ForkServerProcess
    channel: connection.Connection
    stack_file: Path


class _Pool:
    """The processes of this test run; a call on n ranks uses the first n of them."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.busy = False
        self._owner = os.getpid()

    def call(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        """Return the ranks' results, or raise the first failure; the pool stays usable."""
        if os.getpid() != self._owner:  # a forked child must not talk into its parent's channels
            self.workers, self.busy, self._owner = [], False, os.getpid()
        if self.busy:
            self.kill()
        body = pickle.dumps((fn, args))
        self.busy = True
        self._grow(world_size)
        workers = self.workers[:world_size]
        with tempfile.TemporaryDirectory(prefix="moe_tp_ranks_") as folder:
            store = os.path.join(folder, "store")
            request = pickle.dumps((list(sys.path), os.getcwd(), store, world_size, timeout, body))
            for worker in workers:
                with contextlib.suppress(BrokenPipeError):  # it died; _collect says so by its rank
                    worker.channel.send_bytes(request)
            answers = self._collect(workers, timeout)
        failures = {r: a for r, a in enumerate(answers) if isinstance(a, _Failure)}
        if failures:
            if len(failures) < world_size or not all(f.trace for f in failures.values()):
                self.kill()  # some ranks finished, died or hang, and would answer the next call
            self.busy = False
            raise _labelled(failures, world_size)
        self.busy = False
        if max(_num_threads(worker.process.pid) for worker in workers) > _MOST_THREADS:
            self.kill()
        return [pickle.loads(answer) for answer in answers if isinstance(answer, bytes)]

    def kill(self) -> None:
        """End every process of the pool; the next call starts new ones."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.channel.close()
            worker.stack_file.unlink(missing_ok=True)
        self.workers = []
        self.busy = False

    def _grow(self, world_size: int) -> None:
        context = _context()
        added: list[_Worker] = []
        for rank in range(len(self.workers), world_size):
            ours, theirs = context.Pipe()
            handle, name = tempfile.mkstemp(prefix="moe_tp_stack_")
            os.close(handle)
            process = context.Process(target=_serve, args=(theirs, rank, name), daemon=True)
            with _one_thread():
                process.start()
            theirs.close()
            added.append(_Worker(process, ours, Path(name)))
        self.workers += added
        for worker in added:
            if not worker.channel.poll(_START_S):
                self.kill()
                raise TimeoutError(f"a test rank did not start within {_START_S:.0f} s")
            worker.channel.recv_bytes()

    def _collect(self, workers: list[_Worker], timeout: float) -> list[bytes | _Failure]:
        """Return each rank's answer: a `_Failure` where it failed, died or hangs after one."""
        answers: list[bytes | _Failure | None] = [None] * len(workers)
        deadline = time.monotonic() + timeout
        while None in answers:
            open_ranks = [rank for rank, answer in enumerate(answers) if answer is None]
            ready = connection.wait(
                [workers[rank].channel for rank in open_ranks],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                if any(isinstance(answer, _Failure) for answer in answers):
                    break
                stacks = _stacks(workers, open_ranks)
                self.kill()
                raise TimeoutError(
                    f"ranks {open_ranks} of {len(workers)} did not answer within {timeout:g} s and "
                    f"were killed; they were here:\n{stacks}"
                )
            for rank in open_ranks:
                if workers[rank].channel not in ready:
                    continue
                answer = answers[rank] = _receive(workers[rank])
                if isinstance(answer, _Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        hangs = _Failure(
            time.time(), None, "RankFailedError", "still ran when another rank failed", ""
        )
        return [hangs if answer is None else answer for answer in answers]


_POOL = _Pool()
atexit.register(lambda: _POOL.kill() if os.getpid() == _POOL._owner else None)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
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


def _receive(worker: _Worker) -> bytes | _Failure:
    try:
        kind, body = pickle.loads(worker.channel.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(5.0)
        code = worker.process.exitcode
        return _Failure(time.time(), None, "RankFailedError", f"died with exit code {code}", "")
    return body if kind == "ok" else _Failure(*body)


def _labelled(failures: dict[int, _Failure], world_size: int) -> BaseException:
    """Return the first cause as an exception of its own type, with rank and traceback.

    That is the earliest failure which does not read like the loss of a peer: under load the news
    of a death can come after the complaints of those who lost it.
    """

    def order(rank: int) -> tuple[bool, float]:
        return reads_like_a_lost_peer(failures[rank].message), failures[rank].when

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
    return "\n".join(f"rank {r}: {_read_text(workers[r].stack_file).strip()}" for r in ranks)


def _num_threads(pid: int | None) -> int:
    """Return the threads of a process; 0 where the system does not tell."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _serve(channel: connection.Connection, rank: int, stack_file: str) -> None:
    """Answer calls until the caller closes the channel; the main function of a pool process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        gc.freeze()  # what torch has made by now need not be looked at after every call
        channel.send_bytes(b"ready")
        while True:
            try:
                request = channel.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            channel.send_bytes(pickle.dumps(_answer(rank, request)))


def _answer(rank: int, request: bytes) -> tuple[str, Any]:
    try:
        path, folder, store, world_size, timeout, body = pickle.loads(request)
        sys.path[:] = path
        os.chdir(folder)
        fn, args = pickle.loads(body)
        with _group(store, rank, world_size, timeout):
            try:
                return "ok", pickle.dumps(fn(*args))
            except BaseException as error:  # noqa: BLE001 - stamped before leaving fails others
                return "failed", _describe(error)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must hear of it
        return "failed", _describe(error)


def _describe(error: BaseException) -> tuple[float, bytes | None, str, str, str]:
    """Return the fields of a `_Failure`."""
    when, trace = time.time(), "".join(traceback.format_exception(error))
    packed: bytes | None = None
    if isinstance(error, Exception):
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # noqa: BLE001 - an exception that does not pickle travels as text
            packed = None
    return when, packed, type(error).__name__, str(error), trace


@contextlib.contextmanager
def _group(store: str, rank: int, world_size: int, timeout: float) -> Iterator[None]:
    """Have a default gloo group, made through a file, and torch's global state as if fresh."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a mesh in a cycle would keep its groups, and their threads


def _run_fresh(
    folder: str,
    rank: int,
    world_size: int,
    request: bytes,
    path: list[str],
    timeout: float,
    env: dict[str, str],
) -> None:
    """Run one rank of `run_crash`; its stderr goes to a file, its result to another."""
    out = os.open(os.path.join(folder, f"stderr{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 2)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.path[:] = path
    try:
        fn, args = pickle.loads(request)
        with _group(os.path.join(folder, "store"), rank, world_size, timeout):
            result = pickle.dumps(fn(*args))
        Path(folder, f"result{rank}").write_bytes(result)
    except MoeTpError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exc()
        os._exit(1)
    except Exception:  # noqa: BLE001 - printed; the exit code tells the caller
        traceback.print_exc()
        os._exit(1)


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _read_pickle(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None
