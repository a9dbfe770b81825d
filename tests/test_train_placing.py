"""Runs whose experts move and have replicas: the numbers of a run without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_hubs import DEEPSEEK

from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.parallel.layout import Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train.config import FinetuneConfig, TrainConfig
from moe_tp.train.loop import Run, finetune
from moe_tp.train.placing import Placement
from moe_tp.train.settings import from_mapping


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a moving bias, and data."""
    root = tmp_path_factory.mktemp("placing")
    config = ModelConfig.from_hub({**DEEPSEEK, "n_routed_experts": 8})
    save_pretrained(build(config, Mesh.single(), seed=1), root / "model")
    ids = np.random.default_rng(0).integers(0, 61, (40, 20))
    (root / "train.jsonl").write_text(
        "\n".join(
            json.dumps({"input_ids": row[: 3 + i % 17].tolist()}) for i, row in enumerate(ids)
        )
    )
    return root


def settings(root: Path, output: str, spare: int, **more: Any) -> dict[str, Any]:
    return {
        "model": str(root / "model"),
        "output": str(root / output),
        "data": {"train": str(root / "train.jsonl"), "seq_len": 24},
        "runtime": {"master_dtype": "float64", "spare_slots": spare},
        "parallel": more,
        "train": {
            "steps": 5, "micro_batch": 2, "global_batch": 8, "lr": 1e-2, "eps": 1e-4,
            "save_every": 3, "rebalance_every": 2, "balance_coef": 0.0,
        },
    }  # fmt: skip


def _run(tree: dict[str, Any], resume: bool) -> list[tuple[int, ...]]:
    config = from_mapping(FinetuneConfig, tree, "test")
    split = torch.distributed.is_initialized()
    mesh = Mesh(config.parallel, config.runtime) if split else Mesh.single(config.runtime)
    seen: list[tuple[int, ...]] = []
    step = Run.train_step

    def watched(self: Run) -> Any:
        seen.append(next(m.table.slots for m in self.model.modules() if hasattr(m, "table")))
        return step(self)

    Run.train_step = watched  # type: ignore[method-assign]
    try:
        finetune(config, mesh, quiet=True, resume=resume)
    finally:
        Run.train_step = step  # type: ignore[method-assign]
    return seen


def _losses(root: Path, output: str) -> list[float]:
    lines = (root / output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_run_with_replicas_is_the_run_without(root: Path) -> None:
    """G5, K1, K4, L4, issue 5: experts move every two steps; resumed it sums in the same order."""
    _run(settings(root, "one", 0), False)
    want = _losses(root, "one")
    tables = run_ranks(_run, 2, settings(root, "two", 1, ep=2), False)[0]
    assert tables[0] == tables[1] != tables[2] == tables[3]  # what each step begins with
    assert len(set(tables[-1])) < len(tables[-1])
    assert _losses(root, "two") == pytest.approx(want, rel=1e-9)
    final = load_file(root / "two" / "final" / "model.safetensors")
    for name, value in load_file(root / "one" / "final" / "model.safetensors").items():
        assert torch.allclose(final[name], value, rtol=1e-6, atol=1e-9), name

    for output, world, spare, layout in (
        ("two", 2, 1, {"ep": 2}), ("other", 4, 0, {"dp": 4, "ep": 2, "zero": 2}),
    ):  # fmt: skip
        if output == "other":
            shutil.copytree(root / "two", root / "other")
        shutil.rmtree(root / output / "checkpoint-5", ignore_errors=True)
        before = _losses(root, "two")
        again = run_ranks(_run, world, settings(root, output, spare, **layout), True)[0]
        got = _losses(root, output)
        if output == "two":
            assert got == before
            assert again == tables[3:]
        assert got == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("every", "ep", "spare", "said"),
    [
        (2, 1, 0, "with ep=1, where one rank holds all of them; leave it out, or choose ep above"),
        (2, 1, 1, "with ep=1"),  # spare slots of one rank would do nothing
        (2, 8, 0, "with ep=8, where each rank holds one of them; leave it out, or choose a lower"),
        (2, 8, 1, None),
        (2, 4, 0, None),
        (0, 1, 0, None),
    ],
)
def test_where_no_expert_can_move(
    every: int, ep: int, spare: int, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """F3: told, since a file of settings serves several layouts."""
    mesh = SimpleNamespace(size=lambda _: ep, runtime=Runtime(spare_slots=spare))
    config = ModelConfig.from_hub({**DEEPSEEK, "n_routed_experts": 8})
    Placement(cast(Any, SimpleNamespace(mesh=mesh, config=config)), every)
    assert (said or "") in caplog.text
    assert bool(said) == ("moves no experts" in caplog.text)


def test_what_cannot_move_is_refused() -> None:
    """F3: moments in blocks of several experts; fewer than no slots."""
    with pytest.raises(ConfigError, match="rebalance_every=2 moves experts"):
        TrainConfig(steps=1, rebalance_every=2, moments="8bit")
    with pytest.raises(ConfigError, match="spare_slots=-1"):
        from_mapping(FinetuneConfig, {"model": "m", "output": "o", "data": {"train": "x"},
                     "train": {"steps": 1}, "runtime": {"spare_slots": -1}}, "test")  # fmt: skip
