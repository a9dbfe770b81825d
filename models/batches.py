"""Batches as callers bring them: what is wrong with one, and what all ranks know of theirs.

Letters: B batch · S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_tp.errors import DataError, RankMismatchError
from moe_tp.models.tokens import IGNORE, next_token_targets
from moe_tp.parallel.collectives import raw_all_gather
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import hash_bits, key_of

# What ranks that share a batch compare -> a number of it, int64.
Prints = Mapping[str, torch.Tensor]

_SHAPES, _NUMBERS = "shapes or number of micro-batches", "step or sample offsets"
_TENSORS = ("input_ids", "labels", "attention_mask", "position_ids")
_PRINTED = (_SHAPES, *_TENSORS, _NUMBERS)


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
    mesh: Mesh, numbers: Sequence[int], prints: Prints, problem: str | None, what: str
) -> list[list[int]]:
    """Return the numbers of every dp rank, unless what a rank was given cannot be used.

    Args:
        mesh: the mesh.
        numbers: this rank's, as many on every rank.
        prints: of what this rank was given; ranks of one dp coordinate must have the same.
        problem: why what this rank was given cannot be used, or None.
        what: it was given.

    Raises:
        DataError: on every rank: this rank's problem, or which rank has one.
        RankMismatchError: on every rank: two that share a batch were given unlike ones.

    Collectives: all-gather over the world of the numbers, the prints and one more.
    """
    flag, more = torch.tensor([int(problem is not None)]), torch.tensor(numbers, dtype=torch.int64)
    parts = [flag, *(value.view(1) for value in prints.values()), more]
    row = torch.cat([part.to(mesh.device) for part in parts])
    table = raw_all_gather(row[None], mesh.group("world")).tolist()
    if problem is not None:
        raise DataError(problem)
    bad = next((rank for rank, row in enumerate(table) if row[0]), None)
    if bad is not None:
        raise DataError(f"rank {bad} was given {what} that cannot be used; its message says why")
    for ranks in _sharers(mesh):
        for rank in ranks:
            for at, name in enumerate(prints, 1):
                if table[rank][at] != table[ranks[0]][at]:
                    raise RankMismatchError(
                        f"ranks {ranks[0]} and {rank} share a batch, but their {name} differ; deal "
                        f"out data by mesh.coordinate('dp') of mesh.size('dp'), since the ranks of "
                        f"tp, cp and pp work on one batch together"
                    )
    return [table[rank][1 + len(prints) :] for rank in mesh.group("dp").ranks]


def _sharers(mesh: Mesh) -> list[list[int]]:
    """Return the ranks of each dp coordinate, of which each list has the same batch."""
    sharing: list[list[int]] = [[] for _ in range(mesh.size("dp"))]
    for rank in range(mesh.world_size):
        sharing[rank // mesh.size("cp_tp") % len(sharing)].append(rank)
    return sharing


def fingerprints(
    batches: Sequence[Mapping[str, Any]], mesh: Mesh, *numbers: int, problem: str | None = None
) -> Prints:
    """Return numbers that differ where batches do, by what they are made of; zeros without sharers.

    Args:
        batches: arguments of calls, by name.
        mesh: the mesh; where no ranks share a batch nothing is read.
        numbers: more that must be the same, such as the step.
        problem: what is wrong with them, or None; nothing is read where there is something.

    Collectives: none.
    """
    prints = {name: torch.zeros((), dtype=torch.int64) for name in _PRINTED}
    if problem is not None or mesh.size("cp_tp") * mesh.size("pp") == 1:
        return prints
    shapes = [tuple(batch["input_ids"].shape) for batch in batches]
    offsets = [int(batch.get("sample_offset") or 0) for batch in batches]
    prints[_SHAPES] += key_of(*shapes)
    prints[_NUMBERS] += key_of(*numbers, *offsets)
    for m, batch in enumerate(batches):
        for name in _TENSORS:
            value = batch.get(name)
            if value is not None:
                key = key_of("batch", m)
                flat = value.detach().reshape(-1).to(torch.int64)
                place = torch.arange(1, flat.numel() + 1, device=flat.device)
                prints[name] = prints[name].to(flat.device)
                prints[name] += hash_bits(key, hash_bits(1, flat) + place).sum()
    return prints


def count_agreed(
    batches: Sequence[Mapping[str, Any]], problem: str | None, mesh: Mesh, *numbers: int
) -> torch.Tensor:
    """Return the targets of all batches on all dp ranks, or raise on every rank if one is bad.

    Args:
        batches: arguments of calls, by name; those without labels have no target.
        problem: what is wrong with this rank's batches, or None.
        mesh: the mesh.
        numbers: more that ranks which share a batch must have alike.

    Raises:
        DataError: this rank's problem, or that another rank has one.
        RankMismatchError: two ranks that share a batch were given unlike ones.

    Collectives: all-gather of eight integers over the world.
    """
    count = 0
    for batch in batches if problem is None else ():
        labels, mask, positions = (batch.get(name) for name in _TENSORS[1:])
        if labels is not None:
            count += int((next_token_targets(labels, mask, positions) != IGNORE).sum())
    prints = fingerprints(batches, mesh, *numbers, problem=problem)
    found = share_numbers(mesh, [count], prints, problem, "a batch")
    return torch.tensor(sum(row[0] for row in found), device=mesh.device)
