"""Batches as callers bring them: what is wrong with one, and what all ranks know of theirs.

Letters: B batch · S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_tp.errors import DataError
from moe_tp.models.tokens import IGNORE, next_token_targets
from moe_tp.parallel.collectives import raw_all_gather, raw_all_reduce
from moe_tp.parallel.mesh import Mesh

TargetBatch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def batch_problem(
    vocab_size: int,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> str | None:
    """Return what is wrong with a batch as one sentence, or None.

    Args:
        vocab_size: ids must lie below.
        input_ids, labels, attention_mask, position_ids: `[B, S]`.
    """
    named = {"labels": labels, "attention_mask": attention_mask, "position_ids": position_ids}
    given: dict[str, object] = {"input_ids": input_ids, **named}
    for name, what in given.items():
        if what is not None and not isinstance(what, torch.Tensor):
            return f"{name} is of type {type(what).__name__}; it must be a tensor"
    if input_ids.dim() != 2 or not _whole(input_ids):
        return (
            f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}; it must be "
            f"[batch, sequence] of whole numbers"
        )
    for name, value in named.items():
        if value is not None and value.shape != input_ids.shape:
            return (
                f"{name} has shape {list(value.shape)}, but input_ids has "
                f"{list(input_ids.shape)}; they must be equal"
            )
        if value is not None and name != "attention_mask" and not _whole(value):
            return f"{name} has dtype {value.dtype}; it must be of whole numbers"
    if input_ids.numel() == 0:
        return None
    low, high = (int(v) for v in torch.stack(torch.aminmax(input_ids)))
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        return (
            f"token id {bad} lies outside the vocabulary of {vocab_size}; use the tokenizer that "
            f"belongs to the model"
        )
    if labels is not None:
        wrong = ((labels < 0) & (labels != IGNORE)) | (labels >= vocab_size)
        if bool(wrong.any()):
            return (
                f"label {int(labels[wrong][0])} lies outside the vocabulary of {vocab_size}; use "
                f"{IGNORE} for tokens without a target"
            )
    return None if attention_mask is None else mask_problem(attention_mask)


def _whole(value: torch.Tensor) -> bool:
    return not (value.dtype.is_floating_point or value.is_complex() or value.dtype == torch.bool)


def mask_problem(attention_mask: torch.Tensor) -> str | None:
    """Return why a mask does not say which tokens are real, or None.

    Two kinds of mask would be taken for another: in one that is added to attention scores 0 is a
    real token, and numbers of packed documents would all be true.

    Args:
        attention_mask: any shape and dtype.
    """
    if attention_mask.dtype == torch.bool:
        return None
    strange = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
    if strange.numel() == 0:
        return None
    found = f"attention_mask holds {strange[0].item()}, but it says 1 where a token is real, else 0"
    if bool((strange > 1).all()):
        return f"{found}; packed documents are told by position_ids that start again at each"
    return f"{found}, unlike a mask that is added to attention scores; pass the tokenizer's"


def share_numbers(
    mesh: Mesh, numbers: Sequence[int], problem: str | None, what: str
) -> list[list[int]]:
    """Return the numbers of every dp rank, unless one of them has a problem.

    Args:
        mesh: the mesh.
        numbers: this rank's, as many on every rank.
        problem: why what this rank was given cannot be used, or None.
        what: it was given.

    Raises:
        DataError: on every rank: this rank's problem, or which rank has one.

    Collectives: all-gather of the numbers and one more over dp.
    """
    group = mesh.group("dp")
    mine = torch.tensor([[*numbers, int(problem is not None)]], device=mesh.device)
    table = raw_all_gather(mine, group).tolist()
    if problem is not None:
        raise DataError(problem)
    bad = [group.ranks[i] for i, row in enumerate(table) if row[-1]]
    if bad:
        raise DataError(f"rank {bad[0]} was given {what} that cannot be used; its message says why")
    return [row[:-1] for row in table]


def count_agreed(
    batches: Sequence[TargetBatch | None], problem: str | None, mesh: Mesh
) -> torch.Tensor:
    """Return the targets of all batches on all dp ranks, or raise on every rank if one is bad.

    Args:
        batches: labels, attention mask and positions of each; None for a bad or empty one.
        problem: what is wrong with this rank's batches, or None.
        mesh: the mesh.

    Raises:
        DataError: this rank's problem, or that another rank has one.

    Collectives: all-reduce of two integers over dp.
    """
    count = sum(
        (next_token_targets(*batch) != IGNORE).sum() for batch in batches if batch is not None
    )
    both = torch.tensor([int(count), int(problem is not None)], device=mesh.device)
    both = raw_all_reduce(both, mesh.group("dp"))
    if problem is not None:
        raise DataError(problem)
    if mesh.size("dp") > 1 and int(both[1]):
        raise DataError(
            f"{int(both[1])} other data-parallel ranks were given a batch that cannot be used; "
            f"their own messages say why"
        )
    return both[0]
