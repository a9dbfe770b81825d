"""Checkpoints of a run: written beside it, kept by age and by loss, whole whenever it is killed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from resumable import learnable, make_run
from tiny_hubs import DEEPSEEK

from moe_tp.checkpoint.state import save_state
from moe_tp.checkpoint.states import (
    facts_of,
    keep_states,
    list_states,
    newest_state,
    open_state,
    state_folder,
)
from moe_tp.errors import CheckpointError
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_crash
from moe_tp.train import resume
from moe_tp.train.loop import Run, finetune

HUB = DEEPSEEK
EVERY = 2  # steps between checkpoints


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a moving bias, and data that it can learn."""
    root = tmp_path_factory.mktemp("resume")
    save_pretrained(build(ModelConfig.from_hub(HUB), Mesh.single(), seed=1), root / "model")
    lines = learnable(np.random.default_rng(0), 40)
    (root / "train.jsonl").write_text("\n".join(lines))
    (root / "eval.jsonl").write_text("\n".join(lines[:4]))
    return root


def settings(root: Path, output: str, **train: Any) -> dict[str, Any]:
    return {
        "model": str(root / "model"),
        "output": str(root / output),
        "data": {"train": str(root / "train.jsonl"), "seq_len": 24},
        "runtime": {"master_dtype": "float64"},
        "train": {"steps": 4, "micro_batch": 2, "global_batch": 8, "lr": 1e-2, **train},
    }


def losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_training_goes_on_while_a_checkpoint_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K4, K5: the first save ends after the next step has, and holds the state of its own step."""
    finetune(*make_run(settings(root, "at-once", save_every=3, async_save=False)), quiet=True)
    training = Run(*make_run(settings(root, "beside", save_every=3)), quiet=True)
    write, seen = resume.write_state, []

    def write_late(*args: Any, **more: Any) -> Any:
        deadline = time.monotonic() + 30
        while training.step < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(training.step)
        return write(*args, **more)

    monkeypatch.setattr(resume, "write_state", write_late)
    training.go()
    assert seen == [4]
    for name in ("model.safetensors", "model.safetensors.index.json"):
        files = [state_folder(root / output, 3) / name for output in ("beside", "at-once")]
        assert [f.exists() for f in files] in ([True] * 2, [False] * 2)
        if files[0].exists():
            assert files[0].read_bytes() == files[1].read_bytes()


def test_a_save_that_fails_stops_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K5: no later than at the next save, with the cause."""

    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(resume, "write_state", fail)
    training = Run(*make_run(settings(root, "full", save_every=1)), quiet=True)
    with pytest.raises(CheckpointError, match="the disk is full"):
        training.go()
    assert training.step == 2
    assert list_states(root / "full") == []


def test_the_best_and_the_newest_stay(root: Path, tmp_path: Path) -> None:
    """K5: by held-out loss; neither a step that was not evaluated nor a NaN is best."""
    model = build(ModelConfig.from_hub(HUB), Mesh.single(), seed=1)
    optimizer = torch.optim.SGD(model.parameters())
    for step, loss in enumerate([2.0, 1.0, 3.0, math.nan, None, 4.0], start=1):
        save_state(model, optimizer, state_folder(tmp_path, step), {"eval_loss": loss})
    assert resume.best_states(tmp_path, 2) == [state_folder(tmp_path, n) for n in (2, 1)]
    assert resume.best_states(tmp_path, 0) == []
    keep_states(tmp_path, 2, resume.best_states(tmp_path, 1))
    assert list_states(tmp_path) == [state_folder(tmp_path, n) for n in (6, 5, 2)]
    tree = settings(root, "best", save_every=1, eval_every=2, keep=1)
    tree["data"]["eval"] = str(root / "eval.jsonl")
    result = finetune(*make_run(tree), quiet=True)
    kept = {p.name: facts_of(p)["eval_loss"] for p in list_states(root / "best")}
    assert kept == {"checkpoint-4": result["eval_loss"]}


