"""The README's code blocks run, in order, in one folder; its commands too."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_tp.cli.main import COMMANDS, main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def _make_inputs(folder: Path) -> None:
    """Write what the README takes for granted: what `make demo` leaves."""
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = Path(spec.origin).parent / "data" / "tokenizer.model.v1"
    (folder / "demo-out" / "model").mkdir(parents=True)
    shutil.copy(tokenizer, folder / "demo-out" / "model" / "tokenizer.model")
    lines = [f"Enter messenger {i}, who says: the {i % 7} ships are lost." for i in range(200)]
    for name, part in (("train", lines[:180]), ("held-out", lines[180:])):
        text = folder / "demo-out" / "text" / name / "play.txt"
        text.parent.mkdir(parents=True)
        text.write_text("\n".join(part))


def _run_python(text: str, script: Path) -> None:
    """Run a block as a script; in this process where it starts no others, which is sooner done."""
    if "__main__" not in text:
        exec(compile(text, script.name, "exec"), {"__name__": "block"})
        return
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script.name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"


def test_the_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands by `main`, Python as scripts, YAML written to the file it names."""
    monkeypatch.chdir(tmp_path)
    _make_inputs(tmp_path)
    ran = dict.fromkeys(("console", "python", "yaml", "sh"), 0)
    for kind, text in BLOCKS:
        if kind == "console":
            for line in re.findall(r"^\$ moe-tp (.*)$", text, flags=re.MULTILINE):
                assert main(shlex.split(line, comments=True)) == 0, line
                ran[kind] += 1
        elif text.startswith("cp "):
            subprocess.run(shlex.split(text), check=True)
            ran[kind] += 1
        elif kind == "yaml":
            (name,) = re.findall(r"^# (\S+\.yaml)$", text, flags=re.MULTILINE)
            Path(name).write_text(text)
            ran[kind] += 1
        elif kind == "python":
            _run_python(text, tmp_path / f"block{ran[kind]}.py")
            ran[kind] += 1
    assert ran["console"] >= 5
    assert ran["yaml"] == ran["sh"] == 1
    assert (tmp_path / "run" / "final" / "tokenizer.model").exists()
    assert ran["python"] >= 4


def test_the_two_commands_and_every_subcommand_are_named() -> None:
    for text in ("make demo", "make test", "make gpu-check", *(f"moe-tp {c}" for c in COMMANDS)):
        assert text in README
