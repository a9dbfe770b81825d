"""The code blocks of docs/: settings that are read, commands that are parsed, Python that runs."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from model_cases import hub_config

from moe_tp.cli.main import _parse
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.config import FinetuneConfig, TrainConfig
from moe_tp.train.optim import make_optimizer
from moe_tp.train.settings import from_mapping
from moe_tp.train.step import forward_backward

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCKS = [
    (page.name, kind, text)
    for page in sorted(DOCS.glob("*.md"))
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.M | re.S)
]


def blocks(kind: str) -> list[Any]:
    found = [(name, text) for name, what, text in BLOCKS if what == kind]
    return [pytest.param(text, id=f"{name}-{i}") for i, (name, text) in enumerate(found)]


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    assert {kind for _, kind, _ in BLOCKS} <= {"yaml", "sh", "python"}
    assert min(len(blocks(kind)) for kind in ("yaml", "sh", "python")) >= 2


@pytest.mark.parametrize("text", blocks("yaml"))
def test_settings_are_read(text: str) -> None:
    """Beside what every run names."""
    tree: dict[str, Any] = {"model": "m", "output": "o", "data": {"train": "t"}, "train": {}}
    for name, part in yaml.safe_load(text).items():
        tree[name] = {**tree.get(name, {}), **part}
    tree["train"].setdefault("steps", 1)
    from_mapping(FinetuneConfig, tree, "docs")


@pytest.mark.parametrize("text", blocks("sh"))
def test_commands_are_parsed(text: str) -> None:
    lines = re.findall(r"^moe-tp (.*)$", text, re.M)
    assert lines
    for line in lines:
        assert callable(_parse(shlex.split(line, comments=True)).run)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names that it takes for granted."""
    monkeypatch.chdir(tmp_path)
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single(), seed=1)
    ids = torch.arange(12).view(2, 6)
    batches = [{"input_ids": ids, "labels": ids}]
    forward_backward(model, batches)
    settle_gradients(model)
    names: dict[str, Any] = {
        "model": model,
        "other": copy.deepcopy(model),
        "micro_batches": batches,
        "forward_backward": forward_backward,
        "optimizer": make_optimizer(model, TrainConfig(steps=1)),
    }
    exec(compile(text, "docs", "exec"), names)
