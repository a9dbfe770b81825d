"""Loss and perplexity of held-out rows."""

from __future__ import annotations

import math

from moe_tp.models.decoder import Decoder
from moe_tp.train.data import evaluation_batches
from moe_tp.train.rows import Rows
from moe_tp.train.step import forward_backward

_CHUNK = 16  # micro-batches of one call


def evaluate(model: Decoder, rows: Rows, *, micro_batch: int, step: int = 0) -> dict[str, float]:
    """Return mean loss, perplexity and number of targets; equal for every layout.

    Args:
        model: is in evaluation mode afterwards.
        rows: held-out rows.
        micro_batch: rows a data-parallel rank computes at a time.
        step: of the run.

    Collectives: those of the forward passes.
    """
    model.eval()
    mesh = model.mesh
    total, targets = 0.0, 0
    lists = list(
        evaluation_batches(
            rows, micro_batch=micro_batch, dp=mesh.size("dp"), dp_rank=mesh.coordinate("dp")
        )
    )
    for first in range(0, len(lists), _CHUNK):
        pending = [batch for part in lists[first : first + _CHUNK] for batch in part]
        out = forward_backward(model, pending, step=step, backward=False)
        total += float(out.loss) * out.target_tokens
        targets += out.target_tokens
    loss = total / max(1, targets)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"eval_loss": loss, "eval_perplexity": perplexity, "eval_tokens": targets}
