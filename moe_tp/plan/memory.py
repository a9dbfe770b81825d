"""Peak memory of a rank, part by part, for any layout and pipeline stage.

Letters: T owned tokens · N tokens of the tp group · D width · F expert hidden · E experts ·
K choices · R rows after dispatch · V vocabulary.

What is counted follows the library's code: what each autograd function saves, which parameters ZeRO
leaves whole, the bf16 copies that a step makes of fp32 weights. At `zero=0` a cast is part of the
graph, so that every micro-batch in flight keeps its own copy of the weights (unless recompute makes
it again); under ZeRO there is one gathered copy. The model is arithmetic: it has not yet been
compared with measured peaks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from moe_tp.models.config import ModelConfig
from moe_tp.models.counts import layer_flops
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Domain
from moe_tp.parallel.pipeline.stages import deal_layers, num_stages
from moe_tp.plan.job import STATE_BYTES, Job
from moe_tp.plan.params import Holding, Kind, Piece, hold, part_flops, pieces

_BUCKET_BYTES = 64 << 20  # of settle_gradients
_TYPICAL_LENGTH = 4096  # by which models/stages.py deals layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at its peak.

    Args:
        stage: pipeline rank.
        weights: the model's parameters between steps.
        adapters: LoRA's, in fp32.
        copies: of the parameters in the compute dtype, or gathered by ZeRO.
        gradients, states: of what is trained; `states` of the optimiser.
        activations: kept for backward, all micro-batches in flight.
        dispatch: rows on their way to experts and partial sums on theirs back.
        working: one layer's recomputed activations.
        logits: chunk of logits, and the gradients that the loss takes with it.
        settle: flat buffers of gradient sums, alive when activations are not.
        margin: fragmentation, context, communication buffers.
    """

    stage: int
    weights: float
    adapters: float
    copies: float
    gradients: float
    states: float
    activations: float
    dispatch: float
    working: float
    logits: float
    settle: float
    margin: float

    @property
    def resident(self) -> float:
        """Bytes that lie there between the passes of a step."""
        return self.weights + self.adapters + self.gradients + self.states

    @property
    def total(self) -> float:
        """Peak bytes: the passes or the settling of gradients, whichever needs more."""
        passes = self.copies + self.activations + self.working + max(self.dispatch, self.logits)
        return self.resident + max(passes, self.settle) + self.margin

    def parts(self) -> dict[str, float]:
        """Return bytes by part."""
        names = ("weights", "adapters", "copies", "gradients", "states", "activations")
        more = ("dispatch", "working", "logits", "settle", "margin")
        return {name: getattr(self, name) for name in (*names, *more)}


@dataclass(frozen=True, slots=True)
class Stage:
    """What a pipeline rank holds: layers of each kind, and the ends of the model."""

    rank: int
    dense: int
    moe: int
    first: bool
    last: bool

    def kinds(self) -> list[tuple[Kind, int]]:
        """Return its parts and how many there are of each."""
        found: list[tuple[Kind, int]] = [("dense", self.dense), ("moe", self.moe)]
        found += [("embed", int(self.first)), ("head", int(self.last))]
        return [(kind, count) for kind, count in found if count]


