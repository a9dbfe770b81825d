"""One local rank: what a process of the pool, or a fresh one, does when it is called."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_tp.errors import MoeTpError


def serve(channel: connection.Connection, rank: int, stderr: str) -> None:
    """Answer calls until the caller closes the channel; the main function of a pool process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with open(stderr, "a") as words:
        os.dup2(words.fileno(), 2)  # so that the caller hears why libraries in C abort
        faulthandler.register(signal.SIGUSR1, file=words, all_threads=False)
        faulthandler.enable(file=words)  # a crash in C leaves the Python stack here too
        gc.freeze()  # what torch has made by now need not be looked at after every call
        channel.send_bytes(b"ready")
        while True:
            try:
                request = channel.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            channel.send_bytes(pickle.dumps(_answer(rank, request, channel)))


def _answer(rank: int, request: bytes, channel: connection.Connection) -> tuple[str, Any]:
    try:
        path, folder, store, world_size, timeout, body = pickle.loads(request)
        sys.path[:] = path
        os.chdir(folder)
        fn, args = pickle.loads(body)
        with _group(store, rank, world_size, timeout):
            dist.barrier()  # where one rank begins, no other can still fail to connect
            channel.send_bytes(pickle.dumps(("met", None)))
            try:
                return "ok", pickle.dumps(fn(*args))
            except BaseException as error:  # noqa: BLE001 - stamped before leaving fails others
                return "failed", _describe(error)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must hear of it
        return "failed", _describe(error)


def _describe(error: BaseException) -> tuple[float, bytes | None, str, str, str]:
    """Return the fields of a `Failure`."""
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


def run_fresh(
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
