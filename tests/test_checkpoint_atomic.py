"""A save is whole or not at all: killed at any moment, on a full disk, over what must not go."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_toy import Toy, constant, make_mesh, save, value_of

from moe_tp.checkpoint import atomic, writer
from moe_tp.checkpoint.scan import UNFINISHED
from moe_tp.errors import CheckpointError
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_crash, run_ranks


def count_events(limit: int) -> Callable[[], int]:
    """Make this process kill itself at its `limit`-th write, sync or rename; return the counter."""
    seen = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.fsync = counted(os.fsync)
    os.rename = counted(os.rename)
    os.unlink = counted(os.unlink)
    atomic.shutil.rmtree = counted(atomic.shutil.rmtree)  # type: ignore[attr-defined]
    atomic._exchange = counted(atomic._exchange)
    writer._Output._write = counted(writer._Output._write)  # type: ignore[method-assign]
    return lambda: seen


def in_child(work: Callable[[], None]) -> int:
    """Return the wait status of a forked child that ran `work`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def check_after_kill(target: Path) -> float:
    """One of both checkpoints loads, whole; whatever else lies there is refused by name."""
    value = value_of(target)
    for left in target.parent.glob(f".{target.name}*"):
        try:  # refused, or the other one whole: new before the exchange of the folders, old after
            assert value_of(left) == 3.0 - value
        except CheckpointError as error:
            if "unfinished save" not in str(error):
                raise
    return value


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path: Path, moments: int) -> None:
    """K5: SIGKILL at random writes, syncs and renames of a save over an older checkpoint, and at
    each of the last ones, where the folders change places."""
    target = tmp_path / "ckpt"
    old, new = Toy(Mesh.single()), Toy(Mesh.single())
    constant(old, 1.0)
    constant(new, 2.0)
    save(old, target)
    total_file = tmp_path / "events"

    def counting() -> None:
        seen = count_events(-1)
        save(new, tmp_path / "other")
        save(new, tmp_path / "other")
        total_file.write_text(str(seen() // 2 + 2))

    assert in_child(counting) == 0
    total = int(total_file.read_text())
    chosen = sorted(random.Random().sample(range(1, total - 8), moments))
    seen_values = set()
    for moment in [*chosen, *range(total - 8, total + 99)]:

        def killed(moment: int = moment) -> None:
            count_events(moment)
            save(new, target)

        status = in_child(killed)
        assert os.WIFSIGNALED(status) or status == 0
        value = check_after_kill(target)
        seen_values.add(value)
        if value == 2.0 or moment % 3 == 0:
            save(old, target)  # a save on this machine cleans up after a dead one
            assert not list(tmp_path.glob(".ckpt*"))
        assert value_of(target) == 1.0
        if status == 0:
            break
    assert seen_values == {1.0, 2.0}


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_a_random_time(tmp_path: Path, kills: int) -> None:
    """K5: SIGKILL by the clock, at any instruction of a save, not only at its system calls."""
    target = tmp_path / "ckpt"
    old, new = Toy(Mesh.single()), Toy(Mesh.single())
    constant(old, 1.0)
    constant(new, 2.0)
    save(old, target)
    start = time.monotonic()
    save(new, tmp_path / "other")
    usual = time.monotonic() - start
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                save(new, target)
            finally:
                os._exit(0)
        time.sleep(random.random() * 1.2 * usual)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_after_kill(target)
        save(old, target)
        assert value_of(target) == 1.0
        assert not list(tmp_path.glob(".ckpt*"))


def killed_rank(path: str) -> str:
    import torch.distributed as dist

    model = Toy(make_mesh(2, ep=2))
    constant(model, 2.0)
    if dist.get_rank() == 1:
        count_events(3)
    save(model, path)
    return "done"


def test_one_rank_of_two_is_killed(tmp_path: Path) -> None:
    """K5, F1: the other rank ends too, and the older checkpoint is untouched."""
    target = tmp_path / "ckpt"
    old = Toy(Mesh.single())
    constant(old, 1.0)
    save(old, target)
    report = run_crash(killed_rank, 2, str(target), timeout=60.0)
    assert report.exit_codes[1] == -signal.SIGKILL
    assert report.exit_codes[0] != 0
    assert report.results[0] is None
    assert not report.timed_out[0]
    assert value_of(target) == 1.0


class _Full(io.FileIO):
    """A file on a disk with 700 bytes left."""

    room = 700

    def write(self, data: Any) -> int:
        part = memoryview(data)[: _Full.room]
        if not len(part):
            raise OSError(errno.ENOSPC, "No space left on device")
        _Full.room -= len(part)
        return super().write(part)


def disk_full(path: str, world: int, layout: dict[str, int]) -> str:
    model = Toy(make_mesh(world, **layout))
    constant(model, 2.0)
    rank = 0
    if world > 1:
        import torch.distributed as dist

        rank = dist.get_rank()
    before = writer.io.FileIO  # type: ignore[attr-defined]
    if rank == world - 1:
        _Full.room = 700
        writer.io.FileIO = _Full  # type: ignore[attr-defined,misc]
    try:
        with pytest.raises(CheckpointError) as caught:
            save(model, path)
    finally:
        writer.io.FileIO = before  # type: ignore[attr-defined,misc]
    return str(caught.value)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"ep": 2})])
def test_disk_full(tmp_path: Path, world: int, layout: dict[str, int]) -> None:
    """K5: every rank raises, naming the rank and the cause; nothing is left, the old one loads."""
    target = tmp_path / "ckpt"
    old = Toy(Mesh.single())
    constant(old, 1.0)
    save(old, target)
    for message in run_ranks(disk_full, world, str(target), world, layout):
        assert "No space left on device" in message
        assert message.startswith("rank 1: ") or world == 1
    assert value_of(target) == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_no_room_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K5: bytes needed and free are compared first."""
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"expected room for \d+ bytes, found 100 free"):
        save(Toy(Mesh.single()), tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_targets_that_would_lose_something(tmp_path: Path) -> None:
    """K5: a file, or a folder that is no model folder, is never replaced."""
    model = Toy(Mesh.single())
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="found a file"):
        save(model, tmp_path / "file")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"found 'thesis\.tex' in it"):
        save(model, tmp_path / "home")
    constant(model, 1.0)
    save(model, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "runs").mkdir()
    with pytest.raises(CheckpointError, match="found 'runs' in it"):
        save(model, tmp_path / "ckpt")
    (tmp_path / "empty").mkdir()
    save(model, tmp_path / "empty")
    assert value_of(tmp_path / "empty") == 1.0


def test_without_an_exchange_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K5: systems that cannot swap two names in one step rename twice."""
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    model = Toy(Mesh.single())
    for value in (1.0, 2.0):
        constant(model, value)
        save(model, tmp_path / "ckpt")
        assert value_of(tmp_path / "ckpt") == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_what_a_killed_save_left_is_refused_by_name(tmp_path: Path) -> None:
    """K5: from its first moment, before the marker lies in it, a folder of a save is called so."""
    work = atomic.begin(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"unfinished save .*json lies in it"):
        value_of(work)
    (work / UNFINISHED).unlink()
    with pytest.raises(CheckpointError, match=r"unfinished save .nothing lies in it"):
        value_of(work)
    with pytest.raises(CheckpointError) as plainly_empty:
        value_of(tmp_path)
    assert "unfinished" not in str(plainly_empty.value)
