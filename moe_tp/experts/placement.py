"""Experts moved between ranks while a model trains, so that measured load is even.

Between two optimiser steps each layer's experts are dealt anew over the ranks of ep by the load
that was measured (after the idea of DeepSeek's expert-parallel load balancer: DeepSeek-V3,
arXiv:2412.19437, section 3.4). Weights, adapters, gradients and optimiser state move along, and the
expert table says where each expert lies, so routing, checkpoints and exports do not notice. Hot
experts are moved, not replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from moe_tp.errors import ConfigError
from moe_tp.experts.layer import refuse_replicas
from moe_tp.experts.moe import MoE
from moe_tp.parallel.collectives import raw_all_to_all
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule, splits, to_local
from moe_tp.routing.table import ExpertTable, balanced_table

__all__ = ["place", "rebalance"]


def rebalance(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    load: torch.Tensor | Mapping[int, Sequence[float]],
) -> dict[int, ExpertTable]:
    """Return the new table of each layer whose experts moved; call between steps, on every rank.

    A layer is left alone where its busiest rank would have no less to do.

    Args:
        model: holds MoE layers.
        optimizer: whose state of the experts moves along; None where there is none.
        load: by number of the layer the load of each expert, the same on every rank: `counts_LE` of
            a step's `aux`, or a sum of several.

    Raises:
        ConfigError: a layer's dispatcher is the user's own, or the optimiser keeps something of an
            expert that cannot be told apart by expert.

    Collectives: those of `place`.
    """
    moved = {}
    for layer in [module for module in model.modules() if isinstance(module, MoE)]:
        load_E = load[layer.layer]
        numbers = load_E.tolist() if isinstance(load_E, torch.Tensor) else list(load_E)
        table = balanced_table(numbers, layer.table.ep)
        if _busiest(table, numbers) < _busiest(layer.table, numbers):
            place(layer, table, optimizer)
            moved[layer.layer] = table
    return moved


def _busiest(table: ExpertTable, load_E: Sequence[float]) -> float:
    """Return the load of the rank that has most."""
    held = [table.experts_of_rank(rank) for rank in range(table.ep)]
    return max(sum(load_E[e] for e in experts if e >= 0) for experts in held)


@torch.no_grad()
def place(layer: MoE, table: ExpertTable, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move the experts of one layer to the slots of another table.

    Args:
        layer: the layer.
        table: with as many slots as the layer's.
        optimizer: whose state moves along.

    Raises:
        ConfigError: the table does not fit, or as for `rebalance`.

    Collectives: for each parameter, gradient and optimiser moment an all-to-all over the owners of
        tokens, of the experts that move.
    """
    old = layer.table
    if (table.num_experts, table.ep, len(table.slots)) != (old.num_experts, old.ep, len(old.slots)):
        raise ConfigError(
            f"a table of {table.num_experts} experts in {len(table.slots)} slots on ep={table.ep} "
            f"cannot replace one of {old.num_experts} in {len(old.slots)} on ep={old.ep}; keep "
            "the numbers and change the order"
        )
    refuse_replicas(table)
    if layer.own_dispatcher:
        raise ConfigError(
            f"layer {layer.layer} was given its dispatcher, which knows the old table; let the "
            "layer make its own to move experts"
        )
    moves = []
    for module in layer.modules():
        if isinstance(module, ParallelModule):
            for name, spec in module.specs.items():
                if spec.slots is not None:
                    param = module.get_parameter(name)
                    moves.append((_plan(param, old, table, layer.mesh), _parts(param, optimizer)))
                    module.specs[name] = replace(spec, slots=table.slots)
    for plan, parts in moves:
        for part in parts:
            _move(part, plan, layer.mesh)
    layer.use_table(table)


def _parts(param: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the local tensors that hold something of each expert: value, gradient, moments."""
    local = to_local(param)
    parts = [local]
    if param.grad is not None:
        parts.append(to_local(param.grad))
    state = {} if optimizer is None else optimizer.state.get(param, {})
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.numel() <= 1 < local.numel():
            continue
        moment = to_local(value)
        if moment.shape != local.shape:
            raise ConfigError(
                f"the optimiser keeps {name!r} of shape {tuple(moment.shape)} for experts of shape "
                f"{tuple(local.shape)}, which cannot be moved with them; choose AdamW or SGD"
            )
        parts.append(moment)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Local slots to send and to fill, in the order of the ranks they go to and come from."""

    send: list[int]
    send_counts: list[int]
    fill: list[int]
    recv_counts: list[int]


def _plan(param: torch.Tensor, old: ExpertTable, new: ExpertTable, mesh: Mesh) -> _Plan:
    """Return which of this rank's slots go where, by rank of the group of all owners.

    ZeRO may have dealt a rank's slots over the replicas; then each deals its part.
    """
    dealt = [s for s in splits(param) if s.dim == 0 and s.axis != "ep"]
    shares = dealt[0].size if dealt else 1
    chunk = -(-old.slots_per_rank // shares)
    # the replicas among which slots are dealt are neighbours along edp
    run = mesh.coordinate("edp") // shares * shares
    own = mesh.coordinate("edp") - run if dealt else 0
    base = run if dealt else mesh.coordinate("edp")

    def owner(table: ExpertTable, expert: int) -> tuple[int, int]:
        """Return rank among all owners of tokens, and local slot."""
        ep, slot = divmod(table.replicas[expert][0], table.slots_per_rank)
        share, at = divmod(slot, chunk) if dealt else (0, slot)
        edp = base + share
        return (edp * mesh.size("ep") + ep) * mesh.size("etp") + mesh.coordinate("etp"), at

    me = ((base + own) * mesh.size("ep") + mesh.coordinate("ep")) * mesh.size("etp")
    me += mesh.coordinate("etp")
    ranks, experts = mesh.size("stage"), range(old.num_experts)
    send = sorted(
        (owner(new, e)[0], e, owner(old, e)[1]) for e in experts if owner(old, e)[0] == me
    )
    fill = sorted(
        (owner(old, e)[0], e, owner(new, e)[1]) for e in experts if owner(new, e)[0] == me
    )
    return _Plan(
        send=[slot for _, _, slot in send],
        send_counts=[sum(rank == r for rank, _, _ in send) for r in range(ranks)],
        fill=[slot for _, _, slot in fill],
        recv_counts=[sum(rank == r for rank, _, _ in fill) for r in range(ranks)],
    )


def _move(local: torch.Tensor, plan: _Plan, mesh: Mesh) -> None:
    """Send the local tensor's experts where they go and put those that come in their slots."""
    device = local.device
    rows = local.reshape(local.shape[0], -1)
    sent = rows.index_select(0, torch.tensor(plan.send, dtype=torch.int64, device=device))
    group = mesh.group("stage")
    came = raw_all_to_all(sent.to(mesh.device), plan.send_counts, plan.recv_counts, group)
    fresh = torch.zeros_like(rows)
    fresh.index_copy_(0, torch.tensor(plan.fill, dtype=torch.int64, device=device), came.to(device))
    local.copy_(fresh.view_as(local))
