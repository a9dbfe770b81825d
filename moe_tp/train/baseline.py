"""What a model must beat: the loss of word frequencies alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_tp.models.tokens import IGNORE
from moe_tp.train.rows import Rows

_SMOOTHING = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)


def unigram_loss(train: Rows, held_out: Rows, vocab_size: int) -> float:
    """Return the mean held-out loss of the training text's token frequencies, in nats.

    Every token counts a little more often than it was seen, so that none is impossible; how much
    more is chosen by the held-out loss itself, which makes the bar no lower than it can be.

    Args:
        train: rows whose targets are counted.
        held_out: rows whose targets are predicted.
        vocab_size: tokens.
    """
    seen = np.bincount(target_ids(train), minlength=vocab_size)
    asked = np.bincount(target_ids(held_out), minlength=vocab_size)
    losses = []
    for extra in _SMOOTHING:
        log_p = np.log((seen + extra) / (seen.sum() + extra * vocab_size))
        losses.append(-float((asked * log_p).sum()) / max(1, int(asked.sum())))
    return min(losses)


def target_ids(rows: Rows) -> npt.NDArray[np.int64]:
    """Return the targets of all rows: labels of their pieces, but for the first of each piece."""
    inside = np.zeros(len(rows.labels) + 2, np.int32)
    np.add.at(inside, rows.pieces[:, 0] + 1, 1)
    np.add.at(inside, rows.pieces[:, 1], -1)
    labels: npt.NDArray[np.int64] = np.asarray(rows.labels, np.int64)
    learned = (np.cumsum(inside)[: len(labels)] > 0) & (labels != IGNORE)
    targets: npt.NDArray[np.int64] = labels[learned]
    return targets
