"""What the tests of the experts room share: one step of a layer, on one process and on ranks."""

from __future__ import annotations

from typing import Any

import torch

from moe_tp import Mesh, MoE, ParallelLayout, Runtime, settle_gradients
from moe_tp.parallel.collectives import raw_all_gather
from moe_tp.parallel.gradients import gradient_norm
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import full_logical, local_index, to_local
from moe_tp.routing import RouterConfig

# world, layout, tokens a rank: unequal, 0 among them
LAYOUTS: list[tuple[int, dict[str, int], list[int]]] = [
    (2, {"ep": 2}, [3, 5]),
    (2, {"tp": 2, "ep": 2}, [0, 7]),
    (2, {"tp": 2, "etp": 2}, [4, 1]),
    (4, {"ep": 4}, [3, 0, 5, 2]),
    (4, {"tp": 2, "ep": 2, "etp": 2}, [3, 0, 5, 2]),
    (4, {"ep": 2}, [3, 4, 0, 2]),
    (4, {"tp": 4, "ep": 2, "etp": 2}, [0, 0, 0, 1]),
    (4, {"tp": 2, "etp": 4}, [2, 1, 0, 6]),
]


def mesh_of_layout(layout: dict[str, int] | None, **runtime: Any) -> Mesh:
    if layout is None:
        return Mesh.single(Runtime(**runtime))
    return Mesh(ParallelLayout(**layout), Runtime(**runtime))


def own_rows(tokens: list[int], rank: int) -> slice:
    start = sum(tokens[:rank])
    return slice(start, start + tokens[rank])


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n.fqn: full_logical(n.param.grad, n.spec, n.module.mesh)
            for n in named_specs(model) if n.param.grad is not None}  # fmt: skip


def layer_step(
    layout: dict[str, int] | None,
    runtime: dict[str, Any],
    tokens: list[int],
    experts: int,
    options: dict[str, Any],
    router: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    skew: float = 1.0,
    mesh: Mesh | None = None,
) -> dict[str, torch.Tensor]:
    """Return output, input gradient, losses, load, norm and gradients of one step of a layer."""
    mesh = mesh or mesh_of_layout(layout, **runtime)
    dim, hidden = 8, 12
    config = RouterConfig(experts, **{"top_k": 2, **router})
    layer = MoE(dim, hidden, config, mesh, dtype=dtype, seed=3, **options)
    total = sum(tokens)
    rows = slice(0, total) if layout is None else own_rows(tokens, mesh.rank)
    x_all = draw(total, dim, dtype=dtype) + skew
    x = x_all[rows].clone().requires_grad_()
    y, aux = layer(x)
    ((y * draw(total, dim, dtype=dtype, seed=1)[rows]).sum() + aux.loss).backward()
    settle_gradients(layer)
    return {
        "y": y.detach(), "dx": x.grad, "aux": aux.loss.detach(), "counts": aux.counts_E,
        "norm": gradient_norm(layer), **gradients(layer),
    }  # fmt: skip


def joined(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the step's values over all ranks; what is no token's must be equal on all."""
    out = {}
    for name, value in results[0].items():
        if name in ("y", "dx"):
            out[name] = torch.cat([r[name] for r in results])
        else:
            assert all(torch.equal(r[name], value) for r in results), f"{name} differs by rank"
            out[name] = value
    return out


def worst_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error, as RULES.md defines it."""
    assert got.keys() == want.keys()
    scale = want["norm"].item() if "norm" in want else 1.0
    worst = 0.0
    for name, b in want.items():
        a = got[name]
        assert a.shape == b.shape, name
        size = max(b.double().norm().item(), 1e-6 * scale)
        worst = max(worst, (a.double() - b.double()).norm().item() / size if size else 0.0)
    return worst


def replicas_are_equal(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> bool:
    """Return whether all replicas of each expert have the same bits, and their moments."""
    equal = True
    for _, module, _, param, spec in named_specs(model):
        if spec.slots is None:
            continue
        local, ep = to_local(param), module.mesh.group("ep")
        state = {} if optimizer is None else optimizer.state.get(param, {})
        parts = [to_local(v) for v in state.values()
                 if isinstance(v, torch.Tensor) and v.dim()]  # fmt: skip
        index = raw_all_gather(local_index(param, spec)[0], ep)
        for part in (local, *parts):
            slots = raw_all_gather(part, ep)
            for expert in range(spec.shape[0]):
                mine = slots[index == expert]
                equal = equal and all(torch.equal(one, mine[0]) for one in mine)
    return equal
