"""Rows, bytes and times of dispatch on gloo ranks, beside transformers' expert parallelism.

    python benchmarks/dispatch.py [--rows 2 4 8] [--times 2 4] [--repeats 7] [--write]

On the same input: rows on the wire for each way of sending, beside one row a choice; bytes, and the
share of them that is neither rows nor sums; times of one MoE layer, forward and backward, of this
library's dispatchers and of transformers' Mixtral block under its `AllToAllEP`, one thread a rank,
repetitions interleaved, medians. Shape B of the layer benchmark: width 512, hidden 256, 64 experts,
8 of them a token, uniform routing, 512 tokens a rank.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_tp import Mesh, MoE, ParallelLayout, Runtime
from moe_tp.parallel.collectives import record_traffic
from moe_tp.routing import RouterConfig
from moe_tp.testing import run_ranks

WIDTH, HIDDEN, EXPERTS, CHOICES, TOKENS = 512, 256, 64, 8, 512
WAYS: dict[str, dict[str, Any]] = {
    "all_to_all": {"dispatcher": "all_to_all"},
    "all_to_all, bf16 sums": {"dispatcher": "all_to_all", "wire_dtype": torch.bfloat16},
    "all_to_all, fp8 rows": {"dispatcher": "all_to_all", "wire_dtype": torch.float8_e4m3fn},
    "all_to_all, no overlap": {"dispatcher": "all_to_all", "overlap": False},
    "all_gather": {"dispatcher": "all_gather"},
}


def layer_of(way: dict[str, Any]) -> MoE:
    """Return the layer on all ranks, experts over ep."""
    mesh = Mesh(ParallelLayout(ep=dist.get_world_size()), Runtime(**way))
    return MoE(WIDTH, HIDDEN, RouterConfig(EXPERTS, CHOICES), mesh, seed=0)


def tokens_of(rank: int) -> torch.Tensor:
    """Return a rank's tokens; a random router spreads them evenly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()


def wire_of(way: dict[str, Any]) -> dict[str, float]:
    """Return rows and bytes that this rank sends forward, and what they would be by choice."""
    layer, x = layer_of(way), tokens_of(dist.get_rank())
    experts_here = EXPERTS // dist.get_world_size()
    rank_TK = layer.router(x).ids_TK // experts_here
    away_TK = rank_TK != dist.get_rank()
    distinct = sum(int((rank_TK == r).any(1).sum()) for r in range(dist.get_world_size()))
    distinct -= int((rank_TK == dist.get_rank()).any(1).sum())
    with torch.no_grad(), record_traffic() as log:
        aux = layer(x)[1]
    sent = log.total(axis="ep")
    row = WIDTH * {torch.float8_e4m3fn: 1}.get(way.get("wire_dtype"), 4)
    row += 4 if way.get("wire_dtype") == torch.float8_e4m3fn else 0
    back = WIDTH * (4 if way.get("wire_dtype") is None else 2)
    payload = aux.wire.rows_sent * row + aux.wire.rows_received * back
    return {
        "by_choice": int(away_TK.sum()),
        "distinct": distinct,
        "rows": aux.wire.rows_sent,
        "back": aux.wire.rows_received,
        "bytes": sent,
        "rest": sent - payload,
    }


def peer_layer() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return transformers' Mixtral block with its experts over all ranks, by its all-to-all."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS,
        num_experts_per_tok=CHOICES, experts_implementation="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config)
    experts, own = block.experts, EXPERTS // ranks
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(std=0.02)
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)[rank * own : (rank + 1) * own]
            setattr(experts, name, torch.nn.Parameter(weight.clone()))
    experts.num_experts, experts._is_expert_parallel = own, True
    grid = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    experts.forward = AllToAllEP(experts, grid["ep"], grid["tp"])

    def call(x_TD: torch.Tensor) -> torch.Tensor:
        out = block(x_TD.unsqueeze(0))
        return out[0] if isinstance(out, tuple) else out

    return call


