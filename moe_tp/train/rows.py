"""Rows of seq_len tokens from documents: splitting, cutting, packing; kept as flat arrays on disk.

A piece is a run of one document; a row holds pieces one after the other. Positions restart with
each piece, which is how the model knows that none may see, or be the target of, another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moe_tp.errors import DataError
from moe_tp.models.tokens import IGNORE
from moe_tp.train.config import LongDocuments
from moe_tp.train.documents import Document

Ints = npt.NDArray[np.int64]
_WINDOW = 1 << 16  # pieces packed together
_FILES = ("tokens", "labels", "pieces", "rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of the documents.

    Args:
        documents: read.
        tokens: kept; a token that two pieces share counts once.
        targets: of those, tokens that are learned (not the first of a document).
        split: documents longer than a row, spread over several.
        truncated: documents cut at the end of a row.
        truncated_tokens: tokens cut off.
        dropped_long: documents left out because they are longer than a row.
        dropped_empty: documents left out because nothing in them is learned.
        rows: rows made.
        row_tokens: seq_len.
    """

    documents: int = 0
    tokens: int = 0
    targets: int = 0
    split: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    dropped_long: int = 0
    dropped_empty: int = 0
    rows: int = 0
    row_tokens: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.targets:,} targets) in "
            f"{self.rows:,} rows of {self.row_tokens}, "
            f"{100 * self.tokens / max(self.rows * self.row_tokens, 1):.1f} % full"
        ]
        if self.split:
            parts.append(f"{self.split:,} split")
        if self.truncated:
            parts.append(f"{self.truncated:,} cut by {self.truncated_tokens:,} tokens in all")
        if self.dropped_long:
            parts.append(f"{self.dropped_long:,} left out as longer than a row")
        if self.dropped_empty:
            parts.append(f"{self.dropped_empty:,} left out as without targets")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows that can be read by number.

    Args:
        tokens, labels: int32, of all documents one after the other.
        pieces: `[P, 2]`, first and one past the last token of each piece, in the order of rows.
        rows: `[rows + 1]`, number of the first piece of each row.
        counts: how they came about.
        digest: of the arrays, "" where they were not saved; by it a resume knows its data.
    """

    tokens: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    pieces: Ints
    rows: Ints
    counts: Counts
    digest: str = ""

    def __len__(self) -> int:
        return len(self.rows) - 1

    def batch(
        self, numbers: Sequence[int], *, length: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return rows as the model takes them: ids, labels, positions and a mask, `[B, S]`.

        Args:
            numbers: of the rows.
            length: S; None: of the longest of these rows.
        """
        spans = [self.pieces[self.rows[n] : self.rows[n + 1]] for n in numbers]
        longest = max((int((s[:, 1] - s[:, 0]).sum()) for s in spans), default=1)
        shape = (len(spans), longest if length is None else length)
        ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        labels, mask = np.full(shape, IGNORE, np.int64), np.zeros(shape, np.bool_)
        for b, row in enumerate(spans):
            at = 0
            for start, stop in row:
                end = at + int(stop - start)
                ids[b, at:end] = self.tokens[start:stop]
                labels[b, at:end] = self.labels[start:stop]
                labels[b, at] = IGNORE  # what begins a piece has nothing before it
                positions[b, at:end] = np.arange(end - at)
                mask[b, at:end] = True
                at = end
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
            "attention_mask": torch.from_numpy(mask),
        }

    def save(self, folder: Path) -> None:
        """Write the arrays to a folder; the file of counts comes last and marks it complete.

        Raises:
            DataError: the disk is full, or the folder cannot be written.
        """
        try:
            self._write(folder)
        except OSError as error:
            raise DataError(
                f"{folder}: rows cannot be written ({error}); free some room, or choose another "
                f"output"
            ) from error

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        for name in _FILES:
            array = np.ascontiguousarray(getattr(self, name))
            digest.update(array.data)
            np.save(folder / f"{name}.npy", array)
        part = folder / "counts.part"
        part.write_text(json.dumps({**asdict(self.counts), "digest": digest.hexdigest()[:16]}))
        os.replace(part, folder / "counts.json")

    @classmethod
    def load(cls, folder: Path) -> Rows:
        """Return the rows that lie in a folder, mapped into memory rather than read.

        Raises:
            DataError: a file is cut or damaged.
        """
        try:
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _FILES}
            counts = json.loads((folder / "counts.json").read_text())
        except (EOFError, OSError, ValueError) as error:
            raise DataError(
                f"{folder} holds rows that cannot be read: {str(error).splitlines()[0]}; delete "
                f"the folder, and they are made anew"
            ) from error
        digest = counts.pop("digest", "")
        return cls(counts=Counts(**counts), digest=digest, **arrays)


