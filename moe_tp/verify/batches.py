"""The batches that `verify` runs: small, random, and uneven in every way that has broken a layout.

Letters: B batch · S sequence.
"""

from __future__ import annotations

import torch

from moe_tp.verify.data import Batch

__all__ = ["make_step"]

_SHARES = (3, 1, 2, 0)  # of the tokens, for the data-parallel ranks in turn


def make_step(
    *, vocab_size: int, tokens: int, ranks: int, micro_batches: int, seed: int
) -> list[list[Batch]]:
    """Return the batches of one optimiser step, `[micro-batch][data-parallel rank]`.

    Token counts are odd and differ from rank to rank; from four ranks on one of them gets nothing
    at all. Rows end in padding whose labels are left in (they must not count), hold packed
    documents (positions that restart), ignored labels, and a run of one repeated token that skews
    the routing. The second micro-batch comes without mask and positions, the third is one document
    a row again, and so on.

    Args:
        vocab_size: ids are drawn from all of it, and its last id occurs.
        tokens: about how many a micro-batch holds over all ranks, from 1.
        ranks: data-parallel ranks.
        micro_batches: of the step.
        seed: another seed, another batch.
    """
    generator = torch.Generator().manual_seed(seed)
    step = []
    for m in range(micro_batches):
        shares = [_SHARES[(r + m) % len(_SHARES)] for r in range(ranks)] if ranks > 1 else [1]
        step.append(
            [
                _batch(vocab_size, tokens * share // sum(shares), m + r, m % 2 == 1, generator)
                for r, share in enumerate(shares)
            ]
        )
    return step


def _batch(
    vocab_size: int, tokens: int, turn: int, plain: bool, generator: torch.Generator
) -> Batch:
    """Return one rank's part; `turn` varies its shape."""
    rows = min(1 + turn % 3, max(tokens, 1))
    length = max(tokens, 1) // rows
    length += 1 - length % 2
    if tokens == 0:
        rows = 0
    ids_BS = torch.randint(0, vocab_size, (rows, length), generator=generator)
    if rows:
        ids_BS[0, : length // 2] = ids_BS[0, 0]
        ids_BS[-1, -1] = vocab_size - 1
    labels_BS = ids_BS.clone()
    labels_BS[:, length // 2 :: 5] = -100
    if plain:
        return Batch(input_ids=ids_BS, labels=labels_BS)
    mask_BS = torch.ones_like(ids_BS)
    position_BS = torch.arange(length).repeat(rows, 1)
    if rows and length >= 5:
        mask_BS[-1, length - length // 4 :] = 0
        cut = length // 3
        position_BS[0, cut:] -= cut
        position_BS[0, cut + 1 :] -= 1  # a document of one token
    return Batch(
        input_ids=ids_BS, labels=labels_BS, attention_mask=mask_BS, position_ids=position_BS
    )
