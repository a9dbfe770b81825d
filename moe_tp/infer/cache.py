"""Keys and values of the columns so far, on the ranks that hold their heads.

Letters: B batch · S new columns · L columns in all · G heads of this rank · h head size.

Each layer allocates its buffers when it sees its first columns, ahead of what it holds, and grows
by blocks; no step allocates. A layer with a sliding window lets go of columns that no later query
can look at.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

BLOCK = 256  # columns


class LayerColumns:
    """What one layer keeps; see `moe_tp.models.cache.LayerCache`.

    Args:
        window: the layer's sliding window in columns, 0 for none.
        expected: columns that there will be at most, as far as is known.
    """

    def __init__(self, window: int, expected: int) -> None:
        self.window, self.columns = window, 0
        self._expected = expected
        self._held = 0
        self._buffers: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def extend(self, *new_BSGh: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the new columns may look at, themselves last, as `[B, G, L, h]` each."""
        new = [x.transpose(1, 2) for x in new_BSGh]
        count = new[0].shape[2]
        first = self.columns == 0
        self.columns += count
        if first and self.window:
            self._store([x[:, :, max(count - self.window, 0) :] for x in new])
            return tuple(new)
        self._store(new)
        seen = min(self._held, self.window - 1 + count) if self.window else self._held
        return tuple(buffer.narrow(2, self._held - seen, seen) for buffer in self._buffers)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch alone, in this order."""
        self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]

    def _store(self, new: list[torch.Tensor]) -> None:
        count = new[0].shape[2]
        if not self._buffers or self._held + count > self._buffers[0].shape[2]:
            self._make_room(new)
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer.narrow(2, self._held, count).copy_(x)
        self._held += count

    def _make_room(self, new: list[torch.Tensor]) -> None:
        """Move what later queries need to the front of buffers with room for more."""
        count = new[0].shape[2]
        kept = min(self._held, self.window - 1) if self.window else self._held
        needed = kept + count
        size = needed + max(BLOCK, needed // 2)
        if not self.window:
            size = max(needed, min(size, self._expected))
        buffers = []
        for i, x in enumerate(new):
            buffer = x.new_empty(*x.shape[:2], size, x.shape[3])
            if kept:
                buffer[:, :, :kept] = self._buffers[i][:, :, self._held - kept : self._held]
            buffers.append(buffer)
        self._buffers, self._held = buffers, kept


class Cache:
    """What all layers of this rank keep of one batch.

    Args:
        windows: sliding window of each layer that this rank holds, by its number.
        expected: columns that there will be at most.
    """

    def __init__(self, windows: Iterable[tuple[int, int]], expected: int) -> None:
        self.layers = {layer: LayerColumns(window, expected) for layer, window in windows}

    @property
    def nbytes(self) -> int:
        """Bytes allocated on this rank."""
        return sum(layer.nbytes for layer in self.layers.values())

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch alone."""
        for layer in self.layers.values():
            layer.keep_rows(rows)
