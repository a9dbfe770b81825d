"""What fits where a layout of N GPUs does not: the smallest group, cheaper settings, reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

from moe_tp.errors import ConfigError
from moe_tp.models.config import ModelConfig
from moe_tp.parallel.layout import ParallelLayout, Recompute
from moe_tp.plan.hardware import Hardware
from moe_tp.plan.job import Job, check
from moe_tp.plan.memory import Planner
from moe_tp.plan.moments import Memory
from moe_tp.plan.search import RECOMPUTE, Candidate, layouts, legal_layouts
from moe_tp.plan.time import Clock

_LOOKED_AT = 20_000  # refused layouts whose reasons are counted
_NARROW = "train.moments: 8bit"
_LORA = "LoRA over frozen bf16 weights (--mode lora)"
_AWAY = "weights and states in host memory (runtime.offload: true)"


def smallest_group(
    config: ModelConfig,
    job: Job,
    gpu: Hardware,
    *,
    most: int = 4096,
    recompute: Recompute | None = None,
    like: Planner | None = None,
) -> tuple[int, Candidate] | None:
    """Return the fewest GPUs (a power of two, or one and a half) on which anything fits.

    With `dp_replicate` also that many times these.

    Args:
        config: the model.
        job: the run.
        gpu: memory and rates.
        most: GPUs to look up to.
        recompute: None takes `full`, which needs least.
        like: a planner of the same model and job, see `Planner`.
    """
    plain = {n for p in range(15) for n in (1 << p, 3 << p)}
    sizes = sorted(n for n in plain | {n * job.dp_replicate for n in plain} if n <= most)
    planner = Planner(config, replace(job, recompute=recompute or "full"), like)
    for gpus in sizes:
        least = _least(planner, gpus, gpu)
        if least is not None:
            return gpus, least
    return None


def _least(planner: Planner, gpus: int, gpu: Hardware) -> Candidate | None:
    """Return the layout of N GPUs with the least memory, if it fits."""
    if _share(planner, gpus) > gpu.memory:
        return None
    best: tuple[float, ParallelLayout, Memory] | None = None
    for layout in legal_layouts(planner.config, planner.job, gpus)[0]:
        if planner.least_passing(layout) > gpu.memory:
            continue
        least = planner.least(layout)
        if least > gpu.memory or (best is not None and least >= best[0]):
            continue
        memory = planner.peak(layout)
        if best is None or memory.total < best[0]:
            best = (memory.total, layout, memory)
    if best is None or best[0] > gpu.memory:
        return None
    time = Clock(planner, gpu).step(best[1])
    return Candidate(
        layout=best[1], recompute=planner.job.recompute, memory=best[2], fits=True, time=time
    )


def _share(planner: Planner, gpus: int) -> float:
    """Return bytes below which no layout gets: an equal share of what lies there between steps."""
    job = planner.job
    if job.offload:
        return job.reserve
    alone = ParallelLayout().resolve(1)
    held = [(planner.holding(k, alone), n) for k, n in planner.stages(alone)[0].kinds]
    total = sum((h.weights + h.adapters + h.gradients + h.states) * n for h, n in held)
    return total / gpus * (1.0 + job.margin) + job.reserve


def remedies(
    config: ModelConfig,
    job: Job,
    gpus: int,
    gpu: Hardware,
    *,
    recompute: Recompute | None = None,
    group: tuple[int, Candidate] | None = None,
) -> list[str]:
    """Return what would make the model fit, the cheapest first; each is tried by itself.

    The order is by what it costs the run: more recompute than was asked for costs time; a smaller
    micro-batch and an optimiser that holds nothing besides its states cost next to nothing;
    narrower states cost some precision; LoRA trains less; host memory costs time; more GPUs cost
    GPUs. Two at once are named where neither is enough.

    Args:
        config: the model.
        job: the run.
        gpus: N.
        gpu: memory and rates.
        recompute: what the run is bound to; None where it may be any.
        group: the outcome of `smallest_group`, where known.
    """
    found: dict[str, str] = {}

    def add(what: str, changed: Job, mode: Recompute | None = recompute) -> None:
        planner = Planner(config, replace(changed, recompute=mode or "full"))
        least = _least(planner, gpus, gpu)
        if least is not None:
            found[what] = f"{what}: {least.memory.total / 1e9:.1f} GB a GPU as {least.layout}"

    later = RECOMPUTE[RECOMPUTE.index(recompute) + 1 :] if recompute else ()
    for mode in later:
        add(f"runtime.recompute: {mode}", job, mode)
    for what, changed in _singles(job):
        add(what, changed)
    if not {_NARROW, _AWAY} & found.keys() and job.mode == "full" and job.optimizer != "sgd":
        add(f"{_NARROW} with runtime.offload: true", replace(job, moments="8bit", offload=True))
    if job.mode == "full" and _LORA not in found:
        if job.dp_replicate == 1:
            few = replace(_adapters(job), lora_base="int4", offload=False)
            add("LoRA over experts in 4 bits (--mode lora --lora-base int4)", few)
        add("LoRA with weights in host memory (--mode lora --offload)", _away(_adapters(job)))
    group = group or smallest_group(config, job, gpu, recompute=recompute)
    if group is not None and group[0] != gpus:
        what = "more GPUs" if group[0] > gpus else "another number of GPUs"
        found[what] = f"{what}: {group[0]} as {group[1].layout}"
    return list(found.values())


def _singles(job: Job) -> list[tuple[str, Job]]:
    """Return what is tried by itself, and the job with it."""
    tries: list[tuple[str, Job]] = []
    if job.micro_batch > 1:
        tries.append(("train.micro_batch: 1", replace(job, micro_batch=1)))
    if job.optimizer != "sgd" and job.moments == "float32":
        if job.optimizer == "adamw" and job.kernel == "foreach":
            tries.append(("train.kernel: fused", replace(job, kernel="fused")))
        for moments in ("bfloat16", "8bit"):
            tries.append((f"train.moments: {moments}", replace(job, moments=moments)))
    if job.mode == "full" and job.master_bytes == 4 and job.optimizer != "sgd":
        low = replace(job, master_bytes=2, moments="bfloat16")
        tries.append(("bf16 weights and moments (runtime.master_dtype: bfloat16)", low))
    if job.mode == "full":
        tries.append((_LORA, _adapters(job)))
    whole = job.lora_base == "loaded" and not job.offload
    if job.mode == "lora" and whole and job.dp_replicate == 1:
        few = replace(job, lora_base="int4")
        tries.append(("experts' frozen weights in 4 bits (lora.base: int4)", few))
    if whole:
        tries.append((_AWAY, _away(job)))
    return tries


def _adapters(job: Job) -> Job:
    return replace(job, mode="lora", master_bytes=4)


def _away(job: Job) -> Job:
    return replace(job, offload=True)


def why_none(config: ModelConfig, job: Job, gpus: int, *, most: int = 3) -> list[str]:
    """Return the commonest reasons for which layouts of N GPUs are refused.

    Args:
        config: the model.
        job: the run.
        gpus: N.
        most: reasons.
    """
    reasons: Counter[str] = Counter()
    for layout in islice(layouts(gpus), _LOOKED_AT):
        try:
            check(config, layout, job)
        except ConfigError as error:
            reasons[str(error)] += 1
    return [reason for reason, _ in reasons.most_common(most)]
