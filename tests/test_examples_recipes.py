"""The recipes in examples/ are settings that the command takes, and by the plan they fit."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_tp.cli.main import main
from moe_tp.models.families import preset
from moe_tp.parallel.layout import Runtime
from moe_tp.plan.job import Job, check
from moe_tp.plan.memory import Planner
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.settings import load_config

RECIPES = sorted((Path(__file__).resolve().parents[1] / "examples" / "recipes").glob("*.yaml"))
HEAD = re.compile(r"# .*\((\w+):([\w.-]+)\), .*on (\d+) (?:GPUs|ranks) of (\d+) GB")


PLANNED = {"recompute", "compute_dtype", "master_dtype"}  # what a recipe's runtime section may set


def head_of(recipe: Path) -> tuple[str, str, int, int]:
    """Return family, preset, number of GPUs and GB of each, as the recipe's first line has them."""
    found = HEAD.match(recipe.read_text().splitlines()[0])
    assert found is not None
    return found[1], found[2], int(found[3]), int(found[4])


def job_of(config: FinetuneConfig) -> Job:
    """Return what the planner is asked; a setting that it would not be told of is an error."""
    train, runtime, lora = config.train, config.runtime, config.lora
    plain = asdict(Runtime())
    assert {name for name, value in asdict(runtime).items() if value != plain[name]} <= PLANNED
    assert train.kernel == "auto"  # of which the planner takes foreach, torch's choice on a GPU
    assert lora is None or sorted(lora.targets) == ["attention", "experts"]
    assert lora is None or lora.base is None
    return Job(
        mode="full" if lora is None else "lora",
        seq_len=config.data.seq_len,
        global_batch=train.rows_a_step,
        micro_batch=train.micro_batch,
        recompute=runtime.recompute,
        optimizer=train.optimizer,
        moments=train.moments,
        lora_rank=16 if lora is None else lora.rank,
        compute_bytes=2 if runtime.compute_dtype or runtime.master_dtype else 4,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_fits(recipe: Path) -> None:
    """Parsed as `moe-tp finetune` does; accepted for the model; within the memory it names."""
    family, size, gpus, memory = head_of(recipe)
    model = preset(family, size)
    config = load_config(recipe)
    layout = config.parallel.resolve(gpus)
    config.train.accumulation(layout.dp or 1)
    job = job_of(config)
    check(model, layout, job)
    needed = Planner(model, job).peak(layout).total
    assert needed < memory * 1e9, f"{needed / 1e9:.1f} GB"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_command_says_that_it_fits(recipe: Path, tmp_path: Path) -> None:
    """`moe-tp plan` for the model, the GPUs and the settings lists the recipe's layout as one."""
    family, size, gpus, memory = head_of(recipe)
    config = load_config(recipe)
    job = job_of(config)
    words = [f"{family}:{size}", "--gpus", gpus, "--gpu-memory", f"{memory}GB", "--top", 1000]
    for name in ("mode", "seq_len", "global_batch", "micro_batch", "recompute", "lora_rank"):
        words += [f"--{name.replace('_', '-')}", getattr(job, name)]
    out = tmp_path / "plan.json"
    assert main(["plan", *map(str, words), "--json", str(out)]) == 0
    wanted = config.parallel.resolve(gpus)
    rows = json.loads(out.read_text())["layouts"]
    (row,) = [r for r in rows if all(getattr(wanted, n) == d for n, d in r["layout"].items())]
    assert row["fits"]
    assert row["memory"] < memory * 1e9


def test_the_five_are_there() -> None:
    """Issue 6 names them."""
    assert [path.stem for path in RECIPES] == [
        "gpt-oss-20b-lora",
        "laptop",
        "mixtral-8x7b-lora",
        "pretrain-olmoe-1b-7b",
        "qwen3-30b-a3b-full",
    ]
