"""Peak memory of a rank, part by part, for any layout and pipeline stage.

Letters: T owned tokens · D width · V vocabulary · c bytes of an element in the compute dtype.

A step is looked at in a few moments, and the fullest counts: the loss, the backward of the last
layer, the sums of gradients, the optimiser. Weights lie in fp32 and a step casts them: at `zero=0`
the copy is part of the graph, shared by all micro-batches in flight (under recompute one layer's);
under ZeRO it is what is gathered. Measured peaks stand in docs/planner.md.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_tp.models.config import ModelConfig
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.plan.activations import Work
from moe_tp.plan.fixed import Resting
from moe_tp.plan.job import Job
from moe_tp.plan.moments import Fullness, Memory, Resident, fullness
from moe_tp.plan.params import Kind
from moe_tp.plan.parts import LAYERS
from moe_tp.plan.stages import Stage

_LOSS_PIECE = 128  # of parallel/vocab.py, which loads more of torch than a plan needs
_NONE: Resident = (0.0, 0.0, 0.0, 0.0)
_IDLE = Work(kept=0.0, again=0.0, moved=0.0, backward=0.0)


class _Layers(NamedTuple):
    """Bytes of a pipeline rank's layers and one micro-batch: all kept, and of the fullest layer."""

    kept: float
    moved: float
    working: float
    most_kept: float


class _Works(NamedTuple):
    """Of one micro-batch: each kind of layer, as usual and at its fullest; and sums by stage.

    `least` is what no peak falls below: its backward holds one layer of some kind.
    """

    kinds: list[tuple[Kind, Work, Work]]
    stages: dict[tuple[int, int], _Layers]
    least: float


class Planner(Resting):
    """Memory of layouts of one model and job; remembers what layouts share.

    Args:
        config: the model.
        job: the run.
        like: a planner of the same model, and of a job that differs in `recompute` at most.
    """

    def __init__(self, config: ModelConfig, job: Job, like: Planner | None = None) -> None:
        super().__init__(config, job, like)
        self._works: dict[tuple[int, ...], _Works] = {}

    def peak(self, layout: ParallelLayout) -> Memory:
        """Return the fullest moment of the fullest pipeline rank."""
        stages = self.unlike_stages(layout)
        found = [(m, s) for s in stages for m in self._moments(layout, s)]
        moment, stage = max(found, key=lambda each: each[0].total)
        return moment.memory(stage)

    def least(self, layout: ParallelLayout) -> float:
        """Return bytes that the peak is no less than, whatever is computed again."""
        return self.fixed(layout).least

    def least_passing(self, layout: ParallelLayout) -> float:
        """Return bytes that the peak is no less than, whatever rests there; dp and pp are free."""
        return self._works_of(layout).least

    def trained(self, layout: ParallelLayout, stage: Stage) -> int:
        """Return the elements that the optimiser steps on a pipeline rank."""
        return self.fixed(layout).fixed[stage.shape].trained

    def memory(self, layout: ParallelLayout, stage: Stage) -> Memory:
        """Return the fullest moment of one pipeline rank.

        Args:
            layout: resolved.
            stage: from `stages`.
        """
        return max(self._moments(layout, stage), key=lambda m: m.total).memory(stage)

    def moments(self, layout: ParallelLayout, stage: Stage) -> list[Memory]:
        """Return the moments of a step at which one pipeline rank may be fullest."""
        return [moment.memory(stage) for moment in self._moments(layout, stage)]

    def _moments(self, layout: ParallelLayout, stage: Stage) -> list[Fullness]:
        micro = self.job.micro_batches(layout)
        in_flight = min(layout.pp - stage.rank, micro)
        fixed, layers = self.fixed(layout).fixed[stage.shape], self._layers(layout, stage)
        copies = fixed.copies[self.job.recompute != "none"]
        kept = layers.kept * in_flight + self._ends(layout, stage, micro, in_flight)
        moved, working = layers.moved, max(layers.working, fixed.reducing)
        found = [
            fullness(self.job, "backward", fixed.backward, copies, kept, moved, working),
            *fixed.after,
        ]
        if stage.last:
            logits = self._logits(layout)
            found.append(fullness(self.job, "loss", fixed.loss, copies, kept, logits=logits))
        if micro == 1:
            one = layers.most_kept
            found.append(fullness(self.job, "end", fixed.resident, 0.0, one, moved, working))
        return found

    def _layers(self, layout: ParallelLayout, stage: Stage) -> _Layers:
        """Return what the layers of a pipeline rank hold of a micro-batch."""
        works = self._works_of(layout)
        found = works.stages.get((stage.dense, stage.moe))
        if found is None:
            counts = {"dense": stage.dense, "moe": stage.moe}
            held = [(work, most, counts[kind]) for kind, work, most in works.kinds if counts[kind]]
            fullest = max(
                (most for _, most, _ in held),
                key=lambda w: w.again + w.moved + w.backward,
                default=_IDLE,
            )
            works.stages[stage.dense, stage.moe] = found = _Layers(
                kept=sum(work.kept * n for work, _, n in held),
                moved=fullest.moved,
                working=fullest.again + fullest.backward,
                most_kept=max((work.kept for work, _, _ in held), default=0.0),
            )
        return found

    def _works_of(self, layout: ParallelLayout) -> _Works:
        """Return what each kind of layer holds of a micro-batch."""
        key = (layout.cp, layout.tp, layout.ep, layout.etp)
        found = self._works.get(key)
        if found is None:
            skew = self.job.layer_skew or self.job.skew
            kinds = [kind for kind in self.kinds if kind in LAYERS]
            both = [(k, self.work(k, layout), self.work(k, layout, skew)) for k in kinds]
            kept = min(work.kept for _, work, _ in both)
            passing = [
                fullness(self.job, "backward", _NONE, 0.0, kept, w.moved, w.again + w.backward)
                for _, _, w in both
            ]
            least = min(moment.total for moment in passing)
            self._works[key] = found = _Works(both, {}, least)
        return found

    def _ends(self, layout: ParallelLayout, stage: Stage, micro: int, in_flight: int) -> float:
        """Return bytes kept by the ends of a stage: residual streams that go in and out."""
        stream = float(self.job.owned_tokens(layout) * self.config.dim * self.job.compute_bytes)
        kept = in_flight * stream if stage.last else 0.0
        if layout.pp > 1:
            kept += 0.0 if stage.last else in_flight * stream
            # the schedule makes a buffer for every micro-batch that arrives, from either side
            kept += micro * stream * ((not stage.first) + (not stage.last))
        return kept

    def _logits(self, layout: ParallelLayout) -> float:
        """Return the bytes of one chunk of logits and of the gradients taken with it."""
        config, job, c = self.config, self.job, self.job.compute_bytes
        tokens = job.owned_tokens(layout) * layout.tp
        words = -(-config.vocab_size // layout.tp)
        held = min(job.loss_chunk, tokens)
        # in fp32; in lower precision a few tokens' stand beside them on their way
        chunk = words * (4.0 * held + (c * min(held, _LOSS_PIECE) if c < 4 else 0))
        streams = tokens * config.dim * c * (1 if layout.tp == 1 else 2)
        # the weight's copy, its gradient in fp32, and one chunk's part
        cast = c if job.mode == "full" and job.master_bytes != c and not layout.zero else 0
        head = words * config.dim * (cast + (4 + c if job.mode == "full" else 0))
        return chunk + head + streams
