"""Peak memory of a rank, part by part, for any layout and pipeline stage.

Letters: T owned tokens · D width · V vocabulary · c bytes of an element in the compute dtype.

A step is looked at in a few moments, and the fullest counts: the loss, the backward of the last
layer, the sums of gradients, the optimiser. Weights lie in fp32 and a step casts them: at `zero=0`
the copy is part of the graph, shared by all micro-batches in flight (under recompute one layer's);
under ZeRO it is what is gathered. Measured peaks stand in docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moe_tp.models.config import ModelConfig
from moe_tp.models.counts import layer_flops
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Domain
from moe_tp.parallel.pipeline.stages import deal_layers, num_stages
from moe_tp.parallel.vocab import LOSS_PIECE
from moe_tp.plan.activations import Load, Work, layer_work, rows_per_token
from moe_tp.plan.axes import axis_sizes
from moe_tp.plan.job import Job
from moe_tp.plan.params import (
    Holding,
    Kind,
    Piece,
    adapters,
    hold,
    owed_bytes,
    pieces,
    zero_ranks,
)
from moe_tp.plan.stages import Stage, part_flops

Moment = Literal["loss", "backward", "end", "settle", "update"]
_BUCKET_BYTES = 64 << 20  # of settle_gradients
_UPDATED = 1 << 22  # elements that train/adamw.py updates at a time
_TYPICAL_LENGTH = 4096  # by which models/stages.py deals layers
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
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return bytes by part."""
        return {name: getattr(self, name) for name in _PARTS}


_PARTS = (
    "weights", "adapters", "copies", "gradients", "states", "activations", "dispatch", "working",
    "logits", "settle", "update", "margin",
)  # fmt: skip


