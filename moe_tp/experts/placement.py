"""Experts moved between ranks while a model trains, so that measured load is even.

Between two optimiser steps each layer's experts are dealt anew over the ranks of ep by the load
that was measured (after the idea of DeepSeek's expert-parallel load balancer: DeepSeek-V3,
arXiv:2412.19437, section 3.4). Weights, adapters, gradients and optimiser state move along, and the
expert table says where each expert lies, so routing, checkpoints and exports do not notice.

Where the table has more slots than experts (`Runtime.spare_slots`), hot experts lie in several:
each serves a part of the expert's tokens, their gradients are summed (`moe_tp.parallel.replicas`),
and a new replica begins with a copy of weights, gradient and moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from moe_tp.errors import ConfigError
from moe_tp.experts.moe import MoE
from moe_tp.parallel.collectives import raw_all_to_all
from moe_tp.parallel.gradients import owed_axes
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import NamedSpec, named_specs
from moe_tp.parallel.replicas import mark_summed, owes_replicas, replicated
from moe_tp.parallel.shards import splits, to_local
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
        extra = len(layer.table.slots) - layer.table.num_experts
        if -(-layer.table.num_experts // layer.table.ep) == layer.table.slots_per_rank:
            extra = 0  # slots are empty because experts do not divide evenly, not for replicas
        table = balanced_table(numbers, layer.table.ep, extra_slots=extra)
        if _busiest(table, numbers) < _busiest(layer.table, numbers):
            place(layer, table, optimizer)
            moved[layer.layer] = table
    return moved


def _busiest(table: ExpertTable, load_E: Sequence[float]) -> float:
    """Return the load of the rank that has most."""
    held = [table.experts_of_rank(rank) for rank in range(table.ep)]
    part_E = [load / len(slots) for load, slots in zip(load_E, table.replicas, strict=True)]
    return max(sum(part_E[e] for e in experts if e >= 0) for experts in held)


@torch.no_grad()
def place(layer: MoE, table: ExpertTable, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move the experts of one layer to the slots of another table.

    Args:
        layer: the layer.
        table: with as many slots as the layer's.
        optimizer: whose state moves along.

    Raises:
        ConfigError: the table does not fit, gradients are not settled where experts have
            replicas, or as for `rebalance`.

    Collectives: for each parameter, gradient and optimiser moment an all-to-all over the owners of
        tokens, of the experts that move or get another replica.
    """
    old = layer.table
    if (table.num_experts, table.ep, len(table.slots)) != (old.num_experts, old.ep, len(old.slots)):
        raise ConfigError(
            f"a table of {table.num_experts} experts in {len(table.slots)} slots on ep={table.ep} "
            f"cannot replace one of {old.num_experts} in {len(old.slots)} on ep={old.ep}; keep "
            "the numbers and change the order"
        )
    if layer.own_dispatcher:
        raise ConfigError(
            f"layer {layer.layer} was given its dispatcher, which knows the old table; let the "
            "layer make its own to move experts"
        )
    if layer.experts.quantized is not None:
        raise ConfigError(
            f"layer {layer.layer} holds its experts in few bits, which do not move; leave the base "
            f"as it is (lora.base), or the experts where they are (train.rebalance_every=0)"
        )
    found = [entry for entry in named_specs(layer) if entry.spec.slots is not None]
    moves = [
        (_plan(entry.param, old, table, layer.mesh), _parts(entry, table, optimizer))
        for entry in found
    ]
    for entry, (plan, parts) in zip(found, moves, strict=True):
        for part in parts:
            _move(part, plan, layer.mesh)
        spec = replace(entry.spec, slots=table.slots)
        entry.module.specs[entry.name] = spec
        mark_summed(entry._replace(spec=spec))
    layer.use_table(table)


def _parts(
    entry: NamedSpec, table: ExpertTable, optimizer: torch.optim.Optimizer | None
) -> list[torch.Tensor]:
    """Return the local tensors that hold something of each expert: value, gradient, moments."""
    param = entry.param
    local = to_local(param)
    parts = [local]
    if param.grad is not None:
        owed = owed_axes(param.grad) or owes_replicas(entry)
        if owed and (replicated(entry.spec) or table.replicated):
            raise ConfigError(
                f"the gradient of {entry.fqn} is a sum over replicas that was not settled; place "
                f"experts after settle_gradients, or after zero_grad"
            )
        parts.append(to_local(param.grad))
    state = {} if optimizer is None else optimizer.state.get(param, {})
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.numel() <= 1 < local.numel():
            continue
        moment = to_local(value)
        if moment.shape != local.shape or hasattr(moment, "codes"):
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

    def owner(slot: int) -> tuple[int, int]:
        """Return rank among all owners of tokens, and local slot."""
        ep, slot = divmod(slot, old.slots_per_rank)
        share, at = divmod(slot, chunk) if dealt else (0, slot)
        edp = base + share
        return (edp * mesh.size("ep") + ep) * mesh.size("etp") + mesh.coordinate("etp"), at

    me = ((base + own) * mesh.size("ep") + mesh.coordinate("ep")) * mesh.size("etp")
    me += mesh.coordinate("etp")
    ranks = mesh.size("stage")
    send, fill = [], []
    for expert, slots in enumerate(new.replicas):
        sources = [owner(slot) for slot in old.replicas[expert]]
        for rank, at in map(owner, slots):
            # from the rank's own replica where it has one, else from the first
            source, its = next((s for s in sources if s[0] == rank), sources[0])
            if source == me:
                send.append((rank, expert, at, its))
            if rank == me:
                fill.append((source, expert, at, at))
    send.sort()
    fill.sort()
    return _Plan(
        send=[slot for *_, slot in send],
        send_counts=[sum(rank == r for rank, *_ in send) for r in range(ranks)],
        fill=[slot for *_, slot in fill],
        recv_counts=[sum(rank == r for rank, *_ in fill) for r in range(ranks)],
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
