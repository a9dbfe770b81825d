"""What goes into the reference and what comes out of it.

Letters: B batch · S sequence · D width · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_tp.verify.attention import documents
from moe_tp.verify.gate import Routing

__all__ = ["Batch", "Losses", "Outcome", "Trace", "targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of a micro-batch; all `[B, S]`, labels hub-style (-100 ignored)."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    @property
    def real(self) -> torch.Tensor:
        """Return `[B, S]`, False where a token is padding."""
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask.bool()

    @property
    def positions(self) -> torch.Tensor:
        """Return `[B, S]` positions, counted from 0 in each row unless given."""
        if self.position_ids is not None:
            return self.position_ids
        length = self.input_ids.shape[1]
        return torch.arange(length).expand(self.input_ids.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Which router losses are added to the cross entropy, and how strongly."""

    balance: float = 0.0
    # or "sequence", "global_batch", "global_batch_exact"; "pooled": transformers' mean over layers
    kind: str = "micro_batch"
    z: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one part of a micro-batch left on its way through the model."""

    logits_BSV: torch.Tensor
    routing: list[Routing]  # of each MoE layer
    hidden: list[torch.Tensor]  # `[B, S, D]` after each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the reference computed for one optimiser step."""

    loss: torch.Tensor
    aux_loss: torch.Tensor
    targets: int
    logits: list[list[torch.Tensor]]  # [micro-batch][rank] -> [B, S, V]
    routing: list[list[list[Routing]]]  # [micro-batch][rank][MoE layer in order]
    hidden: list[list[list[torch.Tensor]]]  # [micro-batch][rank][layer] -> [B, S, D] after it
    gradients: dict[str, torch.Tensor]

    @property
    def grad_norm(self) -> float:
        """Return the global gradient norm."""
        squares = [g.double().square().sum() for g in self.gradients.values()]
        return float(torch.stack(squares).sum().sqrt())


def targets(batch: Batch) -> torch.Tensor:
    """Return `[B, S]`: the token each position must predict, -100 where there is none.

    None: the last position, an ignored label, the first token of a packed document, padding on
        either side.
    """
    target_BS = torch.full_like(batch.labels, -100)
    if batch.labels.shape[1] < 2:
        return target_BS
    document_BS = documents(batch.positions)
    valid_BS = (document_BS[:, 1:] == document_BS[:, :-1]) & batch.real[:, 1:] & batch.real[:, :-1]
    target_BS[:, :-1] = batch.labels[:, 1:].masked_fill(~valid_BS, -100)
    return target_BS
