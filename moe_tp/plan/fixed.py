"""What a rank holds whatever the tokens of a micro-batch: parameters, their copies and sums.

Layouts that differ in how dp and cp divide the ranks have it in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Domain
from moe_tp.plan.axes import axis_sizes
from moe_tp.plan.moments import Fullness, Resident, fullness
from moe_tp.plan.params import Holding, Kind
from moe_tp.plan.parts import LAYERS, Parts
from moe_tp.plan.stages import Stage

_BUCKET_BYTES = 64 << 20  # of settle_gradients
_UPDATED = 1 << 22  # elements that train/adamw.py updates at a time


class _Part(NamedTuple):
    """What the fullest rank holds of one layer or end of the model, and what it sums.

    Args:
        holding: of parameters.
        whole: elements that ZeRO splits, before it does; `unit` those of the larger domain.
        owed: bytes of gradients that owe a sum over several ranks, by axes.
        sums: bytes of the largest sum over replicas of experts.
    """

    holding: Holding
    whole: int
    unit: int
    owed: list[tuple[tuple[str, ...], int]]
    sums: int


_Held = list[tuple[_Part, Kind, int]]


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a pipeline rank holds however its micro-batches are split over dp and cp.

    Args:
        resident: bytes between the passes of a step.
        backward, loss: the same at these moments.
        copies: bytes of weights in the compute dtype, of all layers kept and of one at a time.
        reducing: bytes of a unit's gradients as ZeRO sums them.
        after: the moments after the backward.
        trained: elements of trained parameters.
    """

    resident: Resident
    backward: Resident
    loss: Resident
    copies: tuple[float, float]
    reducing: float
    after: tuple[Fullness, Fullness]
    trained: int


class Stages(NamedTuple):
    """Of the unlike stages of a layout, by `Stage.shape`; and bytes that its peak is no less than.

    Peaks are no less than the moments after the backward, which know nothing of tokens.
    """

    fixed: dict[tuple[int, int, bool, bool], Fixed]
    least: float


