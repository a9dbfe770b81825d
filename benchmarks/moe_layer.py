"""Time of the MoE layer, forward and backward, over its matmul floor, beside transformers'.

    python benchmarks/moe_layer.py [--shape A B] [--dtype fp32 bf16] [--threads 2] [--write]

One process. The floor runs the matmuls of the same layer with perfectly balanced experts, one
matmul an expert and projection, forward and backward, in memory that is there already: no
activation, routing or autograd. All layers hold the same weights and are compared in fp32 before
anything is timed. They take turns, each between two runs of the floor; a ratio is the median over
the rounds of a layer's time over the mean of the floors beside it. `natural` routing is that of
random tokens; `skewed` binds half of the tokens for one expert. Allocator settings are those of
the machine. transformers' `batched_mm` is left out: it copies an expert's weights for each pair
(45 GB on shape A).
"""

from __future__ import annotations

import argparse

import torch
from side_by_side import DTYPES, Layer, check_equal, publish, table, their_layer, today, versions

from moe_tp import Mesh, Runtime
from moe_tp.bench.floor import SHAPES, LayerShape, matmul_floor
from moe_tp.bench.layer import make_layer, make_tokens, training_step
from moe_tp.bench.timing import FLOOR, Times, machine, side_by_side

PEERS = ("grouped_mm", "eager")


def compare(
    shape: LayerShape, dtype: torch.dtype, options: argparse.Namespace, *, skew: bool
) -> Times:
    """Return the times of this library's layer and of its peers."""
    device = torch.device(options.device)
    layers: dict[str, Layer] = {}
    modules: dict[str, torch.nn.Module] = {}
    for how in options.experts:
        mesh = Mesh.single(Runtime(experts=how), device)
        ours = modules[f"moe_tp, {how}"] = make_layer(shape, mesh, dtype)
        layers[f"moe_tp, {how}"] = lambda x, ours=ours: ours(x)[0]
    for how in options.peers:
        theirs = modules[f"transformers, {how}"] = their_layer(ours, shape, how)
        layers[f"transformers, {how}"] = lambda x, theirs=theirs: theirs(x.unsqueeze(0))[0]
    router_ED = ours.router.get_parameter("weight").to_local().detach()
    x_TD = make_tokens(router_ED, options.tokens, dtype, skew=skew)
    if dtype == torch.float32:  # in bf16 transformers also scores in bf16, and others win
        check_equal(layers, x_TD)
    steps = {
        name: training_step(layer, x_TD, list(modules[name].parameters()))
        for name, layer in layers.items()
    }
    floor = matmul_floor(shape, options.tokens, mesh, dtype)
    return side_by_side(steps, floor, rounds=options.rounds, device=device)


def main() -> None:
    """Print, and with --write keep, a table of times and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--experts", nargs="+", default=["auto"], help="our back ends")
    parser.add_argument("--peers", nargs="*", default=PEERS, help="ways of transformers' experts")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--write", action="store_true", help="write benchmarks/moe_layer-DATE.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.shape:
        for label in options.dtype:
            for skew in (False, True):
                times = compare(SHAPES[name], DTYPES[label], options, skew=skew)
                floor = 1e3 * times.median(FLOOR)
                for who in times.floors:
                    ratio, median = times.ratio(who), 1e3 * times.median(who)
                    routing = "skewed" if skew else "natural"
                    row = [name, label, routing, who, f"{median:.0f}", f"{floor:.0f}"]
                    rows.append([*row, f"{ratio:.2f}"])
                    print(*rows[-1], flush=True)
    shapes = "; ".join(f"{name}: {SHAPES[name]}" for name in options.shape)
    lines = [
        f"# MoE layer, forward and backward, {today()}",
        "",
        f"`python benchmarks/moe_layer.py`, {options.tokens} tokens; {shapes}. One process, "
        f"{machine(torch.device(options.device))}; {versions()}. Medians of {options.rounds}.",
        "",
        *table(["shape", "dtype", "routing", "layer", "ms", "floor ms", "ratio"], rows),
    ]
    publish("moe_layer", lines, write=options.write)


if __name__ == "__main__":
    main()
