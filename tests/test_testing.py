"""run_ranks and run_crash: results, labelled errors, hangs, deaths (F1)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_tp.errors import ConfigError, RankFailedError
from moe_tp.testing import pool, run_crash, run_ranks
from moe_tp.testing.pool import Failure, labelled


def _sum(start: int) -> tuple[int, torch.Tensor]:
    x = torch.tensor([float(start + dist.get_rank())], requires_grad=True)
    total = x.detach().clone()
    dist.all_reduce(total)
    return dist.get_rank(), total * x


def _one_fails(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ConfigError("tp=3 does not divide heads=4")
    dist.barrier()


def _all_fail() -> None:
    raise ConfigError(f"seen by {dist.get_world_size()}")


def _odd_error() -> None:
    raise OSError(2, "nothing there", "some/file")


def _crash(rank: int) -> None:
    if dist.get_rank() == rank:
        os.write(2, b"terminate called")  # as a library in C does
        os.abort()
    dist.barrier()


def _say(what: int) -> None:
    print(dist.get_rank(), "says", what, file=sys.stderr)


def _hang() -> None:
    if dist.get_rank() == 1:
        dist.barrier()
    time.sleep(30)


def _die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _pid_and_threads() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def _leak_groups(count: int) -> int:
    for _ in range(count + dist.get_rank()):  # out of step on purpose: local groups only
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return dist.get_world_size()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_by_rank_and_tensors_by_value(world_size: int) -> None:
    results = run_ranks(_sum, world_size, 1)
    total = sum(range(1, world_size + 1))
    assert [rank for rank, _ in results] == list(range(world_size))
    assert [y.item() for _, y in results] == [total * (1 + r) for r in range(world_size)]


def test_one_pool_serves_all_calls_with_one_thread() -> None:
    first, second = run_ranks(_pid_and_threads, 2), run_ranks(_pid_and_threads, 2)
    assert first == second
    assert [threads for _, threads in first] == [1, 1]
    assert run_ranks(_pid_and_threads, 4)[:2] == first


def test_groups_of_one_call_do_not_reach_the_next() -> None:
    assert run_ranks(_leak_groups, 2, 3) == [2, 2]
    assert run_ranks(_sum, 2, 0)[0][0] == 0


def test_an_error_keeps_its_type_and_names_its_rank() -> None:
    """F1: the first cause, not what it led to on the other ranks."""
    with pytest.raises(ConfigError, match=r"rank 1 of 2: tp=3 does not divide") as caught:
        run_ranks(_one_fails, 2, 1)
    assert "_one_fails" in "".join(caught.value.__notes__)
    assert run_ranks(_sum, 2, 0)[1][0] == 1


def test_an_error_on_all_ranks_keeps_the_pool() -> None:
    before = run_ranks(_pid_and_threads, 2)
    with pytest.raises(ConfigError, match="seen by 2"):
        run_ranks(_all_fail, 2)
    assert run_ranks(_pid_and_threads, 2) == before


def test_an_error_whose_text_cannot_be_labelled_becomes_rank_failed() -> None:
    with pytest.raises((RankFailedError, OSError), match=r"rank 0 of 1: .*nothing there"):
        run_ranks(_odd_error, 1)


def test_a_hang_ends_at_the_timeout_and_shows_where() -> None:
    """F1: TimeoutError with each rank's stack; the next call works."""
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="did not answer within 2 s") as caught:
        run_ranks(_hang, 2, timeout=2.0)
    assert time.monotonic() - start < 10
    assert "in _hang" in str(caught.value)
    assert run_ranks(_sum, 2, 0)[1][0] == 1


def test_a_dead_rank_is_named() -> None:
    """F1."""
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 of 2: .*exit code -9"):
        run_ranks(_die, 2, 1)
    assert time.monotonic() - start < 10


def test_a_crash_shows_where() -> None:
    """F1: the Python stack at a fatal signal."""
    with pytest.raises(RankFailedError, match=r"rank 1 of 2: .*exit code -6") as caught:
        run_ranks(_crash, 2, 1)
    assert "in _crash" in str(caught.value)
    assert "terminate called" in str(caught.value)


def test_what_ranks_write_to_stderr_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """F1: by rank, and each call's own."""
    for again in range(2):
        run_ranks(_say, 2, again)
    assert capsys.readouterr().err == "".join(f"{r} says {n}\n" for n in range(2) for r in range(2))


def test_the_news_of_a_death_may_come_late() -> None:
    """F1: a rank that lost its peer is no first cause, however early it says so."""
    lost = Failure(1.0, None, "RuntimeError", "[pair.cc:553] Connection closed by peer", "")
    died = Failure(2.0, None, "RankFailedError", "died with exit code -9", "")
    assert "rank 1 of 2: RankFailedError: died" in str(labelled({0: lost, 1: died}, 2))
    wrapped = Failure(1.0, None, "RuntimeError", "Failed to run stage", f"{lost.message}\nabove")
    assert "rank 1 of 2: RankFailedError: died" in str(labelled({0: wrapped, 1: died}, 2))


