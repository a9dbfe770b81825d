"""What the MoE layers of a step did: load, drops, router entropy, rows and bytes on the wire.

Letters: L MoE layers · E experts · P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_tp.experts.losses import SUMS
from moe_tp.models.decoder import Decoder
from moe_tp.models.head import Aux
from moe_tp.parallel.collectives import raw_all_gather
from moe_tp.routing.metrics import load_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The layers of one step; equal on all ranks.

    Args:
        layers: number of each MoE layer.
        counts_LE: tokens that each expert worked on.
        choices_L: choices of all tokens, before capacity dropped any.
        entropy_L: mean entropy of the router's probabilities over log E; 1: it knows nothing.
        wire_P4: of each rank of a stage, over all stages: rows sent, rows received, bytes sent,
            bytes received; forward.
    """

    layers: tuple[int, ...]
    counts_LE: torch.Tensor
    choices_L: torch.Tensor
    entropy_L: torch.Tensor
    wire_P4: torch.Tensor

    def summary(self) -> dict[str, Any]:
        """Return the figures of metrics.jsonl: the worst layer's, each layer's, each rank's."""
        if not self.layers:
            return {"max_load_ratio": 0.0, "load_entropy": 0.0, "dead_experts": 0}
        found = load_metrics(self.counts_LE)
        asked_L = self.choices_L.clamp_min(1)
        dropped_L = 1.0 - self.counts_LE.sum(dim=-1) / asked_L
        return {
            "max_load_ratio": float(found.max_ratio.max()),
            "load_entropy": float(found.load_entropy.min()),
            "dead_experts": int(found.dead_experts.sum()),
            "dropped_share": 1.0 - float(self.counts_LE.sum() / asked_L.sum()),
            "router_entropy": float(self.entropy_L.mean()),
            "layer_max_load_ratio": _short(found.max_ratio),
            "layer_dead_experts": found.dead_experts.tolist(),
            "layer_dropped_share": _short(dropped_L),
            "layer_router_entropy": _short(self.entropy_L),
            "wire_rows_sent": self.wire_P4[:, 0].tolist(),
            "wire_rows_received": self.wire_P4[:, 1].tolist(),
            "wire_bytes_sent": self.wire_P4[:, 2].tolist(),
            "wire_bytes_received": self.wire_P4[:, 3].tolist(),
        }

    def line(self) -> dict[str, Any]:
        """Return the figures of load.jsonl: the load of each layer and expert."""
        return {"layers": list(self.layers), "counts": self.counts_LE.tolist()}


def step_load(model: Decoder, aux: Aux) -> StepLoad:
    """Return the figures of a step.

    Args:
        model: whose step it was.
        aux: of all its micro-batches, as `forward_backward` returns it.

    Collectives: all-gather of four integers over the ranks of a stage.
    """
    layers = tuple(model.config.moe_layers)
    at = {name: i for i, name in enumerate(SUMS)}
    sums_LM = aux.sums_LM[list(layers)]
    wire = [at[n] for n in ("rows_sent", "rows_received", "bytes_sent", "bytes_received")]
    mine_14 = sums_LM[:, wire].sum(dim=0, keepdim=True).round().long()
    wire_P4 = raw_all_gather(mine_14, model.mesh.group("stage")).cpu()
    sums_LM = sums_LM.cpu()
    tokens_L = sums_LM[:, at["tokens"]]
    experts = max(model.config.moe.router.num_experts, 2)
    return StepLoad(
        layers=layers,
        counts_LE=aux.counts_LE[list(layers)].cpu(),
        choices_L=sums_LM[:, at["choices"]].long(),
        entropy_L=sums_LM[:, at["entropy"]] / tokens_L.clamp_min(1) / math.log(experts),
        wire_P4=wire_P4,
    )


def scalars(line: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, float]:
    """Return a step's line as flat names and numbers, as trackers take them.

    Args:
        line: of metrics.jsonl; lists are of layers or of ranks.
        layers: numbers of the MoE layers.
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, bool) or value is None or name == "step":
            continue
        if isinstance(value, (int, float)):
            found[name] = value
        elif isinstance(value, list) and name.startswith("layer_"):
            short = name.removeprefix("layer_")
            found |= {f"{short}/layer_{n}": v for n, v in zip(layers, value, strict=True)}
        elif isinstance(value, list):
            found |= {f"{name}/rank_{n}": v for n, v in enumerate(value)}
    return {name: float(value) for name, value in found.items()}


def _short(values: torch.Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