def test_a_step_left_out_moves_no_bias(root: Path) -> None:
    """F1, L4: neither the correction bias nor its count of steps, and its load is forgotten."""
    training = Run(*make_run(settings(root, "left-out")), quiet=True)
    training.train_step()
    model = training.model
    before = {n: to_local(p).clone() for n, p in model.named_parameters() if "correction" in n}
    assert before
    (steps,) = [b for n, b in model.named_buffers() if n.endswith("bias_steps")]
    (load,) = [b for n, b in model.named_buffers() if n.endswith("step_counts_E")]
    norm = model.norm
    assert norm is not None
    with torch.no_grad():
        weight = norm.local("weight").clone()
        norm.local("weight").fill_(math.nan)
    line, _ = training.train_step()
    assert line["skipped"] is True
    assert int(steps) == 1
    assert int(load.sum()) == 0
    for name, value in before.items():
        assert torch.equal(to_local(model.get_parameter(name)), value)
    with torch.no_grad():
        norm.local("weight").copy_(weight)
    training.train_step()
    assert int(steps) == 2


def killed(tree: dict[str, Any], seconds: float, how: int, victims: tuple[int, ...]) -> int:
    """The steps of a run that goes on from its folder, and of which ranks are sent a signal."""
    config, mesh = make_run(tree)
    training = Run(config, mesh, quiet=True)
    checkpoint = resume.find_checkpoint(config, mesh, resume=True)
    if checkpoint is not None:
        training.restore(checkpoint)

    def strike() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), how)

    if mesh.rank in victims:
        threading.Thread(target=strike, daemon=True).start()
    training.go()
    return training.step


KILLS = [(signal.SIGKILL, (1,)), (signal.SIGKILL, (0, 1)), (signal.SIGTERM, (0,))]
LAYOUTS = [{"tp": 2}, {"dp": 2, "ep": 2, "zero": 1}]


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_goes_on(root: Path, moments: int) -> None:
    """K4, K5: one rank, all of them, or asked to leave; no torn checkpoint is loaded, and the
    losses are those of a run that never stopped (fp64, 1e-9), in changing layouts."""
    generator = random.Random(moments)
    steps = 30 if moments < 10 else 200
    tree = settings(root, f"killed-{moments}", save_every=EVERY, steps=steps)
    output = Path(tree["output"])
    for n in range(moments):
        how, victims = KILLS[n % 3]
        layout = {**tree, "parallel": LAYOUTS[n % 2]}
        wait = generator.uniform(0.0, 0.6)
        report = run_crash(killed, 2, layout, wait, how, victims, timeout=120)
        assert not any(report.timed_out)
        done = len(losses(output)) if (output / "metrics.jsonl").exists() else 0
        newest = newest_state(output)
        saved = 0 if newest is None else facts_of(newest)["counters"]["step"]
        if how == signal.SIGTERM:
            assert report.exit_codes == [0, 0], report.stderr
            assert report.results == [saved, saved] or done == steps
        elif done < steps:
            assert report.exit_codes[1] == -signal.SIGKILL, report.stderr
        # one save may be under way, and the step before the next one may have ended
        assert saved >= done - 2 * EVERY
        for path in list_states(output):
            if not any(path.glob("*unfinished*")):
                open_state(path).close()
    finetune(*make_run(tree), quiet=True, resume=True)
    whole = settings(root, f"whole-{moments}", steps=steps)
    finetune(*make_run(whole), quiet=True)
    assert np.allclose(losses(output), losses(Path(whole["output"])), rtol=0, atol=1e-9)
    assert [p.name for p in output.iterdir() if p.name.startswith(".")] == []


ELASTIC = """
import os, signal
from moe_tp.cli.start import entry
from moe_tp.train.loop import Run
step = Run.train_step
def train_step(self):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and self.step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)
Run.train_step = train_step
entry()
"""


@pytest.mark.slow
def test_an_elastic_restart_goes_on_from_the_last_checkpoint(root: Path, tmp_path: Path) -> None:
    """K4: torchrun starts killed ranks again, and with --resume they do not begin at 0."""
    script = tmp_path / "run.py"
    script.write_text(ELASTIC)
    tree = settings(root, "elastic", save_every=1, steps=5)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**tree, "parallel": {"tp": 2}}))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(script), "finetune", str(tmp_path / "run.yaml"), "--resume"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stdout
    assert len(losses(Path(tree["output"]))) == 5
    whole = settings(root, "never-stopped", steps=5)
    finetune(*make_run(whole), quiet=True)
    assert np.allclose(
        losses(Path(tree["output"])), losses(Path(whole["output"])), rtol=0, atol=1e-9
    )
