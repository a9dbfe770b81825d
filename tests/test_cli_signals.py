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

import pytest
import torch
from tiny_hubs import SMALLEST
from tokenizers import Tokenizer, models

from moe_tp import Mesh
from moe_tp.cli import start
from moe_tp.cli.environment import Place
from moe_tp.cli.main import main
from moe_tp.cli.ranks import _FIRST, _record
from moe_tp.errors import RankFailedError
from moe_tp.models import ModelConfig, build, save_pretrained

SAID = "moe-tp: stopped by a signal\n"


SIGNALLED = """
import os, signal, sys, time
class Finder:
    def find_spec(name, path=None, target=None):
        if name == os.environ["IMPORTED"] and "moe_tp.cli" in sys.modules:
            try:
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
                time.sleep(10)
            except BaseException:
                pass  # as numpy's first import does
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("imported", ["moe_tp.cli.main", "argparse", "torch", "numpy"])
def test_while_a_command_is_imported(tmp_path: Path, imported: str, how: signal.Signals) -> None:
    """F1: one sentence, where the default is a traceback for Ctrl-C and no word for SIGTERM."""
    (tmp_path / "sitecustomize.py").write_text(SIGNALLED)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-m", "moe_tp", "finetune", "none.yaml"],
        env={**os.environ, "PYTHONPATH": path, "IMPORTED": imported, "SIGNAL": str(int(how))},
        stderr=subprocess.PIPE,
        timeout=60,
        text=True,
    )
    assert (run.returncode, run.stderr) == (130, SAID)


def test_once_it_is_loaded_a_signal_is_raised(tmp_path: Path) -> None:
    """F1: so that what is half written is put away; what somebody else has set is left alone."""
    kept = signal.signal(signal.SIGINT, start._leave), signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["inspect", str(tmp_path)]) == 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, kept[0])
        signal.signal(signal.SIGTERM, kept[1])


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


CLOSED = "[pair.cc] Connection closed by peer [127.0.0.1]:4. This is typically caused by a remote"


@pytest.mark.parametrize(
    ("first", "own", "said"),
    [
        ("", RuntimeError(CLOSED), "another rank ended without a word, killed or by a signal"),
        ("0 stopped by a signal", RuntimeError(CLOSED), "rank 0 failed first: stopped by a signal"),
        ("0 KeyError: 'a'", KeyError("b"), "rank 0 failed first: KeyError: 'a'"),
        ("", RuntimeError("NCCL error: invalid usage"), None),  # nothing says why but itself
        ("", BrokenPipeError("Broken pipe"), None),  # whoever reads stdout has gone
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_what_a_rank_says_of_another(
    first: str, own: Exception, said: str | None, stored: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """F1: a sentence in place of gloo's; also where the store has gone with its rank."""
    store = torch.distributed.HashStore() if stored else None
    if store is not None and first:
        store.set(_FIRST, first)
    if first and not stored:
        said = "another rank ended without a word" if CLOSED in str(own) else None
    place = Place(rank=1, world_size=3, local_rank=1, local_world_size=3)
    with pytest.raises(RankFailedError, match=said) if said else contextlib.nullcontext():
        _record(own, place, store)
    if store is not None:  # the loss of a peer is no first cause, which may come later
        later = store.compare_set(_FIRST, "", "2 later").decode()
        assert later == (first or ("2 later" if said else f"1 {type(own).__name__}: {own}"))


@pytest.mark.slow
def test_ctrl_c_for_one_rank_of_torchrun(tmp_path: Path) -> None:
    """F1: the other, inside a collective, says which rank it was."""
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
        with template.open("w"):  # returns when the first rank reads
            first = next(p for p in _children(run.pid) if b"\0RANK=0\0" in _environment(p))
            os.kill(first, signal.SIGINT)
            _, said = run.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    ours = sorted(line for line in said.splitlines() if line.startswith("moe-tp"))
    assert ours == [
        "moe-tp: rank 0: stopped by a signal",
        "moe-tp: rank 1: error: stopped because rank 0 failed first: stopped by a signal",
    ]


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


def _environment(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def _children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
