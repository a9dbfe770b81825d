"""Peak memory of a rank, part by part, for any layout and pipeline stage.

Letters: T owned tokens · D width · V vocabulary · c bytes of an element in the compute dtype.

A step is looked at in a few moments, and the fullest counts: the loss, the backward of the last
layer, the sums of gradients, the optimiser. Weights lie in fp32 and a step casts them: at `zero=0`
the copy is part of the graph, shared by all micro-batches in flight (under recompute one layer's);
under ZeRO it is what is gathered. Measured peaks stand in docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from moe_tp.models.config import ModelConfig
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Domain
from moe_tp.parallel.vocab import LOSS_PIECE
from moe_tp.plan.activations import Work
from moe_tp.plan.axes import axis_sizes
from moe_tp.plan.job import Job
from moe_tp.plan.params import Holding, Kind
from moe_tp.plan.parts import Parts
from moe_tp.plan.stages import Stage

Moment = Literal["loss", "backward", "end", "settle", "update"]
_BUCKET_BYTES = 64 << 20  # of settle_gradients
_UPDATED = 1 << 22  # elements that train/adamw.py updates at a time
_LAYERS: tuple[Kind, ...] = ("dense", "moe")
_IDLE = Work(kept=0.0, again=0.0, moved=0.0, backward=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at one moment of a step.

    Args:
        stage: pipeline rank.
        moment: `loss`, `backward` (of the last layer), `end` (of a backward that is the step's
            only one), `settle` or `update`.
        weights: the model's parameters between steps.
        adapters: LoRA's, in fp32.
        copies: of the parameters in the compute dtype, or gathered by ZeRO.
        gradients, states: of what is trained; `states` of the optimiser.
        activations: kept for backward, all micro-batches in flight.
        dispatch: rows and sums of the experts.
        working: one layer's backward, with what it computes again.
        logits: chunk of logits, and the gradients that the loss takes with it.
        settle: flat buffers of gradient sums.
        update: what the optimiser holds besides its states.
        margin: fragmentation, context, communication buffers.
    """

    stage: int
    moment: Moment
    weights: float
    adapters: float
    gradients: float
    states: float
    copies: float = 0.0
    activations: float = 0.0
    dispatch: float = 0.0
    working: float = 0.0
    logits: float = 0.0
    settle: float = 0.0
    update: float = 0.0
    margin: float = 0.0

    @property
    def resident(self) -> float:
        """Bytes that lie there between the passes of a step."""
        return self.weights + self.adapters + self.gradients + self.states

    @property
    def total(self) -> float:
        """All bytes."""
        found: tuple[float, ...] = _values(self)
        return sum(found)

    def parts(self) -> dict[str, float]:
        """Return bytes by part."""
        return dict(zip(_PARTS, _values(self), strict=True))


_PARTS = (
    "weights", "adapters", "copies", "gradients", "states", "activations", "dispatch", "working",
    "logits", "settle", "update", "margin",
)  # fmt: skip
_values = attrgetter(*_PARTS)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What a pipeline rank holds however its micro-batches are split over dp and cp.

    Args:
        resident: bytes by part between the passes of a step.
        backward, loss: the same at these moments.
        copies: bytes of weights in the compute dtype, of all layers kept and of one at a time.
        reducing: bytes of a unit's gradients as ZeRO sums them.
        after: the moments after the backward.
        after_total: bytes of the fuller of them.
    """

    resident: dict[str, float]
    backward: dict[str, float]
    loss: dict[str, float]
    copies: tuple[float, float]
    reducing: float
    after: tuple[Memory, Memory]
    after_total: float


class _Layers(NamedTuple):
    """Bytes of a pipeline rank's layers and one micro-batch: all kept, and of the fullest layer."""

    kept: float
    moved: float
    working: float
    most_kept: float


