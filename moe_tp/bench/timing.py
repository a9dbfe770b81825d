"""Times of several things that take turns, each beside a floor measured just before and after.

A busy moment of the machine then falls on a thing and on its floor alike, and the median over the
rounds of the paired ratios moves little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

FLOOR = "floor"
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds by name and round, and for each the mean of the floors beside it.

    Args:
        seconds: by name, one number a round; the floor's own under `FLOOR`.
        floors: by name, what lies below those numbers.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    floors: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Return the median in seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        """Return the median of the rounds' ratios to the floor."""
        pairs = zip(self.seconds[name], self.floors[name], strict=True)
        return statistics.median(one / floor for one, floor in pairs)


def side_by_side(
    steps: Mapping[str, Step],
    floor: Step,
    *,
    rounds: int,
    warmup: int = 1,
    meet: Callable[[], object] | None = None,
    device: torch.device | None = None,
) -> Times:
    """Return the times of `steps`, which take turns for some rounds.

    Args:
        steps: by name.
        floor: measured before and after each of them.
        rounds: how many count.
        warmup: rounds before those.
        meet: called before a clock starts and before it stops (a barrier, where ranks share work).
        device: whose work is waited for.

    Collectives: those of `steps`, `floor` and `meet`.
    """
    times = Times({name: [] for name in (FLOOR, *steps)}, {name: [] for name in steps})

    def clock(step: Step) -> float:
        wait(device)
        if meet is not None:
            meet()
        start = time.perf_counter()
        step()
        wait(device)
        if meet is not None:
            meet()
        return time.perf_counter() - start

    for turn in range(-warmup, rounds):
        before = clock(floor)
        for name, step in steps.items():
            seconds, after = clock(step), clock(floor)
            if turn >= 0:
                times.seconds[name].append(seconds)
                times.floors[name].append((before + after) / 2)
                times.seconds[FLOOR].append(after)
            before = after
    return times


def wait(device: torch.device | None) -> None:
    """Wait for a GPU's work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    """Return what a table says about where it was measured."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    flags = torch.backends.cpu.get_cpu_capability()
    return f"CPU ({flags}), {torch.get_num_threads()} thread(s) a process"
