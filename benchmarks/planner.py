"""Peak memory of a training step on local ranks, against what the planner says.

Each row is a step of two micro-batches (four with pipeline stages) with clipping and the optimiser,
after a first one that makes the states, on gloo ranks. Peak memory is what tensors hold: the bytes
of all storages alive, measured after every operator (`moe_tp.parallel.live`); scratch inside
operators, buffers of gloo and the interpreter are not in it. The planner's figure is without its
margins, and gets the skew of the load that the run had. The fullest rank counts on both sides.

    python benchmarks/planner.py --write    # also writes benchmarks/planner-DATE.md
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moe_tp import Mesh, ParallelLayout, Runtime, clip_grad_norm, forward_backward, settle_gradients
from moe_tp.experts import elementwise, workspace
from moe_tp.models import ModelConfig, build
from moe_tp.models.families import preset
from moe_tp.parallel.live import LiveBytes, tensors_of
from moe_tp.plan.job import Job
from moe_tp.plan.memory import Planner
from moe_tp.plan.moments import Memory
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora
from moe_tp.train.config import TrainConfig
from moe_tp.train.optim import make_optimizer

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "vocab_size": 1000,
        "hidden_size": 96,
        "moe_intermediate_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "deepseek_v3": {
        "vocab_size": 1024,
        "hidden_size": 96,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,  # torch's fused attention on CPUs wants equal widths
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured run.

    Args:
        model: of `SIZES`.
        ranks: of the run.
        layout: degrees that are not 1.
        job: fields of `Job` that are not its defaults.
        skewed: few distinct tokens, so that few experts get most of the load.
    """

    model: str
    ranks: int
    layout: dict[str, int]
    job: dict[str, Any]
    skewed: bool = False

    def __str__(self) -> str:
        layout = ParallelLayout(**self.layout).resolve(self.ranks)
        words = [f"{name}={value}" for name, value in self.job.items()]
        return ", ".join([self.model, str(layout), *words, *["skewed"] * self.skewed])

    def planned_for(self) -> Job:
        """Return the job; its skew is known only after the run."""
        pipeline = self.layout.get("pp", 1) > 1
        layout = ParallelLayout(**self.layout).resolve(self.ranks)
        assert layout.dp is not None
        plain: dict[str, Any] = {
            "seq_len": 256,
            "micro_batch": 2,
            "global_batch": 2 * (4 if pipeline else 2) * layout.dp,
            "lora_rank": 8,
            "loss_chunk": 128,
            "margin": 0.0,
            "reserve": 0.0,
            "skew": 1.0,
            "kernel": "loop",
        }
        return Job(**{**plain, **self.job})


def _cases(model: str, *rows: tuple[int, dict[str, int], dict[str, Any]]) -> list[Case]:
    return [Case(model=model, ranks=n, layout=layout, job=job) for n, layout, job in rows]


FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
LORA = {"mode": "lora"}
TOKENS = {"seq_len": 32}  # so few that sums and the optimiser need most
SEEN: list[Case] = [
    *_cases(
        "mixtral",
        (1, {}, {}),
        (1, {}, FULL),
        (1, {}, SELECTIVE),
        (1, {}, LORA),
        (1, {}, {"optimizer": "sgd"}),
        (1, {}, {**TOKENS, "kernel": "foreach"}),
        (1, {}, {**TOKENS, "kernel": "loop"}),
        (1, {}, {"global_batch": 2}),
        (2, {"tp": 2}, {}),
        (2, {"ep": 2}, {}),
        (2, {"etp": 2}, {}),
        (2, {"dp": 2}, {}),
        (2, {"zero": 1}, {}),
        (2, {"zero": 2}, {}),
        (2, {"zero": 3}, {}),
        (2, {"pp": 2}, {}),
        (2, {"cp": 2}, {}),
        (2, {"cp": 2}, {"cp_kind": "ring"}),
        (2, {"tp": 2, "ep": 2}, LORA),
        (4, {"tp": 2, "ep": 4, "zero": 3}, {}),
        (4, {"ep": 2, "etp": 2}, FULL),
        (4, {"pp": 2, "ep": 2, "zero": 1}, SELECTIVE),
    ),
    *_cases(
        "qwen3_moe",
        (1, {}, {}),
        (1, {}, {"compute_bytes": 4}),
        (1, {}, {**TOKENS, "optimizer": "muon"}),
        (1, {}, {**TOKENS, "moments": "bfloat16"}),
        (1, {}, {**TOKENS, "moments": "8bit"}),
        (1, {}, {"master_bytes": 2, "moments": "bfloat16"}),
        (2, {"ep": 2}, {}),
        (2, {"ep": 2}, SELECTIVE),
        (2, {"ep": 2}, FULL),
        (2, {"tp": 2, "ep": 2}, {}),
        (2, {"ep": 2, "zero": 3}, LORA),
        (4, {"tp": 2, "ep": 2, "etp": 2}, {}),
        (4, {"pp": 2, "tp": 2, "ep": 2}, {}),
        (4, {"ep": 4, "zero": 2}, FULL),
    ),
    Case(model="mixtral", ranks=2, layout={"ep": 2}, job={}, skewed=True),
    Case(model="qwen3_moe", ranks=4, layout={"ep": 4}, job=SELECTIVE, skewed=True),
]
UNSEEN: list[Case] = _cases(
    "deepseek_v3",
    (1, {}, {}),
    (1, {}, SELECTIVE),
    (2, {"tp": 2}, FULL),
    (2, {"ep": 2, "zero": 1}, {}),
    (2, {"pp": 2}, FULL),
    (2, {"cp": 2, "ep": 2}, {}),
    (4, {"tp": 2, "ep": 4}, {}),
    (4, {"zero": 3, "ep": 2, "etp": 2}, {}),
    (4, {"pp": 2, "ep": 2}, SELECTIVE),
    (4, {"tp": 4, "ep": 2}, LORA),
)
SHORT = [SEEN[i] for i in (0, 9, 14, 18)]  # what the default tests measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one rank measured.

    Args:
        peak: bytes.
        counts_LE: choices of each layer and expert, of all ranks.
    """

    peak: int
    counts_LE: list[list[int]]


def model_config(name: str) -> ModelConfig:
    """Return a small model of a family."""
    return preset(name, **SIZES[name])


def measure(case: Case) -> Found:
    """Return the peak of the second step; runs on every rank."""
    job = case.planned_for()
    bf16 = job.compute_bytes == 2
    runtime = Runtime(
        compute_dtype=torch.bfloat16 if bf16 else None,
        recompute=job.recompute,
        cp_kind=job.cp_kind,
        dp_replicate=job.dp_replicate,
        offload=job.offload,
        loss_chunk=job.loss_chunk,
        experts="grouped_mm",  # as on a GPU
    )
    workspace.SMALLEST = 1 << 62  # the CPU's cache of buffers off, as on a GPU
    elementwise.CHUNK["cpu"] = elementwise.CHUNK["cuda"]
    mesh = Mesh(ParallelLayout(**case.layout), runtime)
    config = model_config(case.model)
    narrow = job.mode == "lora" or job.master_bytes == 2
    model = build(config, mesh, dtype=torch.bfloat16 if narrow else torch.float32)
    if job.mode == "lora":
        apply_lora(model, LoRAConfig(rank=job.lora_rank, alpha=2.0 * job.lora_rank))
    plain = job.optimizer == "adamw" and job.moments == "float32"
    settings = TrainConfig(
        steps=1,
        lr=1e-4,
        optimizer=job.optimizer,
        moments=job.moments,
        kernel=job.kernel if plain else "auto",
    )
    optimizer = make_optimizer(model, settings)
    generator = torch.Generator().manual_seed(mesh.coordinate("dp"))
    words = 3 if case.skewed else config.vocab_size
    shape = (job.micro_batch, job.seq_len)
    batches = []
    for _ in range(job.micro_batches(mesh.layout)):
        ids = torch.randint(0, words, shape, generator=generator)
        batches.append({"input_ids": ids, "labels": ids})
    peak, counts = 0, torch.zeros(0)
    for step in range(2):
        with LiveBytes() as live:
            live.add(tensors_of(model))
            live.add(v for s in optimizer.state.values() for t in s.values() for v in parts_of(t))
            out = forward_backward(model, batches, step=step)
            settle_gradients(model)
            clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        peak, counts = live.peak, out.aux.counts_LE
    return Found(peak=peak, counts_LE=counts.tolist())


def parts_of(value: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor, or what a quantised one is made of."""
    local = value.to_local() if isinstance(value, DTensor) else value
    names = ("codes", "scale", "qmap")
    return [getattr(local, name) for name in names if hasattr(local, name)] or [local]


def with_skews(job: Job, case: Case, found: Found) -> Job:
    """Return the job with the skew of a run: of all layers together, and of the fullest one."""
    ep = case.layout.get("ep", 1)
    counts_LE = torch.tensor([row for row in found.counts_LE if any(row)], dtype=torch.float64)
    share = -(-counts_LE.shape[1] // ep)
    loads_LP = torch.stack([part.sum(1) for part in counts_LE.split(share, dim=1)], dim=1)
    loads_LP /= loads_LP.mean(1, keepdim=True)
    busiest = int(loads_LP.sum(0).argmax())
    own_L = loads_LP[:, busiest]
    return replace(
        job,
        skew=max(1.0, float(own_L.mean())),
        layer_skew=max(1.0, float(own_L.max())),
    )


def compare(case: Case) -> tuple[int, Memory]:
    """Return measured bytes and the planner's figure."""
    found = max(run_ranks(measure, case.ranks, case, timeout=200.0), key=lambda f: f.peak)
    job = with_skews(case.planned_for(), case, found)
    planner = Planner(model_config(case.model), job)
    return found.peak, planner.peak(ParallelLayout(**case.layout).resolve(case.ranks))


def main() -> int:
    """Return 0 when every row is within 10 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the dated table")
    options = parser.parse_args()
    lines = ["| model, layout, settings | planner | measured | error |", "|---|---|---|---|"]
    fine, begun = True, time.perf_counter()
    for case in SEEN + UNSEEN:
        peak, memory = compare(case)
        error = memory.total / peak - 1.0
        fine = fine and abs(error) <= 0.10
        lines.append(
            f"| {case} | {memory.total / 1e6:.2f} MB | {peak / 1e6:.2f} MB | {error:+.1%} |"
        )
        print(lines[-1], flush=True)
    today = datetime.date.today()
    head = f"""# The planner's memory against measured peaks, {today}

`python benchmarks/planner.py` ({time.perf_counter() - begun:.0f} s); gloo, {platform.machine()},
one thread a rank, torch {torch.__version__}. Bytes of tensor storages alive, peak over the second
step, fullest rank. bf16 compute over fp32 weights, or LoRA over bf16 weights; 256 tokens a
sequence, two sequences a micro-batch. The rows of {UNSEEN[0].model} were run once, after the model
of memory had been frozen.

"""
    text = head + "\n".join(lines) + "\n"
    if options.write:
        Path(__file__).with_name(f"planner-{today}.md").write_text(text)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
