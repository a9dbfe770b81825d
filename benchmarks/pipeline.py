"""Bubble of each pipeline schedule, from the recorded events of a run.

Every forward, backward and weight-gradient of a stage is recorded as a rank runs it: what it was,
when it started, and the processor time it took. Ranks of one machine share its cores, so their
wall clocks say little; the run is replayed instead, each rank with its actions in the order in
which it ran them and of the time they took, an action starting when its rank is free and what it
waits for is done, and sending costing nothing. The bubble is the share of time that ranks stand
still. Promised: (P-1)/(VM+P-1) for P ranks, M micro-batches and V stages a rank of equal cost
(GPipe, arXiv:1811.06965, and 1F1B with V = 1; interleaved, arXiv:2104.04473, section 2.2); ZBV
promises less than interleaved does, by computing weight gradients where ranks would stand still
(arXiv:2401.10241, section 6).

    python benchmarks/pipeline.py --write    # also writes benchmarks/pipeline-DATE.md
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import time
from collections.abc import Callable
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
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
TOLERANCE = 0.04  # of the whole time: stages are not exactly alike


class Event(NamedTuple):
    """One action of a rank: `F`, `B` (input gradients, or all) or `W` (weight gradients alone)."""

    kind: str
    stage: int
    micro_batch: int
    start: float  # wall clock, seconds
    seconds: float  # of processor time


def record(events: list[Event]) -> Callable[[], None]:
    """Record the actions of every pipeline stage of this process; return what ends it."""
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
            start, used = time.monotonic(), time.thread_time()
            result = run(stage, chunk, *args, **kwargs)
            used = time.thread_time() - used
            events.append(Event(kinds[name], stage.stage_index, chunk, start, used))
            return result

        return action

    for name in kinds:
        setattr(PipelineStage, name, watched(name))

    def end() -> None:
        for name, method in before.items():
            setattr(PipelineStage, name, method)

    return end


def run(schedule: str, micro_batches: int, tokens: int) -> list[Event]:
    """Return the events of this rank in the last of four steps, each with its least time.

    A rank that the machine has just put aside finds its caches cold; the least of three steps is
    what the action costs.
    """
    virtual = 2 if schedule == "interleaved_1f1b" else 1
    ranks = dist.get_world_size()
    per_stage = SIZES["num_hidden_layers"] // (ranks * SCHEDULES[schedule])
    mesh = Mesh(
        ParallelLayout(pp=ranks),
        Runtime(
            pp_schedule=schedule,  # type: ignore[arg-type]
            virtual_stages=virtual,
            stage_layers=(per_stage,) * (SIZES["num_hidden_layers"] // per_stage),
        ),
    )
    model = build(preset("mixtral", **SIZES), mesh, seed=0)
    ids = torch.randint(0, SIZES["vocab_size"], (1, tokens))
    batches = [{"input_ids": ids, "labels": ids}] * micro_batches
    least: dict[tuple[str, int, int], float] = {}
    events: list[Event] = []
    for step in range(4):
        events.clear()
        end = record(events)
        try:
            forward_backward(model, batches, step=step)
        finally:
            end()
        settle_gradients(model)
        for event in events if step else ():
            least[event[:3]] = min(event.seconds, least.get(event[:3], event.seconds))
    return [event._replace(seconds=least[event[:3]]) for event in events]


def replay(ranks: list[list[Event]]) -> tuple[float, float]:
    """Return the bubble and the seconds of a step, ranks waiting for each other only.

    Args:
        ranks: the events of each rank, in any order.
    """
    queues = [sorted(events, key=lambda event: event.start) for events in ranks]
    last = max(event.stage for events in ranks for event in events)
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(ranks)
    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                event = queue[0]
                needs = _needs(event, last)
                if any(need not in done for need in needs):
                    break
                begin = max([free[rank], *(done[need] for need in needs)])
                free[rank] = done[event[:3]] = begin + event.seconds
                queue.pop(0)
                moved = True
        if not moved:
            raise RuntimeError("the recorded orders of the ranks wait for each other in a circle")
    busy = sum(event.seconds for events in ranks for event in events)
    whole = max(free)
    return 1.0 - busy / (whole * len(ranks)), whole


def _needs(event: Event, last: int) -> list[tuple[str, int, int]]:
    kind, stage, m = event[:3]
    if kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [("B", stage, m)]
    return [("F", stage, m)] if stage == last else [("B", stage + 1, m)]


def main() -> int:
    """Return 0 when every schedule keeps its promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="a micro-batch")
    parser.add_argument("--write", action="store_true", help="write the dated table")
    options = parser.parse_args()
    p, m = options.ranks, options.micro_batches
    lines = [
        "| schedule | stages a rank | promised | measured | holds |",
        "|---|---|---|---|---|",
    ]
    fine = True
    for schedule, virtual in SCHEDULES.items():
        events = run_ranks(run, p, schedule, m, options.tokens, timeout=300)
        actions = {event.kind for rank in events for event in rank}
        bubble, _ = replay(events)
        if schedule == "zbv":
            promised = (p - 1) / (virtual * m + p - 1)
            holds, text = bubble <= promised and "W" in actions, f"< {promised:.3f}"
        else:
            promised = (p - 1) / (virtual * m + p - 1)
            holds, text = abs(bubble - promised) <= TOLERANCE, f"{promised:.3f}"
        fine = fine and holds
        lines.append(
            f"| {schedule} | {virtual} | {text} | {bubble:.3f} | {'yes' if holds else 'NO'} |"
        )
        print(lines[-1], flush=True)
    today = datetime.date.today()
    head = f"""# Pipeline bubbles, {today}

`python benchmarks/pipeline.py --ranks {p} --micro-batches {m} --tokens {options.tokens}`

Mixtral of {SIZES["num_hidden_layers"]} layers, width {SIZES["hidden_size"]}, \
{SIZES["num_local_experts"]} experts of {SIZES["intermediate_size"]}, vocabulary \
{SIZES["vocab_size"]}, fp32; {p} ranks,
gloo, {platform.machine()}, one thread each, torch {torch.__version__}. The last of four steps,
replayed from its recorded actions, their order and their least processor time (see the script); a
bubble is the promised one when it lies within {TOLERANCE} of it.

"""
    text = head + "\n".join(lines) + "\n"
    print(text)
    if options.write:
        Path(__file__).with_name(f"pipeline-{today}.md").write_text(text)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
