"""Full tensors under hub names on every rank, for checks on small models."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_tp.checkpoint.blocks import Aligned
from moe_tp.checkpoint.holdings import gather_holdings
from moe_tp.checkpoint.load import Target, targets_of
from moe_tp.checkpoint.rules import NameRules
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.parameter import mesh_of, named_specs
from moe_tp.parallel.replicas import owes_replicas
from moe_tp.parallel.shards import to_local


def gather_named(
    model: nn.Module, what: Literal["param", "grad"] = "param", *, rules: NameRules | None = None
) -> dict[str, torch.Tensor]:
    """Return the model's full tensors under their hub names, in natural order, on every rank.

    Args:
        model: in any layout; `model.name_rules` says the names unless `rules` does.
        what: parameters (and the buffers that lie in a hub folder), or settled gradients.
        rules: name rules.

    Raises:
        CheckpointError: a gradient is missing or still owes a sum; call `settle_gradients` first.
        ConfigError: `what` is neither.

    Collectives: over the world: a table of contents, one all-reduce a parameter.
    """
    if what not in ("param", "grad"):
        raise ConfigError(f"what={what!r} is nothing to gather; choose 'param' or 'grad'")
    if rules is None:
        found = getattr(model, "name_rules", None)
        if not isinstance(found, NameRules):
            raise CheckpointError("the model has no name_rules; pass rules=")
        rules = found
    mesh = mesh_of(model)
    world = mesh.group("world")
    targets = targets_of(model, rules)
    if what == "grad":
        targets = _gradients(model, targets)
    holdings = gather_holdings(targets, world, mesh.device)
    local = {target.fqn: target.local for target in targets}
    named: dict[str, torch.Tensor] = {}
    for fqn in sorted(holdings):
        holding = holdings[fqn]
        full = torch.zeros(holding.shape, dtype=holding.dtype, device=mesh.device)
        for cell in holding.cells:
            if cell.rank == world.rank:
                at = tuple(slice(r.logical, r.logical + r.length) for r in cell.box)
                mine = tuple(slice(r.local, r.local + r.length) for r in cell.box)
                full[at] = local[fqn][mine]
        # Sums of bytes, all but one of them 0: exact, and -0.0 stays -0.0.
        total = raw_all_reduce(full.view(-1).view(torch.uint8), world)
        full = total.view(holding.dtype).view(full.shape)
        for piece in rules.pieces[fqn]:
            aligned = Aligned(piece, holding.shape)
            out = named.get(piece.hub_name)
            if out is None:
                out = named[piece.hub_name] = full.new_empty(piece.hub_shape)
            block = full[tuple(slice(r.start, r.stop, r.step) for r in aligned.param)]
            view = out[tuple(slice(r.start, r.stop, r.step) for r in aligned.hub)]
            view.copy_(aligned.as_hub(block))
    return {name: named[name] for name in rules.hub_shapes() if name in named}


def _gradients(model: nn.Module, targets: list[Target]) -> list[Target]:
    known = {target.fqn: target for target in targets}
    found = []
    for entry in named_specs(model):
        fqn, param = entry.fqn, entry.param
        if not param.requires_grad:
            continue
        grad = param.grad
        if grad is None:
            raise CheckpointError(f"parameter {fqn!r} has no gradient; run backward first")
        partial = isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
        if partial or owes_replicas(entry):
            raise CheckpointError(
                f"the gradient of {fqn!r} still owes a sum over ranks; call settle_gradients first"
            )
        target = known[fqn]
        found.append(Target(fqn, to_local(grad), target.shape, target.index, target.keep_fp32))
    return found
