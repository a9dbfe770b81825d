"""What one call of the model knows of its tokens: checked ids, targets, documents, owners.

Letters: B batch · S sequence · N tokens of a (cp, tp) group, padded so that tp divides them · T
owned tokens.

Ranks that share a batch build this alike from the same `[B, S]` tensors. The flattened tokens are
cut into equal runs, one for each tp rank; rows past B*S are padding, masked everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moe_tp.errors import DataError
from moe_tp.models.attention import Sequences
from moe_tp.models.config import ModelConfig
from moe_tp.models.rope import Rotation, rotation
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import DropoutKey

IGNORE = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of one call, on the model's device.

    Args:
        batch, length: B and S.
        rows: N.
        ids_N: vocabulary ids, 0 in padding.
        ids_T: the owned ones.
        targets_N: the next token of each, -100 where there is none; None without labels.
        mask_T: True where an owned token is real; None if all are.
        token_ids_T: identity of owned tokens for dropout: sample of the global batch * 2^32 +
            column.
        sequence_T: row of the batch of each owned token.
        token_ids_BS: the same identity for all tokens.
        rotation: of the positions.
        masks: sliding window (0 for none) -> attention mask; None is plainly causal.
    """

    batch: int
    length: int
    rows: int
    ids_N: torch.Tensor
    ids_T: torch.Tensor
    targets_N: torch.Tensor | None
    mask_T: torch.Tensor | None
    token_ids_T: torch.Tensor
    sequence_T: torch.Tensor
    token_ids_BS: torch.Tensor
    rotation: Rotation
    masks: dict[int, torch.Tensor | None]

    def sequences(self, window: int, key: DropoutKey | None) -> Sequences:
        """Return what a layer's attention must know.

        Args:
            window: the layer's sliding window, 0 for none.
            key: identity of the layer's attention dropout; None outside training.
        """
        return Sequences(
            batch=self.batch,
            length=self.length,
            rotation=self.rotation,
            mask_BSS=self.masks[window],
            dropout_key=key,
        )


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
    if input_ids.dim() != 2 or input_ids.dtype.is_floating_point:
        return (
            f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}; it must be "
            f"[batch, sequence] of whole numbers"
        )
    named = {"labels": labels, "attention_mask": attention_mask, "position_ids": position_ids}
    for name, value in named.items():
        if value is not None and value.shape != input_ids.shape:
            return (
                f"{name} has shape {list(value.shape)}, but input_ids has "
                f"{list(input_ids.shape)}; they must be equal"
            )
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
    return None


def check_batch(
    vocab_size: int,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> None:
    """Check a batch.

    Raises:
        DataError: see `batch_problem`.
    """
    problem = batch_problem(vocab_size, input_ids, labels, attention_mask, position_ids)
    if problem is not None:
        raise DataError(problem)


def document_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return `[B, S]`, True where a document begins inside a row: positions do not go on by one."""
    starts = torch.zeros_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def next_token_targets(
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `[B, S]`, the label of the next column, -100 where there is no target.

    The first token of a document is no target of the one before it, and masked tokens neither have
    nor are targets.

    Args:
        labels: hub-style, same shape as the ids, not shifted.
        attention_mask: true where a token is real.
        position_ids: restart at the documents of a packed row.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    none = torch.zeros_like(targets, dtype=torch.bool)
    if position_ids is not None:
        none |= F.pad(document_starts(position_ids)[:, 1:], (0, 1))
    if attention_mask is not None:
        real = attention_mask.bool()
        none |= ~real | ~F.pad(real[:, 1:], (0, 1))
    return targets.masked_fill(none, IGNORE)


def attention_masks(
    length: int,
    windows: set[int],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    device: torch.device,
) -> dict[int, torch.Tensor | None]:
    """Return for each sliding window the mask `[B or 1, 1, S, S]`, None where causal order is all.

    Documents of a packed row do not see each other; padding is seen by nobody; every token sees
    itself, so that no row of the softmax is empty.

    Args:
        length: S.
        windows: sliding windows in tokens, 0 for none.
        attention_mask, position_ids: `[B, S]` on `device`.
        device: where to build them.
    """
    at = torch.arange(length, device=device)
    causal = at[:, None] >= at[None, :]
    shared: torch.Tensor | None = None
    if position_ids is not None:
        starts = document_starts(position_ids)
        if bool(starts.any()):
            document = starts.cumsum(1)
            shared = (document[:, :, None] == document[:, None, :]) & causal
    if attention_mask is not None and not bool(attention_mask.all()):
        seen = attention_mask.bool()[:, None, :] & causal
        shared = seen if shared is None else shared & seen
        shared = shared | torch.eye(length, dtype=torch.bool, device=device)
    masks: dict[int, torch.Tensor | None] = {}
    for window in windows:
        mask = shared
        if 0 < window < length:
            near = causal & (at[:, None] - at[None, :] < window)
            mask = near[None] if mask is None else mask & near
        masks[window] = None if mask is None else mask[:, None]
    return masks


def owned_tokens(batch: int, length: int, mesh: Mesh) -> int:
    """Return T, the tokens of a `[B, S]` batch that each rank owns, padding included."""
    return -(-batch * length // mesh.size("tp"))


def prepare(
    config: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    sample_offset: int,
) -> Tokens:
    """Return the tokens of one call.

    Args:
        config: the model.
        mesh: the mesh.
        dtype: of activations.
        input_ids, labels, attention_mask, position_ids: checked `[B, S]` tensors, on any device.
        sample_offset: number of the first row in the global batch.

    Collectives: none.
    """
    device, group = mesh.device, mesh.group("tp")
    batch, length = input_ids.shape
    targets = None
    if labels is not None:
        targets = next_token_targets(labels, attention_mask, position_ids).to(device)
    if attention_mask is not None:
        attention_mask = attention_mask.to(device)
    column = torch.arange(length, device=device)
    if position_ids is None:
        positions = column.expand(batch, length)
    else:
        positions = position_ids = position_ids.to(device)
    owned = owned_tokens(batch, length, mesh)
    rows = owned * group.size
    mine = slice(group.rank * owned, (group.rank + 1) * owned)

    def flat(value: torch.Tensor, fill: int) -> torch.Tensor:
        return F.pad(value.reshape(-1), (0, rows - batch * length), value=fill)

    real = None
    if attention_mask is not None or rows > batch * length:
        given = torch.ones_like(positions) if attention_mask is None else attention_mask.long()
        real = flat(given, 0)[mine].bool()
    sample = torch.arange(sample_offset, sample_offset + batch, device=device)
    identity = sample[:, None] * 2**32 + column
    row = torch.arange(batch, device=device)[:, None].expand(batch, length)
    windows = {config.window(layer) for layer in range(config.num_layers)}
    ids_N = flat(input_ids.to(device=device, dtype=torch.int64), 0)
    mla = config.attention.mla
    turned = config.attention.head_dim if mla is None else mla.rope_dim
    return Tokens(
        batch=batch,
        length=length,
        rows=rows,
        ids_N=ids_N,
        ids_T=ids_N[mine],
        targets_N=None if targets is None else flat(targets, IGNORE),
        mask_T=real,
        token_ids_T=flat(identity, -1)[mine],
        sequence_T=flat(row, 0)[mine],
        token_ids_BS=identity,
        rotation=rotation(config.rope, turned, positions, dtype),
        masks=attention_masks(length, windows, attention_mask, position_ids, device),
    )
