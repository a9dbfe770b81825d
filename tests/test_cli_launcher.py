"""Runs of several ranks that fail (F1): the rest ends in seconds, the first cause is named once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_tp.cli.environment import find_place, first_host
from moe_tp.cli.failures import Failure, first_cause
from moe_tp.cli.launcher import launch
from moe_tp.cli.ranks import _meet
from moe_tp.errors import ConfigError

PROBE = str(Path(__file__).parent / "rank_probe.py")


def _launch(capfd: pytest.CaptureFixture[str], *words: str, nproc: int = 2) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of the probe on local ranks."""
    code = launch(["probe", *words], nproc, debug=False, program=[PROBE])
    out, err = capfd.readouterr()
    return code, out, err


def test_only_the_first_rank_prints(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = _launch(capfd, "well", "--ep", "3", nproc=3)
    assert (code, out, err) == (0, "rank 0 of 3, layout dp3 ep3\n", "")


def test_an_error_of_one_rank_is_the_message_and_the_exit_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """F1: not what the waiting ranks say about their lost connection."""
    start = time.monotonic()
    code, _, err = _launch(capfd, "config", "--on", "1")
    assert code == 2
    assert err == "moe-tp: rank 1: error: tp=3 does not divide heads=4; choose tp=2\n"
    assert time.monotonic() - start < 40


@pytest.mark.slow
def test_a_bug_says_its_type_and_where_to_look(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = _launch(capfd, "bug", "--on", "0")
    assert code == 1
    assert err == "moe-tp: rank 0: error: KeyError: 'lost' (--debug shows where)\n"


def test_a_killed_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """F1."""
    code, _, err = _launch(capfd, "kill", "--on", "1")
    assert code == 1
    assert err.startswith("moe-tp: rank 1: error: died with signal SIGKILL")
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_rank_that_exits_is_named_with_its_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    """F1."""
    code, _, err = _launch(capfd, "exit", "--on", "1")
    assert code == 1
    assert err == "moe-tp: rank 1: error: died with exit code 7; its last words: the last words\n"


def test_ranks_that_hang_are_ended_when_one_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """F1: a rank that waits for nobody does not hold up the end of the run."""
    start = time.monotonic()
    code, _, err = _launch(capfd, "beside-sleepers")
    assert (code, err) == (2, "moe-tp: rank 0: error: rank 0 gave up\n")
    assert time.monotonic() - start < 50  # the sleeper sleeps 60 s


@pytest.mark.slow
def test_a_failed_check_is_no_failure_of_a_rank(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = _launch(capfd, "unequal")
    assert (code, err) == (1, "")
    assert out.startswith("rank 0")


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_the_ranks_end_with_their_launcher(tmp_path: Path, how: signal.Signals) -> None:
    """F1: also where the launcher cannot clean up."""
    code = "from moe_tp.cli.launcher import launch; launch(['probe', 'hang', '--pids', "
    code += f"{str(tmp_path)!r}], 2, debug=False, program=[{PROBE!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    _wait(lambda: len(list(tmp_path.iterdir())) == 2 and all(_pids(tmp_path)), 60)
    launcher.send_signal(how)
    launcher.communicate(timeout=20)
    _wait(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in _pids(tmp_path)), 10)


@pytest.mark.parametrize(
    ("grace", "saved"), [(30.0, 2), pytest.param(0.5, 0, marks=pytest.mark.slow)]
)
def test_ranks_have_time_to_save_after_sigterm(tmp_path: Path, grace: float, saved: int) -> None:
    """F1, K4: a rank that needs two seconds has them, and no more than --grace."""
    code = "import sys; from moe_tp.cli.launcher import launch; sys.exit(launch(['probe', 'save', "
    code += f"'--pids', {str(tmp_path)!r}], 2, debug=False, grace={grace}, program=[{PROBE!r}]))"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    _wait(lambda: len(list(tmp_path.iterdir())) == 2 and all(_pids(tmp_path)), 60)
    launcher.terminate()
    out, _ = launcher.communicate(timeout=20)
    assert len(list(tmp_path.glob("saved-*"))) == saved
    assert (launcher.returncode == 0, out) == (saved == 2, b"saved\n" if saved else b"")


@pytest.mark.parametrize(
    ("signals", "saved"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 2),
        pytest.param((signal.SIGINT,), 2, marks=pytest.mark.slow),
        pytest.param((signal.SIGINT, signal.SIGINT), 0, marks=pytest.mark.slow),
    ],
    ids=["term-term", "int", "int-int"],
)
def test_a_second_signal_and_ctrl_c(
    tmp_path: Path, signals: tuple[signal.Signals, ...], saved: int
) -> None:
    """K4: a second SIGTERM breaks no save; Ctrl-C reaches the ranks too, and the second one ends
    them at once."""
    code = "import sys; from moe_tp.cli.launcher import launch; sys.exit(launch(['probe', 'save', "
    code += f"'--pids', {str(tmp_path)!r}], 2, debug=False, program=[{PROBE!r}]))"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True
    )
    _wait(lambda: len(list(tmp_path.iterdir())) == 2 and all(_pids(tmp_path)), 60)
    for how in signals:
        if how == signal.SIGINT:
            os.killpg(launcher.pid, how)  # as a terminal does
        else:
            launcher.send_signal(how)
        time.sleep(0.5)
    launcher.communicate(timeout=20)
    assert len(list(tmp_path.glob("saved-*"))) == saved
    assert (launcher.returncode == 0) == (saved == 2)
    _wait(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in _pids(tmp_path)), 10)


