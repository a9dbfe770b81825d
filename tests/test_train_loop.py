"""The fine-tuning run: the same curve on every layout, its files, and what makes it stop."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from resumable import learnable, make_run
from safetensors.torch import load_file
from tiny_hubs import MIXTRAL

from moe_tp.cli.main import main
from moe_tp.errors import ConfigError, MoeTpError
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks
from moe_tp.train import lock
from moe_tp.train.baseline import unigram_loss
from moe_tp.train.checks import warn_of_final
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.data import read_documents
from moe_tp.train.documents import Document
from moe_tp.train.lock import alone_in
from moe_tp.train.loop import Run, finetune
from moe_tp.train.overrides import set_residual_dropout
from moe_tp.train.probe import check_probe
from moe_tp.train.rows import make_rows
from moe_tp.train.settings import from_mapping
from moe_tp.train.step import count_targets

HUB: dict[str, Any] = {
    **MIXTRAL,
    "hidden_size": 32,
    "intermediate_size": 24,
    "router_aux_loss_coef": 0.01,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral, with a file beside its weights, and data that a model can learn."""
    root = tmp_path_factory.mktemp("train")
    model = build(ModelConfig.from_hub(HUB), Mesh.single(), seed=1)
    save_pretrained(model, root / "model")
    (root / "model" / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    generator = np.random.default_rng(0)
    for name, count in (("train", 40), ("eval", 7)):
        (root / f"{name}.jsonl").write_text("\n".join(learnable(generator, count)))
    return root


def settings(folder: Path, output: str, **train: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "output": str(folder / output),
        "seed": 5,
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "seq_len": 24,
        },
        "train": {
            "steps": 6,
            "micro_batch": 2,
            "global_batch": 8,
            "lr": 1e-2,
            "eps": 1e-6,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "eval_every": 3,
            "load_every": 2,
            "probe_tokens": 16,
            **train,
        },
    }


