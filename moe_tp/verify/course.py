"""The optimiser steps that both sides take, and the reference's way along them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_tp.verify.data import Batch, Losses, Outcome
from moe_tp.verify.reference import Reference
from moe_tp.verify.watch import Choices, tables

__all__ = ["Course", "Truth"]

CLIP = 0.5  # of the first gradient norm, so that clipping takes part
STRIDE = 0.02  # of the weights' norm, what one optimiser step moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How the weights are moved, the same on both sides."""

    optimizer: str
    eps: float
    max_norm: float = float("inf")
    lr: float = 0.0

    def build(self, params: Any) -> torch.optim.Optimizer:
        """Return the optimiser of one side."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(params, lr=self.lr, eps=self.eps, weight_decay=0.0)

    def paced(self, weights: Sequence[torch.Tensor], norm: float) -> Course:
        """Return the course with its clip and learning rate set from the first gradients.

        A step moves the weights by a set part of their norm: enough that a wrong update shows in
        them, too little to leave the point where rounding stays small.
        """
        size = math.sqrt(sum(float(w.detach().double().square().sum()) for w in weights))
        max_norm = CLIP * norm
        if self.optimizer == "sgd":
            lr = STRIDE * size / max(max_norm, 1e-30)
        else:
            lr = STRIDE * size / sum(w.numel() for w in weights) ** 0.5
        return replace(self, max_norm=max_norm, lr=lr)


@dataclass(slots=True)
class Truth:
    """The reference's side; filled on rank 0 only."""

    _model: Reference | None = None
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def reference(self) -> Reference:
        """The model, after its last step."""
        assert self._model is not None
        return self._model

    def run(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype,
        batches: list[list[list[Batch]]],
        losses: Losses,
        course: Course,
        steps: int,
    ) -> tuple[Course, list[dict[int, Choices]]]:
        """Return the paced course and the choices of each step, after running the reference."""
        model = self._model = Reference.load(path, dtype)
        layers = sorted(model.facts.moe_layers)
        optimise: torch.optim.Optimizer | None = None
        choices = []
        for step in batches:
            out = model.step(step, losses)
            self.outcomes.append(out)
            choices.append(tables(step, out.routing, layers))
            leaves = list(model.weights.values())
            if optimise is None:
                course = course.paced(leaves, out.grad_norm)
                optimise = course.build(leaves)
            scale = min(1.0, course.max_norm / (out.grad_norm + 1e-6))
            for name, leaf in model.weights.items():
                leaf.grad = out.gradients[name] * scale
            if steps:
                optimise.step()
        return course, choices

    def final(self) -> dict[str, torch.Tensor]:
        """Return the weights after the last step by hub name, buffers among them."""
        weights = {name: leaf.detach() for name, leaf in self.reference.weights.items()}
        return {**weights, **self.reference.buffers}
