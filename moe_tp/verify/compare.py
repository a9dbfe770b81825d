"""How two computations are compared and what that says: errors, tolerances, the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from moe_tp.errors import ConfigError

__all__ = ["Findings", "Report", "Tolerances", "relative_error", "tolerances_for"]

_FLOOR = 1e-6
_AFTER_STEPS = ("later_grad_norms", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Largest relative errors that pass, and the score gap up to which a flip is rounding."""

    loss: float
    logits: float
    gradients: float
    grad_norm: float
    later_grad_norms: float
    weights: float
    flip_gap: float


_TOLERANCES = {
    torch.float64: Tolerances(
        loss=1e-9,
        logits=1e-9,
        gradients=1e-9,
        grad_norm=1e-9,
        later_grad_norms=1e-9,
        weights=1e-9,
        flip_gap=1e-10,
    ),
    torch.float32: Tolerances(
        loss=1e-5,
        logits=1e-5,
        gradients=1e-5,
        grad_norm=1e-6,
        later_grad_norms=1e-5,  # of weights that may differ by as much
        weights=1e-5,
        flip_gap=1e-5,
    ),
    # Against the fp32 reference: what the 8 bits of bf16 cost a few layers deep.
    torch.bfloat16: Tolerances(
        loss=2e-2,
        logits=5e-2,
        gradients=2e-1,
        grad_norm=5e-2,
        later_grad_norms=5e-2,
        weights=2e-2,
        flip_gap=5e-2,
    ),
}


def tolerances_for(dtype: torch.dtype) -> Tolerances:
    """Return the tolerances of a layout computed in `dtype`.

    Args:
        dtype: float64, float32 or bfloat16.
    """
    if dtype not in _TOLERANCES:
        raise ConfigError(
            f"verify knows no tolerances for {dtype}; choose float32, float64 or bfloat16"
        )
    return _TOLERANCES[dtype]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor, scale: float) -> float:
    """Return ||ours - theirs|| / max(||theirs||, 1e-6 scale); inf where a value is not finite.

    Args:
        ours: what the layout computed.
        theirs: what the reference computed, of the same shape.
        scale: the norm of all tensors of this kind together.
    """
    if ours.shape != theirs.shape:
        return math.inf
    a, b = ours.double(), theirs.double()
    error = float((a - b).norm()) / max(float(b.norm()), _FLOOR * scale, torch.finfo(b.dtype).tiny)
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict of `verify`, the same on every rank.

    Args:
        passed: every error and every flip within tolerance.
        layout: the resolved layout, as text.
        loss: `reference` and `layout`, of the first step.
        max_relative_error: `logits`, `gradients` and `grad_norm` of the first step, where both
            hold the same weights; `loss` of all steps; `weights` after them, None without steps.
        later_grad_norms: the largest error of the other steps' norms, which are taken on weights
            that differ by rounding; None without steps.
        worst_parameter: hub name with the largest error of gradient or weight.
        first_divergent_layer: the first layer whose router scores or output differ; where the
            forward agrees, the last layer with a wrong gradient (backward starts at the last).
        routing_flips: choices of experts that differ, of the layout's own choice at the reference's
            inputs (its routing is replayed).
        widest_flip: the largest score gap among them.
        tolerances: what counts as equal.
        failures: one sentence for each thing out of tolerance.
        steps, dtype, tokens, targets: what was run.
    """

    passed: bool
    layout: str
    loss: dict[str, float]
    max_relative_error: dict[str, float | None]
    later_grad_norms: float | None
    worst_parameter: str | None
    first_divergent_layer: int | None
    routing_flips: int
    widest_flip: float
    tolerances: Tolerances
    failures: tuple[str, ...]
    steps: int
    dtype: str
    tokens: int
    targets: int

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an infinite error is the text "inf"."""
        return {key: _jsonable(value) for key, value in asdict(self).items()}

    def __str__(self) -> str:
        errors = ", ".join(
            f"{kind} {error:.1e}"
            for kind, error in self.max_relative_error.items()
            if error is not None
        )
        head = f"{'passed' if self.passed else 'FAILED'} {self.layout}: {errors}"
        return "\n  ".join([head, *self.failures])


