"""Rows: nothing lost by splitting and packing, and nothing seen or learned across documents."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tp.errors import DataError
from moe_tp.models.tokens import IGNORE, next_token_targets
from moe_tp.train.documents import Document
from moe_tp.train.rows import Rows, make_rows, pack


def documents(lengths: list[int], *, splits: bool = True) -> list[Document]:
    """Documents whose tokens are all different, from 1 on."""
    starts = np.cumsum([1, *lengths])
    runs = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    return [Document(ids=ids, labels=list(ids), splits=splits) for ids in runs]


def learned(rows: Rows, *, length: int | None = None) -> list[tuple[int, int]]:
    """(token, its target) of every target of all rows, by the model's own rule."""
    found: list[tuple[int, int]] = []
    for n in range(len(rows)):
        batch = rows.batch([n], length=length)
        targets = next_token_targets(
            batch["labels"], batch["attention_mask"], batch["position_ids"]
        )
        keep = targets != IGNORE
        pairs = zip(batch["input_ids"][keep].tolist(), targets[keep].tolist(), strict=True)
        found += list(pairs)
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 17), st.booleans())
def test_each_token_but_the_first_is_a_target_once(
    lengths: list[int], seq_len: int, packing: bool
) -> None:
    """C54: also where a document is split over rows; none of another document's."""
    docs = documents(lengths)
    expected = sorted((t, t + 1) for d in docs for t in d.ids[:-1])
    if not expected:
        with pytest.raises(DataError, match="nothing to learn"):
            make_rows(docs, seq_len, packing=packing)
        return
    rows = make_rows(docs, seq_len, packing=packing)
    assert learned(rows) == expected
    assert learned(rows, length=seq_len) == expected
    assert rows.counts.targets == len(expected)
    assert rows.counts.tokens == sum(len(d.ids) for d in docs if len(d.ids) > 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=200))
def test_packing_holds_each_piece_once_and_no_two_rows_fit_in_one(lengths: list[int]) -> None:
    groups = pack(np.asarray(lengths), 32)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    filled = sorted(sum(lengths[i] for i in group) for group in groups)
    assert filled[-1] <= 32
    assert len(filled) < 2 or filled[0] + filled[1] > 32


def test_packing_takes_the_best_fit() -> None:
    assert pack(np.asarray([6, 5, 4, 5]), 10) == [[0, 2], [1, 3]]
    # 7 leaves room 3, 6 leaves 4: the 3 goes where nothing is left over.
    assert pack(np.asarray([6, 7, 3]), 10) == [[1, 2], [0]]


def test_positions_restart_and_padding_is_masked() -> None:
    rows = make_rows(documents([3, 2], splits=False), 8)
    batch = rows.batch([0], length=8)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 5 + [False] * 3]
    assert batch["labels"].tolist() == [[IGNORE, 2, 3, IGNORE, 5, IGNORE, IGNORE, IGNORE]]
    assert rows.batch([0])["input_ids"].shape == (1, 5)


def test_what_does_not_fit_is_counted() -> None:
    docs = documents([9, 3, 1], splits=False)
    cut = make_rows(docs, 4)
    assert (cut.counts.truncated, cut.counts.truncated_tokens) == (1, 5)
    assert (cut.counts.dropped_empty, cut.counts.documents, cut.counts.tokens) == (1, 3, 7)
    assert "1 cut by 5 tokens in all" in str(cut.counts)
    dropped = make_rows(docs, 4, long="drop")
    assert (dropped.counts.dropped_long, dropped.counts.tokens) == (1, 3)
    split = make_rows(docs, 4, long="split")
    assert (split.counts.split, split.counts.tokens) == (1, 12)


def test_a_document_whose_targets_are_cut_off_is_dropped() -> None:
    ids = list(range(1, 9))
    late = Document(ids=ids, labels=[IGNORE] * 6 + ids[6:], splits=False)
    with pytest.raises(DataError, match="of 1 documents 1 have no target within 4 tokens"):
        make_rows([late], 4)
    assert make_rows([late], 8).counts.targets == 2


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """F3: numpy's own error names neither the file nor the cause."""
    (tmp_path / "tokens.npy").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"rows cannot be written .*choose another output"):
        make_rows(documents([5000]), 8).save(tmp_path)


def test_saved_rows_are_mapped_and_equal(tmp_path: Path) -> None:
    rows = make_rows(documents([5, 30, 2, 7]), 8)
    rows.save(tmp_path / "rows")
    loaded = Rows.load(tmp_path / "rows")
    assert isinstance(loaded.tokens, np.memmap)
    assert loaded.counts == rows.counts
    for n in range(len(rows)):
        first, second = rows.batch([n]), loaded.batch([n])
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("size", [0, 2, 100, -4])
def test_damaged_rows_are_named(tmp_path: Path, size: int) -> None:
    """K2: a file that a full disk or a crash has cut."""
    make_rows(documents([5, 30, 2, 7]), 8).save(tmp_path / "rows")
    file = tmp_path / "rows" / "tokens.npy"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match=r"rows that cannot be read: .*; delete the folder"):
        Rows.load(tmp_path / "rows")


def test_rows_are_known_by_what_they_hold(tmp_path: Path) -> None:
    """K4: other tokens in as many rows have another digest, the same ones the same."""
    digests = []
    for number, first in enumerate((1, 1, 2)):
        changed = documents([5, 30, 2, 7])
        changed[0] = Document(ids=[first] * 5, labels=[first] * 5, splits=True)
        make_rows(changed, 8).save(tmp_path / str(number))
        digests.append(Rows.load(tmp_path / str(number)).digest)
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 16