def rows_per_token(config: ModelConfig, ranks: int) -> float:
    """Return how many of `ranks` expert ranks a token's choices lie on, on average.

    Choices are taken as uniform: over all experts, or over those of uniformly chosen groups. A rank
    with n of E experts is hit with probability 1 - C(E - n, K) / C(E, K).

    Args:
        config: the model.
        ranks: of ep; uneven shares are counted as they lie.
    """
    router = config.moe.router
    experts, chosen = router.num_experts, router.top_k
    if ranks == 1 or not config.moe_layers:
        return 1.0
    size = experts // router.num_groups
    some, longer = divmod(experts, ranks)

    def hit(held: int) -> float:
        if router.num_groups == 1 or router.top_groups == router.num_groups:
            return 1.0 - math.comb(experts - held, chosen) / math.comb(experts, chosen)
        groups, per_group = max(1, held // size), min(held, size)
        pool, total = router.top_groups * size, 0.0
        ways = math.comb(router.num_groups, router.top_groups)
        for met in range(1, min(groups, router.top_groups) + 1):
            part = math.comb(groups, met) * math.comb(
                router.num_groups - groups, router.top_groups - met
            )
            miss = math.comb(pool - met * per_group, chosen) / math.comb(pool, chosen)
            total += part / ways * (1.0 - miss)
        return total

    return longer * hit(some + 1) + (ranks - longer) * hit(some)


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
        self._activations: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._flops = 0.0
        self._pieces: dict[tuple[object, ...], list[Piece]] = {}
        self._units: dict[tuple[object, ...], list[tuple[Domain, int]]] = {}
        self.owed: dict[tuple[object, ...], dict[tuple[str, ...], int]] = {}  # of `traffic`
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
        zero = layout.zero > 0
        replicas = (layout.dp * layout.cp, layout.edp) if zero else ()
        experts = (layout.ep, layout.etp) if kind == "moe" else ()
        key = (kind, layout.tp, experts, layout.pp > 1, replicas)
        if key not in self._holdings:
            self._holdings[key] = hold(self.config, kind, layout, self.job.lora_rank)
        return self._holdings[key]

    def pieces(self, kind: Kind, layout: ParallelLayout) -> list[Piece]:
        """Return the parameters of one part on one rank before ZeRO."""
        key = (kind, layout.tp, layout.ep, layout.etp, layout.pp > 1)
        if key not in self._pieces:
            self._pieces[key] = pieces(self.config, kind, layout)
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
        return sum((h.resting + h.fp32) * count for h, count in held)

    def peak(self, layout: ParallelLayout) -> Memory:
        """Return the memory of the fullest pipeline rank."""
        # of equal stages the earliest has the most micro-batches in flight
        worst: dict[tuple[int, int, bool, bool], Stage] = {}
        for stage in self.stages(layout):
            worst.setdefault((stage.dense, stage.moe, stage.first, stage.last), stage)
        return max((self.memory(layout, s) for s in worst.values()), key=lambda m: m.total)

    def memory(self, layout: ParallelLayout, stage: Stage) -> Memory:
        """Return the memory of one pipeline rank.

        Args:
            layout: resolved.
            stage: from `stages`.
        """
        job, zero = self.job, layout.zero
        held = [(self.holding(kind, layout), count) for kind, count in stage.kinds()]
        micro = job.micro_batches(layout)
        in_flight = min(layout.pp - stage.rank, micro)

        resting = sum(h.resting * n for h, n in held)
        fp32 = sum(h.fp32 * n for h, n in held)
        whole = sum(h.shardable * n for h, n in held)
        split = sum(h.shardable_rest * n for h, n in held)
        unit = max(h.unit for h, _ in held)
        adapters = sum(h.adapters * n for h, n in held)
        full = job.mode == "full"
        base = job.master_bytes if full else job.compute_bytes
        cast = full and job.master_bytes != job.compute_bytes
        trained = resting + fp32 if full else adapters
        weights = float(resting * base + fp32 * 4)
        added = 0.0 if full else adapters * 4.0

        copies = 0.0
        kept_whole = resting if zero == 0 else resting - split  # cast in the graph
        if cast and job.recompute == "none":
            copies += kept_whole * job.compute_bytes * in_flight
        elif cast:
            copies += max(h.resting for h, _ in held) * job.compute_bytes
        if zero in (1, 2):
            copies += whole * job.compute_bytes
        elif zero == 3:  # this unit and the next, gathered
            copies += 2 * unit * job.compute_bytes
        if zero and full:  # a unit's gradient in the compute dtype and on its way in fp32
            copies += unit * (job.compute_bytes + 4)

        width = job.master_bytes if full else 4
        gradients = float(trained * width)
        if full and zero == 1 and micro > 1:
            gradients += (whole - split) * width
        states = trained * STATE_BYTES[job.optimizer]
        if job.offload:
            states, weights = 0.0, 0.0

        kept = working = dispatch = 0.0
        for kind, count in stage.kinds():
            keeps, works, moves = self.activations(kind, layout)
            kept += keeps * count * in_flight
            working, dispatch = max(working, works), max(dispatch, moves)
        settle = 0.0
        if layout.stage_size > 1:
            largest = max((h.largest for h, _ in held), default=0) if full else 0
            bytes_owed = 4 * trained if zero == 0 else 4 * (trained - split if full else adapters)
            settle = 2.0 * min(max(_BUCKET_BYTES, 4 * largest), max(0, bytes_owed))
        logits = self._logits(layout) if stage.last else 0.0
        passes = copies + kept + working + max(dispatch, logits)
        total = weights + added + gradients + states + max(passes, settle)
        return Memory(
            stage=stage.rank,
            weights=weights,
            adapters=added,
            copies=copies,
            gradients=gradients,
            states=states,
            activations=kept,
            dispatch=dispatch,
            working=working,
            logits=logits,
            settle=settle,
            margin=total * job.margin + job.reserve,
        )

    def _logits(self, layout: ParallelLayout) -> float:
        """Return the bytes of one chunk of logits and of the gradients taken with it."""
        config, job = self.config, self.job
        tokens = self.job.owned_tokens(layout) * layout.tp
        words = -(-config.vocab_size // layout.tp)
        chunk = min(job.loss_chunk, tokens) * words * (4 + 4 + job.compute_bytes)
        head = words * config.dim * 4 if job.mode == "full" else 0
        return chunk + head + 2 * tokens * config.dim * job.compute_bytes

    def activations(self, kind: Kind, layout: ParallelLayout) -> tuple[float, float, float]:
        """Return bytes that one part keeps, works with under recompute, and sends and receives.

        Args:
            kind: which part.
            layout: resolved.
        """
        tokens = self.job.owned_tokens(layout)
        key = (kind, tokens, layout.tp, layout.cp > 1, layout.ep, layout.etp)
        if key not in self._activations:
            self._activations[key] = self._part(kind, layout, tokens)
        return self._activations[key]

    def _part(self, kind: Kind, layout: ParallelLayout, tokens: int) -> tuple[float, float, float]:
        config, job, size = self.config, self.job, self.job.compute_bytes
        stream = float(tokens * config.dim * size)
        if kind in ("embed", "head"):
            return (2.0 * stream if kind == "head" else 0.0), 0.0, 0.0
        attention, out = self._attention(layout, tokens)
        saved, moved, routing = 4.0 * stream + attention, 0.0, 0.0
        gathered = tokens * layout.tp
        if kind == "dense":
            saved += 3.0 * gathered * config.dense_dim // layout.tp * size
        else:
            moe, router = config.moe, config.moe.router
            choices = tokens * router.top_k
            # each rank of etp works on the rows of all of them, with its share of F
            saved += 2.0 * job.skew * choices * moe.expert_dim * size
            saved += tokens * config.dim * 4.0 if job.mode == "full" else 0.0
            saved += 12.0 * tokens * router.num_experts
            routing = 16.0 * choices
            saved += 24.0 * job.skew * choices * layout.etp + routing
            saved += 3.0 * gathered * moe.shared_dim // layout.tp * size
            rows = tokens * self.rows(layout.ep)
            arrived = job.skew * rows * layout.etp
            if layout.ep * layout.etp > 1:
                saved += arrived * config.dim * size
                moved = rows * config.dim * (size + 4.0)
            # partial sums in fp32, and in backward the rows of their gradient
            moved += arrived * config.dim * (4.0 + size)
        if job.recompute == "none":
            return saved, 0.0, moved
        kept = stream + routing + (out if job.recompute == "selective" else 0.0)
        return kept, saved, moved

    def _attention(self, layout: ParallelLayout, tokens: int) -> tuple[float, float]:
        """Return bytes that attention saves, and those of its outputs among them."""
        a, size, gathered = self.config.attention, self.job.compute_bytes, tokens * layout.tp
        heads = a.num_heads // layout.tp
        if a.mla is not None:
            mla = a.mla
            latents = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim
            per_head = 2 * mla.qk_dim + mla.value_dim
            out = gathered * heads * (mla.value_dim * size + 4.0)
            return tokens * latents * size + gathered * heads * per_head * size + out, out
        kv = max(1, -(-heads * a.num_kv_heads // a.num_heads))
        elements = (heads + 2 * kv) * a.head_dim
        if a.qk_norm != "none":
            elements += (heads + kv) * a.head_dim
        out = gathered * heads * (a.head_dim * size + 4.0)
        if layout.cp > 1 and self.job.cp_kind == "ring":
            out += gathered * heads * a.head_dim * 4.0
        return gathered * elements * size + out, out
