"""All layouts of N GPUs for a model: which are refused and why, which fit, which are fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_tp.errors import ConfigError
from moe_tp.models.config import ModelConfig
from moe_tp.parallel.layout import ParallelLayout, Recompute, check_sharding
from moe_tp.plan.hardware import Hardware
from moe_tp.plan.job import Job, check, divisors
from moe_tp.plan.memory import Planner
from moe_tp.plan.moments import Memory
from moe_tp.plan.time import Clock, StepTime

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout with what it needs.

    Args:
        layout: resolved.
        recompute: the least that fits, or `full` where none does.
        memory: of the fullest rank.
        fits: whether that is no more than a GPU has.
        time: of a step; None where it does not fit.
    """

    layout: ParallelLayout
    recompute: Recompute
    memory: Memory
    fits: bool
    time: StepTime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A layout that the library refuses, and its reason."""

    layout: ParallelLayout
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The outcome of a search.

    Args:
        candidates: legal layouts, the fastest that fit first, then by memory.
        refusals: where asked for.
        num_refused: how many were refused.
    """

    candidates: list[Candidate]
    refusals: list[Refusal]
    num_refused: int

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.fits else None


def layouts(gpus: int) -> Iterator[ParallelLayout]:
    """Yield every layout that fills the GPUs, resolved, whatever the model."""
    degrees = divisors(gpus)
    for pp in degrees:
        stage = gpus // pp
        inner = [d for d in degrees if stage % d == 0]
        experts = [(ep, etp) for ep in inner for etp in inner if stage % (ep * etp) == 0]
        for tp in inner:
            for cp in inner:
                if stage % (tp * cp):
                    continue
                for ep, etp in experts:
                    for zero in range(4):
                        yield ParallelLayout(
                            dp=stage // (tp * cp), cp=cp, tp=tp, pp=pp, ep=ep, etp=etp, zero=zero
                        )


def legal_layouts(
    config: ModelConfig, job: Job, gpus: int, refusals: list[Refusal] | None = None
) -> tuple[list[ParallelLayout], int]:
    """Return the layouts that the library accepts, and how many it refuses.

    One bad degree refuses all layouts that have it, so what each axis does on its own is asked
    first; with `refusals` every refused layout is listed.

    Args:
        config: the model.
        job: the run.
        gpus: N.
        refusals: filled with the reasons where given.
    """
    if refusals is not None:
        found = []
        for layout in layouts(gpus):
            reason = _reason(config, layout, job)
            if reason is None:
                found.append(layout)
            else:
                refusals.append(Refusal(layout=layout, reason=reason))
        return found, len(refusals)
    degrees = divisors(gpus)
    # what depends on several axes at once, or on ZeRO, is asked below
    plain = replace(
        job,
        global_batch=max(job.global_batch, gpus * job.micro_batch),
        offload=False,
        dp_replicate=1,
    )

    def alone(**axes: int) -> bool:
        """Whether these degrees are refused by no rule that the others cannot mend."""
        size = 1
        for value in axes.values():
            size *= value
        return gpus % size == 0 and _reason(config, ParallelLayout(dp=1, **axes), plain) is None

    tps = [d for d in degrees if alone(tp=d)]
    pps = [d for d in degrees if alone(pp=d)]
    # experts lie over dp * cp * tp ranks: dp is free here
    eps = [d for d in degrees if d <= max(1, config.moe.router.num_experts)]
    etps = [d for d in degrees if alone(etp=d)]
    few = job.mode == "lora" and job.lora_base != "loaded"  # which ZeRO does not split
    result = []
    for pp in pps:
        stage = gpus // pp
        zeros = (0,) if few else (0, 1) if pp > 1 else (0, 1, 2, 3)
        for tp in tps:
            for cp in degrees:
                if stage % (tp * cp) or (cp > 1 and not alone(tp=tp, cp=cp)):
                    continue
                dp = stage // (tp * cp)
                if dp * job.micro_batch > job.global_batch:
                    continue
                for ep in eps:
                    for etp in etps:
                        if stage % (ep * etp):
                            continue
                        flat = dp * cp == 1 and stage == ep * etp
                        for zero in (0,) if flat and not job.offload else zeros:
                            layout = ParallelLayout(
                                dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp, zero=zero
                            )
                            if _shards(layout, job):
                                result.append(layout)
    return result, _count_layouts(gpus) - len(result)


def _shards(layout: ParallelLayout, job: Job) -> bool:
    """Return whether `check_sharding` takes the layout."""
    if job.dp_replicate == 1 and not job.offload:
        return True
    try:
        check_sharding(layout, job.runtime)
    except ConfigError:
        return False
    return True


def _count_layouts(gpus: int) -> int:
    total = 0
    for pp in divisors(gpus):
        inner = divisors(gpus // pp)
        pairs = sum(1 for a in inner for b in inner if gpus // pp % (a * b) == 0)
        total += 4 * pairs * pairs
    return total


def _reason(config: ModelConfig, layout: ParallelLayout, job: Job) -> str | None:
    try:
        check(config, layout, job)
    except ConfigError as error:
        return str(error)
    return None


def search(
    config: ModelConfig,
    job: Job,
    gpus: int,
    gpu: Hardware,
    *,
    recompute: Recompute | None = None,
    refusals: bool = False,
    max_cp: int | None = None,
    like: Planner | None = None,
) -> Plan:
    """Return all legal layouts of N GPUs, ranked.

    Args:
        config: the model.
        job: the run; its `recompute` is overridden.
        gpus: N.
        gpu: memory and rates.
        recompute: None takes for each layout the mode that is fastest among those that fit.
        refusals: list the refused layouts with reasons.
        max_cp: do not look at more; None looks at all.
        like: a planner of the same model and job, see `Planner`.
    """
    refused: list[Refusal] | None = [] if refusals else None
    legal, num_refused = legal_layouts(config, job, gpus, refused)
    modes = RECOMPUTE if recompute is None else (recompute,)
    first = like or Planner(config, job)
    clocks = [Clock(Planner(config, replace(job, recompute=m), first), gpu) for m in modes]
    found = []
    for layout in legal:
        if max_cp is None or layout.cp <= max_cp:
            found.append(_candidate(layout, clocks))
    found.sort(
        key=lambda c: (
            not c.fits,
            -c.time.tokens_per_second if c.time else 0.0,
            c.memory.total,
            _simplicity(c.layout),
        )
    )
    return Plan(candidates=found, refusals=refused or [], num_refused=num_refused)


def _simplicity(layout: ParallelLayout) -> tuple[int, ...]:
    return (layout.pp, layout.cp, layout.etp, layout.tp, layout.ep, layout.zero)


def _candidate(layout: ParallelLayout, clocks: list[Clock]) -> Candidate:
    """Return the layout with the least recompute that fits."""
    never = clocks[0].planner.least(layout) > clocks[0].gpu.memory
    for clock in clocks[-1:] if never else clocks:
        planner = clock.planner
        memory = planner.peak(layout)
        fits = memory.total <= clock.gpu.memory
        if fits or clock is clocks[-1]:
            return Candidate(
                layout=layout,
                recompute=planner.job.recompute,
                memory=memory,
                fits=fits,
                time=clock.step(layout) if fits else None,
            )
    raise AssertionError("no recompute mode was given")