class Planner(Parts):
    """Memory of layouts of one model and job; remembers what layouts share.

    Args:
        config: the model.
        job: the run.
        like: a planner of the same model, and of a job that differs in `recompute` at most.
    """

    def __init__(self, config: ModelConfig, job: Job, like: Planner | None = None) -> None:
        super().__init__(config, job, like)
        self._layers: dict[tuple[object, ...], _Layers] = {}

    def peak(self, layout: ParallelLayout) -> Memory:
        """Return the fullest moment of the fullest pipeline rank."""
        stages = self.unlike_stages(layout)
        return max((self.memory(layout, s) for s in stages), key=lambda m: m.total)

    def least(self, layout: ParallelLayout) -> float:
        """Return bytes that the peak is no less than, whatever is computed again."""
        once = self.job.micro_batches(layout) == 1
        stages = self.unlike_stages(layout)
        return max(self.fixed(layout, stage, once=once).after_total for stage in stages)

    def memory(self, layout: ParallelLayout, stage: Stage) -> Memory:
        """Return the fullest moment of one pipeline rank.

        Args:
            layout: resolved.
            stage: from `stages`.
        """
        return max(self.moments(layout, stage), key=lambda m: m.total)

    def moments(self, layout: ParallelLayout, stage: Stage) -> list[Memory]:
        """Return the moments of a step at which one pipeline rank may be fullest."""
        micro = self.job.micro_batches(layout)
        in_flight = min(layout.pp - stage.rank, micro)
        fixed, layers = self.fixed(layout, stage, once=micro == 1), self.layers(layout, stage)
        copies = fixed.copies[self.job.recompute != "none"]
        kept = layers.kept * in_flight + self._ends(layout, stage, micro, in_flight)
        backward = {
            "dispatch": layers.moved,
            "working": max(layers.working, fixed.reducing),
        }
        found = [
            self._memory(
                stage, "backward", fixed.backward, copies=copies, activations=kept, **backward
            ),
            *fixed.after,
        ]
        if stage.last:
            logits = self._logits(layout)
            found.append(
                self._memory(
                    stage, "loss", fixed.loss, copies=copies, activations=kept, logits=logits
                )
            )
        if micro == 1:
            one = layers.most_kept
            found.append(self._memory(stage, "end", fixed.resident, activations=one, **backward))
        return found

    def fixed(self, layout: ParallelLayout, stage: Stage, *, once: bool) -> _Fixed:
        """Return what does not depend on the tokens of a micro-batch.

        Args:
            layout: resolved; dp and cp count by their product alone.
            stage: from `stages`.
            once: a step is one micro-batch.
        """
        experts = (layout.ep, layout.etp)
        key = (stage, layout.pp, layout.stage_size, layout.tp, *experts, layout.zero, once)
        found: _Fixed | None = self.shared.fixed.get(key)
        if found is None:
            self.shared.fixed[key] = found = self._find_fixed(layout, stage, once)
        return found

    def _find_fixed(self, layout: ParallelLayout, stage: Stage, once: bool) -> _Fixed:
        held = [(self.holding(kind, layout), kind, count) for kind, count in stage.kinds()]
        resident = {
            name: sum(getattr(h, name) * n for h, _, n in held)
            for name in ("weights", "adapters", "gradients", "states")
        }
        if self.job.mode == "full" and layout.zero == 1 and not once:
            resident["gradients"] += 4.0 * sum(h.accumulated * n for h, _, n in held)
        backward = loss = resident
        if once:  # gradients come up as activations go
            ends = [h.gradients for h, kind, _ in held if kind == "head"]
            backward, loss = {**resident, "gradients": sum(ends)}, {**resident, "gradients": 0.0}
        settle = self._memory(stage, "settle", resident, settle=self._settle(layout, stage))
        update = self._memory(stage, "update", resident, update=self._update(held))
        return _Fixed(
            resident=resident,
            backward=backward,
            loss=loss,
            copies=(self._copies(layout, held, True), self._copies(layout, held, False)),
            reducing=self._reducing(layout, held),
            after=(settle, update),
            after_total=max(settle.total, update.total),
        )

    def layers(self, layout: ParallelLayout, stage: Stage) -> _Layers:
        """Return what the layers of a pipeline rank hold of a micro-batch."""
        experts = (layout.ep, layout.etp)
        key = (stage.dense, stage.moe, layout.cp, layout.tp, *experts)
        if key not in self._layers:
            kinds = [(kind, n) for kind, n in stage.kinds() if kind in _LAYERS]
            works = [(self.work(kind, layout), n) for kind, n in kinds]
            skew = self.job.layer_skew or self.job.skew
            fullest = max(
                (self.work(kind, layout, skew) for kind, _ in kinds),
                key=lambda w: w.again + w.moved + w.backward,
                default=_IDLE,
            )
            self._layers[key] = _Layers(
                kept=sum(work.kept * n for work, n in works),
                moved=fullest.moved,
                working=fullest.again + fullest.backward,
                most_kept=max((work.kept for work, _ in works), default=0.0),
            )
        return self._layers[key]

    def _memory(
        self, stage: Stage, moment: Moment, resident: dict[str, float], **parts: float
    ) -> Memory:
        total = sum(resident.values()) + sum(parts.values())
        margin = total * self.job.margin + self.job.reserve
        return Memory(stage=stage.rank, moment=moment, **resident, **parts, margin=margin)

    def _copies(
        self, layout: ParallelLayout, held: list[tuple[Holding, Kind, int]], whole: bool
    ) -> float:
        """Return bytes of weights cast for the graph, or gathered by ZeRO."""
        job, c = self.job, self.job.compute_bytes
        layers = [(h, n) for h, kind, n in held if kind in _LAYERS]
        # of one expert, in fp32 and in the compute dtype, and the one before it
        copies = max(h.taken_back for h, _, _ in held) * (4.0 + 2.0 * c)
        cast = [h.adapters / 4.0 * c for h, _ in layers]  # adapters rest in fp32
        if job.mode == "full" and job.master_bytes != c:
            cast = [float(h.casts * c) for h, _ in layers]
        if job.mode == "lora" or job.master_bytes != c:
            counts = [n for _, n in layers]
            each = zip(cast, counts, strict=True)
            copies = sum(a * n for a, n in each) if whole else max(cast, default=0.0)
        if layout.zero in (1, 2):
            copies += sum(sum(h.whole.values()) * n for h, _, n in held) * c
        elif layout.zero == 3:  # this layer's units, and the next unit on its way
            units = [sum(h.whole.values()) for h, _, _ in held]
            ahead = [max(h.whole.values()) for h, _, _ in held]
            copies += (max(units) + max(ahead)) * c
        return copies

    def _reducing(self, layout: ParallelLayout, held: list[tuple[Holding, Kind, int]]) -> float:
        """Return bytes of a unit's gradients as ZeRO casts and sums them."""
        if not layout.zero or self.job.mode == "lora":
            return 0.0
        unit = max(max(h.whole.values()) for h, _, _ in held)
        return unit * (self.job.compute_bytes + 4.0)

    def _ends(self, layout: ParallelLayout, stage: Stage, micro: int, in_flight: int) -> float:
        """Return bytes kept by the ends of a stage: residual streams that go in and out."""
        stream = float(self.job.owned_tokens(layout) * self.config.dim * self.job.compute_bytes)
        kept = in_flight * stream if stage.last else 0.0
        if layout.pp > 1:
            kept += 0.0 if stage.last else in_flight * stream
            # the schedule makes a buffer for every micro-batch that arrives, from either side
            kept += micro * stream * ((not stage.first) + (not stage.last))
        return kept

    def _settle(self, layout: ParallelLayout, stage: Stage) -> float:
        """Return bytes of the largest buffer of gradients, before and after its sum."""
        sizes = axis_sizes(layout)
        owed: dict[tuple[str, ...], int] = {}
        largest = 0
        for kind, count in stage.kinds():
            largest = max(largest, 4 * self.holding(kind, layout).largest)
            for axes, size in self.owed(kind, layout).items():
                owed[axes] = owed.get(axes, 0) + count * size
        most = max(_BUCKET_BYTES, largest)
        flat = [size for axes, size in owed.items() if any(sizes[axis] > 1 for axis in axes)]
        sums = [4 * n for kind, _ in stage.kinds() for _, n in self.replica_sums(kind, layout)]
        return 2.0 * max(min(most, max(flat, default=0)), max(sums, default=0))

    def _update(self, held: list[tuple[Holding, Kind, int]]) -> float:
        """Return what the optimiser holds besides its states."""
        job = self.job
        if job.optimizer == "sgd":
            return 0.0
        largest = max(h.largest_rest for h, _, _ in held)
        if job.optimizer == "muon":  # weight, momentum, gradient, its step, and the iteration's
            return 8.0 * 4.0 * max(h.largest for h, _, _ in held)
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
        return 4.0 * max(sum(h.stepped[d] * n for h, _, n in held) for d in domains)

    def _logits(self, layout: ParallelLayout) -> float:
        """Return the bytes of one chunk of logits and of the gradients taken with it."""
        config, job, c = self.config, self.job, self.job.compute_bytes
        tokens = job.owned_tokens(layout) * layout.tp
        words = -(-config.vocab_size // layout.tp)
        held = min(job.loss_chunk, tokens)
        # in fp32; in lower precision a few tokens' stand beside them on their way
        chunk = words * (4.0 * held + (c * min(held, LOSS_PIECE) if c < 4 else 0))
        streams = tokens * config.dim * c * (1 if layout.tp == 1 else 2)
        # the weight's copy, its gradient in fp32, and one chunk's part
        cast = c if job.mode == "full" and job.master_bytes != c and not layout.zero else 0
        head = words * config.dim * (cast + (4 + c if job.mode == "full" else 0))
        return chunk + head + streams
