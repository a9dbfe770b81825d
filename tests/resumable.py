"""Small runs that stop and go on, and data that they can learn; shared by the tests of runs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import tiny_hubs
import torch

from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.loop import Run, finetune
from moe_tp.train.settings import from_mapping

MIXTRAL: dict[str, Any] = {
    **tiny_hubs.MIXTRAL,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
}
DEEPSEEK = tiny_hubs.DEEPSEEK
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK}


def learnable(generator: np.random.Generator, count: int) -> list[str]:
    """JSON lines of ids, each going up by a step of its own, which a small model can learn."""
    lines = []
    for _ in range(count):
        start, step = generator.integers(0, 61), generator.integers(1, 4)
        ids = (start + step * np.arange(generator.integers(3, 30))) % 61
        lines.append(json.dumps({"input_ids": ids.tolist()}))
    return lines


def write_inputs(root: Path) -> None:
    """Write random models, and data that they can learn."""
    for name, hub in MODELS.items():
        model = build(ModelConfig.from_hub(hub), Mesh.single(), seed=1)
        save_pretrained(model, root / name)
        (root / name / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    (root / "train.jsonl").write_text("\n".join(learnable(np.random.default_rng(0), 40)))


def settings(root: Path, output: str, model: str = "mixtral", **train: Any) -> dict[str, Any]:
    return {
        "model": str(root / model),
        "output": str(root / output),
        "seed": 5,
        "data": {"train": str(root / "train.jsonl"), "seq_len": 24},
        "runtime": {"master_dtype": "float64"},
        "train": {
            "steps": 6,
            "micro_batch": 2,
            "global_batch": 8,
            "lr": 1e-2,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "residual_dropout": 0.1,
            "save_every": 3,
            **train,
        },
    }


def make_run(tree: dict[str, Any]) -> tuple[FinetuneConfig, Mesh]:
    config = from_mapping(FinetuneConfig, tree, "test")
    split = torch.distributed.is_initialized()
    return config, Mesh(config.parallel, config.runtime) if split else Mesh.single(config.runtime)


def run(tree: dict[str, Any], resume: bool = False) -> dict[str, Any]:
    return finetune(*make_run(tree), quiet=True, resume=resume)


def curve(output: Path) -> list[tuple[int, float, float, float, int]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "lr", "total_tokens")
    return [tuple(line[name] for name in names) for line in lines]


def stop_after(
    tree: dict[str, Any], steps: int, signals: tuple[int, ...] = (signal.SIGTERM,)
) -> dict[str, Any]:
    """A run that gets signals while it does a step."""
    training = Run(*make_run(tree), quiet=True)
    step = training.train_step

    def train_step() -> tuple[dict[str, Any], dict[str, Any]]:
        if (
            training.step == steps - 1
            and training.mesh.rank == training.mesh.group("world").size - 1
        ):
            for number in signals:
                os.kill(os.getpid(), number)
        return step()

    training.train_step = train_step  # type: ignore[method-assign]
    return training.go()
