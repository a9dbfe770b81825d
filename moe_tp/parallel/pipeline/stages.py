"""Which pipeline stages a rank holds, and how layers are dealt to stages."""

from __future__ import annotations

from collections.abc import Sequence

from moe_tp.errors import ConfigError
from moe_tp.parallel.layout import ParallelLayout, Runtime


def num_stages(layout: ParallelLayout, runtime: Runtime) -> int:
    """Return the number of stages of the model.

    Raises:
        ConfigError: the schedule does not go with the number of virtual stages, or ZeRO would
            hold its stage whole.
    """
    if layout.pp == 1:
        return 1
    schedule, virtual = runtime.pp_schedule, runtime.virtual_stages
    if schedule in ("gpipe", "1f1b") and virtual > 1:
        raise ConfigError(
            f'virtual_stages={virtual} needs pp_schedule="interleaved_1f1b"; {schedule} runs one '
            f"stage a rank"
        )
    if schedule == "interleaved_1f1b" and virtual == 1:
        raise ConfigError(
            'pp_schedule="interleaved_1f1b" needs virtual_stages of at least 2; with one stage a '
            'rank choose pp_schedule="1f1b"'
        )
    if schedule == "zbv" and runtime.recompute == "selective":
        raise ConfigError(
            'pp_schedule="zbv" runs backward in two parts, and recompute="selective" can replay '
            'what it kept only once; choose recompute="full" or "none", or pp_schedule="1f1b"'
        )
    if layout.zero > 1:
        raise ConfigError(
            f"zero={layout.zero} with pp={layout.pp} would hold each stage's gradients (and at 3 "
            f"its parameters) whole until the last micro-batch, which is no more than zero=1 "
            f"saves; choose zero=1, or pp=1"
        )
    return layout.pp * (2 if schedule == "zbv" else virtual)


def stages_of(layout: ParallelLayout, runtime: Runtime, rank: int) -> tuple[int, ...]:
    """Return the stages that a pipeline rank holds, in rising order.

    Interleaved schedules deal them round; ZBV folds them into a V, so that the first rank holds
    the first stage and the last (arXiv:2401.10241, section 6).
    """
    total, pp = num_stages(layout, runtime), layout.pp
    if runtime.pp_schedule == "zbv" and pp > 1:
        return (rank, total - 1 - rank)
    return tuple(range(rank, total, pp))


def holder_of(layout: ParallelLayout, runtime: Runtime, stage: int) -> int:
    """Return the pipeline rank that holds a stage."""
    if runtime.pp_schedule == "zbv" and layout.pp > 1 and stage >= layout.pp:
        return 2 * layout.pp - 1 - stage
    return stage % layout.pp


def fitting_micro_batches(layout: ParallelLayout, runtime: Runtime, count: int) -> int:
    """Return the least number of micro-batches, `count` or more, that the schedule can run.

    Interleaved 1F1B takes them in rounds of equal length, as many rounds as pp fits into them
    (arXiv:2104.04473, section 2.2, asks for a multiple of pp); the other schedules take any number.
    """
    if runtime.pp_schedule == "interleaved_1f1b":
        while count % max(1, count // layout.pp):
            count += 1
    return count


def deal_layers(
    costs: Sequence[float], parts: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Return runs of layers whose most expensive stage is as cheap as possible.

    Args:
        costs: of each layer, in any unit.
        parts: number of stages; each gets at least one layer.
        first, last: cost that the first and the last stage have besides (embedding, head).

    Raises:
        ConfigError: more stages than layers.
    """
    layers = len(costs)
    if parts > layers:
        raise ConfigError(
            f"{parts} pipeline stages are more than the model's {layers} layers; lower pp or "
            f"virtual_stages"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def stage_cost(part: int, start: int, stop: int) -> float:
        extra = (first if part == 0 else 0.0) + (last if part == parts - 1 else 0.0)
        return total[stop] - total[start] + extra

    # best[part][stop]: the cheapest bottleneck of the first `part + 1` stages over `stop` layers.
    best = [[stage_cost(0, 0, stop) for stop in range(layers + 1)]]
    cuts: list[list[int]] = [[0] * (layers + 1)]
    for part in range(1, parts):
        row, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for stop in range(part + 1, layers + 1):
            for start in range(part, stop):
                cost = max(best[-1][start], stage_cost(part, start, stop))
                if cost < row[stop]:
                    row[stop], cut[stop] = cost, start
        best.append(row)
        cuts.append(cut)
    runs: list[range] = []
    stop = layers
    for part in range(parts - 1, -1, -1):
        start = cuts[part][stop]
        runs.append(range(start, stop))
        stop = start
    return runs[::-1]


def given_layers(sizes: Sequence[int], layers: int, parts: int) -> list[range]:
    """Return runs of layers of the sizes that a user gave.

    Raises:
        ConfigError: the sizes are not one for each stage, or do not add up.
    """
    if len(sizes) != parts or min(sizes) < 1 or sum(sizes) != layers:
        raise ConfigError(
            f"stage_layers={tuple(sizes)} must be {parts} positive numbers, one a stage, that add "
            f"up to the model's {layers} layers"
        )
    runs, start = [], 0
    for size in sizes:
        runs.append(range(start, start + size))
        start += size
    return runs