def make_rows(
    documents: Iterable[Document],
    seq_len: int,
    *,
    packing: bool = True,
    long: LongDocuments = "auto",
) -> Rows:
    """Return the rows of all documents, in their order or, packed, nearly so.

    Args:
        documents: read once.
        seq_len: tokens a row.
        packing: several documents a row, by best fit among windows of pieces.
        long: what becomes of documents longer than a row. Pieces of a split one overlap by one
            token, so that each token but the first is a target exactly once.

    Raises:
        DataError: nothing is left to learn.
    """
    tokens: list[npt.NDArray[np.int32]] = []
    labels: list[npt.NDArray[np.int32]] = []
    spans: list[tuple[int, int]] = []
    tally = dict.fromkeys(asdict(Counts()), 0)
    at = 0
    for document in documents:
        tally["documents"] += 1
        ids = np.asarray(document.ids, np.int32)
        own = np.asarray(document.labels, np.int32)
        excess = len(ids) - seq_len
        splits = long == "split" or (long == "auto" and document.splits)
        if excess > 0 and long == "drop":
            tally["dropped_long"] += 1
            continue
        if excess > 0 and not splits:
            ids, own = ids[:seq_len], own[:seq_len]
        if not (own[1:] != IGNORE).any():
            tally["dropped_empty"] += 1
            continue
        if excess > 0 and splits:
            tally["split"] += 1
        elif excess > 0:
            tally["truncated"] += 1
            tally["truncated_tokens"] += excess
        stride = seq_len - 1
        starts = range(0, max(len(ids) - 1, 1), stride)
        spans += [(at + s, at + min(s + seq_len, len(ids))) for s in starts]
        tokens.append(ids)
        labels.append(own)
        tally["targets"] += int((own[1:] != IGNORE).sum())
        at += len(ids)
    if not spans:
        raise DataError(
            f"the data holds nothing to learn: of {tally['documents']} documents "
            f"{tally['dropped_empty']} have no target within {seq_len} tokens and "
            f"{tally['dropped_long']} are longer; raise data.seq_len, or see to data.long and "
            f"data.loss"
        )
    pieces = np.asarray(spans, np.int64)
    lengths = pieces[:, 1] - pieces[:, 0]
    groups = pack(lengths, seq_len) if packing else [[i] for i in range(len(pieces))]
    tally |= {"tokens": at, "rows": len(groups), "row_tokens": seq_len}
    return Rows(
        tokens=np.concatenate(tokens),
        labels=np.concatenate(labels),
        pieces=pieces[[i for group in groups for i in group]],
        rows=np.cumsum([0, *map(len, groups)], dtype=np.int64),
        counts=Counts(**tally),
    )


def pack(lengths: Ints, capacity: int) -> list[list[int]]:
    """Return pieces by row: best fit of the longest first, within windows of pieces.

    Args:
        lengths: tokens of each piece, at most `capacity`.
        capacity: tokens of a row.
    """
    rows: list[list[int]] = []
    for first in range(0, len(lengths), _WINDOW):
        window = lengths[first : first + _WINDOW]
        # Rows by room left, and the rooms in use as bits: the best fit is the lowest bit from the
        # length on.
        by_room: dict[int, list[int]] = {}
        rooms = 0
        for i in np.argsort(-window, kind="stable"):
            length = int(window[i])
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = by_room[room].pop()
                if not by_room[room]:
                    rooms &= ~(1 << room)
            else:
                room, row = capacity, len(rows)
                rows.append([])
            rows[row].append(first + int(i))
            left = room - length
            if left:
                by_room.setdefault(left, []).append(row)
                rooms |= 1 << left
    return rows