def run(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The result of a run on the ranks there are, and its curves."""
    config, mesh = make_run(tree)
    result = finetune(config, mesh, quiet=True)
    return result, curves(Path(config.output))


def curves(output: Path) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "lr", "tokens", "load_balance_loss", "eval_loss")
    return {name: [line[name] for line in lines if name in line] for name in names}


@pytest.fixture(scope="module")
def one(folder: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """One process."""
    return run(settings(folder, "one", residual_dropout=0.1))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "ep": 2, "etp": 2},
        {"dp": 4, "ep": 2},
        pytest.param({"tp": 4, "etp": 4}, marks=pytest.mark.slow),
    ],
    ids=["tp2-ep2-etp2", "dp4-ep2", "tp4-etp4"],
)
def test_four_ranks_have_the_curve_of_one_process(
    folder: Path, one: tuple[dict[str, Any], dict[str, list[float]]], layout: dict[str, int]
) -> None:
    """L1, L2, N2, G5: within 1e-3, with dropout, balance loss, packing and accumulation."""
    tree = settings(folder, "-".join(layout), residual_dropout=0.1)
    tree["parallel"] = layout
    if layout.get("dp") == 4:
        tree["train"]["micro_batch"] = 1  # the unions of 4 ranks are those of micro_batch 4
    (result, curve), *others = run_ranks(run, 4, tree)
    _, expected = one
    if layout.get("dp") == 4:
        _, expected = run(settings(folder, "one-4", residual_dropout=0.1, micro_batch=4))
    elif "tp" in layout and layout["tp"] == 2:
        _, expected = run(settings(folder, "one-2", residual_dropout=0.1, micro_batch=4))
    assert expected["tokens"] == curve["tokens"]
    assert expected["lr"] == curve["lr"]
    for name in ("loss", "grad_norm", "load_balance_loss", "eval_loss"):
        assert np.allclose(expected[name], curve[name], rtol=0, atol=1e-3), name
    assert all(other[0]["eval_loss"] == result["eval_loss"] for other in others)


def held_out_loss(folder: Path, model_folder: Path) -> float:
    """Of each held-out row by itself, added up by hand."""
    model = from_pretrained(model_folder, Mesh.single()).eval()
    config = from_mapping(FinetuneConfig, settings(folder, "none"), "test").data
    rows = make_rows(read_documents(config, config.eval, str(folder), 61), config.seq_len)
    total = targets = 0.0
    for n in range(len(rows)):
        batch = rows.batch([n])
        count = count_targets([batch], model.mesh)
        with torch.no_grad():
            total += float(model(**batch).loss) * count
        targets += count
    return total / targets


def test_two_runs_do_not_share_an_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: their metrics and checkpoints would mix, and both end with exit code 0."""
    monkeypatch.setattr(lock, "PATIENCE", 0.3)
    mesh, output = Mesh.single(), folder / "shared"
    config = from_mapping(FinetuneConfig, settings(folder, "shared", steps=1), "test")
    with alone_in(output, mesh), pytest.raises(ConfigError, match="another run writes there now"):
        finetune(config, mesh, quiet=True)
    assert list(output.iterdir()) == []
    assert finetune(config, mesh, quiet=True)["steps"] == 1
    with alone_in(output, mesh):
        pass  # the run has given it back


def test_the_run_learns_and_writes_its_folder(
    folder: Path, one: tuple[dict[str, Any], dict[str, list[float]]]
) -> None:
    result, curve = one
    output = folder / "one"
    assert curve["step"] == [1, 2, 3, 4, 5, 6]
    assert len(curve["eval_loss"]) == 2
    assert curve["loss"][-1] < curve["loss"][0]
    assert result["eval_loss"] == curve["eval_loss"][-1]
    line = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("tokens_per_second", "max_load_ratio", "eval_perplexity", "memory_gib"):
        assert line[name] > 0
    assert math.isclose(line["eval_perplexity"], math.exp(line["eval_loss"]))
    assert math.isclose(held_out_loss(folder, output / "final"), line["eval_loss"], rel_tol=1e-5)
    load = [json.loads(line) for line in (output / "load.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in load] == [1, 2, 4, 6]
    assert load[0]["layers"] == [0, 1]
    assert len(load[0]["counts"][0]) == 6
    assert (output / "report.html").is_file()
    assert (output / "config.yaml").is_file()


def test_final_is_a_whole_hub_folder(
    folder: Path, one: tuple[dict[str, Any], dict[str, list[float]]]
) -> None:
    """K1: dtype, tokenizer files and config as the model's; weights are those that were trained."""
    final, source = folder / "one" / "final", folder / "model"
    before, after = (load_file(f / "model.safetensors") for f in (source, final))
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {
        n: (t.dtype, t.shape) for n, t in after.items()
    }
    assert all(not torch.equal(before[n], after[n]) for n in before)
    assert (final / "tokenizer_config.json").read_text() == '{"eos_token": "x"}'
    config = json.loads((final / "config.json").read_text())
    assert not config.get("residual_dropout")
    assert config["num_local_experts"] == 6
    found = check_probe(final, folder / "one" / "probe.safetensors")
    assert found.relative_error < 1e-6
    assert found.same_best == 1.0


def test_a_probe_of_four_ranks_agrees_with_one_process(folder: Path) -> None:
    """K1: and a changed weight is seen."""
    tree = settings(folder, "probe", steps=2)
    tree["parallel"] = {"tp": 2, "ep": 2, "etp": 2}
    run_ranks(run, 4, tree)
    final = folder / "probe" / "final"
    assert check_probe(final, folder / "probe" / "probe.safetensors").relative_error < 1e-5
    assert check_probe(folder / "model", folder / "probe" / "probe.safetensors").relative_error > (
        1e-2
    )


def local_copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: to_local(param).detach().clone() for name, param in model.named_parameters()}


def test_a_step_that_is_not_finite_changes_nothing(folder: Path) -> None:
    """F1: the step is left out and counted; after max_bad_steps in a row the run stops."""
    tree = settings(folder, "bad", max_bad_steps=3, eval_every=0, steps=9)
    config = from_mapping(FinetuneConfig, tree, "test")
    training = Run(config, Mesh.single(), quiet=True)
    training.train_step()
    norm = training.model.norm
    assert norm is not None
    with torch.no_grad():
        weight = norm.local("weight").clone()
        norm.local("weight").fill_(math.nan)
    before = local_copies(training.model)
    line, _ = training.train_step()
    assert line["skipped"] is True
    assert "rank 0: gradient of" in line["where"]
    assert line["skipped_steps"] == 1
    for name, value in local_copies(training.model).items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name
    with torch.no_grad():
        norm.local("weight").copy_(weight)
    line, _ = training.train_step()
    assert "skipped" not in line
    with torch.no_grad():
        norm.local("weight").fill_(math.nan)
    with pytest.raises(MoeTpError, match=r"the last 3 steps .* lower train\.lr"):
        training.go()


def test_what_cannot_work_is_refused_first(folder: Path) -> None:
    """F3."""
    with pytest.raises(ConfigError, match="choose a multiple of 5"):
        run(settings(folder, "none", micro_batch=5))
    assert not (folder / "none").exists()


def test_the_command_trains(folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings(folder, "command")))
    assert main(["finetune", str(path), "train.steps=1", "train.lr=1e-3"]) == 0
    assert curves(folder / "command")["step"] == [1]
    assert "lr: 0.001" in (folder / "command" / "config.yaml").read_text()


def test_warnings_are_seen(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What does not do what it seems to is told on stderr, once a run; stdout stays as it was."""
    path = folder / "warned.yaml"
    tree = settings(folder, "warned", steps=2, warmup_steps=9, decay_steps=3, eval_every=1)
    tree["train"]["rebalance_every"] = 1
    del tree["data"]["eval"]
    path.write_text(yaml.safe_dump(tree))
    expected = [
        "moe-tp: warning: train.warmup_steps=9 is not below the 2 steps of the run",
        "moe-tp: warning: train.eval_every=1 evaluates nothing without data.eval",
        "moe-tp: warning: train.decay_steps=3 is of schedule wsd and does nothing with",
        "moe-tp: warning: train.rebalance_every=1 moves no experts with ep=1, where one rank",
    ]
    assert main(["finetune", str(path), "--nproc", "2"]) == 0
    out, err = capfd.readouterr()
    assert all(err.count(line) == 1 for line in expected)
    assert "warning" not in out
    words = ["train.warmup_steps=0", "train.decay_steps=none", "train.eval_every=0"]
    words.append("train.rebalance_every=0")
    assert main(["finetune", str(path), "--resume", *words]) == 0
    err = capfd.readouterr().err
    assert "--resume: no checkpoint in" in err
    assert "final is of an earlier run, and this one replaces it" in err
    assert not any(line in err for line in expected)


def test_a_full_disk_is_told_before_the_run(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """K5: while there is time to make room; by the size of what is written."""
    usage = shutil.disk_usage(tmp_path)
    for free, dtype, said in ((47, None, True), (48, None, False), (95, torch.float32, True)):
        caplog.clear()
        monkeypatch.setattr(shutil, "disk_usage", lambda _, f=free: usage._replace(free=f))
        warn_of_final(tmp_path / "final", {"a": (2, 3, 3), "b": (6,)}, dtype)
        size = "47 B free, and the weights in final/ take 48 B" if dtype is None else "95 B free"
        assert (size in caplog.text) == said


def test_an_output_that_is_a_file(folder: Path) -> None:
    """F3."""
    (folder / "a-file").write_text("x")
    with pytest.raises(MoeTpError, match="cannot be made a folder: File exists"):
        run(settings(folder, "a-file"))


def test_an_output_that_cannot_be_written_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: as on a read-only mount; asked of the system, since root may write where modes say no."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(MoeTpError, match="is a folder that cannot be written to; choose another"):
        run(settings(folder, str(tmp_path)))


def test_epochs_become_steps(folder: Path) -> None:
    tree = settings(folder, "epochs", epochs=1.5)
    del tree["train"]["steps"]
    config = from_mapping(FinetuneConfig, tree, "test")
    training = Run(config, Mesh.single(), quiet=True)
    assert training.steps == math.ceil(1.5 * len(training.rows) / 8)


def test_residual_dropout_is_for_training_only(folder: Path) -> None:
    """N2: reachable from the settings, and not exported."""
    model = from_pretrained(folder / "model", Mesh.single())
    set_residual_dropout(model, 0.5)
    ids = torch.arange(12).view(1, 12)
    model.train()
    first, second = (float(model(ids, ids, step=s).loss) for s in (0, 1))
    model.eval()
    assert first != second
    assert float(model(ids, ids, step=0).loss) == float(model(ids, ids, step=1).loss)


def test_the_unigram_model_counts_targets() -> None:
    train = make_rows([Document(ids=[3, 1, 1, 2], labels=[3, 1, 1, 2], splits=True)], 3)
    held_out = make_rows([Document(ids=[3, 1, 2], labels=[3, 1, 2], splits=True)], 3)
    best = min(
        -math.log((2 + e) / (3 + 4 * e)) / 2 - math.log((1 + e) / (3 + 4 * e)) / 2
        for e in (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
    )
    assert math.isclose(unigram_loss(train, held_out, 4), best, rel_tol=1e-12)
