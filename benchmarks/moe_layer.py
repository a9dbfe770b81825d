"""Time of the MoE layer, forward and backward, against transformers' and against dense matmuls.

One process. `dense` is the lower bound that no layer reaches: a SwiGLU MLP on T x K rows, the same
arithmetic without routing, sorting or grouping. All layers hold the same weights, and are compared
in fp32 before anything is timed. The time is the median over the repeats, which go around the
candidates in turn, so that a busy moment of the machine falls on all of them.

    python benchmarks/moe_layer.py --write    # also writes benchmarks/moe_layer-DATE.md
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from moe_tp import Mesh, MoE, Runtime
from moe_tp.routing import RouterConfig

Step = Callable[[torch.Tensor], torch.Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def their_layer(sizes: argparse.Namespace, dtype: torch.dtype, how: str) -> MixtralSparseMoeBlock:
    """Return transformers' layer with its experts computed in this way, seeded."""
    config = MixtralConfig(
        hidden_size=sizes.dim,
        intermediate_size=sizes.expert_dim,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = how
    layer = MixtralSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=sizes.dim**-0.5, generator=generator)
    return layer.to(sizes.device, dtype)


def our_layer(sizes: argparse.Namespace, theirs: MixtralSparseMoeBlock, how: str) -> MoE:
    """Return this library's layer with the same weights, its experts computed in this way."""
    router = RouterConfig(num_experts=sizes.experts, top_k=sizes.top_k)
    dtype = theirs.experts.down_proj.dtype
    mesh = Mesh.single(Runtime(experts=how), sizes.device)
    layer = MoE(sizes.dim, sizes.expert_dim, router, mesh, dtype=dtype, seed=0)
    shape = (sizes.experts, 2, sizes.expert_dim, sizes.dim)
    with torch.no_grad():
        layer.router.weight.to_local().copy_(theirs.gate.weight)
        layer.experts.gate_up.to_local().copy_(theirs.experts.gate_up_proj.view(shape))
        layer.experts.down.to_local().copy_(theirs.experts.down_proj)
    return layer


def candidates(sizes: argparse.Namespace, dtype: torch.dtype) -> dict[str, Step]:
    """Return what is timed, each from `[T, D]` to its output."""
    steps: dict[str, Step] = {}
    reference = their_layer(sizes, dtype, "eager")
    for how in ("auto", "loop", "sliced", "grouped_mm"):
        layer = our_layer(sizes, reference, how)
        steps[f"moe_tp, {how}"] = lambda x, layer=layer: layer(x)[0]
    for how in ("eager", "grouped_mm"):  # its batched_mm copies an expert's weights for each row
        theirs = their_layer(sizes, dtype, how)
        steps[f"transformers, {how}"] = lambda x, theirs=theirs: theirs(x.unsqueeze(0))[0]
    options = {"dtype": dtype, "device": sizes.device, "requires_grad": True}
    gate_up = torch.randn(2 * sizes.expert_dim, sizes.dim, **options)
    down = torch.randn(sizes.dim, sizes.expert_dim, **options)

    def dense(x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x.repeat(sizes.top_k, 1), gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    steps["dense, same FLOPs"] = dense
    return steps


def check(steps: dict[str, Step], x_TD: torch.Tensor) -> None:
    """Raise unless all layers compute the same."""
    expected = steps["transformers, eager"](x_TD).double()
    for name, step in steps.items():
        if name.startswith("dense"):
            continue
        error = ((step(x_TD).double() - expected).norm() / expected.norm()).item()
        if error > 1e-5:
            raise SystemExit(f"{name} differs from transformers' eager layer by {error:.1e}")


def measure(steps: dict[str, Step], x_TD: torch.Tensor, repeats: int) -> dict[str, float]:
    """Return milliseconds of forward and backward, by name."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            leaf = x_TD.clone().requires_grad_()
            start = time.perf_counter()
            step(leaf).float().square().sum().backward()
            if leaf.is_cuda:
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print, and with --write keep, a table of times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, size in (
        ("tokens", 2048),
        ("dim", 512),
        ("expert-dim", 1024),
        ("experts", 8),
        ("top-k", 2),
        ("repeats", 9),
        ("threads", torch.get_num_threads()),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--write", action="store_true", help="write benchmarks/moe_layer-DATE.md")
    sizes = parser.parse_args()
    torch.set_num_threads(sizes.threads)
    results: dict[str, dict[str, float]] = {}
    for label, dtype in DTYPES.items():
        torch.manual_seed(0)
        x_TD = torch.randn(sizes.tokens, sizes.dim).to(sizes.device, dtype)
        steps = candidates(sizes, dtype)
        if (
            dtype == torch.float32
        ):  # in bf16 transformers also scores in bf16, and other experts win
            check(steps, x_TD)
        results[label] = measure(steps, x_TD, sizes.repeats)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    machine = f"{sizes.threads} threads, {platform.machine()} CPU"
    if sizes.device != "cpu":
        machine = torch.cuda.get_device_name()
    lines = [
        f"# MoE layer, forward and backward, {today}",
        "",
        f"T={sizes.tokens} tokens, D={sizes.dim}, F={sizes.expert_dim}, E={sizes.experts}, "
        f"K={sizes.top_k}; one process, {machine}; torch "
        f"{torch.__version__}, transformers {transformers.__version__}; milliseconds, median of "
        f"{sizes.repeats}; in brackets the factor over `dense`.",
        "",
        "| | " + " | ".join(results) + " |",
        "|---|" + "---|" * len(results),
    ]
    for name in results["fp32"]:
        cells = [
            f"{r[name]:.1f} ({r[name] / r['dense, same FLOPs']:.2f})" for r in results.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    print("\n".join(lines))
    if sizes.write:
        path = Path(__file__).parent / f"moe_layer-{today}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
