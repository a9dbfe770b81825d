"""One step of all ranks against the same step of the reference; runs on rank 0.

Letters: B batch · S sequence · V vocabulary · D width · K choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_tp.verify.compare import Findings, relative_error
from moe_tp.verify.data import Batch, Outcome
from moe_tp.verify.gate import flip_gap
from moe_tp.verify.reference import Reference
from moe_tp.verify.watch import first_sample, token_ids

__all__ = ["StepResult", "compare_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one rank has to show for a step; `rank` is its data-parallel rank."""

    loss: float
    aux_loss: float
    targets: int
    grad_norm: float
    rank: int
    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    seen: dict[str, dict[int, torch.Tensor]]

    def without_tensors(self) -> StepResult:
        """Return the numbers and the choices alone."""
        chosen = {k: v if k != "hidden" else {} for k, v in self.seen.items()}
        return replace(self, logits=[], gradients={}, seen=chosen)


def compare_step(
    findings: Findings,
    results: Sequence[StepResult],
    step: list[list[Batch]],
    truth: Outcome,
    reference: Reference,
    whole: bool,
) -> None:
    """Add to `findings` what differs in one step.

    Args:
        findings: filled.
        results: of every rank.
        step: the batches, `[micro-batch][data-parallel rank]`.
        truth: the reference's step.
        reference: names the layers.
        whole: logits, gradients and layer outputs are there to compare, not only numbers.
    """
    loss, aux = float(truth.loss), float(truth.aux_loss)
    for result in results:
        if result.targets != truth.targets:
            findings.note(f"{result.targets} target tokens were counted, not {truth.targets}")
        findings.meet("loss", _scalar_error(result.loss, loss))
        findings.meet("loss", _scalar_error(result.aux_loss, aux))
        norm = "grad_norm" if whole else "later_grad_norms"
        findings.meet(norm, _scalar_error(result.grad_norm, truth.grad_norm))
    places = _places(findings, results, step)
    _count_flips(findings, results, places, truth, reference)
    if not whole:
        return
    for result in results:
        for m, logits_BSV in enumerate(result.logits):
            batch, expected_BSV = step[m][result.rank], truth.logits[m][result.rank]
            if logits_BSV.shape != expected_BSV.shape:
                findings.note(f"logits have shape {tuple(logits_BSV.shape)}")
                findings.meet("logits", math.inf)
            elif batch.real.any():
                ours, theirs = logits_BSV[batch.real], expected_BSV[batch.real]
                findings.meet("logits", relative_error(ours, theirs, 0.0))
    _compare_layers(findings, results, places, truth)
    errors = findings.compare_named("gradients", results[0].gradients, truth.gradients)
    for name, error in errors.items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            layer = int(parts[2])
            findings.backward[layer] = max(findings.backward.get(layer, 0.0), error)


_Place = tuple[int, int, int]  # micro-batch, data-parallel rank, token of that part


def _places(
    findings: Findings, results: Sequence[StepResult], step: list[list[Batch]]
) -> dict[int, _Place]:
    """Return where each real token lies; every layer must have seen each exactly once."""
    places: dict[int, _Place] = {}
    for m, parts in enumerate(step):
        for r, batch in enumerate(parts):
            ids = token_ids(batch, first_sample(m, r, len(parts)))
            real = batch.real.flatten().tolist()
            places.update({t: (m, r, at) for at, t in enumerate(ids.tolist()) if real[at]})
    everyone = sorted(places)
    for layer in sorted({layer for result in results for layer in result.seen["ids"]}):
        met = [
            token
            for result in results
            if layer in result.seen["ids"]
            for token in result.seen["ids"][layer].tolist()
        ]
        if sorted(met) != everyone:
            findings.note(
                f"layer {layer} worked on {len(met)} real tokens ({len(set(met))} different ones), "
                f"not on each of the {len(everyone)} once"
            )
    return places


def _count_flips(
    findings: Findings,
    results: Sequence[StepResult],
    places: dict[int, _Place],
    truth: Outcome,
    reference: Reference,
) -> None:
    """Add the choices of experts that differ and the widest score gap among them."""
    gate = reference.facts.gate
    for at, layer in enumerate(sorted(reference.facts.moe_layers)):
        for result in results:
            if layer not in result.seen["chosen"]:
                continue
            ids = result.seen["ids"][layer].tolist()
            chosen = result.seen["chosen"][layer].tolist()
            for token, ours in zip(ids, chosen, strict=True):
                if token not in places:
                    continue  # padding that was taken for a token: _places has noted it
                m, r, row = places[token]
                routing = truth.routing[m][r][at]
                theirs = routing.own_ids_TK[row].tolist()
                if set(ours) != set(theirs):
                    findings.flips += 1
                    gap = flip_gap(routing.choice_TE[row], gate, theirs, ours)
                    findings.widest_flip = max(findings.widest_flip, gap)


def _compare_layers(
    findings: Findings,
    results: Sequence[StepResult],
    places: dict[int, _Place],
    truth: Outcome,
) -> None:
    """Keep the error of each layer's output over all its tokens."""
    for layer in sorted({layer for result in results for layer in result.seen["hidden"]}):
        ours, theirs = [], []
        for result in results:
            if layer not in result.seen["hidden"]:
                continue
            hidden = result.seen["hidden"][layer]
            for token, row_D in zip(result.seen["ids"][layer].tolist(), hidden, strict=True):
                if token not in places:
                    continue
                m, r, row = places[token]
                ours.append(row_D)
                theirs.append(truth.hidden[m][r][layer].flatten(0, 1)[row])
        if ours:
            error = relative_error(torch.stack(ours), torch.stack(theirs), 0.0)
            findings.forward[layer] = error


def _scalar_error(ours: float, theirs: float) -> float:
    error = abs(ours - theirs) / max(abs(theirs), 1e-6)
    return error if math.isfinite(error) else math.inf
