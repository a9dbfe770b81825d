"""Signals that come before a run can save: while Python, the model or the data is still loading."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_hubs import SMALLEST
from tokenizers import Tokenizer, models

from moe_tp import Mesh
from moe_tp.cli import main as cli
from moe_tp.models import ModelConfig, build, save_pretrained

SAID = "moe-tp: stopped by a signal\n"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_while_a_command_is_imported(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """F1: one sentence, where the default is a traceback for Ctrl-C and no word for SIGTERM."""

    def slow_import(name: str) -> Any:
        os.kill(os.getpid(), how)
        time.sleep(10.0)  # another thread may be given the signal, and tells this one
        raise AssertionError(f"{name} is imported in spite of the signal")

    monkeypatch.setattr(sys, "argv", ["moe-tp", "finetune", "run.yaml"])
    monkeypatch.setattr(cli.importlib, "import_module", slow_import)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing here may end pytest
    try:
        with pytest.raises(BaseException) as left:  # noqa: PT011 - KeyboardInterrupt is none too
            cli.entry()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(left.value, SystemExit)
    assert (left.value.code, capfd.readouterr().err) == (130, SAID)


STUCK = """
import ctypes, os, signal, time
from moe_tp.cli.leaving import leave_at_sigterm
leave_at_sigterm("moe-tp: rank 1: stopped")
ours = signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
signal.signal(signal.SIGTERM, ours)
print("stuck", flush=True)
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_rank_inside_a_collective_leaves_too() -> None:
    """F1: main threads in C code run no handler; one that a run sets meanwhile is left alone."""
    rank = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    try:
        assert [rank.stdout.readline() for _ in range(2)] == ["saved\n", "stuck\n"]
        rank.terminate()
        _, said = rank.communicate(timeout=5)
    finally:
        rank.kill()
    assert (rank.returncode, said) == (130, "moe-tp: rank 1: stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("loading", [False, True])
def test_ranks_of_torchrun(tmp_path: Path, how: signal.Signals, loading: bool) -> None:
    """F1: while they import, or one reads data and one waits for it: a sentence each, no hang."""
    template = write_run(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "moe_tp"]
    run = subprocess.Popen(
        [*torchrun, "finetune", "run.yaml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        while not all(map(_catches, ranks := _children(run.pid))) or len(ranks) < 2:
            time.sleep(0.05)
        with template.open("w") if loading else contextlib.nullcontext():
            os.killpg(run.pid, how)
            _, said = run.communicate(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode != 0
    ours = sorted(line for line in said.splitlines() if line.startswith("moe-tp"))
    assert ours == [f"moe-tp: rank {rank}: stopped by a signal" for rank in range(2)]
    assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in ranks)


@pytest.mark.parametrize(
    ("nproc", "how"),
    [
        (1, signal.SIGTERM),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(4, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(4, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_while_data_is_read(tmp_path: Path, nproc: int, how: signal.Signals) -> None:
    """F1, K5: the first rank reads, the others wait for it; all leave, and nothing is left that a
    later run would take for done."""
    template = write_run(tmp_path)
    run = subprocess.Popen(
        [sys.executable, "-m", "moe_tp", "finetune", "run.yaml", "--nproc", str(nproc)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    with template.open("w"):  # returns when the first rank reads
        ranks = {run.pid, *_children(run.pid)}
        os.killpg(run.pid, how)  # as a terminal and a batch system do
        _, said = run.communicate(timeout=30)
    assert (run.returncode, said) == (130, SAID)
    assert len(ranks) == (1 if nproc == 1 else 1 + nproc)
    assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in ranks)
    assert not list((tmp_path / "out").rglob("counts.json"))
    assert not {"final", "config.yaml"} & {path.name for path in (tmp_path / "out").iterdir()}


def write_run(folder: Path) -> Path:
    """Return the template that a run.yaml of this folder reads: it takes until somebody writes."""
    save_pretrained(build(ModelConfig.from_hub(SMALLEST), Mesh.single()), folder / "model")
    letters = Tokenizer(models.WordLevel({"~": 0}, unk_token="~"))
    letters.save(str(folder / "model" / "tokenizer.json"))
    record = {"messages": [{"role": "assistant", "content": "~"}]}
    (folder / "data.jsonl").write_text(json.dumps(record))
    template = folder / "template"  # a pipe: to read it takes until somebody writes
    os.mkfifo(template)
    settings = {
        "model": "model",
        "output": "out",
        "data": {"train": "data.jsonl", "seq_len": 8, "chat_template": str(template)},
        "train": {"steps": 1, "global_batch": 4},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    return template


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def _children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