def test_run_crash_reports_each_rank() -> None:
    """F1: the survivor of a group whose other rank was killed fails too, and says so on stderr."""
    report = run_crash(_die, 2, 1, timeout=30.0)
    assert report.exit_codes == [1, -9]
    assert report.timed_out == [False, False]
    assert "Traceback" in report.stderr[0]
    assert max(report.seconds) < 25
    assert run_crash(_sum, 2, 1).results[1][0] == 1


def test_run_crash_kills_at_the_timeout() -> None:
    report = run_crash(_hang, 2, timeout=5.0)
    assert report.timed_out[0]
    assert report.exit_codes[0] == -9


def test_a_world_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(_sum, 0, 1)


def _fails_beside_a_sleeper() -> None:
    if dist.get_rank() == 0:
        raise ConfigError("rank 0 gave up")
    time.sleep(25)


def test_a_failure_ends_the_others_at_once() -> None:
    """F1."""
    start = time.monotonic()
    with pytest.raises(ConfigError, match="rank 0 of 2: rank 0 gave up"):
        run_ranks(_fails_beside_a_sleeper, 2)
    assert time.monotonic() - start < 15
    assert run_ranks(_sum, 2, 0)[1][0] == 1  # not the sleeper's late answer


def _many_groups(count: int) -> int:
    for _ in range(count):
        _KEPT.append(dist.new_group([0, 1]))
    return os.getpid()


_KEPT: list[object] = []


def test_a_process_full_of_idle_threads_is_replaced() -> None:
    """Groups that something keeps alive do not add up over a test run."""
    first = run_ranks(_many_groups, 2, 1)
    assert run_ranks(_many_groups, 2, 40) == first
    assert set(run_ranks(_many_groups, 2, 1)).isdisjoint(first)


def _paths(where: str) -> str:
    return where


def test_ranks_that_do_not_meet_are_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a stalled rendezvous costs a warning, a second one the run, with every rank's stack."""
    ask = pool.Pool._ask
    asked: list[int] = []

    def ask_one_fewer(
        self: pool.Pool, workers: list[pool._Worker], call: tuple[object, ...]
    ) -> None:
        asked.append(len(workers))
        ask(self, workers[: len(workers) - (len(asked) in absent)], call)

    monkeypatch.setattr(pool.Pool, "_ask", ask_one_fewer)
    monkeypatch.setattr(pool, "_MEET_S", 3.0)
    absent = {1}
    with pytest.warns(UserWarning, match="new ranks are started: .* did not meet within 3 s"):
        assert run_ranks(_paths, 2, "here") == ["here", "here"]
    asked.clear()
    absent = {1, 2}
    with (
        pytest.warns(UserWarning, match="did not meet"),
        pytest.raises(TimeoutError, match=r"(?s)did not meet within 3 s.*init_process_group"),
    ):
        run_ranks(_paths, 2, "here")
    assert asked == [2, 2]


class _LosesPeers:
    """An argument whose arrival fails as a connection does, for as many arrivals as are wanted."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def __reduce__(self) -> tuple[object, tuple[Path, int]]:
        return _arrive, (self.folder, self.times)


def _arrive(folder: Path, times: int) -> str:
    (folder / f"{len(list(folder.iterdir()))}-{os.getpid()}").touch()
    if len(list(folder.iterdir())) <= times:
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:3287")
    return "here"


def _loses_peers(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:3287")


def test_ranks_that_lose_each_other_before_the_call_are_started_anew(tmp_path: Path) -> None:
    """F1: and never after the function began on one of them."""
    with pytest.warns(UserWarning, match="new ranks are started: .*Connection closed by peer"):
        assert run_ranks(_paths, 1, _LosesPeers(tmp_path, 1)) == ["here"]
    (tmp_path / "begun").mkdir()
    with pytest.raises(RuntimeError, match=r"rank 0 of 1: .*Connection closed by peer"):
        run_ranks(_loses_peers, 1, tmp_path / "begun")
    assert len(list((tmp_path / "begun").iterdir())) == 1
    (tmp_path / "always").mkdir()
    with (
        pytest.warns(UserWarning, match="new ranks are started"),
        pytest.raises(RuntimeError, match=r"rank 0 of 1: .*Connection closed by peer"),
    ):
        run_ranks(_paths, 1, _LosesPeers(tmp_path / "always", 9))
    assert len(list((tmp_path / "always").iterdir())) == 2
