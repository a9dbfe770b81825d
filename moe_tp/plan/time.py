"""Seconds of an optimiser step: compute, exposed communication, pipeline bubble.

Letters: T owned tokens · D width · F expert hidden · E experts · K choices.

Compute is operations over an achievable rate: the peak times one efficiency, falling off with few
rows a matmul. Besides, what norms, residuals, activations and permutations move is counted over the
memory's bandwidth. All tp, ep, etp and cp traffic is taken as exposed; ZeRO's hides behind a part
of the compute; gradient sums at `zero=0` come after backward and are exposed. The bubble is that
of 1F1B, (pp - 1) / (pp - 1 + micro-batches) (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_tp.parallel.layout import ParallelLayout
from moe_tp.plan.axes import axis_sizes, spans
from moe_tp.plan.hardware import Hardware
from moe_tp.plan.memory import Planner
from moe_tp.plan.params import Kind
from moe_tp.plan.stages import Stage, part_flops
from moe_tp.plan.traffic import Flow, part_traffic, stage_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step.

    Args:
        compute: matmuls and what else moves through memory.
        exposed: communication that nothing hides.
        bubble: pipeline ranks waiting.
        optimizer: reading and writing states.
        tokens_per_second: of all GPUs.
        model_flops: useful operations a second and GPU (no recompute counted).
        bound: what takes most: `compute`, an axis, `bubble`.
    """

    compute: float
    exposed: float
    bubble: float
    optimizer: float
    tokens_per_second: float
    model_flops: float
    bound: str

    @property
    def total(self) -> float:
        """Seconds."""
        return self.compute + self.exposed + self.bubble + self.optimizer


class Part(NamedTuple):
    """Seconds of one micro-batch in one layer, or in an end of the model.

    Args:
        compute: of forward and backward.
        exposed: of traffic, by axis.
        seconds: of both.
    """

    compute: float
    exposed: dict[str, float]
    seconds: float


class Clock:
    """Times of layouts of one planner on one kind of GPU; remembers what layouts share.

    Args:
        planner: of model and job.
        gpu: rates.
    """

    def __init__(self, planner: Planner, gpu: Hardware) -> None:
        self.planner, self.gpu = planner, gpu
        self._parts: dict[tuple[object, ...], Part] = {}
        self._layouts: dict[tuple[int, ...], dict[Kind, Part]] = {}

    def part(self, kind: Kind, layout: ParallelLayout) -> Part:
        """Return the time of one micro-batch in one layer, or in an end of the model."""
        experts = (layout.ep, layout.etp) if kind == "moe" else ()
        key = (kind, layout.tp, layout.cp, layout.stage_size, experts)
        if key not in self._parts:
            flows = part_traffic(self.planner, kind, layout)
            compute = _compute(self.planner, layout, kind, self.gpu)
            exposed = communication(flows, layout, self.gpu, 0.0, 1)
            self._parts[key] = Part(compute, exposed, compute + sum(exposed.values()))
        return self._parts[key]

    def parts(self, layout: ParallelLayout) -> dict[Kind, Part]:
        """Return the time of one micro-batch in every kind of part that the model has."""
        key = (layout.tp, layout.cp, layout.stage_size, layout.ep, layout.etp)
        found = self._layouts.get(key)
        if found is None:
            found = {kind: self.part(kind, layout) for kind in self.planner.kinds}
            self._layouts[key] = found
        return found

    def stage(
        self, layout: ParallelLayout, stage: Stage, parts: dict[Kind, Part]
    ) -> tuple[float, dict[str, float]]:
        """Return seconds of compute and of exposed traffic by axis, of a step."""
        micro = self.planner.job.micro_batches(layout)
        compute, axes = 0.0, dict[str, float]()
        for kind, count in stage.kinds:
            compute += parts[kind].compute * count * micro
            for axis, more in parts[kind].exposed.items():
                axes[axis] = axes.get(axis, 0.0) + more * count * micro
        flows = stage_traffic(self.planner, layout, stage)
        for axis, more in communication(
            flows, layout, self.gpu, compute, self.planner.job.dp_replicate
        ).items():
            axes[axis] = axes.get(axis, 0.0) + more
        return compute, axes

    def step(self, layout: ParallelLayout) -> StepTime:
        """Return the time of a step, set by the slowest pipeline rank."""
        planner, job, parts = self.planner, self.planner.job, self.parts(layout)
        micro = job.micro_batches(layout)
        # the ends of a pipeline differ from its middle: the slowest by what its layers need
        stage = max(
            planner.unlike_stages(layout),
            key=lambda s: sum(parts[kind].seconds * count for kind, count in s.kinds),
        )
        compute, axes = self.stage(layout, stage, parts)
        busy = compute + sum(axes.values())
        once = axes.pop("once", 0.0)
        bubble = (busy - once) * (layout.pp - 1) / micro
        full = job.mode == "full"
        # read p, g, m, v; write p, m, v
        optimizer = planner.trained(layout, stage) * 28.0 / self.gpu.bandwidth
        tokens = float(job.global_batch * job.seq_len)
        total = busy + bubble + optimizer
        useful = planner.forward_flops(layout) * (3.0 if full else 2.0)
        shares = {"compute": compute, "bubble": bubble, "gradients": once, **axes}
        return StepTime(
            compute=compute,
            exposed=busy - compute,
            bubble=bubble,
            optimizer=optimizer,
            tokens_per_second=tokens / total,
            model_flops=useful * tokens / total / layout.world_size,
            bound=max(shares, key=lambda name: shares[name]),
        )