class Resting(Parts):
    """Parts of a model, and what a pipeline rank holds however many tokens it computes."""

    def fixed(self, layout: ParallelLayout) -> Stages:
        """Return what does not depend on the tokens of a micro-batch; dp x cp counts alone."""
        once = self.job.micro_batches(layout) == 1
        experts = (layout.ep, layout.etp)
        key = (layout.pp, layout.stage_size, layout.tp, *experts, layout.zero, once)
        found: Stages | None = self.shared.fixed.get(key)
        if found is None:
            parts = {kind: self._part(kind, layout) for kind in self.kinds}
            fixed = {
                stage.shape: self._find_fixed(layout, stage, parts, once)
                for stage in self.unlike_stages(layout)
            }
            least = max(moment.total for each in fixed.values() for moment in each.after)
            self.shared.fixed[key] = found = Stages(fixed, least)
        return found

    def _part(self, kind: Kind, layout: ParallelLayout) -> _Part:
        holding, sizes = self.holding(kind, layout), axis_sizes(layout)
        whole = holding.whole.values()
        owed = [
            (axes, size)
            for axes, size in self.owed(kind, layout).items()
            if any(sizes[axis] > 1 for axis in axes)
        ]
        sums = max((n for _, n in self.replica_sums(kind, layout)), default=0)
        return _Part(holding, sum(whole), max(whole), owed, 4 * sums)

    def _find_fixed(
        self, layout: ParallelLayout, stage: Stage, parts: dict[Kind, _Part], once: bool
    ) -> Fixed:
        held = [(parts[kind], kind, count) for kind, count in stage.kinds]
        weights, adapters, gradients, states, trained = 0.0, 0.0, 0.0, 0.0, 0
        for (h, *_), _, n in held:
            weights, adapters = weights + h.weights * n, adapters + h.adapters * n
            gradients, states = gradients + h.gradients * n, states + h.states * n
            trained += sum(h.trained.values()) * n
        if self.job.mode == "full" and layout.zero == 1 and not once:
            gradients += 4.0 * sum(part.holding.accumulated * n for part, _, n in held)
        resident = backward = loss = (weights, adapters, gradients, states)
        if once:  # gradients come up as activations go
            ends = sum(part.holding.gradients for part, kind, _ in held if kind == "head")
            backward, loss = (weights, adapters, ends, states), (weights, adapters, 0.0, states)
        settle = fullness(self.job, "settle", resident, settle=self._settle(held))
        update = fullness(self.job, "update", resident, update=self._update(held))
        return Fixed(
            resident=resident,
            backward=backward,
            loss=loss,
            copies=self._copies(layout, held),
            reducing=self._reducing(layout, held),
            after=(settle, update),
            trained=trained,
        )

    def _copies(self, layout: ParallelLayout, held: _Held) -> tuple[float, float]:
        """Return bytes of weights cast for the graph, or gathered by ZeRO.

        Of all layers where their casts are kept, and where there is one at a time.
        """
        job, c = self.job, self.job.compute_bytes
        layers = [(part.holding, n) for part, kind, n in held if kind in LAYERS]
        # of one expert, in fp32 and in the compute dtype, and the one before it
        every = one = max(part.holding.taken_back for part, _, _ in held) * (4.0 + 2.0 * c)
        if job.mode == "lora" or job.master_bytes != c:
            cast = [h.adapters / 4.0 * c for h, _ in layers]  # adapters rest in fp32
            if job.mode == "full":
                cast = [float(h.casts * c) for h, _ in layers]
            every = sum(a * n for a, (_, n) in zip(cast, layers, strict=True))
            one = max(cast, default=0.0)
        gathered = 0
        if layout.zero in (1, 2):
            gathered = sum(part.whole * n for part, _, n in held)
        elif layout.zero == 3:  # this layer's units, and the next unit on its way
            gathered = max(part.whole for part, _, _ in held)
            gathered += max(part.unit for part, _, _ in held)
        return every + gathered * c, one + gathered * c

    def _reducing(self, layout: ParallelLayout, held: _Held) -> float:
        """Return bytes of a unit's gradients as ZeRO casts and sums them."""
        if not layout.zero or self.job.mode == "lora":
            return 0.0
        return max(part.unit for part, _, _ in held) * (self.job.compute_bytes + 4.0)

    def _settle(self, held: _Held) -> float:
        """Return bytes of the largest buffer of gradients, before and after its sum."""
        owed: dict[tuple[str, ...], int] = {}
        for part, _, count in held:
            for axes, size in part.owed:
                owed[axes] = owed.get(axes, 0) + count * size
        most = max(_BUCKET_BYTES, max(4 * part.holding.largest for part, _, _ in held))
        sums = max(part.sums for part, _, _ in held)
        return 2.0 * max(min(most, max(owed.values(), default=0)), sums)

    def _update(self, held: _Held) -> float:
        """Return what the optimiser holds besides its states."""
        job = self.job
        if job.optimizer == "sgd":
            return 0.0
        holdings = [part.holding for part, _, _ in held]
        largest = max(h.largest_rest for h in holdings)
        if job.optimizer == "muon":  # weight, momentum, gradient, its step, and the iteration's
            return 8.0 * 4.0 * max(h.largest for h in holdings)
        narrow = job.mode == "full" and job.master_bytes != 4
        if job.moments != "float32" or narrow:
            # weight, moments and their denominator in fp32, and what rounds or quantises one
            each = 48.0 if narrow or job.moments == "bfloat16" else 24.0
            return each * (largest if job.moments == "8bit" else min(largest, _UPDATED))
        if job.kernel == "fused":
            return 0.0
        if job.kernel == "loop":
            return 2.0 * 4.0 * largest
        domains: tuple[Domain, ...] = ("dense", "expert")
        return 4.0 * max(sum(part.holding.stepped[d] * n for part, _, n in held) for d in domains)