@dataclass(slots=True, kw_only=True)
class Findings:
    """Largest errors met so far; filled step by step on rank 0."""

    errors: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("logits", "loss", "gradients", "grad_norm", "later_grad_norms", "weights"), 0.0
        )
    )
    worst: tuple[float, str | None] = (0.0, None)
    forward: dict[int, float] = field(default_factory=dict)  # error of each layer's output
    backward: dict[int, float] = field(default_factory=dict)  # and of its worst gradient
    flips: int = 0
    widest_flip: float = 0.0
    notes: list[str] = field(default_factory=list)

    def meet(self, kind: str, error: float) -> None:
        """Keep an error if it is the largest of its kind."""
        self.errors[kind] = max(self.errors[kind], error)

    def note(self, sentence: str) -> None:
        """Keep a sentence, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def divergent_layer(self, limits: Tolerances) -> int | None:
        """Return the layer to look at first, or None; see `Report.first_divergent_layer`."""
        ahead = [i for i, e in self.forward.items() if not e <= limits.logits]
        behind = [i for i, e in self.backward.items() if not e <= limits.gradients]
        return min(ahead) if ahead else max(behind) if behind else None

    def compare_named(
        self, kind: str, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        """Return each named tensor's error, all kept; a name on one side only is an infinite error.

        Args:
            kind: "gradients" or "weights".
            ours: what the layout holds, by hub name.
            theirs: what the reference holds, by hub name.
        """
        scale = math.sqrt(sum(float(t.double().square().sum()) for t in theirs.values()))
        errors = {}
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                side = "the layout" if name not in ours else "the reference"
                self.note(f"{side} has no {kind} for {name}")
                errors[name] = math.inf
            else:
                errors[name] = relative_error(ours[name], theirs[name], scale)
            self.meet(kind, errors[name])
            self.worst = max(self.worst, (errors[name], name), key=lambda pair: pair[0])
        return errors

    def failures(self, limits: Tolerances, *, steps: int) -> tuple[str, ...]:
        """Return one sentence for each finding out of tolerance.

        Args:
            limits: what passes.
            steps: 0 leaves the weights out.
        """
        found = list(self.notes)
        for kind, error in self.errors.items():
            limit: float = getattr(limits, kind)
            if (steps or kind not in _AFTER_STEPS) and not error <= limit:
                named = f", worst at {self.worst[1]}" if kind in ("gradients", "weights") else ""
                found.append(f"{kind}: relative error {error:.3g} is above {limit:g}{named}")
        if not self.widest_flip <= limits.flip_gap:
            found.append(
                f"routing: {self.flips} choices differ, one at a score gap of "
                f"{self.widest_flip:.3g}, above {limits.flip_gap:g}"
            )
        return tuple(found)

    def report(
        self, limits: Tolerances, loss: dict[str, float], *, steps: int, **about: Any
    ) -> Report:
        """Return the verdict.

        Args:
            limits: what passes.
            loss: `reference` and `layout`.
            steps: optimiser steps that were taken.
            about: the other fields of `Report`.
        """
        failures = self.failures(limits, steps=steps)
        errors: dict[str, float | None] = dict(self.errors)
        if not steps:
            errors |= dict.fromkeys(_AFTER_STEPS)
        later_grad_norms = errors.pop("later_grad_norms")
        return Report(
            passed=not failures,
            loss=loss,
            max_relative_error=errors,
            later_grad_norms=later_grad_norms,
            worst_parameter=self.worst[1],
            first_divergent_layer=self.divergent_layer(limits),
            routing_flips=self.flips,
            widest_flip=self.widest_flip,
            tolerances=limits,
            failures=failures,
            steps=steps,
            **about,
        )


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_jsonable(item) for item in value]
    return value
