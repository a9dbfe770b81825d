"""Peak memory of a rank at each ZeRO stage, against the formulas of docs/layouts.md.

A model of about 300 M parameters takes an AdamW step of two micro-batches on 4 local ranks, in
fp32, its states made before. Peak memory is what tensors hold: the bytes of all storages alive,
measured after every operator of the step (`moe_tp.parallel.live`); scratch inside operators,
buffers of gloo and the interpreter are not in it. The fullest rank counts.

    python benchmarks/memory.py --write    # also writes benchmarks/memory-DATE.md
"""

from __future__ import annotations

import argparse
import datetime
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_tp import Mesh, ParallelLayout, Runtime, clip_grad_norm, forward_backward, settle_gradients
from moe_tp.models.config import ModelConfig
from moe_tp.models.families import preset
from moe_tp.models.load import allocate, wrap_units
from moe_tp.parallel.gradients import parameter_groups
from moe_tp.parallel.live import LiveBytes, tensors_of
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

MIB = 1 << 20
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.0,
}
TOKENS = 16
SMALL = {**SIZES, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes of one rank.

    Args:
        peak: measured.
        where: in what part of the step.
        whole: its parameters before ZeRO.
        shard: its parameters at rest.
        group: the largest unit that ZeRO gathers at once.
        tensor: its largest parameter at rest.
    """

    peak: int
    where: str
    whole: int
    shard: int
    group: int
    tensor: int


def model_config(sizes: dict[str, Any]) -> ModelConfig:
    """Return a Mixtral of these sizes."""
    return preset("mixtral", **sizes)


def measure(sizes: dict[str, Any], layout: dict[str, int], runtime: dict[str, Any]) -> Found:
    """Return what one rank held; runs on every rank."""
    mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
    config = model_config(sizes)
    model = allocate(config, mesh, torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for entry in named_specs(model):
            to_local(entry.param).normal_(std=0.02, generator=generator)
    optimiser = torch.optim.AdamW(parameter_groups(model), lr=1e-4)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimiser.step()  # makes its states
    optimiser.zero_grad()
    ids = torch.randint(0, config.vocab_size, (1, TOKENS), generator=generator)
    batches = [{"input_ids": ids, "labels": ids}] * 2
    parts: dict[str, int] = {}
    with LiveBytes() as live:
        live.add(tensors_of(model))
        live.add(v for s in optimiser.state.values() for v in s.values())
        for name, work in (
            ("forward_backward", lambda: forward_backward(model, batches)),
            ("settle_gradients", lambda: settle_gradients(model)),
            ("clip_grad_norm", lambda: clip_grad_norm(model, 1.0)),
            ("optimiser", optimiser.step),
        ):
            live.peak = live.now()
            work()
            parts[name] = live.peak
    where, peak = max(parts.items(), key=lambda part: part[1])
    shards = {e.fqn: to_local(e.param).nbytes for e in named_specs(model)}
    replicas = {"dense": mesh.size("dp_cp"), "expert": mesh.size("edp")}

    def before(entry: Any) -> int:
        split = layout["zero"] and entry.spec.zero_sharded
        return shards[entry.fqn] * (replicas[entry.spec.domain] if split else 1)

    names = {id(e.param): e for e in named_specs(model)}
    groups, seen = [0], set()
    for unit in wrap_units(model):
        mine = [names[id(p)] for p in unit.module.parameters() if id(p) not in seen]
        seen |= {id(e.param) for e in mine}
        groups.append(sum(before(e) for e in mine))
    return Found(
        peak=peak,
        where=where,
        whole=sum(before(e) for e in named_specs(model)),
        shard=sum(shards.values()),
        group=max(groups),
        tensor=max(shards.values()),
    )


def formula(zero: int, found: Found) -> int:
    """Return the bytes that docs/layouts.md gives for fp32 AdamW with accumulation."""
    p, s, g, t = found.whole, found.shard, found.group, found.tensor
    return (4 * p + 2 * t, 3 * s + 2 * p + 2 * g, 4 * s + p + 3 * g, 4 * s + 4 * g)[zero]


def table(
    sizes: dict[str, Any], layout: dict[str, int], ranks: int, stages: list[int]
) -> tuple[list[str], bool]:
    """Return the rows of the table, and whether every bound holds."""
    config = model_config(sizes)
    total = config.num_params()
    lines = [
        "| zero | peak of a rank | in | formula | peak / formula | bound | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    fine = True
    for zero in stages:
        found = max(
            run_ranks(measure, ranks, sizes, {**layout, "zero": zero}, {}, timeout=380),
            key=lambda f: f.peak,
        )
        want = formula(zero, found)
        if zero < 3:
            bound, holds = "within 10 %", abs(found.peak / want - 1.0) <= 0.10
        else:
            most = 1.15 * 16 * total / ranks + 4 * found.group
            bound, holds = f"{most / MIB:.0f} MiB", found.peak <= most
        fine = fine and holds
        lines.append(
            f"| {zero} | {found.peak / MIB:.0f} MiB | {found.where} | {want / MIB:.0f} MiB | "
            f"{found.peak / want:.3f} | {bound} | {'yes' if holds else 'NO'} |"
        )
        print(lines[-1], found, flush=True)
    return lines, fine


def main() -> int:
    """Return 0 when every bound holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1, 2, 3], help="stages")
    parser.add_argument("--small", action="store_true", help="a model for a rehearsal")
    parser.add_argument("--write", action="store_true", help="write the dated table")
    options = parser.parse_args()
    sizes = SMALL if options.small else SIZES
    lines, fine = table(sizes, {"ep": options.ep}, options.ranks, options.zero)
    total = model_config(sizes).num_params()
    today = datetime.date.today()
    head = f"""# Peak memory of a rank, {today}

`python benchmarks/memory.py --ranks {options.ranks} --ep {options.ep}`

Mixtral of {total / 1e6:.0f} M parameters: {sizes["num_hidden_layers"]} layers, width \
{sizes["hidden_size"]}, {sizes["num_local_experts"]} experts of {sizes["intermediate_size"]}, \
vocabulary {sizes["vocab_size"]}.
fp32 weights and AdamW states, two micro-batches of {TOKENS} tokens a rank; {options.ranks} ranks,
gloo, {platform.machine()}, one thread each, torch {torch.__version__}. Bytes of tensor storages
alive, peak over a step, fullest rank. The formulas are those of docs/layouts.md; the bound of
stage 3 is 1.15 x (parameters + gradients + states) / ranks + 4 x the largest wrapped group.

"""
    text = head + "\n".join(lines) + "\n"
    print(text)
    if options.write:
        Path(__file__).with_name(f"memory-{today}.md").write_text(text)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
