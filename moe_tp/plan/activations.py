"""What one part of a model holds of a micro-batch: for backward, and while it works.

Letters: T owned tokens · N tokens of the tp group · D width · F expert hidden of this rank · E
experts · K choices · P (row, expert) pairs of this rank · R rows of this rank · W elements of its
expert weights in one layer · c bytes of an element in the compute dtype.

Read off the code: what each autograd function saves (`experts/kernel.py`, `parallel/linear.py`,
`parallel/sequence.py`, `models/attention.py`), what `parallel/recompute.py` keeps instead, and what
the expert kernel has in its hands at the end of its backward, where a layer needs most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_tp.models.config import ModelConfig
from moe_tp.parallel.context.sequence import padded_length
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.plan.job import Job
from moe_tp.plan.params import Kind

_RING_ROWS = 1024  # query rows whose scores a ring holds at a time


@dataclass(frozen=True, slots=True)
class Load:
    """Rows and pairs that the busiest rank gets of a micro-batch, in one layer."""

    rows: float
    pairs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes of one layer and micro-batch.

    Args:
        kept: from forward to backward.
        again: what a recomputed forward makes once more, for its backward alone.
        moved: rows and sums on their way to experts and back, and as they lie there.
        backward: what backward needs besides.
    """

    kept: float
    again: float
    moved: float
    backward: float


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


def layer_work(
    config: ModelConfig, job: Job, layout: ParallelLayout, kind: Kind, load: Load, weights: int
) -> Work:
    """Return what one layer holds.

    Args:
        config: the model.
        job: the run.
        layout: resolved.
        kind: `dense` or `moe`.
        load: of the busiest rank.
        weights: W; of a dense layer the elements of its largest matrix.
    """
    tokens, c = job.owned_tokens(layout), job.compute_bytes
    stream = float(tokens * config.dim * c)
    attention, out, attending = _attention(config, job, layout, tokens)
    saved = 4.0 * stream + 8.0 * tokens + attention
    gathered = tokens * layout.tp
    if kind == "dense":
        hidden = float(gathered * config.dense_dim // layout.tp * c)
        saved += 4.0 * hidden
        backward = 2.0 * stream + max(attending, 4.0 * hidden + 2.0 * gathered * config.dim * c)
        backward += _cast_gradient(job, weights)
        return _by_mode(job, saved, out, 0.0, 0.0, stream, 0.0, backward, 0.0)
    moe = config.moe
    routing = 8.0 * tokens * moe.router.top_k
    shared = 4.0 * (gathered * moe.shared_dim // layout.tp) * c
    lists = 24.0 * load.pairs
    apart = layout.ep * layout.etp > 1
    if apart:  # what goes where, and where it came from
        lists += 10.0 * tokens * moe.router.top_k + 24.0 * tokens
    rows = load.rows * config.dim * c if apart else 0.0
    router = 12.0 * tokens * moe.router.num_experts
    if job.mode == "full" and not moe.router.frozen:
        router += 4.0 * tokens * config.dim  # its input in fp32
    hidden = 2.0 * load.pairs * (moe.expert_dim // layout.etp) * c
    saved += routing + shared + lists + rows + router + hidden
    moved, backward = _kernel(config, job, layout, load, weights)
    backward = max(2.0 * stream + backward, 2.0 * stream + attending - moved)
    return _by_mode(job, saved, out, routing, rows + lists, stream, hidden, backward, moved)


def _by_mode(
    job: Job,
    saved: float,
    out: float,
    routing: float,
    received: float,
    stream: float,
    hidden: float,
    backward: float,
    moved: float,
) -> Work:
    """Return what the recompute mode keeps of `saved`."""
    if job.recompute == "none":
        return Work(kept=saved, again=0.0, moved=moved, backward=backward)
    kept = stream + routing
    if job.recompute == "selective":
        kept += out + (0.0 if job.resend_rows else received)
    return Work(kept=kept, again=saved - kept + stream, moved=moved, backward=backward)


def _cast_gradient(job: Job, elements: int) -> float:
    """Return the bytes of one weight's gradient in the compute dtype and in the master's."""
    if job.mode == "lora":
        return 0.0
    return float(elements * (job.compute_bytes + job.master_bytes))


def _kernel(
    config: ModelConfig, job: Job, layout: ParallelLayout, load: Load, weights: int
) -> tuple[float, float]:
    """Return bytes of rows and sums, and of the rest, at the fullest moment of the kernel."""
    c, dim = job.compute_bytes, config.dim
    hidden = config.moe.expert_dim // layout.etp
    rows, pairs = load.rows * dim, load.pairs * dim
    exact = 4.0 if c < 4 else 0.0  # what is cast to fp32 for sums, and back
    # gradients of partial sums, in fp32 and cast, and of rows; the sum of the latter once more
    moved = rows * (4.0 + 4.0 + c + 4.0)
    inner = pairs * (3.0 * c + exact)  # expanded rows, their gradients in and out
    inner += 4.0 * load.pairs * hidden * c  # of hidden, of pre-activations, and hidden itself
    if job.mode == "full":
        inner += weights * c  # gradients of all
        two_thirds = weights * 2 // 3
        inner = max(inner, inner - pairs * exact - rows * 4.0 + two_thirds * c)
        return moved, max(inner, _cast_gradient(job, two_thirds) + weights * c - moved)
    return moved, inner


def _attention(
    config: ModelConfig, job: Job, layout: ParallelLayout, tokens: int
) -> tuple[float, float, float]:
    """Return bytes that attention saves, those of its outputs among them, those of backward."""
    a, c, gathered = config.attention, job.compute_bytes, tokens * layout.tp
    heads = a.num_heads // layout.tp
    value = a.head_dim if a.mla is None else a.mla.value_dim
    out = gathered * heads * (value * c + 4.0)
    shared = working = 0.0
    if layout.cp > 1 and job.cp_kind == "ulysses":  # outputs lie in both orders
        shared = float(gathered * heads * value * c)
    elif layout.cp > 1:  # sums in fp32, and in backward three blocks of scores
        out += gathered * heads * value * 4.0
        length = padded_length(job.seq_len, layout.cp) // layout.cp
        blocks = 3.0 * 4.0 * job.micro_batch * heads * min(_RING_ROWS, length) * length
        working = blocks + 8.0 * gathered * heads * value
    if a.mla is not None:
        mla = a.mla
        latents = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim
        per_head = 2 * mla.qk_dim + mla.nope_dim + mla.value_dim  # values lie beside keys
        working += gathered * heads * (3 * mla.qk_dim + 2 * mla.value_dim) * (c + 2.0)
        saved = float(tokens * latents * c + gathered * heads * per_head * c)
        return saved + shared + out, out, working
    kv = max(1, -(-heads * a.num_kv_heads // a.num_heads))
    each = float((heads + 2 * kv) * a.head_dim * c)
    if a.qk_norm == "head":
        each += (heads + kv) * (a.head_dim * c + 4.0)
    elif a.qk_norm == "full":
        each += (heads + kv) * a.head_dim * 8.0
    rotated = (2 * heads + 2 * kv) * a.head_dim * (c + 4.0)
    working += gathered * (rotated + 2.0 * config.dim * c)
    return gathered * each + shared + out, out, working


__all__ = ["Load", "Work", "layer_work", "rows_per_token"]
