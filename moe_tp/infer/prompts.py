"""Prompts as users bring them, checked and agreed on before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_tp.errors import ConfigError, DataError
from moe_tp.models.batches import Prints, mask_problem, share_numbers
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import key_of

Prompts = torch.Tensor | Sequence[Sequence[int]] | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The prompts of this rank.

    Args:
        prompts: token ids, padding taken out.
        first: number of the first one in the batch of all ranks.
        most: prompts of the rank that has most.
        total: prompts of all ranks.
    """

    prompts: list[list[int]]
    first: int
    most: int
    total: int


def check_model(model: Decoder) -> None:
    """Refuse a layout or router with which a token would depend on more than its own row.

    Raises:
        ConfigError: names the fix.
    """
    cp = model.mesh.size("cp")
    if cp > 1:
        raise ConfigError(
            f"generate does not run with cp={cp}, which shares sequences that do not exist yet; "
            f"choose cp=1 (tp={cp} splits the heads instead)"
        )
    router = model.config.moe.router
    if router.kind in ("expert_choice", "sinkhorn", "balanced"):
        raise ConfigError(
            f"generate does not run with router kind={router.kind!r}: a token's experts would "
            f"depend on the other rows of the batch and on tokens to come; choose kind='top_k'"
        )


def read_prompts(input_ids: Prompts, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Return each row's real tokens.

    Raises:
        DataError: not `[B, S]` of whole numbers or a list of lists, or a mask that is not one of
            real tokens.
    """
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() != 2 or input_ids.dtype.is_floating_point:
            raise DataError(
                f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}; it must "
                f"be [batch, sequence] of whole numbers, or a list of lists of token ids"
            )
        if attention_mask is None:
            return [[int(i) for i in row] for row in input_ids.tolist()]
        if attention_mask.shape != input_ids.shape:
            raise DataError(
                f"attention_mask has shape {list(attention_mask.shape)}, but input_ids has "
                f"{list(input_ids.shape)}; they must be equal"
            )
        problem = mask_problem(attention_mask)
        if problem is not None:
            raise DataError(problem)
        pairs = zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)
        return [[i for i, real in zip(*pair, strict=True) if real] for pair in pairs]
    if attention_mask is not None:
        raise DataError(
            "attention_mask belongs to a tensor of ids; a list of prompts has no padding"
        )
    try:
        return [[operator.index(i) for i in row] for row in input_ids]
    except TypeError:
        raise DataError(
            "prompts must be a list of lists of token ids (whole numbers), or a [batch, sequence] "
            "tensor of them"
        ) from None


def prompt_problem(model: Decoder, prompts: Sequence[Sequence[int]]) -> str | None:
    """Return what is wrong with prompts as one sentence, or None."""
    words, most = model.config.vocab_size, model.config.max_positions
    for i, prompt in enumerate(prompts):
        if not prompt:
            return f"prompt {i} has no token; begin it with the tokenizer's first token at least"
        if len(prompt) > most:
            return (
                f"prompt {i} has {len(prompt)} tokens, but the model knows "
                f"max_position_embeddings={most} positions; shorten it"
            )
        bad = min(prompt) if min(prompt) < 0 else max(prompt)
        if bad < 0 or bad >= words:
            return (
                f"prompt {i}: token id {bad} lies outside the vocabulary of {words}; use the "
                f"tokenizer that belongs to the model"
            )
    return None


def agree_rows(model: Decoder, prompts: list[list[int]], problem: str | None) -> Rows:
    """Return this rank's rows and their place among all ranks', or raise on every rank.

    Args:
        model: the model.
        prompts: this dp rank's.
        problem: what is wrong with them, or None.

    Raises:
        DataError: this rank's problem, or that another rank has one.
        RankMismatchError: ranks that share a batch were given unlike prompts.

    Collectives: all-gather of three integers over the world.
    """
    prints: Prints = {"prompts": torch.tensor(key_of(prompts))}
    found = share_numbers(model.mesh, [len(prompts)], prints, problem, "prompts")
    counts = [row[0] for row in found]
    return Rows(
        prompts=prompts,
        first=sum(counts[: model.mesh.group("dp").rank]),
        most=max(counts),
        total=sum(counts),
    )


def share_of(rows: int, mesh: Mesh) -> slice:
    """Return which of `rows` prompts this dp rank takes; the first ranks take the odd ones."""
    dp, rank = mesh.size("dp"), mesh.coordinate("dp")
    return slice(-(-rows * rank // dp), -(-rows * (rank + 1) // dp))
