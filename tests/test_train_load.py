"""Each layer's load, drops and entropy in the metrics of a run, equal in every layout; trackers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_hubs import MIXTRAL

from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.loop import finetune
from moe_tp.train.settings import from_mapping
from moe_tp.train.trackers import open_trackers

HUB = MIXTRAL


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("load")
    save_pretrained(build(ModelConfig.from_hub(HUB), Mesh.single(), seed=1), root / "model")
    lines = [json.dumps({"input_ids": [(7 * n + 3 * i) % 61 for i in range(24)]}) for n in range(9)]
    (root / "train.jsonl").write_text("\n".join(lines))
    return root


def run(root: Path, output: str, settings: dict[str, Any], **train: Any) -> list[dict[str, Any]]:
    tree: dict[str, Any] = {
        "model": str(root / "model"),
        "output": str(root / output),
        "data": {"train": str(root / "train.jsonl"), "seq_len": 24},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "lr": 1e-2, **train},
        **settings,
    }
    config = from_mapping(FinetuneConfig, tree, "test")
    split = torch.distributed.is_initialized()
    mesh = Mesh(config.parallel, config.runtime) if split else Mesh.single(config.runtime)
    finetune(config, mesh, quiet=True)
    text = (root / output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(entry) for entry in text]


LAYERS = ("layer_max_load_ratio", "layer_dead_experts", "layer_dropped_share")


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel": {"tp": 2, "ep": 2}, "runtime": {"recompute": "full"}},
        {"parallel": {"pp": 2}},
    ],
    ids=["tp2-ep2-recompute", "pp2"],
)
def test_the_figures_of_each_layer_do_not_depend_on_the_layout(
    root: Path, settings: dict[str, Any]
) -> None:
    """L3, F2: counted once under recompute and pipelining; rows and bytes balance over ranks."""
    expected = run(root, "one", {})
    output = "-".join(settings["parallel"])
    run_ranks(run, 2, root, output, settings)
    text = (root / output / "metrics.jsonl").read_text().splitlines()
    for mine, line in zip(expected, map(json.loads, text), strict=True):
        assert [mine[name] for name in LAYERS] == [line[name] for name in LAYERS]
        names = ("layer_router_entropy", "router_entropy", "max_load_ratio", "load_entropy")
        for name in names:
            assert np.allclose(mine[name], line[name], rtol=0, atol=1e-4), name
        assert 0.5 < mine["router_entropy"] <= 1.0
        assert mine["dropped_share"] == line["dropped_share"] == 0.0
        assert len(line["wire_rows_sent"]) == (1 if "pp" in settings["parallel"] else 2)
        sent = settings["parallel"].get("ep") == 2
        assert (sum(line["wire_bytes_sent"]) > 0) == sent
        assert sum(line["wire_rows_sent"]) == sum(line["wire_rows_received"])
        assert sum(line["wire_bytes_sent"]) == sum(line["wire_bytes_received"])


class Fake(types.ModuleType):
    """The three calls of wandb and trackio."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> None:
        self.calls.append(("init", settings))

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_each_step(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started with the settings, a call a step with flat numbers, finished."""
    fake = Fake(name)
    monkeypatch.setitem(sys.modules, name, fake)
    lines = run(root, name, {}, trackers=[name], project="p")
    kinds = [kind for kind, _ in fake.calls]
    assert kinds == ["init", "log", "log", "finish"]
    assert (fake.calls[0][1]["project"], fake.calls[0][1]["name"]) == ("p", name)
    assert fake.calls[0][1]["config"]["train"]["lr"] == 1e-2
    step, values = fake.calls[2][1]
    assert step == 2
    assert values["loss"] == lines[1]["loss"]
    assert values["max_load_ratio/layer_1"] == lines[1]["layer_max_load_ratio"][1]
    assert values["wire_bytes_sent/rank_0"] == 0.0


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_know_a_run_again(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B by its id (its `resume` does nothing without one), trackio by its name."""
    fake = Fake(name)
    monkeypatch.setitem(sys.modules, name, fake)
    for step in (0, 2, 0):
        open_trackers([name], tmp_path / "run", project="p", settings={}, step=step)
    calls = [settings for _, settings in fake.calls]
    assert [call["resume"] for call in calls] == ["never", "allow", "never"]
    if name == "wandb":
        assert calls[0]["id"] == calls[1]["id"] != calls[2]["id"]
    else:
        assert all("id" not in call for call in calls)


def test_tensorboard_gets_each_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's contract, against a fake: scalars by name and step, closed; a resume purges."""
    made: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            self.folder, self.purge, self.closed = folder, purge_step, False
            self.scalars: dict[tuple[str, int], float] = {}
            made.append(self)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name, step] = value

        def close(self) -> None:
            self.closed = True

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    lines = run(root, "board", {}, trackers=["tensorboard"])
    (writer,) = made
    assert writer.folder == str(root / "board" / "tensorboard")
    assert writer.purge is None
    assert writer.closed
    assert writer.scalars["loss", 2] == lines[1]["loss"]
    assert writer.scalars["router_entropy/layer_0", 1] == lines[0]["layer_router_entropy"][0]
    open_trackers(["tensorboard"], root, project="p", settings={}, step=7)
    assert made[1].purge == 8


def test_a_missing_package_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: before the first step, with the extra to install."""
    for module, name in (("wandb", "wandb"), ("torch.utils.tensorboard", "tensorboard")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"asks for {name}.*moe-tp\[{name}\]"):
            open_trackers([name], root, project="p", settings={})
