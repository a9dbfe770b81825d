"""Times of the planner against published runs of other systems.

Nothing is measured here and nothing is fitted: each row is a layout that somebody published, with
what they reached, beside what the planner says of it with the hardware table as it stands. What the
source does not say is assumed, and stands in the row. Skew is 1.

    python benchmarks/published.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from moe_tp import ParallelLayout
from moe_tp.models.families import preset
from moe_tp.plan.hardware import Hardware, hardware
from moe_tp.plan.job import Job
from moe_tp.plan.memory import Planner
from moe_tp.plan.time import Clock, communication
from moe_tp.plan.traffic import part_traffic

Unit = Literal["tokens/s/GPU", "TFLOP/s/GPU"]
H800 = hardware("H100", name="H800", link=200e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run.

    Args:
        what: model, system and source.
        assumed: what the source does not say.
        model: family and preset.
        gpus, layout, job: of the run.
        gpu: its kind.
        reached: the published figure.
        unit: of it.
    """

    what: str
    assumed: str
    model: tuple[str, str]
    gpus: int
    layout: dict[str, int]
    job: dict[str, Any]
    reached: float
    unit: Unit = "tokens/s/GPU"
    gpu: Hardware = field(default_factory=lambda: hardware("H100"))


LAYER = (4.33e-3, 7.68e-3)  # seconds forward and backward
QWEN, DEEPSEEK = ("qwen3_moe", "30b-a3b"), ("deepseek_v3", "v3")
RUNS = [
    Run(
        what="Mixtral 8x7B, 64 H100, EP8 PP4 (Megatron-LM)",
        assumed="global batch 256",
        model=("mixtral", "8x7b"),
        gpus=64,
        layout={"ep": 8, "pp": 4, "zero": 1},
        job={"global_batch": 256},
        reached=468.0,
        unit="TFLOP/s/GPU",
    ),
    Run(
        what="Qwen3-30B-A3B, 8 H100, EP8 FSDP8, 4096 tokens (Automodel)",
        assumed="global batch 512",
        model=QWEN,
        gpus=8,
        layout={"ep": 8, "zero": 3},
        job={"global_batch": 512},
        reached=12040.0,
    ),
    Run(
        what="Qwen3-30B-A3B, 8 H100, tp = ep = 8, 2048 tokens (transformers)",
        assumed="8 sequences a step",
        model=QWEN,
        gpus=8,
        layout={"tp": 8, "ep": 8},
        job={"global_batch": 8, "seq_len": 2048},
        reached=3485.0,
    ),
    Run(
        what="DeepSeek-V3, 512 H100 (torchtitan)",
        assumed="EP32 ZeRO 3, full recompute, global batch 1024",
        model=DEEPSEEK,
        gpus=512,
        layout={"ep": 32, "zero": 3},
        job={"global_batch": 1024, "recompute": "full"},
        reached=346.0,
    ),
    Run(
        what="DeepSeek-V3, 512 H100 with DeepEP (torchtitan)",
        assumed="EP32 ZeRO 3, full recompute, global batch 1024",
        model=DEEPSEEK,
        gpus=512,
        layout={"ep": 32, "zero": 3},
        job={"global_batch": 1024, "recompute": "full"},
        reached=579.0,
    ),
    Run(
        what="DeepSeek-V3, 2048 H800, PP16 EP64 ZeRO 1 (arXiv:2412.19437: 14.8 T tokens in 2.664 M "
        "GPU hours)",
        assumed="1F1B in bf16; theirs is DualPipe in fp8",
        model=DEEPSEEK,
        gpus=2048,
        layout={"pp": 16, "ep": 64, "zero": 1},
        job={"global_batch": 15360, "recompute": "selective"},
        reached=14.8e12 / (2.664e6 * 3600),
        gpu=H800,
    ),
]


def planned(run: Run) -> float:
    """Return the planner's figure in the run's unit."""
    job = Job(skew=1.0, **run.job)
    layout = ParallelLayout(**run.layout).resolve(run.gpus)
    step = Clock(Planner(preset(*run.model), job), run.gpu).step(layout)
    if run.unit == "TFLOP/s/GPU":
        return step.model_flops / 1e12
    return step.tokens_per_second / run.gpus


def layer_seconds() -> tuple[float, float]:
    """Return seconds of one Mixtral MoE layer forward and backward, 4096 tokens a rank at EP8."""
    bare = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}  # next to nothing
    planner = Planner(preset("mixtral", "8x7b", **bare), Job(skew=1.0, global_batch=8))
    layout, gpu = ParallelLayout(ep=8).resolve(8), hardware("H100")
    compute = Clock(planner, gpu).part("moe", layout).compute
    found = []
    for phase, part in (("forward", 1 / 3), ("backward", 2 / 3)):
        flows = [f for f in part_traffic(planner, "moe", layout) if f.phase == phase]
        found.append(compute * part + sum(communication(flows, layout, gpu, 0.0, 1).values()))
    return found[0], found[1]


def main() -> None:
    """Print the table."""
    print("| run | assumed | published | planner | error |")
    print("|---|---|---|---|---|")
    what = "MoE layer of Mixtral 8x7B, 4096 tokens a rank, 8 H100, EP8 (Megatron-LM, moe_perf)"
    for name, ours, theirs in zip(("forward", "backward"), layer_seconds(), LAYER, strict=True):
        print(
            f"| {what}, {name} | balanced | {theirs * 1e3:.2f} ms | {ours * 1e3:.2f} ms | "
            f"{ours / theirs - 1.0:+.0%} |"
        )
    for run in RUNS:
        found = planned(run)
        print(
            f"| {run.what} | {run.assumed} | {run.reached:.0f} {run.unit} | {found:.0f} | "
            f"{found / run.reached - 1.0:+.0%} |"
        )


if __name__ == "__main__":
    main()
