"""What the load metrics of a run cost: its steps with and without them, in turns, in one process.

    python benchmarks/metrics_cost.py [--shapes A B] [--layers 2] [--tokens 2048] [--write]

A real run (`moe_tp.train.loop`) on random tokens, with `metrics.jsonl`, `load.jsonl` and, where it
is installed, TensorBoard. Without metrics the functions that collect and write them are left out:
entropy, sums and traffic of each layer, load and figures of the step, all lines and trackers. A
step lasts from its data to its last line. A difference of 1 % is near the noise of a machine, so
the time spent within these functions is taken as well, over the steps that have them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from side_by_side import publish, table, today, versions

from moe_tp import Mesh
from moe_tp.bench.floor import SHAPES, LayerShape
from moe_tp.experts import losses
from moe_tp.experts.dispatch import Wire
from moe_tp.experts.moe import MoE
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.train import loop
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.journal import Journal
from moe_tp.train.load import StepLoad
from moe_tp.train.settings import from_mapping

LENGTH, VOCAB, WARMUP = 512, 1024, 4
TENSORBOARD = find_spec("tensorboard") is not None
Function = Callable[..., Any]
NO_SUMS = torch.zeros(len(losses.SUMS), dtype=torch.float64)
NO_LOAD = StepLoad(
    layers=(),
    counts_LE=torch.zeros(0, 1),
    choices_L=torch.zeros(0),
    entropy_L=torch.zeros(0),
    wire_P4=torch.zeros(0, 4),
)
# where each function stands, and what a step without metrics has in its place
PARTS: dict[str, tuple[object, str, Function]] = {
    "entropy": (losses, "router_entropy", lambda assignment: assignment.scores_TE.new_zeros(())),
    "layers' sums": (losses.MoEAux, "sums", lambda aux: NO_SUMS),
    "layers' traffic": (MoE, "_wire", lambda layer, received: Wire()),
    "step": (loop, "step_load", lambda model, aux: NO_LOAD),
    "figures": (StepLoad, "summary", lambda load: {}),
    "lines": (Journal, "step", lambda journal, line, load: None),
}


class Clock:
    """Seconds of each step with and without metrics, and of each part in those with them."""

    def __init__(self) -> None:
        self.on, self.began = True, 0.0
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.parts: dict[str, list[float]] = {name: [] for name in PARTS}

    def start(self, step: int) -> None:
        """Begin a step; with and without take turns, and turns in being first."""
        self.on = step % 4 in (0, 3)
        for seconds in self.parts.values():
            seconds.append(0.0)
        self.began = time.perf_counter()

    def stop(self) -> None:
        """End a step."""
        self.steps[self.on].append(time.perf_counter() - self.began)
        if not self.on:
            for seconds in self.parts.values():
                seconds.pop()

    def wrap(self, name: str, function: Function, without: Function) -> Function:
        """Return a function that is timed, or left out."""

        def run(*args: Any) -> Any:
            if self.on:
                start = time.perf_counter()
                result = function(*args)
                self.parts[name][-1] += time.perf_counter() - start
            else:
                result = without(*args)
            if name == "lines":  # the last thing of a step
                self.stop()
            return result

        return run


def settings(shape: LayerShape, folder: Path, options: argparse.Namespace) -> FinetuneConfig:
    """Return a run's settings, having written its random model and data."""
    hub = {
        "model_type": "mixtral",
        "vocab_size": VOCAB,
        "hidden_size": shape.dim,
        "intermediate_size": shape.expert_dim,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
    }
    save_pretrained(build(ModelConfig.from_hub(hub), Mesh.single(), seed=0), folder / "model")
    rows = options.tokens // LENGTH
    ids = torch.randint(0, VOCAB, (4 * rows, LENGTH), generator=torch.Generator().manual_seed(0))
    lines = [json.dumps({"input_ids": row}) for row in ids.tolist()]
    (folder / "train.jsonl").write_text("\n".join(lines))
    tree = {
        "model": str(folder / "model"),
        "output": str(folder / "run"),
        "data": {"train": str(folder / "train.jsonl"), "seq_len": LENGTH},
        "train": {
            "steps": WARMUP + options.steps,
            "micro_batch": rows,
            "global_batch": rows,
            "lr": 1e-4,
            "trackers": ["tensorboard"] if TENSORBOARD else [],
        },
    }
    return from_mapping(FinetuneConfig, tree, "benchmark")


def measure(shape: LayerShape, options: argparse.Namespace) -> Clock:
    """Return the times of a run's steps after the first few."""
    clock = Clock()

    class Timed(loop.Run):
        def train_step(self) -> tuple[dict[str, Any], StepLoad]:
            clock.start(self.step)
            return super().train_step()

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = settings(shape, Path(folder), options)
        for name, (place, function, without) in PARTS.items():
            timed = clock.wrap(name, getattr(place, function), without)
            stack.enter_context(mock.patch.object(place, function, timed))
        Timed(config, Mesh.single(config.runtime), quiet=True).go()
    for seconds in (*clock.steps.values(), *clock.parts.values()):
        del seconds[: WARMUP // 2]
    return clock


def row_of(name: str, clock: Clock) -> list[str]:
    """Return a row of the table, in milliseconds and per cent."""
    on, off = (statistics.median(clock.steps[each]) for each in (True, False))
    ratios = [a / b for a, b in zip(clock.steps[True], clock.steps[False], strict=True)]
    parts = {part: statistics.median(seconds) for part, seconds in clock.parts.items()}
    own = sum(parts.values())
    return [
        name,
        f"{1000 * on:.1f}",
        f"{1000 * off:.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{1000 * own:.2f}",
        f"{100 * own / on:.2f} %",
        *(f"{1000 * seconds:.2f}" for seconds in parts.values()),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--steps", type=int, default=24, help="half of them with metrics")
    parser.add_argument("--write", action="store_true", help="write the dated table beside this")
    options = parser.parse_args(arguments)
    rows = [row_of(name, measure(SHAPES[name], options)) for name in options.shapes]
    shapes = "; ".join(f"{name}: {SHAPES[name]}" for name in options.shapes)
    head = ["shape", "step with, ms", "without, ms", "ratio", "metrics alone, ms", "share"]
    lines = [
        f"# Cost of the load metrics, {today()}",
        "",
        f"`python benchmarks/metrics_cost.py`: one process, {torch.get_num_threads()} threads, "
        f"fp32, {options.layers} layers, {options.tokens} tokens a step; {shapes}. "
        f"{options.steps} steps, half of them with metrics, in turns: medians, the median of the "
        f"pairs' ratios, and the time within the functions that collect and write (entropy, sums "
        f"and traffic of the layers; load and figures of the step; lines"
        f"{' and TensorBoard' if TENSORBOARD else ''}). "
        f"{versions()}.",
        "",
        *table([*head, *PARTS], rows),
    ]
    publish("metrics_cost", lines, write=options.write)


if __name__ == "__main__":
    main()
