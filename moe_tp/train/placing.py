"""Placement of experts in a run: by measured load, every so many steps, and kept by checkpoints.

Letters: L layers · E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_tp.checkpoint.agree import gather_json
from moe_tp.experts.moe import MoE
from moe_tp.experts.placement import place, rebalance
from moe_tp.log import get_logger
from moe_tp.models.decoder import Decoder
from moe_tp.routing.table import ExpertTable

_log = get_logger(__name__)


class Placement:
    """Where the experts of a run's model lie, and the load that says where they should.

    Args:
        model: its experts are moved.
        every: steps between; 0: never.

    Attributes:
        counts_LE: tokens of each layer and expert since the experts were placed last.
    """

    def __init__(self, model: Decoder, every: int) -> None:
        self.model, self.every = model, every
        if every:
            _warn_of_none(model, every)
        self.counts_LE: torch.Tensor | None = None

    def after_step(
        self, step: int, counts_LE: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take note of a step's load, and place the experts anew where that is due.

        Args:
            step: steps done.
            counts_LE: tokens of each layer and expert over all ranks.
            optimizer: its state moves along; gradients are dropped.

        Collectives: those of `rebalance`.
        """
        if not self.every:
            return
        fresh = counts_LE.to("cpu", torch.int64)
        self.counts_LE = fresh if self.counts_LE is None else self.counts_LE + fresh
        if step % self.every == 0:
            optimizer.zero_grad()
            rebalance(self.model, optimizer, self.counts_LE)
            self.counts_LE = None

    def state(self) -> dict[str, Any] | None:
        """Return as JSON what a checkpoint keeps, so that a resumed run sums in the same order.

        Collectives: an exchange over the world, where experts move.
        """
        if not self.every:
            return None
        mesh = self.model.mesh
        mine = {str(layer.layer): list(layer.table.slots) for layer in _layers(self.model)}
        found = gather_json(mine, mesh.group("world"), mesh.device)
        counts = None if self.counts_LE is None else self.counts_LE.tolist()
        return {"tables": {name: t for tables in found for name, t in tables.items()},
                "counts": counts, "ep": mesh.size("ep")}  # fmt: skip

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Place the experts as they lay, where the layout has the same slots; no weights yet.

        Args:
            state: as `state` returned it; None: of a run without.

        Collectives: those of `place`.
        """
        if state is None or not self.every:
            return
        counts, ep = state["counts"], self.model.mesh.size("ep")
        self.counts_LE = None if counts is None else torch.tensor(counts, dtype=torch.int64)
        for layer in _layers(self.model):
            slots = tuple(state["tables"][str(layer.layer)])
            if state["ep"] == ep and len(slots) == len(layer.table.slots):
                place(layer, ExpertTable(layer.table.num_experts, ep, slots))


def _warn_of_none(model: Decoder, every: int) -> None:
    """Warn where no expert could lie elsewhere: on one rank, or one on each without a spare slot.

    Not asked of the layers: a stage of a pipeline may have none.
    """
    ep, num_experts = model.mesh.size("ep"), model.config.moe.router.num_experts
    if ep > 1 and (num_experts > ep or model.mesh.runtime.spare_slots):
        return
    why, fix = "one rank holds all of them", "choose ep above 1"
    if ep > 1:
        why, fix = "each rank holds one of them", "choose a lower ep, or runtime.spare_slots"
    _log.warning(
        "train.rebalance_every=%d moves no experts with ep=%d, where %s; leave it out, or %s",
        every,
        ep,
        why,
        fix,
    )


def _layers(model: Decoder) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]
