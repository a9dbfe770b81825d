"""All-gathers of generation through memory that ranks of one host share."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from moe_tp import Mesh, ParallelLayout, Runtime
from moe_tp.errors import RankFailedError
from moe_tp.parallel import collectives, exchange
from moe_tp.parallel.collectives import Group, raw_all_gather, record_traffic
from moe_tp.parallel.exchange import ROOM, Exchange, sharing_memory
from moe_tp.testing import run_ranks

compiles = pytest.mark.skipif(
    exchange._library() is None or not Path("/dev/shm").is_dir(), reason="no C compiler"
)


def tensors(rank: int) -> list[torch.Tensor]:
    """Return tensors of many types and shapes, one of them strided, one as large as the room."""
    draw = torch.Generator().manual_seed(rank)
    rows = torch.randn(3, 8, generator=draw)
    return [
        rows, rows.bfloat16(), rows.double().t(), rows > 0, torch.tensor([rank]), rows[:, ::2],
        torch.randn(0, 4), torch.randint(9, (5,), generator=draw),
        torch.randn(ROOM // 4, generator=draw),
    ]  # fmt: skip


def gathered() -> tuple[list[str], int]:
    """Return what differs from the group's own all-gathers, and messages of the group inside."""
    mesh = Mesh(ParallelLayout(tp=torch.distributed.get_world_size()))
    group, wrong, asked = mesh.group("tp"), [], []
    expected = [raw_all_gather(x, group) for x in tensors(mesh.rank)]
    inner = collectives._wait

    def noted(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.shape)
        return inner(x)

    collectives._wait = noted
    try:
        with torch.no_grad(), sharing_memory([group, group], 60.0), record_traffic() as log:
            for _ in range(20):  # both rooms, again and again, while ranks come early and late
                for number, (x, want) in enumerate(zip(tensors(mesh.rank), expected, strict=True)):
                    if (number + mesh.rank) % 5 == 0:
                        time.sleep(0.001)
                    found = raw_all_gather(x, group)
                    if not torch.equal(found, want) or found.dtype != want.dtype:
                        wrong.append(f"{number}: {x.dtype} {tuple(x.shape)}")
            sent = log.total(axis="tp", op="all_gather")
            inside = len(asked)
            raw_all_gather(torch.zeros(ROOM + 1, dtype=torch.uint8), group)
            with torch.enable_grad():
                raw_all_gather(torch.zeros(1), group)
        raw_all_gather(torch.zeros(1), group)
    finally:
        collectives._wait = inner
    assert sent == 20 * sum(x.nbytes for x in tensors(0)) * (group.size - 1)
    assert len(asked) == inside + 3  # too large, with gradients, and outside
    return wrong, inside


@compiles
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_bits_as_the_groups(ranks: int) -> None:
    """D1: every type, any shape, in rank order; nothing of it goes through the group."""
    for wrong, inside in run_ranks(gathered, ranks):
        assert wrong == []
        assert inside == 0


def only_rank_0_can(what: str) -> float:
    mesh = Mesh(ParallelLayout(tp=2))
    real = getattr(exchange, what)
    if mesh.rank == 1:
        setattr(exchange, what, lambda *args: None)
    try:
        with torch.no_grad(), sharing_memory([mesh.group("tp")], 60.0):
            assert not exchange._opened.get()
            return float(raw_all_gather(torch.tensor([1.0 + mesh.rank]), mesh.group("tp")).sum())
    finally:
        setattr(exchange, what, real)


@compiles
@pytest.mark.parametrize("what", ["_library", "_map"])
def test_all_ranks_or_none(what: str) -> None:
    """F2: where one rank cannot compile, or not see the memory, all go by the group."""
    assert run_ranks(only_rank_0_can, 2, what) == [3.0, 3.0]


class OwnError(Exception):
    """Of the rank that fails first."""


def one_fails(folder: str) -> str:
    mesh = Mesh(ParallelLayout(tp=2), Runtime(timeout=60.0))
    group = mesh.group("tp")
    start = time.monotonic()
    try:
        with torch.no_grad(), sharing_memory([group], 60.0):
            raw_all_gather(torch.zeros(1), group)
            if mesh.rank == 0:
                raise OwnError
            raw_all_gather(torch.zeros(1), group)
    except OwnError:
        while not Path(folder, "told").exists() and time.monotonic() < start + 30:
            time.sleep(0.01)  # alive: it is not its end that the other sees
        return ""
    except RankFailedError as error:
        Path(folder, "told").touch()
        assert time.monotonic() < start + 20
        return str(error)
    return "nothing"


@compiles
def test_a_rank_that_fails_is_told_of(tmp_path: Path) -> None:
    """F2: at once, though it lives on."""
    said = run_ranks(one_fails, 2, str(tmp_path))
    assert said[0] == ""
    assert "rank 0 failed or ended while this rank waited for it over tp" in said[1]


@compiles
def test_a_rank_that_has_ended_or_does_not_come() -> None:
    """F2: a process that is gone is missed within moments, a slow one after the timeout."""
    group = Group("tp", size=2, rank=0, ranks=(4, 7))
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid, timeout, said in (
        (ended.pid, 60.0, "rank 7 failed or ended while this rank waited for it over tp"),
        (os.getpid(), 0.1, r"rank 7 has not come in 0.1 s \(Runtime.timeout\)"),
    ):
        memory = mmap.mmap(-1, 2 * (64 + 2 * ROOM))
        alone, start = Exchange(memory, group, [os.getpid(), pid], timeout), time.monotonic()
        with pytest.raises(RankFailedError, match=said):
            alone.all_gather(torch.zeros(4))
        assert time.monotonic() < start + 10


def test_no_room_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host without such memory, or with a full one, goes by the group."""
    monkeypatch.setattr(exchange, "_MEMORY", tmp_path / "none")
    assert exchange._create(64) is None
    monkeypatch.setattr(exchange, "_MEMORY", tmp_path)
    assert exchange._create(1 << 60) is None
    assert list(tmp_path.iterdir()) == []
