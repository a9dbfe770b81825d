"""Expert parallelism on local gloo ranks, forward and backward, beside transformers'.

    python benchmarks/expert_parallel.py [--ranks 2 4] [--shape A B] [--dtype fp32 bf16] [--write]

Every rank brings 512 tokens of its own and uses one thread. The floor is the rank's share of a
perfectly balanced layer's matmuls, then a bare exchange of the rows that have to travel: one for
each distinct (token, remote rank), four times (out and back, forward and backward), in the dtype of
the layer. All layers hold the same weights and take turns, each between two runs of the floor, with
a barrier before and after; a ratio is the median over the rounds. transformers runs its
`AllToAllEP`. `MB sent` is what a rank hands to its collectives for other ranks in one step,
forward and backward: the busiest rank's, counted for this library, worked out for transformers
(two rows a remote (token, expert) pair each way).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import DTYPES, Layer, publish, table, their_layer, today, versions
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from moe_tp import Mesh, ParallelLayout
from moe_tp.bench.floor import SHAPES, LayerShape, exchange_floor, matmul_floor
from moe_tp.bench.layer import make_layer, make_tokens, routing_of, training_step
from moe_tp.bench.timing import FLOOR, machine, side_by_side
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

Row = dict[str, Any]


def spread(whole: MixtralSparseMoeBlock, mesh: Mesh) -> MixtralSparseMoeBlock:
    """Return transformers' layer with this rank's experts, reached by its all-to-all."""
    experts, ranks = whole.experts, mesh.size("ep")
    local = experts.num_experts // ranks
    own = slice(mesh.coordinate("ep") * local, (mesh.coordinate("ep") + 1) * local)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        setattr(experts, name, torch.nn.Parameter(weight.detach()[own].clone()))
    experts.num_experts, experts._is_expert_parallel = local, True
    grid = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    experts.forward = AllToAllEP(experts, grid["ep"], grid["tp"])
    return whole


def measure(shape: LayerShape, label: str, ep: int, etp: int, options: argparse.Namespace) -> Row:
    """Return this rank's times and bytes.

    Collectives: those of the layers and the floor.
    """
    torch.set_num_threads(1)
    dtype, tokens = DTYPES[label], options.tokens
    mesh = Mesh(ParallelLayout(ep=ep, etp=etp))
    ours = make_layer(shape, mesh, dtype)
    layers: dict[str, Layer] = {"moe_tp": lambda x: ours(x)[0]}
    modules: dict[str, torch.nn.Module] = {"moe_tp": ours}
    if etp == 1:
        whole = their_layer(make_layer(shape, Mesh.single(), dtype), shape, "grouped_mm")
        theirs = modules["transformers"] = spread(whole, mesh)
        layers["transformers"] = lambda x: theirs(x.unsqueeze(0))[0]
    router_ED = to_local(ours.router.get_parameter("weight")).detach()
    x_TD = make_tokens(router_ED, tokens, dtype, skew=False, seed=mesh.rank)
    outputs = [layer(x_TD).detach().double() for layer in layers.values()]
    for other in outputs[1:]:  # in bf16 transformers also scores in bf16, and others win
        error = ((other - outputs[0]).norm() / outputs[0].norm()).item()
        if dtype == torch.float32 and error > 1e-5:
            raise SystemExit(f"transformers' layer differs by {error:.1e}")
    steps = {
        name: training_step(layer, x_TD, list(modules[name].parameters()))
        for name, layer in layers.items()
    }
    matmuls = matmul_floor(shape, tokens, mesh, dtype)
    assignment = routing_of(ours, x_TD)
    send = exchange_floor(assignment, shape.dim, mesh, dtype)

    def floor() -> None:
        matmuls()
        send()

    times = side_by_side(steps, floor, rounds=options.rounds, meet=dist.barrier)
    with record_traffic() as log:
        steps["moe_tp"]()
    # ranks are asked in turn, so that every rank takes part in both
    remote = int((assignment.ids_TK // (shape.experts // ep) != mesh.coordinate("ep")).sum())
    sent = {"moe_tp": log.total(), "transformers": 4 * remote * shape.dim * dtype.itemsize}
    return {"times": times, "sent": sent, "machine": machine(mesh.device)}


def rows_of(name: str, label: str, ep: int, etp: int, options: argparse.Namespace) -> list[Row]:
    """Return one row a layer."""
    ranks = ep * etp
    found = run_ranks(measure, ranks, SHAPES[name], label, ep, etp, options, timeout=380)
    times = found[0]["times"]
    layout = f"ep {ep}" + (f", etp {etp}" if etp > 1 else "")
    return [
        {
            "shape": name,
            "dtype": label,
            "layout": layout,
            "layer": who,
            "ms": f"{1e3 * times.median(who):.0f}",
            "floor ms": f"{1e3 * times.median(FLOOR):.0f}",
            "ratio": f"{times.ratio(who):.2f}",
            "MB sent": f"{max(one['sent'][who] for one in found) / 1e6:.1f}",
        }
        for who in times.floors
    ]


def main() -> None:
    """Print, and with --write keep, a table of times, ratios and bytes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--etp", type=int, default=2, help="also ETP of this size on shape A")
    parser.add_argument("--write", action="store_true", help="keep benchmarks/NAME-DATE.md")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.shape:
        for label in options.dtype:
            for ranks in options.ranks:
                layouts = [(ranks, 1)]
                if name == "A" and ranks > options.etp > 1:
                    layouts.append((ranks // options.etp, options.etp))
                for ep, etp in layouts:
                    for row in rows_of(name, label, ep, etp, options):
                        rows.append(row)
                        print(*row.values(), flush=True)
    shapes = "; ".join(f"{name}: {SHAPES[name]}" for name in options.shape)
    lines = [
        f"# Expert parallelism, forward and backward, {today()}",
        "",
        f"`python benchmarks/expert_parallel.py`, {options.tokens} tokens a rank; {shapes}. gloo "
        f"ranks on one machine, one thread each; {versions()}. Medians of {options.rounds}.",
        "",
        *table(list(rows[0]), [list(row.values()) for row in rows]),
    ]
    publish("expert_parallel", lines, write=options.write)


if __name__ == "__main__":
    main()