class Planner:
    """Memory of layouts of one model and job; remembers the parts that layouts share.

    Args:
        config: the model.
        job: the run.
    """

    def __init__(self, config: ModelConfig, job: Job) -> None:
        self.config, self.job = config, job
        self._holdings: dict[tuple[object, ...], Holding] = {}
        self._stages: dict[int, list[Stage]] = {}
        self._rows: dict[int, float] = {}
        self._work: dict[tuple[object, ...], Work] = {}
        self._owed: dict[tuple[object, ...], dict[tuple[str, ...], int]] = {}
        self._flops = 0.0
        self._pieces: dict[tuple[object, ...], list[Piece]] = {}
        self._units: dict[tuple[object, ...], list[tuple[Domain, int]]] = {}
        self.flows: dict[tuple[object, ...], list[Any]] = {}  # of `traffic`

    def stages(self, layout: ParallelLayout) -> list[Stage]:
        """Return what each pipeline rank holds, dealt as the library deals."""
        if layout.pp not in self._stages:
            config, total = self.config, num_stages(layout, self.job.runtime)
            costs = [layer_flops(config, i, _TYPICAL_LENGTH) for i in range(config.num_layers)]
            head = 2.0 * config.vocab_size * config.dim
            runs = deal_layers(costs, total, last=head if total > 1 else 0.0)
            dense = [sum(config.is_dense(i) for i in run) for run in runs]
            self._stages[layout.pp] = [
                Stage(rank, dense[rank], len(run) - dense[rank], rank == 0, rank == total - 1)
                for rank, run in enumerate(runs)
            ]
        return self._stages[layout.pp]

    def holding(self, kind: Kind, layout: ParallelLayout) -> Holding:
        """Return the parameter elements of one part on the fullest rank."""
        assert layout.dp is not None
        replicas = tuple(zero_ranks(layout, self.job).values())
        experts = (layout.ep, layout.etp) if kind == "moe" else ()
        key = (kind, layout.tp, experts, layout.pp > 1, layout.zero > 0, replicas)
        if key not in self._holdings:
            self._holdings[key] = hold(self.config, kind, layout, self.job)
        return self._holdings[key]

    def pieces(self, kind: Kind, layout: ParallelLayout) -> list[Piece]:
        """Return the parameters of one part on one rank before ZeRO."""
        key = (kind, layout.tp, layout.ep, layout.etp, layout.pp > 1)
        if key not in self._pieces:
            self._pieces[key] = pieces(self.config, kind, layout, self.job.spare_slots)
        return self._pieces[key]

    def units(self, kind: Kind, layout: ParallelLayout) -> list[tuple[Domain, int]]:
        """Return the whole elements that ZeRO gathers for one part, by domain."""
        key = (kind, layout.tp, layout.ep, layout.etp, layout.pp > 1)
        if key not in self._units:
            found: dict[Domain, int] = {"dense": 0, "expert": 0}
            for piece in self.pieces(kind, layout):
                found[piece.domain] += piece.size if piece.zero_sharded else 0
            self._units[key] = list(found.items())
        return self._units[key]

    def replica_sums(self, kind: Kind, layout: ParallelLayout) -> list[tuple[tuple[str, ...], int]]:
        """Return axes and elements of each sum over replicas of one part's experts."""
        if not self.job.spare_slots or kind != "moe":
            return []
        found, replicas = self.pieces(kind, layout), zero_ranks(layout, self.job)["expert"]
        trained = found if self.job.mode == "full" else adapters(found, self.job.lora_rank)
        return [p.replica_sums(replicas) for p in trained if p.several and p.trained]

    def rows(self, ep: int) -> float:
        """Return distinct (token, rank) rows of a token, see `rows_per_token`."""
        if ep not in self._rows:
            self._rows[ep] = rows_per_token(self.config, ep)
        return self._rows[ep]

    def forward_flops(self, layout: ParallelLayout) -> float:
        """Return the operations of one token's forward through the whole model."""
        if not self._flops:
            self._flops = sum(
                sum(part_flops(self.config, kind, self.job.seq_len)) * count
                for stage in self.stages(layout)
                for kind, count in stage.kinds()
            )
        return self._flops

    def elements(self, layout: ParallelLayout, stage: Stage) -> int:
        """Return the parameter elements of a pipeline rank between steps, on its fullest rank."""
        held = [(self.holding(kind, layout), count) for kind, count in stage.kinds()]
        return sum(h.elements * count for h, count in held)

    def peak(self, layout: ParallelLayout) -> Memory:
        """Return the fullest moment of the fullest pipeline rank."""
        # of equal stages the earliest has the most micro-batches in flight
        worst: dict[tuple[int, int, bool, bool], Stage] = {}
        for stage in self.stages(layout):
            worst.setdefault((stage.dense, stage.moe, stage.first, stage.last), stage)
        return max((self.memory(layout, s) for s in worst.values()), key=lambda m: m.total)

    def memory(self, layout: ParallelLayout, stage: Stage) -> Memory:
        """Return the fullest moment of one pipeline rank.

        Args:
            layout: resolved.
            stage: from `stages`.
        """
        return max(self.moments(layout, stage), key=lambda m: m.total)

    def moments(self, layout: ParallelLayout, stage: Stage) -> list[Memory]:
        """Return the moments of a step at which one pipeline rank may be fullest."""
        job, last = self.job, stage.last
        held = [(self.holding(kind, layout), kind, count) for kind, count in stage.kinds()]
        micro = job.micro_batches(layout)
        in_flight = min(layout.pp - stage.rank, micro)
        resident = {
            name: sum(getattr(h, name) * n for h, _, n in held)
            for name in ("weights", "adapters", "gradients", "states")
        }
        if job.mode == "full" and layout.zero == 1 and micro > 1:
            resident["gradients"] += 4.0 * sum(h.accumulated * n for h, _, n in held)
        copies = self._copies(layout, held)
        works = {kind: (self.work(kind, layout), n) for _, kind, n in held if kind in _LAYERS}
        kept = sum(work.kept * n for work, n in works.values()) * in_flight
        kept += self._ends(layout, stage, micro, in_flight)
        skew = job.layer_skew or job.skew
        fullest = max(
            (self.work(kind, layout, skew) for kind in works),
            key=lambda w: w.again + w.moved + w.backward,
            default=_IDLE,
        )
        backward = {
            "dispatch": fullest.moved,
            "working": max(fullest.again + fullest.backward, self._reducing(layout, held)),
        }
        first = dict(resident)
        if micro == 1:  # gradients come up as activations go
            ends = [h.gradients for h, kind, _ in held if kind == "head"]
            first["gradients"] = sum(ends)
        found = [
            self._memory(stage, "backward", first, copies=copies, activations=kept, **backward),
            self._memory(stage, "settle", resident, settle=self._settle(layout, stage)),
            self._memory(stage, "update", resident, update=self._update(held)),
        ]
        if last:
            logits = self._logits(layout)
            if micro == 1:
                first["gradients"] = 0.0
            found.append(
                self._memory(stage, "loss", first, copies=copies, activations=kept, logits=logits)
            )
        if micro == 1:
            one = max((work.kept for work, _ in works.values()), default=0.0)
            found.append(self._memory(stage, "end", resident, activations=one, **backward))
        return found

    def _memory(
        self, stage: Stage, moment: Moment, resident: dict[str, float], **parts: float
    ) -> Memory:
        total = sum(resident.values()) + sum(parts.values())
        margin = total * self.job.margin + self.job.reserve
        return Memory(stage=stage.rank, moment=moment, **resident, **parts, margin=margin)

    def _copies(self, layout: ParallelLayout, held: list[tuple[Holding, Kind, int]]) -> float:
        """Return bytes of weights cast for the graph, or gathered by ZeRO."""
        job, c = self.job, self.job.compute_bytes
        layers = [(h, n) for h, kind, n in held if kind in _LAYERS]
        whole = job.recompute == "none"
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

    def skew(self, layout: ParallelLayout, asked: float) -> float:
        """Return rows of the busiest rank over the mean: never above all that it can get.

        A rank with n experts gets at most min(K, n) of a token's K choices; the mean is K / ep.
        """
        if layout.ep == 1:
            return 1.0
        router = self.config.moe.router
        slots = -(-router.num_experts // layout.ep) + self.job.spare_slots
        held = min(router.top_k, slots)
        return min(asked, max(1.0, layout.ep * held / router.top_k))

    def work(self, kind: Kind, layout: ParallelLayout, skew: float | None = None) -> Work:
        """Return what one layer holds of a micro-batch, on the busiest rank.

        Args:
            kind: `dense` or `moe`.
            layout: resolved.
            skew: of the layer; None is the job's.
        """
        tokens = self.job.owned_tokens(layout)
        skew = self.skew(layout, skew or self.job.skew)
        key = (kind, tokens, layout.tp, layout.cp > 1, layout.ep, layout.etp, skew)
        if key not in self._work:
            job, router = self.job, self.config.moe.router
            each = tokens * layout.etp * skew
            load = Load(rows=each * self.rows(layout.ep), pairs=each * router.top_k)
            found = self.pieces(kind, layout)
            if kind == "moe":
                weights = sum(p.size for p in found if p.domain == "expert")
            else:
                weights = max(p.size for p in found)
            self._work[key] = layer_work(self.config, job, layout, kind, load, weights)
        return self._work[key]

    def owed(self, kind: Kind, layout: ParallelLayout) -> dict[tuple[str, ...], int]:
        """Return the bytes of one part's gradients that owe a sum, by axes."""
        key = (kind, layout.tp, layout.ep, layout.etp, layout.pp > 1, layout.zero > 0)
        found = self._owed.get(key)
        if found is None:
            self._owed[key] = found = owed_bytes(
                self.pieces(kind, layout), self.job, zero=layout.zero > 0
            )
        return found
