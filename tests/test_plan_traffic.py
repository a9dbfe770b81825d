"""The planner's bytes of a step equal what is counted on the wire, with every kind of layout."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_cases import BASE, CASES
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from moe_tp.models import ModelConfig, build
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.plan.job import Job
from moe_tp.plan.memory import Planner
from moe_tp.plan.traffic import step_traffic
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora
from moe_tp.train.step import forward_backward

LENGTH, RANK = 12, 4


def config_of(name: str) -> ModelConfig:
    """Return a tiny model; `everywhere` and `odd` send every token to every expert."""
    if name == "odd":
        found = {**BASE, **CASES["mixtral"], "num_local_experts": 6, "num_experts_per_tok": 6}
        odd = {"hidden_size": 30, "head_dim": 8, "intermediate_size": 24, "vocab_size": 64}
        return ModelConfig.from_hub({**found, **odd})
    if name == "everywhere":
        found = {**BASE, **CASES["mixtral"], "num_local_experts": 4, "num_experts_per_tok": 4}
        return ModelConfig.from_hub({**found, "num_hidden_layers": 4})
    return ModelConfig.from_hub({**BASE, **CASES[name]})


class WireBytes(TorchDispatchMode):
    """Bytes sent by torch's own collectives: FSDP's and those of pipeline stages."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            ranks = ProcessGroup.unbox(args[2]).size()
            self.sent["fsdp"] += args[1].nbytes * (ranks - 1)
        elif name == "c10d::_reduce_scatter_base_":
            ranks = ProcessGroup.unbox(args[2]).size()
            self.sent["fsdp"] += args[1].nbytes * (ranks - 1) // ranks
        elif name == "c10d::allreduce_":
            ranks = ProcessGroup.unbox(args[1]).size()
            self.sent["all_reduce"] += 2 * args[0][0].nbytes * (ranks - 1) // ranks
        elif name == "c10d::send":
            self.sent["send"] += args[0][0].nbytes
        return func(*args, **(kwargs or {}))


def logged_step(name: str, layout: dict[str, int], job: Job) -> tuple[int, dict[str, int]]:
    runtime = Runtime(
        recompute=job.recompute,
        resend_rows=job.resend_rows,
        cp_kind=job.cp_kind,
        dp_replicate=job.dp_replicate,
        loss_chunk=job.loss_chunk,
        spare_slots=job.spare_slots,
    )
    mesh = Mesh(ParallelLayout(**layout), runtime)
    config = config_of(name)
    model = build(config, mesh)
    if job.mode == "lora":
        apply_lora(model, LoRAConfig(rank=RANK, alpha=8))
    generator = torch.Generator().manual_seed(mesh.coordinate("dp"))
    ids = torch.randint(0, config.vocab_size, (job.micro_batch, LENGTH), generator=generator)
    batches = [{"input_ids": ids, "labels": ids}] * job.micro_batches(mesh.layout)
    with record_traffic() as log, WireBytes() as wire:
        forward_backward(model, batches)
        settle_gradients(model)
        clip_grad_norm(model, 1.0)
    found: dict[str, int] = defaultdict(int)
    for axis, op, phase, sent in log.entries:
        found[f"{axis} {op} {phase}"] += sent
    for op, sent in wire.sent.items():
        found[f"wire {op}"] += sent
    return mesh.stage, {key: sent for key, sent in found.items() if sent}


def counted_step(name: str, layout: ParallelLayout, job: Job) -> list[dict[str, int]]:
    """Return the planner's bytes of each pipeline rank, under the keys of `logged_step`."""
    planner, result = Planner(config_of(name), job), []
    for stage in planner.stages(layout):
        counted: dict[str, float] = defaultdict(float)
        for flow in step_traffic(planner, layout, stage):
            own = flow.op in ("fsdp", "send") or "replicate" in flow.axis
            key = f"wire {flow.op}" if own else f"{flow.axis} {flow.op} {flow.phase}"
            counted[key] += flow.sent
        result.append({key: round(sent) for key, sent in counted.items() if round(sent)})
    return result