def times_of(repeats: int) -> dict[str, float]:
    """Return milliseconds of forward and backward, medians of interleaved repetitions."""
    torch.set_num_threads(1)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"transformers": peer_layer()}
    for name, way in WAYS.items():
        layer = layer_of(way)
        calls[name] = lambda x, layer=layer: layer(x)[0]
    x, found = tokens_of(dist.get_rank()), {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call(x).square().mean().backward()
            dist.barrier()
            if repeat:  # the first warms up
                found[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(values) for name, values in found.items()}


def measure(ranks: list[int], timed: list[int], repeats: int) -> dict[str, Any]:
    """Return the figures of all tables.

    Args:
        ranks: numbers of ranks whose rows are counted.
        timed: those that are timed as well.
        repeats: of each layer.
    """
    result: dict[str, Any] = {"rows": {}, "times": {}}
    for world in ranks:
        for name, way in WAYS.items():
            found = run_ranks(wire_of, world, way)
            total = {key: sum(each[key] for each in found) for key in found[0]}
            result["rows"][f"{world} ranks, {name}"] = {
                "rows sent a rank": total["rows"] / world,
                "sums sent back a rank": total["back"] / world,
                "rows at one a choice": total["by_choice"] / world,
                "distinct (token, remote rank) pairs": total["distinct"] / world,
                "KB sent a rank": total["bytes"] / world / 1000,
                "share of metadata": total["rest"] / total["bytes"],
            }
    for world in timed:
        found = run_ranks(times_of, world, repeats)
        result["times"][f"{world} ranks"] = {
            name: max(each[name] for each in found) for name in found[0]
        }
    return result


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the tables as lines of Markdown."""
    lines = [
        "| ranks, way | rows sent a rank | sums sent back | distinct (token, remote rank) pairs | "
        "one row a choice | fewer | KB sent a rank | metadata |",
        "|---" * 8 + "|",
    ]
    for name, row in result["rows"].items():
        sent, plain = row["rows sent a rank"], row["rows at one a choice"]
        lines.append(
            f"| {name} | {sent:.0f} | {row['sums sent back a rank']:.0f} | "
            f"{row['distinct (token, remote rank) pairs']:.0f} | {plain:.0f} | "
            f"{100 * (1 - sent / plain):.0f} % | "
            f"{row['KB sent a rank']:.0f} | {100 * row['share of metadata']:.2f} % |"
        )
    if result["times"]:
        names = list(next(iter(result["times"].values())))
        lines += ["", "| ms, forward + backward | " + " | ".join(names) + " |"]
        lines += ["|---" * (len(names) + 1) + "|"]
        for world, row in result["times"].items():
            lines.append(f"| {world} | " + " | ".join(f"{row[name]:.0f}" for name in names) + " |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[2, 4, 8], help="ranks to count on")
    parser.add_argument("--times", type=int, nargs="*", default=[2, 4], help="ranks to time on")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the dated table beside this")
    options = parser.parse_args(arguments)
    lines = lines_of(measure(options.rows, options.times, options.repeats))
    print("\n".join(lines))
    if options.write:
        import transformers

        day = time.strftime("%Y-%m-%d")
        about = [
            f"# Dispatch, {day}",
            "",
            f"`python benchmarks/dispatch.py --write`: torch {torch.__version__}, transformers "
            f"{transformers.__version__}, {platform.machine()} CPU, gloo, fp32, width {WIDTH}, "
            f"hidden {HIDDEN}, {EXPERTS} experts, {CHOICES} a token, {TOKENS} tokens a rank, "
            f"random router, one thread a rank, median of {options.repeats} interleaved "
            "repetitions, slowest rank. Rows and bytes are those of one forward: rows out, partial "
            "sums (fp32 unless said) back. transformers sends one row a choice each way. 8 ranks "
            "share the cores of one machine, and so do 4 where it has fewer: times there compare "
            "layers, not hardware.",
            "",
        ]
        path = Path(__file__).with_name(f"dispatch-{day}.md")
        path.write_text("\n".join([*about, *lines]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
