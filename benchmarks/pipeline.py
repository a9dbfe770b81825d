"""Bubble of each pipeline schedule, from recorded start and stop events of a run.

Ranks of one machine share its cores, so that each would wait for the others' arithmetic, which
ranks with a GPU each do not. A small model is trained instead, and every action of a stage is held
until it has taken its share of a unit: one for a forward (of all stages of a rank together), two
for a backward, or one for its input gradients and one for its weight gradients where ZBV parts
them. Sleeping ranks need no core. Everything else is the real run: order, sends and waits.

The bubble is the share of time in which ranks stand still, from the first start to the last stop:
once by the clock, which also holds sends and what else the machine does, and once with the recorded
actions laid out anew, each rank's in the order in which it ran them and of the median time of their
kind, an action starting when its rank is free and what it waits for is done. Promised,
for P ranks, M micro-batches and V stages a rank: (P-1)/(VM+P-1) (GPipe, arXiv:1811.06965, section
2.3, and 1F1B with V = 1; interleaved, arXiv:2104.04473, section 2.2). ZBV (arXiv:2401.10241,
section 6) leaves no rank waiting between its first and its last action when forward, input and
weight gradients take as long as each other, as they do here; rank r begins r forwards of a stage
late, so that of 6 M + P - 1 of these P - 1 are lost.

    python benchmarks/pipeline.py --write    # also writes benchmarks/pipeline-DATE.md
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from moe_tp import Mesh, ParallelLayout, Runtime, forward_backward, settle_gradients
from moe_tp.models import build
from moe_tp.models.families import preset
from moe_tp.testing import run_ranks

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}  # stages a rank
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
TOKENS = 4
TOLERANCE = 0.01  # of the whole time, for the actions laid out anew


class Event(NamedTuple):
    """One action of a rank: `F`, `B` (input gradients, or all) or `W` (weight gradients alone)."""

    kind: str
    stage: int
    micro_batch: int
    start: float  # seconds of a clock that all ranks share
    stop: float


def record(events: list[Event], unit: float) -> Callable[[], None]:
    """Hold and record the actions of every stage of this process; return what ends it.

    Args:
        events: where they go.
        unit: seconds of one forward of one stage.
    """
    kinds = {
        "forward_one_chunk": "F",
        "backward_one_chunk": "B",
        "backward_weight_one_chunk": "W",
    }
    before = {name: getattr(PipelineStage, name) for name in kinds}

    def watched(name: str) -> Callable[..., Any]:
        run = before[name]

        @functools.wraps(run)
        def action(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            result = run(stage, chunk, *args, **kwargs)
            whole = name == "backward_one_chunk" and kwargs.get("full_backward", True)
            time.sleep(max(0.0, start + (2 if whole else 1) * unit - time.monotonic()))
            events.append(Event(kinds[name], stage.stage_index, chunk, start, time.monotonic()))
            return result

        return action

    for name in kinds:
        setattr(PipelineStage, name, watched(name))

    def end() -> None:
        for name, method in before.items():
            setattr(PipelineStage, name, method)

    return end


def run(schedule: str, micro_batches: int, unit: float, steps: int) -> list[list[Event]]:
    """Return the events of this rank in each step but the first, which warms up."""
    virtual = 2 if schedule == "interleaved_1f1b" else 1
    ranks = dist.get_world_size()
    mesh = Mesh(
        ParallelLayout(pp=ranks),
        Runtime(pp_schedule=schedule, virtual_stages=virtual),  # type: ignore[arg-type]
    )
    model = build(preset("mixtral", **SIZES), mesh, seed=0)
    ids = torch.randint(0, SIZES["vocab_size"], (1, TOKENS))
    batches = [{"input_ids": ids, "labels": ids}] * micro_batches
    found = []
    for step in range(steps + 1):
        events: list[Event] = []
        end = record(events, unit / SCHEDULES[schedule] if step else 0.0)
        try:
            forward_backward(model, batches, step=step)
        finally:
            end()
        settle_gradients(model)
        model.zero_grad()
        found.append(events)
    return found[1:]


def bubble(ranks: Sequence[Sequence[Event]]) -> float:
    """Return the share of a step in which ranks stand still.

    Args:
        ranks: the events of each rank.
    """
    events = [event for rank in ranks for event in rank]
    whole = max(event.stop for event in events) - min(event.start for event in events)
    busy = sum(event.stop - event.start for event in events)
    return 1.0 - busy / (whole * len(ranks))


def laid_out(ranks: Sequence[Sequence[Event]]) -> float:
    """Return the bubble of the same actions, in the same orders, where sends cost nothing.

    Args:
        ranks: the events of each rank.
    """
    events = [event for rank in ranks for event in rank]
    last = max(event.stage for event in events)
    cost = {
        kind: statistics.median(e.stop - e.start for e in events if e.kind == kind)
        for kind in {event.kind for event in events}
    }
    queues = [sorted(rank, key=lambda event: event.start) for rank in ranks]
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(ranks)
    while any(queues):
        left = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and all(need in done for need in _needs(queue[0], last)):
                event = queue.pop(0)
                begin = max([free[rank], *(done[need] for need in _needs(event, last))])
                free[rank] = done[event[:3]] = begin + cost[event.kind]
        if left == sum(map(len, queues)):
            raise RuntimeError("the recorded orders of the ranks wait for each other in a circle")
    return 1.0 - sum(cost[event.kind] for event in events) / (max(free) * len(ranks))


def _needs(event: Event, last: int) -> list[tuple[str, int, int]]:
    """Return the actions that one waits for."""
    kind, stage, m = event[:3]
    if kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [("B", stage, m)]
    return [("F", stage, m)] if stage == last else [("B", stage + 1, m)]


def promise(schedule: str, ranks: int, micro_batches: int) -> float:
    """Return the bubble that the schedule promises."""
    work = SCHEDULES[schedule] * micro_batches
    if schedule == "zbv":
        work = 3 * SCHEDULES[schedule] * micro_batches
    return (ranks - 1) / (work + ranks - 1)


def _listed(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def main() -> int:
    """Return 0 when every schedule keeps its promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.2, help="seconds of a rank's forward")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the dated table")
    options = parser.parse_args()
    p, m = options.ranks, options.micro_batches
    lines = [
        "| schedule | stages a rank | promised | laid out anew | holds | by the clock |",
        "|---|---|---|---|---|---|",
    ]
    fine = True
    for schedule, stages in SCHEDULES.items():
        found = run_ranks(run, p, schedule, m, options.unit, options.steps, timeout=300)
        steps = [[rank[step] for rank in found] for step in range(options.steps)]
        promised, anew = promise(schedule, p, m), [laid_out(step) for step in steps]
        holds = all(abs(value - promised) <= TOLERANCE for value in anew)
        fine = fine and holds
        lines.append(
            f"| {schedule} | {stages} | {promised:.3f} | {_listed(anew)} | "
            f"{'yes' if holds else 'NO'} | {_listed([bubble(step) for step in steps])} |"
        )
        print(lines[-1], flush=True)
    today = datetime.date.today()
    head = f"""# Pipeline bubbles, {today}

`python benchmarks/pipeline.py --ranks {p} --micro-batches {m} --unit {options.unit}`

Mixtral of {SIZES["num_hidden_layers"]} layers, width {SIZES["hidden_size"]}, fp32; {p} ranks, gloo,
{platform.machine()}, torch {torch.__version__}. Each forward of a
rank takes {options.unit} s and each backward twice that, by sleeping (see the script); starts and
stops are the recorded ones of {options.steps} steps after a first, one figure each. Laid out anew \
holds within {TOLERANCE}
of what is promised; the clock also counts sends and other work on the same cores (load \
{os.getloadavg()[0]:.0f}, {os.cpu_count()} cores).

"""
    text = head + "\n".join(lines) + "\n"
    print(text)
    if options.write:
        Path(__file__).with_name(f"pipeline-{today}.md").write_text(text)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
