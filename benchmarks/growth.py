"""How the time of a step grows with tokens, experts, choices, depth and ranks.

    python benchmarks/growth.py [--rounds 5] [--write]

One thread a process, fp32, forward and backward. Each row doubles one size and keeps the others;
its times take turns. The exponent is the slope of a least-squares line through the logarithms of
time and size: 1 is linear. For experts the tokens and choices stay, so that the matmuls stay the
same in sum and get smaller; for ranks each rank brings the same number of tokens, and where the
machine has fewer cores than ranks 1 is what sharing them costs. What a step costs at any size
lowers the exponent of small sizes, so that of the last doubling stands beside it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from side_by_side import publish, table, today, versions

from moe_tp import Mesh, ParallelLayout, forward_backward
from moe_tp.bench.floor import LayerShape
from moe_tp.bench.layer import make_layer, make_tokens, training_step
from moe_tp.bench.timing import side_by_side
from moe_tp.models import build
from moe_tp.models.families import preset
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

SHAPE = LayerShape(dim=256, expert_dim=256, experts=16, top_k=2)
TOKENS = 1024
Step = Callable[[], object]


def layer_step(shape: LayerShape, tokens: int, mesh: Mesh) -> Step:
    """Return forward and backward of a layer."""
    layer = make_layer(shape, mesh, torch.float32)
    router_ED = to_local(layer.router.get_parameter("weight")).detach()
    x_TD = make_tokens(router_ED, tokens, torch.float32, skew=False, seed=mesh.rank)
    return training_step(lambda x: layer(x)[0], x_TD, list(layer.parameters()))


def model_step(layers: int, length: int) -> Step:
    """Return forward and backward of a small Mixtral on one sequence."""
    config = preset("mixtral", num_hidden_layers=layers, vocab_size=256, hidden_size=128)
    model = build(config, Mesh.single(), seed=0)
    ids = torch.randint(256, (1, length))

    def run() -> None:
        forward_backward(model, [{"input_ids": ids, "labels": ids}])
        model.zero_grad()

    return run


def seconds(steps: Mapping[str, Step], rounds: int) -> dict[int, float]:
    """Return the median seconds of each step by its size."""
    times = side_by_side(steps, lambda: None, rounds=rounds)
    return {int(name): times.median(name) for name in steps}


def on_ranks(rounds: int) -> float:
    """Return the median seconds of a layer's step over these ranks.

    Collectives: those of the layer and barriers.
    """
    mesh = Mesh(ParallelLayout(ep=dist.get_world_size()))
    step = {"step": layer_step(SHAPE, TOKENS // 2, mesh)}
    return side_by_side(step, lambda: None, rounds=rounds, meet=dist.barrier).median("step")


def exponent(found: Mapping[int, float]) -> float:
    """Return the slope of log time over log size."""
    x, y = [math.log(size) for size in found], [math.log(time) for time in found.values()]
    return statistics.linear_regression(x, y).slope


def main() -> None:
    """Print, and with --write keep, a table of times and exponents."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep benchmarks/NAME-DATE.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    single = Mesh.single()
    found = {}
    for name, sizes, make in (
        ("tokens", (512, 1024, 2048, 4096, 8192, 16384), lambda n: layer_step(SHAPE, n, single)),
        (
            "experts",
            (8, 16, 32, 64, 128),
            lambda n: layer_step(replace(SHAPE, experts=n), TOKENS, single),
        ),
        ("top-k", (2, 4, 8, 16), lambda n: layer_step(replace(SHAPE, top_k=n), TOKENS, single)),
        ("depth (whole model)", (1, 2, 4, 8, 16), lambda n: model_step(n, 128)),
        ("sequence (whole model)", (256, 512, 1024, 2048, 4096), lambda n: model_step(1, n)),
    ):
        found[name] = seconds({str(n): make(n) for n in sizes}, options.rounds)
    ranks = {n: run_ranks(on_ranks, n, options.rounds, timeout=200)[0] for n in (1, 2, 4)}
    found["ranks (ep), 512 tokens each"] = ranks
    rows = [
        [
            name,
            ", ".join(f"{n}: {1e3 * t:.0f}" for n, t in by.items()),
            f"{exponent(by):.2f}",
            f"{exponent(dict(list(by.items())[-2:])):.2f}",
        ]
        for name, by in found.items()
    ]
    lines = [
        f"# Growth of the time of a step, {today()}",
        "",
        f"`python benchmarks/growth.py`: a layer of {SHAPE} on {TOKENS} tokens where not said "
        f"otherwise, fp32, one thread; {versions()}. Medians of {options.rounds}, milliseconds.",
        "",
        *table(["what grows", "size: ms", "exponent", "last doubling"], rows),
    ]
    publish("growth", lines, write=options.write)


if __name__ == "__main__":
    main()
