"""What layouts of one model and job have in common, computed once.

A search asks for thousands of layouts that differ in one degree: what a layer or an end of the
model holds depends on few of them.
"""

from __future__ import annotations

from typing import Any

from moe_tp.models.config import ModelConfig
from moe_tp.models.counts import layer_flops
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Domain
from moe_tp.parallel.pipeline.stages import deal_layers, num_stages
from moe_tp.plan.activations import Load, Work, layer_work, rows_per_token
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

LAYERS: tuple[Kind, ...] = ("dense", "moe")
_TYPICAL_LENGTH = 4096  # by which models/stages.py deals layers


class Shared:
    """What has been found of the parts of one model, whatever is computed again."""

    def __init__(self) -> None:
        self.holdings: dict[tuple[object, ...], Holding] = {}
        self.stages: dict[int, list[Stage]] = {}
        self.unlike: dict[int, list[Stage]] = {}
        self.rows: dict[int, float] = {}
        self.owed: dict[tuple[object, ...], dict[tuple[str, ...], int]] = {}
        self.pieces: dict[tuple[object, ...], list[Piece]] = {}
        self.units: dict[tuple[object, ...], list[tuple[Domain, int]]] = {}
        self.fixed: dict[tuple[object, ...], Any] = {}  # of `memory`


class Parts:
    """Parts of a model as the ranks of any layout hold them; remembers those that layouts share.

    Args:
        config: the model.
        job: the run.
        like: of the same model, and of a job that differs in `recompute` at most; what it has
            found and will find is shared.
    """

    def __init__(self, config: ModelConfig, job: Job, like: Parts | None = None) -> None:
        self.config, self.job = config, job
        self.shared: Shared = Shared() if like is None else like.shared
        self._work: dict[tuple[object, ...], Work] = {}
        layers: list[tuple[Kind, bool]] = [("dense", bool(config.dense_layers))]
        layers.append(("moe", bool(config.moe_layers)))
        # of the model's parts, those that it has
        self.kinds: list[Kind] = [*(kind for kind, some in layers if some), "embed", "head"]
        self._flops = 0.0
        self.flows: dict[tuple[object, ...], list[Any]] = {}  # of `traffic`

    def stages(self, layout: ParallelLayout) -> list[Stage]:
        """Return what each pipeline rank holds, dealt as the library deals."""
        if layout.pp not in self.shared.stages:
            config, total = self.config, num_stages(layout, self.job.runtime)
            costs = [layer_flops(config, i, _TYPICAL_LENGTH) for i in range(config.num_layers)]
            head = 2.0 * config.vocab_size * config.dim
            runs = deal_layers(costs, total, last=head if total > 1 else 0.0)
            dense = [sum(config.is_dense(i) for i in run) for run in runs]
            self.shared.stages[layout.pp] = [
                Stage(rank, dense[rank], len(run) - dense[rank], rank == 0, rank == total - 1)
                for rank, run in enumerate(runs)
            ]
        return self.shared.stages[layout.pp]

    def unlike_stages(self, layout: ParallelLayout) -> list[Stage]:
        """Return the first of equal stages: the one with the most micro-batches in flight."""
        if layout.pp not in self.shared.unlike:
            unlike: dict[tuple[int, int, bool, bool], Stage] = {}
            for stage in self.stages(layout):
                unlike.setdefault(stage.shape, stage)
            self.shared.unlike[layout.pp] = list(unlike.values())
        return self.shared.unlike[layout.pp]

    def holding(self, kind: Kind, layout: ParallelLayout) -> Holding:
        """Return the parameter elements of one part on the fullest rank."""
        assert layout.dp is not None
        replicas = zero_ranks(layout, self.job)
        experts = (layout.ep, layout.etp, replicas["expert"]) if kind == "moe" else ()
        key = (kind, layout.tp, experts, layout.pp > 1, layout.zero > 0, replicas["dense"])
        if key not in self.shared.holdings:
            self.shared.holdings[key] = hold(
                self.config, kind, self.pieces(kind, layout), layout, self.job
            )
        return self.shared.holdings[key]

    def pieces(self, kind: Kind, layout: ParallelLayout) -> list[Piece]:
        """Return the parameters of one part on one rank before ZeRO."""
        key = (kind, layout.tp, layout.ep, layout.etp, layout.pp > 1)
        if key not in self.shared.pieces:
            self.shared.pieces[key] = pieces(self.config, kind, layout, self.job.spare_slots)
        return self.shared.pieces[key]

    def units(self, kind: Kind, layout: ParallelLayout) -> list[tuple[Domain, int]]:
        """Return the whole elements that ZeRO gathers for one part, by domain."""
        key = (kind, layout.tp, layout.ep, layout.etp, layout.pp > 1)
        if key not in self.shared.units:
            found: dict[Domain, int] = {"dense": 0, "expert": 0}
            for piece in self.pieces(kind, layout):
                found[piece.domain] += piece.size if piece.zero_sharded else 0
            self.shared.units[key] = list(found.items())
        return self.shared.units[key]

    def replica_sums(self, kind: Kind, layout: ParallelLayout) -> list[tuple[tuple[str, ...], int]]:
        """Return axes and elements of each sum over replicas of one part's experts."""
        if not self.job.spare_slots or kind != "moe":
            return []
        found, replicas = self.pieces(kind, layout), zero_ranks(layout, self.job)["expert"]
        trained = found if self.job.mode == "full" else adapters(found, self.job.lora_rank)
        return [p.replica_sums(replicas) for p in trained if p.several and p.trained]

    def rows(self, ep: int) -> float:
        """Return distinct (token, rank) rows of a token, see `rows_per_token`."""
        if ep not in self.shared.rows:
            self.shared.rows[ep] = rows_per_token(self.config, ep)
        return self.shared.rows[ep]

    def forward_flops(self, layout: ParallelLayout) -> float:
        """Return the operations of one token's forward through the whole model."""
        if not self._flops:
            self._flops = sum(
                sum(part_flops(self.config, kind, self.job.seq_len)) * count
                for stage in self.stages(layout)
                for kind, count in stage.kinds
            )
        return self._flops

    def elements(self, layout: ParallelLayout, stage: Stage) -> int:
        """Return the parameter elements of a pipeline rank between steps, on its fullest rank."""
        held = [(self.holding(kind, layout), count) for kind, count in stage.kinds]
        return sum(h.elements * count for h, count in held)

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
        found = self.shared.owed.get(key)
        if found is None:
            self.shared.owed[key] = found = owed_bytes(
                self.pieces(kind, layout), self.job, zero=layout.zero > 0
            )
        return found
