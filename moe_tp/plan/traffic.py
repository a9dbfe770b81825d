"""Bytes that a rank sends in one optimiser step, by mesh axis, collective and pass.

Letters: T owned tokens · D width · E experts · K choices · c bytes of an activation.

The list below is the library's own algorithms read off one by one. With the rows of a dispatch as
they are (an expectation for uniform choices, exact where every token goes everywhere) it equals
what is counted: what `record_traffic` logs, what `fully_shard` gathers and sums (op `fsdp`), and
what pipeline stages send (op `send`). A second run of a layer under recompute sends again what is
not kept.

| where             | forward                                | backward                          |
|-------------------|----------------------------------------|-----------------------------------|
| embedding         | reduce-scatter T D                     | all-gather T D                    |
| each projection   | all-gather of its input                | the same again, reduce-scatter    |
| output projection | reduce-scatter T D                     | all-gather T D                    |
| dispatch, combine | rows in c, sums in fp32, 6 B a pair    | rows in c twice, 4 B a pair       |
| loss              | all-gather, reduce-scatter T D, 3 numbers a token | nothing                |
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from moe_tp.experts.losses import SUMS
from moe_tp.models.config import ModelConfig
from moe_tp.parallel.collectives import Phase
from moe_tp.parallel.context.sequence import padded_length
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Domain
from moe_tp.plan.axes import axis_sizes
from moe_tp.plan.job import Job
from moe_tp.plan.memory import Planner
from moe_tp.plan.params import Kind, zero_ranks
from moe_tp.plan.stages import Stage

_SHARDS: dict[Domain, str] = {"dense": "shard", "expert": "expert_shard"}
_COPIES: dict[Domain, str] = {"dense": "replicate", "expert": "expert_replicate"}


class Flow(NamedTuple):
    """What one rank sends along one axis by one collective in one pass of a step.

    Args:
        axis: mesh axis.
        op: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `ring`, `fsdp`, `send`.
        phase: as the traffic log names it; what happens after backward is `forward`.
        sent: bytes.
        calls: number of messages or collectives.
        once: it happens once a step, after or before the micro-batches.
    """

    axis: str
    op: str
    phase: Phase
    sent: float
    calls: int
    once: bool = False


class _Sum:
    """Flows added up by axis, op, phase and whether they are once a step."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, str, Phase, bool], float] = defaultdict(float)
        self.calls: dict[tuple[str, str, Phase, bool], int] = defaultdict(int)

    def add(
        self, axis: str, op: str, phase: Phase, sent: float, calls: int = 1, *, once: bool = False
    ) -> None:
        if sent:
            self.sent[axis, op, phase, once] += sent
            self.calls[axis, op, phase, once] += calls

    def flows(self) -> list[Flow]:
        return [
            Flow(axis, op, phase, sent, self.calls[axis, op, phase, once], once)
            for (axis, op, phase, once), sent in self.sent.items()
        ]


