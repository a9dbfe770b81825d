"""Watching a layout's run by token: layer outputs and choices; the reference's choices fed in.

Letters: T tokens on this rank · D width · K choices · E experts.

A token is known by the identity that the model gives its owner, sample * 2^32 + column, so that
nothing here depends on which rank owns what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_tp.experts.moe import MoE, Router
from moe_tp.models.blocks import Block
from moe_tp.parallel.recompute import recomputing
from moe_tp.routing import Assignment, route
from moe_tp.verify.data import Batch

__all__ = ["SAMPLES", "Choices", "Seen", "first_sample", "tables", "watch"]

SAMPLES = 2**16  # sample numbers set apart for each part of a micro-batch
_ROW = 2**32


def first_sample(micro_batch: int, rank: int, ranks: int) -> int:
    """Return the number of the first row of a part, unlike any other part's."""
    return (micro_batch * ranks + rank) * SAMPLES


def token_ids(batch: Batch, first: int) -> torch.Tensor:
    """Return the identity of each of the batch's tokens, `[B * S]`."""
    rows, length = batch.input_ids.shape
    return ((first + torch.arange(rows))[:, None] * _ROW + torch.arange(length)).flatten()


@dataclass(frozen=True, slots=True)
class Choices:
    """Experts by token, for one layer: identities in ascending order, and the choices of each."""

    id_N: torch.Tensor
    expert_NK: torch.Tensor

    def of(self, id_T: torch.Tensor) -> torch.Tensor:
        """Return the choices of these tokens, `[T, K]`; -1 for padding and strangers."""
        own = id_T.cpu()
        result = torch.full((len(own), self.expert_NK.shape[1]), -1)
        if len(self.id_N):
            at = torch.searchsorted(self.id_N, own).clamp(max=len(self.id_N) - 1)
            known = self.id_N[at] == own
            result[known] = self.expert_NK[at[known]]
        return result.to(id_T.device)


def tables(
    micro_batches: list[list[Batch]], routing: list[list[list[Any]]], layers: list[int]
) -> dict[int, Choices]:
    """Return the reference's choices of a step by MoE layer.

    Args:
        micro_batches: of the step, `[micro-batch][rank]`.
        routing: the reference's, `[micro-batch][rank][MoE layer]`.
        layers: numbers of the MoE layers.
    """
    found = {}
    for at, layer in enumerate(layers):
        ids, experts = [], []
        for m, parts in enumerate(micro_batches):
            for r, batch in enumerate(parts):
                ids.append(token_ids(batch, first_sample(m, r, len(parts))))
                experts.append(routing[m][r][at].own_ids_TK)
        id_N, order_N = torch.cat(ids).sort()
        found[layer] = Choices(id_N, torch.cat(experts)[order_N])
    return found


@dataclass(slots=True)
class Seen:
    """What a rank saw of its own real tokens in one step: by layer, the rows of each call."""

    calls: dict[int, list[dict[str, torch.Tensor]]] = field(default_factory=dict)

    def add(self, layer: int, **rows: torch.Tensor) -> None:
        """Keep one call of a layer: `ids`, `hidden` and in an MoE layer `chosen` of its tokens."""
        self.calls.setdefault(layer, []).append(rows)

    def joined(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return one tensor a layer, on the host."""
        found: dict[str, dict[int, torch.Tensor]] = {"ids": {}, "hidden": {}, "chosen": {}}
        for layer, calls in self.calls.items():
            for name in calls[0]:
                found[name][layer] = torch.cat([call[name] for call in calls]).cpu()
        return found


@contextmanager
def watch(model: torch.nn.Module, replay: Mapping[int, Choices]) -> Iterator[Seen]:
    """Yield what the model's layers do while the context is open; their routing is replaced.

    Each MoE layer still chooses by itself, which is recorded; then the reference's choice is
    computed.

    Args:
        model: a decoder.
        replay: the reference's choices by layer.
    """
    seen = Seen()
    with ExitStack() as stack:
        for block in model.modules():
            if isinstance(block, Block):
                stack.enter_context(_watch_block(block, replay.get(block.layer), seen))
        yield seen


def _watch_block(block: Block, choices: Choices | None, seen: Seen) -> ExitStack:
    """Return a context that closes the hooks on one layer."""
    layer = block.layer
    current: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []

    def enter(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        current[:] = [args[1].tokens.token_ids_T]

    def leave(_: torch.nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        if _again():
            return
        real_T = _real(args[1].tokens)
        rows = {"ids": current[0][real_T], "hidden": output[0].detach()[real_T]}
        if chosen:
            rows["chosen"] = chosen.pop()
        seen.add(layer, **rows)

    def feed(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert choices is not None
        return args, {**kwargs, "replay": choices.of(current[0])}

    def choose(router: torch.nn.Module, _: tuple[Any, ...], assignment: Assignment) -> None:
        if not _again():
            chosen[:] = [_own_choice(router, assignment)]

    stack = ExitStack()
    stack.callback(block.register_forward_pre_hook(enter).remove)
    stack.callback(block.register_forward_hook(leave).remove)
    if choices is not None:
        moe: MoE = block.moe
        stack.callback(moe.register_forward_pre_hook(feed, with_kwargs=True).remove)
        stack.callback(moe.router.register_forward_hook(choose).remove)
    return stack


def _again() -> bool:
    """Return whether this is not the step's own pass: recompute, or a pipeline's for logits."""
    return recomputing() or not torch.is_grad_enabled()


def _real(tokens: Any) -> torch.Tensor:
    """Return True for the owned tokens that are neither the layout's padding nor the batch's."""
    real_T: torch.Tensor = tokens.token_ids_T >= 0
    return real_T if tokens.mask_T is None else real_T & tokens.mask_T


def _own_choice(router: torch.nn.Module, assignment: Assignment) -> torch.Tensor:
    """Return the experts that the layout would have chosen for its real tokens."""
    assert isinstance(router, Router)
    bias_E = router.local("correction_bias") if "correction_bias" in router.specs else None
    with torch.no_grad():
        own = route(
            assignment.logits_TE.detach(), router.config, bias_E=bias_E, mask_T=assignment.mask_T
        )
    return own.ids_TK if assignment.mask_T is None else own.ids_TK[assignment.mask_T]
