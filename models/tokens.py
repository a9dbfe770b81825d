"""What one call of the model knows of its tokens: checked ids, targets, documents, owners.

Letters: B batch · S sequence · N tokens of a (cp, tp) group, padded so that tp divides them · T
owned tokens.

Ranks that share a batch build this alike from the same `[B, S]` tensors. Each cp rank takes its
columns of every sequence (padded so that they divide); the flattened tokens are
cut into equal runs, one for each tp rank; rows past B*S are padding, masked everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from moe_tp.models.attention import Sequences
from moe_tp.models.cache import LayerCache
from moe_tp.models.config import ModelConfig
from moe_tp.models.context import SharedSequences
from moe_tp.models.rope import Rotation, rotation
from moe_tp.parallel.context.sequence import padded_length, share
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import DropoutKey

IGNORE = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of one call, on the model's device.

    Args:
        batch, length: B and S, this rank's share of each sequence.
        given: columns of the sequences as they were given, of which cp holds shares.
        rows: N.
        ids_N: vocabulary ids, 0 in padding.
        ids_T: the owned ones.
        targets_N: the next token of each, -100 where there is none; None without labels.
        mask_T: True where an owned token is real; None if all are.
        token_ids_T: identity of owned tokens for dropout: sample of the global batch * 2^32 +
            column.
        sequence_T: row of the batch of each owned token, or its packed document where router losses
            are those of each sequence.
        num_sequences: of the batch that the ranks of (cp, tp) share.
        token_ids_BS: the same identity for all tokens of whole sequences.
        rotation: of the positions.
        masks: sliding window (0 for none) -> mask over whole sequences; None is plainly causal.
        context: how the ranks of cp share the sequences.
        whole: every rank of tp owns all N tokens, and T is N (a step of generation).
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
    given: int
    context: SharedSequences | None = None
    num_sequences: int = 0
    whole: bool = False

    def sequences(
        self, window: int, key: DropoutKey | None, cache: LayerCache | None = None
    ) -> Sequences:
        """Return what a layer's attention must know.

        Args:
            window: the layer's sliding window, 0 for none.
            key: identity of the layer's attention dropout; None outside training.
            cache: what the layer keeps of earlier columns; None outside generation.
        """
        return Sequences(
            batch=self.batch,
            length=self.length,
            rotation=self.rotation,
            mask_BSS=self.masks[window],
            dropout_key=key,
            context=None if self.context is None else replace(self.context, window=window),
            cache=cache,
            whole=self.whole,
        )


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
    targets = F.pad(labels[:, 1:].to(torch.int64), (0, 1), value=IGNORE)
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
    share_length = padded_length(length, mesh.size("cp")) // mesh.size("cp")
    return -(-batch * share_length // mesh.size("tp"))


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
    device, tp, cp = mesh.device, mesh.group("tp"), mesh.group("cp")
    batch, given = input_ids.shape
    whole = padded_length(given, cp.size)
    columns = share(whole, cp.size, cp.rank).to(device)
    length = columns.shape[0]
    owned = owned_tokens(batch, given, mesh)
    rows = owned * tp.size
    mine = slice(tp.rank * owned, (tp.rank + 1) * owned)

    def wide(value: torch.Tensor, fill: int) -> torch.Tensor:
        return F.pad(value.to(device), (0, whole - given), value=fill)

    def flat(value_BS: torch.Tensor, fill: int) -> torch.Tensor:
        """This rank's columns, flattened and padded to whole runs."""
        part = value_BS[:, columns].reshape(-1)
        return F.pad(part, (0, rows - batch * length), value=fill)

    targets = None
    if labels is not None:
        targets = wide(next_token_targets(labels, attention_mask, position_ids), IGNORE)
    column = torch.arange(whole, device=device)
    positions = column.expand(batch, whole)
    if position_ids is not None:
        # Padding goes on counting, so that no document begins in it.
        last = position_ids[:, -1:].to(device) if given else torch.zeros_like(positions[:, :1])
        more = column[given:] + (last + 1 - given)
        positions = position_ids = torch.cat([position_ids.to(device), more], dim=1)
    real = None
    if attention_mask is not None or whole > given or rows > batch * length:
        ones = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        real = flat(wide(ones, 0), 0)[mine].bool()
    sample = torch.arange(sample_offset, sample_offset + batch, device=device)
    identity = sample[:, None] * 2**32 + column
    row, num_sequences = torch.arange(batch, device=device)[:, None].expand(batch, whole), batch
    if position_ids is not None and config.moe.router.balance_kind == "sequence":
        row, num_sequences = _documents(position_ids)
    windows = {config.window(layer) for layer in range(config.num_layers)}
    ids_N = flat(wide(input_ids.to(torch.int64), 0), 0)
    mask = None if attention_mask is None else wide(attention_mask.long(), 0)
    ring = cp.size > 1 and mesh.runtime.cp_kind == "ring"
    masks: dict[int, torch.Tensor | None] = dict.fromkeys(windows)
    if not ring:
        masks = attention_masks(whole, windows, mask, position_ids, device)
    return Tokens(
        batch=batch,
        length=length,
        given=given,
        rows=rows,
        ids_N=ids_N,
        ids_T=ids_N[mine],
        targets_N=None if targets is None else flat(targets, IGNORE),
        mask_T=real,
        token_ids_T=flat(identity, -1)[mine],
        sequence_T=flat(row, 0)[mine],
        token_ids_BS=identity,
        rotation=rotation(config.rope, config.attention.rope_size, positions[:, columns], dtype),
        masks=masks,
        context=_context(mesh, whole, mask, position_ids),
        num_sequences=num_sequences,
    )


def _documents(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the number of each token's packed document in the batch, and how many there are."""
    starts = document_starts(position_ids)
    starts[:, :1] = True
    number = starts.flatten().cumsum(0) - 1
    return number.view_as(starts), int(starts.sum())


def _context(
    mesh: Mesh, length: int, mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> SharedSequences | None:
    """Return how the ranks of cp share the sequences; None where they do not."""
    if mesh.size("cp") == 1:
        return None
    documents = None if position_ids is None else document_starts(position_ids).cumsum(1)
    return SharedSequences(
        group=mesh.group("cp"),
        kind=mesh.runtime.cp_kind,
        length=length,
        document=documents,
        real=None if mask is None else mask.bool(),
    )
