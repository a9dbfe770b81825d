"""What the MoE layers of a step did: load, drops, router entropy, rows and bytes on the wire.

Letters: L MoE layers · E experts · P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_tp.experts.dispatch import Wire
from moe_tp.experts.losses import MoEAux
from moe_tp.experts.moe import MoE
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.collectives import raw_all_gather, raw_all_reduce
from moe_tp.routing.metrics import load_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The layers of one step; equal on all ranks.

    Args:
        layers: number of each MoE layer.
        counts_LE: tokens that each expert worked on.
        chosen_LE: tokens that chose it.
        tokens_L: real tokens.
        entropy_L: mean entropy of the router's probabilities over log E; 1: it knows nothing.
        wire_P4: of each rank: rows sent, rows received, bytes sent, bytes received; forward.
    """

    layers: tuple[int, ...]
    counts_LE: torch.Tensor
    chosen_LE: torch.Tensor
    tokens_L: torch.Tensor
    entropy_L: torch.Tensor
    wire_P4: torch.Tensor

    def summary(self) -> dict[str, Any]:
        """Return the figures of metrics.jsonl: the worst layer's, each layer's, each rank's."""
        if not self.layers:
            return {"max_load_ratio": 0.0, "load_entropy": 0.0, "dead_experts": 0}
        found = load_metrics(self.counts_LE, chosen_E=self.chosen_LE)
        asked = self.chosen_LE.sum().clamp_min(1)
        return {
            "max_load_ratio": float(found.max_ratio.max()),
            "load_entropy": float(found.load_entropy.min()),
            "dead_experts": int(found.dead_experts.sum()),
            "dropped_share": 1.0 - float(self.counts_LE.sum() / asked),
            "router_entropy": float(self.entropy_L.mean()),
            "layer_max_load_ratio": _short(found.max_ratio),
            "layer_dead_experts": found.dead_experts.tolist(),
            "layer_dropped_share": _short(found.dropped_share),
            "layer_router_entropy": _short(self.entropy_L),
            "wire_rows_sent": self.wire_P4[:, 0].tolist(),
            "wire_rows_received": self.wire_P4[:, 1].tolist(),
            "wire_bytes_sent": self.wire_P4[:, 2].tolist(),
            "wire_bytes_received": self.wire_P4[:, 3].tolist(),
        }

    def line(self) -> dict[str, Any]:
        """Return the figures of load.jsonl: the load of each layer and expert."""
        return {"layers": list(self.layers), "counts": self.counts_LE.tolist()}


class LoadMeter:
    """Adds up what the MoE layers of a model tell in training, until `take`.

    A recomputed forward and evaluations count nothing.

    Args:
        model: the model; its layers are observed as long as they live.
    """

    def __init__(self, model: Decoder) -> None:
        self.mesh, self.layers = model.mesh, tuple(model.config.moe_layers)
        self.experts = model.config.moe.router.num_experts
        self._sums: dict[int, torch.Tensor] = {}
        self._wire = Wire()
        for module in model.modules():
            if isinstance(module, MoE):
                module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, _: Any, output: tuple[torch.Tensor, MoEAux]) -> None:
        assert isinstance(module, MoE)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or not (module.training and torch.is_grad_enabled()):
            return
        aux = output[1]
        rest = torch.stack([aux.num_tokens.double().view(()), aux.entropy_sum.double().view(())])
        found = torch.cat([aux.counts_E.double(), aux.chosen_E.double(), rest]).detach()
        before = self._sums.get(module.layer)
        self._sums[module.layer] = found if before is None else before + found
        self._wire = self._wire + aux.wire

    def take(self) -> StepLoad:
        """Return the step's figures, and begin the next step's.

        Collectives: all-reduce over pp of what each layer tells, all-gather of four integers over
        the world.
        """
        device, experts = self.mesh.device, self.experts
        rows = torch.zeros(len(self.layers), 2 * experts + 2, dtype=torch.float64, device=device)
        for at, layer in enumerate(self.layers):
            if layer in self._sums:
                rows[at] = self._sums[layer].to(device)
        rows = raw_all_reduce(rows, self.mesh.group("pp")).cpu()
        w = self._wire
        mine = [w.rows_sent, w.rows_received, w.bytes_sent, w.bytes_received]
        wire_14 = torch.tensor([mine], dtype=torch.int64, device=device)
        wire_P4 = raw_all_gather(wire_14, self.mesh.group("world")).cpu()
        self._sums, self._wire = {}, Wire()
        tokens_L, entropy_L = rows[:, -2], rows[:, -1]
        return StepLoad(
            layers=self.layers,
            counts_LE=rows[:, :experts].long(),
            chosen_LE=rows[:, experts : 2 * experts].long(),
            tokens_L=tokens_L.long(),
            entropy_L=entropy_L / tokens_L.clamp_min(1) / math.log(max(experts, 2)),
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