def reduced(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all-reduce of `size` bytes."""
    return 2 * size * (ranks - 1) // ranks


def step_traffic(
    planner: Planner, layout: ParallelLayout, stage: Stage, *, clip: bool = True
) -> list[Flow]:
    """Return what a rank of a pipeline stage sends in one optimiser step.

    Args:
        planner: of model and job.
        layout: resolved.
        stage: from `planner.stages`.
        clip: the gradient norm is taken.
    """
    total = _Sum()
    micro = planner.job.micro_batches(layout)
    for kind, count in stage.kinds:
        for flow in part_traffic(planner, kind, layout):
            times = count * micro
            total.add(flow.axis, flow.op, flow.phase, flow.sent * times, flow.calls * times)
    for flow in stage_traffic(planner, layout, stage, clip=clip):
        total.add(flow.axis, flow.op, flow.phase, flow.sent, flow.calls, once=flow.once)
    return total.flows()


def stage_traffic(
    planner: Planner, layout: ParallelLayout, stage: Stage, *, clip: bool = True
) -> list[Flow]:
    """Return what a rank sends in a step beside `part_traffic`; see `step_traffic`."""
    config, job = planner.config, planner.job
    total = _Sum()
    micro = job.micro_batches(layout)
    if stage.last and layout.stage_size > 1:  # the loss, a scalar
        total.add("stage", "all_reduce", "forward", reduced(4, layout.stage_size) * micro, micro)
    if job.mode == "lora" and layout.pp == 1 and config.attention.mla is None:
        # behind a frozen embedding the first layer's input has no gradient to sum
        unsent = job.owned_tokens(layout) * config.dim * job.compute_bytes * (layout.tp - 1)
        total.add("tp", "reduce_scatter", "backward", -unsent * micro, -micro)
    if layout.pp > 1:
        rows = job.owned_tokens(layout) * config.dim * job.compute_bytes
        if not stage.last:
            total.add("pp", "send", "forward", (rows + 4) * micro, micro)
        if not stage.first:
            total.add("pp", "send", "backward", (rows + 4) * micro, micro)
        neighbours = (not stage.first) + (not stage.last)
        total.add("pp", "send", "forward", 4 * neighbours, neighbours, once=True)  # hello
        total.add("pp", "all_reduce", "forward", reduced(8, layout.pp), once=True)
        for numbers in (config.moe.router.num_experts, len(SUMS)):
            size = config.num_layers * numbers * 8
            total.add("pp", "all_reduce", "forward", reduced(size, layout.pp), once=True)
    total.add("world", "all_gather", "forward", 88 * (layout.world_size - 1), once=True)
    _zero(planner, layout, stage, total, micro)
    _settle(planner, layout, stage, total)
    if clip and layout.world_size > 1:
        norm = reduced(8, layout.world_size)
        total.add("world", "all_reduce", "forward", norm, once=True)
    return total.flows()


def part_traffic(planner: Planner, kind: Kind, layout: ParallelLayout) -> list[Flow]:
    """Return what a rank sends for one part of the model in one micro-batch.

    Args:
        planner: of model and job.
        kind: a layer or an end of the model.
        layout: resolved.
    """
    experts = (layout.ep, layout.etp) if kind == "moe" else ()
    key = (kind, layout.tp, layout.cp, layout.stage_size, experts)
    found = planner.flows.get(key)
    if found is None:
        total = _Sum()
        _part(planner, kind, layout, total)
        planner.flows[key] = found = total.flows()
    return found


def _part(planner: Planner, kind: Kind, layout: ParallelLayout, total: _Sum) -> None:
    config, job, tp = planner.config, planner.job, layout.tp
    tokens, c = job.owned_tokens(layout), job.compute_bytes
    full = job.mode == "full"
    peers = tp - 1
    stream = tokens * config.dim * c * peers
    again = 1 if job.recompute == "none" else 2

    def gather(width: int) -> None:
        """One gathered input: again in backward where its weights train; its gradient summed."""
        sent = tokens * width * c * peers
        total.add("tp", "all_gather", "forward", sent * again, again)
        if full:
            total.add("tp", "all_gather", "backward", sent)
        total.add("tp", "reduce_scatter", "backward", sent)

    def scatter() -> None:
        total.add("tp", "reduce_scatter", "forward", stream * again, again)
        total.add("tp", "all_gather", "backward", stream)

    if kind == "embed":
        total.add("tp", "reduce_scatter", "forward", stream)
        if full:
            total.add("tp", "all_gather", "backward", stream)
        return
    if kind == "head":
        total.add("tp", "all_gather", "forward", stream)
        total.add("tp", "reduce_scatter", "forward", stream)
        full_chunks, rest = divmod(tokens * tp, job.loss_chunk)
        for chunk, times in ((job.loss_chunk, full_chunks), (rest, int(rest > 0))):
            if tp > 1:
                sent = reduced(4 * chunk, tp) + reduced(8 * chunk, tp)
                total.add("tp", "all_reduce", "forward", sent * times, 2 * times)
        return

    attention = config.attention
    if attention.mla is None:
        gather(config.dim)
    else:
        mla = attention.mla
        gather(config.dim if mla.q_rank is None else mla.q_rank)
        gather(mla.kv_rank)
        turned = tokens * mla.rope_dim * c * peers
        total.add("tp", "all_gather", "forward", turned * again, again)
        total.add("tp", "reduce_scatter", "backward", turned)
    if attention.qk_norm == "full" and tp > 1:
        shared = job.micro_batch * padded_length(job.seq_len, layout.cp) // layout.cp
        for _ in ("q", "k"):
            total.add("tp", "all_reduce", "forward", reduced(4 * shared, tp) * again, again)
            total.add("tp", "all_reduce", "backward", reduced(4 * shared, tp))
    _context(config, job, layout, total, again)
    scatter()
    if not full:  # what adapters send is r wide: q, k, v or the two latents' heads, and o
        low, inputs = tokens * job.lora_rank * c * peers, 3 if attention.mla is None else 2
        total.add("tp", "all_gather", "forward", inputs * low * again, inputs * again)
        total.add("tp", "reduce_scatter", "backward", inputs * low, inputs)
        total.add("tp", "reduce_scatter", "forward", low * again, again)
        total.add("tp", "all_gather", "backward", low)
    if kind == "dense":
        gather(config.dim)
        scatter()
        return
    if config.moe.shared_dim:
        gather(config.dim)
        scatter()
    _dispatch(planner, layout, total, again)
    router, stage = config.moe.router, layout.stage_size
    if stage > 1:
        counts = 8 * (3 * router.num_experts + 2)  # of three kinds, tokens, entropy
        total.add("stage", "all_reduce", "forward", reduced(counts, stage) * again, again)
        if router.balance_coef or router.z_coef:
            total.add("stage", "all_reduce", "forward", reduced(8, stage) * again, again)
    if router.balance_coef and router.balance_kind == "sequence":
        shared, dp = layout.cp * layout.tp, axis_sizes(layout)["dp"]
        size = 8 * job.micro_batch * (router.num_experts + 1)
        if shared > 1:
            total.add("cp_tp", "all_reduce", "forward", reduced(size, shared) * again, again)
        if dp > 1:
            total.add("dp", "all_reduce", "forward", reduced(8, dp) * again, again)


def _context(
    config: ModelConfig, job: Job, layout: ParallelLayout, total: _Sum, again: int
) -> None:
    """Add what the ranks of cp exchange for attention."""
    cp, a = layout.cp, config.attention
    if cp == 1:
        return
    tokens = job.micro_batch * padded_length(job.seq_len, cp) // cp
    heads = a.num_heads // layout.tp
    if a.mla is None:
        kv, key, value = max(1, -(-heads * a.num_kv_heads // a.num_heads)), a.head_dim, a.head_dim
    else:
        kv, key, value = heads, a.mla.qk_dim, a.mla.value_dim
    if job.cp_kind == "ulysses":
        kv *= cp // math.gcd(kv, cp)
        elements = heads * (key + value) + kv * (key + value)
        sent = tokens * elements * job.compute_bytes * (cp - 1) / cp
        total.add("cp", "all_to_all", "forward", sent * again, 4 * again)
        total.add("cp", "all_to_all", "backward", sent, 4)
        return
    block = tokens * kv * (key + value)
    once = block * job.compute_bytes * (cp - 1)
    total.add("cp", "ring", "forward", once * again, (cp - 1) * again)
    total.add("cp", "ring", "backward", once + block * 4 * cp, 2 * cp - 1)


def _dispatch(planner: Planner, layout: ParallelLayout, total: _Sum, again: int) -> None:
    """Add the rows to the experts and their sums back, in expectation."""
    config, job, ep, etp = planner.config, planner.job, layout.ep, layout.etp
    if ep * etp == 1:
        return
    tokens, c, dim = job.owned_tokens(layout), job.compute_bytes, config.dim
    rows = tokens * planner.rows(ep)  # that arrive at this rank, on average
    pairs = float(tokens * config.moe.router.top_k)
    away, others = (ep - 1) / ep, etp - 1
    # Selective recompute keeps what arrived; sums on their way back are never sent again.
    if job.recompute == "selective" and not job.resend_rows:
        again = 1
    if ep > 1:
        there = 16.0 * (ep - 1) + 6 * pairs * away + rows * away * dim * c
        forward = there * again + rows * away * dim * 4
        total.add("ep", "all_to_all", "forward", forward, 3 * again + 1)
        backward = 4 * pairs * away + 2 * rows * away * dim * c
        total.add("ep", "all_to_all", "backward", backward, 3)
    if etp > 1:
        gathered = others * (16.0 + pairs * 6 + rows * dim * c)
        total.add("etp", "all_gather", "forward", gathered * again, 4 * again)
        total.add("etp", "reduce_scatter", "forward", others * rows * dim * 4)
        summed = others * (pairs * 4 + rows * dim * c)
        total.add("etp", "reduce_scatter", "backward", summed, 2)
        total.add("etp", "all_gather", "backward", others * rows * dim * c)


def _zero(planner: Planner, layout: ParallelLayout, stage: Stage, total: _Sum, micro: int) -> None:
    """Add what `fully_shard` gathers and sums: stages 1 and 2 gather once a step."""
    if not layout.zero:
        return
    job, copies = planner.job, planner.job.dp_replicate
    full, replicas = job.mode == "full", zero_ranks(layout, job)
    gathers = micro if layout.zero == 3 else 1
    sums = 1 if layout.zero == 1 else micro
    for kind, count in stage.kinds:
        for domain, elements in planner.units(kind, layout):
            size = replicas[domain]
            axis, across = _SHARDS[domain], _COPIES[domain]
            split = elements * (size - 1) / size * count
            whole = split * job.compute_bytes
            total.add(axis, "fsdp", "forward", whole * gathers, count * gathers)
            if layout.zero == 3:
                total.add(axis, "fsdp", "backward", whole * micro, count * micro)
            if full:
                total.add(axis, "fsdp", "backward", split * 4.0 * sums, count * sums)
            if full and copies > 1 and not (domain == "expert" and layout.edp == 1):
                owed = 2.0 * 4.0 * elements / size * (copies - 1) / copies * count
                total.add(across, "all_reduce", "backward", owed, count, once=True)


def _settle(planner: Planner, layout: ParallelLayout, stage: Stage, total: _Sum) -> None:
    """Add the gradient sums of a step, in fp32."""
    sizes = axis_sizes(layout)
    owed: dict[tuple[str, ...], int] = defaultdict(int)
    for kind, count in stage.kinds:
        for axes, size in planner.owed(kind, layout).items():
            owed[axes] += count * size
    for axes, size in owed.items():
        for axis in axes:
            if sizes[axis] > 1:
                calls = -(-size // (64 << 20))
                sent = reduced(size, sizes[axis])
                total.add(axis, "all_reduce", "forward", sent, calls, once=True)
    for kind, count in stage.kinds:
        for axes, elements in planner.replica_sums(kind, layout):
            for axis in axes:
                sent = reduced(4 * elements, sizes[axis]) * count
                total.add(axis, "all_reduce", "forward", sent, count, once=True)


def by_axis(flows: list[Flow]) -> dict[str, float]:
    """Return bytes by axis."""
    found: dict[str, float] = defaultdict(float)
    for flow in flows:
        found[flow.axis] += flow.sent
    return dict(found)


__all__ = [
    "Flow",
    "by_axis",
    "part_traffic",
    "reduced",
    "stage_traffic",
    "step_traffic",
]
