"""Writes checkpoints beside the training: a copy in host memory, a thread, a group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_tp.parallel.collectives import Group
from moe_tp.parallel.mesh import Mesh

_CPU = torch.device("cpu")
Job = Callable[[Group, torch.device], None]


class Saver:
    """Runs one job at a time, each on every rank.

    A job that fails does so on every rank (its collectives see to that), and `wait` raises it on
    every rank alike. The thread ends with the process: a save that is cut off leaves no checkpoint
    behind, torn or whole.

    Args:
        mesh: the ranks.
        background: run jobs on a thread; False: at once, by the caller.

    Attributes:
        copies: host memory for `stage_state`, kept from save to save; None without a thread.

    Collectives: creation of a gloo group over the world, at the first job.
    """

    def __init__(self, mesh: Mesh, *, background: bool) -> None:
        self.mesh, self.background = mesh, background
        self.copies: dict[str, torch.Tensor] | None = {} if background else None
        self._group: Group | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def run(self, job: Job) -> None:
        """Start a job; `wait` must have been called since the last one.

        Args:
            job: called with the ranks' group and the device its collectives take tensors on.
        """
        assert self._thread is None, "the job before this one was not waited for"
        if not self.background:
            job(self.mesh.group("world"), self.mesh.device)
            return
        group = self._own_group()

        def work() -> None:
            try:
                job(group, _CPU)
            except Exception as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=work, name="moe_tp checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when no job runs; raise what the last one has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _own_group(self) -> Group:
        """Return a group that the training's collectives do not use."""
        if self._group is None:
            world = self.mesh.group("world")
            made = None
            if world.size > 1:
                limit = timedelta(seconds=self.mesh.runtime.timeout)
                made = dist.new_group(backend="gloo", timeout=limit)
            self._group = Group("checkpoint", world.size, world.rank, world.ranks, made)
        return self._group