def _compute(planner: Planner, layout: ParallelLayout, kind: Kind, gpu: Hardware) -> float:
    """Return seconds of one part's forward and backward of a micro-batch."""
    config, job = planner.config, planner.job
    tokens = job.owned_tokens(layout)
    sent = tokens * layout.etp * config.moe.router.top_k * layout.ep
    rows = sent / config.moe.router.num_experts  # of one expert
    again = 3.0 if job.mode == "full" else 2.0
    again += 1.0 if job.recompute != "none" and kind != "head" else 0.0
    dense, routed, scores = part_flops(config, kind, job.seq_len)
    # tp gathers the tokens of its ranks, and each computes its share of the outputs
    work = (dense + scores) * (1.0 + gpu.half_rows / (tokens * layout.tp))
    work += routed * planner.skew(layout, job.skew) * (1.0 + gpu.half_rows / rows)
    seconds = work * tokens * again / (gpu.flops * gpu.matmul_efficiency)
    return seconds + _moved(planner, layout, kind, tokens) * again / 2.0 / gpu.bandwidth


def _moved(planner: Planner, layout: ParallelLayout, kind: Kind, tokens: int) -> float:
    """Return bytes that elementwise work and permutations move in one forward."""
    if kind in ("embed", "head"):
        return 0.0
    config, c = planner.config, planner.job.compute_bytes
    moved = 12.0 * tokens * config.dim * c
    a = config.attention
    moved += 4.0 * tokens * (a.num_heads + a.num_kv_heads) * a.head_dim * c
    if kind == "dense":
        return moved + 3.0 * tokens * config.dense_dim * c
    pairs = tokens * config.moe.router.top_k * planner.skew(layout, planner.job.skew)
    moved += pairs * (4.0 * config.dim * layout.etp + 5.0 * config.moe.expert_dim) * c
    return moved + 3.0 * tokens * config.moe.shared_dim * c


def communication(
    flows: list[Flow], layout: ParallelLayout, gpu: Hardware, compute: float, replicate: int
) -> dict[str, float]:
    """Return exposed seconds by axis, and those that come once a step under `once`."""
    result: dict[str, float] = {}
    if not flows:
        return result
    reach, sizes = spans(layout, replicate), axis_sizes(layout, replicate)
    hidden = 0.0
    for flow in flows:
        size, span = sizes[flow.axis], reach[flow.axis]
        seconds = flow.calls * gpu.latency
        if span <= gpu.node_size:
            seconds += flow.sent / (gpu.link * gpu.link_efficiency)
        else:
            step = span / size  # ranks between neighbours of the group
            inside = max(1.0, gpu.node_size // step)
            rate = gpu.network * gpu.link_efficiency
            if flow.op in ("all_reduce", "fsdp", "send"):
                # rings cross once for each of a node's members, which share its ports
                seconds += flow.sent / (rate * (1.0 if flow.op == "send" else inside))
            else:
                away = (size - inside) / max(1, size - 1)
                near = flow.sent * (1.0 - away) / (gpu.link * gpu.link_efficiency)
                seconds += max(near, flow.sent * away / rate)
        if flow.op == "fsdp":
            hidden += seconds
            continue
        name = "once" if flow.once else flow.axis
        result[name] = result.get(name, 0.0) + seconds
    if hidden:
        result["zero"] = max(0.0, hidden - gpu.overlap * compute)
    return result
