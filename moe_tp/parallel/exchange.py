"""All-gathers of a few bytes through memory that the ranks of one host share; without gradient.

A step of generation on CPUs waits for some collectives of a few kilobytes each. Through gloo such a
one is sockets and threads that wake up; ranks that look into each other's memory need a few
microseconds. `generate` opens such a memory for the ranks of tp and of ep. Where they are on
several hosts, or nothing compiles, or a tensor is larger, all goes by the process group.

Letters: P ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from moe_tp.errors import RankFailedError
from moe_tp.parallel.native import build_or_none

if TYPE_CHECKING:
    from moe_tp.parallel.collectives import Group

ROOM = 1 << 18  # bytes of a rank's tensor
_LINE = 64  # bytes, of `exchange.c`
_SOURCE = Path(__file__).with_name("exchange.c")
_MEMORY = Path("/dev/shm")
_PATIENCE = 0.05  # seconds between two looks whether the others are alive


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build_or_none(_SOURCE, "exchanges of generation")
    if library is None:
        return None
    pointer, count, turn = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    slot = (pointer, count, count)
    library.moe_tp_exchange_put.argtypes = [*slot, turn, pointer, count]
    library.moe_tp_exchange_put.restype = None
    library.moe_tp_exchange_take.argtypes = [*slot, turn, pointer, count, ctypes.c_double]
    library.moe_tp_exchange_take.restype = count
    library.moe_tp_exchange_fail.argtypes = [*slot]
    library.moe_tp_exchange_fail.restype = None
    library.moe_tp_exchange_failed.argtypes = [*slot]
    return library


class Exchange:
    """Memory that the ranks of a group share.

    Args:
        memory: zeros.
        group: the ranks.
        pids: the process of each.
        timeout: seconds before a rank that does not come is an error.
    """

    def __init__(
        self, memory: mmap.mmap, group: Group, pids: Sequence[int], timeout: float
    ) -> None:
        library = _library()
        assert library is not None
        self._library, self._group, self._pids, self._timeout = library, group, pids, timeout
        self._turn = 0
        self._memory = ctypes.c_char.from_buffer(memory)  # holds it open
        self._address = ctypes.addressof(self._memory)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[P, *x.shape]`, in rank order.

        Args:
            x: on a CPU, of equal shape on each rank, at most `ROOM` bytes.

        Raises:
            RankFailedError: a rank has ended, or does not come in time.
        """
        x = x.contiguous()
        out = x.new_empty((self._group.size, *x.shape))
        self._turn += 1
        now = self._address, self._group.rank, ROOM, self._turn
        self._library.moe_tp_exchange_put(*now, x.data_ptr(), x.nbytes)
        all_of = self._address, self._group.size, ROOM, self._turn
        until = None
        while True:
            late = self._library.moe_tp_exchange_take(*all_of, out.data_ptr(), x.nbytes, _PATIENCE)
            if late < 0:
                return out
            until = until or time.monotonic() + self._timeout
            self._check(late, until)

    def fail(self) -> None:
        """Tell the others that this rank takes part no more."""
        self._library.moe_tp_exchange_fail(self._address, self._group.rank, ROOM)

    def _check(self, late: int, until: float) -> None:
        """Raise an error if there is no use in waiting on."""
        rank = self._group.ranks[late]
        failed = self._library.moe_tp_exchange_failed(self._address, late, ROOM)
        if failed or not _is_alive(self._pids[late]):
            raise RankFailedError(
                f"rank {rank} failed or ended while this rank waited for it over "
                f"{self._group.axis}; its own output says why"
            )
        if time.monotonic() > until:
            raise RankFailedError(
                f"rank {rank} has not come in {self._timeout:g} s (Runtime.timeout) while this "
                f"rank waited for it over {self._group.axis}; all ranks must make the same calls"
            )


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _create(size: int) -> str | None:
    """Return a new file of so many zeros in the host's memory, None where there is no room."""
    try:
        number, path = tempfile.mkstemp(prefix="moe_tp-", dir=_MEMORY)
    except OSError:
        return None
    try:
        os.posix_fallocate(number, 0, size)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(number)
    return path


def _map(path: str, size: int) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        return None


class _Told(NamedTuple):
    """What a rank tells the others of its group."""

    able: bool
    path: str | None
    pid: int
    processes: str  # the kernel's name of the space in which pids count


def _tell(path: str | None) -> _Told:
    able = _library() is not None
    return _Told(able, path, os.getpid(), os.readlink("/proc/self/ns/pid") if able else "")


def _open(group: Group, timeout: float) -> Exchange | None:
    """Return an exchange of the group; None where its ranks do not all find the same memory.

    Collectives: two all-gathers of objects over `group`.
    """
    size = group.size * (_LINE + 2 * ROOM)
    path = _create(size) if group.rank == 0 and _library() is not None else None
    told = [_tell(None)] * group.size
    try:
        dist.all_gather_object(told, _tell(path), group=group.process_group)
        alike = all(other.able and other.processes == told[0].processes for other in told)
        memory = _map(told[0].path, size) if alike and told[0].path else None
        found = [False] * group.size
        dist.all_gather_object(found, memory is not None, group=group.process_group)
    finally:
        if path is not None:
            os.unlink(path)
    if memory is None or not all(found):
        return None
    return Exchange(memory, group, [other.pid for other in told], timeout)


_opened: ContextVar[dict[str, Exchange]] = ContextVar("opened", default={})  # noqa: B039


@contextlib.contextmanager
def sharing_memory(groups: Iterable[Group], timeout: float) -> Iterator[None]:
    """Let small all-gathers over these groups go through shared memory while the context is open.

    Args:
        groups: of ranks with CPUs; the same axes on each rank.
        timeout: seconds before a rank that does not come is an error.

    Collectives: two all-gathers of objects over each group.
    """
    opened: dict[str, Exchange] = {}
    for name, group in {group.name: group for group in groups if group.size > 1}.items():
        exchange = _open(group, timeout)
        if exchange is not None:
            opened[name] = exchange
    token = _opened.set(opened)
    try:
        yield
    except BaseException:
        for exchange in opened.values():
            exchange.fail()
        raise
    finally:
        _opened.reset(token)


def exchange_of(group: Group, x: torch.Tensor) -> Exchange | None:
    """Return the memory through which an all-gather of `x` goes; None: the process group."""
    opened = _opened.get()
    if not opened or not x.is_cpu or x.nbytes > ROOM or torch.is_grad_enabled():
        return None
    return opened.get(group.name)
