"""A rank's side of a run: meet the others, and let the first failure be known by its rank (F1)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from moe_tp.cli.environment import Place
from moe_tp.cli.failures import Failure, leave
from moe_tp.cli.launcher import PARENT_PIPE
from moe_tp.cli.options import runtime_of
from moe_tp.errors import ConfigError, MoeTpError, RankFailedError, reads_like_an_ended_peer
from moe_tp.log import get_logger

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["joined", "pick_device"]

_FIRST = "moe_tp/first_failure"


@contextlib.contextmanager
def joined(place: Place | None, options: argparse.Namespace) -> Iterator[None]:
    """Have the default process group of a run; without a place, have nothing and use one process.

    A failure inside is recorded where the launcher and the other ranks find it, before this rank
    leaves the group. A rank that fails because another did raises RankFailedError naming the first.

    Args:
        place: this rank of the run.
        options: `--device` and `--runtime`; `options.torch_device` is set to the device chosen.

    Collectives: the rendezvous of the ranks.
    """
    options.torch_device = pick_device(options.device, place)
    if place is None:
        yield
        return
    _end_with_parent()
    if torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    store: Store | None = None
    try:
        limit = timedelta(seconds=runtime_of(options).timeout)
        store = _meet(place, limit)
        on_gpu = options.torch_device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=limit,
            device_id=options.torch_device if on_gpu else None,
        )
        yield
        if place.run_folder is not None:
            (place.run_folder / f"done-{place.rank}").touch()
    except KeyboardInterrupt:
        _first(store, f"{place.rank} stopped by a signal")
        raise
    except Exception as error:
        _record(error, place, store)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def pick_device(choice: str, place: Place | None) -> torch.device:
    """Return this rank's device, made current where it is a GPU.

    Args:
        choice: "auto" takes a GPU a rank where there are enough of them, else the CPU.
        place: this rank; None for one process.
    """
    ranks, index = (place.local_world_size, place.local_rank) if place else (1, 0)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cuda" and gpus < ranks:
        raise ConfigError(
            f"--device cuda needs a GPU for each of the {ranks} ranks of this machine, and it has "
            f"{gpus}; start {gpus or 'no'} ranks on it, or choose --device cpu"
        )
    if choice == "cpu" or gpus < ranks:
        if gpus and choice == "auto":
            get_logger(__name__).warning(
                "%d ranks on %d GPUs: using the CPU; give each rank a GPU", ranks, gpus
            )
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _meet(place: Place, limit: timedelta) -> Store:
    """Return the store that all ranks of the run share."""
    if place.run_folder is not None:
        url = f"file://{place.run_folder / 'store'}"
        found = next(rendezvous(url, place.rank, place.world_size))
    else:
        found = next(rendezvous("env://", timeout=limit))
    store: Store = found[0]
    # torchrun starts ranks again on the same store, where the addresses of the dead still lie
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is not None and place.run_folder is None:
        store = PrefixStore(f"moe_tp/attempt_{attempt}", store)
    store.set_timeout(limit)
    return store


def _record(error: Exception, place: Place, store: Store | None) -> None:
    """Leave this failure for launcher and ranks; raise RankFailedError where another was first."""
    failure = Failure(
        rank=place.rank,
        when=time.time(),
        kind=type(error).__name__,
        message=" ".join(str(error).split()),
        trace="".join(traceback.format_exception(error)),
    )
    if place.run_folder is not None:
        leave(place.run_folder, failure, error)
        return
    _tell_torchrun(error)
    ours = isinstance(error, MoeTpError) or not isinstance(error, RuntimeError)
    ended = not ours and reads_like_an_ended_peer(failure.message)
    mine = "" if ended else f"{place.rank} {failure.kind}: {failure.message}"
    rank, _, text = _first(store, mine).partition(" ")
    if rank and int(rank) != place.rank:
        raise RankFailedError(f"stopped because rank {rank} failed first: {text}") from error
    if ended:
        raise RankFailedError(
            "stopped because another rank ended without a word, killed or by a signal"
        ) from error


def _first(store: Store | None, mine: str) -> str:
    """Return what the first rank to fail said, which is `mine` where none has; "" is no word."""
    if store is None:
        return mine
    try:
        return store.compare_set(_FIRST, "", mine).decode()
    except RuntimeError:  # the store's host has gone; this rank's own error is all there is to tell
        return mine


def _tell_torchrun(error: Exception) -> None:
    """Write the file from which torchrun prints the root cause of a failed run."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = f"{type(error).__name__}: {error}"
        info = {"py_callstack": "".join(traceback.format_exception(error))}
        info["timestamp"] = str(int(time.time()))
        content = {"message": {"message": text, "extraInfo": info}}
        Path(path).write_text(json.dumps(content))


def _end_with_parent() -> None:
    """End this process when the launcher goes, however it does: its end of a pipe closes."""
    pipe = os.environ.get(PARENT_PIPE)
    if pipe is None:
        return

    def wait() -> None:
        os.read(int(pipe), 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
