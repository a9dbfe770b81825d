"""The recipes in examples/ are settings that the command takes, and by the plan they fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_tp.models.families import preset
from moe_tp.plan.job import Job, check
from moe_tp.plan.memory import Planner
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.settings import load_config

RECIPES = sorted((Path(__file__).resolve().parents[1] / "examples" / "recipes").glob("*.yaml"))
HEAD = re.compile(r"# .*\((\w+):([\w.-]+)\), .*on (\d+) (?:GPUs|ranks) of (\d+) GB")


def job_of(config: FinetuneConfig) -> Job:
    """Return what the planner is asked."""
    train, runtime = config.train, config.runtime
    return Job(
        mode="full" if config.lora is None else "lora",
        seq_len=config.data.seq_len,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        recompute=runtime.recompute,
        optimizer=train.optimizer,
        lora_rank=16 if config.lora is None else config.lora.rank,
        compute_bytes=2 if runtime.compute_dtype or runtime.master_dtype else 4,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_fits(recipe: Path) -> None:
    """Parsed as `moe-tp finetune` does; accepted for the model; within the memory it names."""
    found = HEAD.match(recipe.read_text().splitlines()[0])
    assert found is not None
    model, gpus, memory = preset(found[1], found[2]), int(found[3]), int(found[4])
    config = load_config(recipe)
    layout = config.parallel.resolve(gpus)
    config.train.accumulation(layout.dp or 1)
    job = job_of(config)
    check(model, layout, job)
    needed = Planner(model, job).peak(layout).total
    assert needed < memory * 1e9, f"{needed / 1e9:.1f} GB"


def test_the_five_are_there() -> None:
    """Issue 6 names them."""
    assert [path.stem for path in RECIPES] == [
        "gpt-oss-20b-lora",
        "laptop",
        "mixtral-8x7b-lora",
        "pretrain-olmoe-1b-7b",
        "qwen3-30b-a3b-full",
    ]