def job_of(layout: ParallelLayout, **changes: Any) -> Job:
    assert layout.dp is not None
    micro = 4 if layout.pp > 1 else 2
    plain = Job(
        seq_len=LENGTH,
        micro_batch=2,
        global_batch=2 * micro * layout.dp,
        compute_bytes=4,
        lora_rank=RANK,
    )
    return replace(plain, **changes)


ROWS: list[tuple[int, str, dict[str, int], dict[str, Any]]] = [
    (2, "mixtral", {"zero": 1}, {}),
    (2, "mixtral", {"zero": 3}, {}),
    (2, "deepseek_v3", {"tp": 2}, {"recompute": "selective"}),
    (2, "everywhere", {"etp": 2}, {"recompute": "full"}),
    (2, "everywhere", {"ep": 2}, {"recompute": "selective"}),
    (2, "everywhere", {"pp": 2}, {}),
    (2, "mixtral", {"cp": 2}, {"cp_kind": "ring"}),
    (2, "everywhere", {"ep": 2, "zero": 1}, {"mode": "lora", "spare_slots": 1}),
    (2, "everywhere", {"ep": 2}, {"spare_slots": 1}),
]
MORE: list[tuple[int, str, dict[str, int], dict[str, Any]]] = [
    (2, "mixtral", {"zero": 2}, {}),
    (2, "qwen2_moe", {"tp": 2}, {"recompute": "full"}),
    (2, "everywhere", {"ep": 2}, {}),
    (2, "mixtral", {"cp": 2}, {}),
    (2, "mixtral", {"zero": 3}, {"recompute": "full"}),
    (2, "everywhere", {"ep": 2}, {"recompute": "full"}),
    (2, "everywhere", {"ep": 2}, {"recompute": "selective", "resend_rows": True}),
    (2, "everywhere", {"etp": 2}, {}),
    (2, "everywhere", {"zero": 3}, {"mode": "lora"}),
    (2, "deepseek_v3", {"cp": 2}, {}),
    (2, "mixtral", {"tp": 2}, {"mode": "lora", "recompute": "full"}),
    (4, "everywhere", {"ep": 2, "etp": 2, "tp": 2}, {}),
    (4, "everywhere", {"pp": 2, "ep": 2, "zero": 1}, {}),
    (4, "mixtral", {"zero": 2}, {"dp_replicate": 2}),
    (4, "mixtral", {"zero": 3}, {"dp_replicate": 2}),
    (4, "qwen2_moe", {"pp": 2, "tp": 2}, {"recompute": "selective"}),
    (4, "mixtral", {"cp": 2, "tp": 2}, {}),
]
SPARE: list[tuple[int, str, dict[str, int], dict[str, Any]]] = [
    (4, "everywhere", {"dp": 4, "ep": 2, "zero": 1}, {"spare_slots": 1}),
    (8, "odd", {"dp": 8, "ep": 2, "zero": 3}, {"spare_slots": 1}),  # ZeRO deals the slots
]


def differences(rows: list[tuple[int, str, dict[str, int], dict[str, Any]]]) -> list[str]:
    wrong = []
    for ranks, name, degrees, changes in rows:
        layout = ParallelLayout(**degrees).resolve(ranks)
        job = job_of(layout, **changes)
        counted = counted_step(name, layout, job)
        for rank, (stage, logged) in enumerate(
            run_ranks(logged_step, ranks, name, degrees, job, timeout=120.0)
        ):
            keys = sorted({*logged, *counted[stage]})
            off = {k: (logged.get(k, 0), counted[stage].get(k, 0)) for k in keys}
            off = {k: pair for k, pair in off.items() if pair[0] != pair[1]}
            if off:
                wrong.append(f"{name} {layout} {changes} rank {rank}: (logged, planned) {off}")
    return wrong


def test_traffic_equals_what_is_counted() -> None:
    """ZeRO 1-3, pp, cp, expert axes, LoRA, recompute: bytes by axis, collective and pass."""
    wrong = differences(ROWS)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_traffic_equals_what_is_counted_in_more_layouts() -> None:
    wrong = differences(MORE)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_traffic_with_spare_slots() -> None:
    """Sums over replicas, where ZeRO splits within them and where it deals the slots."""
    wrong = differences(SPARE)
    assert not wrong, "\n".join(wrong)