def test_torchrun_starts_the_ranks_and_hears_the_cause(tmp_path: Path) -> None:
    """F1: every line of moe-tp names the rank that failed first."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", PROBE, "probe"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "well", "--tp", "2"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 2, layout tp2\n"
    done = subprocess.run(
        [*torchrun, "config", "--on", "1"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("moe-tp: ")]
    assert "moe-tp: rank 1: error: tp=3 does not divide heads=4; choose tp=2" in lines
    assert all("tp=3 does not divide" in line for line in lines)


def test_the_first_cause_is_the_earliest_that_is_no_lost_peer() -> None:
    """F1."""
    lost = "[pair.cc] Connection closed by peer [127.0.0.1]:4"
    failures = [
        Failure(rank=0, when=1.0, kind="RuntimeError", message=lost),
        Failure(rank=2, when=3.0, kind="ConfigError", message="later", expected=True),
        Failure(rank=1, when=2.0, kind="RankDied", message="died", expected=True),
    ]
    assert first_cause(failures).rank == 1
    assert first_cause(failures[:1]).rank == 0


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert find_place(1) is None
    slurm = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
    }
    with monkeypatch.context() as patch:
        for name, value in slurm.items():
            patch.setenv(name, value)
        assert find_place(4) is None  # --nproc inside a Slurm job starts local ranks
        place = find_place(1)
        assert place is not None
        assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)
        assert place.local_world_size == 4
        assert os.environ["MASTER_ADDR"] == "gpu03"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="leave --nproc out under torchrun"):
        find_place(4)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK='first'"):
        find_place(1)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9],b", "gpu03"), ("r[1,2]-ib", "r1-ib")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in folder.iterdir()]


def _wait(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_restart_finds_nothing_of_the_ranks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """K4: torchrun keeps its store; addresses and failures of the last attempt lie there."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "RANK": "0"}
    variables |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    seen = []
    for attempt in "001":
        for name, value in (variables | {"TORCHELASTIC_RESTART_COUNT": attempt}).items():
            monkeypatch.setenv(name, value)
        place = find_place(None)
        assert place is not None
        store = _meet(place, timedelta(seconds=10))
        seen.append(store.check(["address"]))
        store.set("address", "of a rank")
    assert seen == [False, True, False]
