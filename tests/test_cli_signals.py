"""Signals that come before a run can save: while Python, the model or the data is still loading."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
    save_pretrained(build(ModelConfig.from_hub(SMALLEST), Mesh.single()), tmp_path / "model")
    letters = Tokenizer(models.WordLevel({"~": 0}, unk_token="~"))
    letters.save(str(tmp_path / "model" / "tokenizer.json"))
    record = {"messages": [{"role": "assistant", "content": "~"}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    template = tmp_path / "template"  # a pipe: to read it takes until somebody writes
    os.mkfifo(template)
    settings = {
        "model": "model",
        "output": "out",
        "data": {"train": "data.jsonl", "seq_len": 8, "chat_template": str(template)},
        "train": {"steps": 1, "global_batch": 4},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
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


def _children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
